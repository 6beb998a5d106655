"""Files that others may have put anything into the place of: only regular ones are read, up to a size.

A FIFO without a writer would hold its reader for ever, a device may have no end, and opening one may do something.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

_KINDS = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}
_STEP = 1 << 20


def open_regular(path: Path, flags: int, mode: int = 0o644) -> int:
    """Opens a regular file; never waits for one that is something else.

    Args:
        path: the file; symbolic links are followed.
        flags: of :func:`os.open`.
        mode: permissions of a file that is made.

    Returns:
        Its descriptor.

    Raises:
        OSError: it is not a regular file, or the system refuses.
    """
    if path.exists():
        _require_regular(path.stat())
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    try:
        _require_regular(os.fstat(descriptor))  # it may have been replaced since
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(file: Path | Traversable, limit: int) -> bytes:
    """The content of a regular file.

    Args:
        file: the file; one inside a zip archive is read as it is.
        limit: most bytes it may have.

    Raises:
        OSError: it is not a regular file, it is larger, or the system refuses.
    """
    if not isinstance(file, Path):
        return file.read_bytes()
    content = bytearray()
    with open(open_regular(file, os.O_RDONLY), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        while size <= limit and len(content) <= limit and (part := stream.read(_STEP)):
            content += part
    if max(size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit >> 20} MiB")
    return bytes(content)


def _require_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "special file")
        raise OSError(errno.EINVAL, f"it is a {kind}, not a regular file")

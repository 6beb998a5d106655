"""Files that others may have put anything into the place of: only regular ones are read, up to a size.

A FIFO without a writer would hold its reader for ever, a device may have no end, and opening one may do something.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable

_KINDS = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}
_STEP = 1 << 20


def open_regular(path: Path, flags: int) -> int:
    """The descriptor of a regular file, or of one behind symbolic links; never waits for a file of another kind.

    Raises OSError if it is not a regular file, or the system refuses.
    """
    if path.exists():
        _require_regular(path.stat())
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    try:
        _require_regular(os.fstat(descriptor))  # it may have been replaced since
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(file: Path | Traversable, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes; one inside a zip archive is read as it is.

    Raises OSError if it is not a regular file, it is larger, or the system refuses.
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

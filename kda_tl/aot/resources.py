"""What a kernel's binary says it needs, read without CUDA's tools."""

from __future__ import annotations

import re
import struct
from typing import Any

# Records of a kernel: format 4, attribute, size 8, symbol, value; two and more, as four bytes alone may be anything
_RECORDS = re.compile(rb"(?:\x04[\x11\x12\x23\x2f]\x08\x00.{8}){2,}", re.DOTALL)
_ATTRIBUTES = {0x2F: "registers", 0x11: "local_bytes"}


def read_resources(library: bytes) -> dict[str, Any]:
    """Registers and local memory a thread of the one kernel in a library that embeds a cubin; None if there is none.

    Source: section ``.nv.info`` of a cubin is a run of such records; the attributes' numbers are those that
    ``cuobjdump -elf`` names. Equal to what its ELF headers lead to for four kernels of TileLang 0.1.15, CUDA 13.
    """
    found: dict[str, Any] = dict.fromkeys(_ATTRIBUTES.values())
    for records in _RECORDS.findall(library):
        for attribute, value in struct.iter_unpack("<xB6xI", records):
            if attribute in _ATTRIBUTES:
                found[_ATTRIBUTES[attribute]] = value
    return found

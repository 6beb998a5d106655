"""Calling a kernel's host function by address, without building Python tensors.

Headers are DLPack 1.0's ``DLTensor``; arguments and calls are the C interface of tvm-ffi 0.1 (``TVMFFIAny``,
``TVMFFIFunctionCall``), which the host functions of tilelang 0.1.15 speak. Python objects cost 0.2 us a tensor and 6 us
a launch there; a call on prepared headers and arguments costs 0.5 us before the driver's own time (x86 CPU).
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_FLOAT, _DLTENSOR = 3, 7  # TVMFFITypeIndex
_DEVICE_TYPE = {"cpu": 1, "cuda": 2}  # DLDeviceType
_DTYPE = {  # DLDataTypeCode and bits
    torch.int32: (0, 32),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_int64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),  # null should mean contiguous, but tilelang 0.1.15's host functions refuse it
        ("byte_offset", ctypes.c_uint64),
    )


class _Any(ctypes.Structure):
    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_int64))


class _Error(ctypes.Structure):
    """The start of ``TVMFFIErrorCell``, after the object's header of 24 bytes."""

    _fields_ = (
        ("header", ctypes.c_byte * 24),
        ("kind", ctypes.c_void_p),
        ("kind_size", ctypes.c_size_t),
        ("message", ctypes.c_void_p),
        ("message_size", ctypes.c_size_t),
    )


class Headers:
    """Tensor headers in one block. A caller rewrites ``addresses``, their data pointers in order, before every call."""

    def __init__(self, tensors: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self._shapes = [_int64s(shape) for shape, _ in tensors]  # headers point into these
        self._strides = [_int64s([math.prod(shape[i + 1 :]) for i in range(len(shape))]) for shape, _ in tensors]
        self._block = (_DLTensor * len(tensors))()
        for header, shape, strides, (_, dtype) in zip(self._block, self._shapes, self._strides, tensors, strict=True):
            header.device_type, header.device_id = _DEVICE_TYPE[device.type], device.index or 0
            header.code, header.bits = _DTYPE[dtype]
            header.lanes, header.ndim = 1, len(shape)
            header.shape, header.strides = ctypes.addressof(shape), ctypes.addressof(strides)
        words = np.frombuffer(memoryview(self._block), dtype=np.int64)
        self.addresses = words[:: ctypes.sizeof(_DLTensor) // 8]

    def address(self, index: int) -> int:
        """Where one header is."""
        return ctypes.addressof(self._block) + index * ctypes.sizeof(_DLTensor)


def _int64s(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


class Arguments:
    """The arguments of one call: headers, then ``numbers``, which a caller rewrites before every call."""

    def __init__(self, headers: Sequence[int], numbers: int) -> None:
        self.count, self.result = len(headers) + numbers, _Any()
        self._block = (_Any * self.count)()
        for argument, address in zip(self._block, headers, strict=False):
            argument.type_index, argument.value = _DLTENSOR, address
        for argument in self._block[len(headers) :]:
            argument.type_index = _FLOAT
        words = np.frombuffer(memoryview(self._block), dtype=np.float64)
        self.numbers = words[1::2][len(headers) :]
        self.address = ctypes.addressof(self._block)


@functools.cache
def _library() -> Any:
    """tvm-ffi's library, called with the interpreter's lock held: calls are shorter than letting go of it."""
    import tvm_ffi.libinfo

    found = ctypes.PyDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    found.TVMFFIFunctionCall.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
    found.TVMFFIEnvSetStream.argtypes = (ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
    found.TVMFFIErrorMoveFromRaised.argtypes = (ctypes.c_void_p,)
    found.TVMFFIErrorMoveFromRaised.restype = None
    found.TVMFFIObjectDecRef.argtypes = (ctypes.c_void_p,)
    return found


def prepare_call(function: Any, arguments: Arguments) -> Callable[[], int]:
    """A call of a host function (``tvm_ffi.Function``) that returns 0, or after an error anything else.

    The caller keeps the function, the arguments and their headers alive.
    """
    return functools.partial(
        _library().TVMFFIFunctionCall,
        function.__chandle__(),
        arguments.address,
        arguments.count,
        ctypes.addressof(arguments.result),
    )


def take_error() -> str:
    """The message of the error that the last call of this thread ended with."""
    handle = ctypes.c_void_p()
    _library().TVMFFIErrorMoveFromRaised(ctypes.byref(handle))
    if not handle.value:
        return "no reason given"
    error = _Error.from_address(handle.value)
    message = ctypes.string_at(error.message, error.message_size).decode(errors="replace")
    _library().TVMFFIObjectDecRef(handle)
    return message


def set_stream(device: torch.device, stream: int) -> int:
    """Puts this thread's next launches on a CUDA stream; returns the one that was set before."""
    before = ctypes.c_void_p()
    _library().TVMFFIEnvSetStream(_DEVICE_TYPE[device.type], device.index or 0, stream, ctypes.byref(before))
    return before.value or 0

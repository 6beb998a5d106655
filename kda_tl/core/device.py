"""Where kernels run: capabilities that code asks for, and the slug under which tuning records are kept.

No code branches on a GPU's name; aliases such as ``h100`` are data in ``tuning_db/gpus.json``.
"""

import functools
import importlib.util
import os
import platform
import re
import shutil
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Device:
    """A compilation and execution target."""

    kind: str = field(init=False)  # "cuda" or "cpu"
    slug: str  # normalised product name, the folder in tuning_db: ``nvidia_h200``, ``cpu``
    arch: str  # compiler architecture: ``sm_90a``, or the processor's (``x86_64``)
    sm: int = field(init=False)  # compute capability times ten (90), 0 on a CPU
    num_sms: int  # multiprocessors (on a CPU: 1, the C target runs on one core)
    smem_bytes: int  # shared memory one thread block may use

    def __post_init__(self) -> None:
        capability = re.match(r"sm_(\d+)", self.arch)
        object.__setattr__(self, "kind", "cuda" if capability else "cpu")
        object.__setattr__(self, "sm", int(capability[1]) if capability else 0)

    @property
    def target(self) -> Any:
        """What ``tilelang.compile`` takes as target."""
        return "c" if self.kind == "cpu" else {"kind": "cuda", "arch": self.arch}


def normalise_gpu_name(name: str) -> str:
    """``NVIDIA H200`` -> ``nvidia_h200``: lower case, runs of other characters become one underscore."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def cpu_device() -> Device:
    """TileLang's C target on this processor."""
    return Device(slug="cpu", arch=platform.machine(), num_sms=1, smem_bytes=0)


@functools.cache
def cuda_device(index: int = 0) -> Device:
    """The CUDA device of an index, asked of the driver once."""
    import torch

    props = torch.cuda.get_device_properties(index)
    return Device(
        slug=normalise_gpu_name(props.name),
        arch=f"sm_{props.major}{props.minor}" + ("a" if props.major >= 9 else ""),  # Hopper's own instructions need "a"
        num_sms=props.multi_processor_count,
        smem_bytes=getattr(props, "shared_memory_per_block_optin", 48 * 1024),
    )


def current_device() -> Device:
    """The GPU if there is one, else the CPU."""
    import torch

    return cuda_device(torch.cuda.current_device()) if torch.cuda.is_available() else cpu_device()


def find_compiler(device: Device) -> str | None:
    """Path of the compiler that builds kernels for a device, or None.

    For CUDA: ``$CUDA_HOME/bin/nvcc``, ``nvcc`` on the PATH, or the ``nvidia-cuda-nvcc`` wheel. For the CPU: a C++
    compiler (``$CXX``, ``g++``, ``clang++``), which is what TileLang calls for its C target.
    """
    if device.kind == "cpu":
        names = [os.environ.get("CXX", ""), "g++", "clang++"]
        return next((path for name in names if name and (path := shutil.which(name))), None)
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [os.path.join(home, "bin", "nvcc") for home in homes if home]
    candidates.append(shutil.which("nvcc") or "")
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        candidates += [os.path.join(root, sub, "bin", "nvcc") for sub in ("cu13", "cuda_nvcc")]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)

"""Kernels for sm_90a run on the host: their generated CUDA, compiled as C++ with emulated.h."""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.runtime.compile import CpuBinary
from kda_tl.runtime.kernel import Kernel
from kda_tl.runtime.lower import generate_source

HEADER = Path(__file__).with_name("emulated.h")
SIZES = "H", "HV", "NT", "tokens"
RESIDENT = {"fwd_gdn_pairs": "resident", "fwd_gdn_inverse": "blocks"}  # what of a config counts blocks that take turns
WRONG_NAMES = {"d_o": "do", "factor": "scale"}  # do is a word of C; a number gets the name of a macro's parameter


class EmulatedKernel(Kernel):
    """A kernel whose launch is a loop over blocks on the host. Of stages with one block a chunk and head, or with some
    on each multiprocessor (RESIDENT), which take chunks and heads in turn.
    """

    def __init__(self, stage: Stage, case: Case, config: Config) -> None:
        super().__init__(stage, case, config, CpuBinary(None))
        text = generate_source(stage, stage.specialise(case), config)
        body = text[text.index('extern "C"') :].replace("extern __shared__", "extern").replace("__shared__", "static")
        found = re.search(r"__launch_bounds__\((\d+).*?\) \w+_kernel\((.*?)\) \{", body)
        assert found is not None
        self.threads = int(found[1])
        parameters = [parameter.rpartition(" ")[::2] for parameter in found[2].split(", ")]
        names = ", ".join(name for _, name in parameters)
        launch = f"fibers::run(blocks, {self.threads}, [=] {{ {stage.name}_kernel({names}); }});"
        source = f'#include "{HEADER}"\n{body}\nextern "C" void launch(int blocks, {found[2]}) {{ {launch} }}\n'
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "kernel.cpp").write_text(source)
            compiler = [
                find_compiler(cpu_device()),
                "-std=c++17",
                "-O1",
                "-w",
                "-fno-strict-aliasing",
                "-fPIC",
                "-shared",
            ]
            subprocess.run([*compiler, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True)
            self.library = ctypes.CDLL(str(Path(folder) / "kernel.so"))

        self.arguments = [(kind, self._find(name, parameters)) for kind, name in parameters]

    def _find(self, name: str, parameters: Sequence[tuple[str, str]]) -> str:
        """What a parameter is. TileLang forgets names of tensors that macros take, but not their order."""
        name = WRONG_NAMES.get(name, name)
        known = [*(slot.name for slot in self.slots if slot.present), *self.stage.scalars, *SIZES]
        if name in known:
            return name
        named = {WRONG_NAMES.get(other, other) for _, other in parameters}
        unnamed = [other for kind, other in parameters if "*" in kind and WRONG_NAMES.get(other, other) not in known]
        return [other for other in known if other not in named][unnamed.index(name)]

    def launch(self, tensors: Mapping[str, Any], outputs: Sequence[Tensor | None], device: torch.device) -> None:
        """See :meth:`kda_tl.runtime.compile.Kernel.launch`."""
        given = dict(tensors) | dict(zip(self.stage.outputs, outputs, strict=True))
        (tokens, H, _), (_, HV, _) = given["k"].shape, given["g"].shape
        given |= {"H": H, "HV": HV, "NT": len(given["chunk_tokens"]), "tokens": tokens}
        resident = RESIDENT.get(self.stage.name)
        most = self.case.device.num_sms * (getattr(self.config, resident) if resident else 1 << 16)
        arguments: list[Any] = [ctypes.c_int(min(given["NT"] * HV, most))]
        for kind, name in self.arguments:
            x = given[name]
            if "*" in kind:
                arguments.append(ctypes.c_void_p(x.data_ptr()))
            else:
                arguments.append((ctypes.c_int if kind == "int" else ctypes.c_float)(x))
        self.library.launch(*arguments)

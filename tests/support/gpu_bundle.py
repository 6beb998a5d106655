"""The kernels of GPU tests as a bundle, built where no GPU is: ``python tests/support/gpu_bundle.py DIR [GPU]``.

The tests then compile nothing: ``KDA_TL_KERNELS=DIR KDA_TL_JIT=0 pytest -m gpu``, with the ``KDA_TL_TEST_SEED`` of the
build, since some dimensions and configs are drawn. The same command goes on where it was stopped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import gpu_cases
from support.parts import SEED_VARIABLE

from kda_tl import __version__, templates
from kda_tl.aot.plans import BuildJob, KernelSpec
from kda_tl.aot.writer import BundleWriter
from kda_tl.core.isolate import WorkerFailure, map_pool
from kda_tl.database.gpus import known_device
from kda_tl.tune.pool import TARGET


def build(folder: Path, slug: str) -> int:
    """Builds what the bundle lacks; returns how many kernels could not be built."""
    gpu_cases.device = lambda: known_device(slug)
    kernels = [
        KernelSpec(stage=templates.load(name), case=case, config=config)
        for name, case, config in gpu_cases.list_kernels()
    ]
    failed = 0
    with BundleWriter(folder, __version__) as bundle:
        missing = bundle.list_missing(kernels, keep_source=False)
        print(f"{len(kernels)} kernels, {len(missing)} to build", flush=True)
        jobs = [BuildJob(kernel=kernel, folder=str(folder.resolve()), keep_source=False) for kernel in missing]
        for number, (i, result) in enumerate(map_pool(TARGET, jobs, jobs=os.cpu_count() or 1, timeout_s=600), start=1):
            name, case, config = missing[i].stage.name, missing[i].case, missing[i].config
            if isinstance(result, WorkerFailure):
                failed += 1
                print(f"{name} {case} {config}: {result}", flush=True)
                continue
            bundle.add(result)
            print(f"{number} of {len(missing)} {name}", flush=True)
    return failed


if __name__ == "__main__":
    if SEED_VARIABLE not in os.environ:
        sys.exit(f"set {SEED_VARIABLE}, and the same for the tests")
    sys.exit(bool(build(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "nvidia_h100_80gb_hbm3")))

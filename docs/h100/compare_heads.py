"""Kernels built for one number of heads beside those that are told it: ``python compare_heads.py FOLDER OUT.json``.

Every packaged plan of the GPU here, CUDA graphs, cold L2, in turns in one process, on the same tensors; results are
compared bit by bit. FOLDER holds the former kernels, and ``index.json``: their file names by "workload/stage". Those
are today's with constants, from constant_heads.py. Those of heads.json, on both GPUs, were commit 36314a3's, the last
that built a kernel for each number of heads, but on the H200 for stages of segments, which hand on other tensors since.
"""

import datetime
import json
import math
import statistics
import sys
from pathlib import Path

import torch
import tvm_ffi

from kda_tl.bench.fixtures import operator_tensors, torch_device
from kda_tl.bench.workloads import WORKLOADS
from kda_tl.core.device import current_device
from kda_tl.core.stage import Case
from kda_tl.database.store import sources
from kda_tl.runtime.compile import compile_stages
from kda_tl.runtime.dispatch import select_plan
from kda_tl.runtime.kernel import placeholder, slots_of
from kda_tl.templates.pipelines import PIPELINES

ROUNDS, WARM_UP = 20, 4
folder, out = Path(sys.argv[1]), Path(sys.argv[2])
index = json.loads((folder / "index.json").read_text())
device = current_device()
where = torch_device(device)
flush = torch.empty(256 << 20, dtype=torch.uint8, device=where)


def list_launches(workload):
    """Of every stage the former function, today's, and the arguments of both; and what they write."""
    problem = workload.problem()
    plan = select_plan(problem, device, sources()).plan
    pipeline = PIPELINES[plan.pipeline]
    case = Case(problem=problem.without_lengths(), device=device, BT=plan.BT, BC=plan.BC)
    tensors, sizes = operator_tensors(workload, plan.BT, where, segments=pipeline.segments)
    launches, written = [], []

    def launch(stage, inputs):
        outputs, arguments = [], []
        for slot in slots_of(stage, case):
            x = None if slot.written else inputs[slot.name]
            if slot.written:
                x = torch.empty(slot.shape(sizes), dtype=slot.dtype, device=where) if slot.present else None
                outputs.append(x)
            arguments.append(placeholder(slot.dtype, where) if not slot.present or x is None else x)
        arguments += [inputs[name] for name in stage.scalars]
        (kernel,) = compile_stages([(stage, case, plan.config(stage.name))])
        former = tvm_ffi.load_module(str(folder / index[f"{workload.name}/{stage.name}"]))["main"]
        launches.append(((former, kernel.function), arguments))
        written.extend(x for x in outputs if x is not None)
        kernel.function(*arguments)
        return outputs

    pipeline.flow(problem).run(launch, tensors)
    torch.cuda.synchronize()
    return launches, written


def compare(workload):
    """A row of the report."""
    launches, written = list_launches(workload)
    results, graphs = [], []
    for version in (0, 1):
        for x in written:
            x.fill_(math.nan if x.is_floating_point() else 0)
        for functions, arguments in launches:
            functions[version](*arguments)
        torch.cuda.synchronize()
        results.append([x.clone().flatten().view(torch.uint8) for x in written])
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for functions, arguments in launches:
                functions[version](*arguments)
    events = ([], [])
    for n in range(ROUNDS + WARM_UP):
        for version in (n % 2, 1 - n % 2):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            pair[0].record()
            graphs[version].replay()
            pair[1].record()
            events[version].append(pair)
    torch.cuda.synchronize()
    old, new = ([1000 * a.elapsed_time(b) for a, b in each[WARM_UP:]] for each in events)
    ratios = sorted(b / a for a, b in zip(old, new, strict=True))
    return {
        "workload": workload.name,
        "pass": workload.direction,
        "old_us": round(statistics.median(old), 2),
        "new_us": round(statistics.median(new), 2),
        "ratio": round(statistics.median(new) / statistics.median(old), 4),
        "quartiles": [round(ratios[ROUNDS // 4], 4), round(ratios[-1 - ROUNDS // 4], 4)],
        "same_bits": all(torch.equal(a, b) for a, b in zip(*results, strict=True)),
    }


names = {key.partition("/")[0] for key in index}
rows = [compare(workload) for workload in WORKLOADS if workload.name in names]
for row in rows:
    print(f"{row['workload']:34} {row['old_us']:9.1f} {row['new_us']:9.1f} {row['ratio']:.4f} {row['same_bits']}")
about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(datetime.date.today())}
out.write_text(json.dumps({"about": __doc__, **about, "old": "constants", "rows": rows}, indent=1))

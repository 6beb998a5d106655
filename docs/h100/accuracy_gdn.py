"""Errors of chunk_gated_delta_rule against the float64 recurrence: of random problems, and beside its peers.

    python accuracy_gdn.py accuracy_gdn.json    # in a checkout: it draws and judges with tests/support

Problems: ``--problems`` of them, in turns of SPECIALISED, whose kernels are compiled first, side by side. Drawn are
heads, lengths of dense and packed sequences, and gates: sizes log-uniform from 1e-6 to 50 nats, one a head or one a
token, of which a token has half to all. In half of the problems some tokens are masked: half of the tokens have no
decay ("flat"), or a tenth of them 1e4 nats ("steep"). Results and all gradients are compared with
autograd through the recurrence, on the same rounded tensors. What exceeds the tolerances of the GPU tests is listed. As
there, an error of dbeta, dg, dA_log or ddt_bias that exceeds them is first taken relative to the size of the terms that
the gradient is the sum of; and gradients of the gate are not judged where it saturates: masked steep, or steeper than
STEEPEST.

Peers: FlashQLA's inputs (normalised q and k, fp32 log gate, initial and final state, K = V = 128, bf16), TOKENS tokens,
three gates; medians of SEEDS draws of each tensor's error.

A relative error is the norm of the difference over the norm of the truth, of a whole tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from compare_gdn import draw, load_peer

import kda_tl
from kda_tl.cli._peers import find_versions
from kda_tl.core.device import cpu_device, current_device
from kda_tl.core.problem import Problem
from kda_tl.database.store import provenance
from kda_tl.errors import KdaTlError
from kda_tl.ops.call import backward_problem, choose_backward_of
from kda_tl.reference import gradient_name, recurrent_gradients, recurrent_kda, relative_error
from kda_tl.runtime.compile import compile_stages
from kda_tl.runtime.dispatch import select_cached
from kda_tl.runtime.program import list_jobs

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
os.environ.setdefault("KDA_TL_TEST_SEED", "0")  # of what the tests draw when they are imported; nothing of it is used

from support.cases import TENSORS, Call, draw_backward, draw_call, draw_lengths, operator_arguments
from support.fla_stub import shorten_autotuning
from support.gpu_cases import GRADIENT_TOLERANCE, tolerance_of

F64 = torch.float64
NATS = (1e-6, 50.0)  # smallest and largest decay of a token
MASKED = {"flat": 0.5, "steep": 0.1}  # share of the tokens
SATURATED = 1e4  # raw gate or nats, as the tests have it
STEEPEST = 5.0  # nats: the tests judge gradients of gates up to there
BESIDE_THE_GATE = ("q", "k", "v", "beta", "initial_state")  # what they judge beyond, tests/gpu/test_gpu_gradients.py
FEWEST, MOST = 64, 320  # tokens of a problem

FULL: dict[str, Any] = {"beta": "sigmoid", "l2norm": True, "initial_state": True, "final_state": True}
BARE: dict[str, Any] = {"beta": "plain", "l2norm": False, "initial_state": False, "final_state": False}
BIASED: dict[str, Any] = {"gate": "softplus", "has_A_log": True, "has_dt_bias": True}
UNBIASED: dict[str, Any] = {**BIASED, "has_dt_bias": False}
LOG: dict[str, Any] = {"gate": "log"}
FP32_GATE: dict[str, Any] = {"g_dtype": "fp32"}
V_FIRST: dict[str, Any] = {"state_v_first": True}
NEGATIVE: dict[str, Any] = {"beta": "sigmoid2"}  # negative eigenvalues
# K, V, whether value heads share key heads, and the rest. Kernels depend on nothing else
SPECIALISED: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "bf16-flashqla": (128, 128, True, {**LOG, **FP32_GATE, **FULL, "beta": "plain", "l2norm": False}),
    "bf16-K128-V128-layer": (128, 128, False, {**BIASED, **FULL, **V_FIRST}),
    "bf16-K128-V128-negative": (128, 128, True, {**UNBIASED, **FULL, **NEGATIVE}),
    "bf16-K128-V128-bare": (128, 128, False, {**LOG, **BARE}),
    "bf16-K64-V64": (64, 64, True, {**BIASED, **FULL, **V_FIRST}),
    "bf16-K64-V128-negative": (64, 128, False, {**LOG, **FULL, **NEGATIVE}),
    "bf16-K128-V64": (128, 64, True, {**LOG, **FULL, "initial_state": False}),
    "bf16-K128-V512": (128, 512, True, {**BIASED, **FULL, **V_FIRST, "final_state": False}),
    "bf16-K256-V512-layer": (256, 512, False, {**BIASED, **FULL, **V_FIRST}),
    "bf16-K256-V256": (256, 256, True, {**LOG, **FP32_GATE, **FULL}),
    "bf16-K60-V100": (60, 100, True, {**UNBIASED, **FULL}),
    "bf16-K100-V60-negative": (100, 60, False, {**LOG, **FULL, **NEGATIVE, **V_FIRST}),
    "fp16-K128-V128": (128, 128, True, {**BIASED, **FULL, **V_FIRST}),
    "fp16-K128-V128-log": (128, 128, False, {**LOG, **FP32_GATE, **FULL, "beta": "plain"}),
    "fp16-K64-V64-bare": (64, 64, True, {**LOG, **BARE}),
    "fp16-K60-V60-negative": (60, 60, False, {**UNBIASED, **FULL, **NEGATIVE}),
    "fp16-K100-V100": (100, 100, True, {**LOG, **FULL}),
    "fp16-K256-V128": (256, 128, True, {**BIASED, **FULL}),
    "fp32-K128-V128": (128, 128, True, {**BIASED, **FULL}),
    "fp32-K128-V128-log": (128, 128, False, {**LOG, **FULL, "beta": "plain", "l2norm": False}),
    "fp32-K64-V64-negative": (64, 64, True, {**UNBIASED, **FULL, **NEGATIVE, **V_FIRST}),
    "fp32-K60-V100-bare": (60, 100, False, {**LOG, **BARE}),
    "fp32-K100-V60": (100, 60, True, {**LOG, **FULL, "final_state": False}),
}

TOKENS, SEEDS = 1024, 3
PEERS = ("FLA", "FlashQLA")
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # nats a token, from numbers that are uniform in [0, 1)
    "steep (-3.5 nats a token)": lambda u: -3.5 * (0.5 + u),
    "slow (-1e-3 nats a token)": lambda u: -1e-3 * (0.5 + u),
}
FLASHQLA_GATE = "FlashQLA's (logsigmoid of normal numbers)"


# Random problems


def problem_of(name: str, HV: int = 2) -> Problem:
    """A specialisation's problem without lengths."""
    K, V, grouped, flags = SPECIALISED[name]
    operator = {"operator": "chunk_gated_delta_rule", "scalar_gate": True}
    return Problem(H=1, HV=HV if grouped else 1, K=K, V=V, tokens=0, dtype=name.split("-")[0], **operator, **flags)


def compile_all(names: list[str], on_gpu: bool) -> float:
    """Makes the kernels of both passes ready, side by side. Returns the seconds it took.

    One that does not compile is told, and fails again in its own problems.
    """
    start, device, jobs = time.perf_counter(), current_device() if on_gpu else cpu_device(), []
    for name in names:
        problem = problem_of(name)
        forward = select_cached(problem, device).plan
        backward = choose_backward_of(problem, device, None, forward).choice.plan
        passes = ((forward, problem), (backward, backward_problem(problem, problem.final_state)))
        jobs += [job for plan, what in passes if plan is not None for job in list_jobs(plan, what, device)]
    try:
        compile_stages(jobs)
    except KdaTlError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    return time.perf_counter() - start


def draw_gate(rng: random.Random, problem: Problem, tokens: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """g, A_log and dt_bias whose decays are of the drawn sizes; and what to say of them."""
    one_a, mask = rng.choice(("head", "token")), rng.choice((None, None, *MASKED))
    numbers = torch.Generator().manual_seed(rng.randrange(2**31))

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=numbers, dtype=F64)

    low, high = map(math.log, NATS)
    nats = (low + (high - low) * uniform(tokens if one_a == "token" else 1, problem.HV, 1)).exp()
    nats = nats * (0.5 + 0.5 * uniform(tokens, problem.HV, 1))
    given = {"g": -nats}
    saturated = {"flat": 0.0, "steep": -SATURATED}
    if problem.gate == "softplus":
        slope, bias = uniform(problem.HV), torch.randn(problem.HV, 1, generator=numbers, dtype=F64)
        softplus = nats / slope.exp()[:, None]
        given = {"g": softplus + torch.log(-torch.expm1(-softplus)), "A_log": slope}  # the inverse of softplus
        if problem.has_dt_bias:
            given |= {"g": given["g"] - bias, "dt_bias": bias}
        saturated = {"flat": -SATURATED, "steep": SATURATED}
    if mask:
        given["g"] = torch.where(uniform(tokens, problem.HV, 1) < MASKED[mask], saturated[mask], given["g"])
    return given, {"one a": one_a, "mask": mask, "nats": [float(f"{x:.2g}") for x in (nats.min(), nats.max())]}


def draw_sizes(rng: random.Random, most: int) -> tuple[tuple[int, ...], bool]:
    """Lengths of sequences, and whether they are packed: else they are equal."""
    if rng.random() < 0.5:
        length = round(math.exp(rng.uniform(0, math.log(most))))
        fewest, room = -(-FEWEST // length), max(1, most // length)
        return (length,) * max(fewest, min(rng.choice((1, 2, 3)), room)), False
    while True:
        lengths = draw_lengths(rng, most // 2)
        if FEWEST <= sum(lengths) <= most:
            return lengths, True


@dataclass
class Found:
    """What came of the problems."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    exceedances: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    compiling_s: float = 0.0

    def report(self) -> dict[str, Any]:
        """Worst and median errors by dtype, what exceeds, and every problem."""
        errors: dict[bool, dict[str, dict[str, list[tuple[float, float]]]]] = {True: {}, False: {}}
        for row in self.rows:
            for tensor, error in row["errors"].items():
                of_dtype = errors[is_judged(row, tensor)].setdefault(row["name"].split("-")[0], {})
                of_dtype.setdefault(tensor, []).append((error, row["of terms"].get(tensor, error)))
        judged, beyond = (
            {
                dtype: {tensor: summarise(pairs) for tensor, pairs in tensors.items()}
                for dtype, tensors in sorted(errors[which].items())
            }
            for which in (True, False)
        )
        return {
            "problems": len(self.rows),
            "compiling, s": round(self.compiling_s, 1),
            "tensors that are not finite": sum(len(row["not finite"]) for row in self.rows),
            "errors": judged,
            "errors where the gate saturates": beyond,
            "exceedances": self.exceedances,
            "failed": self.failed,
            "rows": self.rows,
        }


def is_judged(row: dict[str, Any], tensor: str) -> bool:
    """Whether the tests would judge a tensor's error."""
    saturated = row["gate"]["mask"] == "steep" or row["gate"]["nats"][1] > STEEPEST
    return not saturated or tensor in {"o", "ht", *map(gradient_name, BESIDE_THE_GATE)}


def summarise(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Of errors, and of the same where those over the tolerance are relative to the terms."""
    plain, judged = zip(*pairs, strict=True)
    found = {"median": statistics.median(plain), "worst": max(plain), "worst, of terms": max(judged)}
    return {name: round_error(x) for name, x in found.items()} | {"problems": len(pairs)}


def round_error(error: float) -> float:
    return float(f"{error:.3g}")


def run_problem(rng: random.Random, name: str, device: str, most: int) -> tuple[Call, int, dict[str, Any]]:
    """A drawn backward of a specialisation, its batch, and what to say of it."""
    _, _, grouped, _ = SPECIALISED[name]
    H, group = rng.choice((1, 2)), rng.choice((2, 4)) if grouped else 1
    problem = replace(problem_of(name), H=H, HV=H * group)
    lengths, packed = draw_sizes(rng, most)
    given, about = draw_gate(rng, problem, sum(lengths))
    seed = rng.randrange(2**31)
    call = draw_backward(draw_call(problem, lengths, seed, varlen=packed, device=device, **given), seed)
    sizes = list(lengths) if packed else f"{len(lengths)} x {lengths[0]}"
    return call, 1 if packed else len(lengths), {"H": H, "HV": H * group, "lengths": sizes, "gate": about}


def judge(call: Call, batch: int) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Errors of results and gradients, those that the tests would take instead, and what is not finite."""
    arguments, p = operator_arguments(call, batch), call.problem
    leaves = {x: arguments[x].requires_grad_() for x in TENSORS if arguments.get(x) is not None}
    o, ht = kda_tl.chunk_gated_delta_rule(**arguments)
    seeds = [call.x["do"].view(o.shape).to(o.dtype)] + ([] if ht is None else [call.x["dht"].float()])
    outputs = [o] if ht is None else [o, ht]
    gradients = dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), seeds), strict=True))
    truth_o, truth_ht, _ = call.truth()
    errors = {"o": relative_error(o.flatten(0, 1), truth_o)}
    if ht is not None:
        errors["ht"] = relative_error(ht, truth_ht)
    truth, tolerance = call.gradients(), GRADIENT_TOLERANCE[p.dtype]
    for name, gradient in gradients.items():
        expected = truth[gradient_name(name)]
        errors[gradient_name(name)] = relative_error(gradient.flatten(), expected.flatten())
    of_terms = {}
    over = {x for x in leaves if tolerance <= errors[gradient_name(x)] < math.inf}
    if over & {"beta", "g", "A_log", "dt_bias"}:
        again = call.gradient_errors({x: gradients.get(x) for x in TENSORS}, tolerance)
        of_terms = {gradient_name(x): again[x] for x in over if again[x] != errors[gradient_name(x)]}
    results = {"o": o, "ht": ht} | {gradient_name(x): gradient for x, gradient in gradients.items()}
    return errors, of_terms, [name for name, x in results.items() if x is not None and not x.isfinite().all()]


def find_exceedances(row: dict[str, Any], problem: Problem) -> list[dict[str, Any]]:
    """The errors over the tests' tolerances, with whether the tests would judge them."""
    found = []
    for tensor, error in row["errors"].items():
        tolerance = tolerance_of(problem) if tensor in ("o", "ht") else GRADIENT_TOLERANCE[problem.dtype]
        error = row["of terms"].get(tensor, error)
        if error >= tolerance:
            found.append(
                {"problem": row["n"], "tensor": tensor, "error": error, "judged by tests": is_judged(row, tensor)}
            )
    return found


def run_problems(found: Found, count: int, seed: int, names: list[str], device: str, most: int) -> None:
    """Fills ``found`` with so many problems."""
    print(f"compiling {len(names)} specialisations", flush=True)
    found.compiling_s = compile_all(names, device == "cuda")
    print(f"compiled in {found.compiling_s:.0f} s", flush=True)
    for n in range(count):
        start, name = time.perf_counter(), names[n % len(names)]
        call, batch, about = run_problem(random.Random(f"{seed}/{n}"), name, device, most)
        row: dict[str, Any] = {"n": n, "name": name, **about}
        try:
            errors, of_terms, row["not finite"] = judge(call, batch)
        except KdaTlError as error:
            found.failed.append({**row, "message": f"{type(error).__name__}: {error}"})
            print(f"{n} {name}: {type(error).__name__}: {error}", flush=True)
            continue
        row |= {
            "errors": {tensor: round_error(x) for tensor, x in errors.items()},
            "of terms": {tensor: round_error(x) for tensor, x in of_terms.items()},
        }
        found.rows.append(row)
        over = find_exceedances(row, call.problem)
        found.exceedances += over
        worst = max(row["errors"], key=row["errors"].__getitem__)
        print(
            f"{n + 1}/{count} {name}, HV/H {row['HV']}/{row['H']}, {row['lengths']}, {row['gate']}:"
            f" worst {worst} {row['errors'][worst]:.1e}"
            + "".join(f"; {x['tensor']} {x['error']:.1e} exceeds" for x in over)
            + (f"; not finite: {', '.join(row['not finite'])}" if row["not finite"] else "")
            + f" ({time.perf_counter() - start:.1f} s)",
            flush=True,
        )


# Beside peers


def find_operators(device: str) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """Ours and the peers' that can be imported, and why the others are left out."""
    operators: dict[str, Callable[..., Any]] = {"kda_tl": kda_tl.chunk_gated_delta_rule}
    left_out: dict[str, str] = {}
    for name in PEERS:
        try:
            if device != "cuda":
                raise ImportError("its kernels need a GPU")
            if name == "FLA":
                shorten_autotuning()  # of what is not imported yet
            operators[name] = load_peer(name)
        except Exception as error:  # peers raise what they like while they are imported
            left_out[name] = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"{name} is left out: it cannot be imported here ({left_out[name]}).", flush=True)
    return operators, left_out


def run_peers(device: str, tokens: int) -> dict[str, Any]:
    """Errors by gate and implementation, and who is left out."""
    operators, left_out = find_operators(device)
    errors: dict[str, dict[str, dict[str, float]]] = {}
    for gate in (*GATES, FLASHQLA_GATE):
        draws: dict[str, dict[str, list[float]]] = {}
        for seed in range(SEEDS):
            x = draw(2, 4, tokens, 1, seed=seed, device=device)
            rng = torch.Generator(device).manual_seed(1000 + seed)
            if gate in GATES:
                x[3] = GATES[gate](torch.rand(x[3].shape, generator=rng, device=device))
            names = ("q", "k", "v", "g", "beta", "initial_state")
            seeds = [torch.randn(x[2].shape, generator=rng, device=device).to(x[2].dtype)]
            seeds.append(0.1 * torch.randn(x[5].shape, generator=rng, device=device))
            arguments = dict(zip(names, x, strict=True)) | {"g": x[3][..., None]}
            with torch.no_grad():
                truth = dict(zip(("o", "ht"), recurrent_kda(**arguments), strict=True))
            truth |= recurrent_gradients(arguments, *seeds)
            for name, operator in list(operators.items()):
                try:
                    found = differentiate(operator, names, x, seeds)
                except Exception as error:  # a peer that cannot run is left out
                    if name == "kda_tl":
                        raise
                    left_out[name] = " ".join(f"{type(error).__name__}: {error}".split())
                    print(f"{name} is left out: it fails here ({left_out[name]}).", flush=True)
                    del operators[name]
                    continue
                for tensor, result in found.items():
                    error = relative_error(result, truth[tensor].view(result.shape))
                    draws.setdefault(name, {}).setdefault(tensor, []).append(error)
        errors[gate] = {
            name: {tensor: round_error(statistics.median(all_)) for tensor, all_ in tensors.items()}
            for name, tensors in draws.items()
        }
        for name, row in errors[gate].items():
            print(f"{gate}, {name}:", *(f"{tensor} {error:.2e}" for tensor, error in row.items()), flush=True)
    return {"tokens": tokens, "seeds": SEEDS, "HV": 4, "H": 2, "left out": left_out, "errors": errors}


def differentiate(
    operator: Callable[..., Any], names: tuple[str, ...], x: list[torch.Tensor], seeds: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """o, ht and all gradients."""
    leaves = [y.clone().requires_grad_() for y in x]
    o, ht = operator(*leaves[:5], initial_state=leaves[5], output_final_state=True)
    found = torch.autograd.grad([o, ht], leaves, seeds)
    return {"o": o, "ht": ht} | {gradient_name(name): gradient for name, gradient in zip(names, found, strict=True)}


def write(file: Path, report: dict[str, Any]) -> None:
    """As JSON, a problem a line."""
    problems = dict(report["random problems"])
    lists = {f"@{name}": problems[name] for name in ("exceedances", "failed", "rows") if problems[name]}
    problems |= {mark[1:]: mark for mark in lists}
    text = json.dumps(report | {"random problems": problems}, indent=1)
    for mark, lines in lists.items():
        text = text.replace(json.dumps(mark), "[\n" + ",\n".join(f"   {json.dumps(line)}" for line in lines) + "\n  ]")
    file.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--problems", type=int, default=200, help="random ones; 0 leaves them out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--names", nargs="+", choices=tuple(SPECIALISED), metavar="NAME", help="specialisations")
    parser.add_argument("--most", type=int, default=MOST, help=f"tokens of a problem, {2 * FEWEST} or more")
    parser.add_argument("--no-peers", action="store_true", help="random problems only")
    args = parser.parse_args()
    if args.most < 2 * FEWEST:
        parser.error(f"--most must be {2 * FEWEST} or more, got {args.most}")
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "none"
    about = {**provenance(), "gpu": gpu, "seed": args.seed, "about": __doc__}
    found = Found()
    report: dict[str, Any] = {"about": about}
    try:
        if args.problems:
            names = args.names or list(SPECIALISED)
            run_problems(found, args.problems, args.seed, names, args.device, args.most)
        if not args.no_peers:
            report["peers"] = run_peers(args.device, TOKENS)
    finally:  # what was found before an error too
        about |= find_versions()
        with contextlib.suppress(metadata.PackageNotFoundError):
            about["flash_qla"] = metadata.version("flash-qla")
        write(args.out, report | {"random problems": found.report()})
    judged = sum(x["judged by tests"] for x in found.exceedances)
    print(
        f"{len(found.rows)} problems, {len(found.failed)} failed,"
        f" {sum(bool(row['not finite']) for row in found.rows)} with numbers that are not finite;"
        f" {len(found.exceedances)} errors over the tolerance, {judged} of them where the tests judge"
    )


if __name__ == "__main__":
    main()

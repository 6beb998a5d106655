"""The chart of ``kda-tl bench``: how long a whole call takes, one row a problem, one column a gate.

A row has one scale, so its bars compare implementations and gates; problems differ too much to share one. Drawn with
matplotlib, the extra ``chart``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kda_tl.bench.workloads import WORKLOADS
from kda_tl.cli._console import one_line
from kda_tl.cli._report import OURS, CallRow, Report, Result, check_file, unwritable
from kda_tl.errors import InputError

SUFFIXES = (".svg", ".png")
# an implementation's title, and the name of its version in the environment
LABELS = {OURS: ("kda_tl", "kda_tl"), "fla": ("FLA", "fla"), "cudnn": ("cuDNN frontend", "cudnn_frontend")}
BESIDE = ("torch", "triton", "tilelang", "driver")  # versions that are no implementation's
# Okabe and Ito's colours, told apart by colour-blind readers; every group has its bars in the same order as well.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
GREY = "#6b6b6b"
NOTE = (
    "Median of a call, as a CUDA graph unless it says eager. Each row of bars has its own scale. "
    "K = V = 128 and bf16 unless a row says otherwise."
)
_STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "svg.hashsalt": "kda_tl",  # the same numbers make the same file
}
_INCHES = {"labels": 1.5, "column": 3.1, "bar": 0.2, "between": 0.26, "heading": 1.2}
_ROOM = 1.35  # the widest bar leaves room for its time
_ROOFLINE_WIDTH = 1.3
_DPI = 150


def check_chart(given: str) -> Path:
    """The file to draw, and all that drawing needs, tried now: better told before the measuring than after.

    Raises InputError if the suffix is unknown, matplotlib cannot be imported, or the file cannot be written.
    """
    if Path(given).suffix.lower() not in SUFFIXES:
        kinds = " or ".join(SUFFIXES)
        raise InputError(f"--chart draws {kinds} files, not {given!r}: give the file one of these suffixes.")
    try:
        import matplotlib.figure  # noqa: F401
    except Exception as error:  # a broken installation raises whatever it likes
        raise InputError(
            f"--chart needs matplotlib, which cannot be imported here ({one_line(error)}): run "
            "`pip install 'kda-tl[chart]'`, or leave --chart out and draw later with --from."
        ) from error
    return check_file("--chart", given)


def draw_chart(report: Report, file: Path) -> None:
    """Draws a report into a file, .svg or .png. Raises InputError if the file cannot be written."""
    import matplotlib

    kind = file.suffix.lower().removeprefix(".")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's matplotlibrc says: the layout is made for these
        matplotlib.rcParams.update(_STYLE)
        try:
            make_figure(report).savefig(file, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
        except OSError as error:
            raise unwritable("--chart", file, error) from error


def make_figure(report: Report) -> Any:
    """The figure: a grid of axes, each with the calls of one workload in milliseconds."""
    from matplotlib.figure import Figure

    cells = {_name_cell(result.workload): result for result in report.workloads}
    problems, gates = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    measured = dict.fromkeys(call.name for result in report.workloads for call in result.calls)
    names = [name for name in LABELS if name in measured] + [name for name in measured if name not in LABELS]
    size = _INCHES
    width = size["labels"] + size["column"] * max(2, len(gates))
    height = size["heading"] + len(problems) * (size["between"] + size["bar"] * max(2, len(names)))
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(len(problems), len(gates), squeeze=False)
    for problem, row in zip(problems, grid, strict=True):
        found = [cells.get((problem, gate)) for gate in gates]
        widest = max(_time_us(call)[0] for result in found if result for call in result.calls) / 1e3
        for axes, result in zip(row, found, strict=True):
            axes.set(xlim=(0, widest * _ROOM), ylim=(len(names) - 0.4, -0.6), xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if result:
                _draw_calls(axes, result, names)
        row[0].set_ylabel(problem, rotation=0, ha="right", va="center")
    for axes, gate in zip(grid[0], gates, strict=True):
        axes.set_title(f"{gate}, ms", loc="left", fontsize=10, fontweight="bold")
    _add_heading(figure, report, names)
    return figure


def _time_us(call: CallRow) -> tuple[float, str]:
    """The time to draw, as a CUDA graph where there is one, and what to say of it otherwise."""
    return (call.eager_us, " eager") if call.graph_us is None else (call.graph_us, "")


def _format_ms(ms: float) -> str:
    """Three digits, without a unit."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:#.3g}".rstrip(".")


def _draw_calls(axes: Any, result: Result, names: Sequence[str]) -> None:
    """A bar an implementation, in the order of names, and the roofline across them."""
    axes.spines["left"].set(visible=True, color=GREY)
    calls = {call.name: call for call in result.calls}
    roofline = result.calls[0].roofline_us / 1e3
    for i, name in enumerate(names):
        ms, text, color = 0.0, "not run", GREY
        if call := calls.get(name):
            us, told = _time_us(call)
            ms, color = us / 1e3, "black"
            text = f"{_format_ms(ms)}{told}"
            axes.barh(i, ms, height=0.84, color=COLORS[i % len(COLORS)])
        place: dict[str, Any] = {"xytext": (3, 0), "textcoords": "offset points", "va": "center_baseline"}
        axes.annotate(text, (max(ms, roofline), i), fontsize=8, color=color, **place)
    for color, more in (("white", 1.2), ("black", 0)):
        axes.plot([roofline, roofline], [-0.5, len(names) - 0.5], color=color, linewidth=_ROOFLINE_WIDTH + more)


def _add_heading(figure: Any, report: Report, names: Sequence[str]) -> None:
    """Title, legend with the versions of what was compared, and below what else there is to know."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    known = report.environment
    where = known.get("gpu") or known.get("slug", known["kind"])
    labels = [LABELS.get(name, (name, name)) for name in names]
    title = f"{', '.join(label for label, _ in labels)} on {where}, {str(known.get('date', ''))[:10]}"
    handles: list[Any] = [
        Patch(color=COLORS[i % len(COLORS)], label=f"{label} {known.get(package, '(version unknown)')}")
        for i, (label, package) in enumerate(labels)
    ]
    roofline = "roofline: the least bytes and FLOPs at measured speed"
    handles.append(Line2D([], [], color="black", linewidth=_ROOFLINE_WIDTH, label=roofline))
    style = {"title_fontproperties": {"size": 13, "weight": "bold"}, "alignment": "left", "frameon": False}
    columns = 4 if figure.get_figwidth() > 10 else 2
    figure.legend(handles=handles, title=title, ncols=columns, loc="outside upper left", **style)
    beside = ", ".join(f"{package} {known[package]}" for package in BESIDE if package in known)
    notes = "\n".join(textwrap.wrap(f"{NOTE} {beside}", width=int(15 * figure.get_figwidth())))
    figure.supxlabel(notes, x=0.01, ha="left", fontsize=8, color=GREY)


def _name_cell(name: str) -> tuple[str, str]:
    """Of a workload: its shape, then its gate and how fast its states decay; one not in the table keeps its name."""
    w = next((workload for workload in WORKLOADS if workload.name == name), None)
    if w is None:
        return name, "other workloads"
    tokens = f"B{w.B} T{w.T}"
    if w.lengths:
        least, most = min(w.lengths), max(w.lengths)
        tokens = f"{len(w.lengths)} packed, T{least}" + (f" to {most}" if most > least else "")
    heads = f"H{w.H}" if w.H == w.HV else f"H{w.H} HV{w.HV}"
    more = "" if (w.K, w.V, w.dtype) == (128, 128, "bf16") else f"\nK{w.K} V{w.V} {w.dtype}"
    step = "\ntraining step" if w.direction == "bwd" else ""
    return f"{tokens}\n{heads}{more}", f"{w.gate} gate, {w.decay}{step}"

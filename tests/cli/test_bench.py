"""``kda-tl bench``: its report is read back as it was written, and the chart shows the numbers that were measured."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from support.cases import OPERATOR

from kda_tl.bench.workloads import Workload, select
from kda_tl.cli import _chart as chart
from kda_tl.cli import main
from kda_tl.cli._console import to_json
from kda_tl.cli._peers import _activate_before, find_versions
from kda_tl.cli._report import CallRow, Ceilings, Report, Result, Row, read_report
from kda_tl.cli._timing import call_bytes
from kda_tl.core.problem import GATES
from kda_tl.errors import InputError
from kda_tl.reference import recurrent_kda, relative_error

REPOSITORY = Path(__file__).resolve().parents[2]
FORWARD = select(["forward"])
CEILINGS = Ceilings(bytes_per_s=4e12, flops_per_s=8e14, dtype="bfloat16")
ENVIRONMENT = {"kind": "cuda", "gpu": "NVIDIA Invented", "date": "2026-01-02T03:04:05+00:00", "kda_tl": "9.8.7"}
VERSIONS = {"fla": "0.6.5", "cudnn_frontend": "1.32.1", "triton": "3.6.4"}
US = {"kda_tl": 700.0, "fla": 975.0, "cudnn": 2340.0}  # of one head and 8192 tokens
drawing = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib: pip install 'kda-tl[chart]'")


def invent_call(name: str, us: float, graph: bool = True) -> CallRow:
    return CallRow(
        name=name,
        eager_us=1.5 * us,
        eager_mad_us=0.25,
        graph_us=us if graph else None,
        host_us=60.0,
        peak_bytes=12345678,
        roofline_us=us / 7,
        roofline_fraction=1 / 7,
        speed=1.0,
        difference=float("inf"),
    )


def invent_result(workload: Workload) -> Result:
    """Times in proportion to heads and tokens; cuDNN has no softplus gate, and no graph of a dense batch."""
    scale = workload.H * workload.tokens / 8192
    names = [name for name in US if name != "cudnn" or workload.gate == "safe"]
    calls = [invent_call(name, US[name] * scale, graph=name != "cudnn" or workload.B == 1) for name in names]
    times = {"median_us": 60.0, "mad_us": 0.5, "roofline_us": 25.0}
    stage = Row(name="fwd_gate", config={"BK": 64}, bytes=10**8, flops=10**9, **times)
    return Result(
        workload=workload.name,
        problem=workload.problem().key,
        plan="staged BT=64 BC=16",
        step="exact bucket",
        stages=(stage,),
        calls=tuple(replace(call, roofline_us=100 * scale) for call in calls),
        left_out={} if "cudnn" in names else {"cudnn": "it has no softplus gate"},
    )


def invent_report(*workloads: Workload) -> Report:
    results = tuple(map(invent_result, workloads or FORWARD))
    return Report(environment=ENVIRONMENT | VERSIONS, ceilings=CEILINGS, workloads=results)


Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The command; nothing is measured, the numbers are invented."""
    monkeypatch.setattr("kda_tl.cli._timing.measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr("kda_tl.cli._timing.bench_workload", lambda workload, *_: invent_result(workload))
    monkeypatch.setattr("kda_tl.cli._peers.find_versions", lambda: VERSIONS)

    def bench(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["bench", *map(str, argv)])
        return code, *capsys.readouterr()

    return bench


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever measures fails."""
    monkeypatch.setattr("kda_tl.cli._timing.measure_ceilings", lambda device: pytest.fail("it measures"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """What bench wrote."""
    (tmp_path / "report.json").write_text(to_json(invent_report()), encoding="utf-8")
    return tmp_path / "report.json"


# The report


def test_report_is_read_as_it_was_written(file: Path) -> None:
    assert read_report(str(file)) == invent_report()


def test_versions_of_what_was_compared_are_written(bench: Bench, tmp_path: Path) -> None:
    code, _, _ = bench("--gpu", "cpu", "--workload", "small", "--json", tmp_path / "x.json")
    environment = json.loads((tmp_path / "x.json").read_text())["environment"]
    assert code == 0 and environment.items() >= VERSIONS.items()
    assert {"kind", "date", "python", "kda_tl", "torch", "tilelang"} <= environment.keys()


def test_versions_are_those_imported_else_those_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "nvidia-cudnn-frontend":
            raise metadata.PackageNotFoundError(package)
        return f"installed {package}"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "fla", types.SimpleNamespace(__version__="imported"))
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    expected = {"fla": "imported", "flash_qla": "installed flash-qla", "flashinfer": "installed flashinfer-python"}
    expected |= {"triton": "installed triton"}
    assert find_versions() == expected
    monkeypatch.setitem(sys.modules, "cudnn", types.SimpleNamespace(__version__="of a checkout"))
    assert find_versions()["cudnn_frontend"] == "of a checkout"


@pytest.mark.parametrize("gate", GATES)
def test_a_peer_without_activations_is_given_the_same_problem(gate: str) -> None:
    workload = Workload(name="w", lengths=(20, 9), H=2, K=16, V=16, dtype="fp32", gate=gate, direction="bwd")
    inputs = workload.inputs("cpu")
    tensors, options = _activate_before(inputs, workload)
    assert options["initial_state"].shape == (2, 2, 16, 16)
    o, ht = recurrent_kda(**tensors, cu_seqlens=inputs["cu_seqlens_cpu"])
    expected = recurrent_kda(**OPERATOR.recurrence(OPERATOR.bind(**inputs)))
    assert max(map(relative_error, (o, ht), expected)) < 1e-6


@pytest.mark.usefixtures("unmeasured")
def test_tables_are_shown_again_without_measuring(bench: Bench, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_tl.cli._target.current_device", lambda: pytest.fail("it looks for a GPU"))
    code, out, err = bench("--from", file)
    assert (code, err) == (0, "")
    assert re.findall(r"^(\S+)  \(staged", out, re.M) == [w.name for w in FORWARD]
    assert re.search(r"kda_tl +33.6 ms +0.2 us +22.4 ms +60.0 us +12.3 MB +14.3% +1.00x +inf", out)
    assert "fwd_gate" in out and "cudnn left out: it has no softplus gate" in out
    assert json.loads(bench("--from", file, "--json")[1]) == json.loads(file.read_text())


REPORTS = sorted(REPOSITORY.glob("docs/*/bench*.json"))
OLD = REPOSITORY / "docs/h200/bench.json"  # of before `bench` measured peak memory: `--from` refuses it


@pytest.mark.parametrize("file", [file for file in REPORTS if file != OLD], ids=lambda file: file.name)
def test_reports_of_the_docs_can_be_shown(bench: Bench, file: Path) -> None:
    """A field that is renamed must not make what was measured unreadable."""
    code, out, err = bench("--from", file)
    assert (code, err) == (0, "") and all(w["workload"] in out for w in json.loads(file.read_text())["workloads"])


def test_tables_are_those_of_the_measuring(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    measured = bench("--gpu", "cpu", "--workload", "small", "--json", file)
    assert measured[0] == 0 and "safe-T512-H32" in measured[1]
    assert bench("--from", file)[:2] == measured[:2]


def spoil_field(values: dict[str, Any]) -> None:
    del values["workloads"][3]["calls"][1]["host_us"]


def spoil_number(values: dict[str, Any]) -> None:
    values["workloads"][3]["calls"][1]["graph_us"] = "quick"


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda values: values.clear(), "it lacks 'environment'"),
        (lambda values: values["workloads"].clear(), "no call was measured"),
        (lambda values: values["workloads"][1]["calls"].clear(), "no call was measured"),
        (lambda values: values["workloads"].append(values["workloads"][0]), "a workload is there twice"),
        (lambda values: values.update(ceilings=[]), "is not what bench writes"),
        (lambda values: values["environment"].pop("kind"), "it lacks 'kind'"),
        (spoil_field, "it lacks 'host_us'"),
        (spoil_number, "could not convert string to float: 'quick'"),
    ],
)
def test_other_files_are_refused(file: Path, spoil: Callable[[Any], Any], told: str) -> None:
    values = json.loads(file.read_text())
    spoil(values)
    file.write_text(json.dumps(values))
    with pytest.raises(InputError, match=f"{re.escape(told)}.*pass --from a file that `kda-tl bench --json FILE`"):
        read_report(str(file))


@pytest.mark.usefixtures("unmeasured")
def test_unreadable_files_are_a_sentence_and_2(bench: Bench, tmp_path: Path) -> None:
    code, out, err = bench("--from", tmp_path / "nowhere.json")
    assert (code, out) == (2, "") and "nowhere.json (No such file or directory): pass --from a file" in err
    (tmp_path / "text.json").write_text("no JSON")
    code, out, err = bench("--from", tmp_path / "text.json")
    assert (code, out) == (2, "") and "text.json is not what bench writes" in err
    code, _, err = bench("--from", tmp_path / "text.json", "--calls-only", "--reps", "2")
    assert code == 2 and "--from measures nothing, so --calls-only, --reps cannot apply" in err


# The chart: refusals


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("given", [("--gpu", "cpu"), ("--from", "report.json")], ids=["measured", "read"])
def test_charts_that_cannot_be_drawn_are_refused_first(
    bench: Bench, file: Path, given: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    for name in ("chart.pdf", "chart", ""):
        code, out, err = bench(*given, "--chart", name)
        assert (code, out) == (2, "") and f".svg or .png files, not {name!r}" in err
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        code, out, err = bench(*given, "--chart", "chart.svg")
    assert (code, out) == (2, "") and "--chart needs matplotlib" in err and "pip install 'kda-tl[chart]'" in err


@drawing
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("given", [("--gpu", "cpu"), ("--from", "report.json")], ids=["measured", "read"])
def test_a_chart_that_cannot_be_written_is_refused_first(
    bench: Bench, file: Path, given: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    code, out, err = bench(*given, "--chart", "nowhere/chart.svg")
    assert (code, out) == (2, "") and "cannot write nowhere/chart.svg (No such file or directory)" in err
    assert "pass --chart a file you may write" in err
    bench(*given, "--chart", "chart.svg", "--json", "/nowhere/file.json")
    assert not Path("chart.svg").exists()  # trying leaves nothing behind


def test_matplotlib_is_needed_for_charts_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = bench("--gpu", "cpu", "--workload", "small")
    assert code == 0 and "safe-T512-H32" in out


# The chart: what is drawn


def cells(figure: Any) -> Iterator[tuple[str, str, Any]]:
    """Problem, gate and axes of every cell."""
    columns = [axes.get_title("left") for axes in figure.axes if axes.get_title("left")]
    for n, axes in enumerate(figure.axes):
        row = figure.axes[n - n % len(columns)].get_ylabel()
        yield row, columns[n % len(columns)], axes


@drawing
def test_bars_are_the_times_and_marks_the_rooflines() -> None:
    found = {(row, column): axes for row, column, axes in cells(chart.make_figure(invent_report()))}
    assert len(found) == 21
    shapes = {
        "B1 T8192\nH32": 32,
        "B1 T8192\nH64": 64,
        "B1 T8192\nH96": 96,
        "B1 T32768\nH8": 32,
        "6 packed, T271 to 3063\nH64": 64,
        "B8 T1024\nH96": 96,
        "8 packed, T1024\nH96": 96,
    }
    for (row, column), axes in found.items():
        scale = shapes[row] / 1e3
        times = [US["kda_tl"] * scale, US["fla"] * scale, US["cudnn"] * scale]
        told = [chart._format_ms(ms) for ms in times]
        if row.startswith("B8") and column.startswith("safe"):  # as issued, not as a graph
            times[2] *= 1.5
            told[2] = f"{chart._format_ms(times[2])} eager"
        if column == "softplus gate, slow, ms":
            times[2:], told[2:] = [], ["not run"]
        else:
            assert column in ("safe gate, steep, ms", "safe gate, slow, ms")
        assert [bar.get_width() for bar in axes.patches] == pytest.approx(times)
        assert [bar.get_y() + bar.get_height() / 2 for bar in axes.patches] == pytest.approx(range(len(times)))
        assert [text.get_text() for text in axes.texts] == told
        assert all(line.get_xdata() == pytest.approx([100 * scale] * 2) for line in axes.lines) and axes.lines
        assert axes.get_xlim()[1] > max(times)
    for shape in shapes:
        assert len({axes.get_xlim() for (row, _), axes in found.items() if row == shape}) == 1  # a row has one scale


@drawing
def test_unknown_workloads_and_implementations_are_drawn_too() -> None:
    report = invent_report(FORWARD[0])
    calls = (invent_call("another", 5000.0), *report.workloads[0].calls)
    report = replace(report, workloads=(replace(report.workloads[0], workload="mine", calls=calls),))
    ((row, column, axes),) = cells(figure := chart.make_figure(report))
    assert (row, column) == ("mine", "other workloads, ms")
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([22.4, 31.2, 74.88, 5.0])
    assert [text.get_text() for text in figure.legends[0].get_texts()][3] == "another (version unknown)"


@pytest.mark.parametrize(
    ("ms", "told"), [(0.05584, "0.0558"), (1.4, "1.40"), (12.0, "12.0"), (99.96, "100"), (1234.5, "1234")]
)
def test_times_have_three_digits(ms: float, told: str) -> None:
    assert chart._format_ms(ms) == told


@drawing
@pytest.mark.parametrize(
    "words", [["forward"], ["safe-T8192-H32"], ["tune", "train", "small"], ["cpu"]], ids=lambda words: " ".join(words)
)
def test_no_text_covers_another_or_leaves_the_figure(words: list[str]) -> None:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    with matplotlib.rc_context(chart._STYLE):
        figure = chart.make_figure(invent_report(*select(words)))
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
        boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]
    assert len(boxes) > 5
    for (one, a), (other, b) in combinations(boxes, 2):
        assert not a.overlaps(b), f"{one!r} covers {other!r}"
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text


@drawing
@pytest.mark.usefixtures("unmeasured")
def test_charts_are_drawn_from_an_earlier_file(bench: Bench, file: Path) -> None:
    svg, png = file.with_name("chart.svg"), file.with_name("chart.PNG")
    code, _, err = bench("--from", file, "--chart", svg)
    assert code == 0 and f"Wrote {svg}" in err
    drawn = svg.read_text()
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", drawn)
    assert "kda_tl, FLA, cuDNN frontend on NVIDIA Invented, 2026-01-02" in texts
    assert {"kda_tl 9.8.7", "FLA 0.6.5", "cuDNN frontend 1.32.1"} <= set(texts)
    assert any("triton 3.6.4" in text for text in texts)
    assert texts.count("not run") == 7 and texts.count("337 eager") == 2
    assert texts.count("22.4") == 6 and texts.count("31.2") == 6  # kda_tl and FLA at H32 T8192 and H8 T32768
    bench("--from", file, "--chart", svg)
    assert svg.read_text() == drawn
    assert bench("--from", file, "--chart", png)[0] == 0
    assert png.read_bytes().startswith(b"\x89PNG")


@drawing
def test_a_chart_is_drawn_of_what_was_just_measured(bench: Bench, tmp_path: Path) -> None:
    svg = tmp_path / "chart.svg"
    code, out, _ = bench("--gpu", "cpu", "--workload", "small", "--chart", svg, "--json")
    assert code == 0 and len(json.loads(out)["workloads"]) == 2
    assert ">1.40</text>" in svg.read_text() and ">2.80</text>" in svg.read_text()


@pytest.mark.parametrize("operator", ("chunk_kda", "chunk_gated_delta_rule"))
def test_a_call_moves_its_tensors_once(operator: str) -> None:
    """The floor of a whole call, counted from its tensors; a scalar gate is one number a token and value head."""
    gate = {"gate": "safe" if operator == "chunk_kda" else "softplus", "operator": operator}
    workload = Workload(name="few", B=2, T=5, H=2, HV=4, K=8, V=16, initial_state=True, **gate)
    x = workload.inputs("cpu")
    tokens = sum(x[name].nbytes for name in ("q", "k", "v", "g", "beta"))
    state, o = x["initial_state"].nbytes, x["v"].nbytes
    forward = workload.problem()
    assert call_bytes(forward) == tokens + o + 2 * state
    assert call_bytes(replace(forward, direction="bwd")) == 2 * tokens + o + 3 * state

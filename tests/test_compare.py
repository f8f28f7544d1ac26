"""compare and --expect: the report, the picture, the files, the flags, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import oracle
from tests.cases import LAYERS, NUMPY, Case, normal
from tests.command_line import Result, poolgrad, poolgrad_process, save, save_safetensors, zeros
from tests.comparison_reference import MERE, MIXED, TOLERANCES, noisy, with_nonfinite

from poolgrad.cli import error_map, options
from poolgrad.cli.new_file import NewFile
from poolgrad.core.comparison import Comparison, ComparisonSink
from poolgrad.core.standards import ROWS, STANDARDS

Array = Any
F32, F16 = np.float32, np.float16
ROOT = Path(__file__).resolve().parent.parent


def compare(tmp_path: Path, actual: Array, expected: Array, *more: object) -> Result:
    return poolgrad("compare", save(tmp_path / "a.npy", actual), save(tmp_path / "g.npy", expected), *more)


# ---- The command


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    """A device's gradInput that is wrong in one element, and the right one."""
    expected = np.array([[[[1, 1, 2, 2], [1, 1, 2, 2]]]], np.float32)
    actual = expected.copy()
    actual[0, 0, 1, 2] = 2.5
    return [save(tmp_path / "device.npy", actual), save(tmp_path / "golden.npy", expected)]


def test_exit_codes(pair: list[Path]) -> None:
    device, golden = pair
    assert poolgrad("compare", golden, golden).code == 0
    failed = poolgrad("compare", device, golden)
    assert (failed.code, failed.err) == (1, "")
    assert poolgrad("compare", device, golden, "--exit-zero").code == 0
    assert poolgrad("compare", device, golden.with_name("none.npy")).code == 3
    assert poolgrad("compare", device).code == 2


def test_quiet_tells_by_its_exit_code(pair: list[Path]) -> None:
    result = poolgrad("compare", *pair, "-q")
    assert (result.code, result.out, result.err) == (1, "", "")


def test_report_begins_with_the_verdict_and_the_standard(pair: list[Path]) -> None:
    lines = poolgrad("compare", *pair).out.splitlines()
    assert lines[0] == "FAIL by mere-mare (Ascend ecosystem standard), thresholds of float32"
    assert lines[2] == "x MERE: 0.03125, to be < 0.00012207"
    passed = poolgrad("compare", pair[1], pair[1], "--standard", "exact").out.splitlines()
    assert passed[0] == "PASS by exact (bit for bit, NaN payloads aside), thresholds of float32"


def test_report_has_every_part(tmp_path: Path) -> None:
    actual, expected = with_nonfinite(*noisy((2, 3, 6, 7), "float16", 0.01, seed=3))
    text = compare(tmp_path, actual, expected).out
    wanted = [
        "NaN and infinity",
        "opposite infinities",
        "max abs error",
        "max rel error",
        "MERE, MARE",
        "RMSE",
        "cosine",
    ]
    wanted += [
        "msprobe",
        "under 0.001",
        "ulp",
        "of float16",
        "would pass",
        "worst elements",
        "worst planes",
        "zeros",
    ]
    assert [part for part in wanted if part not in text] == []
    assert len(re.findall(r"^\(\d+, \d+, \d+, \d+\) ", text, re.MULTILINE)) == 10
    assert len(re.findall(r"^\(\d+, \d+\) ", text, re.MULTILINE)) == 6 - 1  # One plane is NaN in both.


def test_json_is_json_at_full_precision(tmp_path: Path) -> None:
    actual, expected = with_nonfinite(*noisy((2, 3, 6, 7), "float32", 0.01, seed=3))
    out = compare(tmp_path, actual, expected, "--json").out

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    record = json.loads(out, parse_constant=refuse)
    assert record["status"] == "failed"
    assert record["op"] == "compare"
    assert record["regions"] is None
    largest = record["max_absolute_error"]
    assert largest["actual"] == float(actual[tuple(largest["index"])])
    assert largest["value"] == abs(largest["actual"] - largest["expected"])
    assert [one["name"] for one in record["criteria"]] == ["non-finite disagreements", "MERE", "MARE"]


def test_precision_row(pair: list[Path], tmp_path: Path) -> None:
    device, golden = pair
    record = poolgrad("compare", device, golden, "--json", "--precision-row", "bfloat16").record
    assert (record["precision_row"], record["criteria"][1]["threshold"]) == ("bfloat16", 2**-7)
    grad_output = save(tmp_path / "g.npy", np.array([[[[4, 8]]]], np.float32))
    own = zeros(tmp_path / "x.npy", (1, 1, 2, 4))
    call = ["avg2d", grad_output, own, "-k", 2, "--expect", golden, "--json"]
    rows = {0: "float32", 1: "hfloat32", 2: "float16", 3: "hfloat32"}
    for mode, row in rows.items():
        record = poolgrad(*call, "--cube-math-type", mode).record
        assert (record["compute_dtype"], record["comparison"]["precision_row"]) == (row, row)
        assert record["comparison"]["criteria"][1]["threshold"] == MERE[row]
    record = poolgrad(*call, "--cube-math-type", 1, "--precision-row", "float32").record
    assert record["comparison"]["precision_row"] == "float32"


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_expect(case: Case, tmp_path: Path) -> None:
    """The right answer of every layer passes, and with one wrong element fails there; nothing is written."""
    given_tensor = normal(case.grad_shape, "float32", seed=1)
    golden = oracle.rounded(oracle.backward(oracle.exact(given_tensor), case.self_shape, case.pool), "float32")
    grad_output, own = save(tmp_path / "g.npy", given_tensor), zeros(tmp_path / "x.npy", case.self_shape)
    actual = golden.astype(np.float32)
    device = save(tmp_path / "d.npy", actual)
    call = [*call_of(case), grad_output, own, "--expect", device, "--json", "--standard", "allclose"]
    before = sorted(tmp_path.iterdir())
    assert poolgrad(*call).code == 0
    place = tuple(extent // 2 for extent in case.self_shape)
    actual[place] += 1
    save(tmp_path / "d.npy", actual)
    result = poolgrad(*call)
    assert result.code == 1
    assert result.record["comparison"]["worst_elements"][0]["index"] == list(place)
    assert result.record["comparison"]["mismatched"] == 1
    assert result.record["grad_input"]["path"] is None
    assert sorted(tmp_path.iterdir()) == before


def call_of(case: Case) -> list[object]:
    pool = case.pool
    if pool is None:
        return ["adaptive2d"]
    flags = ["--ceil-mode"] * pool.ceil_mode + ["--no-count-include-pad"] * (not pool.count_include_pad)
    pairs = {"-k": pool.kernel_size, "-s": pool.stride, "-p": pool.padding}
    words = [word for flag, (high, wide) in pairs.items() for word in (flag, f"{high},{wide}")]
    return ["avg2d", *words, *flags, "--divisor-override", pool.divisor_override]


def test_expect_reports_regions_and_the_call(pair: list[Path], tmp_path: Path) -> None:
    grad_output = save(tmp_path / "g.npy", np.array([[[[4, 8]]]], np.float32))
    own = zeros(tmp_path / "x.npy", (1, 1, 2, 4))
    result = poolgrad("avg2d", grad_output, own, "-k", 2, "--expect", pair[0])
    assert result.code == 1
    text = result.out
    assert text.startswith("FAIL by mere-mare")
    assert (
        text.index("cells under")
        < text.index("operator ")
        < text.index("computed, not stored", text.index("operator "))
    )
    assert re.search(r"^one window +8 +1 ", text, re.MULTILINE)


def test_an_expected_tensor_by_name(tmp_path: Path) -> None:
    golden = np.array([[[[1, 1, 2, 2], [1, 1, 2, 2]]]], np.float32)
    both = save_safetensors(tmp_path / "both.safetensors", {"grad_input": golden, "x": golden + 1})
    assert poolgrad("compare", both, f"{both}:grad_input").code == 0
    assert poolgrad("compare", f"{both}:x", both).code == 1
    record = poolgrad("compare", f"{both}:x", both, "--json").record
    assert (record["actual"]["name"], record["expected"]["name"]) == ("x", "grad_input")


def test_the_expected_file_is_never_the_target(pair: list[Path], tmp_path: Path) -> None:
    grad_output = save(tmp_path / "g.npy", np.array([[[[4, 8]]]], np.float32))
    own = zeros(tmp_path / "x.npy", (1, 1, 2, 4))
    before = pair[0].read_bytes()
    result = poolgrad("avg2d", grad_output, own, "-k", 2, "--expect", pair[0], "-o", pair[0])
    assert result.code == 3
    assert "it is the input" in result.error
    assert pair[0].read_bytes() == before


def test_files_that_change_meanwhile_are_an_error(pair: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    device, golden = pair
    whole = Comparison.run

    def meddle(self: Comparison, *arguments: Any) -> Comparison:
        done = whole(self, *arguments)
        save(device, np.zeros((1, 1, 2, 4), np.float32))
        return done

    monkeypatch.setattr(Comparison, "run", meddle)
    result = poolgrad("compare", device, golden)
    assert result.code == 3
    assert "changed while it was read" in result.error
    assert result.out == ""


def test_an_expected_file_that_changes_meanwhile_is_an_error(
    pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad_output = save(tmp_path / "g.npy", np.array([[[[4, 8]]]], np.float32))
    own = zeros(tmp_path / "x.npy", (1, 1, 2, 4))
    whole = ComparisonSink.write

    def meddle(self: ComparisonSink, *arguments: Any) -> None:
        whole(self, *arguments)
        save(pair[1], np.zeros((1, 1, 2, 4), np.float32))

    monkeypatch.setattr(ComparisonSink, "write", meddle)
    for more in ([], ["-o", tmp_path / "out.npy"]):
        save(pair[1], np.ones((1, 1, 2, 5), np.float32)[..., :4])
        result = poolgrad("avg2d", grad_output, own, "-k", 2, "--expect", pair[1], *more)
        assert result.code == 3
        assert "changed while it was read" in result.error
        assert not (tmp_path / "out.npy").exists()


# ---- The picture in the terminal


def test_shrinking_keeps_the_largest() -> None:
    cells = np.random.default_rng(0).random((100, 37))
    small = error_map.shrink(cells, 7, 5)
    assert small.shape == (7, 5)
    assert small.max() == cells.max()
    assert error_map.shrink(cells, 100, 37).tolist() == cells.tolist()


def picture_lines(text: str) -> list[str]:
    return [line[1:-1] for line in text.splitlines() if re.fullmatch(r"\|.*\|", line)]


def test_picture_shows_where(tmp_path: Path) -> None:
    expected = np.ones((2, 3, 6, 8), np.float32)
    actual = expected.copy()
    actual[1, 2, 4, 5], actual[0, 0, 0, 0], actual[1, 0, 2, 7] = 2, 1.01, math.nan
    drawn = picture_lines(compare(tmp_path, actual, expected).out)
    wanted = [[" "] * 8 for _ in range(6)]
    wanted[4][5], wanted[0][0], wanted[2][7] = "█", "▒", "N"
    assert drawn == ["".join(2 * mark for mark in row) for row in wanted]


def test_picture_of_a_large_plane_fits(tmp_path: Path) -> None:
    expected = np.ones((1, 1, 900, 1300), np.float32)
    actual = expected.copy()
    actual[0, 0, 899, 1299] = 2
    drawn = picture_lines(compare(tmp_path, actual, expected).out)
    assert 10 <= len(drawn) <= 24
    assert {len(line) for line in drawn} <= set(range(40, 73))
    assert [mark for line in drawn for mark in line if mark != " "] == ["█"]
    assert drawn[-1][-1] == "█"


def test_picture_without_the_characters(tmp_path: Path) -> None:
    files = [
        save(tmp_path / name, np.full((1, 1, 2, 2), value, np.float32))
        for name, value in (("a.npy", 2), ("g.npy", 1))
    ]
    result = poolgrad_process("compare", *files, PYTHONIOENCODING="ascii")
    assert picture_lines(result.out) == ["####", "####"]
    assert "\\u" not in result.out


def test_picture_in_colour(tmp_path: Path) -> None:
    files = [
        save(tmp_path / name, np.full((1, 1, 3, 2), value, np.float32))
        for name, value in (("a.npy", 2), ("g.npy", 1))
    ]
    result = poolgrad_process("compare", *files, FORCE_COLOR="1", TERM="xterm-256color", PYTHONIOENCODING="utf-8")
    assert "\x1b[1;31mFAIL\x1b[0m" in result.out
    halves = [line for line in result.out.splitlines() if line.count("▀") == 2]
    assert len(halves) == 2
    assert "\x1b" in halves[0]
    plain = poolgrad_process("compare", *files, NO_COLOR="1", FORCE_COLOR="1", PYTHONIOENCODING="utf-8")
    assert "▀" not in plain.out


# ---- Refusals


def tensors(tmp_path: Path, actual: Array, expected: Array) -> list[Path]:
    return [save(tmp_path / "a.npy", actual), save(tmp_path / "g.npy", expected)]


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (np.zeros((1, 2, 3), F32), np.zeros((1, 3, 2), F32), r"float32 \(1, 2, 3\) and EXPECTED .* same shape"),
        (np.zeros((1, 2, 3), F32), np.zeros((1, 1, 2, 3), F32), "expected the same shape"),
        (np.zeros((1, 2, 3), F32), np.zeros((1, 2, 3), F16), "expected the same dtype, or EXPECTED in float32"),
        (np.zeros((1, 2, 3), F16), np.zeros((1, 2, 3), NUMPY["bfloat16"]), "ACTUAL is float16 and EXPECTED bfloat16"),
        (np.zeros((2, 3), F32), np.zeros((2, 3), F32), r"ACTUAL is float32 \(2, 3\); expected rank 4"),
        (np.zeros((1, 2, 3), float), np.zeros((1, 2, 3), F32), r"is float64 \(1, 2, 3\); expected float32, "),
        (np.zeros((1, 2, 3), F32), np.zeros((1, 2, 3), int), r"EXPECTED is int64"),
        (np.zeros((1, 0, 3), F32), np.zeros((1, 0, 3), F32), "empty"),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_compared(actual: Array, expected: Array, message: str, tmp_path: Path) -> None:
    result = poolgrad("compare", *tensors(tmp_path, actual, expected))
    assert result.code == 2
    assert re.search(message, result.error)
    assert "poolgrad compare --help" in result.error
    assert result.out == ""


def test_exact_takes_the_same_dtype(tmp_path: Path) -> None:
    files = tensors(tmp_path, np.zeros((1, 2, 3), F16), np.zeros((1, 2, 3), F32))
    result = poolgrad("compare", *files, "--standard", "exact")
    assert result.code == 2
    assert "the standard exact compares bits, which takes the same dtype" in result.error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rtol", "1e-3"], "--rtol and --atol belong to the standard allclose, and this is mere-mare"),
        (["--standard", "allclose", "--rtol", "-1"], "--rtol is -1.0; expected a finite number, at least 0"),
        (["--standard", "allclose", "--atol", "nan"], "--atol is nan; expected a finite number"),
        (["--standard", "allclose", "--atol", "inf"], "--atol is inf; expected a finite number"),
        (["--standard", "close"], "'close' is not one of 'mere-mare', 'mixed', 'allclose', 'exact'"),
        (["--precision-row", "float64"], "'float64' is not one of 'float32', 'float16', 'bfloat16', 'hfloat32'"),
        (["--plot", "errors.pdf"], "--plot draws .png and .svg, and this is errors.pdf"),
    ],
)
def test_flags_that_are_refused(flags: list[str], message: str, pair: list[Path]) -> None:
    result = poolgrad("compare", *pair, *flags)
    assert result.code == 2
    assert message in result.error


@pytest.mark.parametrize(
    "flags",
    [["--standard", "exact"], ["--rtol", "1"], ["--exit-zero"], ["--plot", "e.png"], ["--precision-row", "float16"]],
)
def test_flags_that_take_expect(flags: list[str], tmp_path: Path) -> None:
    result = poolgrad("adaptive2d", "g.npy", "x.npy", "-o", tmp_path / "out.npy", *flags)
    assert result.code == 2
    assert f"{flags[0]} takes --expect" in result.error


def test_without_output_and_expect_there_is_nothing_to_do() -> None:
    result = poolgrad("adaptive2d", "g.npy", "x.npy")
    assert result.code == 2
    assert "Missing option '-o' / '--output'" in result.error


def test_an_expected_file_of_another_shape_stops_before_the_work(tmp_path: Path) -> None:
    grad_output, own = zeros(tmp_path / "g.npy", (1, 1, 1, 2)), zeros(tmp_path / "x.npy", (1, 1, 2, 4))
    device, out = zeros(tmp_path / "d.npy", (1, 1, 4, 2)), tmp_path / "out.npy"
    result = poolgrad("avg2d", grad_output, own, "-k", 2, "--expect", device, "-o", out)
    assert result.code == 2
    assert "expected the same shape" in result.error
    assert not out.exists()


def test_choices_are_the_core_ones() -> None:
    """They are written out in the flags, which are parsed without core."""
    parameters = {parameter.name: parameter for parameter in command_parameters()}
    assert tuple(parameters["standard"].type.choices) == STANDARDS
    assert sorted(parameters["precision_row"].type.choices) == sorted(ROWS)
    assert set(vars(options.Judging)["__dataclass_fields__"]) <= set(parameters)


def command_parameters() -> list[Any]:
    from poolgrad.cli.compare import command

    return list(command.params)


# ---- --plot


needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="poolgrad[plot]")


@needs_matplotlib
@pytest.mark.parametrize(
    ("kind", "name"),
    [("noise", "e.png"), ("noise", "e.SVG"), ("same", "e.svg"), ("nonfinite", "e.svg"), ("zero", "e.png")],
)
def test_plot(kind: str, name: str, tmp_path: Path) -> None:
    actual, expected = noisy((2, 3, 16, 17), "float32", 0.01, seed=1)
    if kind == "same":
        actual = expected
    if kind == "zero":
        expected[...] = 0
    if kind == "nonfinite":
        actual[...] = math.nan
    target = tmp_path / name
    result = compare(tmp_path, actual, expected, "--plot", target, "-q")
    assert result.code == (0 if kind == "same" else 1)
    assert result.err == ""
    start = b"\x89PNG\r\n\x1a\n" if name.endswith("png") else b"<?xml"
    assert target.read_bytes().startswith(start)
    assert len(target.read_bytes()) > 5000


@needs_matplotlib
def test_plot_of_an_operator(pair: list[Path], tmp_path: Path) -> None:
    grad_output = save(tmp_path / "g.npy", np.array([[[[4, 8]]]], np.float32))
    own = zeros(tmp_path / "x.npy", (1, 1, 2, 4))
    target = tmp_path / "e.svg"
    assert poolgrad("avg2d", grad_output, own, "-k", 2, "--expect", pair[0], "--plot", target, "-q").code == 1
    assert "<svg" in target.read_text(encoding="utf-8")


@needs_matplotlib
def test_plot_that_cannot_be_written(pair: list[Path], tmp_path: Path) -> None:
    result = poolgrad("compare", *pair, "--plot", tmp_path / "none" / "e.png")
    assert result.code == 3
    assert "there is no directory" in result.error


def test_plot_without_matplotlib(pair: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    target = tmp_path / "e.png"
    result = poolgrad("compare", *pair, "--plot", target)
    assert result.code == 2
    assert "--plot takes matplotlib; pip install 'poolgrad[plot]' installs it" in result.error
    assert not target.exists()


@needs_matplotlib
def test_a_picture_replaces_its_target_only_when_complete(
    pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "e.svg"
    target.write_text("old", encoding="utf-8")

    def fail(self: NewFile) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(NewFile, "commit", fail)
    result = poolgrad("compare", *pair, "--plot", target)
    assert (result.code, target.read_text(encoding="utf-8")) == (3, "old")
    assert result.out == ""


# ---- The README


def test_report_shown_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## Comparing with a device's gradInput") :]
    line = re.search(r"^poolgrad (avg2d .* --expect .*)$", section, re.MULTILINE)
    shown = re.search(r"^```text\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert line
    assert shown
    monkeypatch.chdir(ROOT)
    printed = poolgrad(*line[1].split()).out
    assert printed[: printed.index("operator ")].rstrip("\n") == shown[1].rstrip("\n")


def test_thresholds_in_the_readme() -> None:
    """Every number of the table of standards, by row."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = {match[1]: match[0] for match in re.finditer(r"^\| `([\w-]+)`.*$", readme, re.MULTILINE)}
    rows = ("float32", "hfloat32", "float16", "bfloat16")
    for standard, table in (("mere-mare", MERE), ("mixed", MIXED), ("allclose", TOLERANCES)):
        cells = lines[standard].replace("\\|", "").strip("|").split("|")[2:]
        for row, cell in zip(rows, cells, strict=True):
            found = [number(text) for text in cell.split(",")]
            wanted = table[row]
            assert found == list(wanted if isinstance(wanted, tuple) else (wanted,)), (standard, row)


def number(text: str) -> float:
    base, _, power = text.strip().partition("^")
    return float(base) ** int(power) if power else float(base)

"""The command line: from files to a file with every flag, and what the user sees."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from tests import oracle
from tests.cases import LAYERS, NUMPY, Case, normal
from tests.command_line import (
    ENTRY,
    Result,
    environment,
    load,
    on_terminal,
    poolgrad,
    poolgrad_process,
    save,
    save_safetensors,
    zeros,
)

from poolgrad.cli import main, options, report, signals
from poolgrad.core import AclnnError, CubeMathType, Product
from poolgrad.core.executor import Executor
from poolgrad.core.products import RULES, Precision, Rules

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
ESCAPE = "\x1b"


def flags(case: Case) -> list[str]:
    """The command and flags of a case."""
    pool = case.pool
    if pool is None:
        return ["adaptive2d"]
    pairs = {"-k": pool.kernel_size, "-s": pool.stride, "-p": pool.padding}
    words = ["avg2d", *(word for flag, pair in pairs.items() for word in (flag, f"{pair[0]},{pair[1]}"))]
    words += ["--ceil-mode"] * pool.ceil_mode + ["--no-count-include-pad"] * (not pool.count_include_pad)
    return [*words, "--divisor-override", str(pool.divisor_override)]


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    """gradOutput [[4, 8]] and self of a 2x2 pooling over 2x4."""
    grad_output = save(tmp_path / "g.npy", np.array([[[[4, 8]]]], np.float32))
    return [grad_output, zeros(tmp_path / "x.npy", (1, 1, 2, 4))]


def avg2d(pair: list[Path], *more: object, out: str = "out.npy") -> list[object]:
    """The command line of the 2x2 pooling over `pair`."""
    return ["avg2d", *pair, "-o", pair[0].with_name(out), "-k", "2", *more]


PAIR_GRAD_INPUT = [[[[1, 1, 2, 2], [1, 1, 2, 2]]]]


# ---- From files to a file


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_result_file(case: Case, dtype: str, tmp_path: Path) -> None:
    number = LAYERS.index(case)
    g_suffix, x_suffix, out_suffix = (
        (".npy", ".safetensors")[(number >> bit) % 2 == (dtype == "float16")] for bit in range(3)
    )
    given = normal(case.grad_shape, dtype, seed=number)
    grad_output = save(tmp_path / f"g{g_suffix}", given)
    own = zeros(tmp_path / f"x{x_suffix}", case.self_shape, NUMPY[dtype])
    out = tmp_path / f"out{out_suffix}"
    result = poolgrad(*flags(case), grad_output, own, "-o", out, "--json", "--accumulate", "float64")
    assert result.code == 0, result.err
    expected = oracle.rounded(oracle.backward(oracle.exact(given), case.self_shape, case.pool), dtype)
    written = load(out, dtype)
    assert written.shape == case.self_shape
    # Exact ties may round either way: by one unit in the last place, and a rare few.
    values = written.astype(np.float64)
    assert np.all(abs(values - expected) <= abs(expected) * 2.0 ** (1 - oracle.FORMATS[dtype].bits))
    assert np.count_nonzero(values != expected) <= expected.size // 100


def test_one_file_with_both_tensors_and_well_known_names(tmp_path: Path) -> None:
    grad_output = np.array([[[[4, 8]]]], np.float32)
    tensors = {"other": np.zeros((3,), np.float32), "gradOutput": grad_output, "x": np.zeros((1, 1, 2, 4), "f4")}
    both = save_safetensors(tmp_path / "both.safetensors", tensors)
    result = poolgrad(*avg2d([both, both], "--json"))
    assert (result.record["grad_output"]["name"], result.record["self"]["name"]) == ("gradOutput", "x")
    assert load(tmp_path / "out.npy").tolist() == PAIR_GRAD_INPUT


def test_named_tensors(tmp_path: Path) -> None:
    tensors = {
        "a:b": np.array([[[[4, 8]]]], np.float32),
        "grad": np.zeros((1, 1, 1, 2), np.float32),
        "c": np.zeros((1, 1, 2, 4), np.float32),
    }
    both = save_safetensors(tmp_path / "both.safetensors", tensors)
    out = f"{tmp_path / 'out.safetensors'}:my gradient"
    result = poolgrad("avg2d", f"{both}:a:b", f"{both}:c", "-o", out, "-k", 2, "--json")
    assert result.record["grad_output"]["name"] == "a:b"
    assert result.record["grad_input"]["path"] == str(tmp_path / "out.safetensors")
    assert result.record["grad_input"]["name"] == "my gradient"
    assert load(tmp_path / "out.safetensors", name="my gradient").tolist() == PAIR_GRAD_INPUT


@pytest.mark.parametrize("stored", [">f4", "F"])
def test_layouts_give_the_same_bytes(stored: str, tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2)
    other = values.astype(">f4") if stored == ">f4" else np.asfortranarray(values)
    own = zeros(tmp_path / "x.npy", (2, 3, 4, 4))
    outs = []
    for name, array in {"plain": values, "other": other}.items():
        grad_output = save(tmp_path / f"{name}.npy", array)
        outs.append(tmp_path / f"{name}-out.npy")
        assert poolgrad("adaptive2d", grad_output, own, "-o", outs[-1]).code == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert load(outs[0]).tolist() == (values / 4).repeat(2, axis=2).repeat(2, axis=3).tolist()


def test_bf16_bits(tmp_path: Path) -> None:
    bits = np.array([[[[0x4080, 0x4100]]]], np.uint16)  # 4.0 and 8.0
    pair = [save(tmp_path / "g.npy", bits), zeros(tmp_path / "x.npy", (1, 1, 2, 4), np.uint16)]
    assert poolgrad(*avg2d(pair)).code == 2
    assert poolgrad(*avg2d(pair, "--bf16-bits")).code == 0
    assert load(tmp_path / "out.npy", "bfloat16").tolist() == PAIR_GRAD_INPUT


@pytest.mark.parametrize(
    ("mode", "bits"),
    [
        ("0", [0x3F801800, 0x4788B800]),
        ("keep_dtype", [0x3F801800, 0x4788B800]),
        ("1", [0x3F802000, 0x4788C000]),
        ("Allow_Fp32_Down_Precision", [0x3F802000, 0x4788C000]),
        ("2", [0x3F802000, 0x7F800000]),  # 70000 is past float16's range
        ("USE_FP16", [0x3F802000, 0x7F800000]),
        ("3", [0x3F802000, 0x4788C000]),
        ("use_hf32", [0x3F802000, 0x4788C000]),
    ],
)
def test_cube_math_type(mode: str, bits: list[int], tmp_path: Path) -> None:
    given = np.array([[[[0x3F801800, 0x4788B800]]]], np.uint32).view(np.float32)
    pair = [save(tmp_path / "g.npy", given), zeros(tmp_path / "x.npy", given.shape)]
    result = poolgrad("avg2d", *pair, "-o", tmp_path / "out.npy", "-k", 1, "--cube-math-type", mode, "--json")
    assert load(tmp_path / "out.npy").view(np.uint32).reshape(-1).tolist() == bits
    number = int(mode) if mode.isdigit() else CubeMathType[mode.upper()]
    computed = {0: "float32", 1: "hfloat32", 2: "float16", 3: "hfloat32"}
    assert (result.record["cube_math_type"], result.record["compute_dtype"]) == (number, computed[number])


@pytest.mark.parametrize(("accumulate", "total"), [("float32", 2**24), ("float64", 2**24 + 2)])
def test_accumulate(accumulate: str, total: int, tmp_path: Path) -> None:
    pair = [
        save(tmp_path / "g.npy", np.array([[[1, 2**24, 1]]], np.float32)),
        zeros(tmp_path / "x.npy", (1, 1, 5)),
    ]
    call = ["avg2d", *pair, "-o", tmp_path / "out.npy", "-k", "1,3", "-s", 1, "--divisor-override", 1]
    assert poolgrad(*call, "--accumulate", accumulate).code == 0
    assert load(tmp_path / "out.npy")[0, 0, 2] == total


def test_product_is_passed_on(pair: list[Path]) -> None:
    call = avg2d(pair, "--product", "Atlas-Training", "--cube-math-type", "1", "--json")
    record = poolgrad(*call).record
    assert (record["product"], record["compute_dtype"]) == ("atlas-training", "float16")


def test_threads_and_workspace_limit_do_not_change_the_bytes(tmp_path: Path) -> None:
    values = np.random.default_rng(5).standard_normal((4, 8, 30, 30)).astype(np.float32)
    pair = [save(tmp_path / "g.npy", values), zeros(tmp_path / "x.npy", (4, 8, 59, 59))]
    contents = set()
    for number, extra in enumerate([[], ["--threads", 1], ["--threads", 3, "--workspace-limit", "48KiB"]]):
        out = tmp_path / f"{number}.npy"
        call = ["avg2d", *pair, "-o", out, "-k", 3, "-s", 2, "-p", 1, "--json", *extra]
        record = poolgrad(*call).record
        if "--workspace-limit" in extra:
            assert record["workspace_bytes"] <= 48 * 1024
            assert record["threads"] == 3
        contents.add(out.read_bytes())
    assert len(contents) == 1


def test_existing_target_is_replaced(pair: list[Path]) -> None:
    pair[0].with_name("out.npy").write_bytes(b"old")
    assert poolgrad(*avg2d(pair, "-q")) == Result(0, "", "")
    assert load(pair[0].with_name("out.npy")).tolist() == PAIR_GRAD_INPUT
    assert sorted(os.listdir(pair[0].parent)) == ["g.npy", "out.npy", "x.npy"]


# ---- JSON


def test_json_of_avg2d(pair: list[Path]) -> None:
    result = poolgrad(*avg2d(pair, "--json", out="out.safetensors"))
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith('{"schema":1,"status":"ok","op":"avg2d",')
    record = result.record
    timing = record.pop("timing_s")
    assert list(timing) == ["plan", "read", "compute", "write", "total"]
    assert all(0 < seconds < 60 for seconds in timing.values())
    assert timing["total"] >= timing["plan"]
    assert record.pop("throughput_gb_s") == pytest.approx((8 + 32) / 1e9 / timing["total"], rel=1e-4)
    assert record.pop("workspace_bytes") > 0
    assert record == {
        "schema": 1,
        "status": "ok",
        "op": "avg2d",
        "aclnn": "aclnnAvgPool2dBackward",
        "product": "atlas-a2",
        "cube_math_type": 0,
        "compute_dtype": "float32",
        "grad_output": tensor(pair[0], None, [1, 1, 1, 2], 8),
        "self": tensor(pair[1], None, [1, 1, 2, 4], 32),
        "grad_input": tensor(pair[0].with_name("out.safetensors"), "grad_input", [1, 1, 2, 4], 32),
        "threads": 1,
    }


def tensor(path: Path, name: str | None, shape: list[int], size: int) -> dict[str, Any]:
    return {"path": str(path), "name": name, "dtype": "float32", "shape": shape, "bytes": size}


def test_json_of_adaptive2d(pair: list[Path]) -> None:
    record = poolgrad("adaptive2d", *pair, "-o", pair[0].with_name("out.npy"), "--json").record
    assert (record["op"], record["aclnn"]) == ("adaptive2d", "aclnnAdaptiveAvgPool2dBackward")
    assert record["cube_math_type"] is None


@POSIX
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_undecodable_path(locale: str, pair: list[Path]) -> None:
    out = os.fsencode(pair[0].parent) + b"/\xff\xe9.npy"
    for flag in ("--json", "--bf16-bits"):
        words = [os.fsencode(str(word)) for word in ["avg2d", *pair, "-k", "2", flag]]
        result = poolgrad_process(*words, "-o", out, LC_ALL=locale)
        assert (result.code, result.err) == (0, "")
        if flag == "--json":
            assert os.fsencode(result.record["grad_input"]["path"]) == out
        else:
            assert "\\udcff\\udce9.npy" in result.out
    assert os.path.exists(out)


# ---- The table


def test_table(pair: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    result = poolgrad(*avg2d(pair, "--cube-math-type", 1, out="out.safetensors"))
    assert (result.code, result.err) == (0, "")
    expected = [
        r"operator +avg2d \(aclnnAvgPool2dBackward\)",
        r"product +atlas-a2 \(Atlas A2 training / 800I A2 inference / A200I A2 Box\)",
        r"cubeMathType +1 ALLOW_FP32_DOWN_PRECISION",
        r" +HF32, gradOutput rounded to HFLOAT32",
        r"sums +float32",
        r"",
        rf"gradOutput +{re.escape(str(pair[0]))}",
        r" +float32 \(1, 1, 1, 2\), 8 bytes",
        rf"self +{re.escape(str(pair[1]))}",
        r" +float32 \(1, 1, 2, 4\), 32 bytes",
        rf"gradInput +{re.escape(str(pair[0].with_name('out.safetensors')))}:grad_input",
        r" +float32 \(1, 1, 2, 4\), 32 bytes",
        r"",
        r"workspace +[\d,]+ bytes \([\d.]+ (B|KiB)\)",
        r"threads +1",
        r"busy time +plan [\d.]+ ms, read [\d.]+ ms, compute [\d.]+ ms, write [\d.]+ ms",
        r"wall time +[\d.]+ ms, [\d.e-]+ GB/s",
    ]
    lines = result.out.splitlines()
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_the_table_of_adaptive2d_has_no_cube_math_type(pair: list[Path]) -> None:
    result = poolgrad("adaptive2d", *pair, "-o", pair[0].with_name("out.npy"))
    assert "aclnnAdaptiveAvgPool2dBackward" in result.out
    assert "cubeMathType" not in result.out


@pytest.mark.parametrize(
    ("mode", "meaning"),
    [("0", "float32 as it is"), ("2", "FP16, gradOutput and gradInput rounded to float16")],
)
def test_what_cube_math_type_meant(mode: str, meaning: str, pair: list[Path]) -> None:
    assert meaning in poolgrad(*avg2d(pair, "--cube-math-type", mode)).out


def long_path(folder: Path) -> Path:
    deep = folder / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    return deep / "out.npy"


def test_80_columns_fold_a_long_path_without_losing_any(pair: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = long_path(pair[0].parent)
    result = poolgrad("avg2d", *pair, "-k", 2, "-o", out)
    assert max(map(len, result.out.splitlines())) <= 80
    assert str(out) in "".join(line[15:] for line in result.out.splitlines())


def test_a_pipe_gets_a_long_path_in_one_piece_and_no_escapes(pair: list[Path]) -> None:
    out = long_path(pair[0].parent)
    result = poolgrad_process("avg2d", *pair, "-k", 2, "-o", out)
    assert (result.code, result.err) == (0, "")
    assert str(out) in result.out
    assert ESCAPE not in result.out


def test_markup_and_escapes_in_names_are_shown_not_obeyed(tmp_path: Path) -> None:
    name = "[red]\x1b[31m\n:smile:[/]"
    both = save_safetensors(tmp_path / "g.safetensors", {name: np.ones((1, 1, 1, 2), np.float32)})
    own = zeros(tmp_path / "x.npy", (1, 1, 2, 4))
    result = poolgrad("avg2d", both, own, "-k", 2, "-o", tmp_path / "[bold]out.npy")
    assert result.code == 0
    assert r"g.safetensors:[red]\x1b[31m\n:smile:[/]" in result.out
    assert "[bold]out.npy" in result.out
    assert ESCAPE not in result.out
    error = poolgrad("avg2d", "\x1b[31m\n.npy", own, "-k", 2, "-o", "out.npy").error
    assert error == r"poolgrad avg2d: cannot read \x1b[31m\n.npy: No such file or directory"


def test_an_ascii_terminal_gets_ascii(pair: list[Path]) -> None:
    result = poolgrad_process(*avg2d(pair, out="\u00e9.npy"), PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert result.code == 0
    assert result.out.isascii()
    assert "\\xe9.npy" in result.out
    assert "\\u" not in result.out


def test_quiet(pair: list[Path]) -> None:
    assert poolgrad(*avg2d(pair, "-q")) == Result(0, "", "")
    assert poolgrad(*avg2d(pair, "--quiet", "--json")) == Result(0, "", "")
    assert "kernelSize is 0" in poolgrad("avg2d", *pair, "-o", "out.npy", "-k", 0, "-q").error


# ---- On a terminal


@POSIX
def test_a_terminal_gets_style_but_not_with_no_color(pair: list[Path]) -> None:
    code, styled = on_terminal("stdout", *avg2d(pair))
    assert code == 0
    assert f"{ESCAPE}[1m" in styled
    code, unstyled = on_terminal("stdout", *avg2d(pair), NO_COLOR="1")
    assert code == 0
    assert ESCAPE not in unstyled
    assert "gradInput" in unstyled


@POSIX
def test_a_terminal_of_80_columns_is_not_overrun(pair: list[Path]) -> None:
    for command in (avg2d(pair), ["products"]):
        code, seen = on_terminal("stdout", *command, NO_COLOR="1")
        assert code == 0
        assert max(map(len, seen.splitlines())) <= 80


EAGER_BAR = f"from poolgrad.cli import report; report.BAR_AFTER_SECONDS = 0.0; {ENTRY}"


@POSIX
def test_a_long_run_shows_a_bar_on_a_terminal(pair: list[Path]) -> None:
    code, seen = on_terminal("stderr", *avg2d(pair), code=EAGER_BAR)
    assert code == 0
    assert "32/32 bytes" in seen
    code, seen = on_terminal("stderr", *avg2d(pair), code=EAGER_BAR, NO_COLOR="1")
    assert code == 0
    assert "32/32 bytes" in seen
    assert f"{ESCAPE}[3" not in seen


@POSIX
@pytest.mark.parametrize("flag", ["-q", "--json"])
def test_no_bar_when_quiet_or_for_scripts(flag: str, pair: list[Path]) -> None:
    assert on_terminal("stderr", *avg2d(pair, flag), code=EAGER_BAR) == (0, "")


@POSIX
def test_a_short_run_shows_no_bar(pair: list[Path]) -> None:
    assert on_terminal("stderr", *avg2d(pair)) == (0, "")


def test_no_bar_without_a_terminal(pair: list[Path]) -> None:
    assert poolgrad_process(*avg2d(pair), code=EAGER_BAR).err == ""


def test_the_bar_waits_and_is_not_drawn_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    drawn: list[int] = []
    bar = report._Bar(1000)
    monkeypatch.setattr(bar, "_open", lambda: setattr(bar, "_draw", drawn.append))
    for moment in (100.5, 100.99, 101.0, 101.05, 101.2):
        clock[0] = moment
        bar.update(int(moment * 100))
    assert drawn == [10100, 10120]


# ---- What is imported


def modules_after(*arguments: object) -> set[str]:
    code = "import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    result = poolgrad_process(*arguments, code=code + ENTRY)
    return {name.split(".")[0] for name in result.err.splitlines()[-1].split()}


HEAVY = {"numpy", "rich", "safetensors", "ml_dtypes"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["avg2d", "--help"],
        ["adaptive2d", "--help"],
        ["products", "--help"],
        ["avg2d", "--product", "atlas-a3", "--cube-math-type", "USE_HF32", "--help"],
        ["avg2d"],
        ["nonsense"],
    ],
    ids=" ".join,
)
def test_help_version_and_usage_errors_import_nothing_heavy(arguments: list[str]) -> None:
    loaded = modules_after(*arguments)
    assert "click" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("flag", ["--json", "-q"])
def test_rich_is_imported_only_to_draw(flag: str, pair: list[Path]) -> None:
    assert "rich" not in modules_after(*avg2d(pair, flag))
    assert "rich" in modules_after(*avg2d(pair))


# ---- Help and version


def test_version() -> None:
    assert poolgrad("--version") == Result(0, f"poolgrad {version('poolgrad')}\n", "")


def test_help_lists_the_commands() -> None:
    for flag in ("--help", "-h"):
        result = poolgrad(flag)
        assert (result.code, result.err) == (0, "")
        for name in ("avg2d", "adaptive2d", "products"):
            assert re.search(rf"^  {name} ", result.out, re.M)


def test_every_command_in_the_list_is_one() -> None:
    for name in main.COMMANDS:
        context = main.main.make_context("poolgrad", [name, "--help"], resilient_parsing=True)
        loaded = main.main.get_command(context, name)
        assert loaded is not None
        assert loaded.name == name


def unfolded(text: str) -> str:
    return re.sub(r"-\n +", "-", text).replace("\n", " ")


def test_help_names_every_product_and_cube_math_type() -> None:
    """The help spells them out, since it may not import the tables."""
    text = re.sub(r"\s+", " ", unfolded(poolgrad("avg2d", "--help").out))
    names = [product.value for product in Product]
    assert f"{', '.join(names[:-1])} or {names[-1]}" in text
    modes = [f"{int(mode)} {mode.name}" for mode in CubeMathType]
    assert re.sub(r" \(the default\)", "", text).count(f"{', '.join(modes[:-1])} or {modes[-1]}") == 1


# ---- products


def test_products_json_is_the_table_of_the_checks() -> None:
    result = poolgrad("products", "--json")
    assert (result.code, result.err) == (0, "")
    record = result.record
    assert (record["schema"], record["status"]) == (1, "ok")
    assert {item["value"]: item["name"] for item in record["cube_math_types"]} == {
        0: "KEEP_DTYPE",
        1: "ALLOW_FP32_DOWN_PRECISION",
        2: "USE_FP16",
        3: "USE_HF32",
    }
    products = {item["product"]: item for item in record["products"]}
    assert list(products) == [product.value for product in Product]
    training = {
        "product": "atlas-training",
        "title": "Atlas training series",
        "supported": True,
        "dtypes": ["float32", "float16"],
        "divisor_override": [-255, 255],
        "precision": {"float32": [None, "FP16", "FP16", None], "float16": ["AS_IS", "AS_IS", "AS_IS", None]},
    }
    assert products["atlas-training"] == training
    assert products["atlas-a3"]["divisor_override"] == [-(2**63), 2**63 - 1]
    assert products["atlas-a3"]["precision"]["bfloat16"] == ["AS_IS", "AS_IS", None, None]
    assert products["atlas-200i-500-a2"]["supported"] is False


def test_products_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = poolgrad("products")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines]
    assert ["atlas-a2", "float32", "0,", "1,", "2,", "3", "any", "int64"] in words
    assert ["inference", "/", "A200I", "A2", "Box", "bfloat16", "0,", "1"] in words
    assert ["atlas-training", "float32", "1,", "2", "-255", "to", "255"] in words
    assert ["Atlas", "training", "series", "float16", "0,", "1,", "2"] in words
    assert ["atlas-200i-500-a2", "not"] in words
    assert ["0", "KEEP_DTYPE", "as", "it", "is", "rejected", "as", "it", "is", "as", "it", "is"] in words
    assert ["1", "ALLOW_FP32_DOWN_PRECISION", "HF32", "FP16", "as", "it", "is", "as", "it", "is"] in words
    assert ["2", "USE_FP16", "FP16", "FP16", "as", "it", "is", "rejected"] in words
    assert ["3", "USE_HF32", "HF32", "rejected", "rejected", "rejected"] in words


def test_products_tables_follow_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Rules((-7, 9), {"float16": (None, Precision.HF32, None, Precision.FP16)})
    monkeypatch.setattr("poolgrad.core.products.RULES", {**RULES, Product.ATLAS_A3: changed})
    record = poolgrad("products", "--json").record["products"][0]
    assert (record["divisor_override"], record["precision"]) == ([-7, 9], {"float16": [None, "HF32", None, "FP16"]})
    words = [line.split() for line in poolgrad("products").out.splitlines()]
    assert ["atlas-a3", "float16", "1,", "3", "-7", "to", "9"] in words


# ---- Usage


USAGE = [
    ([], "Missing command"),
    (["nonsense"], "No such command 'nonsense'"),
    (["avg2d"], "Missing"),
    (["avg2d", "g.npy", "x.npy", "-o", "o.npy"], "Missing option '-k' / '--kernel-size'"),
    (["avg2d", "g.npy", "x.npy", "-k", "2"], "Missing option '-o' / '--output'"),
    (["adaptive2d", "g.npy", "-o", "o.npy"], "Missing argument 'SELF'"),
    (["adaptive2d", "g.npy", "x.npy", "-o", "o.npy", "-k", "2"], "No such option"),
    (["adaptive2d", "g.npy", "x.npy", "more", "-o", "o.npy"], "unexpected extra argument"),
    (["avg2d", "g", "x", "-o", "o", "-k", "2x2"], "'2x2' is not one integer or two (height,width)"),
    (["avg2d", "g", "x", "-o", "o", "-k", "2,"], "'2,' is not one integer or two"),
    (["avg2d", "g", "x", "-o", "o", "-k", ""], "'' is not one integer or two"),
    (["avg2d", "g", "x", "-o", "o", "-k", "2", "-s", "1.5"], "'1.5' is not one integer or two"),
    (["avg2d", "g", "x", "-o", "o", "-k", "2", "-p", "1_0"], "'1_0' is not one integer or two"),
    (["avg2d", "g", "x", "-o", "o", "-k", "2", "--divisor-override", "2.0"], "'2.0' is not an integer"),
    (["avg2d", "g", "x", "-o", "o", "-k", "2", "--cube-math-type", "HF32"], "'HF32' is neither 0 to 3 nor one of"),
    (["avg2d", "g", "x", "-o", "o", "-k", "2", "--product", "a2"], "'a2' is not one of atlas-a3, atlas-a2, "),
    (["adaptive2d", "g", "x", "-o", "o", "--accumulate", "float16"], "'float16' is not one of 'float32', 'float64'"),
    (["adaptive2d", "g", "x", "-o", "o", "--threads", "0"], "0 is not in the range x>=1"),
    (["adaptive2d", "g", "x", "-o", "o", "--workspace-limit", "64 parsecs"], "'64 parsecs' is not a size"),
    (["adaptive2d", "g", "x", "-o", "o", "--workspace-limit", "-1"], "'-1' is not a size"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=lambda value: value if isinstance(value, str) else "")
def test_usage_error(arguments: list[str], message: str) -> None:
    result = poolgrad(*arguments)
    command = arguments[:1] if arguments[:1] != ["nonsense"] else []
    title = " ".join(["poolgrad", *command])
    assert (result.code, result.out) == (2, "")
    assert result.error.startswith(f"{title}: ")
    assert result.error.endswith(f" (see '{title} --help')")
    assert message in result.error
    if command:
        as_json = poolgrad(*arguments, "--json")
        record = as_json.record
        assert as_json.code == 2
        assert as_json.error == f"{title}: {record.pop('message')}"
        assert record == {"schema": 1, "status": "error", "code": None, "name": "USAGE"}


def test_escapes_in_a_usage_error_are_shown_not_obeyed() -> None:
    assert r"--\x1b[31m\nred" in poolgrad("avg2d", "--\x1b[31m\nred").error


def test_a_file_named_like_a_flag(pair: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pair[0].parent)
    pair[0].rename("--json")
    result = poolgrad("avg2d", "-k", 2, "-o", "out.npy", "--", "--json", "x.npy")
    assert result.code == 3
    assert result.out == ""
    assert "--json: expected a .npy" in result.error


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("64mib", 64 << 20),
        ("64 MiB", 64 << 20),
        ("64MB", 64_000_000),
        ("64M", 64 << 20),
        ("1GiB", 1 << 30),
        ("1.5GiB", 3 << 29),
        ("2kB", 2000),
        ("10B", 10),
        ("1TB", 10**12),
    ],
)
def test_byte_size(text: str, size: int) -> None:
    assert options.byte_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1e6", "0x10", "1.MiB", "٣", "1,5GiB", "64Mi", "1 2"])
def test_no_byte_size(text: str) -> None:
    with pytest.raises(click.BadParameter):
        options.byte_size(text)


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", (3,)), ("3,2", (3, 2)), (" +3, -2 ", (3, -2)), ("1,2,3", (1, 2, 3))]
)
def test_integers(text: str, numbers: tuple[int, ...]) -> None:
    assert options.integers(text) == numbers


# ---- The error boundary


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Executor, "run", fail)


FAILURES: list[tuple[BaseException, int, str, str]] = [
    (
        IndexError("off by\none"),
        4,
        "BUG",
        r"a bug in poolgrad, please report .* POOLGRAD_DEBUG=1 \(IndexError: off by",
    ),
    (MemoryError(), 3, "MEMORY", "not enough memory"),
    (OSError(5, "Input/output error", "g.npy"), 3, "FILE", "^g.npy: Input/output error$"),
    (KeyboardInterrupt(), 130, "INTERRUPTED", "^interrupted$"),
    (signals.Stopped(signal.SIGTERM), 143, "TERMINATED", "^terminated by SIGTERM$"),
    (AclnnError("no such thing"), 2, "ACLNN_ERR_PARAM_INVALID", "^no such thing$"),
]


@pytest.mark.parametrize(("error", "code", "name", "message"), FAILURES, ids=lambda value: type(value).__name__)
def test_error_boundary(
    error: BaseException, code: int, name: str, message: str, pair: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, error)
    monkeypatch.delenv("POOLGRAD_DEBUG", raising=False)
    result = poolgrad(*avg2d(pair))
    assert (result.code, result.out) == (code, "")
    assert result.error.startswith("poolgrad avg2d: ")
    as_json = poolgrad(*avg2d(pair, "--json"))
    assert as_json.code == code
    assert as_json.err == result.err
    record = as_json.record
    assert record["name"] == name
    assert re.search(message, record["message"])
    assert sorted(os.listdir(pair[0].parent)) == ["g.npy", "x.npy"]


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
def test_a_bug_shows_its_traceback_only_on_request(
    value: str, shown: bool, pair: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, IndexError("off by one"))
    monkeypatch.setenv("POOLGRAD_DEBUG", value)
    result = poolgrad(*avg2d(pair))
    assert result.code == 4
    assert ("Traceback (most recent call last)" in result.err) is shown
    assert result.err.splitlines()[-1].startswith("poolgrad avg2d: this is a bug in poolgrad")


def test_a_refusal_shows_no_traceback_even_on_request(pair: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOLGRAD_DEBUG", "1")
    assert "kernelSize is 0" in poolgrad("avg2d", *pair, "-o", "out.npy", "-k", 0).error


SIGNALLED = """
import os, signal, sys, time
from poolgrad.core.executor import Executor
def run(self, source, sink, workspace=None, progress=None):
    os.kill(os.getpid(), signal.{name})
    time.sleep(20)
Executor.run = run
from poolgrad.cli.start import entry_point
sys.exit(entry_point())
"""


@POSIX
@pytest.mark.parametrize(
    ("name", "code", "json_name"),
    [("SIGINT", 130, "INTERRUPTED"), ("SIGTERM", 143, "TERMINATED"), ("SIGHUP", 129, "TERMINATED")],
)
def test_signal(name: str, code: int, json_name: str, pair: list[Path]) -> None:
    out = pair[0].with_name("out.npy")
    out.write_bytes(b"old")
    start = time.monotonic()
    result = poolgrad_process(*avg2d(pair, "--json"), code=SIGNALLED.format(name=name))
    assert time.monotonic() - start < 10
    assert result.code == code
    assert result.record["name"] == json_name
    assert result.error == f"poolgrad avg2d: {result.record['message']}"
    assert out.read_bytes() == b"old"
    assert sorted(os.listdir(out.parent)) == ["g.npy", "out.npy", "x.npy"]


@POSIX
def test_an_ignored_signal_stays_ignored(pair: list[Path]) -> None:
    """What nohup asks for."""
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SIGNALLED.format(name="SIGHUP")
    code = code.replace("time.sleep(20)", "raise MemoryError")
    assert poolgrad_process(*avg2d(pair), code=code).code == 3


def test_signal_handlers_are_put_back(pair: list[Path]) -> None:
    assert poolgrad(*avg2d(pair)).code == 0
    assert poolgrad(*avg2d(pair, "-k", "0")).code == 2
    for signum in (signal.SIGTERM, signal.SIGINT):
        assert signal.getsignal(signum) is not signals.stop


# ---- Broken output


CLOSED = """
import os, sys
os.close({descriptor})
os.execv(sys.executable, [sys.executable, '-c', {entry!r}, *sys.argv[1:]])
"""


@POSIX
@pytest.mark.parametrize(
    "command", [avg2d, lambda pair: avg2d(pair, "--json"), lambda _: ["products"], lambda _: ["--help"]]
)
def test_closed_stdout_is_quiet(command: Callable[[list[Path]], list[object]], pair: list[Path]) -> None:
    result = poolgrad_process(*command(pair), code=CLOSED.format(descriptor=1, entry=ENTRY))
    assert result == Result(0, "", "")


@POSIX
def test_closed_stderr_keeps_the_exit_code(pair: list[Path]) -> None:
    code = CLOSED.format(descriptor=2, entry=ENTRY)
    assert poolgrad_process(*avg2d(pair), code=code).code == 0
    assert poolgrad_process(*avg2d(pair, "-k", "0"), code=code) == Result(2, "", "")


@POSIX
@pytest.mark.parametrize(
    "command", [avg2d, lambda pair: avg2d(pair, "--json"), lambda _: ["products"], lambda _: ["--help"]]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_broken_pipe_is_quiet(
    unbuffered: str, command: Callable[[list[Path]], list[object]], pair: list[Path]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", ENTRY, *map(str, command(pair))]
    with open(writer, "wb") as pipe:
        env = environment(PYTHONUNBUFFERED=unbuffered)
        done = subprocess.run(words, env=env, stdout=pipe, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_strange_streams_are_left_alone(pair: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main.run([str(word) for word in avg2d(pair, "--json")]) == 0
    assert json.loads(stream.getvalue())["status"] == "ok"

"""The README's commands, examples and tables, against what is installed; and the docstrings' examples."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import poolgrad.cli
import poolgrad.core
from poolgrad.cli.main import COMMANDS, main
from poolgrad.core.products import INT64_MAX, INT64_MIN, RULES, CubeMathType, Rules

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

SET_UP = re.compile(r"python3 -m venv \.venv && \.venv/bin/pip install -q (-e )?\S+ && \.venv/bin/")
"""Set-up by itself would take the network and minutes: `.ci/run` runs these lines as they stand; here what
follows the set-up is run with what is installed already."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


SHELL_LINES = [line for block in blocks("sh") for line in block.splitlines()]


def run_line(line: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell line in a folder that has the fixtures, with this environment's commands found first."""
    (directory / "fixtures").symlink_to(ROOT / "fixtures")
    scripts = sysconfig.get_path("scripts")
    assert shutil.which("poolgrad", path=scripts), "poolgrad is to be installed: pip install -e ."
    environment = {**os.environ, "PATH": scripts + os.pathsep + os.environ["PATH"], "PYTHONIOENCODING": "utf-8"}
    environment.pop("COLUMNS", None)
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=directory,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=60,
    )


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="the README's lines are for a POSIX shell")


def test_there_are_shell_lines_and_both_set_ups() -> None:
    set_ups = [SET_UP.sub("", line) for line in SHELL_LINES if SET_UP.match(line)]
    assert len(set_ups) == 2
    assert set_ups[0].startswith("poolgrad avg2d fixtures/")
    assert set_ups[1] == "python -m pytest -q -n 2"
    assert len(SHELL_LINES) >= 6


@needs_bash
@pytest.mark.parametrize("line", [line for line in SHELL_LINES if "pytest" not in line])
def test_shell_line(line: str, tmp_path: Path) -> None:
    done = run_line(SET_UP.sub("", line), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr
    target = re.search(r"-o ([\w.]+?)(:\w+)?( |$)", line)
    if target:
        assert (tmp_path / target[1]).stat().st_size > 0


@needs_bash
def test_first_command_gives_the_fixture(tmp_path: Path) -> None:
    run_line(SET_UP.sub("", SHELL_LINES[0]), tmp_path)
    expected = ROOT / "fixtures/resnet_stem/float32/grad_input.npy"
    np.testing.assert_array_equal(np.load(tmp_path / "grad_input.npy"), np.load(expected))


@needs_bash
def test_report_shown(tmp_path: Path) -> None:
    """The table is the one that the command above it prints, but for times, and sizes of the workspace."""
    line = next(line for line in SHELL_LINES if line.startswith("poolgrad avg2d"))
    shown, printed = blocks("text")[0], run_line(line, tmp_path).stdout
    assert masked(shown) == masked(printed)


@needs_bash
def test_diagnosis_shown(tmp_path: Path) -> None:
    line = next(line for line in SHELL_LINES if "poolgrad diagnose" in line)
    shown, printed = next(block for block in blocks("text") if "This is " in block), run_line(line, tmp_path).stdout
    assert masked(shown) == masked(printed)


def masked(table: str) -> list[str]:
    """The words of each line, without the frame; figures of times and of the workspace as #."""
    rows = [" ".join(re.findall(r"[^\s│┃|─━]+", row)) for row in table.splitlines()]
    return [
        re.sub(r"\d[\d.,]*( ms\b| s\b| GB/s)?", "#", row) if re.search(r" s\b| ms\b|workspace", row) else row
        for row in rows
    ]


@needs_bash
@pytest.mark.parametrize(("index", "extra"), [(0, "-p 1"), (1, "-p 0")], ids=["ok", "error"])
def test_json_shown(index: int, extra: str, tmp_path: Path) -> None:
    fixture = "fixtures/resnet_stem/float32"
    call = f"poolgrad avg2d {fixture}/grad_output.npy {fixture}/self.npy -o out.npy -k 3 -s 2 {extra} --json"
    shown, printed = json.loads(blocks("json")[index]), json.loads(run_line(call, tmp_path).stdout)
    assert fixed_part(shown) == fixed_part(printed)


def fixed_part(record: Any, key: str = "") -> Any:
    """The record without paths and measured values, with every key."""
    if isinstance(record, dict):
        return {key: fixed_part(value, key) for key, value in record.items()}
    measured = isinstance(record, float) or key in ("path", "workspace_bytes")
    return type(record).__name__ if measured else record


def test_python_examples() -> None:
    example = "\n".join(blocks("python"))
    test = doctest.DocTestParser().get_doctest(example, {}, "README", "README.md", 0)
    assert len(test.examples) >= 10
    report: list[str] = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.failed == 0, "".join(report)


def modules() -> list[str]:
    packages = (poolgrad.core, poolgrad.cli)
    return [
        info.name for package in packages for info in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
    ]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), report=False)
    assert result.failed == 0


def test_every_public_function_has_an_example() -> None:
    for name in poolgrad.core.__all__:
        public = getattr(poolgrad.core, name)
        if callable(public) and not isinstance(public, type):
            assert ">>>" in (public.__doc__ or ""), name


def test_product_table() -> None:
    header = ["`--product`", "dtype", *(f"{int(mode)} {mode.name}" for mode in CubeMathType), "`--divisor-override`"]
    assert table_under("`--product` | dtype") == [header, *expected_products()]


def table_under(headings: str) -> list[list[str]]:
    """The cells of the table whose headings start so, without the rule below them."""
    lines = README.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {headings} |"))
    end = next(index for index in range(start, len(lines)) if not lines[index].startswith("|"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]
    return [rows[0], *rows[2:]]


def expected_products() -> list[list[str]]:
    """A row for the products with the same rules, and each dtype that they take."""
    groups: list[tuple[Rules | None, list[str]]] = []
    for product, rules in RULES.items():
        if groups and rules is not None and groups[-1][0] == rules:
            groups[-1][1].append(f"`{product.value}`")
        else:
            groups.append((rules, [f"`{product.value}`"]))
    rows = []
    for rules, names in groups:
        if rules is None:
            rows.append([", ".join(names), "neither operator is supported", *[""] * 5])
            continue
        low, high = rules.divisor_override
        span = "any int64" if (low, high) == (INT64_MIN, INT64_MAX) else f"{low} to {high}"
        for dtype, outcomes in rules.precision.items():
            meanings = ["rejected" if outcome is None else outcome.value for outcome in outcomes]
            rows.append([", ".join(names), dtype, *meanings, span])
    return rows


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_listed(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    flags = [flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
    listed = re.findall(r"`(-[\w-]+)`", README)
    assert [flag for flag in flags if flag.startswith("-") and flag not in listed] == []
    assert f"poolgrad {name}" in README


def test_every_module_has_its_room() -> None:
    table = "\n".join(cell for row in table_under("room") for cell in row)
    files = [path.relative_to(ROOT).as_posix() for folder in ("core", "cli") for path in (ROOT / folder).glob("*.py")]
    assert [file for file in files if not file.endswith("__init__.py") and f"`{file}`" not in table] == []


def test_python_version_named_is_the_least_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    least = project["requires-python"].removeprefix(">=")
    assert f"Python {least} or later" in README


def test_the_benchmark_of_the_readme_measures(tmp_path: Path) -> None:
    """One row, whatever the figures are; it is the project's own Python that the README names."""
    row = "avg2d (32,1024,14,14) k2 s2 float32"
    command = [sys.executable, str(ROOT / "tests/bench/run.py"), "--quick", "--only=memory", "--rows", row]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "f.json")], capture_output=True, check=False, timeout=60
    )
    assert done.returncode in (0, 1), done.stderr
    first, *_ = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert first["name"] == row
    assert {"poolgrad", "copy"} <= set(first["times"])

"""Odd names, directories, locales, environments and streams: the same results, or one line on what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.command_line import ENTRY, Result, environment, load, poolgrad, poolgrad_process, save, zeros

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
ROOT = Path(__file__).resolve().parent.parent

GRAD_OUTPUT = np.array([[[[4, 8]]]], np.float32)
GRAD_INPUT = [[[[1, 1, 2, 2], [1, 1, 2, 2]]]]

NAMES = [
    "with space",
    " leading and trailing ",
    "co:lon",
    "new\nline",
    "tab\tand\rreturn",
    "ünï 中文 \U0001f600",
    "-k",
    "--json",
    "-",
    "*?[a]{b}",
    "$HOME `id` \"quoted' \\",
    "[bold]markup",
    ".hidden",
    "..",
    "~",
    "%s{0}",
    "n" * 200,
]


def inputs(folder: Path, name: str = "", suffix: str = ".npy") -> tuple[Path, Path]:
    """gradOutput and self of a 2x2 pooling over 2x4."""
    grad_output = save(folder / f"{name}g{suffix}", GRAD_OUTPUT)
    return grad_output, save(folder / f"{name}x{suffix}", np.zeros((1, 1, 2, 4), np.float32))


def is_right(path: Path) -> bool:
    return bool(load(path).tolist() == GRAD_INPUT)


def run_in(folder: Path, *arguments: object, env: dict[str, str] | None = None, code: str = ENTRY) -> Result:
    """Run in a process whose working directory is `folder`, and not searched for modules: as the console script."""
    words = [item if isinstance(item, bytes) else os.fsencode(str(item)) for item in arguments]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        cwd=folder,
        env=environment() if env is None else env,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


# ---- Names


@POSIX
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names(tmp_path: Path, name: str, suffix: str) -> None:
    """As input and as output, absolute paths, which no dash begins."""
    grad_output, own = inputs(tmp_path, name, suffix)
    out = tmp_path / f"{name} out{suffix}"
    result = poolgrad("avg2d", grad_output, own, "-o", out, "-k", 2, "--json")
    assert result.code == 0
    assert result.record["grad_output"]["path"] == str(grad_output)
    assert result.record["grad_input"]["path"] == str(out)
    assert is_right(out)
    shown = poolgrad("adaptive2d", grad_output, own, "-o", out)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.replace("\n", "").isprintable()
    record = poolgrad("inspect", out, grad_output, "--json", "--stats").record
    assert [file["tensors"][0]["stats"]["max"] for file in record["files"]] == [2, 8]


@POSIX
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_relative_names_behind_a_separator(
    tmp_path: Path, name: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--` ends the flags; an output is a flag's value, which may begin with a dash."""
    inputs(tmp_path, name, suffix)
    monkeypatch.chdir(tmp_path)
    out = f"{name}out{suffix}"
    result = poolgrad("avg2d", "-k", 2, f"--output={out}", "--", f"{name}g{suffix}", f"{name}x{suffix}")
    assert (result.code, result.err) == (0, "")
    assert is_right(tmp_path / out)
    result = poolgrad("adaptive2d", "-q", "-o", out, "--", f"{name}g{suffix}", f"{name}x{suffix}")
    assert result == Result(0, "", "")
    result = poolgrad("inspect", "--json", "--", out)
    assert result.record["files"][0]["path"] == out
    missing = poolgrad("inspect", "--", f"{name}missing{suffix}")
    assert missing.code == 3
    assert missing.error.isprintable()


def test_flags_behind_a_separator_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = poolgrad("inspect", "--", "--json", "--stats")
    assert (result.code, result.err.count("\n")) == (3, 1)
    assert result.out.startswith("--json\nFAULT: --json: expected a .npy")


@POSIX
def test_names_that_are_no_text(tmp_path: Path) -> None:
    """Bytes that no encoding gives."""
    inputs(tmp_path)
    for name in map(os.fsdecode, (b"\xff", b"\xc3", b"a\x80b")):
        os.link(tmp_path / "g.npy", tmp_path / f"{name}.npy")
        out = tmp_path / f"{name}out.npy"
        result = poolgrad("adaptive2d", tmp_path / f"{name}.npy", tmp_path / "x.npy", "-o", out)
        assert (result.code, result.err) == (0, "")
        assert is_right(out)
        assert poolgrad("inspect", out, "--json").record["files"][0]["path"] == str(out)
    result = run_in(tmp_path, "inspect", b"\xffout.npy", b"\xfenone.npy")
    assert (result.code, result.error) == (
        3,
        r"poolgrad inspect: cannot read \udcfenone.npy: No such file or directory",
    )
    assert result.out.startswith(r"\udcffout.npy")


def test_a_file_with_a_separator_in_its_name(tmp_path: Path) -> None:
    """A file of the whole name wins over a tensor in another; a new one cannot be told, and is a tensor's name."""
    path = save(tmp_path / "a.safetensors:b.npy", GRAD_OUTPUT)
    assert poolgrad("inspect", path, "--json").record["files"][0]["path"] == str(path)
    out = tmp_path / "new.safetensors:b.npy"
    assert poolgrad("adaptive2d", path, path, "-o", out, "-q") == Result(0, "", "")
    assert poolgrad("inspect", out, "--json").record["files"][0]["tensors"][0]["name"] == "b.npy"


def test_tensor_names_with_colons_and_dashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grad_output, own = inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("-dx", "a:b", "a.safetensors:b", " ", "\n", "ü"):
        out = f"-out.safetensors:{name}"
        assert poolgrad("adaptive2d", grad_output, own, "-o", out, "-q") == Result(0, "", "")
        assert load(tmp_path / "-out.safetensors", name=name).tolist() == GRAD_INPUT
        result = poolgrad("inspect", "--json", "--", out)
        assert result.record["files"][0]["tensors"][0]["name"] == name


# ---- Directories


def test_relative_paths_after_a_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run is where the process is then."""
    for number, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        folder.mkdir()
        inputs(folder)
        save(folder / "g.npy", GRAD_OUTPUT * (number + 1))
        monkeypatch.chdir(folder)
        assert poolgrad("adaptive2d", "g.npy", "x.npy", "-o", "out.npy", "-q").code == 0
        assert poolgrad("adaptive2d", "../a/g.npy", "./x.npy", "-o", "../shared.npy", "-q").code == 0
        assert poolgrad("inspect", "out.npy", "--stats", "--json").record["files"][0]["tensors"][0]["stats"][
            "max"
        ] == (2 * (number + 1))
    assert is_right(tmp_path / "a" / "out.npy")
    assert not is_right(tmp_path / "b" / "out.npy")
    assert is_right(tmp_path / "shared.npy")


@POSIX
def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    """Absolute paths do not need one; relative ones are one line."""
    grad_output, own = inputs(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.rmdir({str(gone)!r}); {ENTRY}"
    assert run_in(gone, "adaptive2d", grad_output, own, "-o", tmp_path / "out.npy", "-q", code=code) == Result(
        0, "", ""
    )
    assert is_right(tmp_path / "out.npy")
    for arguments in (
        ["inspect", "g.npy"],
        ["adaptive2d", grad_output, own, "-o", "out.npy"],
        ["inspect", grad_output],
    ):
        gone.mkdir()
        result = run_in(gone, *arguments, code=code)
        assert result.code == (0 if arguments[-1] == grad_output else 3)
        assert result.err.count("\n") == (result.code != 0)
        assert "No such file or directory" in result.err or result.code == 0 or "no directory" in result.err


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


# What an unprivileged user may not be able to import is imported before.
UNPRIVILEGED = """
import json, os, sys
import poolgrad.cli.inspect, poolgrad.cli.adaptive2d, poolgrad.core.statistics, rich.table
from poolgrad.cli.main import run
run(["inspect", "g.npy", "--stats"])
run(["adaptive2d", "g.npy", "x.npy", "-q", "-o", "../warm.npy"])
os.unlink("../warm.npy")
print("----", flush=True)
if os.geteuid() == 0:  # root may write everything
    os.setgid(65534)
    os.setuid(65534)
sys.exit(run(sys.argv[1:]))
"""


@POSIX
def test_run_from_a_read_only_directory(public: Path) -> None:
    folder = public / "locked"
    folder.mkdir()
    inputs(folder)
    folder.chmod(0o555)
    try:
        words = ["adaptive2d", "g.npy", "x.npy", "-q", "-o"]
        for out in (public / "out.npy", "../out2.npy"):
            result = run_in(folder, *words, out, code=UNPRIVILEGED)
            assert (result.code, result.out.partition("----\n")[2], result.err) == (0, "", "")
            assert is_right(folder / out)
        result = run_in(folder, *words, "out.npy", code=UNPRIVILEGED)
        assert result.code == 3
        assert result.error == "poolgrad adaptive2d: cannot write out.npy: Permission denied"
        result = run_in(folder, "inspect", "g.npy", "--stats", code=UNPRIVILEGED)
        assert (result.code, result.err) == (0, "")
        assert "max 8" in result.out.partition("----\n")[2]
        assert sorted(os.listdir(folder)) == ["g.npy", "x.npy"]
    finally:
        folder.chmod(0o777)


# ---- Environments


C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@POSIX
@pytest.mark.parametrize("env", [C_LOCALE, {"LC_ALL": "C"}], ids=str)
def test_a_locale_of_c(tmp_path: Path, env: dict[str, str]) -> None:
    """Names keep their bytes; what the terminal's encoding lacks is escaped."""
    grad_output, own = inputs(tmp_path, "ü 中")
    out = tmp_path / "é.npy"
    result = poolgrad_process("avg2d", grad_output, own, "-o", out, "-k", 2, "--json", **env)
    assert (result.code, result.err) == (0, "")
    assert is_right(out)
    name = os.path.basename(result.record["grad_output"]["path"])
    assert name.encode("utf-8", "surrogateescape") == "ü 中g.npy".encode()
    result = poolgrad_process("inspect", grad_output, tmp_path / "fehlt ö.npy", "--stats", **env)
    assert result.code == 3
    assert result.error.isprintable()
    assert "max 8" in result.out


def test_c_locale_prints_ascii(tmp_path: Path) -> None:
    path = save(tmp_path / "ü.npy", GRAD_OUTPUT)
    result = poolgrad_process("inspect", path, **C_LOCALE)
    assert result.out.isascii()
    assert r"/\udcc3\udcbc.npy" in result.out or r"\xfc.npy" in result.out


def test_an_encoding_that_lacks_letters(tmp_path: Path) -> None:
    """What cannot be printed is escaped, also where Python would raise an error."""
    path = save(tmp_path / "ü 中.npy", GRAD_OUTPUT)
    result = poolgrad_process("inspect", path, tmp_path / "fehlt é.npy", PYTHONIOENCODING="ascii:strict")
    assert result.code == 3
    assert r"\xfc \u4e2d.npy" in result.out
    assert r"fehlt \xe9.npy" in result.error


@POSIX
@pytest.mark.parametrize("kept", [[], ["PATH"]], ids=str)
def test_without_an_environment(tmp_path: Path, kept: list[str]) -> None:
    """HOME is not needed, nor is anything else but what finds the package."""
    inputs(tmp_path)
    env = {name: os.environ[name] for name in (*kept, "PYTHONPATH") if name in os.environ}
    result = run_in(tmp_path, "adaptive2d", "g.npy", "x.npy", "-o", "out.npy", env=env)
    assert (result.code, result.err) == (0, "")
    assert is_right(tmp_path / "out.npy")
    result = run_in(tmp_path, "inspect", "g.npy", "--stats", env=env)
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize("variable", ["HOME=/nowhere", "HOME=", "TERM=dumb", "COLUMNS=x", "COLUMNS=1", "LINES=0"])
def test_odd_variables(tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*variable.split("="))
    grad_output, own = inputs(tmp_path)
    for words in (["adaptive2d", grad_output, own, "-o", tmp_path / "out.npy"], ["inspect", own], ["products"]):
        result = poolgrad(*words)
        assert (result.code, result.err) == (0, "")
        assert result.out


# ---- Streams


CLOSED = """
import os, sys
os.close({descriptor})
os.execv(sys.executable, [sys.executable, '-c', {entry!r}, *sys.argv[1:]])
"""


@POSIX
@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_closed_stream(tmp_path: Path, descriptor: int) -> None:
    """A file opened in the place of a closed stream does not get what is printed."""
    grad_output, own = inputs(tmp_path)
    before = grad_output.read_bytes()
    code, out = CLOSED.format(descriptor=descriptor, entry=ENTRY), tmp_path / "out.npy"
    for words in (["inspect", "--stats", "--json", grad_output], ["adaptive2d", grad_output, own, "-o", out]):
        result = poolgrad_process(*words, code=code)
        assert (result.code, result.err, bool(result.out)) == (0, "", descriptor != 1)
    assert is_right(out)
    result = poolgrad_process("inspect", grad_output, tmp_path / "missing.npy", code=code)
    assert (result.code, result.err.count("\n"), bool(result.out)) == (3, int(descriptor != 2), descriptor != 1)
    assert grad_output.read_bytes() == before


def into_broken_pipe(*arguments: object, **changes: str) -> tuple[int, bytes]:
    """Run with stdout a pipe that nobody reads; the exit code and stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", ENTRY, *map(str, arguments)]
    with open(writer, "wb") as pipe:
        env = environment(**changes)
        done = subprocess.run(words, env=env, stdout=pipe, stderr=subprocess.PIPE, timeout=60, check=False)
    return done.returncode, done.stderr


@POSIX
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("more", [[], ["--json"]], ids=str)
def test_a_broken_pipe_is_quiet(tmp_path: Path, more: list[str], unbuffered: str) -> None:
    path = zeros(tmp_path / "a.npy", (1, 1, 2, 2))
    words = ["inspect", *[path] * 30, *more]
    assert into_broken_pipe(*words, PYTHONUNBUFFERED=unbuffered) == (0, b"")


@POSIX
def test_head_closes_the_pipe(tmp_path: Path) -> None:
    """Read a line and stop, as `head` does, while more than a pipe holds is written."""
    path = zeros(tmp_path / "a.npy", (1, 1, 2, 2))
    words = [sys.executable, "-c", ENTRY, "inspect", *[str(path)] * 700]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().rstrip().endswith(b"a.npy")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


@POSIX
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_broken_pipe_hides_no_failure(tmp_path: Path, more: list[str]) -> None:
    one, other = (save(tmp_path / f"{value}.npy", np.full((1, 1, 2, 2), value, np.float32)) for value in (1, 2))
    assert into_broken_pipe("compare", one, other, *more) == (1, b"")


@POSIX
def test_a_directory_that_has_vanished(tmp_path: Path) -> None:
    like = save(tmp_path / "x.npy", np.zeros((1, 1, 2, 2), np.float32))
    code = f"import os; os.mkdir({str(tmp_path / 'd')!r}); os.chdir({str(tmp_path / 'd')!r}); os.rmdir('../d')\n"
    result = poolgrad_process("adaptive2d", like, like, "-o", "out.npy", code=code + ENTRY)
    assert (result.code, result.error) == (3, "poolgrad adaptive2d: cannot write out.npy: No such file or directory")

"""Files made to do harm: mutated ones by the hundred, and the kinds of harm one by one.

The long form is `tests/long/hostile_headers.py`, with tens of thousands.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.command_line import ENTRY, Result, poolgrad, poolgrad_process, save, zeros
from tests.long import hostile_headers
from tests.mutations import NAMES, bomb

from poolgrad.cli.file_errors import printable, shorten

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limit of address space")


@LINUX
def test_mutated_files() -> None:
    seen = hostile_headers.check(1500, seed=2)
    assert seen["broken"] == []
    assert sum(seen["codes"].values()) == 1500
    assert seen["codes"][0] > 50, "hardly a mutated file was sound enough to be computed with"
    assert seen["codes"][3] > 1000
    assert seen["codes"][2] > 0
    assert len(seen["kinds"]) >= 19, "some mutations never ran"
    assert seen["grown"] < 64 << 20


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (Result(4, "", "poolgrad: this is a bug\n"), "exit code 4"),
        (Result(3, "", "one\ntwo\n"), "stderr"),
        (Result(3, "", ""), "stderr"),
        (Result(0, "", "warning\n"), "stderr"),
        (Result(3, "", "Traceback (most recent call last)\n"), "said"),
        (Result(3, "", "not enough memory\n"), "said"),
        (Result(3, "", "a\x1b[31m\n"), "control"),
        (Result(0, "a\x9b2J\n", ""), "control"),
    ],
)
def test_the_judge_is_strict(result: Result, fault: str) -> None:
    assert any(fault in found for found in hostile_headers._judge(result.code, result.out, result.err, as_json=False))


def test_the_judge_wants_one_line_of_json() -> None:
    good = '{"status":"ok"}\n'
    assert list(hostile_headers._judge(0, good, "", as_json=True)) == []
    for bad in ("", good * 2, "{\n", '{"status":"error"}\n', "x\n"):
        assert len(list(hostile_headers._judge(0, bad, "", as_json=True))) == 1


# ---- One by one


def refusal(path: Path | str, *more: object) -> str:
    """The one line of a refused file, the same for every command."""
    good = zeros(Path(str(path).partition(".safetensors:")[0]).parent / "good.npy", (1, 1, 2, 2))
    commands: list[list[object]] = [
        ["inspect", path, "--stats"],
        ["avg2d", path, good, "-k", 1, "-o", good.with_name("out.npy")],
        ["adaptive2d", good, path, "-o", good.with_name("out.npy")],
    ]
    reasons = set()
    for command in commands:
        result = poolgrad(*command, *more)
        assert result.code == 3
        assert not good.with_name("out.npy").exists()
        reasons.add(result.error.partition(": ")[2])
    assert len(reasons) == 1
    return reasons.pop()


def with_header(path: Path, text: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def npy(path: Path, text: bytes, data: bytes = b"", version: int = 1) -> Path:
    field = struct.pack("<H" if version == 1 else "<I", len(text))
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + field + text + data)
    return path


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("__metadata__",)], ids=ascii)
def test_names_of_tensors(tmp_path: Path, name: str) -> None:
    """Any text may be a name; it is shown, picked and listed without a control character."""
    entry = {"dtype": "F32", "shape": [1, 1, 2, 2], "data_offsets": [0, 16]}
    text = json.dumps({name: entry}, ensure_ascii=False).encode()
    path = with_header(tmp_path / "a.safetensors", text, np.ones(4, np.float32).tobytes())
    good = zeros(tmp_path / "good.npy", (1, 1, 2, 2))
    runs = [
        poolgrad("inspect", path),
        poolgrad("inspect", path, "--json"),
        poolgrad("adaptive2d", path, good, "-o", tmp_path / "out.npy"),
        poolgrad("adaptive2d", path, good, "-o", tmp_path / "out.npy", "--json"),
        poolgrad("adaptive2d", f"{path}:none such", good, "-o", tmp_path / "out.npy"),
    ]
    assert [run.code for run in runs] == [0, 0, 0, 0, 3]
    for run in runs:
        assert (run.out + run.err).replace("\n", "").isprintable()
    assert shorten(name, 1000) in runs[0].out
    assert runs[1].record["files"][0]["tensors"][0]["name"] == name
    assert runs[3].record["grad_output"]["name"] == name
    assert shorten(name, 60) in runs[4].error
    if "\0" not in name and len(name) < 1000:
        assert poolgrad("inspect", f"{path}:{name}").code == 0


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX file names")
@pytest.mark.parametrize(
    "name", ["\x1b[31mred", "\x1b]0;title\x07", "two\nlines", "\x9b2J", "\u202egnp", "\udcff", "\x7f"]
)
def test_names_of_files(tmp_path: Path, name: str) -> None:
    """In a table, in JSON and in errors about files that are there, broken or missing."""
    path = zeros(tmp_path / f"{name}.npy", (1, 1, 2, 2))
    broken = tmp_path / f"{name}.safetensors"
    broken.write_bytes(b"{}")
    runs: list[Result] = []
    for more in ([], ["--json"]):
        runs += [
            poolgrad("inspect", path, broken, *more),
            poolgrad("adaptive2d", path, path, "-o", tmp_path / f"out{name}.npy", *more),
            poolgrad("adaptive2d", path, broken, "-o", tmp_path / "out.npy", *more),
            poolgrad("adaptive2d", path, f"missing{name}.npy", "-o", tmp_path / "out.npy", *more),
            poolgrad("adaptive2d", path, path, "-o", tmp_path / name / "out.npy", *more),
            poolgrad("avg2d", path, path, "-o", tmp_path / "out.npy", "-k", name, *more),
        ]
    assert [run.code for run in runs] == [3, 0, 3, 3, 3, 2] * 2
    for run in runs:
        assert (run.out + run.err).replace("\n", "").isprintable()
        assert run.err.count("\n") == (run.code != 0)
    assert printable(f"{name}.npy") in runs[0].out
    assert runs[6].record["files"][0]["path"] == str(path)


@pytest.mark.parametrize("limit", ["0", "4300"])
def test_an_integer_of_a_million_digits(tmp_path: Path, limit: str) -> None:
    """Also where Python's own limit on digits is off: converting them would take minutes."""
    digits = b"9" * 1_000_000
    text = b'{"a":{"dtype":"F32","shape":[' + digits + b'],"data_offsets":[0,4]}}'
    path = with_header(tmp_path / "a.safetensors", text, bytes(4))
    start = time.monotonic()
    result = poolgrad_process("inspect", path, PYTHONINTMAXSTRDIGITS=limit)
    assert time.monotonic() - start < 5
    assert result.code == 3
    assert result.error.endswith("not valid JSON: an integer of 1000000 digits")


def test_a_shape_of_very_many_axes(tmp_path: Path) -> None:
    """Their product would have 3 million bits."""
    shape = b",".join([str(2**63 - 1).encode()] * 50_000)
    text = b'{"a":{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[0,4]}}'
    path = with_header(tmp_path / "a.safetensors", text, bytes(4))
    start = time.monotonic()
    result = poolgrad("inspect", path)
    assert time.monotonic() - start < 5
    assert result.code == 3
    assert len(result.error) < 1000
    assert "impossible shape [9223372036854775807, 9223" in result.error


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(
    "opening", [b"(", b"[", b"{1:", b"-", b"not ", b"1+", b"f(", b"lambda:", b"0x" + b"f" * 9, b"\\\n"]
)
def test_deep_npy_headers(tmp_path: Path, opening: bytes, version: int) -> None:
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': " + (opening * 9000)[:9900]
    path = npy(tmp_path / "a.npy", text, bytes(16), version)
    assert "cannot understand the .npy header at byte" in refusal(path)


@pytest.mark.parametrize("depth", [500, 5000, 500_000])
@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"":'])
def test_deep_json(tmp_path: Path, opening: bytes, depth: int) -> None:
    message = refusal(with_header(tmp_path / "a.safetensors", b'{"a":' + opening * depth))
    over_a_megabyte = depth * len(opening) > 1 << 20
    assert ("more lists, objects or numbers than" if over_a_megabyte else "header is not valid JSON: ") in message


def test_closed_deep_json_is_refused_too(tmp_path: Path) -> None:
    for depth in (50, 900, 100_000):
        text = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
        message = refusal(with_header(tmp_path / "a.safetensors", text))
        assert "nested too deeply at byte 15" in message or "'a' lacks a proper dtype" in message


@LINUX
@pytest.mark.parametrize("claim", ["npy shape", "npy header", "safetensors header", "safetensors shape", "dtype"])
def test_no_memory_is_taken_on_a_headers_word(tmp_path: Path, claim: str) -> None:
    """What is claimed is 90 MB to 6 GB; the process may take 8 MB over what an empty file takes."""
    big: dict[str, Callable[[], Path]] = {
        "npy shape": lambda: npy(
            tmp_path / "a.npy", b"{'descr':'<f4','fortran_order':False,'shape':(1,1,40000,40000)}"
        ),
        "npy header": lambda: npy(tmp_path / "a.npy", b"", b"", version=2),
        "safetensors header": lambda: with_header(tmp_path / "a.safetensors", b"{}"),
        "safetensors shape": lambda: with_header(
            tmp_path / "a.safetensors",
            b'{"a":{"dtype":"F32","shape":[1,1,40000,40000],"data_offsets":[0,6400000000]}}',
        ),
        "dtype": lambda: npy(tmp_path / "a.npy", b"{'descr':'<U500000000','fortran_order':False,'shape':(1,1,1,1)}"),
    }
    path = big[claim]()
    content = bytearray(path.read_bytes())
    if claim == "npy header":
        content[8:12] = b"\xff\xff\xff\x7f"
    if claim == "safetensors header":
        content[:8] = struct.pack("<Q", 90_000_000)
    path.write_bytes(content)
    empty = tmp_path / f"empty{path.suffix}"
    empty.write_bytes(b"")
    assert peak_memory(path) - peak_memory(empty) < 8 << 10


def peak_memory(path: Path) -> int:
    """KiB that a process takes to refuse the file."""
    report = "import atexit, numpy, resource as r, sys; "
    report += "atexit.register(lambda: print(r.getrusage(0).ru_maxrss, file=sys.stderr)); "
    result = poolgrad_process("inspect", path, "--stats", code=report + ENTRY)
    message, peak = result.err.splitlines()
    assert result.code == 3
    assert str(path) in message
    return int(peak)


def test_nothing_is_executed(tmp_path: Path) -> None:
    """Neither a pickle nor an expression, in whichever part of a header."""
    made = tmp_path / "made"
    call = f"__import__('os').mkdir('{made}')".encode()
    (tmp_path / "pickle.npy").write_bytes(bomb(str(made)))
    save(tmp_path / "object.npy", np.array([[None]], dtype=object))
    texts = [
        b"{'descr': " + call + b", 'fortran_order': False, 'shape': (1,)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + call + b",)}",
        b"{'descr': '<f4', 'fortran_order': " + call + b", 'shape': (1,)}",
        b"{'descr': [('a', " + call + b")], 'fortran_order': False, 'shape': (1,)}",
        b"{**" + call + b", 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
        call,
        b"f'{" + call + b"}'",
    ]
    for number, text in enumerate(texts):
        npy(tmp_path / f"{number}.npy", text, bytes(4))
    for path in sorted(tmp_path.glob("*.npy")):
        if path.name != "good.npy":
            refusal(path)
    assert not made.exists()
    np.load(tmp_path / "pickle.npy", allow_pickle=True)
    assert made.exists(), "the bomb is a dud"


STUFFED = {
    "lists": b'{"a":[' + b"[]," * 8_000_000 + b"[]]}",
    "objects": b'{"a":[' + b"{}," * 8_000_000 + b"{}]}",
    "numbers": b'{"a":{"dtype":"F32","data_offsets":[0,4],"shape":[' + b"1," * 12_000_000 + b"1]}}",
    "lists behind names": b"{" + b'"[\\"":1,' * 200_000 + b'"a":[' + b"[]," * 7_000_000 + b"[]]}",
}


@LINUX
@pytest.mark.parametrize("kind", STUFFED)
def test_a_header_takes_no_multiple_of_its_size(tmp_path: Path, kind: str) -> None:
    """24 MB, which as Python's lists, objects and integers would take 180 to 1,500 MB."""
    path = with_header(tmp_path / "a.safetensors", STUFFED[kind])
    limit = "import resource as r; r.setrlimit(r.RLIMIT_DATA, (150_000_000, 150_000_000))\n"
    result = poolgrad_process("inspect", path, code=limit + ENTRY)
    expected = f"poolgrad inspect: {path}: its header has more lists, objects or numbers than tensors have"
    assert (result.code, result.error) == (3, expected)


def test_names_full_of_brackets_are_taken(tmp_path: Path) -> None:
    entries = {
        f"layers[{n}][0][1][2]{{3,4}}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
        for n in range(12_000)
    }
    text = json.dumps({"__metadata__": {"[": "{,"}, **entries}).encode()
    assert len(text) > 1 << 20
    path = with_header(tmp_path / "a.safetensors", text, bytes(48_000))
    result = poolgrad("inspect", f"{path}:layers[7][0][1][2]{{3,4}}")
    assert (result.code, "float32 (1), 4 bytes" in result.out) == (0, True)


@LINUX
def test_a_header_for_which_there_is_no_memory(tmp_path: Path) -> None:
    text = b'{"a":[' + b'"ab",' * 3_000_000 + b'"x"]}'
    path = with_header(tmp_path / "a.safetensors", text)
    limit = "import resource as r; r.setrlimit(r.RLIMIT_DATA, (150_000_000, 150_000_000))\n"
    result = poolgrad_process("inspect", path, code=limit + ENTRY)
    expected = f"poolgrad inspect: {path}: there is too little memory for its header of {len(text)} bytes"
    assert (result.code, result.error) == (3, expected)


@LINUX
def test_a_large_sparse_header_takes_its_size_and_no_more(tmp_path: Path) -> None:
    """The largest header that the format allows, of which nothing is on the disk."""
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_000) + b"{")
        file.truncate(8 + 100_000_000)
    start = time.monotonic()
    result = poolgrad_process("inspect", path)
    assert time.monotonic() - start < 5
    assert (result.code, "not valid JSON" in result.error) == (3, True)

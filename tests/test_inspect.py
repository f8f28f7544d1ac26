"""`poolgrad inspect`: what it says of sound and of damaged files, and the figures against exact ones."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.command_line import (
    ENTRY,
    Result,
    environment,
    on_terminal,
    poolgrad,
    poolgrad_process,
    save,
    save_safetensors,
)
from tests.test_cli import POSIX, modules_after

from poolgrad.cli import contents
from poolgrad.core import statistics
from poolgrad.core.statistics import Figures, Statistics, bits_dtype

Array = NDArray[Any]

ROOT = Path(__file__).resolve().parent.parent
FLOATS = ["float16", "bfloat16", "float32", "float64"]
SMALL_FLOATS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
SMALL_FLOATS = [name for name in SMALL_FLOATS if hasattr(ml_dtypes, name)]  # Older versions lack some.
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
SAFETENSORS = {
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
    "int64": "I64",
    "bfloat16": "BF16",
    "float64": "F64",
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def tensors_of(*arguments: object) -> list[dict[str, Any]]:
    """The tensors in the JSON of one sound file."""
    result = poolgrad("inspect", "--json", *arguments)
    assert (result.code, result.err) == (0, "")
    assert set(result.record) == {"schema", "status", "files"}
    assert (result.record["schema"], result.record["status"]) == (1, "ok")
    (file,) = result.record["files"]
    assert file["fault"] is None
    assert isinstance(file["tensors"], list)
    return file["tensors"]


def stats_of(path: Path, *arguments: object) -> dict[str, Any]:
    (tensor,) = tensors_of(path, "--stats", *arguments)
    assert isinstance(tensor["stats"], dict)
    return tensor["stats"]


def raw_safetensors(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


# ---- What the header says


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize("code", ["f2", "f4", "f8", "i2", "u4", "i8", "c8"])
def test_npy(tmp_path: Path, code: str, byte_order: str, order: Any) -> None:
    array = np.zeros((2, 3, 5), byte_order + code, order=order)
    path = save(tmp_path / "a.npy", array)
    (tensor,) = tensors_of(path)
    assert tensor == {
        "name": None,
        "dtype": array.dtype.name,
        "stored_dtype": byte_order + code,
        "shape": [2, 3, 5],
        "bytes": array.nbytes,
        "offset": path.stat().st_size - array.nbytes,
        "byte_order": "little" if byte_order == "<" else "big",
        "order": order,
        "stats": None,
    }


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8"])
def test_bytes_have_no_byte_order(tmp_path: Path, dtype: str) -> None:
    (tensor,) = tensors_of(save(tmp_path / "a.npy", np.zeros((2, 2), dtype)))
    assert (tensor["dtype"], tensor["byte_order"]) == (dtype, None)
    code = {"bool": "BOOL", "int8": "I8", "uint8": "U8"}[dtype]
    (tensor,) = tensors_of(raw_safetensors(tmp_path / "a.safetensors", {"a": entry([4], 0, 4, code)}, bytes(4)))
    assert (tensor["dtype"], tensor["byte_order"]) == (dtype, None)
    assert "endian" not in poolgrad("inspect", tmp_path / "a.npy").out


def test_bfloat16_is_recognised(tmp_path: Path) -> None:
    array = np.ones((2, 2), ml_dtypes.bfloat16)
    (tensor,) = tensors_of(save(tmp_path / "a.npy", array))
    assert (tensor["dtype"], tensor["stored_dtype"], tensor["byte_order"]) == ("bfloat16", "<V2", "little")
    (tensor,) = tensors_of(save(tmp_path / "a.safetensors", array))
    assert (tensor["dtype"], tensor["stored_dtype"]) == ("bfloat16", "BF16")
    for descr, order in {"<V2": "little", "|V2": "little", "bfloat16": "little", ">V2": "big"}.items():
        header = NPY.replace(b"<f4", descr.encode()).ljust(127) + b"\n"
        (tmp_path / "b.npy").write_bytes(header + array.tobytes())
        (tensor,) = tensors_of(tmp_path / "b.npy")
        assert (tensor["dtype"], tensor["stored_dtype"], tensor["byte_order"]) == ("bfloat16", descr, order)
    path = save(tmp_path / "bits.npy", array.view(np.uint16))
    assert tensors_of(path)[0]["dtype"] == "uint16"
    assert tensors_of(path, "--bf16-bits")[0]["dtype"] == "bfloat16"
    assert stats_of(path, "--bf16-bits")["mean"] == 1.0
    assert stats_of(path)["mean"] == 0x3F80
    assert "bfloat16 stored as <V2 (2, 2), 8 bytes" in poolgrad("inspect", tmp_path / "a.npy").out


def test_safetensors_and_one_of_its_tensors(tmp_path: Path) -> None:
    arrays: dict[str, Array] = {"b": np.zeros((2, 3), np.float32), "layer:0": np.zeros((), np.float16)}
    arrays["a"] = np.zeros((0, 7), np.int32)
    path = save_safetensors(tmp_path / "a.safetensors", arrays)
    start = path.stat().st_size - 26
    found = [(tensor["name"], tensor["dtype"], tensor["shape"], tensor["bytes"]) for tensor in tensors_of(path)]
    assert found == [("b", "float32", [2, 3], 24), ("layer:0", "float16", [], 2), ("a", "int32", [0, 7], 0)]
    assert [tensor["offset"] for tensor in tensors_of(path)] == [start, start + 24, start + 26]
    (tensor,) = tensors_of(f"{path}:layer:0")
    assert tensor["name"] == "layer:0"
    shown = poolgrad("inspect", f"{path}:layer:0").out
    assert "safetensors, 2" in shown
    assert "3 tensors\nlayer:0   float16 (), 2 bytes, little-endian, C order\n\n" in shown


def test_unknown_dtypes_are_shown_too(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "a.safetensors", {"a": entry([3], 0, 8, "F99_NEW")}, bytes(8))
    (tensor,) = tensors_of(path, "--stats")
    assert (tensor["dtype"], tensor["stats"], tensor["byte_order"]) == ("F99_NEW", None, None)
    assert "no statistics of F99_NEW" in poolgrad("inspect", path, "--stats").out
    for dtype in ("U3", "M8[s]", [("a", "<f4")], "c16", "V1", "S0"):
        path = save(tmp_path / "a.npy", np.zeros((2, 2), dtype))
        (tensor,) = tensors_of(path, "--stats")
        assert (tensor["shape"], tensor["stats"]) == ([2, 2], None)
        assert "no statistics of" in poolgrad("inspect", path, "--stats").out


def test_pt(tmp_path: Path) -> None:
    """With torch its one tensor, without it what to install."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "a.pt"
    torch.save(torch.arange(1, 7, dtype=torch.bfloat16).reshape(2, 3), path)
    (tensor,) = tensors_of(path, "--stats")
    assert (tensor["name"], tensor["dtype"], tensor["shape"], tensor["bytes"]) == (None, "bfloat16", [2, 3], 12)
    assert (tensor["stats"]["min"], tensor["stats"]["max"], tensor["stats"]["mean"]) == (1, 6, 3.5)
    assert "tensor   bfloat16 (2, 3), 12 bytes, little-endian, C order\n" in poolgrad("inspect", path).out
    path.write_bytes(path.read_bytes()[:-30])
    assert poolgrad("inspect", path).code == 3


def test_several_files_in_their_order(tmp_path: Path) -> None:
    paths = [save(tmp_path / name, np.zeros((2, 2), np.float32)) for name in ("b.npy", "a.safetensors", "c.npy")]
    record = poolgrad("inspect", *paths, "--json").record
    assert [(file["path"], file["format"], file["bytes"]) for file in record["files"]] == [
        (str(path), path.suffix[1:], path.stat().st_size) for path in paths
    ]


def test_no_file_is_a_usage_error() -> None:
    assert poolgrad("inspect").code == 2
    assert "FILE[:NAME]" in poolgrad("inspect").error


# ---- Figures


def random_bits(dtype: str, size: int) -> Array:
    """Every kind of value, among them NaN, infinities and subnormals where there are any."""
    rng, item = np.random.default_rng(size), numpy_dtype(dtype)
    bits = rng.integers(0, 256, size * item.itemsize, dtype=np.uint8).view(item)
    if dtype == "bool":
        return (bits.view(np.uint8) % 2).astype(bool)
    if dtype in FLOATS:
        small = np.array([0.0, -0.0, 1e-45, -1e-310, np.inf, -np.inf, np.inf, np.nan]).astype(item)
        bits[: 4 * small.size] = np.tile(small, 4)
    return bits


def exact_figures(array: Array) -> Figures:
    """By Python's numbers, one by one."""
    with np.errstate(invalid="ignore"):
        values = array.astype(object if array.dtype.kind in "iub" else np.float64).tolist()
    finite = [value for value in values if math.isfinite(value)]
    finfo: Any = ml_dtypes.finfo
    least_normal = float(finfo(array.dtype).smallest_normal) if array.dtype.kind not in "iub" else 0
    return Figures(
        count=len(values),
        minimum=min(finite) if finite else None,
        maximum=max(finite) if finite else None,
        mean=float(sum(map(Fraction, finite)) / len(finite)) if finite else None,
        nan=sum(map(math.isnan, values)),
        positive_infinity=values.count(math.inf),
        negative_infinity=values.count(-math.inf),
        zeros=values.count(0),
        subnormals=sum(0 < abs(value) < least_normal for value in finite),
    )


def gathered(array: Array, chunk: int) -> Figures:
    statistics = Statistics(array.dtype.name)
    bits_type = bits_dtype(array.dtype.name)
    assert bits_type is not None
    bits = array.view(bits_type)
    for start in range(0, max(bits.size, 1), chunk):
        statistics.add(bits[start : start + chunk])
    return statistics.figures()


@pytest.mark.parametrize("chunk", [7, 1000, 10**6])
@pytest.mark.parametrize("dtype", [*FLOATS, *SMALL_FLOATS, *INTEGERS, "bool"])
def test_figures_are_exact(dtype: str, chunk: int) -> None:
    array = random_bits(dtype, 1200)
    expected = exact_figures(array)
    assert gathered(array, chunk) == expected
    assert type(gathered(array, chunk).minimum) is (float if "float" in dtype else int)
    if dtype in FLOATS:
        assert min(expected.nan, expected.zeros, expected.subnormals, expected.positive_infinity) > 0
        assert expected.positive_infinity > expected.negative_infinity > 0


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_figures_do_not_depend_on_how_the_elements_are_cut(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    array = (np.random.default_rng(3).standard_normal(100_001) * 1e6).astype(dtype)
    figures = {gathered(array, 1 << 20), gathered(array[::-1].copy(), 4099)}
    monkeypatch.setattr(statistics._Floats, "chunk", 1 << 10)
    monkeypatch.setattr(statistics._Integers, "chunk", 1 << 10)
    figures.add(gathered(array, 1 << 20))
    assert figures == {exact_figures(array)}


@pytest.mark.parametrize(
    ("dtype", "values", "mean"),
    [
        ("float64", [1e308, 1e308, 1e308, -1e308], 5e307),
        ("float64", [1.7e308] * 40_000, 1.7e308),
        ("float64", [1e300, 1.0, 2.0**-1074, -1e300], float((1 + Fraction(1, 2**1074)) / 4)),
        ("float64", [5e-324, 0.0], 0.0),
        ("float64", [5e-324] * 3, 5e-324),
        ("float32", [3e38, 3e38, 1e-45], float((2 * Fraction(float(np.float32(3e38))) + Fraction(1, 2**149)) / 3)),
        ("float32", [0.1] * 70_001, float(np.float32(0.1))),
        ("int64", [2**63 - 1] * 5, float(2**63 - 1)),
        ("int64", [-(2**63)] * 40_000, -float(2**63)),
        ("uint64", [2**64 - 1, 2**64 - 3], float(2**64 - 2)),
        ("uint32", [2**32 - 1] * 70_000, float(2**32 - 1)),
        ("int32", [-(2**31)] * 70_000, -float(2**31)),
    ],
)
def test_means_of_extremes(dtype: str, values: list[float], mean: float) -> None:
    figures = gathered(np.array(values, dtype), 1 << 20)
    assert (figures.mean, figures.minimum, figures.maximum) == (mean, *figures_range(np.array(values, dtype)))


def figures_range(array: Array) -> tuple[float, float]:
    return min(array.tolist()), max(array.tolist())


def test_a_zero_has_no_sign() -> None:
    for dtype in FLOATS:
        figures = gathered(np.array([-0.0, -0.0], numpy_dtype(dtype)), 1)
        assert str((figures.minimum, figures.maximum, figures.zeros)) == "(0.0, 0.0, 2)"


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 0x7D00), ("bfloat16", 0x7F81), ("float32", 0x7F800001)])
def test_a_signalling_nan_is_a_nan(dtype: str, bits: int) -> None:
    """Without a warning, which the suite takes for an error."""
    bits_type = bits_dtype(dtype)
    statistics = Statistics(dtype)
    statistics.add(np.array([bits, 0, bits], bits_type))
    assert (statistics.figures().nan, statistics.figures().mean) == (2, 0.0)


def test_no_finite_elements(tmp_path: Path) -> None:
    for dtype in FLOATS:
        for values in ([], [np.nan, np.inf, -np.inf]):
            figures = gathered(np.array(values, numpy_dtype(dtype)), 10)
            assert (figures.minimum, figures.maximum, figures.mean) == (None, None, None)
            assert figures.count == len(values)
    path = save(tmp_path / "a.npy", np.array([[np.nan, -np.inf]], np.float32))
    assert stats_of(path)["min"] is None
    assert "no finite elements\n         1 NaN, 0 +inf, 1 -inf, 0 zeros" in poolgrad("inspect", path, "--stats").out


@pytest.mark.parametrize("read_bytes", [8, 64, 1 << 20])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize("code", ["f2", "f4", "f8", "i2", "i4", "u8"])
def test_stats_of_files(
    tmp_path: Path, code: str, byte_order: str, order: Any, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_READ_BYTES", read_bytes)
    array = np.arange(1, 106).reshape(3, 5, 7).astype(byte_order + code, order=order)
    array[1, 2, 3] = 0
    found = stats_of(save(tmp_path / "a.npy", array))
    assert found == {
        "count": 105,
        "min": 0,
        "max": 105,
        "mean": float(Fraction(105 * 106 // 2 - (1 + 35 + 14 + 3), 105)),
        "nan": 0,
        "positive_infinity": 0,
        "negative_infinity": 0,
        "zeros": 1,
        "subnormals": 0,
    }


def test_stats_of_every_tensor_of_a_file(tmp_path: Path) -> None:
    """Each from its own place, with its own dtype."""
    header, data = {}, b""
    arrays = {name: np.array([0, 1, 1, 0, 1]).astype(numpy_dtype(name)) for name in SAFETENSORS}
    for number, (name, array) in enumerate(arrays.items()):
        content = array[: 5 - number % 3].tobytes()
        header[name] = entry([5 - number % 3], len(data), len(data) + len(content), SAFETENSORS[name])
        data += content
    path = raw_safetensors(tmp_path / "a.safetensors", header, data)
    for number, tensor in enumerate(tensors_of(path, "--stats")):
        assert tensor["dtype"] == tensor["name"]
        stats = tensor["stats"]
        assert (stats["min"], stats["max"], stats["zeros"]) == (0, 1, [2, 2, 1][number % 3])
        assert stats["mean"] == [3 / 5, 2 / 4, 2 / 3][number % 3]
        assert type(stats["max"]) is (float if "float" in tensor["name"] else int)


def test_floats_of_half_a_byte_have_no_figures(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "a.safetensors", {"a": entry([4], 0, 2, "F4")}, bytes(2))
    assert tensors_of(path, "--stats")[0]["stats"] is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the peak of memory as Linux gives it")
def test_memory_is_flat(tmp_path: Path) -> None:
    report = (
        "; import atexit, resource as r; atexit.register(lambda: print(r.getrusage(0).ru_maxrss, file=sys.stderr)); "
    )
    peaks = []
    for rows in (1 << 10, 1 << 16):  # 4 MB and 256 MB, of which nothing is on the disk.
        path = tmp_path / f"{rows}.npy"
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": ">f4", "fortran_order": True, "shape": (rows, 1024)})
            file.truncate(file.tell() + rows * 4096)
        result = poolgrad_process("inspect", "--stats", "--json", path, code="import sys" + report + ENTRY)
        assert result.record["files"][0]["tensors"][0]["stats"]["zeros"] == rows * 1024
        peaks.append(int(result.err))
    assert peaks[1] - peaks[0] < 4 << 10, peaks


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.npy", np.zeros((64, 64), np.float32))
    other = save(tmp_path / "b.npy", np.ones(3, np.float32))
    monkeypatch.setattr(contents, "_READ_BYTES", 1024)
    changes: list[tuple[Callable[[Path, int], None], str]] = [
        (os.truncate, "was cut short while it was read"),
        (grow, "changed while it was read"),
    ]
    for change, fault in changes:
        after_a_read(monkeypatch, functools.partial(change, path, 4096))
        result = poolgrad("inspect", path, other, "--stats", "--json")
        assert result.code == 3
        assert [file["fault"] for file in result.record["files"]] == [f"{path} {fault}", None]
        assert [file["tensors"][0]["stats"] is None for file in result.record["files"]] == [True, False]
        save(path, np.zeros((64, 64), np.float32))


def grow(path: Path, count: int) -> None:
    with path.open("ab") as file:
        file.write(bytes(count))


def after_a_read(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Do something once, when the first elements have been counted."""
    add, actions = Statistics.add, [action]

    def counted(self: Statistics, bits: Array) -> None:
        add(self, bits)
        if actions:
            actions.pop()()

    monkeypatch.setattr(Statistics, "add", counted)


# ---- Damaged files


GOOD = {"a": entry([2, 2], 0, 16), "b": entry([3], 16, 28)}
NPY = b"\x93NUMPY\1\0\x76\0{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }"

DAMAGED: dict[str, tuple[str, bytes | dict[str, Any], bytes, str, list[str | None]]] = {
    "cut": (".safetensors", GOOD, bytes(20), "tensor 'b', bytes <16> to <28>, is the first cut short", ["a", "b"]),
    "cut early": (".safetensors", GOOD, bytes(3), "tensor 'a', bytes <0> to <16>, is the first", ["a", "b"]),
    "long": (".safetensors", GOOD, bytes(30), "has 2 bytes too many: its header promises <28> in all", ["a", "b"]),
    "hole": (
        ".safetensors",
        {"a": entry([2, 2], 0, 16), "b": entry([3], 20, 32)},
        bytes(32),
        "tensor 'b' follows a hole (data_offsets start at 20, expected 16), at byte <20>",
        ["a", "b"],
    ),
    "overlap": (
        ".safetensors",
        {"a": entry([2, 2], 0, 16), "b": entry([3], 8, 20)},
        bytes(20),
        "tensor 'b' overlaps the tensor before it (data_offsets start at 8, expected 16), at byte <8>",
        ["a", "b"],
    ),
    "size": (".safetensors", {"a": entry([9], 0, 4)}, bytes(4), "tensor 'a': shape [9] of dtype F32 is 36 bytes", []),
    "comma": (".safetensors", b'{"\xc3\xa9":1 x}', b"", "Expecting ',' delimiter at byte 16", []),
    "utf-8": (".safetensors", b'{"abc\xff":1}', b"", "invalid start byte at byte 13", []),
    "deep": (".safetensors", b"[" * 100_000, b"", "is not valid JSON: nested too deeply at byte 11", []),
    "entry": (
        ".safetensors",
        {"a": entry([2, 2], 0, 16), "x": {"dtype": 3}, "y": [], "b": entry([3], 20, 32)},
        bytes(32),
        "tensor 'x' lacks a proper dtype, shape or data_offsets",
        ["a", "b"],
    ),
    "digits": (".safetensors", b'{"a":' + b"9" * 5000 + b"}", b"", "an integer of 5000 digits", []),
    "npy cut": (".npy", NPY.ljust(127) + b"\n", bytes(15), "promises 144 bytes, the file has 143", [None]),
    "npy long": (".npy", NPY.ljust(127) + b"\n", bytes(17), "has 1 bytes too many", [None]),
    "npy text": (".npy", NPY.replace(b"4'", b"5'").ljust(127) + b"\n", bytes(16), "at byte 10: {'descr': '<f5'", []),
    "npy pickle": (".npy", NPY.replace(b"<f4", b"|O8").ljust(127) + b"\n", bytes(16), "poolgrad never loads", []),
    "npy start": (".npy", b"\x93NUMPY\1", b"", "is cut short inside its header", []),
}  # fmt: skip


@pytest.mark.parametrize("stats", [[], ["--stats"]])
@pytest.mark.parametrize("case", DAMAGED)
def test_damaged(tmp_path: Path, case: str, stats: list[str]) -> None:
    """What is wrong and where, what is known all the same, and the sound file beside it."""
    suffix, header, data, fault, names = DAMAGED[case]
    path = tmp_path / f"bad{suffix}"
    if suffix == ".npy":
        assert isinstance(header, bytes)
        path.write_bytes(header + data)
    else:
        raw_safetensors(path, header, data)
        start = path.stat().st_size - len(data)
        fault = re.sub(r"<(\d+)>", lambda match: str(start + int(match[1])), fault)
    good = save(tmp_path / "good.npy", np.ones((2, 2), np.float32))
    result = poolgrad("inspect", path, good, "--json", *stats)
    assert result.code == 3
    record = result.record
    assert (record["status"], record["code"], record["name"]) == ("error", None, "FILE")
    bad_file, good_file = record["files"]
    assert fault in bad_file["fault"]
    assert record["message"] == bad_file["fault"]
    assert result.error == f"poolgrad inspect: {bad_file['fault']}"
    assert [tensor["name"] for tensor in bad_file["tensors"]] == names
    assert all(tensor["stats"] is None for tensor in bad_file["tensors"])
    assert good_file["tensors"][0]["shape"] == [2, 2]
    shown = poolgrad("inspect", path, good, *stats)
    assert (shown.code, shown.err) == (3, result.err)
    assert f"\nFAULT: {bad_file['fault']}\n" in shown.out
    assert f"{good}\nnpy, 144 bytes\ntensor   float32 (2, 2), 16 bytes, little-endian, C order\n" in shown.out
    assert ("min 1, max 1, mean 1\n" in shown.out) == bool(stats)


def test_where_the_json_is_wrong(tmp_path: Path) -> None:
    """The byte named is the one at fault, also behind letters of several bytes."""
    text = '{"é中": 1 x}'.encode()
    path = raw_safetensors(tmp_path / "a.safetensors", text)
    message = poolgrad("inspect", path).error
    match = re.search(r"at byte (\d+)$", message)
    assert match
    assert path.read_bytes()[int(match[1]) :][:1] == b"x"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    good = save(tmp_path / "good.npy", np.ones((2, 2), np.float32))
    words = [tmp_path / "missing.npy", tmp_path, good, f"{good}:a", tmp_path / "a.pth", "a\0.npy"]
    result = poolgrad("inspect", *words, "--json")
    assert result.code == 3
    faults = [file["fault"] for file in result.record["files"]]
    assert faults[0] == f"cannot read {words[0]}: No such file or directory"
    assert "expected a .npy, .safetensors or .pt file" in faults[1]
    assert faults[2] is None
    assert "an .npy file holds one tensor, without a name" in faults[3]
    assert result.error == f"poolgrad inspect: {faults[0]} (and 4 more faulty files)"
    assert [file["format"] for file in result.record["files"]] == ["npy", None, "npy", None, None, None]


@POSIX
def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npy")
    result = poolgrad_process("inspect", tmp_path / "a.npy")
    assert (result.code, result.error.endswith("it is not a regular file")) == (3, True)


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "a.safetensors", {"x": np.zeros(1, np.float32), "y": np.zeros(1, np.float32)})
    result = poolgrad("inspect", f"{path}:z", path)
    assert result.code == 3
    assert result.error == f"poolgrad inspect: {path} has no tensor 'z'; it has x, y"
    assert result.out.count("float32 (1)") == 2


# ---- How it looks


def test_80_columns(tmp_path: Path) -> None:
    names = ["a", "model.layers.10.self_attn.q_proj.weight.of.a.rather.long.name.that.goes.on", "ünï"]
    arrays = {name: np.full((64, 3, 224, 224, 1)[-2:], -1.2345678e-30, np.float32) for name in names}
    path = save_safetensors(tmp_path / "a.safetensors", arrays)
    result = poolgrad_process("inspect", "--stats", path, COLUMNS="80")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    assert "".join(re.findall(r"^(\S+)", result.out, re.MULTILINE)).count(names[1]) == 1
    assert result.out.count("mean -1.23457e-30") == 3


def test_a_pipe_gets_one_line_a_tensor(tmp_path: Path) -> None:
    name = "n" * 300
    path = save_safetensors(tmp_path / "a.safetensors", {name: np.zeros(3, np.float32), "b": np.zeros(1, np.float32)})
    result = poolgrad_process("inspect", path)
    assert f"{name}   float32 (3), 12 bytes, little-endian, C order\n" in result.out
    assert f"{'b':<300}   float32 (1), 4 bytes, little-endian, C order\n" in result.out


@POSIX
def test_a_terminal_gets_style_but_not_with_no_color(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npy", np.zeros((2, 2), np.float32))
    code, styled = on_terminal("stdout", "inspect", path)
    assert (code, "\x1b[1m" in styled) == (0, True)
    code, plain = on_terminal("stdout", "inspect", "--stats", path, NO_COLOR="1")
    assert (code, "\x1b" in plain, "float32 (2, 2)" in plain) == (0, False, True)
    assert max(map(len, plain.splitlines())) <= 80


@POSIX
def test_a_long_look_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npy", np.zeros((2, 4), np.float32))
    eager = f"from poolgrad.cli import report; report.BAR_AFTER_SECONDS = 0.0; {ENTRY}"
    code, seen = on_terminal("stderr", "inspect", "--stats", path, code=eager)
    assert (code, "32/32 bytes" in seen) == (0, True)
    assert on_terminal("stderr", "inspect", "--stats", "--json", path, code=eager) == (0, "")
    assert on_terminal("stderr", "inspect", path, code=eager) == (0, "")


def test_a_name_of_megabytes(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "a.safetensors", {"n" * 3_000_000: entry([0], 0, 0)})
    result = poolgrad("inspect", path)
    assert (result.code, len(result.out) < 3000) == (0, True)
    assert len(tensors_of(path)[0]["name"]) == 3_000_000


def test_what_is_imported(tmp_path: Path) -> None:
    array = np.zeros((2, 2), np.float32)
    safetensors, npy = save(tmp_path / "a.safetensors", array), save(tmp_path / "a.npy", array)
    heavy = {"numpy", "rich", "ml_dtypes", "safetensors"}
    assert not modules_after("inspect", "--help") & heavy
    assert not modules_after("inspect", safetensors, "--json") & heavy
    assert modules_after("inspect", safetensors) & heavy == {"rich"}
    assert modules_after("inspect", npy, "--json") & heavy == {"numpy"}
    assert modules_after("inspect", safetensors, "--json", "--stats") & heavy == {"numpy"}


def test_the_readme_shows_what_is_printed() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Looking into a file")[2]
    match = re.search(r"```sh\npoolgrad (inspect [^\n]*)\n```.*?```text\n(.*?)```", section, re.DOTALL)
    assert match
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, *match[1].split()], cwd=ROOT, env=environment(), capture_output=True, check=True
    )
    assert done.stdout.decode() == match[2]


def test_escapes_are_shown_not_obeyed(tmp_path: Path) -> None:
    names = ["\x1b[31mred", "a\nb", "\x9b2J", "\u202egnp", "[bold]x[/bold]"]
    header = {name: entry([1], 4 * index, 4 * index + 4) for index, name in enumerate(names)}
    path = raw_safetensors(tmp_path / "\x1b]0;t\x07\n.safetensors", header, bytes(20))
    for arguments in ([path], [path, "--json"], [f"{path}:none"], [f"{path}:none", "--json"]):
        result = poolgrad("inspect", *arguments, "--stats")
        assert (result.out + result.err).replace("\n", "").isprintable()
    shown: Result = poolgrad("inspect", path)
    for text in (r"\x1b[31mred", r"a\nb", r"\x9b2J", r"\u202egnp", "[bold]x[/bold]", r"\x1b]0;t\x07\n.safetensors"):
        assert text in shown.out
    assert [tensor["name"] for tensor in tensors_of(path)] == names


def test_a_table_of_many_tensors_is_cut(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "many.safetensors", {str(number): entry([0], 0, 0) for number in range(1500)})
    shown = poolgrad("inspect", path)
    assert shown.code == 0
    assert "\nand 500 more tensors, which --json lists\n" in shown.out
    assert shown.out.count("little-endian") == 1000
    assert len(tensors_of(path)) == 1500

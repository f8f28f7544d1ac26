"""Tensor files: what is read and written is what numpy and safetensors read and write; the rest is refused."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import pickle
import random
import re
import resource
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from poolgrad.cli import new_file
from poolgrad.cli.file_errors import FileError, printable, shorten
from poolgrad.cli.tensor_files import OpenTensor, OutputTensor, create_tensor, open_tensor
from poolgrad.core import TensorSpec
from poolgrad.core.tensors import STORAGE
from poolgrad.core.tiles import Tiling

Array = NDArray[Any]

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SHAPES = [(2, 3, 5, 7), (3, 5, 7), (1, 1, 1, 1)]
TILES = [10_000, 70, 14, 3]
"""Elements a tile: all, whole planes, rows of a plane, pieces of a row."""


def sample(dtype: str, shape: tuple[int, ...] = (2, 3, 5, 7)) -> Array:
    values = np.random.default_rng(7).standard_normal(shape)
    return values.astype(DTYPES[dtype])


def bits(array: Array) -> Array:
    """The elements as native integers, which compare exactly."""
    native = array.astype(array.dtype.newbyteorder("="))
    contiguous: Array = np.ascontiguousarray(native)
    return contiguous.view(f"u{array.dtype.itemsize}")


def tiles_of(spec: TensorSpec, elements: int) -> Tiling:
    *planes, rows, columns = spec.shape
    return Tiling.of((math.prod(planes), rows, columns), elements)


def read_all(tensor: OpenTensor, elements: int) -> Array:
    """The tensor's bits, read tile by tile, last tile first."""
    whole = np.zeros(tensor.spec.shape, STORAGE[tensor.spec.dtype])
    planes = whole.reshape(-1, *whole.shape[-2:])
    source = tensor.source()
    tiling = tiles_of(tensor.spec, elements)
    for index in reversed(range(len(tiling))):
        box = tiling[index]
        buffer = np.full(box.shape, 77, whole.dtype)
        assert source.read(box, buffer) is buffer
        planes[box.planes, box.rows, box.columns] = buffer
    return bits(whole)


def write_all(output: OutputTensor, array: Array, elements: int = 10_000) -> None:
    stored = bits(array).view(STORAGE[output.spec.dtype])
    planes = stored.reshape(-1, *stored.shape[-2:])
    tiling = tiles_of(output.spec, elements)
    for index in reversed(range(len(tiling))):
        box = tiling[index]
        tile = output.target(box, np.empty(box.shape, stored.dtype))
        tile[:] = planes[box.planes, box.rows, box.columns]
        output.write(box, tile)


def save(path: Path, array: Array, inputs: list[OpenTensor] | None = None) -> None:
    with create_tensor(str(path), TensorSpec.of(array), inputs or []) as output:
        write_all(output, array)
        output.commit()


def npy_bytes(array: Array, version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


def npy_header(descr: str, shape: tuple[int, ...], fortran_order: bool = False) -> bytes:
    file = io.BytesIO()
    fields = {"descr": descr, "fortran_order": fortran_order, "shape": shape}
    np.lib.format.write_array_header_1_0(file, fields)
    return file.getvalue()


def st_bytes(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: object = (1, 1, 2, 2), offsets: object = (0, 16), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def opened(path: Path | str, role: Any = "grad_output", bf16_bits: bool = False) -> OpenTensor:
    return open_tensor(str(path), role, bf16_bits)


def refuse(path: Path | str, message: str, role: Any = "grad_output") -> None:
    """Opening fails with one line that matches."""
    with pytest.raises(FileError, match=message) as caught, opened(path, role):
        pass
    assert str(caught.value).isprintable()


# Reading


@pytest.mark.parametrize("elements", TILES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_are_read_as_the_library_wrote_them(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], elements: int
) -> None:
    array = sample(dtype, shape)
    path = tmp_path / "a.safetensors"
    others: dict[str, Array] = {"aa": np.arange(3, dtype=np.uint8), "zz": np.ones((2, 2), np.int64)}
    safetensors.numpy.save_file({"grad": array, **others}, path, metadata={"by": "test"})
    with opened(path) as tensor:
        assert (tensor.spec, tensor.name, tensor.nbytes) == (TensorSpec(shape, dtype), "grad", array.nbytes)
        np.testing.assert_array_equal(read_all(tensor, elements), bits(array))


@pytest.mark.parametrize("elements", TILES)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_npy_is_read_as_numpy_wrote_it(
    tmp_path: Path, dtype: str, byte_order: Any, order: Any, version: tuple[int, int], elements: int
) -> None:
    array = sample(dtype)
    stored = np.asarray(array, array.dtype.newbyteorder(byte_order), order=order)
    path = tmp_path / "a.npy"
    path.write_bytes(npy_bytes(stored, version))
    assert np.load(path).flags.fnc is (order == "F")
    with opened(path) as tensor:
        assert (tensor.spec, tensor.name, tensor.nbytes) == (TensorSpec.of(array), None, array.nbytes)
        np.testing.assert_array_equal(read_all(tensor, elements), bits(array))


@pytest.mark.parametrize("elements", TILES)
@pytest.mark.parametrize("fortran_order", [False, True])
@pytest.mark.parametrize("descr", ["<V2", "|V2", ">V2", "bfloat16"])
def test_bfloat16_in_npy(tmp_path: Path, descr: str, fortran_order: bool, elements: int) -> None:
    array = sample("bfloat16")
    stored = bits(array).astype(">u2" if descr == ">V2" else "<u2")
    path = tmp_path / "a.npy"
    header = npy_header(descr, array.shape, fortran_order)
    path.write_bytes(header + stored.tobytes("F" if fortran_order else "C"))
    with opened(path) as tensor:
        assert tensor.spec == TensorSpec(array.shape, "bfloat16")
        np.testing.assert_array_equal(read_all(tensor, elements), bits(array))


def test_bfloat16_as_np_save_stores_it(tmp_path: Path) -> None:
    array = sample("bfloat16")
    np.save(tmp_path / "a.npy", array)
    with opened(tmp_path / "a.npy") as tensor:
        assert tensor.spec.dtype == "bfloat16"
        np.testing.assert_array_equal(read_all(tensor, 70), bits(array))


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_uint16_is_bfloat16_only_when_told(tmp_path: Path, suffix: str) -> None:
    array = sample("bfloat16")
    path = tmp_path / f"a{suffix}"
    if suffix == ".npy":
        np.save(path, array.view(np.uint16))
    else:
        safetensors.numpy.save_file({"g": array.view(np.uint16)}, path)
    with opened(path) as tensor:
        assert tensor.spec.dtype == "uint16"
    with opened(path, bf16_bits=True) as tensor:
        assert tensor.spec.dtype == "bfloat16"
        np.testing.assert_array_equal(read_all(tensor, 14), bits(array))


def test_bf16_bits_leaves_other_dtypes_alone(tmp_path: Path) -> None:
    for dtype in (np.float16, np.int16, np.float32):
        np.save(tmp_path / "a.npy", np.ones((1, 2, 2), dtype))
        with opened(tmp_path / "a.npy", bf16_bits=True) as tensor:
            assert tensor.spec.dtype == np.dtype(dtype).name


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.int64, np.uint8, np.bool_, np.complex64])
def test_dtypes_of_no_operator_are_valid_files(tmp_path: Path, dtype: Any) -> None:
    array = np.zeros((1, 2, 3), dtype)
    np.save(tmp_path / "a.npy", array)
    safetensors.numpy.save_file({"self": array}, tmp_path / "a.safetensors")
    for path in tmp_path.iterdir():
        with opened(path, "self") as tensor:
            assert tensor.spec == TensorSpec(array.shape, array.dtype)
            assert tensor.nbytes == array.nbytes


def test_empty_tensors_are_valid_files(tmp_path: Path) -> None:
    array = np.zeros((1, 0, 3), np.float32)
    np.save(tmp_path / "a.npy", array)
    safetensors.numpy.save_file({"a": array}, tmp_path / "a.safetensors")
    for path in tmp_path.iterdir():
        with opened(path) as tensor:
            assert tensor.spec.shape == (1, 0, 3)


def test_a_header_of_python_2_is_read(tmp_path: Path) -> None:
    array = sample("float32", (1, 2, 3))
    data = npy_bytes(array).replace(b"(1, 2, 3), }   ", b"(1L, 2L, 3L), }")
    assert b"2L" in data
    (tmp_path / "a.npy").write_bytes(data)
    with opened(tmp_path / "a.npy") as tensor:
        np.testing.assert_array_equal(read_all(tensor, 100), bits(array))


def test_a_tile_without_elements_reads_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", sample("float32"))
    with opened(tmp_path / "a.npy") as tensor:
        box = tiles_of(tensor.spec, 70)[0]
        empty = type(box)(box.planes, slice(2, 2), box.columns)
        assert tensor.source().read(empty, np.empty(empty.shape, np.float32)).size == 0


@pytest.fixture(params=["positioned", "seek and lock"])
def io_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "positioned":
        monkeypatch.delattr(os, "preadv", raising=False)
        monkeypatch.delattr(os, "pwrite", raising=False)


@pytest.mark.usefixtures("io_calls")
def test_threads_share_a_file(tmp_path: Path) -> None:
    array = sample("float32", (64, 8, 16, 16))
    np.save(tmp_path / "a.npy", array)
    with (
        opened(tmp_path / "a.npy") as tensor,
        create_tensor(str(tmp_path / "b.npy"), tensor.spec, [tensor]) as output,
    ):
        source, tiling = tensor.source(), tiles_of(tensor.spec, 256)

        def copy(first: int) -> None:
            for index in range(first, len(tiling), 4):
                box = tiling[index]
                output.write(box, source.read(box, output.target(box, None)))

        threads = [threading.Thread(target=copy, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        output.commit()
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


@pytest.mark.parametrize("call", ["preadv", "pwrite"])
def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    array = sample("float32")
    np.save(tmp_path / "a.npy", array)
    real = getattr(os, call)

    def short(descriptor: int, data: Any, offset: int) -> int:
        part = [data[0][:11]] if call == "preadv" else data[:11]
        return int(real(descriptor, part, offset))

    monkeypatch.setattr(os, call, short)
    with opened(tmp_path / "a.npy") as tensor:
        np.testing.assert_array_equal(read_all(tensor, 70), bits(array))
    save(tmp_path / "b.npy", array)
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


# Names


def several(path: Path, *names: str) -> Path:
    arrays = {name: np.full((1, 1, 1), index, np.float32) for index, name in enumerate(names)}
    safetensors.numpy.save_file(arrays, path)
    return path


@pytest.mark.parametrize(
    ("role", "names", "chosen"),
    [
        ("grad_output", ["only"], "only"),
        ("self", ["only"], "only"),
        ("grad_output", ["a", "gradOutput", "self"], "gradOutput"),
        ("grad_output", ["grad_output", "x"], "grad_output"),
        ("grad_output", ["grad", "input"], "grad"),
        ("self", ["grad", "self"], "self"),
        ("self", ["grad", "input"], "input"),
        ("self", ["grad", "x"], "x"),
    ],
)
def test_well_known_names(tmp_path: Path, role: str, names: list[str], chosen: str) -> None:
    path = several(tmp_path / "a.safetensors", *names)
    with opened(path, role) as tensor:
        assert tensor.name == chosen
        assert read_all(tensor, 1).view(np.float32).item() == names.index(chosen)


@pytest.mark.parametrize(
    ("role", "names", "listed"),
    [
        ("grad_output", ["a", "b"], "a, b; name one as a.safetensors:NAME"),
        ("grad_output", ["self", "input"], "input, self"),
        ("self", ["grad", "b"], "b, grad"),
        ("self", ["input", "x"], "input, x"),
        ("self", [f"t{index:02}" for index in range(40)], "t00, t01, .* t09 and 30 more;"),
    ],
)
def test_no_or_two_well_known_names(tmp_path: Path, role: str, names: list[str], listed: str) -> None:
    refuse(several(tmp_path / "a.safetensors", *names), f"which tensor is {role}.*{listed}", role)


def test_a_file_without_tensors(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(st_bytes({"__metadata__": {"a": "b"}}))
    refuse(tmp_path / "a.safetensors", "holds no tensors$")
    refuse(f"{tmp_path / 'a.safetensors'}:__metadata__", "has no tensor '__metadata__'; it has no tensors")


@pytest.mark.parametrize("name", ["b", "layer:0:grad", "a.safetensors:b", "é ü", " "])
def test_a_tensor_by_name(tmp_path: Path, name: str) -> None:
    path = several(tmp_path / "a.safetensors", "a", name)
    with opened(f"{path}:{name}") as tensor:
        assert (tensor.path, tensor.name) == (str(path), name)
        assert read_all(tensor, 1).view(np.float32).item() == 1


def test_an_unknown_name_lists_those_there(tmp_path: Path) -> None:
    path = several(tmp_path / "a.safetensors", "a", "b")
    refuse(f"{path}:c", "a.safetensors has no tensor 'c'; it has a, b$")
    refuse(f"{path}:", "a.safetensors has no tensor ''; it has a, b$")


def test_a_folder_with_a_colon(tmp_path: Path) -> None:
    folder = tmp_path / "run.safetensors:old"
    folder.mkdir()
    path = several(folder / "a.safetensors", "a", "b")
    with opened(f"{path}:b") as tensor:
        assert (tensor.path, tensor.name) == (str(path), "b")


def test_a_file_of_the_whole_name_wins(tmp_path: Path) -> None:
    several(tmp_path / "a.safetensors", "b.npy")
    np.save(tmp_path / "a.safetensors:b.npy", np.full((1, 1, 1), 5, np.float32))
    with opened(tmp_path / "a.safetensors:b.npy") as tensor:
        assert tensor.name is None
        assert read_all(tensor, 1).view(np.float32).item() == 5


def test_extensions_in_capitals(tmp_path: Path) -> None:
    several(tmp_path / "A.SafeTensors", "a", "b")
    with opened(f"{tmp_path / 'A.SafeTensors'}:b") as tensor:
        assert tensor.name == "b"
    (tmp_path / "A.NPY").write_bytes(npy_bytes(sample("float32")))
    with opened(tmp_path / "A.NPY") as tensor:
        assert tensor.spec.dtype == "float32"


@pytest.mark.parametrize("name", ["a.pth", "a", "", "a.npz", "a.npy/", "npy"])
def test_other_extensions(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.pth").write_bytes(b"x")
    path = f"{tmp_path}/{name}" if name else ""
    refuse(path, f"^{re.escape(path) or 'an empty path'}: expected a .npy, .safetensors or .pt file$")
    with pytest.raises(FileError, match=r"expected a .npy or .safetensors file$"):
        create_tensor(path, TensorSpec((1, 1, 1), "float32"), [])


def test_npy_takes_no_name(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", sample("float32"))
    refuse(f"{tmp_path / 'a.npy'}:x", "an .npy file holds one tensor, without a name")


# Files that are refused


class Bomb:
    """Unpickling this leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


GOOD_NPY = npy_bytes(np.zeros((1, 1, 2, 2), np.float32))
HUGE = 2**62

BAD_NPY: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "40 bytes": (GOOD_NPY[:40], "cut short inside its header"),
    "9 bytes": (GOOD_NPY[:9], "cut short inside its header"),
    "3 bytes": (GOOD_NPY[:3], "not an .npy file"),
    "last 8 bytes missing": (GOOD_NPY[:-8], "cut short: its header promises 144 bytes, the file has 136"),
    "trailing bytes": (GOOD_NPY + b"abc", "3 bytes too many: its header promises 144"),
    "4 EiB": (npy_header("<f4", (1, 1, 2**30, 2**30)), "cut short: its header promises 4611686018427388032 "),
    "over 2**63 bytes": (npy_header("<f4", (1, 1, 2**31, 2**30)), r"impossible shape \(1, 1, 2147483648, "),
    "extent of 2**64": (npy_header("<f4", (1, 0, 2**64)), "impossible shape"),
    "negative extents": (npy_header("<f4", (1, -2, -2)) + bytes(16), r"impossible shape \(1, -2, -2\)"),
    "boolean extent": (npy_header("<f4", (True, 2, 2)) + bytes(16), "impossible shape"),
    "65 axes": (npy_header("<f4", (1,) * 65) + bytes(4), "impossible shape"),
    "np.int64 in the shape": (
        GOOD_NPY.replace(b"(1, 1, 2, 2), }            ", b"(1, 1, np.int64(2), 2), }  "),
        r"cannot understand the .npy header .*np.int64\(2\)",
    ),
    "unknown dtype": (npy_header("<q9", (1, 2, 2)) + bytes(36), "cannot understand the .npy header .*q9"),
    "no dict": (GOOD_NPY.replace(b"{", b"["), "cannot understand the .npy header"),
    "hex extent": (
        b"\x93NUMPY\1\0" + (9000).to_bytes(2, "little") + (
            b"{'descr':'<f4','fortran_order':False,'shape':(1,1,0x" + b"f" * 8000 + b")}"
        ).ljust(9000),
        "impossible shape of astronomical extents",
    ),
    "deep header": (
        b"\x93NUMPY\1\0" + (9000).to_bytes(2, "little") + b"(" * 9000,
        "cannot understand the .npy header",
    ),
    "signs": (
        b"\x93NUMPY\1\0" + (9000).to_bytes(2, "little") + (b"-" * 8999 + b"1"),
        "cannot understand the .npy header",
    ),
    "escape that warns": (GOOD_NPY.replace(b"'<f4'", rb"'\d4'"), "cannot understand the .npy header"),
    "long header": (
        b"\x93NUMPY\2\0" + (20_000).to_bytes(4, "little") + b" " * 20_000,
        "a header of 20000 bytes is too long",
    ),
    "header of 4 GiB": (b"\x93NUMPY\2\0\xff\xff\xff\xff{}", "cut short inside its header"),
    "version 4": (GOOD_NPY.replace(b"NUMPY\1", b"NUMPY\4"), "unknown .npy version 4.0"),
    "structure": (npy_bytes(np.zeros((1, 2, 2), [("a", "<f4")])), "has dtype .*'a'.*expected float32"),
    "text": (npy_bytes(np.zeros((1, 2, 2), "U3")), "has dtype <U3, expected float32"),
    "dates": (npy_bytes(np.zeros((1, 2, 2), "M8[s]")), r"has dtype <M8\[s\], expected"),
    "one-byte void": (npy_header("|V1", (1, 2, 2)) + bytes(4), r"has dtype \|V1, expected"),
    "pickle": (pickle.dumps([1]), "not an .npy file; it looks like a Python pickle"),
    "npz": (b"PK\x03\x04" + bytes(40), "looks like a zip archive"),
    "safetensors": (st_bytes({}), "looks like a safetensors file"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "a git-lfs pointer"),
}  # fmt: skip

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n"
HALF = {"a": entry(offsets=(0, 16)), "b": entry(offsets=(16, 32))}

BAD_SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "2 bytes": (b"ab", "no safetensors file: 2 bytes"),
    "header of 2**60": ((1 << 60).to_bytes(8, "little") + b"{}", "header of 1152921504606846976 bytes"),
    "header one too long": (b"\3" + bytes(7) + b"{}", "a header of 3 bytes does not fit its 10 bytes"),
    "HTML": (b"\n <!DOCTYPE html><html><body>404</body></html>", "looks like an HTML page"),
    "git-lfs pointer": (LFS, "looks like a git-lfs pointer"),
    "npy": (GOOD_NPY, "looks like an .npy file"),
    "pickle": (pickle.dumps([1, 2, 3]), "looks like a Python pickle"),
    "invalid JSON": (st_bytes(b'{"a": '), "not valid JSON: Expecting value"),
    "no JSON at all": (st_bytes(b""), "not valid JSON"),
    "not UTF-8": (st_bytes(b'{"\xff": 1}'), "not valid JSON: 'utf-8' codec"),
    "half a surrogate": (st_bytes(b'{"\\ud800": 1}'), "not valid JSON: 'utf-8' codec"),
    "deep JSON": (st_bytes(b'{"a":' * 100_000), "not valid JSON"),
    "NaN": (st_bytes(b'{"a": NaN}'), "not valid JSON: NaN is not JSON"),
    "integer of 10,000 digits": (st_bytes(b'{"a": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "list": (st_bytes([]), "not a JSON object"),
    "name twice": (
        st_bytes(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            bytes(4),
        ),
        "'a' is there twice",
    ),
    "field twice": (
        st_bytes(b'{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "'shape' is there twice",
    ),
    "metadata of numbers": (st_bytes({"__metadata__": {"a": 1}}), "does not map text to text"),
    "metadata is a list": (st_bytes({"__metadata__": ["a"]}), "does not map text to text"),
    "metadata is text": (st_bytes({"__metadata__": "a"}), "does not map text to text"),
    "entry is a list": (st_bytes({"a": []}), "tensor 'a' lacks a proper dtype"),
    "no dtype": (st_bytes({"a": {"shape": [], "data_offsets": [0, 4]}}, bytes(4)), "'a' lacks"),
    "no shape": (st_bytes({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)), "'a' lacks"),
    "no offsets": (st_bytes({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)), "'a' lacks"),
    "three offsets": (st_bytes({"a": entry((1,), (0, 4, 8))}, bytes(4)), r"data_offsets \[0, 4, 8\] are not"),
    "fractional offset": (st_bytes({"a": entry((1,), (0, 4.0))}, bytes(4)), "are not two integers"),
    "boolean offset": (st_bytes({"a": entry((1,), (False, 4))}, bytes(4)), "are not two integers"),
    "offsets reversed": (st_bytes({"a": entry((1,), (4, 0))}, bytes(4)), r"impossible data_offsets \[4, 0\]"),
    "negative offset": (st_bytes({"a": entry((1,), (-4, 0))}, bytes(4)), "impossible data_offsets"),
    "offset of 2**64": (st_bytes({"a": entry((1,), (0, 2**64))}, bytes(4)), "impossible data_offsets"),
    "negative extent": (st_bytes({"a": entry((-1, -1), (0, 4))}, bytes(4)), r"impossible shape \[-1, -1\]"),
    "fractional extent": (st_bytes({"a": entry((1.0,), (0, 4))}, bytes(4)), "impossible shape"),
    "boolean extent": (st_bytes({"a": entry((True,), (0, 4))}, bytes(4)), "impossible shape"),
    "overflowing shape": (st_bytes({"a": entry((HUGE, 4), (0, 0))}), "impossible shape"),
    "half a byte": (st_bytes({"a": entry((3,), (0, 1), "F4")}, bytes(1)), "impossible shape"),
    "small offsets": (
        st_bytes({"a": entry((1000, 1000), (0, 4))}, bytes(4)),
        r"'a': shape \[1000, 1000\] of dtype F32 is 4000000 bytes, its data_offsets \[0, 4\] hold 4$",
    ),
    "overlap": (
        st_bytes({"a": entry((4,), (0, 16)), "b": entry((4,), (8, 24))}, bytes(24)),
        "tensor 'b' overlaps the tensor before it",
    ),
    "hole": (
        st_bytes({"a": entry((4,), (0, 16)), "b": entry((4,), (20, 36))}, bytes(36)),
        r"tensor 'b' follows a hole \(data_offsets start at 20, expected 16\)",
    ),
    "hole at the start": (st_bytes({"a": entry((4,), (4, 20))}, bytes(20)), "'a' follows a hole"),
    "4 bytes missing": (st_bytes(HALF, bytes(28)), "is cut short: its header promises"),
    "4 bytes too many": (st_bytes(HALF, bytes(36)), "has 4 bytes too many"),
    "bytes without a tensor": (st_bytes({}, bytes(4)), "has 4 bytes too many"),
}


@pytest.mark.parametrize("case", BAD_NPY)
def test_bad_npy(tmp_path: Path, case: str) -> None:
    content, message = BAD_NPY[case]
    (tmp_path / "a.npy").write_bytes(content)
    refuse(tmp_path / "a.npy", f"a.npy.*{message}")


@pytest.mark.parametrize("case", BAD_SAFETENSORS)
def test_bad_safetensors(tmp_path: Path, case: str) -> None:
    content, message = BAD_SAFETENSORS[case]
    (tmp_path / "a.safetensors").write_bytes(content)
    refuse(tmp_path / "a.safetensors", f"a.safetensors.*{message}")


def test_no_pickle_is_ever_loaded(tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "exploded")
    array = np.full((1, 1, 1), bomb, dtype=object)
    np.save(tmp_path / "object.npy", array, allow_pickle=True)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(bomb))
    refuse(tmp_path / "object.npy", "object array")
    refuse(tmp_path / "pickle.npy", "a Python pickle, which poolgrad never loads")
    assert not bomb.path.exists()
    np.load(tmp_path / "object.npy", allow_pickle=True)
    assert bomb.path.exists(), "the bomb is a dud"


def test_no_memory_is_taken_on_a_headers_word(tmp_path: Path) -> None:
    cases = {"a.npy": [BAD_NPY["4 EiB"], BAD_NPY["header of 4 GiB"], BAD_NPY["over 2**63 bytes"]]}
    cases["a.safetensors"] = [BAD_SAFETENSORS["header of 2**60"], BAD_SAFETENSORS["small offsets"]]
    tracemalloc.start()
    try:
        for name, bad in cases.items():
            for content, message in bad:
                (tmp_path / name).write_bytes(content)
                refuse(tmp_path / name, message)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("stored", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F9_NEW"])
def test_a_picked_tensor_of_another_float_is_named(tmp_path: Path, stored: str) -> None:
    header = {"w": entry((1, 2, 2), (0, 4), stored), "grad": entry((1,), (4, 8))}
    path = tmp_path / "a.safetensors"
    path.write_bytes(st_bytes(header, bytes(8)))
    refuse(f"{path}:w", f"tensor 'w' has dtype {stored}, expected float32, float16 or bfloat16")
    with opened(path) as tensor:
        assert tensor.name == "grad"


def test_missing_and_odd_files(tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "loop.npy").symlink_to("loop.npy")
    refuse(tmp_path / "no.npy", "cannot read .*no.npy: No such file or directory")
    refuse(tmp_path / "no.safetensors:x", "cannot read .*no.safetensors: No such file")
    refuse(tmp_path / "folder.npy", "cannot read .*: it is a directory")
    refuse(tmp_path / "pipe.npy", "cannot read .*: it is not a regular file")
    refuse(tmp_path / "loop.npy", "cannot read .*: Too many levels of symbolic links")
    refuse(tmp_path / ("x" * 300 + ".npy"), "cannot read .*: File name too long")
    refuse("a\0.npy", r"a\\x00.npy: a path cannot hold a NUL character")


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder that anyone may write, and no rights beyond that, even where the tests run as root."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o777)
        root = os.geteuid() == 0
        if root:
            os.setresuid(65534, 65534, 0)
        try:
            yield path
        finally:
            if root:
                os.setresuid(0, 0, 0)
            for part in [path, *path.rglob("*")]:
                part.chmod(0o777)


def test_a_file_without_read_permission(unprivileged: Path) -> None:
    path = unprivileged / "a.npy"
    path.write_bytes(GOOD_NPY)
    path.chmod(0)
    refuse(path, "cannot read .*a.npy: Permission denied")


def test_a_target_on_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.npy"
    path.write_bytes(b"old")
    status = os.statvfs(path)
    read_only = os.statvfs_result([*status[:8], status.f_flag | os.ST_RDONLY, *status[9:]])
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FileError, match=r"cannot write .*old\.npy: its file system is read-only$"):
        create_tensor(str(path), TensorSpec((1, 1, 1), "float32"), [])


def test_a_read_only_folder_or_target(unprivileged: Path) -> None:
    array = sample("float32")
    (unprivileged / "old.npy").write_bytes(b"old")
    (unprivileged / "old.npy").chmod(0o444)
    with pytest.raises(FileError, match=r"cannot write .*old\.npy: the file that is there is read-only"):
        save(unprivileged / "old.npy", array)
    (unprivileged / "folder").mkdir(0o555)
    with pytest.raises(FileError, match=r"cannot write .*folder/a\.npy: Permission denied"):
        save(unprivileged / "folder" / "a.npy", array)
    assert (unprivileged / "old.npy").read_bytes() == b"old"
    assert sorted(path.name for path in unprivileged.rglob("*")) == ["folder", "old.npy"]


def mutated(content: bytes, header: int, rng: random.Random) -> bytes:
    """The content with a few faults in its header, now and then with another length."""
    data = bytearray(content)
    numbers = [b"0", b"-1", b"1", b"9", b"4.0", b"2147483648", b"9223372036854775808", b"[", b"}", b'"', b"F16"]
    for _ in range(rng.choice([1, 1, 2])):
        place = rng.randrange(header)
        match rng.randrange(4):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                number = rng.choice(numbers)
                data[place : place + rng.choice([len(number), rng.randrange(3)])] = number
            case 2:
                del data[place : place + rng.choice([1, 1, 8])]
            case _:
                data += bytes(rng.randrange(1, 5))
    return bytes(data)


def with_other_character(content: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    """The content with one character exchanged for one that may well fit there."""
    place = rng.randrange(start, stop)
    return content[:place] + rng.choice("<>|=0123456789fiuVcbOU,() ").encode() + content[place + 1 :]


def with_true_length(content: bytes, header: int, change: int) -> bytes:
    """Repair the length field, so that faults behind it are reached."""
    return (header + change).to_bytes(8, "little") + content[8:]


def test_mutated_safetensors_are_judged_as_by_the_library(tmp_path: Path) -> None:
    header = json.dumps({"a": entry((1, 2, 2), (0, 16)), "b": entry((3,), (16, 22), "BF16")}).encode()
    good, rng, judged = st_bytes(header, bytes(22)), random.Random(1), {True: 0, False: 0}
    path = tmp_path / "a.safetensors"
    deserialize: Any = safetensors.deserialize
    for number in range(4000):
        bad = mutated(good, 8 + len(header), rng)
        if number % 2:
            bad = with_true_length(bad, len(header), len(bad) - len(good))
        path.write_bytes(bad)
        try:
            expected = {item[0]: tuple(item[1]["shape"]) for item in deserialize(bad)}
        except safetensors.SafetensorError:
            expected = {}
        found = listed_shapes(path)
        if found != expected:
            # The library takes a name that is there twice, which its own format forbids.
            assert found == {}, bad
            with pytest.raises(ValueError, match="twice"):
                json.loads(bad[8:-22].rstrip(b"\0"), object_pairs_hook=refuse_twice)
        judged[bool(expected)] += 1
    assert min(judged.values()) > 50, judged


def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("twice")
    return dict(pairs)


def listed_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors, found through the public opening alone; {} if it is refused."""
    try:
        opened(f"{path}:?no such name")
    except FileError as error:
        match = re.search(r"it has (.*)$", str(error))
    shapes = {}
    for name in match[1].split(", ") if match else []:
        try:
            with opened(f"{path}:{name}") as tensor:
                shapes[name] = tensor.spec.shape
        except FileError:
            return {}
    return shapes


def test_mutated_npy_is_taken_only_if_numpy_takes_it(tmp_path: Path) -> None:
    good, rng, taken = npy_bytes(sample("float32", (1, 2, 3))), random.Random(2), 0
    path = tmp_path / "a.npy"
    for number in range(3000):
        bad = mutated(good, 80, rng) if number % 2 else with_other_character(good, 8, 72, rng)
        path.write_bytes(bad)
        try:
            tensor = opened(path)
        except FileError:
            continue
        taken += 1
        tensor.close()
        array = np.load(io.BytesIO(bad), allow_pickle=False)
        assert (tensor.spec.shape, tensor.nbytes) == (array.shape, array.nbytes)
    assert taken > 20


# Writing


@pytest.mark.parametrize("elements", TILES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_npy_is_written_as_numpy_writes_it(tmp_path: Path, dtype: str, shape: tuple[int, ...], elements: int) -> None:
    array = sample(dtype, shape)
    with create_tensor(str(tmp_path / "a.npy"), TensorSpec(shape, dtype), []) as output:
        assert (output.path, output.name) == (str(tmp_path / "a.npy"), None)
        write_all(output, array, elements)
        output.commit()
    assert (tmp_path / "a.npy").read_bytes() == npy_bytes(array)
    assert os.listdir(tmp_path) == ["a.npy"]


@pytest.mark.parametrize("elements", TILES)
@pytest.mark.parametrize("name", [None, "w", "layer:0 é", 'q"\\\t\x01'])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_are_written_as_the_library_writes_them(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], name: str | None, elements: int
) -> None:
    array = sample(dtype, shape)
    path = tmp_path / "a.safetensors"
    reference = str(path) if name is None else f"{path}:{name}"
    with create_tensor(reference, TensorSpec(shape, dtype), []) as output:
        assert (output.path, output.name) == (str(path), name or "grad_input")
        write_all(output, array, elements)
        output.commit()
    assert path.read_bytes() == safetensors.numpy.save({name or "grad_input": array})
    np.testing.assert_array_equal(bits(safetensors.numpy.load_file(path)[name or "grad_input"]), bits(array))


@pytest.mark.parametrize("name", ["", "__metadata__"])
def test_names_that_no_tensor_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileError, match=f"a tensor cannot be called '{name}'"):
        create_tensor(f"{tmp_path}/a.safetensors:{name}", TensorSpec((1, 1, 1), "float32"), [])
    with pytest.raises(FileError, match=r"the tensor name '\\udcff' is not valid text"):
        create_tensor(f"{tmp_path}/a.safetensors:\udcff", TensorSpec((1, 1, 1), "float32"), [])
    assert os.listdir(tmp_path) == []


@pytest.fixture(params=["unnamed", "named"])
def temporary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to a temporary file."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    elif not hasattr(os, "O_TMPFILE"):
        pytest.skip("no unnamed temporary files on this system")
    return str(request.param)


def test_the_target_appears_when_complete(tmp_path: Path, temporary: str) -> None:
    array = sample("float32")
    target = tmp_path / "a.npy"
    target.write_bytes(b"old")
    with create_tensor(str(target), TensorSpec.of(array), []) as output:
        write_all(output, array)
        assert target.read_bytes() == b"old"
        names = set(os.listdir(tmp_path)) - {"a.npy"}
        if temporary == "named":
            assert re.fullmatch(rf"\.a\.npy\.poolgrad-{os.getpid()}-[0-9a-f]{{8}}\.tmp", names.pop())
        assert not names
        output.commit()
    assert target.read_bytes() == npy_bytes(array)
    assert os.listdir(tmp_path) == ["a.npy"]


@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize("old", [None, b"old"])
def test_without_a_commit_nothing_is_left(tmp_path: Path, old: bytes | None) -> None:
    array = sample("float32")
    target = tmp_path / "a.npy"
    if old:
        target.write_bytes(old)
    before = descriptors()
    with contextlib.suppress(KeyboardInterrupt), create_tensor(str(target), TensorSpec.of(array), []) as output:
        write_all(output, array)
        raise KeyboardInterrupt
    assert (target.read_bytes() if target.exists() else None) == old
    assert os.listdir(tmp_path) == (["a.npy"] if old else [])
    assert descriptors() == before


def descriptors() -> int:
    """How many files this process has open, where that can be told."""
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


def test_refused_files_are_closed(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(GOOD_NPY[:-1])
    (tmp_path / "a.safetensors").write_bytes(b"[]")
    before = descriptors()
    for path in tmp_path.iterdir():
        refuse(path, "a.")
    assert descriptors() == before


@pytest.mark.usefixtures("temporary")
def test_a_result_with_a_hole_is_not_put_in_place(tmp_path: Path) -> None:
    array = sample("float32")
    with create_tensor(str(tmp_path / "a.npy"), TensorSpec.of(array), []) as output:
        box = tiles_of(output.spec, 35)[0]
        output.write(box, np.zeros(box.shape, np.float32))
        with pytest.raises(RuntimeError, match="700 bytes of gradInput were never computed"):
            output.commit()
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("temporary")
def test_the_mode_follows_the_umask_or_the_old_target(tmp_path: Path) -> None:
    array = sample("float32", (1, 2, 2))
    old_mask = os.umask(0o027)
    try:
        save(tmp_path / "new.npy", array)
        (tmp_path / "old.npy").write_bytes(b"old")
        (tmp_path / "old.npy").chmod(0o606)
        save(tmp_path / "old.npy", array)
    finally:
        os.umask(old_mask)
    assert (tmp_path / "new.npy").stat().st_mode & 0o7777 == 0o640
    assert (tmp_path / "old.npy").stat().st_mode & 0o7777 == 0o606


@pytest.mark.usefixtures("temporary")
def test_a_symlink_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    array = sample("float32", (1, 2, 2))
    (tmp_path / "there").mkdir()
    for old in (None, b"old"):
        real = tmp_path / "there" / f"real{old is None}.npy"
        if old:
            real.write_bytes(old)
        link = tmp_path / f"link{old is None}.npy"
        link.symlink_to(real)
        save(link, array)
        assert link.is_symlink()
        assert real.read_bytes() == npy_bytes(array)


@pytest.mark.usefixtures("temporary")
def test_a_hard_link_of_the_old_target_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"old")
    (tmp_path / "b.npy").hardlink_to(tmp_path / "a.npy")
    save(tmp_path / "a.npy", sample("float32"))
    assert (tmp_path / "b.npy").read_bytes() == b"old"


def test_odd_names(tmp_path: Path, temporary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    array = sample("float32", (1, 2, 2))
    for name in ["-a b.npy", "x:y.npy", "new\nline\x1b[31m.npy", "é.npy", "\udcff.npy", "é" * 120 + ".npy"]:
        save(Path(name), array)
        assert Path(name).read_bytes() == npy_bytes(array)
        with opened(name) as tensor:
            np.testing.assert_array_equal(read_all(tensor, 100), bits(array))
    assert len(os.listdir()) == 6


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    array = sample("float32")
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "null.npy").symlink_to("/dev/null")
    (tmp_path / "loop.npy").symlink_to("loop.npy")
    (tmp_path / "file").write_bytes(b"")
    for name, reason in {
        "no/a.npy": "there is no directory .*/no$",
        "file/a.npy": "Not a directory|there is no directory",
        "folder.npy": "it is a directory",
        "pipe.npy": "it is not a regular file",
        "null.npy": "it is not a regular file",
        "loop.npy": "Too many levels of symbolic links",
        "x" * 300 + ".npy": "File name too long",
    }.items():
        with pytest.raises(FileError, match=f"cannot write .*{name}: {reason}"):
            save(tmp_path / name, array)
    assert len(os.listdir(tmp_path)) == 5


@pytest.mark.parametrize("link", ["same", "symlink", "hard link", "dotted"])
@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_an_output_that_is_an_input(tmp_path: Path, suffix: str, link: str) -> None:
    array = sample("float32")
    source, target = tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}"
    save(source, array)
    content = source.read_bytes()
    if link == "symlink":
        target.symlink_to(source)
    elif link == "hard link":
        target.hardlink_to(source)
    else:
        target = source if link == "same" else tmp_path / ".." / tmp_path.name / source.name
    name = ":other" if suffix == "safetensors" else ""
    before = sorted(os.listdir(tmp_path))
    with opened(source) as tensor, pytest.raises(FileError, match=f"cannot write .*: it is the input .*in.{suffix}"):
        create_tensor(f"{target}{name}", tensor.spec, [tensor])
    assert source.read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == before


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def rewrite(path: Path) -> None:
    status = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def exchange(path: Path) -> None:
    status = path.stat()
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [cut, grow, rewrite, exchange, remove])
@pytest.mark.parametrize("which", ["g.npy", "s.npy"])
def test_an_input_that_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, change: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    array = sample("float32")
    for name in ("g.npy", "s.npy"):
        np.save(name, array)
    Path("out.npy").write_bytes(b"old")
    with opened("g.npy") as g, opened("s.npy") as s, create_tensor("out.npy", s.spec, [g, s]) as output:
        write_all(output, array)
        change(tmp_path / which)
        monkeypatch.chdir("/")
        with pytest.raises(FileError, match=f"{which} changed while it was read"):
            output.commit()
    assert (tmp_path / "out.npy").read_bytes() == b"old"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("io_calls")
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_input_cut_short_while_it_is_read(tmp_path: Path, order: Any) -> None:
    np.save(tmp_path / "a.npy", np.asarray(sample("float32"), order=order))
    with opened(tmp_path / "a.npy") as tensor:
        cut(tmp_path / "a.npy")
        with pytest.raises(FileError, match=r"a.npy was cut short while it was read"):
            read_all(tensor, 70)


def test_a_read_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", sample("float32"))
    with opened(tmp_path / "a.npy") as tensor:
        monkeypatch.setattr(os, "preadv", fail_with(errno.EIO))
        with pytest.raises(FileError, match=r"cannot read .*a.npy: Input/output error"):
            read_all(tensor, 70)


def fail_with(number: int) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate", "replace", "fchmod"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_error_leaves_the_old_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: str, call: str, number: int
) -> None:
    array = sample("float32")
    (tmp_path / "a.npy").write_bytes(b"old")
    monkeypatch.setattr(os, call, fail_with(number))
    needs = r" \(968 bytes are needed\)" if call == "posix_fallocate" else ""
    with pytest.raises(FileError, match=f"cannot write .*a.npy: {os.strerror(number)}{needs}$"):
        save(tmp_path / "a.npy", array)
    assert (tmp_path / "a.npy").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.npy"]


@pytest.mark.usefixtures("temporary")
def test_an_error_that_comes_with_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = sample("float32")
    (tmp_path / "a.npy").write_bytes(b"old")
    close = os.close

    def close_and_fail(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with create_tensor(str(tmp_path / "a.npy"), TensorSpec.of(array), []) as output:
        write_all(output, array)
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", close_and_fail)
            with pytest.raises(FileError, match=r"cannot write .*a\.npy: Disk quota exceeded"):
                output.commit()
    assert (tmp_path / "a.npy").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.npy"]


def test_a_write_error_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = sample("float32")
    with create_tensor(str(tmp_path / "a.npy"), TensorSpec.of(array), []) as output:
        monkeypatch.setattr(os, "pwrite", fail_with(errno.ENOSPC))
        with pytest.raises(FileError, match=r"cannot write .*a.npy: No space left on device$"):
            write_all(output, array)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize("fallocate", [True, False])
def test_a_file_size_limit_is_met_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallocate: bool
) -> None:
    if not fallocate:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(FileError, match=r"cannot write .*a.npy: File too large"):
            create_tensor(str(tmp_path / "a.npy"), TensorSpec((1, 1024, 1024), "float32"), [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("way", ["posix_fallocate", "missing", "not supported"])
def test_space_is_claimed_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    if way == "missing":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    elif way == "not supported":
        monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.EOPNOTSUPP))
    with create_tensor(str(tmp_path / "a.npy"), TensorSpec((3, 640, 512), "float32"), []):
        (status,) = [path.stat() for path in tmp_path.iterdir()]
        assert status.st_size == 128 + 3 * 640 * 512 * 4
        # Some file systems count blocks only when they are flushed, so this asks for no more than it must.
        if way == "posix_fallocate":
            assert status.st_blocks * 512 >= status.st_size


def test_the_folder_vanishes(tmp_path: Path, temporary: str) -> None:
    array = sample("float32")
    folder = tmp_path / "folder"
    folder.mkdir()
    with create_tensor(str(folder / "a.npy"), TensorSpec.of(array), []) as output:
        write_all(output, array)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        with pytest.raises(FileError, match=r"cannot write .*a.npy: No such file or directory"):
            output.commit()


@pytest.mark.usefixtures("temporary")
def test_the_last_complete_writer_wins(tmp_path: Path) -> None:
    one, two = sample("float32"), -sample("float32")
    target, spec = str(tmp_path / "a.npy"), TensorSpec.of(one)
    with create_tensor(target, spec, []) as first, create_tensor(target, spec, []) as second:
        write_all(second, two)
        write_all(first, one)
        second.commit()
        assert Path(target).read_bytes() == npy_bytes(two)
        first.commit()
    assert Path(target).read_bytes() == npy_bytes(one)
    assert os.listdir(tmp_path) == ["a.npy"]


def test_without_proc_the_file_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_file, "_proc_path", lambda descriptor: f"/no/proc/{descriptor}")
    array = sample("float32")
    with create_tensor(str(tmp_path / "a.npy"), TensorSpec.of(array), []) as output:
        assert len(os.listdir(tmp_path)) == 1
        write_all(output, array)
        output.commit()
    assert (tmp_path / "a.npy").read_bytes() == npy_bytes(array)


# Messages


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 a\\b", "plain é 漢 a\\b"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202eabc\u2028", r"\u202eabc\u2028"),
        ("\udcff", r"\udcff"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert str(FileError(text)) == shown


def test_shorten() -> None:
    assert shorten("a" * 80) == "a" * 80
    assert shorten("a" * 1_000_000) == "a" * 80 + "..."


def test_escape_sequences_are_not_passed_on(tmp_path: Path) -> None:
    path = several(tmp_path / "a\x1b[2J.safetensors", "\x1b]0;title\x07", "b\nc")
    refuse(path, r"a\\x1b\[2J.safetensors: which tensor is grad_output\? .*\\x1b\]0;title\\x07")
    refuse(f"{path}:\x1b[1m", r"no tensor '\\x1b\[1m'")
    long = several(tmp_path / "long.safetensors", "n" * 100_000, "m")
    with pytest.raises(FileError, match="nnn") as caught:
        opened(long)
    assert len(str(caught.value)) < 1000

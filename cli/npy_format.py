"""The header of an .npy file: read (versions 1 to 3) into a Layout, and written (version 1).

numpy's own readers parse the header; whatever it claims is checked against the file's size before it is
believed. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
from numpy.lib import format as npy

from poolgrad.core.tensors import TensorSpec

from .file_errors import FileError, looks_like, shorten
from .positioned_io import PositionedFile
from .tensor_layout import Layout, claimed_bytes, shape_text, size_fault

_MAX_HEADER = 10_000
"""numpy's own bound; a plain tensor's header takes about a hundred bytes."""

_DESCR = {"float32": "<f4", "float16": "<f2", "bfloat16": "<V2"}


def read_header(file: PositionedFile, size: int) -> Layout:
    """The tensor of an .npy file of `size` bytes, or a FileError."""
    layout, fault = examine(file, size)
    if fault is not None:
        raise fault
    return layout


def examine(file: PositionedFile, size: int) -> tuple[Layout, FileError | None]:
    """The tensor that an .npy file describes, and what is wrong with the bytes that are to be its elements.

    A header that describes none is a FileError.
    """
    version, field, offset = _read_preamble(file, size)
    raw = field + file.read_bytes(offset - _header_length(field), _header_length(field))
    shape, fortran_order, dtype = _parse(file.path, version, raw)
    stored, name = _dtype_names(dtype, raw)
    if dtype.hasobject:
        raise FileError(f"{file.path} holds an object array (Python pickles), which poolgrad never loads")
    nbytes = claimed_bytes(shape, 8 * dtype.itemsize)
    if nbytes is None:
        raise FileError(f"{file.path}: impossible shape {shape_text(shape)} of dtype {shorten(stored)}")
    big_endian = dtype.str.startswith(">") or stored.startswith(">")
    has_byte_order = name == "bfloat16" or stored.startswith(("<", ">"))
    layout = Layout(name, stored, shape, offset, nbytes, big_endian, fortran_order, has_byte_order)
    return layout, size_fault(file.path, offset + nbytes, size)


def header_bytes(spec: TensorSpec) -> bytes:
    """The header of a little-endian tensor in C order, as np.save writes it."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, {"descr": _DESCR[spec.dtype], "fortran_order": False, "shape": spec.shape})
    return header.getvalue()


def _read_preamble(file: PositionedFile, size: int) -> tuple[int, bytes, int]:
    """Major version, the header's length field as it is, and where the elements start."""
    if size == 0:
        raise FileError(f"{file.path} is empty")
    start = file.read_bytes(0, min(size, 64))
    if not start.startswith(npy.MAGIC_PREFIX):
        raise FileError(f"{file.path} is not an .npy file{looks_like(start)}")
    version = tuple(start[6:8])
    if len(version) < 2:
        raise FileError(f"{file.path} is cut short inside its header")
    if version not in {(1, 0), (2, 0), (3, 0)}:
        raise FileError(f"{file.path}: unknown .npy version {'.'.join(map(str, version))}, expected 1, 2 or 3")
    field = start[8 : 10 if version == (1, 0) else 12]
    if len(field) < (2 if version == (1, 0) else 4):
        raise FileError(f"{file.path} is cut short inside its header")
    offset = 8 + len(field) + _header_length(field)
    if offset > size:
        raise FileError(f"{file.path} is cut short inside its header ({size} bytes of at least {offset})")
    if _header_length(field) > _MAX_HEADER:
        raise FileError(f"{file.path}: a header of {_header_length(field)} bytes is too long for one tensor")
    return version[0], field, offset


def _header_length(field: bytes) -> int:
    return int.from_bytes(field, "little")


def _parse(path: str, version: int, raw: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """numpy's reading of the header.

    Version 3 differs from 2 only in the encoding of field names, and tensors have no fields.
    """
    if b"bfloat16" in raw:
        import ml_dtypes  # noqa: F401  (numpy knows the name once this is imported)
    reader = npy.read_array_header_1_0 if version == 1 else npy.read_array_header_2_0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return reader(io.BytesIO(raw), max_header_size=_MAX_HEADER)
    except Exception as error:  # Hostile text makes numpy, ast and tokenize raise nearly anything.
        length_field = 2 if version == 1 else 4
        text, start = raw[length_field:].decode("latin1").strip(), 8 + length_field
        raise FileError(f"{path}: cannot understand the .npy header at byte {start}: {shorten(text, 200)}") from error


def _dtype_names(dtype: np.dtype[Any], raw: bytes) -> tuple[str, str]:
    """The dtype as stored and by name. 2-byte void is what np.save makes of bfloat16."""
    if dtype == np.dtype("V2") or dtype.name == "bfloat16":
        # numpy drops the byte order of void types.
        return next(text for text in (">V2", "|V2", "<V2", "bfloat16", dtype.str) if text.encode() in raw), "bfloat16"
    return str(dtype) if dtype.names else dtype.str, dtype.name

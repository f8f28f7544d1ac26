"""The header of a .safetensors file: read into Layouts, and written for one tensor.

The format: 8 bytes of header length (little-endian), a JSON object {name: {dtype, shape, data_offsets}},
and the tensors' bytes, with neither holes nor overlaps. The checks here are those of the safetensors
library, made on plain reads: the library maps the file into memory, and dies with SIGBUS when another
process cuts it short.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

from .file_errors import FileError, looks_like, shorten
from .positioned_io import PositionedFile
from .tensor_layout import MAX_AXES, MAX_BYTES, Layout, claimed_bytes, shape_text, size_fault

if TYPE_CHECKING:
    from poolgrad.core.tensors import TensorSpec

METADATA = "__metadata__"
_MAX_HEADER = 100_000_000
_MAX_DIGITS = 100
_LARGE = 1 << 20
"""Bytes from which a header is looked at before it is parsed."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_MAX_DEPTH = 3
"""Braces and brackets around an extent: the header's, its entry's, its shape's."""
_MOST_FAULTS = 1000
"""Faulty entries after which the others are not looked at."""

_DTYPES = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
    "F4": ("float4_e2m1fn", 4),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
}
_STORED = {name: stored for stored, (name, _) in _DTYPES.items()}


def read_header(file: PositionedFile, size: int) -> dict[str, Layout]:
    """Every tensor of a .safetensors file of `size` bytes, in the header's order, or a FileError."""
    layouts, fault = examine(file, size)
    if fault is not None:
        raise fault
    return layouts


def examine(file: PositionedFile, size: int) -> tuple[dict[str, Layout], FileError | None]:
    """Every tensor that a .safetensors file describes, and what is wrong with their places in the file.

    A header that is no header is a FileError; one with faulty entries has the sound ones, and the first fault.
    """
    header, start = _read_json(file, size)
    _check_metadata(file.path, header.pop(METADATA, None))
    layouts: dict[str, Layout] = {}
    faults: list[FileError] = []
    for name, entry in header.items():
        try:
            layouts[name] = _layout(file.path, name, entry, start)
        except FileError as error:
            faults.append(error)
            if len(faults) == _MOST_FAULTS:
                break
    # Holes that faulty entries leave say nothing.
    return layouts, faults[0] if faults else _cover_fault(file.path, layouts, start, size)


def header_bytes(name: str, spec: TensorSpec) -> bytes:
    """The header of a file that holds one tensor, byte for byte as the safetensors library writes it."""
    entry = {"dtype": _STORED[spec.dtype], "shape": spec.shape, "data_offsets": [0, spec.nbytes]}
    text = json.dumps({name: entry}, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_json(file: PositionedFile, size: int) -> tuple[dict[str, Any], int]:
    """The header's JSON object, and where the tensors' bytes start."""
    path = file.path
    if size < 8:
        raise FileError(f"{path} is empty" if size == 0 else f"{path} is no safetensors file: {size} bytes")
    start = file.read_bytes(0, min(size, 64))
    length = int.from_bytes(start[:8], "little")
    if length > size - 8 or length > _MAX_HEADER:
        kind = "" if start[8:9] == b"{" else looks_like(start)
        reason = f"a header of {length} bytes does not fit its {size} bytes"
        if length <= size - 8:
            reason = f"a header of {length} bytes is over the format's limit of {_MAX_HEADER}"
        raise FileError(f"{path} is no safetensors file, or cut short: {reason}{kind}")
    text = file.read_bytes(8, length)
    if length > _LARGE and _is_stuffed(text) and _is_stuffed(_STRING.sub(b'""', text)):
        raise FileError(f"{path}: its header has more lists, objects or numbers than tensors have")
    header = _parse(path, text)
    if not isinstance(header, dict):
        raise FileError(f"{path}: the safetensors header is not a JSON object")
    return header, 8 + length


def _is_stuffed(text: bytes) -> bool:
    """Whether there are more lists, objects or numbers than entries have, each with five strings at least.

    Parsed, they could take a hundred times their size.
    """
    strings = text.count(b'"') // 2
    most = {b"[": 2 * strings // 5, b"{": strings // 5 + 2, b",": strings * MAX_AXES}
    return any(text.count(char) > count for char, count in most.items())


def _parse(path: str, data: bytes) -> Any:
    try:
        text = data.decode("utf-8")
        # Calls of Python take most of the time of a large header; few need them.
        unique = _unique_text if "\\u" in text else _unique
        integer = _integer if re.search(f"[0-9]{{{_MAX_DIGITS + 1}}}", text) else None
        return json.loads(text, object_pairs_hook=unique, parse_constant=_no_constant, parse_int=integer)
    except MemoryError as error:
        raise FileError(f"{path}: there is too little memory for its header of {len(data)} bytes") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: the safetensors header is not valid JSON: {_json_fault(error, data)}") from error


def _json_fault(error: Exception, data: bytes) -> str:
    """What is wrong and, as far as is known, where in the file, whose first 8 bytes are the header's length."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at byte {8 + len(error.doc[: error.pos].encode())}"
    if isinstance(error, UnicodeDecodeError):
        return f"{error.encoding!r} codec: {error.reason} at byte {8 + error.start}"
    if isinstance(error, RecursionError):
        return f"nested too deeply at byte {8 + _too_deep(data)}"
    return shorten(str(error)) or type(error).__name__


def _too_deep(data: bytes) -> int:
    """Where the first list or object starts that is deeper than the format has any."""
    depth = 0
    for token in re.finditer(_STRING.pattern + rb"|[][{}]", data, re.DOTALL):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token[0], 0)
        if depth > _MAX_DEPTH:
            return token.start()
    return len(data)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"'{shorten(twice)}' is there twice")
    return entries


def _unique_text(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, _ in pairs:
        key.encode("utf-8")  # Half a surrogate pair is valid for json, but no text.
    return _unique(pairs)


def _integer(text: str) -> int:
    # Python's own limit on digits can be switched off, and the time to convert them grows with their square.
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_metadata(path: str, metadata: Any) -> None:
    if metadata is None:
        return
    if not (isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())):
        raise FileError(f"{path}: {METADATA} does not map text to text")


def _layout(path: str, name: str, entry: Any, start: int) -> Layout:
    """Check one entry by itself: its fields are there, possible, and agree."""
    tensor = f"{path}: tensor '{shorten(name)}'"
    fields = entry if isinstance(entry, dict) else {}
    stored, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(stored, str) and isinstance(shape, list) and isinstance(offsets, list)):
        raise FileError(f"{tensor} lacks a proper dtype, shape or data_offsets")
    if not (len(offsets) == 2 and all(type(offset) is int for offset in offsets)):
        raise FileError(f"{tensor}: data_offsets {shorten(str(offsets))} are not two integers")
    first, last = offsets
    if not 0 <= first <= last <= MAX_BYTES:
        raise FileError(f"{tensor}: impossible data_offsets {shorten(str(offsets))}")
    # A dtype newer than this table harms nobody until it is the tensor that is asked for.
    dtype, bits = _DTYPES.get(stored, (stored, None))
    nbytes = claimed_bytes(shape, 8 if bits is None else bits)
    if nbytes is None:
        raise FileError(f"{tensor}: impossible shape {shape_text(shape)} of dtype {shorten(stored)}")
    if bits is not None and nbytes != last - first:
        raise FileError(
            f"{tensor}: shape {shape_text(shape)} of dtype {stored} is {nbytes} bytes, "
            f"its data_offsets [{first}, {last}] hold {last - first}"
        )
    has_byte_order = bits is not None and bits > 8
    return Layout(dtype, stored, tuple(shape), start + first, last - first, has_byte_order=has_byte_order)


def _cover_fault(path: str, layouts: dict[str, Layout], start: int, size: int) -> FileError | None:
    """Whether the tensors follow each other without a hole or an overlap up to the end of the file."""
    end, cut = start, ""
    for name, layout in sorted(layouts.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        tensor = f"tensor '{shorten(name)}'"
        if layout.offset != end:
            fault = "overlaps the tensor before it" if layout.offset < end else "follows a hole"
            return FileError(
                f"{path}: {tensor} {fault} (data_offsets start at {layout.offset - start}, "
                f"expected {end - start}), at byte {layout.offset}"
            )
        end += layout.nbytes
        if end > size and not cut:
            cut = f"{tensor}, bytes {layout.offset} to {end},"
    return size_fault(path, end, size, cut)

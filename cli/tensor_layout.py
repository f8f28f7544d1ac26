"""Where the elements of one tensor lie in a file: what both formats' headers come to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .file_errors import FileError, shorten

if TYPE_CHECKING:
    from poolgrad.core.tiles import Box

MAX_BYTES = 2**63 - 1
"""No file is longer; a header that claims more is wrong whatever the file holds."""

MAX_AXES = 64
"""numpy's limit. Without one, the product of a megabyte of extents would take for ever."""

_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", "float96", "float128"})
NUMBER_DTYPES = _INTEGERS | _FLOATS | {"bool", "complex64", "complex128", "complex192", "complex256"}
"""The dtypes that a tensor may be opened as. Which of them an operator takes is the operator's to say."""


class Layout(NamedTuple):
    """One tensor in a file.

    dtype: its numpy-like name; stored_dtype: the name that the file uses; offset, nbytes: the place of the
    elements, in bytes; fortran_order: the first axis is the fastest, instead of the last; has_byte_order: false
    for elements of one byte, and for those that are no numbers.
    """

    dtype: str
    stored_dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    big_endian: bool = False
    fortran_order: bool = False
    has_byte_order: bool = True


def claimed_bytes(shape: Sequence[object], bits: int) -> int | None:
    """Bytes that a header's shape and bits per element come to, in exact integers.

    None where they are impossible: an extent that is no integer or negative, more axes than numpy has, a part
    of a byte, or more bytes than any file can have.
    """
    if len(shape) > MAX_AXES:
        return None
    extents = [extent for extent in shape if type(extent) is int and 0 <= extent <= MAX_BYTES]
    if len(extents) != len(shape):
        return None
    total, rest = divmod(math.prod(extents) * bits, 8)
    return None if rest or total > MAX_BYTES else total


def size_fault(path: str, expected: int, size: int, cut_tensor: str = "") -> FileError | None:
    """What is wrong with a file's size, where its header promises another; which tensor is the first cut short."""
    if size < expected:
        which = f"; {cut_tensor} is the first cut short" if cut_tensor else ""
        return FileError(f"{path} is cut short: its header promises {expected} bytes, the file has {size}{which}")
    if size > expected:
        return FileError(f"{path} has {size - expected} bytes too many: its header promises {expected} in all")
    return None


def shape_text(shape: Sequence[object]) -> str:
    """A header's shape for a message, whatever is in it."""
    try:
        return shorten(str(shape))
    except ValueError:  # Python prints no integer of over 4300 digits.
        return "of astronomical extents"


def contiguous_runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """The box, cut into runs of elements that are contiguous in C order: (first element, count)."""
    height, width = shape[-2:]
    planes, rows, columns = box.shape
    if (rows, columns) == (height, width):
        yield box.planes.start * height * width, planes * height * width
        return
    for plane in range(box.planes.start, box.planes.stop):
        first = (plane * height + box.rows.start) * width + box.columns.start
        if columns == width:
            yield first, rows * width
        else:
            yield from ((first + row * width, columns) for row in range(rows))

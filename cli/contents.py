"""What is in a tensor file, sound or damaged: its tensors as described and, on request, figures of their elements.

A bad file raises nothing here: what is wrong becomes part of the answer, beside what can be told all the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from . import safetensors_format
from .file_errors import FileError
from .locate import Identity, no_such_tensor, open_regular, split
from .positioned_io import PositionedFile
from .tensor_layout import Layout

if TYPE_CHECKING:
    from poolgrad.core.statistics import Figures

_READ_BYTES = 1 << 20


class Held(NamedTuple):
    """A tensor in a file; figures are None where they were not asked for, or its dtype has none."""

    name: str | None
    layout: Layout
    figures: Figures | None = None


class Contents:
    """The answer for one file: what could not be found out is None, or an empty list.

    count: tensors in the file, of which `tensors` has the one that was asked for, if one was.
    """

    def __init__(self, given: str) -> None:
        self.path = given
        self.format: str | None = None
        self.size: int | None = None
        self.count: int | None = None
        self.tensors: list[Held] = []
        self.fault: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(tensor.layout.nbytes for tensor in self.tensors)


@contextmanager
def examine(path_and_name: str, bf16_bits: bool) -> Iterator[tuple[Contents, PositionedFile | None]]:
    """What the headers of `FILE[:NAME]` say, and the file, open if it is sound.

    With `bf16_bits`, uint16 elements are the bits of bfloat16.
    """
    contents = Contents(path_and_name)
    file = None
    try:
        contents.path, name, extension = split(path_and_name)
        contents.format = extension[1:]
        file, status = open_regular(contents.path)
        contents.size = status.st_size
        tensors, fault = _describe(file, status.st_size, extension)
        contents.count = len(tensors)
        contents.tensors = [tensor for tensor in tensors if name in (None, tensor.name)]
        if fault is not None:
            raise fault
        if name is not None and not contents.tensors:
            raise no_such_tensor(contents.path, name, [str(tensor.name) for tensor in tensors])
    except FileError as error:
        contents.fault = str(error)
    if bf16_bits:
        contents.tensors = list(map(_as_bfloat16, contents.tensors))
    try:
        yield contents, None if contents.fault else file
    finally:
        if file is not None:
            file.close()


def _describe(file: PositionedFile, size: int, extension: str) -> tuple[list[Held], FileError | None]:
    if extension == ".npy":
        from . import npy_format  # With numpy, which a safetensors file's header does not need.

        layout, fault = npy_format.examine(file, size)
        return [Held(None, layout)], fault
    if extension == ".pt":
        from . import pt_files  # With torch, which is optional, and slow to load.

        return [Held(None, pt_files.read_header(file, size))], None
    layouts, fault = safetensors_format.examine(file, size)
    return [Held(*item) for item in layouts.items()], fault


def _as_bfloat16(tensor: Held) -> Held:
    layout = tensor.layout
    return tensor._replace(layout=layout._replace(dtype="bfloat16")) if layout.dtype == "uint16" else tensor


def gather_figures(contents: Contents, file: PositionedFile, progress: Callable[[int], None] | None) -> None:
    """Add the figures of every tensor of a sound file; `progress` is called with the bytes gone through."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done)

    identity = Identity.of(os.fstat(file.descriptor))
    try:
        tensors = [tensor._replace(figures=_figures(file, tensor.layout, advance)) for tensor in contents.tensors]
        if Identity.of(os.fstat(file.descriptor)) != identity:
            raise FileError(f"{contents.path} changed while it was read")
        contents.tensors = tensors
    except FileError as error:
        contents.fault = str(error)


def _figures(file: PositionedFile, layout: Layout, advance: Callable[[int], None]) -> Figures | None:
    import numpy as np

    from poolgrad.core.statistics import Statistics, bits_dtype

    bits = bits_dtype(layout.dtype)
    if bits is None:
        return None
    statistics = Statistics(layout.dtype)
    buffer = np.empty(min(_READ_BYTES, layout.nbytes) // bits.itemsize, bits)
    for start in range(0, layout.nbytes, _READ_BYTES):
        part = buffer[: (layout.nbytes - start) // bits.itemsize]
        file.read_into(layout.offset + start, part.data.cast("B"))
        if bits.itemsize > 1 and layout.big_endian != (sys.byteorder == "big"):
            part.byteswap(inplace=True)
        statistics.add(part)
        advance(part.nbytes)
    return statistics.figures()

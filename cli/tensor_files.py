"""Tensors in files: `FILE` or `FILE.safetensors:NAME` to a TensorSpec and a tile source, or to a tile sink.

A tensor is opened by its header alone; tiles are then read at their place. Only a gradOutput in Fortran order
is read into memory as a whole, because its tiles are scattered over the file. gradInput goes tile by tile to a
new file that replaces the target when it is complete and no input has changed meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from poolgrad.core.tensors import STORAGE, TensorSpec
from poolgrad.core.tiles import ArrayTensor, Box, TileSource

from . import new_file, npy_format
from .file_errors import FileError, cannot, shorten
from .locate import WRITTEN, Identity, listed, no_such_tensor, open_regular, split
from .positioned_io import PositionedFile
from .tensor_layout import MAX_BYTES, NUMBER_DTYPES, Layout, contiguous_runs

Role = Literal["grad_output", "self", "grad_input"]

_WELL_KNOWN: dict[Role, tuple[str, ...]] = {
    "grad_output": ("gradOutput", "grad_output", "grad"),
    "self": ("self", "input", "x"),
    "grad_input": ("gradInput", "grad_input", "dx"),
}
_DEFAULT_OUTPUT_NAME = "grad_input"


class OpenTensor:
    """One tensor of an open file. A context manager that closes it.

    path: the file as given; name: the tensor's name in a safetensors file, else None; spec: shape and dtype,
    which may be one that no operator takes; nbytes: bytes of its elements in the file.
    """

    def __init__(
        self, file: PositionedFile, identity: Identity, name: str | None, layout: Layout, bf16_widened: bool = False
    ) -> None:
        self.path = file.path
        self.name = name
        self._narrows = bf16_widened and layout.dtype == "float32"
        self.spec = TensorSpec(layout.shape, "bfloat16" if self._narrows else layout.dtype)
        self.nbytes = layout.nbytes
        self.identity = identity
        self._file = file
        self._layout = layout
        self._absolute = os.path.abspath(file.path)

    def source(self) -> TileSource:
        """Its tiles, for a tensor of rank 3 or 4 and a dtype that some product takes."""
        source: TileSource = FileSource(self._file, self._layout)
        if self._layout.fortran_order:
            source = ArrayTensor(_read_fortran(self._file, self._layout))
        return NarrowingSource(source) if self._narrows else source

    def check_unchanged(self) -> None:
        """Raise a FileError if the file is not what it was when it was opened."""
        try:
            now = Identity.of(os.stat(self._absolute))
        except OSError as error:
            raise FileError(f"{self.path} changed while it was read: {error.strerror}") from error
        if now != self.identity:
            raise FileError(f"{self.path} changed while it was read")

    def is_same_file(self, status: os.stat_result) -> bool:
        """Whether a stat result is of this file, under whatever name."""
        return (status.st_dev, status.st_ino) == (self.identity.device, self.identity.inode)

    def close(self) -> None:
        """Close the file; the tensor's sources end with it."""
        self._file.close()

    def __enter__(self) -> OpenTensor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FileSource:
    """Tiles of a tensor in C order, each read at its place: one read, or one a row where a tile is narrower."""

    def __init__(self, file: PositionedFile, layout: Layout) -> None:
        self._file = file
        self._layout = layout
        self._storage = STORAGE[layout.dtype]
        self._swapped = layout.big_endian != (sys.byteorder == "big")

    def read(self, box: Box, buffer: NDArray[Any] | None) -> NDArray[Any]:
        """The box as stored bits in native byte order, in `buffer` where one is given."""
        tile = np.empty(box.shape, self._storage) if buffer is None else buffer
        if tile.size == 0:
            return tile
        view, item = tile.data.cast("B"), self._storage.itemsize
        for first, count in contiguous_runs(self._layout.shape, box):
            size = count * item
            self._file.read_into(self._layout.offset + first * item, view[:size])
            view = view[size:]
        if self._swapped:
            tile.byteswap(inplace=True)
        return tile


class NarrowingSource:
    """Tiles of a float32 tensor, rounded to bfloat16: to what they were, if they are bfloat16 that was widened."""

    def __init__(self, wide: TileSource) -> None:
        self._wide = wide

    def read(self, box: Box, buffer: NDArray[Any] | None) -> NDArray[Any]:
        """The box as bits of bfloat16, in `buffer` where one is given."""
        import ml_dtypes

        wide = self._wide.read(box, np.empty(box.shape, np.float32))
        with np.errstate(all="ignore"):
            narrow = wide.astype(ml_dtypes.bfloat16).view(np.uint16)
        if buffer is None:
            return narrow
        np.copyto(buffer, narrow)
        return buffer


class OutputTensor:
    """A tile sink into a new file; `commit` makes it the target. Leaving the context without leaves no trace."""

    def __init__(
        self, path: str, name: str | None, spec: TensorSpec, header: bytes, inputs: Sequence[OpenTensor]
    ) -> None:
        self.path = path
        self.name = name
        self.spec = spec
        self._start = len(header)
        size = self._start + spec.nbytes
        if size > MAX_BYTES:
            raise cannot("write", path, f"{size} bytes are more than a file can have")
        self._inputs = tuple(inputs)
        self._missing = spec.nbytes
        self._lock = threading.Lock()
        self._file = new_file.NewFile(path, size)
        try:
            self._file.write(0, memoryview(header))
        except BaseException:
            self._file.discard()
            raise

    def target(self, box: Box, buffer: NDArray[Any] | None) -> NDArray[Any]:
        """The array to compute the tile into."""
        return np.empty(box.shape, STORAGE[self.spec.dtype]) if buffer is None else buffer

    def write(self, box: Box, tile: NDArray[Any]) -> None:
        """Write a complete tile at its place."""
        if tile.size == 0:
            return
        item = tile.itemsize
        stored = tile if sys.byteorder == "little" else tile.byteswap()
        view = stored.data.cast("B")
        for first, count in contiguous_runs(self.spec.shape, box):
            size = count * item
            self._file.write(self._start + first * item, view[:size])
            view = view[size:]
        with self._lock:
            self._missing -= tile.nbytes

    def commit(self) -> None:
        """Replace the target, unless an input has changed since it was opened."""
        if self._missing:
            raise RuntimeError(f"{self._missing} bytes of gradInput were never computed")
        for tensor in self._inputs:
            tensor.check_unchanged()
        self._file.commit()

    def __enter__(self) -> OutputTensor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.discard()


def open_tensor(path_and_name: str, role: Role, bf16_bits: bool, bf16_widened: bool = False) -> OpenTensor:
    """Open `FILE.npy`, `FILE.safetensors`, `FILE.safetensors:NAME` or `FILE.pt`, reading its header alone.

    Without a name, a safetensors file's only tensor is taken, or the one whose name is well known for the
    role. With `bf16_bits`, uint16 elements are the bits of bfloat16; with `bf16_widened`, float32 elements are
    rounded to it. Raises FileError.
    """
    path, name, extension = split(path_and_name)
    file, status = open_regular(path)
    try:
        if extension == ".npy":
            layout = npy_format.read_header(file, status.st_size)
        elif extension == ".pt":
            from . import pt_files  # With torch, which is optional, and slow to load.

            layout = pt_files.read_header(file, status.st_size)
        else:
            from . import safetensors_format  # Its json takes milliseconds, which runs on .npy files need not spend.

            layouts = safetensors_format.read_header(file, status.st_size)
            name = _choose(path, layouts, name, role)
            layout = layouts[name]
        if bf16_bits and layout.dtype == "uint16":
            layout = layout._replace(dtype="bfloat16")
        if layout.dtype not in NUMBER_DTYPES:
            what = path if name is None else f"{path}: tensor '{shorten(name)}'"
            raise FileError(f"{what} has dtype {shorten(layout.stored_dtype)}, expected float32, float16 or bfloat16")
        return OpenTensor(file, Identity.of(status), name, layout, bf16_widened)
    except BaseException:
        file.close()
        raise


def create_tensor(path_and_name: str, spec: TensorSpec, inputs: Sequence[OpenTensor]) -> OutputTensor:
    """Start a new `FILE.npy`, `FILE.safetensors` or `FILE.safetensors:NAME` that is to hold one tensor.

    Its space is claimed at once; the target stays as it is until `commit`, which also checks that `inputs`
    have not changed. A target that is one of the inputs is refused. Raises FileError.
    """
    return OutputTensor(*_target(path_and_name, spec, inputs), inputs)


def check_target(path_and_name: str, spec: TensorSpec, inputs: Sequence[OpenTensor]) -> tuple[str, str | None]:
    """Refuse what `create_tensor` would refuse before it takes any space; returns path and name. Writes nothing."""
    path, name, _, _ = _target(path_and_name, spec, inputs)
    new_file.check_target(path)
    return path, name


def _target(
    path_and_name: str, spec: TensorSpec, inputs: Sequence[OpenTensor]
) -> tuple[str, str | None, TensorSpec, bytes]:
    """Path and name of a new tensor, and what its file starts with."""
    path, name, extension = split(path_and_name, WRITTEN)
    if extension == ".pt":
        raise FileError(f"{path_and_name}: expected {WRITTEN}; .pt files are only read")
    _refuse_inputs(path, inputs)
    if extension == ".npy":
        return path, None, spec, npy_format.header_bytes(spec)
    from . import safetensors_format

    name = _DEFAULT_OUTPUT_NAME if name is None else name
    if name in ("", safetensors_format.METADATA):
        raise cannot("write", path, f"a tensor cannot be called {name!r}")
    try:
        header = safetensors_format.header_bytes(name, spec)
    except UnicodeEncodeError as error:
        raise cannot("write", path, f"the tensor name '{shorten(name)}' is not valid text") from error
    return path, name, spec, header


def _choose(path: str, layouts: dict[str, Layout], name: str | None, role: Role) -> str:
    """The name of the tensor that is meant."""
    if name is not None:
        if name not in layouts:
            raise no_such_tensor(path, name, layouts)
        return name
    if len(layouts) == 1:
        return next(iter(layouts))
    known = [candidate for candidate in _WELL_KNOWN[role] if candidate in layouts]
    if not layouts:
        raise FileError(f"{path} holds no tensors")
    if len(known) != 1:
        named = f"{os.path.basename(path)}:NAME"
        raise FileError(f"{path}: which tensor is {role}? It has {listed(layouts)}; name one as {named}")
    return known[0]


def _refuse_inputs(path: str, inputs: Sequence[OpenTensor]) -> None:
    """Refuse a target that is an input, by name or through a link."""
    try:
        status = os.stat(path)
    except OSError:
        return  # Not there, or not to be reached: then it is no input, and opening it says what is wrong.
    for tensor in inputs:
        if tensor.is_same_file(status):
            raise cannot("write", path, f"it is the input {tensor.path}")


def _read_fortran(file: PositionedFile, layout: Layout) -> NDArray[Any]:
    """All elements, as an array with the first axis fastest."""
    storage = STORAGE[layout.dtype].newbyteorder(">" if layout.big_endian else "<")
    try:
        elements = np.empty(layout.shape, storage, order="F")
    except MemoryError as error:
        raise cannot(
            "read", file.path, f"its Fortran order takes {layout.nbytes} bytes of memory; store it in C order"
        ) from error
    if elements.size:
        file.read_into(layout.offset, elements.T.data.cast("B"))
    return elements

"""Beyond 2^31 elements, and beyond memory: plans, the tiles around the ends, and what is refused.

`tests/long/huge.py` runs such calls as a whole, from files to files.
"""

from __future__ import annotations

import os
import random
import threading
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.command_line import poolgrad, poolgrad_process
from tests.huge import CALLS, NUMPY, PEAK_ENTRY, B, Call, gradient, sparse_npy, stored, write_gradient

from poolgrad.cli.file_errors import FileError
from poolgrad.cli.tensor_files import create_tensor, open_tensor
from poolgrad.core import AclnnError, TensorSpec, plan_adaptive_avg_pool2d_backward, plan_avg_pool2d_backward
from poolgrad.core.executor import Executor
from poolgrad.core.tensors import STORAGE
from poolgrad.core.tiles import Box, Tiling

MORE_CALLS = [
    Call((1, 1, 32769, 32768), (1, 1, 65537, 65535), "float32", (3, 3), (2, 2), (1, 1), count_include_pad=False),
    Call((1, 1, 1, 3), (1, 1, 1, B), "float32"),
    Call((1, 1, 5, 1), (1, 1, B + 1, 1), "float16"),
    Call((1, 1, 1, B - 1), (1, 1, 1, B + 1), "float32", (1, 3)),
    Call((1, 2, B, 1), (1, 2, B // 3, 1), "float32"),
    Call((B // 2 + 1, 3, 1, 1), (B // 2 + 1, 3, 1, 1), "float16"),
]
"""Some of them would take hours to run whole."""


@dataclass(frozen=True)
class Chosen(Tiling):
    """Some of the tiles of a tiling."""

    indices: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Box:
        return super().__getitem__(self.indices[index])


class Formula:
    """gradOutput by `tests.huge.gradient`."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def read(self, box: Box, buffer: NDArray[Any] | None) -> NDArray[Any]:
        assert buffer is not None
        flat, block = buffer.reshape(-1), 1 << 16
        for first in range(0, flat.size, block):  # The arrays of 64-bit numbers would be the most of the memory.
            part = flat[first : first + block]
            places = np.unravel_index(np.arange(first, first + part.size), box.shape)
            starts = (box.planes.start, box.rows.start, box.columns.start)
            values = gradient(*(place + start for place, start in zip(places, starts, strict=True)))
            part[...] = stored(values, self._dtype).view(STORAGE[self._dtype])
        return buffer


class Collected:
    """gradInput's tiles."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._lock = threading.Lock()
        self.tiles: list[tuple[Box, NDArray[Any]]] = []

    def target(self, box: Box, buffer: NDArray[Any] | None) -> NDArray[Any]:
        assert buffer is not None
        return buffer

    def write(self, box: Box, tile: NDArray[Any]) -> None:
        with self._lock:
            self.tiles.append((box, tile.view(NUMPY[self._dtype]).copy()))


def some_tiles(executor: Executor) -> Executor:
    """The same call, but only for the first tile, the last two and the one around element 2^31."""
    tiling = executor.tiling
    last = len(tiling) - 1
    middle = last * B // executor.grad_input.size
    indices = tuple(sorted({index for index in (0, middle, last - 1, last) if 0 <= index <= last}))
    return replace(executor, tiling=Chosen(tiling.extents, tiling.tile, indices), threads=min(2, len(indices)))


@pytest.mark.parametrize("call", CALLS + MORE_CALLS, ids=str)
def test_tiles_of_huge_tensors(call: Call) -> None:
    """Numbers of elements, of rows and of bytes beyond 32 bits; and no memory but the workspace."""
    executor = some_tiles(call.plan(threads=2))
    assert executor.workspace_size < 64 << 20
    source, sink = Formula(call.dtype), Collected(call.dtype)
    tracemalloc.start()
    try:
        executor.run(source, sink)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < executor.workspace_size + sum(tile.nbytes for _, tile in sink.tiles) + (8 << 20)
    assert len(sink.tiles) == len(executor.tiling)
    chance = random.Random(call.dtype)
    for box, tile in sink.tiles:
        for number in range(60):
            # Corners first.
            place = [number & bit and extent - 1 for bit, extent in zip((1, 2, 4), tile.shape, strict=True)]
            if number >= 8:
                place = [chance.randrange(extent) for extent in tile.shape]
            starts = (box.planes.start, box.rows.start, box.columns.start)
            cell = [start + offset for start, offset in zip(starts, place, strict=True)]
            call.check(cell[0], cell[1], cell[2], tile[tuple(place)])


@pytest.mark.parametrize("call", CALLS + MORE_CALLS, ids=str)
def test_tiles_begin_and_end_with_the_tensor(call: Call) -> None:
    """The numbers of tiles and elements add up, beyond 32 bits too."""
    tiling = call.plan().tiling
    first, last = tiling[0], tiling[len(tiling) - 1]
    assert (first.planes.start, first.rows.start, first.columns.start) == (0, 0, 0)
    assert (last.planes.stop, last.rows.stop, last.columns.stop) == tiling.extents
    counts = [len(range(0, extent, size)) for extent, size in zip(tiling.extents, tiling.tile, strict=True)]
    assert len(tiling) == counts[0] * counts[1] * counts[2]


# ---- Files


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a claim of space make a file long without taking it."""
    monkeypatch.setattr(
        os, "posix_fallocate", lambda file, offset, size: os.ftruncate(file, offset + size), raising=False
    )
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)


@pytest.mark.usefixtures("sparse")
def test_tiles_from_file_to_file_beyond_4_gib(tmp_path: Path) -> None:
    call = Call((1, 1, 32769, 32768), (1, 1, 65537, 65535), "float32", (3, 3), (2, 2), (1, 1))
    grad_path, own_path = tmp_path / "g.npy", tmp_path / "x.npy"
    try:
        sparse_npy(grad_path, call.grad_shape, call.dtype)
        sparse_npy(own_path, call.shape, call.dtype)
    except OSError as error:
        pytest.skip(f"no sparse files here: {error}")
    total, width = call.grad_shape[2] * call.grad_shape[3], call.grad_shape[3]
    executor = some_tiles(call.plan(threads=1))
    write_gradient(grad_path, call, total - 40 * width, 40 * width)
    with open_tensor(str(grad_path), "grad_output", False) as g, open_tensor(str(own_path), "self", False) as x:
        assert (g.spec, x.spec) == (executor.grad_output, executor.grad_input)
        with create_tensor(str(tmp_path / "out.npy"), executor.grad_input, [g, x]) as output:
            executor.run(g.source(), output)
            (temporary,) = tmp_path.glob(".out.npy.*")
            result = np.memmap(temporary, np.float32, "r", 128, call.shape)
            assert temporary.stat().st_size == 128 + executor.grad_input.nbytes
            for row, column in [(65536, 65534), (65536, 0), (65535, 40000), (65530, 65533), (65520, 1)]:
                call.check(0, row, column, result[0, 0, row, column])
            del result
    assert sorted(os.listdir(tmp_path)) == ["g.npy", "x.npy"]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no VmHWM here")
def test_peak_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    peaks = []
    for planes in (8, 128):
        call = Call((1, planes, 7, 7), (1, planes, 512, 512), "float32")
        grad_path = sparse_npy(tmp_path / "g.npy", call.grad_shape, call.dtype)
        own_path = sparse_npy(tmp_path / "x.npy", call.shape, call.dtype)
        command = [*call.flags(), grad_path, own_path, "-o", tmp_path / "out.npy", "-q"]
        result = poolgrad_process(*command, code=PEAK_ENTRY)
        assert (result.code, result.err) == (0, "")
        peaks.append(int(result.out) / 1000)
        assert (tmp_path / "out.npy").stat().st_size == 128 + planes * 2**20
    assert peaks[1] < 150
    assert peaks[1] - peaks[0] < 20


# ---- Refused


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2**31, 2**31, 1, 1), "float32"),
        ((1, 1, 2**31, 2**32), "float16"),
        ((1, 1, 2**61, 1), "float32"),
        ((2**20, 2**20, 2**20, 8), "bfloat16"),
        ((1, 1, 2**64, 1), "float16"),
    ],
)
def test_2_to_the_63_bytes_are_refused(shape: tuple[int, int, int, int], dtype: str) -> None:
    own = TensorSpec(shape, dtype)
    grad_output = TensorSpec((*shape[:2], 1, 1), dtype)
    with pytest.raises(AclnnError, match=r"expected less than 2\^63"):
        plan_adaptive_avg_pool2d_backward(grad_output, own)
    with pytest.raises(AclnnError, match=r"2\^63"):
        plan_avg_pool2d_backward(grad_output, own, shape[2:])


def test_just_below_2_to_the_63_bytes_is_planned() -> None:
    own = TensorSpec((1, 1, 2**31 - 1, 2**31), "float16")
    executor = plan_adaptive_avg_pool2d_backward(TensorSpec((1, 1, 1, 1), "float16"), own, staging=True)
    assert executor.workspace_size < 64 << 20
    last = executor.tiling[executor.tile_count - 1]
    assert (last.rows.stop, last.columns.stop) == (2**31 - 1, 2**31)


def test_a_header_that_claims_2_to_the_63_bytes_is_refused(tmp_path: Path) -> None:
    grad_path = sparse_npy(tmp_path / "g.npy", (1, 1, 1, 1), "float16")
    own_path = tmp_path / "x.npy"
    header = b"{'descr': '<f2', 'fortran_order': False, 'shape': (1, 1, 2147483648, 2147483648), }\n"
    own_path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    result = poolgrad("adaptive2d", grad_path, own_path, "-o", tmp_path / "out.npy")
    assert (result.code, result.out) == (3, "")
    assert "impossible shape (1, 1, 2147483648, 2147483648)" in result.error


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_a_file_longer_than_files_can_be_is_refused(tmp_path: Path, suffix: str) -> None:
    """The elements would fit, but not with the header before them."""
    target = tmp_path / f"out.{suffix}"
    with pytest.raises(FileError, match=r"cannot write .*: \d+ bytes are more than a file can have"):
        create_tensor(str(target), TensorSpec((1, 2**31 - 1, 2**31 + 1, 1), "float16"), [])
    assert os.listdir(tmp_path) == []


def test_more_than_the_disk_has_is_refused_before_it_is_filled(tmp_path: Path) -> None:
    """An exbibyte, which the file system is asked for in one piece."""
    with pytest.raises(FileError, match=r"cannot write .*: .* \(\d+ bytes are needed\)"):
        create_tensor(str(tmp_path / "out.npy"), TensorSpec((1, 2**28, 2**31, 1), "float16"), [])
    assert os.listdir(tmp_path) == []

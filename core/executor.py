"""Phase 2: an executor runs a planned backward over tiles, on worker threads.

A tile is computed in two passes of `core/spread` (along columns and rows, first the one that keeps the data
between them smaller), after scaling gradOutput by the divisor:

    given -> decoded -> scaled (padded) -> half spread (padded) -> result -> target

Where no two windows overlap on either axis, every cell holds a copy of one quotient, so that is rounded to the
stored dtype while it is small and the stored elements are spread. For narrow planes the arrays between are laid
out with planes innermost, so that numpy's inner loops are long.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .precision import CHUNK, decode, encode
from .products import CubeMathType, Precision, Product
from .spread import Gather, at, gather, most_cells, plan_gather, scratch_size, source_extent
from .status import AclnnError
from .tensors import STORAGE, TensorSpec
from .tiles import Box, TileSink, TileSource, Tiling
from .windows import Windows

Array = NDArray[Any]

NARROW_PLANE = 20
"""Planes up to this many columns wide are computed with planes innermost."""

TILE = 1 << 18
"""Elements of the largest array of a tile."""

TILES_PER_THREAD = 4
LEAST_TILE = 1 << 8
"""Elements below which a tile is not made smaller for a workspace limit: its own cost would be all there is."""

_ALIGNMENT = 64


@dataclass
class RunStats:
    """Seconds of a run: busy, summed over the threads, for each kind of work, and wall-clock in total."""

    read: float = 0.0
    compute: float = 0.0
    write: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class Task:
    """A checked operator call: all that the computation depends on."""

    operator: str
    aclnn: str
    product: Product
    cube_math_type: CubeMathType | None
    precision: Precision
    accumulate: str
    grad_output: TensorSpec
    grad_input: TensorSpec
    rows: Windows
    columns: Windows
    divisor_override: int

    @property
    def values(self) -> np.dtype[Any]:
        """The dtype that quotients and sums are computed in."""
        return np.dtype(self.accumulate)

    @property
    def storage(self) -> np.dtype[Any]:
        """How tiles carry the tensors' elements."""
        return STORAGE[self.grad_output.dtype]

    @property
    def decodes(self) -> bool:
        """Whether gradOutput must be cast or rounded before it is divided."""
        return self.values != self.storage or self.precision is not Precision.AS_IS

    @property
    def encodes(self) -> bool:
        """Whether the result must be cast or rounded."""
        return self.values != self.storage or self.precision is Precision.FP16

    @property
    def rounds_early(self) -> bool:
        """Whether to round on gradOutput's grid: no cell sums two windows, and rounding commutes with copying."""
        return self.encodes and not self.overlaps

    @property
    def overlaps(self) -> bool:
        """Whether some cell is covered by more than one window."""
        return self.rows.overlap or self.columns.overlap

    @property
    def spread_dtype(self) -> np.dtype[Any]:
        """The dtype of the elements that are spread."""
        return self.storage if self.rounds_early else self.values

    @property
    def columns_first(self) -> bool:
        """Whether to spread along columns first: by the elements of each pass, those along columns at four to one."""
        rows, columns = self.rows, self.columns
        first = 4 * rows.count * columns.cells + rows.cells * columns.cells
        return first <= rows.cells * columns.count + 4 * rows.cells * columns.cells

    @property
    def planes_innermost(self) -> bool:
        """Whether the arrays between are laid out with planes innermost: numpy's inner loops are then long."""
        return self.columns.cells <= NARROW_PLANE

    @property
    def columns_contiguous(self) -> bool:
        """Whether neighbours in a row are neighbours in memory."""
        return not self.planes_innermost

    @property
    def divisor(self) -> int | None:
        """The one divisor of all windows, or None where they differ."""
        if self.divisor_override:
            return self.divisor_override
        rows, columns = self.rows.uniform_divisor, self.columns.uniform_divisor
        return None if rows is None or columns is None else rows * columns

    @property
    def divides_late(self) -> bool:
        """Whether to divide sums instead of gradOutput, which takes a divisor common to all windows.

        The sum of 16-bit values is often exact in float32; one division then decides right how a tie rounds.
        """
        holds = self.encodes or self.values == np.float64
        return holds and self.overlaps and self.divisor is not None and self._most_summed <= 2**16

    @property
    def early_scale(self) -> float:
        """What gradOutput is multiplied with when sums are divided late.

        A power of two, so that no sum overflows; with the divisor's sign, so that empty sums stay +0.
        """
        scale = 2.0 ** -(self._most_summed - 1).bit_length()
        return -scale if (self.divisor or 0) < 0 else scale

    @property
    def _most_summed(self) -> int:
        return min(self.rows.widths[1], self.rows.count) * min(self.columns.widths[1], self.columns.count)

    @property
    def extents(self) -> tuple[int, int, int]:
        """(planes, rows, columns) of gradInput."""
        planes = self.grad_input.size // (self.rows.cells * self.columns.cells)
        return planes, self.rows.cells, self.columns.cells


@dataclass(frozen=True)
class Layout:
    """The workspace of one worker: the place of each array, sized for the largest tile."""

    places: dict[str, tuple[int, int]]
    nbytes: int

    @classmethod
    def of(cls, sizes: dict[str, int]) -> Layout:
        """Arrays of the given bytes one after the other, aligned."""
        places, offset = {}, 0
        for name, size in sizes.items():
            places[name] = (offset, size)
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(places, offset)


@dataclass(frozen=True)
class Executor:
    """A planned call. It may be run any number of times, also from several threads with a workspace each."""

    task: Task
    tiling: Tiling
    threads: int
    staging: bool
    layout: Layout

    @property
    def operator(self) -> str:
        """The command's name: avg2d or adaptive2d."""
        return self.task.operator

    @property
    def aclnn(self) -> str:
        """CANN's name of the operator."""
        return self.task.aclnn

    @property
    def product(self) -> Product:
        """The product whose contract was checked."""
        return self.task.product

    @property
    def cube_math_type(self) -> CubeMathType | None:
        """avg2d's cubeMathType; adaptive2d has none."""
        return self.task.cube_math_type

    @property
    def precision(self) -> Precision:
        """What the cubeMathType came to."""
        return self.task.precision

    @property
    def accumulate(self) -> str:
        """The dtype of the sums: float32 or float64."""
        return self.task.accumulate

    @property
    def compute_dtype(self) -> str:
        """The type that the result is as good as: hfloat32, float16, or the tensors' own."""
        lowered = {Precision.HF32: "hfloat32", Precision.FP16: "float16"}
        return lowered.get(self.precision, self.grad_input.dtype)

    @property
    def grad_output(self) -> TensorSpec:
        """What the source must give."""
        return self.task.grad_output

    @property
    def grad_input(self) -> TensorSpec:
        """What the sink will get."""
        return self.task.grad_input

    @property
    def workspace_size(self) -> int:
        """Bytes of scratch memory that a run uses, over all threads."""
        return self.layout.nbytes * self.threads + _ALIGNMENT

    @property
    def tile_count(self) -> int:
        """Number of tiles."""
        return len(self.tiling)

    def run(
        self,
        source: TileSource,
        sink: TileSink,
        workspace: Any = None,
        progress: Callable[[int], None] | None = None,
    ) -> RunStats:
        """Compute every tile of `source` into `sink`.

        workspace: a writable buffer of at least `workspace_size` bytes, or None to allocate one.
        progress: called now and then, on this thread, with the bytes of gradInput that are done.
        """
        began = time.perf_counter()
        memory = self._memory(workspace)
        work = _Work(self, source, sink)
        shares = [memory[i * self.layout.nbytes :][: self.layout.nbytes] for i in range(self.threads)]
        if self.threads == 1:
            work.run(shares[0], progress)
        else:
            work.run_on_threads(shares, progress)
        work.stats.total = time.perf_counter() - began
        return work.stats

    def _memory(self, workspace: Any) -> NDArray[np.uint8]:
        if workspace is None:
            memory = np.empty(self.workspace_size, np.uint8)
        else:
            memory = _as_bytes(workspace)
            if memory.size < self.workspace_size:
                raise AclnnError(
                    f"the workspace has {memory.size} bytes, and {self.workspace_size} (workspace_size) are needed"
                )
        return memory[-memory.ctypes.data % _ALIGNMENT :]


def _as_bytes(workspace: Any) -> NDArray[np.uint8]:
    try:
        view = memoryview(workspace)
    except TypeError:
        raise AclnnError(
            f"the workspace is of type {type(workspace).__name__}; expected a writable buffer, such as a bytearray"
        ) from None
    if view.readonly or not view.c_contiguous:
        raise AclnnError("the workspace is not writable and contiguous; expected such as a bytearray or numpy.empty")
    return np.frombuffer(view.cast("B"), np.uint8)


def plan_executor(task: Task, threads: int, workspace_limit: int | None, staging: bool) -> Executor:
    """Tiles as large as a core's cache takes and the limit allows; no more threads than tiles."""
    elements, least = _tile_elements(task, threads)
    while True:
        executor = _planned(task, elements, threads, staging)
        if workspace_limit is None or executor.workspace_size <= workspace_limit:
            return executor
        if elements > least:
            elements = max(least, elements // 2)
        elif threads > 1:
            threads = 1
        else:
            raise AclnnError(
                f"the workspace limit is {workspace_limit} bytes; this call needs at least {executor.workspace_size}"
            )


def _planned(task: Task, elements: int, threads: int, staging: bool) -> Executor:
    most = most_cells(task.rows, False), most_cells(task.columns, task.columns_contiguous)
    tiling = Tiling.of(task.extents, elements, most)
    layout = plan_layout(task, tiling, staging)
    return Executor(task, tiling, min(threads, len(tiling)), staging, layout)


def _tile_elements(task: Task, threads: int) -> tuple[int, int]:
    """Elements of gradInput in a tile, the usual number and the least, by the largest array of the two passes."""
    planes, *plane = task.extents
    largest = max(task.rows.cells, task.rows.count) * max(task.columns.cells, task.columns.count)
    share = -(-planes * largest // (threads * TILES_PER_THREAD))
    usual, least = (
        max(1, size * math.prod(plane) // largest) for size in (min(TILE, max(share, TILE // 8)), LEAST_TILE)
    )
    return usual, min(usual, least)


def plan_layout(task: Task, tiling: Tiling, staging: bool) -> Layout:
    """The workspace of a worker for the largest tile of a tiling."""
    planes, height, width = tiling.tile
    rows_real, rows_padded = source_extent(task.rows, height, False)
    columns_real, columns_padded = source_extent(task.columns, width, task.columns_contiguous)
    given, out = planes * rows_real * columns_real, planes * height * width
    if task.columns_first:
        scaled, between = planes * rows_real * columns_padded, planes * rows_real * width
        half = planes * rows_padded * width
    else:
        scaled, between = planes * rows_padded * columns_real, planes * height * columns_real
        half = planes * height * columns_padded
    by_columns, by_rows = ((scaled, between), (half, out))[:: 1 if task.columns_first else -1]
    gathers = (
        scratch_size(task.columns, task.columns_contiguous, *by_columns),
        scratch_size(task.rows, False, *by_rows),
    )
    whole_rows = width == task.columns.cells
    item, value, moved = task.storage.itemsize, task.values.itemsize, task.spread_dtype.itemsize
    casts = task.encodes and not task.rounds_early
    sizes = {
        "read": given * item if staging or (task.decodes and not whole_rows) else 0,
        "decoded": given * value if task.decodes else 0,
        "rounded": given * item if task.rounds_early else 0,
        "divisor": rows_real * columns_real * value if task.divisor is None else 0,
        "scaled": scaled * moved,
        "half": half * moved,
        "gather": max(gathers) * moved,
        "result": out * moved if casts or task.planes_innermost else 0,
        "encoded": out * item if casts and task.planes_innermost else 0,
        "spare": 16 * min(CHUNK, max(given, out)) if task.decodes else 0,
        "write": out * item if staging else 0,
    }
    return Layout.of({name: size for name, size in sizes.items() if size})


@dataclass
class _Work:
    """One run: hands tiles to workers, and gathers what they report."""

    executor: Executor
    source: TileSource
    sink: TileSink
    stats: RunStats = field(default_factory=RunStats)
    done: int = 0
    stopped: bool = False
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._tiles = iter(range(self.executor.tile_count))
        self._lock = threading.Lock()
        self._finished = threading.Semaphore(0)

    def run(self, memory: NDArray[np.uint8], progress: Callable[[int], None] | None = None) -> None:
        """Tiles until none is left, on this thread."""
        worker = _Worker(self.executor, memory)
        with np.errstate(all="ignore"):
            while (index := self._next()) is not None:
                box = self.executor.tiling[index]
                times = worker.run(box, self.source, self.sink)
                self._report(box, times)
                if progress:
                    progress(self.done)

    def run_on_threads(self, memories: list[NDArray[np.uint8]], progress: Callable[[int], None] | None) -> None:
        """Tiles until none is left, on a thread for each memory. The first error stops all and is raised here."""
        threads = [threading.Thread(target=self._guarded, args=(memory,)) for memory in memories]
        try:
            for thread in threads:
                thread.start()
            running = len(threads)
            while running:
                running -= self._finished.acquire(timeout=0.1)
                if progress:
                    progress(self.done)
        finally:
            self.stopped = True
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self.error:
            raise self.error

    def _guarded(self, memory: NDArray[np.uint8]) -> None:
        try:
            self.run(memory)
        except BaseException as error:
            with self._lock:
                self.error = self.error or error
                self.stopped = True
        finally:
            self._finished.release()

    def _next(self) -> int | None:
        with self._lock:
            return None if self.stopped else next(self._tiles, None)

    def _report(self, box: Box, times: tuple[float, float, float, float]) -> None:
        planes, rows, columns = box.shape
        read, computed, written, end = times
        with self._lock:
            self.stats.read += computed - read
            self.stats.compute += written - computed
            self.stats.write += end - written
            self.done += planes * rows * columns * self.executor.task.storage.itemsize


class _Worker:
    """Computes tiles in its share of the workspace."""

    def __init__(self, executor: Executor, memory: NDArray[np.uint8]) -> None:
        self._task = executor.task
        self._layout = executor.layout
        self._memory = memory
        self._innermost = executor.task.planes_innermost
        self._span: tuple[slice | None, slice | None] = (None, None)
        self._divisor: Any = executor.task.divisor

    def run(self, box: Box, source: TileSource, sink: TileSink) -> tuple[float, float, float, float]:
        """One tile; the times at which reading, computing and writing began, and the end."""
        times = [time.perf_counter()]
        if self._span != (box.rows, box.columns):
            self._enter(box)
        need = Box(box.planes, self._rows.windows, self._columns.windows)
        given = source.read(need, self._staged("read", need.shape))
        times.append(time.perf_counter())
        target = sink.target(box, self._staged("write", box.shape))
        self._compute(given, target)
        times.append(time.perf_counter())
        sink.write(box, target)
        return times[0], times[1], times[2], time.perf_counter()

    def _enter(self, box: Box) -> None:
        """Plan the gathers and the divisors of a range of rows and columns; most tiles share one."""
        task = self._task
        if box.rows != self._span[0]:
            self._rows = plan_gather(task.rows, box.rows.start, box.rows.stop, False)
        if box.columns != self._span[1]:
            start, stop = box.columns.start, box.columns.stop
            self._columns = plan_gather(task.columns, start, stop, task.columns_contiguous)
        self._span = (box.rows, box.columns)
        if task.divisor is None:
            self._divisor = self._divisors(self._rows.windows, self._columns.windows)
        else:
            scale = task.early_scale if task.divides_late else 1
            self._divisor = task.values.type(task.divisor) * task.values.type(scale)

    def _divisors(self, rows: slice, columns: slice) -> Array:
        """The divisor of each window of a rectangle, made in blocks so that little is allocated."""
        task, block = self._task, 1024
        divisors = self._array("divisor", (rows.stop - rows.start, columns.stop - columns.start), task.values)
        for top, left in itertools.product(range(0, divisors.shape[0], block), range(0, divisors.shape[1], block)):
            part = divisors[top : top + block, left : left + block]
            height, width = (
                np.asarray(windows.divisors(windows.indices(first, first + extent)), task.values)
                for windows, first, extent in (
                    (task.rows, rows.start + top, part.shape[0]),
                    (task.columns, columns.start + left, part.shape[1]),
                )
            )
            np.multiply(height[:, None], width, out=part)
        return divisors

    def _compute(self, given: Array, target: Array) -> None:
        first, second, axis1, axis2 = self._columns, self._rows, 2, 1
        if not self._task.columns_first:
            first, second, axis1, axis2 = second, first, axis2, axis1
        scaled = self._planes("scaled", _with(given.shape, axis1, first.length))
        self._scale(given, _inside(scaled, axis1, first))
        half = self._planes("half", _with(target.shape, axis2, second.length))
        self._gather(scaled, _inside(half, axis2, second), axis1, first)
        if "result" not in self._layout.places:
            self._gather(half, target, axis2, second)
            return
        result = self._planes("result", target.shape)
        self._gather(half, result, axis2, second)
        if self._task.divides_late:
            np.divide(result, self._divisor, out=result)
        self._store(result, target)

    def _scale(self, given: Array, place: Array) -> None:
        """gradOutput over the divisor, rounded already where that commutes with spreading."""
        task = self._task
        if not task.decodes:
            np.divide(given, self._divisor, out=place)
            return
        values = self._array("decoded", given.shape, task.values)
        decode(given.reshape(-1), values.reshape(-1), task.grad_output.dtype, task.precision, self._spare())
        if not task.rounds_early:
            if task.divides_late:
                np.multiply(values, task.values.type(task.early_scale), out=place)
            else:
                np.divide(values, self._divisor, out=place)
            return
        np.divide(values, self._divisor, out=values)
        rounded = self._array("rounded", given.shape, task.storage)
        self._encode(values, rounded)
        np.copyto(place, rounded)

    def _gather(self, source: Array, out: Array, axis: int, plan: Gather) -> None:
        """`core/spread` along an axis of (planes, rows, columns), in the order of memory."""
        scratch = self._flat("gather", source.dtype)
        if self._innermost:
            gather(source.transpose(1, 2, 0), out.transpose(1, 2, 0), axis - 1, plan, scratch)
        else:
            gather(source, out, axis, plan, scratch)

    def _store(self, result: Array, target: Array) -> None:
        """A result that was not computed in place: cast, if that is due, and transposed, if it is innermost."""
        if not self._task.encodes or self._task.rounds_early:
            np.copyto(target, result)
        elif self._innermost:
            encoded = self._planes("encoded", target.shape, self._task.storage)
            self._encode(result.transpose(1, 2, 0), encoded.transpose(1, 2, 0))
            np.copyto(target, encoded)
        else:
            self._encode(result, target)

    def _encode(self, values: Array, tile: Array) -> None:
        dtype, precision = self._task.grad_input.dtype, self._task.precision
        encode(values.reshape(-1), tile.reshape(-1), dtype, precision, self._spare())

    def _planes(self, name: str, shape: tuple[int, int, int], dtype: np.dtype[Any] | None = None) -> Array:
        """An array of (planes, rows, columns), planes innermost in memory where that is the layout."""
        planes, rows, columns = shape
        dtype = dtype or self._task.spread_dtype
        if self._innermost:
            return self._array(name, (rows, columns, planes), dtype).transpose(2, 0, 1)
        return self._array(name, shape, dtype)

    def _array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self._flat(name, dtype)[: math.prod(shape)].reshape(shape)

    def _staged(self, name: str, shape: tuple[int, ...]) -> Array | None:
        return self._array(name, shape, self._task.storage) if name in self._layout.places else None

    def _spare(self) -> NDArray[np.uint32]:
        return self._flat("spare", np.dtype(np.uint32)).reshape(4, -1)

    def _flat(self, name: str, dtype: np.dtype[Any]) -> Array:
        offset, size = self._layout.places.get(name, (0, 0))
        return self._memory[offset : offset + size].view(dtype)


def _with(shape: tuple[int, ...], axis: int, extent: int) -> tuple[int, int, int]:
    extents = list(shape)
    extents[axis] = extent
    return extents[0], extents[1], extents[2]


def _inside(array: Array, axis: int, plan: Gather) -> Array:
    """The places of windows that exist; the padding around them is set to zero."""
    array[at(axis, slice(0, plan.real.start))] = 0
    array[at(axis, slice(plan.real.stop, None))] = 0
    return array[at(axis, plan.real)]

"""Phase 2: an executor runs a planned backward over tiles, on worker threads. Phase 1 ends in making one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layout import ALIGNMENT, Layout, plan_layout
from .products import CubeMathType, Precision, Product
from .sharing import share
from .spread import MOST_INDEXED, is_indexed
from .status import AclnnError
from .task import Task
from .tensors import TensorSpec
from .tiles import TileSink, TileSource, Tiling
from .worker import Worker

TILE = 1 << 20
SMALL_TILE = 1 << 17
"""Elements of the largest array of a tile, and where the cache is to hold it. What was measured is in `Executor`."""

MANY_WINDOWS = 512

TILES_PER_THREAD = 4
LEAST_TILE = 1 << 8
"""Elements below which a tile is not made smaller for a workspace limit: its own cost would be all there is."""


@dataclass
class RunStats:
    """Seconds of a run: busy, summed over the threads, for each kind of work, and wall-clock in total."""

    read: float = 0.0
    compute: float = 0.0
    write: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class Executor:
    """A planned call. It may be run any number of times, also from several threads with a workspace each.

    What was measured, on two cores with 2 MB of cache each (`tests/bench` repeats it; the README has ratios):

    - Tiles of a million elements. Smaller ones that stay in the cache are up to a fifth faster on one thread, but
      numpy holds the interpreter lock between calls: with tiles of 2**17 two threads take twice as long for cheap
      calls.
    - Planes innermost pay where windows overlap and planes are up to 7 columns wide, with tiles of 2**17: with a
      million, they take half as long again.
    - Where a cell sums over 512 windows, additions are most of the work, and tiles of 2**17 are a quarter faster.
    - 16-bit types: sums on runs of cells, and the rounding before the copies, take a third to three quarters of the
      time where strides are 3 or more, or kernels end on strides. float32 only gains where kernels end on strides.
    - Rounding to float16 takes 2.3 ns an element: a dozen passes of numpy, bounded by the cache's bandwidth. Casts by
      the processor, which oneDNN has, are out of numpy's reach. Two threads meet at the interpreter lock after every
      pass: the single call in which ml_dtypes rounds to bfloat16 takes 0.6 ns on one thread where bit arithmetic
      takes 0.9, and 0.4 for each of two where that takes 0.6 to 1.7.
    - Left out, for they gained less than a tenth: sums in blocks within a tile, results in scratch that are copied
      out at the end, indices instead of phases, 32-bit repeats as 64-bit integers.
    """

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
        return self.layout.nbytes * self.threads + ALIGNMENT

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
        stats = RunStats()
        run = _Run(self, source, sink, stats)
        parts = (memory[i * self.layout.nbytes :][: self.layout.nbytes] for i in range(self.threads))
        workers = [partial(run.tile, Worker(self.task, self.layout, part)) for part in parts]
        share(range(self.tile_count), workers, progress and (lambda: progress(run.done)))
        stats.total = time.perf_counter() - began
        return stats

    def _memory(self, workspace: Any) -> NDArray[np.uint8]:
        if workspace is None:
            memory = np.empty(self.workspace_size, np.uint8)
        else:
            memory = _as_bytes(workspace)
            if memory.size < self.workspace_size:
                raise AclnnError(
                    f"the workspace has {memory.size} bytes, and {self.workspace_size} (workspace_size) are needed"
                )
        return memory[-memory.ctypes.data % ALIGNMENT :]


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
    most = {1: task.rows.cells, 2: task.columns.cells}
    for stage in task.sums + task.copies:
        if is_indexed(stage.cover, stage.contiguous):
            most[stage.axis] = min(most[stage.axis], MOST_INDEXED)
    tiling = Tiling.of(task.extents, elements, (most[1], most[2]))
    layout = plan_layout(task, tiling.tile, staging)
    return Executor(task, tiling, min(threads, len(tiling)), staging, layout)


def _tile_elements(task: Task, threads: int) -> tuple[int, int]:
    """Elements of gradInput in a tile, the usual number and the least, by the largest array of the two passes."""
    planes, *plane = task.extents
    largest = max(task.rows.cells, task.rows.count) * max(task.columns.cells, task.columns.count)
    share = -(-planes * largest // (threads * TILES_PER_THREAD))
    most = SMALL_TILE if task.planes_innermost or task.most_summed > MANY_WINDOWS else TILE
    usual, least = (
        max(1, size * math.prod(plane) // largest) for size in (min(most, max(share, most // 8)), LEAST_TILE)
    )
    return usual, min(usual, least)


@dataclass
class _Run:
    """One run: computes tiles, on any thread, and gathers what they took."""

    executor: Executor
    source: TileSource
    sink: TileSink
    stats: RunStats
    done: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def tile(self, worker: Worker, index: int) -> None:
        """One tile, by a worker that no other thread uses meanwhile."""
        box = self.executor.tiling[index]
        with np.errstate(all="ignore"):
            read, computed, written, end = worker.run(box, self.source, self.sink)
        with self._lock:
            self.stats.read += computed - read
            self.stats.compute += written - computed
            self.stats.write += end - written
            self.done += math.prod(box.shape) * self.executor.task.storage.itemsize

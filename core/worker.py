"""Computes tiles: from gradOutput's elements to gradInput's, in a worker's share of the workspace.

    given -> decoded -> scaled by the divisor -> summed -> encoded -> copied -> target

For narrow planes the arrays between are laid out with planes innermost, so that numpy's inner loops are long.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layout import Layout
from .precision import decode, encode
from .spread import Gather, at, gather, plan_gather
from .task import Stage, Task
from .tiles import Box, TileSink, TileSource

Array = NDArray[Any]


@dataclass(frozen=True)
class Pass:
    """How to gather along an axis, and the name of the array to gather from."""

    source: str
    axis: int
    plan: Gather


class Worker:
    """Computes tiles of a task, one after the other."""

    def __init__(self, task: Task, layout: Layout, memory: NDArray[np.uint8]) -> None:
        self._task = task
        self._layout = layout
        self._memory = memory
        self._innermost = task.planes_innermost
        self._span: tuple[slice, slice] | None = None
        self._plans: dict[tuple[Stage, int, int], Gather] = {}

    def run(self, box: Box, source: TileSource, sink: TileSink) -> tuple[float, float, float, float]:
        """One tile; the times at which reading, computing and writing began, and the end."""
        times = [time.perf_counter()]
        if self._span != (box.rows, box.columns):
            self._enter(box)
        need = Box(box.planes, *self._need)
        given = source.read(need, self._staged("read", need.shape)) if math.prod(need.shape) else None
        times.append(time.perf_counter())
        target = sink.target(box, self._staged("write", box.shape))
        if given is None:
            target[...] = 0
        else:
            self._compute(given, target)
        times.append(time.perf_counter())
        sink.write(box, target)
        return times[0], times[1], times[2], time.perf_counter()

    def _enter(self, box: Box) -> None:
        """Plan the passes and the divisors for a range of rows and columns; most tiles share one."""
        task = self._task
        self._span = (box.rows, box.columns)
        spans, known, self._plans = {1: box.rows, 2: box.columns}, self._plans, {}
        self._copies = self._planned("copy", task.copies, spans, known)
        self._sums = self._planned("sum", task.sums, spans, known)
        self._need = (spans[1], spans[2])
        if task.divisor is None:
            self._divisor: Any = self._divisors(*self._need)
        else:
            scale = task.early_scale if task.divides_late else 1
            self._divisor = task.values.type(task.divisor) * task.values.type(scale)

    def _planned(
        self, name: str, stages: list[Stage], spans: dict[int, slice], known: dict[tuple[Stage, int, int], Gather]
    ) -> list[Pass]:
        """The passes to the cells in `spans`, which become what the first pass needs."""
        passes = []
        for number, stage in reversed(list(enumerate(stages))):
            key = (stage, spans[stage.axis].start, spans[stage.axis].stop)
            plan = known.get(key) or plan_gather(stage.cover, *key[1:], stage.contiguous)
            self._plans[key] = plan
            spans[stage.axis] = plan.windows
            passes.append(Pass(f"{name}{number}", stage.axis, plan))
        return passes[::-1]

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
        task = self._task
        result = self._planes("result", target.shape, task.storage) if self._innermost else target
        if task.encodes:
            middle = _after(self._sums, given.shape)
            values = self._planes("values", middle, task.values)
            self._run(self._sums, lambda place: self._scale(given, place), values)
            if task.divides_late:
                np.divide(values, self._divisor, out=values)
            self._run(self._copies, lambda place: self._encode(values, place), result)
        else:
            self._run(self._sums + self._copies, lambda place: self._scale(given, place), result)
        if result is not target:
            np.copyto(target, result)

    def _run(self, passes: list[Pass], fill: Callable[[Array], None], end: Array) -> None:
        """`fill` gets the place to put the first pass' source to; the last pass goes to `end`."""
        shape, sources, places = _before(passes, end.shape), [], []
        for step in passes:
            source = self._planes(step.source, _with(shape, step.axis, step.plan.length), end.dtype)
            sources.append(source)
            places.append(_inside(source, step.axis, step.plan))
            shape = _with(shape, step.axis, step.plan.cells)
        places.append(end)
        fill(places[0])
        for step, source, place in zip(passes, sources, places[1:], strict=True):
            self._gather(source, place, step.axis, step.plan)

    def _scale(self, given: Array, place: Array) -> None:
        """gradOutput over the divisor, or, where sums are divided, times a power of two."""
        task, values = self._task, given
        if task.decodes:
            values = self._array("decoded", given.shape, task.values)
            decode(given.reshape(-1), values.reshape(-1), task.grad_output.dtype, task.precision, self._spare())
        if task.divides_late:
            np.multiply(values, task.values.type(task.early_scale), out=place)
        else:
            np.divide(values, self._divisor, out=place)

    def _encode(self, values: Array, place: Array) -> None:
        """Computed values, cast and rounded to the stored dtype."""
        dtype, precision = self._task.grad_input.dtype, self._task.precision
        flat, out = self._in_memory(values).reshape(-1), self._in_memory(place)
        bits = out if out.flags.c_contiguous else self._array("bits", out.shape, self._task.storage)
        encode(flat, bits.reshape(-1), dtype, precision, self._spare())
        if bits is not out:
            np.copyto(out, bits)

    def _gather(self, source: Array, out: Array, axis: int, plan: Gather) -> None:
        """`core/spread` along an axis of (planes, rows, columns), in the order of memory."""
        scratch = self._flat("gather", source.dtype)
        gather(self._in_memory(source), self._in_memory(out), axis - self._innermost, plan, scratch)

    def _in_memory(self, array: Array) -> Array:
        """An array of (planes, rows, columns) as (rows, columns, planes), where that is its order in memory."""
        return array.transpose(1, 2, 0) if self._innermost else array

    def _planes(self, name: str, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> Array:
        """An array of (planes, rows, columns), planes innermost in memory where that is the layout."""
        planes, rows, columns = shape
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


def _after(passes: list[Pass], shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The extents of what passes make of a source."""
    for step in passes:
        shape = _with(shape, step.axis, step.plan.cells)
    return shape[0], shape[1], shape[2]


def _before(passes: list[Pass], shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The extents of the existing windows that passes start from."""
    for step in reversed(passes):
        shape = _with(shape, step.axis, step.plan.real.stop - step.plan.real.start)
    return shape[0], shape[1], shape[2]


def _inside(array: Array, axis: int, plan: Gather) -> Array:
    """The places of windows that exist; the padding around them is set to zero."""
    array[at(axis, slice(0, plan.real.start))] = 0
    array[at(axis, slice(plan.real.stop, None))] = 0
    return array[at(axis, plan.real)]

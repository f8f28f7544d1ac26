"""The workspace of a worker: which arrays a tile of a task takes, and where each is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .precision import CHUNK
from .spread import scratch_size, source_extent
from .task import Stage, Task

ALIGNMENT = 64


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
            aligned = -(-size // ALIGNMENT) * ALIGNMENT
            places[name] = (offset, aligned)
            offset += aligned
        return cls(places, offset)


def plan_layout(task: Task, tile: tuple[int, int, int], staging: bool) -> Layout:
    """The workspace for a tile of the given extents."""
    extents = list(tile)
    copies = _sources(task.copies, extents)
    middle = math.prod(extents)
    sums = _sources(task.sums, extents)
    given, out = math.prod(extents), math.prod(tile)
    item, value = task.storage.itemsize, task.values.itemsize
    sizes = {
        "read": given * item if staging or (task.decodes and tile[2] < task.columns.cells) else 0,
        "decoded": given * value if task.decodes else 0,
        "divisor": extents[1] * extents[2] * value if task.divisor is None else 0,
        **{f"sum{number}": source * value for number, (source, _) in enumerate(sums)},
        "values": middle * value if task.encodes else 0,
        "bits": middle * item if task.encodes else 0,
        **{f"copy{number}": source * item for number, (source, _) in enumerate(copies)},
        "gather": max(0, *(scratch * value for _, scratch in sums), *(scratch * item for _, scratch in copies), 0),
        "result": out * item if task.planes_innermost else 0,
        "spare": 16 * min(CHUNK, max(given, middle)) if task.decodes else 0,
        "write": out * item if staging else 0,
    }
    return Layout.of({name: size for name, size in sizes.items() if size})


def _sources(stages: list[Stage], extents: list[int]) -> list[tuple[int, int]]:
    """Elements of each pass' source and scratch. `extents` go from the result's to those of the first source."""
    sizes = []
    for stage in reversed(stages):
        out = math.prod(extents)
        real, padded = source_extent(stage.cover, extents[stage.axis], stage.contiguous)
        extents[stage.axis] = real
        source = math.prod(extents) // max(1, real) * padded
        sizes.append((source, scratch_size(stage.cover, stage.contiguous, source, out)))
    return sizes[::-1]

"""A checked operator call, and how it is computed: which passes, in which types, in which order.

A pass of `core/spread` works along one axis. First windows are added up, on as few cells as tell all sums apart;
these are rounded to the stored dtype; then they are copied to the cells that share them. So the rounding, which
is dear for 16-bit types, is done on the small grid wherever there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .products import CubeMathType, Precision, Product
from .tensors import STORAGE, TensorSpec
from .windows import Cover, Windows

NARROW_PLANE = 7
"""Planes up to this many columns wide are summed with planes innermost."""


@dataclass(frozen=True)
class Stage:
    """A pass along an axis of (planes, rows, columns); whether neighbours there are neighbours in memory."""

    axis: int
    cover: Cover
    contiguous: bool


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
    def overlaps(self) -> bool:
        """Whether some cell is covered by more than one window."""
        return self.rows.overlap or self.columns.overlap

    @property
    def sums(self) -> list[Stage]:
        """The passes that add windows up, in order: first the one that leaves less to the other."""
        stages = self._stages(0)
        if len(stages) == 2:
            columns, rows = stages[0].cover, stages[1].cover
            # By the elements that each pass writes, those along columns at four to one.
            columns_first = 4 * rows.count * columns.cells + rows.cells * columns.cells
            rows_first = rows.cells * columns.count + 4 * rows.cells * columns.cells
            if rows_first < columns_first:
                stages.reverse()
        return stages

    @property
    def copies(self) -> list[Stage]:
        """The passes that then copy sums to the cells that share them."""
        return self._stages(1)

    def _stages(self, which: int) -> list[Stage]:
        rows, columns = (windows.passes(self.encodes)[which] for windows in (self.rows, self.columns))
        stages = (
            Stage(2, columns, self.columns_contiguous) if columns else None,
            Stage(1, rows, False) if rows else None,
        )
        return [stage for stage in stages if stage]

    @property
    def planes_innermost(self) -> bool:
        """Whether the arrays between are laid out with planes innermost: numpy's inner loops are then long."""
        return self.overlaps and self.columns.cells <= NARROW_PLANE

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
        return holds and self.overlaps and self.divisor is not None and self.most_summed <= 2**16

    @property
    def early_scale(self) -> float:
        """What gradOutput is multiplied with when sums are divided late.

        A power of two, so that no sum overflows; with the divisor's sign, so that empty sums stay +0.
        """
        scale = 2.0 ** -(self.most_summed - 1).bit_length()
        return -scale if (self.divisor or 0) < 0 else scale

    @property
    def most_summed(self) -> int:
        """Windows that one cell sums at the most."""
        return min(self.rows.widths[1], self.rows.count) * min(self.columns.widths[1], self.columns.count)

    @property
    def extents(self) -> tuple[int, int, int]:
        """(planes, rows, columns) of gradInput."""
        planes = self.grad_input.size // (self.rows.cells * self.columns.cells)
        return planes, self.rows.cells, self.columns.cells

"""What the operators must give, by plain loops over windows. Shares nothing with poolgrad.core.

The loops run in whatever arithmetic the array holds: `fractions.Fraction` objects (`exact`) where the answer
must be exact, float64 for larger tensors and for NaN and infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Pair = tuple[int, int]


class Window(NamedTuple):
    """One window of one axis: it reads the cells [start, stop) and divides by `divisor`."""

    start: int
    stop: int
    divisor: int


@dataclass(frozen=True)
class Pool:
    """The arguments of avg2d."""

    kernel_size: Pair
    stride: Pair
    padding: Pair = (0, 0)
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int = 0

    def windows(self, axis: int, cells: int) -> list[Window]:
        """Every window of one axis (0: H, 1: W), by walking along it."""
        kernel, stride, padding = self.kernel_size[axis], self.stride[axis], self.padding[axis]
        found = []
        start = -padding
        while self._exists(start, cells, kernel, stride, padding):
            end = min(start + kernel, cells + padding)
            inside = Window(max(start, 0), min(end, cells), end - start)
            if not self.count_include_pad:
                inside = inside._replace(divisor=inside.stop - inside.start)
            found.append(inside)
            start += stride
        return found

    def _exists(self, start: int, cells: int, kernel: int, stride: int, padding: int) -> bool:
        """Floor: it fits. Ceil: the one before it left cells over, and it starts before their end."""
        if self.ceil_mode:
            return start - stride + kernel < cells + padding and start < cells
        return start + kernel <= cells + padding

    def output_size(self, cells: Pair) -> Pair:
        return len(self.windows(0, cells[0])), len(self.windows(1, cells[1]))


def adaptive_windows(cells: int, count: int) -> list[Window]:
    """Window o of adaptive2d: floor(o*n/m) up to ceil((o+1)*n/m)."""
    edges = [(o * cells // count, -((o + 1) * cells // -count)) for o in range(count)]
    return [Window(start, stop, stop - start) for start, stop in edges]


def spread(grad_output: Array, rows: list[Window], columns: list[Window], cells: Pair, override: int = 0) -> Array:
    """The adjoint of `average`: every window gives each of its cells grad_output / divisor."""
    assert grad_output.shape[-2:] == (len(rows), len(columns))
    grad_input = np.zeros((*grad_output.shape[:-2], *cells), grad_output.dtype)
    with np.errstate(all="ignore"):
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                divisor = override or row.divisor * column.divisor
                share = grad_output[..., i, j] / divisor
                grad_input[..., row.start : row.stop, column.start : column.stop] += share[..., None, None]
    return grad_input


def average(x: Array, rows: list[Window], columns: list[Window], override: int = 0) -> Array:
    """The forward pooling: the sum of every window's cells over its divisor."""
    output = np.zeros((*x.shape[:-2], len(rows), len(columns)), x.dtype)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            cells = x[..., row.start : row.stop, column.start : column.stop]
            output[..., i, j] = cells.sum(axis=(-2, -1)) / (override or row.divisor * column.divisor)
    return output


def avg_pool2d_backward(grad_output: Array, self_shape: tuple[int, ...], pool: Pool) -> Array:
    cells = self_shape[-2], self_shape[-1]
    rows, columns = pool.windows(0, cells[0]), pool.windows(1, cells[1])
    return spread(grad_output, rows, columns, cells, pool.divisor_override)


def adaptive_avg_pool2d_backward(grad_output: Array, self_shape: tuple[int, ...]) -> Array:
    cells = self_shape[-2], self_shape[-1]
    rows, columns = (adaptive_windows(n, m) for n, m in zip(cells, grad_output.shape[-2:], strict=True))
    return spread(grad_output, rows, columns, cells)


def backward(grad_output: Array, self_shape: tuple[int, ...], pool: Pool | None) -> Array:
    """avg2d with a Pool, adaptive2d with None."""
    if pool is None:
        return adaptive_avg_pool2d_backward(grad_output, self_shape)
    return avg_pool2d_backward(grad_output, self_shape, pool)


def magnitude(grad_output: Array, self_shape: tuple[int, ...], pool: Pool | None) -> Array:
    """sum(|terms|) of every cell: what the error of a float32 sum is measured against."""
    if pool is not None:
        pool = Pool(**{**vars(pool), "divisor_override": abs(pool.divisor_override)})
    return backward(abs(grad_output), self_shape, pool)


def exact(values: Array) -> Array:
    """The same finite values as Fractions."""
    flat = [Fraction(value) for value in np.asarray(values).astype(np.float64).reshape(-1).tolist()]
    result = np.empty(len(flat), object)
    result[:] = flat
    return result.reshape(np.shape(values))


class Format(NamedTuple):
    """A floating-point format: significant bits (with the hidden one), exponents of its normal numbers."""

    bits: int
    least: int
    most: int


FORMATS = {
    "float32": Format(24, -126, 127),
    "float16": Format(11, -14, 15),
    "bfloat16": Format(8, -126, 127),
    "hfloat32": Format(12, -126, 127),
}


def exponent(value: Fraction) -> int:
    """floor(log2(|value|)) of a value that is not 0."""
    top, bottom = abs(value).as_integer_ratio()
    guess = top.bit_length() - bottom.bit_length()
    return guess if abs(value) >= Fraction(2) ** guess else guess - 1


def ulp(value: Fraction, form: Format) -> Fraction:
    """The step between numbers of the format at `value`."""
    place = form.least if value == 0 else max(exponent(value), form.least)
    return Fraction(2) ** (place - form.bits + 1)


def round_one(value: Fraction, form: Format) -> float:
    """The nearest number of the format, ties to even, infinity past its range."""
    step = ulp(value, form)
    nearest = round(value / step) * step
    if abs(nearest) >= Fraction(2) ** (form.most + 1):
        return math.copysign(math.inf, value)
    return float(nearest)


def rounded(values: Array, dtype: str) -> Array:
    """Fractions rounded once to a format, in float64."""
    flat = [round_one(value, FORMATS[dtype]) for value in values.reshape(-1)]
    return np.array(flat, np.float64).reshape(values.shape)

"""Figures of a tensor's elements, gathered chunk by chunk in flat memory.

Everything is exact until the mean is rounded once, so neither the chunks nor the order of the elements matter.
Types of up to two bytes are counted by bit pattern. Wider floats are summed by a few leading bits at a time, which
float64 adds without rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 15
"""Elements at a time, few enough to stay in a core's cache."""

_LEAST_NORMAL = {
    "float16": 2.0**-14,
    "bfloat16": 2.0**-126,
    "float8_e4m3fn": 2.0**-6,
    "float8_e4m3fnuz": 2.0**-7,
    "float8_e5m2": 2.0**-14,
    "float8_e5m2fnuz": 2.0**-15,
    "float8_e8m0fnu": 2.0**-127,
}
"""The floats of up to two bytes; below it, they are subnormal."""

_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))

_UNIT = 1074
"""Every finite float is a multiple of 2**-1074, the least of float64: sums are integers in that unit."""

_LARGE = 2.0**900


@dataclass(frozen=True)
class Figures:
    """What is in a tensor. minimum, maximum and mean are of its finite elements; None where there are none.

    Integers have neither NaN nor infinities nor subnormals; a bool counts as 0 or 1.
    """

    count: int
    minimum: int | float | None
    maximum: int | float | None
    mean: float | None
    nan: int = 0
    positive_infinity: int = 0
    negative_infinity: int = 0
    zeros: int = 0
    subnormals: int = 0


def bits_dtype(dtype: str) -> np.dtype[Any] | None:
    """The unsigned integers that carry the bits of a dtype's elements; None where it has no statistics.

    >>> bits_dtype("bfloat16"), bits_dtype("bool"), bits_dtype("complex64")
    (dtype('uint16'), dtype('uint8'), None)
    """
    known = _numpy_dtype(dtype)
    return None if known is None else np.dtype(f"u{known.itemsize}")


class Statistics:
    """Gathers the figures of one tensor of a dtype that `bits_dtype` knows.

    >>> statistics = Statistics("float32")
    >>> for chunk in ([1.0, 0.0], [np.inf, 2.0]):
    ...     statistics.add(np.array(chunk, np.float32).view(np.uint32))
    >>> figures = statistics.figures()
    >>> figures.minimum, figures.maximum, figures.mean, figures.positive_infinity, figures.zeros
    (0.0, 2.0, 1.0, 1, 1)
    """

    def __init__(self, dtype: str) -> None:
        known = _numpy_dtype(dtype)
        if known is None:
            raise ValueError(f"no statistics of {dtype}")
        self._gatherer: _Gatherer
        if known.itemsize <= 2:
            self._gatherer = _Patterns(known)
        else:
            self._gatherer = _Floats(known) if known.kind == "f" else _Integers(known)

    def add(self, bits: NDArray[Any]) -> None:
        """Count in the next elements: flat, their bits in native byte order, as `bits_dtype` has them."""
        with np.errstate(invalid="ignore"):  # Signalling NaNs.
            for start in range(0, bits.size, self._gatherer.chunk):
                self._gatherer.add(bits[start : start + self._gatherer.chunk])

    def figures(self) -> Figures:
        """The figures of all elements so far."""
        return self._gatherer.figures()


class _Gatherer(Protocol):
    """Figures of one family of dtypes; `add` gets from one to `chunk` elements."""

    chunk: int

    def add(self, bits: NDArray[Any]) -> None: ...

    def figures(self) -> Figures: ...


class _Patterns:
    """Types of one or two bytes: how often each pattern is there tells everything."""

    chunk = 1 << 18  # Against the size of the table, which is gone through once a chunk.

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._counts = np.zeros(256**dtype.itemsize, np.int64)

    def add(self, bits: NDArray[Any]) -> None:
        self._counts += np.bincount(bits, minlength=self._counts.size)

    def figures(self) -> Figures:
        values, subnormal = _values_of_patterns(self._dtype)
        finite = np.isfinite(values) & (self._counts > 0)
        known, counts = values[finite], self._counts[finite].tolist()
        total = sum(count * _units(value) for count, value in zip(counts, known.tolist(), strict=True))
        exact: type[int | float] = float if self._dtype.name in _LEAST_NORMAL else int
        return Figures(
            count=int(self._counts.sum()),
            # Adding 0.0 makes a zero of -0.0.
            minimum=exact(known.min() + 0.0) if known.size else None,
            maximum=exact(known.max() + 0.0) if known.size else None,
            mean=_mean(total, sum(counts)),
            nan=self._count(np.isnan(values)),
            positive_infinity=self._count(values == np.inf),
            negative_infinity=self._count(values == -np.inf),
            zeros=self._count(values == 0),
            subnormals=self._count(subnormal),
        )

    def _count(self, which: NDArray[np.bool_]) -> int:
        return int(self._counts[which].sum())


@cache
def _values_of_patterns(dtype: np.dtype[Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The value of every bit pattern, and whether it is a subnormal."""
    patterns = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}")
    if dtype.kind == "b":
        # Bytes other than 0 and 1 are no bools, but whoever reads them takes them for true.
        return (patterns != 0).astype(np.float64), np.zeros(patterns.size, np.bool_)
    with np.errstate(invalid="ignore"):  # Signalling NaNs.
        values = patterns.view(dtype).astype(np.float64)
    least_normal = _LEAST_NORMAL.get(dtype.name, 0.0)
    return values, (values != 0) & (np.abs(values) < least_normal)


class _Floats:
    """float32 and float64."""

    chunk = _CHUNK

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._least_normal = np.finfo(dtype).tiny
        self._total = self._finite = self._nan = self._above = self._below = self._zeros = self._subnormals = 0
        self._least, self._most = np.inf, -np.inf
        self._spare = np.empty((2, _CHUNK))

    def add(self, bits: NDArray[Any]) -> None:
        values = bits.view(self._dtype)
        zeros = values.size - int(np.count_nonzero(values))
        self._zeros += zeros
        self._subnormals += int(np.count_nonzero(np.abs(values) < self._least_normal)) - zeros
        # NaN passes through both, so that a look at the two tells whether all are finite.
        if not (math.isfinite(values.min()) and math.isfinite(values.max())):
            finite = np.isfinite(values)
            self._count_special(values[~finite])
            values = values[finite]
        self._finite += values.size
        if values.size:
            self._least = min(self._least, float(values.min()))
            self._most = max(self._most, float(values.max()))
            wide, spare = self._spare[:, : values.size]
            np.copyto(wide, values)
            self._total += _exact_sum(wide, spare)

    def _count_special(self, values: NDArray[Any]) -> None:
        above, below = int(np.count_nonzero(values == np.inf)), int(np.count_nonzero(values == -np.inf))
        self._above += above
        self._below += below
        self._nan += values.size - above - below

    def figures(self) -> Figures:
        return Figures(
            count=self._finite + self._nan + self._above + self._below,
            minimum=self._least + 0.0 if self._finite else None,
            maximum=self._most + 0.0 if self._finite else None,
            mean=_mean(self._total, self._finite),
            nan=self._nan,
            positive_infinity=self._above,
            negative_infinity=self._below,
            zeros=self._zeros,
            subnormals=self._subnormals,
        )


def _exact_sum(values: NDArray[np.float64], spare: NDArray[np.float64]) -> int:
    """The sum of at most `_CHUNK` finite elements (both arrays are overwritten), in multiples of 2**-_UNIT.

    Adding and subtracting a power of two cuts every element to a few leading bits, whose sum is exact; then come
    the bits that are left. Source: Rump, Ogita and Oishi, "Accurate floating-point summation" (AccSum).
    """
    total = 0
    if max(values.max(), -values.min()) >= _LARGE:
        large = np.where(np.abs(values) >= _LARGE, values, 0)
        values -= large
        total = _exact_sum(large / _LARGE, spare) * int(_LARGE)
    while largest := max(float(values.max()), -float(values.min())):
        power = math.ldexp(1.0, math.frexp(largest)[1] + _CHUNK.bit_length())
        np.add(values, power, out=spare)
        np.subtract(spare, power, out=spare)
        np.subtract(values, spare, out=values)
        total += _units(float(spare.sum()))
    return total


class _Integers:
    """Integers of 32 and 64 bits, the latter summed in halves."""

    chunk = _CHUNK

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._count = self._zeros = self._total = 0
        self._least: int | None = None
        self._most: int | None = None

    def add(self, bits: NDArray[Any]) -> None:
        values = bits.view(self._dtype)
        least, most = int(values.min()), int(values.max())
        self._least = least if self._least is None else min(self._least, least)
        self._most = most if self._most is None else max(self._most, most)
        self._count += values.size
        self._zeros += values.size - int(np.count_nonzero(values))
        if self._dtype.itemsize == 4:
            self._total += int(values.sum(dtype=np.int64))
        else:
            low = values & values.dtype.type(0xFFFFFFFF)
            self._total += (int((values >> 32).sum()) << 32) + int(low.sum())

    def figures(self) -> Figures:
        mean = _mean(self._total, self._count, unit=0)
        return Figures(self._count, self._least, self._most, mean, zeros=self._zeros)


def _units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return (numerator << _UNIT) // denominator


def _mean(total: int, count: int, unit: int = _UNIT) -> float | None:
    """`total * 2**-unit / count`, correctly rounded, as Python divides integers."""
    return total / (count << unit) if count else None


@cache
def _numpy_dtype(name: str) -> np.dtype[Any] | None:
    """The dtype of this name, if it has statistics."""
    if name in _INTEGERS or name in ("bool", "float16", "float32", "float64"):
        return np.dtype(name)
    if name in _LEAST_NORMAL:
        import ml_dtypes

        # Older versions lack some.
        return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else None
    return None

"""Errors of one block: a run of neighbouring elements of two tensors, in float64 and in ulp.

Arrays are a workspace's, flat, and hold until its next block. A pair with a NaN or an infinity on either side has
no error: it is counted by its kind, and both its values are 0 in every array, so that sums and maxima pass it by.

Most blocks of a good result hold the same bits, or values that are a few ulp apart: these take fewer passes to
the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .precision import decode, encode
from .products import Precision
from .tensors import STORAGE

Array = NDArray[Any]
Float64s = NDArray[np.float64]
Mask = NDArray[np.bool_]

RELATIVE_FLOOR = 1e-7
"""Added to |expected| in the relative error |actual - expected| / (|expected| + 1e-7)."""

NONFINITE = {
    "both_nan": "both NaN",
    "same_infinity": "the same infinity",
    "opposite_infinity": "opposite infinities",
    "nan_only_in_actual": "NaN only in ACTUAL",
    "nan_only_in_expected": "NaN only in EXPECTED",
    "infinity_only_in_actual": "infinity in ACTUAL, finite in EXPECTED",
    "infinity_only_in_expected": "finite in ACTUAL, infinity in EXPECTED",
}
"""The kinds of pairs that are not both finite; each such pair is of one kind. The first two agree."""

AGREEING = ("both_nan", "same_infinity")

_INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
_MANTISSA = {"float32": 23, "float16": 10, "bfloat16": 7}
_SUBNORMAL_STEP = 2.0**-149
_LEAST = 2.0**-1022
"""Less than a share of any number but 0."""


class Workspace:
    """The arrays of one block at a time, of at most `size` elements."""

    def __init__(self, size: int, actual: str, expected: str) -> None:
        """Dtypes of the two tensors; `expected` may be float32 where `actual` is a 16-bit type."""
        self.dtypes = actual, expected
        self.read_actual = np.empty(size, STORAGE[actual])
        self.read_expected = np.empty(size, STORAGE[expected])
        self.doubles = np.empty((4, size), np.float64)
        self.singles = np.empty((3, size), np.float32)
        self.keys = np.empty((4, size), f"i{STORAGE[actual].itemsize}")
        self.mask = np.empty(size, np.bool_)
        self.casts = np.empty((4, 0 if actual == "float32" else size), np.uint32)


class BlockErrors:
    """The errors of a block of ACTUAL against the same block of EXPECTED.

    size: elements; differs: whether any have other bits, without which there are no errors and none of the arrays.
    absolute: |actual - expected|; relative: that over |expected| + 1e-7; magnitude: |expected|; ulps: how many
    numbers of ACTUAL's dtype apart, EXPECTED being rounded to it. sums: by name, float64 numbers whose exact total is
    the sum.
    """

    sums: dict[str, tuple[float, ...]]

    def __init__(self, actual: Array, expected: Array, work: Workspace) -> None:
        """Flat arrays of stored elements, as `STORAGE[dtype]`."""
        self._actual, self._expected, self._work = actual, expected, work
        self.size = actual.size
        self.same_dtype = work.dtypes[0] == work.dtypes[1]
        self.excluded: Mask | None = None
        self.disagree: Mask | None = None
        self.nonfinite: dict[str, int] = {}
        self._single_errors: NDArray[np.float32] | None = None
        self.magnitude: Float64s = work.doubles[0, : self.size]
        self.absolute: Float64s = work.doubles[1, : self.size]
        self.relative: Float64s = work.doubles[2, : self.size]
        self.spare: Float64s = work.doubles[3, : self.size]
        self._mask = work.mask[: self.size]
        self._error_bound: float | None = None
        signed = work.keys.dtype
        self._bits = actual.view(signed), self._rounded().view(signed)
        self._differing = np.bitwise_xor(*self._bits, out=work.keys[0, : self.size])
        # Negative where some signs differ.
        self._any_differing = int(np.bitwise_or.reduce(self._differing))
        self.differs = not self.same_dtype or self._any_differing != 0
        if self.differs:
            self._compute()
        else:
            self._compute_same()

    def _rounded(self) -> Array:
        """EXPECTED's elements in ACTUAL's dtype."""
        if self.same_dtype:
            return self._expected
        dtype = self._work.dtypes[0]
        bits = np.empty(self.size, STORAGE[dtype])
        encode(self._expected.copy(), bits, dtype, Precision.AS_IS, self._work.casts)
        return bits

    # ---- The three ways to the errors

    def _compute_same(self) -> None:
        """Where all bits are the same there is nothing but the sum of squares."""
        _, expected = self._values()
        np.copyto(self.magnitude, expected)
        squares = self._sum_of(self.magnitude, self.magnitude)
        if not math.isfinite(squares):
            self._exclude()
            self.magnitude[self.excluded] = 0
            squares = self._sum_of(self.magnitude, self.magnitude)
        self.sums = dict.fromkeys(("expected_squared", "actual_squared", "product"), (squares,))

    def _compute(self) -> None:
        if not (self._measure_close() and self._compute_close()):
            self._compute_any()

    def _measure_close(self) -> bool:
        """Distances in ulp, if they are small and between numbers of the same sign; else they are left undone."""
        if not self.same_dtype or self._any_differing < 0:
            return False
        distance = self._work.keys[1, : self.size]
        np.subtract(*self._bits, out=distance)
        np.abs(distance, out=distance)
        self.most_ulps = int(distance.max())
        self.ulps = distance.view(f"u{distance.itemsize}")
        return self.most_ulps <= 1 << (_MANTISSA[self._work.dtypes[0]] - 2)

    def _compute_close(self) -> bool:
        """Of values that close the difference is exact in float32. False where some are not finite."""
        actual, expected = self._values()
        self._single_errors = np.subtract(actual, expected, out=self._work.singles[2, : self.size])
        np.copyto(self.absolute, self._single_errors)
        np.copyto(self.magnitude, expected)
        error = self._sum_of(self.absolute, self.absolute)
        if not math.isfinite(error):
            return False
        # With actual = expected + error, one product less to sum.
        squares, shift = self._sum_of(self.magnitude, self.magnitude), self._sum_of(self.magnitude, self.absolute)
        self._finish(error, squares, (squares, shift, shift, error), (squares, shift))
        return True

    def _compute_any(self) -> None:
        values = self._values()
        self._single_errors = None  # They may have been of values that are not finite.
        a, g, d = self.relative, self.magnitude, self.absolute
        for double, single in zip((a, g), values, strict=True):
            np.copyto(double, single)
        np.subtract(a, g, out=d)
        if not math.isfinite(float(np.add.reduce(d))):
            self._exclude()
            a[self.excluded] = g[self.excluded] = d[self.excluded] = 0
        sums = (self._sum_of(a, a),), (self._sum_of(a, g),)
        self._finish(self._sum_of(d, d), self._sum_of(g, g), *sums)
        self._measure_any()

    def _finish(self, error: float, expected: float, actual: tuple[float, ...], product: tuple[float, ...]) -> None:
        """From signed errors, expected values and sums of squares and products to everything else."""
        d, g, e = self.absolute, self.magnitude, self.relative
        np.abs(d, out=d)
        np.abs(g, out=g)
        np.add(g, RELATIVE_FLOOR, out=self.spare)
        np.divide(d, self.spare, out=e)
        self.sums = {
            "expected_squared": (expected,),
            "actual_squared": actual,
            "product": product,
            "error_squared": (error,),
            "relative": (float(np.add.reduce(e)),),
        }
        self.first_most_absolute, self.first_most_relative = int(d.argmax()), int(e.argmax())
        self.most_absolute, self.most_relative = (
            float(d[self.first_most_absolute]),
            float(e[self.first_most_relative]),
        )

    def _sum_of(self, left: Float64s, right: Float64s) -> float:
        # One pass; and unlike dot it is no BLAS, whose threads would get in the way of ours.
        return float(np.einsum("i,i->", left, right))

    def _measure_any(self) -> None:
        """Distances in ulp between any two finite numbers."""
        keys = self._work.keys[1:, : self.size]
        key_a, key_g, spare = keys
        for bits, key in zip(self._bits, (key_a, key_g), strict=True):
            # Magnitudes, negated for negative numbers, are in the order of the values.
            np.bitwise_and(bits, np.iinfo(keys.dtype).max, out=key)
            np.right_shift(bits, 8 * keys.itemsize - 1, out=spare)
            np.bitwise_xor(key, spare, out=key)
            np.subtract(key, spare, out=key)
        if self.excluded is not None:
            key_a[self.excluded] = key_g[self.excluded] = 0
        np.maximum(key_a, key_g, out=spare)
        np.minimum(key_a, key_g, out=key_a)
        np.subtract(spare, key_a, out=spare)
        self.ulps = spare.view(f"u{keys.itemsize}")
        self.most_ulps = int(self.ulps.max())

    def _values(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Both sides in float32, which holds all that may be compared."""
        sides = (self._actual, self._expected)
        singles = self._work.singles[:2, : self.size]
        pairs = zip(sides, singles, self._work.dtypes, strict=True)
        actual, expected = (_widened(bits, single, dtype, self._work.casts) for bits, single, dtype in pairs)
        return actual, expected

    # ---- What is not finite

    def _exclude(self) -> None:
        """Mark and count the pairs that are not both finite."""
        a, g = self._values()
        nan_a, inf_a, nan_g, inf_g = np.isnan(a), np.isinf(a), np.isnan(g), np.isinf(g)
        both_infinite = inf_a & inf_g
        kinds = {
            "both_nan": nan_a & nan_g,
            "same_infinity": both_infinite & (a == g),
            "opposite_infinity": both_infinite & (a != g),
            "nan_only_in_actual": nan_a & ~nan_g,
            "nan_only_in_expected": nan_g & ~nan_a,
            "infinity_only_in_actual": inf_a & ~inf_g & ~nan_g,
            "infinity_only_in_expected": inf_g & ~inf_a & ~nan_a,
        }
        self.nonfinite = {kind: int(np.count_nonzero(mask)) for kind, mask in kinds.items()}
        self.excluded = nan_a | inf_a | nan_g | inf_g
        disagree = self.excluded & ~kinds["both_nan"] & ~kinds["same_infinity"]
        self.disagree = disagree if disagree.any() else None
        # Excluded pairs are no difference of finite values.
        self._differing[self.excluded] = 0

    @property
    def excluded_count(self) -> int:
        """How many pairs are not both finite."""
        return sum(self.nonfinite.values())

    # ---- What standards and figures ask for; only where something differs

    @property
    def error_bound(self) -> float:
        """What |actual - expected| / |expected| is at most, where that is cheap to tell; else infinity.

        Errors of `u` ulp of normal numbers are at most `u * 2**-23` of them: a step is at most 2**-23 of a number,
        and twice that only beyond the next power of two, where the number is nearly twice the power below it. An
        error over `u * 2**-149` is none of a subnormal number or 0.
        """
        if self._error_bound is None:
            self._error_bound = self._bounded_error()
        return self._error_bound

    def _bounded_error(self) -> float:
        if self._single_errors is None or self._work.dtypes[0] != "float32" or self.most_ulps > 1 << 12:
            return math.inf
        if self.magnitude.min() >= 2.0**-126 or self._least_error() > self.most_ulps * _SUBNORMAL_STEP:
            return self.most_ulps * 2.0**-23
        return math.inf

    def _least_error(self) -> float:
        """The least absolute error but 0."""
        assert self._single_errors is not None
        bits = self._work.keys[2, : self.size]
        np.bitwise_and(self._single_errors.view(np.int32), 0x7FFFFFFF, out=bits)
        np.subtract(bits, 1, out=bits)  # As unsigned numbers, errors of 0 become the largest.
        return float(np.uint32(int(bits.view(np.uint32).min()) + 1 & 0xFFFFFFFF).view(np.float32))

    def _surely_within(self, share: float) -> bool:
        return self.error_bound < 0.999 * share

    def zero_signs(self) -> Mask:
        """Where one side is +0 and the other -0."""
        mask: Mask = (self.ulps == 0) & (self._differing != 0)
        return mask

    def zero_sign_count(self, differing_values: int) -> int:
        """How many pairs are zeros of opposite sign, given how many pairs of finite values differ."""
        if not self.same_dtype:
            return int(np.count_nonzero(self.zero_signs() & (self.magnitude == 0) & (self.absolute == 0)))
        if self._any_differing > 0:
            return 0
        return int(np.count_nonzero(self._differing)) - differing_values

    def under(self, share: float) -> int:
        """How many finite pairs differ by less than a share of the expected value, or not at all."""
        if self._surely_within(share):
            return self.size - self.excluded_count
        np.multiply(self.magnitude, share, out=self.spare)
        np.maximum(self.spare, _LEAST, out=self.spare)  # Where 0 is expected, an error of 0 counts.
        return int(np.count_nonzero(np.less(self.absolute, self.spare, out=self._mask))) - self.excluded_count

    def least_atol(self, rtol: float) -> float:
        """The least atol that all pass with at this rtol (but for rounding up)."""
        if self._surely_within(rtol):
            return 0.0
        np.multiply(self.magnitude, rtol, out=self.spare)
        return max(0.0, float(np.subtract(self.absolute, self.spare, out=self.spare).max()))

    def least_rtol(self, atol: float, known: float) -> float:
        """The least rtol that all pass with at this atol (but for rounding up), or 0 if surely less than `known`.

        Infinite where 0 is expected.
        """
        if self.most_absolute <= atol or self._surely_within(known):
            return 0.0
        np.subtract(self.absolute, atol, out=self.spare)
        most = float(np.divide(self.spare, self.magnitude, out=self.spare).max())
        # 0 / 0 is an error of just atol where 0 is expected, which passes.
        return float(np.nanmax(self.spare)) if math.isnan(most) else most

    def ulp_histogram(self) -> list[int]:
        """How many finite pairs are 0, 1, 2-3, 4-7, 8-15 ... ulp apart."""
        counts = self._count_small() if self.most_ulps < 256 else self._count_exponents()
        counts[0] -= self.excluded_count
        return counts

    def _count_small(self) -> list[int]:
        """On bytes, comparing with each bin's start is quickest."""
        ulps, at_least = self.ulps.astype(np.uint8), [self.size]
        for power in range(self.most_ulps.bit_length()):
            at_least.append(int(np.count_nonzero(np.greater_equal(ulps, 1 << power, out=self._mask))))
        return [low - high for low, high in zip(at_least, [*at_least[1:], 0], strict=True)]

    def _count_exponents(self) -> list[int]:
        """By the binary exponents that the distances have as floats which hold them exactly."""
        small = self.most_ulps < 1 << 24
        floats: Array = self._work.singles[0, : self.size] if small else self.spare
        integers, mantissa, one = ("i4", 23, 127) if small else ("i8", 52, 1023)
        np.copyto(floats, self.ulps, casting="unsafe")
        fields = floats.view(integers)
        np.right_shift(fields, mantissa, out=fields)
        counts = np.bincount(fields, minlength=one + self.most_ulps.bit_length()).tolist()
        return [counts[0], *counts[one:]]

    def ulp_total(self) -> int:
        """The sum of the distances."""
        fits = self.most_ulps * self.size < 1 << 32
        return int(np.add.reduce(self.ulps, dtype=np.uint32 if fits else np.uint64))

    def values(self, index: int) -> tuple[float, float]:
        """ACTUAL's and EXPECTED's element, whatever they are."""
        actual, expected = self._work.dtypes
        return scalar(self._actual[index], actual), scalar(self._expected[index], expected)


def scalar(bits: Any, dtype: str) -> float:
    """A stored element's value."""
    if dtype == "bfloat16":
        return float((np.asarray(bits, np.uint32) << np.uint32(16)).view(np.float32))
    return float(np.asarray(bits).view(dtype))


def _widened(bits: Array, single: NDArray[np.float32], dtype: str, casts: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Stored elements as float32: themselves, or decoded into `single`."""
    if dtype == "float32":
        return bits
    decode(bits, single, dtype, Precision.AS_IS, casts)
    return single

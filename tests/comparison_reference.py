"""What a comparison must find, by plain arithmetic, an element at a time. Shares nothing with poolgrad.core."""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from tests.cases import NUMPY

Array = Any
Record = dict[str, Any]

FLOOR = 1e-7
TOLERANCES = {
    "float32": (1.3e-6, 1e-5),
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "hfloat32": (1e-3, 1e-5),
}
MIXED = {
    "float32": (2**-10, 2**-16, 1e-2),
    "float16": (2**-9, 2**-9, 0.1),
    "bfloat16": (2**-6, 2**-6, 1.0),
    "hfloat32": (2**-9, 2**-10, 0.1),
}
MERE = {"float32": 2**-13, "float16": 2**-10, "bfloat16": 2**-7, "hfloat32": 2**-11}
"""The thresholds as issued, not as core has them."""


def bits_of(value: Any) -> int:
    raw = np.asarray(value).tobytes()
    return int(struct.unpack("<I" if len(raw) == 4 else "<H", raw)[0])


def rank_of(value: Any) -> int:
    """The number's place among all numbers of its dtype; both zeros are 0."""
    sign = 1 << (8 * np.asarray(value).itemsize - 1)
    bits = bits_of(value)
    return -(bits - sign) if bits & sign else bits


class Pair:
    """One element of both tensors."""

    def __init__(self, index: tuple[int, ...], actual: Any, expected: Any, standard: str, row: str) -> None:
        self.index, self.actual, self.expected = index, float(actual), float(expected)
        self.finite = math.isfinite(self.actual) and math.isfinite(self.expected)
        self.kind = self._kind()
        self.agrees = self.finite or self.kind in ("both_nan", "same_infinity")
        self.error = abs(self.actual - self.expected) if self.finite else math.nan
        self.relative = self.error / (abs(self.expected) + FLOOR)
        nearest = np.asarray(expected).astype(np.asarray(actual).dtype)
        self.ulps = abs(rank_of(actual) - rank_of(nearest)) if self.finite else 0
        self.zero_signs = self.actual == self.expected == 0 and bits_of(actual) != bits_of(nearest)
        self.severity, self.mismatched = self._judged(standard, row)

    def _kind(self) -> str:
        a, g = self.actual, self.expected
        if self.finite:
            return ""
        if math.isnan(a) or math.isnan(g):
            return "both_nan" if a != a and g != g else f"nan_only_in_{'actual' if a != a else 'expected'}"
        if math.isinf(a) and math.isinf(g):
            return "same_infinity" if a == g else "opposite_infinity"
        return f"infinity_only_in_{'actual' if math.isinf(a) else 'expected'}"

    def _judged(self, standard: str, row: str) -> tuple[float, bool]:
        if not self.finite:
            return (0.0, False) if self.agrees else (math.inf, True)
        if standard == "mere-mare":
            return self.relative, self.relative >= 10 * MERE[row]
        if standard == "exact":
            return float(max(self.ulps, self.zero_signs)), self.ulps > 0 or self.zero_signs
        rtol, atol = TOLERANCES[row] if standard == "allclose" else MIXED[row][:2]
        bound = rtol * abs(self.expected) + atol
        return self.error / bound, self.error > bound


def pairs_of(actual: Array, expected: Array, standard: str, row: str) -> list[Pair]:
    return [Pair(index, actual[index], expected[index], standard, row) for index in np.ndindex(actual.shape)]


def reference(actual: Array, expected: Array, standard: str, row: str) -> Record:
    """What `compare --json` is to say, but for the verdict and what it measured of itself."""
    pairs = pairs_of(actual, expected, standard, row)
    finite = [pair for pair in pairs if pair.finite]
    kinds = [pair.kind for pair in pairs]
    rtol, atol = MIXED[row][:2] if standard == "mixed" else TOLERANCES[row]
    return {
        "compared": len(pairs),
        "finite": len(finite),
        "different": sum(pair.actual != pair.expected for pair in finite),
        "mismatched": sum(pair.mismatched for pair in pairs),
        "zeros_of_opposite_sign": sum(pair.zero_signs for pair in pairs),
        "nonfinite": {kind: kinds.count(kind) for kind in NONFINITE},
        "max_absolute_error": extreme(finite, "error"),
        "max_relative_error": extreme(finite, "relative"),
        "mere": mean([pair.relative for pair in finite]),
        "mare": max((pair.relative for pair in finite), default=0.0),
        "rmse": math.sqrt(mean([pair.error**2 for pair in finite])),
        "cosine": cosine(finite),
        "share_under": {str(share): share_under(pairs, share) for share in (0.001, 0.005)},
        "ulp": {
            "mean": sum(pair.ulps for pair in finite) / max(1, len(finite)),
            "max": max((pair.ulps for pair in finite), default=0),
            "histogram": ulp_counts(finite),
        },
        "least_rtol": max((least_rtol(pair, atol) for pair in finite), default=0.0),
        "least_atol": max((max(0.0, pair.error - rtol * abs(pair.expected)) for pair in finite), default=0.0),
        "worst_elements": worst_elements(pairs),
        "worst_planes": worst_planes(pairs),
    }


NONFINITE = [
    "both_nan",
    "same_infinity",
    "opposite_infinity",
    "nan_only_in_actual",
    "nan_only_in_expected",
    "infinity_only_in_actual",
    "infinity_only_in_expected",
]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def extreme(pairs: list[Pair], name: str) -> Any:
    most = max((getattr(pair, name) for pair in pairs), default=0.0)
    if most == 0:
        return {"value": 0.0, "index": None, "actual": None, "expected": None}
    first = next(pair for pair in pairs if getattr(pair, name) == most)
    return {"value": most, "index": list(first.index), "actual": first.actual, "expected": first.expected}


def cosine(pairs: list[Pair]) -> float:
    def dot(left: str, right: str) -> Fraction:
        return sum((Fraction(getattr(pair, left)) * Fraction(getattr(pair, right)) for pair in pairs), Fraction(0))

    squares = dot("actual", "actual") * dot("expected", "expected")
    return float(dot("actual", "expected")) / math.sqrt(squares) if squares else math.nan


def share_under(pairs: list[Pair], share: float) -> float:
    near = [
        pair.error < share * abs(pair.expected) or not pair.error if pair.finite else pair.agrees for pair in pairs
    ]
    return sum(near) / len(pairs)


def ulp_counts(pairs: list[Pair]) -> dict[int, int]:
    """By the least of each bin."""
    counts: dict[int, int] = {}
    for pair in pairs:
        least = 1 << pair.ulps.bit_length() >> 1
        counts[least] = counts.get(least, 0) + 1
    return counts


def least_rtol(pair: Pair, atol: float) -> float:
    if pair.error <= atol:
        return 0.0
    return (pair.error - atol) / abs(pair.expected) if pair.expected else math.inf


def worst_elements(pairs: list[Pair]) -> list[list[int]]:
    bad = sorted((pair for pair in pairs if pair.severity > 0), key=lambda pair: (-pair.severity, pair.index))
    return [list(pair.index) for pair in bad[:10]]


def worst_planes(pairs: list[Pair]) -> list[tuple[list[int], int, float]]:
    planes: dict[tuple[int, ...], list[Pair]] = {}
    for pair in pairs:
        planes.setdefault(pair.index[:-2], []).append(pair)
    found = [
        (list(index), sum(pair.mismatched for pair in own), max(pair.severity for pair in own))
        for index, own in planes.items()
    ]
    bad = sorted((plane for plane in found if plane[2] > 0), key=lambda plane: (-plane[1], -plane[2], plane[0]))
    return bad[:10]


def as_reference(record: Record) -> Record:
    """The same figures, as `compare --json` says them."""
    kept = ["compared", "finite", "different", "mismatched", "zeros_of_opposite_sign", "nonfinite", "mere", "mare"]
    kept += ["max_absolute_error", "max_relative_error", "rmse", "cosine", "share_under"]
    bins = record["ulp"]["histogram"]
    assert all(one["to"] == max(0, 2 * one["from"] - 1) or (one["from"], one["to"]) == (1, 1) for one in bins)
    return {
        **{name: as_number(record[name]) for name in kept},
        "ulp": {
            "mean": record["ulp"]["mean"],
            "max": record["ulp"]["max"],
            "histogram": {one["from"]: one["count"] for one in bins if one["count"]},
        },
        "least_rtol": as_number(record["least_rtol"]["value"]),
        "least_atol": record["least_atol"]["value"],
        "worst_elements": [element["index"] for element in record["worst_elements"]],
        "worst_planes": [
            (plane["plane"], plane["mismatched"], as_number(plane["severity"])) for plane in record["worst_planes"]
        ],
    }


def as_number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def assert_same(found: Any, wanted: Any, name: str = "") -> None:
    """The same, floats within the rounding of sums, everything else exactly."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), name
        for key in wanted:
            assert_same(found[key], wanted[key], f"{name}.{key}")
    elif isinstance(wanted, float) and name.split(".")[1] in ("mere", "rmse", "cosine", "least_rtol", "least_atol"):
        assert found == pytest.approx(wanted, rel=1e-13, abs=0, nan_ok=True), name
    else:
        assert found == wanted, name


# ---- Tensors


def noisy(shape: tuple[int, ...], dtype: str, noise: float, seed: int) -> tuple[Array, Array]:
    """A tensor, and one that differs in half its elements; zeros of both signs, small and large values."""
    rng = np.random.default_rng(seed)
    expected = rng.standard_normal(shape) * 10.0 ** rng.integers(-8, 3, shape)
    expected[rng.random(shape) < 0.1] = 0
    stored = expected.astype(NUMPY[dtype])
    actual = stored.astype(np.float64) * (1 + noise * rng.standard_normal(shape) * (rng.random(shape) < 0.5))
    actual = actual.astype(NUMPY[dtype])
    actual[(stored == 0) & (rng.random(shape) < 0.3)] = -0.0
    actual[(stored == 0) & (rng.random(shape) < 0.1)] = 1e-6
    return actual, stored


def with_nonfinite(actual: Array, expected: Array) -> tuple[Array, Array]:
    """One pair of each kind more than once, and a plane of NaN in both."""
    inf, nan = math.inf, math.nan
    kinds = itertools.product((inf, -inf, nan, 1.0), (inf, -inf, nan, 1.0))
    left, right = actual.reshape(-1), expected.reshape(-1)
    for number, (a, g) in enumerate(kinds):
        left[7 * number], right[7 * number] = a, g
    actual[-1, -1], expected[-1, -1] = nan, nan
    return actual, expected

"""Floating-point formats, and rounding to them: what an implementation keeps may be narrower than what it stores.

Everything is float64 arithmetic on whole arrays. Source: IEEE 754-2019, 4.3; HF32: Ascend's HFLOAT32, as in DESIGN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Format(NamedTuple):
    """A floating-point format: significant bits with the hidden one, exponents of its normal numbers."""

    name: str
    bits: int
    least: int
    most: int


FLOAT32 = Format("float32", 24, -126, 127)
FLOAT16 = Format("float16", 11, -14, 15)
BFLOAT16 = Format("bfloat16", 8, -126, 127)
HFLOAT32 = Format("HF32", 12, -126, 127)
FORMATS = {form.name: form for form in (FLOAT32, FLOAT16, BFLOAT16)}


def rounded(values: Floats, form: Format, ties_away: bool = False) -> Floats:
    """The nearest numbers of a format, ties to even (or away from zero), infinity past its range.

    >>> rounded(np.array([1 + 2**-8, 1 + 2**-7, 1e39]), BFLOAT16).tolist()
    [1.0, 1.0078125, inf]
    """
    if form is FLOAT32 and not ties_away:
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(np.float32).astype(np.float64)
    shift = np.uint64(53 - form.bits)
    bits = values.view(np.uint64)
    half = np.uint64(1 << (52 - form.bits))
    carry = half if ties_away else ((bits >> shift) & np.uint64(1)) + (half - np.uint64(1))
    result = ((bits + carry) >> shift << shift).view(np.float64)
    magnitude = np.abs(values)
    small = (magnitude < 2.0**form.least) & (magnitude > 0)
    if small.any():
        step = 2.0 ** (form.least - form.bits + 1)
        scaled = values[small] / step
        nearest = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled) if ties_away else np.rint(scaled)
        result[small] = nearest * step
    large = ~(np.abs(result) < 2.0 ** (form.most + 1)) | ~np.isfinite(values)
    if large.any():
        result[large] = np.where(np.isnan(values[large]), np.nan, np.copysign(np.inf, values[large]))
    return result


def ulp(values: Floats, form: Format) -> Floats:
    """The step between numbers of the format at each magnitude."""
    power = (np.abs(values).view(np.uint64) & np.uint64(0x7FF0000000000000)).view(np.float64)
    return np.asarray(np.maximum(power, 2.0**form.least) * 2.0 ** (1 - form.bits))

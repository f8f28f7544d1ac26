"""Casts between storage and computation, and the HF32 and FP16 roundings of cubeMathType.

Tiles carry 16-bit floats as their bits (uint16). The casts between them and float32 are bit arithmetic on
whole arrays, for numpy's own float16 casts go element by element and are several times slower, most of all on
subnormals; but ml_dtypes rounds to bfloat16 in one call. All round to nearest, ties to even (IEEE 754).

Every function works on flat contiguous arrays, at most `CHUNK` elements at a time: as many as a row of `spare`
has, four rows of scratch from the workspace. So nothing is allocated and what is between stays in cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .products import Precision

CHUNK = 1 << 17

Floats = NDArray[np.floating[Any]]
Float32s = NDArray[np.float32]
Bits16 = NDArray[np.uint16]
Spare = NDArray[np.uint32]

_SMALL = 1 << 12

_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LEAST_NORMAL_16 = np.float32(2.0**-14)
_LEAST_NORMAL_16_BITS = np.uint32(0x38800000)
_OVERFLOW_16 = np.uint32(0x477FF000)
_TWO_TO_16 = np.uint32(0x47800000)


def decode(tile: NDArray[Any], values: Floats, dtype: str, precision: Precision, spare: Spare) -> None:
    """Stored elements to values to compute with, rounded as `precision` asks.

    tile: flat, as `STORAGE[dtype]` in any byte order; values: flat float32 or float64.
    """
    chunk = spare.shape[1]
    for start in range(0, tile.size, chunk):
        part, result = tile[start : start + chunk], values[start : start + chunk]
        if result.dtype == np.float32:
            single: Float32s = result
        else:
            single = spare[2, : part.size].view(np.float32)
        if dtype == "float32":
            np.copyto(single, part)
        else:
            _WIDEN[dtype](part, single, spare)
        if precision is Precision.HF32:
            _round_hf32(single, spare)
        elif precision is Precision.FP16:
            _round_fp16(single, spare)
        if single is not result:
            np.copyto(result, single)


def encode(values: Floats, tile: NDArray[Any], dtype: str, precision: Precision, spare: Spare) -> None:
    """Computed values to stored elements, rounded once; FP16 results go through float16 to float32.

    values: flat float32 or float64, overwritten; tile: flat, native, as `STORAGE[dtype]`.
    """
    chunk = spare.shape[1]
    for start in range(0, values.size, chunk):
        part, result = values[start : start + chunk], tile[start : start + chunk]
        if dtype == "float32" and precision is not Precision.FP16:
            np.copyto(result, part, casting="same_kind")
            continue
        single: Float32s = part if part.dtype == np.float32 else _to_odd_float32(part, spare)
        if dtype == "float32":
            _round_fp16(single, spare)
            np.copyto(result, single)
        else:
            _NARROW[dtype](single, result, spare)


def _to_odd_float32(values: Floats, spare: Spare) -> Float32s:
    """float64 to float32, rounded to odd: what is then rounded to 16 bits is rounded as if once.

    Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
    rounding to odd"; float32 has over two bits more than either 16-bit type.
    """
    single = spare[2, : values.size].view(np.float32)
    np.copyto(single, values, casting="same_kind")
    # Comparisons make arrays of their own, so in small parts.
    for start in range(0, values.size, _SMALL):
        part, double = single[start : start + _SMALL], values[start : start + _SMALL]
        bits, back = part.view(np.uint32), part.astype(np.float64)
        # Infinity where float64 passes float32's range: it is infinity in 16 bits too.
        inexact = (back != double) & np.isfinite(back)
        np.subtract(bits, 1, out=bits, where=inexact & (np.abs(back) > np.abs(double)))
        np.bitwise_or(bits, 1, out=bits, where=inexact)
    return single


def _round_hf32(values: Float32s, spare: Spare) -> None:
    """float32 to HFLOAT32 in place: 11 explicit mantissa bits, the low 12 bits become 0."""
    bits = values.view(np.uint32)
    carry, nan = spare[0, : values.size], _nan_mask(values)
    np.right_shift(bits, 12, out=carry)
    np.bitwise_and(carry, 1, out=carry)
    np.add(carry, 0x7FF, out=carry)
    if nan is not None:
        carry[nan] = 0
    np.add(bits, carry, out=bits)
    np.bitwise_and(bits, np.uint32(0xFFFFF000), out=bits)
    if nan is not None:
        np.bitwise_or(bits, 0x400000, out=bits, where=nan)


def _round_fp16(values: Float32s, spare: Spare) -> None:
    """float32 to the nearest float16, in place; past 65504 + half a step it is infinity."""
    bits = spare[3].view(np.uint16)[: values.size]
    _narrow_float16(values, bits, spare)
    _widen_float16(bits, values, spare)


def _widen_float16(bits: Bits16, values: Float32s, spare: Spare) -> None:
    """float16 bits to float32.

    With the exponent moved over, a normal number is right, and a subnormal `m * 2**-24` reads as
    `y = 2**-15 + m * 2**-25`. There `2*y - 2**-14` is right, and it is the lesser of the two just there.
    """
    wide = values.view(np.uint32)
    sign, twice = spare[0, : bits.size], spare[1, : bits.size].view(np.float32)
    np.copyto(wide, bits)
    np.bitwise_and(wide, 0x8000, out=sign)
    np.left_shift(sign, 16, out=sign)
    np.bitwise_and(wide, 0x7FFF, out=wide)
    special = bits.size > 0 and bool(wide.max() >= 0x7C00)
    np.left_shift(wide, 13, out=wide)
    np.add(wide, 0x38000000, out=wide)
    np.add(values, values, out=twice)
    np.subtract(twice, _LEAST_NORMAL_16, out=twice)
    np.minimum(values, twice, out=values)
    if special:
        np.add(wide, 0x38000000, out=wide, where=wide >= 0x47800000)
    np.bitwise_or(wide, sign, out=wide)


def _narrow_float16(values: Float32s, bits: Bits16, spare: Spare) -> None:
    """float32 (overwritten) to float16 bits.

    Adding `2**(e+13)` to a magnitude of exponent e rounds it in the adder to 10 mantissa bits; the integer
    that this leaves in the low bits, plus the exponent moved over, is the float16. Below 2**-14, e stays -14.
    """
    wide = values.view(np.uint32)
    sign, magic = spare[0, : bits.size], spare[1, : bits.size]
    np.right_shift(wide, 16, out=sign)
    np.bitwise_and(sign, 0x8000, out=sign)
    np.bitwise_and(wide, _MAGNITUDE, out=wide)
    nan = None
    if bits.size and wide.max() >= _OVERFLOW_16:
        nan = wide > _INFINITY
        np.minimum(wide, _TWO_TO_16, out=wide)
    # Not maximum, which takes three times as long.
    np.clip(wide, _LEAST_NORMAL_16_BITS, _TWO_TO_16, out=magic)
    np.bitwise_and(magic, _INFINITY, out=magic)
    # The exponents' biases leave 126 << 10 to take off, which is to add 0x800 modulo 2**16.
    np.add(magic, np.uint32((13 << 23) + 0x800), out=magic)
    np.add(values, magic.view(np.float32), out=values)
    np.right_shift(magic, 13, out=magic)
    np.add(wide, magic, out=wide)
    np.add(wide, sign, out=wide)
    np.copyto(bits, wide, casting="same_kind")
    if nan is not None:
        np.bitwise_or(bits, 0x7E00, out=bits, where=nan)


def _widen_bfloat16(bits: Bits16, values: Float32s, spare: Spare) -> None:
    """bfloat16 bits to float32: they are its upper half."""
    wide = values.view(np.uint32)
    np.copyto(wide, bits)
    np.left_shift(wide, 16, out=wide)


def _narrow_bfloat16(values: Float32s, bits: Bits16, spare: Spare) -> None:
    """float32 to bfloat16 bits, in one call: seven, as bit arithmetic takes, wait for the interpreter seven times."""
    np.copyto(bits.view(_bfloat16()), values, casting="unsafe")


@functools.cache
def _bfloat16() -> np.dtype[Any]:
    import ml_dtypes  # Only a run that stores bfloat16 needs it.

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _nan_mask(values: Float32s) -> NDArray[np.bool_] | None:
    """Where the NaNs are; None, at the cost of one pass, when there is none."""
    if not values.size or not np.isnan(values.max()):
        return None
    return np.isnan(values)


_WIDEN: dict[str, Callable[[Bits16, Float32s, Spare], None]] = {
    "float16": _widen_float16,
    "bfloat16": _widen_bfloat16,
}
_NARROW: dict[str, Callable[[Float32s, Bits16, Spare], None]] = {
    "float16": _narrow_float16,
    "bfloat16": _narrow_bfloat16,
}

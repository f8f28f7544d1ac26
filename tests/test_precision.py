"""The casts of core/precision: every 16-bit value, and float32 over every exponent with ties and specials.

numpy warns of signalling NaNs; the executor silences it around all its work (test_operators checks that).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cases import NUMPY
from tests.oracle import FORMATS, round_one

from poolgrad.core.precision import CHUNK, decode, encode
from poolgrad.core.products import Precision

Bits = NDArray[Any]


def _spare() -> NDArray[np.uint32]:
    return np.empty((4, CHUNK), np.uint32)


def _decode(tile: Bits, dtype: str, precision: Precision, to: Any = np.float32) -> Bits:
    values = np.empty(tile.size, to)
    with np.errstate(all="ignore"):
        decode(tile, values, dtype, precision, _spare())
    return values


def _encode(values: Bits, dtype: str, precision: Precision = Precision.AS_IS) -> Bits:
    tile = np.empty(values.size, np.float32 if dtype == "float32" else np.uint16)
    with np.errstate(all="ignore"):
        encode(values.copy(), tile, dtype, precision, _spare())
    return tile


def _assert_same(actual: Bits, expected: Bits) -> None:
    """The same numbers, signs of zero included; NaN where NaN."""
    assert actual.dtype == expected.dtype
    with np.errstate(all="ignore"):
        nan = np.isnan(expected)
        assert np.array_equal(np.isnan(actual), nan)
    bits = f"u{expected.dtype.itemsize}"
    wrong = (actual.view(bits) != expected.view(bits)) & ~nan
    assert not wrong.any(), f"{wrong.sum()} wrong, first {actual[wrong][0]!r}, expected {expected[wrong][0]!r}"


def _float32_samples() -> Bits:
    """For each sign and exponent: random mantissas, and what is close to a tie or an end of each format."""
    rng = np.random.default_rng(1)
    mantissas = set(range(8)) | {2**23 - 1 - step for step in range(8)}
    for kept in range(1, 23):
        for leading in (0, 1, 2, 3, 2**kept - 2, 2**kept - 1):
            tie = (leading << (23 - kept)) + (1 << (22 - kept))
            mantissas |= {(tie + step) % 2**23 for step in (-1, 0, 1)}
    special = np.array(sorted(mantissas), np.uint32)
    exponents = np.arange(256, dtype=np.uint32) << 23
    random_bits = rng.integers(0, 2**23, (256, 4000), dtype=np.uint32)
    positive = np.concatenate(
        [(exponents[:, None] | special).reshape(-1), (exponents[:, None] | random_bits).reshape(-1)]
    )
    return np.concatenate([positive, positive | np.uint32(0x80000000)]).view(np.float32)


SAMPLES = _float32_samples()


def test_samples_are_enough() -> None:
    assert SAMPLES.size > 2_000_000
    assert len(np.unique(SAMPLES.view(np.uint32) >> 23)) == 512


@pytest.mark.parametrize("to", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_value_widens(dtype: str, to: Any) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        expected = bits.view(NUMPY[dtype]).astype(np.float32).astype(to)
    _assert_same(_decode(bits, dtype, Precision.AS_IS, to), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_value_survives_the_round_trip(dtype: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    back = _encode(_decode(bits, dtype, Precision.AS_IS), dtype)
    _assert_same(back.view(NUMPY[dtype]), bits.view(NUMPY[dtype]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_narrows_over_every_exponent(dtype: str) -> None:
    with np.errstate(all="ignore"):
        expected = SAMPLES.astype(NUMPY[dtype])
    _assert_same(_encode(SAMPLES, dtype).view(NUMPY[dtype]), expected)


def test_fp16_rounds_float32_through_float16() -> None:
    with np.errstate(all="ignore"):
        expected = SAMPLES.astype(np.float16).astype(np.float32)
    _assert_same(_decode(SAMPLES, "float32", Precision.FP16), expected)
    _assert_same(_encode(SAMPLES, "float32", Precision.FP16), expected)


def _hf32(bits: Bits) -> Bits:
    """Nearest multiple of 2**12 of the bits, ties to even: what HF32 rounding is to a finite float32."""
    wide = bits.astype(np.int64)
    low, kept = wide % 4096, wide // 4096
    up = (low > 2048) | ((low == 2048) & (kept % 2 == 1))
    return np.asarray((kept + up) * 4096, np.uint32)


def test_hf32_over_every_exponent() -> None:
    expected = SAMPLES.copy()
    finite = np.isfinite(SAMPLES)
    expected[finite] = _hf32(SAMPLES.view(np.uint32)[finite]).view(np.float32)
    actual = _decode(SAMPLES, "float32", Precision.HF32)
    _assert_same(actual, expected)
    assert not (actual.view(np.uint32)[finite] & 0xFFF).any()


def test_hf32_agrees_with_exact_rounding() -> None:
    values = SAMPLES[np.isfinite(SAMPLES)][::997]
    expected = [round_one(Fraction(float(value)), FORMATS["hfloat32"]) for value in values]
    assert _decode(values, "float32", Precision.HF32).tolist() == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0x3F800800, 0x3F800000),
        (0x3F801800, 0x3F802000),
        (0x3FFFFFFF, 0x40000000),
        (0x7FC00000, 0x7FC00000),
        (0x7F800000, 0x7F800000),
        (0xFF800000, 0xFF800000),
        (0x7F7FFFFF, 0x7F800000),
        (0x3F800801, 0x3F801000),
        (0xBF800800, 0xBF800000),
        (0x00000800, 0x00000000),
        (0x80000000, 0x80000000),
    ],
)
def test_hf32_vectors(given: int, expected: int) -> None:
    result = _decode(np.array([given], np.uint32).view(np.float32), "float32", Precision.HF32)
    assert hex(int(result.view(np.uint32)[0])) == hex(expected)


@pytest.mark.parametrize("precision", [Precision.HF32, Precision.FP16])
@pytest.mark.parametrize("bits", [0x7F800001, 0x7F800FFF, 0xFFFFFFFF, 0xFF800001, 0x7FFFF800])
def test_nan_with_any_payload_stays_nan(bits: int, precision: Precision) -> None:
    result = _decode(np.array([1, bits], np.uint32).view(np.float32), "float32", precision)
    assert np.isnan(result[1])
    assert result[0] == 0


def _float64_samples(dtype: str) -> Bits:
    """Doubles a hair from a tie of the 16-bit type, which a detour through float32 would put on the tie."""
    finite = np.arange(2**16, dtype=np.uint16).view(NUMPY[dtype]).astype(np.float32)
    finite = np.unique(np.abs(finite[np.isfinite(finite)]).astype(np.float64))
    ties = (finite[:-1] + finite[1:]) / 2
    top = finite[-1] + (finite[-1] - finite[-2]) / 2
    ties = np.append(ties[:: max(1, ties.size // 3000)], top)
    values = np.concatenate([ties, ties * (1 + 2.0**-40), ties * (1 - 2.0**-40), np.nextafter(ties, 0)])
    smallest = np.array([0.0, 5e-324, 2.0**-151, 2.0**-150, 2.0**-149, 1e-46, 1e300, 3.4028235e38, 3.40282357e38])
    values = np.concatenate([values, smallest])
    return np.concatenate([values, -values])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float64_narrows_with_a_single_rounding(dtype: str) -> None:
    values = _float64_samples(dtype)
    expected = np.array([round_one(Fraction(value), FORMATS[dtype]) for value in values.tolist()])
    with np.errstate(all="ignore"):
        twice = values.astype(np.float32).astype(NUMPY[dtype]).astype(np.float64)
    actual = _encode(values, dtype).view(NUMPY[dtype]).astype(np.float64)
    assert (twice != expected).sum() > 100, "the samples must show double rounding"
    wrong = actual != expected
    assert not wrong.any(), (values[wrong][:3], actual[wrong][:3], expected[wrong][:3])


def test_float64_narrows_to_fp16_in_float32_with_a_single_rounding() -> None:
    values = _float64_samples("float16")
    expected = [round_one(Fraction(value), FORMATS["float16"]) for value in values.tolist()]
    assert _encode(values, "float32", Precision.FP16).tolist() == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float64_specials(dtype: str) -> None:
    result = _encode(np.array([np.inf, -np.inf, np.nan, 1e300, -0.0]), dtype).view(NUMPY[dtype])
    assert result[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(result[2])
    assert result[3] == np.inf
    assert np.signbit(result[4])


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_any_length(dtype: str, size: int) -> None:
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    expected = values.astype(NUMPY[dtype])
    tile = _encode(values, dtype)
    _assert_same(tile.view(NUMPY[dtype]), expected)
    _assert_same(_decode(tile, dtype, Precision.AS_IS), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_byte_order_decodes(dtype: str) -> None:
    expected = np.array([1.5, -2.25, 1e-3, 0.0], np.float32).astype(NUMPY[dtype])
    native = expected.view(np.float32 if dtype == "float32" else np.uint16)
    swapped = native.astype(native.dtype.newbyteorder())
    _assert_same(_decode(swapped, dtype, Precision.AS_IS), expected.astype(np.float32))


def test_ml_dtypes_is_the_reference_for_bfloat16() -> None:
    assert np.array([0x3F80], np.uint16).view(ml_dtypes.bfloat16)[0] == 1

"""Every figure of a comparison against plain arithmetic; the standards' thresholds; the same whatever the tiles."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import LAYERS, NUMPY, Case, avg, normal
from tests.command_line import Result, load, poolgrad, save, zeros
from tests.comparison_reference import (
    FLOOR,
    MERE,
    MIXED,
    TOLERANCES,
    Record,
    as_reference,
    assert_same,
    mean,
    noisy,
    pairs_of,
    reference,
    with_nonfinite,
)

from poolgrad.core import TensorSpec, comparison, plan_adaptive_avg_pool2d_backward, plan_avg_pool2d_backward
from poolgrad.core.comparison import Comparison, ComparisonSink
from poolgrad.core.figures import ExactSum, Figures
from poolgrad.core.regions import axis_codes, cell_codes
from poolgrad.core.standards import STANDARDS, find_standard
from poolgrad.core.tensors import STORAGE
from poolgrad.core.tiles import ArrayTensor, Box, Tiling
from poolgrad.core.windows import PoolWindows

Array = Any
F32 = np.float32


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks small enough for small tensors to have several, of whole planes or of parts of them."""
    monkeypatch.setattr(comparison, "BLOCK", 100)


def compare(tmp_path: Path, actual: Array, expected: Array, *more: object) -> Result:
    return poolgrad("compare", save(tmp_path / "a.npy", actual), save(tmp_path / "g.npy", expected), *more)


# ---- Every figure


SHAPES = [(2, 3, 5, 7), (1, 2, 11, 13), (2, 2, 2, 150), (30, 4, 1, 1), (3, 9, 8)]
"""Planes smaller and larger than a block, rows longer than one, planes of one cell, rank 3."""


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("standard", STANDARDS)
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize(
    ("noise", "shape"),
    [(0, SHAPES[0]), (1e-7, SHAPES[1]), (1e-3, SHAPES[2]), (0.3, SHAPES[3]), (2e-7, SHAPES[4])],
    ids=str,
)
def test_figures(noise: float, shape: tuple[int, ...], dtype: str, standard: str, tmp_path: Path) -> None:
    actual, expected = noisy(shape, dtype, noise, seed=len(standard))
    result = compare(tmp_path, actual, expected, "--standard", standard, "--json", "--threads", 2)
    assert_same(as_reference(result.record), reference(actual, expected, standard, dtype))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("standard", STANDARDS)
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("noise", [0, 2e-3])
def test_figures_with_nan_and_infinity(noise: float, dtype: str, standard: str, tmp_path: Path) -> None:
    actual, expected = with_nonfinite(*noisy((2, 3, 5, 7), dtype, noise, seed=1))
    result = compare(tmp_path, actual, expected, "--standard", standard, "--json", "--exit-zero")
    found = as_reference(result.record)
    assert_same(found, reference(actual, expected, standard, dtype))
    assert min(found["nonfinite"].values()) >= 1
    assert result.record["verdict"] == "fail"
    assert result.code == 0
    first = result.record["worst_elements"][0]
    assert (first["severity"], first["absolute_error"], first["ulp"]) == ("inf", "nan", None)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("standard", ["mere-mare", "mixed", "allclose"])
def test_figures_of_a_16_bit_tensor_against_float32(standard: str, dtype: str, tmp_path: Path) -> None:
    expected = noisy((2, 3, 5, 7), "float32", 1e-3, seed=5)[0]
    actual = np.where(np.arange(expected.size).reshape(expected.shape) % 3, expected, expected * 1.01)
    actual = actual.astype(NUMPY[dtype])
    expected[0, 0, 0, :3] = 7e4, 3.4e38, -7e4  # Past float16, and half a step past bfloat16, but finite.
    expected[0, 0, 1, 0] = actual[0, 0, 1, 0] = math.inf
    with np.errstate(over="ignore"):
        wanted = reference_rounded(actual, expected, standard, dtype)
    found = as_reference(compare(tmp_path, actual, expected, "--standard", standard, "--json").record)
    assert found.pop("zeros_of_opposite_sign") == 0
    assert_same(found, wanted)


def reference_rounded(actual: Array, expected: Array, standard: str, dtype: str) -> Record:
    wanted = reference(actual, expected, standard, dtype)
    del wanted["zeros_of_opposite_sign"]
    return wanted


@pytest.mark.usefixtures("small_blocks")
def test_nothing_differs(tmp_path: Path) -> None:
    tensor = noisy((2, 3, 5, 7), "float32", 0, seed=2)[1]
    tensor[0, 0, 0, :2] = math.nan, math.inf
    for standard in STANDARDS:
        result = compare(tmp_path, tensor, tensor, "--standard", standard, "--json")
        assert_same(as_reference(result.record), reference(tensor, tensor, standard, "float32"))
        assert (result.code, result.record["status"], result.record["verdict"]) == (0, "ok", "pass")
        assert result.record["cosine"] == 1.0


def test_subnormal_numbers_and_errors_of_just_a_bound(tmp_path: Path) -> None:
    """What the cheap bound on relative errors must not be taken for."""
    least = np.float32(2.0**-149)
    expected = np.array([[[least, 2 * least, 1000 * least, 0, 1e-5, 1, 2**-126, 0]]], np.float32)
    actual = np.array([[[2 * least, 2 * least, 1001 * least, least, 2e-5, 1, 2**-126, 1e-5]]], np.float32)
    for standard in STANDARDS:
        found = compare(tmp_path, actual, expected, "--standard", standard, "--json").record
        assert_same(as_reference(found), reference(actual, expected, standard, "float32"))


@pytest.mark.parametrize("others", [[], [2.0**-126] * 9], ids=["alone", "with normal numbers"])
@pytest.mark.parametrize("share", [400, 900, 1100, 6000])
def test_one_ulp_of_a_subnormal_number_is_much_of_it(share: int, others: list[float], tmp_path: Path) -> None:
    """Where every error is of one ulp, which is nothing of a normal number."""
    least = 2.0**-149
    expected = np.array([[[*others, share * least, 0, 7 * least]]], F32)
    actual = np.array([[[*others, (share + 1) * least, least, 7 * least]]], F32)
    for standard in STANDARDS:
        found = compare(tmp_path, actual, expected, "--standard", standard, "--json").record
        assert_same(as_reference(found), reference(actual, expected, standard, "float32"))


@pytest.mark.parametrize("distance", [255, 256, 2**24 - 1, 2**24, 2**25 - 1, 2**30 + 1, 2**31 - 2**24 - 1])
def test_ulp_histogram_at_the_ends_of_its_bins(distance: int, tmp_path: Path) -> None:
    least, most = 1, 0x7F7FFFFF
    bits = np.array([[[least, least + distance, least, least + 3, least, most]]], np.uint32)
    actual, expected = bits.view(F32)[..., 1::2], bits.view(F32)[..., ::2]
    found = as_reference(compare(tmp_path, actual, expected, "--json").record)
    assert found["ulp"]["histogram"] == {1 << distance.bit_length() >> 1: 1, 2: 1, 2**30: 1 + (distance >= 2**30)}
    assert (found["ulp"]["max"], found["ulp"]["mean"]) == (most - least, (distance + 3 + most - least) / 3)


def test_of_equal_errors_the_first_are_listed(tmp_path: Path) -> None:
    expected = np.ones((3, 50, 2, 2), F32)
    actual = expected * F32(1.5)
    for standard in STANDARDS:
        record = compare(tmp_path, actual, expected, "--standard", standard, "--json").record
        assert [element["index"] for element in record["worst_elements"]] == [
            list(index) for index in itertools.islice(np.ndindex(actual.shape), 10)
        ]
        assert [plane["plane"] for plane in record["worst_planes"]] == [[0, channel] for channel in range(10)]


@pytest.mark.parametrize(
    ("actual", "expected", "cosine_is"), [(0, 0, 1.0), (0, 1, "nan"), (1, 0, "nan"), (1, -1, -1.0)], ids=str
)
def test_cosine_at_its_ends(actual: float, expected: float, cosine_is: Any, tmp_path: Path) -> None:
    sides = (np.full((1, 2, 3), value, np.float32) for value in (actual, expected))
    assert compare(tmp_path, *sides, "--json").record["cosine"] == cosine_is


def test_cosine_of_the_largest_and_smallest_numbers(tmp_path: Path) -> None:
    for scale in (2.0**-149, 2.0**126):
        expected = (np.array([[[1, 1]]]) * scale).astype(np.float32)
        actual = (np.array([[[1, 0]]]) * scale).astype(np.float32)
        assert compare(tmp_path, actual, expected, "--json").record["cosine"] == pytest.approx(
            math.sqrt(0.5), rel=1e-15
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ulps_count_the_numbers_between(dtype: str) -> None:
    """Of every finite number to a few others, by its place in the sorted list of all."""
    everything = np.arange(1 << 16, dtype=np.uint16).view(NUMPY[dtype])
    finite = everything[np.isfinite(everything.astype(np.float32))]
    places = {value: place for place, value in enumerate(sorted({float(value) for value in finite}))}
    other = np.random.default_rng(3).permutation(finite)
    distances = [abs(places[float(a)] - places[float(g)]) for a, g in zip(finite, other, strict=True)]
    figures = run(finite.reshape(1, 1, -1), other.reshape(1, 1, -1), "exact").figures
    assert (figures.ulp_total, figures.ulp_most) == (sum(distances), max(distances))
    assert figures.different == sum(distance > 0 for distance in distances)


def run(actual: Array, expected: Array, standard: str, threads: int = 1, **more: Any) -> Comparison:
    specs = TensorSpec.of(actual), TensorSpec.of(expected)
    found = find_standard(standard, specs[0].dtype)
    sources = (
        ArrayTensor(side.view(STORAGE[spec.dtype])) for side, spec in zip((actual, expected), specs, strict=True)
    )
    return Comparison(*specs, found, **more).run(next(sources), next(sources), threads)


# ---- The same figures whatever the tiles, threads and files


def facts(made: Comparison) -> tuple[Any, ...]:
    """Everything that a comparison knows, exactly."""
    figures: Figures = made.figures
    sums = {name: total.exact for name, total in figures.sums.items()}
    plain = {name: value for name, value in vars(figures).items() if name not in ("sums", "regions")}
    regions = {
        code: (region.compared, region.finite, region.mismatched, region.max_absolute, region.max_relative)
        for code, region in figures.regions.items()
    }
    means = {code: region.relative.exact for code, region in figures.regions.items()}
    return repr(plain), sums, regions, means, made.worst_planes, made.map.cells.tobytes()


CLIPPED = avg("clipped", (3, 4, 9, 17), (3, 2), (2, 2), (1, 1))


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=40, deadline=None)
@given(elements=st.integers(1, 700), seed=st.integers(0, 2**32), noise=st.sampled_from([0, 1e-7, 0.1, None]))
def test_any_tiles_in_any_order_give_the_same(elements: int, seed: int, noise: float | None) -> None:
    """Without `noise`, all errors are equal: which come first is then all that tells them apart."""
    if noise is None:
        expected = np.ones(CLIPPED.self_shape, F32)
        actual = expected * F32(2)
    else:
        actual, expected = with_nonfinite(*noisy(CLIPPED.self_shape, "float32", noise, seed=4))
    specs = TensorSpec.of(actual), TensorSpec.of(expected)
    windows = executor_of(CLIPPED).task.rows, executor_of(CLIPPED).task.columns
    standard = find_standard("mere-mare", "float32")
    whole = Comparison(*specs, standard, windows).run(ArrayTensor(actual), ArrayTensor(expected))
    parts = Comparison(*specs, standard, windows)
    sink = ComparisonSink(parts, ArrayTensor(actual))
    tiling = Tiling.of((12, 9, 17), elements)
    order = list(range(len(tiling)))
    random.Random(seed).shuffle(order)
    for number in order:
        box = tiling[number]
        tile = sink.target(box, None)
        tile[...] = expected.reshape(12, 9, 17)[box.planes, box.rows, box.columns]
        sink.write(box, tile)
    assert facts(parts) == facts(whole)


def executor_of(case: Case) -> Any:
    pool = case.pool
    assert pool is not None
    return plan_avg_pool2d_backward(
        TensorSpec(case.grad_shape, "float32"), TensorSpec(case.self_shape, "float32"),
        pool.kernel_size, pool.stride, pool.padding, pool.ceil_mode, pool.count_include_pad,
    )  # fmt: skip


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("standard", STANDARDS)
def test_threads_do_not_matter(standard: str) -> None:
    actual, expected = noisy((6, 7, 9, 11), "float32", 1e-6, seed=8)
    first = facts(run(actual, expected, standard))
    for threads in (2, 5):
        assert facts(run(actual, expected, standard, threads)) == first


def measured_out(record: Record) -> Record:
    """A record without times, and without what the call's way through files changes."""
    comparing = record.get("comparison", record)
    return {key: value for key, value in comparing.items() if key not in ("seconds", "actual", "expected")}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", NUMPY)
def test_files_and_the_workspace_limit_do_not_matter(dtype: str, tmp_path: Path) -> None:
    case = avg("stem", (2, 3, 20, 20), (3, 3), (2, 2), (1, 1))
    grad_output = save(tmp_path / "g.npy", normal(case.grad_shape, dtype, 1))
    own = zeros(tmp_path / "x.npy", case.self_shape, NUMPY[dtype])
    call = ["avg2d", grad_output, own, "-k", 3, "-s", 2, "-p", 1]
    assert poolgrad(*call, "-o", tmp_path / "golden.npy", "-q").code == 0
    golden = load(tmp_path / "golden.npy", dtype)
    made = (golden.astype(np.float32) * (1 + 1e-3 * np.arange(golden.size).reshape(golden.shape) % 7)).astype(
        golden.dtype
    )
    device = save(tmp_path / "device.safetensors", made)
    fortran = save(tmp_path / "device.npy", np.asfortranarray(made))
    results = [
        poolgrad(*call, "--expect", file, "--json", *more)
        for file in (device, fortran)
        for more in ((), ("--workspace-limit", 20000), ("--threads", 1, "-o", tmp_path / "again.npy"))
    ]
    records = [measured_out(result.record) for result in results]
    assert all(record == records[0] for record in records)
    assert {result.code for result in results} == {1}
    assert load(tmp_path / "again.npy", dtype).tobytes() == golden.tobytes()
    of_files = measured_out(poolgrad("compare", device, tmp_path / "golden.npy", "--json").record)
    assert {**records[0], "regions": None} == {key: of_files[key] for key in records[0]}


def test_sums_are_exact() -> None:
    values = [1e300, 1.0, -1e300, 2.0**-1074, 0.1, -0.1]
    for order in itertools.permutations(values):
        total = ExactSum()
        for value in order:
            total.add(value)
        assert total.exact == 1 + Fraction(2.0**-1074)


class Endless:
    """A tensor too large for memory, made tile by tile: `value`, and every so often something else."""

    def __init__(self, value: float, other: float) -> None:
        self._value, self._other = value, other

    def read(self, box: Box, buffer: Array) -> Array:
        buffer[...] = self._value
        buffer.reshape(-1)[:: 1 << 12] = self._other
        return buffer


@pytest.mark.parametrize("shape", [(1, 10, 1024, 1024), (10 << 10, 1024, 1, 1), (1, 1, 1, 10 << 20)], ids=str)
def test_memory_is_flat(shape: tuple[int, ...]) -> None:
    spec = TensorSpec(shape, "float32")
    made = Comparison(spec, spec, find_standard("mere-mare", "float32"))
    tracemalloc.start()
    made.run(Endless(1.0, 1.1), Endless(1.0, 1.0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made.figures.compared == 10 << 20
    assert made.figures.mismatched == (10 << 20) >> 12
    assert peak < 12 << 20 < spec.nbytes


# ---- Standards and their thresholds


def verdict(actual: list[float], expected: list[float], standard: str, row: str) -> bool:
    """Of float32 tensors computed in the type of `row`."""
    sides = [np.array([[values]], np.float32) for values in (actual, expected)]
    specs = [TensorSpec.of(side) for side in sides]
    made = Comparison(specs[0], specs[1], find_standard(standard, row))
    return made.run(ArrayTensor(sides[0]), ArrayTensor(sides[1])).figures.passed


def moved(expected: float, error: float) -> float:
    return float(np.float32(expected + error))


@pytest.mark.parametrize("row", MERE)
def test_mere_mare(row: str) -> None:
    limit = MERE[row]
    # One error in twenty: the maximum decides, at 10 T. All the same: the mean does, at T.
    one = [1.0] * 19
    assert verdict([*one, moved(1, 9.9 * limit)], [*one, 1.0], "mere-mare", row)
    assert not verdict([*one, moved(1, 10.1 * limit)], [*one, 1.0], "mere-mare", row)
    assert verdict([moved(1, 0.99 * limit)] * 20, [1.0] * 20, "mere-mare", row)
    assert not verdict([moved(1, 1.01 * limit)] * 20, [1.0] * 20, "mere-mare", row)
    # At just T it fails: relative to 1 - 1e-7 with its 1e-7, both of which float64 adds up to 1.
    assert not verdict([limit * FLOOR], [0.0], "mere-mare", row) or float(np.float32(limit * FLOOR)) < limit * FLOOR


@pytest.mark.parametrize("row", MIXED)
def test_mixed(row: str) -> None:
    rtol, atol, limit = MIXED[row]
    near, far = 0.99 * (rtol + atol), 1.01 * (rtol + atol)
    assert far < limit
    right = [1.0] * 99
    assert verdict([*right, moved(1, far)], [*right, 1.0], "mixed", row)
    assert not verdict([*right[1:], moved(1, far), moved(1, far)], [1.0] * 100, "mixed", row)
    assert verdict([moved(1, near)] * 100, [1.0] * 100, "mixed", row)
    assert not verdict([*right, moved(1, 1.01 * limit)], [*right, 1.0], "mixed", row)
    assert verdict([*right, moved(1, 0.99 * limit)], [*right, 1.0], "mixed", row)


@pytest.mark.parametrize(("row", "bits"), [("float32", 23), ("float16", 10), ("bfloat16", 7), ("hfloat32", 11)])
def test_mixed_takes_32_ulp_of_the_row_over_the_limit(row: str, bits: int) -> None:
    large, step = 2.0**20, 2.0 ** (20 - bits)
    assert 32 * step > MIXED[row][2]
    right = [large] * 99
    assert verdict([*right, large + 32 * step], [*right, large], "mixed", row)
    assert not verdict([*right, large + 33 * step], [*right, large], "mixed", row)


@pytest.mark.parametrize("row", TOLERANCES)
def test_allclose(row: str) -> None:
    rtol, atol = TOLERANCES[row]
    for expected in (0.0, 1.0, -1000.0):
        bound = atol + rtol * abs(expected)
        # Float32 near 1000 has steps of 6e-5: enough room on both sides.
        assert verdict([moved(expected, 0.95 * bound)], [expected], "allclose", row)
        assert not verdict([moved(expected, 1.05 * bound)], [expected], "allclose", row)


def test_exact() -> None:
    assert verdict([1.0, 0.0, math.inf], [1.0, 0.0, math.inf], "exact", "float32")
    assert not verdict([1.0, 0.0], [1.0, -0.0], "exact", "float32")
    assert not verdict([np.nextafter(np.float32(1), np.float32(2))], [1.0], "exact", "float32")


@pytest.mark.parametrize("dtype", NUMPY)
def test_nan_payloads_are_the_same_to_exact(dtype: str, tmp_path: Path) -> None:
    quiet = np.full((1, 1, 2, 2), math.nan, NUMPY[dtype])
    other = quiet.view(f"u{quiet.itemsize}") | np.array(5, f"u{quiet.itemsize}")
    other[0, 0, 0, 0] ^= 1 << (8 * other.itemsize - 1)
    result = compare(tmp_path, other.view(NUMPY[dtype]), quiet, "--standard", "exact", "--json")
    assert result.code == 0
    assert result.record["nonfinite"]["both_nan"] == 4


@pytest.mark.parametrize("standard", STANDARDS)
@pytest.mark.parametrize(
    ("a", "g"), [(math.nan, 1), (1, math.nan), (math.inf, 1), (1, -math.inf), (math.inf, -math.inf)]
)
def test_a_nonfinite_disagreement_fails_every_standard(a: float, g: float, standard: str) -> None:
    assert not verdict([1.0] * 999 + [a], [1.0] * 999 + [g], standard, "bfloat16")


def test_least_tolerances_pass_and_less_does_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        expected = (rng.standard_normal((1, 2, 4, 5)) * 10.0 ** rng.integers(-6, 3)).astype(np.float32)
        expected[expected == 0] = 1
        actual = (expected * (1 + 10.0 ** rng.integers(-7, 0) * rng.standard_normal(expected.shape))).astype(
            np.float32
        )
        first = compare(tmp_path, actual, expected, "--standard", "allclose", "--json").record
        rtol, atol = (first[name]["value"] for name in ("least_rtol", "least_atol"))
        for flags, least in ((["--rtol", "{}"], rtol), (["--atol", "{}"], atol)):
            for factor, code in ((1, 0), (1 - 1e-12, 1)):
                if least == 0 and factor < 1:
                    continue
                text = [flag.format(repr(least * factor)) for flag in flags]
                assert compare(tmp_path, actual, expected, "--standard", "allclose", *text, "-q").code == code, seed


def test_least_tolerances_pass_to_the_last_digit() -> None:
    rng = np.random.default_rng(1)
    for _ in range(400):
        expected = (rng.standard_normal((1, 1, 3)) * 10.0 ** rng.integers(-6, 4)).astype(F32)
        actual = (expected * (1 + 10.0 ** rng.integers(-6, 1) * rng.standard_normal(3))).astype(F32)
        first = run(actual, expected, "allclose").figures
        spec = TensorSpec.of(actual)
        for tolerance in ({"rtol": first.least_rtol}, {"atol": first.least_atol}):
            made = Comparison(spec, spec, find_standard("allclose", "float32", **tolerance))
            assert made.run(ArrayTensor(actual), ArrayTensor(expected)).figures.passed, (actual, expected)


def test_an_error_of_just_atol_where_0_is_expected_passes(tmp_path: Path) -> None:
    actual, expected = np.array([[[0.5, 2, 0]]], F32), np.array([[[0, 1, 0]]], F32)
    flags = ["--standard", "allclose", "--atol", 0.5, "--json"]
    record = compare(tmp_path, actual, expected, *flags).record
    assert record["mismatched"] == 1
    assert record["least_rtol"]["value"] == pytest.approx(0.5, rel=1e-14)
    assert compare(tmp_path, actual, expected, *flags, "--rtol", 0.5).code == 0


def test_rtol_of_0_and_atol_of_0(tmp_path: Path) -> None:
    tensor = np.array([[[0, 1, -2]]], np.float32)
    flags = ["--standard", "allclose", "--rtol", 0, "--atol", 0, "--json"]
    assert compare(tmp_path, tensor, tensor, *flags).code == 0
    record = compare(tmp_path, tensor + np.array([1, 0, 0], F32), tensor, *flags).record
    assert (record["mismatched"], record["least_rtol"]["value"]) == (1, "inf")
    assert record["least_atol"]["value"] == pytest.approx(1, rel=1e-14)
    assert record["worst_elements"][0]["severity"] == "inf"
    signs = compare(tmp_path, tensor * np.array([-1, 1, 1], F32), tensor, *flags)
    assert (signs.code, signs.record["zeros_of_opposite_sign"]) == (0, 1)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", NUMPY)
def test_allclose_agrees_with_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    verdicts = []
    for seed in range(60):
        actual, expected = noisy((1, 2, 3, 4), dtype, TOLERANCES[dtype][0] / 2, seed)
        if seed % 5 == 0:
            actual[0, 0, 0, 0] = expected[0, 0, 0, 0] = (math.nan, math.inf)[seed % 2]
        sides = (torch.from_numpy(side.astype(np.float32)).to(getattr(torch, dtype)) for side in (actual, expected))
        try:
            torch.testing.assert_close(*sides, equal_nan=True)
            close = True
        except AssertionError:
            close = False
        assert run(actual, expected, "allclose").figures.passed == close, seed
        verdicts.append(close)
    assert len(set(verdicts)) == 2


@pytest.mark.torch
def test_cosine_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    actual, expected = noisy((2, 3, 20, 20), "float32", 0.5, seed=3)
    sides = (torch.from_numpy(side.astype(np.float64).reshape(-1)) for side in (actual, expected))
    cosine_of_torch = float(torch.nn.functional.cosine_similarity(*sides, dim=0))
    assert run(actual, expected, "mere-mare").figures.cosine == pytest.approx(cosine_of_torch, rel=1e-13)


# ---- Regions, map


def brute_codes(case: Case) -> Array:
    """Flags of each cell by walking all windows: 1 some window, 2 several, 4 a clipped one."""
    height, width = case.self_shape[-2:]
    codes = np.zeros((height, width), int)
    cover = np.zeros((height, width), int)
    sides = [list(nominal_windows(case, axis)) for axis in (0, 1)]
    for (top, bottom), (left, right) in itertools.product(*sides):
        area = np.s_[max(top, 0) : min(bottom, height), max(left, 0) : min(right, width)]
        cover[area] += 1
        if case.pool is not None and (top < 0 or left < 0 or bottom > height or right > width):
            codes[area] |= 4
    return codes | (cover > 0) | 2 * (cover > 1)


def nominal_windows(case: Case, axis: int) -> Iterator[tuple[int, int]]:
    for number, window in enumerate(case.windows(axis)):
        if case.pool is None:
            yield window.start, window.stop
        else:
            start = number * case.pool.stride[axis] - case.pool.padding[axis]
            yield start, start + case.pool.kernel_size[axis]


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_region_codes(case: Case) -> None:
    specs = TensorSpec(case.grad_shape, "float32"), TensorSpec(case.self_shape, "float32")
    task = executor_of(case).task if case.pool else plan_adaptive_avg_pool2d_backward(*specs).task
    axes = zip((task.rows, task.columns), case.self_shape[-2:], strict=True)
    codes = cell_codes(*(axis_codes(axis, 0, cells) for axis, cells in axes))
    assert codes.tolist() == brute_codes(case).tolist()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("nonfinite", [False, True])
def test_figures_of_regions(nonfinite: bool) -> None:
    actual, expected = noisy(CLIPPED.self_shape, "float32", 0.01, seed=6)
    if nonfinite:
        actual, expected = with_nonfinite(actual, expected)
    task = executor_of(CLIPPED).task
    made = run(actual, expected, "mere-mare", 2, windows=(task.rows, task.columns)).figures
    pairs = pairs_of(actual, expected, "mere-mare", "float32")
    codes = brute_codes(CLIPPED)
    wanted = {"clipped": (5, 5), "not_clipped": (5, 1), "several": (3, 3), "one": (3, 1), "none": (1, 0)}
    for name, (mask, flags) in wanted.items():
        own = [pair for pair in pairs if codes[pair.index[-2:]] & mask == flags]
        finite = [pair for pair in own if pair.finite]
        kind = made.kind(name)
        assert (kind.compared, kind.finite) == (len(own), len(finite)), name
        assert kind.mismatched == sum(pair.mismatched for pair in own)
        assert kind.max_absolute == max((pair.error for pair in finite), default=0.0)
        assert kind.max_relative == max((pair.relative for pair in finite), default=0.0)
        assert kind.mere == pytest.approx(mean([pair.relative for pair in finite]), rel=1e-13)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "shape", [(3, 4, 9, 17), (2, 1, 700, 3), (1, 2, 3, 1101), (2, 1, 1030, 2), (40, 3, 2, 2)], ids=str
)
def test_error_map(shape: tuple[int, ...]) -> None:
    """The largest of each cell; beyond 512 of the neighbours that share one."""
    actual, expected = noisy(shape, "float32", 0.01, seed=9)
    made = run(actual, expected, "mere-mare")
    errors = np.abs(actual.astype(float) - expected) / (np.abs(expected.astype(float)) + FLOOR)
    largest = errors.reshape(-1, *shape[-2:]).max(axis=0)
    high, wide = (math.ceil(extent / 512) for extent in shape[-2:])
    wanted = np.zeros((math.ceil(shape[-2] / high), math.ceil(shape[-1] / wide)))
    for (row, column), value in np.ndenumerate(largest):
        place = row // high, column // wide
        wanted[place] = max(wanted[place], value)
    assert made.map.cells.tolist() == wanted.tolist()


def test_error_map_of_wide_rows_in_whole_blocks() -> None:
    """Of few neighbours to a cell, and of many."""
    for columns in (1024, 1026, 1027, 16_000, 40_000):
        actual, expected = noisy((1, 2, 3, columns), "float32", 0.01, seed=9)
        made = run(actual, expected, "mere-mare")
        errors = np.abs(actual.astype(float) - expected) / (np.abs(expected.astype(float)) + FLOOR)
        wide = math.ceil(columns / 512)
        padded = np.pad(errors.max(axis=(0, 1)), ((0, 0), (0, -columns % wide)))
        assert made.map.cells.tolist() == padded.reshape(3, -1, wide).max(axis=2).tolist()


def test_region_codes_of_parameters_past_int64() -> None:
    far = 2**62
    assert axis_codes(PoolWindows.of(5, 1, far, far, far // 2, True), 0, 5).tolist() == [5] * 5


# ---- Histograms for pictures, errors, progress


@pytest.mark.parametrize("noise", [0, 0.01])
def test_charts_count_every_finite_pair(noise: float) -> None:
    actual, expected = with_nonfinite(*noisy((2, 3, 16, 17), "float32", noise, seed=1))
    made = run(actual, expected, "mere-mare", charts=True)
    charts = made.charts
    assert charts is not None
    pairs = [pair for pair in pairs_of(actual, expected, "mere-mare", "float32") if pair.finite]
    wanted = np.zeros_like(charts.errors)
    relative = np.zeros_like(charts.relative)
    for pair in pairs:
        wanted[chart_place(abs(pair.expected)), chart_place(pair.error)] += 1
        relative[chart_place(pair.relative)] += 1
    assert charts.errors.tolist() == wanted.tolist()
    assert charts.relative.tolist() == relative.tolist()


def chart_place(value: float) -> int:
    return min(319, max(1, math.frexp(value)[1] - 1 + 160)) if value else 0


def test_an_error_on_one_thread_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "BLOCK", 100)
    tensor = np.ones((1, 9, 10, 10), np.float32)

    class Broken(ArrayTensor):
        def read(self, box: Box, buffer: Array) -> Array:
            if box.planes.start == 5:
                raise OSError("broken")
            return super().read(box, buffer)

    spec = TensorSpec.of(tensor)
    for threads in (1, 3):
        made = Comparison(spec, spec, find_standard("exact", "float32"))
        with pytest.raises(OSError, match="broken"):
            made.run(ArrayTensor(tensor), Broken(tensor), threads)


def test_progress_ends_with_all() -> None:
    tensor = np.ones((1, 9, 100, 100), np.float32)
    spec = TensorSpec.of(tensor)
    for threads in (1, 2):
        seen: list[int] = []
        made = Comparison(spec, spec, find_standard("exact", "float32"))
        made.run(ArrayTensor(tensor), ArrayTensor(tensor), threads, seen.append)
        assert seen[-1] == tensor.size

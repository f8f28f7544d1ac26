"""compare and --expect: every figure against plain arithmetic, the standards' thresholds, the report, the files."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import random
import re
import struct
import tracemalloc
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import oracle
from tests.cases import LAYERS, NUMPY, Case, avg, normal
from tests.command_line import Result, load, poolgrad, poolgrad_process, save, save_safetensors, zeros
from tests.oracle import Window

from poolgrad.cli import error_map, new_file, options
from poolgrad.core import TensorSpec, comparison, plan_avg_pool2d_backward
from poolgrad.core.comparison import Comparison, ComparisonSink
from poolgrad.core.figures import ExactSum, Figures
from poolgrad.core.regions import axis_codes, cell_codes
from poolgrad.core.standards import STANDARDS, find_standard
from poolgrad.core.tensors import STORAGE
from poolgrad.core.tiles import ArrayTensor, Box, Tiling

Array = Any
F32, F16 = np.float32, np.float16
Record = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent

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


# ---- The figures by plain arithmetic, an element at a time


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
        "share_within": {str(share): share_within(pairs, share) for share in (0.001, 0.005)},
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


def share_within(pairs: list[Pair], share: float) -> float:
    near = [pair.error <= share * abs(pair.expected) if pair.finite else pair.agrees for pair in pairs]
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
    kept += ["max_absolute_error", "max_relative_error", "rmse", "cosine", "share_within"]
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
@given(elements=st.integers(1, 700), seed=st.integers(0, 2**32), noise=st.sampled_from([0, 1e-7, 0.1]))
def test_any_tiles_in_any_order_give_the_same(elements: int, seed: int, noise: float) -> None:
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


def is_clipped(window: Window, nominal: tuple[int, int], cells: int) -> bool:
    return nominal[0] < 0 or nominal[1] > cells


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
    from poolgrad.core import plan_adaptive_avg_pool2d_backward

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


def test_shrinking_keeps_the_largest() -> None:
    cells = np.random.default_rng(0).random((100, 37))
    small = error_map.shrink(cells, 7, 5)
    assert small.shape == (7, 5)
    assert small.max() == cells.max()
    assert error_map.shrink(cells, 100, 37).tolist() == cells.tolist()


def picture_lines(text: str) -> list[str]:
    return [line[1:-1] for line in text.splitlines() if re.fullmatch(r"\|.*\|", line)]


def test_picture_shows_where(tmp_path: Path) -> None:
    expected = np.ones((2, 3, 6, 8), np.float32)
    actual = expected.copy()
    actual[1, 2, 4, 5], actual[0, 0, 0, 0], actual[1, 0, 2, 7] = 2, 1.01, math.nan
    drawn = picture_lines(compare(tmp_path, actual, expected).out)
    wanted = [[" "] * 8 for _ in range(6)]
    wanted[4][5], wanted[0][0], wanted[2][7] = "█", "▒", "N"
    assert drawn == ["".join(2 * mark for mark in row) for row in wanted]


def test_picture_of_a_large_plane_fits(tmp_path: Path) -> None:
    expected = np.ones((1, 1, 900, 1300), np.float32)
    actual = expected.copy()
    actual[0, 0, 899, 1299] = 2
    drawn = picture_lines(compare(tmp_path, actual, expected).out)
    assert 10 <= len(drawn) <= 24
    assert {len(line) for line in drawn} <= set(range(40, 73))
    assert [mark for line in drawn for mark in line if mark != " "] == ["█"]
    assert drawn[-1][-1] == "█"


def test_picture_without_the_characters(tmp_path: Path) -> None:
    files = [
        save(tmp_path / name, np.full((1, 1, 2, 2), value, np.float32))
        for name, value in (("a.npy", 2), ("g.npy", 1))
    ]
    result = poolgrad_process("compare", *files, PYTHONIOENCODING="ascii")
    assert picture_lines(result.out) == ["####", "####"]
    assert "\\u" not in result.out


def test_picture_in_colour(tmp_path: Path) -> None:
    files = [
        save(tmp_path / name, np.full((1, 1, 3, 2), value, np.float32))
        for name, value in (("a.npy", 2), ("g.npy", 1))
    ]
    result = poolgrad_process("compare", *files, FORCE_COLOR="1", TERM="xterm-256color", PYTHONIOENCODING="utf-8")
    assert "\x1b[1;31mFAIL\x1b[0m" in result.out
    halves = [line for line in result.out.splitlines() if line.count("▀") == 2]
    assert len(halves) == 2
    assert "\x1b" in halves[0]
    plain = poolgrad_process("compare", *files, NO_COLOR="1", FORCE_COLOR="1", PYTHONIOENCODING="utf-8")
    assert "▀" not in plain.out


# ---- The command


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    """A device's gradInput that is wrong in one element, and the right one."""
    expected = np.array([[[[1, 1, 2, 2], [1, 1, 2, 2]]]], np.float32)
    actual = expected.copy()
    actual[0, 0, 1, 2] = 2.5
    return [save(tmp_path / "device.npy", actual), save(tmp_path / "golden.npy", expected)]


def test_exit_codes(pair: list[Path]) -> None:
    device, golden = pair
    assert poolgrad("compare", golden, golden).code == 0
    failed = poolgrad("compare", device, golden)
    assert (failed.code, failed.err) == (1, "")
    assert poolgrad("compare", device, golden, "--exit-zero").code == 0
    assert poolgrad("compare", device, golden.with_name("none.npy")).code == 3
    assert poolgrad("compare", device).code == 2


def test_quiet_tells_by_its_exit_code(pair: list[Path]) -> None:
    result = poolgrad("compare", *pair, "-q")
    assert (result.code, result.out, result.err) == (1, "", "")


def test_report_begins_with_the_verdict_and_the_standard(pair: list[Path]) -> None:
    lines = poolgrad("compare", *pair).out.splitlines()
    assert lines[0] == "FAIL by mere-mare (Ascend ecosystem standard), thresholds of float32"
    assert lines[2] == "x MERE: 0.03125, to be < 0.00012207"
    passed = poolgrad("compare", pair[1], pair[1], "--standard", "exact").out.splitlines()
    assert passed[0] == "PASS by exact (bit for bit, NaN payloads aside), thresholds of float32"


def test_report_has_every_part(tmp_path: Path) -> None:
    actual, expected = with_nonfinite(*noisy((2, 3, 6, 7), "float16", 0.01, seed=3))
    text = compare(tmp_path, actual, expected).out
    wanted = [
        "NaN and infinity",
        "opposite infinities",
        "max abs error",
        "max rel error",
        "MERE, MARE",
        "RMSE",
        "cosine",
    ]
    wanted += [
        "msprobe",
        "within 0.001",
        "ulp",
        "of float16",
        "would pass",
        "worst elements",
        "worst planes",
        "zeros",
    ]
    assert [part for part in wanted if part not in text] == []
    assert len(re.findall(r"^\(\d+, \d+, \d+, \d+\) ", text, re.MULTILINE)) == 10
    assert len(re.findall(r"^\(\d+, \d+\) ", text, re.MULTILINE)) == 6 - 1  # One plane is NaN in both.


def test_json_is_json_at_full_precision(tmp_path: Path) -> None:
    actual, expected = with_nonfinite(*noisy((2, 3, 6, 7), "float32", 0.01, seed=3))
    out = compare(tmp_path, actual, expected, "--json").out

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    record = json.loads(out, parse_constant=refuse)
    assert record["status"] == "failed"
    assert record["op"] == "compare"
    assert record["regions"] is None
    largest = record["max_absolute_error"]
    assert largest["actual"] == float(actual[tuple(largest["index"])])
    assert largest["value"] == abs(largest["actual"] - largest["expected"])
    assert [one["name"] for one in record["criteria"]] == ["non-finite disagreements", "MERE", "MARE"]


def test_precision_row(pair: list[Path], tmp_path: Path) -> None:
    device, golden = pair
    record = poolgrad("compare", device, golden, "--json", "--precision-row", "bfloat16").record
    assert (record["precision_row"], record["criteria"][1]["threshold"]) == ("bfloat16", 2**-7)
    grad_output = save(tmp_path / "g.npy", np.array([[[[4, 8]]]], np.float32))
    own = zeros(tmp_path / "x.npy", (1, 1, 2, 4))
    call = ["avg2d", grad_output, own, "-k", 2, "--expect", golden, "--json"]
    rows = {0: "float32", 1: "hfloat32", 2: "float16", 3: "hfloat32"}
    for mode, row in rows.items():
        record = poolgrad(*call, "--cube-math-type", mode).record
        assert (record["compute_dtype"], record["comparison"]["precision_row"]) == (row, row)
        assert record["comparison"]["criteria"][1]["threshold"] == MERE[row]
    record = poolgrad(*call, "--cube-math-type", 1, "--precision-row", "float32").record
    assert record["comparison"]["precision_row"] == "float32"


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_expect(case: Case, tmp_path: Path) -> None:
    """The right answer of every layer passes, and with one wrong element fails there; nothing is written."""
    given_tensor = normal(case.grad_shape, "float32", seed=1)
    golden = oracle.rounded(oracle.backward(oracle.exact(given_tensor), case.self_shape, case.pool), "float32")
    grad_output, own = save(tmp_path / "g.npy", given_tensor), zeros(tmp_path / "x.npy", case.self_shape)
    actual = golden.astype(np.float32)
    device = save(tmp_path / "d.npy", actual)
    call = [*call_of(case), grad_output, own, "--expect", device, "--json", "--standard", "allclose"]
    before = sorted(tmp_path.iterdir())
    assert poolgrad(*call).code == 0
    place = tuple(extent // 2 for extent in case.self_shape)
    actual[place] += 1
    save(tmp_path / "d.npy", actual)
    result = poolgrad(*call)
    assert result.code == 1
    assert result.record["comparison"]["worst_elements"][0]["index"] == list(place)
    assert result.record["comparison"]["mismatched"] == 1
    assert result.record["grad_input"]["path"] is None
    assert sorted(tmp_path.iterdir()) == before


def call_of(case: Case) -> list[object]:
    pool = case.pool
    if pool is None:
        return ["adaptive2d"]
    flags = ["--ceil-mode"] * pool.ceil_mode + ["--no-count-include-pad"] * (not pool.count_include_pad)
    pairs = {"-k": pool.kernel_size, "-s": pool.stride, "-p": pool.padding}
    words = [word for flag, (high, wide) in pairs.items() for word in (flag, f"{high},{wide}")]
    return ["avg2d", *words, *flags, "--divisor-override", pool.divisor_override]


def test_expect_reports_regions_and_the_call(pair: list[Path], tmp_path: Path) -> None:
    grad_output = save(tmp_path / "g.npy", np.array([[[[4, 8]]]], np.float32))
    own = zeros(tmp_path / "x.npy", (1, 1, 2, 4))
    result = poolgrad("avg2d", grad_output, own, "-k", 2, "--expect", pair[0])
    assert result.code == 1
    text = result.out
    assert text.startswith("FAIL by mere-mare")
    assert (
        text.index("cells under")
        < text.index("operator ")
        < text.index("computed, not stored", text.index("operator "))
    )
    assert re.search(r"^one window +8 +1 ", text, re.MULTILINE)


def test_an_expected_tensor_by_name(tmp_path: Path) -> None:
    golden = np.array([[[[1, 1, 2, 2], [1, 1, 2, 2]]]], np.float32)
    both = save_safetensors(tmp_path / "both.safetensors", {"grad_input": golden, "x": golden + 1})
    assert poolgrad("compare", both, f"{both}:grad_input").code == 0
    assert poolgrad("compare", f"{both}:x", both).code == 1
    record = poolgrad("compare", f"{both}:x", both, "--json").record
    assert (record["actual"]["name"], record["expected"]["name"]) == ("x", "grad_input")


def test_the_expected_file_is_never_the_target(pair: list[Path], tmp_path: Path) -> None:
    grad_output = save(tmp_path / "g.npy", np.array([[[[4, 8]]]], np.float32))
    own = zeros(tmp_path / "x.npy", (1, 1, 2, 4))
    before = pair[0].read_bytes()
    result = poolgrad("avg2d", grad_output, own, "-k", 2, "--expect", pair[0], "-o", pair[0])
    assert result.code == 3
    assert "it is the input" in result.error
    assert pair[0].read_bytes() == before


def test_files_that_change_meanwhile_are_an_error(pair: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    device, golden = pair
    whole = Comparison.run

    def meddle(self: Comparison, *arguments: Any) -> Comparison:
        done = whole(self, *arguments)
        save(device, np.zeros((1, 1, 2, 4), np.float32))
        return done

    monkeypatch.setattr(Comparison, "run", meddle)
    result = poolgrad("compare", device, golden)
    assert result.code == 3
    assert "changed while it was read" in result.error
    assert result.out == ""


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


# ---- Refusals


def tensors(tmp_path: Path, actual: Array, expected: Array) -> list[Path]:
    return [save(tmp_path / "a.npy", actual), save(tmp_path / "g.npy", expected)]


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (np.zeros((1, 2, 3), F32), np.zeros((1, 3, 2), F32), r"float32 \(1, 2, 3\) and EXPECTED .* same shape"),
        (np.zeros((1, 2, 3), F32), np.zeros((1, 1, 2, 3), F32), "expected the same shape"),
        (np.zeros((1, 2, 3), F32), np.zeros((1, 2, 3), F16), "expected the same dtype, or EXPECTED in float32"),
        (np.zeros((1, 2, 3), F16), np.zeros((1, 2, 3), NUMPY["bfloat16"]), "ACTUAL is float16 and EXPECTED bfloat16"),
        (np.zeros((2, 3), F32), np.zeros((2, 3), F32), r"ACTUAL is float32 \(2, 3\); expected rank 4"),
        (np.zeros((1, 2, 3), float), np.zeros((1, 2, 3), F32), r"is float64 \(1, 2, 3\); expected float32, "),
        (np.zeros((1, 2, 3), F32), np.zeros((1, 2, 3), int), r"EXPECTED is int64"),
        (np.zeros((1, 0, 3), F32), np.zeros((1, 0, 3), F32), "empty"),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_compared(actual: Array, expected: Array, message: str, tmp_path: Path) -> None:
    result = poolgrad("compare", *tensors(tmp_path, actual, expected))
    assert result.code == 2
    assert re.search(message, result.error)
    assert "poolgrad compare --help" in result.error
    assert result.out == ""


def test_exact_takes_the_same_dtype(tmp_path: Path) -> None:
    files = tensors(tmp_path, np.zeros((1, 2, 3), F16), np.zeros((1, 2, 3), F32))
    result = poolgrad("compare", *files, "--standard", "exact")
    assert result.code == 2
    assert "the standard exact compares bits, which takes the same dtype" in result.error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rtol", "1e-3"], "--rtol and --atol belong to the standard allclose, and this is mere-mare"),
        (["--standard", "allclose", "--rtol", "-1"], "--rtol is -1.0; expected a finite number, at least 0"),
        (["--standard", "allclose", "--atol", "nan"], "--atol is nan; expected a finite number"),
        (["--standard", "allclose", "--atol", "inf"], "--atol is inf; expected a finite number"),
        (["--standard", "close"], "'close' is not one of 'mere-mare', 'mixed', 'allclose', 'exact'"),
        (["--precision-row", "float64"], "'float64' is not one of 'float32', 'float16', 'bfloat16', 'hfloat32'"),
        (["--plot", "errors.pdf"], "--plot draws .png and .svg, and this is errors.pdf"),
    ],
)
def test_flags_that_are_refused(flags: list[str], message: str, pair: list[Path]) -> None:
    result = poolgrad("compare", *pair, *flags)
    assert result.code == 2
    assert message in result.error


@pytest.mark.parametrize(
    "flags",
    [["--standard", "exact"], ["--rtol", "1"], ["--exit-zero"], ["--plot", "e.png"], ["--precision-row", "float16"]],
)
def test_flags_that_take_expect(flags: list[str], tmp_path: Path) -> None:
    result = poolgrad("adaptive2d", "g.npy", "x.npy", "-o", tmp_path / "out.npy", *flags)
    assert result.code == 2
    assert f"{flags[0]} takes --expect" in result.error


def test_without_output_and_expect_there_is_nothing_to_do() -> None:
    result = poolgrad("adaptive2d", "g.npy", "x.npy")
    assert result.code == 2
    assert "Missing option '-o' / '--output'" in result.error


def test_an_expected_file_of_another_shape_stops_before_the_work(tmp_path: Path) -> None:
    grad_output, own = zeros(tmp_path / "g.npy", (1, 1, 1, 2)), zeros(tmp_path / "x.npy", (1, 1, 2, 4))
    device, out = zeros(tmp_path / "d.npy", (1, 1, 4, 2)), tmp_path / "out.npy"
    result = poolgrad("avg2d", grad_output, own, "-k", 2, "--expect", device, "-o", out)
    assert result.code == 2
    assert "expected the same shape" in result.error
    assert not out.exists()


def test_choices_are_the_core_ones() -> None:
    """They are written out in the flags, which are parsed without core."""
    from poolgrad.core.standards import ROWS

    parameters = {parameter.name: parameter for parameter in command_parameters()}
    assert tuple(parameters["standard"].type.choices) == STANDARDS
    assert sorted(parameters["precision_row"].type.choices) == sorted(ROWS)
    assert set(vars(options.Judging)["__dataclass_fields__"]) <= set(parameters)


def command_parameters() -> list[Any]:
    from poolgrad.cli.compare import command

    return list(command.params)


# ---- --plot


needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="poolgrad[plot]")


@needs_matplotlib
@pytest.mark.parametrize(
    ("kind", "name"),
    [("noise", "e.png"), ("noise", "e.SVG"), ("same", "e.svg"), ("nonfinite", "e.svg"), ("zero", "e.png")],
)
def test_plot(kind: str, name: str, tmp_path: Path) -> None:
    actual, expected = noisy((2, 3, 16, 17), "float32", 0.01, seed=1)
    if kind == "same":
        actual = expected
    if kind == "zero":
        expected[...] = 0
    if kind == "nonfinite":
        actual[...] = math.nan
    target = tmp_path / name
    result = compare(tmp_path, actual, expected, "--plot", target, "-q")
    assert result.code == (0 if kind == "same" else 1)
    assert result.err == ""
    start = b"\x89PNG\r\n\x1a\n" if name.endswith("png") else b"<?xml"
    assert target.read_bytes().startswith(start)
    assert len(target.read_bytes()) > 5000


@needs_matplotlib
def test_plot_of_an_operator(pair: list[Path], tmp_path: Path) -> None:
    grad_output = save(tmp_path / "g.npy", np.array([[[[4, 8]]]], np.float32))
    own = zeros(tmp_path / "x.npy", (1, 1, 2, 4))
    target = tmp_path / "e.svg"
    assert poolgrad("avg2d", grad_output, own, "-k", 2, "--expect", pair[0], "--plot", target, "-q").code == 1
    text = target.read_text(encoding="utf-8")
    first = target.read_bytes()
    assert "<svg" in text
    poolgrad("avg2d", grad_output, own, "-k", 2, "--expect", pair[0], "--plot", target, "-q")
    assert len(target.read_bytes()) == len(first)


@needs_matplotlib
def test_plot_that_cannot_be_written(pair: list[Path], tmp_path: Path) -> None:
    result = poolgrad("compare", *pair, "--plot", tmp_path / "none" / "e.png")
    assert result.code == 3
    assert "there is no directory" in result.error


def test_plot_without_matplotlib(pair: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    target = tmp_path / "e.png"
    result = poolgrad("compare", *pair, "--plot", target)
    assert result.code == 2
    assert "--plot takes matplotlib; pip install 'poolgrad[plot]' installs it" in result.error
    assert not target.exists()


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


# ---- The README


def test_report_shown_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## Comparing with a device's gradInput") :]
    line = re.search(r"^poolgrad (avg2d .* --expect .*)$", section, re.MULTILINE)
    shown = re.search(r"^```text\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert line
    assert shown
    monkeypatch.chdir(ROOT)
    printed = poolgrad(*line[1].split()).out
    assert printed[: printed.index("operator ")].rstrip("\n") == shown[1].rstrip("\n")


def test_thresholds_in_the_readme() -> None:
    """Every number of the table of standards, by row."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = {match[1]: match[0] for match in re.finditer(r"^\| `([\w-]+)`.*$", readme, re.MULTILINE)}
    rows = ("float32", "hfloat32", "float16", "bfloat16")
    for standard, table in (("mere-mare", MERE), ("mixed", MIXED), ("allclose", TOLERANCES)):
        cells = lines[standard].replace("\\|", "").strip("|").split("|")[2:]
        for row, cell in zip(rows, cells, strict=True):
            found = [number(text) for text in cell.split(",")]
            wanted = table[row]
            assert found == list(wanted if isinstance(wanted, tuple) else (wanted,)), (standard, row)


def number(text: str) -> float:
    base, _, power = text.strip().partition("^")
    return float(base) ** int(power) if power else float(base)


def test_new_file_is_what_pictures_are_written_by() -> None:
    """So that a picture replaces its target only when it is complete."""
    from poolgrad.cli import plot

    assert vars(plot)["NewFile"] is new_file.NewFile

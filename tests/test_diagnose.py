"""`poolgrad diagnose`: faults planted by a few lines that share nothing with core, and what it calls them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.cases import NUMPY, Array
from tests.command_line import ENTRY, poolgrad, poolgrad_process, save, save_safetensors
from tests.oracle import FORMATS, Pool, Window, adaptive_windows, exact, rounded

from poolgrad.core import TensorSpec, byte_orders, formats, prediction
from poolgrad.core.hypotheses import FAULTS, PARAMETERS, Call, plan_of

FIXTURES = Path(__file__).parent.parent / "fixtures"
LAYERS: dict[str, dict[str, Any]] = json.loads((FIXTURES / "layers.json").read_text(encoding="utf-8"))

Windows = Sequence[Window]
Share = Callable[[Array, int, int], Array]


# ---- Planting


def scatter(given: Array, rows: Windows, columns: Windows, cells: Sequence[int], share: Share | None = None) -> Array:
    """Every window adds its share to its cells, in float64; by default gradOutput over the divisor."""
    made = np.zeros((*given.shape[:-2], *cells[-2:]))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            value = given[..., i, j].astype(np.float64)
            value = share(value, i, j) if share else value / (row.divisor * column.divisor)
            made[..., max(row.start, 0) : row.stop, max(column.start, 0) : column.stop] += value[..., None, None]
    return made


def hf32(values: Array, ties_away: bool = False) -> Array:
    bits = np.asarray(values, np.float32).view(np.uint32)
    carry = 0x800 if ties_away else 0x7FF + (bits >> 12 & 1)
    return (bits + carry & 0xFFFFF000).astype(np.uint32).view(np.float32)


def random(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(NUMPY[dtype])


@dataclass(frozen=True)
class Plant:
    """A wrong gradInput: what is believed, the tensors, and what it is to be called."""

    given: Array
    actual: Array
    believed: Pool | None
    named: str
    extra: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        return [*flags_of(self.believed), *self.extra]


def flags_of(pool: Pool | None) -> list[str]:
    if pool is None:
        return []
    pairs = {"-k": pool.kernel_size, "-s": pool.stride, "-p": pool.padding}
    flags = [text for flag, pair in pairs.items() for text in (flag, f"{pair[0]},{pair[1]}")]
    flags += ["--ceil-mode"] * pool.ceil_mode + ["--no-count-include-pad"] * (not pool.count_include_pad)
    return flags + ["--divisor-override", str(pool.divisor_override)] * bool(pool.divisor_override)


STEM = Pool((3, 3), (2, 2), (1, 1))
CELLS = (2, 3, 12, 14)


def pooled(
    pool: Pool, cells: Sequence[int] = CELLS, dtype: str = "float32", seed: int = 0
) -> tuple[Array, Windows, Windows]:
    """gradOutput and windows of a pooling."""
    rows, columns = (pool.windows(axis, cells[-2 + axis]) for axis in (0, 1))
    return random(*cells[:-2], len(rows), len(columns), dtype=dtype, seed=seed), rows, columns


def right(pool: Pool, cells: Sequence[int] = CELLS, dtype: str = "float32") -> tuple[Array, Array]:
    given, rows, columns = pooled(pool, cells, dtype)
    made = scatter(given, rows, columns, cells, override(pool))
    return given, made.astype(np.float32).astype(NUMPY[dtype])


def override(pool: Pool) -> Share | None:
    return (lambda value, i, j: value / pool.divisor_override) if pool.divisor_override else None


def other_pool(actual: Pool, believed: Pool, named: str, cells: Sequence[int] = CELLS) -> Plant:
    given, made = right(actual, cells)
    return Plant(given, made, believed, named)


def ceil_overhang() -> Plant:
    pool = Pool((3, 3), (2, 2), ceil_mode=True)
    given, rows, columns = pooled(pool)
    made = scatter(given, rows, columns, CELLS, lambda value, i, j: value / 9)
    return Plant(
        given, made.astype(np.float32), pool, "avg2d with the overhang of ceil mode divided by the full kernel"
    )


def padding_lost(counted: bool) -> Plant:
    pool = Pool((5, 5), (2, 2), (2, 2), count_include_pad=not counted)
    given, rows, columns = pooled(pool)
    moved = [
        [Window(2 * o, min(2 * o + 5, n), min(2 * o + 5, n) - 2 * o if counted else window.divisor) for o, window in
         enumerate(windows)] for windows, n in ((rows, 12), (columns, 14))
    ]  # fmt: skip
    made = scatter(given, moved[0], moved[1], CELLS)
    return Plant(given, made.astype(np.float32), pool, "avg2d with the padding's offset lost")


def global_shortcut() -> Plant:
    cells, pool = (2, 3, 4, 4), Pool((4, 4), (4, 4), (1, 1))
    given = pooled(pool, cells)[0]
    made = np.broadcast_to(given / np.float32(16), cells)
    return Plant(given, made.copy(), pool, "avg2d with padding ignored by a global-pool shortcut")


def override_ignored(divisor: int, counts: bool, reason: str) -> Plant:
    pool = Pool((3, 3), (2, 2), (1, 1), count_include_pad=counts, divisor_override=divisor)
    given, rows, columns = pooled(pool)
    made = scatter(given, rows, columns, CELLS)
    return Plant(given, made.astype(np.float32), pool, f"avg2d with divisor_override ignored{reason}")


def bins(
    edges: Callable[[int, int, int], tuple[int, int]], named: str, cells: Sequence[int], output: Sequence[int]
) -> Plant:
    """adaptive2d with other bins, of (o, n, m)."""
    sides = []
    for n, m in zip(cells[-2:], output, strict=True):
        ends = [edges(o, n, m) for o in range(m)]
        sides.append([Window(start, min(end, n), end - start) for start, end in ends])
    given = random(*cells[:-2], *output)
    made = scatter(given, sides[0], sides[1], cells).astype(np.float32)
    return Plant(given, made, None, f"adaptive2d with {named}")


def float32_bins() -> Plant:
    """Extents found by looking for the least whose ends differ."""

    def edge(o: int, n: int, m: int) -> tuple[int, int]:
        scale = np.float32(n) / np.float32(m)
        return int(np.floor(np.float32(o) * scale)), min(int(np.ceil(np.float32(o + 1) * scale)), n)

    def differs(n: int, m: int) -> bool:
        return [edge(o, n, m) for o in range(m)] != [(w.start, w.stop) for w in adaptive_windows(n, m)]

    n, m = next((n, m) for n in range(20, 200) for m in range(3, n) if differs(n, m))
    return bins(edge, "bin ends computed in float32", (2, 2, n, n), (m, m))


def weights(
    dtype: str, weight: Callable[[float], float], named: str, lowered: Callable[[Array], Array] | None = None
) -> Plant:
    pool = Pool((3, 3), (2, 2), (1, 1), count_include_pad=False)
    given, rows, columns = pooled(pool, (4, 8, 12, 14), dtype)
    values = given if lowered is None else lowered(given)
    made = scatter(
        values, rows, columns, (4, 8, 12, 14), lambda v, i, j: v * weight(1 / (rows[i].divisor * columns[j].divisor))
    )
    return Plant(given, made.astype(np.float32).astype(NUMPY[dtype]), pool, f"avg2d with weights {named}")


def half(values: Array) -> Array:
    return values.astype(np.float16)


def float16(value: float) -> float:
    return float(np.float16(value))


def bfloat16(value: float) -> float:
    return float(ml_dtypes.bfloat16(value))


def sums_in_16_bits(dtype: str, stored: str, terms_too: bool = True, by_product: bool = False) -> Plant:
    """Sums in dtype, of tensors stored in another; terms rounded too, or in float32, by division or product."""
    pool, kind, cells = Pool((3, 3), (1, 1), (1, 1)), NUMPY[dtype], (2, 8, 24, 28)
    given, rows, columns = pooled(pool, cells, stored)
    made = np.zeros(cells, kind)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            value = given[..., i, j].astype(np.float32)
            term = value * np.float32(1 / 9) if by_product else value / np.float32(9)
            term = term.astype(kind).astype(np.float32) if terms_too else term
            area = made[..., max(row.start, 0) : row.stop, max(column.start, 0) : column.stop]
            area[...] = (area.astype(np.float32) + term[..., None, None]).astype(kind)
    of = "" if terms_too else " of terms in float32"
    return Plant(given, made.astype(NUMPY[stored]), pool, f"avg2d with sums in {dtype}{of}: ")


def lowered(
    mode: str, named: str, rounding: Callable[[Array], Array], result: Any, given: Array | None = None
) -> Plant:
    drawn, rows, columns = pooled(STEM)
    given = drawn if given is None else given
    made = scatter(rounding(given), rows, columns, CELLS).astype(result).astype(np.float32)
    return Plant(given, made, STEM, named, ("--cube-math-type", mode))


def lowered_in_float32(mode: str, named: str, backwards: bool = False) -> Plant:
    """FP16 with sums in float32: some lie so near a tie that the order of additions decides."""
    cells = (8, 16, 56, 56)
    given, rows, columns = pooled(STEM, cells)
    made = float32_sums(half(given), rows, columns, cells, backwards=backwards)
    assert (made.astype(np.float16) != scatter(half(given), rows, columns, cells).astype(np.float16)).any()
    return Plant(given, made.astype(np.float16).astype(np.float32), STEM, named, ("--cube-math-type", mode))


def float32_sums(
    given: Array,
    rows: Windows,
    columns: Windows,
    cells: Sequence[int],
    by_product: bool = False,
    backwards: bool = False,
) -> Array:
    """Sums in float32, from the first window to the last or backwards, of quotients or of products with 1/divisor."""
    made = np.zeros(cells, np.float32)
    places = [(i, j) for i in range(len(rows)) for j in range(len(columns))]
    for i, j in reversed(places) if backwards else places:
        value, divisor = given[..., i, j].astype(np.float32), np.float32(rows[i].divisor * columns[j].divisor)
        value = value * (np.float32(1) / divisor) if by_product else value / divisor
        area = slice(max(rows[i].start, 0), rows[i].stop), slice(max(columns[j].start, 0), columns[j].stop)
        made[(..., *area)] += value[..., None, None]
    return made


def with_ties() -> Array:
    """Values that lie halfway between numbers of HF32, as often as not."""
    given = hf32(pooled(STEM)[0]).view(np.uint32)
    return (given + np.uint32(0x800) * (np.arange(given.size).reshape(given.shape) % 2).astype(np.uint32)).view(
        np.float32
    )


def ordered(named: str, given_read: str = "", result_read: str = "") -> Plant:
    """Bytes read in another order, of planes that are not square."""
    given, rows, columns = pooled(STEM)
    made = scatter(misread(given, given_read), rows, columns, CELLS).astype(np.float32)
    return Plant(given, np.ascontiguousarray(misread(made, result_read)), STEM, f"avg2d with {named}: ")


def misread(values: Array, how: str) -> Array:
    """Bytes in one order read as another."""
    n, c, h, w = values.shape
    made = {
        "": values,
        "last as first": values.transpose(LAST).reshape(n, c, h, w),
        "first as last": values.reshape(n, h, w, c).transpose(0, 3, 1, 2),
        "WH as HW": values.transpose(TRANSPOSED).reshape(n, c, h, w),
        "HW as WH": values.reshape(n, c, w, h).transpose(TRANSPOSED),
    }
    return made[how]


def overridden(divisor: int, dtype: str = "float32") -> Plant:
    """A divisorOverride that is a constant factor, too, which sums in float32 happen to fit a little better."""
    cells = (1, 2, 20, 20)
    given, rows, columns = pooled(STEM, cells, dtype, seed=7)
    ones, whole = ([w._replace(divisor=d) for w in windows] for windows, d in ((rows, 1), (columns, divisor)))
    made = float32_sums(given, ones, whole, cells)
    return Plant(given, made.astype(NUMPY[dtype]), STEM, f"avg2d with divisor_override={divisor}")


def scaled(factor: float, named: str, divided: bool = True, pool: Pool = STEM) -> Plant:
    given, rows, columns = pooled(pool)
    made = scatter(given, rows, columns, CELLS, None if divided else lambda value, i, j: value) * factor
    return Plant(given, made.astype(np.float32), pool, f"avg2d with {named}")


def unwritten(pool: Pool) -> Plant:
    """Every cell that no window covers holds something else."""
    given, made = right(pool)
    uncovered = (made == 0).all(axis=(0, 1))
    made[..., uncovered] = random(2, 3, int(uncovered.sum()), seed=1)
    return Plant(given, made, pool, "avg2d with the cells that no window covers left unwritten")


def race() -> Plant:
    given, made = right(STEM)
    for number in range(9):
        # Cell (5, 4 + number) lies under windows 2 and 3 along H; one addition is lost.
        made[1, 2, 5, number] -= given[1, 2, 2, (number + 1) // 2] / np.float32(9)
    return Plant(given, made, STEM, "avg2d with a race")


MODES = replace(STEM, count_include_pad=False)
LAST, TRANSPOSED = (0, 2, 3, 1), (0, 1, 3, 2)
VARIED = replace(STEM, count_include_pad=False)

PLANTS: dict[str, Callable[[], Plant]] = {
    "count_include_pad": lambda: other_pool(MODES, STEM, "avg2d with count_include_pad=False"),
    "count_include_pad on": lambda: other_pool(STEM, MODES, "avg2d with count_include_pad=True"),
    "ceil_mode": lambda: other_pool(
        Pool((3, 3), (2, 2), ceil_mode=True), Pool((3, 3), (2, 2)), "avg2d with ceil_mode=True"
    ),
    "both_modes": lambda: other_pool(
        Pool((3, 3), (2, 2), (0, 1), True, False), Pool((3, 3), (2, 2), (0, 1)),
        "avg2d with ceil_mode=True and count_include_pad=False",
    ),
    "swapped kernel": lambda: other_pool(
        Pool((3, 1), (1, 1), (0, 0)), Pool((1, 3), (1, 1)), "avg2d with H and W swapped of kernel", (2, 3, 9, 7)
    ),
    "swapped stride": lambda: other_pool(
        Pool((3, 3), (1, 2)), Pool((3, 3), (2, 1)), "avg2d with H and W swapped of stride"
    ),
    "swapped padding": lambda: other_pool(
        Pool((3, 3), (2, 2), (1, 0)), Pool((3, 3), (2, 2), (0, 1)), "avg2d with H and W swapped of padding",
        (2, 3, 13, 13),
    ),
    "swapped all": lambda: other_pool(
        Pool((3, 5), (1, 2), (1, 2)), Pool((5, 3), (2, 1), (2, 1)),
        "avg2d with H and W swapped of kernel and of stride and of padding",
    ),
    "windows": lambda: other_pool(
        Pool((5, 3), (2, 3), (2, 0)), Pool((3, 3), (2, 3), (1, 0)), "avg2d with kernel 5,3, stride 2,3, padding 2,0"
    ),
    "windows of one": lambda: other_pool(
        Pool((6, 6), (6, 6), (2, 2)), Pool((5, 5), (5, 5)), "avg2d with kernel 6, stride 6, padding 2", (2, 3, 6, 6)
    ),
    "divisor_override": lambda: other_pool(replace(STEM, divisor_override=7), STEM, "avg2d with divisor_override=7"),
    "divisor_override 11": lambda: overridden(11),
    "divisor_override bfloat16": lambda: overridden(1000, "bfloat16"),
    "divisor_override < 0": lambda: other_pool(
        replace(STEM, divisor_override=-300), STEM, "avg2d with divisor_override=-300"
    ),
    "cube_math_type": lambda: lowered("0", "avg2d with cube_math_type=1 (ALLOW_FP32", hf32, np.float32),
    "cube_math_type 2": lambda: lowered_in_float32("0", "avg2d with cube_math_type=2 (USE_FP16)"),
    "cube_math_type 0": lambda: lowered("3", "avg2d with cube_math_type=0 (KEEP_DTYPE)", np.array, np.float32),
    "product": lambda: lowered("1", "product=atlas-inference", half, np.float16),
    "ceil_overhang": ceil_overhang,
    "padding_lost": lambda: padding_lost(False),
    "padding_lost counted": lambda: padding_lost(True),
    "global_shortcut": global_shortcut,
    "override_ignored off": lambda: override_ignored(7, False, " because count_include_pad is off"),
    "override_ignored 255": lambda: override_ignored(255, True, " at exactly 255"),
    "override_ignored -255": lambda: override_ignored(-255, True, " at exactly -255"),
    "floor_ends": lambda: bins(
        lambda o, n, m: (o * n // m, (o + 1) * n // m), "bins that end at floor((o+1)*n/m)", CELLS, (5, 4)
    ),
    "one_size": lambda: bins(
        lambda o, n, m: (o * n // m, o * n // m - (-n // m)), "bins all of one size ceil(n/m)", CELLS, (5, 4)
    ),
    "one_size packed": lambda: bins(
        lambda o, n, m: (o * -(-n // m), min((o + 1) * -(-n // m), n)), "bins all of one size ceil(n/m), end to end",
        (2, 3, 14, 14), (5, 5),
    ),
    "as_pool": lambda: bins(
        lambda o, n, m: (o * (n // m), n - (m - 1 - o) * (n // m)), "bins of a plain pooling", CELLS, (5, 4)
    ),
    "float32_ends": float32_bins,
    "weights float16": lambda: weights("float16", float16, "1/count rounded to float16"),
    "weights bfloat16": lambda: weights("bfloat16", bfloat16, "1/count rounded to bfloat16"),
    "weights float32": lambda: weights("float32", float16, "1/count rounded to float16"),
    "weights HF32": lambda: weights("float32", lambda v: float(hf32(np.array(v))), "1/count rounded to HF32"),
    "weights both HF32": lambda: weights(
        "float32", lambda v: float(hf32(np.array(v))), "1/count and gradOutput rounded to HF32", hf32
    ),
    "sums_16 float16": lambda: sums_in_16_bits("float16", "float16"),
    "sums_16 bfloat16": lambda: sums_in_16_bits("bfloat16", "bfloat16"),
    "sums_16 float16 float32": lambda: sums_in_16_bits("float16", "float32"),
    "sums_16 bfloat16 product": lambda: sums_in_16_bits("bfloat16", "bfloat16", True, True),
    "sums_16 float16 terms": lambda: sums_in_16_bits("float16", "float16", False),
    "sums_16 bfloat16 terms": lambda: sums_in_16_bits("bfloat16", "bfloat16", False),
    "sums_16 float16 terms float32": lambda: sums_in_16_bits("float16", "float32", False),
    "sums_16 bfloat16 terms product": lambda: sums_in_16_bits("bfloat16", "float32", False, True),
    "fp16_for_hf32": lambda: lowered("1", "avg2d with FP16 where the documents say HF32", half, np.float16),
    "fp16_for_hf32 in float32": lambda: lowered_in_float32("1", "avg2d with FP16 where the documents say HF32", True),
    "ties_away": lambda: lowered(
        "3", "avg2d with HF32 whose ties go away from zero", lambda v: hf32(v, True), np.float32, with_ties()
    ),
    "channels_last in": lambda: ordered(
        "channels-last bytes of gradOutput read as channels-first", "last as first"
    ),
    "channels_last out": lambda: ordered(
        "channels-last bytes of gradInput read as channels-first", "", "last as first"
    ),
    "channels_last in back": lambda: ordered(
        "channels-first bytes of gradOutput read as channels-last", "first as last"
    ),
    "channels_last out back": lambda: ordered(
        "channels-first bytes of gradInput read as channels-last", "", "first as last"
    ),
    "channels_last kernel": lambda: ordered(
        "channels-first bytes of gradOutput read as channels-last, and channels-last bytes of gradInput read as "
        "channels-first", "first as last", "last as first",
    ),
    "channels_last tensors": lambda: ordered(
        "channels-last bytes of gradOutput read as channels-first, and channels-first bytes of gradInput read as "
        "channels-last", "last as first", "first as last",
    ),
    "transposed in": lambda: ordered("H and W of gradOutput transposed", "WH as HW"),
    "transposed out": lambda: ordered("H and W of gradInput transposed", "", "WH as HW"),
    "transposed both": lambda: ordered("H and W of gradOutput and gradInput transposed", "WH as HW", "WH as HW"),
    "transposed in back": lambda: ordered(
        "H and W of gradOutput transposed by reading H, W as W, H", "HW as WH"
    ),
    "transposed out back": lambda: ordered(
        "H and W of gradInput transposed by reading H, W as W, H", "", "HW as WH"
    ),
    "sum": lambda: scaled(1, "the sum instead of the mean", divided=False, pool=VARIED),
    "factor": lambda: scaled(1024, "a constant factor of 2^10"),
    "factor 1/N": lambda: scaled(1 / 6, "a constant factor of 1/6", pool=VARIED),
    "factor 0.3": lambda: scaled(0.3, "a constant factor of 0.3", pool=VARIED),
    "unwritten": lambda: unwritten(Pool((2, 2), (3, 3))),
    "unwritten most": lambda: unwritten(Pool((1, 1), (3, 3))),
    "race": race,
}  # fmt: skip


def diagnosed(plant: Plant, folder: Path, *more: object) -> Any:
    own = np.zeros(plant.actual.shape, plant.given.dtype)
    tensors = {"g.npy": plant.given, "x.npy": own, "a.npy": plant.actual}
    paths = [save(folder / name, array) for name, array in tensors.items()]
    return poolgrad("diagnose", *paths, *plant.flags, *more)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_named(name: str, tmp_path: Path) -> None:
    plant = PLANTS[name]()
    done = diagnosed(plant, tmp_path, "--json")
    assert done.code == 1, done.out
    record = done.record
    assert record["verdict"] == "explained"
    assert plant.named in record["sentence"]
    best = record["hypotheses"][0]
    phrases = [best["phrase"], *(other["phrase"] for other in best["same"])]
    assert any(plant.named.removesuffix(": ") in phrase for phrase in phrases)
    assert name.split(" ")[0] in [best["key"], *(other["key"] for other in best["same"])]
    assert (best["whole"], best["explains"], best["compared"]) == (True, True, plant.actual.size)


def test_every_hypothesis_has_a_plant() -> None:
    planted = {name.split(" ")[0] for name in PLANTS}
    assert planted == {entry.key for entry in PARAMETERS + FAULTS} | {"windows"}


# ---- What is right


@pytest.mark.parametrize(("layer", "dtype"), [(layer, dtype) for layer in LAYERS for dtype in NUMPY])
def test_no_false_alarm(layer: str, dtype: str) -> None:
    """The fixtures are right, by both formats."""
    folder = FIXTURES / layer / dtype
    arguments = dict(LAYERS[layer])
    op = arguments.pop("op")
    pool = None if op == "adaptive2d" else Pool(**arguments)
    for files in (
        [folder / f"{name}.npy" for name in ("grad_output", "self", "grad_input")],
        [folder / "inputs.safetensors", folder / "inputs.safetensors", folder / "grad_input.safetensors"],
    ):
        done = poolgrad("diagnose", *files, *flags_of(pool), "-q")
        assert done.code == 0, done.out
        assert done.out.startswith(f"This is {op} as believed: 100 % of ")


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("reciprocal", [False, True])
def test_other_orders_and_reciprocals_are_right(dtype: str, reciprocal: bool, tmp_path: Path) -> None:
    """float32 sums, from the last window to the first, of quotients or of products with 1/9."""
    pool = Pool((3, 3), (1, 1), (1, 1))
    given, rows, columns = pooled(pool, (4, 8, 12, 14), dtype)
    made = float32_sums(given, rows, columns, (4, 8, 12, 14), reciprocal, backwards=True)
    done = diagnosed(Plant(given, made.astype(NUMPY[dtype]), pool, ""), tmp_path, "-q")
    assert done.code == 0, done.out
    assert done.out.startswith("This is avg2d as believed: 100 % of 5,376 elements")


@pytest.mark.parametrize("backwards", [False, True])
def test_a_lowered_result_is_right(backwards: bool, tmp_path: Path) -> None:
    done = diagnosed(lowered_in_float32("2", "", backwards), tmp_path, "-q")
    assert done.code == 0, done.out
    assert done.out.startswith("This is avg2d as believed: 100 % of 401,408 elements, ")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_and_infinity_agree(tmp_path: Path) -> None:
    given, rows, columns = pooled(STEM)
    given[0, 0, 2, 2], given[1, 1, 3, 3], given[1, 1, 3, 4], given[0, 2, 0, 0] = np.nan, np.inf, -np.inf, 3e38
    made = scatter(given, rows, columns, CELLS).astype(np.float32)
    assert np.isnan(made).any()
    assert diagnosed(Plant(given, made, STEM, ""), tmp_path, "-q").code == 0
    made[0, 0, 0, 0] = np.nan
    assert diagnosed(Plant(given, made, STEM, ""), tmp_path, "-q").code == 5


# ---- Nothing explains it, or several do


def test_noise_is_not_explained(tmp_path: Path) -> None:
    given, made = right(STEM)
    done = diagnosed(Plant(given, random(*made.shape, seed=5), STEM, ""), tmp_path, "-q")
    assert (done.code, done.out) == (5, "Nothing explains it: no hypothesis reaches 1 % of 1,008 elements.\n")


@pytest.mark.parametrize("cells", [CELLS, (8, 32, 112, 112), (1, 2, 300, 280)])
def test_nothing_was_written(cells: tuple[int, ...], tmp_path: Path) -> None:
    """Windows of a large stride leave boxes of the sample without any window, in every order of bytes."""
    given = pooled(STEM, cells)[0]
    done = diagnosed(Plant(given, np.zeros(cells, np.float32), STEM, ""), tmp_path, "-q")
    assert done.code == 5, done.error
    assert done.out.startswith("Nothing explains it: ")


def test_transposing_both_tensors_is_nothing_where_windows_are_alike(tmp_path: Path) -> None:
    given, made = right(STEM, (2, 3, 12, 12))
    made[1, 1, 0, 0] *= np.float32(1.01)
    record = diagnosed(Plant(given, made, STEM, ""), tmp_path, "--json").record
    assert record["hypotheses"][0]["key"] == "as_believed"
    assert record["sentence"].startswith("Nothing explains it: avg2d as believed comes nearest")
    phrases = {one["phrase"] for one in record["hypotheses"]}
    assert "avg2d with H and W of gradOutput and gradInput transposed" not in phrases


def test_one_wrong_element_is_not_overlooked(tmp_path: Path) -> None:
    """It lies under one window, so that it is no race, and far from the planes of the sample."""
    cells = (5, 20, 40, 40)
    given, made = right(STEM, cells)
    made[0, 15, 8, 8] += 1
    done = diagnosed(Plant(given, made, STEM, ""), tmp_path, "-q")
    assert done.code == 5
    assert done.out == (
        "Nothing explains it: avg2d as believed comes nearest, with 99.99 % of 160,000 elements; 1 differ.\n"
    )


def test_a_race_outside_the_sample_is_found(tmp_path: Path) -> None:
    cells = (5, 20, 40, 40)
    given, made = right(STEM, cells)
    made[0, 15, 9, 8] -= given[0, 15, 4, 4] / np.float32(9)
    done = diagnosed(Plant(given, made, STEM, ""), tmp_path, "-q")
    assert done.code == 1
    assert done.out == (
        "This is avg2d with a race: 99.99 % of 160,000 elements are right, "
        "and all others lie under several windows.\n"
    )


def test_garbage_under_several_windows_is_no_race(tmp_path: Path) -> None:
    given, made = right(STEM)
    made[1, 2, 5, 5] = 1e6
    assert diagnosed(Plant(given, made, STEM, ""), tmp_path, "-q").code == 5


def test_what_roundings_make_is_no_race(tmp_path: Path) -> None:
    """Sums in bfloat16 in an order that is not tried: few are over an ulp off, and all under several windows."""
    cells = (2, 8, 24, 28)
    given, rows, columns = pooled(Pool((2, 2), (1, 1)), cells, "bfloat16")
    made = np.zeros(cells, ml_dtypes.bfloat16)
    for i, row in reversed(list(enumerate(rows))):
        for j, column in enumerate(columns):
            area = made[..., row.start : row.stop, column.start : column.stop]
            area[...] = (area.astype(np.float32) + given[..., i, j, None, None].astype(np.float32) / 4).astype(
                made.dtype
            )
    done = diagnosed(Plant(given, made, Pool((2, 2), (1, 1)), ""), tmp_path, "--json")
    best = done.record["hypotheses"][0]
    assert best["explained"] > 0.9 * best["compared"]
    assert done.code == 5, done.out


def test_two_of_five_elements_wrong_are_no_race(tmp_path: Path) -> None:
    given, made = right(STEM)
    for number in range(5):
        made[..., 2 * number + 1, :] -= given[..., number, [c // 2 for c in range(14)]] / np.float32(9)
    done = diagnosed(Plant(given, made, STEM, ""), tmp_path, "-q")
    assert done.code == 5
    assert done.out.startswith("Nothing explains it: avg2d as believed comes nearest, with 58.33 % of")


def test_the_call_comes_nearer_than_its_race(tmp_path: Path) -> None:
    """The sample is kinder than the whole, so that each of the two is confirmed, the race last."""
    cells = (8, 32, 40, 40)
    given, made = right(STEM, cells)
    made[1::2] *= np.float32(1.001)
    done = diagnosed(Plant(given, made, STEM, ""), tmp_path, "-q")
    assert done.out.startswith("Nothing explains it: avg2d as believed comes nearest")


def test_what_cannot_be_told_apart_is_listed(tmp_path: Path) -> None:
    """Nothing but the sum, an override of 1 and a factor of 9 give this where every divisor is 9."""
    plant = scaled(1, "", divided=False)
    done = diagnosed(plant, tmp_path, "--json")
    best = done.record["hypotheses"][0]
    assert done.code == 1
    assert [best["key"], *(other["key"] for other in best["same"])] == ["divisor_override", "sum", "factor"]
    assert diagnosed(plant, tmp_path, "-q").out == (
        "This is avg2d with divisor_override=1, or avg2d with the sum instead of the mean, or avg2d with a constant "
        "factor of 9 (not to be told apart here): 100 % of 1,008 elements, exactly.\n"
    )


def test_modes_that_make_no_difference_are_listed_beside_the_believed_call(tmp_path: Path) -> None:
    pool = Pool((2, 2), (2, 2))
    given, made = right(pool)
    done = diagnosed(Plant(given, made, pool, ""), tmp_path, "--json")
    best = done.record["hypotheses"][0]
    assert done.code == 0
    assert best["key"] == "as_believed"
    assert {"count_include_pad", "ceil_mode", "adaptive2d"} <= {other["key"] for other in best["same"]}


def test_global_shortcut_and_count_include_pad_are_listed_together(tmp_path: Path) -> None:
    """A window over the whole plane: the shortcut does what count_include_pad=False asks."""
    cells, pool = (2, 3, 4, 4), Pool((6, 6), (6, 6), (1, 1))
    given = pooled(pool, cells)[0]
    made = np.broadcast_to(given / np.float32(16), cells).copy()
    done = diagnosed(Plant(given, made, pool, ""), tmp_path, "--json")
    best = done.record["hypotheses"][0]
    assert {"count_include_pad", "global_shortcut"} <= {best["key"], *(other["key"] for other in best["same"])}


def test_a_result_that_is_right_within_an_ulp_gives_way_to_one_that_is_exact(tmp_path: Path) -> None:
    plant = PLANTS["weights bfloat16"]()
    done = diagnosed(plant, tmp_path, "--json")
    believed = next(one for one in done.record["hypotheses"] if one["key"] == "as_believed")
    assert done.code == 1
    assert believed["explained"] > 0.99 * plant.actual.size > believed["exact"]


def test_a_rounded_weight_with_a_near_tie(tmp_path: Path) -> None:
    """Even the right hypothesis misses the last bit of some element of a large tensor."""
    cells = (8, 16, 24, 24)
    given, rows, columns = pooled(STEM, cells, "bfloat16")
    made = np.zeros(cells, np.float32)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            term = given[..., i, j].astype(np.float32) * np.float32(bfloat16(1 / 9))
            made[..., max(row.start, 0) : row.stop, max(column.start, 0) : column.stop] += term[..., None, None]
    stored = made.astype(ml_dtypes.bfloat16)
    stored.view(np.uint16)[3, 3, 5, 5] ^= 1
    done = diagnosed(Plant(given, stored, STEM, ""), tmp_path, "-q")
    assert done.code == 1
    assert done.out == (
        "This is avg2d with weights 1/9 rounded to bfloat16: 100 % of 73,728 elements, "
        "within one ulp (99.99 % exactly).\n"
    )


@pytest.mark.parametrize("pool", [replace(STEM, count_include_pad=False), None])
def test_what_poolgrad_computes_is_explained_exactly(pool: Pool | None, tmp_path: Path) -> None:
    """Sums in float32 are not all the exact ones rounded, and are this call to the last bit all the same."""
    cells = (8, 16, 24, 24)
    given = pooled(STEM, cells)[0] if pool else random(8, 16, 7, 7)
    paths = save(tmp_path / "g.npy", given), save(tmp_path / "x.npy", np.zeros(cells, np.float32))
    made = tmp_path / "made.npy"
    flags = ["avg2d", *flags_of(pool)] if pool else ["adaptive2d"]
    assert poolgrad(flags[0], *paths, "-o", made, *flags[1:], "-q").code == 0
    actual = np.load(made)
    exact_sums = right(pool, cells)[1] if pool else None
    assert exact_sums is None or (actual != exact_sums).mean() > 0.1

    named = "avg2d with count_include_pad=False" if pool else "adaptive2d as believed"
    plant = Plant(given, actual, STEM if pool else None, named)
    done = diagnosed(plant, tmp_path, "-q")
    assert done.code == (1 if pool else 0)
    assert done.out == f"This is {named}: 100 % of 73,728 elements, exactly.\n"

    actual.view(np.uint32)[3, 3, 5, 5] ^= 1
    assert diagnosed(plant, tmp_path, "-q").out.endswith("elements, within one ulp (99.99 % exactly).\n")


# ---- What is believed


def test_nothing_believed_finds_the_call(tmp_path: Path) -> None:
    given, made = right(replace(STEM, count_include_pad=False))
    done = diagnosed(Plant(given, made, None, "", ("--op", "avg2d")), tmp_path, "--json")
    assert done.code == 1
    assert done.record["believed"] is None
    assert done.record["sentence"].startswith(
        "This is avg2d with kernel 3, stride 2, padding 1, count_include_pad=False: 100 % of 1,008 elements, "
    )
    call = done.record["hypotheses"][0]["call"]
    assert call == {
        "op": "avg2d", "product": "atlas-a2", "kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1],
        "ceil_mode": False, "count_include_pad": False, "divisor_override": 0, "cube_math_type": 0,
    }  # fmt: skip


def test_the_operator_may_be_another(tmp_path: Path) -> None:
    given = random(2, 3, 5, 4)
    sides = [adaptive_windows(12, 5), adaptive_windows(14, 4)]
    made = scatter(given, sides[0], sides[1], CELLS).astype(np.float32)
    plant = Plant(given, made, Pool((4, 5), (2, 3)), "")
    assert diagnosed(plant, tmp_path, "-q").out.startswith("This is adaptive2d: 100 %")
    assert diagnosed(replace(plant, extra=("--op", "avg2d")), tmp_path, "-q").code == 5
    assert diagnosed(replace(plant, believed=None), tmp_path, "-q").code == 0


def test_a_fault_of_a_call_that_nobody_believed_in(tmp_path: Path) -> None:
    """First the windows are found by what is nearest, then the fault on them."""
    plant = PLANTS["weights HF32"]()
    done = diagnosed(replace(plant, believed=Pool((5, 5), (2, 2), (2, 2))), tmp_path, "-q")
    assert done.code == 1
    assert done.out.startswith(
        "This is avg2d with kernel 3, stride 2, padding 1, count_include_pad=False, "
        "and with weights 1/count rounded to HF32: 100 % of "
    )


def test_other_windows_and_another_precision(tmp_path: Path) -> None:
    plant = lowered("0", "", hf32, np.float32)
    done = diagnosed(replace(plant, believed=Pool((5, 5), (2, 2), (2, 2))), tmp_path, "-q")
    assert done.code == 1
    assert done.out.startswith("This is avg2d with kernel 3, stride 2, padding 1, cube_math_type=1, or avg2d with")


def test_a_rejected_call_is_said_to_be(tmp_path: Path) -> None:
    done = diagnosed(PLANTS["ceil_mode"](), tmp_path)
    assert done.code == 1
    assert "rejected: gradOutput is 6x7" in done.out
    assert done.out.splitlines()[-1].startswith("This is avg2d with ceil_mode=True: 100 % of 1,008 elements")


@pytest.mark.parametrize("shape", [(3, 12, 14), (1, 1, 12, 14), (2, 3, 300, 14), (1, 2, 260, 270)])
def test_other_shapes(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Rank 3, one plane, and planes of which the sample has corners, edges and the middle."""
    given, made = right(STEM, shape)
    assert diagnosed(Plant(given, made, STEM, ""), tmp_path, "-q").code == 0
    named = other_pool(MODES, STEM, "", shape)
    assert "count_include_pad=False" in diagnosed(named, tmp_path, "-q").out


# ---- Files and dtypes


def test_a_wider_actual_is_rounded(tmp_path: Path) -> None:
    given, made = right(STEM, dtype="bfloat16")
    plant = Plant(given, made.astype(np.float32), STEM, "")
    done = diagnosed(plant, tmp_path)
    assert done.code == 0
    assert "self is bfloat16: ACTUAL is rounded to it, to compare it" in done.out


def test_predictions_are_rounded_to_a_narrower_actual(tmp_path: Path) -> None:
    given, made = right(STEM)
    done = diagnosed(Plant(given, made.astype(np.float16), STEM, ""), tmp_path)
    assert done.code == 0
    assert "self is float32: predictions are rounded to float16, to compare them" in done.out


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (random(*CELLS, dtype="float16"), "ACTUAL is float16 and self bfloat16; expected float32 or bfloat16"),
        (random(*CELLS).astype(np.float64), "ACTUAL is float64 and self bfloat16"),
        (random(2, 12, 14, 3, dtype="bfloat16"), "as self; it seems to be channels-last, and is to be transposed"),
        (random(2, 3, 14, 12, dtype="bfloat16"), "it seems to be with H and W exchanged"),
        (random(3, 12, 14, dtype="bfloat16"), "ACTUAL is bfloat16 (3, 12, 14); expected bfloat16 (2, 3, 12, 14)"),
    ],
)
def test_an_actual_that_cannot_be_compared_is_refused(actual: Array, words: str, tmp_path: Path) -> None:
    given = right(STEM, dtype="bfloat16")[0]
    own = save(tmp_path / "x.npy", np.zeros(CELLS, ml_dtypes.bfloat16))
    done = poolgrad("diagnose", save(tmp_path / "g.npy", given), own, save(tmp_path / "a.npy", actual), "-k", "3")
    assert done.code == 2
    assert words in done.error


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["-k", "0"], 2, "kernelSize is 0; expected"),
        (["-k", "3,3,3"], 2, "kernelSize is 3,3,3"),
        (["-k", "x"], 2, "'x' is not one integer"),
        (["--op", "max2d"], 2, "max2d"),
        (["--product", "atlas-200i-500-a2"], 2, "not supported on atlas-200i-500-a2"),
    ],
)
def test_calls_that_nobody_can_believe(flags: list[str], code: int, words: str, tmp_path: Path) -> None:
    given, made = right(STEM)
    done = diagnosed(Plant(given, made, None, "", tuple(flags)), tmp_path)
    assert done.code == code
    assert words in done.error


def test_a_missing_file(tmp_path: Path) -> None:
    given, made = right(STEM)
    paths = [save(tmp_path / "g.npy", given), save(tmp_path / "x.npy", made), tmp_path / "none.npy"]
    done = poolgrad("diagnose", *paths, "-k", "3", "--json")
    assert done.code == 3
    assert (done.record["name"], done.record["status"]) == ("FILE", "error")


def test_one_file_with_three_tensors(tmp_path: Path) -> None:
    given, made = right(STEM)
    path = save_safetensors(tmp_path / "all.safetensors", {"grad_output": given, "self": made, "grad_input": made})
    done = poolgrad("diagnose", path, path, path, *flags_of(STEM), "--json")
    assert done.code == 0
    assert [done.record[key]["name"] for key in ("grad_output", "self", "actual")] == [
        "grad_output", "self", "grad_input",
    ]  # fmt: skip


def test_orders_of_bytes_and_axes_do_not_matter(tmp_path: Path) -> None:
    given, made = right(STEM)
    np.save(tmp_path / "g.npy", np.asfortranarray(given.astype(">f4")))
    np.save(tmp_path / "a.npy", np.asfortranarray(made.astype(">f4")))
    own = save(tmp_path / "x.npy", made)
    assert poolgrad("diagnose", tmp_path / "g.npy", own, tmp_path / "a.npy", *flags_of(STEM), "-q").code == 0


def test_threads_do_not_matter(tmp_path: Path) -> None:
    plant = other_pool(MODES, STEM, "", (7, 30, 40, 40))
    records = [diagnosed(plant, tmp_path, "--json", "--threads", number).record for number in (1, 3)]
    for record in records:
        record.pop("timing_s")
    assert records[0] == records[1]


# ---- What is shown


def test_the_report_fits_80_columns(tmp_path: Path) -> None:
    plant = PLANTS["weights both HF32"]()
    paths = [save(tmp_path / name, array) for name, array in (("g.npy", plant.given), ("a.npy", plant.actual))]
    words = ["diagnose", paths[0].name, paths[1].name, paths[1].name, *plant.flags, "--all"]
    code = f"import os; os.chdir({str(tmp_path)!r})\n{ENTRY}"
    done = poolgrad_process(*words, code=code, COLUMNS="80")
    assert (done.code, done.err) == (1, "")
    lines = done.out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert "\x1b" not in done.out
    assert lines[-1].startswith("This is avg2d with weights 1/count and gradOutput rounded to HF32: 100 %")
    piped = poolgrad_process(*words, code=code)
    assert piped.out.splitlines()[-1] == lines[-1]


def test_the_table_lists_the_best_and_counts_the_rest(tmp_path: Path) -> None:
    plant = PLANTS["count_include_pad"]()
    short, long = diagnosed(plant, tmp_path).out, diagnosed(plant, tmp_path, "--all").out
    assert "more explain no more (--all lists them)" in short
    assert "more explain no more" not in long
    assert len(long.splitlines()) > len(short.splitlines())
    assert short.splitlines()[-1] == long.splitlines()[-1] == diagnosed(plant, tmp_path, "-q").out.rstrip("\n")


def test_json_has_every_hypothesis(tmp_path: Path) -> None:
    record = diagnosed(PLANTS["count_include_pad"](), tmp_path, "--json").record
    assert (record["schema"], record["status"], record["elements"]) == (1, "ok", 1008)
    assert record["believed"]["kernel_size"] == [3, 3]
    hypotheses = record["hypotheses"]
    assert len(hypotheses) > 15
    shares = [one["explained"] / one["compared"] for one in hypotheses]
    assert shares == sorted(shares, reverse=True)
    assert set(hypotheses[0]) == {
        "key", "phrase", "sentence", "call", "explained", "exact", "compared", "whole", "explains", "same",
    }  # fmt: skip


# ---- Predictions


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "hfloat32"])
def test_rounding(name: str) -> None:
    """Against exact fractions: ties, subnormals, the greatest numbers."""
    form = {"hfloat32": formats.HFLOAT32}.get(name) or formats.FORMATS[name]
    drawn = np.random.default_rng(0)
    values = np.ldexp(drawn.standard_normal(400), drawn.integers(-160, 130, 400))
    step = 2.0 ** (1 - form.bits)
    ties = np.ldexp(1 + step * (drawn.integers(0, 64, 200) + 0.5), drawn.integers(form.least, form.most, 200))
    edges = np.ldexp(
        [1 + 1 / 3, 0.5, 1.5, 1 - 2.0**-30, 2 - step / 2, 2 - step, 2 - step / 1.9], [form.least - 3] * 7
    )
    values = np.concatenate([values, ties, -ties, edges, np.ldexp(edges, form.most + 3 - form.least), [0.0]])
    expected = rounded(exact(values), name)
    np.testing.assert_array_equal(formats.rounded(values, form), expected)
    away = formats.rounded(ties, form, ties_away=True)
    assert (away >= formats.rounded(ties, form)).all()
    assert (away > ties).all()
    assert FORMATS[name].bits == form.bits


@pytest.mark.parametrize(
    "pool",
    [STEM, MODES, Pool((9, 7), (1, 1), (4, 3)), Pool((2, 3), (3, 5)), Pool((5, 5), (2, 3), (2, 1), True, False, 7)],
    ids=str,
)
def test_boxes_are_cut_from_what_the_windows_give(pool: Pool) -> None:
    cells = (2, 3, 20, 23)
    given, rows, columns = pooled(pool, cells)
    whole = scatter(given, rows, columns, cells, override(pool)).reshape(6, 20, 23)
    call = Call(
        "avg2d",
        TensorSpec(given.shape, "float32"),
        TensorSpec(cells, "float32"),
        "atlas-a2",
        *list(vars(pool).values()),
    )
    flat = given.reshape(6, *given.shape[2:]).astype(np.float64)
    predictor = prediction.Predictor(plan_of(call), lambda p, r, c: flat[p, r, c], (formats.FLOAT32,))
    drawn = np.random.default_rng(0)
    for _ in range(40):
        box = random_box(drawn, (6, 20, 23))
        np.testing.assert_allclose(predictor.values(*box), whole[box], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("most_read", [8, 1 << 20])
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 7), (1, 4, 6, 2), (3, 1, 4, 4), (2, 5, 1, 9), (2, 7, 9, 1), (1, 6, 2, 3)]
)
def test_other_orders_of_bytes(shape: tuple[int, ...], most_read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_orders, "_MOST_READ", most_read)
    n, c, h, w = shape
    values = random(*shape).astype(np.float64)
    flat = values.reshape(n * c, h, w)
    ways = dict(
        zip(list(byte_orders.Order)[1:], ("last as first", "first as last", "WH as HW", "HW as WH"), strict=True)
    )
    for order, how in ways.items():
        expected = misread(values, how).reshape(n * c, h, w)
        read = byte_orders.reordered(lambda p, r, c: flat[p, r, c], order, c, h, w)
        drawn = np.random.default_rng(0)
        for _ in range(60):
            box = random_box(drawn, (n * c, h, w))
            np.testing.assert_array_equal(read(*box), expected[box])


def random_box(drawn: np.random.Generator, extents: tuple[int, int, int]) -> tuple[slice, slice, slice]:
    """Any part, every third time of whole rows."""
    sides = []
    for extent in extents:
        start = int(drawn.integers(extent))
        sides.append(slice(start, int(drawn.integers(start, extent)) + 1))
    whole = drawn.random() < 0.3
    return sides[0], sides[1], slice(0, extents[2]) if whole else sides[2]

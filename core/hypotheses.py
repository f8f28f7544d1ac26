"""What may explain a wrong gradInput, as a table: a name, one sentence, and what it changes in the plan.

To add a hypothesis, write its change (a function from a `Base` to the variants of its call or plan; none where it
does not apply) and one entry of `PARAMETERS` or `FAULTS`. A parameter changes the call, a fault the plan. The name
is to read well after "This is avg2d with ...", and may hold `{}` for a variant's detail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product as combinations
from typing import Any, Protocol

import numpy as np

from .byte_orders import Order
from .executor import Executor
from .formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS, HFLOAT32, Format, Ints
from .operators import plan_adaptive_avg_pool2d_backward, plan_avg_pool2d_backward
from .prediction import Axis, Edges, Free, Plan
from .products import RULES, CubeMathType, Precision, Product
from .status import AclnnError
from .tensors import TensorSpec

Pair = tuple[int, int]

MOST_ROUNDED_TERMS = 256
"""Windows over a cell up to which sums in 16 bits are tried: each takes a pass."""


@dataclass(frozen=True)
class Call:
    """A call of one of the operators. adaptive2d has the tensors and the product alone."""

    operator: str
    grad_output: TensorSpec
    self: TensorSpec
    product: str = Product.ATLAS_A2.value
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int = 0
    cube_math_type: int = 0

    def executor(self, threads: int = 1) -> Executor:
        """What computes the call from files. Raises AclnnError where the operator rejects it."""
        if self.operator == "adaptive2d":
            return plan_adaptive_avg_pool2d_backward(
                self.grad_output, self.self, product=self.product, threads=threads, staging=True
            )
        return plan_avg_pool2d_backward(
            self.grad_output, self.self, self.kernel, self.stride, self.padding, self.ceil_mode,
            self.count_include_pad, self.divisor_override, self.cube_math_type, product=self.product,
            threads=threads, staging=True,
        )  # fmt: skip

    def check(self) -> None:
        """Raise AclnnError where the operator rejects the call."""
        self.executor()

    @property
    def is_legal(self) -> bool:
        """Whether the operator takes the call."""
        try:
            self.check()
        except AclnnError:
            return False
        return True

    @property
    def precision(self) -> Precision | None:
        """What the cubeMathType comes to, None where it is rejected."""
        rules = RULES[Product(self.product)]
        if self.operator == "adaptive2d":
            return Precision.AS_IS
        outcomes = rules.precision.get(self.self.dtype) if rules else None
        return outcomes[self.cube_math_type] if outcomes and 0 <= self.cube_math_type < len(outcomes) else None

    def __str__(self) -> str:
        if self.operator == "adaptive2d":
            return self.operator
        pairs = {"kernel": self.kernel, "stride": self.stride, "padding": self.padding}
        words = [f"{name} {text_of(pair)}" for name, pair in pairs.items() if name != "padding" or any(pair)]
        words += ["ceil_mode=True"] * self.ceil_mode
        words += ["count_include_pad=False"] * (not self.count_include_pad)
        words += [f"divisor_override={self.divisor_override}"] * bool(self.divisor_override)
        words += [f"cube_math_type={self.cube_math_type}"] * bool(self.cube_math_type)
        return f"{self.operator} with {', '.join(words)}"


def text_of(pair: Pair) -> str:
    """`3`, or `3,2` where the axes differ."""
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]},{pair[1]}"


class Evidence(Protocol):
    """What can be inferred from the data: see `core/inference`."""

    def divisors(self, plan: Plan) -> list[int]:
        """The common divisors that would make the plan explain the data."""

    def factors(self, plan: Plan) -> list[Fraction]:
        """The constant factors that would."""


@dataclass(frozen=True)
class Base:
    """What a hypothesis starts from: a call, its plan (None where the call is rejected) and the data."""

    call: Call
    plan: Plan | None
    evidence: Evidence

    @property
    def planned(self) -> Plan:
        """The plan, where there is one: faults are tried on legal calls alone."""
        assert self.plan is not None
        return self.plan

    @property
    def form(self) -> Format:
        """The format of the tensors."""
        return FORMATS[self.call.self.dtype]


Change = Callable[[Base], Iterator[tuple[Any, str]]]
"""Yields calls (a parameter) or plans (a fault), each with the detail for the name."""


@dataclass(frozen=True)
class Hypothesis:
    """One entry of the table. operators: those that it can befall."""

    key: str
    name: str
    sentence: str
    change: Change
    operators: tuple[str, ...] = ("avg2d", "adaptive2d")


# ---- The plan of a call


def believed_call(
    tensors: Call,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] | None,
    padding: tuple[int, ...],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int,
    cube_math_type: int,
) -> Call:
    """avg2d on the tensors of another call; arguments as of `avg_pool2d_backward`.

    Raises AclnnError for numbers that no call can have. What only does not go with the shapes is let pass.
    """
    kernel = _pair("kernelSize", kernel_size, 1)
    return replace(
        tensors,
        operator="avg2d",
        kernel=kernel,
        stride=_pair("stride", stride, 1) if stride else kernel,
        padding=_pair("padding", padding, 0),
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        divisor_override=divisor_override,
        cube_math_type=cube_math_type,
    )


def _pair(name: str, values: tuple[int, ...], least: int) -> Pair:
    if len(values) not in (1, 2) or not all(least <= value < 2**62 for value in values):
        text = ",".join(map(str, values))
        raise AclnnError(f"{name} is {text}; expected one integer or two (H, W), at least {least} and below 2^62")
    return values[0], values[-1]


def plan_of(call: Call) -> Plan:
    """What a legal call is to compute."""
    rows, columns = (axis_of(call, axis) for axis in (0, 1))
    channels = call.self.shape[-3]
    images = call.self.shape[0] if len(call.self.shape) == 4 else 1
    precision = call.precision
    given = {Precision.HF32: HFLOAT32, Precision.FP16: FLOAT16}.get(precision) if precision else None
    return Plan(
        (images, channels), rows, columns, call.divisor_override or None, given,
        result=FLOAT16 if precision is Precision.FP16 else None,
    )  # fmt: skip


def axis_of(call: Call, axis: int) -> Axis:
    """The windows of H (0) or W (1) of a legal call."""
    cells, count = extents(call, axis)
    if call.operator == "adaptive2d":
        return Axis(cells, count, bins(cells, count))
    return Axis(
        cells, count, pool(cells, call.kernel[axis], call.stride[axis], call.padding[axis], call.count_include_pad)
    )


def extents(call: Call, axis: int) -> Pair:
    """Input cells and windows of H (0) or W (1)."""
    return call.self.shape[-2 + axis], call.grad_output.shape[-2 + axis]


def pool(cells: int, kernel: int, stride: int, padding: int, count_include_pad: bool) -> Edges:
    """avg2d's windows along an axis."""

    def edges(windows: Ints) -> tuple[Any, Any, Any]:
        start = windows * stride - padding
        end = np.minimum(start + kernel, cells + padding)
        inside = np.minimum(end, cells) - np.maximum(start, 0)
        return start, end, end - start if count_include_pad else inside

    return edges


def undivided(edges: Edges) -> Edges:
    """The same windows, dividing by 1."""
    return lambda windows: (*edges(windows)[:2], 1)


def bins(cells: int, count: int) -> Edges:
    """adaptive2d's windows along an axis."""

    def edges(windows: Ints) -> tuple[Any, Any, Any]:
        start, end = windows * cells // count, -(-(windows + 1) * cells // count)
        return start, end, end - start

    return edges


# ---- Other parameters


def _count_include_pad(base: Base) -> Iterator[tuple[Call, str]]:
    other = not base.call.count_include_pad
    yield replace(base.call, count_include_pad=other), str(other)


def _ceil_mode(base: Base) -> Iterator[tuple[Call, str]]:
    other = not base.call.ceil_mode
    yield replace(base.call, ceil_mode=other), str(other)


def _both_modes(base: Base) -> Iterator[tuple[Call, str]]:
    ceil, count = not base.call.ceil_mode, not base.call.count_include_pad
    detail = f"ceil_mode={ceil} and count_include_pad={count}"
    yield replace(base.call, ceil_mode=ceil, count_include_pad=count), detail


def _swapped(base: Base) -> Iterator[tuple[Call, str]]:
    pairs: dict[str, Pair] = {"kernel": base.call.kernel, "stride": base.call.stride, "padding": base.call.padding}
    unequal = [name for name, pair in pairs.items() if pair[0] != pair[1]]
    for chosen in sorted(combinations((False, True), repeat=len(unequal)), key=sum)[1:]:
        names = [name for name, swaps in zip(unequal, chosen, strict=True) if swaps]
        swapped: dict[str, Any] = {name: pairs[name][::-1] for name in names}
        yield replace(base.call, **swapped), " and of ".join(names)


def _divisor_override(base: Base) -> Iterator[tuple[Call, str]]:
    if base.plan is None:
        return
    for divisor in base.evidence.divisors(base.plan):
        if divisor != base.plan.common_divisor:
            yield replace(base.call, divisor_override=divisor), str(divisor)


def _fp16_for_hf32(base: Base) -> Iterator[tuple[Call, str]]:
    if base.call.cube_math_type == CubeMathType.ALLOW_FP32_DOWN_PRECISION and base.call.precision is Precision.HF32:
        yield replace(base.call, cube_math_type=int(CubeMathType.USE_FP16)), ""


def _cube_math_type(base: Base) -> Iterator[tuple[Call, str]]:
    for mode in CubeMathType:
        if int(mode) != base.call.cube_math_type:
            yield replace(base.call, cube_math_type=int(mode)), f"{int(mode)} ({mode.name})"


def _product(base: Base) -> Iterator[tuple[Call, str]]:
    """Products that lower this call differently, and modes that come to what this product never does."""
    call = base.call
    own = {replace(call, cube_math_type=int(mode)).precision for mode in CubeMathType} | {None}
    seen = {None, call.precision}
    for mode, product in combinations(dict.fromkeys((call.cube_math_type, *range(4))), Product):
        other = replace(call, product=product.value, cube_math_type=mode)
        same_mode = mode == call.cube_math_type
        if other.precision not in (seen if same_mode else seen | own):
            seen.add(other.precision)
            yield other, product.value + f" and cube_math_type={mode}" * (not same_mode)


PARAMETERS: tuple[Hypothesis, ...] = (
    Hypothesis(
        "count_include_pad",
        "count_include_pad={}",
        "Padding counts in the divisor, or does not, against what is believed.",
        _count_include_pad,
        ("avg2d",),
    ),
    Hypothesis(
        "ceil_mode",
        "ceil_mode={}",
        "The output's size is rounded the other way.",
        _ceil_mode,
        ("avg2d",),
    ),
    Hypothesis(
        "both_modes",
        "{}",
        "Both ceil_mode and count_include_pad are the other way.",
        _both_modes,
        ("avg2d",),
    ),
    Hypothesis(
        "swapped",
        "H and W swapped of {}",
        "The two numbers of an argument are taken as (W, H).",
        _swapped,
        ("avg2d",),
    ),
    Hypothesis(
        "divisor_override",
        "divisor_override={}",
        "Every window is divided by this number, which the data show.",
        _divisor_override,
        ("avg2d",),
    ),
    Hypothesis(
        "fp16_for_hf32",
        "FP16 where the documents say HF32",
        "cubeMathType 1 casts to float16, as the published source of the operator appears to.",
        _fp16_for_hf32,
        ("avg2d",),
    ),
    Hypothesis(
        "cube_math_type",
        "cube_math_type={}",
        "float32 is lowered as another cubeMathType asks.",
        _cube_math_type,
        ("avg2d",),
    ),
    Hypothesis(
        "product",
        "product={}",
        "float32 is lowered as another product does.",
        _product,
        ("avg2d",),
    ),
)


# ---- Known faults


def _with_edges(base: Base, make: Callable[[int], Edges]) -> Plan:
    """The plan with other windows on both axes; `make` gets 0 for H and 1 for W."""
    rows, columns = (Axis(*extents(base.call, axis), make(axis)) for axis in (0, 1))
    return replace(base.planned, rows=rows, columns=columns)


def _overhang(base: Base) -> Iterator[tuple[Plan, str]]:
    call = base.call

    def make(axis: int) -> Edges:
        right, kernel = axis_of(call, axis).edges, call.kernel[axis]
        reach = extents(call, axis)[0] + call.padding[axis]

        def edges(windows: Ints) -> tuple[Any, Any, Any]:
            start, end, divisor = right(windows)
            return start, end, np.where(start + kernel > reach, kernel, divisor)

        return edges

    if not call.divisor_override:
        yield _with_edges(base, make), ""


def _padding_lost(base: Base) -> Iterator[tuple[Plan, str]]:
    if any(base.call.padding):
        yield _with_edges(base, lambda axis: _moved(base.call, axis)), ""
        yield _with_edges(base, lambda axis: _moved_and_counted(base.call, axis)), " before cells are counted"


def _moved(call: Call, axis: int) -> Edges:
    """Windows that lost the offset where they are written, and kept their divisors."""
    right, padding = axis_of(call, axis).edges, call.padding[axis]

    def edges(windows: Ints) -> tuple[Any, Any, Any]:
        start, end, divisor = right(windows)
        return start + padding, end + padding, divisor

    return edges


def _moved_and_counted(call: Call, axis: int) -> Edges:
    """Windows that lost the offset before their cells were counted."""
    cells, kernel, stride, padding = extents(call, axis)[0], call.kernel[axis], call.stride[axis], call.padding[axis]

    def edges(windows: Ints) -> tuple[Any, Any, Any]:
        start = windows * stride
        end = np.minimum(start + kernel, cells + padding)
        inside = np.maximum(np.minimum(end, cells) - start, 1)
        return start, end, end - start if call.count_include_pad else inside

    return edges


def _global_shortcut(base: Base) -> Iterator[tuple[Plan, str]]:
    call = base.call
    if call.grad_output.shape[-2:] != (1, 1) or not any(call.padding):
        return
    cells = call.self.shape[-2:]
    plan = _with_edges(base, lambda axis: lambda windows: (windows * 0, windows * 0 + cells[axis], cells[axis]))
    yield replace(plan, divisor=None), ""


def _override_ignored(base: Base) -> Iterator[tuple[Plan, str]]:
    call = base.call
    if not call.divisor_override:
        return
    reasons = ["because count_include_pad is off"] * (not call.count_include_pad)
    reasons += [f"at exactly {call.divisor_override}"] * (abs(call.divisor_override) == 255)
    for reason in reasons or [""]:
        yield replace(base.planned, divisor=None), reason


def _floor_ends(base: Base) -> Iterator[tuple[Plan, str]]:
    def make(axis: int) -> Edges:
        cells, count = extents(base.call, axis)

        def edges(windows: Ints) -> tuple[Any, Any, Any]:
            start, end = windows * cells // count, (windows + 1) * cells // count
            return start, end, np.maximum(end - start, 1)

        return edges

    yield _with_edges(base, make), ""


def _one_size(base: Base) -> Iterator[tuple[Plan, str]]:
    """Starts as they should be, or end to end; then the last bins are cut, or lie past the input."""

    def plan(packed: bool, full: bool) -> Plan:
        return _with_edges(base, lambda axis: _equal_bins(*extents(base.call, axis), packed, full))

    yield plan(False, False), "ceil(n/m)"
    yield plan(True, False), "ceil(n/m), end to end"
    yield plan(True, True), "ceil(n/m), end to end, the last divided in full"


def _equal_bins(cells: int, count: int, packed: bool, full: bool) -> Edges:
    size = -(-cells // count)

    def edges(windows: Ints) -> tuple[Any, Any, Any]:
        start = windows * size if packed else windows * cells // count
        end = np.minimum(start + size, cells)
        return start, end, size if full else np.maximum(end - start, 1)

    return edges


def _as_pool(base: Base) -> Iterator[tuple[Plan, str]]:
    def make(axis: int) -> Edges:
        cells, count = extents(base.call, axis)
        stride = cells // count
        return pool(cells, cells - (count - 1) * stride, stride, 0, True)

    yield _with_edges(base, make), ""


def _float32_ends(base: Base) -> Iterator[tuple[Plan, str]]:
    for scale_first in (True, False):
        edges = [_rounded_bins(*extents(base.call, axis), scale_first) for axis in (0, 1)]
        yield _with_edges(base, edges.__getitem__), ", the scale n/m first" * scale_first


def _rounded_bins(cells: int, count: int, scale_first: bool) -> Edges:
    one = np.float32

    def ends(windows: Ints) -> Any:
        if scale_first:
            return windows.astype(one) * (one(cells) / one(count))
        return windows.astype(one) * one(cells) / one(count)

    def edges(windows: Ints) -> tuple[Any, Any, Any]:
        start = np.floor(ends(windows)).astype(np.int64)
        end = np.minimum(np.ceil(ends(windows + 1)).astype(np.int64), cells)
        return start, end, np.maximum(end - start, 1)

    return edges


def _weights(base: Base) -> Iterator[tuple[Plan, str]]:
    plan, is_float32 = base.planned, base.call.self.dtype == "float32"
    weights = f"1/{plan.common_divisor}" if (plan.common_divisor or 0) > 0 else "1/count"
    halves = [FLOAT16, BFLOAT16] if is_float32 else [base.form]
    for form in (*halves, HFLOAT32):
        yield replace(plan, weight=form), f"{weights} rounded to {form.name}"
    for form in (*halves, HFLOAT32) if is_float32 else ():
        lowered = replace(plan, weight=form, given=form, result=None)
        yield lowered, f"{weights} and gradOutput rounded to {form.name}"
        if form is not HFLOAT32:
            yield replace(lowered, result=form), f"{weights}, gradOutput and gradInput rounded to {form.name}"


def _sums_in_16_bits(base: Base) -> Iterator[tuple[Plan, str]]:
    plan, is_float32 = base.planned, base.call.self.dtype == "float32"
    # In 16 bits a cell's only term is rounded when it is stored, anyway.
    if not (1 if is_float32 else 2) <= plan.most_terms <= MOST_ROUNDED_TERMS:
        return
    for form in [FLOAT16, BFLOAT16] if is_float32 else [base.form]:
        yield replace(plan, terms=form, sums=form), form.name
        yield replace(plan, terms=FLOAT32, sums=form), f"{form.name} of terms in float32"


def _ties_away(base: Base) -> Iterator[tuple[Plan, str]]:
    if base.call.self.dtype == "float32" and base.call.operator == "avg2d":
        yield replace(base.planned, given=HFLOAT32, ties_away=True, result=None), ""


def _channels_last(base: Base) -> Iterator[tuple[Plan, str]]:
    names = {
        Order.CHANNELS_LAST: "channels-last bytes of {} read as channels-first",
        Order.CHANNELS_FIRST: "channels-first bytes of {} read as channels-last",
    }
    return _misread(base.planned, names)


def _transposed(base: Base) -> Iterator[tuple[Plan, str]]:
    names = {
        Order.TRANSPOSED: "H and W of {} transposed",
        Order.TRANSPOSED_BACK: "H and W of {} transposed by reading H, W as W, H",
    }
    return _misread(base.planned, names)


def _misread(plan: Plan, names: dict[Order, str]) -> Iterator[tuple[Plan, str]]:
    """One tensor in each order, then both; orders that come to the same by the name of the first."""
    seen = {plan.identity}
    for given, result in sorted(
        combinations((Order.AS_IS, *names), repeat=2), key=lambda pair: Order.AS_IS not in pair
    ):
        made = replace(plan, given_order=given, result_order=result)
        if made.identity in seen:
            continue
        seen.add(made.identity)
        if given is result:
            yield made, names[given].format("gradOutput and gradInput")
        else:
            tensors = {"gradOutput": given, "gradInput": result}
            parts = (names[order].format(tensor) for tensor, order in tensors.items() if order is not Order.AS_IS)
            yield made, ", and ".join(parts)


def _sum(base: Base) -> Iterator[tuple[Plan, str]]:
    yield replace(base.planned, divisor=1), ""


def _factor(base: Base) -> Iterator[tuple[Plan, str]]:
    for factor in base.evidence.factors(base.planned):
        yield replace(base.planned, factor=factor), _factor_text(factor)


def _factor_text(factor: Fraction) -> str:
    top, bottom = abs(factor.numerator), factor.denominator
    sign = "-" if factor < 0 else ""
    if min(top, bottom) != 1:
        return f"{float(factor):.7g}"
    if max(top, bottom) > 2 and max(top, bottom).bit_count() == 1:
        return f"{sign}2^{top.bit_length() - bottom.bit_length()}"
    return f"{sign}{top}" if bottom == 1 else f"{sign}1/{bottom}"


def _unwritten(base: Base) -> Iterator[tuple[Plan, str]]:
    if min(base.planned.rows.widths[0], base.planned.columns.widths[0]) == 0:
        yield replace(base.planned, free=Free.UNCOVERED), ""


def _race(base: Base) -> Iterator[tuple[Plan, str]]:
    if base.planned.most_terms > 1:
        yield replace(base.planned, free=Free.OVERLAP), ""


FAULTS: tuple[Hypothesis, ...] = (
    Hypothesis(
        "ceil_overhang",
        "the overhang of ceil mode divided by the full kernel",
        "The last windows of ceil mode reach past the padding, and are divided by kh*kw all the same.",
        _overhang,
        ("avg2d",),
    ),
    Hypothesis(
        "padding_lost",
        "the padding's offset lost{}",
        "Windows start at o*stride instead of o*stride - padding.",
        _padding_lost,
        ("avg2d",),
    ),
    Hypothesis(
        "global_shortcut",
        "padding ignored by a global-pool shortcut",
        "An output of 1x1 is taken for the mean of the whole plane.",
        _global_shortcut,
        ("avg2d",),
    ),
    Hypothesis(
        "override_ignored",
        "divisor_override ignored {}",
        "The windows are divided as if there were no divisorOverride.",
        _override_ignored,
        ("avg2d",),
    ),
    Hypothesis(
        "floor_ends",
        "bins that end at floor((o+1)*n/m)",
        "Adaptive bins are ended by floor instead of ceil, so that they never overlap.",
        _floor_ends,
        ("adaptive2d",),
    ),
    Hypothesis(
        "one_size",
        "bins all of one size {}",
        "Adaptive bins are all as large as the largest need be.",
        _one_size,
        ("adaptive2d",),
    ),
    Hypothesis(
        "as_pool",
        "bins of a plain pooling: stride floor(n/m), kernel n - (m-1)*stride",
        "The adaptive pooling was replaced by a plain one with one kernel and stride.",
        _as_pool,
        ("adaptive2d",),
    ),
    Hypothesis(
        "float32_ends",
        "bin ends computed in float32{}",
        "Rounding in float32 moves some bin ends by a cell.",
        _float32_ends,
        ("adaptive2d",),
    ),
    Hypothesis(
        "weights",
        "weights {}",
        "gradOutput is multiplied by a weight that was rounded, where it is to be divided.",
        _weights,
    ),
    Hypothesis(
        "sums_16",
        "sums in {}",
        "Terms, rounded themselves or in float32, are added up in 16 bits: every sum is rounded.",
        _sums_in_16_bits,
    ),
    Hypothesis(
        "ties_away",
        "HF32 whose ties go away from zero",
        "gradOutput is rounded to HF32 with ties away from zero, as msprobe does, not to even.",
        _ties_away,
        ("avg2d",),
    ),
    Hypothesis(
        "channels_last",
        "{}",
        "Bytes that lie as (N, H, W, C) were read as (N, C, H, W), or the other way round.",
        _channels_last,
    ),
    Hypothesis(
        "transposed",
        "{}",
        "Bytes that lie as (N, C, W, H) were read as (N, C, H, W), or the other way round.",
        _transposed,
    ),
    Hypothesis(
        "sum",
        "the sum instead of the mean",
        "Nothing was divided.",
        _sum,
    ),
    Hypothesis(
        "factor",
        "a constant factor of {}",
        "Every element is off by one factor: a loss scale, or a mean taken twice.",
        _factor,
    ),
    Hypothesis(
        "unwritten",
        "the cells that no window covers left unwritten",
        "Cells under no window hold what was in memory before, where +0 is due.",
        _unwritten,
    ),
    Hypothesis(
        "race",
        "a race",
        "Only cells under several windows differ, by no more than their terms, and nothing else explains it: "
        "additions were lost or doubled.",
        _race,
    ),
)

PARTIAL = ("unwritten", "race")
"""The faults that leave cells open: they stand back behind all that predict every cell."""

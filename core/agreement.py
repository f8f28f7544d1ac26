"""How much of a tensor a prediction explains, and where it does not."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from .formats import Floats, Format, ulp
from .prediction import Free, Predictor

NEAR_NONE = 1e-3
"""Share within an ulp below which bounds are not looked at: n additions leave one in sqrt(n) within an ulp."""


@dataclass(frozen=True)
class Agreement:
    """How many of `total` elements a prediction explains: `matched` ones within an ulp, of them `exact` ones.

    allowed: further elements that the plan does not predict, but allows to be as they are. coarse: those of them that
    are off by more than roundings of the sum could make them.
    """

    total: int = 0
    matched: int = 0
    exact: int = 0
    allowed: int = 0
    coarse: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(*(left + right for left, right in zip(astuple(self), astuple(other), strict=True)))


def agree(
    predictor: Predictor, actual: Floats, predicted: Floats, box: tuple[slice, slice, slice], form: Format
) -> tuple[Agreement, NDArray[np.bool_] | None]:
    """Compare a box with its prediction; also where it is not explained, or None where all is.

    Within one ulp; where several windows are added up in float32, also within the `Predictor.bounds` of the sum: what
    the order of additions may change, and what is left of it when terms cancel.
    """
    near, exact = _near_at_once(actual, predicted, form)
    rest = ~near
    if not rest.any():
        return Agreement(near.size, near.size, exact), None
    one, other = actual[rest], predicted[rest]
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    near = same | _within_ulp(one, other, form)
    exact += int(np.count_nonzero(same))
    wrong = np.zeros(rest.shape, bool)
    wrong[rest] = ~near
    plan = predictor.plan
    near_none = np.count_nonzero(wrong) > (1 - NEAR_NONE) * wrong.size
    if plan.most_terms > 1 and plan.sums is None and wrong.any() and not near_none:
        wrong &= ~_between(actual, *predictor.bounds(*box))
    matched = wrong.size - int(np.count_nonzero(wrong))
    if not wrong.any() or (near_none and plan.free is not Free.UNCOVERED):
        return Agreement(wrong.size, matched, exact), wrong
    excused, coarse = _excused(predictor, actual, predicted, box, form)
    counts = (int(np.count_nonzero(wrong & some)) for some in (excused, coarse))
    return Agreement(wrong.size, matched, exact, *counts), wrong & ~excused


def _excused(
    predictor: Predictor, actual: Floats, predicted: Floats, box: tuple[slice, slice, slice], form: Format
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The elements that the plan leaves open, and those of them that are off by more than roundings."""
    plan, nothing = predictor.plan, np.zeros(actual.shape, bool)
    if plan.sums is not None:
        return _between(actual, *predictor.bounds(*box)), nothing
    if plan.free is Free.NONE:
        return nothing, nothing
    free = predictor.free(*box[1:])
    if plan.free is Free.UNCOVERED:
        return free | nothing, nothing
    # A lost or doubled addition is off by some of the terms, never by more than all of them; but seldom by so little
    # as sums may be off that are rounded at every step.
    errors, magnitudes, step = np.abs(actual - predicted), predictor.magnitudes(*box), 2.0 ** (1 - form.bits)
    excused = free & (errors <= magnitudes * (1 + step))
    return excused, excused & (errors > plan.most_terms * step * magnitudes)


def _between(actual: Floats, low: Floats, high: Floats) -> NDArray[np.bool_]:
    return np.asarray((low <= actual) & (actual <= high))


def _near_at_once(actual: Floats, predicted: Floats, form: Format) -> tuple[NDArray[np.bool_], int]:
    """Where two numbers are a step of the format apart or none, by their bits, and how many are equal.

    Most elements are told so at a low cost; it says nothing of zeros of two signs, subnormals and infinity.
    """
    steps = actual.view(np.int64) - predicted.view(np.int64)
    exact = steps.size - int(np.count_nonzero(steps))
    step = 1 << (53 - form.bits)
    return np.asarray((steps + step).view(np.uint64) <= np.uint64(2 * step)), exact


def _within_ulp(actual: Floats, predicted: Floats, form: Format) -> NDArray[np.bool_]:
    # Infinity is one step from the greatest finite number.
    past = 2.0 ** (form.most + 1)
    one, other = (np.clip(values, -past, past) for values in (actual, predicted))
    return np.asarray(np.abs(one - other) <= ulp(np.minimum(np.abs(one), np.abs(other)), form))

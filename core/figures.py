"""The figures of a comparison, of a part of the tensors or of all; parts merge to the same whole in any order.

Counts are integers, maxima keep the smallest index, lists keep the worst by (severity, index), and sums are exact:
the float64 sum of each block, which depends on the block alone, is added up as an integer of 2**-1074.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import zip_longest

import numpy as np

from .block_errors import AGREEING, BlockErrors
from .regions import KINDS
from .standards import Float64s, Mask, Standard

WORST = 10
"""Elements and planes that are listed."""

_UNIT = 1074
_ROUND_UP = 1 + 2.0**-50


class ExactSum:
    """A sum of float64s without rounding.

    >>> total = ExactSum()
    >>> for term in (1e16, 1.0, -1e16):
    ...     total.add(term)
    >>> total.over(2)
    0.5
    """

    def __init__(self) -> None:
        self._units = 0

    def add(self, term: float) -> None:
        """Add a finite number."""
        numerator, denominator = term.as_integer_ratio()
        self._units += numerator << (_UNIT + 1 - denominator.bit_length())

    def merge(self, other: ExactSum) -> None:
        """Add another sum."""
        self._units += other._units

    @property
    def exact(self) -> Fraction:
        """The sum."""
        return Fraction(self._units, 1 << _UNIT)

    def over(self, count: int) -> float:
        """The mean, rounded once; 0 of nothing."""
        return float(self.exact / count) if count else 0.0


@dataclass(frozen=True)
class Element:
    """One pair: its place in the flat tensor, the values, and its errors (NaN where a value is not finite)."""

    index: int
    actual: float
    expected: float
    absolute: float
    relative: float
    ulps: int | None
    severity: float

    @property
    def rank(self) -> tuple[float, int]:
        """The worst first."""
        return -self.severity, self.index


@dataclass
class Extreme:
    """The element with the largest of something, the first of equals; None while all is 0."""

    value: float = 0.0
    element: Element | None = None

    def merge(self, other: Extreme) -> None:
        """Keep the larger."""
        if other.element is None:
            return
        if self.element is None or (-other.value, other.element.index) < (-self.value, self.element.index):
            self.value, self.element = other.value, other.element


@dataclass
class RegionFigures:
    """Errors of the cells of one kind (see `core/regions`)."""

    compared: int = 0
    finite: int = 0
    mismatched: int = 0
    max_absolute: float = 0.0
    max_relative: float = 0.0
    relative: ExactSum = field(default_factory=ExactSum)

    def merge(self, other: RegionFigures) -> None:
        """Add another part."""
        self.compared += other.compared
        self.finite += other.finite
        self.mismatched += other.mismatched
        self.max_absolute = max(self.max_absolute, other.max_absolute)
        self.max_relative = max(self.max_relative, other.max_relative)
        self.relative.merge(other.relative)

    @property
    def mere(self) -> float:
        """Mean relative error."""
        return self.relative.over(self.finite)


_SUMS = ("expected_squared", "actual_squared", "product", "error_squared", "relative")

SHARES = (0.001, 0.005)
"""Of which msprobe counts the elements with a smaller relative error."""


@dataclass
class Figures:
    """What a comparison found.

    compared: pairs; different: finite pairs of other values; zero_signs: pairs of +0 and -0; mismatched: pairs out
    of the standard's bounds for an element; beyond: see `Standard.beyond`; under: finite pairs under each of
    `SHARES` of the expected value; ulp_histogram: finite pairs 0, 1, 2-3, 4-7 ... ulp apart; sums: see
    `BlockErrors`.
    """

    standard: Standard
    compared: int = 0
    different: int = 0
    zero_signs: int = 0
    mismatched: int = 0
    beyond: int = 0
    nonfinite: dict[str, int] = field(default_factory=dict)
    under: list[int] = field(default_factory=lambda: [0] * len(SHARES))
    ulp_histogram: list[int] = field(default_factory=lambda: [0])
    ulp_total: int = 0
    ulp_most: int = 0
    sums: dict[str, ExactSum] = field(default_factory=lambda: {name: ExactSum() for name in _SUMS})
    max_absolute: Extreme = field(default_factory=Extreme)
    max_relative: Extreme = field(default_factory=Extreme)
    least_rtol_exact: float = 0.0
    least_atol_exact: float = 0.0
    worst: list[Element] = field(default_factory=list)
    regions: dict[int, RegionFigures] = field(default_factory=dict)

    def merge(self, other: Figures) -> None:
        """Add the figures of another part."""
        for count in ("compared", "different", "zero_signs", "mismatched", "beyond", "ulp_total"):
            setattr(self, count, getattr(self, count) + getattr(other, count))
        for most in ("ulp_most", "least_rtol_exact", "least_atol_exact"):
            setattr(self, most, max(getattr(self, most), getattr(other, most)))
        for kind, number in other.nonfinite.items():
            self.nonfinite[kind] = self.nonfinite.get(kind, 0) + number
        for counts in ("under", "ulp_histogram"):
            both = zip_longest(getattr(self, counts), getattr(other, counts), fillvalue=0)
            setattr(self, counts, [left + right for left, right in both])
        for name, total in other.sums.items():
            self.sums[name].merge(total)
        self.max_absolute.merge(other.max_absolute)
        self.max_relative.merge(other.max_relative)
        if other.worst:
            self.worst = sorted(self.worst + other.worst, key=lambda element: element.rank)[:WORST]
        for code, region in other.regions.items():
            self.regions.setdefault(code, RegionFigures()).merge(region)

    # ---- What they come to

    @property
    def passed(self) -> bool:
        """The verdict."""
        return all(criterion.passed for criterion in self.standard.criteria(self))

    @property
    def finite(self) -> int:
        """Pairs of two finite values."""
        return self.compared - sum(self.nonfinite.values())

    @property
    def disagreements(self) -> int:
        """Pairs not both finite that are neither both NaN nor the same infinity."""
        return sum(count for kind, count in self.nonfinite.items() if kind not in AGREEING)

    @property
    def mere(self) -> float:
        """Mean relative error."""
        return self.sums["relative"].over(self.finite)

    @property
    def mare(self) -> float:
        """Maximum relative error."""
        return self.max_relative.value

    @property
    def rmse(self) -> float:
        """Root of the mean squared error."""
        return math.sqrt(self.sums["error_squared"].over(self.finite))

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the tensors: 1 where both are 0, NaN where one is."""
        expected, actual, product = (self.sums[name].exact for name in _SUMS[:3])
        if expected <= 0 or actual <= 0:
            return 1.0 if expected == actual else math.nan
        # The sums' own rounding may take it past 1.
        return math.copysign(math.sqrt(min(1.0, float(product**2 / (expected * actual)))), product)

    @property
    def ulp_mean(self) -> float:
        """Mean distance in ulp."""
        return self.ulp_total / self.finite if self.finite else 0.0

    @property
    def least_rtol(self) -> float:
        """The least rtol that every finite pair passes with at the standard's atol, rounded up."""
        return self.least_rtol_exact * _ROUND_UP

    @property
    def least_atol(self) -> float:
        """The least atol that every finite pair passes with at the standard's rtol, rounded up."""
        return self.least_atol_exact * _ROUND_UP

    def kind(self, name: str) -> RegionFigures:
        """The figures of the cells of a kind (`core/regions`)."""
        mask, flags = KINDS[name]
        total = RegionFigures()
        for code, region in self.regions.items():
            if code & mask == flags:
                total.merge(region)
        return total

    def ratio(self, share: float) -> float:
        """The share of all pairs whose relative error is under `share`; pairs that agree without one count."""
        agreeing = sum(self.nonfinite.get(kind, 0) for kind in AGREEING)
        return (self.under[SHARES.index(share)] + agreeing) / self.compared if self.compared else 1.0


@dataclass(frozen=True)
class Marked:
    """A block's figures, and of each element how bad it is and whether it is out of bounds; None: none is.

    most: the largest severity.
    """

    figures: Figures
    severity: Float64s | None = None
    mismatches: Mask | None = None
    most: float = 0.0


def figures_of(errors: BlockErrors, standard: Standard, first: int, known: Figures) -> Marked:
    """The figures of one block, whose first element is the tensor's `first`.

    known: figures that these are to be merged with. What cannot change them is left out.
    """
    figures = Figures(standard, compared=errors.size, nonfinite=errors.nonfinite)
    for name, terms in errors.sums.items():
        for term in terms:
            figures.sums[name].add(term)
    if not errors.differs:
        figures.under = [figures.finite] * len(SHARES)
        figures.ulp_histogram = [figures.finite]
        return Marked(figures)
    _add_counts(figures, errors, known)
    _add_extremes(figures, errors, first, known)
    severity = standard.severity(errors)
    mismatches = standard.mismatches(errors, severity)
    if errors.disagree is not None:
        severity = np.where(errors.disagree, np.inf, severity)
        mismatches = errors.disagree if mismatches is None else mismatches | errors.disagree
    figures.mismatched = 0 if mismatches is None else int(np.count_nonzero(mismatches))
    place = errors.first_most_relative if severity is errors.relative else int(severity.argmax())
    figures.worst = _worst(errors, severity, place, first, known)
    return Marked(figures, severity, mismatches, float(severity[place]))


def _add_counts(figures: Figures, errors: BlockErrors, known: Figures) -> None:
    figures.ulp_histogram, figures.ulp_most = errors.ulp_histogram(), errors.most_ulps
    differing = sum(figures.ulp_histogram[1:])
    figures.ulp_total = errors.ulp_total() if errors.most_ulps > 1 else differing
    figures.different = differing if errors.same_dtype else int(np.count_nonzero(errors.absolute))
    figures.zero_signs = errors.zero_sign_count(differing)
    figures.under = [errors.under(share) for share in SHARES]
    figures.beyond = figures.standard.beyond(errors)
    tolerance = figures.standard.tolerance
    figures.least_rtol_exact = errors.least_rtol(tolerance.atol, known.least_rtol_exact)
    figures.least_atol_exact = errors.least_atol(tolerance.rtol)


def _add_extremes(figures: Figures, errors: BlockErrors, first: int, known: Figures) -> None:
    for extreme, best, index, value in (
        (figures.max_absolute, known.max_absolute, errors.first_most_absolute, errors.most_absolute),
        (figures.max_relative, known.max_relative, errors.first_most_relative, errors.most_relative),
    ):
        if value > 0 and value >= best.value:
            extreme.value, extreme.element = value, _element(errors, index, first, value)


def _element(errors: BlockErrors, index: int, first: int, severity: float) -> Element:
    actual, expected = errors.values(index)
    if errors.excluded is not None and errors.excluded[index]:
        return Element(first + index, actual, expected, math.nan, math.nan, None, severity)
    absolute, relative = float(errors.absolute[index]), float(errors.relative[index])
    return Element(first + index, actual, expected, absolute, relative, int(errors.ulps[index]), severity)


def _worst(errors: BlockErrors, severity: Float64s, place: int, first: int, known: Figures) -> list[Element]:
    """The worst elements of the block that may be among the worst of all. place: the first of the worst."""
    full = len(known.worst) == WORST
    if severity[place] == 0 or (full and (-severity[place], first + place) > known.worst[-1].rank):
        return []
    chosen = first_largest(severity, WORST)
    return [_element(errors, index, first, float(severity[index])) for index in chosen if severity[index] > 0]


def first_largest(values: Float64s, count: int) -> list[int]:
    """Places of the `count` largest, the first of equals, in no certain order.

    >>> sorted(first_largest(np.array([1.0, 3.0, 1.0, 2.0, 1.0]), 3))
    [0, 1, 3]
    """
    if values.size <= count:
        return list(range(values.size))
    least = np.partition(values, -count)[-count]
    larger = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - larger.size]
    return [*larger.tolist(), *equal.tolist()]

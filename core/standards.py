"""Accuracy standards: when a computed tensor passes for an expected one, with the thresholds as data.

A threshold goes by the type that was computed in, which need not be the type that the tensors are stored in: the
row of a standard's table. Over errors of single elements a standard says three things: how bad each is
(`severity`, which orders the worst), which are out of bounds (`mismatches`), and, with the figures of the whole,
what must hold (`criteria`). Wherever only one side is NaN or infinite, or both differ, no standard passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .block_errors import BlockErrors

Mask = NDArray[np.bool_]
Float64s = NDArray[np.float64]

ROWS = ("float32", "float16", "bfloat16", "hfloat32")
"""The types that a computation may have been in."""

MERE = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-13, "hfloat32": 2.0**-11}
"""T of mere-mare. Source: the Ascend ecosystem standard of CANN 9.0 and 9.1."""

MARE_OVER_MERE = 10


@dataclass(frozen=True)
class Tolerance:
    """An element passes when |actual - expected| <= atol + rtol * |expected|."""

    rtol: float
    atol: float


MIXED = {
    "float16": (Tolerance(2.0**-9, 2.0**-9), 0.1),
    "bfloat16": (Tolerance(2.0**-6, 2.0**-6), 1.0),
    "float32": (Tolerance(2.0**-10, 2.0**-16), 1e-2),
    "hfloat32": (Tolerance(2.0**-9, 2.0**-10), 0.1),
}
"""Tolerance and limit of mixed. Source: CANN's opbase, since 2026-07-15."""

MIXED_PERCENT = 99
MIXED_ULPS = 32

ALLCLOSE = {
    "float16": Tolerance(1e-3, 1e-5),
    "bfloat16": Tolerance(1.6e-2, 1e-5),
    "float32": Tolerance(1.3e-6, 1e-5),
    # torch has no HF32; its mantissa is one bit longer than float16's.
    "hfloat32": Tolerance(1e-3, 1e-5),
}
"""Source: the defaults of `torch.testing.assert_close`, but for hfloat32."""

GRIDS = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126), "hfloat32": (11, -126)}
"""Explicit mantissa bits and least exponent of each row's type."""


class ComparisonError(ValueError):
    """Tensors or settings that cannot be compared by: `str()` is one line."""


class Criterion(NamedTuple):
    """One thing that must hold: `value` `relation` `threshold`."""

    name: str
    value: float
    relation: str
    threshold: float
    passed: bool


class Totals(Protocol):
    """What standards ask of the figures of the whole."""

    @property
    def compared(self) -> int:
        """Pairs."""

    @property
    def disagreements(self) -> int:
        """Pairs of which one side alone is not finite, or both differently."""

    @property
    def mismatched(self) -> int:
        """Pairs out of bounds by themselves."""

    @property
    def beyond(self) -> int:
        """As of `Standard.beyond`, over all pairs."""

    @property
    def mere(self) -> float:
        """Mean relative error."""

    @property
    def mare(self) -> float:
        """Largest relative error."""


@dataclass(frozen=True)
class Standard(ABC):
    """A standard with the thresholds of its row, and the tolerance that least rtol and least atol start from."""

    row: str
    tolerance: Tolerance

    name: ClassVar[str]
    title: ClassVar[str]
    severity_name: ClassVar[str]
    compares_bits: ClassVar[bool] = False

    @abstractmethod
    def severity(self, errors: BlockErrors) -> Float64s:
        """How bad each element is, 0 where it is right; orders elements and planes."""

    @abstractmethod
    def mismatches(self, errors: BlockErrors, severity: Float64s) -> Mask | None:
        """Which elements are out of bounds; None where none is."""

    def beyond(self, errors: BlockErrors) -> int:
        """How many elements are past a limit that no share of elements may pass."""
        return 0

    def criteria(self, figures: Totals) -> list[Criterion]:
        """What must hold, the same for all standards first."""
        return [_none("non-finite disagreements", figures.disagreements), *self._own_criteria(figures)]

    @abstractmethod
    def _own_criteria(self, figures: Totals) -> list[Criterion]: ...


def _none(name: str, count: int) -> Criterion:
    return Criterion(name, count, "=", 0, count == 0)


@dataclass(frozen=True)
class MereMare(Standard):
    """Mean and maximum of the relative error, each below a threshold."""

    mere: float

    name = "mere-mare"
    title = "Ascend ecosystem standard"
    severity_name = "relative error"

    @property
    def mare(self) -> float:
        """What the maximum must be below."""
        return MARE_OVER_MERE * self.mere

    def severity(self, errors: BlockErrors) -> Float64s:
        """The relative error."""
        return errors.relative

    def mismatches(self, errors: BlockErrors, severity: Float64s) -> Mask | None:
        """Relative errors that alone make MARE fail."""
        if errors.most_relative < self.mare:
            return None
        mask: Mask = severity >= self.mare
        return mask

    def _own_criteria(self, figures: Totals) -> list[Criterion]:
        return [
            Criterion("MERE", figures.mere, "<", self.mere, figures.mere < self.mere),
            Criterion("MARE", figures.mare, "<", self.mare, figures.mare < self.mare),
        ]


@dataclass(frozen=True)
class AllClose(Standard):
    """Every element within the tolerance."""

    name = "allclose"
    title = "torch.testing.assert_close"
    severity_name = "error / tolerance"

    def severity(self, errors: BlockErrors) -> Float64s:
        """The error over its tolerance; infinite where the tolerance is 0."""
        ratio: Float64s = np.divide(errors.absolute, self._bound(errors, errors.spare), out=errors.spare)
        if self.tolerance.atol == 0:
            ratio[errors.absolute == 0] = 0
        return ratio

    def mismatches(self, errors: BlockErrors, severity: Float64s) -> Mask | None:
        """Errors over their tolerance; the ratio alone may have rounded to 1."""
        if severity.max() < 1:
            return None
        mask: Mask = errors.absolute > self._bound(errors, np.empty_like(severity))
        return mask

    def _bound(self, errors: BlockErrors, out: Float64s) -> Float64s:
        np.multiply(errors.magnitude, self.tolerance.rtol, out=out)
        np.add(out, self.tolerance.atol, out=out)
        return out

    def _own_criteria(self, figures: Totals) -> list[Criterion]:
        return [_none("elements over the tolerance", figures.mismatched)]


@dataclass(frozen=True)
class Mixed(AllClose):
    """Nearly every element within the tolerance, and none far off."""

    limit: float

    name = "mixed"
    title = "opbase mixed tolerance"

    def beyond(self, errors: BlockErrors) -> int:
        """Errors over the limit that are over 32 ulp of the row's type, too."""
        if errors.most_absolute <= self.limit:
            return 0
        over = errors.absolute > self.limit
        ulps = MIXED_ULPS * ulp(errors.magnitude[over], self.row)
        return int(np.count_nonzero(errors.absolute[over] > ulps))

    def _own_criteria(self, figures: Totals) -> list[Criterion]:
        within, compared = figures.compared - figures.mismatched, figures.compared
        enough = 100 * within >= MIXED_PERCENT * compared
        return [
            Criterion("share within the tolerance", within / compared, ">=", MIXED_PERCENT / 100, enough),
            _none(f"elements over {self.limit:g} and {MIXED_ULPS} ulp off", figures.beyond),
        ]


@dataclass(frozen=True)
class Exact(Standard):
    """The same bits, but for the payloads of NaNs."""

    name = "exact"
    title = "bit for bit, NaN payloads aside"
    severity_name = "ulp"
    compares_bits = True

    def severity(self, errors: BlockErrors) -> Float64s:
        """The distance in ulp; 1 for zeros of opposite sign."""
        distance = errors.spare
        np.copyto(distance, errors.ulps)
        distance[errors.zero_signs()] = 1
        return distance

    def mismatches(self, errors: BlockErrors, severity: Float64s) -> Mask | None:
        """All that differ."""
        mask: Mask = severity > 0
        return mask

    def _own_criteria(self, figures: Totals) -> list[Criterion]:
        return [_none("elements with other bits", figures.mismatched)]


def ulp(magnitude: Float64s, row: str) -> Float64s:
    """The step of a row's type at a magnitude.

    >>> ulp(np.array([1.0, 2.0**-20]), "float16").tolist() == [2.0**-10, 2.0**-24]
    True
    """
    bits, least = GRIDS[row]
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, least)
    step: Float64s = np.ldexp(1.0, exponent - bits)
    return step


STANDARDS = (MereMare.name, Mixed.name, AllClose.name, Exact.name)
"""Names of the standards, the default first."""


def find_standard(name: str | None, row: str, rtol: float | None = None, atol: float | None = None) -> Standard:
    """The standard of a name (None: the default), with a row's thresholds; rtol and atol replace those of allclose.

    For standards without a tolerance, least rtol and least atol start from that of allclose.

    >>> find_standard("mere-mare", "hfloat32").mere == 2.0**-11
    True
    """
    name = STANDARDS[0] if name is None else name
    if row not in ROWS:
        raise ComparisonError(f"no standard has thresholds for {row}; expected one of {', '.join(ROWS)}")
    if name != AllClose.name and (rtol is not None or atol is not None):
        raise ComparisonError(f"--rtol and --atol belong to the standard allclose, and this is {name}")
    usual = ALLCLOSE[row]
    given = Tolerance(usual.rtol if rtol is None else rtol, usual.atol if atol is None else atol)
    for option, value in (("rtol", given.rtol), ("atol", given.atol)):
        if not 0 <= value < np.inf:
            raise ComparisonError(f"--{option} is {value}; expected a finite number, at least 0")
    choices: dict[str, Any] = {
        MereMare.name: lambda: MereMare(row, usual, MERE[row]),
        Mixed.name: lambda: Mixed(row, *MIXED[row]),
        AllClose.name: lambda: AllClose(row, given),
        Exact.name: lambda: Exact(row, usual),
    }
    if name not in choices:
        raise ComparisonError(f"no standard is called {name}; expected one of {', '.join(STANDARDS)}")
    standard = choices[name]()
    assert isinstance(standard, Standard)
    return standard

"""What a comparison shows: the verdict, the figures, where the errors are, a map of the plane; or JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import report
from .error_map import ErrorPicture

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from poolgrad.core.comparison import Comparison
    from poolgrad.core.figures import Element, Extreme, Figures, RegionFigures
    from poolgrad.core.standards import Criterion

KIND_TITLES = {
    "clipped": "a window that the border clips",
    "not_clipped": "whole windows only",
    "several": "several windows",
    "one": "one window",
    "none": "no window",
}


class Result(NamedTuple):
    """A finished comparison of two tensors; `outcome` is of the job that computed EXPECTED, if one did."""

    comparison: Comparison
    actual: report.Tensor
    expected: report.Tensor
    seconds: float
    outcome: report.Outcome | None = None


def show(result: Result, as_json: bool) -> None:
    """Report on stdout."""
    if not as_json:
        report.print_tables(list(_page(result)))
        return
    record = comparison_record(result)
    if result.outcome is None:
        report.print_json({"op": "compare", **record}, status(result))
    else:
        report.print_json(job_record(result.outcome, result), status(result))


def status(result: Result | None) -> str:
    """The status of a job that ended with this comparison, or with none."""
    return "ok" if result is None or result.comparison.figures.passed else "failed"


# ---- JSON


def job_record(outcome: report.Outcome, result: Result | None) -> dict[str, Any]:
    """The JSON of a finished job, with its comparison if there was one, but for schema and status."""
    record = report.outcome_record(outcome)
    return record if result is None else {**record, "comparison": comparison_record(result)}


def comparison_record(result: Result) -> dict[str, Any]:
    """Every figure, at full precision; NaN and infinities are the strings "nan", "inf" and "-inf"."""
    comparison, figures = result.comparison, result.comparison.figures
    record = {
        "verdict": "pass" if figures.passed else "fail",
        "standard": figures.standard.name,
        "precision_row": figures.standard.row,
        "criteria": [criterion._asdict() for criterion in figures.standard.criteria(figures)],
        "actual": report.tensor_record(result.actual),
        "expected": report.tensor_record(result.expected),
        **_count_record(figures),
        **_error_record(comparison),
        **_place_record(comparison),
        "seconds": result.seconds,
    }
    plain = _plain(record)
    assert isinstance(plain, dict)
    return plain


def _count_record(figures: Figures) -> dict[str, Any]:
    from poolgrad.core.block_errors import NONFINITE

    return {
        "compared": figures.compared,
        "finite": figures.finite,
        "different": figures.different,
        "mismatched": figures.mismatched,
        "zeros_of_opposite_sign": figures.zero_signs,
        "nonfinite": {kind: figures.nonfinite.get(kind, 0) for kind in NONFINITE},
    }


def _error_record(comparison: Comparison) -> dict[str, Any]:
    from poolgrad.core.figures import SHARES

    figures, tolerance = comparison.figures, comparison.standard.tolerance
    return {
        "max_absolute_error": _extreme_record(comparison, figures.max_absolute),
        "max_relative_error": _extreme_record(comparison, figures.max_relative),
        "mere": figures.mere,
        "mare": figures.mare,
        "rmse": figures.rmse,
        "cosine": figures.cosine,
        "share_under": {str(share): figures.ratio(share) for share in SHARES},
        "ulp": {
            "dtype": comparison.specs[0].dtype,
            "mean": figures.ulp_mean,
            "max": figures.ulp_most,
            "histogram": [
                {"from": low, "to": high, "count": count} for low, high, count in _bins(figures.ulp_histogram)
            ],
        },
        "least_rtol": {"value": figures.least_rtol, "at_atol": tolerance.atol},
        "least_atol": {"value": figures.least_atol, "at_rtol": tolerance.rtol},
    }


def _place_record(comparison: Comparison) -> dict[str, Any]:
    figures = comparison.figures
    return {
        "severity": comparison.standard.severity_name,
        "worst_elements": [_element_record(comparison, element) for element in figures.worst],
        "worst_planes": [
            {
                "plane": comparison.plane_index(plane.index),
                "mismatched": plane.mismatched,
                "severity": plane.severity,
            }
            for plane in comparison.worst_planes
        ],
        "regions": {
            name: {
                "compared": kind.compared,
                "mismatched": kind.mismatched,
                "max_absolute_error": kind.max_absolute,
                "mare": kind.max_relative,
                "mere": kind.mere,
            }
            for name, kind in _kinds(comparison)
        }
        or None,
    }


def _kinds(comparison: Comparison) -> Iterator[tuple[str, RegionFigures]]:
    if comparison.figures.regions:
        for name in KIND_TITLES:
            yield name, comparison.figures.kind(name)


def _extreme_record(comparison: Comparison, extreme: Extreme) -> dict[str, Any]:
    element = extreme.element
    return {
        "value": extreme.value,
        "index": element and comparison.index(element.index),
        "actual": element and element.actual,
        "expected": element and element.expected,
    }


def _element_record(comparison: Comparison, element: Element) -> dict[str, Any]:
    return {
        "index": comparison.index(element.index),
        "actual": element.actual,
        "expected": element.expected,
        "absolute_error": element.absolute,
        "relative_error": element.relative,
        "ulp": element.ulps,
        "severity": element.severity,
    }


def _plain(value: Any) -> Any:
    """The value with floats that JSON lacks as strings."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _bins(histogram: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for power, count in enumerate(histogram):
        yield (1 << power >> 1), max(0, (1 << power) - 1), count


# ---- For people


def _page(result: Result) -> Iterator[RenderableType]:
    comparison = result.comparison
    yield _verdict(comparison.figures)
    yield report.label_table(_tensor_rows(result), _figure_rows(comparison))
    for part in _place_parts(comparison):
        yield ""
        yield part
    if result.outcome is not None:
        yield ""
        yield report.outcome_table(result.outcome)


def _place_parts(comparison: Comparison) -> Iterator[RenderableType]:
    figures = comparison.figures
    if figures.nonfinite:
        yield _nonfinite_table(figures)
    if figures.worst:
        yield _element_table(comparison)
        yield _plane_table(comparison)
    if figures.regions:
        yield _region_table(comparison)
    if comparison.map.cells.any():
        yield ErrorPicture(comparison.map, comparison.standard.severity_name)


def _verdict(figures: Figures) -> Text:
    from rich.text import Text

    passed, standard = figures.passed, figures.standard
    text = Text(overflow="fold")
    text.append("PASS" if passed else "FAIL", style="bold green" if passed else "bold red")
    text.append(f" by {standard.name} ({standard.title}), thresholds of {standard.row}")
    for criterion in standard.criteria(figures):
        text.append(f"\n{_criterion_text(criterion)}")
    text.append("\n")
    return text


def _criterion_text(criterion: Criterion) -> str:
    sign = "  " if criterion.passed else "x "
    wanted = "none" if criterion.relation == "=" else f"{criterion.relation} {_number(criterion.threshold)}"
    return f"{sign}{criterion.name}: {_number(criterion.value)}, to be {wanted}"


def _tensor_rows(result: Result) -> Iterator[tuple[str, str]]:
    yield "ACTUAL", report.tensor_text(result.actual)
    yield "EXPECTED", report.tensor_text(result.expected)


def _figure_rows(comparison: Comparison) -> Iterator[tuple[str, str]]:
    figures, tolerance = comparison.figures, comparison.standard.tolerance
    yield "compared", f"{figures.compared:,} elements"
    yield "mismatched", f"{figures.mismatched:,} out of bounds, {figures.different:,} of other value"
    if figures.zero_signs:
        yield "zeros", f"{figures.zero_signs:,} differ in sign alone, +0 and -0"
    if not figures.nonfinite:
        yield "non-finite", "none"
    yield "max abs error", _extreme_text(comparison, figures.max_absolute)
    yield "max rel error", _extreme_text(comparison, figures.max_relative)
    yield "MERE, MARE", f"{_number(figures.mere)}, {_number(figures.mare)}"
    yield "RMSE", _number(figures.rmse)
    yield "cosine", f"{figures.cosine:.12g}"
    yield "msprobe", f"{_ratio(figures, 0.001)} under 0.001, {_ratio(figures, 0.005)} under 0.005"
    yield "ulp", f"mean {_number(figures.ulp_mean)}, max {figures.ulp_most:,} of {comparison.specs[0].dtype}"
    yield "", _histogram_text(figures.ulp_histogram)
    yield (
        "would pass",
        (
            f"rtol {_number(figures.least_rtol)} with atol {_number(tolerance.atol)}\n"
            f"atol {_number(figures.least_atol)} with rtol {_number(tolerance.rtol)}"
        ),
    )


def _ratio(figures: Figures, share: float) -> str:
    return f"{_floored(100 * figures.ratio(share), 4)} %"


def _floored(value: float, digits: int) -> str:
    """Never 100 unless it is all."""
    scale = 10**digits
    return f"{math.floor(value * scale) / scale:.{digits}f}"


def _extreme_text(comparison: Comparison, extreme: Extreme) -> str:
    element = extreme.element
    if element is None:
        return "0"
    place = _index_text(comparison.index(element.index))
    return f"{_number(extreme.value)} at {place}: {_value(element.actual)}, expected {_value(element.expected)}"


def _histogram_text(histogram: Sequence[int]) -> str:
    parts = []
    for low, high, count in _bins(histogram):
        if count:
            parts.append(f"{low if low == high else f'{low}-{high}'}: {count:,}")
    return ", ".join(parts)


def _nonfinite_table(figures: Figures) -> Table:
    from poolgrad.core.block_errors import AGREEING, NONFINITE

    table = _table("NaN and infinity", "agrees", "elements")
    for kind, title in NONFINITE.items():
        if count := figures.nonfinite.get(kind, 0):
            table.add_row(title, "yes" if kind in AGREEING else "no", f"{count:,}")
    return table


def _element_table(comparison: Comparison) -> Table:
    table = _table("worst elements", "actual", "expected", "abs error", "rel error", "ulp")
    for element in comparison.figures.worst:
        table.add_row(
            _index_text(comparison.index(element.index)),
            _value(element.actual),
            _value(element.expected),
            _number(element.absolute),
            _number(element.relative),
            "" if element.ulps is None else f"{element.ulps:,}",
        )
    return table


def _plane_table(comparison: Comparison) -> Table:
    table = _table("worst planes", "mismatched", comparison.standard.severity_name)
    for plane in comparison.worst_planes:
        index = _index_text(comparison.plane_index(plane.index))
        table.add_row(index, f"{plane.mismatched:,}", _number(plane.severity))
    return table


def _region_table(comparison: Comparison) -> Table:
    table = _table("cells under", "elements", "mismatched", "max abs error", "MARE", "MERE")
    for name, kind in _kinds(comparison):
        if not kind.compared:
            continue
        table.add_row(
            KIND_TITLES[name],
            f"{kind.compared:,}",
            f"{kind.mismatched:,}",
            _number(kind.max_absolute),
            _number(kind.max_relative),
            _number(kind.mere),
        )
    return table


def _table(title: str, *headings: str) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column(title, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _index_text(index: Sequence[int]) -> str:
    return f"({', '.join(map(str, index))})"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _value(value: float) -> str:
    """A tensor's element; nine digits tell all float32s apart."""
    return f"{value:.9g}"

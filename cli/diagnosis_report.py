"""What `poolgrad diagnose` shows: the ranked table and, last, the sentence that names the cause; or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from . import report

if TYPE_CHECKING:
    from rich.console import RenderableType

    from poolgrad.core.diagnosis import Diagnosis, Explanation
    from poolgrad.core.hypotheses import Call

SHOWN = 8
"""Hypotheses in the table, unless all are asked for."""
NAMED = 3
"""Hypotheses that predict the same which the last line names."""

Tensors = Mapping[str, report.Tensor]


def show(diagnosis: Diagnosis, tensors: Tensors, seconds: float, as_json: bool, quiet: bool, show_all: bool) -> None:
    """Report on stdout."""
    if as_json:
        report.print_json(_record(diagnosis, tensors, seconds))
        return
    if not quiet:
        report.print_tables(_tables(diagnosis, tensors, seconds, show_all))
        report.write_report("\n")
    report.write_report(sentence(diagnosis) + "\n")


# ---- The last line


def sentence(diagnosis: Diagnosis) -> str:
    """The outcome in a sentence."""
    found, elements = diagnosis.found, f"{diagnosis.elements:,} elements"
    if found is None:
        return _unexplained(diagnosis, elements)
    start = f"This is {_alternatives(found, diagnosis.as_believed)}"
    share = percent(found.explained, found.agreement.total)
    if found.key == "race":
        return f"{start}: {share} of {elements} are right, and all others lie under several windows."
    if found.key == "unwritten":
        return f"{start}: {share} of {elements}, {percent(found.agreement.allowed, diagnosis.elements)} left open."
    return f"{start}: {share} of {elements}, {_how_exactly(found)}."


def _unexplained(diagnosis: Diagnosis, elements: str) -> str:
    best = diagnosis.ranked[0] if diagnosis.ranked else None
    if best is None:
        return "Nothing explains it: no call fits the shapes."
    if 100 * best.explained < best.agreement.total:
        return f"Nothing explains it: no hypothesis reaches 1 % of {elements}."
    differ = best.agreement.total - best.explained
    share = percent(best.explained, best.agreement.total)
    return f"Nothing explains it: {best.phrase} comes nearest, with {share} of {elements}; {differ:,} differ."


def _alternatives(found: Explanation, as_believed: bool) -> str:
    if as_believed or not found.rivals:
        return found.phrase
    names = [found.phrase, *(other.phrase for other in found.rivals)]
    more = len(names) - NAMED
    named = ", or ".join(names[:NAMED]) + (f", or one of {more} more" if more > 0 else "")
    return f"{named} (not to be told apart here)"


def _how_exactly(one: Explanation) -> str:
    found = one.agreement
    if found.exact == found.total:
        return "exactly"
    return f"within one ulp ({percent(found.exact, found.total)} exactly)"


def percent(part: int, total: int) -> str:
    """A share, cut and not rounded: 100 % is all and 0 % is none."""
    if part == total:
        return "100 %"
    if part == 0:
        return "0 %"
    hundredths = part * 10_000 // total
    return f"{hundredths // 100}.{hundredths % 100:02} %" if hundredths else "under 0.01 %"


# ---- Tables


def _tables(diagnosis: Diagnosis, tensors: Tensors, seconds: float, show_all: bool) -> list[RenderableType]:
    from rich.box import SIMPLE
    from rich.table import Table

    ranking = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for name in ("explained", "exactly", "of"):
        ranking.add_column(name, justify="right", no_wrap=True)
    ranking.add_column("hypothesis", overflow="fold")
    shown = diagnosis.ranked if show_all else diagnosis.ranked[:SHOWN]
    for one in shown:
        ranking.add_row(*(report.plain(cell) for cell in _cells(one)))
    rest = len(diagnosis.ranked) - len(shown)
    if rest:
        ranking.add_row("", "", "", report.plain(f"{rest} more explain no more (--all lists them)"))
    return [report.label_table(_head_rows(diagnosis, tensors, seconds)), report.plain(""), ranking]


def _head_rows(diagnosis: Diagnosis, tensors: Tensors, seconds: float) -> Iterator[tuple[str, str]]:
    for label, key in (("gradOutput", "grad_output"), ("self", "self"), ("ACTUAL", "actual")):
        yield label, report.tensor_text(tensors[key])
    if diagnosis.note:
        yield "", diagnosis.note
    yield "believed", "nothing" if diagnosis.believed is None else str(diagnosis.believed)
    if diagnosis.refusal:
        yield "", f"rejected: {diagnosis.refusal}"
    yield "wall time", report.seconds_text(seconds)


def _cells(one: Explanation) -> tuple[str, str, str, str]:
    found = one.agreement
    lines = [one.phrase, *(f"= {other.phrase}" for other in one.rivals[: NAMED + 1])]
    more, idle = len(one.rivals) - NAMED - 1, len(one.same) - len(one.rivals)
    lines += [f"= {more} more"] * (more > 0)
    lines += [f"= {idle} more that would not show here"] * (idle > 0)
    compared = "all" if one.whole else f"sample {found.total:,}"
    return percent(one.explained, found.total), percent(found.exact, found.total), compared, "\n".join(lines)


# ---- JSON


def _record(diagnosis: Diagnosis, tensors: Tensors, seconds: float) -> dict[str, Any]:
    found = diagnosis.found
    return {
        "verdict": "as_believed" if diagnosis.as_believed else "explained" if found else "unexplained",
        "sentence": sentence(diagnosis),
        "elements": diagnosis.elements,
        **{name: report.tensor_record(tensor) for name, tensor in tensors.items()},
        "note": diagnosis.note,
        "believed": None if diagnosis.believed is None else _call(diagnosis.believed),
        "refusal": diagnosis.refusal,
        "hypotheses": [_hypothesis(one) for one in diagnosis.ranked],
        "timing_s": {"total": round(seconds, 9)},
    }


def _hypothesis(one: Explanation) -> dict[str, Any]:
    found = one.agreement
    return {
        "key": one.key,
        "phrase": one.phrase,
        "sentence": one.sentence,
        "call": _call(one.call),
        "explained": one.explained,
        "exact": found.exact,
        "compared": found.total,
        "whole": one.whole,
        "explains": one.explains,
        "same": [{"key": other.key, "phrase": other.phrase, "shows": not other.idle} for other in one.same],
    }


def _call(call: Call) -> dict[str, Any]:
    """The call, its parameters as the flags are named; adaptive2d has none."""
    record: dict[str, Any] = {"op": call.operator, "product": call.product}
    if call.operator == "adaptive2d":
        return record
    names = {"kernel": "kernel_size", "grad_output": None, "self": None, "operator": None, "product": None}
    for name, value in asdict(call).items():
        key = names.get(name, name)
        if key is not None:
            record[key] = list(value) if isinstance(value, tuple) else value
    return record

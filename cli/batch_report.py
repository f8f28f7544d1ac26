"""What a batch shows on stderr: the progress of its jobs, and at the end how many came to what, and which failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import report
from .file_errors import printable, shorten

if TYPE_CHECKING:
    from rich.table import Table

    from .jobs import Result

MOST_LISTED = 100
"""Jobs that the summary lists; all of them are in the results."""

_MEANINGS = {
    "ok": "done, and passed what there was to compare with",
    "skipped": "done before (--resume)",
    "failed": "computed, but other than what was expected",
    "error": "not computed",
    "not run": "not started any more",
}
_DRY_MEANINGS = {
    "ok": "would run",
    "skipped": "would be skipped: done before (--resume)",
    "error": "would not be computed",
    "not run": "not checked any more",
}


class Tally:
    """How many jobs came to what, and what was wrong with those that are not ok."""

    def __init__(self, jobs: int) -> None:
        """jobs: how many there are, broken lines included."""
        self.jobs = jobs
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[str, str, str]] = []

    def add(self, result: Result) -> None:
        """Count a job's result."""
        self.counts[result["status"]] += 1
        if result["status"] != "ok":
            self.wrong.append((_id_text(result["id"]), result["status"], _reason(result)))

    def skip(self, jobs: int) -> None:
        """Count jobs that need not run."""
        self.counts["skipped"] += jobs

    @property
    def all_ok(self) -> bool:
        """Whether every job has been run, now or before, and is ok."""
        return self.counts["ok"] + self.counts["skipped"] == self.jobs

    def label(self) -> str:
        """What stands before the progress bar."""
        wrong = f", {len(self.wrong)} not ok" if self.wrong else ""
        return f"{self.counts.total():,} of {self.jobs:,} jobs{wrong}"


def _id_text(ident: Any) -> str:
    return shorten(ident if isinstance(ident, str) else str(ident))


def _reason(result: Result) -> str:
    """Why a job is not ok, in a line."""
    if result["status"] == "error":
        code = "" if result["code"] is None else f" ({result['name']} {result['code']})"
        return printable(result["message"]) + code
    comparison = result["comparison"]
    missed = [criterion for criterion in comparison["criteria"] if not criterion["passed"]]
    return f"{comparison['standard']}: " + ", ".join(map(_missed, missed))


def _missed(criterion: dict[str, Any]) -> str:
    value, threshold = (_number(criterion[name]) for name in ("value", "threshold"))
    return f"{criterion['name']} is {value}, not {criterion['relation']} {threshold}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_summary(tally: Tally, seconds: float, dry_run: bool) -> None:
    """The table at the end."""
    tally.counts["not run"] = tally.jobs - tally.counts.total()
    tables = [_count_table(tally, seconds, dry_run)]
    if tally.wrong:
        tables.append(_wrong_table(tally))
    report.print_tables_to_stderr(tables)


def _count_table(tally: Tally, seconds: float, dry_run: bool) -> Table:
    meanings = _MEANINGS | (_DRY_MEANINGS if dry_run else {})
    rows = [
        (status, f"{tally.counts[status]:,}   {what}") for status, what in meanings.items() if tally.counts[status]
    ]
    return report.label_table(rows, [("jobs", f"{tally.jobs:,}   in {report.seconds_text(seconds)}")])


def _wrong_table(tally: Tally) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("job", "status", "why"):
        table.add_column(heading, overflow="fold")
    for row in _listed(tally):
        table.add_row(*map(report.plain, row))
    return table


def _listed(tally: Tally) -> Iterator[tuple[str, str, str]]:
    yield from tally.wrong[:MOST_LISTED]
    if len(tally.wrong) > MOST_LISTED:
        yield "...", "", f"and {len(tally.wrong) - MOST_LISTED:,} more, which the results name"

"""Timing by turns, and the lines in which results are printed and stored."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Task = Callable[[], object]

PAUSE = 0.01
"""Seconds between two measurements: OpenMP threads spin on for a while, and would slow the other side."""


@dataclass(frozen=True)
class Timing:
    """The seconds of one side, run by run."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a part of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    def __str__(self) -> str:
        if self.median < 1:
            return f"{self.median * 1e3:.4g} ms ±{self.spread:.0%}"
        return f"{self.median:.4g} s ±{self.spread:.0%}"


@dataclass(frozen=True)
class Check:
    """A figure and, where there is a target, the bound that it should keep."""

    what: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        too_low = self.at_least is not None and self.value < self.at_least
        too_high = self.at_most is not None and self.value > self.at_most
        return not (too_low or too_high)

    def __str__(self) -> str:
        if self.at_least is None and self.at_most is None:
            return f"{self.what} {self.value:.3g}"
        bound = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        return f"{self.what} {self.value:.3g} ({bound} {'ok' if self.met else 'MISSED'})"


@dataclass
class Line:
    """One row of the benchmark: what was timed, the ratios, and what could not be measured."""

    section: str
    name: str
    times: dict[str, Timing] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def ratio(self, slow: str, fast: str) -> float:
        return self.times[slow].median / self.times[fast].median

    def __str__(self) -> str:
        times = "  ".join(f"{side} {timing}".ljust(len(side) + 16) for side, timing in self.times.items())
        results = "; ".join([*map(str, self.checks), *self.notes])
        return f"{self.name}\n    {times}\n    {results}" if times else f"{self.name}\n    {results}"

    def as_json(self) -> dict[str, Any]:
        return {
            "section": self.section,
            "name": self.name,
            "times": {
                side: {"median_s": timing.median, "spread": timing.spread, "seconds": timing.seconds}
                for side, timing in self.times.items()
            },
            "checks": [
                {
                    "what": check.what,
                    "value": check.value,
                    "at_least": check.at_least,
                    "at_most": check.at_most,
                    "met": check.met,
                }
                for check in self.checks
            ],
            "notes": self.notes,
        }


def alternate(
    tasks: Mapping[str, Task], rounds: int, budget: float = 30.0, prepare: Task = lambda: None
) -> dict[str, Timing]:
    """Time every task `rounds` times, taking turns, after one run of each that does not count.

    From three rounds on, stop when the budget (seconds) is spent. `prepare` runs before each task, not timed.
    """
    seconds: dict[str, list[float]] = {side: [] for side in tasks}
    for task in tasks.values():
        prepare()
        task()
    begin = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - begin > budget:
            break
        for side, task in tasks.items():
            prepare()
            time.sleep(PAUSE)
            start = time.perf_counter()
            task()
            seconds[side].append(time.perf_counter() - start)
    return {side: Timing(values) for side, values in seconds.items()}

"""What the command line of the benchmark selects."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """quick: fewer rounds, smaller files; rows: only rows with one of these in the name (all when empty)."""

    quick: bool
    rows: tuple[str, ...]
    threads: int
    directory: Path | None

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 9

    def selects(self, name: str) -> bool:
        return not self.rows or any(part in name for part in self.rows)


def usable_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

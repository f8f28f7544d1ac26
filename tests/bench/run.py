"""Measure poolgrad against torch, oneDNN and plain copies, by turns in one run, and print the ratios.

    python tests/bench/run.py [--quick] [--json FILE] [--only memory,growth,...] [--rows TEXT]...

Ratios are of medians; ± is the distance of the quartiles as a part of the median. Where torch is missing,
the rows say so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

# numpy's own threads have no part in this, and a setting for them would slow every start; so would compiling
# poolgrad at every start, which an installed one never does.
for variable in [name for name in os.environ if name.startswith("OPENBLAS_") or name == "PYTHONDONTWRITEBYTECODE"]:
    del os.environ[variable]
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import files, growth, memory, process  # noqa: E402
from tests.bench.measure import Line  # noqa: E402
from tests.bench.options import Options, usable_cpus  # noqa: E402

SECTIONS: dict[str, Callable[[Options], Iterator[Line]]] = {
    "memory": memory.lines,
    "growth": growth.lines,
    "files": files.lines,
    "start": process.start_lines,
    "peak": process.peak_lines,
}


def main() -> int:
    """Run the sections asked for; 1 when a target is missed."""
    arguments = _parser().parse_args()
    options = Options(arguments.quick, tuple(arguments.rows), arguments.threads, arguments.dir)
    machine = _machine(options)
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    begin, done = time.perf_counter(), []
    for name in arguments.only:
        print(f"\n== {name}", flush=True)
        for line in SECTIONS[name](options):
            print(line, flush=True)
            done.append(line)
    missed = [f"{line.name}: {check}" for line in done for check in line.checks if not check.met]
    print(
        f"\n{len(done)} rows in {time.perf_counter() - begin:.0f} s, {len(missed)} targets missed",
        *missed,
        sep="\n  ",
    )
    if arguments.json:
        record = {"machine": machine, "quick": options.quick, "rows": [line.as_json() for line in done]}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 9, and smaller files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement to FILE")
    parser.add_argument("--only", type=_sections, default=list(SECTIONS), metavar="NAMES", help=", ".join(SECTIONS))
    parser.add_argument("--rows", action="append", default=[], metavar="TEXT", help="only rows with TEXT in the name")
    parser.add_argument("--threads", type=int, default=usable_cpus(), help="of both sides (default: the usable CPUs)")
    parser.add_argument("--dir", type=Path, help="where the files of the file rows go (default: temporary directory)")
    return parser


def _sections(text: str) -> list[str]:
    names = text.split(",")
    unknown = set(names) - set(SECTIONS)
    if unknown:
        raise argparse.ArgumentTypeError(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return names


def _machine(options: Options) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("numpy", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return {**versions, "cpu": _cpu(), "threads": str(options.threads), "load before": load}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())

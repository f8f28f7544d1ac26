"""Kill, interrupt and terminate many runs at random times, and look at what they leave: minutes.

    python tests/long/kill_runs.py [--runs 200] [--stops 40] [--seed N] [--dir DIRECTORY]

`tests/test_faults.py` has the short form. Exit 0 when every run left what it may, and every stop took less than a
second.
"""

from __future__ import annotations

import argparse
import random
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.faults import NAMED, UNNAMED, WORKING, Job, kill_at_random, stop, stop_at_random

STOPS = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    """Run everything asked for; an AssertionError tells what was found."""
    arguments = _parser().parse_args()
    # As in a terminal, where a shell's background jobs ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chance = random.Random(arguments.seed)
    print(f"seed {arguments.seed}, temporary files are {'unnamed' if UNNAMED else 'named'} where not told otherwise")
    slowest = 0.0
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        for named in (False, True):
            _kill(Path(name), arguments.runs // 2, named, chance)
        for signum in STOPS:
            slowest = max(slowest, *_stop(Path(name), arguments.stops // 2, signum, chance))
    print(f"slowest stop {slowest:.2f} s")
    return 0 if slowest < 1 else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="runs to kill, half with named files")
    parser.add_argument("--stops", type=int, default=40, help="runs to stop, half with each signal")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the random times")
    parser.add_argument("--dir", type=Path, help="where the files go (default: temporary directory)")
    return parser


def _kill(directory: Path, runs: int, named: bool, chance: random.Random) -> None:
    began = time.monotonic()
    states = kill_at_random(Job(directory, (1, 64, 512, 512)), runs, named, chance)
    print(
        f"{runs} killed, {'named' if named else 'unnamed'}: {states} in {time.monotonic() - began:.0f} s", flush=True
    )


def _stop(directory: Path, runs: int, signum: signal.Signals, chance: random.Random) -> list[float]:
    """Runs from start to end, and runs on files of a gigabyte that are well under way."""
    took = stop_at_random(Job(directory, (1, 64, 512, 512)), runs, signum, chance.random() < 0.5, chance)
    print(f"{runs} stopped by {signum.name} at random: at most {max(took):.2f} s", flush=True)
    job, large = Job(directory, (1, 64, 2048, 2048), 15, accumulate="float64"), []
    for run in range(runs):
        job.reset(with_old=run % 2 == 1)
        process = job.start((NAMED if run % 4 > 1 else "") + WORKING)
        large.append(stop(job, process, signum, chance.uniform(0, 2)))
    print(f"{runs} stopped by {signum.name} while writing 1 GiB: at most {max(large):.2f} s", flush=True)
    return took + large


if __name__ == "__main__":
    sys.exit(main())

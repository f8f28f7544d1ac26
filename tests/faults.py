"""What the tests of faults and their long form share: a job in a process of its own that is cut short."""

from __future__ import annotations

import functools
import io
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.command_line import ENTRY, environment

from poolgrad.core import TensorSpec, avg_pool2d_backward

NAMED = "import os; vars(os).pop('O_TMPFILE', None)\n"
"""As on a system without unnamed temporary files."""

UP = """
import os, sys
class Up:
    def find_spec(name, path=None, target=None):
        if name == "poolgrad.cli.main":
            os.write(1, b".")
sys.meta_path.insert(0, Up)
"""
"""Prints a dot when poolgrad has control: what a signal does before that, the interpreter decides."""

WORKING = """
import os
from poolgrad.cli.tensor_files import OutputTensor
def write(self, box, tile, write=OutputTensor.write):
    write(self, box, tile)
    OutputTensor.write = write_on
    os.write(1, b".")
write_on, OutputTensor.write = OutputTensor.write, write
"""
"""Prints a dot when the first tile is written (two threads may each print one)."""

TEMPORARY = re.compile(r"\.out\.npy\.poolgrad-[0-9]+-[0-9a-f]{8}\.tmp")

UNNAMED = hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd")
"""Whether temporary files need no name here (which also takes a file system that offers it)."""


@dataclass
class Job:
    """avg2d from files to `out.npy`, where `old` may have been before."""

    directory: Path
    shape: tuple[int, int, int, int] = (1, 16, 512, 512)
    kernel: int = 3
    flags: tuple[str, ...] = ()
    accumulate: str = "float32"
    old: bytes = b"the old result"

    def __post_init__(self) -> None:
        n, c, height, width = self.shape
        grad_output = np.random.default_rng(1).normal(size=(n, c, height // 2, width // 2)).astype(np.float32)
        np.save(self.directory / "grad_output.npy", grad_output)
        np.save(self.directory / "self.npy", np.zeros(self.shape, np.float32))
        self._grad_output = grad_output

    @functools.cached_property
    def result(self) -> bytes:
        """What must be in the target in the end."""
        like, pad = TensorSpec(self.shape, np.float32), self.kernel // 2
        return npy(avg_pool2d_backward(self._grad_output, like, self.kernel, 2, pad, accumulate=self.accumulate))

    @property
    def target(self) -> Path:
        return self.directory / "out.npy"

    @property
    def command(self) -> list[str]:
        files = [str(self.directory / name) for name in ("grad_output.npy", "self.npy", "out.npy")]
        numbers = [f"-k{self.kernel}", "-s2", f"-p{self.kernel // 2}", "--accumulate", self.accumulate]
        return ["avg2d", *files[:2], "-o", files[2], *numbers, "--quiet", *self.flags]

    def start(self, code: str = "") -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", code + ENTRY, *self.command]
        return subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def reset(self, with_old: bool) -> None:
        """As before the first run: no target, or an old one."""
        for path in self.directory.iterdir():
            if path.name not in ("grad_output.npy", "self.npy"):
                path.unlink()
        if with_old:
            self.target.write_bytes(self.old)

    def state(self) -> str:
        """What the target is now; anything that it may never be is an AssertionError."""
        if not self.target.exists():
            return "absent"
        content = self.target.read_bytes()
        known = content == self.old or content == self.result
        assert known, f"the target is neither old nor complete: {len(content)} bytes"
        return "old" if content == self.old else "complete"

    def leftovers(self) -> list[str]:
        """Names in the directory that are neither input nor target."""
        return sorted(set(os.listdir(self.directory)) - {"grad_output.npy", "self.npy", "out.npy"})

    def seconds(self) -> float:
        """How long an undisturbed run takes."""
        self.reset(with_old=False)
        began = time.monotonic()
        process = self.start()
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert (self.state(), self.leftovers()) == ("complete", [])
        return time.monotonic() - began


def npy(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    """The .npy file of an array."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def kill_at_random(job: Job, runs: int, named: bool, chance: random.Random) -> dict[str, int]:
    """Kill runs at random times, with and without an old file by turns; how often which state was met."""
    longest, states = 1.1 * min(job.seconds(), job.seconds()), dict.fromkeys(("absent", "old", "complete"), 0)
    for run in range(runs):
        with_old = run % 2 == 1
        job.reset(with_old)
        process = job.start(NAMED if named else "")
        time.sleep(chance.uniform(0, longest))
        process.kill()
        process.communicate(timeout=60)
        state, leftovers = job.state(), job.leftovers()
        assert state in ("old" if with_old else "absent", "complete"), f"{state} with_old={with_old}"
        assert len(leftovers) <= named, leftovers
        assert all(TEMPORARY.fullmatch(name) for name in leftovers), leftovers
        states[state] += 1
    return states


def stop_at_random(job: Job, runs: int, signum: signal.Signals, named: bool, chance: random.Random) -> list[float]:
    """Send a signal at random times, from poolgrad's first import to the end; the seconds it took each time."""
    longest, took = job.seconds(), []
    for run in range(runs):
        job.reset(with_old=run % 2 == 1)
        process = job.start((NAMED if named else "") + UP)
        took.append(stop(job, process, signum, chance.uniform(0, longest)))
    return took


def stop(job: Job, process: subprocess.Popen[bytes], signum: signal.Signals, delay: float) -> float:
    """Send a signal some time after the process' first dot, and check what it leaves; the seconds it took."""
    assert process.stdout
    assert process.stdout.read(1) == b"."
    time.sleep(delay)
    began = time.monotonic()
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    took = time.monotonic() - began
    assert out.strip(b".") == b"", out
    assert job.leftovers() == []
    if process.returncode in (0, -signum):  # All was done; Python has no handlers any more when it takes itself down.
        assert (job.state(), err) == ("complete", b"")
    else:
        what = {signal.SIGINT: b"interrupted", signal.SIGTERM: b"terminated by SIGTERM"}[signum]
        assert process.returncode == 128 + signum, (process.returncode, err)
        assert re.fullmatch(rb"poolgrad( avg2d)?: %s\n" % what, err), err
        job.state()
    return took

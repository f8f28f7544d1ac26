"""Run calls of over 2^31 elements from files to files; print seconds and peak memory: minutes, and 5 GB of disk.

    python tests/long/huge.py [--only TEXT] [--dir DIRECTORY]

`tests/test_huge.py` has the short form. Inputs are sparse files, with values around both ends and in the middle;
there, and at random places, the result is compared with the definition. Exit 0 when all are right and flat.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.huge import CALLS, NUMPY, PEAK_ENTRY, Call, sparse_npy, write_gradient

MOST_MEGABYTES = 150
SPAN = 1 << 20
"""gradOutput's elements that are not zero, at either end and in the middle."""


def main() -> int:
    """Run every call asked for; 1 when one took more memory than it may."""
    arguments = _parser().parse_args()
    failed = False
    for call in CALLS:
        if arguments.only in str(call):
            with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
                failed |= _run(call, Path(name)) > MOST_MEGABYTES
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only calls with TEXT in what is printed of them")
    parser.add_argument("--dir", type=Path, help="where the files go (default: temporary directory)")
    return parser


def _run(call: Call, directory: Path) -> float:
    """Run a call and check its result; the peak memory in megabytes."""
    grad_path = sparse_npy(directory / "grad_output.npy", call.grad_shape, call.dtype)
    own_path = sparse_npy(directory / "self.npy", call.shape, call.dtype)
    out_path = directory / "out.npy"
    for first, count in _spans(call):
        write_gradient(grad_path, call, first, count)
    words = [*call.flags(), str(grad_path), str(own_path), "-o", str(out_path), "--quiet"]
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PEAK_ENTRY, *words], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    assert done.returncode == 0, done.stderr
    checked = _check(call, out_path)
    megabytes, size = int(done.stdout) / 1000, out_path.stat().st_size
    print(
        f"{call}: {size / 1e9:.2f} GB in {seconds:.1f} s, {megabytes:.0f} MB at most, {checked} cells right",
        flush=True,
    )
    return megabytes


def _spans(call: Call) -> list[tuple[int, int]]:
    """Where gradOutput has values: (first element, count)."""
    total = int(np.prod(call.grad_shape, dtype=object))
    count = min(SPAN, total)
    return [(first, count) for first in sorted({0, (total - count) // 2, total - count})]


def _check(call: Call, path: Path) -> int:
    """Compare cells all of whose windows have values; how many there were."""
    dtype = np.dtype(NUMPY[call.dtype])
    n, c, height, width = call.shape
    total = n * c * height * width
    assert path.stat().st_size == 128 + total * dtype.itemsize
    chance, checked = random.Random(str(call)), 0
    with path.open("rb") as file:
        for first, count in _spans(call):
            ends = [place * total // int(np.prod(call.grad_shape, dtype=object)) for place in (first, first + count)]
            # At the edges of a span, windows without values would have a part in the result.
            margin = 2 * width * max(1, height // max(1, call.grad_shape[2])) if call.grad_shape[2] > 1 else 0
            low, high = ends[0] + (margin if first else 0), ends[1] - (margin if ends[1] < total else 0)
            cells = [low, high - 1, *(chance.randrange(low, high) for _ in range(2000))]
            for cell in cells:
                plane, rest = divmod(cell, height * width)
                file.seek(128 + cell * dtype.itemsize)
                call.check(plane, *divmod(rest, width), np.frombuffer(file.read(dtype.itemsize), dtype)[0])
            checked += len(cells)
    return checked


if __name__ == "__main__":
    sys.exit(main())

"""Whole processes: how fast they start, and the most memory they take."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench.cases import DTYPES, NUMPY_DTYPES, Case
from tests.bench.files import sized, write_header, write_inputs
from tests.bench.measure import Check, Line, Task, alternate
from tests.bench.options import Options
from tests.bench.peers import load_torch

ENTRY = "import sys; from poolgrad.cli.start import entry_point; sys.exit(entry_point())"

# The whole of a script that a person without poolgrad would write.
SCRIPT = """
import sys, numpy, torch
grad = torch.from_numpy(numpy.load(sys.argv[1]))
like = torch.from_numpy(numpy.load(sys.argv[2]))
result = torch.ops.aten.avg_pool2d_backward(grad, like, [3, 3], [2, 2], [1, 1], False, True, None)
numpy.save(sys.argv[3], result.numpy())
"""

# VmHWM belongs to the program alone; ru_maxrss, the only figure elsewhere, may hold its parent's size.
PEAK = """
import sys
from poolgrad.cli.start import entry_point
try:
    code = entry_point()
except SystemExit as exit:
    code = exit.code
try:
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
except OSError:
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak, file=sys.stderr)
sys.exit(code)
"""
IMPORTED = """
import sys
from poolgrad.cli.start import entry_point
try:
    entry_point()
except SystemExit:
    pass
print(" ".join(name for name in ("rich", "numpy", "safetensors") if name in sys.modules), file=sys.stderr)
"""


def start_lines(options: Options) -> Iterator[Line]:
    """Cold start on a tensor of 1 KB, `--help`, and what each imports."""
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        call = _small_call(Path(directory))
        yield from _start_tensor(options, call)
        yield from _start_help(options)
        yield from _imports(options, call)
        yield from _start_script(options, call)


def _small_call(directory: Path) -> list[str]:
    case = Case((1, 1, 16, 16), 3, 2, 1)
    grad_output, like = write_inputs(case, "float32", directory)
    return ["avg2d", str(grad_output), str(like), "-o", str(directory / "out.npy"), *case.flags()]


def _start_tensor(options: Options, call: list[str]) -> Iterator[Line]:
    for flag in ("", "--quiet", "--json"):
        line = Line("start", f"start: avg2d on 1 KB {flag}".rstrip())
        if not options.selects(line.name):
            continue
        flags = [flag] if flag else []
        tasks = {"poolgrad": _python(ENTRY, *call, *flags), "imports": _python("import numpy, click")}
        line.times = alternate(tasks, options.rounds * 3)
        what = "poolgrad/(import numpy, click)"
        line.checks = [Check(what, line.ratio("poolgrad", "imports"), at_most=1.6)]
        yield line


def _start_help(options: Options) -> Iterator[Line]:
    for arguments in (["--help"], ["--version"], ["avg2d", "--help"]):
        line = Line("start", f"start: {' '.join(arguments)}")
        if not options.selects(line.name):
            continue
        tasks = {"poolgrad": _python(ENTRY, *arguments), "import": _python("import click")}
        line.times = alternate(tasks, options.rounds * 3)
        line.checks = [Check("poolgrad/(import click)", line.ratio("poolgrad", "import"), at_most=1.6)]
        yield line


def _imports(options: Options, call: list[str]) -> Iterator[Line]:
    for name, arguments, unwanted in (
        ("--json", [*call, "--json"], {"rich", "safetensors"}),
        ("--help", ["--help"], {"rich", "safetensors", "numpy"}),
    ):
        line = Line("start", f"start: what {name} imports")
        if not options.selects(line.name):
            continue
        done = _run(IMPORTED, *arguments)
        found = sorted(unwanted & set(done.stderr.split()))
        line.checks = [Check("modules that are not needed", len(found), at_most=0)]
        line.notes = found
        yield line


def _start_script(options: Options, call: list[str]) -> Iterator[Line]:
    line = Line("start", "start: 1 KB, against a load, torch, save script")
    if not options.selects(line.name):
        return
    if load_torch(options.threads) is None:
        line.notes.append("torch: not installed")
    else:
        script = _python(SCRIPT, *call[1:3], call[4])
        line.times = alternate({"poolgrad": _python(ENTRY, *call), "script": script}, options.rounds)
        line.checks = [Check("script/poolgrad", line.ratio("script", "poolgrad"), at_least=8)]
    yield line


def peak_lines(options: Options) -> Iterator[Line]:
    """Most memory of the whole process with 4 GB of output (1 GB when quick) and with 40 MB."""
    large = 1_000_000_000 if options.quick else 4_000_000_000
    for shape in (
        Case((1, 64, 112, 112), 3, 2, 1),
        Case((1, 256, 56, 56), grid=(1, 1)),
        Case((1, 4, 4096, 4096), 2, 2),
    ):
        for dtype in DTYPES:
            line = Line("peak", f"peak memory: {shape.name} {dtype}, {large / 1e9:g} GB and 40 MB of output")
            if not options.selects(line.name):
                continue
            if shutil.disk_usage(options.directory or tempfile.gettempdir()).free < 1.6 * large:
                line.notes.append("not enough room on the disk")
            else:
                big, small = (_peak(sized(shape, dtype, size), dtype, options) / 1e6 for size in (large, 40_000_000))
                line.checks = [
                    Check("MB at most", big, at_most=150),
                    Check("MB over that at 40 MB", big - small, at_most=20),
                ]
            yield line


def _peak(case: Case, dtype: str, options: Options) -> int:
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        write_header(directory / "grad_output.npy", case.grad_output_shape, dtype)
        write_header(directory / "self.npy", case.shape, dtype)
        files = [
            str(directory / "grad_output.npy"),
            str(directory / "self.npy"),
            "-o",
            str(directory / "out.npy"),
        ]
        done = _run(PEAK, case.command, *files, *case.flags(), "--threads", str(options.threads))
        size = (directory / "out.npy").stat().st_size
    assert size >= case.elements() * NUMPY_DTYPES[dtype].itemsize
    return int(done.stderr.split()[-1])


def _environment() -> dict[str, str]:
    """Ours without the settings of one machine for numpy's linear algebra."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=_environment(), check=True, capture_output=True, text=True)


def _python(code: str, *arguments: str) -> Task:
    return lambda: _run(code, *arguments)

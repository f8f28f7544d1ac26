"""Run poolgrad on tens of thousands of hostile .npy and .safetensors files, made of the fixtures by mutation.

    python tests/long/hostile_headers.py [--files 20000] [--seed 1] [--first 0] [--processes 2]

Every command line must end with exit code 0, 2 or 3, print at most one line to stderr (none when it is 0) and no
control characters at all, take at most 3 seconds of CPU time and few MB of memory, leave no file behind
but a complete result, and execute nothing. The worker processes run the command line's own entry in a row,
each under a limit of address space hardly over what the libraries take. Prints what was seen; exits with 1 when any
of it is broken. A case is known by seed and number: `--first NUMBER --files 1` runs it alone.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.mutations import bomb, mutate  # noqa: E402

from poolgrad.cli.main import run  # noqa: E402

MARGIN = 96 << 20
"""Address space over what is taken after a sound run of every command. No mutated file is over 2 MB."""
CPU_SECONDS = 3.0
HANG_SECONDS = 20

LAYERS = {
    "resnet_stem": ["avg2d", "-k", "3", "-s", "2", "-p", "1"],
    "vgg_pool": ["avg2d", "-k", "2"],
    "adaptive_7x7": ["adaptive2d"],
}
STEMS = ["bad", "\x1b[31mred", "two\nlines", "\x9b2J", "\u202egnp", "\udcff", "[bold]b"]
EVENTS = {
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
}


class Case(NamedTuple):
    """One hostile file and what is run on it."""

    name: str
    content: bytes
    mutations: str
    arguments: list[str]


class Hang(BaseException):
    """The command took far too long."""


# ---- Cases


def make_case(seed: int, number: int, bomb_path: str) -> Case:
    """The case of this number; files are named relative to the working directory."""
    rng = random.Random(f"{seed}/{number}")
    layer, dtype = rng.choice(list(LAYERS)), rng.choice(["float32", "float16", "bfloat16"])
    folder = ROOT / "fixtures" / layer / dtype
    suffix, role = rng.choice([".npy", ".safetensors"]), rng.choice(["grad_output", "self"])
    if suffix == ".npy":
        content = bomb(bomb_path) if rng.random() < 0.02 else (folder / f"{role}.npy").read_bytes()
    else:
        content = (folder / "inputs.safetensors").read_bytes()
    content, mutations = mutate(content, suffix, rng)
    content = content.replace(b"{bomb}", bomb_path.encode())
    name = (rng.choice(STEMS) if rng.random() < 0.2 else "bad") + suffix
    return Case(name, content, mutations, _arguments(rng, name, role, layer, folder))


def _arguments(rng: random.Random, bad: str, role: str, layer: str, folder: Path) -> list[str]:
    more = [flag for flag in ("--json", "--bf16-bits") if rng.random() < 0.3]
    if rng.random() < 0.4:
        stats = ["--stats"] * (rng.random() < 0.7)
        return ["inspect", bad, *[str(folder / "self.npy")] * (rng.random() < 0.2), *stats, *more]
    given = bad + rng.choice(["", "", f":{role}", ":no such"]) if bad.endswith(".safetensors") else bad
    pair = {"grad_output": str(folder / "grad_output.npy"), "self": str(folder / "self.npy"), role: given}
    command, *flags = LAYERS[layer]
    output = rng.choice(["out.npy", "out.safetensors"])
    return [command, pair["grad_output"], pair["self"], "-o", output, *flags, *more]


# ---- One worker: many command lines in one process


def work(seed: int, first: int, count: int, folder: str) -> dict[str, Any]:
    """Run cases in `folder`, and report what was seen."""
    os.chdir(folder)
    bomb_path = os.path.join(folder, "bomb")
    _warm_up()
    base = _limit_memory()
    watch = Watch(folder)
    codes: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    broken, slowest = [], 0.0
    for number in range(first, first + count):
        Path("number").write_text(str(number))
        case = make_case(seed, number, bomb_path)
        code, spent, faults = run_case(case, watch)
        codes[code] += 1
        kinds.update(case.mutations.split("+"))
        slowest = max(slowest, spent)
        broken += [f"case {number} ({case.mutations}): {fault}" for fault in faults]
    grown = _peak_memory() - base
    return {"codes": codes, "kinds": kinds, "broken": broken, "slowest": slowest, "grown": grown}


def run_case(case: Case, watch: Watch) -> tuple[int, float, list[str]]:
    """The exit code, the seconds of CPU time, and what is not as it must be."""
    Path(case.name).write_bytes(case.content)
    before = set(os.listdir())
    start = time.process_time()
    with watch.events() as events:
        code, out, err = _invoke(case.arguments)
    spent = time.process_time() - start
    left = set(os.listdir()) - before
    faults = [f"was seen to {event}" for event in events]
    faults += _judge(code, out, err, "--json" in case.arguments)
    if spent > CPU_SECONDS:
        faults.append(f"took {spent:.1f} s")
    written = {"out.npy", "out.safetensors"} & left
    if left - written or bool(written) != (code == 0 and case.arguments[0] != "inspect"):
        faults.append(f"left {left} with exit code {code}")
    for name in (case.name, *written):
        os.unlink(name)
    return code, spent, faults


def _invoke(arguments: list[str]) -> tuple[int, str, str]:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(2))
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = run(arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    texts = []
    for stream in (out, err):
        stream.flush()
        stream.seek(0)
        texts.append(stream.read())
    return code, texts[0], texts[1]


def _judge(code: int, out: str, err: str, as_json: bool) -> Iterator[str]:
    if code not in (0, 2, 3):
        yield f"exit code {code}: {err[:300]}"
    if err.count("\n") != (code != 0) or err[-1:] not in ("", "\n"):
        yield f"stderr with exit code {code}: {err[:300]!r}"
    if "Traceback" in out + err or "emory" in err:
        yield f"said {err[:300]!r}"
    for text in (out, err):
        if not text.replace("\n", "").isprintable():
            yield f"printed control characters: {[char for char in text if not char.isprintable()][:5]}"
    if as_json and not _is_json_line(out, "ok" if code == 0 else "error"):
        yield f"printed no JSON: {out[:300]!r}"


def _is_json_line(text: str, status: str) -> bool:
    try:
        return text.count("\n") == 1 and json.loads(text, parse_constant=float.fromhex)["status"] == status
    except ValueError:
        return False


class Watch:
    """What Python reports (audit events) while a case runs: nothing may be executed, or written elsewhere."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._seen: list[str] | None = None
        sys.addaudithook(self._hear)

    @contextmanager
    def events(self) -> Iterator[list[str]]:
        """Collect forbidden events."""
        self._seen = []
        try:
            yield self._seen
        finally:
            self._seen = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._seen is None:
            return
        is_code = event == "exec" and arguments[0].co_filename.startswith("<")
        if event in EVENTS or is_code or (event == "open" and self._is_write_elsewhere(arguments)):
            self._seen.append(f"{event} {arguments}")

    def _is_write_elsewhere(self, arguments: tuple[Any, ...]) -> bool:
        path, _, flags = arguments
        if not flags & (os.O_WRONLY | os.O_RDWR) or isinstance(path, int):
            return False
        return not os.path.abspath(os.fsdecode(path)).startswith(self._folder)


def _warm_up() -> None:
    """Run every command once on sound files, so that everything is imported."""
    folder = ROOT / "fixtures" / "resnet_stem" / "bfloat16"
    inputs = [str(folder / "inputs.safetensors"), str(folder / "self.npy")]
    for more in ([], ["--json"]):
        for command in (
            ["inspect", *inputs, "--stats"],
            [*LAYERS["resnet_stem"][:1], *inputs, "-o", "out.npy", *LAYERS["resnet_stem"][1:]],
        ):
            code, _, err = _invoke([*command, *more])
            assert code == 0, err
    code, _, err = _invoke(["adaptive2d", *inputs, "-o", "out.safetensors"])
    assert code == 0, err
    for name in ("out.npy", "out.safetensors"):
        os.unlink(name)


def _limit_memory() -> int:
    """Limit address space to what is taken and a margin; returns the peak of resident memory so far."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MARGIN
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return _peak_memory()


def _peak_memory() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _hang(_signum: int, _frame: FrameType | None) -> None:
    raise Hang


# ---- All workers


def check(files: int, seed: int, first: int = 0, processes: int = 1) -> dict[str, Any]:
    """Run `files` cases in so many processes; what they saw, added up. Raises if a process dies or hangs."""
    share = -(-files // processes)
    starts = range(first, first + files, share)
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, str(start)) for start in starts]
        workers = [
            _start(seed, start, min(share, first + files - start), folder)
            for start, folder in zip(starts, folders, strict=True)
        ]
        try:
            reports = [_finish(worker, folder) for worker, folder in zip(workers, folders, strict=True)]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    total: dict[str, Any] = {"codes": Counter(), "kinds": Counter(), "broken": [], "slowest": 0.0, "grown": 0}
    for report in reports:
        for key in ("codes", "kinds"):
            total[key].update(report[key])
        total["broken"] += report["broken"]
        for key in ("slowest", "grown"):
            total[key] = max(total[key], report[key])
    return total


def _start(seed: int, first: int, count: int, folder: Path) -> subprocess.Popen[str]:
    folder.mkdir()
    command = [sys.executable, __file__, "--worker", str(folder), "--seed", str(seed)]
    command += ["--first", str(first), "--files", str(count)]
    # Each thread of a library, and each arena of the allocator, reserves address space that it never uses.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    environment.pop("POOLGRAD_DEBUG", None)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, encoding="utf-8")


def _finish(worker: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    out, err = worker.communicate()
    if worker.returncode or err:
        number = folder / "number"
        where = f"at case {number.read_text()}" if number.exists() else "before the first case"
        raise RuntimeError(f"a worker ended with {worker.returncode} {where}: {err}")
    report = json.loads(out)
    assert isinstance(report, dict)
    report["codes"] = {int(code): count for code, count in report["codes"].items()}  # JSON's keys are text.
    return report


def main() -> int:
    """Run as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("--files", 20_000), ("--seed", 1), ("--first", 0), ("--processes", 2)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        signal.signal(signal.SIGALRM, _hang)
        print(json.dumps(work(options.seed, options.first, options.files, options.worker)))
        return 0
    start = time.monotonic()
    seen = check(options.files, options.seed, options.first, options.processes)
    print(f"{options.files} files in {time.monotonic() - start:.0f} s, seed {options.seed}")
    print("exit codes:", ", ".join(f"{code}: {count}" for code, count in sorted(seen["codes"].items())))
    print("mutations:", ", ".join(f"{name} {count}" for name, count in sorted(seen["kinds"].items())))
    print(f"slowest {seen['slowest'] * 1000:.0f} ms of CPU time; memory grew by {seen['grown'] >> 20} MiB at most")
    print(*seen["broken"], sep="\n")
    return 1 if seen["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())

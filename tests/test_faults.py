"""Faults: a run that is killed, interrupted or fails loses no file, leaves none behind, and says why in one line.

The long form of the random ones is `tests/long/kill_runs.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.command_line import ENTRY, Result, environment, poolgrad, poolgrad_process
from tests.faults import NAMED, TEMPORARY, UNNAMED, UP, WORKING, Job, kill_at_random, stop, stop_at_random

from poolgrad.cli.tensor_files import FileSource, create_tensor
from poolgrad.core import TensorSpec

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals, limits and permissions")

ROOT = Path(__file__).resolve().parent.parent
NAMES = [
    pytest.param(False, id="unnamed", marks=pytest.mark.skipif(not UNNAMED, reason="no unnamed files here")),
    pytest.param(True, id="named"),
]
"""Both ways to a temporary file."""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Many tiles of one KiB rows, so that a fault can be in the middle."""
    return Job(tmp_path, (1, 4, 64, 64), flags=("--workspace-limit", "64KiB", "--threads", "2"))


def failed(job: Job, result: Result, *words: str) -> None:
    """Exit 3 and one line with the words; the old target is intact and nothing is left."""
    assert (result.code, result.out) == (3, ""), result
    for word in words:
        assert word in result.error, result.error
    assert (job.state(), job.leftovers()) == ("old", [])


# ---- Killed (SIGKILL)


@pytest.mark.parametrize("named", NAMES)
def test_killed_at_random(tmp_path: Path, named: bool) -> None:
    kill_at_random(Job(tmp_path), 8, named, random.Random(20240 + named))


def test_killed_before_and_after_every_step(tmp_path: Path) -> None:
    variables = environment(OPENBLAS_NUM_THREADS="1")
    command = [sys.executable, "-m", "tests.kill_steps", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(record["killed"] for record in records) >= 20
    for record in records:
        before = "old" if record["with_old"] else "absent"
        assert record["state"] in (before, "complete"), record
        assert record["state"] == "complete" or record["killed"], record
        # Between the two steps by which an unnamed file replaces an old one, it has a name.
        between = (record["call"], record["number"]) in (("link", 2), ("replace", 1)) and record["state"] == "old"
        most = int(record["killed"] and (record["named"] or not UNNAMED or between))
        assert len(record["leftovers"]) <= most, record
        assert all(TEMPORARY.fullmatch(name) for name in record["leftovers"]), record


# ---- Interrupted and terminated (SIGINT, SIGTERM)

STOPS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize(("signum", "named"), [(signal.SIGINT, not UNNAMED), (signal.SIGTERM, True)])
def test_stopped_in_the_middle_of_much_work(tmp_path: Path, signum: signal.Signals, named: bool) -> None:
    took = []
    # Large tiles; on the thread that gets the signal; so many small ones that the whole takes minutes.
    for run, tiles in enumerate([(), ("--threads", "1"), ("--threads", "2", "--workspace-limit", "512KiB")]):
        job = Job(tmp_path, (1, 16, 1024, 1024), 31, tiles, "float64")
        job.reset(with_old=run > 0)
        process = job.start((NAMED if named else "") + WORKING)
        took.append(stop(job, process, signum, 0.05 * run))
        assert process.returncode == 128 + signum
        assert job.state() == ("old" if run else "absent")
    # A machine that is busy with other things may hold up either of them.
    assert min(took) < 1
    assert max(took) < 5


@pytest.mark.parametrize("signum", STOPS)
def test_stopped_at_random(tmp_path: Path, signum: signal.Signals) -> None:
    stop_at_random(Job(tmp_path), 4, signum, signum == signal.SIGTERM, random.Random(signum))


@pytest.mark.parametrize("signum", STOPS)
@pytest.mark.parametrize("module", ["click", "numpy"])
def test_stopped_while_modules_are_imported(job: Job, signum: signal.Signals, module: str) -> None:
    send = f"os.kill(os.getpid(), {int(signum)})"
    code = UP.replace('"poolgrad.cli.main"', repr(module)).replace('os.write(1, b".")', send)
    job.reset(with_old=True)
    process = job.start(code)
    _, err = process.communicate(timeout=60)
    what = "interrupted" if signum == signal.SIGINT else "terminated by SIGTERM"
    assert process.returncode == 128 + signum
    assert re.fullmatch(rf"poolgrad( avg2d)?: {what}\n", err.decode())
    assert (job.state(), job.leftovers()) == ("old", [])


DROPPED = """
import os, time
from poolgrad.core.executor import Executor
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), {signum})
        time.sleep(0.01)
def run(self, source, sink, workspace=None, progress=None):
    Finalized()
    for _ in range(2000):
        time.sleep(0.01)
Executor.run = run
"""


@pytest.mark.parametrize("signum", STOPS)
def test_a_stop_that_python_drops_is_not_lost(job: Job, signum: signal.Signals) -> None:
    """An exception out of a finalizer or a callback of a weak reference goes nowhere."""
    began = time.monotonic()
    process = job.start(DROPPED.format(signum=int(signum)))
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert process.returncode == 128 + signum
    assert err.count(b"\n") == 1
    assert job.leftovers() == []


def test_a_stop_between_making_the_file_and_keeping_it(job: Job) -> None:
    """However early the signal comes, the name does not stay."""
    code = (
        "import os, signal\n"
        + NAMED
        + (
            "def opened(*arguments, open=os.open):\n"
            "    made = open(*arguments)\n"
            "    if arguments[1] & os.O_CREAT: os.kill(os.getpid(), signal.SIGINT)\n"
            "    return made\n"
            "os.open = opened\n"
        )
    )
    process = job.start(code)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"poolgrad avg2d: interrupted\n")
    assert (job.state(), job.leftovers()) == ("absent", [])


# ---- The system fails: no space, no permission, no directory, no device


def fail_on(call: str, number: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the given time on, a call of the system fails."""
    if not hasattr(os, call):
        pytest.skip(f"no {call} on this system")
    real, count, lock = getattr(os, call), [0], threading.Lock()

    def failing(*arguments: Any) -> Any:
        with lock:
            count[0] += 1
            fails = count[0] >= number
        if fails:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize("named", NAMES)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS], ids=os.strerror)
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_writing_fails(job: Job, call: str, code: int, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also quotas, and file systems that claim no space when asked to."""
    if named:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    job.reset(with_old=True)
    fail_on(call, 1 if call == "posix_fallocate" else 5, code, monkeypatch)
    failed(job, poolgrad(*job.command), f"cannot write {job.target}: {os.strerror(code)}")


@pytest.mark.parametrize("number", [1, 5, 9])
def test_reading_fails(job: Job, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job.reset(with_old=True)
    fail_on("preadv", number, errno.EIO, monkeypatch)
    failed(job, poolgrad(*job.command), "cannot read ", ".npy: Input/output error")


def test_a_file_size_limit(job: Job) -> None:
    """Python ignores the signal that would kill the process, so the call fails."""
    job.reset(with_old=True)
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    result = poolgrad_process(*job.command, code=code + ENTRY)
    failed(job, result, f"cannot write {job.target}: File too large")


def in_small_file_system(job: Job, script: str) -> Result:
    """Run a shell script in `job.directory`/disk, a file system of 64 KiB that this process does not see."""
    disk = job.directory / "disk"
    disk.mkdir()
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    mount = f"mount -t tmpfs -o size=64k none {disk} && cd {disk}"
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("may not mount a small file system")
    done = subprocess.run(
        [*unshare, "sh", "-c", f"{mount} && {script}", "sh", sys.executable, "-c", ENTRY, *job.command],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    disk.rmdir()
    return Result(done.returncode, done.stdout, done.stderr)


def test_a_full_disk(job: Job) -> None:
    """Found before the work; then, what there is in the end, and what the old file holds."""
    job.flags += ("-o", "out.npy")
    script = 'printf old >out.npy; "$@"; code=$?; ls -A; cat out.npy; exit $code'
    result = in_small_file_system(job, script)
    assert (result.code, result.out) == (3, "out.npy\nold")
    assert result.error == "poolgrad avg2d: cannot write out.npy: No space left on device (65664 bytes are needed)"


def test_space_is_claimed_in_steps_where_there_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal waits for the end of a call, but a disk should not be filled only to find that it was too small."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _, offset, size: calls.append((offset, size)))
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=1000, f_frsize=1 << 20))
    size = 200 << 20
    with create_tensor(str(tmp_path / "out.npy"), TensorSpec((1, 50, 1 << 20), "float32"), []):
        assert [offset for offset, _ in calls] == list(range(0, size, 64 << 20))
        assert [offset + size for offset, size in calls] == [*range(64 << 20, size, 64 << 20), size + 128]
    calls.clear()
    with create_tensor(str(tmp_path / "out.npy"), TensorSpec((1, 250, 1 << 20), "float32"), []):
        assert calls == [(0, (1000 << 20) + 128)]


def test_space_is_claimed_before_the_work_starts(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.reset(with_old=True)
    monkeypatch.setattr(FileSource, "read", lambda *_: pytest.fail("the work has started"))
    fail_on("posix_fallocate", 1, errno.ENOSPC, monkeypatch)
    failed(job, poolgrad(*job.command), "No space left on device (65664 bytes are needed)")


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Does something once, when some of gradOutput's tiles have been read."""

    def arrange(action: Callable[[], object]) -> None:
        real, count, lock = FileSource.read, [0], threading.Lock()

        def read(self: FileSource, *arguments: Any) -> Any:
            tile = real(self, *arguments)
            with lock:
                count[0] += 1
                if count[0] == 3:
                    action()
            return tile

        monkeypatch.setattr(FileSource, "read", read)

    return arrange


Meanwhile = Callable[[Callable[[], object]], None]


@pytest.mark.parametrize("named", NAMES)
def test_the_directory_vanishes(job: Job, named: bool, meanwhile: Meanwhile, monkeypatch: pytest.MonkeyPatch) -> None:
    if named:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    folder = job.directory / "folder"
    folder.mkdir()
    meanwhile(lambda: shutil.rmtree(folder))
    result = poolgrad(*job.command, "-o", folder / "out.npy")
    failed_line = f"poolgrad avg2d: cannot write {folder / 'out.npy'}: No such file or directory"
    assert (result.code, result.out, result.error) == (3, "", failed_line)
    assert job.leftovers() == []


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder of a user that is not root, whose rights this process has meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        root = os.geteuid() == 0
        if root:
            os.chown(name, 65534, -1)
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)
            os.chmod(name, 0o700)


@pytest.mark.skipif(not UNNAMED, reason="nobody can remove a name from a directory that is read-only")
def test_the_directory_becomes_read_only(unprivileged: Path, meanwhile: Meanwhile) -> None:
    job = Job(unprivileged, (1, 4, 64, 64), flags=("--workspace-limit", "64KiB"))
    job.reset(with_old=True)
    meanwhile(lambda: unprivileged.chmod(0o555))
    failed(job, poolgrad(*job.command), f"cannot write {job.target}: Permission denied")


# ---- An input changes while it is read


def cut(path: Path) -> None:
    os.truncate(path, 200)


def cut_a_little(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def rewrite(path: Path) -> None:
    """Other values in the same file, of the same size."""
    time.sleep(0.02)  # A file system's clock ticks a hundred times a second or more.
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\x80?")


def exchange(path: Path) -> None:
    """Another file of the same size and age."""
    status = path.stat()
    other = path.with_suffix(".other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [cut, cut_a_little, grow, rewrite, exchange, Path.unlink])
@pytest.mark.parametrize("name", ["grad_output.npy", "self.npy"])
def test_an_input_changes(job: Job, name: str, change: Callable[[Path], None], meanwhile: Meanwhile) -> None:
    job.reset(with_old=True)
    path = job.directory / name
    meanwhile(lambda: change(path))
    what = "was cut short" if change in (cut, cut_a_little) and name == "grad_output.npy" else "changed"
    failed(job, poolgrad(*job.command), f"{path} {what} while it was read")


# ---- Two processes write the same target

AGAIN = """
import sys
from poolgrad.cli.main import run
for _ in range(int(sys.argv[1])):
    code = run(sys.argv[2:])
    assert code == 0, code
"""


@pytest.mark.parametrize("named", NAMES)
def test_two_writers_of_one_target(tmp_path: Path, named: bool) -> None:
    jobs = [Job(tmp_path, (1, 16, 128, 128))]
    other = jobs[0].result
    (tmp_path / "more").mkdir()
    jobs.append(Job(tmp_path / "more", (1, 16, 128, 128), kernel=5, flags=("-o", str(jobs[0].target))))
    assert len(jobs[1].result) == len(other)
    assert jobs[1].result != other
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", (NAMED if named else "") + AGAIN, "30", *job.command], stderr=subprocess.PIPE
        )
        for job in jobs
    ]
    seen: set[bytes] = set()
    while any(writer.poll() is None for writer in writers):
        with contextlib.suppress(FileNotFoundError):
            content = jobs[0].target.read_bytes()
            assert content in (other, jobs[1].result)
            seen.add(content)
    assert [writer.communicate()[1] for writer in writers] == [b"", b""]
    assert len(seen) == 2
    (tmp_path / "more" / "self.npy").unlink()
    shutil.rmtree(tmp_path / "more")
    assert jobs[0].leftovers() == []


# ---- Where the result goes


@pytest.mark.parametrize("alias", ["name", "symlink", "hard link"])
@pytest.mark.parametrize("name", ["grad_output.npy", "self.npy"])
def test_the_output_is_an_input(job: Job, name: str, alias: str) -> None:
    job.reset(with_old=False)
    path = job.directory / name
    content = path.read_bytes()
    if alias == "symlink":
        job.target.symlink_to(path)
    elif alias == "hard link":
        job.target.hardlink_to(path)
    target = path if alias == "name" else job.target
    result = poolgrad(*job.command, "-o", target)
    assert (result.code, result.out) == (3, "")
    assert result.error == f"poolgrad avg2d: cannot write {target}: it is the input {path}"
    assert path.read_bytes() == content


@pytest.mark.parametrize("named", NAMES)
@pytest.mark.parametrize("old", [None, 0o640, 0o604])
def test_a_link_and_a_mode_stay(job: Job, named: bool, old: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if named:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    job.reset(with_old=False)
    folder = job.directory / "there"
    folder.mkdir()
    real = folder / "real.npy"
    if old is not None:
        real.write_bytes(job.old)
        real.chmod(old)
    job.target.symlink_to(Path("there", "real.npy"))
    mask = os.umask(0o026)
    try:
        result = poolgrad(*job.command)
    finally:
        os.umask(mask)
    assert result == Result(0, "", "")
    assert job.target.readlink() == Path("there", "real.npy")
    assert real.read_bytes() == job.result
    assert stat.S_IMODE(real.stat().st_mode) == (0o640 if old is None else old)
    assert os.listdir(folder) == ["real.npy"]


# ---- The README


def test_the_readme_names_tests_that_exist() -> None:
    section = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("## What is promised of files")[1].split("\n## ")[0]
    )
    named = re.findall(r"`(test_\w+)(…?)`", section)
    assert len(named) >= 12
    for name, more in named:
        assert any(known.startswith(name) if more else known == name for known in globals()), name
    for path in re.findall(r"`(tests/[\w/]+\.py)`", section):
        assert (ROOT / path).is_file()

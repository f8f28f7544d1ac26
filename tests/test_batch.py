"""poolgrad batch: manifests, results, workers that die, interrupts, resuming, dry runs."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.command_line import ENTRY, Result, environment, on_terminal, poolgrad, poolgrad_process, save, zeros

from poolgrad.cli import batch, pool, run
from poolgrad.cli import jobs as jobs_module
from poolgrad.cli.batch_report import Tally
from poolgrad.cli.jobs import Job, JobError, parse_job, run_job
from poolgrad.cli.results import earlier_results, open_results
from poolgrad.core import AclnnError
from poolgrad.core.executor import Executor

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
STATUSES = {"ok", "failed", "error"}
Object = dict[str, Any]

PLANTED = """
import os, signal, sys, time
from poolgrad.core.executor import Executor
def run(self, *arguments, original=Executor.run):
    channels = self.grad_input.shape[1]
{fault}
    return original(self, *arguments)
Executor.run = run
"""
"""For sitecustomize, which every Python process runs first: workers have the fault in jobs of so many channels."""

SLEEPS = """
    if channels == 7:
        with open({log!r}, "a") as log:
            log.write(f"{{os.getpid()}}\\n")
        time.sleep(60)
"""


@pytest.fixture
def serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs run in this process, one after another: for tests of all that is not about processes."""

    def run_here(
        jobs: Sequence[Job], _sizes: object, _workers: int, _cpus: int, on_result: pool.OnResult, _progress: object
    ) -> None:
        for index, job in enumerate(jobs):
            if not on_result(index, run_job(job)):
                return

    monkeypatch.setattr(pool, "run_on_processes", run_here)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where jobs and their files are: not the folder that the tests run in."""
    (tmp_path / "jobs").mkdir()
    return tmp_path / "jobs"


def make_job(folder: Path, name: str, channels: int = 1, **keys: Any) -> Object:
    """A job whose files exist: 3x3, stride 2, padding 1 over 16x16."""
    grad_output = np.random.default_rng(len(name)).normal(size=(1, channels, 8, 8)).astype(np.float32)
    save(folder / f"{name}.g.npy", grad_output)
    zeros(folder / f"{name}.x.npy", (1, channels, 16, 16))
    files = {"grad_output": f"{name}.g.npy", "self": f"{name}.x.npy", "out": f"{name}.out.npy"}
    return {"id": name, "op": "avg2d", **files, "kernel_size": 3, "stride": 2, "padding": 1, **keys}


def write_manifest(folder: Path, *lines: Object | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path = folder / "jobs.jsonl"
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def plant(folder: Path, fault: str) -> dict[str, str]:
    """The environment in which every process has the fault."""
    place = folder.parent / "planted"
    place.mkdir(exist_ok=True)
    place.joinpath("sitecustomize.py").write_text(PLANTED.format(fault=fault))
    return {"PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def read_lines(text: str) -> list[Object]:
    """Lines of JSON, each of which says what every result says."""
    assert text == "" or text.endswith("\n")
    records = [json.loads(line) for line in text.splitlines()]
    for record in records:
        assert record["schema"] == 1
        assert record["status"] in STATUSES
        assert record["seconds"] >= 0
    return records


def by_id(text: str) -> dict[Any, Object]:
    """The results by their ids, of which each must be there once."""
    records = read_lines(text)
    found = {record["id"]: record for record in records}
    assert len(found) == len(records)
    return found


def statuses(text: str) -> dict[Any, str]:
    return {ident: record["status"] for ident, record in by_id(text).items()}


def rows(result: Result) -> list[list[str]]:
    """The words of each line of the summary."""
    return [line.split() for line in result.err.splitlines()]


# ---- One result line a job


def test_a_result_is_the_json_of_the_single_command(folder: Path) -> None:
    lines = [
        make_job(folder, "stem", channels=3, ceil_mode=False, divisor_override=5, cube_math_type="USE_HF32"),
        {**make_job(folder, "bins"), "op": "adaptive2d"},
    ]
    for key in ("kernel_size", "stride", "padding"):
        del lines[1][key]
    result = poolgrad_process("batch", write_manifest(folder, *lines))
    assert result.code == 0
    found = by_id(result.out)
    flags = ["-k", 3, "-s", 2, "-p", 1, "--divisor-override", 5, "--cube-math-type", 3]
    commands: dict[str, list[object]] = {"stem": ["avg2d", *flags], "bins": ["adaptive2d"]}
    for name, words in commands.items():
        given, like, made = (folder / f"{name}.{kind}.npy" for kind in ("g", "x", "out"))
        single = poolgrad(words[0], given, like, "-o", folder / "single.npy", *words[1:], "--json").record
        assert made.read_bytes() == (folder / "single.npy").read_bytes()
        single["grad_input"]["path"] = str(made)
        for measured in ("timing_s", "throughput_gb_s", "threads"):
            assert type(single.pop(measured)) is type(found[name].pop(measured))
        assert single.items() <= found[name].items()
        extra = {key: value for key, value in found[name].items() if key not in single}
        assert extra.keys() == {"id", "seconds", "inputs", "job"}
        files = [{"path": str(path), "bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
                 for path in (given, like)]  # fmt: skip
        assert extra["inputs"] == files


def test_neither_broken_lines_nor_failing_jobs_stop_the_others(folder: Path) -> None:
    path = write_manifest(
        folder,
        make_job(folder, "first"),
        "{not json",
        "",
        make_job(folder, "shapes", kernel_size=7),
        make_job(folder, "missing", self="nowhere.npy"),
        {"id": "unknown", "op": "avg2d", "kernel": 3},
        make_job(folder, "expected", expect="first.x.npy", standard="exact"),
        {key: value for key, value in make_job(folder, "last").items() if key != "id"},
    )
    with path.open("ab") as file:
        file.write(b'{"op": "\xff"}\n')
    result = poolgrad_process("batch", path)
    assert result.code == 1
    found = by_id(result.out)
    assert {ident: record["status"] for ident, record in found.items()} == {
        "first": "ok", 2: "error", "shapes": "error", "missing": "error", "unknown": "error", "expected": "failed",
        8: "ok", 9: "error",
    }  # fmt: skip
    assert (found["shapes"]["code"], found["shapes"]["name"]) == (161002, "ACLNN_ERR_PARAM_INVALID")
    assert found["shapes"]["message"].startswith("gradOutput is 8x8, kernel 7")
    assert (found["missing"]["code"], found["missing"]["name"]) == (None, "FILE")
    assert str(folder / "nowhere.npy") in found["missing"]["message"]
    assert found[2]["name"] == found["unknown"]["name"] == found[9]["name"] == "JOB"
    assert found[2]["message"].startswith("line 2: not a line of JSON")
    assert found["unknown"]["message"].startswith("line 6: unknown key 'kernel'; avg2d takes id, op, grad_output, ")
    assert found[9]["message"] == "line 9: not UTF-8 (byte 8)"
    assert (folder / "last.out.npy").exists()


@pytest.mark.usefixtures("serial")
def test_the_summary_counts_and_lists_the_failures(folder: Path) -> None:
    lines = [
        make_job(folder, "good"),
        make_job(folder, "shapes", kernel_size=7),
        make_job(folder, "expected", expect="good.x.npy"),
    ]
    result = poolgrad("batch", write_manifest(folder, *lines))
    assert [row[:2] for row in rows(result)[:3]] == [["ok", "1"], ["failed", "1"], ["error", "1"]]
    assert re.search(r"^shapes +error +gradOutput is 8x8.*\(ACLNN_ERR_PARAM_INVALID 161002\)$", result.err, re.M)
    assert re.search(r"^expected +failed +mere-mare: MERE is \S+, not < 0\.0001221, MARE is ", result.err, re.M)
    assert "good " not in result.err
    assert not re.search(r"\x1b|\r|jobs,| of 3 jobs", result.err), "a progress bar where there is no terminal"
    quiet = poolgrad("batch", write_manifest(folder, lines[0]), "--quiet")
    assert (quiet.code, quiet.err) == (0, "")
    assert "shapes" in poolgrad("batch", write_manifest(folder, lines[1]), "-q").err


@pytest.mark.usefixtures("serial")
def test_expect_and_standard(folder: Path) -> None:
    assert poolgrad("batch", write_manifest(folder, make_job(folder, "made")), "-q").code == 0
    near = np.load(folder / "made.out.npy") + np.float32(1e-6)
    save(folder / "near.npy", near)
    golden = {key: value for key, value in make_job(folder, "made", expect="near.npy").items() if key != "out"}
    cases: dict[str, Object] = {
        "exact": {"standard": "exact"},
        "loose": {"standard": "allclose", "atol": 1, "rtol": 0},
        "tight": {"standard": "allclose", "atol": 1e-9, "rtol": 0},
        "row": {"precision_row": "float16", "standard": "mixed"},
    }
    result = poolgrad(
        "batch", write_manifest(folder, *({**golden, "id": name, **keys} for name, keys in cases.items()))
    )
    assert result.code == 1
    found = by_id(result.out)
    assert {name: found[name]["status"] for name in cases} == {
        "exact": "failed", "loose": "ok", "tight": "failed", "row": "ok",
    }  # fmt: skip
    assert found["row"]["comparison"]["precision_row"] == "float16"
    assert found["loose"]["comparison"]["standard"] == "allclose"
    assert found["exact"]["grad_input"]["path"] is None
    assert len(found["exact"]["inputs"]) == 3


@pytest.mark.parametrize(("workers", "results"), [(1, {"a": "error"}), (2, {"a": "error", "b0": "ok"})])
def test_fail_fast_starts_no_more(folder: Path, workers: int, results: dict[str, str]) -> None:
    """The job on the other worker, which waits here until the failure is known, is finished."""
    path = folder / "r.jsonl"
    fault = f"    while not (os.path.exists({str(path)!r}) and os.path.getsize({str(path)!r})): time.sleep(0.01)"
    lines = [make_job(folder, "a", kernel_size=7), *(make_job(folder, f"b{number}") for number in range(5))]
    flags = ["--results", path, "--fail-fast", "--workers", workers]
    result = poolgrad_process("batch", write_manifest(folder, *lines), *flags, **plant(folder, fault))
    assert result.code == 1
    assert statuses(path.read_text()) == results
    assert {made.name for made in folder.glob("*.out.npy")} == {f"{name}.out.npy" for name in results.keys() - {"a"}}
    assert ["not", "run", str(6 - len(results))] in [row[:3] for row in rows(result)]


def test_fail_fast_with_a_broken_line_starts_nothing(folder: Path) -> None:
    result = poolgrad("batch", write_manifest(folder, make_job(folder, "a"), "{"), "--fail-fast")
    assert (result.code, statuses(result.out)) == (1, {2: "error"})
    assert not list(folder.glob("*.out.npy"))


def test_stdin_is_relative_to_the_current_folder(folder: Path) -> None:
    text = "\n\ufeff" + json.dumps({**make_job(folder, "a"), "id": None})
    command = [sys.executable, "-c", ENTRY, "batch", "-", "-q"]
    done = subprocess.run(
        command, cwd=folder, env=environment(), input=text.encode(), capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert statuses(done.stdout.decode()) == {2: "ok"}
    assert (folder / "a.out.npy").exists()


def test_no_jobs_at_all(folder: Path) -> None:
    result = poolgrad("batch", write_manifest(folder, ""))
    assert (result.code, result.out) == (0, "")


# ---- Lines to jobs

GOOD = {"op": "avg2d", "grad_output": "g.npy", "self": "x.npy", "out": "o.npy", "kernel_size": 3}


def parse(**keys: Any) -> Job:
    return parse_job({**GOOD, **keys}, Path("folder"))


def test_values_are_those_of_the_flags() -> None:
    job = parse(stride=[2, 1], padding="1", ceil_mode=True, product="ATLAS-A3", workspace_limit="1KiB", id=7)
    assert job.parameters == {
        "kernel_size": (3,), "stride": (2, 1), "padding": (1,), "ceil_mode": True, "count_include_pad": True,
        "divisor_override": 0, "cube_math_type": 0,
    }  # fmt: skip
    assert (job.id, job.op, job.common.product, job.common.workspace_limit) == (7, "avg2d", "atlas-a3", 1024)
    assert (job.common.grad_output, job.common.output) == ("folder/g.npy", "folder/o.npy")
    assert parse_job(GOOD, Path(".")).common.grad_output == "g.npy"
    absolute = str(Path("/elsewhere/x.npy").absolute())
    assert parse(self=absolute).common.self_tensor == absolute


def test_null_and_no_integers_are_as_good_as_no_key() -> None:
    assert parse(stride=[], divisor_override=None, expect=None, product=None).common == parse().common
    assert parse(stride=[]).parameters == parse().parameters


def test_a_job_names_its_files_without_tensors() -> None:
    job = parse(self="x.safetensors:a:b", out="o.safetensors:dx", expect="e.npy")
    assert job.inputs == ["folder/g.npy", "folder/x.safetensors", "folder/e.npy"]
    assert job.output == "folder/o.safetensors"


def test_a_job_is_told_from_others_but_not_by_its_id() -> None:
    assert parse(id="a").digest == parse(id="b").digest
    assert parse(padding=1).digest != parse().digest
    assert parse_job(json.dumps(dict(reversed(GOOD.items()))), Path("folder")).digest == parse().digest


BROKEN: list[tuple[str | Object, str]] = [
    ("[1, 2]", r"^a job is an object with keys, not \[1, 2\]$"),
    ("", "^not a line of JSON: "),
    ("[" * 100_000, "^not a line of JSON: it is nested too deeply$"),
    ('{"op": "avg2d", "op": "avg2d"}', "^the key 'op' is given twice$"),
    ({}, "^op is missing, expected avg2d or adaptive2d$"),
    ({"op": "max2d"}, '^op is "max2d", expected avg2d or adaptive2d$'),
    ({"op": ["avg2d"]}, r'^op is \["avg2d"\], expected'),
    ({"id": 1.5}, "^id is 1.5, expected text or an integer$"),
    ({"id": True}, "^id is true, expected text or an integer$"),
    ({**GOOD, "kernel": 1}, "^unknown key 'kernel'; avg2d takes id, op, grad_output, self, kernel_size, "),
    ({**GOOD, "threads": 1}, "^unknown key 'threads'"),
    ({**GOOD, "op": "adaptive2d"}, "^unknown key 'kernel_size'; adaptive2d takes "),
    ({**GOOD, "\x1b[2J": 1}, r"^unknown key '\\x1b\[2J'"),
    ({**GOOD, "self": None}, "^self is missing$"),
    ({**GOOD, "kernel_size": []}, "^kernel_size is missing$"),
    ({**GOOD, "out": None}, "^out is missing, and expect as well: "),
    ({**GOOD, "standard": "exact"}, "^standard takes expect, a file to compare with$"),
    ({**GOOD, "grad_output": 3}, "^grad_output is 3, expected a path$"),
    ({**GOOD, "out": ""}, '^out is "", expected a path$'),
    ({**GOOD, "ceil_mode": 1}, "^ceil_mode is 1, expected true or false$"),
    ({**GOOD, "ceil_mode": "true"}, '^ceil_mode is "true", expected true or false$'),
    ({**GOOD, "kernel_size": 3.0}, "^kernel_size is 3.0, expected an integer, a list of integers or text$"),
    ({**GOOD, "kernel_size": [3, True]}, r"^kernel_size is \[3, true\], expected an integer"),
    ({**GOOD, "kernel_size": "three"}, "^kernel_size: 'three' is not one integer or two"),
    ({**GOOD, "divisor_override": [1, 2]}, "^divisor_override: '1,2' is not an integer$"),
    ({**GOOD, "cube_math_type": "FP64"}, "^cube_math_type: 'FP64' is neither 0 to 3 nor one of KEEP_DTYPE"),
    ({**GOOD, "product": "gpu"}, "^product: 'gpu' is not one of atlas-a3"),
    ({**GOOD, "accumulate": "float16"}, "^accumulate: 'float16' is not one of"),
    ({**GOOD, "expect": "e.npy", "rtol": "1"}, '^rtol is "1", expected a number$'),
    ({**GOOD, "expect": "e.npy", "atol": True}, "^atol is true, expected a number$"),
]


@pytest.mark.parametrize(("line", "message"), BROKEN, ids=range(len(BROKEN)))
def test_broken_lines(line: str | Object, message: str) -> None:
    given = line if isinstance(line, str) else {**line, "id": line.get("id", "mine")}
    with pytest.raises(JobError, match=message) as caught:
        parse_job(given, Path())
    assert str(caught.value).isprintable()
    if isinstance(line, dict) and "id" not in line:
        assert caught.value.ident == "mine"


# ---- Running one


def real_job(folder: Path, name: str = "a", **keys: Any) -> Job:
    return parse_job(make_job(folder, name, **keys), folder)


@pytest.mark.parametrize(
    ("error", "name"),
    [(IndexError("off"), "BUG"), (MemoryError(), "MEMORY"), (AclnnError("no"), "ACLNN_ERR_PARAM_INVALID")],
)
def test_an_error_becomes_a_result(
    error: Exception, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Executor, "run", fail)
    result = run_job(real_job(folder), 1)
    assert (result["status"], result["name"], result["id"]) == ("error", name, "a")
    assert not (folder / "a.out.npy").exists()


def test_an_interrupt_does_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Executor, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_job(real_job(folder), 1)


def test_jobs_and_results_go_through_a_pipe(folder: Path) -> None:
    job = real_job(folder)
    assert pickle.loads(pickle.dumps(job)) == job
    result = run_job(job, 1)
    assert json.loads(json.dumps(result)) == pickle.loads(pickle.dumps(result)) == result


def test_one_workspace_serves_all_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    def spy(self: Executor, *arguments: Any, original: Any = Executor.run) -> Any:
        assert len(arguments[2]) >= self.workspace_size
        used.append(arguments[2])
        return original(self, *arguments)

    monkeypatch.setattr(Executor, "run", spy)
    monkeypatch.setattr(jobs_module, "_workspace", jobs_module._Workspace())
    sizes = [4, 1, 2, 4, 400]
    results = [run_job(real_job(folder, f"job{index}", channels=size), 1) for index, size in enumerate(sizes)]
    assert [result["status"] for result in results] == ["ok"] * 5
    assert used[0] is used[1] is used[2] is used[3] is not used[4]
    assert len(used[4]) > len(used[0])


def test_threads_are_for_large_jobs() -> None:
    job, large = parse(), pool.LARGE

    def threads(sizes: list[int], workers: int = 4, cpus: int = 4) -> int:
        return pool._Pool([job] * len(sizes), sizes, workers, cpus)._threads(0)

    assert threads([large - 1]) == 1
    assert threads([large]) == 4
    assert threads([large, large]) == 2
    assert threads([large] * 4) == threads([large] * 1000) == 1
    assert threads([large, *[large // 1000] * 100]) == 3, "its share of the bytes"
    assert threads([large] * 100, workers=1) == 4, "CPUs that no other worker uses"


# ---- Workers


def test_a_thousand_small_jobs(folder: Path) -> None:
    """Two processes run them all. Five seconds on two cores are ten of CPU time, which no other load can take."""
    resource = pytest.importorskip("resource")
    one = make_job(folder, "a")
    lines = [{**one, "id": number, "out": f"{number}.npy"} for number in range(1000)]
    log = folder / "log"
    fault = f"    with open({str(log)!r}, 'a') as log: log.write(f'{{os.getpid()}}\\n')"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = poolgrad_process("batch", write_manifest(folder, *lines), "--workers", 2, **plant(folder, fault))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.code == 0
    assert statuses(result.out) == dict.fromkeys(range(1000), "ok")
    assert len(list(folder.glob("*.npy"))) == 1002
    processes = log.read_text().split()
    assert (len(processes), len(set(processes))) == (1000, 2)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


@POSIX
def test_a_killed_worker_takes_one_job_with_it(folder: Path) -> None:
    fault = "    if channels == 7: os.kill(os.getpid(), signal.SIGKILL)\n    if channels == 5: os._exit(9)"
    lines = [make_job(folder, f"job{number}", channels=number % 10) for number in range(1, 12)]
    result = poolgrad_process("batch", write_manifest(folder, *lines), **plant(folder, fault))
    assert result.code == 1
    found = by_id(result.out)
    dead = {f"job{number}" for number in (5, 7, 10)}  # Ten times no channels at all are refused.
    assert {ident for ident, record in found.items() if record["status"] == "error"} == dead
    assert len(found) == 11
    assert found["job7"]["name"] == found["job5"]["name"] == "WORKER"
    assert found["job7"]["message"] == "the worker process was killed by SIGKILL (was it out of memory?)"
    assert found["job5"]["message"] == "the worker process ended with code 9"
    assert "job7 " in result.err


def test_a_worker_that_dies_idle_takes_no_job(folder: Path) -> None:
    import multiprocessing

    given = [real_job(folder, name) for name in ("a", "b", "c")]
    found: list[tuple[int, str]] = []

    def take(index: int, result: Object) -> bool:
        found.append((index, result["status"]))
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        return True

    pool.run_on_processes(given, [0] * 3, 1, 1, take, lambda _done: None)
    assert found == [(0, "ok"), (1, "ok"), (2, "ok")]
    assert multiprocessing.active_children() == []


def test_a_result_that_an_interrupt_cut_off_is_offered_again(folder: Path) -> None:
    offered: list[tuple[int, str]] = []

    def take(index: int, result: Object) -> bool:
        offered.append((index, result["status"]))
        if len(offered) == 1:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        pool.run_on_processes([real_job(folder, name) for name in "ab"], [0] * 2, 1, 1, take, lambda _done: None)
    assert offered == [(0, "ok"), (0, "ok")]


def test_a_result_that_is_offered_again_is_written_once(folder: Path) -> None:
    tally, results = Tally(2), folder / "r.jsonl"
    with open_results(str(results)) as sink:
        recorder = batch._Recorder(sink, tally, fail_fast=False)
        for index in (0, 1, 0):
            assert recorder.take(index, run_job(real_job(folder, "ab"[index])))
    assert statuses(results.read_text()) == {"a": "ok", "b": "ok"}
    assert tally.counts["ok"] == 2


# ---- Results in a file


def test_results_are_appended_and_a_torn_line_is_ended(folder: Path) -> None:
    results = folder / "r.jsonl"
    results.write_text('{"schema":1,"id":"torn')
    result = poolgrad_process("batch", write_manifest(folder, make_job(folder, "a")), "--results", results)
    assert (result.code, result.out) == (0, "")
    torn, rest = results.read_text().split("\n", 1)
    assert torn == '{"schema":1,"id":"torn'
    assert statuses(rest) == {"a": "ok"}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def start_with_a_sleeper(folder: Path, *flags: str) -> tuple[subprocess.Popen[bytes], Path, int]:
    """A batch that has done its six quick jobs and is in the middle of a long one; its results, the worker's id."""
    log, results = folder.parent / "log", folder / "r.jsonl"
    named = "    vars(os).pop('O_TMPFILE', None)\n"  # A temporary file that would be seen.
    env = environment(**plant(folder, named + SLEEPS.format(log=str(log))))
    path = write_manifest(
        folder, make_job(folder, "long", channels=7), *(make_job(folder, f"quick{number}") for number in range(6))
    )
    command = [sys.executable, "-c", ENTRY, "batch", str(path), "--results", str(results), "--workers", "2", *flags]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    # Each result is there before the batch has ended.
    wait_for(lambda: results.exists() and results.read_text().count("\n") == 6 and log.exists())
    return process, results, int(log.read_text())


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended may still have an entry until its parent asks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@POSIX
@pytest.mark.parametrize(
    ("signum", "whole_group", "code", "message"),
    [
        (signal.SIGINT, True, 130, "interrupted"),
        (signal.SIGINT, False, 130, "interrupted"),
        (signal.SIGTERM, False, 143, "terminated by SIGTERM"),
    ],
)
def test_a_signal_keeps_every_finished_result(
    folder: Path, signum: signal.Signals, whole_group: bool, code: int, message: str
) -> None:
    """A terminal's Ctrl-C reaches the workers as well."""
    process, results, worker = start_with_a_sleeper(folder)
    began = time.monotonic()
    (os.killpg if whole_group else os.kill)(process.pid, signum)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 4
    assert (process.returncode, out) == (code, b"")
    lines = err.decode().splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["ok", "6"], ["not", "run"]]
    assert lines[-1] == f"poolgrad batch: {message}"
    assert "Traceback" not in err.decode()
    assert statuses(results.read_text()) == {f"quick{number}": "ok" for number in range(6)}
    assert not is_running(worker)
    assert not (folder / "long.out.npy").exists()
    assert not list(folder.glob(".*"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_workers_end_when_the_batch_is_killed(folder: Path) -> None:
    fault = f"    time.sleep(1)\n    open({str(folder / 'log')!r}, 'a').write(f'{{os.getpid()}}\\n')"
    env = environment(**plant(folder, fault))
    lines = [make_job(folder, name) for name in "abcdef"]
    command = [sys.executable, "-c", ENTRY, "batch", str(write_manifest(folder, *lines)), "--workers", "1"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for((folder / "log").exists)
    process.kill()
    process.communicate(timeout=30)
    worker = int((folder / "log").read_text().split()[0])
    wait_for(lambda: not is_running(worker))
    assert len(list(folder.glob("*.out.npy"))) <= 2


@POSIX
def test_a_full_disk_ends_the_batch(folder: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (folder / "r.jsonl").symlink_to("/dev/full")
    result = poolgrad_process(
        "batch", write_manifest(folder, make_job(folder, "a")), "--results", folder / "r.jsonl", "-q"
    )
    assert result.code == 3
    last = result.err.splitlines()[-1]
    assert last == f"poolgrad batch: cannot write {folder / 'r.jsonl'}: No space left on device"


@POSIX
def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", ENTRY, "batch", str(write_manifest(folder, make_job(folder, "a"))), "-q"]
    with open(writer, "wb") as broken:
        done = subprocess.run(
            words, env=environment(), stdout=broken, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


# ---- Resuming


class Resumed:
    """Jobs a, b and c with their results; what a further run computes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = folder / "r.jsonl"
        self.lines = [make_job(folder, name, expect="near.npy") for name in "abc"]
        zeros(folder / "near.npy", (1, 1, 16, 16))
        for line in self.lines:
            line |= {"standard": "allclose", "atol": 1e9, "rtol": 0}

    def run(self, *flags: str) -> set[Any]:
        before = self.results.read_text() if self.results.exists() else ""
        path = write_manifest(self.folder, *self.lines)
        result = poolgrad("batch", path, "--results", self.results, "--resume", *flags)
        assert result.out == ""
        after = self.results.read_text()
        assert after.startswith(before)
        found = statuses(after[len(before) :])
        skipped = [row[1] for row in rows(result) if row[:1] == ["skipped"]]
        assert skipped == ([str(len(self.lines) - len(found))] if len(found) < len(self.lines) else [])
        assert result.code == (0 if set(found.values()) <= {"ok"} else 1)
        return set(found)


@pytest.mark.usefixtures("serial")
def test_resume(folder: Path) -> None:
    resumed = Resumed(folder)
    assert resumed.run() == {"a", "b", "c"}
    inodes = [path.stat().st_ino for path in sorted(folder.glob("*.out.npy"))]
    assert resumed.run() == set()
    assert [path.stat().st_ino for path in sorted(folder.glob("*.out.npy"))] == inodes
    (folder / "b.out.npy").unlink()
    assert resumed.run() == {"b"}
    for changed in ("c.g.npy", "c.x.npy"):
        os.utime(folder / changed, ns=(1, 1))
        assert resumed.run() == {"c"}
    same_time = (folder / "a.g.npy").stat().st_mtime_ns
    save(folder / "a.g.npy", np.ones((1, 1, 9, 8), np.float32))
    os.utime(folder / "a.g.npy", ns=(same_time, same_time))
    assert resumed.run() == {"a"}, "the size differs"
    assert resumed.run() == {"a"}, "its result is an error, whatever it was before"
    make_job(folder, "a")
    resumed.lines[1]["atol"] = 1e8
    assert resumed.run() == {"a", "b"}, "another job"
    os.utime(folder / "near.npy", ns=(1, 1))
    assert resumed.run() == {"a", "b", "c"}
    resumed.lines[2]["id"] = "d"
    assert resumed.run() == {"d"}
    for line in resumed.lines:
        line["atol"] = 1e-9
    assert resumed.run() == {"a", "b", "d"}
    assert resumed.run() == {"a", "b", "d"}, "a failed comparison is not done"


@pytest.mark.usefixtures("serial")
def test_resume_passes_over_what_is_no_result(folder: Path) -> None:
    resumed = Resumed(folder)
    resumed.run()
    text = resumed.results.read_text()
    strange = ["[1]", "{", '{"id":"a"}', "\x00", "[" * 100_000, '{"id":["a"],"job":{},"inputs":3,"status":"ok"}']
    resumed.results.write_text("\n".join(strange) + "\n" + text + text.splitlines()[0][:-40])
    assert len(earlier_results(str(resumed.results))) == 5
    result = poolgrad("batch", folder / "jobs.jsonl", "--results", resumed.results, "--resume")
    assert (result.code, rows(result)[0][:2]) == (0, ["skipped", "3"])


def test_resume_takes_results(folder: Path) -> None:
    result = poolgrad("batch", write_manifest(folder, make_job(folder, "a")), "--resume")
    assert result.code == 2
    assert "--resume takes --results" in result.error


# ---- Dry runs and refusals


def test_a_dry_run_checks_headers_and_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Object | str] = [
        make_job(folder, "good", expect="good.x.npy"),
        make_job(folder, "shapes", kernel_size=7),
        make_job(folder, "missing", grad_output="nowhere.npy"),
        make_job(folder, "nowhere", out="nowhere/out.npy"),
        make_job(folder, "itself", out="itself.x.npy"),
        make_job(folder, "expected", expect="good.g.npy"),
        make_job(folder, "standard", expect="good.x.npy", rtol=1),
        make_job(folder, "name", out="out.safetensors:__metadata__"),
        "{",
    ]
    path = write_manifest(folder, *lines)
    before = sorted(os.listdir(folder))
    monkeypatch.setattr(Executor, "run", None)
    result = poolgrad("batch", path, "--dry-run", "--results", folder / "r.jsonl")
    assert sorted(os.listdir(folder)) == before
    assert result.code == 1
    found = by_id(result.out)
    assert {ident for ident, record in found.items() if record["status"] == "ok"} == {"good"}
    assert all(record["dry_run"] for ident, record in found.items() if ident != 9)
    good = found["good"]
    assert (good["op"], good["grad_input"]["path"], good["self"]["bytes"]) == (
        "avg2d", str(folder / "good.out.npy"), 1024,
    )  # fmt: skip
    assert good["workspace_bytes"] > 0
    messages = {ident: record.get("message", "") for ident, record in found.items()}
    assert f"there is no directory {folder / 'nowhere'}" in messages["nowhere"]
    assert "it is the input" in messages["itself"]
    assert "expected the same shape" in messages["expected"]
    assert "rtol" in messages["standard"]
    assert "a tensor cannot be called" in messages["name"]
    assert ["ok", "1", "would", "run"] in rows(result)


@pytest.mark.usefixtures("serial")
def test_a_dry_run_finds_what_the_run_finds(folder: Path) -> None:
    """The same result, up to what was measured."""
    lines = [
        make_job(folder, "good"),
        make_job(folder, "shapes", kernel_size=7),
        make_job(folder, "gone", self="n.npy"),
    ]
    path = write_manifest(folder, *lines)
    dry, wet = by_id(poolgrad("batch", path, "--dry-run").out), by_id(poolgrad("batch", path).out)
    measured = {"seconds", "timing_s", "throughput_gb_s", "dry_run", "threads", "workspace_bytes"}
    for ident, record in wet.items():
        assert {k: v for k, v in record.items() if k not in measured} == {
            k: v for k, v in dry[ident].items() if k not in measured
        }


@pytest.mark.usefixtures("serial")
def test_a_dry_run_resumes(folder: Path) -> None:
    resumed = Resumed(folder)
    resumed.run()
    (folder / "b.out.npy").unlink()
    path, results = folder / "jobs.jsonl", resumed.results.read_bytes()
    result = poolgrad("batch", path, "--dry-run", "--resume", "--results", resumed.results)
    assert statuses(result.out) == {"b": "ok"}
    assert resumed.results.read_bytes() == results


def test_a_dry_run_looks_at_permissions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "locked").mkdir()
    monkeypatch.setattr(
        os, "access", lambda path, _mode: not str(path).endswith("locked")
    )  # Root may write anywhere.
    path = write_manifest(folder, make_job(folder, "a", out="locked/out.npy"))
    assert "nothing can be written to the directory" in poolgrad("batch", path, "--dry-run").record["message"]


CONFLICTS: list[tuple[list[Object], str]] = [
    ([{"out": "b.out.npy"}], r'job "b" writes \S+b.out.npy, which job "a" writes, too'),
    ([{"out": "../jobs/./b.out.npy"}], r'job "b" writes \S+b.out.npy, which job "a" writes, too'),
    ([{"out": "link/b.out.npy"}], r'job "b" writes \S+b.out.npy, which job "a" writes, too'),
    ([{"out": "o.safetensors:x"}, {"out": "o.safetensors:y"}], r"writes \S+o.safetensors, which job"),
    ([{"grad_output": "b.out.npy"}], r'job "a" reads \S+b.out.npy, which job "b" writes'),
    ([{"expect": "b.out.npy"}], r'job "a" reads \S+b.out.npy, which job "b" writes'),
    ([{"out": "jobs.jsonl"}], r'job "a" writes \S+jobs.jsonl, which is the manifest'),
    ([{"out": "r.jsonl"}], r'job "a" writes \S+r.jsonl, which is the results file'),
    ([{"self": "r.jsonl"}], r'job "a" reads \S+r.jsonl, which is the results file'),
]


@pytest.mark.parametrize(("changes", "message"), CONFLICTS, ids=range(len(CONFLICTS)))
@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_jobs_that_would_meet_in_a_file_are_refused(
    changes: list[Object], message: str, flags: list[str], folder: Path
) -> None:
    (folder / "link").symlink_to(folder)
    lines = [make_job(folder, "a"), make_job(folder, "b")]
    for line, change in zip(lines, changes, strict=False):
        line |= change
    result = poolgrad("batch", write_manifest(folder, *lines), "--results", folder / "r.jsonl", *flags)
    assert (result.code, result.out) == (2, "")
    assert re.search(message, result.error)
    assert not list(folder.glob("*.out.npy"))
    assert not (folder / "r.jsonl").exists()


@pytest.mark.usefixtures("serial")
def test_jobs_may_share_inputs_and_one_job_may_be_refused_by_itself(folder: Path) -> None:
    a = make_job(folder, "a", expect="a.x.npy", standard="exact")
    lines = [a, {**a, "id": "b", "out": "b.npy"}, {**a, "id": "c", "out": "a.y.npy", "self": "a.y.npy"}]
    zeros(folder / "a.y.npy", (1, 1, 16, 16))
    found = by_id(poolgrad("batch", write_manifest(folder, *lines)).out)
    assert [found[ident]["status"] for ident in "abc"] == ["failed", "failed", "error"]
    assert "it is the input" in found["c"]["message"]


def test_results_must_not_be_the_manifest(folder: Path) -> None:
    path = write_manifest(folder, make_job(folder, "a"))
    before = path.read_bytes()
    result = poolgrad("batch", path, "--results", folder / "." / "jobs.jsonl")
    assert (result.code, path.read_bytes()) == (2, before)
    assert "is the manifest" in result.error


def test_a_manifest_that_is_not_there(folder: Path) -> None:
    result = poolgrad("batch", folder / "none.jsonl")
    assert result.code == 3
    assert result.error == f"poolgrad batch: cannot read {folder / 'none.jsonl'}: No such file or directory"


# ---- Progress


@POSIX
def test_a_bar_on_a_terminal_only(folder: Path) -> None:
    lines = [make_job(folder, "a"), make_job(folder, "b", channels=7), make_job(folder, "c", kernel_size=7)]
    planted = plant(folder, "    if channels == 7: time.sleep(1.5)")
    path = write_manifest(folder, *lines)
    code, seen = on_terminal("stderr", "batch", path, "--workers", 1, **planted)
    assert code == 1
    seen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    # Jobs, the bar, bytes, time left; job a is over when the bar appears after a second.
    assert re.search(r"1 of 3 jobs +\S+ +1\.0/9\.2 kB +[-\d]:[-\d]{2}:[-\d]{2}", seen)
    assert "kernel 7" in seen


def test_bytes_of_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that cannot be read count nothing, and torch is not loaded for them."""
    monkeypatch.setitem(sys.modules, "torch", None)
    (folder / "a.PT").write_bytes(bytes(5000))
    assert jobs_module.gradient_bytes(real_job(folder, self="a.PT")) == 5000
    assert jobs_module.gradient_bytes(real_job(folder, channels=3)) == 3 * 1024
    assert jobs_module.gradient_bytes(real_job(folder, self="nowhere.npy")) == 0
    assert jobs_module.gradient_bytes(real_job(folder, self="nowhere.pt")) == 0
    assert jobs_module.gradient_bytes(real_job(folder, self="a.txt")) == 0


def test_large_jobs_tell_their_progress(folder: Path) -> None:
    done: list[int] = []
    job = real_job(folder, channels=64, workspace_limit=20_000)
    assert run_job(job, 1, done.append)["status"] == "ok"
    assert done == sorted(done)
    assert done[-1] == 64 * 1024
    assert len(done) > 1


def test_every_flag_of_the_operators_is_a_key_or_of_the_batch() -> None:
    for operator in jobs_module.OPERATORS:
        keys, defaults = jobs_module._parameters(operator)
        assert {jobs_module._name(parameter) for parameter in keys.values()} | jobs_module._NOT_OF_A_JOB == set(
            defaults
        )
    assert set(run._PLANS) == set(jobs_module.OPERATORS)

"""Jobs on a Dask cluster: workers that die, that lack poolgrad, that are not there."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from tests.command_line import poolgrad, zeros
from tests.dumps import K2, Dump, add_avg, gradients

from poolgrad.cli import __version__, scheduler
from poolgrad.cli.jobs import parse_job, run_job
from poolgrad.cli.scheduler import run_on_cluster

JOBS = 50

# Of Dask's own sockets and event loops, which it leaves to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_without_dask_a_line_says_which_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    (tmp_path / "jobs.jsonl").write_text(
        '{"op": "avg2d", "grad_output": "g.npy", "self": "x.npy", "out": "o.npy", "kernel_size": 1}'
    )
    result = poolgrad("batch", tmp_path / "jobs.jsonl", "--scheduler", "tcp://127.0.0.1:1", "-q")
    assert result.code == 2
    assert "--scheduler takes the extra dask: pip install 'poolgrad[dask]'" in result.err.splitlines()[-1]
    assert result.out == ""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A scheduler and two worker processes, each of one thread, which are started again when they die."""
    distributed = pytest.importorskip("distributed")
    dask = importlib.import_module("dask")
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
        ) as local,
    ):
        yield local


def pids(cluster: Any) -> list[int]:
    """The processes of the workers."""
    return [
        nanny.process.pid for nanny in cluster.workers.values() if nanny.process is not None and nanny.process.pid
    ]


@pytest.fixture
def address(cluster: Any) -> str:
    """The scheduler's, once both workers are there, also after a test has killed some."""
    distributed = importlib.import_module("distributed")
    with distributed.Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=30)
    return str(cluster.scheduler_address)


def no_result(task: Any, reason: str) -> dict[str, Any]:
    return {"task": task, "lost": reason}


def slow_job(line: dict[str, Any]) -> dict[str, Any]:
    """A real job, and who did it."""
    time.sleep(0.03)
    return {**run_job(parse_job(line, Path("."))), "pid": os.getpid()}


def write_job(folder: Path, number: int) -> dict[str, Any]:
    own, grad_output = zeros(folder / "self.npy", (1, 2, 64, 64)), folder / f"grad_output{number}.npy"
    np.save(grad_output, np.full((1, 2, 32, 32), number, np.float32))
    files = {"grad_output": str(grad_output), "self": str(own), "out": str(folder / f"out{number}.npy")}
    return {"id": number, "op": "avg2d", "kernel_size": 2, **files}


def test_a_worker_is_killed_in_the_middle_of_50_jobs(cluster: Any, address: str, tmp_path: Path) -> None:
    jobs = [write_job(tmp_path, number) for number in range(JOBS)]
    victim, found = pids(cluster)[0], []
    for number, result in run_on_cluster(address, slow_job, jobs, no_result):
        found.append((number, result))
        if len(found) == 10:
            os.kill(victim, signal.SIGKILL)
    assert sorted(number for number, _ in found) == list(range(JOBS))
    for number, result in found:
        assert (result["status"], result["id"]) == ("ok", number)
        assert np.array_equal(np.load(tmp_path / f"out{number}.npy"), np.full((1, 2, 64, 64), number / 4, np.float32))
    workers = Counter(result["pid"] for _, result in found)
    assert 0 < workers[victim] < JOBS - 10
    assert not list(tmp_path.glob(".*"))


def dies_once(marker: str) -> dict[str, Any]:
    """Kills its worker the first time."""
    with open(marker, "a") as file:
        file.write(f"{os.getpid()}\n")
    if Path(marker).read_text().count("\n") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"pid": os.getpid()}


def test_a_job_whose_worker_dies_is_run_again(address: str, tmp_path: Path) -> None:
    markers = [str(tmp_path / f"job{number}") for number in range(2)]
    Path(markers[1]).write_text("an earlier attempt\n")
    found = dict(run_on_cluster(address, dies_once, markers, no_result))
    assert set(found) == {0, 1}
    first, second = Path(markers[0]).read_text().splitlines()
    assert first != second
    assert found[0] == {"pid": int(second)}


def dies(_task: int) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def dies_if_odd(task: int) -> dict[str, Any]:
    return dies(task) if task % 2 else {"task": task}


def test_a_job_that_kills_every_worker_is_given_up(address: str) -> None:
    found = list(run_on_cluster(address, dies_if_odd, [1], no_result))
    assert found == [(0, {"task": 1, "lost": "the workers that ran it died, one after another"})]
    # The cluster has workers again, and others' jobs are done.
    assert sorted(run_on_cluster(address, dies_if_odd, [0, 2], no_result)) == [(0, {"task": 0}), (1, {"task": 2})]


def test_jobs_that_are_alike_have_a_result_each(address: str) -> None:
    assert sorted(run_on_cluster(address, dies_if_odd, [2, 2], no_result)) == [(0, {"task": 2}), (1, {"task": 2})]


def record_that_it_ran(folder: str) -> dict[str, Any]:
    (Path(folder) / "ran").touch()
    return {}


PATCHES = {
    "another version": ("import poolgrad.cli; poolgrad.cli.__version__ = '0.0.1\x1b'", "has poolgrad 0.0.1\\x1b;"),
    "none": ("import sys; sys.modules['poolgrad.cli'] = None", "cannot import poolgrad (ModuleNotFoundError"),
}

UNDO = f"""
import importlib, sys
for name in ("poolgrad.cli", "poolgrad.cli.scheduler"):
    sys.modules.pop(name, None)
assert importlib.import_module("poolgrad.cli").__version__ == "{__version__}"
"""


@pytest.mark.parametrize("case", PATCHES)
def test_a_worker_that_cannot_do_the_jobs_is_an_error_before_the_first(
    cluster: Any, address: str, tmp_path: Path, case: str
) -> None:
    distributed = importlib.import_module("distributed")
    patch, message = PATCHES[case]
    worker = cluster.scheduler_info["workers"]
    bad = sorted(worker)[0]
    with distributed.Client(cluster, set_as_default=False) as client:
        client.run(exec, patch, {}, workers=[bad])
        try:
            with pytest.raises(click.UsageError) as caught:
                list(run_on_cluster(address, record_that_it_ran, [str(tmp_path)] * 4, no_result))
        finally:
            client.run(exec, UNDO, {}, workers=[bad])
    assert f"the worker {bad} {message}" in caught.value.message
    assert caught.value.message.endswith(f"all need poolgrad {__version__}, as is here")
    assert not (tmp_path / "ran").exists()


def test_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr(scheduler, "CONNECT_SECONDS", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(click.UsageError, match=f"no scheduler answers at {nobody}: "):
        list(run_on_cluster(nobody, dies_if_odd, [0], no_result))
    # Dask's client, which never came to be, closes when it is collected, and not in the middle of another's start.
    gc.collect()


@pytest.mark.parametrize(
    "text", ["nonsense", "", "host:8786", "tcp://a b:1", "tcp://", "tcp://host", "tcp://host:port", "xyz://host:1"]
)
def test_addresses_that_are_none(text: str) -> None:
    pytest.importorskip("distributed")
    with pytest.raises(click.UsageError, match=f"--scheduler is {text or 'empty'}, expected tcp://HOST:PORT"):
        list(run_on_cluster(text, dies_if_odd, [0], no_result))


def test_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(scheduler, "WORKERS_SECONDS", 1)
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=":0", silence_logs=50) as empty,
        pytest.raises(click.UsageError, match="has no workers after 1 s"),
    ):
        list(run_on_cluster(empty.scheduler_address, dies_if_odd, [0], no_result))


def test_the_scheduler_goes_away(capfd: pytest.CaptureFixture[str]) -> None:
    distributed = pytest.importorskip("distributed")
    logger = logging.getLogger("distributed.client")
    logger.setLevel(logging.WARNING)
    found = []
    with distributed.LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=False,
        protocol="tcp://",
        dashboard_address=":0",
        silence_logs=50,
    ) as short:
        results = run_on_cluster(short.scheduler_address, wait_a_little, list(range(30)), no_result)
        found.append(next(results))
        short.close()
        with pytest.raises(click.UsageError, match=f"the scheduler at {short.scheduler_address} is gone"):
            found.extend(results)
    assert 0 < len(found) < 30
    assert capfd.readouterr().err == ""
    # What it logs goes to the stderr of when it was imported, which no fixture sees.
    assert not logger.isEnabledFor(logging.CRITICAL)


def wait_a_little(task: int) -> dict[str, Any]:
    time.sleep(0.1)
    return {"task": task}


# ---- The commands


def test_batch_on_a_cluster(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        write_job(tmp_path, number)
    lines = [{"id": n, "op": "avg2d", "kernel_size": 2, "grad_output": f"grad_output{n}.npy", "self": "self.npy",
              "out": f"out{n}.npy"} for n in range(3)]  # fmt: skip
    lines[2]["kernel_size"] = 3
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)  # Workers have another folder.
    result = poolgrad("batch", "jobs.jsonl", "--scheduler", address, "--quiet")
    assert result.code == 1
    records = {record["id"]: record for record in map(json.loads, result.out.splitlines())}
    assert {number: record["status"] for number, record in records.items()} == {0: "ok", 1: "ok", 2: "error"}
    assert "gives 21x21" in records[2]["message"]
    for number in range(2):
        assert np.array_equal(np.load(f"out{number}.npy"), np.full((1, 2, 64, 64), number / 4, np.float32))


def test_msprobe_on_a_cluster(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = add_avg(Dump(tmp_path / "step0" / "rank0"), "Mint.avg_pool2d.0", K2, 2)
    own, grad_output, grad_input = gradients(K2, (1, 2, 8, 8))
    dump.call("Mint.avg_pool2d.1", own, grad_output, (grad_input * 4).astype(np.float32), 2)
    add_avg(dump, "Mint.avg_pool2d.2", K2, 2)
    (dump.tensors / "Mint.avg_pool2d.2.backward.input.0.npy").unlink()
    dump.write()
    monkeypatch.chdir(tmp_path)
    here, there = (
        poolgrad("msprobe", "step0", "--diagnose", "--json", *flags) for flags in ([], ["--scheduler", address])
    )
    assert (there.code, there.err) == (here.code, here.err) == (1, "3 calls: 1 pass, 1 fail, 1 not checked\n")
    assert timeless(there.out) == timeless(here.out)
    assert "a constant factor of 2^2" in there.out


def timeless(text: str) -> dict[str, Any]:
    """The records by call, without times."""
    records = {record["call"]: record for record in map(json.loads, text.splitlines())}
    for record in records.values():
        for place in (record, record.get("comparison", {})):
            place.pop("seconds", None)
    return records

"""Jobs on a Dask cluster (`--scheduler tcp://HOST:PORT`): Dask hands them out, and again where a worker is lost.

Takes the optional extra `dask`. Paths have to mean the same on all machines, as on a shared file system.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from . import __version__
from .file_errors import shorten

INSTALL = "--scheduler takes the extra dask: pip install 'poolgrad[dask]'"

CONNECT_SECONDS = 10
WORKERS_SECONDS = 30
"""How long to wait for the scheduler, and for its first worker."""

_ADDRESS = re.compile(r"(tcp|tls|ucx|wss?)://([^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
"""What Dask makes nothing of would keep the process from ending."""

Task = TypeVar("Task")
Record = dict[str, Any]


def run_on_cluster(
    address: str,
    work: Callable[[Task], Record],
    tasks: Sequence[Task],
    lost: Callable[[Task, str], Record],
) -> Generator[tuple[int, Record], None, None]:
    """Each task's number and what `work` makes of it, as they finish.

    `work` is a function of a module of poolgrad and raises nothing; `lost` makes the result of a task that Dask has
    given up, of the task and the reason. Workers are checked before the first task. Raises click.UsageError for a
    cluster that cannot be used.
    """
    distributed = _import_distributed()
    with _client(distributed, address) as client:
        _check_workers(client, address)
        futures = client.map(work, tasks, pure=False)
        numbers = {future.key: number for number, future in enumerate(futures)}
        try:
            finished = distributed.as_completed(futures, loop=client.loop, with_results=True, raise_errors=False)
            for future, result in finished:
                number = numbers[future.key]
                if future.status == "cancelled":
                    raise click.UsageError(f"the scheduler at {address} is gone, or has cancelled the jobs")
                yield number, result if isinstance(result, dict) else lost(tasks[number], _why(result))
        finally:
            client.cancel(futures)


def _why(result: Any) -> str:
    # With raise_errors=False an error comes as (type, exception, traceback).
    error = result[1] if isinstance(result, tuple) else result
    if type(error).__name__ == "KilledWorker":
        return "the workers that ran it died, one after another"
    return f"the cluster failed: {_reason(error)}"


def _reason(error: Any) -> str:
    text = str(error).strip().partition("\n")[0]
    return shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__, 200)


def _import_distributed() -> Any:
    try:
        return importlib.import_module("distributed")
    except ImportError as error:
        raise click.UsageError(INSTALL) from error


@contextmanager
def _client(distributed: Any, address: str) -> Iterator[Any]:
    import logging

    if not _ADDRESS.fullmatch(address):
        raise click.UsageError(f"--scheduler is {shorten(address) or 'empty'}, expected tcp://HOST:PORT")
    # What goes wrong is told in one line; Dask would tell it in many.
    for name in ("distributed", "distributed.client", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise click.UsageError(f"no scheduler answers at {address}: {_reason(error)}") from error
    try:
        yield client
    finally:
        client.close(timeout=CONNECT_SECONDS)


def _check_workers(client: Any, address: str) -> None:
    """Every worker must have this version of poolgrad: another one may compute other results."""
    try:
        client.wait_for_workers(1, timeout=WORKERS_SECONDS)
    except TimeoutError as error:
        raise click.UsageError(f"the scheduler at {address} has no workers after {WORKERS_SECONDS} s") from error
    # A function of the standard library, so that a worker without poolgrad can be asked, too.
    answers = client.run(pkgutil.resolve_name, "poolgrad.cli:__version__", on_error="return")
    for worker, answer in sorted(answers.items()):
        if answer != __version__:
            has = f"has poolgrad {shorten(answer, 40)}" if isinstance(answer, str) else "cannot import poolgrad"
            detail = "" if isinstance(answer, str) else f" ({_reason(answer)})"
            raise click.UsageError(f"the worker {worker} {has}{detail}; all need poolgrad {__version__}, as is here")

"""The manifest of a batch: its lines to jobs, and what the jobs may not do to each other's files."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click

from .file_errors import cannot
from .jobs import Id, Job, JobError, parse_job


class Broken(NamedTuple):
    """A line that is no job, and why. `ident` is the number of the line where it has no id of its own."""

    ident: Id
    message: str


def read_manifest(path: str, absolute: bool = False) -> list[Job | Broken]:
    """The jobs of a file, or of stdin for `-`. A job without an id gets the number of its line.

    absolute: whether the jobs' paths are to be absolute, as other processes need them.
    """
    base = Path(".") if path == "-" else Path(path).parent
    base = base.absolute() if absolute else base
    return [_entry(number, line, base) for number, line in enumerate(_lines(path), 1) if line.strip()]


def _lines(path: str) -> list[bytes]:
    try:
        if path == "-":
            return sys.stdin.buffer.read().split(b"\n") if sys.stdin is not None else []
        return Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise cannot("read", path, error) from error


def _entry(number: int, line: bytes, base: Path) -> Job | Broken:
    try:
        job = parse_job(line.decode("utf-8-sig"), base)
    except UnicodeDecodeError as error:
        return Broken(number, f"line {number}: not UTF-8 (byte {error.start})")
    except JobError as error:
        return Broken(number if error.ident is None else error.ident, f"line {number}: {error}")
    return replace(job, id=number) if job.id is None else job


def refuse_conflicts(jobs: Sequence[Job], manifest: str | None, results: str | None) -> None:
    """Refuse two jobs that write one file, one that reads what another writes, and the batch's own files as outputs.

    Jobs run in any order, several at once: what such files hold in the end would be a matter of chance.
    """
    taken: dict[str, tuple[Job | None, str]] = {}
    if manifest is not None:
        taken[same_file(manifest)] = None, "is the manifest"
    if results is not None:
        if same_file(results) in taken:
            raise click.UsageError(f"--results {results} is the manifest")
        taken[same_file(results)] = None, "is the results file"
    for job in jobs:
        if job.output is not None:
            owner, what = taken.setdefault(same_file(job.output), (job, f"{job.title} writes"))
            if owner is not job:
                raise click.UsageError(f"{job.title} writes {job.output}, which {what}{', too' if owner else ''}")
    for job in jobs:
        for path in job.inputs:
            owner, what = taken.get(same_file(path), (job, ""))
            if owner is not job:
                raise click.UsageError(f"{job.title} reads {path}, which {what}")


def same_file(path: str) -> str:
    """One name for a file, whatever links and relative paths lead to it."""
    folder, name = os.path.split(path)
    whole = os.path.join(_real_folder(folder), name)
    # Only then is the whole path to be looked at, which takes a call a folder.
    return os.path.normcase(os.path.realpath(whole) if os.path.islink(whole) else whole)


@functools.lru_cache(maxsize=1024)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)

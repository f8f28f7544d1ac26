"""`poolgrad batch`: the jobs of a manifest, on worker processes, to a line of JSON each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import click

from . import report
from .failures import USAGE
from .options import scheduler_option

if TYPE_CHECKING:
    from .batch_report import Tally
    from .jobs import Job, Result
    from .manifest import Broken
    from .results import ResultFile, ResultsOnStdout

FAILED = 1
"""Exit code of a batch of which a job is not ok."""


@click.command("batch")
@click.argument("manifest", metavar="JOBS.jsonl")
@click.option("--results", metavar="FILE", help="Append the results to this file instead of printing them.")
@click.option(
    "--resume",
    is_flag=True,
    help="Skip jobs whose result in --results is ok, whose inputs have not changed and whose output exists.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes; by default the CPUs this process may use. The results do not depend on it.",
)
@scheduler_option
@click.option("--fail-fast", is_flag=True, help="Start no more jobs once one is not ok.")
@click.option("--dry-run", is_flag=True, help="Check every job from headers alone and print what would run.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar, and no summary when all is well.")
@click.pass_context
def command(
    context: click.Context,
    manifest: str,
    results: str | None,
    resume: bool,
    workers: int | None,
    scheduler: str | None,
    fail_fast: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Run many jobs of avg2d and adaptive2d.

    JOBS.jsonl, or - for stdin, holds a JSON object a line, the keys named as the flags. Paths are relative to its
    folder. Each job's result is a line of JSON, as of the single command.

    Exit codes: 0 all jobs are ok; 1 one is not; 2 and 3 when the batch itself cannot run.

    \b
    Example of a line
        {"id": "stem", "op": "avg2d", "grad_output": "g.npy", "self": "x.npy", "out": "dx.npy", "kernel_size": 3}
    """
    from .results import open_results

    if resume and results is None:
        raise click.UsageError("--resume takes --results, the file that tells what is done", context)
    if scheduler is not None and workers is not None:
        raise click.UsageError("--workers is of this machine; the cluster has its own", context)
    batch = _read(manifest, results, resume, absolute=scheduler is not None)
    jobs = len(batch.jobs) + len(batch.broken) + batch.done
    with _summary(jobs, quiet, dry_run) as tally, open_results(None if dry_run else results) as sink:
        tally.skip(batch.done)
        recorder = _Recorder(sink, tally, fail_fast)
        recorder.take_broken(batch.broken)
        if dry_run:
            _check(batch, recorder)
        elif recorder.goes_on:
            # Lines that go to the same terminal as the bar would show the progress themselves.
            shown = not quiet and report.is_terminal_stderr() and not sink.is_terminal
            _run(batch.jobs, recorder, workers, scheduler, shown)
    context.exit(0 if tally.all_ok else FAILED)


class _Batch(NamedTuple):
    """What is to be done. jobs: to run; done: how many need not run."""

    jobs: list[Job]
    broken: list[Broken]
    done: int


def _read(manifest: str, results: str | None, resume: bool, absolute: bool) -> _Batch:
    from .manifest import Broken, read_manifest, refuse_conflicts
    from .results import earlier_results, is_done

    entries = read_manifest(manifest, absolute)
    broken = [entry for entry in entries if isinstance(entry, Broken)]
    jobs = [entry for entry in entries if not isinstance(entry, Broken)]
    refuse_conflicts(jobs, None if manifest == "-" else manifest, results)
    earlier = earlier_results(results) if resume and results is not None else {}
    waiting = [job for job in jobs if not is_done(job, earlier)]
    return _Batch(waiting, broken, len(jobs) - len(waiting))


@contextmanager
def _summary(jobs: int, quiet: bool, dry_run: bool) -> Iterator[Tally]:
    """A tally, which is shown in the end, also when an exception ends the batch."""
    from .batch_report import Tally, print_summary

    tally, began = Tally(jobs), time.perf_counter()
    try:
        yield tally
    finally:
        if not (quiet and tally.all_ok):
            print_summary(tally, time.perf_counter() - began, dry_run)


def _check(batch: _Batch, recorder: _Recorder) -> None:
    """A dry run."""
    from .jobs import check_job

    for index, job in enumerate(batch.jobs):
        if not recorder.take(index, {**check_job(job), "dry_run": True}):
            return


def _run(jobs: list[Job], recorder: _Recorder, workers: int | None, scheduler: str | None, shown: bool) -> None:
    from .jobs import gradient_bytes

    sizes = [gradient_bytes(job) for job in jobs]
    with report.progress(sum(sizes), shown, recorder.tally.label) as progress:
        if scheduler is not None:
            _run_on_cluster(scheduler, jobs, sizes, recorder, progress or _ignore)
            return
        from poolgrad.core.operators import available_cpus

        from .pool import run_on_processes

        cpus = available_cpus()
        run_on_processes(jobs, sizes, workers or cpus, cpus, recorder.take, progress or _ignore)


def _run_on_cluster(
    address: str, jobs: list[Job], sizes: list[int], recorder: _Recorder, progress: Callable[[int], None]
) -> None:
    from .jobs import lost_result, run_job
    from .scheduler import run_on_cluster

    done = 0
    with closing(run_on_cluster(address, run_job, jobs, lost_result)) as results:
        for index, result in results:
            if not recorder.take(index, result):
                return
            done += sizes[index]
            progress(done)


def _ignore(_done: int) -> None:
    """Show no progress."""


class _Recorder:
    """Writes and counts results, each once, also when it is offered again after an interrupt."""

    def __init__(self, sink: ResultFile | ResultsOnStdout, tally: Tally, fail_fast: bool) -> None:
        self._sink = sink
        self._fail_fast = fail_fast
        self._taken: set[int] = set()
        self.tally = tally

    def take(self, index: int, result: Result) -> bool:
        """Take the result of a job; says whether others are still to be started."""
        if index not in self._taken:
            with self._sink.whole_lines():
                self._sink.write(result)
                self._taken.add(index)
            self.tally.add(result)
        return self.goes_on

    def take_broken(self, broken: Sequence[Broken]) -> None:
        """Take lines that are no jobs."""
        from .jobs import error_result

        for line in broken:
            result = error_result(line.ident, report.Failure(USAGE, "JOB", line.message))
            self._sink.write(result)
            self.tally.add(result)

    @property
    def goes_on(self) -> bool:
        """Whether more jobs are to be started."""
        return not (self._fail_fast and self.tally.wrong)

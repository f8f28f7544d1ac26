"""Jobs on worker processes, which live as long as the batch. One that dies takes a single job with it.

Workers are started afresh (spawn), on every system alike: nothing of this process' threads and locks reaches them.
A worker has one job at a time, so that what died with it is known; handing over the next takes about 0.1 ms.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from .jobs import Job, Result, lost_result, run_job
from .signals import Stopped, signals_raise, signals_wait

LARGE = 1 << 24
"""Bytes of gradInput from which a job may get several threads: below, they cost more than they bring."""

_PATIENCE = 5.0
"""Seconds that workers get to remove their temporary files and end, before they are killed."""

_INTERVAL = 0.2
"""Seconds between two messages about a job's progress, and at most until the bar is drawn again."""

OnResult = Callable[[int, Result], bool]
"""Takes a job's index and result; says whether others are still to be started."""

OnProgress = Callable[[int], None]
"""Takes the bytes of gradInput done so far."""


def run_on_processes(
    jobs: Sequence[Job], sizes: Sequence[int], workers: int, cpus: int, on_result: OnResult, on_progress: OnProgress
) -> None:
    """Run every job, and pass on its result as soon as it is there; each once, in the order in which they finish.

    sizes: bytes of gradInput of each job, as far as known. When an exception ends this, an interrupt as well,
    results that have arrived are passed on first.
    """
    pool = _Pool(jobs, sizes, min(workers, len(jobs)), cpus)
    try:
        while pool.unfinished:
            pool.step()
            pool.deliver(on_result)
            on_progress(pool.done)
        pool.end(at_once=False)
    except (KeyboardInterrupt, Stopped):
        pool.end(at_once=True)
        pool.deliver(on_result)
        raise
    finally:
        pool.end(at_once=True)


class _Pool:
    """The workers, and which job each of them has."""

    def __init__(self, jobs: Sequence[Job], sizes: Sequence[int], workers: int, cpus: int) -> None:
        self._jobs = jobs
        self._sizes = sizes
        self._cpus = cpus
        self._most = workers
        self._waiting = deque(range(len(jobs)))
        self._workers: list[_Worker] = []
        self._arrived: deque[tuple[int, Result]] = deque()
        self._bytes_left = sum(sizes)
        self._bytes_done = 0
        self.unfinished = len(jobs)

    @property
    def done(self) -> int:
        """Bytes of gradInput that are done."""
        return self._bytes_done + sum(worker.done for worker in self._workers)

    def step(self) -> None:
        """Give every free worker a job, and take in what the others say."""
        while self._waiting and (worker := self._free_worker()):
            self._hand_out(worker)
        connections = {worker.connection: worker for worker in self._workers if worker.index is not None}
        for connection in wait(list(connections), _INTERVAL):
            assert isinstance(connection, Connection)
            self._listen(connections[connection])

    def deliver(self, on_result: OnResult) -> None:
        """Pass on what has arrived."""
        while self._arrived:
            go_on = on_result(*self._arrived[0])
            self._arrived.popleft()
            if not go_on:
                self.unfinished -= len(self._waiting)
                self._waiting.clear()

    def end(self, at_once: bool) -> None:
        """End the workers; at once, those in the middle of a job as well. Idle ones end by themselves."""
        with signals_wait():
            for worker in self._workers:
                worker.end(at_once)
            for worker in self._workers:
                self._last_words(worker)
            self._workers.clear()

    def _free_worker(self) -> _Worker | None:
        for worker in self._workers:
            if worker.index is None:
                return worker
        if len(self._workers) == self._most:
            return None
        self._workers.append(_Worker())
        return self._workers[-1]

    def _hand_out(self, worker: _Worker) -> None:
        index = self._waiting[0]
        try:
            with signals_wait():
                worker.take(index, self._jobs[index], self._threads(index))
                self._waiting.popleft()
        except OSError:  # It died while it was idle: no job is lost.
            self._dismiss(worker)

    def _threads(self, index: int) -> int:
        """One; a large job gets the CPUs that would be idle, or its share of them by the work that is left."""
        size = self._sizes[index]
        if size < LARGE:
            return 1
        return max(1, self._cpus // min(self._most, self.unfinished), self._cpus * size // self._bytes_left)

    def _listen(self, worker: _Worker) -> None:
        try:
            with signals_wait():
                message = worker.connection.recv()
                if isinstance(message, dict):
                    self._arrive(worker, message)
                else:
                    worker.done = message
        except (EOFError, OSError):
            self._dismiss(worker)

    def _dismiss(self, worker: _Worker) -> None:
        """Forget a worker that is dead, and report the job it had."""
        with signals_wait():
            self._workers.remove(worker)
            how = worker.how_it_died()
            if worker.index is not None:
                self._arrive(worker, lost_result(self._jobs[worker.index], f"the worker process {how}"))

    def _arrive(self, worker: _Worker, result: Result) -> None:
        assert worker.index is not None
        self._arrived.append((worker.index, result))
        self._bytes_left -= self._sizes[worker.index]
        self._bytes_done += self._sizes[worker.index]
        self.unfinished -= 1
        worker.index, worker.done = None, 0

    def _last_words(self, worker: _Worker) -> None:
        """Wait until a worker has ended; a result that was under way when it was told to end counts."""
        try:
            while worker.connection.poll(_PATIENCE):
                message = worker.connection.recv()
                if isinstance(message, dict):
                    self._arrive(worker, message)
        except (EOFError, OSError):
            pass
        worker.bury()


class _Worker:
    """A worker process as this one sees it. index: of the job that it has; done: bytes of that job."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        if os.name == "posix":
            from multiprocessing import resource_tracker

            resource_tracker.ensure_running()  # Its start would let the signals through that wait below.
        self.connection, theirs = context.Pipe()
        # The process inherits that signals wait: one that comes before it is ready to handle it would be a traceback.
        with signals_wait(), theirs:
            self._process = context.Process(target=_work, args=(theirs,), name="poolgrad worker", daemon=True)
            self._process.start()
        self.index: int | None = None
        self.done = 0

    def take(self, index: int, job: Job, threads: int) -> None:
        """Give it a job."""
        self.connection.send((job, threads))
        self.index = index

    def end(self, at_once: bool) -> None:
        """Tell it to end."""
        if at_once and self.index is not None:
            self._process.terminate()
        else:
            self.connection.close()

    def how_it_died(self) -> str:
        """What ended a process that has ended."""
        self.bury()
        code = self._process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"was killed by {name}" + (" (was it out of memory?)" if name == "SIGKILL" else "")
        return f"ended with code {code}"

    def bury(self) -> None:
        """Wait for its end, and make sure of it."""
        self.connection.close()
        self._process.join(_PATIENCE)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


# ---- In the worker


def _work(connection: Connection) -> None:
    """Run what comes, until nothing does any more or a signal ends it. An interrupt is for the batch to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals_raise():
        try:
            if hasattr(signal, "pthread_sigmask"):
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
            while True:
                job, threads = connection.recv()
                connection.send(run_job(job, threads, _Teller(connection)))
        except (EOFError, OSError):
            pass  # The batch has ended, or is gone.
        except Stopped as stopped:
            raise SystemExit(128 + stopped.signum) from None


class _Teller:
    """Tells the batch about a job's progress, now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._next = time.monotonic() + _INTERVAL

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _INTERVAL
            self._connection.send(done)

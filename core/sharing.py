"""Work shared among threads: the executor's tiles and the comparison's blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


def share(
    items: Iterable[Item], workers: Sequence[Callable[[Item], None]], progress: Callable[[], None] | None = None
) -> None:
    """Give every item to one of the workers, each on a thread of its own, the first on this one.

    progress: called now and then, on this thread. The first error stops all and is raised here.

    Were this thread to wait for the others, two of them could share the processor that it started them on for
    milliseconds, while another is idle.

    >>> done = []
    >>> share(range(3), [done.append, done.append])
    >>> sorted(done)
    [0, 1, 2]
    """
    sharing = _Sharing(items)
    threads = [threading.Thread(target=sharing.guarded, args=(worker,)) for worker in workers[1:]]
    try:
        for thread in threads:
            thread.start()
        sharing.work(workers[0], progress)
        running = len(threads)
        while running:
            running -= sharing.finished.acquire(timeout=0.1)
            if progress:
                progress()
    finally:
        sharing.stopped = True
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if sharing.error:
        raise sharing.error


class _Sharing(Generic[Item]):
    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()
        self.finished = threading.Semaphore(0)
        self.stopped = False
        self.error: BaseException | None = None

    def work(self, worker: Callable[[Item], None], progress: Callable[[], None] | None = None) -> None:
        """Items until none is left."""
        while True:
            with self._lock:
                if self.stopped:
                    return
                try:
                    item = next(self._items)
                except StopIteration:
                    return
            worker(item)
            if progress:
                progress()

    def guarded(self, worker: Callable[[Item], None]) -> None:
        """The same on another thread, where an error is kept for the first."""
        try:
            self.work(worker)
        except BaseException as error:
            with self._lock:
                self.error = self.error or error
                self.stopped = True
        finally:
            self.finished.release()

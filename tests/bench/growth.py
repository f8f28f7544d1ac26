"""How the time grows: with the kernel, with N*C, with threads, and down to a plain fill."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.bench.cases import DTYPES, MEMORY_CASES, Case
from tests.bench.measure import Check, Line, Task, alternate
from tests.bench.options import Options


def lines(options: Options) -> Iterator[Line]:
    """Kernel 63 against 3, global pools against a fill, N*C, and two threads against one."""
    for measure in (_kernel, _global_pool, _planes, _threads):
        yield from measure(options)


def _task(case: Case, dtype: str, threads: int) -> Task:
    return case.poolgrad(case.grad_output(dtype), case.grad_input(dtype), dtype, threads)


def _kernel(options: Options) -> Iterator[Line]:
    shape = (8, 64, 128, 128)
    small, large = Case(shape, 3, padding=1), Case(shape, 63, padding=31)
    for dtype in DTYPES:
        line = Line("growth", f"avg2d (8,64,128,128) s1, k63 p31 against k3 p1 {dtype}")
        if not options.selects(line.name):
            continue
        tasks = {"k3": _task(small, dtype, options.threads), "k63": _task(large, dtype, options.threads)}
        line.times = alternate(tasks, options.rounds)
        line.checks = [Check("k63/k3", line.ratio("k63", "k3"), at_most=2.5)]
        yield line


def _global_pool(options: Options) -> Iterator[Line]:
    shape = (32, 256, 56, 56)
    for case in (Case(shape, grid=(1, 1)), Case(shape, 56, 56)):
        for dtype in DTYPES:
            line = Line("growth", f"global pool against a fill: {case.name} {dtype}")
            if not options.selects(line.name):
                continue
            tasks: dict[str, Task] = {
                "poolgrad": _task(case, dtype, options.threads),
                "fill": partial(case.grad_input(dtype).fill, 0.5),
            }
            line.times = alternate(tasks, options.rounds)
            line.checks = [Check("poolgrad/fill", line.ratio("poolgrad", "fill"), at_most=2)]
            yield line


def _planes(options: Options) -> Iterator[Line]:
    for dtype in DTYPES:
        line = Line("growth", f"time for each of N*C planes, (N,64,112,112) k3 s2 p1 {dtype}")
        if not options.selects(line.name):
            continue
        cases = {batch: Case((batch, 64, 112, 112), 3, 2, 1) for batch in (4, 8, 16, 32, 64)}
        tasks = {f"N={batch}": _task(case, dtype, options.threads) for batch, case in cases.items()}
        line.times = alternate(tasks, options.rounds)
        each = [line.times[f"N={batch}"].median / batch for batch in cases]
        line.checks = [Check("most/least time a plane", max(each) / min(each), at_most=1.5)]
        yield line


def _threads(options: Options) -> Iterator[Line]:
    for case in MEMORY_CASES:
        for dtype in DTYPES:
            line = Line("growth", f"two threads against one: {case.name} {dtype}")
            touched = case.grad_output(dtype).nbytes if options.selects(line.name) else 0
            size = max(touched, case.elements() * (4 if dtype == "float32" else 2))
            if size < 100e6 or not options.selects(line.name):
                continue
            if options.threads < 2:
                line.notes.append("only one CPU may be used")
            else:
                tasks = {f"{threads} threads": _task(case, dtype, threads) for threads in (1, 2)}
                line.times = alternate(tasks, options.rounds)
                line.checks = [Check("one/two threads", line.ratio("1 threads", "2 threads"), at_least=1.5)]
            yield line

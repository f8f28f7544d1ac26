"""One job of the two operators: open the files, plan, run, put the result in place or compare it, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from poolgrad.core import TensorSpec
from poolgrad.core.executor import Executor
from poolgrad.core.tiles import TileSink

from . import report
from .options import Job
from .tensor_files import OpenTensor, OutputTensor, create_tensor, open_tensor

if TYPE_CHECKING:
    from poolgrad.core.comparison import Comparison, ComparisonSink

Plan = Callable[[TensorSpec, TensorSpec], Executor]


def run_job(job: Job, plan: Plan) -> None:
    """Compute `job` with the executor that `plan` makes of gradOutput's and self's spec."""
    if job.expect is None:
        outcome = _compute(job, plan)
        if not job.quiet:
            report.print_outcome(outcome, as_json=job.as_json)
    else:
        with open_tensor(job.expect, "grad_input", job.bf16_bits) as actual:
            _compare(job, plan, actual)


def _compute(job: Job, plan: Plan, expectation: _Expectation | None = None) -> report.Outcome:
    start = time.perf_counter()
    with (
        open_tensor(job.grad_output, "grad_output", job.bf16_bits) as grad_output,
        open_tensor(job.self_tensor, "self", job.bf16_bits) as self,
    ):
        executor = plan(grad_output.spec, self.spec)
        planned = time.perf_counter()
        if expectation is not None:
            expectation.start(executor)
        checked = time.perf_counter()
        inputs = [grad_output, self] + ([expectation.actual] if expectation else [])
        with _output(job, executor.grad_input, inputs) as grad_input:
            created = time.perf_counter()
            sink: TileSink | None = grad_input if expectation is None else expectation.sink(grad_input)
            assert sink is not None, "there is a file to write or one to compare with"
            with report.progress(executor.grad_input.nbytes, _shows_progress(job)) as progress:
                stats = executor.run(grad_output.source(), sink, progress=progress)
            computed = time.perf_counter()
            _complete(grad_input, inputs)
            end = time.perf_counter()
    # Claiming the file's space and putting it in place are part of writing it; comparing is not.
    compared = expectation.busy if expectation else 0.0
    timing = report.Timing(
        plan=planned - start,
        read=stats.read,
        compute=stats.compute,
        write=stats.write - compared + (created - checked) + (end - computed),
        total=end - start,
    )
    return report.Outcome(
        executor,
        grad_output=report.Tensor(grad_output.path, grad_output.name, executor.grad_output),
        self=report.Tensor(self.path, self.name, executor.grad_input),
        grad_input=report.Tensor(
            grad_input.path if grad_input else None, grad_input.name if grad_input else None, executor.grad_input
        ),
        timing=timing,
    )


@contextmanager
def _output(job: Job, spec: TensorSpec, inputs: list[OpenTensor]) -> Iterator[OutputTensor | None]:
    """The file to write, if one is asked for."""
    if job.output is None:
        yield None
        return
    with create_tensor(job.output, spec, inputs) as output:
        yield output


def _complete(output: OutputTensor | None, inputs: list[OpenTensor]) -> None:
    """Put the file in place; without one, only see that no input has changed, which else is part of it."""
    if output is not None:
        output.commit()
        return
    for tensor in inputs:
        tensor.check_unchanged()


class _Expectation:
    """What a job's result is compared with."""

    def __init__(self, job: Job, actual: OpenTensor) -> None:
        self._job = job
        self._sink: ComparisonSink | None = None
        self.actual = actual
        self.comparison: Comparison

    def start(self, executor: Executor) -> None:
        """Check that the two can be compared, before anything is computed."""
        from .compare import start_comparison

        windows = executor.task.rows, executor.task.columns
        spec, computed_in = executor.grad_input, executor.compute_dtype
        self.comparison = start_comparison(self._job.judging, self.actual.spec, spec, computed_in, windows)

    def sink(self, inner: TileSink | None) -> ComparisonSink:
        """Compares tiles, and passes them on."""
        from poolgrad.core.comparison import ComparisonSink

        self._sink = ComparisonSink(self.comparison, self.actual.source(), inner)
        return self._sink

    @property
    def busy(self) -> float:
        """Seconds spent comparing, over all threads."""
        return self._sink.busy if self._sink else 0.0


def _compare(job: Job, plan: Plan, actual: OpenTensor) -> None:
    from . import comparison_report
    from .compare import draw_plot, finish

    expectation = _Expectation(job, actual)
    outcome = _compute(job, plan, expectation)
    comparison = expectation.comparison
    made = report.Tensor(actual.path, actual.name, actual.spec)
    draw_plot(job.judging, comparison)
    if not job.quiet:
        result = comparison_report.Result(comparison, made, outcome.grad_input, expectation.busy, outcome)
        comparison_report.show(result, job.as_json)
    finish(job.judging, comparison)


def _shows_progress(job: Job) -> bool:
    return not (job.quiet or job.as_json) and report.is_terminal_stderr()

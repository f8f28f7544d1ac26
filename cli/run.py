"""One job of the two operators: open the files, plan, run, put the result in place or compare it, report."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from poolgrad.core import TensorSpec, plan_adaptive_avg_pool2d_backward, plan_avg_pool2d_backward
from poolgrad.core.executor import Executor
from poolgrad.core.tiles import TileSink

from . import report
from .options import Common
from .tensor_files import OpenTensor, OutputTensor, Role, check_target, create_tensor, open_tensor

if TYPE_CHECKING:
    from poolgrad.core.comparison import Comparison, ComparisonSink

    from .comparison_report import Result

Plan = Callable[[TensorSpec, TensorSpec], Executor]

Watch = Callable[[int], AbstractContextManager[Callable[[int], None] | None]]
"""From the bytes of gradInput to what is to be told how many of them are done."""

_PLANS: dict[str, Callable[..., Executor]] = {
    "avg2d": plan_avg_pool2d_backward,
    "adaptive2d": plan_adaptive_avg_pool2d_backward,
}


class Resources(NamedTuple):
    """What a job may use. workspace: gives a buffer of at least so many bytes; without, each run allocates one."""

    watch: Watch
    workspace: Callable[[int], Any] | None = None


def run_command(operator: str, common: Common, parameters: Mapping[str, Any]) -> None:
    """Run one job and report it as its command is to."""

    def watch(total: int) -> AbstractContextManager[Callable[[int], None] | None]:
        shown = not (common.quiet or common.as_json) and report.is_terminal_stderr()
        return report.progress(total, shown)

    outcome, result = compute(operator, common, parameters, Resources(watch))
    if result is None:
        if not common.quiet:
            report.print_outcome(outcome, as_json=common.as_json)
        return
    from . import comparison_report
    from .compare import draw_plot, finish

    draw_plot(common.judging, result.comparison)
    if not common.quiet:
        comparison_report.show(result, common.as_json)
    finish(common.judging, result.comparison)


def compute(
    operator: str, common: Common, parameters: Mapping[str, Any], resources: Resources
) -> tuple[report.Outcome, Result | None]:
    """Compute gradInput, and compare it if there is something to compare with."""
    plan = _plan(operator, common, parameters)
    if common.expect is None:
        return _compute(common, plan, resources), None
    from .comparison_report import Result

    with open_tensor(common.expect, "grad_input", common.bf16_bits, common.bf16_widened) as actual:
        expectation = _Expectation(common, actual)
        outcome = _compute(common, plan, resources, expectation)
    made = report.Tensor(actual.path, actual.name, actual.spec)
    return outcome, Result(expectation.comparison, made, outcome.grad_input, expectation.busy, outcome)


def check(operator: str, common: Common, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a job from the headers of its files, as JSON; raises what `compute` would before it runs."""
    with ExitStack() as files:

        def opened(path: str, role: Role) -> OpenTensor:
            return files.enter_context(open_tensor(path, role, common.bf16_bits, common.bf16_widened))

        grad_output, self = opened(common.grad_output, "grad_output"), opened(common.self_tensor, "self")
        executor = _plan(operator, common, parameters)(grad_output.spec, self.spec)
        inputs = [grad_output, self]
        if common.expect is not None:
            inputs.append(opened(common.expect, "grad_input"))
            _Expectation(common, inputs[-1]).start(executor)
        path, name = None, None
        if common.output is not None:
            path, name = check_target(common.output, executor.grad_input, inputs)
    return report.plan_record(
        executor,
        report.Tensor(grad_output.path, grad_output.name, executor.grad_output),
        report.Tensor(self.path, self.name, executor.grad_input),
        report.Tensor(path, name, executor.grad_input),
    )


def _plan(operator: str, common: Common, parameters: Mapping[str, Any]) -> Plan:
    given = {name: value for name, value in parameters.items() if value is not None}
    return functools.partial(
        _PLANS[operator],
        **given,
        product=common.product,
        accumulate=common.accumulate,
        threads=common.threads,
        workspace_limit=common.workspace_limit,
        staging=True,
    )


def _compute(
    common: Common, plan: Plan, resources: Resources, expectation: _Expectation | None = None
) -> report.Outcome:
    start = time.perf_counter()
    with (
        open_tensor(common.grad_output, "grad_output", common.bf16_bits, common.bf16_widened) as grad_output,
        open_tensor(common.self_tensor, "self", common.bf16_bits, common.bf16_widened) as self,
    ):
        executor = plan(grad_output.spec, self.spec)
        planned = time.perf_counter()
        if expectation is not None:
            expectation.start(executor)
        checked = time.perf_counter()
        inputs = [grad_output, self] + ([expectation.actual] if expectation else [])
        with _output(common, executor.grad_input, inputs) as grad_input:
            created = time.perf_counter()
            sink: TileSink | None = grad_input if expectation is None else expectation.sink(grad_input)
            assert sink is not None, "there is a file to write or one to compare with"
            workspace = resources.workspace and resources.workspace(executor.workspace_size)
            with resources.watch(executor.grad_input.nbytes) as progress:
                stats = executor.run(grad_output.source(), sink, workspace, progress)
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
def _output(common: Common, spec: TensorSpec, inputs: list[OpenTensor]) -> Iterator[OutputTensor | None]:
    """The file to write, if one is asked for."""
    if common.output is None:
        yield None
        return
    with create_tensor(common.output, spec, inputs) as output:
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

    def __init__(self, common: Common, actual: OpenTensor) -> None:
        self._common = common
        self._sink: ComparisonSink | None = None
        self.actual = actual
        self.comparison: Comparison

    def start(self, executor: Executor) -> None:
        """Check that the two can be compared, before anything is computed."""
        from .compare import start_comparison

        windows = executor.task.rows, executor.task.columns
        spec, computed_in = executor.grad_input, executor.compute_dtype
        self.comparison = start_comparison(self._common.judging, self.actual.spec, spec, computed_in, windows)

    def sink(self, inner: TileSink | None) -> ComparisonSink:
        """Compares tiles, and passes them on."""
        from poolgrad.core.comparison import ComparisonSink

        self._sink = ComparisonSink(self.comparison, self.actual.source(), inner)
        return self._sink

    @property
    def busy(self) -> float:
        """Seconds spent comparing, over all threads."""
        return self._sink.busy if self._sink else 0.0

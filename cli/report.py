"""What the user sees: the rich table, JSON, the progress bar and errors. Imports rich only to draw."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from .file_errors import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from poolgrad.core import TensorSpec
    from poolgrad.core.executor import Executor

SCHEMA = 1
WIDEST = 100_000
"""Characters of the widest table in a pipe; a path of PATH_MAX bytes fits, every one of them escaped."""
BAR_AFTER_SECONDS = 1.0
BAR_INTERVAL_SECONDS = 0.1


class Failure(NamedTuple):
    """An error as the user gets it: exit code, name and number for scripts, a line for people."""

    exit_code: int
    name: str
    message: str
    code: int | None = None


class Timing(NamedTuple):
    """Seconds: `read`, `compute` and `write` are busy seconds over all threads, `total` is wall time."""

    plan: float
    read: float
    compute: float
    write: float
    total: float


class Tensor(NamedTuple):
    """A tensor as the user named it; `name` is its name inside a safetensors file, `path` None if not in a file."""

    path: str | None
    name: str | None
    spec: TensorSpec


class Outcome(NamedTuple):
    """A finished job."""

    executor: Executor
    grad_output: Tensor
    self: Tensor
    grad_input: Tensor
    timing: Timing

    @property
    def throughput_gb_s(self) -> float:
        """gradOutput's and gradInput's bytes over the wall time, in 1e9 bytes a second."""
        moved = self.grad_output.spec.nbytes + self.grad_input.spec.nbytes
        return moved / 1e9 / max(self.timing.total, 1e-9)


# ---- A finished job


def print_outcome(outcome: Outcome, as_json: bool) -> None:
    """Report a finished job on stdout."""
    if as_json:
        print_json(outcome_record(outcome))
    else:
        print_tables([outcome_table(outcome)])


def outcome_record(outcome: Outcome) -> dict[str, Any]:
    """The JSON of a finished job, but for schema and status."""
    return {
        **plan_record(outcome.executor, outcome.grad_output, outcome.self, outcome.grad_input),
        "timing_s": {name: round(seconds, 9) for name, seconds in outcome.timing._asdict().items()},
        "throughput_gb_s": outcome.throughput_gb_s,
    }


def plan_record(executor: Executor, grad_output: Tensor, self: Tensor, grad_input: Tensor) -> dict[str, Any]:
    """The JSON of what is known of a job before it runs."""
    cube_math_type = executor.cube_math_type
    return {
        "op": executor.operator,
        "aclnn": executor.aclnn,
        "product": executor.product.value,
        "cube_math_type": None if cube_math_type is None else int(cube_math_type),
        "compute_dtype": executor.compute_dtype,
        "grad_output": tensor_record(grad_output),
        "self": tensor_record(self),
        "grad_input": tensor_record(grad_input),
        "workspace_bytes": executor.workspace_size,
        "threads": executor.threads,
    }


def tensor_record(tensor: Tensor) -> dict[str, Any]:
    """The JSON of a tensor."""
    return {
        "path": tensor.path,
        "name": tensor.name,
        "dtype": tensor.spec.dtype,
        "shape": list(tensor.spec.shape),
        "bytes": tensor.spec.nbytes,
    }


def outcome_table(outcome: Outcome) -> Table:
    """What was computed, of what, and what it cost."""
    return label_table(_call_rows(outcome.executor), _tensor_rows(outcome), _cost_rows(outcome))


def label_table(*sections: Iterable[tuple[str, str]]) -> Table:
    """Labels and what they mean, in sections."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, show_header=False, show_edge=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for section in sections:
        for label, text in section:
            table.add_row(plain(label), plain(text))
        table.add_section()
    return table


def _call_rows(executor: Executor) -> Iterator[tuple[str, str]]:
    yield "operator", f"{executor.operator} ({executor.aclnn})"
    yield "product", f"{executor.product.value} ({executor.product.long_name})"
    cube_math_type = executor.cube_math_type
    if cube_math_type is not None:
        yield "cubeMathType", f"{int(cube_math_type)} {cube_math_type.name}\n{_meaning(executor)}"
    yield "sums", executor.accumulate


def _tensor_rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    named = {"gradOutput": outcome.grad_output, "self": outcome.self, "gradInput": outcome.grad_input}
    for label, tensor in named.items():
        yield label, tensor_text(tensor)


def tensor_text(tensor: Tensor) -> str:
    """Where a tensor is, and what."""
    where = "computed, not stored" if tensor.path is None else printable(tensor.path)
    if tensor.name is not None:
        where = f"{where}:{printable(tensor.name)}"
    return f"{where}\n{tensor.spec}, {tensor.spec.nbytes:,} bytes"


def _cost_rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    workspace = outcome.executor.workspace_size
    timing = outcome.timing._asdict()
    wall = timing.pop("total")
    yield "workspace", f"{workspace:,} bytes ({_binary_size(workspace)})"
    yield "threads", str(outcome.executor.threads)
    yield "busy time", ", ".join(f"{name} {seconds_text(spent)}" for name, spent in timing.items())
    yield "wall time", f"{seconds_text(wall)}, {outcome.throughput_gb_s:.3g} GB/s"


def _meaning(executor: Executor) -> str:
    dtype = executor.grad_output.dtype
    return {
        "AS_IS": f"{dtype} as it is",
        "HF32": "HF32, gradOutput rounded to HFLOAT32",
        "FP16": "FP16, gradOutput and gradInput rounded to float16",
    }[executor.precision.name]


def seconds_text(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _binary_size(size: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = min(len(units) - 1, max(0, int(size).bit_length() - 1) // 10)
    return f"{size / 1024**power:.4g} {units[power]}"


# ---- Progress


def is_terminal_stderr() -> bool:
    """Whether a person is looking at stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def progress(total: int, shown: bool, label: Callable[[], str] = str) -> Iterator[Callable[[int], None] | None]:
    """What to call with the bytes done so far: a bar on stderr once the work has taken over a second.

    label: what stands before the bar, asked for each time that it is drawn.
    """
    if not shown:
        yield None
        return
    bar = _Bar(total, label)
    try:
        yield bar.update
    finally:
        bar.close()


class _Bar:
    """A progress bar that imports rich and appears only when the work turns out to be long."""

    def __init__(self, total: int, label: Callable[[], str] = str) -> None:
        self._total = total
        self._label = label
        self._next = time.monotonic() + BAR_AFTER_SECONDS
        self._draw: Callable[[int], None] | None = None
        self._stop: Callable[[], None] | None = None

    def update(self, done: int) -> None:
        if time.monotonic() < self._next:
            return
        if self._draw is None:
            self._open()
        assert self._draw is not None
        self._draw(done)
        self._next = time.monotonic() + BAR_INTERVAL_SECONDS

    def _open(self) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns: list[ProgressColumn] = [BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
        if self._label():
            # 80 columns have no room for everything.
            columns = [TextColumn("{task.description}", markup=False), BarColumn(12), columns[1], columns[3]]
        bar = Progress(*columns, console=_console(sys.stderr), auto_refresh=False, transient=True)
        task = bar.add_task(self._label(), total=self._total)
        bar.start()
        self._draw = lambda done: bar.update(task, completed=done, description=self._label(), refresh=True)
        self._stop = bar.stop

    def close(self) -> None:
        if self._stop is not None:
            self._stop()


# ---- Output


def plain(text: str) -> RenderableType:
    """Text that rich draws as it is, whatever markup it seems to hold."""
    from rich.text import Text

    return Text(text, overflow="fold")


def print_json(record: dict[str, Any], status: str = "ok") -> None:
    """Print one line of JSON: ASCII, so that undecodable bytes of a path can be told (as lone surrogates)."""
    import json

    write_report(json.dumps({"schema": SCHEMA, "status": status, **record}, separators=(",", ":")) + "\n")


class _Page(io.StringIO):
    """Text drawn as for a stream: rich itself ends the process when it writes and meets a broken pipe."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return self._stream.isatty()


def print_tables(tables: Sequence[RenderableType]) -> None:
    """Draw tables on stdout."""
    if sys.stdout is not None:
        write_report(_drawn(tables, sys.stdout))


def print_tables_to_stderr(tables: Sequence[RenderableType]) -> None:
    """Draw tables on stderr, if there is one."""
    if sys.stderr is not None:
        print_to_stderr(_drawn(tables, sys.stderr))


def _drawn(tables: Sequence[RenderableType], stream: TextIO) -> str:
    """Tables as wide as the terminal, or as they need where there is none."""
    page = _Page(stream)
    console = _console(page)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        # In a pipe nobody sees a width: a long path in one piece can be searched for.
        boundless = console.options.update(width=WIDEST)
        console.width = max(80, *(console.measure(table, options=boundless).maximum for table in tables))
    console.print(*tables, sep="\n")
    return "\n".join(line.rstrip() for line in page.getvalue().split("\n"))


def _console(stream: Any) -> Console:
    from rich.console import Console

    # rich takes NO_COLOR to forbid colours alone; no escape sequences at all is the safer reading.
    return Console(file=stream, highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")


def write_stdout(text: str) -> None:
    """Write to stdout now, so that what goes wrong with it is met inside the error boundary."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        raise OSError(error.errno, error.strerror, "standard output") from error


def write_report(text: str) -> None:
    """Write what a run has found out; where nobody is there to read it, the exit code still tells."""
    try:
        write_stdout(text)
    except BrokenPipeError:
        abandon_stdout()


def flush_stdout() -> None:
    """Flush what others wrote to stdout."""
    write_stdout("")


def abandon_stdout() -> None:
    """When stdout is broken: let nothing more be written, not even by the interpreter at its end."""
    with suppress(OSError, ValueError, AttributeError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def harden_streams() -> None:
    """Let text that the terminal's encoding lacks be escaped, where it would be an exception."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


# ---- Errors


def print_failure(failure: Failure, title: str, as_json: bool) -> None:
    """Report an error: one line on stderr for people, and with --json one on stdout for scripts."""
    status = "" if failure.code is None else f" ({failure.name} {failure.code})"
    print_to_stderr(printable(f"{title}: {failure.message}{status}") + "\n")
    try:
        if as_json:
            print_json({"code": failure.code, "name": failure.name, "message": failure.message}, status="error")
        else:
            flush_stdout()
    except OSError:
        abandon_stdout()  # It may be stdout that failed.


def print_to_stderr(text: str) -> None:
    """Write to stderr, if there is one."""
    with suppress(OSError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()

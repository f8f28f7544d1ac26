"""What `poolgrad msprobe` shows: one row a call, what failed and what could not be checked, the count."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import report
from .file_errors import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .dump_checks import Record

VERDICTS = {"ok": "pass", "failed": "FAIL", "unchecked": "not checked"}


def print_record(record: Record) -> None:
    """One line of JSON. The schema and the status come first, as everywhere."""
    status = record["status"]
    report.print_json({key: value for key, value in record.items() if key not in ("schema", "status")}, status)


def print_tables(records: Sequence[Record]) -> None:
    """Every call in a row, and how many there are."""
    if records:
        report.print_tables([_table(records)])
        report.write_report("\n")
    report.write_report(f"{count_text(records)}\n")


def count_text(records: Iterable[Record]) -> str:
    """How many calls there are, and of each verdict."""
    counts = Counter(record["status"] for record in records)
    total = sum(counts.values())
    if not total:
        return "no backward call of average pooling"
    calls = "1 call" if total == 1 else f"{total} calls"
    return f"{calls}: {counts['ok']} pass, {counts['failed']} fail, {counts['unchecked']} not checked"


def _table(records: Sequence[Record]) -> RenderableType:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for name in ("verdict", "MERE", "MARE", "rank"):
        table.add_column(name, justify="right" if name.isupper() else "left", no_wrap=True)
    # The last column takes what is left of a narrow terminal.
    table.add_column("call", overflow="fold")
    for record in records:
        comparison = record.get("comparison") or {"mere": "", "mare": ""}
        figures = _figure(comparison["mere"]), _figure(comparison["mare"])
        cells = VERDICTS[record["status"]], *figures, printable(record["rank"]), "\n".join(_call_lines(record))
        table.add_row(*map(report.plain, cells))
    return table


def _call_lines(record: Record) -> Iterator[str]:
    """Its name, its tensors and parameters, and what there is to say of it."""
    yield printable(record["call"])
    if tensors := record.get("tensors"):
        shapes = [_shape(tensors[role]["shape"]) for role in ("self", "grad_output")]
        parameters = parameter_text(record["parameters"])
        yield f"{tensors['self']['dtype']} {shapes[0]}, gradOutput {shapes[1]}{parameters and ', '}{parameters}"
    if text := record.get("reason") or record.get("diagnosis", {}).get("sentence"):
        yield printable(text)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _figure(value: Any) -> str:
    """A number for people; those that JSON lacks are text already."""
    return f"{value:.3g}" if isinstance(value, int | float) else str(value)


def parameter_text(parameters: dict[str, Any]) -> str:
    """avg2d's arguments as its flags, those that are as by default left out."""
    if not parameters:
        return ""
    kernel, stride = parameters["kernel_size"], parameters["stride"]
    words = [f"-k {_pair(kernel)}"]
    words += [f"-s {_pair(stride)}"] * (_pair(stride) != _pair(kernel))
    words += [f"-p {_pair(parameters['padding'])}"] * any(parameters["padding"])
    words += ["--ceil-mode"] * parameters["ceil_mode"]
    words += ["--no-count-include-pad"] * (not parameters["count_include_pad"])
    words += [f"--divisor-override {parameters['divisor_override']}"] * bool(parameters["divisor_override"])
    return " ".join(words)


def _pair(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else ",".join(map(str, values))


def manifest_line(job: dict[str, Any]) -> str:
    """A job as a line of a manifest."""
    return json.dumps(job) + "\n"

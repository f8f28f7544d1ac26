"""`poolgrad msprobe`: the calls of a dump, each checked here or on a cluster, or written to a manifest; report."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from . import report
from .file_errors import printable
from .options import (
    cube_math_type_option,
    json_option,
    product_option,
    scheduler_option,
    threads_option,
    threshold_options,
)

if TYPE_CHECKING:
    from .dump_checks import Check, Record, Skipped

FAILED = 1
"""Exit code when a call fails, or none could be checked."""


@click.command("msprobe")
@click.argument("directory", metavar="STEP_DIR")
@threshold_options
@product_option
@cube_math_type_option
@click.option("--diagnose", is_flag=True, help="Name the cause of each call that fails.")
@click.option("--manifest", metavar="FILE", help="Write the jobs as a manifest for 'poolgrad batch' instead.")
@scheduler_option
@threads_option
@json_option
def command(
    directory: str,
    diagnose: bool,
    cube_math_type: int,
    manifest: str | None,
    scheduler: str | None,
    threads: int | None,
    as_json: bool,
    **keys: Any,
) -> None:
    """Check every backward call of average pooling in an msprobe dump.

    STEP_DIR holds rankN/dump.json and rankN/dump_tensor_data, as msprobe writes them with task tensor; the folder
    of all steps, or that of one rank, will do as well. For each call the golden gradInput is computed and compared
    with the dumped one. A dump tells neither the product nor cubeMathType: those given are taken for all calls.

    Exit codes: 0 all calls that could be checked pass; 1 one fails, or none could be checked; 2 and 3 as usual.

    \b
    Example
        poolgrad msprobe dump/step0 --diagnose
    """
    from .dump_checks import Settings, checks_in
    from .dump_folders import folders_in

    _check_flags(keys, {"scheduler": scheduler, "diagnose": diagnose, "threads": threads, "manifest": manifest})
    settings = Settings({key: value for key, value in keys.items() if value is not None}, cube_math_type, diagnose)
    found = list(checks_in(folders_in(directory), settings))
    if manifest is not None:
        _write_manifest(manifest, found)
        return
    records = _run(found, scheduler, threads, as_json)
    if not as_json:
        from . import dump_report

        dump_report.print_tables(records)
    verdicts = {record["status"] for record in records}
    if "ok" not in verdicts or "failed" in verdicts:
        raise click.exceptions.Exit(FAILED)


def _check_flags(keys: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse flags that do not go together, before anything is read."""
    from poolgrad.core.standards import ROWS, ComparisonError, find_standard

    context = click.get_current_context()
    try:
        find_standard(keys["standard"], keys["precision_row"] or ROWS[0], keys["rtol"], keys["atol"])
    except ComparisonError as error:
        raise click.UsageError(str(error), context) from error
    for flag in ("scheduler", "diagnose", "threads"):
        if given["manifest"] is not None and given[flag]:
            raise click.UsageError(f"--manifest runs nothing, so that --{flag} has no meaning with it", context)
    if given["scheduler"] is not None and given["threads"] is not None:
        raise click.UsageError("--threads is of this machine; on a cluster each call has one thread", context)


def _run(found: Sequence[Check | Skipped], scheduler: str | None, threads: int | None, as_json: bool) -> list[Record]:
    """The results in the order of the dump; as JSON, each is printed as soon as it is there."""
    from . import dump_report
    from .dump_checks import Check, skipped_record

    records: list[Record | None] = [None] * len(found)
    places = [place for place, one in enumerate(found) if isinstance(one, Check)]
    for place, one in enumerate(found):
        if not isinstance(one, Check):
            records[place] = skipped_record(one)
            if as_json:
                dump_report.print_record(skipped_record(one))
    checks = [one for one in found if isinstance(one, Check)]
    shown = not as_json and report.is_terminal_stderr()
    sizes, done = [_size(check) for check in checks], 0
    with report.progress(sum(sizes), shown) as progress, closing(_results(checks, scheduler, threads)) as results:
        for number, record in results:
            records[places[number]] = record
            if as_json:
                dump_report.print_record(record)
            done += sizes[number]
            if progress:
                progress(done)
    complete = [record for record in records if record is not None]
    if as_json:
        report.print_to_stderr(f"{dump_report.count_text(complete)}\n")
    return complete


def _results(
    checks: Sequence[Check], scheduler: str | None, threads: int | None
) -> Generator[tuple[int, Record], None, None]:
    from poolgrad.core.operators import available_cpus

    from .dump_checks import lost_record, run_check

    if scheduler is None:
        count = threads or available_cpus()
        yield from ((number, run_check(check, count)) for number, check in enumerate(checks))
    else:
        from .scheduler import run_on_cluster

        yield from run_on_cluster(scheduler, run_check, checks, lost_record)


def _size(check: Check) -> int:
    """Bytes of gradInput."""
    record = check.call.self
    return math.prod(record.shape) * (4 if record.dtype == "float32" else 2)


def _write_manifest(path: str, found: Sequence[Check | Skipped]) -> None:
    """Write the jobs, and tell on stderr which calls have none."""
    from . import dump_report
    from .dump_checks import Check
    from .new_file import NewFile

    text = "".join(dump_report.manifest_line(one.job) for one in found if isinstance(one, Check)).encode()
    file = NewFile(path, len(text))
    try:
        file.write(0, memoryview(text))
        file.commit()
    finally:
        file.discard()
    for one in found:
        if not isinstance(one, Check):
            report.print_to_stderr(printable(f"{one.rank}/{one.name}: not checked: {one.reason}") + "\n")
    jobs = sum(isinstance(one, Check) for one in found)
    report.print_to_stderr(f"{jobs} jobs in {printable(path)}, {len(found) - jobs} calls not checked\n")

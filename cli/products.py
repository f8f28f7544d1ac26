"""`poolgrad products`: the tables of what each product takes, from the data that the operators check with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import report
from .options import json_option

if TYPE_CHECKING:
    from rich.table import Table

    from poolgrad.core import Product
    from poolgrad.core.products import Precision, Rules

ANY_INT64 = (-(2**63), 2**63 - 1)


@click.command("products")
@json_option
def command(as_json: bool) -> None:
    """Show what each Ascend product takes, and what each cubeMathType then means."""
    if as_json:
        report.print_json(_record())
    else:
        report.print_tables([_product_table(), _meaning_table()])


def _record() -> dict[str, Any]:
    from poolgrad.core import CubeMathType
    from poolgrad.core.products import RULES

    return {
        "cube_math_types": [{"value": int(value), "name": value.name} for value in CubeMathType],
        "products": [_product_record(product, rules) for product, rules in RULES.items()],
    }


def _product_record(product: Product, rules: Rules | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "product": product.value,
        "title": product.title,
        "supported": rules is not None,
    }
    if rules is None:
        return record | {"dtypes": [], "divisor_override": None, "precision": {}}
    precision = {dtype: list(map(_precision_name, outcomes)) for dtype, outcomes in rules.precision.items()}
    return record | {
        "dtypes": list(rules.dtypes),
        "divisor_override": list(rules.divisor_override),
        "precision": precision,
    }


def _precision_name(precision: Precision | None) -> str | None:
    return None if precision is None else precision.name


def _product_table() -> Table:
    from rich.table import Table

    from poolgrad.core.products import RULES

    table = Table(title="What each product takes", title_justify="left", show_lines=True)
    for heading in ("--product", "dtype", "cubeMathType (avg2d)", "divisorOverride (avg2d)"):
        table.add_column(report.plain(heading), overflow="fold")
    for product, rules in RULES.items():
        name = report.plain(f"{product.value}\n{product.title}")
        if rules is None:
            table.add_row(name, report.plain("neither operator is supported"))
            continue
        accepted = [_accepted(outcomes) for outcomes in rules.precision.values()]
        cells = ("\n".join(rules.dtypes), "\n".join(accepted), _span(rules.divisor_override))
        table.add_row(name, *map(report.plain, cells))
    return table


def _accepted(outcomes: tuple[Precision | None, ...]) -> str:
    return ", ".join(str(value) for value, outcome in enumerate(outcomes) if outcome is not None)


def _span(bounds: tuple[int, int]) -> str:
    return "any int64" if bounds == ANY_INT64 else f"{bounds[0]} to {bounds[1]}"


def _meaning_table() -> Table:
    from rich.table import Table

    from poolgrad.core import CubeMathType

    columns = _meanings()
    table = Table(title="What cubeMathType means", title_justify="left", show_lines=True)
    table.add_column("cubeMathType", overflow="fold")
    for (dtype, _), names in columns.items():
        table.add_column(report.plain(f"{dtype} on\n" + ",\n".join(names)), overflow="fold")
    for value in CubeMathType:
        cells = [_meaning(outcomes[value]) for _, outcomes in columns]
        table.add_row(*map(report.plain, (f"{int(value)} {value.name}", *cells)))
    return table


def _meaning(outcome: Precision | None) -> str:
    return "rejected" if outcome is None else outcome.value


def _meanings() -> dict[tuple[str, tuple[Precision | None, ...]], list[str]]:
    """The products that share one meaning of all cubeMathTypes, for each dtype."""
    from poolgrad.core.products import RULES

    columns: dict[tuple[str, tuple[Precision | None, ...]], list[str]] = {}
    for product, rules in RULES.items():
        for dtype, outcomes in rules.precision.items() if rules else ():
            columns.setdefault((dtype, outcomes), []).append(product.value)
    return dict(
        sorted(columns.items(), key=lambda column: -["bfloat16", "float16", "float32"].index(column[0][0]))
    )

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
NOTE = "\n* of avg2d alone. Both operators take the same dtypes.\n"


@click.command("products")
@json_option
def command(as_json: bool) -> None:
    """Show what each Ascend product takes, and what each cubeMathType then means."""
    if as_json:
        report.print_json(_record())
    else:
        report.print_tables([_product_table(), report.plain(NOTE), _meaning_table()])


def _record() -> dict[str, Any]:
    from poolgrad.core import CubeMathType
    from poolgrad.core.products import RULES

    return {
        "cube_math_types": [{"value": int(value), "name": value.name} for value in CubeMathType],
        "products": [_product_record(product, rules) for product, rules in RULES.items()],
    }


def _product_record(product: Product, rules: Rules | None) -> dict[str, Any]:
    record: dict[str, Any] = {"product": product.value, "title": product.long_name, "supported": rules is not None}
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


def _table(title: str, **options: Any) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    style: dict[str, Any] = {"title_justify": "left", "title_style": "bold"}
    # Without vertical lines and edges both tables just fit into 80 columns.
    return Table(title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, **style, **options)


def _product_table() -> Table:
    from poolgrad.core.products import RULES

    table = _table("What each product takes", leading=1)
    for heading in ("--product", "dtype", "cubeMathType*", "divisorOverride*"):
        table.add_column(heading, overflow="fold")
    for product, rules in RULES.items():
        name = report.plain(f"{product.value}\n{product.long_name}")
        table.add_row(name, *map(report.plain, _product_cells(rules)))
    return table


def _product_cells(rules: Rules | None) -> tuple[str, str, str]:
    if rules is None:
        return "not\nsupported", "", ""
    accepted = "\n".join(map(_accepted, rules.precision.values()))
    return "\n".join(rules.dtypes), accepted, _span(rules.divisor_override)


def _accepted(outcomes: tuple[Precision | None, ...]) -> str:
    return ", ".join(str(value) for value, outcome in enumerate(outcomes) if outcome is not None)


def _span(bounds: tuple[int, int]) -> str:
    return "any int64" if bounds == ANY_INT64 else f"{bounds[0]} to {bounds[1]}"


def _meaning_table() -> Table:
    from poolgrad.core import CubeMathType

    columns = _meanings()
    dtypes = [dtype for dtype, _ in columns]
    table = _table("What cubeMathType means")
    table.add_column("cubeMathType", overflow="fold")
    for (dtype, _), products in columns.items():
        # Only where products differ must the heading tell them apart.
        heading = [f"{dtype} on", *products] if dtypes.count(dtype) > 1 else [dtype]
        table.add_column(report.plain("\n".join(heading)), overflow="fold")
    for value in CubeMathType:
        cells = [_meaning(outcomes[value]) for _, outcomes in columns]
        table.add_row(*map(report.plain, (f"{int(value)} {value.name}", *cells)))
    return table


def _meaning(outcome: Precision | None) -> str:
    return "rejected" if outcome is None else outcome.value


def _meanings() -> dict[tuple[str, tuple[Precision | None, ...]], list[str]]:
    """The products that share the meaning of every cubeMathType, for each dtype."""
    from poolgrad.core.products import RULES

    columns: dict[tuple[str, tuple[Precision | None, ...]], list[str]] = {}
    dtypes = list(dict.fromkeys(dtype for rules in RULES.values() if rules for dtype in rules.dtypes))
    for dtype in dtypes:
        for product, rules in RULES.items():
            if rules is not None and dtype in rules.precision:
                columns.setdefault((dtype, rules.precision[dtype]), []).append(product.value)
    return columns

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


def _table(title: str, **options: Any) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    style: dict[str, Any] = {"title_justify": "left", "title_style": "bold"}
    return Table(title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, **style, **options)

"""What the commands share: one line for a mistake, and tables that are as wide as they must be.

Knows nothing of what any command does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headgate.errors import HeadgateError

WIDE = 160
"""Columns where there is no terminal to tell its width."""


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turn the user's mistakes into one line and exit code 1."""
    try:
        yield
    except HeadgateError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]headgate:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from error


def console() -> Console:
    """For tables: the terminal's width, or wide enough."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(width=WIDE, highlight=False)


def print_json(data: Any) -> None:
    """For programs."""
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """First column to the left, numbers to the right."""
    table = Table(title=escape(title), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console().print(table)

"""The command line. A file for each group of commands; all that computes is below.

Only arguments, tables and messages. A mistake of the user ends in one line that says where and what to do, and exit
code 1. Nobody imports this package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headgate import __version__
from headgate.cli.common import friendly_errors
from headgate.cli.inspect import inspect
from headgate.cli.report import report
from headgate.cli.runs import bench, evaluate, shrink
from headgate.cli.train import average, data, recipes, train, zoo
from headgate.memory import keep_memory

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Learn which channels of a network are worth computing, and do not compute the others.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headgate {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Learn which channels of a network are worth computing, and do not compute the others."""
    keep_memory()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the shrunk network and its ONNX twin.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    quick: Annotated[bool, typer.Option(help="One epoch of everything: does it run?")] = False,
) -> None:
    """Train a small network on the embedded digits, gate it to half its MACs, shrink it, and compare."""
    from headgate.demo import run

    with friendly_errors():
        run(out, seed=seed, quick=quick)


for command in (inspect, train, average, zoo, recipes, evaluate, shrink, bench, report, data):
    app.command()(command)

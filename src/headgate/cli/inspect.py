"""`headgate inspect`: every layer of a model, what it costs, and whether its channels can be gated."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from headgate.cli.common import console, friendly_errors, print_json
from headgate.errors import HeadgateError, TraceError
from headgate.gating import inspect as inspect_model
from headgate.graph.grouping import ChannelGraph, granularity_named
from headgate.graph.table import as_json, layer_rows
from headgate.models.names import load_named


def _shapes(text: str | None) -> list[tuple[int, ...] | None]:
    """What a text may mean: one input without its batch, or, if it begins with 1, with it."""
    if text is None:
        return [None]
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise HeadgateError(f"--input {text!r} is no shape: write sizes such as 3,224,224 (or 1,3,224,224)")
    sizes = tuple(int(part) for part in parts)
    alone, in_batch = (1, *sizes), sizes
    if sizes[0] != 1 or len(sizes) < 3:
        return [alone]
    return [in_batch, alone] if len(sizes) > 3 else [alone, in_batch]


def _inspected(model: str, shapes: list[tuple[int, ...] | None], options: dict[str, Any]) -> ChannelGraph:
    for place, shape in enumerate(shapes):
        named = load_named(model, shape)
        try:
            return inspect_model(named.model.eval(), named.example_input, **options)
        except TraceError:
            if place == len(shapes) - 1:
                raise
    raise AssertionError


def inspect(
    model: Annotated[
        str, typer.Argument(help="torchvision:resnet50, timm:regnetx_002, headgate:cifar_resnet56, or path.py:function")
    ],
    input: Annotated[str | None, typer.Option(help="Shape of one input: 3,224,224, or 1,16000 for sound.")] = None,
    granularity: Annotated[str, typer.Option(help="channel, layer, or channels a gate.")] = "channel",
    stream: Annotated[
        str, typer.Option(help="shared: gates tied along a stream; indexed: masks of their own.")
    ] = "shared",
    frozen: Annotated[list[str] | None, typer.Option(help="A module to leave alone; may be given again.")] = None,
    as_json_text: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show every layer: shape, MACs, share, the gates behind it, and why it has none."""
    with friendly_errors():
        options = {
            "granularity": granularity_named(granularity), "frozen": tuple(frozen or ()), "stream": stream,
        }  # fmt: skip
        graph = _inspected(model, _shapes(input), options)
    if as_json_text:
        print_json(as_json(graph, model))
    else:
        _print_table(model, graph)


def _print_table(name: str, graph: ChannelGraph) -> None:
    screen = console()
    table = Table(title=f"{escape(name)}: {graph.dense_macs:,} MACs an image", title_justify="left")
    table.add_column("layer", no_wrap=True)
    table.add_column("type", no_wrap=True)
    for column in ("output", "MACs", "share", "gates"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("mask, or why there is none", overflow="fold")
    for row in layer_rows(graph):
        shape = "×".join(map(str, row.out_shape[1:]))
        reason = f"[dim]{escape(row.reason or 'nothing to gate')}[/]"
        note = escape(", ".join(row.masks_out)) if row.masks_out else reason
        table.add_row(
            escape(row.name), row.kind, shape, f"{row.macs:,}", f"{row.share:.1%}", str(row.gates_out or "–"), note
        )
    screen.print(table)
    screen.print(
        f"{graph.gate_count:,} gates in {len(graph.masks)} masks; "
        f"{graph.gateable_fraction:.1%} of the MACs are in layers with gates; "
        f"{len(graph.branches)} branches can be removed whole."
    )

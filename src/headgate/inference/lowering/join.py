"""Layers of a program that follow each other become one call of the kernel.

Takes a program whose convolutions and gate networks are modules, and gives another one in which runs of them are
`Steps`, sharing the layers. Layers that are computed densely, and everything else, stay where they are and part the
runs. Knows the graph; nothing of memory or shapes.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from headgate.inference.kernel.prepared import Conv
from headgate.inference.kernel.tape import ConvStep, GatesStep, Step, Steps, Value
from headgate.inference.lowering.masks import GateSite

FEWEST = 2
"""Layers that are worth a call of their own."""


def joined(program: fx.GraphModule) -> fx.GraphModule:
    """The same program, with runs of layers joined; its layers are the other's."""
    graph = copy.deepcopy(program.graph)
    made = fx.GraphModule(program, graph)
    for number, run in enumerate(list(_runs(made))):
        if sum(node.op == "call_module" for node in run) >= FEWEST:
            _join(made, run, f"steps_{number}")
    made.delete_all_unused_submodules()
    graph.lint()
    made.recompile()
    return made


def _runs(program: fx.GraphModule) -> Iterator[list[fx.Node]]:
    """Nodes that stand side by side and are layers of the kernel, or pick a mask of a gate network among them."""
    run: list[fx.Node] = []
    for node in program.graph.nodes:
        if _is_joinable(program, node, run):
            run.append(node)
        else:
            yield _complete(run)
            run = []
    yield _complete(run)


def _is_joinable(program: fx.GraphModule, node: fx.Node, run: list[fx.Node]) -> bool:
    if node.target is operator.getitem:
        return node.args[0] in run and isinstance(node.args[1], int)
    if node.op != "call_module" or node.kwargs:
        return False
    layer = program.get_submodule(str(node.target))
    return not layer.dense if isinstance(layer, Conv) else isinstance(layer, GateSite) and layer.by_kernel


def _complete(run: list[fx.Node]) -> list[fx.Node]:
    """The run up to the first gate network whose masks are picked behind it."""
    for place, node in enumerate(run):
        picks = [user for user in node.users if user.target is operator.getitem]
        if any(user not in run for user in picks):
            return _complete(run[:place])  # what picks for those before it may be gone now, too
    return run


def _join(program: fx.GraphModule, run: list[fx.Node], name: str) -> None:
    """Put one module in the place of a run."""
    given = list(dict.fromkeys(each for node in run for each in node.all_input_nodes if each not in run))
    values: dict[Any, Value | None] = {None: None, **{node: number for number, node in enumerate(given)}}
    count, steps = len(given), []
    for node in run:
        if node.target is operator.getitem:
            continue
        step, count = _step(program, node, values, count)
        steps.append(step)
    asked = [node for node in run if node in values and any(user not in run for user in node.users)]
    outputs = list(dict.fromkeys(values[node] for node in asked))
    program.add_submodule(name, Steps(steps, len(given), [each for each in outputs if each is not None]))
    graph = program.graph
    with graph.inserting_after(run[-1]):
        call = graph.call_module(name, tuple(given))
    place = call
    for number, value in enumerate(outputs):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (call, number))
        for node in (each for each in asked if values[each] == value):
            node.replace_all_uses_with(place, delete_user_cb=lambda user: user not in run)
    for node in reversed(run):
        graph.erase_node(node)


def _step(program: fx.GraphModule, node: fx.Node, values: dict[Any, Value | None], count: int) -> tuple[Step, int]:
    """A layer's step, its results noted down as values from `count` on; and where to go on."""
    layer = program.get_submodule(str(node.target))
    if isinstance(layer, Conv):
        x, in_mask, out_mask, residual = (values[each] for each in node.args)
        assert x is not None
        y = residual if layer.in_place else count
        assert y is not None
        values[node] = y
        return ConvStep(layer, x, in_mask, out_mask, residual, y), count + (not layer.in_place)
    assert isinstance(layer, GateSite)
    x, arriving = (values[each] for each in (*node.args, None)[:2])
    assert x is not None
    gives = tuple(range(count, count + len(layer.sizes)))
    values |= {user: gives[int(str(user.args[1]))] for user in node.users}
    return GatesStep(layer, x, arriving, gives), count + len(gives)

"""Find the branches of a network: what is computed only to be added to something else.

Takes a `Trace`; gives, for each addition, the calls that lead to one operand and nowhere else, and the module whose
output may be masked instead of that operand. Such a branch can be closed as a whole: what is left is the other
operand. Knows nothing of channels, gates or costs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from torch._ops import OpOverload

from headgate.graph.op_rules import OP_RULES, elementwise, over_pixels, reduction
from headgate.graph.trace import Call, ModuleSpan, Trace, Value, under, written_by

aten = torch.ops.aten
ADDITIONS = (aten.add.Tensor, aten.add_.Tensor)
ZERO_STAYS_ZERO = {
    getattr(aten, name).default
    for name in (
        "relu",
        "relu_",
        "gelu",
        "gelu_",
        "silu",
        "silu_",
        "hardswish",
        "hardswish_",
        "clone",
        "tanh",
        "detach",
    )
} | {aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.permute.default, aten.view.default}


@dataclass(frozen=True, eq=False)
class Branch:
    """Calls that serve one operand of an addition only."""

    name: str
    addition: Call
    operand: Value
    other: Value
    calls: frozenset[int]
    entries: tuple[Value, ...]
    mask_at: str
    """The module whose output, times 0, makes the operand 0."""
    mask_value: Value

    def layers(self, trace: Trace) -> set[str]:
        """Names of the layers that run inside the branch and nowhere else."""
        inside = Counter(trace.calls[index].layer for index in self.calls)
        return {name for name, count in inside.items() if name is not None and trace.layer_calls[name] == count}


def find_branches(trace: Trace) -> list[Branch]:
    """All branches that hold a layer and have a module whose output can be masked, in the order of their additions."""
    producers = {value.index: call for call in trace.calls for value in call.outputs}
    users = trace.users()
    kept = {value.index for value in trace.outputs}
    spans: dict[int, list[ModuleSpan]] = {}
    for span in trace.spans:
        if span.gives_tensor and span.name and len(trace.spans_of[span.name]) == 1:
            spans.setdefault(span.outputs[0].index, []).append(span)
    branches = []
    for addition in trace.calls:
        if addition.target not in ADDITIONS or len(addition.inputs) != 2:
            continue
        first, second = addition.inputs
        if first.index == second.index or first.shape != second.shape:
            continue
        for operand, other in ((first, second), (second, first)):
            calls = _only_for(operand, addition, trace, producers, users, kept)
            if not any(trace.calls[index].layer is not None for index in calls):
                continue
            place = _mask_place(operand, calls, producers, spans)
            if place is not None:
                entries = _entries(trace, calls)
                name = place[0]
                branches.append(Branch(name, addition, operand, other, frozenset(calls), entries, place[0], place[1]))
    return branches


def _only_for(
    operand: Value,
    addition: Call,
    trace: Trace,
    producers: dict[int, Call],
    users: dict[int, list[Call]],
    kept: set[int],
) -> set[int]:
    """Calls all of whose results end in `operand` of `addition`."""
    calls: set[int] = set()
    seen: set[int] = set()
    queue: list[int] = []

    def visit(value: Value) -> None:
        call = producers.get(value.index)
        if call is not None and value.from_input and call.index not in seen:
            seen.add(call.index)
            heapq.heappush(queue, -call.index)

    visit(operand)
    while queue:
        call = trace.calls[-heapq.heappop(queue)]
        if all(_serves(value, calls, operand, addition, users, kept) for value in call.outputs):
            calls.add(call.index)
            for value in call.inputs:
                visit(value)
    return calls


def _serves(
    value: Value, calls: set[int], operand: Value, addition: Call, users: dict[int, list[Call]], kept: set[int]
) -> bool:
    if value.index in kept:
        return False
    return all(
        call.index in calls or (call is addition and value.index == operand.index)
        for call in users.get(value.index, ())
    )


def _mask_place(
    operand: Value, calls: set[int], producers: dict[int, Call], spans: dict[int, list[ModuleSpan]]
) -> tuple[str, Value] | None:
    """The nearest module output before the operand from which a zero stays a zero."""
    value = operand
    while True:
        producer = producers.get(value.index)
        if producer is None or producer.index not in calls:
            return None
        if value.index in spans:
            return spans[value.index][-1].name, value
        if producer.target not in ZERO_STAYS_ZERO:
            return None
        live = [given for given in producer.inputs if given.from_input]
        if len(live) != 1:
            return None
        value = live[0]


def _entries(trace: Trace, calls: set[int]) -> tuple[Value, ...]:
    made = {value.index for index in calls for value in trace.calls[index].outputs}
    entries: dict[int, Value] = {}
    for index in sorted(calls):
        for value in trace.calls[index].inputs:
            if value.index not in made and value.from_input:
                entries.setdefault(value.index, value)
    return tuple(entries.values())


def replacements(branch: Branch, trace: Trace, modules: dict[str, nn.Module]) -> dict[str, dict[str, object]] | None:
    """What modules become when the branch is gone: the whole block a plain module where that says it all, else every
    layer of the branch nothing, its first and last zeros. None if the branch can't be taken out."""
    if any(call.index in branch.calls for _, call in trace.overwritten):
        return None  # without it, a tensor that is read again would hold something else
    block = _whole_block(branch, trace)
    if block is not None:
        return {block[0]: {"kind": block[1]}}
    if len(branch.entries) != 1 or not _alone(branch, trace):
        return None
    container = _container(branch, trace)
    if container is not None:
        return {container: {"kind": "zeros"}}
    last = trace.spans_of[branch.mask_at][0]
    if len(last.inputs) != 1 or not _same_pixels(last.inputs[0], branch.mask_value):
        return None
    if not all(_harmless(trace.calls[index]) for index in branch.calls):
        return None
    result: dict[str, dict[str, object]] = {}
    entrance = _at_the_entrance(branch, trace)
    for name in sorted(branch.layers(trace)):
        stand_in = _without_arithmetic(modules[name])
        # PyTorch's encoder layer looks at its layers' weights to choose a fused operator
        if stand_in is None or isinstance(modules[name.rpartition(".")[0]], nn.TransformerEncoderLayer):
            return None
        if name in entrance and stand_in["kind"] == "identity":
            # what works in place inside the branch must not get hold of the stream
            stand_in = {"kind": "zeros", "channels": None}
        if not under(name, branch.mask_at):
            result[name] = stand_in
    result[branch.mask_at] = {"kind": "zeros"}
    return result


def _container(branch: Branch, trace: Trace) -> str | None:
    """The module that is the whole branch: it takes the branch's entry and gives what is masked."""
    start = min(branch.calls)
    if not _same_pixels(branch.entries[0], branch.mask_value):
        return None
    for span in trace.spans_reading(branch.entries[0]):
        gives_it = span.gives_tensor and span.outputs[0].index == branch.mask_value.index
        if span.name and span.first <= start and gives_it:
            return (
                span.name
                if len(trace.spans_of[span.name]) == 1 and not span.name.startswith(f"{branch.mask_at}.")
                else None
            )
    return None


def _same_pixels(taken: Value, given: Value) -> bool:
    """Whether zeros that replace a module could take their shape from its input: at most the channels differ."""
    if len(taken.shape) != len(given.shape):
        return False
    return sum(a != b for a, b in zip(taken.shape, given.shape, strict=True)) <= 1


def _harmless(call: Call) -> bool:
    """Whether a call still runs when the layers around it are gone: it acts on each element or pixel by itself."""
    return call.layer is not None or OP_RULES.get(call.target) in (elementwise, over_pixels, reduction)


def _at_the_entrance(branch: Branch, trace: Trace) -> set[str]:
    """Layers of the branch that read what enters it, or what operators make of that: perhaps the same memory."""
    outside = {value.index for value in branch.entries}
    layers: set[str] = set()
    for index in sorted(branch.calls):
        call = trace.calls[index]
        if any(value.index in outside for value in call.inputs):
            if call.layer is not None:
                layers.add(call.layer)
            else:
                outside.update(value.index for value in call.outputs)
    return layers


def _alone(branch: Branch, trace: Trace) -> bool:
    """Whether the module to be replaced by zeros runs only inside the branch."""
    return all(set(range(span.first, span.last)) <= branch.calls for span in trace.spans_of[branch.mask_at])


def _without_arithmetic(module: nn.Module) -> dict[str, object] | None:
    """A layer's stand-in that keeps only what it does to the number of pixels."""
    if isinstance(module, nn.MultiheadAttention):
        return None  # returns more than a tensor
    stride = getattr(module, "stride", 1)
    steps = stride if isinstance(stride, tuple) else (stride,)
    if all(step == 1 for step in steps):
        return {"kind": "identity"}
    if not isinstance(module, nn.Conv2d) or isinstance(module.padding, str):
        return None
    same = all(
        2 * pad == dilation * (size - 1)
        for pad, dilation, size in zip(module.padding, module.dilation, module.kernel_size, strict=True)
    )
    return {"kind": "stride", "stride": list(steps)} if same and len(steps) == 2 else None


def _whole_block(branch: Branch, trace: Trace) -> tuple[str, str] | None:
    """The module that is nothing but this branch, its addition to the module's own input, and perhaps a ReLU."""
    if branch.entries and any(entry.index != branch.other.index for entry in branch.entries):
        return None
    if branch.other is branch.addition.inputs[1] and branch.addition.kwargs.get("alpha", 1) != 1:
        return None  # what is left is a multiple of the module's input
    start = min(branch.calls)
    for span in trace.spans_reading(branch.other):
        around = span.first <= start and branch.addition.index < span.last
        if not span.name or not around or not span.gives_tensor or len(trace.spans_of[span.name]) != 1:
            continue
        rest = sorted(set(range(span.first, span.last)) - branch.calls)
        targets = [trace.calls[index].target for index in rest]
        if targets[0] not in ADDITIONS or trace.calls[rest[-1]].outputs[0].index != span.outputs[0].index:
            continue
        if len(targets) == 1 and not _overwritten_later(span, branch.other, trace):
            return span.name, "identity"
        if len(targets) == 2 and targets[1] in (aten.relu.default, aten.relu_.default):
            return span.name, "relu"
    return None


def _overwritten_later(block: ModuleSpan, given: Value, trace: Trace) -> bool:
    """Whether the block's result is overwritten while what it was given is still read: they must not be one tensor."""
    later = trace.calls[block.last :]
    if given not in trace.outputs and not any(given in call.inputs for call in later):
        return False
    same = {block.outputs[0].index}
    for call in later:  # blocks behind it may be gone, too: then their sums are the same tensor
        if any(value.index in same for value in written_by(call)):
            return True
        if (call.target in ADDITIONS or _is_view(call)) and any(value.index in same for value in call.inputs):
            same.update(value.index for value in call.outputs)
    return False


def _is_view(call: Call) -> bool:
    returns = call.target._schema.returns if isinstance(call.target, OpOverload) else ()
    return any(result.alias_info is not None for result in returns)

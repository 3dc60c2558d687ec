"""Questions about a node of an exported graph: whose work it is, whose memory, what shape.

Knows PyTorch's operators and ours; nothing of gates.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

import headgate.inference.kernel.op  # noqa: F401  (its operators are registered there)
from headgate.graph.relayout import dense_name

aten = torch.ops.aten
_ITSELF = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}
"""Operators whose result may be what they were given."""
FRESH = {
    torch.ops.headgate.masked_conv2d.default, torch.ops.headgate.max_pool2d.default, aten.relu.default,
    aten.conv2d.default, aten.add.Tensor,
}  # fmt: skip
"""Operators whose result is memory of its own."""


def modules_around(node: fx.Node) -> tuple[str, ...]:
    """The modules a node was recorded in, by their names in the dense network, innermost last."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(dense_name(path) for path, _ in stack.values() if path)


def is_layer_call(node: fx.Node) -> bool:
    """Whether a node is a layer's own work on its input, not a getattr or a reshape."""
    return node.op == "call_function" and any(
        name in str(node.target) for name in ("conv", "linear", "mm", "bilinear", "attention", "matmul")
    )


def is_view(node: fx.Node) -> bool:
    """Whether a node is another form of the same numbers."""
    made: Any = node.args[0] if node.target is operator.getitem else node
    return isinstance(made, fx.Node) and bool(getattr(made.target, "is_view", False))


def aliases(node: fx.Node) -> list[fx.Node]:
    """The node, and all that may share its memory."""
    found = [node]
    for each in found:
        found += [user for user in each.users if is_view(user) or user.target in _ITSELF]
    return found


def is_rectified(node: fx.Node) -> bool:
    """Whether a node's values are known not to be negative. What is noted down counts: its memory may hold something
    else by now than what the node itself made."""
    if "headgate_rectified" in node.meta:
        return bool(node.meta["headgate_rectified"])
    if node.target is aten.relu.default:
        return True
    if node.target is torch.ops.headgate.max_pool2d.default:
        return isinstance(node.args[0], fx.Node) and is_rectified(node.args[0])
    return node.target is torch.ops.headgate.masked_conv2d.default and bool(node.args[9])


def averages_over_images(node: fx.Node) -> bool:
    """Whether what follows a node, up to the next layer, normalizes by the statistics of the batch."""
    found = list(node.users)
    for each in found:
        if "batch_norm" in str(each.target) and "no_training" not in str(each.target):
            return True
        if not is_layer_call(each):
            found += [user for user in each.users if user not in found]
    return False


def pair(size: Any) -> list[int]:
    numbers = [size] if isinstance(size, int) else list(size)
    return numbers * 2 if len(numbers) == 1 else numbers


def dims(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, Tensor) else 0


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def same_shape(first: fx.Node, second: fx.Node) -> bool:
    a, b = first.meta.get("val"), second.meta.get("val")
    if isinstance(b, (tuple, list)):
        b = b[0]
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and len(a.shape) == len(b.shape)
        and all(str(x) == str(y) for x, y in zip(a.shape, b.shape, strict=True))
    )


def padding_in_numbers_(node: fx.Node) -> None:
    """Write "same" or "valid" padding of a convolution in numbers, unless its two sides differ."""
    given: list[Any] = [*node.args, *[None, [1], "valid", [1], 1][len(node.args) - 2 :]]
    x, weight, bias, stride, padding, dilation, groups = given
    sides = weight.meta["val"].shape[2:]
    steps, gaps = ([size[0]] * len(sides) if len(size) == 1 else list(size) for size in (stride, dilation))
    needed = [0 if padding == "valid" else gap * (side - 1) for gap, side in zip(gaps, sides, strict=True)]
    if not any(each % 2 for each in needed):
        node.target = aten.conv2d.default
        node.args = (x, weight, bias, steps, [each // 2 for each in needed], gaps, groups)


def conv_arguments(node: fx.Node) -> tuple[Any, Any, Any, Any, Any, Any, int]:
    given: list[Any] = [*node.args, *[None, [1, 1], [0, 0], [1, 1], 1][len(node.args) - 2 :]]
    x, weight, bias, stride, padding, dilation, groups = given
    return x, weight, bias, pair(stride), pair(padding), pair(dilation), groups

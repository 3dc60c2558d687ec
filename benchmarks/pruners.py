"""The pruning methods beside headgate: a trained CIFAR ResNet in, one within a share of its MACs out, not yet tuned.

All of them cut the inner channels of the residual blocks and leave the stream as it is: Torch-Pruning 1.6.1 cannot
prune a stream that a shortcut pads with zeros. So a result is told by one number for each block, its inner width, and
`with_inner_widths` builds that network again. Each method is used as its authors use it:

==================== ===========================================================================================
torch-pruning        Torch-Pruning's group magnitude (p=2), all blocks ranked together, in 400 small steps
torch-pruning-sparse the same after training with its group regularizer, importance scaled by each block's maximum
uniform-l1           the same share of every block, filters with the smallest L1 norm go (Li et al., 2017)
fpgm                 the same share of every block, filters nearest to the others go (He et al., 2019)
==================== ===========================================================================================

Knows nothing of training, data or files.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import headgate

STEPS = 400
STREAM_OPEN = 0.999
INNER = ".conv1"
Prune = Callable[[nn.Module, Tensor, float], nn.Module]


# ------------------------------------------------------------------------------------------------- inner widths


def inner_convs(model: nn.Module) -> dict[str, nn.Module]:
    """The first convolution of every residual block, by the block's name; its filters are the inner channels."""
    return {name.removesuffix(INNER): module for name, module in model.named_modules() if name.endswith(INNER)}


def inner_widths(model: nn.Module) -> dict[str, int]:
    return {name: int(conv.weight.shape[0]) for name, conv in inner_convs(model).items()}


def with_inner_widths(model: nn.Module, widths: Mapping[str, int]) -> nn.Module:
    """A copy of the dense network with blocks as narrow as `widths` says, their weights random."""
    narrow = copy.deepcopy(model)
    assert widths.keys() == inner_convs(narrow).keys(), "every block has its width"
    for name, width in widths.items():
        block = narrow.get_submodule(name)
        block.conv1 = _conv_like(block.conv1, block.conv1.in_channels, width)
        block.bn1 = nn.BatchNorm2d(width)
        block.conv2 = _conv_like(block.conv2, width, block.conv2.out_channels)
    return narrow


def _conv_like(conv: nn.Conv2d, in_channels: int, out_channels: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, conv.kernel_size, conv.stride, conv.padding, bias=False)


# ---------------------------------------------------------------------------------- the same share of every block


def uniform_l1(model: nn.Module, x: Tensor, target: float) -> nn.Module:
    """Keeps the filters with the largest L1 norm."""
    return _cut_alike(model, x, target, lambda filters_CK: filters_CK.abs().sum(1))


def fpgm(model: nn.Module, x: Tensor, target: float) -> nn.Module:
    """Keeps the filters that are farthest from all others: the rest are near the geometric median, and replaceable."""
    return _cut_alike(model, x, target, lambda filters_CK: torch.cdist(filters_CK, filters_CK).sum(1))


def _cut_alike(model: nn.Module, x: Tensor, target: float, score: Callable[[Tensor], Tensor]) -> nn.Module:
    """The same share of every block, as close to the target as widths allow; the best by score stay."""
    gated = headgate.gate(model, x, target=target)
    chosen = {mask: torch.full_like(p, STREAM_OPEN) for mask, p in gated.gate_probabilities().items()}
    for number, (block, conv) in enumerate(inner_convs(model).items()):
        chosen[block + INNER] = _by_rank(score(conv.weight.detach().flatten(1)), number)
    gated.set_gate_probabilities(chosen)
    return gated.project().eval().shrink()


def _by_rank(score_C: Tensor, number: int) -> Tensor:
    """Falls evenly from 1 to 0 with the rank of a channel in its block; of blocks as wide, the first is first."""
    rank_C = score_C.argsort(descending=True, stable=True).argsort()
    return 1 - (rank_C + 0.5 + number / 100) / len(score_C)


# ------------------------------------------------------------------------------------------------ Torch-Pruning


def torch_pruning(model: nn.Module, x: Tensor, target: float) -> nn.Module:
    return _prune_in_steps(model, x, target, normalizer="mean")


def torch_pruning_sparse(model: nn.Module, x: Tensor, target: float) -> nn.Module:
    """For a network that was trained with `sparse_regularizer`."""
    return _prune_in_steps(model, x, target, normalizer="max")


def sparse_regularizer(model: nn.Module, x: Tensor, reg: float) -> Callable[[nn.Module], None]:
    """To be called between gradient and step: pulls whole channels of `model` to zero, the weaker the harder."""
    with _quiet():
        pruner = _group_norm_pruner(model, x, "max", reg)
    return lambda net: pruner.regularize(net)


def _prune_in_steps(model: nn.Module, x: Tensor, target: float, normalizer: str) -> nn.Module:
    small = copy.deepcopy(model).eval()
    most = int(target * headgate.count_macs(small, x))
    with _quiet():
        pruner = _group_norm_pruner(small, x, normalizer)
        while headgate.count_macs(small, x) > most:
            if pruner.current_step == pruner.iterative_steps:
                raise RuntimeError(f"Torch-Pruning does not reach {target:g} of the MACs: {inner_widths(small)}")
            pruner.step()
    return small


def _group_norm_pruner(model: nn.Module, x: Tensor, normalizer: str, reg: float = 0.0) -> Any:
    import torch_pruning as tp

    return tp.pruner.GroupNormPruner(
        model,
        x[:1],
        importance=tp.importance.GroupMagnitudeImportance(p=2, normalizer=normalizer),
        reg=reg,
        global_pruning=True,
        pruning_ratio=1.0,
        iterative_steps=STEPS,
        ignored_layers=_stream_layers(model),
        # The defaults are dictionaries that all its pruners share and fill.
        in_channel_groups={},
        out_channel_groups={},
        num_heads={},
    )


def _stream_layers(model: nn.Module) -> list[nn.Module]:
    """What writes to the stream, and the output."""
    inner = list(inner_convs(model).values())
    layers = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    return [layer for layer in layers if not any(layer is conv for conv in inner)]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


PRUNERS: dict[str, Prune] = {
    "torch-pruning": torch_pruning,
    "torch-pruning-sparse": torch_pruning_sparse,
    "uniform-l1": uniform_l1,
    "fpgm": fpgm,
}

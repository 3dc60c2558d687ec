"""Torch-Pruning 1.6.1 doing what headgate does: a dense network in, one of half the MACs out.

Used as its own examples use it: magnitude importance (p=1), the output layer protected, channels of a torchvision ViT
rounded to its heads. Steps of 5 % of the channels until its own count has reached the target. Channels are ranked over
the whole network ("global") or within each layer ("local"). Knows nothing of headgate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 20


@dataclasses.dataclass(frozen=True)
class Pruned:
    """`model` is the one given, now smaller; `fraction` is what is left of its MACs, by Torch-Pruning's own count."""

    model: nn.Module
    fraction: float
    steps: int
    reached: bool


def prune_(
    model: nn.Module, x: Tensor, target: float = 0.5, ranking: str = "global", importance: str = "magnitude"
) -> Pruned:
    """Prunes `model` in place until its MACs are at most `target` of what they were, or no step is left."""
    import torch_pruning as tp

    x = x[:1]
    with _quiet():
        dense_macs = tp.utils.count_ops_and_params(model, x)[0]
        pruner = _pruner(model, x, pruning_ratio=1.0, steps=STEPS, ranking=ranking, importance=importance)
        fraction, step = 1.0, 0
        while fraction > target and step < STEPS:
            pruner.step()
            _mend_(model)
            step += 1
            fraction = tp.utils.count_ops_and_params(model, x)[0] / dense_macs
    return Pruned(model, float(fraction), step, fraction <= target)


@torch.no_grad()
def difference_from_zeroed_twin(
    build: Callable[[], nn.Module], x: Tensor, ranking: str = "global", ratio: float = 0.3
) -> float | None:
    """Relative difference between the pruned network and a full-sized one with the same channels set to zero.

    The twin zeroes, in every group that Torch-Pruning found, the weights that it would remove. A channel removed at
    the wrong place shifts all behind it and shows. None where a normalisation over channels makes them differ.
    """
    pruned, twin = build(), build()
    if any(isinstance(module, (nn.LayerNorm, nn.GroupNorm)) for module in pruned.modules()):
        return None
    with _quiet(), torch.enable_grad():
        groups = list(_pruner(twin, x, ratio, 1, ranking, "magnitude").step(interactive=True))
        _pruner(pruned, x, ratio, 1, ranking, "magnitude").step()
    for group in groups:
        for dependency, channels in group.items:
            _zero_(dependency.target.module, _is_output_side(dependency), channels)
    reference, y = twin(x), pruned(x)
    return ((y - reference).abs().max() / reference.abs().max()).item() if y.shape == reference.shape else float("inf")


@torch.no_grad()
def survives_pickle(model: nn.Module, x: Tensor) -> bool:
    """Whether a whole-model pickle, the way Torch-Pruning saves, gives the same output after loading."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.equal(torch.load(file, weights_only=False)(x), model(x))


def output_layers(model: nn.Module, x: Tensor) -> list[nn.Module]:
    """The layers as wide as the output, which must stay so."""
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    return [
        module
        for module in model.modules()
        if (isinstance(module, nn.Linear) and module.out_features == classes)
        or (isinstance(module, nn.Conv2d) and module.out_channels == classes)
    ]


def _pruner(model: nn.Module, x: Tensor, pruning_ratio: float, steps: int, ranking: str, importance: str) -> Any:
    import torch_pruning as tp

    kinds = {
        "magnitude": lambda: tp.importance.MagnitudeImportance(p=1),
        "random": tp.importance.RandomImportance,
    }
    return tp.pruner.BasePruner(
        model,
        x[:1],
        importance=kinds[importance](),
        global_pruning=ranking == "global",
        pruning_ratio=pruning_ratio,
        iterative_steps=steps,
        ignored_layers=output_layers(model, x),
        round_to=model.encoder.layers[0].num_heads if _is_vit(model) else None,
        # The defaults are dictionaries that all its pruners share and fill.
        in_channel_groups={},
        out_channel_groups={},
        num_heads={},
    )


def _is_vit(model: nn.Module) -> bool:
    return type(model).__name__ == "VisionTransformer" and hasattr(model, "conv_proj")


def _mend_(model: nn.Module) -> None:
    """torchvision's ViT keeps its width in an attribute too; Torch-Pruning's examples set it by hand."""
    if _is_vit(model):
        model.hidden_dim = model.conv_proj.out_channels


def _is_output_side(dependency: Any) -> bool:
    return dependency.handler.__name__ == "prune_out_channels"


def _zero_(module: Any, output_side: bool, channels: list[int]) -> None:
    """Zeroes what Torch-Pruning would cut out of a module: rows on the output side, columns on the input side."""
    if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.PReLU)):
        output_side = True
    if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1:
        output_side = output_side or module.groups == module.in_channels
        if not output_side:  # what such a layer reads is zero already, and its columns are shared by its groups
            return
    if isinstance(module, nn.Parameter):
        raise NotImplementedError("a bare parameter has no zeroed twin")
    weight = getattr(module, "weight", None)
    if weight is None:
        return
    if output_side:
        weight[channels] = 0
        if getattr(module, "bias", None) is not None:
            module.bias[channels] = 0
    else:
        weight[:, channels] = 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

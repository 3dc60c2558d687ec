"""Where a batch holds several rows for each image (frames, windows), do those of an image lie side by side?

Gates that look at the input average over the rows of an image, and share what they decide with all of them. A model
that stacks two batches (`torch.cat([a, b])`) would have them look at other images: tried with some random images,
together and one by one, on the model itself. Knows nothing of what gates decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from headgate.errors import ModelError
from headgate.gates.draws import first_of
from headgate.gates.dynamic import pooled
from headgate.graph.sites import Site
from headgate.graph.trace import as_arguments, batch_size_of

PROBES = 3


@torch.no_grad()
def check_folding(model: nn.Module, sites: Sequence[Site], example_input: Any) -> None:
    """Raises where gates would look at other images than their own."""
    folded = [site for site in sites if site.folded]
    if not folded:
        return
    images = _some_like(example_input)
    modules = dict(model.named_modules())
    training = model.training
    model.eval()
    try:
        for site in folded:
            together = _seen_at(model, modules[site.layer], site, images, PROBES)
            alone = [_seen_at(model, modules[site.layer], site, _one(images, number), 1) for number in range(PROBES)]
            if not torch.allclose(torch.cat(alone), together, rtol=1e-3, atol=1e-4):
                raise ModelError(
                    f"before `{site.layer}`, where gates look or close channels, the rows of an image do not lie "
                    "side by side (torch.cat of two batches?): gate the part that sees one batch, or use kind='static'"
                )
    finally:
        model.train(training)


def _some_like(example_input: Any) -> Any:
    """A few random images that differ."""
    generator = torch.Generator().manual_seed(0)
    given = batch_size_of(example_input)

    def some(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != given:
            return leaf
        rows = torch.cat([leaf[:1]] * PROBES)
        return torch.randn(rows.shape, generator=generator).to(rows) if rows.is_floating_point() else rows

    return tree_map(some, example_input)


def _one(images: Any, number: int) -> Any:
    def row(leaf: Any) -> Any:
        in_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == PROBES
        return leaf[number : number + 1] if in_batch else leaf

    return tree_map(row, images)


def _seen_at(model: nn.Module, module: nn.Module, site: Site, images: Any, count: int) -> Tensor:
    """What the gates of a site would look at: (images, channels)."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(pooled(first_of(args, kwargs)[1], site, count)), with_kwargs=True
    )
    try:
        args, kwargs = as_arguments(images)
        model(*args, **kwargs)
    finally:
        hook.remove()
    return seen[0]

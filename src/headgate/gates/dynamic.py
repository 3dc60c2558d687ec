"""Gates that look at the input: a small network at each site gives every image its own probabilities.

Average over all places, to 16 hidden values, BatchNorm, ReLU, to one logit a gate. The masks of a block share one such
network. The last layer starts near zero, so that at first only its bias speaks. Knows the sites of a channel graph and
nothing of what the gates do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from headgate.gates.gumbel import logit_at_first, scale_gradient
from headgate.graph.grouping import ChannelGraph
from headgate.graph.sites import Site

HIDDEN = 16
SMALL_WEIGHT = 1e-3
"""Deviation of the last layer's weights at the start."""
STRIDE = 1 + HIDDEN / 2
"""How far a step of gradient descent moves a logit where it would move one that is a parameter by 1: its bias moves as
far, and each of its weights by a hidden value, which it is multiplied by again; the square of these is a half on
average, since they are normalised and rectified."""

# legend of axes: B images, C channels, H hidden values, N gates of one site


class GateNetwork(nn.Module):
    """The gates of one site."""

    def __init__(self, channels: int, count: int, initial_probability: float) -> None:
        super().__init__()
        self.trunk = nn.Linear(channels, HIDDEN, bias=False)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.head = nn.Linear(HIDDEN, count)
        nn.init.normal_(self.head.weight, std=SMALL_WEIGHT)
        nn.init.constant_(self.head.bias, logit_at_first(initial_probability))

    def forward(self, pooled_BC: Tensor, gradient_scale: float = 1.0) -> Tensor:
        """Logits (B, N). Gradients are scaled by a factor for the head, as static gates' are; the trunk gets their mean
        over its gates, and what goes on to the network is not scaled at all."""
        count = self.head.out_features
        with torch.autocast(pooled_BC.device.type, enabled=False):
            hidden_BH = self.trunk(scale_gradient(pooled_BC.float(), count / gradient_scale))
            if self.norm.training and len(hidden_BH) == 1:  # one image has no variance
                norm = self.norm
                hidden_BH = nn.functional.batch_norm(
                    hidden_BH, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
                )
            else:
                hidden_BH = self.norm(hidden_BH)
            hidden_BH = scale_gradient(torch.relu(hidden_BH), 1 / count)
            logits: Tensor = scale_gradient(self.head(hidden_BH), gradient_scale)
            return logits

    def folded_trunk(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the trunk in eval mode, with the BatchNorm behind it."""
        norm = self.norm
        assert norm.running_mean is not None and norm.running_var is not None
        scale = norm.weight.detach() * (norm.running_var + norm.eps).rsqrt()
        return self.trunk.weight.detach() * scale[:, None], norm.bias.detach() - norm.running_mean * scale

    @property
    def macs(self) -> int:
        """Multiply-adds an image."""
        return HIDDEN * (self.trunk.in_features + self.head.out_features)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Move with the model, but stay float32, like all gates."""
        before = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
        super()._apply(fn, recurse)
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if tensor.is_floating_point() and tensor.dtype != torch.float32:
                tensor.data = before[name].to(tensor.device)
        return self


class DynamicGates(nn.Module):
    """The gate networks of all sites."""

    def __init__(self, graph: ChannelGraph, sites: Sequence[Site], initial_probability: float = 0.95) -> None:
        super().__init__()
        self.sites = tuple(sites)
        self.gradient_scale = 1.0
        """Of the logits' gradient. `1 / STRIDE` lets a step move them as far as those of gates that are parameters."""
        self.networks = nn.ModuleList(
            GateNetwork(site.channels, sum(graph.masks[number].size for number in site.masks), initial_probability)
            for site in sites
        )

    def logits(self, number: int, x: Tensor, images: int, open_BC: Tensor | None = None) -> Tensor:
        """What site `number` says of the tensor there: (images, gates). Channels that are not open count as zero."""
        means_BC = pooled(x, self.sites[number], images)
        if open_BC is not None:
            means_BC = means_BC * open_BC
        logits_BN: Tensor = self.networks[number](means_BC, self.gradient_scale)
        return logits_BN

    @property
    def macs(self) -> int:
        """Multiply-adds an image, of all sites."""
        return sum(network.macs for network in self.networks if isinstance(network, GateNetwork))


class Axes(Protocol):
    """Where channels and images are in a tensor; `axis` None where all of it is one channel."""

    @property
    def axis(self) -> int | None: ...

    @property
    def batch_axis(self) -> int: ...


def pooled(x: Tensor, at: Axes, images: int) -> Tensor:
    """The mean of each channel of each image: (images, channels)."""
    if at.axis is None:
        x, axis, batch_axis = x.movedim(at.batch_axis, 0).flatten(1).unsqueeze(1), 1, 0
    else:
        axis, batch_axis = at.axis % x.dim(), at.batch_axis
    rest = [place for place in range(x.dim()) if place not in (axis, batch_axis)]
    means = x.float().mean(rest) if rest else x.float()
    if axis < batch_axis:
        means = means.t()
    places = means.shape[0]  # len() would make a number of it, and an exported graph one of this many images
    if places != images and places % images == 0:  # windows or tokens folded with images
        means = means.reshape(images, places // images, -1).mean(1)
    return means

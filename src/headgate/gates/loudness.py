"""How loud the channels of each gate are in an image, and gate networks that can tell it from what they see.

A channel that is nearly silent in an image can be left out of it at hardly any loss: for one image that says far more
than any gradient does, and the means of a layer's input foretell it well. So gates that look at the image start by
knowing it. Listens to passes with all gates open, then teaches each site's network its part. Knows masks, sites and
gate networks; nothing of worth, cost or targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headgate.gates.draws import Channels, Draw, MaskBranch
from headgate.gates.dynamic import DynamicGates, GateNetwork, pooled

QUIETEST, LOUDEST = -6.0, 3.0
"""Natural logarithms of a channel's energy, relative to its mean over images: beyond these all are alike."""
TINY = 1e-9
LESSONS, IMAGES_A_LESSON, RATE = 400, 512, 0.02
FIRST_WEIGHT = 0.1

# legend of axes: B images, C channels of a tensor, G gates of the network, N gates of one site


class Loudness:
    """What was heard in all passes so far: the energy of each gate's channels, and what sites saw, image by image."""

    def __init__(self, count: int, dynamic: DynamicGates) -> None:
        self._count = count
        self._dynamic = dynamic
        self._energy_BG = torch.zeros(0, count)
        self._energies: list[Tensor] = []
        self._seen: list[list[Tensor]] = [[] for _ in dynamic.sites]

    def begin(self, images: int) -> None:
        """A pass begins."""
        self._energy_BG = torch.zeros(images, self._count)

    def end(self) -> None:
        """It is over; in half precision, for there may be many gates."""
        self._energies.append((self._energy_BG + TINY).log().half())

    def hear(self, mask: Channels | MaskBranch, x: Tensor) -> None:
        """A tensor, before its channels are multiplied by their gates."""
        images = len(self._energy_BG)
        heard_BC = pooled(x.detach().float().square(), mask, images)
        if len(heard_BC) == images:  # masks over something else than images hear nothing
            gated = mask.gates >= 0
            self._energy_BG.index_add_(1, mask.gates[gated], heard_BC.cpu()[:, gated])

    def see(self, number: int, x: Tensor, draw: Draw) -> None:
        """What a site sees."""
        self._seen[number].append(pooled(x.detach(), self._dynamic.sites[number], len(self._energy_BG)).cpu())

    def relative_BG(self, gates: Tensor) -> Tensor:
        """Of some gates: the logarithm of their energy in each image, relative to the mean over all images."""
        energy_BG = torch.cat([each[:, gates] for each in self._energies]).float()
        mean_G = energy_BG.logsumexp(0) - math.log(len(energy_BG))
        return (energy_BG - mean_G).clamp(QUIETEST, LOUDEST)

    def seen_BC(self, number: int) -> Tensor | None:
        """What a site saw in all passes, if it saw something in each."""
        complete = len(self._seen[number]) == len(self._energies)
        return torch.cat(self._seen[number]) if complete else None


def teach_(
    dynamic: DynamicGates, gates: Sequence[Tensor], logits_G: Tensor, heard: Loudness | None, by_nat: float
) -> None:  # fmt: skip
    """Let every site's network say, of its `gates`, `logits_G`, and `by_nat` more for channels e times as loud; where
    nothing was heard, the same of all images."""
    for number, (network, own) in enumerate(zip(dynamic.networks, gates, strict=True)):
        assert isinstance(network, GateNetwork)
        seen_BC = None if heard is None else heard.seen_BC(number)
        if heard is None or seen_BC is None or len(seen_BC) < 2:
            with torch.no_grad():
                network.head.bias.copy_(logits_G[own])
        else:
            _teach(network, seen_BC, logits_G[own] + by_nat * heard.relative_BG(own))


@torch.enable_grad()
def _teach(network: GateNetwork, seen_BC: Tensor, wanted_BN: Tensor) -> None:
    """Least squares, by Adam, with a generator of its own: the same in every process."""
    device = network.head.weight.device
    generator = torch.Generator().manual_seed(0)
    training = network.training
    network.train()
    with torch.no_grad():
        network.head.weight.copy_(torch.randn(network.head.weight.shape, generator=generator) * FIRST_WEIGHT)
        network.head.bias.copy_(wanted_BN.mean(0))
    optimizer = torch.optim.Adam(network.parameters(), RATE)
    for lesson in range(LESSONS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * lesson / LESSONS))
        some = torch.randint(len(seen_BC), (min(len(seen_BC), IMAGES_A_LESSON),), generator=generator)
        loss = nn.functional.mse_loss(network(seen_BC[some].to(device)), wanted_BN[some].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    network.train(training)

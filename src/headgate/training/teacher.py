"""The network a student learns from: fast where it only answers, and used to other pixels if need be.

It never learns, so its weights may be compiled in, and on a CPU it looks at a few images at a time: what many layers
keep of them then stays in the caches (a DenseNet answers twice as fast). Knows networks and normalisations, nothing of
students.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headgate.data.batches import Normalization
from headgate.graph.trace import tensors_in

PART = 32
"""Images that a teacher looks at together on a CPU."""


class Renormalized(nn.Module):
    """A network that is used to other means and deviations of pixels than its images come with."""

    scale_C11: Tensor
    shift_C11: Tensor

    def __init__(self, net: nn.Module, given: Normalization, wanted: Normalization) -> None:
        super().__init__()
        self.net = net
        mean, std, other_mean, other_std = (
            torch.tensor(values).view(-1, 1, 1) for values in (given.mean, given.std, wanted.mean, wanted.std)
        )
        self.register_buffer("scale_C11", std / other_std)
        self.register_buffer("shift_C11", (mean - other_mean) / other_std)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """What the network says of the images as it knows them."""
        return tensors_in(self.net(images_BCHW * self.scale_C11 + self.shift_C11))[0]


def compiled_teacher(net: nn.Module) -> nn.Module:
    """Compiled for answers alone, with code of its own for every shape of batch."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in net.parameters())
    made = torch.compile(net, dynamic=False, options={"freezing": True} if on_cpu else None)
    assert isinstance(made, nn.Module)
    return made


def answers(teacher: nn.Module, images_BX: Tensor) -> Tensor:
    """The teacher's scores, part by part on a CPU. To be asked without gradients, in whatever precision is on."""
    part = PART if images_BX.device.type == "cpu" else len(images_BX)
    return torch.cat([tensors_in(teacher(images))[0] for images in images_BX.split(part)]).float()

"""What an exit makes of the activations at its cut: class scores, and the logit of leaving.

Written down twice. `read` is what learns, in PyTorch's operators. `Reader` is the same for inference, for classifiers
of our own: one pass over the activations, which are large, and then few small steps, with BatchNorm folded into its
neighbours. An exit costs every image that comes to it, also those that stay. Knows one exit; knows nothing of cascades.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headgate.exits.heads import ConvHead, MeanHead
from headgate.gates.dynamic import GateNetwork
from headgate.inference.kernel import native
from headgate.inference.kernel.prepared import Conv, read_planes

# legend of axes: B images, C channels, K classes


def read(head: nn.Module, gate: GateNetwork, x: Tensor, gradient_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Class scores (B, K), and the logit of leaving of each image."""
    scores_BK = head(x)
    return scores_BK, wish(gate, x.float().mean((2, 3)), scores_BK, gradient_scale)


def wish(gate: GateNetwork, means_BC: Tensor, scores_BK: Tensor, gradient_scale: float = 1.0) -> Tensor:
    """The logit of leaving, for each image: from its mean activations, and from how sure the classifier is."""
    logits: Tensor = gate(torch.cat([means_BC, sureness(scores_BK)], 1), gradient_scale)
    return logits[:, 0]


def sureness(scores_BK: Tensor) -> Tensor:
    """How sure a classifier is, whichever class that is of. The gate learns to read the classifier, which does not
    learn to be read. In logarithms: among images that can leave, probabilities are all 1.0."""
    return scores_BK.detach().float().log_softmax(1).sort(1, descending=True).values


class Reader:
    """An exit for inference, with the weights that its classifier and gate had when it was made."""

    def __init__(self, head: MeanHead | ConvHead, gate: GateNetwork) -> None:
        modules = [module for part in (head, gate) for module in part.modules()]
        self._held = [held for each in modules for held in (each._parameters, each._buffers) if held]
        self._made_of = self._weights()
        self._tile = head.tile
        with torch.no_grad():
            self._scale, self._shift = _affine(head.norm)
            self._convs = _folded(head.body) if isinstance(head, ConvHead) else []
            self._fc = head.fc.weight.detach(), head.fc.bias.detach()
            self._trunk = gate.folded_trunk()
            self._leave = gate.head.weight.detach(), gate.head.bias.detach()

    @staticmethod
    def fits(head: nn.Module, x: Tensor) -> bool:
        """Whether these activations can be read so: nothing learns, and the classifier is one of ours."""
        if torch.is_grad_enabled() or head.training or not isinstance(head, (MeanHead, ConvHead)):
            return False
        exact = x.dtype == head.fc.weight.dtype == torch.float32
        return x.is_cpu and exact and x.numel() > 0 and not torch.compiler.is_compiling()

    def is_of_now(self) -> bool:
        """Whether the weights are still those that it was made of."""
        return self._weights() == self._made_of

    def _weights(self) -> list[tuple[int, int, int]]:
        return [
            (id(tensor), tensor.data_ptr(), tensor._version)
            for held in self._held
            for tensor in held.values()
            if tensor is not None
        ]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Class scores (B, K), and the logit of leaving of each image."""
        y, means_BC = read_planes(x, self._scale, self._shift, self._tile(x))
        for conv in self._convs:
            y = conv(y, None, None, None)
        scores_BK = F.linear(y.mean((2, 3)), *self._fc)
        hidden = F.linear(torch.cat([means_BC, sureness(scores_BK)], 1), *self._trunk)
        return scores_BK, F.linear(hidden.relu_(), *self._leave)[:, 0]


def _affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """BatchNorm in eval mode: times the first, plus the second."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return scale.detach(), (norm.bias - norm.running_mean * scale).detach()


def _folded(body: nn.Sequential) -> list[Conv]:
    """Convolution, BatchNorm and ReLU as one call each."""
    made = []
    for conv, norm in zip(list(body)[::3], list(body)[1::3], strict=True):
        assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d) and not isinstance(conv.padding, str)
        scale, shift = _affine(norm)
        geometry = list(conv.stride), list(conv.padding), list(conv.dilation)
        one = Conv(conv.weight.detach() * scale[:, None, None, None], shift, *geometry, True, False, False)
        one.dense = native.compiled() is None
        made.append(one)
    return made

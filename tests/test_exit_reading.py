"""An exit prepared for inference says what its classifier and its gate say, and follows their weights."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headgate
from headgate.exits.heads import ConvHead, MeanHead
from headgate.exits.reading import Reader, read
from headgate.gates.dynamic import GateNetwork
from headgate.inference.kernel import native
from tests.test_exits import SHAPE, data, dense_net, randn


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from([MeanHead, ConvHead]), images=st.integers(1, 3), channels=st.integers(1, 9),
    height=st.integers(1, 20), width=st.integers(1, 20), seed=st.integers(0, 2**31), striding=st.booleans(),
    compiled=st.booleans(),
)  # fmt: skip
def test_an_exit_is_read_at_inference_as_it_learned(
    kind: Any, images: int, channels: int, height: int, width: int, seed: int, striding: bool, compiled: bool
) -> None:
    """Scores and wishes of the prepared exit are those of classifier and gate, for any norms and shapes."""
    torch.manual_seed(seed)
    head, gate = kind(channels, 5).eval(), GateNetwork(channels + 5, 1, 0.5).eval()
    for module in (*head.modules(), *gate.modules()):
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            for tensor, low in (
                (module.weight, -1),
                (module.bias, -1),
                (module.running_mean, -1),
                (module.running_var, 0.1),
            ):
                nn.init.uniform_(tensor, low, 1.5)
    nn.init.normal_(gate.head.weight)
    x = torch.randn(images, channels, height, width)
    x = x.transpose(2, 3).contiguous().transpose(2, 3) if striding else x
    with torch.no_grad(), patch.object(native, "compiled", native.compiled if compiled else lambda: None):
        assert Reader.fits(head, x)
        for expected, found in zip(read(head, gate, x), Reader(head, gate)(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["in place", "another parameter", "loaded", "trained", "half and back"])
def test_a_prepared_exit_follows_its_weights(change: str) -> None:
    exits = headgate.add_exits(dense_net(), randn(1, *SHAPE), ["block1"], target=0.9).eval()
    x = data()[0][0]
    exits.taus = [0.0]  # all leave
    head = exits.heads[0]
    with torch.no_grad():
        before = exits(x)
        if change == "in place":
            head.norm.running_mean += 1
        elif change == "another parameter":
            head.fc.bias = nn.Parameter(head.fc.bias + 1)
        elif change == "loaded":
            exits.load_state_dict(
                {
                    k: v + 1 if k.startswith("heads") and v.is_floating_point() else v
                    for k, v in exits.state_dict().items()
                }
            )
        elif change == "trained":
            exits.train()
            head.fc.bias.data.add_(1)
            exits.eval()
        else:
            head.fc.bias += 1
            exits.half().float()
        after = exits(x)
        model_x: list[Tensor] = []
        hook = dict(exits.model.named_modules())["block1"].register_forward_hook(lambda m, a, out: model_x.append(out))
        exits.model(x)
        hook.remove()
        torch.testing.assert_close(after, head(model_x[0]), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(before, after)


def test_a_copy_of_a_cascade_prepares_its_own_exits() -> None:
    exits = headgate.add_exits(dense_net(), randn(1, *SHAPE), ["block1"], target=0.9).eval()
    exits.taus, x = [0.0], data()[0][0]
    with torch.no_grad():
        before = exits(x)
        twin = copy.deepcopy(exits)
        twin.heads[0].fc.bias += 1
        assert torch.allclose(twin(x), before + 1, atol=1e-5) and torch.equal(exits(x), before)

import pytest
import torch
from torch import nn

from benchmarks import pruners
from headgate import count_macs
from headgate.models.cifar_resnet import CifarResNet

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def dense() -> nn.Module:
    return CifarResNet(1, width=8).eval()


@pytest.mark.parametrize("name", pruners.PRUNERS)
def test_a_pruned_network_is_within_the_target_and_can_be_built_again_from_its_widths(
    name: str, dense: nn.Module
) -> None:
    if name.startswith("torch-pruning"):
        pytest.importorskip("torch_pruning")
    before = {key: tensor.clone() for key, tensor in dense.state_dict().items()}

    small = pruners.PRUNERS[name](dense, X[:1], 0.5).eval()

    assert 0.45 < count_macs(small, X[:1]) / count_macs(dense, X[:1]) <= 0.5
    assert all(torch.equal(tensor, before[key]) for key, tensor in dense.state_dict().items()), "the dense one stays"
    again = pruners.with_inner_widths(dense, pruners.inner_widths(small)).eval()
    again.load_state_dict(small.state_dict())
    torch.testing.assert_close(again(X), small(X))


@torch.no_grad()
def test_uniform_l1_keeps_the_largest_filters_of_every_block(dense: nn.Module) -> None:
    conv = dense.layer3[0].conv1
    conv.weight[::2] *= 10

    small = pruners.uniform_l1(dense, X[:1], 0.6)

    width = pruners.inner_widths(small)["layer3.0"]
    largest = conv.weight.flatten(1).abs().sum(1).argsort(descending=True)[:width].sort().values
    torch.testing.assert_close(small.layer3[0].conv1.weight, conv.weight[largest])
    assert pruners.inner_widths(small).keys() == {"layer1.0", "layer2.0", "layer3.0"}


@torch.no_grad()
def test_fpgm_removes_what_the_other_filters_can_stand_in_for(dense: nn.Module) -> None:
    """Filters that are all alike are nearest to the rest, however large they are."""
    conv = dense.layer3[0].conv1
    conv.weight[:8] = conv.weight[0]

    kept = pruners.fpgm(dense, X[:1], 0.6).layer3[0].conv1.weight

    alike = (kept - conv.weight[0]).flatten(1).norm(dim=1) < 1e-6
    assert alike.sum() <= 1


def test_the_same_share_of_every_block_whatever_the_score(dense: nn.Module) -> None:
    widths = [pruners.inner_widths(prune(dense, X[:1], 0.5)) for prune in (pruners.uniform_l1, pruners.fpgm)]

    assert widths[0] == widths[1]
    full = pruners.inner_widths(dense)
    shares = [width / full[block] for block, width in widths[0].items()]
    assert max(shares) - min(shares) <= 2 / min(full.values())


def test_the_regularizer_adds_to_the_gradients_of_inner_channels_only(dense: nn.Module) -> None:
    pytest.importorskip("torch_pruning")
    regularize = pruners.sparse_regularizer(dense, X[:1], reg=0.1)
    for parameter in dense.parameters():
        parameter.grad = torch.zeros_like(parameter)

    regularize(dense)

    changed = {name for name, parameter in dense.named_parameters() if parameter.grad.any()}
    blocks = [f"layer{stage}.0" for stage in (1, 2, 3)]
    assert changed == {f"{block}.{part}.weight" for block in blocks for part in ("conv1", "bn1", "conv2")}

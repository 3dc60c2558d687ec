import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headgate.models import (
    CifarResNet,
    ZeroPadShortcut,
    cifar_resnet20,
    cifar_resnet32,
    cifar_resnet44,
    cifar_resnet56,
    cifar_resnet110,
)

# builder, blocks per stage, parameters
NETWORKS = [
    (cifar_resnet20, 3, 269_722),
    (cifar_resnet32, 5, 464_154),
    (cifar_resnet44, 7, 658_586),
    (cifar_resnet56, 9, 853_018),
    (cifar_resnet110, 18, 1_727_962),
]


def expected_names(blocks: int) -> set[str]:
    """The state dict of the public weights, which were saved without `num_batches_tracked`."""
    units = [("conv1", "bn1")]
    for stage in (1, 2, 3):
        for block in range(blocks):
            units += [(f"layer{stage}.{block}.conv{i}", f"layer{stage}.{block}.bn{i}") for i in (1, 2)]
    names = {"linear.weight", "linear.bias"} | {f"{conv}.weight" for conv, _ in units}
    return names | {f"{norm}.{part}" for _, norm in units for part in ("weight", "bias", "running_mean", "running_var")}


@pytest.mark.parametrize(("builder", "blocks", "parameters"), NETWORKS)
def test_names_and_number_of_parameters(builder, blocks, parameters) -> None:
    model = builder()
    names = {name for name in model.state_dict() if not name.endswith("num_batches_tracked")}
    assert names == expected_names(blocks)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_plain_state_dict_without_batch_counters_loads_strictly() -> None:
    state = {k: v for k, v in cifar_resnet20().state_dict().items() if not k.endswith("num_batches_tracked")}
    other = cifar_resnet20()
    other.load_state_dict(state, strict=True)
    x = torch.randn(2, 3, 32, 32)
    reference = cifar_resnet20()
    reference.load_state_dict(state, strict=True)
    torch.testing.assert_close(other.eval()(x), reference.eval()(x))


@pytest.mark.parametrize(("builder", "macs"), [(cifar_resnet20, 40_551_040), (cifar_resnet56, 125_485_696)])
def test_macs(builder, macs) -> None:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        builder()(torch.zeros(1, 3, 32, 32))
    assert counter.get_total_flops() == 2 * macs


def test_shortcut_is_every_second_pixel_between_zero_channels() -> None:
    x = torch.randn(2, 16, 8, 8)
    y = ZeroPadShortcut(16, 32, stride=2)(x)
    assert y.shape == (2, 32, 4, 4)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any() and not y[:, 24:].any()
    assert not list(ZeroPadShortcut(16, 32, stride=2).parameters())


def test_shortcut_pads_an_odd_difference() -> None:
    y = ZeroPadShortcut(3, 6, stride=1)(torch.ones(1, 3, 2, 2))
    assert y[0, :, 0, 0].tolist() == [0, 1, 1, 1, 0, 0]


def test_shortcut_cannot_narrow() -> None:
    with pytest.raises(ValueError, match="cannot narrow 32 channels to 16"):
        ZeroPadShortcut(32, 16, stride=2)


def test_shape_arguments() -> None:
    model = CifarResNet(1, num_classes=7, in_channels=1, width=5)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 7)
    assert [stage[0].conv2.out_channels for stage in (model.layer1, model.layer2, model.layer3)] == [5, 10, 20]


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks_per_stage=0"):
        CifarResNet(0)

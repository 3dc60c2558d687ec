"""Save and load: shrunk, gated and plain networks, into a fresh dense architecture, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headgate
from headgate.models.cifar_resnet import CifarResNet
from tests.networks import NETWORKS, conv, example
from tests.oracle import Net, decide_, difference, randn, randomize_, same

X = (3, 8, 8)


def resnet(width: int = 8, blocks: int = 1) -> nn.Module:
    return CifarResNet(blocks, width=width)


def gated_resnet(**options: Any) -> headgate.GatedModel:
    return headgate.gate(randomize_(resnet().eval()), randn(2, *X), **{"target": 1.0, **options})


def shrunk(**options: Any) -> nn.Module:
    return decide_(gated_resnet(**options), 0.5, 0).shrink()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("stream", ["shared", "indexed"])
def test_loading_a_shrunk_network_traces_nothing(stream: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = shrunk(stream=stream)
    headgate.save(small, path)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("loading must not run or trace the model")

    monkeypatch.setattr(CifarResNet, "forward", forbidden)
    loaded = headgate.load(path, resnet())
    monkeypatch.undo()
    assert same(small(randn(4, *X)), loaded(randn(4, *X)))


def test_loading_leaves_the_given_model_as_it_was(path: Path) -> None:
    headgate.save(shrunk(), path)
    fresh = resnet()
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    headgate.load(path, fresh)
    assert all(torch.equal(before[name], value) for name, value in fresh.state_dict().items())


def test_a_loaded_network_can_be_trained_saved_and_loaded_again(path: Path) -> None:
    headgate.save(shrunk(), path)
    loaded = headgate.load(path, resnet()).train()
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    loaded(randn(4, *X)).square().mean().backward()
    optimizer.step()
    headgate.save(loaded, path)
    again = headgate.load(path, resnet())
    assert same(loaded.eval()(randn(4, *X)), again(randn(4, *X)))
    assert again.state_dict().keys() == loaded.state_dict().keys()


def test_a_shrunk_file_is_smaller(path: Path, tmp_path: Path) -> None:
    headgate.save(shrunk(), path)
    headgate.save(resnet(), tmp_path / "dense")
    assert path.stat().st_size < 0.6 * (tmp_path / "dense").stat().st_size


def test_a_dense_network_is_saved_too(path: Path) -> None:
    model = randomize_(resnet().eval())
    headgate.save(model, path)
    assert same(model(randn(2, *X)), headgate.load(path, resnet())(randn(2, *X)))


GATED: list[dict[str, Any]] = [
    {},
    {"stream": "indexed", "target": 0.4, "backward": "probability", "temperature": 0.7},
    {"granularity": 4, "frozen": ["layer1"], "hard": False},
    {"granularity": "layer", "loss": "activation"},
    {"loss": "per_gate", "rates": 0.3},
    {"target": "150K"},
]


@pytest.mark.parametrize("options", GATED, ids=str)
def test_a_gated_network_comes_back_with_all_its_settings(options: dict[str, Any], path: Path) -> None:
    gated = gated_resnet(**options)
    decide_(gated, 0.6, 1).strategy("threshold", tau=0.3)
    headgate.save(gated, path)
    loaded = headgate.load(path, resnet())
    assert isinstance(loaded, headgate.GatedModel)
    assert same(gated(randn(3, *X)), loaded.eval()(randn(3, *X)))
    assert loaded.macs() == gated.macs() and loaded.target == gated.target and loaded.loss == gated.loss
    assert loaded.gates.relaxation == gated.gates.relaxation
    assert loaded.budget.state() == gated.budget.state()
    assert loaded._strategy == gated._strategy
    assert [mask.name for mask in loaded.graph.masks] == [mask.name for mask in gated.graph.masks]
    torch.manual_seed(0)
    gated.train()(randn(3, *X))
    torch.manual_seed(0)
    loaded.train()(randn(3, *X))
    torch.testing.assert_close(gated.cost_loss(), loaded.cost_loss())


def test_decisions_are_saved(path: Path) -> None:
    gated = decide_(gated_resnet(target=0.5), 0.9, 0).project()
    headgate.save(gated, path)
    loaded = headgate.load(path, resnet()).eval()
    assert torch.equal(loaded.decisions, gated.decisions) and loaded.macs() == gated.macs()
    assert same(gated.shrink()(randn(2, *X)), loaded.shrink()(randn(2, *X)))


def test_a_state_dict_restores_a_gated_network(path: Path) -> None:
    gated = decide_(gated_resnet(target=0.5), 0.9, 0).project()
    torch.save(gated.state_dict(), path.with_suffix(".pt"))
    other = gated_resnet(target=0.5).eval()
    other.load_state_dict(torch.load(path.with_suffix(".pt"), weights_only=True))
    assert other.macs() == gated.macs() and same(gated(randn(2, *X)), other(randn(2, *X)))


def test_tied_weights_stay_tied(path: Path) -> None:
    make = NETWORKS["one parameter in two modules"].make
    model = make().eval()
    headgate.save(model, path)
    loaded = headgate.load(path, make())
    assert same(model(randn(2, *X)), loaded(randn(2, *X)))
    assert loaded.a.weight is loaded.b.weight


def test_a_transposed_weight_is_not_taken_for_the_same(path: Path) -> None:
    """Two parameters may begin at the same place in memory and still hold different numbers."""

    def make() -> nn.Module:
        model = Net(lambda n, x: n.b(n.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
        model.b.weight = nn.Parameter(model.a.weight.detach().T)
        return model

    model = make()
    headgate.save(model, path)
    assert difference(model(randn(3, 4)), headgate.load(path, make())(randn(3, 4))) < 1e-6


def test_buffers_that_are_not_saved_come_from_the_fresh_model(path: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv(3, 8), conv(8, 4)
            self.register_buffer("grid", torch.arange(8.0), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x + self.grid))

    small = decide_(headgate.gate(Positions().eval(), randn(2, *X), target=1.0), 0.5, 0).shrink()
    headgate.save(small, path)
    assert same(small(randn(2, *X)), headgate.load(path, Positions())(randn(2, *X)))


# ------------------------------------------------------------------------------------------------------- other models


OTHERS = {
    "wider": lambda: resnet(width=16),
    "deeper": lambda: resnet(blocks=2),
    "another": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)),
    "empty": nn.Identity,
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", ["shrunk, shared", "shrunk, indexed", "dense", "gated"])
def test_a_file_of_another_model_is_refused(kind: str, other: str, path: Path) -> None:
    model = {
        "shrunk, shared": shrunk, "shrunk, indexed": lambda: shrunk(stream="indexed"), "dense": resnet, "gated": gated_resnet
    }[kind]()  # fmt: skip
    headgate.save(model, path)
    fresh = OTHERS[other]()
    with pytest.raises(headgate.FileError, match=r"does not fit this .*pass a fresh instance of the architecture"):
        headgate.load(path, fresh)


def test_the_same_tensors_under_other_forward_code_are_no_fit(path: Path) -> None:
    def network(residual: bool) -> Net:
        def run(n: Net, x: torch.Tensor) -> torch.Tensor:
            h = n.a(x).relu()
            return n.head((h + n.b(h) if residual else n.b(h)).relu().mean((2, 3)))  # type: ignore[no-any-return]

        return Net(run, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 8, 3, padding=1), head=nn.Linear(8, 5))

    headgate.save(headgate.gate(network(False), randn(1, *X), target=0.9), path)
    with pytest.raises(headgate.FileError, match=r"does not fit this Net \(its forward code makes other gates"):
        headgate.load(path, network(True))


def test_a_shrunk_network_is_no_dense_architecture(path: Path) -> None:
    small = shrunk()
    headgate.save(small, path)
    assert same(small(randn(2, *X)), headgate.load(path, resnet())(randn(2, *X)))
    with pytest.raises(headgate.FileError, match="does not fit"):
        headgate.load(path, decide_(gated_resnet(), 0.3, 5).shrink())


@pytest.mark.parametrize("wrong", ["gated", "a path", None])
def test_load_wants_a_dense_model(wrong: Any, path: Path) -> None:
    headgate.save(shrunk(), path)
    with pytest.raises(headgate.HeadgateError, match="fresh instance of the original, dense architecture"):
        headgate.load(path, gated_resnet() if wrong == "gated" else wrong)


def test_a_gated_network_with_several_inputs_says_how_to_save_it(path: Path) -> None:
    case = NETWORKS["several inputs"]
    gated = headgate.gate(case.make(), example(case), target=1.0)
    net = Net(lambda n, *, image: n.d(n.c(image).relu()).mean((2, 3)), c=conv(3, 8), d=conv(8, 5))
    by_name = headgate.gate(net, {"image": randn(1, *X)}, target=1.0)
    for each in (gated, by_name):
        with pytest.raises(headgate.HeadgateError, match=r"not called with one tensor alone.*state_dict\(\)"):
            headgate.save(each, path)


def test_a_damaged_file_is_refused_by_load(path: Path) -> None:
    headgate.save(shrunk(), path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(headgate.FileError, match="changed after it was saved"):
        headgate.load(path, resnet())
    path.write_bytes(data[:-100])
    with pytest.raises(headgate.FileError, match="damaged"):
        headgate.load(path, resnet())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_gated_model_whose_precision_was_changed_afterwards_shrinks_and_loads(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    gated = headgate.gate(randomize_(resnet()), randn(2, *X), target=0.5, kind=kind).to(dtype).eval()
    images = randn(3, *X).to(dtype)
    if kind == "static":
        gated.project()
        torch.testing.assert_close(gated.shrink()(images), gated(images), rtol=0.05, atol=0.05)
    headgate.save(gated, tmp_path / "gated.safetensors")
    loaded = headgate.load(tmp_path / "gated.safetensors", resnet())
    assert loaded(images).dtype == dtype
    torch.testing.assert_close(loaded(images), gated(images))


def test_exits_whose_precision_was_changed_afterwards_load(tmp_path: Path) -> None:
    exits = headgate.add_exits(randomize_(resnet()), randn(2, *X), at=["layer1"], target=0.9).double().eval()
    headgate.save(exits, tmp_path / "exits.safetensors")
    loaded = headgate.load(tmp_path / "exits.safetensors", resnet())
    images = randn(3, *X).double()
    torch.testing.assert_close(loaded(images), exits(images))


def test_what_can_not_be_built_again_is_not_saved(path: Path) -> None:
    gated = headgate.gate(randomize_(resnet()), randn(2, *X), target=0.5, kind="dynamic").eval()
    with pytest.raises(headgate.HeadgateError, match=r"save that, and call compact\(\) after load"):
        headgate.save(gated.compact(), path)

    class Remembering(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 1}

        def set_extra_state(self, state: object) -> None: ...

    with pytest.raises(headgate.HeadgateError, match=r"`0._extra_state` is no tensor"):
        headgate.save(nn.Sequential(Remembering(2, 2)), path)
    assert not path.exists()


def test_wrappers_are_taken_off_before_saving(path: Path) -> None:
    for wrapped in (nn.DataParallel(resnet()), torch.compile(resnet(), backend="eager")):
        headgate.save(wrapped, path)
        assert same(headgate.load(path, resnet())(randn(2, *X)), wrapped.eval()(randn(2, *X)))

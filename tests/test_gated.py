"""The public contract of a gated model."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import headgate
from headgate.gates.budget import Budget
from headgate.models.cifar_resnet import CifarResNet
from tests.gates.test_dynamic import opinionated_
from tests.networks import NETWORKS, conv, example, head
from tests.oracle import Net, decide_, difference, independent_macs, randn, randomize_, same, same_in_threads

X = (3, 8, 8)


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return randomize_(CifarResNet(1, num_classes=5, width=8).eval())


def gated_resnet(**options: Any) -> headgate.GatedModel:
    return headgate.gate(resnet(), randn(2, *X), **options)


def test_the_fixed_names_have_the_fixed_signatures() -> None:
    gate = inspect.signature(headgate.gate).parameters
    assert list(gate)[:2] == ["model", "example_input"]
    defaults = {name: gate[name].default for name in ("kind", "granularity", "target", "frozen")}
    assert defaults == {"kind": "static", "granularity": "channel", "target": 0.5, "frozen": ()}
    assert all(gate[name].kind is inspect.Parameter.KEYWORD_ONLY for name in defaults)
    for name in (
        "cost_loss", "param_groups", "macs", "dense_macs", "gate_probabilities", "set_gate_probabilities", "gate_parameters",
        "strategy", "calibrate", "shrink",
    ):  # fmt: skip
        assert hasattr(headgate.GatedModel, name), name
    assert set(headgate.__all__) <= set(dir(headgate))


def test_the_ten_lines_of_the_readme() -> None:
    """Gate, train, calibrate, shrink: the shrunk network meets the target and still answers what was learnt."""
    torch.manual_seed(0)
    x, y = randn(64, *X), torch.arange(64) % 5
    x += F.one_hot(y, 5).repeat(1, 39)[:, :192].reshape(64, *X)
    model = CifarResNet(1, num_classes=5, width=8)
    gated = headgate.gate(model, x[:2], target=0.5, budget=Budget(0.5, ramp_steps=20))
    optimizer = torch.optim.SGD(gated.param_groups(lr=0.05, weight_decay=1e-4), momentum=0.9)
    for _ in range(60):
        loss = F.cross_entropy(gated(x), y) + gated.cost_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    gated.calibrate([(x, y)], batches=2)
    small = gated.shrink()
    assert independent_macs(small, x[:1]) <= 0.5 * gated.dense_macs
    assert float((small(x).argmax(1) == y).float().mean()) > 0.9


@pytest.mark.parametrize("training", [True, False])
def test_a_gated_model_is_ready_to_be_trained_whatever_the_mode_of_its_model(training: bool) -> None:
    model = resnet().train(training)
    gated = headgate.gate(model, randn(2, *X))
    assert {module.training for module in gated.modules()} == {True}
    assert model.training == training


def test_gates_are_sampled_in_training_and_decided_in_use() -> None:
    gated = gated_resnet(initial_probability=0.6).train()
    gated(randn(8, *X))
    assert gated._last.gates_BG.shape == (8, gated.graph.gate_count)
    assert 0 < float(gated._last.gates_BG.detach().mean()) < 1
    gated.eval()
    assert torch.equal(gated(randn(8, *X)), gated(randn(8, *X)))
    assert (gated._last.gates_BG == 1).all(), "0.6 is above tau"


def test_a_gated_model_has_all_parameters_and_those_of_the_gates() -> None:
    gated = gated_resnet()
    assert sum(p.numel() for p in gated.gate_parameters()) == gated.graph.gate_count
    own = {id(p) for p in gated.gate_parameters()}
    body = [p for p in gated.parameters() if id(p) not in own]
    assert [p.shape for p in body] == [p.shape for p in resnet().parameters()]


def test_probabilities_go_out_and_in_by_name() -> None:
    gated = gated_resnet()
    before = gated.gate_probabilities()
    assert all(torch.allclose(p, torch.tensor(0.95)) for p in before.values())
    gated.set_gate_probabilities({"conv1": torch.linspace(0.1, 0.9, 8)})
    after = gated.gate_probabilities()
    torch.testing.assert_close(after.pop("conv1"), torch.linspace(0.1, 0.9, 8))
    assert all(torch.equal(before[name], p) for name, p in after.items()), "masks that are not named keep theirs"
    after["layer1.0.conv1"].zero_()
    assert gated.gate_probabilities()["layer1.0.conv1"].min() > 0.9, "what is given out is a copy"


def test_decisions_made_elsewhere_hold_after_others_were_made() -> None:
    gated = gated_resnet().eval()
    gated.project()
    before = gated.macs()
    given = torch.tensor([1.0] + [0.0] * 7)
    gated.set_gate_probabilities({"layer1.0.conv1": given})
    assert gated.macs() < before
    small = gated.shrink()
    assert isinstance(small, CifarResNet) and small.layer1[0].conv1.out_channels == 1


def test_a_number_of_runs_of_any_kind_can_be_saved(tmp_path: Path) -> None:
    gated = gated_resnet().eval().strategy("ensemble", runs=np.int64(3))
    headgate.save(gated, tmp_path / "f.safetensors")
    assert isinstance(headgate.load(tmp_path / "f.safetensors", resnet()), headgate.GatedModel)


def test_macs_tell_of_the_last_pass() -> None:
    gated = gated_resnet().eval()
    assert (
        gated.macs()
        == gated.dense_macs
        == independent_macs(resnet(), randn(1, *X))
        == headgate.count_macs(resnet(), randn(2, *X))
    )
    decide_(gated, 0.5, 0)
    will = gated.macs()
    gated(randn(3, *X))
    assert gated.macs() == will < gated.dense_macs
    gated.train()(randn(16, *X))
    sampled = gated.macs()
    assert sampled == pytest.approx(float(gated.cost.macs_B(gated._last).detach().mean()) * gated.dense_macs)


def test_polarised_is_the_share_of_sure_gates() -> None:
    gated = headgate.gate(NETWORKS["BatchNorm"].make(), randn(2, *X), target=1.0)
    gated.set_gate_probabilities(
        {"a": torch.tensor([0.01, 0.04, 0.06, 0.5, 0.5, 0.94, 0.96, 0.99]), "b": torch.full((6,), 0.5)}
    )
    assert gated.polarised() == pytest.approx(4 / 14)


def test_inputs_of_many_forms() -> None:
    model = Net(
        lambda n, image, extra=None, *, scale=1.0: n.head(F.relu(n.a(image)).mean((2, 3)) * scale + (0 if extra is None else n.b(extra))),
        a=conv(3, 8), b=nn.Linear(4, 8), head=head(8),
    ).eval()  # fmt: skip
    image, extra = randn(2, *X), randn(2, 4)
    for given in (image, (image, extra), {"image": image, "extra": extra, "scale": 2.0}, [image]):
        gated = decide_(headgate.gate(model, given, target=1.0), 0.5, 0)
        args, kwargs = (
            ((), given) if isinstance(given, dict) else (given if isinstance(given, (tuple, list)) else (given,), {})
        )
        assert difference(gated(*args, **kwargs), gated.shrink()(*args, **kwargs)) < 1e-4


def test_gradients_accumulate() -> None:
    gated = headgate.gate(resnet(), randn(2, *X), budget=Budget.paper(0.5)).train()
    for _ in range(2):
        (gated(randn(4, *X)).square().mean() + gated.cost_loss()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gated.parameters())


def test_a_pass_without_gradients_works() -> None:
    gated = gated_resnet().train()
    with torch.no_grad():
        gated(randn(2, *X))
        assert not gated.cost_loss().requires_grad
    with torch.inference_mode():
        gated.eval()(randn(2, *X))


def test_frozen_weights_stay_out_of_the_optimizer() -> None:
    model = resnet()
    for parameter in model.layer1.parameters():
        parameter.requires_grad_(False)
    gated = headgate.gate(model, randn(2, *X), target=1.0)
    weights, gates = gated.param_groups(lr=0.1)
    assert all(p.requires_grad for p in (*weights["params"], *gates["params"]))
    small = decide_(gated, 0.5, 0).shrink()
    assert not any(p.requires_grad for p in small.layer1.parameters())


def test_an_error_in_a_pass_leaves_the_model_usable() -> None:
    gated = gated_resnet().eval()
    with pytest.raises(RuntimeError):
        gated(randn(2, 4, 8, 8))
    assert gated._board.draw is None
    gated(randn(2, *X))


@pytest.mark.parametrize("bad", [randn(3, *X) * math.nan, randn(0, *X)], ids=["NaN", "no image"])
def test_a_bad_batch_leaves_no_trace_in_the_next(bad: torch.Tensor) -> None:
    gated = opinionated_(gated_resnet(kind="dynamic", static=["layer2"], target=0.9)).eval()
    expected = gated(randn(4, *X))
    gated(bad)
    assert torch.equal(gated(randn(4, *X)), expected)


@pytest.mark.parametrize("name", ["threshold", "always_on", "sample", "ensemble"])
@pytest.mark.parametrize("static", [(), ("layer2",)])
@pytest.mark.parametrize("granularity", ["channel", "layer"])
def test_no_image_gives_no_answer_and_nothing_to_tell_of(name: str, static: tuple[str, ...], granularity: str) -> None:
    gated = gated_resnet(kind="dynamic", static=static, granularity=granularity, target=0.9).eval().strategy(name)
    assert gated(randn(0, *X)).shape == (0, 5)
    for ask in (gated.macs, gated.activation_rates, gated.seen, gated.cost_loss, gated.thresholded_macs):
        with pytest.raises(headgate.NotDecided, match="no image in the last pass"):
            ask()
    gated(randn(2, *X))
    assert gated.macs() > 0


def test_an_empty_batch_in_a_sweep_counts_nothing() -> None:
    gated = gated_resnet(kind="dynamic")
    batches = [(randn(n, *X), torch.zeros(n, dtype=torch.int64)) for n in (4, 0)]
    assert gated.sweep_tau(batches, [0.5]) == gated.sweep_tau(batches[:1], [0.5])


def test_a_copy_is_independent() -> None:
    gated = gated_resnet().eval()
    twin = copy.deepcopy(gated)
    twin.set_gate_probabilities({name: torch.zeros_like(p) for name, p in twin.gate_probabilities().items()})
    assert torch.equal(gated(randn(2, *X)), resnet()(randn(2, *X)))
    assert not torch.equal(twin(randn(2, *X)), gated(randn(2, *X)))
    assert twin.macs() < gated.macs() == gated.dense_macs


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_copy_right_after_a_training_step(kind: str) -> None:
    """Averages of weights are taken over copies."""
    gated = gated_resnet(kind=kind)
    (gated(randn(4, *X)).sum() + gated.cost_loss()).backward()
    average = torch.optim.swa_utils.AveragedModel(gated)
    assert torch.equal(average.module.eval()(randn(2, *X)), gated.eval()(randn(2, *X)))


def test_the_cost_loss_of_a_pass_moves_the_budget_once() -> None:
    gated = gated_resnet(budget=Budget(0.5, ramp_steps=10))
    gated(randn(4, *X))
    first = gated.cost_loss()
    assert gated.cost_loss() is first and gated.budget.step == 1
    gated(randn(4, *X))
    assert gated.cost_loss() is not first and gated.budget.step == 2


def test_settled_gates_are_settled_after_loading() -> None:
    gated = gated_resnet(kind="dynamic").settle_()
    other = gated_resnet(kind="dynamic")
    other.load_state_dict(gated.state_dict())
    assert other.settled and not any(p.requires_grad for p in other.gate_parameters())
    other.load_state_dict(gated.settle_(learning=True).state_dict())
    assert other.settled and other.learning and all(p.requires_grad for p in other.dynamic.parameters())
    other.load_state_dict(gated_resnet(kind="dynamic").state_dict())
    assert not other.settled and not other.learning and any(p.requires_grad for p in other.gate_parameters())


def test_threads_may_share_a_model_in_eval_mode() -> None:
    gated = opinionated_(gated_resnet(kind="dynamic", stream="indexed")).eval()
    assert same_in_threads(gated, [randn(1 + seed % 3, *X, seed=seed) * 2 for seed in range(24)])


def test_an_image_larger_than_the_example_is_computed_alike() -> None:
    gated = decide_(gated_resnet(target=1.0), 0.5, 0)
    x = randn(2, 3, 16, 16)
    assert difference(gated(x), gated.shrink()(x)) < 1e-4


def test_the_text_says_gates_target_and_cost() -> None:
    text = repr(gated_resnet(stream="indexed"))
    assert "gates in" in text and "target=0.5 of" in text and "stream='indexed'" in text


def test_the_model_can_be_a_submodule_of_the_users_own() -> None:
    """Gate a part, keep the rest: the usual way out where the whole has control flow on data."""

    class Whole(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x) if float(x.sum()) < 1e9 else x

    whole = Whole(decide_(gated_resnet(target=1.0), 0.5, 0))
    expected = whole(randn(2, *X))
    whole.part = whole.part.shrink()
    assert difference(expected, whole(randn(2, *X))) < 1e-4


def test_shrinking_twice_gives_the_same() -> None:
    gated = decide_(gated_resnet(target=1.0), 0.5, 0)
    assert same(gated.shrink()(randn(2, *X)), gated.shrink()(randn(2, *X)))


def test_shrinking_in_training_mode_gives_the_network_of_use() -> None:
    gated = decide_(gated_resnet(target=1.0), 0.5, 0)
    expected = gated(randn(2, *X))
    small = gated.train().shrink()
    assert gated.training and difference(expected, small(randn(2, *X))) < 1e-4


def test_a_shrunk_network_is_pickled_like_any_other_module() -> None:
    small = decide_(
        headgate.gate(CifarResNet(1, width=8).eval(), randn(2, *X), target=1.0, stream="indexed"), 0.5, 0
    ).shrink()
    assert same(small(randn(2, *X)), pickle.loads(pickle.dumps(small))(randn(2, *X)))
    assert same(small(randn(2, *X)), copy.deepcopy(small)(randn(2, *X)))


def test_inspect_needs_no_gates() -> None:
    case = NETWORKS["one parameter in two modules"]
    graph = headgate.inspect(case.make(), example(case))
    assert graph.masks == () and graph.dense_macs == headgate.count_macs(case.make(), example(case))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.a, self.fc = conv(3, 8), head(8)
        self.b = nn.Sequential(conv(8, 8), nn.ReLU(), conv(8, 8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).relu()
        y = self.b(y) if self.reentrant is None else checkpoint(self.b, y, use_reentrant=self.reentrant)
        return self.fc(y.mean((2, 3)))


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_gradient_checkpoints_find_the_same_gates_again(kind: str) -> None:
    gradients = []
    for reentrant in (None, False):
        torch.manual_seed(0)
        gated = headgate.gate(Checkpointed(reentrant), randn(2, *X), kind=kind, initial_probability=0.6)
        (gated(randn(4, *X)).square().sum() + gated.cost_loss()).backward()
        gradients.append({name: p.grad for name, p in gated.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_the_old_kind_of_checkpoints_is_refused_rather_than_wrong() -> None:
    gated = headgate.gate(Checkpointed(True), randn(2, *X), initial_probability=0.6)
    loss = gated(randn(4, *X)).square().sum()
    with pytest.raises(headgate.HeadgateError, match="use_reentrant=False"):
        loss.backward()


@dataclass
class Answer:
    scores: torch.Tensor


def test_an_answer_in_a_dataclass_is_an_output() -> None:
    net = Net(lambda n, x: Answer(n.fc(n.b(n.a(x).relu()).relu().mean((2, 3)))), a=conv(3, 8), b=conv(8, 8), fc=head(8))
    gated = headgate.gate(net, randn(2, *X), target=0.5).project().eval()
    assert [mask.name for mask in gated.graph.masks] == ["a", "b"]
    assert difference(gated(randn(2, *X)).scores, gated.shrink()(randn(2, *X)).scores) < 1e-5


def test_arguments_by_name_are_found_in_batches() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm, self.fc = conv(3, 8), conv(1, 8), nn.BatchNorm1d(16), nn.Linear(16, 5)

        def forward(self, *, image: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
            both = torch.cat([self.a(image).relu(), self.b(depth).relu()], 1)
            return self.fc(self.norm(both.mean((2, 3))))

    batch = {"depth": randn(4, 1, 8, 8), "image": randn(4, 3, 8, 8)}
    gated = headgate.gate(Two(), batch)
    labelled = [batch | {"label": torch.arange(4)}]
    gated.prime_(labelled, 1).calibrate(labelled, batches=2)
    assert len(gated.sweep_tau(labelled, [0.5])) == 1
    assert difference(gated.eval()(**batch), gated.shrink()(**batch)) < 1e-5


@pytest.mark.parametrize("write", [torch.save, lambda model, path: pickle.dumps(model)], ids=["torch.save", "pickle"])
def test_pickles_are_refused_with_the_way_to_save(tmp_path: Path, write: Callable[..., Any]) -> None:
    with pytest.raises(headgate.HeadgateError, match=r"gated model can't be pickled.*headgate\.save"):
        write(gated_resnet(), tmp_path / "model.pt")


def test_a_shallow_copy_shares_its_weights() -> None:
    gated = gated_resnet().eval()
    twin = copy.copy(gated)
    assert twin is not gated and all(a is b for a, b in zip(gated.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("loss", ["per_gate", "activation", "macs"])
def test_what_sampled_gates_cost_is_known_whatever_the_loss_pulls_at(loss: str) -> None:
    gated = gated_resnet(loss=loss, initial_probability=0.6).train()
    gated(randn(4, *X))
    gated.cost_loss()
    assert gated.budget.last_cost == pytest.approx(gated.macs() / gated.dense_macs)

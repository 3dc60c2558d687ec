"""Early exit: an image that leaves gets the answer of its exit, and nothing behind it is computed for it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headgate
from headgate.errors import HeadgateError, ModelError, NotDecided, TargetError
from headgate.exits.reading import wish
from headgate.gated import GatedModel
from headgate.gates.budget import Budget
from headgate.models.cifar_densenet import CifarDenseNet
from headgate.models.cifar_resnet import CifarResNet
from tests.gates.test_dynamic import opinionated_
from tests.networks import NETWORKS, Block, conv
from tests.networks import example as example_of
from tests.oracle import Net, decide_, independent_macs, randn, randomize_, same_in_threads

SHAPE = (3, 16, 16)


def dense_net() -> nn.Module:
    torch.manual_seed(0)
    return randomize_(CifarDenseNet(10, 4, num_classes=5))


def cascade(
    model: nn.Module | None = None, at: tuple[str, ...] = ("block1", "block2"), **options
) -> headgate.ExitModel:  # type: ignore[no-untyped-def]
    model = dense_net() if model is None else model
    exits = headgate.add_exits(model, randn(1, *SHAPE), at, **{"target": 0.9, **options})
    for gate in exits.gates:  # images that differ in what they want, half of them leaving
        nn.init.normal_(gate.head.weight, std=4.0)
    return balanced_(exits, torch.cat([images for images, _ in data()]))


@torch.no_grad()
def balanced_(exits: headgate.ExitModel, x: Tensor) -> headgate.ExitModel:
    """Half of these images want to leave at each exit."""
    training = exits.training
    _, wishes = exits.eval()._watch((x,), {})
    for gate, wished in zip(exits.gates, wishes, strict=True):
        gate.head.bias -= wished.quantile(0.5)  # between two images, not on one
    return exits.train(training)


def data(batches: int = 3, images: int = 8) -> list[tuple[Tensor, Tensor]]:
    return [(randn(images, *SHAPE, seed=seed) * 2, torch.arange(images) % 5) for seed in range(batches)]


@torch.no_grad()
def one_by_one(exits: headgate.ExitModel, x: Tensor) -> tuple[Tensor, list[int]]:
    """The definition: all exits of one image at a time, the first that wants to leave answers."""
    answers, ways = [], []
    for image in x.split(1):
        logits, wishes = exits._watch((image,), {})
        wants = [bool(torch.sigmoid(wish) > tau) for wish, tau in zip(wishes, exits.taus, strict=True)]
        way = wants.index(True) if any(wants) else len(wants)
        ways.append(way)
        answers.append(logits[way])
    return torch.cat(answers), ways


def test_every_image_gets_the_answer_of_its_exit() -> None:
    exits = cascade().eval()
    x = torch.cat([images for images, _ in data()])
    expected, ways = one_by_one(exits, x)
    assert len(set(ways)) == 3, "all exits are taken by somebody"
    torch.testing.assert_close(exits(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("taus", "way"), [([0.0, 0.0], 0), ([1.0, 0.0], 1), ([1.0, 1.0], 2)])
def test_nothing_is_computed_for_images_that_left(taus: list[float], way: int) -> None:
    exits = cascade().eval()
    exits.taus = taus
    seen: dict[str, int] = {}
    for name in ("block1", "block2", "block3", "fc"):
        exits.model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: seen.update({name: len(args[0])})
        )
    x = randn(5, *SHAPE)
    answers = exits(x)
    assert answers.shape == (5, 5)
    assert list(seen) == ["block1", "block2", "block3", "fc"][: 1 + way + (way == 2)]
    exits.model._forward_hooks.clear()
    expected = one_by_one(exits, x)
    assert set(expected[1]) == {way}
    torch.testing.assert_close(answers, expected[0], rtol=1e-4, atol=1e-5)


def test_later_blocks_run_on_fewer_images() -> None:
    exits = cascade().eval()
    x = torch.cat([images for images, _ in data()])
    _, ways = one_by_one(exits, x)
    seen: list[int] = []
    exits.model.block3.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    exits(x)
    assert seen == [sum(way == 2 for way in ways)]


def thirds(exits: headgate.ExitModel, images: Tensor) -> list[int]:
    """Thresholds at which some images leave at every exit; who leaves where."""
    with torch.no_grad():
        wishes = [torch.sigmoid(wish) for wish in exits._watch((images,), {})[1]]
    place = len(images) * 2 // 3
    exits.taus = [float(wish.sort().values[place : place + 2].mean()) for wish in wishes]  # between two images
    return [int((wish > tau).sum()) for wish, tau in zip(wishes, exits.taus, strict=True)]


@pytest.mark.parametrize("kind", ["plain", "static", "dynamic"])
@pytest.mark.parametrize("seed", range(4))
def test_images_that_move_are_answered_as_where_they_were(kind: str, seed: int) -> None:
    """Without gradients those that stay move together in their own memory; with gradients they are copied."""
    model = dense_net()
    if kind != "plain":
        gated = headgate.gate(model, randn(1, *SHAPE), kind=kind, target=0.9)  # type: ignore[arg-type]
        model = opinionated_(gated) if kind == "dynamic" else decide_(gated, 0.7, seed)
    exits = cascade(model, target=1.0).eval()
    images = randn(13, *SHAPE, seed=seed)
    assert all(0 < count < 13 for count in thirds(exits, images))
    copied = exits(images).detach()
    with torch.inference_mode():
        moved = exits(images)
    torch.testing.assert_close(moved, copied, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        alone = torch.cat([exits(image[None]) for image in images])
    torch.testing.assert_close(alone, copied, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_others_hold_is_not_moved() -> None:
    """The caller's images, and what a hook has kept."""
    exits = cascade().eval()
    images = randn(13, *SHAPE)
    thirds(exits, images)
    kept: list[Tensor] = []
    block = exits.model.block1
    hook = block.register_forward_hook(lambda module, args, output: kept.append(output))
    order = list(block._forward_hooks)
    block._forward_hooks.move_to_end(order[-1], last=False)  # before the exit's own
    exits(images)
    hook.remove()
    seen = kept[0].clone()
    exits(images)
    assert torch.equal(kept[0], seen) and len(kept[0]) == 13

    net = Net(
        lambda n, x: n.head(F.relu(n.b(F.relu(n.a(n.start(x))))).mean((2, 3))),
        start=nn.Identity(), a=conv(3, 8), b=conv(8, 8), head=nn.Linear(8, 5),
    )  # fmt: skip
    early = cascade(randomize_(net), ("start",), target=1.0).eval()
    thirds(early, images)
    before = images.clone()
    early(images)
    assert torch.equal(images, before)


def test_the_cost_is_that_of_the_ways() -> None:
    exits = cascade().eval()
    x = torch.cat([images for images, _ in data()])
    _, ways = one_by_one(exits, x)
    exits(x)
    model, example = exits.model, randn(1, *SHAPE)
    front = independent_macs(nn.Sequential(model.conv1, model.block1), example)
    middle = independent_macs(nn.Sequential(model.conv1, model.block1, model.trans1, model.block2), example) - front
    whole = headgate.count_macs(dense_net(), example)
    segments = [front, middle, whole - front - middle]
    heads = [head.fc.in_features * 5 for head in exits.heads]
    gates = [16 * (gate.trunk.in_features + 1) for gate in exits.gates]
    total = 0
    for way in ways:
        total += sum(segments[: way + 1]) + sum(gates[: way + 1]) + sum(heads[: way + 1])
    assert exits.macs() == pytest.approx(total / len(ways), rel=1e-6)
    table = exits.table([(x, torch.zeros(len(x), dtype=torch.int64))])
    assert table.macs == pytest.approx(total / len(ways), rel=1e-6)
    assert [row.share for row in table.rows] == [pytest.approx(ways.count(way) / len(ways)) for way in range(3)]


def test_the_table_agrees_with_real_answers() -> None:
    exits = cascade().eval()
    batches = data()
    table = exits.table(batches)
    right = sum(int((exits(x).argmax(1) == y).sum()) for x, y in batches)
    assert table.accuracy == pytest.approx(right / table.images) and table.images == 24
    assert sum(row.share for row in table.rows) == pytest.approx(1)
    selected = sum(row.share * (row.accuracy_of_selected or 0) for row in table.rows)
    assert table.accuracy == pytest.approx(selected)
    assert table.rows[-1].accuracy_of_all == table.accuracy_of_last
    assert [row.macs for row in table.rows] == sorted(row.macs for row in table.rows)


def test_thresholds_can_be_tried_without_another_pass() -> None:
    exits = cascade().eval()
    images = torch.cat([images for images, _ in data()])
    watched = exits.watch(data())
    for tau, point in zip((0.2, 0.8), exits.sweep_tau(data(), (0.2, 0.8)), strict=True):
        before, exits.taus = exits.taus, [tau] * 2
        _, ways = one_by_one(exits, images)
        table = exits.table(data())
        exits.taus = before
        assert exits.exit_of(watched, [tau] * 2).tolist() == ways
        assert table == exits.table_of(watched, [tau] * 2)
        assert (point.tau, point.accuracy, point.macs) == (tau, table.accuracy, table.macs)
        assert float(exits.macs_of(watched, [tau] * 2).mean()) == pytest.approx(point.macs)
        assert sum(exits.layers_of(watched, [tau] * 2).values()) == pytest.approx(point.macs)


def test_training_draws_one_exit_an_image_and_teaches_the_gates() -> None:
    torch.manual_seed(0)
    exits = headgate.add_exits(dense_net(), randn(1, *SHAPE), ["block1", "block2"], target=0.9, initial_probability=0.3)
    (x, y), *_ = data()
    answers = exits(x)
    assert exits._reach_BK is not None
    reach = exits._reach_BK.detach()
    assert set(reach.unique().tolist()) == {0.0, 1.0} and bool((reach[:, 0] == 1).all())
    assert bool((reach[:, 1:] <= reach[:, :-1]).all()), "who left does not come back"
    for image in range(len(x)):
        way = int(reach[image].sum()) - 1
        torch.testing.assert_close(answers[image], exits._logits[way][image])
    (F.cross_entropy(answers, y) + exits.cost_loss() + exits.classifier_loss(y)).backward()
    assert all((p.grad != 0).any() for p in exits.gates.parameters())
    assert all(p.grad is not None for p in exits.heads.parameters())
    assert exits.macs() < exits.dense_macs * 1.1


def test_a_model_that_does_not_learn_stays_as_it_is() -> None:
    exits = cascade(train_model=False, budget=Budget(0.9, ramp_steps=5))
    before = {name: value.clone() for name, value in exits.model.state_dict().items()}
    heads = exits.heads[0].fc.weight.detach().clone()
    groups = exits.param_groups(lr=0.1, weight_decay=1e-4, gate_lr=0.05, classifier_scale=2.0)
    assert [(group["name"], group["lr"]) for group in groups] == [("classifiers", 0.2), ("gates", 0.05)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    for x, y in data(4):
        loss = F.cross_entropy(exits.train()(x), y) + exits.cost_loss() + exits.classifier_loss(y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in exits.model.state_dict().items())
    assert not torch.equal(exits.heads[0].fc.weight, heads) and exits.training and not exits.model.training
    watched = exits.eval().watch(data(1))
    expected = (dense_net().eval()(data(1)[0][0]).argmax(1) == data(1)[0][1]).tolist()
    assert watched.right_NK[:, -1].tolist() == expected


def test_training_reaches_the_target_and_calibration_meets_it() -> None:
    torch.manual_seed(0)
    target = 0.88  # the first block alone is three quarters of this network
    exits = headgate.add_exits(
        dense_net(), randn(1, *SHAPE), ["block1", "block2"], target=target, budget=Budget(target, ramp_steps=40)
    )
    optimizer = torch.optim.SGD(exits.param_groups(lr=0.02, gate_lr=0.1), momentum=0.9)
    batches = data(4, 16)
    costs = []
    for step in range(100):
        x, y = batches[step % 4]
        (F.cross_entropy(exits(x), y) + exits.cost_loss() + exits.classifier_loss(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        costs.append(exits.macs() / exits.dense_macs)
    assert sum(costs[-20:]) / 20 == pytest.approx(target, abs=0.04)
    for wanted in (0.8, 0.9):
        exits.calibrate(batches, target=wanted)
        reached = exits.table(batches).macs_fraction
        assert wanted - 0.05 < reached <= wanted
    dear = exits.calibrate(batches, target=1.0).table(batches)
    assert dear.macs_fraction <= 1.0


@pytest.mark.parametrize("kind", ["static", "dynamic", "shrunk"])
def test_together_with_channel_gates(kind: str) -> None:
    torch.manual_seed(0)
    model = randomize_(CifarResNet(1, num_classes=5))
    gated = headgate.gate(model, randn(1, *SHAPE), target=0.6, kind="dynamic" if kind == "dynamic" else "static")
    inner: nn.Module = gated
    if kind == "dynamic":
        opinionated_(gated)
    else:
        probabilities = {name: torch.rand(p.shape) for name, p in gated.gate_probabilities().items()}
        gated.set_gate_probabilities(probabilities)
        gated.project()
        inner = gated.shrink() if kind == "shrunk" else gated
    exits = cascade(inner, ("layer1", "layer2"))
    (x, y), *_ = data(1, 12)
    (exits(x).sum() + exits.cost_loss() + exits.classifier_loss(y)).backward()
    assert all(p.grad is not None for p in exits.gate_parameters() if p.requires_grad)
    balanced_(exits.eval(), x)
    expected, ways = one_by_one(exits, x)
    assert len(set(ways)) > 1
    torch.testing.assert_close(exits(x), expected, rtol=1e-4, atol=1e-5)
    table = exits.table([(x, y)])
    assert table.macs < exits.dense_macs
    if kind != "dynamic":
        assert exits.macs() == pytest.approx(table.macs, rel=1e-5)


def test_the_models_own_weights_are_not_changed_and_the_state_goes_on() -> None:
    model = dense_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exits = cascade(model)
    exits.train()(data()[0][0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    exits.cost_loss()
    exits.taus = [0.3, 0.6]
    twin = cascade(model)
    twin.load_state_dict(exits.state_dict())
    assert twin.taus == [0.3, 0.6] and twin.budget.step == 1
    x = data()[0][0]
    assert torch.equal(exits.eval()(x), twin.eval()(x))


def test_a_gate_reads_how_sure_its_classifier_is() -> None:
    """Whichever class that is of: with all activations alike, only the classifier's answer tells images apart."""
    exits = headgate.add_exits(dense_net(), randn(1, *SHAPE), ["block1"], target=0.9).eval()
    nn.init.normal_(exits.gates[0].head.weight, std=4.0)
    means = torch.ones(3, exits.heads[0].norm.num_features)
    sure = torch.tensor([[9.0, 0, 0, 0, 0], [0, 0, 9.0, 0, 0], [0.1, 0, 0, 0, 0]], requires_grad=True)
    wishes = wish(exits.gates[0], means, sure)
    assert torch.isclose(wishes[0], wishes[1]) and not torch.isclose(wishes[0], wishes[2])
    wishes.sum().backward()
    assert sure.grad is None, "a classifier does not learn to please the gate"


def test_a_gate_tells_sure_images_from_surer_ones() -> None:
    """Their probabilities are the same in float32; what is left for the other classes is not."""
    exits = headgate.add_exits(dense_net(), randn(1, *SHAPE), ["block1"], target=0.9).eval()
    nn.init.normal_(exits.gates[0].head.weight, std=4.0)
    means = torch.ones(2, exits.heads[0].norm.num_features)
    answers = torch.tensor([[20.0, 0, 0, 0, 0], [30.0, 0, 0, 0, 0]])
    assert torch.equal(*answers.softmax(1)[:, :1])
    assert (wish(exits.gates[0], means, answers).diff().abs() > 0.1).all()


def test_gates_that_were_told_other_things_are_refused() -> None:
    exits = cascade(dense_net())
    state = exits.state_dict()
    del state["_extra_state"]["reads"]
    with pytest.raises(headgate.FileError, match="train them again"):
        exits.load_state_dict(state)


@pytest.mark.parametrize("head", ["mean", "conv"])
def test_classifiers_can_be_chosen_and_are_counted(head: str) -> None:
    exits = cascade(randomize_(CifarDenseNet(22, 12, num_classes=5)), head=head, target=0.99).eval()
    x = torch.cat([images for images, _ in data()])
    expected, ways = one_by_one(exits, x)
    assert len(set(ways)) == 3
    torch.testing.assert_close(exits(x), expected, rtol=1e-4, atol=1e-5)
    first = exits.table(data()).rows[0]
    model, example = exits.model, randn(1, *SHAPE)
    front = nn.Sequential(model.conv1, model.block1)
    own = independent_macs(exits.heads[0], front(example)) + 16 * (exits.gates[0].trunk.in_features + 1)
    assert first.macs == pytest.approx(independent_macs(front, example) + own)
    with pytest.raises(HeadgateError, match="mean or conv"):
        cascade(head="linear")
    with pytest.raises(HeadgateError, match="every exit needs its own"):
        cascade(head=nn.Flatten())


@pytest.mark.parametrize(("kind", "head"), [("dense", "mean"), ("dense", "conv"), ("dynamic", "mean")])
def test_a_saved_cascade_answers_the_same(kind: str, head: str, tmp_path: Path) -> None:
    model = randomize_(CifarResNet(2, num_classes=5))
    inner = headgate.gate(model, randn(1, *SHAPE), kind="dynamic", target=0.8) if kind == "dynamic" else model
    exits = cascade(inner, ("layer1", "layer2"), target=0.8, head=head)
    exits.taus = [0.45, 0.55]
    exits.eval()
    headgate.save(exits, tmp_path / "exits.safetensors")
    loaded = headgate.load(tmp_path / "exits.safetensors", CifarResNet(2, num_classes=5))
    assert isinstance(loaded, headgate.ExitModel) and loaded.taus == [0.45, 0.55] and loaded.target == 0.8
    x = torch.cat([images for images, _ in data()])
    assert torch.equal(exits(x), loaded(x))
    with pytest.raises(headgate.FileError):
        headgate.load(tmp_path / "exits.safetensors", CifarResNet(1, num_classes=5))


def test_an_exit_that_nobody_takes_is_not_computed() -> None:
    exits = cascade().eval()
    with torch.no_grad():
        exits.gates[1].head.bias -= 100
    x = torch.cat([images for images, _ in data()])
    watched = exits.watch(data())
    exits.calibrate_on(watched, target=0.93)
    assert exits.taus[0] < 1 and exits.taus[1] == 1
    seen: list[int] = []
    exits.heads[1].register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    expected, ways = one_by_one(exits, x)
    seen.clear()
    torch.testing.assert_close(exits(x), expected, rtol=1e-4, atol=1e-5)
    assert not seen and set(ways) == {0, 2}
    assert exits.macs() == pytest.approx(exits.table_of(watched).macs) and exits.macs() <= 0.93 * exits.dense_macs
    assert sum(exits.layers_of(watched).values()) == pytest.approx(exits.macs())
    exits.calibrate_on(watched, target=1.0)
    assert exits.taus == [1, 1] and exits.table_of(watched).macs == pytest.approx(exits.dense_macs), "nobody has to"


def test_a_copy_is_a_cascade_of_its_own(tmp_path: Path) -> None:
    """Averages of weights are taken over copies; also right after a training step."""
    exits = cascade()
    x = torch.cat([images for images, _ in data()])
    exits(x)
    twin = copy.deepcopy(exits).eval()
    torch.save(exits, tmp_path / "pickled.pt")
    back = torch.load(tmp_path / "pickled.pt", weights_only=False).eval()
    expected, macs = exits.eval()(x), exits.macs()
    exits.taus = [1.0, 1.0]
    for other in (twin, back):
        assert torch.equal(other(x), expected) and other.macs() == macs
        assert other.macs() < other.dense_macs


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("late", [False, True])
def test_other_precisions(dtype: torch.dtype, late: bool, tmp_path: Path) -> None:
    example = randn(1, *SHAPE)
    if late:
        exits = headgate.add_exits(dense_net(), example, ["block1"], target=0.9).to(dtype)
    else:
        exits = headgate.add_exits(dense_net().to(dtype), example.to(dtype), ["block1"], target=0.9)
    assert {p.dtype for p in exits.gates.parameters()} == {torch.float32}
    x, y = data()[0]
    loss = F.cross_entropy(exits(x.to(dtype)).float(), y) + exits.cost_loss() + exits.classifier_loss(y)
    loss.backward()
    assert exits.classifier_loss(y).dtype in (torch.float32, torch.float64)
    answers = balanced_(exits.eval(), x.to(dtype))(x.to(dtype))
    if not late:
        headgate.save(exits, tmp_path / "exits.safetensors")
        loaded = headgate.load(tmp_path / "exits.safetensors", dense_net().to(dtype))
        assert torch.equal(loaded(x.to(dtype)), answers)


def test_a_saved_cascade_is_as_it_was(tmp_path: Path) -> None:
    exits = cascade(train_model=False)
    exits.budget.target = 0.8  # moved on the way
    headgate.save(exits, tmp_path / "exits.safetensors")
    loaded = headgate.load(tmp_path / "exits.safetensors", dense_net())
    assert isinstance(loaded, headgate.ExitModel)
    assert (loaded.target, loaded.budget.target, loaded.train_model) == (0.9, 0.8, False)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert not loaded.train().model.training


class InPlace(nn.Module):
    """What comes behind the exit overwrites it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(F.relu(self.norm(self.stem(x)), inplace=True)).mean((2, 3)))


def test_what_is_overwritten_behind_an_exit_can_be_learned_from() -> None:
    exits = headgate.add_exits(InPlace(), randn(1, *SHAPE), ["norm"], target=0.9)
    x, y = data()[0]
    (F.cross_entropy(exits(x), y) + exits.cost_loss() + exits.classifier_loss(y)).backward()
    assert exits.heads[0].fc.weight.grad is not None


class Products(nn.Module):
    """Multiplies matrices outside of layers, and calls one layer on both sides of the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.second = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 8, 1)
        self.cut, self.twice = nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(self.twice(self.second(self.stem(x))))
        return F.linear(self.twice(x[:, :, ::2, ::2]).mean((2, 3)), self.weight)


def test_every_multiply_add_is_on_its_side_of_an_exit() -> None:
    exits = headgate.add_exits(Products(), randn(1, *SHAPE), ["cut"], target=0.95)
    places = SHAPE[1] * SHAPE[2]
    before, after = (3 * 12 + 12 * 8 + 8 * 8 * 9) * places, 8 * 8 * 9 * places // 4 + 8 * 5
    assert [sum(segment.values()) for segment in exits._segments] == [before, after]
    gated = headgate.gate(randomize_(Products()), randn(1, *SHAPE), target=0.9)
    with pytest.raises(ModelError, match="`twice` computes on both sides of an exit"):
        headgate.add_exits(gated, randn(1, *SHAPE), ["cut"], target=0.9)


class Around(nn.Module):
    """Its second half reads what was computed before the first half ended."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((self.second(self.first(x)) + x).mean((2, 3)))


def scores(net: Any, x: Tensor) -> Tensor:
    return net.c(net.b(net.a(x))).mean((2, 3))


def with_old_size(net: Any, x: Tensor) -> Tensor:
    return scores(net, x).view(x.size(0), -1)


def with_the_batchs_mean(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    return net.c(net.b(y) - net.b(y).mean(0)).mean((2, 3))


@pytest.mark.parametrize(
    "forward, says",
    [(with_old_size, "with fewer images behind it: .*flatten"), (with_the_batchs_mean, "changes others' answers")],
)
def test_forward_code_that_remembers_its_batch_is_told_before_training(forward: Any, says: str) -> None:
    net = Net(forward, a=conv(3, 8), b=conv(8, 8), c=conv(8, 5))
    with pytest.raises(ModelError, match=says):
        headgate.add_exits(net, randn(1, *SHAPE), ["a"], target=0.9)


def test_exits_at_one_place_are_told() -> None:
    with pytest.raises(ModelError, match="end at the same place: name one of them"):
        headgate.add_exits(CifarResNet(1), randn(1, *SHAPE), ["layer1", "layer1.0"], target=0.9)


def test_an_empty_batch_is_answered() -> None:
    exits = cascade().eval()
    assert exits(torch.zeros(0, *SHAPE)).shape == (0, 5)
    with pytest.raises(NotDecided, match="not known"):
        exits.macs()


def test_what_can_not_be_an_exit_is_told() -> None:
    example = randn(1, *SHAPE)
    with pytest.raises(ModelError, match="reads what was computed before"):
        headgate.add_exits(Around(), example, ["first"])
    headgate.add_exits(Around(), example, ["stem"])
    with pytest.raises(ModelError, match="at names `block9`"):
        headgate.add_exits(dense_net(), example, ["block9"])
    with pytest.raises(ModelError, match="no batch of images"):
        headgate.add_exits(dense_net(), example, ["fc"])
    with pytest.raises(HeadgateError, match="list of module names"):
        headgate.add_exits(dense_net(), example, "block1")
    with pytest.raises(HeadgateError, match="initial_probability"):
        headgate.add_exits(dense_net(), example, ["block1"], initial_probability=0)
    with pytest.raises(TargetError):
        headgate.add_exits(dense_net(), example, ["block1"], target=2.0)
    with pytest.raises(TargetError, match=r"0.5 can't be reached: up to `block1`.* an earlier first exit"):
        headgate.add_exits(dense_net(), example, ["block1"], target=0.5)
    with pytest.raises(ModelError, match=r"gives 2 tensors .* class scores alone"):
        headgate.add_exits(Net(lambda n, x: {"a": (y := n.a(x)).mean((2, 3)), "b": y}, a=conv(3, 8)), example, ["a"])
    with pytest.raises(ModelError, match="has exits already"):
        headgate.add_exits(cascade(), example, ["block1"])
    with pytest.raises(ModelError, match="it has exits: put gates on the model's channels first"):
        headgate.gate(cascade(), example, target=0.5)
    drawn = cascade(headgate.gate(randomize_(CifarResNet(1)), example, target=0.9), ("layer1",)).eval()
    for strategy in ("sample", "ensemble"):
        drawn.model.strategy(strategy)
        with pytest.raises(NotDecided, match="draws them anew"):
            drawn(example)
        with pytest.raises(NotDecided, match="draws them anew"):
            drawn.calibrate(data())
    exits = cascade().eval()
    for ask in (exits.macs, exits.cost_loss, lambda: exits.classifier_loss(torch.zeros(1))):
        with pytest.raises(NotDecided):
            ask()
    with pytest.raises(TargetError, match="first exit"):
        exits.calibrate(data(), target=0.01)
    with pytest.raises(HeadgateError, match="empty"):
        exits.table([])


def test_the_published_densenet_has_the_expected_size() -> None:
    net = headgate.models.build("cifar_densenet100")
    names = set(net.state_dict())
    assert {
        "conv1.weight",
        "block1.layer.0.bn1.weight",
        "block3.layer.15.conv2.weight",
        "trans2.conv1.weight",
        "fc.bias",
    } <= names
    assert len(names) == 596
    assert sum(parameter.numel() for parameter in net.parameters()) == 769_162
    with pytest.raises(ModelError, match="6n"):
        CifarDenseNet(99)


def test_threads_may_share_a_cascade() -> None:
    exits = cascade().eval()
    assert same_in_threads(exits, [randn(1 + seed % 5, *SHAPE, seed=seed) * 2 for seed in range(24)])


def test_a_cascade_over_gates_can_be_copied_right_after_a_training_step() -> None:
    exits = cascade(headgate.gate(dense_net(), randn(1, *SHAPE), target=0.8))
    loss = exits(torch.cat([images for images, _ in data()])).sum() + exits.cost_loss()
    assert exits.budget.step == 1 and exits.cost_loss() is exits.cost_loss() and exits.budget.step == 1
    loss.backward()
    copy.deepcopy(exits)


def test_gates_of_channels_have_their_own_decay_under_exits_too() -> None:
    gated = headgate.gate(dense_net(), randn(1, *SHAPE), target=0.8)
    alone = {group["name"]: group for group in gated.param_groups(0.1, 1e-3)}
    groups = cascade(gated).param_groups(0.1, 1e-3, classifier_scale=3.0)
    assert [group["name"] for group in groups] == ["weights", "gates", "classifiers", "gates"]
    assert groups[1]["weight_decay"] == alone["gates"]["weight_decay"] < groups[3]["weight_decay"] == 1e-3
    assert sum(p.numel() for g in groups for p in g["params"]) == sum(p.numel() for p in cascade(gated).parameters())


def test_gate_networks_of_channels_cost_only_who_comes_to_them() -> None:
    inner = headgate.gate(randomize_(CifarResNet(2)), randn(1, 3, 16, 16), kind="dynamic", target=0.9)
    exits = headgate.add_exits(inner, randn(1, 3, 16, 16), ["layer1"], target=0.95)
    assert isinstance(exits.model, GatedModel) and exits.model.dynamic is not None
    before, behind = (exits._deciding_macs(number) for number in range(2))
    assert before > 0 and behind > before and before + behind == exits.model.dynamic.macs


# ------------------------------------------------------------------------------- gates on channels under exits


def gated_net(make: str, **options) -> GatedModel:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = CifarResNet(2, num_classes=5) if make == "resnet" else CifarDenseNet(10, 4, num_classes=5)
    return headgate.gate(randomize_(model), randn(1, *SHAPE), **{"target": 0.9, **options})


def close_(gated: GatedModel, mask: str, gates: list[int]) -> GatedModel:
    """These gates of a mask closed, all others open."""
    chosen = {name: torch.ones_like(p) for name, p in gated.gate_probabilities().items()}
    chosen[mask][gates] = 0
    gated.set_gate_probabilities(chosen)
    return gated.strategy("threshold", tau=0.5)


@torch.no_grad()
def divided_(gated: GatedModel, x: Tensor) -> GatedModel:
    """Gates that look at the image, each open for half of these images."""
    assert gated.dynamic is not None
    for network in opinionated_(gated).dynamic.networks:  # type: ignore[union-attr]
        seen: list[Tensor] = []
        hook = network.register_forward_hook(lambda module, args, logits, seen=seen: seen.append(logits))
        gated.eval()(x)
        hook.remove()
        network.head.bias -= seen[0].quantile(0.5, 0)
    return gated.train()


def said(exits: headgate.ExitModel, x: Tensor) -> list[Tensor]:
    """All classifiers' scores, and all gates' logits."""
    torch.manual_seed(0)
    return [tensor.detach().clone() for tensors in exits._watch((x,), {}) for tensor in tensors]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("net", ["resnet", "dense"])
def test_what_a_closed_channel_holds_does_not_reach_an_exit(net: str, training: bool) -> None:
    """Its cost is not counted, so nothing may depend on it: the weights that write it are free to change."""
    closed = [8, 9, 12, 15] if net == "resnet" else [1, 3]
    mask = "conv1" if net == "resnet" else "block1.layer.0.conv2"
    places = ("layer1", "layer2") if net == "resnet" else ("block1", "block2")
    exits = cascade(close_(gated_net(net), mask, closed), places).train(training)
    model, x = exits.model.model, torch.cat([images for images, _ in data()])
    before = said(exits, x)
    written = [mask, "layer1.0.bn2", "layer1.1.bn2"] if net == "resnet" else [mask]
    with torch.no_grad():
        for name in written:
            model.get_submodule(name).weight[closed] += 3.0
    after = said(exits, x)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with torch.no_grad():  # the test would see it: open channels count
        for name in written:
            model.get_submodule(name).weight[0] += 3.0
    assert not any(torch.equal(a, b) for a, b in zip(before, said(exits, x), strict=True))


@pytest.mark.parametrize("training", [False, True])
def test_of_gates_that_look_at_the_image_its_own_close_channels_to_an_exit(training: bool) -> None:
    x = torch.cat([images for images, _ in data()])
    exits = cascade(divided_(gated_net("dense", kind="dynamic", target=0.95), x)).train(training)
    assert isinstance(exits.model, GatedModel)
    gated, mask = exits.model, "block1.layer.0.conv2"
    number = [mask.name for mask in gated.graph.masks].index(mask)
    before = said(exits, x)
    seen: list[Tensor] = []

    def spoil(module: nn.Module, args: object, output: Tensor) -> Tensor:
        """Anything at all in the closed channels of each image: the last four at block 1."""
        seen.append(1 - gated._board.draw.part(number).detach())
        closed_BC = F.pad(seen[-1], (output.shape[1] - seen[-1].shape[1], 0))
        return output + 100 * torch.randn(closed_BC.shape)[:, :, None, None] * closed_BC[:, :, None, None]

    gated.model.block1.register_forward_hook(spoil, prepend=True)
    torch.manual_seed(0)
    noisy = said(exits, x)
    assert len(seen[0]) == len(x) and bool((seen[0].std(0) > 0).any()), "other channels for other images"
    if training:  # BatchNorm in the model sees all of a channel: only the first exit stands before one
        before, noisy = before[:1], noisy[:1]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(before, noisy, strict=True))


def test_an_exit_teaches_the_gates_of_the_channels_it_reads() -> None:
    """Those of the last layer before it, which nothing else before the exit reads."""
    exits = cascade(gated_net("dense", initial_probability=0.6))
    assert isinstance(exits.model, GatedModel)
    logits, _ = exits._watch((data()[0][0],), {})
    F.cross_entropy(logits[0], data()[0][1]).backward()
    masks = {mask.name: mask for mask in exits.model.graph.masks}
    gradient = exits.model.gates.logits.grad
    assert gradient is not None and bool((gradient[masks["block1.layer.0.conv2"].gates] != 0).all())
    assert bool((gradient[masks["block2.layer.0.conv2"].gates] == 0).all())


@pytest.mark.parametrize(("net", "stream"), [("dense", "indexed"), ("resnet", "shared")])
def test_gates_decided_before_an_exit_go_on_with_the_images_that_stay(net: str, stream: str) -> None:
    """Concatenation and shared streams use gates far behind the layer that decided them."""
    x = torch.cat([images for images, _ in data()])
    gated = divided_(gated_net(net, kind="dynamic", stream=stream, target=0.95), x)
    exits = cascade(gated, ("block1", "block2") if net == "dense" else ("layer2.0", "layer3.0"), target=0.99).eval()
    expected, ways = one_by_one(exits, x)
    assert len(set(ways)) == 3
    torch.testing.assert_close(exits(x), expected, rtol=1e-4, atol=1e-5)
    assert exits.table(data()).macs < exits.dense_macs


def resnet() -> nn.Module:
    return CifarResNet(2, num_classes=5)


def wide_resnet() -> nn.Module:
    return CifarResNet(1, num_classes=5, width=48)


def wide_dense_net() -> nn.Module:
    return CifarDenseNet(10, 12, num_classes=5)


@pytest.mark.parametrize(
    ("fresh", "head", "options"),
    [
        (resnet, "mean", {}),
        (resnet, "mean", {"stream": "indexed"}),
        (resnet, "mean", {"granularity": "layer"}),
        (wide_resnet, "conv", {}),
        (wide_resnet, "conv", {"stream": "indexed"}),
        (wide_dense_net, "mean", {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_shrunk_cascade_answers_the_same(fresh, head: str, options: dict[str, str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    at = ("block1", "block2") if fresh is wide_dense_net else ("layer1", "layer2")
    gated = headgate.gate(randomize_(fresh()), randn(1, *SHAPE), target=0.95, **options)
    exits = cascade(decide_(gated, 0.6, seed=3), at, head=head)
    for part in (exits.heads, exits.gates):
        randomize_(part)  # what BatchNorm makes of zero is not zero
    x = torch.cat([images for images, _ in data()])
    exits.eval().taus = exits.watch(data()).p_NK.quantile(0.5, 0).tolist()
    small = exits.shrink()
    assert not isinstance(small.model, GatedModel) and small.taus == exits.taus
    for ours, theirs in zip(said(exits, x), said(small, x), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    _, ways = one_by_one(exits, x)
    assert len(set(ways)) > 1 and exits.exit_of(exits.watch(data())).tolist() == ways
    torch.testing.assert_close(small(x), exits(x), rtol=1e-4, atol=1e-4)
    narrower = small.heads[0].norm.num_features < exits.heads[0].norm.num_features
    assert narrower == (not options), "an indexed stream, and blocks as a whole, leave the stream's width"
    assert small.dense_macs == headgate.count_macs(small.model, randn(1, *SHAPE)) < exits.dense_macs
    assert small.macs() <= exits.macs() * (1 + 1e-6), (
        "of a gated cascade, classifiers and gates are counted with all channels"
    )
    headgate.save(small, tmp_path / "small.safetensors")
    loaded = headgate.load(tmp_path / "small.safetensors", fresh())
    assert isinstance(loaded, headgate.ExitModel) and torch.equal(loaded(x), small(x))
    assert (loaded.target, loaded.budget.target) == (small.target, small.target)


@pytest.mark.parametrize(
    "name", [*list(NETWORKS)[:9], "dense block", "channel shuffle", "depthwise", "squeeze and excitation"]
)
def test_every_place_of_a_shrunk_network_can_be_an_exit(name: str) -> None:
    given = example_of(NETWORKS[name], batch=3)
    torch.manual_seed(0)
    shrunk, narrower = 0, 0
    for head, granularity in (("mean", "channel"), ("conv", 2)):
        gated = headgate.gate(randomize_(NETWORKS[name].make()), given, target=0.99, granularity=granularity)
        decide_(gated, 0.5, seed=shrunk)
        for place in [name for name, _ in gated.model.named_modules() if name]:
            try:
                exits = headgate.add_exits(gated, given[0], [place], target=0.99, head=head).eval()
                randomize_(exits.heads), randomize_(exits.gates)
                small = exits.shrink()
            except (ModelError, TargetError):  # no cut, or behind everything that costs
                continue
            shrunk += 1
            narrower += small.heads[0].norm.num_features < exits.heads[0].norm.num_features
            for ours, theirs in zip(said(exits, given[0]), said(small, given[0]), strict=True):
                torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert shrunk and narrower


class Named(Block):
    """A block whose last ReLU is a module, behind which it can be cut."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.act, self.twice = nn.ReLU(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + x)


@pytest.mark.parametrize("place", ["one", "one.act", "two", "two.act"])
def test_an_exit_behind_a_block_that_is_gone_stays_where_it_was(place: str) -> None:
    net = Net(
        lambda n, x: n.head(n.last(n.two(n.one(n.stem(x)))).mean((2, 3))),
        stem=conv(3, 8), one=Named(), two=Named(), last=conv(8, 16), head=nn.Linear(16, 5),
    )  # fmt: skip
    gated = headgate.gate(randomize_(net), randn(2, *SHAPE), target=0.9)
    exits = cascade(close_(gated, "one.conv1", list(range(8))), (place,), target=0.99).eval()
    small = exits.shrink()
    assert isinstance(small.model.one, nn.ReLU) and small.names[0] == ("one" if place == "one.act" else place)
    x = torch.cat([images for images, _ in data()])
    torch.testing.assert_close(small(x), exits(x), rtol=1e-4, atol=1e-4)


def test_a_shrunk_cascade_learns_on() -> None:
    exits = cascade(close_(gated_net("dense"), "conv1", [0, 1, 2]), budget=Budget(0.9, ramp_steps=7), train_model=False)
    small = exits.shrink().train()
    assert exits.training and small.budget.ramp_steps == 7 and small.budget.step == 0
    assert small.target * small.dense_macs == pytest.approx(min(0.9 * exits.dense_macs, small.dense_macs))
    x, y = data()[0]
    (F.cross_entropy(small(x), y) + small.cost_loss() + small.classifier_loss(y)).backward()
    assert all(p.grad is not None for p in [*small.heads.parameters(), *small.gates.parameters()])
    assert not any(p.requires_grad for p in small.model.parameters())
    small.calibrate(data(), target=0.97)
    assert small.table(data()).macs_fraction <= 0.97
    assert headgate.gate(small.model, randn(1, *SHAPE), target=0.8), "a plain network, if it is taken out"


def test_what_can_not_be_shrunk_is_told() -> None:
    def own(channels: int, classes: int) -> nn.Module:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

    with pytest.raises(NotDecided, match="exits of a gated model"):
        cascade().shrink()
    with pytest.raises(NotDecided, match=r"depend on the input.*the cascade as it is, or exits.model.compact\(\)"):
        cascade(gated_net("dense", kind="dynamic", target=0.95)).shrink()
    with pytest.raises(ModelError, match=r"no image could leave.*exits.model.compact\(\), without exits"):
        cascade(gated_net("dense", kind="dynamic", target=0.95)).compact()
    with pytest.raises(NotDecided, match="no gate is closed"):
        cascade(gated_net("dense")).shrink()
    with pytest.raises(ModelError, match=r"behind `block1` is a Sequential.* 2 of 12 are closed.*frozen=\['block1'\]"):
        cascade(close_(gated_net("dense"), "conv1", [0, 1]), head=own).shrink()
    elsewhere = cascade(close_(gated_net("dense"), "block1.layer.0.conv1", [0, 1]), head=own).eval()
    x = torch.cat([images for images, _ in data()])
    torch.testing.assert_close(elsewhere.shrink()(x), elsewhere(x), rtol=1e-4, atol=1e-4)
    dear = cascade(decide_(gated_net("resnet"), 0.1, seed=0), ("layer1",), head="conv")
    with pytest.raises(TargetError, match=r"leaving at `layer1` costs .* use exits.model.shrink\(\), without exits"):
        dear.shrink()
    squeezed = cascade(close_(gated_net("dense"), "block1.layer.0.conv1", list(range(8))))
    assert isinstance(squeezed.model, GatedModel) and squeezed.model.squeeze_(least_gain=0.0)
    with pytest.raises(HeadgateError, match="unsqueeze_"):
        squeezed(x)
    squeezed.model.unsqueeze_()
    squeezed(x)


def test_the_network_alone_has_no_exits() -> None:
    """Its smaller form, a copy of it, and exits at other places know nothing of the cascade."""
    exits = cascade(close_(gated_net("dense"), "conv1", [0, 1])).eval()
    assert isinstance(exits.model, GatedModel)
    small, twin = exits.model.shrink(), copy.deepcopy(exits.model)
    assert not any(module._forward_hooks for module in small.modules())
    hooks = [hook for module in twin.modules() for hook in module._forward_hooks.values()]
    assert hooks and not any(getattr(hook, "exits", None) for hook in hooks)
    again = headgate.add_exits(exits.model, randn(1, *SHAPE), ["block2"], target=0.99).eval()
    x = randn(4, *SHAPE)
    exits.taus, again.taus = [-1.0, 1.0], [1.0]
    torch.testing.assert_close(again(x), small(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(twin(x), small(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(exits(x), small(x))


def test_a_classifier_must_give_a_score_a_class() -> None:
    def places(channels: int, classes: int) -> nn.Module:
        return nn.Conv2d(channels, classes, 1)

    def other_classes(channels: int, classes: int) -> nn.Module:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes + 1))

    def other_channels(channels: int, classes: int) -> nn.Module:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels + 1, classes))

    def no_module(channels: int, classes: int) -> nn.Module:
        return F.relu  # type: ignore[return-value]

    with pytest.raises(ModelError, match=r"behind `block1` gives \(images, 5, 16, 16\), the model \(images, 5\)"):
        cascade(head=places)
    with pytest.raises(ModelError, match=r"gives \(images, 6\), the model \(images, 5\): .* one score a class"):
        cascade(head=other_classes)
    with pytest.raises(
        ModelError, match=r"behind `block1` does not take the activations there, \(images, 12, 16, 16\)"
    ):
        cascade(head=other_channels)
    with pytest.raises(HeadgateError, match=r"head\(12, 5\) gives a function: .* nn.Module"):
        cascade(head=no_module)

"""Early exit: an image that leaves gets the answer of its exit, and nothing behind it is computed for it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headgate
from headgate.errors import HeadgateError, ModelError, NotDecided, TargetError
from headgate.gated import GatedModel
from headgate.gates.budget import Budget
from headgate.models.cifar_densenet import CifarDenseNet
from headgate.models.cifar_resnet import CifarResNet
from tests.gates.test_dynamic import opinionated_
from tests.networks import conv
from tests.oracle import Net, independent_macs, randn, randomize_, same_in_threads

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
    for gate, wish in zip(exits.gates, wishes, strict=True):
        gate.head.bias -= wish.quantile(0.5)  # between two images, not on one
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
    x = torch.ones(3, exits.heads[0].norm.num_features, 4, 4)
    sure = torch.tensor([[9.0, 0, 0, 0, 0], [0, 0, 9.0, 0, 0], [0.1, 0, 0, 0, 0]], requires_grad=True)
    wishes = exits.wish(0, x, sure)
    assert torch.isclose(wishes[0], wishes[1]) and not torch.isclose(wishes[0], wishes[2])
    wishes.sum().backward()
    assert sure.grad is None, "a classifier does not learn to please the gate"


def test_a_gate_tells_sure_images_from_surer_ones() -> None:
    """Their probabilities are the same in float32; what is left for the other classes is not."""
    exits = headgate.add_exits(dense_net(), randn(1, *SHAPE), ["block1"], target=0.9).eval()
    nn.init.normal_(exits.gates[0].head.weight, std=4.0)
    x = torch.ones(2, exits.heads[0].norm.num_features, 4, 4)
    answers = torch.tensor([[20.0, 0, 0, 0, 0], [30.0, 0, 0, 0, 0]])
    assert torch.equal(*answers.softmax(1)[:, :1])
    assert (exits.wish(0, x, answers).diff().abs() > 0.1).all()


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
    with pytest.raises(ModelError, match="indexed"):
        shared = headgate.gate(randomize_(CifarResNet(2)), example, kind="dynamic", stream="shared", target=0.9)
        headgate.add_exits(shared, example, ["layer2.0"])
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

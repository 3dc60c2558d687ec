"""Gates that look at the input: every image is answered as a static network with its gates would answer it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headgate
from headgate.errors import HeadgateError, ModelError, NotDecided, TargetError
from headgate.gates.budget import Budget
from headgate.gates.dynamic import STRIDE, GateNetwork
from headgate.graph.sites import Site, find_sites
from headgate.models import cifar_resnet20
from tests.networks import NETWORKS, conv, example, residual
from tests.oracle import Net, difference, randn, randomize_


def two_blocks() -> nn.Module:
    torch.manual_seed(0)
    return randomize_(residual(width=8))


def opinionated_(gated: headgate.GatedModel, seed: int = 0) -> headgate.GatedModel:
    """Gate networks that open about half of their gates, and others for other images."""
    assert gated.dynamic is not None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for network in gated.dynamic.networks:
            assert isinstance(network, GateNetwork)
            network.norm.running_mean.normal_(0, 0.3, generator=generator)
            network.head.weight.normal_(0, 3.0, generator=generator)
            network.head.bias.normal_(0, 0.5, generator=generator)
    return gated


def gated_pair(make, inputs, **options):  # type: ignore[no-untyped-def]
    """A dynamic and a static gated network with the same weights and masks."""
    torch.manual_seed(0)
    model = randomize_(make()).eval()
    return (
        opinionated_(headgate.gate(model, inputs, kind="dynamic", target=0.9, **options)).eval(),
        headgate.gate(model, inputs, kind="static", target=0.9, **{"stream": "indexed", **options}).eval(),
    )


def sites_of(name: str, stream: str = "indexed") -> tuple[Site, ...]:
    graph = headgate.inspect(NETWORKS[name].make(), example(NETWORKS[name]), stream=stream)  # type: ignore[arg-type]
    return find_sites(graph)


def test_most_networks_have_gates_that_look() -> None:
    some = list(NETWORKS)[::5]
    assert sum(bool(sites_of(name)) for name in some) > 0.6 * len(some)


@pytest.mark.parametrize("stream", ["indexed", "shared"])
@pytest.mark.parametrize("name", NETWORKS)
def test_each_image_gets_what_a_static_network_with_its_gates_gives(
    name: str, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = NETWORKS[name]
    inputs = example(case, batch=3)
    monkeypatch.setattr(GateNetwork, "macs", 0)  # these networks are smaller than their gates'
    if not sites_of(name, stream):
        with pytest.raises(headgate.NothingToGate):
            headgate.gate(case.make(), inputs, kind="dynamic", stream=stream)  # type: ignore[arg-type]
        return
    dynamic, static = gated_pair(case.make, inputs, stream=stream)
    assert [mask.name for mask in dynamic.graph.masks] == [mask.name for mask in static.graph.masks]
    together = dynamic(*inputs)
    draw = dynamic._last
    assert draw is not None
    gates_BG = draw.gates_BG.expand(3, -1).clone()
    macs_B = (dynamic.cost.macs_B(draw) * dynamic.dense_macs).expand(3)
    for image in range(3):
        one = tuple(tensor[image : image + 1] for tensor in inputs)
        static.set_gate_probabilities({m.name: gates_BG[image, m.gates] for m in static.graph.masks})
        assert difference(static(*one), dynamic(*one)) < 1e-5
        assert difference(dynamic(*one), together[image : image + 1]) < 1e-5, "the other images make no difference"
        assert dynamic._last is not None and torch.equal(dynamic._last.gates_BG[0], gates_BG[image])
        exact = static.cost.decided_macs(gates_BG[image].numpy() > 0.5) + dynamic.cost.gates_macs
        assert float(macs_B[image]) == pytest.approx(exact, rel=1e-4)


def test_images_differ_in_their_gates_and_evaluation_repeats_itself() -> None:
    gated = opinionated_(headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic")).eval()
    x = randn(16, 3, 8, 8, seed=3) * 3
    first = gated(x)
    gates_BG = gated._last.gates_BG
    assert len(gates_BG.unique(dim=0)) > 1
    assert torch.equal(first, gated(x)) and torch.equal(gates_BG, gated._last.gates_BG)


def test_the_masks_of_a_block_share_one_network_that_costs_little() -> None:
    gated = headgate.gate(cifar_resnet20(), randn(1, 3, 32, 32), kind="dynamic")
    sites = gated.dynamic.sites
    assert len(sites) == 9
    assert [gated.graph.masks[number].name for number in sites[0].masks] == [
        "layer1.0.conv1.input", "layer1.0.conv1", "layer1.0.conv2",
    ]  # fmt: skip
    by_hand = sum(16 * site.channels + 16 * sum(gated.graph.masks[m].size for m in site.masks) for site in sites)
    assert gated.dynamic.macs == gated.cost.gates_macs == by_hand < 0.001 * gated.dense_macs
    gated.eval().strategy("always_on")(randn(2, 3, 32, 32))
    assert gated.macs() == pytest.approx(gated.dense_macs + by_hand, rel=1e-6)


def test_gates_start_open_whatever_the_input() -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", initial_probability=0.9).eval()
    gated(randn(4, 3, 8, 8))
    for p in gated.gate_probabilities().values():
        torch.testing.assert_close(p, torch.full_like(p, 0.9), atol=0.01, rtol=0)


def test_static_and_dynamic_side_by_side() -> None:
    gated = headgate.gate(
        cifar_resnet20(), randn(1, 3, 32, 32), kind="dynamic", static=["layer1", "layer2.0"], target=0.9
    )
    assert [site.layer for site in gated.dynamic.sites] == [
        f"layer{s}.{b}.conv1" for s, b in ((2, 1), (2, 2), (3, 0), (3, 1), (3, 2))
    ]
    x = randn(4, 3, 32, 32)
    (gated(x).mean() + gated.cost_loss()).backward()
    assert all((p.grad != 0).any() for p in gated.gate_parameters())
    shapes = {name: p.dim() for name, p in gated.gate_probabilities().items()}
    assert shapes["layer1.0.conv1"] == 1 and shapes["layer3.0.conv1"] == 2
    gated.set_gate_probabilities({"layer1.0.conv1": torch.zeros(16)})
    gated.eval()(x)
    assert not gated._last.part(1).any()
    with pytest.raises(HeadgateError, match="depend on the input"):
        gated.set_gate_probabilities({"layer3.0.conv1": torch.zeros(64)})
    with pytest.raises(ModelError, match="static names `layer9`"):
        headgate.gate(cifar_resnet20(), randn(1, 3, 32, 32), kind="dynamic", static=["layer9"])


@pytest.mark.parametrize("granularity", ["channel", "layer", 4])
def test_training_reaches_the_target_and_calibration_meets_it(granularity: str | int) -> None:
    torch.manual_seed(0)
    target = 0.7
    gated = headgate.gate(
        two_blocks(), randn(1, 3, 8, 8), kind="dynamic", granularity=granularity, target=target,
        budget=Budget(target, ramp_steps=60),
    )  # fmt: skip
    optimizer = torch.optim.SGD(gated.param_groups(lr=0.02, gate_lr=0.02), momentum=0.9)
    data = [(randn(32, 3, 8, 8, seed=i), torch.arange(32) % 5) for i in range(4)]
    costs = []
    for step in range(120):
        x, y = data[step % 4]
        (F.cross_entropy(gated(x), y) + gated.cost_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        costs.append(gated.macs() / gated.dense_macs)
    assert sum(costs[-20:]) / 20 == pytest.approx(target, abs=0.06)
    gated.calibrate(data, batches=4)
    gated.eval()
    reached = gated._mean_macs([(x,) for x, _ in data]) / gated.dense_macs
    assert reached <= target + 1e-6
    assert reached > target - (0.35 if granularity == "layer" else 0.1)
    assert gated._strategy.name == "calibrated"


def test_a_short_loader_is_calibrated_on_with_every_batch_once() -> None:
    """The first seven of nine batches would otherwise count twice in the sixteen that are looked at."""
    data = [randn(8, 3, 8, 8, seed=number) * (3.0 if number < 7 else 0.2) for number in range(9)]
    gated = opinionated_(headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", target=0.5))
    probe, more = gated._probe(data, 20)
    assert [id(x) for (x,) in probe] == [id(x) for x in data]
    assert [id(x) for (x,) in more] == [id(x) for x in (*data, *data[:2])]
    gated.calibrate(data, batchnorm=False).eval()
    gated(torch.cat(data))
    assert 0.48 < gated.macs() / gated.dense_macs <= 0.5


@pytest.mark.parametrize("count", [16, 20])
def test_a_long_loader_is_calibrated_on_with_its_first_batches(count: int) -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic")
    data = [torch.full((1, 3, 8, 8), float(number)) for number in range(count)]
    probe, more = gated._probe(iter(data), count)
    assert [float(x.mean()) for (x,) in probe] == list(range(16))
    assert [float(x.mean()) for (x,) in more] == list(range(16, count))


def test_gradients_reach_every_gate_network_and_are_the_formulas() -> None:
    """Without the budget's scale, the gradient of the cost is autograd's own through the gate networks."""
    torch.manual_seed(0)
    gated = headgate.gate(
        two_blocks(), randn(1, 3, 8, 8), kind="dynamic", budget=Budget.paper(0.5), backward="probability"
    )
    x = randn(8, 3, 8, 8)
    gated(x)
    gated.cost_loss().backward()
    scaled = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", backward="probability")
    assert all((p.grad != 0).any() for p in gated.gate_parameters() if p.requires_grad)
    network = GateNetwork(4, 6, 0.9)
    pooled = randn(5, 4).requires_grad_()
    network(pooled, 1.0).sum().backward()
    plain = {name: p.grad.clone() for name, p in network.named_parameters()}
    plain_input = pooled.grad.clone()
    network.zero_grad()
    pooled.grad = None
    network(pooled, 12.0).sum().backward()
    torch.testing.assert_close(network.head.weight.grad, plain["head.weight"] * 12)
    torch.testing.assert_close(network.trunk.weight.grad, plain["trunk.weight"] * 12)
    torch.testing.assert_close(pooled.grad, plain_input)
    assert scaled.budget.scale_gradient


def test_a_step_moves_gates_that_look_about_as_far_as_those_that_are_parameters() -> None:
    """With the budget's scale. Each image's own gradient moves its logits; other images move them a little less."""
    rate, wanted_BN = 1e-3, randn(64, 40, seed=4)
    for same_for_all, nearest in ((True, 0.4), (False, 1.0)):
        torch.manual_seed(0)
        network, x = GateNetwork(8, 40, 0.9), randn(64, 8)
        gradient_BN = wanted_BN[:1].expand(64, -1) if same_for_all else wanted_BN * torch.eye(64)[:, :1]
        before_BN = network(x, 1 / STRIDE)
        (before_BN * gradient_BN).sum().backward()
        with torch.no_grad():
            for parameter in network.head.parameters():
                parameter -= rate * parameter.grad
            moved_BN = (before_BN - network(x)) / rate
        by_a_parameter_BN = gradient_BN.sum(0, keepdim=True).expand(64, -1) if same_for_all else gradient_BN
        rows = slice(None) if same_for_all else slice(1)
        ratio = (moved_BN[rows] / by_a_parameter_BN[rows]).median()
        assert 0.5 * nearest < ratio < 2 * nearest


def test_a_network_of_gates_that_look_is_slowed_only_under_the_budgets_scale() -> None:
    for budget, scale in ((None, 1 / STRIDE), (Budget.paper(0.5), None)):
        gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", budget=budget)
        gated(randn(2, 3, 8, 8))
        assert gated.dynamic.gradient_scale == (1.0 if scale is None else scale * gated.graph.gate_count)


def test_one_image_can_be_trained_on() -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic").train()
    (gated(randn(1, 3, 8, 8)).sum() + gated.cost_loss()).backward()
    assert all(p.grad.isfinite().all() for p in gated.gate_parameters() if p.grad is not None)


def test_a_last_batch_of_one_image_is_calibrated_on() -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", target=0.8)
    gated.calibrate([randn(8, 3, 8, 8), randn(1, 3, 8, 8, seed=2)], batches=4)
    assert gated.eval()(randn(2, 3, 8, 8)).isfinite().all()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_layers_may_be_called_by_keyword(kind: str) -> None:
    """The model's own forward code runs as it is."""

    def forward(by_name: bool) -> nn.Module:
        def run(n: Net, x: Tensor) -> Tensor:
            h = F.relu(n.a(input=x) if by_name else n.a(x))
            h = h + (n.c(input=F.relu(n.b(input=h))) if by_name else n.c(F.relu(n.b(h))))
            return n.head(input=h.mean((2, 3))) if by_name else n.head(h.mean((2, 3)))  # type: ignore[no-any-return]

        torch.manual_seed(0)
        return randomize_(Net(run, a=conv(3, 8), b=conv(8, 6), c=conv(6, 8), head=nn.Linear(8, 5))).eval()

    nets = []
    for by_name in (True, False):
        gated = headgate.gate(forward(by_name), randn(1, 3, 8, 8), kind=kind, target=0.9)  # type: ignore[arg-type]
        if kind == "dynamic":
            nets.append(opinionated_(gated).eval())
        else:
            p = {name: (torch.arange(len(p)) % 2).float() for name, p in gated.gate_probabilities().items()}
            gated.set_gate_probabilities(p)
            nets.append(gated.eval())
    x = randn(4, 3, 8, 8, seed=3)
    torch.testing.assert_close(nets[0](x), nets[1](x))
    small = nets[0].compact() if kind == "dynamic" else nets[0].shrink()
    torch.testing.assert_close(small(x), nets[1](x), rtol=1e-4, atol=1e-5)


def test_settled_gates_train_the_weights_only() -> None:
    gated = opinionated_(headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic")).settle_().train()
    x = randn(6, 3, 8, 8)
    before = {name: tensor.clone() for name, tensor in gated.dynamic.state_dict().items()}
    first = gated(x)
    gates = gated._last.gates_BG
    assert float(gated.cost_loss()) == 0
    first.sum().backward()
    gated(x)
    assert torch.equal(gates, gated._last.gates_BG), "no noise"
    assert all(torch.equal(tensor, before[name]) for name, tensor in gated.dynamic.state_dict().items())
    assert all(p.grad is None for p in gated.gate_parameters())
    assert any(p.grad is not None for p in gated.model.parameters())
    gated.settle_(False)
    assert all(p.requires_grad for p in gated.dynamic.parameters())


def test_settled_gates_can_learn_on_without_noise() -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", target=0.8, static=["stem"])
    opinionated_(gated).settle_(learning=True).train()
    x = randn(6, 3, 8, 8)
    answers = gated(x)
    gates = gated._last.gates_BG.detach()
    assert torch.equal(gates, gates.round()), "decided, not drawn"
    (answers.square().mean() + gated.cost_loss()).backward()
    assert gated.budget.step == 1 and gated.budget.last_cost == pytest.approx(gated.macs() / gated.dense_macs)
    assert any(p.grad is not None and bool(p.grad.any()) for p in gated.dynamic.parameters())
    assert all(p.grad is None for p in gated.gates.parameters()), "those that are parameters are decided for good"
    gated(x)
    assert torch.equal(gates, gated._last.gates_BG), "no noise"
    torch.optim.SGD(gated.dynamic.parameters(), 0.1).step()
    gated.eval()(x)
    assert not gated._last.gates_BG.requires_grad


def test_the_budget_holds_decided_gates_that_learn() -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", target=0.6, budget=Budget(0.6, ramp_steps=0))
    opinionated_(gated).settle_(learning=True)
    optimizer = torch.optim.SGD(gated.gate_parameters(), 0.02, momentum=0.9)
    costs = []
    for step in range(120):
        gated(randn(32, 3, 8, 8, seed=step))
        gated.cost_loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        costs.append(gated.budget.last_cost)
    assert abs(costs[0] - 0.6) > 0.03 and sum(costs[-20:]) / 20 == pytest.approx(0.6, abs=0.03), costs[::20]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_only_settled_gates_that_look_at_the_input_can_learn_on(kind: str) -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind=kind)
    with pytest.raises(HeadgateError, match=r"learning=True.*kind='dynamic'"):
        gated.settle_(kind == "static", learning=True)


def test_a_saved_network_decides_the_same(tmp_path: Path) -> None:
    gated = opinionated_(headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", target=0.8, static=["stem"]))
    data = [(randn(8, 3, 8, 8, seed=i), torch.zeros(8)) for i in range(3)]
    gated.calibrate(data, batches=3)
    gated.eval()
    headgate.save(gated, tmp_path / "gated.safetensors")
    loaded = headgate.load(tmp_path / "gated.safetensors", two_blocks()).eval()
    x = randn(8, 3, 8, 8, seed=9)
    assert torch.equal(gated(x), loaded(x))
    assert gated.macs() == loaded.macs() and loaded.static_names == ("stem",)


def test_what_makes_no_sense_is_refused() -> None:
    gated = headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic")
    for ask in (gated.gate_probabilities, gated.polarised, gated.thresholded_macs, gated.eval().macs):
        with pytest.raises(NotDecided, match="call the model first"):
            ask()
    with pytest.raises(NotDecided, match="compact"):
        gated.shrink()
    with pytest.raises(NotDecided, match="calibrate"):
        gated.project()
    with pytest.raises(HeadgateError, match="round"):
        gated.calibrate([randn(2, 3, 8, 8)], round_to=8)
    with pytest.raises(HeadgateError, match='"static" or "dynamic"'):
        headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="both")  # type: ignore[arg-type]
    with pytest.raises(HeadgateError, match="initial_probability"):
        headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", initial_probability=1.0)
    with pytest.raises(TargetError):
        headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", target=0.001)
    assert gated.squeeze_() is False


def test_a_way_the_example_did_not_take_is_told() -> None:
    class TwoWays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
            self.head = nn.Linear(8, 2)
            self.skip = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = x if self.skip else self.first(x)
            return self.head(self.second(x).mean((2, 3)))

    gated = headgate.gate(TwoWays(), randn(1, 3, 8, 8), kind="dynamic").eval()
    gated.model.skip = True
    with pytest.raises(HeadgateError, match="another way"):
        gated(randn(1, 3, 8, 8))
    gated.model.skip = False
    gated(randn(1, 3, 8, 8))


def test_a_sweep_over_tau_averages_over_all_batches() -> None:
    gated = opinionated_(headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic"))
    data = [(randn(n, 3, 8, 8, seed=n) * 3, torch.zeros(n, dtype=torch.int64)) for n in (4, 9)]
    rows = gated.sweep_tau(data, (0.0, 0.5, 1.0))
    assert [row.macs for row in rows] == sorted((row.macs for row in rows), reverse=True)
    gated.eval().strategy("threshold", tau=0.5)
    assert rows[1].macs == pytest.approx(gated._mean_macs([(x,) for x, _ in data]))


def test_closed_channels_do_not_reach_a_decision_before_a_depthwise_layer() -> None:
    def forward(n: Net, x: Tensor) -> Tensor:
        y = n.stem(x).relu()
        return n.fc(torch.cat([n.p(n.depthwise(y)).relu(), n.q(y).relu()], 1).mean((2, 3)))

    net = Net(
        forward, stem=conv(3, 8), depthwise=nn.Conv2d(8, 8, 3, padding=1, groups=8), p=nn.Conv2d(8, 8, 1),
        q=nn.Conv2d(8, 8, 1), fc=nn.Linear(16, 5),
    )  # fmt: skip
    x = randn(8, 3, 8, 8)
    gated = opinionated_(headgate.gate(randomize_(net), x, kind="dynamic", target=0.5))
    with torch.no_grad():
        gated.gates.set_logits(torch.tensor([4.0, -4.0] * 4))  # the stem's
        before = gated.eval()(x)
        assert difference(before, gated.compact()(x)) < 1e-5
        gated.model.stem.bias[1::2] += 5
        assert torch.equal(gated(x), before)


def test_two_batches_in_one_are_refused() -> None:
    def forward(n: Net, a: Tensor, b: Tensor) -> Tensor:
        first, second = n.two(n.one(torch.cat([a, b])).relu()).mean((2, 3)).chunk(2)
        return n.fc((first - second).abs())

    net = Net(forward, one=conv(3, 8), two=conv(8, 8), fc=nn.Linear(8, 2))
    pair = randn(2, 3, 8, 8), randn(2, 3, 8, 8)
    with pytest.raises(ModelError, match="do not lie side by side"):
        headgate.gate(net, pair, kind="dynamic")
    headgate.gate(net, pair, kind="static")


def test_two_batches_in_one_before_the_output_layer_are_refused() -> None:
    def forward(n: Net, x: Tensor) -> Tensor:
        y = n.two(n.one(x).relu()).relu()
        first, second = n.head(torch.cat([y, y.flip(3)])).mean((2, 3)).chunk(2)
        return first + second

    net = Net(forward, one=conv(3, 8), two=conv(8, 8), head=conv(8, 5))
    with pytest.raises(ModelError, match="before `head`, .* do not lie side by side"):
        headgate.gate(net, randn(2, 3, 8, 8), kind="dynamic")
    headgate.gate(net, randn(2, 3, 8, 8), kind="static")


def test_what_gates_would_say_is_known_when_all_are_open() -> None:
    gated = opinionated_(headgate.gate(two_blocks(), randn(1, 3, 8, 8), kind="dynamic", target=0.5)).eval()
    x = randn(4, 3, 8, 8)
    gated(x)
    expected, macs = gated.gate_probabilities(), gated.thresholded_macs()
    gated.strategy("always_on")(x)
    assert gated.macs() >= gated.dense_macs and gated.gate_probabilities().keys() == expected.keys()
    assert gated.thresholded_macs() > 0 and macs > 0 and 0 <= gated.polarised() <= 1

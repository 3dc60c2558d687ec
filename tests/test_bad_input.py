"""Bad input: every mistake gets an error of the right kind that names the place and says what to do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headgate
from headgate.gates.budget import Budget
from headgate.models.cifar_resnet import CifarResNet
from tests.networks import NETWORKS, conv, example, head, pooled
from tests.oracle import Net, decide_, difference, randn, randomize_

X = (3, 8, 8)
LOADER = [(randn(8, *X), torch.arange(8) % 5)]


def resnet() -> nn.Module:
    return CifarResNet(1, num_classes=5, width=8).eval()


def gated_resnet(**options: Any) -> headgate.GatedModel:
    return headgate.gate(resnet(), randn(2, *X), **options)


# -------------------------------------------------------------------------------------------------------- the errors


@pytest.mark.parametrize(
    ("error", "parent"),
    [
        (headgate.HeadgateError, ValueError),
        (headgate.ModelError, headgate.HeadgateError),
        (headgate.TraceError, headgate.ModelError),
        (headgate.NothingToGate, headgate.ModelError),
        (headgate.TargetError, headgate.HeadgateError),
        (headgate.NotDecided, headgate.HeadgateError),
        (headgate.ShrinkMismatch, headgate.HeadgateError),
        (headgate.NonFiniteLoss, headgate.HeadgateError),
        (headgate.FileError, headgate.HeadgateError),
    ],
)
def test_errors_are_a_tree_of_value_errors(error: type, parent: type) -> None:
    assert error.__bases__ == (parent,)


# --------------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize(
    ("model", "example_input", "says"),
    [
        (nn.Sequential(nn.Flatten(), nn.ReLU()), randn(2, *X), "it has no layer with channels.*headgate inspect"),
        (nn.Linear(4, 2), randn(2, 4), "is an output of the model"),
        (
            nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)),
            randn(2, 4),
            r"`1` \(LayerNorm\) normalises",
        ),
        (nn.Identity(), randn(2, 4), "it has no layer with channels"),
    ],
)
def test_a_model_without_gateable_layers(model: nn.Module, example_input: Tensor, says: str) -> None:
    with pytest.raises(headgate.NothingToGate, match=f"no channel of this model can be gated.*{says}"):
        headgate.gate(model, example_input)


@pytest.mark.parametrize("model", [None, torch.ones(3), resnet().state_dict(), resnet, CifarResNet])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(headgate.ModelError, match=r"model is a .*pass an nn\.Module"):
        headgate.gate(model, randn(2, *X))


def test_a_lazy_model() -> None:
    with pytest.raises(headgate.ModelError, match=r"`0\.weight` is not initialised yet.*run the model once"):
        headgate.gate(nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU(), nn.LazyConv2d(4, 3)), randn(2, *X))


def test_a_model_on_the_meta_device() -> None:
    with pytest.raises(
        headgate.ModelError, match="`conv1.weight` is on the meta device and has no values: build the model"
    ):
        headgate.gate(resnet().to("meta"), torch.empty(2, *X, device="meta"))


def test_a_model_that_cannot_be_copied() -> None:
    model = resnet()
    model.generator = (number for number in range(3))
    with pytest.raises(headgate.ModelError, match="can't be copied.*generator"):
        headgate.gate(model, randn(2, *X))


def branch_on_data(n: Any, x: Tensor) -> Tensor:
    x = F.relu(n.a(x))
    if x.sum() > 0:
        x = x * 2
    return pooled(n, n.b(x))


CONTROL_FLOW: dict[str, Any] = {
    "if": branch_on_data,
    "item": lambda n, x: pooled(n, n.b(n.a(x) * x.max().item())),
    "nonzero": lambda n, x: pooled(n, n.b(n.a(x)) + len(x.nonzero())),
    "while": lambda n, x: pooled(n, n.b(n.a(x) if float(x.norm()) < 1 else n.a(x / 2))),
}


@pytest.mark.parametrize("kind", CONTROL_FLOW)
def test_control_flow_on_data(kind: str) -> None:
    model = Net(CONTROL_FLOW[kind], a=conv(3, 8), b=conv(8, 6), head=head(6))
    with pytest.raises(
        headgate.TraceError, match=r"test_bad_input\.py:\d+.*submodules without control flow one by one"
    ):
        headgate.gate(model, randn(2, *X))


def test_an_index_that_depends_on_data_freezes_what_it_touches() -> None:
    model = Net(
        lambda n, x: n.head(F.relu(n.b(F.relu(n.a(x))))[x.mean((1, 2, 3)) > -9].mean((2, 3))),
        a=conv(3, 8),
        b=conv(8, 6),
        head=head(6),
    )
    gated = headgate.gate(randomize_(model.eval()), randn(2, *X), target=1.0)
    assert set(gated.gate_probabilities()) == {"a"} and "aten.index.Tensor" in gated.graph.frozen["b"]
    assert difference(decide_(gated, 0.5, 0)(randn(3, *X)), gated.shrink()(randn(3, *X))) < 1e-4


def test_control_flow_inside_a_module_names_it() -> None:
    inner = Net(branch_on_data, a=conv(3, 8), b=conv(8, 6), head=head(6))
    with pytest.raises(headgate.TraceError, match=r"`inner`"):
        headgate.gate(Net(lambda n, x: n.inner(x), inner=inner), randn(2, *X))


def test_control_flow_on_shapes_and_settings_is_fine() -> None:
    model = Net(
        lambda n, x: pooled(n, n.b(F.relu(n.a(x)) if x.shape[-1] > 4 and not n.training else n.a(x))),
        a=conv(3, 8), b=conv(8, 6), head=head(6),
    )  # fmt: skip
    assert set(headgate.gate(model, randn(2, *X)).gate_probabilities()) == {"a", "b"}


def test_one_module_used_twice_and_one_parameter_used_twice() -> None:
    """Double use is no mistake: tied or frozen, never wrong (see the table of networks for the proof)."""
    for name in ("one module used twice", "one norm used twice"):
        case = NETWORKS[name]
        gated = decide_(headgate.gate(randomize_(case.make().eval()), example(case), target=1.0), 0.5, 0)
        assert difference(gated(*example(case)), gated.shrink()(*example(case))) < 1e-4
    case = NETWORKS["one parameter in two modules"]
    with pytest.raises(headgate.NothingToGate, match="`a` shares a parameter with `b`"):
        headgate.gate(case.make(), example(case))


@pytest.mark.parametrize("stream", ["shared", "indexed"])
def test_a_model_in_half_precision_is_gated_trained_and_shrunk(stream: str) -> None:
    model = randomize_(resnet()).half()
    x = randn(2, *X).half()
    gated = headgate.gate(model, x, target=0.6, stream=stream, budget=Budget.paper(0.6)).train()  # type: ignore[arg-type]
    (gated(x).float().square().mean() + gated.cost_loss()).backward()
    assert gated.gates.logits.dtype == torch.float32 and gated.gates.logits.grad.isfinite().all()
    assert gated(x).dtype == torch.float16
    gated.project().eval()
    small = gated.shrink()
    assert small(x).dtype == torch.float16 and all(p.dtype == torch.float16 for p in small.parameters())
    assert difference(gated(x), small(x)) < 2e-2
    assert gated.macs() <= 0.6 * gated.dense_macs


def test_a_model_in_double_precision_stays_exact() -> None:
    model = randomize_(resnet()).double()
    gated = decide_(headgate.gate(model, randn(2, *X).double(), target=1.0), 0.5, 0)
    assert difference(gated(randn(3, *X).double()), gated.shrink()(randn(3, *X).double())) < 1e-12


# ------------------------------------------------------------------------------------------------- the example input


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (
            randn(2, 4, 8, 8),
            headgate.TraceError,
            r"rejects the example input of shape \(2, 4, 8, 8\).*Pass an example_input",
        ),
        (randn(2, 3), headgate.TraceError, r"rejects the example input of shape \(2, 3\)"),
        (torch.ones(2, *X, dtype=torch.int64), headgate.TraceError, "rejects the example input"),
        (torch.zeros(0, *X), headgate.ModelError, "empty batch: pass at least one image"),
        (torch.tensor(1.0), headgate.ModelError, "no tensor with a batch dimension: pass e.g. torch.randn"),
        (None, headgate.ModelError, "no tensor with a batch dimension"),
        ((), headgate.ModelError, "no tensor with a batch dimension"),
        ((2, 3, 8, 8), headgate.ModelError, "no tensor with a batch dimension"),
        ((randn(2, *X), randn(2, 4)), headgate.TraceError, "rejects the example input"),
        ({"image": randn(2, *X)}, headgate.TraceError, "rejects the example input"),
        (randn(2, *X).numpy(), headgate.ModelError, "no tensor with a batch dimension"),
    ],
)
def test_an_example_the_model_rejects(given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        headgate.gate(resnet(), given)


def test_the_users_own_error_is_shown() -> None:
    def fails(n: Any, x: Tensor) -> Tensor:
        raise KeyError("my own mistake")

    with pytest.raises(headgate.TraceError, match="KeyError: 'my own mistake'"):
        headgate.gate(Net(fails, a=conv(3, 8)), randn(2, *X))


# --------------------------------------------------------------------------------------------------------- the target


@pytest.mark.parametrize("target", [0, 0.0, -0.5, 2, 1.01, math.nan, math.inf, "0M", "0", "9T"])
def test_a_target_that_is_no_share(target: Any) -> None:
    with pytest.raises(headgate.TargetError, match="above 0 and at most 1, a share of the whole network's MACs"):
        gated_resnet(target=target)


@pytest.mark.parametrize("target", ["60X", "", "M", "-5M", "half", "1e6", "50%", "60 MB"])
def test_a_target_that_cannot_be_read(target: str) -> None:
    with pytest.raises(headgate.TargetError, match='is no number of MACs: write "60M"'):
        gated_resnet(target=target)


@pytest.mark.parametrize("target", [None, [0.5], {"macs": 1}])
def test_a_target_of_another_type(target: Any) -> None:
    with pytest.raises((headgate.TargetError, TypeError)):
        gated_resnet(target=target)


@pytest.mark.parametrize(
    ("target", "share"), [("100K", 1e5), ("0.1M", 1e5), ("100000", 1e5), (" 100 k ", 1e5), (".0001G", 1e5)]
)
def test_targets_with_units(target: str, share: float) -> None:
    gated = gated_resnet(target=target)
    assert gated.target == pytest.approx(share / gated.dense_macs)
    assert gated.project().eval().macs() <= share


@pytest.mark.parametrize(
    "options", [{"target": 1e-4}, {"target": "100"}, {"target": 0.3, "frozen": ["layer2", "layer3"]}]
)
def test_a_target_below_what_can_be_reached(options: dict[str, Any]) -> None:
    advice = ", or freeze less" if "frozen" in options else "; `headgate inspect`"
    with pytest.raises(
        headgate.TargetError, match=rf"can't be reached.*of the MACs are left.*Choose a higher target{advice}"
    ):
        gated_resnet(**options)


def test_a_target_lowered_later_below_what_can_be_reached() -> None:
    gated = gated_resnet(target=0.5)
    gated.target = 1e-4
    with pytest.raises(headgate.TargetError, match="can't be reached"):
        gated.project()


# ------------------------------------------------------------------------------------------------------- the settings


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"frozen": ["layer1.0.conv"]},
            headgate.ModelError,
            r"`layer1\.0\.conv`.*no such module: did you mean 'layer1\.0\.conv",
        ),
        ({"frozen": ["backbone"]}, headgate.ModelError, "`backbone`, but the model has no such module"),
        ({"frozen": [""]}, headgate.ModelError, "no such module"),
        (
            {"frozen": "conv1"},
            headgate.HeadgateError,
            r"is one string: pass a list of module names, frozen=\['conv1'\]",
        ),
        ({"frozen": [nn.ReLU()]}, headgate.HeadgateError, "frozen"),
        ({"frozen": 3}, headgate.HeadgateError, "frozen"),
        ({"granularity": 0}, headgate.HeadgateError, "granularity=0.*or a number of channels such as 8"),
        ({"granularity": -4}, headgate.HeadgateError, "granularity=-4"),
        ({"granularity": 2.5}, headgate.HeadgateError, "granularity=2.5"),
        ({"granularity": True}, headgate.HeadgateError, "granularity=True"),
        ({"granularity": "block"}, headgate.HeadgateError, "granularity='block'"),
        ({"granularity": ("channel", 8)}, headgate.HeadgateError, "granularity="),
        ({"granularity": None}, headgate.HeadgateError, "granularity=None"),
        ({"stream": "both"}, headgate.HeadgateError, "stream='both': use \"shared\""),
        ({"loss": "flops"}, headgate.HeadgateError, "loss='flops' is unknown: use one of macs, activation, per_gate"),
        ({"kind": "both"}, headgate.HeadgateError, "kind='both'"),
        ({"temperature": 0}, headgate.HeadgateError, "temperature=0"),
        ({"backward": "p"}, headgate.HeadgateError, "backward='p'"),
        ({"initial_probability": 1}, headgate.HeadgateError, "initial_probability=1"),
    ],
)
def test_wrong_settings(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        gated_resnet(**options)


# ------------------------------------------------------------------------------------------------------ probabilities


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"nowhere": torch.ones(8)}, "there is no mask `nowhere`: names are those of gate_probabilities"),
        ({"conv1": torch.ones(7)}, r"mask `conv1` has 8 gates, got probabilities of shape \(7,\)"),
        ({"conv1": torch.ones(8, 1)}, r"mask `conv1` has 8 gates"),
        ({"conv1": 0.5}, r"mask `conv1` has 8 gates, got probabilities of shape \(\)"),
        ({"conv1": torch.full((8,), 1.5)}, "mask `conv1`: probabilities lie between 0 and 1"),
        ({"conv1": torch.full((8,), math.nan)}, "mask `conv1`: probabilities lie between 0 and 1 and are no NaN"),
    ],
)
def test_wrong_probabilities_change_nothing(given: dict[str, Any], says: str) -> None:
    gated = gated_resnet()
    before = gated.gates.logits.detach().clone()
    with pytest.raises(headgate.HeadgateError, match=says):
        gated.set_gate_probabilities({"layer1.0.conv1": torch.zeros(8), **given})
    assert torch.equal(before, gated.gates.logits)


# ------------------------------------------------------------------------------------------------- too early, too late


def test_shrink_before_training() -> None:
    with pytest.raises(headgate.NotDecided, match=r"no gate is closed.*train the gates, then calibrate"):
        gated_resnet().eval().shrink()


@pytest.mark.parametrize("name", ["sample", "ensemble"])
def test_shrink_under_a_strategy_that_decides_nothing(name: str) -> None:
    with pytest.raises(
        headgate.NotDecided, match=f'strategy "{name}" decides nothing: choose "threshold" or "calibrated"'
    ):
        gated_resnet().eval().strategy(name).shrink()


@pytest.mark.parametrize("question", ["cost_loss", "activation_rates", "macs"])
def test_questions_about_a_pass_that_never_was(question: str) -> None:
    with pytest.raises(headgate.NotDecided, match="there was none: call the model first"):
        getattr(gated_resnet().train(), question)()


def test_always_on_shrinks_to_the_dense_network() -> None:
    gated = gated_resnet().eval().strategy("always_on")
    assert torch.equal(gated(randn(2, *X)), gated.shrink()(randn(2, *X)))


# --------------------------------------------------------------------------------------------------------------- NaN


@pytest.mark.parametrize("loss", ["macs", "activation", "per_gate"])
def test_a_nan_in_the_loss_stops_at_the_next_step(loss: str) -> None:
    gated = gated_resnet(loss=loss).train()
    optimizer = torch.optim.SGD(gated.param_groups(lr=0.1))
    task = gated(randn(2, *X) * math.nan).mean()
    (task + gated.cost_loss()).backward()
    optimizer.step()
    gated(randn(2, *X))
    with pytest.raises(headgate.NonFiniteLoss, match="NaN.*[Ll]ower the learning rate"):
        gated.cost_loss()


@pytest.mark.parametrize("question", ["project", "shrink", "polarised"])
def test_nan_logits_are_never_decided_on(question: str) -> None:
    gated = gated_resnet().eval()
    with torch.no_grad():
        gated.gates.logits[3] = math.nan
    with pytest.raises(headgate.NonFiniteLoss, match="probability is NaN.*checkpoint"):
        getattr(gated, question)()
    with pytest.raises(headgate.NonFiniteLoss):
        gated(randn(2, *X))


def test_infinite_logits_are_sure_gates() -> None:
    gated = gated_resnet(budget=Budget.paper(0.5)).train()
    with torch.no_grad():
        gated.gates.logits[::2], gated.gates.logits[1::2] = math.inf, -math.inf
    gated(randn(4, *X))
    assert gated.cost_loss().isfinite()
    gated.cost_loss().backward()
    assert gated.gates.logits.grad.isfinite().all()


def test_weights_that_are_nan_do_not_shrink_silently() -> None:
    """NaN equals NaN for the check, so the network is shrunk; a NaN that only one side has is a mismatch."""
    gated = decide_(gated_resnet(target=1.0), 0.5, 0)
    with torch.no_grad():
        gated.model.linear.weight[0] = math.nan
    small = gated.shrink()
    assert small(randn(2, *X))[:, 0].isnan().all() and small(randn(2, *X))[:, 1:].isfinite().all()


# --------------------------------------------------------------------------------------------------------- the loader


@pytest.mark.parametrize("loader", [[], iter([])])
def test_an_empty_loader(loader: Any) -> None:
    with pytest.raises(headgate.HeadgateError, match="the loader is empty: calibrate needs at least one batch"):
        gated_resnet().calibrate(loader)
    with pytest.raises(headgate.HeadgateError, match="the loader is empty"):
        gated_resnet().sweep_tau(loader)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("batches", [0, -1])
def test_no_batches(batches: int, kind: str) -> None:
    with pytest.raises(headgate.HeadgateError, match=f"batches={batches}"):
        gated_resnet(kind=kind).calibrate(LOADER, batches=batches)


def test_a_sweep_over_an_iterator_says_that_it_is_spent() -> None:
    with pytest.raises(headgate.HeadgateError, match="spent after the first tau.*pass a list or a DataLoader"):
        gated_resnet().sweep_tau(iter(LOADER))
    assert len(gated_resnet().sweep_tau(iter(LOADER), [0.5])) == 1


# ------------------------------------------------------------------------------------- what a first user tried


def test_a_gated_model_is_not_gated_again() -> None:
    with pytest.raises(headgate.ModelError, match="has gates already"):
        headgate.gate(gated_resnet(), randn(2, *X))


@pytest.mark.parametrize("target", [None, True, [0.5]])
def test_a_target_that_is_no_number(target: Any) -> None:
    with pytest.raises(headgate.TargetError, match="a share of the MACs such as 0.5"):
        gated_resnet(target=target)


def test_a_share_may_be_written_as_text_and_a_budget_in_macs() -> None:
    assert gated_resnet(target="0.7").target == 0.7
    macs = gated_resnet().dense_macs
    text = f"{0.75 * macs / 1e3:.3f}K"
    gated = gated_resnet(target=text, budget=Budget(text))  # type: ignore[arg-type]
    assert gated.budget.target == gated.target == pytest.approx(0.75)


def test_exits_that_make_no_sense() -> None:
    for options, says in (
        ({"at": ["layer1", "layer1"]}, "twice"),
        ({"at": ["layer1"], "head": nn.Linear(3, 3)}, "every exit needs its own"),
    ):
        with pytest.raises(headgate.HeadgateError, match=says):
            headgate.add_exits(resnet(), randn(1, *X), **options)  # type: ignore[arg-type]
    exits = headgate.add_exits(resnet(), randn(1, *X), at=["layer1"])
    with pytest.raises(headgate.HeadgateError, match=r"\(images, labels\)"):
        exits.calibrate([randn(8, *X)])
    assert "together" in str(exits.table(LOADER)) and "layer1" in str(exits.table(LOADER))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"static": ["layer1"]}, "all gates are static already"), ({"rates": 0.3}, "leave them out with loss='macs'")],
)
def test_options_that_would_say_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(headgate.HeadgateError, match=message):
        headgate.gate(resnet(), randn(2, *X), target=0.5, **options)


def test_data_that_is_not_finite_or_empty_is_named_by_its_batch() -> None:
    good = randn(4, *X)
    bad = good.clone()
    bad[0, 0, 0, 0] = math.nan
    gated = gated_resnet()
    before = {name: value.clone() for name, value in gated.state_dict().items() if isinstance(value, Tensor)}
    for batch, says in ((bad, "batch 2 of the loader holds NaN"), (good[:0], "batch 2 of the loader is empty")):
        with pytest.raises(headgate.HeadgateError, match=says):
            gated.calibrate([good, batch], batches=2)
    for name, value in gated.model.state_dict().items():
        assert torch.equal(value, before[f"model.{name}"]), name
    with torch.no_grad():
        gated.model.conv1.weight.fill_(math.nan)
    with pytest.raises(headgate.NonFiniteLoss, match="nothing but NaN"):
        gated.project().shrink()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_and_foreign_answers() -> None:
    with pytest.raises(headgate.ModelError, match="TorchScript"):
        headgate.gate(torch.jit.trace(resnet(), randn(1, *X)), randn(1, *X))
    net = Net(lambda n, x: type("Own", (), {"scores": n.b(n.a(x))})(), a=conv(3, 8), b=conv(8, 4))
    with pytest.raises(headgate.TraceError, match="returns a Own in which no tensor is found"):
        headgate.gate(net, randn(1, *X))


def test_weights_that_are_computed_are_told_with_the_remedy() -> None:
    norm = nn.utils.parametrizations.weight_norm
    net = nn.Sequential(norm(conv(3, 8)), nn.ReLU(), norm(conv(8, 4)))
    with pytest.raises(headgate.NothingToGate, match="`0` has a parametrization.*remove_parametrizations"):
        headgate.gate(net, randn(1, *X))


@pytest.mark.parametrize(
    ("options", "says"),
    [({"budget": 0.5}, "pass headgate.Budget"), ({"initial_probability": "0.9"}, "between 0 and 1")],
)
def test_options_of_other_types(options: dict[str, Any], says: str) -> None:
    with pytest.raises(headgate.HeadgateError, match=says):
        gated_resnet(**options)
    with pytest.raises(headgate.HeadgateError, match="ramp_steps='10'"):
        Budget(0.5, ramp_steps="10")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("ensemble", {"runs": 2.5}, "runs=2.5 is no whole number"),
        ("ensemble", {"runs": "5"}, "runs='5' is no whole number"),
        ("sample", {"generator": 42}, r"generator=42 is no generator: pass torch.Generator\(\).manual_seed"),
        ("threshold", {"tau": None}, "tau=None is no number between 0 and 1"),
        ("threshold", {"taus": 0.4}, "does not take 'taus': its options are tau"),
        ("threshold", {"runs": 3}, "does not take 'runs': its options are tau"),
        ("always_on", {"tau": 0.9}, "does not take 'tau': it has none"),
        ("sample", {"runs": 4}, "does not take 'runs': its options are generator"),
    ],
)
def test_options_of_a_strategy_are_refused_at_once(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(headgate.HeadgateError, match=says):
        gated_resnet().strategy(name, **options)


def test_options_of_a_strategy_may_be_of_torch_and_numpy() -> None:
    gated = gated_resnet().eval()
    gated.strategy("threshold", tau=torch.tensor(0.25)).strategy("threshold", tau=np.float32(0.25))
    assert type(gated._strategy.tau) is float
    gated.strategy("ensemble", runs=np.int64(2), generator=None)(randn(2, *X))


def test_gates_that_cost_more_than_they_save_are_not_helped_by_a_target() -> None:
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    with pytest.raises(headgate.TargetError, match="kind='static', or larger gates") as raised:
        headgate.gate(net, randn(2, 6), kind="dynamic", target=0.9)
    assert "higher target" not in str(raised.value)


def test_a_budget_can_be_given_to_several_models() -> None:
    """What one model does with it is not seen by the next."""
    budget = headgate.Budget(0.5, ramp_steps=4)
    for _ in range(2):
        gated = headgate.gate(small(), torch.randn(1, 3, 8, 8), budget=budget)
        for _ in range(6):
            gated(torch.randn(2, 3, 8, 8))
            gated.cost_loss()
        assert gated.budget.step == 6
    assert budget.step == 0 and budget.start_cost is None


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["shared out", "compiled"])
def test_wrapped_models_are_gated_saved_and_loaded(wrap: Any, tmp_path: Any) -> None:
    plain = small()
    gated = headgate.gate(wrap(plain), torch.randn(1, 3, 8, 8), target=0.6).eval()
    assert list(gated.gate_probabilities()) == list(headgate.gate(plain, torch.randn(1, 3, 8, 8)).gate_probabilities())
    made = gated.project().shrink()
    headgate.save(made, tmp_path / "small.safetensors")
    x = torch.randn(2, 3, 8, 8)
    for fresh in (small(), wrap(small())):
        assert torch.equal(headgate.load(tmp_path / "small.safetensors", fresh)(x), made(x))
    exits = headgate.add_exits(wrap(plain), torch.randn(1, 3, 8, 8), ["1"], target=1.0)
    headgate.save(exits, tmp_path / "exits.safetensors")
    assert torch.equal(headgate.load(tmp_path / "exits.safetensors", small())(x), exits.eval()(x))


@pytest.mark.parametrize("example", [(torch.randn(1, 3, 8, 8), torch.randn(1, 4)), [], {"x": 1}])
def test_exits_of_a_model_that_takes_no_single_tensor(example: Any) -> None:
    with pytest.raises(headgate.ModelError, match="called with one tensor"):
        headgate.add_exits(small(), example, ["1"])


def test_one_tensor_may_come_in_a_list() -> None:
    assert headgate.add_exits(small(), [torch.randn(1, 3, 8, 8)], ["1"], target=1.0).names[0] == "1"  # type: ignore[arg-type]


def test_a_spread_that_is_no_number_changes_no_gate() -> None:
    gated = headgate.gate(small(), torch.randn(1, 3, 8, 8))
    with pytest.raises(headgate.HeadgateError, match="spread=nan"):
        gated.prime_([(torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))], spread=float("nan"))


def test_only_networks_are_saved(tmp_path: Any) -> None:
    with pytest.raises(headgate.HeadgateError, match="a str is no network"):
        headgate.save("x", tmp_path / "x.safetensors")  # type: ignore[arg-type]

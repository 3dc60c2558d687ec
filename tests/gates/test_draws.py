"""Where gates act: on what layers read, image by image, behind BatchNorm; and never on all that a layer has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headgate
from headgate.gates.budget import Budget
from headgate.gates.draws import GateHook, detach
from tests.networks import NETWORKS, AttentionBlock, Case, conv, example, head
from tests.oracle import Net, difference, randn, randomize_, tensors


def windows(n: Any, x: Tensor) -> Tensor:
    """Cuts images in four windows, each an entry of a longer batch, as Swin does."""
    batch = len(x)
    x = n.stem(x).reshape(batch, 8, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(batch * 4, 16, 8)
    x = n.b(F.relu(n.a(x)))
    return n.head(x.reshape(batch, 64, 6).mean(1))


def sequence_first(n: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return n.head((x + n.b(F.relu(n.a(x)))).mean(0))


IMAGE_BY_IMAGE: dict[str, Case] = {
    **{
        name: NETWORKS[name]
        for name in ("residual projection", "inverted bottleneck", "grouped stream", "flatten before linear", "several inputs")
    },
    "tokens": Case(
        lambda: Net(lambda n, x: n.head(n.block(x).mean(1)), block=AttentionBlock(8, 12), head=head(8)), ((5, 8),)
    ),
    "windows": Case(
        lambda: Net(windows, stem=conv(3, 8), a=nn.Linear(8, 12), b=nn.Linear(12, 6), head=head(6)), ((3, 8, 8),)
    ),
    "the sequence comes first": Case(
        lambda: Net(sequence_first, a=nn.Linear(8, 12), b=nn.Linear(12, 8), head=head(8)), ((5, 8),)
    ),
    "the sequence comes first and is as long as the batch": Case(
        lambda: Net(sequence_first, a=nn.Linear(8, 12), b=nn.Linear(12, 8), head=head(8)), ((4, 8),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("stream", ["shared", "indexed"])
@pytest.mark.parametrize("name", IMAGE_BY_IMAGE)
def test_every_image_is_computed_with_its_own_gates(name: str, stream: str) -> None:
    case = IMAGE_BY_IMAGE[name]
    gated = headgate.gate(randomize_(case.make().eval()), example(case), target=1.0, stream=stream).eval()  # type: ignore[arg-type]
    gated.set_gate_probabilities({name: torch.full_like(p, 0.6) for name, p in gated.gate_probabilities().items()})
    batch = example(case, batch=4, seed=3)
    sampled = gated.strategy("sample", generator=torch.Generator().manual_seed(0))(*batch)
    z_BG = gated._last.gates_BG.detach()
    macs = gated.macs()
    gated.strategy("threshold")
    alone = 0.0
    for image in range(4):
        gated.set_gate_probabilities(gated._by_mask(z_BG[image]))
        one = gated(*(x[image : image + 1] for x in batch))
        assert difference(one, sampled[image : image + 1]) < 1e-5
        alone += gated.macs() / 4
    assert macs == pytest.approx(alone, rel=1e-5), "the cost of a batch is the mean of its images'"


def test_batchnorm_never_sees_a_closed_channel_as_zeros() -> None:
    model = NETWORKS["residual projection"].make().train()
    gated = headgate.gate(model, randn(2, 3, 8, 8), target=1.0).train()
    seen: list[Tensor] = []
    gated.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    gated.set_gate_probabilities({"stem": torch.zeros(8)})
    gated(randn(4, 3, 8, 8))
    dense = gated.model.stem(randn(4, 3, 8, 8))
    torch.testing.assert_close(seen[0], dense)


def test_a_closed_channel_has_no_influence() -> None:
    """Whatever its weights: they may be changed at will."""
    gated = headgate.gate(
        randomize_(NETWORKS["residual projection"].make().eval()), randn(2, 3, 8, 8), target=1.0
    ).eval()
    gated.set_gate_probabilities({name: torch.arange(len(p)) % 2.0 for name, p in gated.gate_probabilities().items()})
    before = gated(randn(4, 3, 8, 8))
    with torch.no_grad():
        gated.model.stem.weight[::2] += 7
        gated.model.block.conv1.weight[::2] *= -3
    assert torch.equal(before, gated(randn(4, 3, 8, 8)))
    with torch.no_grad():
        gated.model.stem.weight[1] += 7
    assert not torch.equal(before, gated(randn(4, 3, 8, 8)))


@pytest.mark.parametrize("stream", ["shared", "indexed"])
def test_no_sampled_mask_closes_where_it_would_cut_the_network(stream: str) -> None:
    case = NETWORKS["residual projection"]
    gated = headgate.gate(case.make(), example(case), target=1.0, stream=stream).train()  # type: ignore[arg-type]
    gated.set_gate_probabilities({name: torch.full_like(p, 0.02) for name, p in gated.gate_probabilities().items()})
    gated(*example(case, batch=64))
    died = 0
    for mask in gated.graph.masks:
        open_B = gated._last.gates_BG[:, mask.gates].sum(1)
        died += int((open_B == 0).sum())
        assert mask.may_die or (open_B > 0).all(), mask.name
    assert died > 0, "in residual branches they do close"
    assert set(gated._last.gates_BG.detach().unique().tolist()) == {0.0, 1.0}


def test_a_gate_held_open_still_learns() -> None:
    case = NETWORKS["chunk"]
    gated = headgate.gate(case.make(), example(case), target=0.99, budget=Budget.paper(0.99)).train()
    gated.set_gate_probabilities({name: torch.full_like(p, 1e-3) for name, p in gated.gate_probabilities().items()})
    gated(*example(case, batch=4))
    gated.cost_loss().backward()
    assert (gated.gates.logits.grad < 0).all(), "too cheap: all gates are pulled open"


def test_soft_gates_are_between_and_reach_the_weights() -> None:
    case = NETWORKS["residual identity"]
    gated = headgate.gate(case.make(), example(case), target=1.0, hard=False, temperature=2.0).train()
    gated(*example(case, batch=4)).square().mean().backward()
    z_BG = gated._last.gates_BG
    assert ((z_BG > 0) & (z_BG < 1)).all() and (gated.gates.logits.grad != 0).any()


@pytest.mark.parametrize("name", ["residual projection", "attention block"])
def test_gates_work_under_autocast(name: str) -> None:
    """In float16: the network computes in it, the gates and their cost do not."""
    case = NETWORKS[name]
    gated = headgate.gate(randomize_(case.make().eval()), example(case), target=0.9, budget=Budget.paper(0.9)).train()
    with torch.autocast("cpu", dtype=torch.float16):
        output = gated(*example(case))
        cost = gated.cost_loss()
    assert output.dtype == torch.float16 and cost.dtype == torch.float32
    (output.float().square().mean() + cost).backward()
    assert gated.gates.logits.grad.dtype == torch.float32 and gated.gates.logits.grad.isfinite().all()


def test_detached_masks_leave_no_trace() -> None:
    case = NETWORKS["residual projection"]
    gated = headgate.gate(randomize_(case.make().eval()), example(case), target=1.0, stream="indexed")
    hooks = [
        hook for m in gated.model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
    ]
    assert hooks and all(isinstance(hook, GateHook) for hook in hooks)
    detach(gated.model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in gated.model.modules())


def test_the_bare_model_inside_runs_ungated() -> None:
    """Outside of a pass of the gated model its body is the dense network: for exports, for teachers."""
    case = NETWORKS["residual projection"]
    dense = randomize_(case.make().eval())
    gated = headgate.gate(dense, example(case), target=1.0)
    gated.set_gate_probabilities({name: torch.zeros_like(p) for name, p in gated.gate_probabilities().items()})
    assert torch.equal(tensors(gated.model.eval()(*example(case)))[0], dense(*example(case)))


def test_no_image_passes_a_tensor_with_static_and_dynamic_masks() -> None:
    net = Net(
        lambda n, x: n.head(n.c(torch.cat([n.a(x), n.b(n.a(x).relu())], 1).relu()).mean((2, 3))),
        a=conv(3, 8), b=conv(8, 8), c=conv(16, 16), head=head(16),
    )  # fmt: skip
    gated = headgate.gate(net, randn(2, 3, 8, 8), kind="dynamic", static=["a"], stream="shared", target=0.9).eval()
    assert gated(randn(0, 3, 8, 8)).shape == (0, 5)
    assert gated(randn(2, 3, 8, 8)).shape == (2, 5)


def test_no_image_passes_a_gated_branch_of_any_dimension() -> None:
    net = Net(
        lambda n, x: n.head((n.stem(x).relu() + n.b(n.a(n.stem(x).relu()).relu())).mean(2)),
        stem=nn.Conv1d(3, 16, 3, padding=1), a=nn.Conv1d(16, 16, 3, padding=1), b=nn.Conv1d(16, 16, 3, padding=1),
        head=head(16),
    )  # fmt: skip
    gated = headgate.gate(net, randn(2, 3, 32), kind="dynamic", target=0.9).eval()
    assert gated(randn(0, 3, 32)).shape == gated.compact()(randn(0, 3, 32)).shape == (0, 5)


@pytest.mark.parametrize("granularity", ["channel", "layer"])
@pytest.mark.parametrize(
    ("kind", "settled"), [("static", False), ("dynamic", False), ("dynamic", True), ("dynamic", "learning")]
)
def test_a_compiled_step_is_the_same_step(kind: str, granularity: str, settled: bool | str) -> None:
    case = NETWORKS["residual projection"]
    made = {}
    for how in ("eager", "compiled"):
        torch.manual_seed(0)
        gated = headgate.gate(
            randomize_(case.make()), example(case), target=0.5, kind=kind, granularity=granularity,  # type: ignore[arg-type]
            initial_probability=0.3,
        )  # fmt: skip
        gated.strategy("threshold", tau=0.3).settle_(bool(settled), learning=settled == "learning")
        whole = not settled  # static gates that are decided, if there are some, are decided outside of the graph
        net = torch.compile(gated, dynamic=False, fullgraph=whole, backend="aot_eager") if how == "compiled" else gated
        optimizer = torch.optim.SGD(gated.param_groups(lr=0.1), momentum=0.9)
        for step in range(3):
            torch.manual_seed(step)
            answers = net(randn(16, 3, 8, 8, seed=step))
            (F.cross_entropy(answers, torch.arange(16) % 5) + gated.cost_loss()).backward()
            optimizer.step()
            optimizer.zero_grad()
        made[how] = [
            answers.detach(),
            gated._last.gates_BG.detach(),
            *(tensor.detach() for tensor in gated.parameters()),
        ]
    torch.compiler.reset()
    for eager, compiled in zip(*made.values(), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)

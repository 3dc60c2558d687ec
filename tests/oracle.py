"""What the tests compare with: counts by PyTorch's own counter, random weights and decisions, differences of outputs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

import headgate
from headgate.graph.relayout import Relayout

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


class Net(nn.Module):
    """A network in one expression: its parts by name, and its forward pass as a function of itself and the input."""

    def __init__(self, run: Any, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


@torch.no_grad()
def randomize_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Values of its own for every norm, bias and scale, so that a mistake anywhere shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, (*NORMS, nn.PReLU)) and name == "weight":
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.3, generator=generator)
        if isinstance(getattr(module, "running_mean", None), Tensor):
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    return model


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def difference(expected: Any, found: Any) -> float:
    """The largest difference of two (nests of) outputs, relative to the largest value."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(tensors(expected), tensors(found), strict=True)]
    assert pairs and all(a.shape == b.shape for a, b in pairs)
    assert all(a.isfinite().all() and a.abs().max() > 0 for a, _ in pairs), "the comparison would mean nothing"
    return max(float((a.double() - b.double()).abs().max() / a.double().abs().max()) for a, b in pairs)


def same(expected: Any, found: Any) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(tensors(expected), tensors(found), strict=True))


@torch.no_grad()
def independent_macs(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """MACs for one image by PyTorch's counter (two operations a MAC), attention computed by plain matrix products."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    flops, rest = divmod(counter.get_total_flops(), 2 * len(tensors((args, kwargs))[0]))
    assert rest == 0
    return flops


def decide_(gated: headgate.GatedModel, open_share: float, seed: int) -> headgate.GatedModel:
    """Random decisions, by threshold: about this share of the gates open, at least one closed."""
    generator = torch.Generator().manual_seed(seed)
    chosen = {
        name: (torch.rand(p.shape, generator=generator) < open_share).float()
        for name, p in gated.gate_probabilities().items()
    }
    first = next(iter(chosen.values()))
    first[int(torch.randint(len(first), (), generator=generator))] = 0
    gated.set_gate_probabilities(chosen)
    return gated.strategy("threshold", tau=0.5).eval()


def own_modules(model: nn.Module) -> list[str]:
    """Names of the modules of a shrunk network that are headgate's own."""
    return [name for name, module in model.named_modules() if isinstance(module, Relayout)]


@contextmanager
def weightless() -> Iterator[None]:
    """Modules made here have their parameters on the meta device: no memory, no initialisation."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def same_in_threads(model: nn.Module, batches: list[Tensor]) -> bool:
    """Whether threads that share a model get what one alone gets."""

    @torch.no_grad()  # every thread has its own mind about gradients
    def answer(x: Tensor) -> Tensor:
        answered: Tensor = model(x)
        return answered

    with ThreadPoolExecutor(4) as pool:
        expected = [answer(x) for x in batches]
        found = list(pool.map(answer, batches * 4))
    return all(torch.equal(a, b) for a, b in zip(found, expected * 4, strict=True))

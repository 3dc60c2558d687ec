"""Networks nobody wrote: convolutions, groups, adds, concatenations, norms, splits and pools in random arrangement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headgate
from tests.networks import Block, PreActivation, SqueezeExcite, ZeroPad
from tests.oracle import decide_, difference, independent_macs, randn, randomize_

SIZE = 8
ACTIVATIONS = (
    F.relu,
    F.silu,
    torch.tanh,
    F.hardswish,
    lambda x: F.relu(x, inplace=True),
    lambda x: F.leaky_relu(x, 0.2),
)

Step = tuple[str, int, int, int]
"""What to do, and three numbers that choose how: the tensors it takes, widths, kinds."""

STEPS = (
    "conv", "conv", "grouped", "depthwise", "norm", "activation", "add", "add", "cat", "split", "pool", "excite", "block", "block",
    "preact", "shortcut", "upsample", "scale", "shuffle", "again",
)  # fmt: skip
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 11), st.integers(0, 11), st.integers(0, 11)),
    min_size=2,
    max_size=9,
)


class Random(nn.Module):
    """Carries out a program: every step takes tensors made before and makes a new one.

    Built by running it once: layers are made when their step is first reached, as wide as what they find.
    """

    def __init__(self, program: list[Step]) -> None:
        super().__init__()
        self.program = program
        self.parts = nn.ModuleDict()
        self.scales = nn.ParameterDict()
        self.choices: dict[str, Any] = {}
        with torch.no_grad():
            width = self.body(randn(1, 3, SIZE, SIZE)).shape[1]
        self.head = nn.Linear(width, 4)

    def part(self, key: str, make: Any) -> nn.Module:
        if key not in self.parts:
            self.parts[key] = make()
        return self.parts[key]

    def chosen(self, key: str, choice: Any) -> Any:
        """What was chosen when the network was built: its code does not depend on widths later."""
        return self.choices.setdefault(key, choice)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def body(self, x: Tensor) -> Tensor:
        made = [self.part("stem", lambda: nn.Conv2d(3, 8, 3, padding=1))(x)]
        for number, (what, a, b, c) in enumerate(self.program):
            first, second = made[-1 - a % min(3, len(made))], made[b % len(made)]
            made.append(getattr(self, f"do_{what}")(f"{what}{number}", first, second, c))
        return torch.cat([made[-1].mean((2, 3)), made[len(made) // 2].amax((2, 3))], 1)

    def do_conv(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        size, out = (1, 3)[c % 2], (4, 6, 8)[c % 3]
        return self.part(key, lambda: nn.Conv2d(x.shape[1], out, size, padding=size // 2, bias=c > 5))(x)

    def do_grouped(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        width = x.shape[1]
        groups = [g for g in (2, 3, 4) if width % g == 0]
        chosen = groups[c % len(groups)] if groups else 1
        return self.part(key, lambda: nn.Conv2d(width, chosen * (2 + c % 3), 3, padding=1, groups=chosen))(x)

    def do_depthwise(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        width = x.shape[1]
        return self.part(key, lambda: nn.Conv2d(width, width * (1 + c % 2), 3, padding=1, groups=width))(x)

    def do_norm(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        width = x.shape[1]
        group = next(g for g in (4, 3, 2, 1) if width % g == 0)
        kinds = (
            lambda: nn.BatchNorm2d(width), lambda: nn.GroupNorm(width // group, width), lambda: nn.PReLU(width),
            lambda: nn.InstanceNorm2d(width, affine=True), lambda: nn.GroupNorm(group, width), lambda: nn.BatchNorm2d(width, affine=False),
        )  # fmt: skip
        return self.part(key, kinds[c % 6])(x)

    def do_activation(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        return ACTIVATIONS[c % len(ACTIVATIONS)](x.clone())

    def do_add(self, key: str, x: Tensor, y: Tensor, c: int) -> Tensor:
        y = self.fitted(y, x)
        if self.chosen(key, y.shape[1] != x.shape[1]):
            y = self.part(key, lambda: nn.Conv2d(y.shape[1], x.shape[1], 1))(y)
        return x + y if c % 3 else x * torch.sigmoid(y)

    def do_cat(self, key: str, x: Tensor, y: Tensor, c: int) -> Tensor:
        y = self.fitted(y, x)
        fits = self.chosen(key, x.shape[1] + 2 * y.shape[1] < 32)
        return torch.cat([x, y] if c % 2 else [y, x, y], 1) if fits else x

    def do_split(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        if not self.chosen(key, x.shape[1] % 2 == 0):
            return x
        left, right = x.chunk(2, 1)
        return (left * torch.sigmoid(right), torch.cat([right, left], 1), left + right)[c % 3]

    def do_pool(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        return (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), x[:, :, ::2, ::2])[c % 3] if x.shape[-1] > 2 else x

    def do_excite(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        return self.part(key, lambda: SqueezeExcite(x.shape[1], 2 + c % 3))(x)

    def do_block(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        width = x.shape[1]
        shortcut = lambda: nn.Sequential(nn.Conv2d(width, 6, 1, stride=2), nn.BatchNorm2d(6))  # noqa: E731
        strided = c % 3 == 0 and x.shape[-1] > 2
        return self.part(key, lambda: Block(width, 6, 2, shortcut()) if strided else Block(width, width))(x)

    def do_preact(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        return self.part(key, lambda: PreActivation(x.shape[1]))(x)

    def do_shortcut(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        width = x.shape[1]
        if not self.chosen(key, x.shape[-1] > 2 and width <= 12):
            return x
        return self.part(key, lambda: Block(width, width + 4, 2, ZeroPad(2)))(x)

    def do_upsample(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode=("nearest", "bilinear")[c % 2]) if x.shape[-1] < SIZE else x

    def do_scale(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        if key not in self.scales:
            self.scales[key] = nn.Parameter(torch.randn(x.shape[1], 1, 1) + 1)
        return x * self.scales[key]

    def do_shuffle(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        groups = 2 + c % 2
        return F.channel_shuffle(x, groups) if self.chosen(key, x.shape[1] % groups == 0) else x

    def do_again(self, key: str, x: Tensor, _: Tensor, c: int) -> Tensor:
        """A convolution that is used twice."""
        width = x.shape[1]
        conv = self.part(key, lambda: nn.Conv2d(width, width, 3, padding=1))
        return conv(F.relu(conv(x)))

    def fitted(self, y: Tensor, x: Tensor) -> Tensor:
        """y with as many pixels as x."""
        return y if y.shape[2:] == x.shape[2:] else F.adaptive_avg_pool2d(y, x.shape[-1])


Decided = tuple[list[Step], Any, Any, float, int, bool, int]
"""A program, granularity, stream, share of open gates, round_to, fold_batchnorm, seed."""

FOUND: dict[str, Decided] = {
    "a layer that reads the stream and then itself": ([("preact", 0, 0, 0), ("again", 0, 0, 0)], "channel", "indexed", 0.8, 1, False, 0),
    "a layer that reads a concatenation twice": (
        [("cat", 0, 0, 0), ("block", 0, 0, 1), ("again", 0, 0, 0)], "channel", "indexed", 0.2, 1, False, 0,
    ),
    "a dead block in a dead branch": (
        [("norm", 0, 0, 0), ("split", 0, 0, 0), ("block", 1, 0, 1), ("depthwise", 1, 0, 0), ("add", 0, 3, 1), ("norm", 0, 0, 0), ("grouped", 0, 0, 0)],
        "channel", "indexed", 0.0, 1, False, 0,
    ),
    "a dead block in a dead branch, whole": (
        [("excite", 11, 1, 5), ("preact", 6, 1, 8), ("shortcut", 4, 3, 11), ("block", 11, 3, 0), ("conv", 8, 11, 11), ("add", 7, 6, 9),
         ("add", 10, 1, 11), ("add", 4, 4, 3)],
        "layer", "indexed", 0.2, 1, True, 31,
    ),
    "zero channels tied by groups": (
        [("shortcut", 0, 0, 0), ("scale", 0, 0, 0), ("block", 0, 0, 0), ("shortcut", 1, 0, 0), ("grouped", 0, 0, 0)],
        "channel", "shared", 0.0, 1, False, 0,
    ),
    "groups that read the stream": ([("block", 0, 0, 0), ("grouped", 0, 0, 1), ("excite", 0, 0, 0)], "channel", "indexed", 0.2, 1, False, 0),
    "a depthwise layer that writes to the stream": (
        [("shuffle", 0, 0, 0), ("grouped", 0, 0, 0), ("block", 0, 0, 0), ("depthwise", 2, 0, 0), ("shuffle", 1, 0, 0), ("add", 1, 2, 1)],
        "channel", "indexed", 0.0, 1, False, 0,
    ),
    "what is written to the stream, rounded": (
        [("conv", 0, 0, 0), ("add", 0, 0, 1), ("conv", 0, 0, 0)], "channel", "indexed", 0.0, 4, False, 0,
    ),
    "a strided block as a branch": ([("block", 0, 0, 0), ("add", 0, 0, 1), ("shuffle", 0, 0, 0)], "channel", "shared", 0.0, 1, False, 0),
    "a dead branch, rounded": ([("norm", 4, 11, 4), ("block", 11, 10, 0), ("depthwise", 2, 3, 1)], 3, "indexed", 0.5, 4, False, 47),
    "two gates a mask": ([("split", 6, 3, 7), ("split", 4, 8, 1), ("shortcut", 2, 7, 8)], 2, "shared", 0.2, 1, True, 90),
}  # fmt: skip


def check(
    program: list[Step], granularity: Any, stream: Any, open_share: float, round_to: int, fold: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    model = randomize_(Random(program).eval(), seed)
    try:
        gated = headgate.gate(
            model, randn(2, 3, SIZE, SIZE, seed=seed), target=1.0, granularity=granularity, stream=stream
        )
    except headgate.NothingToGate:
        return
    decide_(gated, open_share, seed)
    small = gated.shrink(round_to=round_to, fold_batchnorm=fold)
    x = randn(3, 3, SIZE, SIZE, seed=seed + 1)
    with torch.no_grad():
        assert difference(gated(x), small(x)) < 1e-4
    if round_to == 1:
        assert gated.macs() == independent_macs(small, x)


@pytest.mark.parametrize("name", FOUND)
def test_networks_that_once_failed(name: str) -> None:
    check(*FOUND[name])


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
@given(
    program=PROGRAMS, granularity=st.sampled_from(["channel", "channel", 2, 3, "layer"]), stream=st.sampled_from(["shared", "indexed"]),
    open_share=st.sampled_from([0.0, 0.2, 0.5, 0.8]), round_to=st.sampled_from([1, 1, 1, 4]), fold=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_shrunk_equals_gated_for_random_networks(
    program: list[Step], granularity: Any, stream: Any, open_share: float, round_to: int, fold: bool, seed: int
) -> None:
    check(program, granularity, stream, open_share, round_to, fold, seed)

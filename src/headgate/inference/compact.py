"""A conditional network that computes only the open channels of each image.

`compact` folds away what is the same for every image (inner channels that are always closed are gone, others are closed
for good), takes the network apart into its operators (`torch.export`) and has them rewritten (`lowering`). The module
runs them, chooses by the clock where dense is quicker, and has a twin in PyTorch's own operators. Knows nothing of
training.
"""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from headgate.errors import HeadgateError
from headgate.gates.cost import dead_branches
from headgate.gates.dynamic import DynamicGates
from headgate.gates.gumbel import threshold_logit
from headgate.graph.grouping import ChannelGraph, Decisions
from headgate.graph.plan import first_names, make_plan
from headgate.graph.sites import folded_readers
from headgate.inference.kernel import native, plain
from headgate.inference.kernel.op import is_recorded
from headgate.inference.kernel.prepared import Conv
from headgate.inference.kernel.tape import Steps
from headgate.inference.lowering.fate import ALWAYS, DEPENDS, gates_over_all_images, left_after_folding
from headgate.inference.lowering.join import joined
from headgate.inference.lowering.masks import GateSite
from headgate.inference.lowering.rewrite import Lowering, Report, marked
from headgate.inference.shrink import TOLERANCE, build, difference, random_like

aten = torch.ops.aten
MEASURED_ROUNDS = 4
DENSE_GAIN = 0.9
"""A layer is computed densely where that takes less than this share of the kernel's time."""
PARTS = (4, 1)
"""Images at once that are tried for larger batches."""
PARTS_GAIN = 0.97
"""A batch is computed in another way where that takes less than this share of the time of the best one so far."""
MOST_SIZES = 1024
"""Of images that a compact network remembers whether it is right for."""
RECORDING = threading.RLock()
"""torch.export turns switches of the whole process: two at a time fail, and leave them wrong."""
QUICKER = "quicker than the kernel here"
MADE_ANEW = "a compact network is made anew from the gated one"
NO_KERNEL = "no compiled kernel here: in plain PyTorch"


class Sizes:
    """Which sizes of images a program is right for, which was recorded with one: those that would record the same."""

    def __init__(self, net: nn.Module, example: Tensor) -> None:
        self._net = net
        """Without numbers."""
        self._example = example
        self._fits = {example.shape[1:]: True}
        self._recorded: list[str] | None = None

    def check(self, x: Tensor) -> None:
        """Raises for images that the program would compute wrongly. A new size is recorded once: that takes seconds."""
        if not isinstance(x, Tensor):
            raise HeadgateError(f"a compact network takes a tensor of images, got {type(x).__name__}")
        if not self._fits.get(x.shape[1:], False) and not self._is_the_same(x):
            raise HeadgateError(
                f"this compact network was made for images of {tuple(self._example.shape[1:])} and would be wrong "
                f"for {tuple(x.shape[1:])}: gate() the model with an example of that size and call compact() again"
            )

    def check_known(self, x: Tensor) -> None:
        """The same where nothing can be recorded: only sizes that were seen before will do."""
        if not any(fits and tuple(x.shape[1:]) == tuple(shape) for shape, fits in list(self._fits.items())):
            raise HeadgateError("this compact network has not seen images of this size: call it once before compiling")

    def _is_the_same(self, x: Tensor) -> bool:
        """Whether images of this size would record the same. Where they can't be recorded, the next call tries again:
        that may not be the size's fault."""
        with RECORDING:  # whoever comes with the same size meanwhile waits for the answer
            shape = x.shape[1:]
            if shape in self._fits or x.dim() != self._example.dim():
                return self._fits.get(shape, False)
            try:
                if self._recorded is None:
                    self._recorded = _written_down(_exported(self._net, self._example))
                same = self._recorded == _written_down(_exported(self._net, torch.empty_like(x[:1], device="meta")))
            except HeadgateError:
                return False
            if len(self._fits) >= MOST_SIZES:
                self._fits = {self._example.shape[1:]: True}
            self._fits[shape] = same
            return same


def _written_down(program: fx.GraphModule) -> list[str]:
    """Every operator with its arguments; guards aside, which only tell what the network was recorded with."""
    return [
        f"{node.name} = {node.target}{node.args}{node.kwargs}"
        for node in program.graph.nodes
        if "guards" not in str(node.target)
    ]


class CompactModel(nn.Module):
    """A network that evaluates its gates and computes only what is open, image by image. For inference."""

    not_traced_because = "a compact network computes other channels for every image: ask the gated model of it"

    def __init__(
        self, program: fx.GraphModule, report: Report, tau: float, folded: bool, fate: NDArray[np.int8], sizes: Sizes
    ) -> None:  # fmt: skip
        super().__init__()
        self._fate = fate
        self._sizes = sizes
        self.folded = folded
        """Whether some gates that depend on the image are folded away: their say is that of the tau they had."""
        self.program = program
        self.report = report
        self._tau = tau
        self.tau = tau
        self.at_once: int | None = None
        """Larger batches are computed in parts of so many images, whose activations stay in the cache; None: whole."""
        self._layers = _prepared(program) if native.compiled() is not None else program
        """The program with every layer a module of its own."""
        self._quick = self._layers
        """What runs: the same, layers that follow each other joined."""
        self._arrange_(set())
        self.eval()

    @property
    def tau(self) -> float:
        """Gates that depend on the image are open where p > tau. Can be moved at any time, unless gates are folded."""
        return self._tau

    @tau.setter
    def tau(self, tau: float) -> None:
        if isinstance(tau, bool) or not isinstance(tau, Real) or not 0 <= tau <= 1:
            raise HeadgateError(f"tau={tau!r}: a gate is open where its probability is above tau, so tau lies in 0..1")
        if self.folded and tau != self._tau:
            raise HeadgateError(f"gates were folded away at tau={self._tau:g}: compact(fold=False) keeps tau movable")
        self._tau = tau
        for module in self.program.modules():
            if isinstance(module, GateSite):
                module.threshold = threshold_logit(tau)

    def in_plain_operators(self) -> nn.Module:
        """The same network in PyTorch's own operators, which computes everything and masks: for export to ONNX."""
        with without_torchs_own_warnings():
            graph = copy.deepcopy(self.program.graph)
            twin = fx.GraphModule(copy.deepcopy(self.program), graph)
        order = {node: place for place, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            in_place = node.target is torch.ops.headgate.masked_conv2d_add_.default
            if node.target is torch.ops.headgate.max_pool2d.default:
                node.target = aten.max_pool2d.default
            if not in_place and node.target is not torch.ops.headgate.masked_conv2d.default:
                continue
            with graph.inserting_before(node):
                made = graph.call_function(plain.conv2d, node.args[:10])
            order[made] = order[node]
            if in_place:
                residual: Any = node.args[5]
                for user in [user for user in residual.users if order[user] > order[node]]:
                    user.replace_input_with(residual, made)
            else:
                node.replace_all_uses_with(made)
            graph.erase_node(node)
        for site in twin.modules():
            if isinstance(site, GateSite):
                site.plain = True
        graph.lint()
        twin.recompile()
        return twin

    def choose_(self, images: Tensor) -> None:
        """Time these images together, apart and in parts, and every layer both ways for as many, and take what is
        quickest."""
        self._sizes.check(images)
        reasons = {name: reason for name, reason in self.report.dense.items() if reason != QUICKER}
        convs = [module for module in self._layers.modules() if isinstance(module, Conv)]
        with torch.no_grad():
            parts = [size for size in PARTS if size < len(images)] if self._parts_are_the_same(images) else []
            best = float("inf")
            for size in (len(images), *parts):
                dense = _quicker_densely(convs, partial(self._layers, images[:size]))
                together = [(dense, False)]
                for way in [*together, (dense, True), (set(), True)] if 1 < size == len(images) else together:
                    self._arrange_(*way)
                    seconds = _seconds(partial(self._in_parts, images, size), ())
                    if seconds < best * (1.0 if best == float("inf") else PARTS_GAIN):
                        best, chosen, self.at_once = seconds, way, None if size == len(images) else size
        self._arrange_(*(chosen if len(images) > 1 else chosen[:1]))
        by_kernel = {conv.layer for conv in convs}
        reasons |= {layer: NO_KERNEL for layer in self.report.fast if layer not in by_kernel}
        reasons |= {conv.layer: QUICKER for conv in convs if conv.dense}
        self.report = Report(tuple(conv.layer for conv in convs if not conv.dense), reasons)

    def _arrange_(self, dense: set[Conv], apart: bool | None = None) -> None:
        """Compute these layers densely, and join the others; the images of a batch go through those together or apart,
        or as their weights suggest."""
        for conv in self._layers.modules():
            if isinstance(conv, Conv):
                conv.dense = conv in dense
        if native.compiled() is None:
            return
        with without_torchs_own_warnings():
            self._quick = joined(self._layers)
        for steps in self._quick.modules():
            if isinstance(steps, Steps) and apart is not None:
                steps.apart = apart

    def _in_parts(self, images: Tensor, size: int) -> Any:
        """What it returns, computed for so many images at a time."""
        if len(images) <= size:
            return self._quick(images)
        found = [tree_flatten(self._quick(part)) for part in images.split(size)]
        joined = [torch.cat(leaves) for leaves in zip(*(leaves for leaves, _ in found), strict=True)]
        return tree_unflatten(joined, found[0][1])

    def _parts_are_the_same(self, images: Tensor) -> bool:
        """Whether everything that it returns is of images side by side, and no image has a say in what becomes of
        another, so that parts can be put together again."""
        if len(images) < 2:
            return False
        images = random_like(images)  # the given ones may all be alike
        whole, first = (tree_flatten(self._quick(part))[0] for part in (images, images[:1]))
        side_by_side = all(
            isinstance(all_, Tensor) and all_.dim() and all_.shape == (len(images), *one.shape[1:]) and len(one) == 1
            for all_, one in zip(whole, first, strict=True)
        )
        if not side_by_side:
            return False
        alone = tree_flatten(self._in_parts(images, 1))[0]
        return all(difference(*pair) <= TOLERANCE[torch.float32] for pair in zip(whole, alone, strict=True))

    def watched(self, images: Tensor) -> tuple[Any, Tensor]:
        """What it returns, and which gates were open for which image; those of branches that died are all closed. The
        gates are those of a pass of their own, all images together and layer by layer."""
        gates_BG = torch.from_numpy(self._fate == ALWAYS).repeat(len(images), 1)

        def note(site: nn.Module, args: Any, masks: list[Tensor]) -> None:
            assert isinstance(site, GateSite)
            gates_BG[:, torch.from_numpy(site.numbers)] = torch.cat(masks, 1).bool().cpu()

        self._sizes.check(images)
        sites = [module for module in self._layers.modules() if isinstance(module, GateSite)]
        hooks = [site.register_forward_hook(note) for site in sites]
        try:
            with torch.no_grad():
                self._layers(images)
        finally:
            for hook in hooks:
                hook.remove()
        return self(images), gates_BG

    def forward(self, images: Tensor) -> Any:
        """What the gated network returns in eval mode."""
        with torch.no_grad():
            if is_recorded(images):
                self._sizes.check_known(images)
                return self.program(images)
            self._sizes.check(images)
            return self._quick(images) if self.at_once is None else self._in_parts(images, self.at_once)

    def _apply(self, fn: Any, recurse: bool = True) -> CompactModel:
        for tensor in [*self.parameters(), *self.buffers()]:
            made = fn(tensor)
            if made.dtype != tensor.dtype or made.device != tensor.device:
                raise HeadgateError(
                    "a compact network stays on its device and in its precision: change those of the gated model, and "
                    "call compact() again"
                )
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: what it computes with is prepared, and would not follow."""
        raise HeadgateError(f"{MADE_ANEW}: load its weights into that, and call compact() again")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HeadgateError(f"{MADE_ANEW}: save that with headgate.save, and call compact() after headgate.load")

    def __deepcopy__(self, memo: dict[int, Any]) -> CompactModel:
        made = memo[id(self)] = CompactModel.__new__(CompactModel)
        with without_torchs_own_warnings():
            made.__dict__ = {name: copy.deepcopy(value, memo) for name, value in vars(self).items()}
        return made

    def train(self, mode: bool = True) -> CompactModel:
        """It stays in eval mode: it can't be trained."""
        self.training = False
        return self

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, {len(self.report.fast)} layers by the kernel, {len(self.report.dense)} dense"


def check_images(images: Any, example: Tensor) -> None:
    """Raises unless the layers of a network with this example can be timed on these images."""
    if not isinstance(images, Tensor) or images.dim() != example.dim() or images.shape[1] != example.shape[1]:
        what = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise HeadgateError(f"compact(images): a tensor like {('images', *example.shape[1:])} is needed, got {what}")
    if not len(images):
        raise HeadgateError("compact(images): there is no image to time the layers on")


def decided_otherwise(given_BN: Tensor, above_BN: Tensor, sure_BN: Tensor, sizes: list[int]) -> bool:
    """Whether gates were decided in a way that rounding can't explain: `given` by the compact network, `above` the
    threshold in the gated one, and `sure` where it is not a close decision; masks of the given sizes side by side.

    A mask whose gates are all below the threshold may have had its likeliest one opened. A mask that is all closed
    though some of its gates are above needs another one, of the same site, that has none: their branch has died.
    """
    masks = list(zip(*(each.split(sizes, 1) for each in (given_BN, above_BN, sure_BN)), strict=True))
    for given, above, sure in masks:
        heard = given.any(1) & above.any(1)
        if bool(((given != above) & sure)[heard].any()):
            return True
    closed_BM = torch.stack([~given.any(1) for given, _, _ in masks], 1)
    surely_BM = torch.stack([(above & sure).any(1) for _, above, sure in masks], 1)
    return bool((closed_BM.any(1) & ~(closed_BM & ~surely_BM).any(1)).any())


def _quicker_densely(convs: list[Conv], call: Callable[[], Any]) -> set[Conv]:
    """The layers that are quicker dense, given what they are given in this call."""
    given: dict[Conv, tuple[Any, ...]] = {}
    hooks = [conv.register_forward_pre_hook(lambda module, args: given.update({module: _kept(args)})) for conv in convs]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return {
        conv for conv, args in given.items()
        if _seconds(conv.densely, args) < DENSE_GAIN * _seconds(conv.by_kernel, args)
    }  # fmt: skip


def _kept(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A layer's arguments; its residual may be overwritten later."""
    return (*args[:3], None if args[3] is None else args[3].clone())


def _seconds(call: Callable[..., Any], given: tuple[Any, ...]) -> float:
    call(*given)
    times = []
    for _ in range(MEASURED_ROUNDS):
        before = time.perf_counter()
        call(*given)
        times.append(time.perf_counter() - before)
    return min(times)


@contextmanager
def without_torchs_own_warnings() -> Iterator[None]:
    """Copying a graph makes torch warn about its own code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        yield


def _prepared(program: fx.GraphModule) -> fx.GraphModule:
    """The same program, sharing its tensors, with calls of the kernel that have everything prepared."""
    with without_torchs_own_warnings():
        graph = copy.deepcopy(program.graph)
    quick = fx.GraphModule(program, graph)
    for node in list(graph.nodes):
        in_place = node.target is torch.ops.headgate.masked_conv2d_add_.default
        if not in_place and node.target is not torch.ops.headgate.masked_conv2d.default:
            continue
        given: Any = node.args
        x, weight, bias, in_mask, out_mask, residual, stride, padding, dilation, relu, *rectified = given
        weight, bias = (None if constant is None else getattr(program, constant.target) for constant in (weight, bias))
        name = f"conv_{node.name}"
        assert weight is not None
        conv = Conv(weight, bias, stride, padding, dilation, relu, in_place, rectified == [True])
        conv.layer = node.meta["headgate_layer"]
        quick.add_submodule(name, conv)
        with graph.inserting_before(node):
            made = graph.call_module(name, (x, in_mask, out_mask, residual))
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph.lint()
    quick.recompile()
    return quick


def compact(
    model: nn.Module, graph: ChannelGraph, dynamic: DynamicGates, decided: Decisions, tau: float, example: Tensor,
    fold: bool = True, always_on: bool = False,
) -> CompactModel:  # fmt: skip
    """The conditional network in its fast form. `decided` are the gates that are parameters; `always_on` opens all."""
    for site in (*dynamic.sites, *folded_readers(graph, dynamic.sites)):
        if site.folded:
            raise HeadgateError(
                f"images are folded with something else (frames, windows) before `{site.layer}`, where gates are "
                "decided or used: compact() takes images one by one; use the gated model itself"
            )
    fate = gates_over_all_images(dynamic, graph, decided, tau, fold)
    if always_on:
        fate[:] = ALWAYS
    looking = [mask for site in dynamic.sites for mask in site.masks]
    folded = any((fate[graph.masks[mask].gates] != DEPENDS).any() for mask in looking)
    left = left_after_folding(graph, fate, dynamic)
    net = build(model, make_plan(graph, left, dead_branches(graph, left))).eval()
    with marked(net, graph):
        program = _exported(net, example)
    lowering = Lowering(program, graph, left, fate, dynamic)
    lowering.carry_out()
    _delete_unused(program)
    sizes = Sizes(_on_meta(net), example[:1].to("meta"))
    return CompactModel(program, Report(tuple(dict.fromkeys(lowering.fast)), lowering.dense), tau, folded, fate, sizes)


def _delete_unused(program: fx.GraphModule) -> None:
    """Take away parameters and buffers that no operator reads any more."""
    read = {str(node.target) for node in program.graph.nodes if node.op == "get_attr"}
    called = tuple(f"{node.target}." for node in program.graph.nodes if node.op == "call_module")
    for name, _ in [*program.named_parameters(), *program.named_buffers()]:
        if name not in read and not name.startswith(called):
            owner, _, own = name.rpartition(".")
            delattr(program.get_submodule(owner), own)


def _by_first_names(program: fx.GraphModule, net: nn.Module) -> None:
    """Note down the modules that operators were recorded in by the names that the channel graph has for them."""
    first = first_names(net)
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: (first.get(path, path), kind) for key, (path, kind) in stack.items()}


def _on_meta(net: nn.Module) -> nn.Module:
    """The network without its numbers."""
    return copy.deepcopy(net, {id(tensor): _like_on_meta(tensor) for tensor in [*net.parameters(), *net.buffers()]})


def _like_on_meta(tensor: Tensor) -> Tensor:
    made = tensor.detach().to("meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _exported(net: nn.Module, example: Tensor) -> fx.GraphModule:
    """The network's operators, for any number of images, none of them in place."""
    two = torch.cat([example[:1], example[:1]])  # one image would be taken for a constant
    with RECORDING, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        any_number = torch.export.ShapesCollection()
        any_number[two] = {0: torch.export.Dim("batch")}
        try:
            shapes: Any = any_number
            exported = torch.export.export(net, (two,), dynamic_shapes=shapes, strict=False)
            program = exported.run_decompositions({}).module()
        except Exception as error:
            raise HeadgateError(
                f"torch.export can't take this network apart ({type(error).__name__}: {str(error).splitlines()[0]}): "
                "use the gated model itself. (A forward that asks for len(x) fixes the number of images: x.shape[0] "
                "does not)"
            ) from error
    assert isinstance(program, fx.GraphModule)
    _by_first_names(program, net)
    return program

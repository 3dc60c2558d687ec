"""Record one forward pass of a model as a list of calls.

Takes a model, an example input and a predicate that says which modules are *layers* (recorded as one call,
their inside unseen). Everything between layers is recorded as ATen operators, so any Python the model's
forward consists of is seen through. The pass runs on the meta device: no arithmetic, no memory; where the
model can't run there, on the model's own device.

It knows nothing of channels: see `propagate.py` for what the calls mean.
"""

from __future__ import annotations

import copy
import os
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from itertools import chain, count
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from headgate.errors import ModelError, TraceError

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
OWN_FILE = __file__
PROBE_IMAGES = 101
"""Images in a trace on the meta device, where they cost nothing: a number that is hardly ever another size, so that the
dimension that runs over images can be told from the others. Where it is one, a larger number is taken."""
DATA_DEPENDENT_OPS = {
    torch.ops.aten._local_scalar_dense.default: "turns a tensor into a Python number or a branch",
    torch.ops.aten.nonzero.default: "takes a shape that depends on the data",
    torch.ops.aten.masked_select.default: "takes a shape that depends on the data",
    torch.ops.aten.unique_dim.default: "takes a shape that depends on the data",
    torch.ops.aten._unique2.default: "takes a shape that depends on the data",
}


@dataclass(eq=False)
class Value:
    """A tensor at one moment of the pass (an in-place operator makes a new value of the same tensor)."""

    index: int
    shape: tuple[int, ...]
    parameter: str | None = None
    """Name of the parameter or buffer that this is, if it is one."""
    from_input: bool = False
    in_state: bool = True
    """False for a buffer that no state dict holds (persistent=False)."""


@dataclass(eq=False)
class Call:
    """One layer or one operator, applied once."""

    index: int
    target: type[nn.Module] | OpOverload
    layer: str | None
    inside: str
    where: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def title(self) -> str:
        """What to call it in a message to the user."""
        if self.layer is not None:
            return f"`{self.layer}` ({self.target.__name__})"
        return f"{self.target} in `{self.inside or 'the model'}` ({self.where})"


def written_by(call: Call) -> list[Value]:
    """The values that an operator overwrites."""
    if not isinstance(call.target, OpOverload):
        return []
    return [given for given in _written(call.target, call.args) if isinstance(given, Value)]


@dataclass(eq=False)
class ModuleSpan:
    """One call of a module: the calls first..last (exclusive) ran inside it."""

    name: str
    inputs: tuple[Value, ...]
    first: int
    last: int = -1
    outputs: tuple[Value, ...] = ()
    gives_tensor: bool = False
    """Whether it returned a tensor, and not a tuple or the like with tensors in it."""


@dataclass(eq=False)
class Trace:
    """A forward pass: what was called, in order, on which values."""

    calls: list[Call] = field(default_factory=list)
    spans: list[ModuleSpan] = field(default_factory=list)
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    batch_size: int = 1
    on_meta: bool = True
    overwritten: list[tuple[Value, Call]] = field(default_factory=list)
    """Values that an in-place operator changed behind the back of a later reader."""

    @cached_property
    def layer_calls(self) -> Counter[str]:
        """How often each layer was called."""
        return Counter(call.layer for call in self.calls if call.layer is not None)

    @cached_property
    def calls_at(self) -> Counter[tuple[Any, str]]:
        """How often each layer, or operator in a line of code, was called: (target, where) → times."""
        return Counter((call.target, call.where) for call in self.calls)

    @cached_property
    def spans_of(self) -> dict[str, list[ModuleSpan]]:
        """The calls of each module, by its name."""
        spans: dict[str, list[ModuleSpan]] = defaultdict(list)
        for span in self.spans:
            spans[span.name].append(span)
        return spans

    @cached_property
    def _spans_by_input(self) -> dict[int, list[ModuleSpan]]:
        spans: dict[int, list[ModuleSpan]] = defaultdict(list)
        for span in self.spans:
            if len(span.inputs) == 1:
                spans[span.inputs[0].index].append(span)
        return spans

    def spans_reading(self, value: Value) -> list[ModuleSpan]:
        """Calls of modules whose one input is this value."""
        return self._spans_by_input.get(value.index, [])

    def values(self) -> Iterator[Value]:
        """All values, some of them more than once."""
        return chain(self.inputs, self.outputs, *((*call.inputs, *call.outputs) for call in self.calls))

    def users(self) -> dict[int, list[Call]]:
        """Calls that read a value, by the value's index."""
        users: dict[int, list[Call]] = {}
        for call in self.calls:
            for value in call.inputs:
                users.setdefault(value.index, []).append(call)
        return users


def as_arguments(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's (args, kwargs) for an example: a tensor, a tuple of arguments, or a mapping of keywords."""
    if isinstance(example_input, Mapping):
        return (), dict(example_input)
    if isinstance(example_input, (tuple, list)):
        return tuple(example_input), {}
    return (example_input,), {}


def under(name: str, module: str) -> bool:
    """Whether a module or tensor is this module or lies inside it, by its name."""
    return name == module or name.startswith(f"{module}.")


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of a nest of tuples, lists, dicts, named tuples and dataclasses, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is tuple and all(isinstance(leaf, Tensor) for leaf in tree):
        return list(tree)
    found: list[Tensor] = []
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, each.name) for each in fields(leaf)])
    return found


def batch_size_of(example_input: Any) -> int:
    """Images in an example: the first size of its first tensor."""
    tensors = tensors_in(example_input)
    if not tensors or tensors[0].dim() == 0:
        raise ModelError("example_input holds no tensor with a batch dimension: pass e.g. torch.randn(1, 3, 224, 224)")
    if tensors[0].shape[0] == 0:
        raise ModelError("example_input is an empty batch: pass at least one image")
    return int(tensors[0].shape[0])


def stripped_copy(model: nn.Module, *, to_meta: bool, attributes: bool = True) -> nn.Module:
    """A copy of the model, its parameters and buffers on the meta device (no memory) or cloned.

    With `attributes`, so are tensors that are neither; without, those are copied as they are.
    """
    memo: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers(), _loose_tensors(model) if attributes else ()):
        if id(tensor) not in memo:
            data = torch.empty_like(tensor, device="meta") if to_meta else tensor.detach().clone()
            if isinstance(tensor, nn.Parameter):
                data = nn.Parameter(data, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = data
    for module in model.modules():  # every module holds a dozen empty tables of hooks, which deepcopy is slow at
        memo.update((id(table), type(table)()) for table in vars(module).values() if _is_table(table) and not table)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(
            f"the model can't be copied ({type(error).__name__}: {error}): remove what deepcopy rejects"
        ) from error


def _is_table(value: Any) -> bool:
    return type(value) in (dict, OrderedDict, set)


def _loose_tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for attribute in vars(module).values():
            if isinstance(attribute, Tensor):
                yield attribute


@dataclass(frozen=True)
class Layers:
    """What the tracer must know of layers: which modules are some, and how to spare their arithmetic on meta."""

    is_layer: Callable[[nn.Module], bool]
    lighten: Callable[[nn.Module], None] = lambda module: None


def trace(model: nn.Module, example_input: Any, layers: Layers, *, training: bool = False) -> Trace:
    """Record the forward pass of `model`, which is not changed: on the meta device, or where that fails, for real."""
    _check_traceable(model)
    try:
        return _record(model, example_input, layers, training, on_meta=True)
    except ModelError:
        raise
    except Exception as meta_error:  # what the meta device can't do, the model's own device may
        try:
            return _record(model, example_input, layers, training, on_meta=False)
        except ModelError:
            raise
        except Exception as error:
            raise _rejected(error, example_input) from meta_error


def _check_traceable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"`{name}`" if name else "the model"
            raise ModelError(
                f"{what} is TorchScript, whose code can't be followed: pass the Python module it was made of"
            )
        if reason := getattr(type(module), "not_traced_because", None):
            raise ModelError(f"the model can't be traced, {reason}")


def _record(model: nn.Module, example_input: Any, layers: Layers, training: bool, on_meta: bool) -> Trace:
    def attempt(images: int) -> Trace:
        twin = stripped_copy(model, to_meta=on_meta).train(training)
        recorder, answer = run_recorded(twin, example_input, layers, images, on_meta)
        if recorder.crash is not None:
            raise recorder.crash
        if not recorder.trace.outputs:
            raise TraceError(
                f"the model returns a {type(answer).__name__} in which no tensor is found: return a tensor, or a "
                "tuple, dict or dataclass of tensors"
            )
        return recorder.trace

    given = batch_size_of(example_input)
    if on_meta:
        with suppress(Exception):  # a model may want as many images as the example has
            probed = attempt(PROBE_IMAGES)
            return attempt(_other_probe(probed)) if _is_ambiguous(probed) else probed
    return attempt(given)


def _is_ambiguous(recorded: Trace) -> bool:
    """Whether some dimension may have the probe's size by chance: a parameter's, or one beside that over images."""
    images = recorded.batch_size
    return any(
        sum(size % images == 0 for size in value.shape) > (0 if value.parameter is not None else 1)
        for value in recorded.values()
    )


def _other_probe(recorded: Trace) -> int:
    """A prime number of images that divides no size of a trace: with so many, only images make multiples of it."""
    sizes = {size for value in recorded.values() for size in value.shape if size}
    return next(
        number
        for number in count(PROBE_IMAGES + 2, 2)
        if all(number % divisor for divisor in range(3, isqrt(number) + 1, 2)) and all(size % number for size in sizes)
    )


def run_recorded(
    twin: nn.Module, example_input: Any, layers: Layers, batch_size: int, on_meta: bool
) -> tuple[Recorder, Any]:
    """Run a copy of a model (hooks are put on it) and record it; what it raises is kept in `crash`."""
    args, kwargs = as_arguments(example_input)
    if on_meta:
        given = batch_size_of(example_input)
        args, kwargs = tree_map(lambda leaf: _to_meta(leaf, given, batch_size), (args, kwargs))
        for module in twin.modules():
            layers.lighten(module)
    recorder = Recorder(twin, layers.is_layer, batch_size)
    recorder.trace.on_meta = on_meta
    return recorder, recorder.run(twin, args, kwargs)


def _rejected(error: Exception, example_input: Any) -> TraceError:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(example_input))
    return TraceError(
        f"the model rejects the example input of shape {shapes}: {type(error).__name__}: {error}. "
        "Pass an example_input that model(example_input) accepts"
    )


def _to_meta(leaf: Any, given: int, wanted: int) -> Any:
    """A tensor without values, with another number of images if it has images."""
    if not isinstance(leaf, Tensor):
        return leaf
    images = wanted if leaf.dim() and leaf.shape[0] == given else (leaf.shape[0] if leaf.dim() else None)
    shape = leaf.shape if images is None else (images, *leaf.shape[1:])
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


class Recorder(TorchDispatchMode):
    """Writes down layers (through module hooks) and operators (through the dispatcher)."""

    def __init__(self, model: nn.Module, is_layer: Callable[[nn.Module], bool], batch_size: int) -> None:
        super().__init__()
        self.trace = Trace(batch_size=batch_size)
        self.crash: Exception | None = None
        self._values: dict[int, Value] = {}
        self._alive: list[Tensor] = []
        self._by_storage: dict[int, dict[int, Tensor]] = {}
        self._overwrites: list[tuple[Value, Call]] = []
        self._stack: list[ModuleSpan] = []
        self._in_layer = 0
        self._value_count = 0
        named = chain(model.named_parameters(), model.named_buffers())
        self._parameters = {id(tensor): name for name, tensor in named}
        self._unsaved = {
            id(module._buffers.get(name)) for module in model.modules() for name in module._non_persistent_buffers_set
        }
        for name, module in model.named_modules():
            layer = is_layer(module)
            module.register_forward_pre_hook(self._enter(name, layer), with_kwargs=True, prepend=False)
            module.register_forward_hook(self._leave(name, layer, type(module)), with_kwargs=True, always_call=False)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, recording; if it raises, that is in `crash` and what came before in `trace`."""
        try:
            with torch.no_grad(), self:
                self.trace.inputs = tuple(self.value(tensor, from_input=True) for tensor in tensors_in((args, kwargs)))
                outputs = model(*args, **kwargs)
        except Exception as error:  # whatever the user's forward code raises
            self.crash = error
            return None
        self.trace.outputs = tuple(self.value(tensor) for tensor in tensors_in(outputs))
        self._find_overwritten()
        return outputs

    def value(self, tensor: Tensor, *, from_input: bool = False) -> Value:
        """The value a tensor holds now."""
        known = self._values.get(id(tensor))
        return known if known is not None else self._new_value(tensor, from_input)

    def _new_value(self, tensor: Tensor, from_input: bool) -> Value:
        value = Value(
            self._value_count, tuple(tensor.shape), self._parameters.get(id(tensor)), from_input,
            id(tensor) not in self._unsaved,
        )  # fmt: skip
        self._value_count += 1
        self._values[id(tensor)] = value
        self._alive.append(tensor)
        if value.parameter is None:
            self._by_storage.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
        return value

    def _enter(self, name: str, layer: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._in_layer == 0:
                inputs = tuple(self.value(tensor) for tensor in tensors_in((args, kwargs)))
                self._stack.append(ModuleSpan(name, inputs, len(self.trace.calls)))
                self.trace.spans.append(self._stack[-1])
            if layer or self._in_layer:
                self._in_layer += 1

        return hook

    def _leave(self, name: str, layer: bool, kind: type[nn.Module]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._in_layer:
                self._in_layer -= 1
            if self._in_layer:
                return
            span = self._stack.pop()
            if layer:
                self._write(kind, name, (args, kwargs), output, span.inputs, name, fresh=True)
            span.last = len(self.trace.calls)
            span.outputs = tuple(self.value(tensor) for tensor in tensors_in(output))
            span.gives_tensor = isinstance(output, Tensor)

        return hook

    def _write(
        self, target: Any, layer: str | None, arguments: tuple[Any, Any], output: Any, inputs: tuple[Value, ...],
        where: str, *, fresh: bool,
    ) -> Call:  # fmt: skip
        inside = layer if layer is not None else (self._stack[-1].name if self._stack else "")
        args, kwargs = tree_map(lambda leaf: self.value(leaf) if isinstance(leaf, Tensor) else leaf, arguments)
        from_input = any(value.from_input for value in inputs)
        outputs = tuple(
            self._new_value(tensor, from_input) if fresh or id(tensor) not in self._values else self._values[id(tensor)]
            for tensor in tensors_in(output)
        )
        call = Call(len(self.trace.calls), target, layer, inside, where, args, kwargs, inputs, outputs)
        self.trace.calls.append(call)
        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_layer:
            return func(*args, **kwargs)
        inputs = tuple(self.value(tensor) for tensor in tensors_in((args, kwargs)))
        from_input = any(value.from_input for value in inputs)
        if from_input and func in DATA_DEPENDENT_OPS:
            inside = self._stack[-1].name if self._stack else ""
            raise TraceError(
                f"the forward code of `{inside or 'the model'}` {DATA_DEPENDENT_OPS[func]} "
                f"({func} at {_users_line()}): a graph that depends on the data can't be gated as a whole. "
                "Gate the submodules without control flow one by one"
            )
        output = func(*args, **kwargs)
        written = [given for given in _written(func, args) if isinstance(given, Tensor)]
        call = self._write(func, None, (args, kwargs), output, inputs, _users_line(), fresh=False)
        if written:
            self._overwrite(call, written, output, from_input)
        return output

    def _overwrite(self, call: Call, written: list[Tensor], output: Any, from_input: bool) -> None:
        for tensor in written:
            storage = self._by_storage.get(tensor.untyped_storage()._cdata, {})
            for identity, alias in storage.items():
                if alias is not tensor:
                    self._overwrites.append((self._values[identity], call))
            self._new_value(tensor, from_input)
        call.outputs = tuple(self.value(tensor) for tensor in tensors_in(output))

    def _find_overwritten(self) -> None:
        """Keep those overwritten values that somebody reads after they were overwritten."""
        last_read: dict[int, int] = {value.index: len(self.trace.calls) for value in self.trace.outputs}
        for call in self.trace.calls:
            for value in call.inputs:
                last_read[value.index] = max(last_read.get(value.index, -1), call.index)
        self.trace.overwritten = [
            (value, call) for value, call in self._overwrites if last_read.get(value.index, -1) > call.index
        ]


def _written(func: OpOverload, args: tuple[Any, ...]) -> list[Any]:
    if not func._schema.is_mutable:
        return []
    pairs = zip(func._schema.arguments, args, strict=False)
    return [given for declared, given in pairs if declared.alias_info is not None and declared.alias_info.is_write]


def _users_line() -> str:
    """file:line of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path != OWN_FILE and not path.startswith(TORCH_FOLDER) and not path.startswith("<"):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"

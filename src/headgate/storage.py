"""Save and load networks: shrunk, gated or dense, with or without exits, through one safe format.

A shrunk network is loaded into a fresh instance of the dense architecture by carrying out its saved plan: nothing is
traced. A gated one is gated again with the same settings, and so are exits added again. Knows models and plans; the
bytes are `inference/files.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from headgate.errors import FileError, HeadgateError
from headgate.exits.add import add_exits
from headgate.exits.cascade import ExitModel
from headgate.exits.heads import head_name
from headgate.gated import GatedModel
from headgate.gates.budget import Budget
from headgate.gating import gate
from headgate.graph.plan import Plan, fingerprint, restructure
from headgate.graph.trace import as_arguments, stripped_copy
from headgate.graph.wrapped import unwrapped
from headgate.inference.compact import CompactModel
from headgate.inference.files import read, write
from headgate.inference.shrink import ORIGIN_ATTRIBUTE, PLANS_ATTRIBUTE, assign

INNER, OWN = "inner.", "exits."
"""Where the tensors of a network with exits lie in its file: the network's, and those of the exits."""


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a shrunk, gated or plain network, or one with exits, to a safetensors file."""
    if not isinstance(model, nn.Module):
        raise HeadgateError(f"save takes a network and a path, in this order: a {type(model).__name__} is no network")
    tensors, description = _described(model)
    write(path, tensors, description)


def load(path: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """The network of a file, built from `model`: a fresh instance of the original, dense architecture (not changed)."""
    if not isinstance(model, nn.Module) or isinstance(model, (GatedModel, ExitModel)):
        raise HeadgateError("load takes a fresh instance of the original, dense architecture as its second argument")
    tensors, description = read(path)
    return _rebuilt(path, tensors, description, unwrapped(model))


def _described(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A network's tensors, and how to build it again."""
    model = unwrapped(model)
    if isinstance(model, CompactModel):
        raise HeadgateError(
            "a compact network is made anew from the gated one: save that, and call compact() after load"
        )
    _check_tensors(model)
    if isinstance(model, GatedModel):
        return _described_gated(model)
    if isinstance(model, ExitModel):
        return _described_exits(model)
    plans: tuple[Plan, ...] = getattr(model, PLANS_ATTRIBUTE, ())
    tensors, aliases = _without_aliases(model.state_dict())
    return tensors, {
        "kind": "network",
        "architecture": getattr(model, ORIGIN_ATTRIBUTE, None) or fingerprint(model),
        "plans": [plan.to_json() for plan in plans],
        "aliases": aliases,
        "class": type(model).__name__,
    }


def _check_tensors(model: nn.Module) -> None:
    """What a model keeps beside tensors would be lost; only what gates and exits keep has a place in the file."""
    own = "_extra_state" if isinstance(model, (GatedModel, ExitModel)) else None
    for name, value in model.state_dict().items():
        inner = isinstance(model, ExitModel) and name.startswith("model.")  # looked at by itself
        if not (isinstance(value, Tensor) or inner or name == own):
            raise HeadgateError(f"`{name}` is no tensor, and a file holds tensors only: save the state_dict() yourself")


def _rebuilt(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], description: dict[str, Any], model: nn.Module
) -> nn.Module:
    """A described network, with its tensors."""
    if description.get("kind") == "gated":
        return _rebuilt_gated(path, tensors, description, model)
    if description.get("kind") == "exits":
        return _rebuilt_exits(path, tensors, description, model)
    if fingerprint(model) != description.get("architecture"):
        raise _other_model(path, description, model, "its tensors have other names or shapes")
    try:
        plans = tuple(Plan.from_json(entry) for entry in description["plans"])
        small = stripped_copy(model, to_meta=True, attributes=False)
        for plan in plans:
            restructure(small, plan)
    except (KeyError, TypeError, AttributeError, IndexError, FileError) as error:
        raise _other_model(path, description, model, str(error)) from error
    tensors = tensors | {name: tensors[source] for name, source in description["aliases"].items()}
    wrong = _mismatch(small.state_dict(), tensors)
    if wrong:
        raise _other_model(path, description, model, wrong)
    assign(small, tensors, model)
    setattr(small, PLANS_ATTRIBUTE, plans)
    setattr(small, ORIGIN_ATTRIBUTE, description["architecture"])
    return small.eval()


def _other_model(
    path: str | os.PathLike[str], description: Mapping[str, Any], model: nn.Module, detail: str
) -> FileError:
    return FileError(
        f"{path} holds a {description.get('class', 'network')} that does not fit this {type(model).__name__} "
        f"({detail}): pass a fresh instance of the architecture that was saved"
    )


def _mismatch(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    for name in sorted(set(expected) ^ set(found)):
        return f"`{name}` is only in the {'model' if name in expected else 'file'}"
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            return f"`{name}` is {tuple(tensor.shape)} in the model and {tuple(found[name].shape)} in the file"
    return None


def _without_aliases(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, each once, and the other names of those that several modules share."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
        else:
            seen[key] = name
            tensors[name] = tensor
    return tensors, aliases


def _described_gated(model: GatedModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = model._unsqueezed()
    args, kwargs = as_arguments(model._example_input)
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        raise HeadgateError(
            "a gated model that is not called with one tensor alone can't be saved as a file: save its state_dict()"
        )
    graph = model.graph
    tensors, aliases = _without_aliases(
        {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    )
    relaxation = model.gates.relaxation
    description = {
        "kind": "gated", "class": type(model.model).__name__, "aliases": aliases,
        "architecture": fingerprint(model.model),
        "gate": {
            "kind": "static" if model.dynamic is None else "dynamic", "static": list(model.static_names),
            "granularity": graph.granularity, "stream": graph.stream, "target": model.target, "loss": model.loss,
            "frozen": list(model.frozen_names), "temperature": relaxation.temperature, "hard": relaxation.hard,
            "backward": relaxation.backward,
        },
        "rates": model._rates.tolist() if model.loss == "per_gate" else None,
        "example": {"shape": list(args[0].shape), "dtype": _name(args[0].dtype)},
        "precision": _precision(model.model),
        "extra": model.get_extra_state(),
    }  # fmt: skip
    return tensors, description


def _rebuilt_gated(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], description: dict[str, Any], model: nn.Module
) -> GatedModel:
    if fingerprint(model) != description["architecture"]:
        raise _other_model(path, description, model, "its tensors have other names or shapes")
    model = _in_precision(model, description.get("precision"))
    example = _example(description, model)
    options = dict(description["gate"])
    extra = description["extra"]
    gated = gate(model, example, budget=_budget(extra, options["target"]), **options)
    tensors = tensors | {name: tensors[source] for name, source in description["aliases"].items()}
    try:
        gated.load_state_dict({**tensors, "_extra_state": extra})
    except RuntimeError as error:
        raise _other_model(path, description, model, "its forward code makes other gates") from error
    if description["rates"] is not None:
        gated._rates = torch.tensor(description["rates"])
    return gated.eval()


def _described_exits(model: ExitModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    head = head_name(model.heads)
    if head is None:
        raise HeadgateError("exits with classifiers of your own can't be saved as a file: save their state_dict()")
    inner, description = _described(model.model)
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(("heads.", "gates."))}
    tensors = {f"{INNER}{name}": tensor for name, tensor in inner.items()} | {
        f"{OWN}{name}": tensor for name, tensor in own.items()
    }
    return tensors, {
        "kind": "exits", "class": description["class"], "inner": description, "at": list(model.names[:-1]),
        "head": head, "target": model.target, "classifier_weight": model.classifier_weight,
        "train_model": model.train_model, "relaxation": asdict(model.relaxation),
        "example": {"shape": list(model.example_shape), "dtype": _name(model.example_dtype)},
        "extra": model.get_extra_state(),
    }  # fmt: skip


def _rebuilt_exits(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], description: dict[str, Any], model: nn.Module
) -> ExitModel:
    inner = {name[len(INNER) :]: tensor for name, tensor in tensors.items() if name.startswith(INNER)}
    own = {name[len(OWN) :]: tensor for name, tensor in tensors.items() if name.startswith(OWN)}
    network = _rebuilt(path, inner, description["inner"], model)
    extra = description["extra"]
    exits = add_exits(
        network, _example(description, model), description["at"], head=description["head"],
        target=description["target"], budget=_budget(extra, description["target"]),
        classifier_weight=description["classifier_weight"], train_model=description["train_model"],
        **description["relaxation"],
    )  # fmt: skip
    exits.load_state_dict(own | {"_extra_state": extra}, strict=False)
    return exits.eval()


def _budget(extra: Mapping[str, Any], target: float) -> Budget:
    """A fresh budget of the settings of a saved one, for the target that the model was made with: the one that it had
    at last comes with the rest of its state."""
    names = ("ramp_steps", "weight", "integral_rate", "scale_gradient", "largest_move")
    saved = extra["budget"]
    return Budget(target, **{name: saved[name] for name in names if name in saved})


def _example(description: Mapping[str, Any], model: nn.Module) -> Tensor:
    """Zeros in the shape of the example input, on the model's device."""
    given = description["example"]
    device = next(model.parameters()).device
    return torch.zeros(given["shape"], dtype=getattr(torch, given["dtype"]), device=device)


def _precision(model: nn.Module) -> str | None:
    """The type of its weights, None if it has none."""
    return next((_name(tensor.dtype) for tensor in model.parameters() if tensor.is_floating_point()), None)


def _in_precision(model: nn.Module, precision: str | None) -> nn.Module:
    """The model, or a copy of it whose weights are of the type that was saved."""
    if precision is None or precision == _precision(model):
        return model
    return stripped_copy(model, to_meta=False).to(getattr(torch, precision))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

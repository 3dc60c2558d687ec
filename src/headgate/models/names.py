"""From a name to a model with an input to try it on.

=========================== ==========================================================
``cifar_resnet56``          one of this package's own networks
``headgate:cifar_resnet56`` the same, spelled out
``torchvision:resnet50``    torchvision's classification models (extra ``vision``)
``timm:regnetx_002``        timm's models (extra ``vision``)
``path/to/file.py:make``    what ``make()`` in that file returns
=========================== ==========================================================

Models come with random weights, in train mode, on the CPU; weights are read from a safetensors file. Nothing is
downloaded, unless `pretrained` asks torchvision or timm for its weights. Mistakes in a name are ModelErrors that say
what to write instead; an exception raised by the user's own file passes through. This module knows nothing of gates, of
data or of the command line.
"""

import copy
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from types import ModuleType

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headgate.errors import FileError, ModelError
from headgate.models import cifar_densenet, cifar_resnet
from headgate.models._torchvision import import_torchvision

__all__ = ["NamedModel", "build", "example_input", "load_named"]

Shape = tuple[int, ...]

CIFAR_SHAPE: Shape = (1, 3, 32, 32)
DIGITS_SHAPE: Shape = (1, 1, 16, 16)
TORCHVISION_SHAPE: Shape = (1, 3, 224, 224)
# The others accept 224×224, and those that fix a size in their constructor fix that one.
TORCHVISION_OTHER_SHAPES: dict[str, Shape] = {"inception_v3": (1, 3, 299, 299)}
# Their own initialisation takes long and warns that it is going to change.
TORCHVISION_OPTIONS = {name: {"init_weights": False} for name in ("googlenet", "inception_v3")}

# What they are built with when their published weights are asked for.
TORCHVISION_PRETRAINED: dict[str, dict[str, bool]] = {
    "inception_v3": {"transform_input": True},
    "googlenet": {"transform_input": True, "aux_logits": False},
}

HEADGATE_MODELS: dict[str, Callable[[], nn.Module]] = {
    name: getattr(cifar_resnet, name) for name in cifar_resnet.__all__ if name.startswith(("cifar_", "digits_"))
} | {
    "cifar_densenet40": cifar_densenet.cifar_densenet40,
    "cifar_densenet100": cifar_densenet.cifar_densenet100,
}


@dataclass(frozen=True)
class NamedModel:
    """A model, the name it was asked for by, and one batch of input that it accepts."""

    name: str
    model: nn.Module
    example_input: Tensor


@dataclass(frozen=True)
class _Blueprint:
    """How to build what a name stands for; ``input_shape`` is None where nobody has said it."""

    build: Callable[[], nn.Module]
    input_shape: Shape | None
    build_pretrained: Callable[[bool], nn.Module] | None = None
    """With the weights, or only the architecture that they go into, which may differ from the usual one."""


def load_named(
    name: str,
    input_shape: Sequence[int] | None = None,
    weights: str | Path | None = None,
    *,
    pretrained: bool = False,
    fetch: bool = True,
) -> NamedModel:
    """Builds the model called ``name``.

    ``input_shape`` includes the batch axis, as in ``(1, 3, 32, 32)``, and replaces the model's own;
    ``weights`` is a safetensors file with exactly the model's state dict; ``pretrained`` takes the weights that
    torchvision (its first ImageNet set) or timm offers, or without ``fetch`` only the architecture they go into.
    """
    blueprint = _resolve(name)
    x = _make_input(name, blueprint.input_shape if input_shape is None else input_shape)
    model = _build_pretrained(name, blueprint, fetch) if pretrained else blueprint.build()
    if weights is not None:
        _load_weights_(model, name, Path(weights))
    return NamedModel(name, model, x)


def _build_pretrained(name: str, blueprint: _Blueprint, fetch: bool) -> nn.Module:
    if blueprint.build_pretrained is None:
        raise ModelError(f'"{name}" has no pretrained weights to ask for: give a safetensors file, or none')
    try:
        return blueprint.build_pretrained(fetch)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f'the pretrained weights of "{name}" can\'t be fetched ({shorten(str(error), 200)}): '
            "download them elsewhere and give a safetensors file"
        ) from error


def build(name: str) -> nn.Module:
    """Builds the model called ``name``, with random weights."""
    return _resolve(name).build()


def example_input(name: str, input_shape: Sequence[int] | None = None) -> Tensor:
    """Returns a random batch, always the same, that the model called ``name`` accepts."""
    return _make_input(name, _resolve(name).input_shape if input_shape is None else input_shape)


def _make_input(name: str, shape: Sequence[int] | None) -> Tensor:
    if shape is None:
        raise ModelError(
            f'"{name}" does not say what input it takes: pass input_shape=(1, 3, 32, 32) or whatever it is '
            "(on the command line --input 3,32,32), or set an attribute `input_shape` on the function or in its file"
        )
    if len(shape) < 2 or min(shape) < 1:
        raise ModelError(f"input_shape is batch, channels, height, width, such as (1, 3, 32, 32), not {tuple(shape)}")
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0))


def _load_weights_(model: nn.Module, name: str, path: Path) -> None:
    if path.suffix != ".safetensors":
        raise FileError(f"{path}: weights are read from .safetensors files only, since pickles can run code")
    if not path.is_file():
        raise FileError(f"{path}: there is no such weights file")
    try:
        model.load_state_dict(load_file(path), strict=True)
    except SafetensorError as error:
        raise FileError(f"{path} is not a safetensors file: {error}") from error
    except RuntimeError as error:
        raise FileError(
            f'{path} holds the weights of another network than "{name}": {shorten(str(error), 300)}'
        ) from error


# From a name to its blueprint, one function for each source.


def _resolve(name: str) -> _Blueprint:
    source, colon, rest = name.rpartition(":")
    if name.endswith(".py"):
        raise ModelError(f'"{name}" does not say which function builds the model: write "{name}:function"')
    if source.endswith(".py"):
        return _from_file(name, Path(source), rest)
    if not colon:
        return _from_headgate(name, name)
    if source not in _SOURCES:
        raise ModelError(
            f'"{name}": "{source}" is no source of models; write {", ".join(f"{known}:NAME" for known in _SOURCES)} '
            "or path/to/file.py:FUNCTION"
        )
    return _SOURCES[source](name, rest)


def _from_headgate(name: str, architecture: str) -> _Blueprint:
    if architecture not in HEADGATE_MODELS:
        elsewhere = [] if ":" in name else _sources_that_have(architecture)
        raise ModelError(_unknown(name, architecture, list(HEADGATE_MODELS), elsewhere))
    return _Blueprint(
        HEADGATE_MODELS[architecture], DIGITS_SHAPE if architecture.startswith("digits_") else CIFAR_SHAPE
    )


def _from_torchvision(name: str, architecture: str) -> _Blueprint:
    models = _need(name, "torchvision").models
    known = models.list_models(module=models)
    if architecture not in known:
        raise ModelError(_unknown(name, architecture, [f"torchvision:{each}" for each in known]))
    options = TORCHVISION_OPTIONS.get(architecture, {})
    return _Blueprint(
        lambda: _module(name, models.get_model(architecture, weights=None, **options)),
        TORCHVISION_OTHER_SHAPES.get(architecture, TORCHVISION_SHAPE),
        lambda fetch: _module(
            name,
            models.get_model(architecture, weights="IMAGENET1K_V1")
            if fetch
            else models.get_model(
                architecture, weights=None, **options, **TORCHVISION_PRETRAINED.get(architecture, {})
            ),
        ),
    )


def _from_timm(name: str, architecture: str) -> _Blueprint:
    timm = _need(name, "timm")
    if not timm.is_model(architecture):
        raise ModelError(_unknown(name, architecture, [f"timm:{each}" for each in timm.list_models()]))

    config = timm.get_pretrained_cfg(architecture)
    return _Blueprint(
        lambda: _module(name, timm.create_model(architecture, pretrained=False)),
        None if config is None else (1, *config.input_size),
        lambda fetch: _module(name, timm.create_model(architecture, pretrained=fetch)),
    )


def _from_file(name: str, path: Path, function_name: str) -> _Blueprint:
    if not path.is_file():
        raise ModelError(f'"{name}": there is no file {path}')
    module = _import_file(path)
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ModelError(
            f'"{name}": {path} has no function "{function_name}"; it defines {", ".join(own) or "nothing"}'
        )
    if not isinstance(function, nn.Module) and not _takes_no_arguments(function):
        raise ModelError(f'"{name}": {function_name}{inspect.signature(function)} must be callable without arguments')

    def build_in_its_folder() -> nn.Module:
        with _importing_from(path.parent):
            return copy.deepcopy(function) if isinstance(function, nn.Module) else _module(name, function())

    shape = getattr(function, "input_shape", None) or getattr(module, "input_shape", None)
    return _Blueprint(build_in_its_folder, None if shape is None else tuple(shape))


_SOURCES: dict[str, Callable[[str, str], _Blueprint]] = {
    "headgate": _from_headgate,
    "torchvision": _from_torchvision,
    "timm": _from_timm,
}


# Help for the sources.


def _need(name: str, library: str) -> ModuleType:
    """Imports an optional library. torchvision goes first in any case: timm imports it too."""
    try:
        torchvision = import_torchvision()
        return torchvision if library == "torchvision" else importlib.import_module(library)
    except ImportError as error:
        raise ModelError(
            f'"{name}" needs {library}, which cannot be imported ({error}): pip install "headgate[vision]"'
        ) from error


def _module(name: str, built: object) -> nn.Module:
    if not isinstance(built, nn.Module):
        raise ModelError(f'"{name}" must return a torch.nn.Module, but returned {type(built).__name__}')
    return built


def _unknown(name: str, architecture: str, known: list[str], elsewhere: Sequence[str] = ()) -> str:
    """The message for a name that nobody knows: the closest known names, or all if they are few and none is close."""
    by_ending = {each.rpartition(":")[2]: each for each in known}
    close = [by_ending[each] for each in difflib.get_close_matches(architecture, by_ending, n=3)]
    suggestions = [*elsewhere, *close] or (known if len(known) <= 8 else [])
    hint = f"; did you mean {' or '.join(suggestions)}?" if suggestions else ""
    return f'there is no model "{name}"{hint}'


def _sources_that_have(architecture: str) -> list[str]:
    found = []
    for source in ("torchvision", "timm"):
        try:
            _SOURCES[source](f"{source}:{architecture}", architecture)
        except ModelError:
            continue
        found.append(f"{source}:{architecture}")
    return found


def _takes_no_arguments(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def _import_file(path: Path) -> ModuleType:
    """Runs the file as a module of its own name space; it may import its neighbours, as a script may."""
    spec = importlib.util.spec_from_file_location(f"headgate_user_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _importing_from(path.parent):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)

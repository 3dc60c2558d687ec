"""Hand a network on: ONNX, checked against PyTorch before anybody relies on it.

Knows nothing of gates; takes any module.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headgate.errors import FileError, HeadgateError
from headgate.inference.shrink import difference, random_like

ONNX_TOLERANCE = 1e-3


@contextmanager
def _only_errors(logger_name: str) -> Iterator[None]:
    """Silence a library's remarks about what is not installed."""
    logger = logging.getLogger(logger_name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class _OfImages(nn.Module):
    """A network under a forward of one argument, which the exporter can name whatever the network's own is."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Any:
        return self.net(images)


def export_onnx(model: nn.Module, example_input: Tensor, path: str | os.PathLike[str]) -> float:
    """Write an ONNX file with a free batch size; returns how far ONNX Runtime is from PyTorch on random images."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise HeadgateError(
            f'exporting needs the "onnx" extra ({error.name} is missing): pip install "headgate[onnx]"'
        ) from error
    path = Path(path)
    model = model.eval()
    two = torch.cat([example_input[:1], example_input[:1]])  # a batch of 1 would be taken for a constant
    with warnings.catch_warnings(), _only_errors("torch.onnx"):
        warnings.simplefilter("ignore")  # the exporter's own, about its own code
        try:
            program = torch.onnx.export(
                _OfImages(model),
                (two,),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["images"],
                verbose=False,
            )
        except Exception as error:
            raise HeadgateError(
                f"the network can't be exported to ONNX ({type(error).__name__}: {str(error).splitlines()[0]}): "
                "torch.onnx.export says more"
            ) from error
        assert program is not None
        try:
            program.save(str(path), external_data=False)
        except OSError as error:
            raise FileError(f"{path} can't be written ({error})") from error
    images = random_like(torch.cat([two, two[:1]]))
    with torch.no_grad():
        expected = model(images)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])
    gap = difference(expected, found)
    if not gap <= ONNX_TOLERANCE:
        raise HeadgateError(
            f"{path}: ONNX Runtime's output differs from PyTorch's by {gap:.2g}: "
            "do not use the file, and report the model"
        )
    return gap

"""The mean of what several finished runs ended with: one network that is often better than any of them.

Runs that were tuned on from one another (`--tune-on`) end at different places of the same valley, each near its edge;
the mean of their weights lies further inside. BatchNorm's statistics are taken anew, for those of a mean are no mean.
What comes of it is a run's folder like any other, with the phases of the last run and the time of all. Knows nothing of
the command line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headgate.analysis.records import write_text
from headgate.data.sources import DataSet
from headgate.errors import FileError, HeadgateError
from headgate.gated import GatedModel
from headgate.inference.calibrate import reestimate_batchnorm
from headgate.storage import load, save
from headgate.training.loop import calibration_batches
from headgate.training.onward import inherit, recipe_of_finished, set_out
from headgate.training.prepare import data_of, start_of, with_absolute_places, with_data_in
from headgate.training.recipe import Recipe
from headgate.training.run import AVERAGED, DONE, GATED, create_folder, last_file, result_in
from headgate.training.start import DEFAULTS, Options, go


def average(
    runs: Sequence[Path], folder: Path, options: Options = DEFAULTS, data_dir: str | None = None
) -> dict[str, Any]:
    """Write the mean of several runs' last networks, and its result, into a new folder; returns the result."""
    recipe = with_absolute_places(with_data_in(_checked(runs), data_dir))
    create_folder(folder, recipe, partial(_fill, folder, runs, recipe, data_of(recipe)))
    result = go(folder, None, options)
    assert result is not None  # there is but one process
    return result


def _checked(runs: Sequence[Path]) -> Recipe:
    """The recipe of the last of several finished runs that have the same gates."""
    if len({run.resolve() for run in runs}) < max(2, len(runs)):
        raise HeadgateError("a mean takes at least two runs, each of them once")
    recipes = [recipe_of_finished(run) for run in runs]
    gates = [_bytes_of(run / GATED) for run in runs]
    for run, recipe, bytes_ in zip(runs, recipes, gates, strict=True):
        if recipe.kind != recipes[-1].kind or bytes_ != gates[-1]:
            raise HeadgateError(
                f"{run} and {runs[-1]} have other gates: only runs that were tuned on from one another "
                "(`headgate train --tune-on`) have a mean"
            )
    return recipes[-1]


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise FileError(f"{file} can't be read ({error}): by it runs of the same gates are known") from error


@torch.no_grad()
def mean_of(nets: Sequence[nn.Module]) -> nn.Module:
    """The first of several networks of one shape, with the mean of their parameters."""
    mean = nets[0]
    for own, *others in zip(*(net.parameters() for net in nets), strict=True):
        own.copy_(torch.stack([parameter.double() for parameter in (own, *others)]).mean(0))
    return mean


def _renew_statistics(net: nn.Module, recipe: Recipe, data: DataSet) -> None:
    """BatchNorm's, and of a conditional network also the threshold that meets the target."""
    images = calibration_batches(data.train, recipe)
    if isinstance(net, GatedModel):
        net.calibrate(images, recipe.calibration_batches)
    else:
        reestimate_batchnorm(net, net, images, recipe.calibration_batches)


def _fill(folder: Path, runs: Sequence[Path], recipe: Recipe, data: DataSet) -> None:
    """A folder at its end: all that is left to do is to measure."""
    start, file = start_of(recipe, data.shape), last_file(recipe)
    results = [result_in(run) for run in runs]
    inherit(folder, runs[-1], {}, lambda entry: True)
    net = mean_of([load(run / file, start.architecture()) for run in runs])
    _renew_statistics(net, recipe, data)
    save(net, folder / file)
    try:
        write_text(folder / AVERAGED, json.dumps(results) + "\n")
    except OSError as error:
        raise FileError(f"{folder} can't be written ({error}): nothing is lost, begin again") from error
    set_out(folder, runs[-1], recipe, DONE, time_of(results))


def time_of(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds by phase of all runs, what several have in common counted once."""
    counted: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    waiting = list(results)
    while waiting:
        result = waiting.pop()
        if result in counted:
            continue
        counted.append(result)
        before = result.get("before", {})
        for name, value in result["seconds"].items():
            seconds[name] = seconds.get(name, 0.0) + value - before.get("seconds", {}).get(name, 0.0)
        waiting += [before] if before else []
    return {name: round(value, 1) for name, value in seconds.items()}

"""Make a run of a network that is already trained, such as one of the zoo: a folder for all that runs can be asked.

What comes of it can be evaluated, timed, reported and tuned on (`--tune-on`) like a run of one's own. The network is
measured anew; where it comes from stands in the result. Knows files and recipes, nothing of the command line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headgate.analysis.records import write_text
from headgate.errors import FileError, HeadgateError
from headgate.storage import save
from headgate.training import checkpoint as checkpoints
from headgate.training.journal import LOG_NAME
from headgate.training.prepare import Start, data_of, start_of, with_absolute_places
from headgate.training.recipe import Recipe
from headgate.training.run import ADOPTED, DENSE, DONE, create_folder, last_file
from headgate.training.start import DEFAULTS, Options, go


def adopt(
    folder: Path, network: Path, record: Mapping[str, Any], weights: str, options: Options = DEFAULTS,
    data_dir: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write a finished run around `network`, with the dense network of `weights` beside it; returns its result.

    `record` tells the recipe it was made by and the seconds that took.
    """
    recipe = recipe_of(record, weights, data_dir)
    if not recipe.gate_epochs:
        raise HeadgateError(f"{network.stem} has no gates behind it: it is a network like any other, use --weights")
    data = data_of(recipe)
    start = start_of(recipe, data.shape)
    create_folder(folder, recipe, partial(_fill, folder, network, record, start, len(data.train)))
    result = go(folder, None, options)
    assert result is not None  # there is but one process
    return result


def recipe_of(record: Mapping[str, Any], weights: str, data_dir: str | None) -> Recipe:
    """The recipe of a record, with files of this machine; its teacher is not among them."""
    places = {"weights": weights, "data_dir": data_dir, "teacher": None, "teacher_normalization": None}
    return with_absolute_places(Recipe.from_json({**record["recipe"], **places}))


def _fill(folder: Path, network: Path, record: Mapping[str, Any], start: Start, images: int) -> None:
    """A folder at its end: all that is left to do is to measure."""
    save(start.build(), folder / DENSE)
    origin = {
        "name": network.stem,
        **{name: record[name] for name in ("accuracy", "recipe", "before") if name in record},
    }
    try:
        shutil.copyfile(network, folder / last_file(start.recipe))
        write_text(folder / ADOPTED, json.dumps(origin, indent=1) + "\n")
        (folder / LOG_NAME).touch()
    except OSError as error:
        raise FileError(f"{folder} can't be written ({error}): nothing is lost, begin again") from error
    checkpoints.write_checkpoint(
        folder,
        checkpoints.Checkpoint(
            DONE, 0, start.recipe.to_json(), dict(record.get("seconds", {})), rest={"conditions": {"images": images}}
        ),
    )

"""The commands that repeat a run, where its files are at hand: one, or several that were carried out one after another.

Files are named without the folders of this machine. Knows recipes and results, nothing of pages.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from headgate.training.recipe import Recipe

Json = Mapping[str, Any]


def commands(recipe: Recipe, result: Json | None = None) -> list[str]:
    """Of a run with this recipe, and what it came to if it has ended: that tells of the runs it began with."""
    made = _Commands()
    made.name_of(result or {"recipe": recipe.to_json()})
    return list(made.names) if len(made.names) > 1 else [line.removesuffix(" --out RUN") for line in made.names]


class _Commands:
    """Commands in their order, each with the name of the folder it makes."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def name_of(self, result: Json) -> str:
        """The folder of a run, after the commands that make it."""
        if "averaged" in result:
            parts = [self.name_of(each) for each in result["averaged"]]
            return self._add(["headgate", "average", *parts], f"{parts[-1]}-mean")
        if "adopted" in result:
            name = result["adopted"]["name"]
            weights = without_folders(result["recipe"]["weights"])
            return self._add(["headgate", "zoo", name, "--weights", weights], name)
        changed = shown(Recipe.from_json(result["recipe"]))
        if "before" not in result:
            return self._add(["headgate", "train", *_options(changed)], "RUN")
        earlier = self.name_of(result["before"])
        before, now = (shown(Recipe.from_json(each["recipe"]), whole=True) for each in (result["before"], result))
        other = {name: value for name, value in now.items() if value != before[name]}
        return self._add(["headgate", "train", "--tune-on", earlier, *_options(other)], f"{earlier}-on")

    def _add(self, words: list[str], name: str) -> str:
        line = shlex.join(words)
        known = {made.removesuffix(f" --out {folder}"): folder for made, folder in self.names.items()}
        if line in known:
            return known[line]
        while name in known.values():
            name += "-too"
        self.names[f"{line} --out {name}"] = name
        return name


def shown(recipe: Recipe, whole: bool = False) -> dict[str, Any]:
    """The fields that are not as they are by default (or all of them), and no folders of this machine."""
    default = Recipe().to_json()
    found = {name: value for name, value in recipe.to_json().items() if whole or value != default[name]}
    for name in ("model", "weights", "data", "data_dir", "teacher"):
        if isinstance(found.get(name), str):
            found[name] = without_folders(found[name])
    return found


def without_folders(text: str) -> str:
    """`folder:/a/b`, `/a/b.py:make` and `net=/a/b` with the last name of the path alone."""
    return re.sub(r"/?(?:[^/:=]+/)+", "", text)


def _options(fields: Json) -> list[str]:
    words: list[str] = []
    for name, value in fields.items():
        flag = "--" + name.replace("_", "-")
        if name == "name":
            continue
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        else:
            for each in value if isinstance(value, (list, tuple)) else [value]:
                words += [flag, "none" if each is None else str(each)]
    return words

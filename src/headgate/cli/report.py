"""`headgate report`: one page about some runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from headgate.cli.common import friendly_errors
from headgate.errors import FileError, HeadgateError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, to be shown side by side.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="Also write each figure as SVG and PNG into this folder.")
    ] = None,
    images: Annotated[
        int, typer.Option(help="Images to look at for everything but the final accuracy; 0: all.")
    ] = 2000,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of timings.")] = 15,
    threads: Annotated[int, typer.Option(help="Threads of timings; 0: as many as torch takes.")] = 0,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "headgate report",
    data_dir: Annotated[str | None, typer.Option(help="Where the data is, if not where it was.")] = None,
) -> None:
    """Write one self-contained HTML page about runs: figures, tables, and a slider that moves tau."""
    from headgate.analysis import plots
    from headgate.analysis import report as pages
    from headgate.analysis.records import write_text
    from headgate.training.study import Look, study

    with friendly_errors():
        if images < 0 or rounds < 1 or threads < 0:
            raise HeadgateError("a report needs 0 (all) or more images and threads, and at least one round of timings")
        plots.check_installed()
        if out.is_dir() or not out.resolve().parent.is_dir():
            raise FileError(f"{out} can't be written: name a file in a folder that is there, with --out")
        again = [str(run) for run, times in Counter(run.resolve() for run in runs).items() if times > 1]
        if again:
            raise HeadgateError(f"{again[0]} is named twice: name every run once")
        look = Look(images=images, rounds=rounds, threads=threads)
        found = []
        for run in runs:
            typer.echo(f"looking at {run}", err=True)
            found.append(study(run, look, data_dir))
        named = _told_apart(found)
        try:
            write_text(out, pages.page(named, title))
            typer.echo(f"wrote {out}")
            if figures is not None:
                for name, drawn in pages.pictures(named).items():
                    for path in plots.write(drawn, figures, f"{name}-" if name else ""):
                        typer.echo(f"wrote {path}")
        except OSError as error:
            where = error.filename or out
            raise FileError(f"{where} can't be written ({error.strerror}): choose another place") from error


def _told_apart(studies: list[dict[str, object]]) -> list[dict[str, object]]:
    """Runs of the same name get a number."""
    times = Counter(str(study["name"]) for study in studies)
    seen: Counter[str] = Counter()
    named = []
    for study in studies:
        name = str(study["name"])
        seen[name] += 1
        named.append(study | {"name": f"{name} ({seen[name]})"} if times[name] > 1 else study)
    return named

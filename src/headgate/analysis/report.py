"""The report: one page that holds everything about some runs, and opens from disk without a network.

Takes studies (plain data) and gives HTML: figures as SVG whose colours follow the reader's theme, tables that sort, a
slider that moves tau in all runs together, and the record behind every figure. Knows nothing of torch or of how
studies are made; style and script are the files beside this one.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from headgate.analysis.plots import Picture, Study, last_network, pictures_of, svg, trade_off
from headgate.analysis.published import PEERS_HOW, Published, exits_published_for, published_for

PLACES = {
    "training": "Training", "polarisation": "How sure the gates are", "layers": "Where the MACs went",
    "latency": "Milliseconds", "exits": "Early exit", "exits_by_class": "Early exit, class by class",
    "classes": "What the gates tell of the class", "image_macs": "From image to image",
}  # fmt: skip
"""Sections, in their order, by the name of their figure."""
WHEN = {"trained": "Trained", "looked": "Looked at and timed"}
KINDS = {"static": "pruned", "dynamic": "conditional", "exits": "early exit"}
TIMED = ("PyTorch", 1)
"""Engine and batch of the speed-up in the table of runs."""


def pictures(studies: Sequence[Study]) -> dict[str, list[Picture]]:
    """All figures of a report: those of each run by the run's name, and what compares them under an empty one."""
    together = trade_off(studies, published_of(studies))
    drawn = {study["name"]: pictures_of(study) for study in studies}
    return {**drawn, "": [] if together is None else [together]}


def published_of(studies: Sequence[Study]) -> tuple[Published, ...]:
    """Published results of the networks that the runs are about."""
    asked = dict.fromkeys((study["model"], study["data"]) for study in studies)
    return tuple(each for model, data in asked for each in published_for(model, data))


def page(studies: Sequence[Study], title: str = "headgate report") -> str:
    """The whole page."""
    drawn = pictures(studies)
    sections = [_summary(studies), _trade_off(studies, drawn[""])]
    for name, heading in PLACES.items():
        cards = [
            _figure(picture, study["name"], (number,)) + _beside(name, study)
            for number, study in enumerate(studies)
            for picture in drawn[study["name"]]
            if picture.name == name
        ]
        if name == "classes":
            cards += [_undecided(study, number) for number, study in enumerate(studies) if _none_decides(study)]
        if cards:
            sections.append(_section(heading, "".join(f'<div class="card">{card}</div>' for card in cards), grid=True))
    sections += [_examples(studies), _provenance(studies)]
    data = json.dumps([_kept(study) for study in studies], allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>\n{_file('report.css')}</style>\n</head>\n<body>\n"
        f"<h1>{_text(title)}</h1>\n" + "\n".join(part for part in sections if part) + "\n"
        f'<script type="application/json" id="studies">{data}</script>\n'
        f"<script>\n{_file('report.js')}</script>\n</body>\n</html>\n"
    )


def provenance(study: Study) -> dict[str, Any]:
    """What every record says of how it came about."""
    result = study.get("result") or {}
    known = ("commit", "date", "versions", "cpu", "threads", "processes", "measured_on", "images", "seconds")
    trained = study.get("trained", {}) | {name: result[name] for name in known if name in result}
    return {"command": study["command"], "trained": trained} | (
        {"looked": study["looked"]} if "looked" in study else {}
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ sections


def _summary(studies: Sequence[Study]) -> str:
    columns = ("run", "kind", "network", "dense", "after", "MACs left", "parameters", "speed-up", "training")
    engine, batch = TIMED
    rows = []
    for study in studies:
        result = study.get("result")
        cells = [_cell(study["name"]), _cell(KINDS[study["kind"]]), _cell(study["model"])]
        if result is None:
            rows.append([*cells, _cell("not finished"), *[_cell("")] * 5])
            continue
        last = last_network(result)
        cells += [_share(result["accuracy"]["dense"], 2), _share(result["accuracy"][last], 2)]
        cells += [
            _share(result["macs_fraction"][last], 1),
            _cell(f"{result['parameters'][last]:,}", result["parameters"][last]),
        ]
        timed = [row for row in study.get("latency", ()) if (row["engine"], row["batch"]) == (engine, batch)]
        speed = timed[0]["speed_up"] if timed else None
        cells += [_cell("" if speed is None else f"{speed:.2f}×", speed)]
        seconds = sum(result["seconds"].values()) if result["seconds"] else None
        cells += [_cell("" if seconds is None else f"{seconds / 60:.1f} min", seconds)]
        rows.append(cells)
    told = {
        f"{study['result']['images']:,} {study['result']['measured_on']} images"
        for study in studies
        if study.get("result")
    }
    where = f"Accuracy on {' or '.join(sorted(told))}, after the last epoch. " if told else ""
    note = f'<p class="quiet">{_text(where)}Speed-up of {engine} at batch {batch}, over the dense network.</p>'
    missing = [f"{study['name']}: {line}" for study in studies for line in study.get("notes", ())]
    return _section("Runs", note + _table(columns, rows) + "".join(f"<p>{_text(line)}</p>" for line in missing))


def _trade_off(studies: Sequence[Study], drawn: Sequence[Picture]) -> str:
    if not drawn:
        return ""
    shown = tuple(number for number, study in enumerate(studies) if study.get("result"))
    cards = [_figure(drawn[0], None, shown), _moved(studies) + _key(studies)]
    inside = "".join(f'<div class="card">{card}</div>' for card in cards if card)
    return _section("Accuracy, MACs, milliseconds", f'<div class="grid two">{inside}</div>')


def _moved(studies: Sequence[Study]) -> str:
    """The slider, and the table that it moves: of the runs whose gates were kept."""
    numbers = tuple(number for number, study in enumerate(studies) if study.get("sweep"))
    if not numbers:
        return ""
    rows = [
        f'<tr id="moved-{number}"><td>{_text(studies[number]["name"])}</td>'
        + "".join(f'<td data-what="{what}"></td>' for what in ("accuracy", "macs", "milliseconds"))
        + "</tr>"
        for number in numbers
    ]
    most = len(studies[numbers[0]]["sweep"]) - 1
    return (
        "<h3>Move tau</h3>"
        '<div class="slider"><label for="slider">tau</label>'
        f'<input type="range" id="slider" min="0" max="{most}" value="{most // 2}" step="1" aria-describedby="tau">'
        '<output id="tau" for="slider"></output></div>'
        + _sortable(("run", "accuracy", "MACs left", "ms"), rows)
        + f'<p class="quiet">On {min(studies[number]["images"] for number in numbers):,} images; milliseconds an '
        "image, one at a time. A gate is open where p is above tau; at the first exit in use images leave where it is, "
        "and the thresholds of the others move along. Pruned runs are shown before tuning.</p>"
    )


def _key(studies: Sequence[Study]) -> str:
    """What the numbers of the figure stand for, and what was published without MACs and has no place in it."""
    numbered = list(enumerate(published_of(studies), 1))
    text = ""
    for heading, here in (("Published by others", False), ("Measured for this package", True)):
        items = "".join(
            f'<li value="{number}">{_text(each.who)}, {_text(each.model)}: {each.accuracy:.2f} % at '
            f"{each.macs_fraction:.0%} of the MACs"
            + (f", from {each.dense_accuracy:.2f} %" if each.dense_accuracy is not None else "")
            + (", conditional" if each.conditional else "")
            + "</li>"
            for number, each in numbered
            if each.measured_here is here
        )
        how = f'<p class="quiet">{_text(PEERS_HOW)}</p>' if here else ""
        text += f"<h3>{heading}</h3><ol>{items}</ol>{how}" if items else ""
    asked = dict.fromkeys((study["model"], study["data"]) for study in studies if study["kind"] == "exits")
    for each in [each for model, data in asked for each in exits_published_for(model, data)]:
        text += (
            f'<p class="quiet">{_text(each.who)}, {_text(each.model)} with exits: {each.accuracy:.2f} % together, '
            f"{each.accuracy_of_last:.2f} % at the last exit alone; MACs were not published.</p>"
        )
    return text


def _beside(name: str, study: Study) -> str:
    """Words and tables that belong to a figure."""
    if name == "classes":
        return _words(study["classes"])
    if name == "exits":
        return _exit_table(study)
    if name == "layers":
        rows = [
            [
                _cell(row["name"]), *(_cell(f"{row[when]:,.0f}", row[when]) for when in ("dense", "after")),
                _share(row["after"] / row["dense"], 1) if row["dense"] else _cell(""),
            ]
            for row in study["layers"]
        ]  # fmt: skip
        return f"<details><summary>table</summary>{_table(('layer', 'before', 'after', 'left'), rows)}</details>"
    return ""


def _none_decides(study: Study) -> bool:
    return "classes" in study and not study["classes"]["gates"]


def _undecided(study: Study, number: int) -> str:
    """Where there is nothing to draw, that is what there is to say."""
    return f"<h3>{_text(study['name'])}</h3>" + _words(study["classes"]) + _record((number,), ("classes",))


def _words(found: Mapping[str, Any]) -> str:
    numbers = found["numbers"]
    if not numbers["deciding_gates"]:
        sentence = (
            f"No gate decides: each of the {numbers['gates']} gates is open for all of {numbers['images']:,} images, "
            "or closed for all, so that they tell nothing of the class."
        )
        return f"<p>{_text(sentence)}</p>"
    sentence = (
        f"{numbers['deciding_gates']} of {numbers['gates']} gates are open for some images and closed for others. "
        f"{numbers['specialised_gates']} of them tell more of the class than chance: on average a deciding gate tells "
        f"{numbers['mean_bits']:.4f} bits (with shuffled labels {numbers['mean_bits_shuffled']:.4f}), the most telling "
        f"{numbers['most_bits']:.3f} (shuffled {numbers['most_bits_shuffled']:.4f}), of {numbers['bits_of_class']:.2f} "
        f"that a class has. {numbers['images']:,} images."
    )
    items = "".join(f"<li>{_text(line)}</li>" for line in found["words"])
    return f"<p>{_text(sentence)}</p>" + (f"<ul>{items}</ul>" if items else "")


def _exit_table(study: Study) -> str:
    found = study["exits"]
    rows = [
        [_cell(row["name"]), _share(row["share"], 1), _share(row["accuracy_of_all"], 2),
         _cell("") if row["accuracy_of_selected"] is None else _share(row["accuracy_of_selected"], 2)]
        for row in found["rows"]
    ]  # fmt: skip
    sentence = (
        f"Together {100 * found['accuracy']:.2f} % at {100 * found['macs_fraction']:.1f} % of the MACs; "
        f"the last exit alone {100 * found['accuracy_of_last']:.2f} %. {found['images']:,} images."
    )
    text = _table(("exit", "leave here", "right, of all", "right, of these"), rows) + f"<p>{_text(sentence)}</p>"
    for each in exits_published_for(study["model"], study["data"]):
        told = "; ".join(
            f"{name}: {share} % leave, {right} % right of all, {own} % of these"
            for name, share, right, own in each.rows
        )
        text += (
            f'<p class="quiet">{_text(each.who)} published {_text(told)}; together {each.accuracy:.2f} %, the last '
            f"exit alone {each.accuracy_of_last:.2f} %.</p>"
        )
    return text


def _examples(studies: Sequence[Study]) -> str:
    cards = []
    for number, study in enumerate(studies):
        names, dense = study.get("class_names", ()), (study.get("result") or {}).get("macs", {}).get("dense", 0)
        for what, rows in study.get("examples", {}).items():
            shown = "".join(_example(row, names, dense) for row in rows)
            heading = f"<h3>{_text(study['name'])}: images that {_text(what)}</h3>"
            record = _record((number,), ("examples", "image_macs"))
            cards.append(f'<div class="card">{heading}<div class="examples">{shown}</div>{record}</div>')
    return _section("Images", "".join(cards), grid=True) if cards else ""


def _example(row: Mapping[str, Any], names: Sequence[str], dense_macs: float) -> str:
    label = names[row["label"]]
    if row["answer"] is None:
        told = f"{label}, wrong"
    else:
        answer = names[row["answer"]] if row["answer"] < len(names) else f"output {row['answer']}"
        told = label if row["answer"] == row["label"] else f"{label}, taken for {answer}"
    where = f", {row['exit']}" if "exit" in row else ""
    caption = f"{told}: {100 * row['macs'] / dense_macs:.0f} %{where}"
    return (
        f'<figure><img src="{row["picture"]}" alt="{_text(label)}"><figcaption>{_text(caption)}</figcaption></figure>'
    )


def _provenance(studies: Sequence[Study]) -> str:
    cards = []
    for number, study in enumerate(studies):
        told = provenance(study)
        lines = [f"<pre>{_text(told['command'])}</pre>"]
        for when in ("trained", "looked"):
            if "versions" in told.get(when, {}):
                versions = ", ".join(f"{name} {version}" for name, version in told[when]["versions"].items())
                dates = _dates(told[when])
                where = f"{WHEN[when]}{dates} on {told[when]['cpu']}, threads: {told[when]['threads']}; {versions}"
                lines.append(f'<p class="quiet">{_text(where)}</p>')
        cards.append(
            f'<div class="card"><h3>{_text(study["name"])}</h3>{"".join(lines)}'
            f"{_record((number,), ('recipe', 'result'))}</div>"
        )
    return _section("How to repeat it", "".join(cards), grid=True)


def _dates(told: Mapping[str, Any]) -> str:
    """The day, or the days from first to last, as far as they are known."""
    days = dict.fromkeys(told[name][:10] for name in ("began", "ended", "date") if name in told)
    return f" {' to '.join(days)}" if days else ""


# --------------------------------------------------------------------------------------------------------- parts


def _figure(picture: Picture, run: str | None, numbers: tuple[int, ...]) -> str:
    prefix = picture.name if run is None else f"{picture.name}-{numbers[0]}"
    heading = "" if run is None else f"<h3>{_text(run)}</h3>"
    caption = f'<p class="quiet">{_text(picture.caption)}</p>'
    return heading + svg(picture, prefix, run or "") + caption + _record(numbers, picture.shows)


def _record(numbers: Sequence[int], shows: Sequence[str]) -> str:
    runs = " ".join(str(number) for number in numbers)
    return f'<details data-runs="{runs}" data-shows="{" ".join(shows)}"><summary>record</summary><pre></pre></details>'


def _section(heading: str, content: str, grid: bool = False) -> str:
    inside = f'<div class="grid">{content}</div>' if grid else content
    return f"<section><h2>{_text(heading)}</h2>{inside}</section>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return _sortable(columns, [f"<tr>{''.join(row)}</tr>" for row in rows])


def _sortable(columns: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col"><button type="button">{_text(column)}</button></th>' for column in columns)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _cell(text: str, value: float | None = None) -> str:
    data = "" if value is None else f' data-value="{value:g}"'
    return f"<td{data}>{_text(text)}</td>"


def _share(value: float, digits: int) -> str:
    return f'<td data-value="{value:.6g}">{100 * value:.{digits}f}&nbsp;%</td>'


def _kept(study: Study) -> dict[str, Any]:
    """What the page's script and records need; pictures are in the page already."""
    kept = {name: value for name, value in study.items() if name not in ("state", "format", "series", "trained")}
    if "examples" in kept:
        kept["examples"] = {
            what: [{name: value for name, value in row.items() if name != "picture"} for row in rows]
            for what, rows in kept["examples"].items()
        }
    return kept | {"provenance": provenance(study)}


def _text(value: str) -> str:
    return html.escape(str(value), quote=True)


def _file(name: str) -> str:
    return (resources.files("headgate.analysis") / name).read_text(encoding="utf-8")

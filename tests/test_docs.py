"""The commands and programs on the pages of docs/ and in the README, run as a reader would run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import headgate

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]


def blocks(page: Path, language: str | None = None) -> list[tuple[str, str]]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(kind, text) for kind, text in found if language in (None, kind)]


def carried_out(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_the_tutorial_works_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    said = []
    for kind, text in blocks(ROOT / "docs" / "tutorial.md"):
        if kind == "console":
            for line in text.strip().splitlines():
                program, *words = shlex.split(line)
                assert program == "headgate"
                said.append(carried_out([sys.executable, "-m", "headgate", *words], tmp_path))
        else:
            assert kind == "python"
            file = re.match(r"# (\w+\.py)\n", text)
            if file:
                (tmp_path / file[1]).write_text(text, encoding="utf-8")
            else:
                said.append(carried_out([sys.executable, "-c", text], tmp_path))
    assert (tmp_path / "report.html").stat().st_size > 100_000 and (tmp_path / "small.onnx").is_file()
    macs = next(re.fullmatch(r"([\d,]+) of ([\d,]+) MACs\n", text) for text in said if text.endswith(" MACs\n"))
    assert macs is not None
    small, dense = (int(number.replace(",", "")) for number in macs.groups())
    assert 0.45 * dense < small <= 0.5 * dense


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_of_commands_on_every_page_exist(page: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    for command, rest in re.findall(
        r"(?:^|[`$ ])headgate (train|evaluate|shrink|bench|report|inspect|data|demo)\b([^\n`]*)", text
    ):
        told = help_of(command)
        for option in re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", rest.split("#")[0]):
            assert option in told, f"{page.name}: headgate {command} has no {option}"


HELP: dict[str, str] = {}


def help_of(command: str) -> str:
    if command not in HELP:
        words = [sys.executable, "-m", "headgate", command, "--help"]
        wide = {**os.environ, "COLUMNS": "250", "TERMINAL_WIDTH": "250"}
        done = subprocess.run(words, capture_output=True, text=True, env=wide, check=True)
        HELP[command] = done.stdout
    return HELP[command]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_every_page_is_python(page: Path) -> None:
    for _, text in blocks(page, "python"):
        assert compile(text, page.name, "exec"), "what is no Python raises, with the page and the line"


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    written = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", page))))
    names = set(headgate.__all__) - {"__version__"}
    for each in (headgate.GatedModel, headgate.ExitModel, headgate.Budget):
        names |= {name for name, value in vars(each).items() if not name.startswith("_") and callable(value)}
    assert names - written == set()

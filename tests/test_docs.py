"""The commands and programs on the pages of docs/ and in the README, run as a reader would run them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headgate
from headgate.cli import app

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]


def blocks(page: Path, language: str | None = None) -> list[tuple[str, str]]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(kind, text) for kind, text in found if language in (None, kind)]


def carried_out(program: str, folder: Path) -> str:
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{program}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.filterwarnings("default")
def test_the_tutorial_works_from_its_first_line_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process: a dozen times torch to import would take longer than most of them."""
    monkeypatch.chdir(tmp_path)
    said = []
    for kind, text in blocks(ROOT / "docs" / "tutorial.md"):
        if kind == "console":
            for line in text.strip().splitlines():
                program, *words = shlex.split(line)
                assert program == "headgate"
                done = CliRunner().invoke(app, words)
                assert done.exit_code == 0, f"{line}\n{done.output[-2000:]}\n{done.exception}"
                said.append(done.stdout)
        else:
            assert kind == "python"
            file = re.match(r"# (\w+\.py)\n", text)
            if file:
                (tmp_path / file[1]).write_text(text, encoding="utf-8")
            else:
                said.append(carried_out(text, tmp_path))
    assert (tmp_path / "report.html").stat().st_size > 100_000 and (tmp_path / "small.onnx").is_file()
    macs = next(re.fullmatch(r"([\d,]+) of ([\d,]+) MACs\n", text) for text in said if text.endswith(" MACs\n"))
    assert macs is not None
    small, dense = (int(number.replace(",", "")) for number in macs.groups())
    assert 0.45 * dense < small <= 0.5 * dense


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_of_commands_on_every_page_exist(page: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    for command, rest in re.findall(
        r"(?:^|[`$ ])headgate (train|average|zoo|evaluate|shrink|bench|report|inspect|data|demo)\b([^\n`]*)", text
    ):
        told = help_of(command)
        for option in re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", rest.split("#")[0]):
            assert option in told, f"{page.name}: headgate {command} has no {option}"


@cache
def help_of(command: str) -> str:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "250", "TERMINAL_WIDTH": "250"})
    assert done.exit_code == 0, done.output
    return done.stdout


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

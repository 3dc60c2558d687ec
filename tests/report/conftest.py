"""Four small runs on the digits, and the page about them: made once for all tests of the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.analysis.report import page
from headgate.training.study import Look, study
from tests.training.runs import run

LOOK = Look(rounds=1, threads=1)
RUNS: dict[str, dict[str, Any]] = {
    "pruned": {},
    "conditional": {"kind": "dynamic"},
    "layers": {"kind": "dynamic", "granularity": "layer", "target": "0.7"},
    "early": {"exits": ("layer1", "layer2"), "tune_epochs": 0, "target": "0.7"},
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs-of-the-report")
    for name, changes in RUNS.items():
        run(root / name, **changes)
        study(root / name, LOOK)
    return {name: root / name for name in RUNS}


@pytest.fixture(scope="session")
def studies(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {name: study(folder, LOOK) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def report_file(studies: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(list(studies.values()), "four <runs>"), encoding="utf-8")
    yield path

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headgate.analysis import records
from headgate.analysis.measure import timing_of
from headgate.errors import HeadgateError


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    git(tmp_path, "init", "-b", "main")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "core.hooksPath=/dev/null", "commit", "-m", "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, results: object = None, **options: object) -> records.Record:
    return records.write_record(path, question="how fast?", results=results, threads=2, seeds=[0, 1], **options)


def test_a_record_says_how_it_came_about(repository: Path) -> None:
    written = write(repository / "records" / "speed.json", {"dense": timing_of([2.0, 1.0, 4.0])})
    data = json.loads((repository / "records" / "speed.json").read_text())
    assert data["results"] == {"dense": {"median_ms": 2.0, "iqr_ms": 1.5, "rounds": 3}}
    assert len(data["commit"]["sha"]) == 40 and data["commit"]["dirty"] is False
    assert data["versions"]["torch"].startswith("2.") and data["python"] and data["cpu"]
    assert (data["question"], data["threads"], data["seeds"]) == ("how fast?", 2, [0, 1])
    assert records.read_record(repository / "records" / "speed.json") == written


def test_an_uncommitted_change_is_dirty_but_an_earlier_record_is_not(repository: Path) -> None:
    folder = repository / "records"
    assert not write(folder / "one.json").commit.dirty
    assert not write(folder / "two.json").commit.dirty
    (repository / "code.py").write_text("x = 2\n")
    assert write(folder / "three.json").commit.dirty


def test_a_new_file_of_code_is_dirty(repository: Path) -> None:
    (repository / "more.py").write_text("")
    assert write(repository / "records" / "one.json").commit.dirty


def test_outside_a_repository_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert write(tmp_path / "one.json").commit == records.Commit(None, False)


def test_a_failed_write_leaves_the_old_record_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.json"
    write(path, 1)
    before = path.read_text()

    def full_disk(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(records.os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write(path, 2)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (np.float32(0.5), 0.5),
        (np.array([1, 2]), [1, 2]),
        ((1, None, "a"), [1, None, "a"]),
        ({1: {"b": True}}, {"1": {"b": True}}),
    ],
)
def test_results_become_plain_data(value: object, stored: object) -> None:
    assert records.plain(value) == stored


def test_a_row_of_results_is_a_line(tmp_path: Path) -> None:
    rows = [{"model": f"net{n}", "ms": 1.5, "note": 'a "quoted" ± sign'} for n in range(20)]
    write(tmp_path / "one.json", {"rows": rows})
    lines = (tmp_path / "one.json").read_text(encoding="utf-8").splitlines()
    assert sum("quoted" in line for line in lines) == 20
    assert records.read_record(tmp_path / "one.json").results == {"rows": rows}


def test_what_json_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match="NaN or infinity"):
        write(tmp_path / "one.json", {"loss": float("nan")})
    with pytest.raises(HeadgateError, match="a set cannot stand in a record"):
        write(tmp_path / "one.json", {"names": {"a"}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "reason"),
    [("no json", "not JSON"), ("[]", "'format'"), ('{"format": "headgate-record-1"}', "not a whole record")],
)
def test_what_is_not_a_record_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(HeadgateError, match=reason):
        records.read_record(tmp_path / "one.json")


def test_the_command_names_no_folder_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bench" / "speed.py"
    script.parent.mkdir()
    script.write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--out", str(tmp_path / "x.json"), f"--log={tmp_path}/y", "--quick"])
    assert records.this_command() == "python bench/speed.py --out x.json --log=y --quick"
    monkeypatch.chdir(script.parent.parent.parent)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/headgate", "bench", "a b"])
    assert records.this_command() == "headgate bench 'a b'"


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    records.write_text(tmp_path / "record", "old")
    records.write_text(tmp_path / "record", "new")
    assert (tmp_path / "record").read_text() == "new" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "device").symlink_to("/dev/null")
    records.write_text(tmp_path / "device", "gone")
    assert (tmp_path / "device").is_symlink() and (tmp_path / "device").is_char_device()


def test_records_know_nothing_of_torch() -> None:
    source = Path(records.__file__).read_text()
    assert "import torch" not in source and "from torch" not in source


def test_a_package_that_is_not_installed_is_left_out() -> None:
    assert records.versions_of(["numpy", "no-such-package-at-all"]) == {"numpy": np.__version__}

import io
import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headgate.errors import FileError, HeadgateError
from headgate.training.journal import AnyJournal, Journal, SilentJournal, read_log
from headgate.training.pace import Average, Pace
from headgate.training.screen import describe, duration

STEP = {"loss": 1.5, "accuracy": 0.25, "lr": 0.1}
EPOCH = {
    "loss": 1.25, "accuracy": 0.5, "validation_accuracy": 0.4375, "cost": 0.61, "cost_decided": 0.58,
    "goal": 0.55, "polarised": 0.34, "lr": 0.1, "seconds": 75.0,
}  # fmt: skip


class Clock:
    """A time that goes on when told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def terminal(width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, _environ={"TERM": "xterm-256color"})


def pipe(width: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=width, _environ={})


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def words(console: Console) -> str:
    """What was printed, without the sequences that move and colour."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed(console))


def train(journal: AnyJournal, epochs: int, steps: int, clock: Clock | None = None, step_seconds: float = 2.0) -> None:
    for _ in range(epochs):
        for _ in range(steps):
            if clock is not None:
                clock.seconds += step_seconds
            journal.step(STEP)
        journal.epoch(EPOCH)


def kinds(path: Path) -> list[tuple[str, int, int]]:
    return [(line["kind"], line["epoch"], line["step"]) for line in read_log(path / "log.jsonl")]


# ------------------------------------------------------------------------------------------------------ the log


def test_the_log_reads_back(tmp_path: Path) -> None:
    with Journal(tmp_path / "new" / "run", title="a run", quiet=True, step_every=2) as journal:
        journal.note("start", {"recipe": {"lr": 0.1, "widths": (8, 16)}, "folder": Path("data")})
        journal.phase("gates", epochs=2, steps=3)
        train(journal, 2, 3)
        journal.note("end", {"accuracy": np.float32(0.5), "macs": np.int64(7)})
    lines = read_log(tmp_path / "new" / "run" / "log.jsonl")
    assert kinds(tmp_path / "new" / "run") == [
        ("start", 0, 0), ("step", 1, 2), ("epoch", 1, 3), ("step", 2, 4), ("step", 2, 6), ("epoch", 2, 6), ("end", 2, 6),
    ]  # fmt: skip
    assert [line["phase"] for line in lines] == [None] + 6 * ["gates"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"]) for line in lines)
    assert (lines[0]["recipe"], lines[0]["folder"]) == ({"lr": 0.1, "widths": [8, 16]}, "data")
    assert lines[1].items() >= STEP.items() and lines[2].items() >= EPOCH.items()
    assert (lines[-1]["accuracy"], lines[-1]["macs"]) == (0.5, 7)


def test_floats_have_six_digits_and_nan_is_json(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    with Journal(tmp_path, title="a run", quiet=True, step_every=1) as journal:
        journal.phase("dense", epochs=1, steps=1)
        journal.step({"loss": nan, "cost": -inf, "lr": 1 / 3, "accuracy": 1.23456789e-9})
        journal.note("end", {"losses": [np.float64("inf"), 2.0], "odd \udc80": "\udc80"})
    for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    step, end = read_log(tmp_path / "log.jsonl")
    assert end["odd \udc80"] == "\udc80"
    assert (step["loss"], step["cost"], step["lr"], step["accuracy"]) == ("nan", "-inf", 0.333333, 1.23457e-9)
    assert np.isnan(float(step["loss"])) and float(step["cost"]) == -inf
    assert end["losses"] == ["inf", 2.0]


def test_a_torn_last_line_is_skipped_and_then_written_over(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes('{"kind": "start", "note": "é"}\n{"kind": "st'.encode())
    assert read_log(path) == [{"kind": "start", "note": "é"}]
    with Journal(tmp_path, title="a run", quiet=True) as journal:
        journal.note("end", {})
    assert [line["kind"] for line in read_log(path)] == ["start", "end"]


@pytest.mark.parametrize("damage", [b'{"kind": "st', b"[1, 2]", b"\xff\xfe", b""])
def test_other_damage_names_the_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"kind": "start"}\n' + damage + b'\n{"kind": "end"}\n')
    with pytest.raises(FileError, match=r"log\.jsonl, line 2 .*delete the line"):
        read_log(path)


def test_a_log_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"log\.jsonl can't be read \(No such file"):
        read_log(tmp_path / "log.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"can't be written .*: choose another folder"):
        Journal(tmp_path / "file", title="a run", quiet=True)


def test_a_run_that_goes_on_logs_what_the_checkpoint_had_not_seen(tmp_path: Path) -> None:
    with Journal(tmp_path, title="a run", quiet=True, step_every=1) as journal:
        assert journal.position == 0
        journal.phase("dense", epochs=2, steps=2)
        train(journal, 1, 2)
        position = journal.position
        assert position == (tmp_path / "log.jsonl").stat().st_size
        journal.step({"loss": 9.0})
    with Journal(tmp_path, title="a run", quiet=True, step_every=1) as journal:
        journal.resume_at(position)
        assert journal.position == position
        journal.phase("dense", epochs=2, steps=2, done=2)
        train(journal, 1, 2)
        assert journal.position == (tmp_path / "log.jsonl").stat().st_size
    assert kinds(tmp_path) == [
        ("step", 1, 1), ("step", 1, 2), ("epoch", 1, 2), ("step", 2, 3), ("step", 2, 4), ("epoch", 2, 4),
    ]  # fmt: skip
    assert 9.0 not in [line["loss"] for line in read_log(tmp_path / "log.jsonl")]


def test_a_log_shorter_than_at_the_checkpoint_is_a_warning(tmp_path: Path) -> None:
    console = pipe()
    with Journal(tmp_path, title="a run", console=console) as journal:
        journal.note("start", {})
        journal.resume_at(10_000)
        journal.note("end", {})
    assert "log.jsonl has fewer than the 10000 bytes" in printed(console)
    assert [line["kind"] for line in read_log(tmp_path / "log.jsonl")] == ["start", "end"]


def test_a_cut_within_a_line_takes_the_whole_line(tmp_path: Path) -> None:
    with Journal(tmp_path, title="a run", quiet=True) as journal:
        journal.note("start", {})
        position = journal.position
        journal.note("decided", {})
        journal.resume_at(position + 5)
        assert journal.position == position


# --------------------------------------------------------------------------------------------------- the screen


def test_without_a_terminal_there_is_one_plain_line_an_epoch(tmp_path: Path) -> None:
    console, clock = pipe(), Clock()
    with Journal(tmp_path, title="resnet [bold] run", console=console, now=clock) as journal:
        journal.phase("gates", epochs=12, steps=4)
        journal.say("a line\x1b[1m\r of [red]text[/red] for the user")
        train(journal, 2, 4, clock)
    lines = printed(console).splitlines()
    assert lines[0] == "resnet [bold] run"
    assert lines[1].endswith("of [red]text[/red] for the user")
    assert lines[2] == (
        "gates  epoch  1/12  loss 1.250  train 50.00%  validation 43.75%  cost 61.0%  decided 58.0%  goal 55.0%  "
        "polarised 34.0%  lr 0.1  took 1 min 15 s  1 min 28 s left"
    )
    assert len(lines) == 4
    assert all(letter.isprintable() or letter == "\n" for letter in printed(console))


def test_a_long_epoch_has_lines_within(tmp_path: Path) -> None:
    console, clock = pipe(), Clock()
    with Journal(tmp_path, title="a run", console=console, now=clock, line_every_seconds=60) as journal:
        journal.phase("dense", epochs=1, steps=100)
        train(journal, 1, 100, clock)
    _, *steps, epoch = printed(console).splitlines()
    assert [re.findall(r"step (\d+)/100", line) for line in steps] == [["30"], ["60"], ["90"]]
    assert steps[0] == "dense  epoch 1/1  step 30/100  loss 1.500  train 25.00%  lr 0.1  2 min 20 s left"
    assert epoch.startswith("dense  epoch 1/1  loss 1.250")


def test_the_live_view_shows_phase_values_and_time_left(tmp_path: Path) -> None:
    console, clock = terminal(), Clock()
    with Journal(tmp_path, title="a run", console=console, now=clock) as journal:
        journal.plan([("gates", 40), ("tune", 20, 0.5)])
        journal.phase("gates", epochs=10, steps=4)
        journal.say("above [the] bar")
        train(journal, 5, 4, clock)
        while_running = words(console)
    assert "\x1b[" in printed(console)
    assert "above [the] bar" in while_running
    last = while_running[while_running.rindex("left") - 120 :]
    assert re.search(r"gates +epoch +5/10 .* 50\.0% +40 s left, 1 min 00 s for the run", last)
    assert "loss 1.500  train 25.00%  lr 0.1" in last
    assert len(re.findall(r"gates  epoch +\d+/10  loss 1\.250", words(console))) == 5


def test_a_narrow_terminal_shows_every_value(tmp_path: Path) -> None:
    console = terminal(width=40)
    with Journal(tmp_path, title="a run", console=console) as journal:
        journal.phase("gates", epochs=1, steps=1)
        journal.step(EPOCH)
        journal.epoch(EPOCH)
        drawn = " ".join(words(console).split())
    assert drawn.count(describe(EPOCH).replace("  ", " ")) >= 2
    assert max(len(line) for line in words(console).splitlines()) <= 40


def test_the_live_view_is_drawn_now_and_then_only(tmp_path: Path) -> None:
    console, clock = terminal(), Clock()
    with Journal(tmp_path, title="a run", console=console, now=clock) as journal:
        journal.phase("dense", epochs=1, steps=100_000)
        for _ in range(1000):
            clock.seconds += 1e-4
            journal.step(STEP)
    assert words(console).count("epoch 1/1") <= 4


def test_the_view_keeps_what_comes_now_and_then_and_smooths_what_jumps(tmp_path: Path) -> None:
    console, clock = pipe(), Clock()
    with Journal(tmp_path, title="a run", console=console, now=clock, line_every_seconds=0) as journal:
        journal.phase("gates", epochs=1, steps=3)
        journal.step({"loss": 1.0, "cost_decided": 0.5})
        journal.step({"loss": 2.0})
        journal.step({"loss": float("nan")})
        journal.step({"loss": 4.0, "unheard of": 1.0})
    lines = printed(console).splitlines()[1:]
    assert [re.findall(r"loss (\S+)  decided (\S+)", line) for line in lines] == [
        [("1.000", "50.0%")], [("1.500", "50.0%")], [("nan", "50.0%")], [("4.000", "50.0%")],
    ]  # fmt: skip
    assert "unheard" not in printed(console)


@pytest.mark.parametrize("make_console", [pipe, terminal])
def test_quiet_prints_nothing_and_still_logs(tmp_path: Path, make_console: Any) -> None:
    console = make_console()
    with Journal(tmp_path, title="a run", console=console, quiet=True) as journal:
        journal.phase("dense", epochs=1, steps=1)
        train(journal, 1, 1)
        journal.say("a line")
    assert printed(console) == ""
    assert kinds(tmp_path) == [("epoch", 1, 1)]


def test_a_terminal_that_cannot_draw_gets_lines(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    with Journal(tmp_path, title="a run", console=console) as journal:
        journal.phase("dense", epochs=1, steps=1)
        train(journal, 1, 1)
    assert len(printed(console).splitlines()) == 2


def test_a_silent_journal_takes_everything_and_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SilentJournal() as journal:
        journal.plan([("dense", 1)])
        journal.resume_at(7)
        journal.phase("dense", epochs=1, steps=1)
        train(journal, 1, 1)
        journal.note("end", {})
        journal.say("a line")
    assert journal.position == 0
    assert capsys.readouterr() == ("", "")
    assert {name for name in vars(Journal) if not name.startswith("_")} <= set(vars(AnyJournal))


def test_closing_twice_is_fine_and_phases_of_nothing_too(tmp_path: Path) -> None:
    for console in (pipe(), terminal()):
        journal = Journal(tmp_path, title="a run", console=console)
        journal.phase("dense", epochs=0, steps=0)
        journal.close()
        journal.close()
        assert read_log(tmp_path / "log.jsonl") == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (724, "12 min 04 s"),
        (3599.7, "1 h 00 min"), (11_100, "3 h 05 min"), (2 * 86400 + 7 * 3600, "2 d 07 h"), (float("inf"), "inf"),
    ],
)  # fmt: skip
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_of_any_size_stay_short() -> None:
    assert describe({"lr": 1e-5, "loss": 12345.678}) == "loss 1.23e+04  lr 1e-05"
    assert describe({"loss": 0.0, "cost": float("nan")}) == "loss 0.000  cost nan"
    assert describe({}) == ""


# ---------------------------------------------------------------------------------------------------- time left


def steps_of(pace: Pace, seconds: list[float], steps_per_epoch: int) -> None:
    now = 0.0
    for step, taken in enumerate(seconds):
        now += taken
        pace.step(now, starts_epoch=step % steps_per_epoch == 0)


def test_the_first_step_is_not_measured_and_nothing_is_known_before_the_second() -> None:
    pace = Pace()
    pace.begin("dense", 10)
    assert pace.phase_left(10) is None
    steps_of(pace, [100.0], 10)
    assert pace.phase_left(9) is None
    steps_of(pace, [100.0, 2.0], 10)
    assert pace.phase_left(8) is not None


def test_what_happens_once_an_epoch_is_spread_over_its_steps() -> None:
    pace = Pace()
    pace.begin("dense", 4)
    steps_of(pace, [9.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0], 4)
    assert pace.phase_left(8) == pytest.approx(8 * (1.0 + 2.0 / 4))


def test_epochs_of_one_step_are_measured_whole() -> None:
    pace = Pace()
    pace.begin("dense", 1)
    steps_of(pace, [9.0, 3.0, 3.0], 1)
    assert pace.phase_left(2) == pytest.approx(6.0)


def test_phases_not_seen_yet_are_guessed_by_their_cost() -> None:
    pace = Pace()
    pace.plan([("dense", 10), ("gates", 100, 1.5), ("tune", 10, 0.5)])
    pace.begin("dense", 10)
    assert pace.run_left(10) is None
    steps_of(pace, [9.0, 2.0], 10)
    assert pace.run_left(8) == pytest.approx(16 + 300 + 10)
    pace.begin("gates", 10)
    assert pace.run_left(100) == pytest.approx(300 + 10)
    steps_of(pace, [9.0, 6.0], 10)
    assert pace.phase_left(98) == pytest.approx(98 * 6)
    assert pace.run_left(98) == pytest.approx(98 * 6 + 10 * 2)
    assert (pace.steps_before("dense"), pace.steps_before("tune"), pace.steps_before("other")) == (0, 110, None)


def test_without_a_plan_only_the_phase_is_known() -> None:
    pace = Pace()
    pace.begin("dense", 10)
    steps_of(pace, [9.0, 2.0], 10)
    assert (pace.phase_left(4), pace.run_left(4)) == (8.0, None)


def test_an_average_is_a_mean_first_and_then_follows() -> None:
    average = Average(0.25)
    assert [average.add(value) for value in (1.0, 3.0, 5.0)] == [1.0, 2.0, 3.0]
    for _ in range(50):
        average.add(100.0)
    assert average.value == pytest.approx(100.0, rel=1e-3)


# -------------------------------------------------------------------------------------------------- TensorBoard


class Writer:
    """What `SummaryWriter` takes, kept."""

    made: list["Writer"]

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.points: list[tuple[str, float, int]] = []
        Writer.made.append(self)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.points.append((tag, value, step))

    def flush(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Writer]]:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    Writer.made = []
    yield Writer.made


def test_tensorboard_counts_steps_over_all_phases(tmp_path: Path, writers: list[Writer]) -> None:
    with Journal(tmp_path, title="a run", quiet=True, tensorboard=True, step_every=2) as journal:
        for phase in ("dense", "gates"):
            journal.phase(phase, epochs=1, steps=3)
            for _ in range(3):
                journal.step({"loss": 1.5})
            journal.epoch({"validation_accuracy": 0.5})
    (writer,) = writers
    assert (writer.folder, writer.purge_step) == (str(tmp_path / "tensorboard"), None)
    assert writer.points == [
        ("step/loss", 1.5, 2), ("epoch/validation_accuracy", 0.5, 3), ("step/loss", 1.5, 5), ("epoch/validation_accuracy", 0.5, 6),
    ]  # fmt: skip


def test_tensorboard_hides_what_comes_after_the_checkpoint(tmp_path: Path, writers: list[Writer]) -> None:
    with Journal(tmp_path, title="a run", quiet=True, tensorboard=True, step_every=1) as journal:
        journal.plan([("dense", 100), ("gates", 30)])
        journal.resume_at(0)
        journal.phase("gates", epochs=3, steps=10, done=12)
        journal.step({"loss": 1.5})
    assert writers[0].purge_step == 113
    assert writers[0].points == [("step/loss", 1.5, 113)]


def test_tensorboard_can_read_its_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    with Journal(tmp_path, title="a run", quiet=True, tensorboard=True) as journal:
        journal.phase("dense", epochs=1, steps=1)
        journal.step({"loss": 1.5})
        journal.epoch({"loss": 1.25, "cost": float("nan")})
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [(event.step, value.tag) for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    assert events == [(1, "epoch/loss"), (1, "epoch/cost")]


def test_a_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(HeadgateError, match=r"pip install 'headgate\[train\]'"):
        Journal(tmp_path / "run", title="a run", tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_told_once_with_its_remedy(tmp_path: Path) -> None:
    """In a process of its own: the limit holds for all its files."""
    program = f"""
import resource, signal
from pathlib import Path
from headgate.errors import FileError
from headgate.training.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    with Journal(Path({str(tmp_path)!r}), title="t", quiet=True) as journal:
        journal.note("first", {{"x": 1}})
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        journal.note("second", {{"x": "y" * 500}})
except FileError as error:
    print("told:", error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "told:" in done.stdout and "--resume" in done.stdout
    assert [line["kind"] for line in read_log(tmp_path / "log.jsonl")] == ["first"]

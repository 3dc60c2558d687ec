"""Records: a measurement as a small JSON file that says how it came about.

Takes the question that was asked and the numbers that answer it; adds the commit, the command, the date, the machine
and the versions; writes the whole atomically. Gives it back, checked, on reading. Knows nothing of torch, of models,
or of what the numbers mean: anything with an `as_record()` method may stand among the results.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from headgate.errors import HeadgateError

FORMAT = "headgate-record-1"
LINE_LENGTH = 400
PACKAGES = ("headgate", "torch", "torchvision", "timm", "numpy", "onnx", "onnxruntime", "openvino", "torch-pruning")


@dataclasses.dataclass(frozen=True)
class Commit:
    """Where the code stood: `sha` is None outside a git repository; `dirty` if the tree had uncommitted changes."""

    sha: str | None
    dirty: bool


@dataclasses.dataclass(frozen=True)
class Record:
    """One measurement. `results` is plain JSON data; every timing in it carries its median and its spread."""

    question: str
    command: str
    commit: Commit
    date: str
    python: str
    versions: Mapping[str, str]
    cpu: str
    cores: int
    threads: int
    seeds: Sequence[int]
    results: Any
    format: str = FORMAT


def write_record(
    path: str | Path,
    *,
    question: str,
    results: Any,
    threads: int,
    seeds: Sequence[int],
    command: str | None = None,
    packages: Sequence[str] = PACKAGES,
) -> Record:
    """Completes `results` to a `Record` and writes it to `path`, whole or not at all.

    Changes under the folder that holds the record do not count as dirty: records are committed after they are measured.
    """
    path = Path(path)
    record = Record(
        question=question,
        command=this_command() if command is None else command,
        commit=commit_of(Path.cwd(), besides=path.parent),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        python=platform.python_version(),
        versions=versions_of(packages),
        cpu=cpu_model(),
        cores=os.cpu_count() or 0,
        threads=threads,
        seeds=[int(seed) for seed in seeds],
        results=plain(results),
    )
    try:
        text = _layout(dataclasses.asdict(record))
    except ValueError as error:
        raise HeadgateError(f"the results for {path.name} hold NaN or infinity: store None and say why") from error
    write_text(path, text + "\n")
    return record


def read_record(path: str | Path) -> Record:
    """Reads what `write_record` wrote. Anything else is refused with the reason."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HeadgateError(f"{path} is not a record: not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise HeadgateError(f"{path} is not a record: its 'format' is not {FORMAT!r}")
    fields = {field.name for field in dataclasses.fields(Record)}
    if data.keys() != fields:
        raise HeadgateError(f"{path} is not a whole record: {sorted(data.keys() ^ fields)} missing or too many")
    data["commit"] = Commit(**data["commit"])
    return Record(**data)


def plain(value: Any) -> Any:
    """`value` as JSON data: `as_record()` is honoured, mappings, sequences, arrays and tensors are walked."""
    if hasattr(value, "as_record"):
        return plain(value.as_record())
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise HeadgateError(f"a {type(value).__name__} cannot stand in a record: give numbers, strings, lists or mappings")


def this_command() -> str:
    """The command line of this process, without any path of this machine."""
    script = Path(sys.argv[0])
    name = os.path.relpath(script) if script.is_file() else script.name
    if name.startswith(".."):
        name = script.name
    arguments = [_without_machine(argument) for argument in sys.argv[1:]]
    return shlex.join(["python", name, *arguments]) if script.suffix == ".py" else shlex.join([script.name, *arguments])


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Version of each package as installed; those not installed are left out."""
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def cpu_model() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or "unknown"


def commit_of(folder: Path, besides: Path | None = None) -> Commit:
    """The commit checked out in `folder`; changes under `besides` do not make it dirty."""
    sha = _git(folder, "rev-parse", "HEAD")
    root = _git(folder, "rev-parse", "--show-toplevel")
    if root is None:
        return Commit(None, False)
    pathspec = ["."]
    if besides is not None and besides.resolve().is_relative_to(root) and besides.resolve() != Path(root):
        pathspec.append(f":(exclude){besides.resolve().relative_to(root).as_posix()}")
    status = _git(Path(root), "status", "--porcelain", "--", *pathspec)
    return Commit(sha, bool(status))


def _layout(value: Any, margin: str = "") -> str:
    """JSON with one line for whatever fits on it, so that a row of results is a line and a change shows in a diff."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(margin) + len(line) <= LINE_LENGTH or not isinstance(value, (dict, list)):
        return line
    deeper = margin + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(key, ensure_ascii=False)}: {_layout(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(deeper + item for item in items) + f"\n{margin}}}"
    return "[\n" + ",\n".join(deeper + _layout(item, deeper) for item in value) + f"\n{margin}]"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _without_machine(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    return option + equals + (Path(value).name if os.path.isabs(value) else value)


def write_text(path: Path, text: str) -> None:
    """Write a file, or leave the old one: a crash never leaves half of it. A device such as /dev/null stays one."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

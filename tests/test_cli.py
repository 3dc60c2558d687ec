"""The command line, as a user types it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.cli import app

USER_MODEL = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
"""


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_inspect_names_every_layer_its_cost_and_the_reason_it_is_frozen() -> None:
    code, output = run("inspect", "headgate:cifar_resnet20")
    assert code == 0
    assert "40,551,040 MACs" in output
    assert "layer3.2.conv2" in output
    assert "is an output of the model" in output
    assert "400 gates in 12 masks; 100.0% of the MACs" in output


def test_inspect_json_adds_up() -> None:
    code, output = run("inspect", "cifar_resnet20", "--json")
    table = json.loads(output)
    assert code == 0
    assert sum(layer["macs"] for layer in table["layers"]) == table["macs"] == 40_551_040
    assert sum(layer["share"] for layer in table["layers"]) == pytest.approx(1)
    assert {layer["name"] for layer in table["layers"] if layer["reason"]} == {"linear"}


def test_inspect_takes_a_users_file_granularity_and_frozen_modules(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USER_MODEL)
    code, output = run("inspect", f"{file}:make", "--input", "3,16,16", "--granularity", "4", "--json")
    assert code == 0
    assert json.loads(output)["gates"] == 2
    code, output = run("inspect", f"{file}:make", "--input", "3,16,16", "--frozen", "0", "--json")
    assert json.loads(output)["gates"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("inspect", "cifar_resnet21"), "cifar_resnet20"),
        (("inspect", "cifar_resnet20", "--input", "3,a"), "3,224,224"),
        (("inspect", "cifar_resnet20", "--frozen", "layer9"), "layer"),
        (("inspect", "cifar_resnet20", "--granularity", "row"), "channel"),
        (("inspect", "nowhere.py:make", "--input", "3,8,8"), "nowhere.py"),
        (("inspect", "cifar_resnet20", "--input", "1,32,32"), "example input"),
    ],
)
def test_a_mistake_ends_in_one_message_and_exit_code_1(arguments: tuple[str, ...], says: str) -> None:
    code, output = run(*arguments)
    assert code == 1
    assert output.startswith("headgate:")
    assert says in output.replace("\n", " ")
    assert "Traceback" not in output


def test_demo_leaves_a_shrunk_file_and_its_onnx_twin(tmp_path: Path) -> None:
    code, output = run("demo", "--quick", "--out", str(tmp_path))
    assert code == 0, output
    assert {"small.safetensors", "small.onnx", "dense.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "small.safetensors").stat().st_size < (tmp_path / "dense.safetensors").stat().st_size
    for word in ("dense", "gated", "shrunk", "fewer MACs"):
        assert word in output


def test_version_is_that_of_the_package() -> None:
    code, output = run("--version")
    assert code == 0
    assert output.startswith("headgate 0.")


@pytest.mark.parametrize("name", ["make", "model"])
@pytest.mark.parametrize("shape", ["2,64", "1,2,64"])
def test_inspect_takes_sound_and_modules_themselves(name: str, shape: str, tmp_path: Path) -> None:
    file = tmp_path / "sound.py"
    file.write_text(
        "from torch import nn\n"
        "def make(): return nn.Sequential(nn.Conv1d(2, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3))\n"
        "model = make()\n"
    )
    code, output = run("inspect", f"{file}:{name}", "--input", shape, "--json")
    assert code == 0 and json.loads(output)["macs"] == 62 * 8 * 2 * 3 + 60 * 4 * 8 * 3

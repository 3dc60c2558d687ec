import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from headgate.models import build, cifar_resnet20, example_input, load_named, names

USER_FILE = """
from torch import nn
from neighbour import CLASSES

def net():
    import late_neighbour
    return nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES))

net.input_shape = [1, 3, 2, 2]

def silent():
    return nn.Linear(4, 2)

def wrong():
    return "no module"

def needs(width):
    return nn.Linear(width, 2)

def fails():
    raise KeyError("the user's own mistake")
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("CLASSES = 5")
    (tmp_path / "late_neighbour.py").write_text("")
    path = tmp_path / "nets.py"
    path.write_text(USER_FILE)
    yield path
    for module in ("neighbour", "late_neighbour"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize(
    ("name", "shape", "outputs"),
    [
        ("cifar_resnet20", (1, 3, 32, 32), 10),
        ("headgate:cifar_resnet20", (1, 3, 32, 32), 10),
        ("torchvision:shufflenet_v2_x0_5", (1, 3, 224, 224), 1000),
        ("torchvision:regnet_x_400mf", (1, 3, 224, 224), 1000),
        ("timm:regnetx_002", (1, 3, 224, 224), 1000),
        ("timm:test_resnet", (1, 3, 160, 160), 1000),
    ],
)
def test_a_name_gives_a_model_and_an_input_it_accepts(name, shape, outputs) -> None:
    named = load_named(name)
    assert named.name == name
    assert named.example_input.shape == shape
    with torch.no_grad():
        assert named.model.eval()(named.example_input).shape == (1, outputs)


# The ones that differ: a size of their own, a size fixed in the constructor, a keyword of their own.
@pytest.mark.parametrize(
    ("name", "size"), [("inception_v3", 299), ("googlenet", 224), ("vit_b_16", 224), ("swin_t", 224), ("maxvit_t", 224)]
)
def test_torchvision_models_accept_their_default_input(name, size) -> None:
    x = example_input(f"torchvision:{name}")
    assert x.shape == (1, 3, size, size)
    with torch.device("meta"):
        model = build(f"torchvision:{name}")
    assert model.eval()(x.to("meta")).shape == (1, 1000)


def test_every_headgate_model_can_be_named() -> None:
    assert set(names.HEADGATE_MODELS) == {
        *(f"cifar_resnet{depth}" for depth in (20, 32, 44, 56, 110)), "cifar_densenet40", "cifar_densenet100",
        "digits_resnet",
    }  # fmt: skip


def test_the_example_input_is_always_the_same_and_takes_a_shape() -> None:
    assert torch.equal(example_input("cifar_resnet20"), load_named("cifar_resnet20").example_input)
    assert example_input("cifar_resnet20", input_shape=(4, 3, 16, 16)).shape == (4, 3, 16, 16)
    assert load_named("timm:test_resnet", input_shape=[2, 3, 64, 64]).example_input.shape == (2, 3, 64, 64)


def test_a_users_file(user_file: Path) -> None:
    path_before = list(sys.path)
    named = load_named(f"{user_file}:net")
    assert named.model(named.example_input).shape == (1, 5)
    assert sys.path == path_before
    assert load_named(f"{user_file}:silent", input_shape=(1, 4)).model.in_features == 4


def test_a_shape_for_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("from torch import nn\ninput_shape = (1, 4)\nclass Net(nn.Identity):\n    pass")
    named = load_named(f"{path}:Net")
    assert named.example_input.shape == (1, 4)
    assert isinstance(named.model, nn.Identity)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar_resnet65", "did you mean cifar_resnet56"),
        ("headgate:vgg", "did you mean cifar_resnet20 or cifar_resnet32"),
        ("resnet18", "did you mean torchvision:resnet18 or timm:resnet18 or"),
        ("torchvision:resnet5O", "did you mean torchvision:resnet50"),
        ("timm:regnetx_02", "or timm:regnetx_002"),
        ("timm:", 'there is no model "timm:"'),
        ("keras:resnet50", "write headgate:NAME, torchvision:NAME, timm:NAME or path/to/file.py:FUNCTION"),
        ("missing.py:net", "there is no file missing.py"),
        ("nets.py", 'write "nets.py:function"'),
    ],
)
def test_mistaken_names(name, message) -> None:
    with pytest.raises(ValueError) as caught:
        load_named(name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("other", 'has no function "other"; it defines net, silent, wrong, needs, fails'),
        ("wrong", "must return a torch.nn.Module, but returned str"),
        ("needs", "needs(width) must be callable without arguments"),
    ],
)
def test_mistakes_in_a_users_file(user_file, function, message) -> None:
    with pytest.raises(ValueError) as caught:
        load_named(f"{user_file}:{function}", input_shape=(1, 4))
    assert message in str(caught.value)


def test_a_users_file_without_a_shape(user_file: Path) -> None:
    with pytest.raises(ValueError, match="pass input_shape="):
        load_named(f"{user_file}:silent")


def test_an_exception_of_the_users_file_passes_through(user_file: Path) -> None:
    with pytest.raises(KeyError, match="own mistake"):
        load_named(f"{user_file}:fails", input_shape=(1, 4))


@pytest.mark.parametrize("shape", [(), (3,), (1, 3, 0, 32)])
def test_a_shape_that_is_none(shape) -> None:
    with pytest.raises(ValueError, match="input_shape is batch, channels, height, width"):
        load_named("cifar_resnet20", input_shape=shape)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_missing_library_names_the_extra(monkeypatch, library) -> None:
    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == library:
            raise ModuleNotFoundError(f"No module named {library!r}")
        return real_import(name, *args, **kwargs)

    real_import = names.importlib.import_module
    monkeypatch.setattr(names.importlib, "import_module", refuse)
    with pytest.raises(ValueError, match=rf'needs {library}.*pip install "headgate\[vision\]"'):
        load_named(f"{library}:resnet18")


def test_weights(tmp_path: Path) -> None:
    saved = cifar_resnet20()
    path = tmp_path / "weights.safetensors"
    save_file(saved.state_dict(), path)
    loaded = load_named("cifar_resnet20", weights=path).model
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in saved.state_dict().items())
    assert not torch.equal(build("cifar_resnet20").conv1.weight, saved.conv1.weight)
    with pytest.raises(ValueError, match=r'another network than "cifar_resnet32".*layer1\.3\.conv1\.weight'):
        load_named("cifar_resnet32", weights=str(path))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("weights.pt", b"", "pickles can run code"),
        ("absent.safetensors", None, "no such weights file"),
        ("broken.safetensors", b"not at all", "is not a safetensors file"),
    ],
)
def test_mistaken_weights(tmp_path, file, content, message) -> None:
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_named("cifar_resnet20", weights=tmp_path / file)


def run_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


HEALTHY = """
import torch
torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


@pytest.mark.parametrize("before", ["", HEALTHY], ids=["as installed", "operators present"])
def test_torchvision_imports_in_a_fresh_process(before: str) -> None:
    code = f"""{before}
from headgate.models import import_torchvision
first = import_torchvision()
import torchvision.transforms, torchvision.datasets
print(first is torchvision and import_torchvision() is torchvision and bool(torchvision.extension))
"""
    assert run_python(code) == "True"


def test_import_of_models_is_light() -> None:
    code = "import sys, headgate.models; print(sorted({'torchvision', 'timm'} & set(sys.modules)))"
    assert run_python(code) == "[]"


def test_other_failures_of_torchvision_are_not_hidden(monkeypatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("something else")

    from headgate.models import _torchvision

    monkeypatch.setattr(_torchvision.importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match="something else"):
        _torchvision.import_torchvision()

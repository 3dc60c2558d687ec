"""One thread per test process, one seed per test, a torchvision that imports, and who runs what."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from headgate.models import import_torchvision

torch.set_num_threads(1)

# From here on a plain `import torchvision` or `import timm` works, whatever torch it was built for.
import_torchvision()


@pytest.fixture(autouse=True)
def seed_() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share whole training runs stay in one process, which makes them once, and begin first."""
    alone = []
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        together = {"report": folder, "training": str(item.path)}.get(folder)
        if together is None:
            alone.append(item)
        else:
            item.add_marker(pytest.mark.xdist_group(together))
    items.sort(key=set(alone).__contains__)

"""One thread per test process, one seed per test, and a torchvision that imports."""

import os

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

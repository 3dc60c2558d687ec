"""One thread per test process, one seed per test, a torchvision that imports, and who runs what."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from headgate.models import import_torchvision

torch.set_num_threads(1)

# From here on a plain `import torchvision` or `import timm` works, whatever torch it was built for.
import_torchvision()


@pytest.fixture(autouse=True)
def seed_() -> None:
    torch.manual_seed(0)


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """Tests that share whole training runs stay in one process, which makes them once, and begin first; of the others
    each goes to whoever is free."""

    def _split_scope(self, nodeid: str) -> str:
        _, folder, *rest = nodeid.partition("::")[0].split("/")
        if folder == "report":
            return folder
        return rest[0] if folder == "training" else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Together:
    return Together(config, log)

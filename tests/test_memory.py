import os
import subprocess
import sys

import pytest

from headgate.memory import keep_memory

# Faults of touching 64 MB a second time, after the first 64 MB were freed: 16,384 pages, if they have to be fetched anew.
TOUCH_AGAIN = """
import resource, sys
from headgate.memory import keep_memory
if "keep" in sys.argv:
    assert keep_memory()
b"x" * (64 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
b"x" * (64 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str) -> int:
    usual = {**os.environ, "GLIBC_TUNABLES": ""}
    words = [sys.executable, "-c", TOUCH_AGAIN, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=usual)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_memory_that_is_kept_is_not_fetched_from_the_system_again() -> None:
    assert faults("keep") < 1000 < faults()


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert not keep_memory()

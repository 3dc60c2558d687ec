"""Keep memory that was used once, for the next tensor.

glibc asks the system for every block above 32 MB and gives it back as soon as it is free; the system then clears each
page anew. A network that passes large activations on spends more time on that than on arithmetic. `keep_memory` lets
the process hold on to what it got. For programs, not for libraries: it is the whole process's memory that grows to its
largest need and stays there, so only the command line and the benchmarks call it. Knows nothing of torch.
"""

from __future__ import annotations

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""glibc's numbers, from malloc.h."""


def keep_memory() -> bool:
    """Whether this process keeps its memory from now on; not where the allocator is not glibc's."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))

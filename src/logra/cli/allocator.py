"""Host memory settings for training on CPUs.

glibc gives every block above 32 MiB its own mapping and returns it to the kernel when it is freed, so that each logits-sized
tensor costs a page fault per 4 KiB, every step. Keeping freed memory in the heap avoids that: a step of SmolLM2-135M took 0.68
and 0.83 of the time in two alternated pairs of runs (benchmarks/README.md). The price: the process keeps its peak.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # <malloc.h>
_GIB = 1 << 30


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for reuse; False where there is no glibc (nothing is changed then)."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2 * _GIB - 1), (_TOP_PAD, _GIB))
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings)

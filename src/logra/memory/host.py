"""How much memory is free, on the host and on an accelerator."""

from __future__ import annotations

from pathlib import Path

import torch

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
# (limit, in use) of cgroup version 2 and 1
_CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def free_memory(device: torch.device) -> int | None:
    """Bytes that a new run can have on a device; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_memory()


def free_host_memory() -> int | None:
    """The smaller of what the kernel thinks can be had without swapping, and what the control group still allows."""
    found = [size for size in (_available(), _cgroup_rest()) if size is not None]
    return min(found) if found else None


def _available() -> int | None:
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] if sizes else None


def _cgroup_rest() -> int | None:
    """Limit less use, page cache not counted as use where the group's statistics tell it."""
    for limit_file, use_file in _CGROUP_FILES:
        try:
            limit, use = (_CGROUP / limit_file).read_text().strip(), int((_CGROUP / use_file).read_text())
        except (OSError, ValueError):
            continue
        if limit == "max" or int(limit) >= 1 << 60:
            return None
        return max(0, int(limit) - use + _file_cache((_CGROUP / limit_file).parent))
    return None


def _file_cache(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.split()[0] == "inactive_file")

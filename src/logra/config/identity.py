"""What of a configuration decides a run, and how two of them differ."""

from __future__ import annotations

from typing import Any

from logra.config.schema import Config

# Sections that decide what a run computes: a checkpoint continues only under the same values.
IDENTITY = ("seed", "model", "data", "reward", "method", "trust", "rollout", "algorithm")


def identity(config: Config) -> dict[str, Any]:
    """The values that must not change between a checkpoint and its continuation."""
    dumped = config.model_dump(mode="json")
    for key in ("workers", "timeout_s", "error_limit"):
        del dumped["reward"][key]
    for key in ("batch_size", "mismatch_limit", "async", "on_update", "vllm"):
        del dumped["rollout"][key]
    del dumped["method"]["residual"]
    return {key: dumped[key] for key in IDENTITY} | {"microbatch_size": dumped["train"]["microbatch_size"]}


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """Readable differences between two dumped configurations."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = []
        for key in sorted({*before, *after}):
            path = f"{where}.{key}" if where else key
            found += differences(before.get(key), after.get(key), path)
        return found
    return [] if before == after else [f"{where} was {before!r}, is {after!r}"]

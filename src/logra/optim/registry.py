"""The optimizers by the names that recipes and benchmarks use."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from logra.optim.base import LowRankOptimizer
from logra.optim.galore import GaLoreAdamW


class Maker(Protocol):
    def __call__(self, params: Any, lr: float, **options: Any) -> LowRankOptimizer: ...


OPTIMIZERS: dict[str, Maker] = {
    "galore": GaLoreAdamW,
    "galore_8bit": partial(GaLoreAdamW, state_bits=8),
}


_OWN_RANK = {"apollo_mini", "blockllm", "muon"}


def takes_rank(name: str) -> bool:
    """Is the rank a setting of this method? (APOLLO-Mini's is 1, Muon and BlockLLM have none.)"""
    return name not in _OWN_RANK

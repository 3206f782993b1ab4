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

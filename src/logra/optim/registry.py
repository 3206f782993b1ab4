"""The optimizers by the names that recipes and benchmarks use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn

from logra.errors import ConfigError
from logra.optim.apollo import ApolloAdamW, ApolloMini
from logra.optim.base import LowRankOptimizer
from logra.optim.blockllm import BlockLLM
from logra.optim.fira import FiraAdamW
from logra.optim.galore import GaLoreAdamW
from logra.optim.groups import param_groups
from logra.optim.lora_pre import LoRAPreAdamW, LoRAPreMuon
from logra.optim.muon import Muon


class Maker(Protocol):
    def __call__(self, params: Any, lr: float, **options: Any) -> LowRankOptimizer: ...


OPTIMIZERS: dict[str, Maker] = {
    "galore": GaLoreAdamW,
    "galore_8bit": partial(GaLoreAdamW, state_bits=8),
    "apollo": ApolloAdamW,
    "apollo_mini": ApolloMini,
    "fira": FiraAdamW,
    "lora_pre": LoRAPreAdamW,
    "lora_pre_muon": LoRAPreMuon,
    "muon": Muon,
    "blockllm": BlockLLM,
}


_OWN_RANK = {"apollo_mini", "blockllm", "muon"}


def takes_rank(name: str) -> bool:
    """Is the rank a setting of this method? (APOLLO-Mini's is 1, Muon and BlockLLM have none.)"""
    return name not in _OWN_RANK


def for_trainer(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    rank: int = 128,
    targets: Sequence[str] | str | None = None,
    others: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Maker, dict[str, Any]]:
    """`optimizer_cls_and_kwargs` of Hugging Face's Trainer and of TRL's trainers, for one of `OPTIMIZERS`.

    rank, targets, others: as in `param_groups`; options: the optimizer's own. The Trainer's `learning_rate`, `weight_decay`,
    betas and `optim_args` do not reach an optimizer that is passed this way: give them here. Its scheduler and clipping do apply.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"no optimizer is called {name!r}: there are {', '.join(OPTIMIZERS)}")
    groups = param_groups(model, rank if takes_rank(name) else 1, targets, others=others)
    return OPTIMIZERS[name], {"params": groups, "lr": lr, **options}

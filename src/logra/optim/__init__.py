"""Low-rank optimizers of dense weights, each a `torch.optim.Optimizer`: see docs/optimizers.md."""

from logra.optim.apollo import ApolloAdamW, ApolloMini
from logra.optim.blockllm import BlockLLM
from logra.optim.fira import FiraAdamW
from logra.optim.galore import GaLoreAdamW
from logra.optim.groups import ParamGroups, param_groups
from logra.optim.lora_pre import LoRAPreAdamW, LoRAPreMuon
from logra.optim.muon import Muon
from logra.optim.registry import OPTIMIZERS, for_trainer
from logra.optim.velora import velora

__all__ = [
    "OPTIMIZERS", "ApolloAdamW", "ApolloMini", "BlockLLM", "FiraAdamW", "GaLoreAdamW", "LoRAPreAdamW", "LoRAPreMuon", "Muon",
    "ParamGroups", "for_trainer", "param_groups", "velora",
]  # fmt: skip

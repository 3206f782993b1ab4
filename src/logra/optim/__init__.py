"""Low-rank optimizers of dense weights, each a `torch.optim.Optimizer`: see docs/optimizers.md."""

from logra.optim.galore import GaLoreAdamW
from logra.optim.groups import ParamGroups, param_groups
from logra.optim.registry import OPTIMIZERS, for_trainer

__all__ = ["OPTIMIZERS", "GaLoreAdamW", "ParamGroups", "for_trainer", "param_groups"]

"""Low-rank optimizers of dense weights, each a `torch.optim.Optimizer`: see docs/optimizers.md."""

from logra.optim.galore import GaLoreAdamW
from logra.optim.groups import ParamGroups, param_groups

__all__ = ["GaLoreAdamW", "ParamGroups", "param_groups"]

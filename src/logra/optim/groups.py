"""Parameter groups of a model: which matrices the method's rule takes, what AdamW takes, and why."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from logra.errors import ConfigError
from logra.sketch.targets import Skipped, clean_name, select_targets

logger = logging.getLogger(__name__)


class ParamGroups(list[dict[str, Any]]):
    """Groups for any optimizer of `logra.optim`: a list of dictionaries with named parameters.

    chosen: (name, shape) of the matrices that the method's rule takes. skipped: the others, each with the reason.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], chosen: list[tuple[str, tuple[int, ...]]], skipped: list[Skipped]
    ):
        super().__init__(groups)
        self.chosen, self.skipped = chosen, skipped

    def __str__(self) -> str:
        lines = [f"{name} {shape}: chosen" for name, shape in self.chosen]
        return "\n".join([*lines, *(f"{s.name} {s.shape}: AdamW ({s.reason})" for s in self.skipped)])


def param_groups(
    model: nn.Module,
    rank: int = 128,
    targets: Sequence[str] | str | None = None,
    *,
    others: Mapping[str, Any] | None = None,
    **options: Any,
) -> ParamGroups:
    """Groups of the parameters of `model` that require a gradient.

    rank, options: of the matrices (`scale`, `update_proj_gap`, ...). targets: None for the attention and MLP projections of a
    decoder, a list of module-name suffixes, or a regular expression that matches whole module names. others: options of all
    other parameters (lr, weight_decay), which AdamW steps: embeddings, the output head, norms, biases; those of fewer than two
    dimensions get no weight decay. A tensor with two names (a tied head) is listed once, by identity.
    """
    chosen, skipped = select_targets(model, targets)
    taken = {id(t.weight) for t in chosen if t.weight.requires_grad}
    if not taken:
        raise ConfigError("no chosen matrix requires a gradient: call requires_grad_(True) on what is to be trained")
    matrices, dense, small = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = matrices if id(parameter) in taken else dense if parameter.ndim >= 2 else small
            kind.append((clean_name(name), parameter))
    rest = {"rank": None, **(others or {})}
    groups = [{"params": matrices, "rank": rank, **options}]
    if dense:
        groups.append({"params": dense, **rest})
    if small:
        groups.append({"params": small, **rest, "weight_decay": 0.0})
    logger.info("%d matrices at rank %d, %d parameters by AdamW", len(matrices), rank, len(dense) + len(small))
    return ParamGroups(groups, [(name, tuple(p.shape)) for name, p in matrices], skipped)

"""The options of `logra.attach`: defaults that depend on each other, and what does not go together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from logra.errors import ConfigError
from logra.sketch import basis as bases
from logra.sketch import optimizers, quantize
from logra.sketch.aligned import LARGEST, AlignedBases
from logra.sketch.split import RESIDUAL

FIRST, SECOND = "first_moment", "moment"  # names of the optimizer's moments in the state
NOT_NEGATIVE = ("update_ratio", "weight_decay", "max_grad_norm")


def resolve(options: dict[str, Any]) -> dict[str, Any]:
    """Fill in beta1 if it is None (0.9 for adam, else 0), then check everything; raises `ConfigError` with the fix."""
    options = dict(options)
    if options["beta1"] is None:
        options["beta1"] = 0.9 if options["optimizer"] == "adam" else 0.0
    _check_choices(options)
    _check_ranges(options)
    _check_together(options)
    return options


def keeps_basis(options: Mapping[str, Any]) -> bool:
    """Whether a coordinate of the sketch means the same at the next update, so that moments of it can be kept."""
    return options["basis"] == "aligned" or not options["refresh"]


def moment_columns(options: Mapping[str, Any]) -> dict[str, int]:
    """The optimizer's moments, by their name in the state, and how many numbers each has a row."""
    second = {"adam": options["rank"], "row_adam": 1}.get(options["optimizer"])
    moments = {} if second is None else {SECOND: second}
    return moments | ({FIRST: options["rank"]} if options["beta1"] else {})


def make_bases(
    columns: Mapping[str, int], options: Mapping[str, Any], device: torch.device
) -> AlignedBases | bases.DrawnBases:
    """The bases of targets with so many columns."""
    rank, seed = options["rank"], options["seed"]
    if options["basis"] == "aligned":
        every, explore = options["refresh_every"], options["explore"]
        return AlignedBases(columns, rank=rank, seed=seed, every=every, explore=explore, device=device)
    return bases.DrawnBases(options["basis"], columns, rank=rank, seed=seed, refresh=options["refresh"], device=device)


def _check_choices(options: Mapping[str, Any]) -> None:
    for what, allowed in (
        ("basis", bases.KINDS),
        ("optimizer", optimizers.NAMES),
        ("variant", optimizers.VARIANTS),
        ("weights", ("fp32", "split")),
        ("residual", RESIDUAL),
    ):
        if options[what] not in allowed:
            raise ConfigError(f"{what}={options[what]!r} is not known: use one of {list(allowed)}")


def _check_ranges(options: Mapping[str, Any]) -> None:
    rank, beta1, beta2, eps = (options[name] for name in ("rank", "beta1", "beta2", "eps"))
    if not isinstance(rank, int) or rank < 1 or not 0.0 <= beta2 < 1.0 or not 0.0 <= beta1 < 1.0 or not eps > 0.0:
        raise ConfigError(
            f"need an integer rank >= 1, 0 <= beta1, beta2 < 1 and eps > 0; got {rank}, {beta1}, {beta2}, {eps}"
        )
    for name in NOT_NEGATIVE:
        if not 0.0 <= options[name] < math.inf:
            raise ConfigError(f"{name} must be finite and not negative, got {options[name]}")
    every, explore = options["refresh_every"], options["explore"]
    if not isinstance(every, int) or every < 1 or not isinstance(explore, int) or not 0 <= explore < rank:
        raise ConfigError(f"need refresh_every >= 1 and 0 <= explore < rank; got {every} and {explore}")


def _check_together(options: Mapping[str, Any]) -> None:
    if options["residual"] == "cpu" and options["weights"] != "split":
        raise ConfigError("residual='cpu' needs weights='split': float32 weights have no residual")
    if options["basis"] == "aligned" and not options["refresh"]:
        raise ConfigError("an aligned basis is refreshed from the inputs: set refresh_every instead of refresh=False")
    if options["explore"] and options["basis"] != "aligned":
        raise ConfigError("explore belongs to basis='aligned'; the other bases are random altogether")
    if (options["optimizer"] == "adam" or options["beta1"]) and not keeps_basis(options):
        raise ConfigError(
            f"optimizer {options['optimizer']!r} with beta1={options['beta1']} keeps moments of single coordinates, and a "
            f"{options['basis']} basis is drawn anew after every update: use basis='aligned' (or refresh=False), or "
            "optimizer='row_adam' with beta1=0"
        )
    if options["variant"] == "paper" and options["optimizer"] == "adam":
        raise ConfigError("variant='paper' is defined for row_adam and sgd: use one of them, or variant='simplified'")
    if options["basis"] != "gaussian":
        quantize.check_exact(options["bits"], LARGEST if options["basis"] == "aligned" else 1, options["rank"])

"""Parameters that are no targets: which of them are trained densely beside the targets, and how the frozen ones are kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from logra.errors import ModelError
from logra.sketch.split import split
from logra.sketch.targets import clean_name, select_targets

KINDS = ("norms", "embeddings", "head", "biases")


def choose_dense(model: nn.Module, chosen: Sequence[str], targets: Collection[str]) -> dict[str, nn.Parameter]:
    """The parameters meant by `chosen`, by name; a tied one once, under its first name.

    chosen: kinds (`norms`, `embeddings`, `head`, `biases`) or suffixes of module names ("model.norm", "lm_head").
    Raises `ModelError` for one that matches nothing, or that is a target already.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head = getattr(get_head(), "weight", None) if get_head is not None else None
    result: dict[str, nn.Parameter] = {}
    for what in chosen:
        found = {
            clean_name(name): parameter
            for name, parameter in model.named_parameters()
            if _is_meant(what, model, name, parameter, head)
        }
        if not found:
            raise ModelError(
                f"method.dense_params: {what!r} matches no parameter; use one of {list(KINDS)}, or the end of a module's name"
            )
        taken = sorted(found.keys() & set(targets))
        if taken:
            raise ModelError(
                f"method.dense_params: {taken[0]} is a target already: leave it out there or in method.targets"
            )
        result |= found
    return result


def _is_meant(what: str, model: nn.Module, name: str, parameter: nn.Parameter, head: object) -> bool:
    module_name, _, leaf = name.rpartition(".")
    if what == "head":
        return parameter is head
    if what == "biases":
        return leaf == "bias" and "norm" not in type(model.get_submodule(module_name)).__name__.lower()
    if what == "norms":
        return "norm" in type(model.get_submodule(module_name)).__name__.lower()
    if what == "embeddings":
        return isinstance(model.get_submodule(module_name), nn.Embedding)
    path = clean_name(module_name)
    return path == what or path.endswith("." + what)


def compact_frozen(model: nn.Module, moving: Collection[str]) -> bool:
    """Store the parameters that never move in bfloat16 if that loses nothing at all: then, all of them; else none.

    Published models are bfloat16, so this undoes the widening that a float32 export or load did; a resumed run decides
    as the first one, since only values count. Returns whether it was done.
    """
    frozen = [p for n, p in model.named_parameters() if clean_name(n) not in moving and p.dtype == torch.float32]
    if not all(torch.equal(p.detach().to(torch.bfloat16).float(), p.detach()) for p in frozen):
        return False
    for parameter in frozen:
        parameter.data = parameter.data.to(torch.bfloat16)
    return True


def store_split(model: nn.Module, targets: Sequence[str] | str | None, dense_params: Sequence[str]) -> None:
    """Store a model that will not move as one that is trained with split weights is stored: the same forward pass."""
    chosen = select_targets(model, targets)[0]
    dense = choose_dense(model, dense_params, [t.name for t in chosen])
    compact_frozen(model, {*(t.name for t in chosen), *dense})
    for target in chosen:
        if target.weight.dtype == torch.float32:
            target.weight.data = split(target.weight.detach())[0]
    for parameter in dense.values():
        parameter.data = parameter.data.float()

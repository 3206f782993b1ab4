"""FSDP2: a model's parameters by rows over the ranks (torch.distributed.fsdp.fully_shard), and whole again for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from logra.errors import ModelError
from logra.head import unwrapped


def shard_model(
    model: nn.Module, mesh: DeviceMesh, *, gather_dtype: torch.dtype | None = None, offload: bool = False
) -> None:
    """Shard in place: each repeated layer is gathered for its own passes, the rest (embedding, last norm, head) with the model.

    mesh: one dimension that shards, or two: (replicate, shard). gather_dtype: in which parameters travel and compute; None: their
    own. offload: shards live in host memory. Gradients are summed over ranks, not averaged: losses have one global denominator.
    Raises `ModelError` for a model without repeated layers.
    """
    layers = repeated_layers(model)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=gather_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _enter_by_decoder(model)


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The members of every outermost `ModuleList`: the decoder's layers."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                visit(child)

    visit(model)
    if not found:
        raise ModelError(f"{type(model).__name__} has no list of layers to shard one by one: use one rank")
    return found


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters are gathered together, the model itself first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _enter_by_decoder(model: Any) -> None:
    """A method that gives the decoder's states in a pass that FSDP sees begin, for who needs no logits (`logra.head`)."""
    inner = unwrapped(model)
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else None
    if decoder is None or decoder is inner:
        return

    def hidden_states(**inputs: Any) -> Tensor:
        return decoder(**inputs, use_cache=False).last_hidden_state

    model.hidden_states = hidden_states
    register_fsdp_forward_method(model, "hidden_states")


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within it every rank holds all parameters whole, and passes without gradient need no other rank: for generation."""
    modules = sharded_modules(model)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(module is not model, recurse=False)

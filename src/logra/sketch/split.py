"""Split weights: the 32 bits of a float32 as a bfloat16 `hi`, which the forward pass uses, and an int16 residual `lo`.

    bits = (hi << 16) + lo,    hi = (bits + 0x8000) >> 16

Exact and reversible for every bit pattern (design 2.4). `hi` is the float32 rounded to bfloat16, halves away from zero, so
it differs from torch's cast (halves to even) on exact ties only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from logra.errors import ModelError, UpdateError
from logra.sketch.shards import local, sharding
from logra.sketch.targets import Target

RESIDUAL = ("device", "cpu")
RECAST = "the model was cast after attaching; cast it before, and attach then"


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """(hi bfloat16, lo int16) of a float32 tensor of any shape."""
    if value.dtype != torch.float32:
        raise UpdateError(f"only float32 values can be split, these are {value.dtype}")
    bits = value.view(torch.int32)
    hi = ((bits + 0x8000) >> 16).to(torch.int16)  # the sum wraps for a NaN with all bits set, and so does merge
    lo = (bits - (hi.to(torch.int32) << 16)).to(torch.int16)
    return hi.view(torch.bfloat16), lo


def merge(hi: Tensor, lo: Tensor) -> Tensor:
    """The float32 tensor that `split` took apart; `UpdateError` for other types, whose bits would mean something else."""
    if hi.dtype != torch.bfloat16 or lo.dtype != torch.int16:
        raise UpdateError(f"split weights are bfloat16 and int16, these are {hi.dtype} and {lo.dtype}: {RECAST}")
    bits = (hi.view(torch.int16).to(torch.int32) << 16) + lo.to(hi.device, torch.int32)
    return bits.view(torch.float32)


def bind(value: Tensor, residual: Tensor) -> None:
    """Note on the residual which state of its upper half it belongs to (torch counts in-place changes).

    For a whole parameter only: slices of one share its count.
    """
    residual.belongs_to = value._version  # type: ignore[attr-defined]


def bind_again(value: Tensor, residual: Tensor) -> None:
    """After a change of both; residuals that were never bound stay so."""
    if hasattr(residual, "belongs_to"):
        bind(value, residual)


def check_bound(name: str, value: Tensor, residual: Tensor) -> None:
    """Raise `UpdateError` if the upper half was cast or overwritten since: the residual then belongs to other weights."""
    if value.dtype != torch.bfloat16:
        raise UpdateError(f"{name} was split and is now {value.dtype}: {RECAST}")
    if getattr(residual, "belongs_to", value._version) != value._version:
        raise UpdateError(
            f"{name} was overwritten while its weights are split, so its residual belongs to other values (load_state_dict "
            "after attaching?): load weights first and attach then, or set them with Sketcher.load_masters"
        )


def check_splittable(targets: Sequence[Target]) -> None:
    """Raise `ModelError` unless every target is float32, or bfloat16, which has a residual of zero."""
    for target in targets:
        if target.weight.dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(
                f"{target.name} is stored as {target.weight.dtype}: weights='split' takes float32 or bfloat16. Load the "
                "model with dtype=torch.float32"
            )


def split_targets(
    targets: Sequence[Target], residual: str, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Replace each target's weight by its `hi` in place; the residuals (out, in) int16 by name.

    One target at a time, so no second copy of the model exists. residual: "device" keeps them beside the weights, "cpu" in
    host memory (pinned where there is CUDA). device: where `hi` goes; None: where the weight is.
    """
    residuals = {}
    for target in targets:
        weight = target.weight
        if sharding(target.name, weight) is not None:
            residuals[target.name] = _sharded_residual(target, residual)
            continue
        if weight.dtype == torch.bfloat16:
            hi, lo = weight.detach(), torch.zeros(weight.shape, dtype=torch.int16, device=weight.device)
        else:
            hi, lo = split(weight.detach())
        target.weight.data = hi if device is None else hi.to(device)
        lo = lo.to(target.weight.device) if residual == "device" else _to_host(lo, target.weight.device)
        residuals[target.name] = lo.t() if target.transposed else lo
        bind(target.weight, residuals[target.name])
    return residuals


def _sharded_residual(target: Target, residual: str) -> Tensor:
    """Of the rows here: FSDP knows the parameter's type, which must be bfloat16 already."""
    weight = local(target.weight).detach()
    if weight.dtype != torch.bfloat16:
        raise ModelError(
            f"{target.name} is sharded as {weight.dtype}: store targets in bfloat16 before fully_shard, attach with "
            "weights='split', then set their float32 values with Sketcher.load_masters"
        )
    lo = torch.zeros(weight.shape, dtype=torch.int16, device=weight.device)
    lo = lo if residual == "device" else _to_host(lo, weight.device)
    bind(weight, lo)
    return lo


def _to_host(lo: Tensor, device: torch.device) -> Tensor:
    host = lo.cpu()
    return host.pin_memory() if device.type == "cuda" else host


def merge_targets(targets: Sequence[Target], residuals: dict[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """Undo `split_targets`: weights that were float32 are so again, exactly; those that were bfloat16 keep their upper half."""
    for target in targets:
        check_bound(target.name, target.weight, residuals[target.name])
    for target in targets:
        lo = residuals.pop(target.name)
        if dtypes[target.name] == torch.float32:
            target.weight.data = merge(target.weight.detach(), lo.t() if target.transposed else lo)

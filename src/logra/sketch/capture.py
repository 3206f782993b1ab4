"""Capture: S <- S + H^T (X A^T) during backward, so that the weight gradient G = H^T X is never formed (methods.md 1.1).

A forward hook projects the layer's input and passes the output through an autograd function whose forward is the identity.
Only the projection Xp (N x r) is saved; the layer input is not needed, but where an aligned basis is due for a refresh. With
every weight frozen nothing would start a backward pass, so each tap also takes an `anchor`, a scalar that requires grad (and
never gets one); below the first target no gradient is computed. Under non-reentrant activation checkpointing the hook runs
again in the recomputation, and as the accumulation happens in backward only, each microbatch counts once.

Shapes: N tokens (all leading dimensions flattened), d out features, k in features, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from logra.errors import ModelError

Scale = float | Tensor  # of the unscaled basis: one number, or (r,) powers of two
Observer = Callable[[Tensor, Tensor, Tensor], None]  # takes x (N, k), the output gradient (N, d), x A^T (N, r)


class Tap(torch.autograd.Function):
    """Identity on the layer output; its backward adds scale * H^T Xp to a (d, r) float32 buffer.

    observe, x: called in backward with the layer's input, its output gradient and Xp. In backward, so that a forward pass
    that is made twice (activation checkpointing) or never differentiated counts as it should.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        anchor: Tensor,
        projected_Nr: Tensor,
        x_Nk: Tensor | None,
        sketch_dr: Tensor,
        scale: float,
        note: Callable[[], None],
        observe: Observer | None,
    ):
        ctx.save_for_backward(projected_Nr, x_Nk)
        ctx.sketch, ctx.scale, ctx.note, ctx.observe = sketch_dr, scale, note, observe
        return output.view_as(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor):
        projected_Nr, x_Nk = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):  # `backward()` may be called under one
            accumulate(ctx.sketch, grad, projected_Nr, ctx.scale)
            if ctx.observe is not None:
                ctx.observe(x_Nk, grad.reshape(-1, grad.shape[-1]), projected_Nr)
        ctx.note()
        return grad, None, None, None, None, None, None, None


def accumulate(sketch_dr: Tensor, grad: Tensor, projected_Nr: Tensor, scale: float) -> None:
    """sketch += scale * grad^T projected, accumulated in float32 whatever the compute dtype."""
    grad_Nd = grad.reshape(-1, grad.shape[-1])
    if grad_Nd.dtype == torch.float32:
        if not grad_Nd.is_cuda and grad_Nd.shape[1] > 12 * projected_Nr.shape[1]:
            # the transposed product reads a wide gradient along its rows: a quarter faster on CPUs
            sketch_dr.add_(torch.mm(projected_Nr.t().contiguous(), grad_Nd).t(), alpha=scale)
        else:
            sketch_dr.addmm_(grad_Nd.t(), projected_Nr, alpha=scale)
    elif grad_Nd.is_cuda:
        product = torch.mm(grad_Nd.t(), projected_Nr, out_dtype=torch.float32)
        sketch_dr.add_(product, alpha=scale)
    else:
        sketch_dr.addmm_(grad_Nd.t().float(), projected_Nr.float(), alpha=scale)


def tap_layer(
    module: nn.Module,
    anchor: Tensor,
    basis: Callable[[], Tensor],
    sketch: Callable[[], Tensor],
    scale: Callable[[], Scale],
    note: Callable[[], None],
    observer: Callable[[], Observer | None] = lambda: None,
) -> RemovableHandle:
    """Hook one layer. `basis()` gives the unscaled (r, k) block in force, `sketch()` its (d, r) buffer.

    observer(): who takes in inputs and output gradients at this update, if anyone; the input is kept for backward then (so
    the model must not change it in place afterwards).
    """

    def hook(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        if owner is not module or not torch.is_grad_enabled():  # a deep copy of the model shares its hooks
            return None
        x = args[0] if args else kwargs["input"]
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            x_Nk = x.detach().reshape(-1, x.shape[-1]).to(output.dtype)
            projected_Nr = functional.linear(x_Nk, basis().to(output.dtype))
            factor = scale()
            if not isinstance(factor, int | float):
                projected_Nr *= factor.to(output.dtype)  # powers of two: exact
                factor = 1.0
        observe = observer()
        kept = None if observe is None else x_Nk
        return Tap.apply(output, anchor, projected_Nr, kept, sketch(), factor, note, observe)

    hook.tapped = module  # type: ignore[attr-defined]
    return module.register_forward_hook(hook, with_kwargs=True)


def is_tapped(module: nn.Module) -> bool:
    """Does a sketcher already listen to this layer?"""
    return any(getattr(hook, "tapped", None) is module for hook in module._forward_hooks.values())


def guard_dtype(module: nn.Module, name: str) -> RemovableHandle:
    """Split weights compute in bfloat16: `ModelError` with the fix, where torch would only name two types."""

    def hook(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        weight = owner.weight
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ModelError(
                f"{name} is split, its forward pass is in {weight.dtype}, but its input is {x.dtype}: run the model (and "
                "predict_kl, measure_kl) under torch.autocast(device, torch.bfloat16), or load all of it in bfloat16"
            )

    return module.register_forward_pre_hook(hook, with_kwargs=True)

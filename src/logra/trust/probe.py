"""Looking at a step before it is taken: the policy along a proposal, without touching a weight.

Everything goes through hooks on the targets. `tangents` adds the proposal's own tangent -(x A^T) U^T, in forward mode, to the
one flowing in from earlier layers; `branch` adds the finite low-rank branch y + eps (x A^T) U^T. Neither adds to and subtracts
from W, which would drift.

Legend: B rows, T tokens, H hidden size, V vocabulary, N contexts (positions that predict a generated token), r rank.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from logra.errors import UserError
from logra.head import LEAST, Head, in_compute_dtype, plain_head, quiet
from logra.sketch.capture import Scale
from logra.sketch.sketcher import Proposal, Sketcher

Batch = Mapping[str, Tensor]
_CHUNK_BYTES = 32 << 20  # of float64 logits at once
_TOKENS = 4096  # of a group of rows, or one row
_QUERIES = 256  # of a block of attention


@dataclass(frozen=True)
class Contexts:
    """What predicts the generated tokens: states (N, H) before a plain output head, or logits (N, V) where there is none."""

    states: Tensor
    head: Head | None

    def __len__(self) -> int:
        return len(self.states)

    def logits(self, *directions: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Chunks of (logits (n, V), and what moving the states along each direction (N, H) does to them)."""
        parts = (self.states, *directions)
        if self.head is None:
            yield from zip(*(part.split(LEAST) for part in parts), strict=True)
            return
        weight, bias = in_compute_dtype(self.head.linear.weight, self.head.linear.bias, self.states)
        size = max(1, _CHUNK_BYTES // (8 * len(weight)))
        for first, *rest in zip(*(part.to(weight.dtype).split(size) for part in parts), strict=True):
            with torch.autocast(weight.device.type, enabled=False):  # left before the yield: others may run in between
                moved = [functional.linear(part, weight) for part in rest]
                found = functional.linear(first, weight, bias)
            yield found, *moved


def contexts(model: nn.Module, batch: Batch) -> Contexts:
    """The positions that predict a generated token.

    batch: `input_ids` (B, T); `attention_mask` (B, T), optional; `completion_mask` (B, T), true at generated tokens,
    default: every attended token but the first of a row. Position ids are made from the attention mask, as models with
    learned positions need under left padding.
    """
    if "input_ids" not in batch:
        raise UserError(f"the probe batch needs input_ids (B, T); it holds {sorted(batch)}")
    ids = batch["input_ids"]
    attention = batch.get("attention_mask")
    attention = torch.ones_like(ids) if attention is None else attention.long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    generated = batch.get("completion_mask")
    if generated is None:
        generated = (attention > 0) & (positions > 0)
    chosen = generated.bool()[:, 1:]  # position t predicts token t + 1
    if not bool(chosen.any()):
        raise UserError("the probe batch has no generated token: pass rollouts with a non-empty completion")
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": attention, "position_ids": positions}
    head = plain_head(model)
    if head is not None:
        return Contexts(head.hidden(**inputs)[:, :-1][chosen], head)
    first = int(chosen.any(0).float().argmax())
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = ids.shape[1] - first
    logits = model(**inputs, use_cache=False).logits
    return Contexts(logits[:, -(ids.shape[1] - first) :][:, :-1][chosen[:, first:]], None)


def groups(batch: Batch) -> Iterator[Batch]:
    """The rows, together as far as they have `_TOKENS` tokens: what is alive at once does not grow with the batch.

    Rows without a generated token are left out, unless no row has one (`contexts` says so then).
    """
    count, length = batch["input_ids"].shape if "input_ids" in batch else (1, 1)
    size, generated = max(1, _TOKENS // max(1, length)), batch.get("completion_mask")
    if size >= count or generated is None or not bool(generated[:, 1:].any()):
        generated = None
    for start in range(0, count, size):
        rows = slice(start, start + size)
        if generated is None or bool(generated[rows, 1:].any()):
            yield {name: value[rows] for name, value in batch.items()}


class BlockAttention(TorchFunctionMode):
    """Within it `scaled_dot_product_attention` is computed a block of queries at a time, by operations that can be
    differentiated forwards: no tensor of length x length exists."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(Q K^T scale + mask) V by blocks of queries; scores in float32. Arguments as of torch's function, without dropout.

    A query that may look at nothing (padding) gets a mean of all values, where torch gives 0: finite, and looked at by none.
    """
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    columns, parts = torch.arange(key.shape[-2], device=query.device), []
    for start in range(0, query.shape[-2], _QUERIES):
        rows = slice(start, min(start + _QUERIES, query.shape[-2]))
        scores = (query[..., rows, :] @ key.transpose(-1, -2)).float() * scale
        mask = columns <= columns[rows, None] if is_causal else None
        if attn_mask is not None:
            mask = attn_mask[..., rows, :] if attn_mask.shape[-2] > 1 else attn_mask
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        elif mask is not None:
            scores = scores + mask
        parts.append(torch.softmax(scores, -1).to(value.dtype) @ value)
    return torch.cat(parts, dim=-2)


@contextlib.contextmanager
def _hooks(sketcher: Sketcher, make: Callable[[Tensor, Scale, Tensor], Any], proposal: Proposal) -> Iterator[None]:
    """Hook every target with `make(unscaled basis (r, k), its scale, factor (d, r) float32)`."""
    handles = []
    try:
        for target in sketcher.targets:
            name = target.name
            hook = make(sketcher.basis_block(name), sketcher.basis_scale(name), proposal.factor(name))
            handles.append(target.module.register_forward_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _low_rank(x: Tensor, basis_rk: Tensor, scale: Scale, factor_dr: Tensor) -> Tensor:
    """(x A^T) U^T in float32."""
    with torch.autocast(x.device.type, enabled=False):
        projected = functional.linear(x.float(), basis_rk.float()) * scale
        return functional.linear(projected, factor_dr)


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["input"]


@contextlib.contextmanager
def branch(sketcher: Sketcher, proposal: Proposal, eps: float) -> Iterator[None]:
    """Within it the model computes with every target moved by eps times the proposal."""

    def make(basis: Tensor, scale: Scale, factor: Tensor) -> Any:
        def hook(_m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            return output + (_low_rank(_input(args, kwargs), basis, scale, factor) * eps).to(output.dtype)

        return hook

    with _hooks(sketcher, make, proposal):
        yield


@contextlib.contextmanager
def _tangents(sketcher: Sketcher, proposal: Proposal) -> Iterator[None]:
    def make(basis: Tensor, scale: Scale, factor: Tensor) -> Any:
        def hook(_m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            x = forward_ad.unpack_dual(_input(args, kwargs)).primal
            own = _low_rank(x, basis, scale, factor).to(output.dtype)
            primal, tangent = forward_ad.unpack_dual(output)
            return forward_ad.make_dual(primal, own if tangent is None else tangent + own)

        return hook

    with _hooks(sketcher, make, proposal):
        yield


def forward_derivative(
    model: nn.Module, sketcher: Sketcher, proposal: Proposal, batch: Batch
) -> tuple[Contexts, Tensor]:
    """(contexts, the derivative of their states along the proposal, of their shape), by forward-mode differentiation.

    Attention is eager or torch's `scaled_dot_product_attention` (whose fused kernels have no forward-mode rule: it is computed
    in blocks here); other kernels raise.
    """
    plain_head(model)  # it is looked at once, before anything is hooked
    with quiet(model), BlockAttention(), forward_ad.dual_level(), _tangents(sketcher, proposal):
        found = contexts(model, batch)
        states, tangent = forward_ad.unpack_dual(found.states)
        return Contexts(states, found.head), torch.zeros_like(states) if tangent is None else tangent


def finite_difference(
    model: nn.Module, sketcher: Sketcher, proposal: Proposal, batch: Batch, relative: float = 1e-3
) -> tuple[Contexts, Tensor]:
    """The same by central differences, with a step of `relative` times the weights' norm (two more forward passes)."""
    weight_square = sketcher.weight_square()
    step_square = sum(float((proposal.factor(n) @ sketcher.basis(n)).norm()) ** 2 for n in sketcher.names)
    if step_square == 0.0:
        raise UserError("the proposal is zero: there is nothing to differentiate along")
    eps = relative * (weight_square / step_square) ** 0.5
    with quiet(model):
        found = contexts(model, batch)
        with branch(sketcher, proposal, eps):
            above = contexts(model, batch).states
        with branch(sketcher, proposal, -eps):
            below = contexts(model, batch).states
    return found, (above.float() - below.float()) / (2.0 * eps)

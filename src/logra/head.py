"""The output head, a few tokens at a time: no tensor of tokens x vocabulary ever exists.

The derivative of a token's log-prob with respect to its hidden state is known when its logits are,

    d log p(id) / d h = (W[id] - softmax(z) W) / T,      z = W h + b,

and what comes from above is one number a token. So the forward pass keeps those rows, (N, H), and the backward pass is one
product by a number: two matrix products a chunk in all, as many as with whole logits, and nothing is computed twice. Only if
the head itself is trained are its logits made again in the backward pass.

Legend: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

logger = logging.getLogger(__name__)

# Bytes of float32 logits at once; about two such buffers exist. An accelerator needs more tokens to be busy.
CHUNK_BYTES = {"cpu": 64 << 20}
CHUNK_BYTES_ACCELERATOR = 256 << 20
LEAST = 16  # tokens


def chunk_size(vocabulary: int, device: torch.device, chunk: int | None = None) -> int:
    """Tokens whose logits exist at once. chunk: None: as many as fit `CHUNK_BYTES`; 0: all."""
    if chunk is not None:
        return chunk or (1 << 62)
    return max(LEAST, CHUNK_BYTES.get(device.type, CHUNK_BYTES_ACCELERATOR) // (4 * vocabulary))


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ids_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probs (N,) of the ids, entropies (N,) without gradient), nats, float32 (float64 stays), of softmax(z / temperature).

    Products are in the type the model would use (autocast's, or the hidden states'), the rest in float32. chunk: see
    `chunk_size`. Differentiable with respect to hidden states, weight and bias, once.
    """
    size = chunk_size(weight_VH.shape[0], hidden_NH.device, chunk)
    return _TokenLogprobs.apply(hidden_NH, weight_VH, bias_V, ids_N, temperature, size)  # type: ignore[return-value]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, temperature: float, size: int
    ) -> tuple[Tensor, Tensor]:
        w, b = in_compute_dtype(weight, bias, hidden)
        out_dtype = torch.promote_types(w.dtype, torch.float32)
        logp, entropy, normaliser = (hidden.new_empty(len(hidden), dtype=out_dtype) for _ in range(3))
        wants_hidden, *wants_head = ctx.needs_input_grad[:3]
        jacobian = torch.empty_like(hidden) if wants_hidden else None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _slices(len(hidden), size):
                z = _logits(hidden[rows].to(w.dtype), w, b, temperature, out_dtype)
                top = z.amax(-1, keepdim=True)
                chosen = z.gather(-1, ids[rows, None]) - top
                p = z.sub_(top).exp()  # not normalised: its sum divides what is made of it
                total = p.sum(-1, keepdim=True)
                log_total = total.log()
                logp[rows] = (chosen - log_total).squeeze(-1)
                normaliser[rows] = (top + log_total).squeeze(-1)
                entropy[rows] = (log_total - z.mul_(p).sum(-1, keepdim=True) / total).squeeze(-1)
                del z
                if jacobian is not None:
                    mean = torch.mm(p.to(w.dtype), w).to(out_dtype).div_(total)
                    jacobian[rows] = (w[ids[rows]].to(out_dtype) - mean).div_(temperature)
                del p
        ctx.temperature, ctx.size = temperature, size
        ctx.save_for_backward(jacobian, *((hidden, weight, bias, ids, normaliser) if any(wants_head) else ()))
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any):
        jacobian, *head = ctx.saved_tensors
        hidden_grad = None if jacobian is None else (jacobian * grad[:, None]).to(jacobian.dtype)
        weight_grad, bias_grad = _head_gradients(ctx, grad, *head) if head else (None, None)
        return hidden_grad, weight_grad, bias_grad, None, None, None


def _head_gradients(
    ctx: Any, grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, normaliser: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Of weight and bias, each None if it is not trained; logits are made again."""
    w, b = in_compute_dtype(weight, bias, hidden)
    weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
    bias_grad = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in _slices(len(hidden), ctx.size):
            h = hidden[rows].to(w.dtype)
            slope = _logits(h, w, b, ctx.temperature, normaliser.dtype).sub_(normaliser[rows, None]).exp_().neg_()
            slope.scatter_add_(-1, ids[rows, None], torch.ones_like(slope[:, :1]))
            slope.mul_(grad[rows, None] / ctx.temperature)
            if weight_grad is not None and weight_grad.dtype == w.dtype:
                weight_grad.addmm_(slope.to(w.dtype).t(), h)
            elif weight_grad is not None:
                weight_grad.add_(torch.mm(slope.to(w.dtype).t(), h))
            if bias_grad is not None:
                bias_grad.add_(slope.sum(0))
    return weight_grad, bias_grad


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor:
    z = functional.linear(h, weight, bias).to(dtype)
    return z if temperature == 1.0 else z.div_(temperature)


def in_compute_dtype(weight: Tensor, bias: Tensor | None, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """The head in the type a linear layer would compute in, cast once instead of once a chunk."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    if hidden.dtype == torch.float64:
        dtype = torch.float64  # which autocast leaves alone
    return weight.to(dtype), None if bias is None else bias.to(dtype)


@contextlib.contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module gets its own mode back: some may be in eval in a training model."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in flags:
            module.training = flag


def let_go(model: nn.Module) -> None:
    """Drop the whole parameters that FSDP's root keeps after a forward pass, for a backward pass that will not come."""
    reshard = getattr(model, "reshard", None)
    if reshard is not None:
        reshard()


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


# -- finding it ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A causal language model taken apart: logits = linear(decoder(ids).last_hidden_state), and nothing else.

    hidden_states: calls the decoder by way of the model, where FSDP must see the pass begin (`logra.rl.sharding`).
    """

    decoder: nn.Module
    linear: nn.Linear
    hidden_states: Callable[..., Tensor] | None = None

    def hidden(self, **inputs: Any) -> Tensor:
        """Last hidden states (B, T, H)."""
        if self.hidden_states is not None:
            return self.hidden_states(**inputs)
        return self.decoder(**inputs, use_cache=False).last_hidden_state


_verified: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
_noted: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def plain_head(model: nn.Module) -> Head | None:
    """The model taken apart, or None where that would not give its logits, which is logged once a model.

    So it is with a head that is hooked (a sketcher's tap), wrapped (a LoRA layer) or no linear layer, and where the model
    does more to its inputs or logits (learned prompts, soft capping, scaling). The latter is seen by running two tokens
    through it, once a model.
    """
    head = _take_apart(model)
    if head is None:
        return _none(model, "its output head is not a linear layer of its own, or something listens to it")
    if model not in _verified:
        seen = _is_all(model, head)
        if seen is None:
            return head  # fake tensors: there is nothing to compare
        _verified[model] = seen
    return head if _verified[model] else _none(model, "there is more to its logits than decoder and linear head")


def _none(model: nn.Module, reason: str) -> None:
    if model not in _noted:
        _noted.add(model)
        logger.warning("the logits of %s are made whole, which takes more memory: %s", type(model).__name__, reason)


def unwrapped(model: nn.Module) -> Any:
    """The model inside what peft wraps around it; a model that is not wrapped itself."""
    unwrap: Any = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def _take_apart(model: nn.Module) -> Head | None:
    inner = unwrapped(model)
    if not hasattr(inner, "get_decoder") or not hasattr(inner, "get_output_embeddings"):
        return None
    decoder, linear = inner.get_decoder(), inner.get_output_embeddings()
    if decoder is None or decoder is inner or type(linear) is not nn.Linear or "forward" in vars(linear):
        return None
    hooks = [linear._backward_hooks, linear._backward_pre_hooks]
    for module in (linear, model, inner):  # none of them is called
        hooks += [module._forward_hooks, module._forward_pre_hooks]
    foreign = [hook for some in hooks for hook in some.values() if not _is_fsdp(hook)]
    return None if foreign else Head(decoder, linear, getattr(model, "hidden_states", None))


def _is_fsdp(hook: Any) -> bool:
    """Of FSDP2, which only gathers parameters: what it hooks is called by way of `Head.hidden_states`."""
    return type(getattr(hook, "__self__", None)).__name__ == "FSDPState"


def _is_all(model: nn.Module, head: Head) -> bool | None:
    """Do decoder and head give the model's logits? None on fake tensors.

    Within the model's own pass it must be so exactly. The decoder called by itself must come close to that: not every
    accelerator's kernel gives the same twice.
    """
    device = head.linear.weight.device
    if isinstance(head.linear.weight, FakeTensor) or isinstance(head.linear.weight.data, FakeTensor):
        return None
    ids = torch.arange(2, device=device)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids}
    seen: list[Tensor] = []
    handles: list[RemovableHandle] = []
    try:
        with quiet(model):
            alone = head.hidden(**inputs)
            handles.append(head.decoder.register_forward_hook(lambda m, a, out: seen.append(out.last_hidden_state)))
            handles.append(head.linear.register_forward_hook(lambda m, a, out: seen.extend((a[0], out))))
            logits = model(**inputs, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
        let_go(model)
    if len(seen) != 3 or not (torch.equal(seen[0], seen[1]) and torch.equal(seen[2], logits)):
        return False
    return alone.shape == seen[0].shape and bool((alone - seen[0]).abs().max() <= 0.01 * alone.abs().max())

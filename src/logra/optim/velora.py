"""VeLoRA: a linear layer keeps a few numbers a token for its weight gradient (Miles et al., arXiv 2405.17991, NeurIPS 2024).

    forward:   y = x W^T + b;   of each group of d features of x only z = x_sub . v is kept, v (d,) a unit vector for all groups
    backward:  dx = g W and db = sum of g, exact;   dW = scale g^T (z (x) v), as if x were its projection on v in each group

Shapes: N tokens (all leading dimensions), P out and D in features, M groups of d = ceil(D / M) features, x (N, D), g (N, P),
z (N, M). The gradient of W is biased: it is exact for M = D only, shorter otherwise, and blind to what of x is orthogonal to v.

What it saves: M / D of a layer's input, if nothing else keeps that input. In a decoder the input of `down_proj` is kept by
nothing else; that of `v_proj` also by `q_proj` and `k_proj`, unless they are compressed or frozen. With activation
checkpointing inputs are not kept in the first place: refused.

Where we leave the published codes (official repository; peft 0.21, `VeloraConfig`):
1. dW = scale (g^T z) (x) v: the same sums in another order, d times fewer, and x is never rebuilt. Sums in float32.
2. D need not be a multiple of M: the last group is filled up with zeros (peft does; the official code stops).
3. `init="batch_average"`: v is the mean sub-token of each forward pass. "batch_average_once": of the first pass, then fixed, so
   that all of training hangs on one batch. "random": drawn once. A mean that is zero gives the diagonal, as in peft, and under
   "once" one that is zero or not finite is not kept; peft keeps both for good. (The official "ema" and "svd" are not offered.)
4. It works wherever gradients are made, in eval mode too; peft compresses in train mode only.
5. z has the dtype the layer computes in (official: float16, which overflows); v is float32.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from logra import hashing
from logra.errors import CheckpointError, ConfigError
from logra.sketch.targets import Target, select_targets

logger = logging.getLogger(__name__)

INITS = ("batch_average", "batch_average_once", "random")


# -- the mathematics ------------------------------------------------------------------------------------------------------


def group_size(in_features: int, num_groups: int) -> int:
    """d, features in a group."""
    return -(-in_features // num_groups)


def grouped(x_ND: Tensor, size: int) -> Tensor:
    """(N, M, d), with zeros after the last feature."""
    missing = -x_ND.shape[1] % size
    return (functional.pad(x_ND, (0, missing)) if missing else x_ND).unflatten(1, (-1, size))


def unit(vector_d: Tensor) -> Tensor:
    """Of length one, float32 (or float64); the diagonal if it is zero."""
    vector_d = vector_d.to(torch.promote_types(vector_d.dtype, torch.float32))
    norm = torch.linalg.vector_norm(vector_d)
    return torch.where(norm > 0, vector_d, torch.ones_like(vector_d)) / torch.where(
        norm > 0, norm, len(vector_d) ** 0.5
    )


def mean_direction(x_ND: Tensor, size: int) -> Tensor:
    """The mean sub-token, (d,), not normalised; float32 (or float64)."""
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    total = x_ND.sum(0, dtype=dtype)
    return grouped(total[None], size)[0].mean(0) / max(len(x_ND), 1)


def compress(x_ND: Tensor, v_d: Tensor) -> Tensor:
    """z (N, M), in x's dtype."""
    return grouped(x_ND, len(v_d)) @ v_d.to(x_ND.dtype)


def weight_gradient(g_NP: Tensor, z_NM: Tensor, v_d: Tensor, in_features: int, scale: float) -> Tensor:
    """dW (P, D), float32 (or float64)."""
    if g_NP.dtype in (torch.float32, torch.float64):
        product = g_NP.t() @ z_NM.to(g_NP.dtype)
    elif g_NP.is_cuda:
        product = torch.mm(g_NP.t(), z_NM.to(g_NP.dtype), out_dtype=torch.float32)
    else:
        product = g_NP.t().float() @ z_NM.float()
    return (product[:, :, None] * (scale * v_d.to(product.dtype))).flatten(1)[:, :in_features]


# -- one layer ------------------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer) -> Tensor:
        output = layer.plain(x)
        with torch.autocast(x.device.type, enabled=False):
            x_ND = x.reshape(-1, x.shape[-1]).to(output.dtype)
            v_d = layer.direction(x_ND)
            ctx.save_for_backward(compress(x_ND, v_d), weight, v_d)
        ctx.layer, ctx.shape, ctx.dtype = layer, x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor):
        z_NM, weight, v_d = ctx.saved_tensors
        transposed = ctx.layer.target.transposed
        dx = dw = db = None
        with torch.autocast(grad.device.type, enabled=False):  # `backward()` may be called under one
            g_NP = grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[0]:
                same = weight.to(grad.dtype)
                dx = (g_NP @ (same.t() if transposed else same)).view(ctx.shape).to(ctx.dtype)
            if ctx.needs_input_grad[1]:
                dw = weight_gradient(g_NP, z_NM, v_d, ctx.shape[-1], ctx.layer.scale)
                dw = (dw.t() if transposed else dw).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                db = g_NP.sum(0).to(ctx.bias_dtype)
        return dx, dw, db, None


class _Layer:
    """One compressed layer: its options, and its v if that is kept."""

    def __init__(self, target: Target, num_groups: int, scale: float, init: str, seed: int):
        self.target, self.scale, self.init = target, scale, init
        self.name = target.name.removesuffix(".weight")
        self.size = group_size(target.in_features, num_groups)
        self.kept: Tensor | None = None
        if init == "random":
            key = hashing.derive_key(seed, "velora", target.name)
            self.kept = unit(torch.randn(self.size, generator=torch.Generator().manual_seed(key >> 1)))

    def attach(self) -> None:
        layer = self

        def forward(module: nn.Module, input: Tensor) -> Tensor:
            if module is not layer.target.module:  # a deep copy of the model has this method too: it computes as ever
                return type(module).forward(module, input)
            weight, bias = module.weight, module.bias
            assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
            if not (torch.is_grad_enabled() and weight.requires_grad):
                return layer.plain(input)
            return _Linear.apply(input, weight, bias, layer)

        forward.velora_of = self.target.module  # type: ignore[attr-defined]
        self.forward = types.MethodType(forward, self.target.module)
        self.target.module.forward = self.forward

    def is_in_place(self) -> bool:
        return self.target.module.__dict__.get("forward") is self.forward

    def plain(self, x: Tensor) -> Tensor:
        return type(self.target.module).forward(self.target.module, x)

    def direction(self, x_ND: Tensor) -> Tensor:
        """v (d,) for an input."""
        if self.kept is not None:
            if self.kept.device != x_ND.device:
                self.kept = self.kept.to(x_ND.device)
            return self.kept
        mean = mean_direction(x_ND, self.size)
        if self.init == "batch_average_once" and 0.0 < float(torch.linalg.vector_norm(mean)) < float("inf"):
            self.kept = unit(mean)
        return unit(mean)


# -- a model ----------------------------------------------------------------------------------------------------------------


class _Watch:
    """Refuses a pass of a model that checkpoints activations; copies of the model, which compute plainly, may."""

    def __init__(self, model_id: int):
        self.model_id = model_id

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if id(module) == self.model_id:
            _check_checkpointing(module)


class Velora:
    """The compressed layers of a model, as `velora` made them.

    names: the modules, in the model's order. Not part of the model: its own state dict and exports are as ever.
    """

    def __init__(self, model: nn.Module, layers: Sequence[_Layer]):
        self._layers = {layer.name: layer for layer in layers}
        self.names = list(self._layers)
        self.is_attached = True
        for layer in layers:
            layer.attach()
        self._watch = model.register_forward_pre_hook(_Watch(id(model)))

    def detach(self) -> None:
        """Give the layers their own forward back. What a pass has kept already stays good for its backward."""
        if not self.is_attached:
            return
        for layer in self._layers.values():
            if not layer.is_in_place():
                raise ConfigError(f"something else has replaced the forward of {layer.name} since: undo that first")
        for layer in self._layers.values():
            del layer.target.module.forward
        self._watch.remove()
        self.is_attached = False

    def state_dict(self) -> dict[str, Tensor]:
        """v (d,) float32 of each layer that keeps one: none with "batch_average", nor before the first pass with "once"."""
        return {name: layer.kept.clone() for name, layer in self._layers.items() if layer.kept is not None}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Strict: another set of layers, other sizes or another init raise `CheckpointError`, and nothing is loaded."""
        unknown = sorted(set(state) - set(self._layers))
        if unknown:
            raise CheckpointError(
                f"the saved state has {unknown[0]!r}, which is not compressed here; these are: {self.names}"
            )
        for name, layer in self._layers.items():
            value = state.get(name)
            if (value is None) if layer.init == "random" else (value is not None and layer.init == "batch_average"):
                raise CheckpointError(f"the saved state was written with another init than {layer.init!r} (see {name})")
            if value is not None and (tuple(value.shape) != (layer.size,) or value.dtype != torch.float32):
                raise CheckpointError(
                    f"v of {name} was saved as {tuple(value.shape)} {value.dtype}, this layer has ({layer.size},) "
                    "torch.float32: build it with the num_groups that the state was saved with"
                )
        for name, layer in self._layers.items():
            value = state.get(name)
            layer.kept = None if value is None else value.detach().to(layer.target.weight.device, copy=True)


def velora(
    model: nn.Module,
    num_groups: int | Mapping[str, int] = 64,
    layers: Sequence[str] | str = ("v_proj", "down_proj"),
    scale: float = 1.0,
    init: str = "batch_average",
    *,
    seed: int = 42,
) -> Velora:
    """Compress what linear layers of a model keep for their weight gradients, from now until `detach()`.

    num_groups: M, of all layers, or by their suffix ({"v_proj": 64, "down_proj": 86}). layers: module-name suffixes, or one
    regular expression for whole names, of `nn.Linear` or GPT-2 style Conv1D modules. scale: times the weight gradient. init:
    see the module. seed: of init="random". A layer whose weight requires no gradient computes as ever, as long as it does not.
    """
    _check(model, num_groups, layers, scale, init)
    targets, _ = select_targets(model, layers)
    if not any(target.weight.requires_grad for target in targets):
        raise ConfigError("no weight of these layers requires a gradient: their inputs are not kept anyway")
    made = []
    for target in targets:
        count = num_groups if isinstance(num_groups, int) else _by_suffix(target.name, num_groups)
        if count > target.in_features:
            raise ConfigError(f"num_groups={count} exceeds the {target.in_features} in features of {target.name}")
        if _is_replaced(target.module):
            raise ConfigError(
                f"the forward of {target.name.removesuffix('.weight')} is already replaced, by VeLoRA or another"
            )
        made.append(_Layer(target, count, float(scale), init, seed))
    logger.info("VeLoRA: %d layers keep a compressed input", len(made))
    return Velora(model, made)


def _check(model: nn.Module, num_groups: Any, layers: Any, scale: float, init: str) -> None:
    counts = list(num_groups.values()) if isinstance(num_groups, Mapping) else [num_groups]
    if not all(isinstance(count, int) and count >= 1 for count in counts):
        raise ConfigError(f"num_groups must be whole numbers of at least 1, got {num_groups!r}")
    if isinstance(num_groups, Mapping) and (isinstance(layers, str) or set(num_groups) != set(layers)):
        raise ConfigError(f"num_groups by suffix must name the suffixes of layers={layers!r}, got {sorted(num_groups)}")
    if not 0.0 < float(scale) < float("inf"):
        raise ConfigError(f"scale must be a positive finite number, got {scale!r}")
    if init not in INITS:
        raise ConfigError(f"init must be one of {', '.join(INITS)}, got {init!r}")
    _check_checkpointing(model)


def _check_checkpointing(model: nn.Module) -> None:
    """Also before each pass: trainers switch checkpointing on late."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):  # as transformers asks it
        raise ConfigError(
            "the model checkpoints activations: inputs of layers are not kept, so VeLoRA would save nothing and still bias the "
            "gradients. Use one of the two (model.gradient_checkpointing_disable())"
        )


def _is_replaced(module: nn.Module) -> bool:
    """Is this layer's forward not that of its class? What a deep copy has from a compressed layer does not count."""
    forward = module.__dict__.get("forward")
    return forward is not None and getattr(forward, "velora_of", module) is module


def _by_suffix(name: str, num_groups: Mapping[str, int]) -> int:
    module = name.removesuffix(".weight")
    return next(count for suffix, count in num_groups.items() if module == suffix or module.endswith("." + suffix))

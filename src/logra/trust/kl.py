"""Predicted and measured KL between the policy and the policy after a step (LoGRA section on step control; methods.md 1.4).

    q(D) = mean over contexts of 1/2 Var_{y ~ p}(z_dot_y / T),   p = softmax(z / T),   KL(a D) is about a^2 q(D)

Legend: N contexts, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from logra.errors import ConfigError, NonFiniteError
from logra.sketch.sketcher import Proposal, Sketcher
from logra.trust import probe

MODES = ("auto", "forward", "finite_difference")
_CHUNK = 64  # contexts reduced at a time in float64


def half_variance(logits_NV: Tensor, derivative_NV: Tensor, temperature: float = 1.0) -> float:
    """Mean over N of 1/2 Var_p(z_dot / T), in float64."""
    total = 0.0
    for z, z_dot in zip(logits_NV.split(_CHUNK), derivative_NV.split(_CHUNK), strict=True):
        p = torch.softmax(z.double() / temperature, dim=-1)
        slope = z_dot.double() / temperature
        centred = slope - (p * slope).sum(-1, keepdim=True)
        total += float(0.5 * (p * centred.square()).sum())
    return total / len(logits_NV)


def mean_kl(old_NV: Tensor, new_NV: Tensor, temperature: float = 1.0) -> float:
    """Mean over N of KL(softmax(old / T) || softmax(new / T)) in nats, in float64."""
    total = 0.0
    for old, new in zip(old_NV.split(_CHUNK), new_NV.split(_CHUNK), strict=True):
        log_p = torch.log_softmax(old.double() / temperature, dim=-1)
        log_q = torch.log_softmax(new.double() / temperature, dim=-1)
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return total / len(old_NV)


def predict_kl(
    model: nn.Module,
    sketcher: Sketcher,
    proposal: Proposal,
    batch: probe.Batch,
    *,
    temperature: float = 1.0,
    mode: str = "auto",
) -> float:
    """Predicted KL (nats per token) of applying the proposal at scale 1; at scale a it is a^2 times that.

    batch: see `logra.trust.probe.context_logits`. mode: "forward" (exact derivative), "finite_difference", or "auto": the
    first, and the second where an operation has no forward-mode rule. Raises `NonFiniteError` if the result is not finite.
    """
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r} is not known: use one of {MODES}")
    if proposal.is_zero:
        return 0.0
    if mode == "finite_difference":
        logits, derivative = probe.finite_difference(model, sketcher, proposal, batch)
    else:
        try:
            logits, derivative = probe.forward_derivative(model, sketcher, proposal, batch)
        except (NotImplementedError, RuntimeError) as error:
            if mode == "forward" or not _lacks_rule(error):
                raise
            logits, derivative = probe.finite_difference(model, sketcher, proposal, batch)
    q = half_variance(logits, derivative, temperature)
    if not 0.0 <= q < float("inf"):
        raise NonFiniteError(f"the predicted KL is {q}; the step was not applied")
    return q


def _lacks_rule(error: Exception) -> bool:
    text = str(error).lower()
    return "forward" in text and ("ad" in text or "derivative" in text or "mode" in text)


def measure_kl(
    model: nn.Module,
    sketcher: Sketcher,
    proposal: Proposal,
    batch: probe.Batch,
    scale: float = 1.0,
    *,
    temperature: float = 1.0,
) -> float:
    """Exact KL(old || new) in nats per token of applying `scale` times the proposal, on the batch; weights untouched."""
    if proposal.is_zero or scale == 0.0:
        return 0.0
    with probe.quiet(model):
        old = probe.context_logits(model, batch)
        with probe.branch(sketcher, proposal, scale):
            new = probe.context_logits(model, batch)
    kl = mean_kl(old, new, temperature)
    if kl != kl or kl == float("inf"):
        raise NonFiniteError(f"the measured KL is {kl}; the step was not applied")
    return kl

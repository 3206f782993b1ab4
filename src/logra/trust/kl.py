"""Predicted and measured KL between the policy and the policy after a step (LoGRA section on step control; methods.md 1.4).

    q(D) = mean over contexts of 1/2 Var_{y ~ p}(z_dot_y / T),   p = softmax(z / T),   KL(a D) is about a^2 q(D)

Legend: N contexts, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from logra.errors import ConfigError, NonFiniteError
from logra.head import let_go, quiet
from logra.sketch.sketcher import Proposal, Sketcher
from logra.trust import probe

MODES = ("auto", "forward", "finite_difference")


def half_variances(logits_NV: Tensor, derivative_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """1/2 Var_p(z_dot / T) of each context, (N,) float64."""
    p = torch.softmax(logits_NV.double() / temperature, dim=-1)
    slope = derivative_NV.double() / temperature
    slope -= (p * slope).sum(-1, keepdim=True)
    return p.mul_(slope.square_()).sum(-1) / 2


def kls(old_NV: Tensor, new_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(softmax(old / T) || softmax(new / T)) of each context in nats, (N,) float64."""
    log_p = torch.log_softmax(old_NV.double() / temperature, dim=-1)
    log_q = torch.log_softmax(new_NV.double() / temperature, dim=-1)
    return log_q.neg_().add_(log_p).mul_(log_p.exp_()).sum(-1)


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

    batch: see `logra.trust.probe.contexts`; where the weights are sharded, each rank's own, as many rows of the same length on
    every rank (their forward passes are collective), and the result is of all together. mode: "forward"
    (exact derivative), "finite_difference", or "auto": the
    first, and the second where an operation has no forward-mode rule. Raises `NonFiniteError` if the result is not finite.
    """
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r} is not known: use one of {MODES}")
    if proposal.is_zero:
        return 0.0
    total, count = 0.0, 0
    for rows in probe.groups(batch):
        found, slopes = _slopes(model, sketcher, proposal, rows, mode)
        with torch.no_grad():
            total += sum(float(half_variances(z, z_dot, temperature).sum()) for z, z_dot in found.logits(slopes))
        count += len(found)
    q = _mean(model, sketcher, total, count)
    if not 0.0 <= q < float("inf"):
        raise NonFiniteError(f"the predicted KL is {q}; the step was not applied")
    return q


def _slopes(
    model: nn.Module, sketcher: Sketcher, proposal: Proposal, batch: probe.Batch, mode: str
) -> tuple[probe.Contexts, Tensor]:
    if mode != "finite_difference":
        try:
            return probe.forward_derivative(model, sketcher, proposal, batch)
        except (NotImplementedError, RuntimeError) as error:
            if mode == "forward" or not _lacks_rule(error):
                raise
    return probe.finite_difference(model, sketcher, proposal, batch)


def _mean(model: nn.Module, sketcher: Sketcher, total: float, count: float) -> float:
    """Over the contexts of all ranks, where the weights are sharded; the last use of what was gathered for it."""
    let_go(model)
    if sketcher.shards is not None:
        total, count = sketcher.shards.sums([total, count], over_ranks=True)
    return total / count


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
    total, count = 0.0, 0
    with quiet(model):
        for rows in probe.groups(batch):
            old = probe.contexts(model, rows)
            with probe.branch(sketcher, proposal, scale):
                new = probe.contexts(model, rows)
            pairs = zip(old.logits(), new.logits(), strict=True)
            total += sum(float(kls(z, z_new, temperature).sum()) for (z,), (z_new,) in pairs)
            count += len(old)
    kl = _mean(model, sketcher, total, count)
    if kl != kl or kl == float("inf"):
        raise NonFiniteError(f"the measured KL is {kl}; the step was not applied")
    return kl

"""LoGRA: sketches, a proposal, a trust region, an exact Update (arXiv 2610.06647; departures in `logra.sketch.sketcher`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from logra.errors import CheckpointError, UpdateError
from logra.rl.methods.base import Probe, Schedule, StepResult, Writer, below, held_weights
from logra.rl.methods.beside import choose_dense, compact_frozen
from logra.rl.methods.dense import AdamWMethod
from logra.sketch.block import Block, blocks_of, digest_blocks
from logra.sketch.shards import sharding
from logra.sketch.sketcher import Proposal, Sketcher, attach
from logra.sketch.targets import Skipped, clean_name, is_conv1d, select_targets
from logra.sketch.update import Update
from logra.trust.kl import measure_kl, predict_kl
from logra.trust.region import Decision, TrustRegion


class LograMethod:
    """trust: None applies proposals as they are. autocast: probe in bfloat16, as the policy computes.

    dense_params: parameters to train by AdamW beside the targets (`logra.rl.methods.beside.choose_dense`), on the learning
    rate of dense_schedule times the scale of the trust region, which predicts the KL of the targets' step alone; their
    new values travel whole in the same Update. options: keyword arguments of `logra.sketch.sketcher.attach`.
    """

    name = "logra"

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        *,
        trust: TrustRegion | None = None,
        trust_mode: str = "auto",
        autocast: bool = False,
        dense_params: Sequence[str] = (),
        dense_schedule: Schedule | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        **options: Any,
    ):
        self.model, self.schedule, self.trust, self.trust_mode = model, schedule, trust, trust_mode
        self.autocast = autocast
        chosen = select_targets(model, options.get("targets"))[0]
        targets = [t.name for t in chosen]
        dense = choose_dense(model, dense_params, targets)
        is_sharded = sharding(targets[0], chosen[0].weight) is not None
        if options.get("weights") == "split" and not is_sharded:  # else done before: FSDP knows the types
            compact_frozen(model, {*targets, *dense})
        if options.get("beta1") is None and options.get("optimizer") == "adam":
            options["beta1"] = betas[0]
        self.sketcher: Sketcher = attach(model, **{"beta2": betas[1], **options})
        for name, parameter in dense.items():
            if parameter.dtype != torch.float32:
                parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
            self.sketcher.skipped[:] = [s for s in self.sketcher.skipped if s.name != name]
        self.beside = None
        if dense:
            common = {k: options[k] for k in ("eps", "weight_decay", "max_grad_norm") if k in options}
            self.beside = AdamWMethod(model, dense, dense_schedule or Schedule(1e-6), betas=betas, **common)

    @property
    def num_updates(self) -> int:
        return self.sketcher.update_index

    def blocks(self) -> dict[str, Block]:
        """Everything that can move, by name: the targets, then what is trained densely beside them."""
        dense = blocks_of(self.model, list(self.beside.parameters)) if self.beside is not None else {}
        return self.sketcher.blocks() | dense

    def whole_blocks(self) -> dict[str, Block]:
        """`blocks()`, of sharded weights copies of all rows in host memory: a collective call, with nothing on all ranks but the
        first."""
        blocks, shards = self.blocks(), self.sketcher.shards
        if shards is None:
            return blocks
        found = {}
        for name, block in blocks.items():
            whole = shards.gather_rows(block.master(), block.shape[0])
            if dist.get_rank() == 0:
                found[name] = Block(name, whole.cpu(), basis=block.basis, basis_index=block.basis_index)
        return found

    def transposed(self) -> list[str]:
        """The names among `blocks()` whose parameters are stored in x out (GPT-2's Conv1D)."""
        conv = {clean_name(name) for name, module in self.model.named_modules() if is_conv1d(module)}
        return [n for n in self.blocks() if n.endswith(".weight") and n.removesuffix(".weight") in conv]

    def digest(self) -> str:
        """Hex digest of everything that can move, the same for every holder of the policy (logra.digest)."""
        return digest_blocks(self.blocks(), self.sketcher.shards)

    def zero(self) -> None:
        self.sketcher.zero()
        if self.beside is not None:
            self.beside.zero()

    def observe_mismatch(self, gap: float) -> None:
        if self.trust is not None:
            self.trust.observe(gap)

    def step(self, probe: Probe, temperature: float) -> StepResult:
        lr = self.schedule.at(self.num_updates)
        dense_norm = self.beside.grad_norm() if self.beside is not None else 0.0
        proposal = self.sketcher.propose(lr)
        if proposal.is_zero:
            return StepResult(False, {"grad_norm": 0.0, "learning_rate": lr})
        metrics = {"grad_norm": proposal.grad_norm, "learning_rate": lr}
        scale = 1.0
        if self.trust is not None:
            with torch.autocast(proposal.factors.device.type, torch.bfloat16, enabled=self.autocast):
                decision = self._decide(self.trust, proposal, probe(), temperature)
            scale = decision.scale
            metrics |= _metrics(decision, self.trust)
        update = self.sketcher.apply(proposal, scale)
        if self.beside is not None and update is not None:
            metrics["dense_grad_norm"] = dense_norm
            update = self._step_beside(self.beside, update, dense_norm, scale)
        return StepResult(True, metrics, update)

    def _step_beside(self, beside: AdamWMethod, update: Update, norm: float, scale: float) -> Update:
        """AdamW on the dense parameters; the Update with their new values."""
        beside.advance(norm, beside.schedule.at(beside.num_updates) * scale)
        blocks, shards = blocks_of(self.model, list(beside.parameters)), self.sketcher.shards
        values = {
            name: (block.master() if shards is None else shards.gather_rows(block.master(), block.shape[0])).cpu()
            for name, block in blocks.items()
        }
        return dataclasses.replace(update, dense=values)

    def _decide(
        self, trust: TrustRegion, proposal: Proposal, batch: Mapping[str, Tensor], temperature: float
    ) -> Decision:
        predicted = predict_kl(
            self.model, self.sketcher, proposal, batch, temperature=temperature, mode=self.trust_mode
        )

        def measure(scale: float) -> float:
            return measure_kl(self.model, self.sketcher, proposal, batch, scale, temperature=temperature)

        return trust.decide(self.num_updates, predicted, measure)

    def describe(self) -> tuple[list[tuple[str, tuple[int, ...]]], list[Skipped]]:
        chosen = [(t.name, (t.out_features, t.in_features)) for t in self.sketcher.targets]
        if self.beside is not None:
            chosen += [(name, tuple(p.shape)) for name, p in self.beside.parameters.items()]  # type: ignore[misc]
        return chosen, self.sketcher.skipped

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        state = self.sketcher.state_dict(residuals=False)  # the export holds the float32 values
        tensors = {f"sketcher.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
        values = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
        named = {"sketcher": values, "trust": self.trust.state_dict() if self.trust else None}
        if self.beside is not None:
            own, named["beside"] = self.beside.state()
            tensors |= {f"beside.{k}": v for k, v in own.items()}
        return tensors, named

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        if (state["trust"] is None) != (self.trust is None):
            raise CheckpointError("the checkpoint was written with another trust.enabled: resume with the same setting")
        if ("beside" in state) != (self.beside is not None):
            raise CheckpointError("the checkpoint was written with other method.dense_params: resume with the same")
        try:
            self.sketcher.load_state_dict({**state["sketcher"], **below("sketcher.", tensors)})
        except UpdateError as error:
            raise CheckpointError(f"{error}: resume with the settings the run was started with") from error
        if self.trust is not None:
            self.trust.load_state_dict(state["trust"])
        if self.beside is not None:
            self.beside.load_state(below("beside.", tensors), state["beside"])

    def held(self) -> dict[str, list[Tensor]]:
        beside = self.beside.held_state() if self.beside is not None else {}
        found = {"weights": held_weights(self.model), **self.sketcher.held()}
        return {kind: [*found.get(kind, []), *beside.get(kind, [])] for kind in {**found, **beside}}

    def export(self, write: Writer, folder: Path) -> None:
        is_split = self.sketcher.options["weights"] == "split"
        write(self.model, folder, self.sketcher.masters() if is_split else None)


def _metrics(decision: Decision, trust: TrustRegion) -> dict[str, float]:
    metrics = {
        "trust/predicted_kl": decision.predicted,
        "trust/predicted_kl_at_1": decision.predicted_at_one,
        "trust/budget": decision.budget,
        "trust/scale": decision.scale,
        "trust/mismatch": trust.gap,
    }
    if decision.measured is not None:
        metrics["trust/measured_kl"] = decision.measured
    return metrics

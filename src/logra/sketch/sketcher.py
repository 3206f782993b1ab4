"""The Sketcher: attaches to a model, collects sketches, proposes a step, applies it as an exact Update.

Departures from the paper (arXiv 2610.06647), each an option or noted: signs come from a counter-based hash, not a torch
generator; factors are integers, not bfloat16, so that the same Update gives the same bits everywhere; a proposal advances
the second moment only when it is applied; a sketch that is exactly zero moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from logra import hashing
from logra.errors import ConfigError, ModelError, NonFiniteError, UpdateError
from logra.sketch import basis as bases
from logra.sketch import capture, optimizers, quantize
from logra.sketch.aligned import Basis
from logra.sketch.block import Block, apply_blocks, digest_blocks
from logra.sketch.options import FIRST, SECOND, make_bases, moment_columns, resolve
from logra.sketch.saved import fitting
from logra.sketch.shards import Shards, local, sharding, shards_of
from logra.sketch.split import bind, check_splittable, merge_targets, split_targets
from logra.sketch.targets import Skipped, Target, check_float32, select_targets
from logra.sketch.update import Factor, Update

STATE_VERSION = 1
_CHUNK = 1 << 19  # numbers of sketches that are stepped at once: temporaries stay small and in cache


@dataclass(frozen=True)
class Proposal:
    """A step that has not been applied. At scale 1 it changes target i by U_i A_i (A scaled, as `Sketcher.basis` gives it).

    factors: (sum d, r) float32, the U of all targets stacked in the order of `Sketcher.names`, its sign included.
    grad_norm: root of sum ||S||^2: with random bases an unbiased estimate of the dense gradient norm (E[A^T A] = I), with
    aligned ones the norm of what they see of it. sketch_version: torch's count of in-place changes of the sketches when it
    was made: `apply` advances the moments from the same sketches, so that a proposal needs no copy of them.
    """

    factors: Tensor
    rows: dict[str, slice]
    update_index: int
    is_zero: bool
    grad_norm: float
    lr: float
    decay: float
    sketch_version: int

    def factor(self, name: str) -> Tensor:
        """U of one target, (d, r) float32: the weight moves by U A."""
        return self.factors[self.rows[name]]


class Sketcher:
    """See `attach`, which builds it. Not thread-safe; one sketcher a model."""

    def __init__(
        self,
        model: nn.Module,
        targets: list[Target],
        skipped: list[Skipped],
        options: dict[str, Any],
        residuals: dict[str, Tensor] | None = None,
        dtypes: dict[str, torch.dtype] | None = None,
    ):
        self.model, self.targets, self.skipped = model, targets, skipped
        self._residuals = residuals or {}  # int16 (out, in), of split weights
        self._dtypes = dtypes or {}  # of the targets before they were split
        self.options = options
        self.rank: int = options["rank"]
        self.update_index = 0
        self.names = [t.name for t in targets]
        self._by_name = {t.name: t for t in targets}
        self.shards = shards_of({t.name: t.weight for t in targets})
        device = local(targets[0].weight).device if self.shards is None else self.shards.device
        self._rows: dict[str, slice] = {}
        start = 0
        for target in targets:
            self._rows[target.name] = slice(start, start + target.out_features)
            start += target.out_features
        self._sketches = torch.zeros(start, self.rank, dtype=torch.float32, device=device)
        # rows that are stepped here, and what they are stepped from: all of them, unless the weights are sharded
        self._here = self._rows if self.shards is None else self.shards.here
        self._summed: Tensor | None = None
        count = start if self.shards is None else self.shards.total
        self._moments = {
            key: torch.zeros(count, columns, dtype=torch.float32, device=device)
            for key, columns in moment_columns(options).items()
        }
        self._bases = make_bases({t.name: t.in_features for t in targets}, options, device)
        self._is_dirty = self._is_detached = False
        self._handles: list[Any] = []
        self._was_trainable = {n: p.requires_grad for n, p in model.named_parameters()}
        self._attach()

    # -- collecting ---------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        chosen = {id(t.weight) for t in self.targets}
        for parameter in self.model.parameters():
            if self.options["freeze"] or id(parameter) in chosen:
                parameter.requires_grad_(False)
        anchor = torch.zeros((), device=self._sketches.device, requires_grad=True)
        for target in self.targets:
            name = target.name
            if self._residuals:
                self._handles.append(capture.guard_dtype(target.module, name))
            self._handles.append(
                capture.tap_layer(
                    target.module,
                    anchor,
                    lambda name=name: self.basis_block(name),
                    lambda name=name: self.sketch(name),
                    lambda name=name: self._bases.scale(name),
                    self._note,
                    lambda name=name: self._bases.observer(name, self.update_index),
                )
            )

    def _note(self) -> None:
        self._is_dirty = True

    def sketch(self, name: str) -> Tensor:
        """S = G A^T of one target, (out, r) float32, accumulated since the last `zero()` or `apply()`, of this rank's tokens."""
        return self._sketches[self._rows[name]]

    def basis(self, name: str) -> Tensor:
        """The A in force, (r, in) float32."""
        scale = self.basis_scale(name)
        return self.basis_block(name).float() * (scale if isinstance(scale, int | float) else scale[:, None])

    def basis_block(self, name: str) -> Tensor:
        """The unscaled A in force, (r, in): int8 for `random` (signs) and `aligned`."""
        return self._bases.block(name, self.update_index)

    def basis_scale(self, name: str) -> capture.Scale:
        """The factor between `basis_block` and A: one number, or (r,) powers of two for `aligned`."""
        return self._bases.scale(name)

    def accumulated(self) -> list[Tensor]:
        """All that adds up over microbatches, to be summed in place over data-parallel ranks before `propose`, where each rank
        holds the whole weights. (Sharded weights: nothing to do, `propose` and `apply` are collective calls.)

        The sketches of all targets, one (sum d, r) float32 tensor, and what is collected for the next aligned bases. The same
        shapes on every rank, also on one that had no rollouts. Ranks that sum them the same way (all_reduce) then propose,
        apply and refresh bit for bit alike, on equal hardware and thread counts (the QR is torch's). What was proposed before is
        refused by `apply`.
        """
        self._is_dirty = True
        torch.autograd.graph.increment_version(self._sketches)  # collectives write without torch counting it
        return [self._sketches, *self._bases.collected(self.update_index)]

    def zero(self) -> None:
        """Forget what was accumulated."""
        self._sketches.zero_()
        self._summed = None
        self._bases.forget()
        self._is_dirty = False

    @property
    def has_signal(self) -> bool:
        """False if every sketch of this rank is exactly zero: then nothing may move (design 2.6)."""
        return self._is_dirty and bool(self._sketches.any())

    # -- proposing ----------------------------------------------------------------------------------------------------

    def propose(self, lr: float = 1.0) -> Proposal:
        """The step the sketch optimizer would take; weights and optimizer state stay as they are until `apply`.

        Sharded weights: a collective call, which sums the sketches of all ranks; the proposal is the same on each.
        lr: the learning rate. With variant "paper" the step is normalised to `update_ratio` and lr multiplies it (1.0 there).
        Raises `NonFiniteError` naming the first target whose sketch is not finite.
        """
        self._check_attached()
        if not math.isfinite(lr):
            raise ConfigError(f"the learning rate must be finite, got {lr}")
        decay, version = float(lr * self.options["weight_decay"]), self._sketches._version
        self._summed = self._sketches if self.shards is None else self.shards.reduce(self._sketches)
        norm, has_signal = self._measured(self._summed)
        if not norm < float("inf"):
            raise NonFiniteError(f"the sketch of {self._first_non_finite()} is not finite; nothing was applied")
        if not has_signal:
            nothing = torch.zeros_like(self._sketches)
            return Proposal(nothing, self._rows, self.update_index, True, 0.0, lr, decay, version)
        factors = self._stepped(norm).mul_(-lr)
        return Proposal(factors, self._rows, self.update_index, False, norm, lr, decay, version)

    def _measured(self, summed: Tensor) -> tuple[float, bool]:
        """(norm of all sketches, whether any number of them is not zero)."""
        norm = float(torch.linalg.vector_norm(summed))
        if self.shards is None:
            return norm, self._is_dirty and (norm > 0.0 or self.has_signal)  # a norm of 0 may be an underflow
        square, dirty, seen = self.shards.sums([norm**2, float(self._is_dirty), float(summed.any())])
        return math.sqrt(square) if square >= 0.0 else math.nan, dirty > 0.0 and seen > 0.0

    def _stepped(self, norm: float) -> Tensor:
        """D of all targets stacked, some rows at a time: no other full-size tensor exists."""
        is_paper = self.options["variant"] == "paper"
        if self.shards is not None and is_paper and SECOND in self._moments:
            direction = self._stepped_together(self.shards, norm)
        else:
            direction = torch.zeros_like(self._stepped_from)
            for rows in self._pieces():
                direction[rows] = self._direction(*self._inputs(rows, norm))
            direction = direction if self.shards is None else self.shards.gather(direction)
        if is_paper:
            direction.mul_(self._global_factor(direction))
        return direction

    def _stepped_together(self, shards: Shards, norm: float) -> Tensor:
        """The same where a target's rows depend on each other and lie on several ranks: what D is made of is gathered first."""
        means, roots = torch.zeros_like(self._stepped_from), torch.zeros_like(self._moments[SECOND])
        for rows in self._pieces():
            means[rows], roots[rows] = self._inputs(rows, norm)  # type: ignore[misc]
        means, roots = shards.gather(means), shards.gather(roots)
        for rows in self._rows.values():
            means[rows] = self._direction(means[rows], roots[rows])
        return means

    @property
    def _stepped_from(self) -> Tensor:
        """The sketches of the rows that are stepped here, summed over ranks."""
        assert self._summed is not None
        return self._summed

    def _pieces(self) -> Iterable[slice]:
        """All stacked rows here, about `_CHUNK` numbers at a time; where a target's rows depend on each other, by target."""
        if self.options["variant"] == "paper":
            return self._here.values()
        count, step = len(self._stepped_from), max(1, _CHUNK // self.rank)
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def _clipped(self, rows: slice, norm: float) -> Tensor:
        """S of some rows; norm: of all S, which is clipped."""
        limit = self.options["max_grad_norm"]
        sketches = self._stepped_from[rows]
        return sketches * optimizers.clip_factor(norm, limit) if limit else sketches

    def _advanced(self, key: str, rows: slice, sketches: Tensor) -> tuple[Tensor, Tensor]:
        """(the next value of a moment, the same corrected for its start) of some rows. sketches: `_clipped`."""
        options, moment, step = self.options, self._moments[key][rows], self.update_index + 1
        if key == FIRST:
            return optimizers.first_moment(sketches, moment, step, options["beta1"])
        if options["optimizer"] == "row_adam":
            return optimizers.row_second_moment(sketches, moment, step, options["beta2"])
        return optimizers.element_second_moment(sketches, moment, step, options["beta2"])

    def _inputs(self, rows: slice, norm: float) -> tuple[Tensor, Tensor | None]:
        """What D of some rows is made of: the first moment (or S) and the second, corrected for their start."""
        sketches = self._clipped(rows, norm)
        mean = self._advanced(FIRST, rows, sketches)[1] if FIRST in self._moments else sketches
        return mean, self._advanced(SECOND, rows, sketches)[1] if SECOND in self._moments else None

    def _direction(self, mean: Tensor, corrected: Tensor | None) -> Tensor:
        """D of some rows."""
        eps = self.options["eps"]
        if corrected is None:
            return mean
        if self.options["variant"] == "simplified":
            return optimizers.row_adam_direction(mean, corrected, eps)
        return optimizers.row_adam_paper_direction(mean, corrected, eps)

    def _global_factor(self, direction: Tensor) -> float:
        """rho sqrt(sum ||W||^2 / sum ||D A||^2) over all targets (methods.md 1.3)."""
        weight_square = self.weight_square()
        update_square = 0.0
        for name in self.names:
            basis = self.basis(name)
            square = optimizers.reconstructed_square(direction[self._rows[name]], basis @ basis.t())
            update_square += float(square)
        return optimizers.update_ratio_factor(weight_square, update_square, self.options["update_ratio"])

    def weight_square(self) -> float:
        """sum ||W||^2 over all targets."""
        own = optimizers.squares([local(t.weight).detach() for t in self.targets])
        return own if self.shards is None else self.shards.sums([own])[0]

    def _first_non_finite(self) -> str:
        return next((n for n in self.names if not bool(torch.isfinite(self.sketch(n)).all())), "some target")

    # -- applying -----------------------------------------------------------------------------------------------------

    def apply(self, proposal: Proposal, scale: float = 1.0) -> Update | None:
        """Quantise `scale` times the proposal once, merge it, advance the state, zero the sketches; the Update to send.

        A proposal without signal changes nothing at all and gives None. Raises `UpdateError` if weights or sketches are no
        longer those it was made with; one whose merge failed before anything moved can be applied again.
        """
        if proposal.update_index != self.update_index:
            raise UpdateError(
                f"this proposal was made at update {proposal.update_index}, the weights are at {self.update_index}: propose again"
            )
        self._check_attached()
        if proposal.sketch_version != self._sketches._version:
            raise UpdateError(
                "the sketches changed since this proposal was made (by a backward pass, zero() or accumulated()): propose again"
            )
        if proposal.is_zero:
            self._bases.forget()
            return None
        update = self.quantize(proposal, scale)
        following = self._following()
        overlaps = self._overlaps(following)
        apply_blocks(self.blocks(), update, {name: self.basis_block(name) for name in self.names})
        self._advance(proposal.grad_norm)
        self._carry_over(overlaps)
        self.update_index += 1
        self._bases.take(following)
        self.zero()
        return update

    def _following(self) -> dict[str, Basis]:
        """The next bases where inputs were collected, of all ranks' inputs, the same on every rank."""
        if self.shards is None:
            return self._bases.following(self.update_index + 1)
        totals = self.shards.total_of(self._bases.collected(self.update_index))
        following = self._bases.following(self.update_index + 1, totals)
        for basis in following.values():
            for part in (basis.q, basis.scale, basis.energy):
                self.shards.from_first(part)
        return following

    def _advance(self, norm: float) -> None:
        """Put the moments' next values in place: those that the proposal was made with, bit for bit."""
        for rows in self._pieces():
            sketches = self._clipped(rows, norm)
            for key, moment in self._moments.items():
                moment[rows] = self._advanced(key, rows, sketches)[0]

    def _overlaps(self, following: Mapping[str, Basis]) -> dict[str, Tensor]:
        """A_old A_new^T (r, r) of the targets that get a new basis, if there are moments to take over."""
        if FIRST not in self._moments and self.options["optimizer"] != "adam":
            return {}
        return {name: self.basis(name) @ basis.matrix.t() for name, basis in following.items()}

    def _carry_over(self, overlaps: Mapping[str, Tensor]) -> None:
        """Take the moments over to new bases, target by target."""
        betas = (self.options["beta1"], self.options["beta2"])
        for name, overlap in overlaps.items():
            first, second = (
                self._moments[key][self._here[name]] if key in self._moments else None for key in (FIRST, SECOND)
            )
            if first is not None:
                first.copy_(optimizers.carry_first(first, overlap))
            if second is not None and self.options["optimizer"] == "adam":
                second.copy_(optimizers.carry_second(second, overlap, first, self.update_index + 1, betas))

    def quantize(self, proposal: Proposal, scale: float = 1.0) -> Update:
        """The Update that `apply` would make; nothing is changed."""
        self._check_attached()
        if not 0.0 <= scale < math.inf:
            raise UpdateError(f"scale must be finite and not negative, got {scale}")
        options, rank = self.options, self.rank
        seed, index = options["seed"], self.update_index
        key = hashing.derive_key(seed, "round", index)
        q, exponent = self._integers(proposal.factors, key, scale)
        if int(exponent.max()) > quantize.MAX_EXPONENT:
            raise NonFiniteError(
                "the step is of size 1e30 and more: training has diverged; nothing was applied, lower the lr"
            )
        parts = {}
        for t in self.targets:
            rows = self._rows[t.name]
            basis, first = self._bases.explicit(t.name)
            parts[t.name] = Factor(t.name, t.out_features, t.in_features, q[rows], exponent[rows], basis, first)
        basis_index = self._bases.basis_index(index)
        return Update(index, options["basis"], basis_index, seed, rank, options["bits"], parts, proposal.decay)

    def _integers(self, factors: Tensor, key: int, scale: float) -> tuple[Tensor, Tensor]:
        """(q, exponent) of all rows, the bases' scales folded in: what is merged is a product of integers."""
        bits, device = self.options["bits"], factors.device
        sizes = torch.tensor([t.out_features for t in self.targets], device=device)
        target = torch.arange(len(sizes), device=device).repeat_interleave(sizes, output_size=len(factors))
        number = torch.cat([torch.arange(t.out_features, device=device) for t in self.targets])
        streams = [hashing.derive_key("target", name) & hashing.MASK32 for name in self.names]
        stream = torch.tensor(streams, dtype=torch.int64, device=device)[target]
        if self.options["basis"] != "aligned":
            return quantize.quantize(factors, bits, key, stream, number, scale=scale * bases.scale(self.rank))
        fold = torch.stack([self._bases.scale(name) for name in self.names])  # type: ignore[arg-type]
        return quantize.quantize(factors, bits, key, stream, number, scale=scale, fold=(fold, target))

    # -- weights ------------------------------------------------------------------------------------------------------

    def blocks(self) -> dict[str, Block]:
        """The targets as blocks: views of the weights as they are now (sharded: of the rows here), with their residuals if
        they are split."""
        result = {}
        for t in self.targets:
            basis, first = self._bases.explicit(t.name)
            start = 0 if self.shards is None else self.shards.rows[t.name].start
            shape = (t.out_features, t.in_features)
            result[t.name] = Block(
                t.name, t.matrix(), self._residuals.get(t.name), shape, start, basis=basis, basis_index=first
            )
        return result

    def digest(self) -> str:
        """Hex digest of the targets' float32 values, the same for `fp32` and `split` weights and any sharding (logra.digest)."""
        return digest_blocks(self.blocks(), self.shards)

    def masters(self) -> dict[str, Tensor]:
        """The targets' float32 values by name, as the parameters are laid out: what to save instead of split weights. Of
        sharded ones the rows here.

        New tensors on the host for split weights, the parameters themselves for float32 ones.
        """
        result = {}
        for target in self.targets:
            if not self._residuals:
                result[target.name] = local(target.weight).detach()
                continue
            master = Block(target.name, target.matrix(), self._residuals[target.name]).master().cpu()
            result[target.name] = master.t() if target.transposed else master
        return result

    def load_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Set targets to float32 values, laid out as `masters()` gives them; the way to load weights after attaching."""
        blocks = self.blocks()
        for name, value in masters.items():
            target = self._by_name.get(name)
            if target is None or value.shape != local(target.weight).shape or value.dtype != torch.float32:
                raise UpdateError(f"{name} is no target here, or not float32 of its shape; nothing was set")
        for name, value in masters.items():
            blocks[name].load(value.t() if self._by_name[name].transposed else value)

    # -- state --------------------------------------------------------------------------------------------------------

    def held(self) -> dict[str, list[Tensor]]:
        """The tensors it keeps beside the model's own, by kind: residual, basis, sketch, optimizer."""
        return {
            "residual": list(self._residuals.values()),
            "basis": self._bases.held(),
            "sketch": [self._sketches],
            "optimizer": list(self._moments.values()),
        }

    def state_dict(self, residuals: bool = True) -> dict[str, Any]:
        """Tensors and plain values: everything but the weights that a bit-identical continuation needs.

        Sharded weights: a collective call; the state is whole and the same on every rank, so any number of ranks can load it.
        residuals: include those of split weights, which `model.state_dict()` lacks; leave them out where `masters()` are
        saved instead.
        """
        if self.shards is not None and (self._is_dirty or residuals):
            raise UpdateError("the state of a sharded sketcher is whole after apply() or zero(), and without residuals")
        state = self._values()
        state |= {key: self._whole(moment) for key, moment in self._moments.items()}
        tensors, values = self._bases.state()
        state |= tensors | values
        if self._is_dirty:
            state["sketches"] = self._sketches.clone()
        if residuals:
            state |= {f"residual.{name}": lo.clone() for name, lo in self._residuals.items()}
        return state

    def _values(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "update_index": self.update_index,
            "names": list(self.names),
            "options": {k: v for k, v in self.options.items() if k not in ("targets", "freeze", "residual")},
            "is_dirty": self._is_dirty,
        }

    def _whole(self, moment: Tensor) -> Tensor:
        """A copy of all rows of a moment."""
        return moment.clone() if self.shards is None else self.shards.gather(moment)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Strict: names, options, shapes and dtypes must be those of this sketcher, else `UpdateError` says which differs."""
        mine = self._values()
        for key in ("version", "names", "options"):
            if state.get(key) != mine[key]:
                raise UpdateError(f"the saved sketcher has another {key}: {_difference(state.get(key), mine[key])}")
        if not isinstance(state.get("is_dirty"), bool) or not isinstance(state.get("update_index"), int):
            raise UpdateError("the saved sketcher lacks is_dirty or update_index")
        needed = dict(self._moments)
        if state.get("is_dirty"):
            needed["sketches"] = self._sketches
        if any(key.startswith("residual.") for key in state):
            needed |= {f"residual.{name}": lo for name, lo in self._residuals.items()}
        whole = {
            key: own.new_empty(len(self._sketches), own.shape[1], device="meta") for key, own in self._moments.items()
        }
        for key, own in {**needed, **whole}.items():
            fitting(state, key, own)
        self._bases.load(state)
        self._sketches.zero_()
        for key, own in needed.items():
            shards = self.shards if key in self._moments else None
            own.copy_(state[key] if shards is None else shards.take(state[key]))
        if any(key.startswith("residual.") for key in needed):
            for target in self.targets:  # the upper halves come from the model's own state dict
                bind(target.weight, self._residuals[target.name])
        self.update_index, self._is_dirty = int(state["update_index"]), bool(state["is_dirty"])

    def detach(self) -> None:
        """Remove every hook and restore requires_grad as it was. The weights keep what they learned; only `state_dict`
        still works afterwards. Split weights that were float32 are so again, exactly; those that were bfloat16 keep their
        upper halves (take `masters()` before for the rest)."""
        if self._is_detached:
            return
        if self._residuals and self.shards is not None:
            raise UpdateError(
                "split weights that are sharded stay split: FSDP knows their type (export the model instead)"
            )
        if self._residuals:
            merge_targets(self.targets, self._residuals, self._dtypes)
        self._is_detached = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._was_trainable[name])

    def _check_attached(self) -> None:
        if self._is_detached:
            raise UpdateError("this sketcher was detached from its model: attach again")

    def as_optimizer(self, lr: float = 1.0, trust: Any = None) -> Any:
        """A `torch.optim.Optimizer` for other people's loops; see `logra.sketch.facade.SketchOptimizer`."""
        from logra.sketch.facade import SketchOptimizer

        return SketchOptimizer(self, lr, trust)


def _difference(saved: Any, mine: Any) -> str:
    if isinstance(saved, dict) and isinstance(mine, dict):
        keys = sorted(k for k in {*saved, *mine} if saved.get(k) != mine.get(k))
        return ", ".join(f"{k} was {saved.get(k)!r}, is {mine.get(k)!r}" for k in keys)
    if isinstance(saved, list) and isinstance(mine, list):
        return f"{len(saved)} entries, here {len(mine)}; first difference {sorted({*saved} ^ {*mine})[:1]}"
    return f"was {saved!r}, is {mine!r}"


def attach(
    model: nn.Module,
    *,
    rank: int = 64,
    basis: str = "random",
    seed: int = 42,
    optimizer: str = "row_adam",
    variant: str = "simplified",
    targets: Sequence[str] | str | None = None,
    weights: str = "fp32",
    residual: str = "device",
    beta1: float | None = None,
    beta2: float = 0.95,
    eps: float = 1e-8,
    update_ratio: float = 6e-5,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    refresh: bool = True,
    refresh_every: int = 8,
    explore: int = 0,
    bits: int = 8,
    freeze: bool = True,
    device: torch.device | str | None = None,
) -> Sketcher:
    """Attach LoGRA to a model: afterwards `loss.backward()` fills sketches instead of weight gradients.

    Module names, the state dict and `save_pretrained` are untouched, and `Sketcher.detach` undoes it.

    rank: r; at most the in features of every target. basis: "random" (Rademacher), "aligned" (tracked from the layers'
    inputs, `logra.sketch.aligned`) or "gaussian" (ablation; never sent). optimizer: "row_adam", "adam" (for a basis that
    stays: aligned, or not refreshed) or "sgd". beta1: decay of the first moment; None: 0.9 for adam, else 0.
    refresh: draw a new basis after every update (not for aligned). refresh_every: updates between two refreshes of one
    target's aligned basis. explore: how many of its rows are random. variant: "simplified" (plain lr) or "paper" (layer
    norms restored, `update_ratio`). targets: see `logra.sketch.targets.select_targets`. max_grad_norm: clip root sum
    ||S||^2, 0 is off (the published code clips ||S A||, about sqrt(k/r) larger for a random basis). bits: 8 or 15, of the
    Update's integers. freeze: also freeze everything that is no target. weights: "fp32", or "split": the parameter becomes
    bfloat16, which the forward pass uses (so compute in bfloat16: a bfloat16 model, or autocast), and an int16 residual keeps
    the rest of the float32 (logra.sketch.split). residual: where it lives, "device" or "cpu" (2 bytes a parameter less on the
    accelerator). device: move the model there
    while attaching, target by target, so that float32 never needs to fit on it. Raises `ModelError` or `ConfigError` with the
    fix; nothing is attached then.
    """
    options = resolve({
        "rank": rank, "basis": basis, "seed": seed, "optimizer": optimizer, "variant": variant, "targets": targets,
        "weights": weights, "residual": residual, "beta1": beta1, "beta2": beta2, "eps": eps, "update_ratio": update_ratio,
        "weight_decay": weight_decay, "max_grad_norm": max_grad_norm, "refresh": refresh, "refresh_every": refresh_every,
        "explore": explore, "bits": bits, "freeze": freeze,
    })  # fmt: skip
    chosen, skipped = select_targets(model, targets)
    for target in chosen:
        if capture.is_tapped(target.module):
            raise ModelError(f"{target.name} already has a sketcher: call its detach() first")
    (check_splittable if weights == "split" else check_float32)(chosen)
    narrow = min(chosen, key=lambda t: t.in_features)
    if rank > narrow.in_features:
        raise ConfigError(
            f"rank {rank} exceeds the {narrow.in_features} inputs of {narrow.name}: use rank <= {narrow.in_features}"
        )
    if any(t.transposed and sharding(t.name, t.weight) is not None for t in chosen):
        raise ModelError(
            "Conv1D weights (GPT-2) are stored in x out: sharded, each rank would have inputs, not rows. Use one rank"
        )
    if any(t.weight.device != chosen[0].weight.device for t in chosen):
        raise ModelError("targets lie on several devices: load the model on one")
    dtypes = {t.name: t.weight.dtype for t in chosen}
    residuals = split_targets(chosen, residual, device) if weights == "split" else None
    if device is not None:
        model.to(device)
    return Sketcher(model, chosen, skipped, options, residuals, dtypes)

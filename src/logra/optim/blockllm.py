"""BlockLLM: Adam on a changing choice of whole matrices (Ramesh et al., arXiv 2406.17296; official code blockllm, 2024).

A block is a matrix; only the chosen ones have gradients, moments and steps. Of n numbers in all blocks (1 - sparsity) n are
chosen, at first by chance, and chosen anew when training on them no longer pays:

    each step:                        AdamW on the chosen blocks
    every `param_update_interval`th:  |N| of `num_bottom_to_sample` other blocks, which get a gradient for that one step
    when the trigger says so:         blocks in descending order of |N| / f, f = 1 + times chosen, as far as they fit

N = m^ / (sqrt(v^) + eps), with one gradient as at Adam's first step where there are no moments: the root of the block's size, so
that untrained blocks come in turn, the large ones first, and dead ones last.

Where we leave paper and code (`**BlockLLM.FAITHFUL` is the code; trigger="paper" with on_reselect="reset" the paper):
1. `selection="paper"`: as above. "code": |g| / exp(f' / t), f' the share of choices, t the step, which is |g| within a part in a
   thousand: Adam's steps do not follow the size of gradients, and the same blocks are chosen again and again. The code starts
   with a count of tensors, not numbers; later it stops at the first block that does not fit, even at none, and blocks that
   were never measured come last. Here the best block is always taken, so that the largest has its turn, and the others where
   they fit. (The paper masks part of the last block to meet the budget exactly; here blocks are whole.)
2. `trigger="plateau"`: every `update_freq` steps of a choice, if the mean of its last `patience` losses is not below that of the
   `patience` before. "paper": at any step, if the loss is not below the mean of the last `patience`; one noisy loss decides.
   "code": every `update_freq` steps, if the mean of all losses of the choice is below that of the last `patience`: never, while
   the loss falls at all. "interval": every `update_freq` steps; needs no loss, for where it says nothing (policy gradients).
   With the others a step without a loss is an error; in the code it silently keeps the first choice for good.
3. `on_reselect="keep"`: a block that is chosen again keeps its moments. "reset": all begin anew (both sources).
4. `first_step="step"`. "skip": the first call of step() does nothing (code).
5. `zero_gradient="skip"`: see `logra.optim.base`; a step without any signal counts for no interval either.
6. Without a switch: schedulers reach the learning rate in use, weight decay and eps are passed on, gradients may be None, random
   choices depend on seed, names and step only, all is in the state dict (none of this holds in the code). A probe lasts one
   step, not an interval, and the block unseen for longest is next. Vectors are no blocks: AdamW steps them always, and the
   matrices of a group with rank=None (embeddings, output head) too: freeze them to leave them out, as the code does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from logra.errors import CheckpointError, ConfigError, NonFiniteError
from logra.optim import adam, options, sharded
from logra.optim.base import MOMENTS, Layout, LowRankOptimizer
from logra.optim.batch import Batch, Move, Slot, batches
from logra.optim.selection import Choice, choose, is_due, shuffled
from logra.sketch.shards import local

logger = logging.getLogger(__name__)

_OF_THE_CHOICE = (
    "sparsity", "update_freq", "patience", "param_update_interval", "num_bottom_to_sample", "selection", "trigger",
    "on_reselect", "first_step", "seed",
)  # fmt: skip


class BlockLLM(LowRankOptimizer):
    """BlockLLM. State of a chosen block: both moments, float32; of any other: none, and no gradient either.

    Give the loss with every step: `step(loss=loss)`, `set_loss(loss)` before it, or a closure that returns it. In data-parallel
    training it should be the same on every rank (averaged), as the losses are part of the state; ranks agree on when to choose
    anew by themselves.

    sparsity, update_freq, patience, param_update_interval, num_bottom_to_sample: as in the code, the same in all groups, as the
    blocks of all groups are one pool. rank: None makes a group AdamW's; any number (such as `param_groups` sets) makes its
    matrices blocks, which have no rank. toggle: switch `requires_grad` off for what is not trained, so that its gradients take
    neither memory nor time; `release()` switches it on again. With False (DistributedDataParallel, whose buckets do not follow
    such switches, needs it) those gradients are made and dropped at step(). Row-sharded matrices (FSDP2) are never switched.
    Other switches: see the module.
    """

    FAITHFUL: ClassVar[Mapping[str, Any]] = {
        "selection": "code", "trigger": "code", "on_reselect": "reset", "first_step": "skip", "zero_gradient": "step",
    }  # fmt: skip
    DECAYS_FIRST = True
    CORRECTS_BEFORE_EPS = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        rank: int | None = 1,
        sparsity: float = 0.9,
        update_freq: int = 1000,
        patience: int = 100,
        param_update_interval: int = 20,
        num_bottom_to_sample: int = 1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        selection: str = "paper",
        trigger: str = "plateau",
        on_reselect: str = "keep",
        first_step: str = "step",
        toggle: bool = True,
        zero_gradient: str = "skip",
        seed: int = 42,
    ):
        self.toggle = toggle
        self._choice: Choice | None = None
        self._loss: float | Tensor | None = None
        super().__init__(
            params, lr=lr, rank=rank, sparsity=sparsity, update_freq=update_freq, patience=patience,
            param_update_interval=param_update_interval, num_bottom_to_sample=num_bottom_to_sample, betas=betas, eps=eps,
            weight_decay=weight_decay, selection=selection, trigger=trigger, on_reselect=on_reselect, first_step=first_step,
            zero_gradient=zero_gradient, seed=seed,
        )  # fmt: skip
        self._choice = Choice()
        self._enlist()
        self._select()

    def _check(self, group: Mapping[str, Any]) -> None:
        options.check_number(group, "sparsity", 0.0, math.nextafter(1.0, 0.0))
        for key in ("update_freq", "patience", "param_update_interval"):
            options.check_number(group, key, 1)
        options.check_number(group, "num_bottom_to_sample", 0)
        options.check_choice(group, "selection", ("paper", "code"))
        options.check_choice(group, "trigger", ("plateau", "interval", "paper", "code"))
        options.check_choice(group, "on_reselect", ("keep", "reset"))
        options.check_choice(group, "first_step", ("step", "skip"))

    def _layout(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Layout:
        return {key: (shape, torch.float32) for key in MOMENTS}

    def _moves(self, batch: Batch) -> list[list[Move]]:
        return self._adamw(batch)

    def _clamp(self, group: dict[str, Any]) -> None:
        """There is no rank."""

    # -- the pool of blocks ---------------------------------------------------------------------------------------------

    @property
    def selected(self) -> list[str]:
        """Names of the blocks that are trained now."""
        return list(self._now.selected)

    @property
    def _now(self) -> Choice:
        assert self._choice is not None
        return self._choice

    @property
    def _pool(self) -> Mapping[str, Any]:
        """The options of the choice."""
        return next((group for group in self.param_groups if group["rank"] is not None), self.defaults)

    def _blocks(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots() if slot.is_matrix}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        whole = {**self.defaults, **param_group}
        others = [group for group in self.param_groups if group["rank"] is not None and whole["rank"] is not None]
        for key in _OF_THE_CHOICE:
            if any(group[key] != whole[key] for group in others):
                raise ConfigError(f"{key} must be the same in all groups: their blocks are chosen from one pool")
        super().add_param_group(param_group)
        if self._choice is not None:
            self._arrange()

    def _accept(self) -> None:
        super()._accept()
        if self._choice is not None:
            self._enlist()

    def _enlist(self) -> None:
        """Take up blocks that are new."""
        for name, slot in self._blocks().items():
            if name in self._now.visits:
                continue
            if not slot.parameter.requires_grad:
                raise ConfigError(
                    f"{name} is frozen: leave it out or call requires_grad_(True); if another BlockLLM had it, its release()"
                )
            if self.toggle and not _is_sharded(slot) and _num_ranks() > 1:
                raise ConfigError(
                    "toggle=True with several ranks: DistributedDataParallel would not follow, and blocks drift apart. Build "
                    "BlockLLM with toggle=False"
                )
            self._now.visits[name] = 0

    def _arrange(self) -> None:
        """Blocks that are neither chosen nor probed have no gradient, and get none if that can be had."""
        wanted = {*self._now.selected, *self._now.probed}
        for name, slot in self._blocks().items():
            if self.toggle and not _is_sharded(slot):
                slot.parameter.requires_grad_(name in wanted)
            if name not in wanted:
                slot.parameter.grad = None

    def release(self) -> None:
        """Switch `requires_grad` on for all blocks: when this optimizer has done its work."""
        for slot in self._blocks().values():
            slot.parameter.requires_grad_(True)

    # -- a step ---------------------------------------------------------------------------------------------------------

    def set_loss(self, loss: float | Tensor) -> None:
        """The loss whose gradients the next step() takes."""
        self._loss = loss

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, loss: float | Tensor | None = None) -> Any:  # type: ignore[override]
        """One update from the gradients at hand. closure: computes them and returns the loss, which is returned."""
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        given = next((value for value in (loss, returned, self._loss) if value is not None), None)
        slots = self._with_signal()
        if slots:
            self._update(slots, self._read(given))
        self._loss = None
        self._arrange()
        return returned

    def reads(self, slot: Slot) -> bool:
        return not slot.is_matrix or slot.name in self._now.selected or slot.name in self._now.probed

    def _with_signal(self) -> list[Slot]:
        """Also a gradient that will be dropped must be finite: the model that it came from is one."""
        return [slot for slot in super()._with_signal() if self.reads(slot)]

    def _read(self, loss: Any) -> float | None:
        if self._pool["trigger"] == "interval" or not self._now.visits:
            return None
        if loss is None:
            raise ConfigError(
                "BlockLLM chooses its blocks by the loss and was given none: pass step(loss=loss), call set_loss(loss) before "
                "step(), or build it with trigger='interval', which chooses anew every update_freq steps"
            )
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        if not math.isfinite(value):
            raise NonFiniteError(f"the loss is {value}; nothing was applied")
        return value

    def _update(self, slots: Sequence[Slot], loss: float | None) -> None:
        now, pool = self._now, self._pool
        now.updates += 1
        if now.updates == 1 and pool["first_step"] == "skip":
            return
        chosen = set(now.selected)
        moving = [slot for slot in slots if not slot.is_matrix or slot.name in chosen]
        for batch in batches(moving, slots[0].parameter.device.type):
            self._advance(batch)
        self._measure([slot for slot in slots if slot.is_matrix and slot.name not in chosen])
        now.since += 1
        if loss is not None:
            now.note_loss(loss, int(pool["patience"]))
        if self._agree(is_due(now, pool), slots[0]):
            trained = [slot for name, slot in self._blocks().items() if name in chosen]
            self._measure([slot for slot in trained if slot.parameter.grad is not None])
            self._select()
        self._choose_probes()

    def _agree(self, due: bool, slot: Slot) -> bool:
        """Is it due on any rank? With losses of their own ranks would otherwise train different blocks."""
        if _num_ranks() == 1 or self._pool["trigger"] == "interval":
            return due
        flag = torch.tensor([float(due)], device=local(slot.parameter).device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def _select(self) -> None:
        """Choose, and drop the state of what is not chosen."""
        now, pool, blocks = self._now, self._pool, self._blocks()
        if not blocks:
            return
        before = set(now.selected)
        now.start(choose(now, {name: slot.parameter.numel() for name, slot in blocks.items()}, pool))
        now.probed = []
        for name, slot in blocks.items():
            if name not in now.selected or pool["on_reselect"] == "reset":
                slot.state.clear()
        logger.info(
            "update %d: %d of %d blocks are trained, %d of them new",
            now.updates, len(now.selected), len(blocks), len(set(now.selected) - before),
        )  # fmt: skip
        self._arrange()

    def _choose_probes(self) -> None:
        """The blocks to be measured at the next update: those that were not for longest, by chance among equals."""
        now, pool = self._now, self._pool
        now.probed = []
        if (now.updates + 1) % int(pool["param_update_interval"]) == 0:
            others = shuffled(now.visits.keys() - set(now.selected), pool["seed"], "probe", now.updates)
            others.sort(key=lambda name: now.measured.get(name, -1))
            now.probed = others[: int(pool["num_bottom_to_sample"])]

    # -- what a choice is made by -----------------------------------------------------------------------------------------

    def _measure(self, slots: Sequence[Slot]) -> None:
        """Note the norms that the next choice goes by."""
        if not slots:
            return
        processed = self._pool["selection"] == "paper"
        norms = [self._processed(slot) if processed else _norm(local(slot.parameter.grad)) for slot in slots]
        own = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
        for slot, square in zip(slots, _summed(slots, [value * value for value in own]), strict=True):
            self._now.norms[slot.name] = math.sqrt(square)
            self._now.measured[slot.name] = self._now.updates

    def _processed(self, slot: Slot) -> Tensor:
        """|m^ / (sqrt(v^) + eps)| of what this rank holds; of a block without moments as at Adam's first step."""
        if slot.state and MOMENTS[0] not in slot.state:
            return torch.zeros((), device=local(slot.parameter).device)  # another rank holds them
        eps, (beta1, beta2) = slot.group["eps"], slot.group["betas"]
        if not slot.state:
            gradient = local(slot.parameter.grad).float()
            return _norm(gradient / (gradient.abs() + max(eps, torch.finfo(torch.float32).tiny)))
        root = math.sqrt(1.0 - beta2 ** slot.state["step"])
        means, squares = ([slot.state[key]] for key in MOMENTS)
        return _norm(adam.directions(means, squares, eps * root)[0]) * (root / (1.0 - beta1 ** slot.state["step"]))

    # -- state ------------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "toggle": self.toggle, "_loss": None}

    def _extra(self) -> dict[str, Any]:
        """Numbers and names only."""
        return asdict(self._now)

    def _take_extra(self, extra: Mapping[str, Any]) -> None:
        self._choice = Choice(**{key: type(value)(extra[key]) for key, value in asdict(Choice()).items()})
        self._arrange()

    def _check_extra(self, extra: Mapping[str, Any], state: Mapping[int, Mapping[str, Any]]) -> None:
        names = set(self._now.visits)
        if set(extra) != {f.name for f in fields(Choice)} or set(extra["visits"]) != names:
            raise CheckpointError(
                "the saved state holds no choice of blocks, or one of other blocks than this optimizer has"
            )
        if not names >= {*extra["selected"], *extra["probed"], *extra["norms"], *extra["measured"]}:
            raise CheckpointError("the saved choice names blocks that this optimizer does not have")
        for place, slot in enumerate(self.slots()):
            if slot.is_matrix and state.get(place) and slot.name not in extra["selected"]:
                raise CheckpointError(
                    f"the saved state holds moments of {slot.name}, which is not among the chosen blocks"
                )


def _norm(tensor: Tensor) -> Tensor:
    """Euclidean, 0-dim float32."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float32)


def _is_sharded(slot: Slot) -> bool:
    return hasattr(slot.parameter, "placements")


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _summed(slots: Sequence[Slot], values: Sequence[float]) -> list[float]:
    """Each number, or the sum over the ranks that split its block."""
    result = list(values)
    for place, slot in enumerate(slots):
        if (group := sharded.group_of(slot)) is not None:
            own = torch.tensor([values[place]], dtype=torch.float64, device=local(slot.parameter).device)
            dist.all_reduce(own, group=group)
            result[place] = float(own.item())
    return result

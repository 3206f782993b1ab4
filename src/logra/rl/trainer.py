"""The training loop: rollout, reward, advantage, batch, update, publish, log; then evaluation and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from logra.errors import CheckpointError, ConfigError, MismatchError, RewardError
from logra.memory.gauge import GRADIENT, ROLLOUT, UPDATE, StepGauge
from logra.rl.advantages import AdvantageResult, RunningBaseline, compute_advantages, find_advantage
from logra.rl.batch import TrainBatch, collate
from logra.rl.checkpoint import STAGED, CheckpointStore, move_files, restore_rng, rng_state
from logra.rl.engines.base import Engine, check_training_sampling, engine_metrics
from logra.rl.evaluate import EvalResult
from logra.rl.methods.base import Method, StepResult, Writer, below, held_weights
from logra.rl.packing import may_pack
from logra.rl.rewards.result import RewardResult
from logra.rl.rollouts import Batch, OnPolicy, OnUpdate, Order, Source, check_versions, make_source
from logra.rl.run_dir import CompletionsWriter, MetricsWriter
from logra.rl.sampler import PromptSampler
from logra.rl.shared import SharedEngine, SharedSource
from logra.rl.step import LossSettings, Tally, accumulate, logprobs_of
from logra.rl.types import Prompt, Rollout, Sampling
from logra.rl.world import World, deal


@dataclass(frozen=True)
class Plan:
    """The numbers of a run. One step: `prompts_per_step * rollouts_per_prompt` rollouts, `updates_per_step` updates.

    ahead, on_update: see `logra.rl.rollouts`.
    """

    steps: int
    prompts_per_step: int
    rollouts_per_prompt: int
    microbatch_size: int
    sampling: Sampling
    loss: LossSettings
    advantage: str = "grpo"
    advantage_params: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "token"
    mask_truncated: bool = False
    updates_per_step: int = 1
    mismatch_limit: float | None = None
    probe_rollouts: int = 2
    probe_max_tokens: int = 4096
    eval_every: int = 0
    eval_before: bool = True
    eval_after: bool = True
    checkpoint_every: int = 0
    ahead: int = 0
    on_update: OnUpdate = "finish"


class Listener(Protocol):
    """Follows a run: the terminal, a tracker."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def on_eval(self, step: int, result: EvalResult) -> None: ...


class Scorer(Protocol):
    """Scores rollouts: `logra.rl.rewards.pool.RewardPool`."""

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> RewardResult: ...


class Recorder(Protocol):
    """Keeps what is needed to continue a killed run at its last finished step, and to rebuild the policy at any step."""

    def record(self, update: Any, step: int) -> Any:
        """An Update was applied in this step (1-based); durable when this returns. Gives what engines are sent."""
        ...

    def finish_step(self, step: int, num_updates: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """The step is done; `tensors` and `state` are those of a checkpoint, without the weights."""
        ...


class Trainer:
    """Holds the parts and the counters; `fit` runs. Everything that changes over a run is in `state` or in the parts."""

    def __init__(
        self,
        plan: Plan,
        *,
        method: Method,
        engine: Engine,
        prompts: Sequence[Prompt],
        sampler: PromptSampler,
        rewards: Scorer,
        pad_id: int,
        metrics: MetricsWriter | None,
        completions: CompletionsWriter | None = None,
        evaluator: Callable[[], EvalResult] | None = None,
        checkpoints: CheckpointStore | None = None,
        write_model: Writer | None = None,
        recorder: Recorder | None = None,
        reference: nn.Module | None = None,
        listeners: Sequence[Listener] = (),
        identity: Mapping[str, Any] | None = None,
        gauge: StepGauge | None = None,
        world: World | None = None,
    ):
        check_training_sampling(plan.sampling)
        find_advantage(plan.advantage, dict(plan.advantage_params))
        self.plan, self.method, self.engine = plan, method, engine
        self.world = world or World()
        self.world.share(lambda: _check_ranks(plan, self.world))  # said once
        self.prompts, self.sampler, self.rewards, self.pad_id = prompts, sampler, rewards, pad_id
        self.metrics, self.completions, self.evaluator = metrics, completions, evaluator
        self.checkpoints, self.write_model, self.reference = checkpoints, write_model, reference
        self.recorder = recorder
        self.listeners = list(listeners)
        self.identity = dict(identity or {})  # stored in checkpoints, compared by whoever resumes
        self.device = next(method.model.parameters()).device
        self.gauge = gauge or StepGauge(self.device, method.held, method.model.parameters)
        if reference is not None:
            self.gauge.keep("weights", held_weights(reference))
        self.baseline = RunningBaseline() if plan.advantage == "running_baseline" else None
        self.step = 0  # finished steps
        self.num_skipped = 0
        self.num_tokens = 0
        self.source: Source | None = None  # while `fit` runs
        self.staleness = [0]  # of the step's rollouts: updates between the policy that sampled and the trained one

    # -- the algorithm ------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Run from the current step to the last. A killed run, resumed, continues bit for bit (strictly on-policy ones)."""
        self.source = self._make_source()
        try:
            self._fit()
        finally:
            self.source.close()
            self.source = None

    def _fit(self) -> None:
        self.engine.publish(self.method.num_updates, None)
        if self.step == 0 and self.plan.eval_before:
            self.evaluate()
        while self.step < self.plan.steps:
            started = time.perf_counter()
            self.gauge.begin(self.step + 1)
            taken = self.take()
            rollouts, wait_s = taken.rollouts, time.perf_counter() - started
            scores = self.rewards.score_rollouts(rollouts)
            advantages = self.advantages(rollouts, scores)
            with self.gauge.watch():
                batch = self.batch(rollouts, advantages)
                metrics = self.update(batch)
                del batch
            self.commit(scores, metrics)
            self.step += 1
            self._source().finish(self.step)
            metrics |= {
                "step_time": time.perf_counter() - started, "time/rollout": taken.seconds, "time/rollout_wait": wait_s,
            }  # fmt: skip
            self.log(rollouts, scores, advantages, metrics)
            is_last = self.step == self.plan.steps
            if (is_last and self.plan.eval_after) or (self.plan.eval_every and self.step % self.plan.eval_every == 0):
                self.evaluate()
            if self.plan.checkpoint_every and (is_last or self.step % self.plan.checkpoint_every == 0):
                self.save()
            if self.recorder is not None:
                self.recorder.finish_step(self.step, self.method.num_updates, *self._state())

    def take(self) -> Batch:
        """The rollouts of the next step.

        Raises `MismatchError` if one was sampled by a version of the policy that is none of the last ones.
        """
        with self.gauge.phase(ROLLOUT):
            batch = self._source().take(self.step)
        newest = self.method.num_updates
        oldest = newest - self.plan.ahead * self.plan.updates_per_step
        check_versions(batch.rollouts, self.step + 1, oldest=oldest, newest=newest)
        self.staleness = [newest - rollout.version for rollout in batch.rollouts]
        return batch

    def rollout(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Sample now, from the newest policy, outside `fit`."""
        with self.gauge.phase(ROLLOUT):
            rollouts = self._order().generate(prompts, self.step)
        check_versions(rollouts, self.step + 1, oldest=self.method.num_updates, newest=self.method.num_updates)
        return rollouts

    def _order(self) -> Order:
        return Order(self.engine, self.sampler, self.prompts, self.plan.rollouts_per_prompt, self.plan.sampling)

    def _make_source(self) -> Source:
        plan, order = self.plan, self._order()
        make = partial(make_source, ahead=plan.ahead, on_update=plan.on_update, first=self.step, last=plan.steps)
        if plan.ahead == 0 or not isinstance(self.engine, SharedEngine):
            return make(order)
        shared, made = self.engine, list[Source]()  # the first rank has the thread that owns the engine
        self.world.share(lambda: made.append(make(replace(order, engine=shared.own))))
        return SharedSource(self.world, made[0] if made else None)

    def _source(self) -> Source:
        """The source of rollouts; outside `fit` one that has nothing in flight."""
        return self.source or OnPolicy(self._order())

    def advantages(self, rollouts: Sequence[Rollout], scores: RewardResult) -> AdvantageResult:
        rewards = _as_tensor(scores.total)
        if bool(rewards.isnan().all()):
            causes = "; ".join(f"{n}: {m}" for n, m in scores.messages.items()) or "every function abstained"
            raise RewardError(f"no rollout of step {self.step + 1} got a reward ({causes})")
        groups = torch.tensor([r.prompt.id for r in rollouts])
        lengths = torch.tensor([len(r.token_ids) for r in rollouts])
        return compute_advantages(
            self.plan.advantage,
            rewards,
            groups,
            state=self.baseline,
            lengths=lengths,
            **self.plan.advantage_params,
        )

    def batch(self, rollouts: Sequence[Rollout], advantages: AdvantageResult) -> TrainBatch:
        batch = collate(rollouts, self.pad_id, mask_truncated=self.plan.mask_truncated)
        return self._weighted(batch, advantages.advantages, advantages.dropped).to(self.device)

    def _weighted(self, batch: TrainBatch, advantages: Tensor, dropped: Tensor) -> TrainBatch:
        """The global denominator of one optimizer update."""
        return batch.with_advantages(
            advantages,
            aggregation=self.plan.aggregation,
            max_new_tokens=self.plan.sampling.max_new_tokens,
            dropped=dropped,
        )

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """All optimizer updates of one batch of rollouts; counts those skipped because nothing could be learned."""
        plan, count = self.plan, self.plan.updates_per_step
        parts = [self._part(batch, index) for index in range(count)]
        own = [self._own(part) for part in parts]
        old: list[Tensor | None] = [None] * count
        reference = list(old)
        with self.gauge.phase(GRADIENT):
            if count > 1:
                old = [logprobs_of(self.method.model, part, plan.microbatch_size, plan.loss) for part in own]
            if self.reference is not None:
                reference = [logprobs_of(self.reference, part, plan.microbatch_size, plan.loss) for part in own]
        tally, metrics, applied = Tally(), {}, 0
        for index, part in enumerate(parts):
            if not part.has_signal and self.reference is None:
                continue
            result = self._update_once(part, own[index], old[index], reference[index], tally)
            metrics |= result.metrics
            applied += result.applied
        self.num_skipped += count - applied
        self.num_tokens += int(batch.prompt_mask.sum()) + int(batch.completion_mask.sum())
        return metrics | _means(tally) | {"updates": applied}

    def _part(self, batch: TrainBatch, index: int) -> TrainBatch:
        """The rollouts of one of a step's updates, with their own denominator."""
        count = self.plan.updates_per_step
        if count == 1:
            return batch
        part = batch.slice(range(index * len(batch) // count, (index + 1) * len(batch) // count))
        return self._weighted(part, part.advantages, part.dropped)

    def _own(self, part: TrainBatch) -> TrainBatch:
        """The rows that this rank computes, as many on every rank: passes through sharded layers are collective. All of a rank
        alone, in order."""
        if self.world.size == 1:
            return part
        prompts = part.prompt_mask.sum(1)
        lengths = (prompts + part.completion_mask.sum(1)).tolist()
        is_packed = self.plan.loss.packed and may_pack(self.method.model)
        together = self.plan.rollouts_per_prompt if is_packed else 1
        rows = deal(lengths, self.world.size, together, prompts.tolist())[self.world.rank]
        missing = -(-len(part) // self.world.size) - len(rows)
        shortest = min(range(len(part)), key=lengths.__getitem__)
        return part.slice([*rows, *[shortest] * missing]).without(range(len(rows), len(rows) + missing))

    def _update_once(
        self, part: TrainBatch, mine: TrainBatch, old: Tensor | None, reference: Tensor | None, tally: Tally
    ) -> StepResult:
        plan, method, own = self.plan, self.method, Tally()
        tally_is_continued = bool(tally.sums)  # a later update of the same rollouts: the policy has moved on purpose
        method.zero()
        with self.gauge.phase(GRADIENT):
            accumulate(
                method.model, mine, plan.microbatch_size, plan.loss, old_logp=old, reference_logp=reference, tally=own
            )
        self.world.add(own)
        _merge(own, tally)
        if not tally_is_continued:
            self._check_mismatch(own)
        gap = _terminated_gap(own)
        if gap is not None and not any(
            self.staleness
        ):  # else the gap holds the steps that were taken since, on purpose
            method.observe_mismatch(gap)
        with self.gauge.phase(UPDATE):
            result = method.step(lambda: self.probe(part), plan.loss.temperature)
        if result.applied:
            message = result.message
            if self.recorder is not None and message is not None:
                message = self.recorder.record(message, self.step + 1)
            self._source().publish(method.num_updates, message)
        return result

    def _check_mismatch(self, tally: Tally) -> None:
        """Stop before a step is taken on rollouts that another policy, or a broken one, must have sampled.

        Only rollouts of the newest version tell: log-probs of an older one differ by the steps taken since, on purpose.
        """
        gap, limit = tally.mean("gap_abs", "tokens"), self.plan.mismatch_limit
        if limit is not None and gap > limit and not any(self.staleness):
            raise MismatchError(
                f"step {self.step + 1}: the log-probs of rollout engine and trainer differ by {gap:.3g} nats a token, above "
                f"rollout.mismatch_limit={limit:g}; nothing was applied. The engine may hold other weights, another dtype or "
                "another temperature: compare the models, or raise the limit (null turns it off)"
            )

    def probe(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Contexts for the trust region: rollouts of as many different prompts as possible, the same on every run."""
        group = self.plan.rollouts_per_prompt
        order = sorted(range(len(batch)), key=lambda row: (row % group, row))
        lengths = batch.lengths.tolist()
        rows = [row for row in order if lengths[row] > 0][: self.plan.probe_rollouts]
        part = batch.probe(rows, self.plan.probe_max_tokens)
        if len(part) % self.world.size == 0:  # else every rank computes all: as many passes on each
            part = part.rows(range(self.world.rank, len(part), self.world.size))
        completion = torch.cat([torch.zeros_like(part.prompt_mask), part.completion_mask], dim=1)
        return {
            "input_ids": part.input_ids,
            "attention_mask": part.attention_mask,
            "completion_mask": completion,
        }

    def commit(self, scores: RewardResult, metrics: Mapping[str, float]) -> None:
        """The baseline moves only when the policy did."""
        if self.baseline is not None and metrics["updates"]:
            self.baseline.commit(_as_tensor(scores.total))

    def evaluate(self) -> EvalResult | None:
        if self.evaluator is None:
            return None
        with self._source().exclusive():
            result = self.evaluator()
        if self.metrics is not None:
            self.metrics.write({"step": self.step, **result.metrics()})
        for listener in self.listeners:
            listener.on_eval(self.step, result)
        return result

    # -- logging and state --------------------------------------------------------------------------------------------

    def log(
        self,
        rollouts: Sequence[Rollout],
        scores: RewardResult,
        advantages: AdvantageResult,
        metrics: Mapping[str, float],
    ) -> None:
        if self.metrics is None:  # another rank writes
            return
        rewards = _as_tensor(scores.total)
        rewards = rewards[~rewards.isnan()]
        record: dict[str, Any] = {
            "step": self.step,
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()) if len(rewards) > 1 else 0.0,
            "frac_reward_zero_std": advantages.frac_zero_std,
            "dropped": advantages.num_dropped,
            **scores.metrics(),
            **_completion_metrics(rollouts),
            "staleness/mean": sum(self.staleness) / len(self.staleness),
            "staleness/max": max(self.staleness),
            **metrics,
            "skipped_steps": self.num_skipped,
            "num_updates": self.method.num_updates,
            "num_tokens": self.num_tokens,
            **self.gauge.metrics(),
            **engine_metrics(self.engine),
        }
        self.metrics.write(record)
        if self.completions is not None:
            self.completions.write(
                self.step, rollouts, reward=scores.total, rewards=scores.per_function,
                advantage=[float(a) for a in advantages.advantages],
            )  # fmt: skip
        for listener in self.listeners:
            listener.on_step(self.step, record)

    def save(self) -> Path | None:
        """A checkpoint with all that a bit-identical continuation needs."""
        if self.checkpoints is None:
            return None
        store = self.checkpoints
        tensors, state = self._state()
        if self.world.size == 1:
            return store.save(self.step, tensors=tensors, state=state, write_model=self.export)
        staged = store.folder / STAGED  # every rank writes; the first then makes a checkpoint of it
        self.export(staged)
        return self.world.share(
            lambda: store.save(self.step, tensors=tensors, state=state, write_model=lambda to: move_files(staged, to))
        )

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything but the weights that a bit-identical continuation needs."""
        tensors, method_state = self.method.state()
        rng_tensors, rng_values = rng_state()
        state = {
            "step": self.step,
            "num_skipped": self.num_skipped,
            "num_tokens": self.num_tokens,
            "method": method_state,
            "sampler": self._source().state(),
            "baseline": self.baseline.state_dict() if self.baseline else None,
            "rng": rng_values,
            "identity": self.identity,
        }
        return {f"method.{k}": v for k, v in tensors.items()} | rng_tensors, state

    def export(self, folder: Path) -> None:
        """Write the model as it is now, adapters merged, with tokenizer and model card."""
        if self.write_model is not None:
            self.method.export(self.write_model, folder)

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint whose model weights are already in place."""
        if (state["baseline"] is None) != (self.baseline is None):
            raise CheckpointError(
                "the checkpoint was written with another algorithm.advantage: resume with the same one"
            )
        self.sampler.load_state_dict(state["sampler"])
        own = below("method.", tensors)
        self.method.load_state(own, state["method"])
        if self.baseline is not None:
            self.baseline.load_state_dict(state["baseline"])
        self.step, self.num_skipped = int(state["step"]), int(state["num_skipped"])
        self.num_tokens = int(state["num_tokens"])
        restore_rng(tensors, state["rng"])


def _check_ranks(plan: Plan, world: World) -> None:
    """Raise `ConfigError` where some rank would have nothing to do."""
    count = plan.prompts_per_step * plan.rollouts_per_prompt // plan.updates_per_step
    if count < world.size:
        raise ConfigError(
            f"an update has {count} rollouts, fewer than the {world.size} ranks: raise rollout.prompts_per_step or "
            "rollout.rollouts_per_prompt, or start fewer ranks"
        )


def _as_tensor(rewards: Sequence[float | None]) -> Tensor:
    return torch.tensor([float("nan") if r is None else r for r in rewards], dtype=torch.float64)


def _merge(own: Tally, total: Tally) -> None:
    for name, value in own.sums.items():
        total.add(name, value)
    for name, value in own.maxima.items():
        total.peak(name, value)


def _terminated_gap(tally: Tally) -> float | None:
    """Mean log-prob gap over the rollouts that ended by themselves; None if there is none."""
    return tally.mean("terminated_gap", "terminated_tokens") if tally.sums["terminated_tokens"] else None


def _means(tally: Tally) -> dict[str, float]:
    if not tally.sums["tokens"]:
        return {}
    means = {
        "loss": tally.sums["loss"],
        "entropy": tally.mean("entropy", "tokens"),
        "mismatch/kl": tally.mean("mismatch_kl", "tokens"),
        "mismatch/max_abs": tally.maxima["gap_abs"],
        "sampling/sampling_logp_difference/mean": tally.mean("gap_abs", "tokens"),
        "sampling/sampling_logp_difference/max": tally.maxima["gap_abs"],
        "sampling/importance_sampling_ratio/min": -tally.maxima["minus_ratio"],
        "sampling/importance_sampling_ratio/max": tally.maxima["ratio"],
    }
    if "kl" in tally.sums:
        means["kl"] = tally.mean("kl", "tokens")
    return means | {n: tally.mean(n, "tokens") for n in tally.sums if n.startswith("clip_ratio/")}


def _completion_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [len(r.token_ids) for r in rollouts]
    ended = [len(r.token_ids) for r in rollouts if r.stop == "eos"]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1.0 - len(ended) / len(lengths),
        "completions/mean_terminated_length": sum(ended) / len(ended) if ended else 0.0,
    }

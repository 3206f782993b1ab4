"""From a configuration to a run that is ready to start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from logra import config as cfg
from logra.build.data import build_data, build_eval_data, build_evaluator, build_rewards
from logra.build.engine import build_engine
from logra.build.history import build_history, read_checkpoint, read_tail, start_serving, sync_token
from logra.build.model import build_method, build_model, check_base, model_card, starts_as
from logra.build.placing import build_world, load_reference, load_sharded, place, shard_again
from logra.head import plain_head
from logra.integrations.trackers import make_trackers
from logra.memory.gauge import StepGauge
from logra.rl.checkpoint import CheckpointStore
from logra.rl.data import PromptSet
from logra.rl.evaluate import EvalResult
from logra.rl.export import export_model
from logra.rl.history import History
from logra.rl.loading import Rows
from logra.rl.methods.base import Method, Writer
from logra.rl.methods.logra import LograMethod
from logra.rl.models import prepare
from logra.rl.rewards.pool import RewardPool
from logra.rl.run_dir import CompletionsWriter, MetricsWriter, RunDir, iterate_metrics
from logra.rl.sampler import PromptSampler
from logra.rl.sharded_export import export_sharded
from logra.rl.shared import SharedRewards
from logra.rl.step import LossSettings
from logra.rl.trainer import Plan, Trainer
from logra.rl.types import Sampling
from logra.rl.world import Ranks, World
from logra.sync.state import TailState

logger = logging.getLogger(__name__)

LINGER_S = 60.0  # how long a finished run waits for subscribers that lag behind


@dataclass
class Run:
    """A run ready to start. `close` releases the folder, the reward workers and the trackers, whatever happened."""

    config: cfg.Config
    trainer: Trainer
    folder: RunDir
    prompts: PromptSet
    resumed_from: Path | None
    history: History | None = None
    closers: list[Callable[[], None]] = field(default_factory=list)

    def fit(self) -> Path:
        """Train, then export the final model; returns its folder."""
        if self.history is not None:
            self.history.start(self.config.sync.subscribers, self.config.sync.timeout_s)
        self.trainer.fit()
        self.trainer.export(self.folder.final)
        if self.history is not None and self.config.sync.serve:  # on the first rank
            self.history.finish(min(self.config.sync.timeout_s, LINGER_S))
        self.trainer.world.share(lambda: None)  # no rank leaves before all are done
        return self.folder.final

    def evaluations(self) -> list[dict[str, Any]]:
        """The records of all evaluations so far, those before an interruption included."""
        return [record for record in iterate_metrics(self.folder.metrics) if "eval/num_prompts" in record]

    def close(self) -> None:
        for closer in reversed(self.closers):
            closer()
        self.closers.clear()


def build_run(config: cfg.Config) -> Run:
    """Everything `logra train` needs. What can fail fails here, before the first step; nothing is left behind then."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    world = build_world(config)
    folder = RunDir(Path(config.output_dir))
    closers: list[Callable[[], None]] = [folder.close]
    try:
        return _build(config, folder, _open(config, folder, world), closers, world)
    except BaseException:
        for closer in reversed(closers):
            closer()
        raise


def _open(config: cfg.Config, folder: RunDir, world: World) -> Path | None:
    """The first rank owns the folder; gives what to resume from."""
    resume = world.share(lambda: folder.open(config.resume))
    if not world.is_first:
        folder.verified = resume  # it was, by the first
    for note in folder.skipped:
        logger.warning("passed over a checkpoint: %s", note)
    return resume


def _build(
    config: cfg.Config, folder: RunDir, resume: Path | None, closers: list[Callable[[], None]], world: World
) -> Run:
    store = CheckpointStore(folder.checkpoints, config.checkpoint.keep)
    checkpoint = read_checkpoint(store, resume, config, folder.verified)
    tail = world.share(lambda: read_tail(folder, checkpoint, config))
    token = sync_token(config.sync, folder) if world.is_first else None
    rows = None
    if isinstance(world, Ranks):
        model, tokenizer, rows = load_sharded(config, checkpoint, world)
    else:
        model, tokenizer = build_model(config, checkpoint)
    eval_prompts = build_eval_data(config, tokenizer)
    held_out = {p.token_ids for p in eval_prompts} if config.eval and config.eval.hold_out else set()
    prompts = build_data(config.data, tokenizer, config.seed, held_out)
    rewards = _build_rewards(config, sorted(prompts[0].columns), closers, world)
    if not starts_as(config, checkpoint) and (config.algorithm.kl_coef or config.rollout.engine == "vllm"):
        world.share(lambda: check_base(config, folder.journal))  # the reference; what vLLM starts from
    reference, reference_rows = load_reference(config, model, rows, checkpoint, world)
    prepare(model, config.model.gradient_checkpointing, config.model.offload_activations)
    method = _build_method(config, model, reference, world, rows, reference_rows)
    history = build_history(config, folder, method, checkpoint, tail, closers, world)
    engine = build_engine(config, method, tokenizer, folder, history, world)
    closers.append(engine.close)
    engine.check_lengths([prompts.longest_prompt()], config.rollout.max_new_tokens)
    if config.eval:
        longest = max(eval_prompts, key=lambda prompt: len(prompt.token_ids))
        engine.check_lengths([longest], config.eval.max_new_tokens or config.rollout.max_new_tokens)
    sampler = PromptSampler(
        len(prompts),
        config.rollout.prompts_per_step,
        config.seed,
        config.data.shuffle,
        fingerprint=prompts.fingerprint,
    )
    start = tail or checkpoint
    resumed_from = resume if tail is None else folder.journal
    run = Run(config, None, folder, prompts, resumed_from, history, closers=closers)  # type: ignore[arg-type]
    trackers = make_trackers(
        list(config.log.trackers), project=config.log.project, run_name=folder.path.name, folder=folder.path,
        config=config.model_dump(mode="json"), resume_step=start.step if start else None,
    ) if world.is_first else []  # fmt: skip
    closers += [tracker.close for tracker in trackers]
    run.trainer = Trainer(
        training_plan(config),
        method=method,
        engine=engine,
        prompts=prompts,
        sampler=sampler,
        rewards=rewards,
        pad_id=engine.pad_token_id,
        metrics=MetricsWriter(folder.metrics) if world.is_first else None,
        completions=CompletionsWriter(folder.completions) if config.log.completions else None,
        evaluator=build_evaluator(config, engine, eval_prompts, rewards) if config.eval else None,
        checkpoints=store,
        write_model=_model_writer(config, tokenizer, run, world),
        recorder=history,
        reference=reference,
        listeners=[_TrackerListener(tracker) for tracker in trackers],
        identity=cfg.identity(config),
        gauge=StepGauge(
            next(model.parameters()).device, method.held, method.model.parameters, enabled=_can_meter(config, world),
            folder=folder.memory if world.is_first else None, timelines=config.log.memory_timelines,
            watch_rollouts=config.rollout.engine == "hf",
        ),
        world=world,
    )  # fmt: skip
    if start is not None:
        run.trainer.load(start.tensors, start.values if isinstance(start, TailState) else start.state)
    if history is not None:
        history.go_back(method.num_updates, served=token is not None)
        if token is not None:
            closers.append(start_serving(config.sync, token, history).close)

    def tidy() -> None:
        if start is not None:
            store.discard_after(start.step)  # a later auto-resume must not pick the abandoned branch
        folder.rewind(run.trainer.step if start is not None else -1)  # a run that begins evaluates its step 0 again
        folder.write_config(cfg.to_yaml(config))

    world.share(tidy)
    return run


def _build_rewards(
    config: cfg.Config, columns: list[str], closers: list[Callable[[], None]], world: World
) -> RewardPool | SharedRewards:
    """The first rank scores for all."""
    pools: list[RewardPool] = []

    def start() -> None:
        pools.append(build_rewards(config.reward))
        closers.append(pools[0].close)
        pools[0].warmup(columns)

    world.share(start)
    return pools[0] if world.size == 1 else SharedRewards(world, pools[0] if pools else None)


def _build_method(
    config: cfg.Config,
    model: PreTrainedModel,
    reference: nn.Module | None,
    world: World,
    rows: Rows | None,
    reference_rows: Rows | None,
) -> Method:
    """The method, on sharded weights where there are several ranks; rows: where the values of the two are, if not in them."""
    if not isinstance(world, Ranks):
        return build_method(config, model)
    if reference is not None:
        place(config, world, reference, reference_rows)
    if config.method.name == "lora":  # adapters are sharded with the layers they are in
        method = build_method(config, model, lambda wrapped: shard_again(config, world, wrapped, rows))
    else:
        masters = place(config, world, model, rows)
        method = build_method(config, model)
        if isinstance(method, LograMethod) and masters:
            method.sketcher.load_masters(masters)
    with torch.autocast(world.device.type, torch.bfloat16, enabled=config.model.dtype == "bfloat16"):
        for part in (method.model, reference):
            if part is not None:
                plain_head(part)  # the first pass tells FSDP which module is the outermost
    return method


def _can_meter(config: cfg.Config, world: World) -> bool:
    """On the CPU tensors are followed one by one, and FSDP frees storages behind that."""
    return config.log.memory and (world.size == 1 or torch.cuda.is_available())


def training_plan(config: cfg.Config) -> Plan:
    rollout, algorithm, evaluation = config.rollout, config.algorithm, config.eval
    assert algorithm.clip_low is not None and algorithm.clip_high is not None and algorithm.aggregation is not None
    loss = LossSettings(
        kind=algorithm.loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        importance_cap=algorithm.importance_cap,
        importance_level=algorithm.importance_level,
        kl_coef=algorithm.kl_coef,
        temperature=rollout.temperature,
        autocast=config.model.dtype == "bfloat16",
        head_chunk=config.train.head_chunk,
        packed=config.train.packed,
    )
    return Plan(
        steps=config.train.steps,
        prompts_per_step=rollout.prompts_per_step,
        rollouts_per_prompt=rollout.rollouts_per_prompt,
        microbatch_size=config.train.microbatch_size,
        sampling=Sampling(rollout.max_new_tokens, rollout.temperature, seed=config.seed),
        loss=loss,
        advantage=algorithm.advantage,
        advantage_params=algorithm.advantage_params,
        aggregation=algorithm.aggregation,
        mask_truncated=algorithm.mask_truncated,
        updates_per_step=algorithm.updates_per_step,
        mismatch_limit=rollout.mismatch_limit,
        probe_rollouts=config.trust.probe_rollouts,
        probe_max_tokens=config.trust.probe_max_tokens,
        eval_every=evaluation.every if evaluation else 0,
        eval_before=evaluation.before if evaluation else False,
        eval_after=evaluation.after if evaluation else False,
        checkpoint_every=config.checkpoint.every,
        ahead=rollout.ahead,
        on_update=rollout.on_update,
    )


def _model_writer(config: cfg.Config, tokenizer: PreTrainedTokenizerBase, run: Run, world: World) -> Writer:
    def write(model: nn.Module, folder: Path, masters: Mapping[str, Tensor] | None) -> None:
        is_bf16 = folder == run.folder.final and config.checkpoint.final_dtype == "bfloat16"
        dtype = torch.bfloat16 if is_bf16 else None
        card = model_card(config, run.trainer.step, run.evaluations())
        if isinstance(world, Ranks):
            export_sharded(model, tokenizer, folder, world=world, card=card, dtype=dtype, rows=masters)
            return
        export_model(model, tokenizer, folder, card=card, dtype=dtype, state_dict=masters)

    return write


class _TrackerListener:
    """Hands scalars to a tracker."""

    def __init__(self, tracker: Any):
        self.tracker = tracker

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.tracker.log(step, metrics)

    def on_eval(self, step: int, result: EvalResult) -> None:
        self.tracker.log(step, result.metrics())

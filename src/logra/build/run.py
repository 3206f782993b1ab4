"""From a configuration to a run that is ready to start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from logra import config as cfg
from logra.build.data import build_data, build_eval_data, build_evaluator, build_rewards
from logra.build.engine import build_engine
from logra.build.history import build_history, read_checkpoint, read_tail, start_serving, sync_token
from logra.build.model import build_base, build_method, build_model, build_reference, model_card
from logra.integrations.trackers import make_trackers
from logra.memory.gauge import StepGauge
from logra.rl.checkpoint import CheckpointStore
from logra.rl.data import PromptSet
from logra.rl.evaluate import EvalResult
from logra.rl.export import export_model
from logra.rl.history import History
from logra.rl.methods.base import Writer
from logra.rl.models import prepare
from logra.rl.run_dir import CompletionsWriter, MetricsWriter, RunDir, read_metrics
from logra.rl.sampler import PromptSampler
from logra.rl.step import LossSettings
from logra.rl.trainer import Plan, Trainer
from logra.rl.types import Sampling
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
        if self.history is not None and self.config.sync.serve:
            self.history.finish(min(self.config.sync.timeout_s, LINGER_S))
        return self.folder.final

    def evaluations(self) -> list[dict[str, Any]]:
        """The records of all evaluations so far, those before an interruption included."""
        return [record for record in read_metrics(self.folder.metrics) if "eval/num_prompts" in record]

    def close(self) -> None:
        for closer in reversed(self.closers):
            closer()
        self.closers.clear()


def build_run(config: cfg.Config) -> Run:
    """Everything `logra train` needs. What can fail fails here, before the first step; nothing is left behind then."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = RunDir(Path(config.output_dir))
    closers: list[Callable[[], None]] = [folder.close]
    try:
        return _build(config, folder, folder.open(config.resume), closers)
    except BaseException:
        for closer in reversed(closers):
            closer()
        raise


def _build(config: cfg.Config, folder: RunDir, resume: Path | None, closers: list[Callable[[], None]]) -> Run:
    for note in folder.skipped:
        logger.warning("passed over a checkpoint: %s", note)
    store = CheckpointStore(folder.checkpoints, config.checkpoint.keep)
    checkpoint = read_checkpoint(store, resume, config, folder.verified)
    tail = read_tail(folder, checkpoint, config)
    token = sync_token(config.sync, folder)
    model, tokenizer = build_model(config, checkpoint)
    eval_prompts = build_eval_data(config, tokenizer)
    held_out = {p.token_ids for p in eval_prompts} if config.eval and config.eval.hold_out else set()
    prompts = build_data(config.data, tokenizer, config.seed, held_out)
    rewards = build_rewards(config.reward)
    closers.append(rewards.close)
    rewards.warmup(sorted(prompts[0].columns))
    reference = build_reference(model, config, checkpoint, folder.journal)
    prepare(model, config.model.gradient_checkpointing, config.model.offload_activations)
    method = build_method(config, model)
    history = build_history(config, folder, method, checkpoint, tail, closers)
    if config.rollout.engine == "vllm" and checkpoint is not None:
        build_base(config, folder.journal)  # vLLM starts from it: what never moves must still be the same
    engine = build_engine(config, method, tokenizer, folder, history)
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
    )  # fmt: skip
    closers += [tracker.close for tracker in trackers]
    run.trainer = Trainer(
        training_plan(config),
        method=method,
        engine=engine,
        prompts=prompts,
        sampler=sampler,
        rewards=rewards,
        pad_id=engine.pad_token_id,
        metrics=MetricsWriter(folder.metrics),
        completions=CompletionsWriter(folder.completions) if config.log.completions else None,
        evaluator=build_evaluator(config, engine, eval_prompts, rewards) if config.eval else None,
        checkpoints=store,
        write_model=_model_writer(config, tokenizer, run),
        recorder=history,
        reference=reference,
        listeners=[_TrackerListener(tracker) for tracker in trackers],
        identity=cfg.identity(config),
        gauge=StepGauge(
            next(model.parameters()).device, method.held, method.model.parameters, enabled=config.log.memory,
            folder=folder.memory, timelines=config.log.memory_timelines, watch_rollouts=config.rollout.engine == "hf",
        ),
    )  # fmt: skip
    if start is not None:
        run.trainer.load(start.tensors, start.values if isinstance(start, TailState) else start.state)
    if history is not None:
        history.go_back(method.num_updates, served=token is not None)
        if token is not None:
            closers.append(start_serving(config.sync, token, history).close)
    if start is not None:
        store.discard_after(start.step)  # a later auto-resume must not pick the abandoned branch
    folder.rewind(run.trainer.step if start is not None else -1)  # a run that begins evaluates its step 0 again
    folder.write_config(cfg.to_yaml(config))
    return run


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
    )


def _model_writer(config: cfg.Config, tokenizer: PreTrainedTokenizerBase, run: Run) -> Writer:
    def write(model: nn.Module, folder: Path, masters: Mapping[str, Tensor] | None) -> None:
        is_bf16 = folder == run.folder.final and config.checkpoint.final_dtype == "bfloat16"
        dtype = torch.bfloat16 if is_bf16 else None
        card = model_card(config, run.trainer.step, run.evaluations())
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

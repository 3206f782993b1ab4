"""From a configuration to objects: the only module that knows both."""

from __future__ import annotations

import copy
import logging
import urllib.parse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from logra import config as cfg
from logra.errors import CheckpointError, ConfigError
from logra.integrations.trackers import make_trackers
from logra.rl.checkpoint import Checkpoint, CheckpointStore
from logra.rl.data import PromptSet, build_prompts
from logra.rl.engines.base import Engine
from logra.rl.engines.hf import HFEngine
from logra.rl.evaluate import EvalResult, evaluate
from logra.rl.export import export_model
from logra.rl.history import History, find_tail, has_journal, open_journal, replay
from logra.rl.methods.base import Method, Schedule, Writer
from logra.rl.methods.dense import DenseMethod, LoraMethod
from logra.rl.methods.logra import LograMethod
from logra.rl.models import BUILTIN, load_model, pick_device, prepare, set_chat_template
from logra.rl.rewards.pool import RewardPool
from logra.rl.rewards.spec import RewardSpec
from logra.rl.run_dir import CompletionsWriter, MetricsWriter, RunDir, read_metrics
from logra.rl.sampler import PromptSampler
from logra.rl.sources import GENERATED, load_rows
from logra.rl.step import LossSettings
from logra.rl.trainer import Plan, Trainer
from logra.rl.types import Prompt, Sampling
from logra.sync.http import Server, is_loopback, serve
from logra.sync.journal import Journal
from logra.sync.state import TailState
from logra.sync.token import load_or_make_token
from logra.trust.region import TrustRegion

logger = logging.getLogger(__name__)


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
    checkpoint = _read_checkpoint(store, resume, config)
    tail = _read_tail(folder, checkpoint, config)
    model, tokenizer = build_model(config, checkpoint)
    eval_prompts = build_eval_data(config, tokenizer)
    held_out = {p.token_ids for p in eval_prompts} if config.eval and config.eval.hold_out else set()
    prompts = build_data(config.data, tokenizer, config.seed, held_out)
    rewards = build_rewards(config.reward)
    closers.append(rewards.close)
    rewards.warmup(sorted(prompts[0].columns))
    reference = _reference(model, config, checkpoint)
    prepare(model, config.model.gradient_checkpointing)
    method = build_method(config, model)
    history = _build_history(config, folder, method, checkpoint, tail, closers)
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
        _plan(config),
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
    )
    if start is not None:
        run.trainer.load(start.tensors, start.values if isinstance(start, TailState) else start.state)
        store.discard_after(start.step)  # a later auto-resume must not pick the abandoned branch
    if history is not None:
        history.journal.truncate(method.num_updates)
    folder.rewind(run.trainer.step)
    folder.write_config(cfg.to_yaml(config))
    return run


def _read_checkpoint(store: CheckpointStore, path: Path | None, config: cfg.Config) -> Checkpoint | None:
    if path is None:
        return None
    checkpoint = store.load(path)
    if checkpoint.step > config.train.steps:
        raise ConfigError(
            f"{path} has {checkpoint.step} steps done, more than train.steps={config.train.steps}: raise train.steps, or "
            "resume from an earlier checkpoint"
        )
    _check_identity(path, checkpoint.state["identity"], config)
    return checkpoint


def _check_identity(path: Path, identity: Mapping[str, Any], config: cfg.Config) -> None:
    changed = cfg.differences(identity, cfg.identity(config))
    if changed:
        raise CheckpointError(
            f"{path} was written under another configuration: {'; '.join(changed[:5])}. "
            "Resume with the same values, or start a new run in another output_dir"
        )


def _read_tail(folder: RunDir, checkpoint: Checkpoint | None, config: cfg.Config) -> TailState | None:
    """Where the journal leads beyond the checkpoint; only where the run as such is resumed, not a checkpoint by name."""
    if has_journal(folder.journal) and not config.keeps_journal:
        raise ConfigError(f"{folder.path} keeps a journal: resume with journal.enabled, or delete {folder.journal}")
    is_whole_run = config.resume == "auto" or Path(config.resume).resolve() == folder.path.resolve()
    if not is_whole_run:
        return None
    tail = find_tail(folder.journal, checkpoint.step if checkpoint else 0)
    if tail is None:
        return None
    if tail.step > config.train.steps:
        raise ConfigError(f"{folder.path} has {tail.step} steps done: raise train.steps={config.train.steps}")
    _check_identity(folder.journal, tail.values["identity"], config)
    return tail


def _build_history(
    config: cfg.Config,
    folder: RunDir,
    method: Method,
    checkpoint: Checkpoint | None,
    tail: TailState | None,
    closers: list[Callable[[], None]],
) -> History | None:
    """The journal, open for writing, with the method's weights brought to the tail; served over HTTP if asked for."""
    if not config.keeps_journal or not isinstance(method, LograMethod):
        return None
    version = int(checkpoint.state["method"]["sketcher"]["update_index"]) if checkpoint else 0
    model = {"name_or_path": config.model.name_or_path, "revision": config.model.revision}
    journal = open_journal(
        folder.journal, method, version=version, step=checkpoint.step if checkpoint else 0, model=model
    )
    closers.append(journal.close)
    if tail is not None:
        replay(journal, method, version, tail)
    if config.sync.serve:
        server = _serve(config.sync, folder, journal)
        closers.append(server.close)
    section = config.journal
    return History(
        journal,
        method,
        digest_every=section.digest_every,
        anchor_every=section.anchor_every,
        keep_anchors=section.keep_anchors,
    )


def _serve(section: cfg.Sync, folder: RunDir, journal: Journal) -> Server:
    """A host that is not loopback needs a token file of the user's own; else one is made in the run folder."""
    given = Path(section.token_file).expanduser() if section.token_file else None
    if given is not None and not given.is_file():
        raise ConfigError(f"sync.token_file={given} does not exist: write a token of at least 16 characters into it")
    path = given or folder.path / "sync_token"
    token = load_or_make_token(path) if given is not None or is_loopback(section.host) else None
    server = serve(journal, token, host=section.host, port=section.port)
    logger.warning("serving policy updates at %s, token in %s", server.url, path)
    return server


def build_model(
    config: cfg.Config, checkpoint: Checkpoint | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model to train: the checkpoint's weights on resuming (for lora the base: adapters are in its state)."""
    section = config.model
    is_split = config.method.weights == "split"
    name, revision = section.name_or_path, section.revision
    if checkpoint is not None and config.method.name != "lora":
        name, revision = str(checkpoint.path / "model"), None
    model, tokenizer = load_model(
        name,
        revision=revision,
        attn_implementation=section.attn_implementation,
        device="cpu" if is_split else section.device,  # split target by target on its way to the device
        seed=config.seed,
        keep_bfloat16=is_split,
    )
    set_chat_template(tokenizer, section.chat_template)
    return model, tokenizer


def _reference(model: PreTrainedModel, config: cfg.Config, checkpoint: Checkpoint | None) -> nn.Module | None:
    """A frozen copy of the starting policy, for the KL term."""
    if config.algorithm.kl_coef == 0.0:
        return None
    if checkpoint is None or config.method.name == "lora":
        reference: nn.Module = copy.deepcopy(model)
    else:
        reference = build_model(config)[0]
    if config.method.weights == "split":
        reference.to(pick_device(config.model.device), torch.bfloat16)
    return reference.eval().requires_grad_(False)


def build_data(
    section: cfg.Data, tokenizer: PreTrainedTokenizerBase, seed: int, exclude: Collection[tuple[int, ...]] = ()
) -> PromptSet:
    is_generated = section.name.startswith(GENERATED)
    rows = load_rows(
        section.name,
        split=section.split,
        subset=section.subset,
        params=section.params,
        seed=seed if section.seed is None else section.seed,
        size=section.size if is_generated else None,
    )
    return build_prompts(
        rows,
        tokenizer,
        prompt_column=section.prompt_column,
        answer_column=section.answer_column,
        system_prompt=section.system_prompt,
        prompt_prefix=section.prompt_prefix,
        prompt_suffix=section.prompt_suffix,
        chat=section.chat,
        chat_template_kwargs=section.chat_template_kwargs,
        max_prompt_tokens=section.max_prompt_tokens,
        limit=None if is_generated else section.size,
        exclude=exclude,
    )


def build_eval_data(config: cfg.Config, tokenizer: PreTrainedTokenizerBase) -> Sequence[Prompt]:
    """Held-out prompts: the training data section with `eval.data` laid over it; generated tasks get another seed."""
    if config.eval is None:
        return ()
    given = config.eval.data
    is_generated = config.data.name.startswith(GENERATED)
    own_seed = config.seed if config.data.seed is None else config.data.seed
    base = config.data.model_dump() | {"size": None}
    if (
        given.get("name", config.data.name) != config.data.name
    ):  # another source: what only described the old one does not carry over
        base |= {"subset": None, "split": "train", "params": {}, "seed": None}
    elif is_generated:
        base |= {"seed": own_seed + 1_000_003, "size": config.eval.num_prompts or 100}
    try:
        section = cfg.Data.model_validate({**base, **given})
    except ValueError as error:
        raise ConfigError(f"eval.data does not fit the data section: {error}") from error
    is_same = all(getattr(section, k) == getattr(config.data, k) for k in ("name", "subset", "split", "params"))
    if is_same and (not is_generated or section.seed in (None, own_seed)):
        raise ConfigError(
            "eval would use the training prompts: set eval.data.split, eval.data.name or eval.data.subset, for generated "
            "tasks eval.data.seed (or --eval null to train without evaluation)"
        )
    prompts = build_data(section, tokenizer, config.seed)
    return prompts[: config.eval.num_prompts] if config.eval.num_prompts else prompts


def build_hf_engine(config: cfg.Config, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> HFEngine:
    return HFEngine(
        model,  # type: ignore[arg-type]
        tokenizer,
        batch_size=config.rollout.batch_size,
        autocast=config.model.dtype == "bfloat16",
    )


def build_engine(
    config: cfg.Config, method: Method, tokenizer: PreTrainedTokenizerBase, folder: RunDir, history: History | None
) -> Engine:
    """The rollout engine; vLLM takes hold of the base model here and acknowledges it, or the run does not start."""
    if config.rollout.engine == "hf":
        return build_hf_engine(config, method.model, tokenizer)
    assert isinstance(method, LograMethod) and history is not None  # the configuration sees to it
    from logra.rl.engines.vllm_local import VLLMEngine
    from logra.rl.engines.vllm_server import VLLMServerEngine

    section, info = config.rollout.vllm, history.journal.info()
    model = _model_folder(config, method, tokenizer, folder)
    common: dict[str, Any] = {
        "run": info.run, "base": info.base, "masters": method.blocks, "digest": method.digest,
        "transposed": method.transposed(), "digest_every": config.journal.digest_every,
    }  # fmt: skip
    if section.url is not None:
        is_near = is_loopback(urllib.parse.urlsplit(section.url).hostname or "")
        transfer = folder.path / "transfer" if is_near else None  # else all goes through the connection
        return VLLMServerEngine(section.url, model, tokenizer, folder=transfer, **common)
    return VLLMEngine(
        model,
        tokenizer,
        dtype=section.dtype or config.model.dtype,
        max_model_len=section.max_model_len,
        max_num_seqs=section.max_num_seqs,
        memory=section.memory,
        tensor_parallel_size=section.tensor_parallel_size,
        enforce_eager=section.enforce_eager,
        colocated=section.colocated,
        options=section.options,
        **common,
    )


def _model_folder(
    config: cfg.Config, method: LograMethod, tokenizer: PreTrainedTokenizerBase, folder: RunDir
) -> str:
    """What vLLM loads: the base model; a built-in one is written out first, as it is now."""
    name = config.model.name_or_path
    if not name.startswith(BUILTIN):
        return name
    path = folder.path / "rollout_model"
    method.export(lambda model, to, masters: export_model(model, tokenizer, to, card={}, state_dict=masters), path)  # type: ignore[arg-type,return-value]
    return str(path)


def build_rewards(section: cfg.Rewards) -> RewardPool:
    specs = [
        RewardSpec(f.function, weight=f.weight, name=f.name, kind=f.kind, params=f.params) for f in section.functions
    ]
    return RewardPool(specs, workers=section.workers, timeout_s=section.timeout_s, error_limit=section.error_limit)


def build_method(config: cfg.Config, model: PreTrainedModel) -> Method:
    method = config.method
    updates = config.train.steps * config.algorithm.updates_per_step
    assert method.lr is not None  # the configuration resolves it
    schedule = Schedule(method.lr, method.warmup_steps, method.schedule, updates)
    common: dict[str, Any] = {
        "targets": method.targets, "eps": method.eps, "weight_decay": method.weight_decay,
        "max_grad_norm": method.max_grad_norm,
    }  # fmt: skip
    if method.name == "dense":
        return DenseMethod(model, schedule, betas=method.betas, **common)
    if method.name == "lora":
        return LoraMethod(
            model,
            schedule,
            rank=method.rank,
            alpha=method.lora_alpha,
            seed=config.seed,
            betas=method.betas,
            **common,
        )
    return LograMethod(
        model,
        schedule,
        trust=build_trust(config.trust) if config.trust.enabled else None,
        trust_mode=config.trust.mode,
        autocast=config.model.dtype == "bfloat16",
        rank=method.rank,
        basis=method.basis,
        seed=config.seed,
        optimizer=method.optimizer,
        variant=method.variant,
        betas=method.betas,
        update_ratio=method.update_ratio,
        refresh=method.refresh,
        bits=method.bits,
        weights=method.weights,
        residual=method.residual,
        device=pick_device(config.model.device) if method.weights == "split" else None,
        dense_params=method.dense_params,
        dense_schedule=Schedule(method.dense_lr, method.warmup_steps, method.schedule, updates),
        **common,
    )


def build_trust(section: cfg.Trust) -> TrustRegion:
    return TrustRegion(
        section.budget,
        start=section.start,
        final=section.final,
        steps=section.steps,
        largest_scale=section.largest_scale,
        mismatch=section.mismatch,
        measure_every=section.measure_every,
        verify=section.verify,
        tolerance=section.tolerance,
    )


def build_evaluator(
    config: cfg.Config, engine: Engine, prompts: Sequence[Prompt], rewards: RewardPool
) -> Callable[[], EvalResult]:
    section = config.eval
    assert section is not None
    sampling = Sampling(
        max_new_tokens=section.max_new_tokens or config.rollout.max_new_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        seed=section.seed,
    )

    def run() -> EvalResult:
        return evaluate(
            engine,
            prompts,
            lambda rollouts: rewards.score_rollouts(rollouts).total,
            num_rollouts=section.rollouts_per_prompt,
            ks=section.ks,
            sampling=sampling,
            success_threshold=section.success_threshold,
        )

    return run


def _plan(config: cfg.Config) -> Plan:
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


def model_card(config: cfg.Config, steps: int, evaluations: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """What the model card tells: see `logra.rl.export.model_card`. evaluations: records, the first before training."""
    shown = [{k: v for k, v in record.items() if k.startswith("eval/") and v is not None} for record in evaluations]
    return {
        "base_model": config.model.name_or_path,
        "dataset": config.data.name,
        "method": config.method.name,
        "settings": config.method.model_dump(mode="json"),
        "steps": steps,
        "eval_before": shown[0] if shown else {},
        "eval_after": shown[-1] if shown else {},
    }


class _TrackerListener:
    """Hands scalars to a tracker."""

    def __init__(self, tracker: Any):
        self.tracker = tracker

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.tracker.log(step, metrics)

    def on_eval(self, step: int, result: EvalResult) -> None:
        self.tracker.log(step, result.metrics())

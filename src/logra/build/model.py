"""Model, reference and method from a configuration, and how the model is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from logra import config as cfg
from logra.errors import CheckpointError
from logra.optim.registry import takes_rank
from logra.rl.checkpoint import Checkpoint
from logra.rl.history import has_journal, is_base
from logra.rl.loading import SkeletonError, digest_of_files, skeleton
from logra.rl.methods.base import Method, Schedule
from logra.rl.methods.beside import store_split
from logra.rl.methods.dense import DenseMethod, LoraMethod
from logra.rl.methods.logra import LograMethod
from logra.rl.methods.low_rank import LowRankMethod
from logra.rl.models import BUILTIN, load_model, model_folder, pick_device, set_chat_template
from logra.trust.region import TrustRegion


def build_model(
    config: cfg.Config, checkpoint: Checkpoint | None = None, is_whole: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model to train: the checkpoint's weights on resuming (for lora the base: adapters are in its state).

    is_whole: it will stay in one piece; else it is left in host memory, to be sharded."""
    section = config.model
    is_split = config.method.weights == "split"
    name, revision = weights_of(config, checkpoint)
    model, tokenizer = load_model(
        name,
        revision=revision,
        attn_implementation=section.attn_implementation,
        # split target by target on its way to the device
        device=section.device if is_whole and not is_split else "cpu",
        seed=config.seed,
        keep_bfloat16=is_split,
    )
    set_chat_template(tokenizer, section.chat_template)
    return model, tokenizer


def weights_of(config: cfg.Config, checkpoint: Checkpoint | None) -> tuple[str, str | None]:
    """(name or folder, revision) of the weights to start with."""
    if checkpoint is not None and config.method.name != "lora":
        return str(checkpoint.path / "model"), None
    return config.model.name_or_path, config.model.revision


def starts_as(config: cfg.Config, checkpoint: Checkpoint | None) -> bool:
    """Is the model as it is loaded the one the run began with?"""
    return checkpoint is None or config.method.name == "lora"


def build_reference(
    model: PreTrainedModel, config: cfg.Config, checkpoint: Checkpoint | None, is_whole: bool = True
) -> PreTrainedModel | None:
    """A frozen copy of the starting policy, for the KL term, after `check_base` where it is loaded anew.

    model: as it was loaded. is_whole: else the reference is left as it is, to be sharded.
    """
    if config.algorithm.kl_coef == 0.0:
        return None
    reference = copy.deepcopy(model) if starts_as(config, checkpoint) else build_model(config)[0]
    if config.method.weights == "split" and is_whole:  # stored as the policy is, so that the KL of the first step is 0
        store_split(reference, config.method.targets, config.method.dense_params)
        reference.to(pick_device(config.model.device))
    return reference.eval().requires_grad_(False)


def check_base(config: cfg.Config, journal: Path) -> None:
    """`CheckpointError` if the base model is no longer the one that the run's journal began with.

    Its files are read a few rows at a time; a model that cannot be read so is loaded into host memory.
    """
    if not has_journal(journal):
        return
    name, section = config.model.name_or_path, config.model
    try:
        if name.startswith(BUILTIN):
            raise SkeletonError("it is made, not read")
        model, rows = skeleton(model_folder(name, section.revision), section.attn_implementation)
        same = is_base(journal, model, lambda model, names: digest_of_files(model, rows, names))
    except SkeletonError:
        same = is_base(journal, load_model(name, revision=section.revision, device="cpu", seed=config.seed)[0])
    if not same:
        raise CheckpointError(
            f"{name} is not the model this run began with: its weights have changed. Restore it, or start a new run in another "
            "output_dir"
        )


def build_method(
    config: cfg.Config, model: PreTrainedModel, shard: Callable[[nn.Module], None] | None = None
) -> Method:
    """shard: of lora, what to do with the model once its adapters are in place; other methods take a sharded model."""
    method = config.method
    updates = config.train.steps * config.algorithm.updates_per_step
    assert method.lr is not None and method.rank is not None  # the configuration resolves them
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
            shard=shard,
            **common,
        )
    if method.name != "logra":
        own: dict[str, Any] = {"seed": config.seed, **({"rank": method.rank} if takes_rank(method.name) else {})}
        if method.name == "blockllm":
            own["trigger"] = "interval"  # the loss of a policy gradient does not say how well it does
        own |= method.options
        return LowRankMethod(method.name, model, schedule, betas=method.betas, **common, **own)
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
        refresh_every=method.refresh_every,
        explore=method.explore,
        beta1=method.momentum,
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

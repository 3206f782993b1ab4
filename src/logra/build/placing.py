"""A run's ranks, and a model sharded over them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from logra import config as cfg
from logra.build.model import build_model, build_reference, starts_as, weights_of
from logra.errors import ConfigError
from logra.rl.checkpoint import Checkpoint
from logra.rl.loading import Rows, SkeletonError, fill, is_bfloat16, read_masters, skeleton
from logra.rl.methods.beside import choose_dense, store_split
from logra.rl.models import BUILTIN, load_tokenizer, model_folder, pick_device, set_chat_template
from logra.rl.sharding import shard_model
from logra.rl.world import Ranks, World, under_launcher
from logra.sketch.shards import rows_of
from logra.sketch.targets import select_targets

logger = logging.getLogger(__name__)


def build_world(config: cfg.Config) -> World:
    """The ranks that torchrun started; one alone otherwise. Raises `ConfigError` for what several ranks cannot do."""
    if not under_launcher():
        return World()
    if config.rollout.engine == "vllm" and not config.rollout.vllm.urls:
        raise ConfigError(
            "several ranks share vLLM servers: start one (vllm serve, or logra launch) and set rollout.vllm.url, or use "
            "rollout.engine=hf"
        )
    if config.rollout.on_update == "keep":
        raise ConfigError("rollout.on_update=keep runs on one rank: over several use finish or restart")
    device = pick_device(config.model.device)
    if config.distributed.offload and device.type == "cpu":
        raise ConfigError(
            "distributed.offload=true keeps shards in host memory, where a model on the CPU is anyway: set it to false"
        )
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    section = config.distributed
    return Ranks(device, section.replicas, section.timeout_s)


def load_sharded(
    config: cfg.Config, checkpoint: Checkpoint | None, world: Ranks
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Rows | None]:
    """(the model, its tokenizer, where its values are): a skeleton that `place` fills, or a whole model and None."""
    name, revision = weights_of(config, checkpoint)
    if not name.startswith(BUILTIN):
        try:
            model, rows = skeleton(model_folder(name, revision), config.model.attn_implementation)
        except SkeletonError as error:
            if world.is_first:
                logger.warning("every rank loads the whole model into host memory: %s", error)
        else:
            tokenizer = load_tokenizer(name, revision)
            set_chat_template(tokenizer, config.model.chat_template)
            return model, tokenizer, rows
    return *build_model(config, checkpoint, is_whole=False), None


def load_reference(
    config: cfg.Config, model: PreTrainedModel, rows: Rows | None, checkpoint: Checkpoint | None, world: World
) -> tuple[PreTrainedModel | None, Rows | None]:
    """(the reference of the KL term or None, where its values are). model, rows: the policy as it was loaded."""
    if not isinstance(world, Ranks) or starts_as(config, checkpoint) or not config.algorithm.kl_coef:
        return build_reference(model, config, checkpoint, is_whole=not isinstance(world, Ranks)), rows
    reference, _, own = load_sharded(config, None, world)
    return reference.eval().requires_grad_(False), own


def place(config: cfg.Config, world: Ranks, model: nn.Module, rows: Rows | None) -> Mapping[str, Tensor]:
    """Shard a model. Gives the float32 rows here of targets that are split, by name.

    rows: None if the model has its values, in host memory.
    """
    is_split = config.method.weights == "split" and config.method.name == "logra"
    masters: Mapping[str, Tensor] = {}
    if is_split and rows is None:
        masters = _masters_of(config, world, model)
        store_split(model, config.method.targets, config.method.dense_params)
    elif is_split and rows is not None:
        _store_split(config, world, model, rows)
    shard_again(config, world, model, rows)
    if is_split and rows is not None:
        masters = read_masters(model, rows, [t.name for t in select_targets(model, config.method.targets)[0]])
    return masters


def shard_again(config: cfg.Config, world: Ranks, model: nn.Module, rows: Rows | None) -> None:
    """Shard a model whose storage is as it will be (a reference, one with adapters), and fill it."""
    is_bf16 = config.model.dtype == "bfloat16"
    # float32 parameters travel as autocast computes with them; split ones are bfloat16, beside some in float32
    dtype = torch.bfloat16 if is_bf16 and config.method.weights == "fp32" else None
    shard_model(model, world.mesh, gather_dtype=dtype, offload=config.distributed.offload)
    if rows is not None:
        fill(model, rows, torch.device("cpu") if config.distributed.offload else world.device)


def _masters_of(config: cfg.Config, world: Ranks, model: nn.Module) -> dict[str, Tensor]:
    rank, ranks = world.mesh.get_local_rank("shard"), world.mesh.size(world.mesh.ndim - 1)
    masters = {}
    for target in select_targets(model, config.method.targets)[0]:
        here = rows_of(target.out_features, ranks)[rank]
        masters[target.name] = target.weight.detach()[here.start : here.stop].float().clone()
    return masters


def _store_split(config: cfg.Config, world: Ranks, model: nn.Module, rows: Rows) -> None:
    """`store_split` of a skeleton: values are in the files, of which each rank looks at its part."""
    targets = {t.name for t in select_targets(model, config.method.targets)[0]}
    moving = targets | choose_dense(model, config.method.dense_params, targets).keys()
    frozen = [(name, p) for name, p in model.named_parameters() if name not in moving]
    own = {name: rows_of(p.shape[0], world.size)[world.rank] for name, p in frozen}
    is_exact = all(world.gather(all(is_bfloat16(rows, name, own[name]) for name, _ in frozen)))
    for name, parameter in model.named_parameters():
        if name in targets or (is_exact and name not in moving):
            parameter.data = parameter.data.to(torch.bfloat16)

"""The rollout engine from a configuration."""

from __future__ import annotations

import urllib.parse
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from logra import config as cfg
from logra.errors import UpdateError
from logra.rl.engines.base import Engine
from logra.rl.engines.hf import HFEngine
from logra.rl.export import export_model
from logra.rl.history import History
from logra.rl.methods.base import Method
from logra.rl.methods.logra import LograMethod
from logra.rl.models import BUILTIN
from logra.rl.run_dir import RunDir
from logra.rl.sharding import gathered
from logra.rl.shared import SharedEngine, SpreadEngine
from logra.rl.world import World
from logra.sync.http import is_loopback
from logra.sync.journal import Journal


def build_engine(
    config: cfg.Config,
    method: Method,
    tokenizer: PreTrainedTokenizerBase,
    folder: RunDir,
    history: History | None,
    world: World,
) -> Engine:
    """The rollout engine; vLLM takes hold of the base model here and acknowledges it, or the run does not start."""
    if config.rollout.engine == "hf":
        engine = build_hf_engine(config, method.model, tokenizer)
        return engine if world.size == 1 else SpreadEngine(world, engine, partial(gathered, method.model))
    assert isinstance(method, LograMethod) and history is not None  # the configuration sees to it
    model = _model_folder(config, method, tokenizer, folder)
    if world.size == 1:
        return _build_vllm(config, method, tokenizer, folder, history, model)
    engines: list[Engine] = []
    world.share(lambda: engines.append(_build_vllm(config, method, tokenizer, folder, history, model)))
    return SharedEngine(world, engines[0] if engines else None)


def _build_vllm(
    config: cfg.Config,
    method: LograMethod,
    tokenizer: PreTrainedTokenizerBase,
    folder: RunDir,
    history: History,
    model: str,
) -> Engine:
    from logra.rl.engines.vllm_local import VLLMEngine

    section, journal = config.rollout.vllm, history.journal
    info = journal.info()
    common: dict[str, Any] = {
        "run": info.run, "base": info.base, "masters": method.blocks, "digest": method.digest,
        "head": lambda: journal.head, "transposed": method.transposed(),
    }  # fmt: skip
    if section.urls:
        if is_sharded := method.sketcher.shards is not None:
            common["digest"] = _refuse_reading
        return build_fleet(config, model, tokenizer, folder, journal, common, is_sharded=is_sharded)
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


def build_fleet(
    config: cfg.Config,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: RunDir,
    journal: Journal,
    link: dict[str, Any],
    *,
    is_sharded: bool = False,
) -> Engine:
    """The engine over the vLLM servers that the configuration names. is_sharded: reading the weights takes all ranks."""
    from logra.rl.engines.fleet import FleetEngine
    from logra.rl.engines.vllm_server import VLLMServerEngine

    section = config.rollout.vllm

    def make(url: str, **options: Any) -> VLLMServerEngine:
        is_near = is_loopback(urllib.parse.urlsplit(url).hostname or "")
        # else all goes through the connection; a folder for each, as they are sent the same names at the same time
        transfer = folder.path / "transfer" / str(section.urls.index(url)) if is_near else None
        return VLLMServerEngine(
            url,
            model,
            tokenizer,
            folder=transfer,
            by_index=section.fetch,
            concurrency=section.max_num_seqs,
            **options,
            **link,
        )

    if config.rollout.on_update == "keep":
        # one server, the configuration sees to it: a fleet samples and moves in turns
        return make(section.urls[0], patience_s=section.patience_s, midway=True)
    return FleetEngine(
        section.urls,
        partial(make, connect=False),
        log=journal,
        live="never" if is_sharded else "always" if config.rollout.ahead == 0 else "placing",
        patience_s=section.patience_s,
    )


def _refuse_reading() -> str:
    raise UpdateError(
        "the vLLM server has other weights than the run began with, and weights that are sharded over ranks are not sent to it: "
        "start it from the run's base model"
    )


def build_hf_engine(config: cfg.Config, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> HFEngine:
    return HFEngine(
        model,  # type: ignore[arg-type]
        tokenizer,
        batch_size=config.rollout.batch_size,
        autocast=config.model.dtype == "bfloat16",
    )


def _model_folder(config: cfg.Config, method: LograMethod, tokenizer: PreTrainedTokenizerBase, folder: RunDir) -> str:
    """What vLLM loads: the base model; a built-in one is written out first, as it is now."""
    name = config.model.name_or_path
    if not name.startswith(BUILTIN):
        return name
    path = folder.path / "rollout_model"
    method.export(lambda model, to, masters: export_model(model, tokenizer, to, card={}, state_dict=masters), path)  # type: ignore[arg-type,return-value]
    return str(path)

"""The rollout engine from a configuration."""

from __future__ import annotations

import urllib.parse
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from logra import config as cfg
from logra.rl.engines.base import Engine
from logra.rl.engines.hf import HFEngine
from logra.rl.export import export_model
from logra.rl.history import History
from logra.rl.methods.base import Method
from logra.rl.methods.logra import LograMethod
from logra.rl.models import BUILTIN
from logra.rl.run_dir import RunDir
from logra.sync.http import is_loopback


def build_engine(
    config: cfg.Config, method: Method, tokenizer: PreTrainedTokenizerBase, folder: RunDir, history: History | None
) -> Engine:
    """The rollout engine; vLLM takes hold of the base model here and acknowledges it, or the run does not start."""
    if config.rollout.engine == "hf":
        return build_hf_engine(config, method.model, tokenizer)
    assert isinstance(method, LograMethod) and history is not None  # the configuration sees to it
    from logra.rl.engines.vllm_local import VLLMEngine
    from logra.rl.engines.vllm_server import VLLMServerEngine

    section, journal = config.rollout.vllm, history.journal
    info = journal.info()
    model = _model_folder(config, method, tokenizer, folder)
    common: dict[str, Any] = {
        "run": info.run, "base": info.base, "masters": method.blocks, "digest": method.digest,
        "head": lambda: journal.head, "transposed": method.transposed(),
    }  # fmt: skip
    if section.url is not None:
        is_near = is_loopback(urllib.parse.urlsplit(section.url).hostname or "")
        transfer = folder.path / "transfer" if is_near else None  # else all goes through the connection
        return VLLMServerEngine(section.url, model, tokenizer, folder=transfer, by_index=section.fetch, **common)
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

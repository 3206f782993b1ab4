"""A sharded model as an ordinary folder, by torch.distributed.checkpoint: ranks write their rows, the first joins the files.

No rank ever holds the model whole: files are merged on disk. What comes out loads with `from_pretrained`, and row by row on any
number of ranks (`logra.rl.loading`).
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from logra.errors import CheckpointError, ModelError
from logra.files import copy_mode, fsync_path, fsync_tree, remove_tree, replace_folder, temporary_sibling, write_file
from logra.head import unwrapped
from logra.rl.export import cast_weight, exported_config, has_tied_embeddings, model_card, set_dtype, widest
from logra.rl.world import Ranks
from logra.sketch.shards import local

FILE_BYTES = 5 << 30  # of one safetensors file
_SHARDS = "sharded"  # where torch's writer puts the ranks' files


def export_sharded(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    *,
    world: Ranks,
    card: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    rows: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write `folder`, replacing an older one only when the new one is complete. A collective call; arguments as of
    `logra.rl.export.export_model`.

    rows: values of this rank's rows that stand for the model's own (float32 masters, merged adapters), by name. Raises
    `CheckpointError` on every rank if any could not write.
    """
    base = _transformers_model(model)
    values = {name: _host_dtensor(world, p, own, dtype) for name, p, own in _entries(base, rows or {})}
    temporary = world.share(lambda: _new_folder(folder))
    failure = ""
    try:
        _save(values, temporary, world)
    except Exception as error:  # torch wraps the ranks' errors; which one failed, all know
        failure = " ".join(str(error).split())[:300] or type(error).__name__
    failures = [text for text in world.gather(failure) if text]
    stored = widest(values)
    del values

    def finish() -> None:
        try:
            if failures:
                raise CheckpointError(
                    f"the model could not be exported to {folder}: {failures[0]}. Free some space or name another folder"
                )
            _finish(base, tokenizer, stored, temporary, folder, model_card(card))
        finally:
            if temporary.exists():
                remove_tree(temporary)

    world.share(finish)
    return folder


def _new_folder(folder: Path) -> Path:
    temporary = temporary_sibling(folder)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error}. Make it writable or name another folder") from error
    return temporary


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    base = unwrapped(model)
    if not isinstance(base, PreTrainedModel):
        raise ModelError(f"cannot export a {type(base).__name__}: only transformers models")
    return base


def _entries(base: PreTrainedModel, rows: Mapping[str, Tensor]) -> list[tuple[str, Any, Tensor]]:
    """(name in the exported model, the parameter, its rows here) of every parameter once, adapters merged."""
    merged = _merged(base)
    found = []
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        own = merged.get(plain, rows.get(plain, local(parameter).detach()))
        found.append((plain, parameter, own))
    return found


def _merged(base: nn.Module) -> dict[str, Tensor]:
    """Rows here of W + scaling B A of every layer with adapters."""
    found = {}
    for name, module in base.named_modules():
        if not hasattr(module, "lora_A") or not hasattr(module, "base_layer"):
            continue
        layer: Any = module
        own = local(layer.base_layer.weight).detach().float()
        for adapter in layer.active_adapters:
            right = layer.lora_A[adapter].weight.detach()
            right = right.full_tensor() if hasattr(right, "full_tensor") else right
            own = own + layer.scaling[adapter] * (local(layer.lora_B[adapter].weight).detach().float() @ right.float())
        found[f"{name}.weight"] = own
    return found


def _host_dtensor(world: Ranks, parameter: Any, own: Tensor, dtype: torch.dtype | None) -> DTensor:
    own = cast_weight(own, dtype) if dtype is not None and own.is_floating_point() else own
    placements = [Replicate()] * (world.mesh.ndim - 1) + [Shard(0)]
    shape = parameter.shape
    return DTensor.from_local(
        own.detach().cpu().contiguous(), world.host_mesh, placements, run_check=False, shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )  # fmt: skip


def _save(values: Mapping[str, DTensor], folder: Path, world: Ranks) -> None:
    index, size, place = 1, 0, {}
    for name, value in values.items():
        count = value.numel() * value.element_size()
        if size and size + count > FILE_BYTES:
            index, size = index + 1, 0
        place[name], size = index, size + count
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=place, save_distributed=True, enable_consolidation=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        dcp.save(dict(values), storage_writer=writer, process_group=world.objects)


def _finish(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    temporary: Path,
    folder: Path,
    card: str,
) -> None:
    try:
        shutil.rmtree(temporary / _SHARDS, ignore_errors=True)
        files = sorted(temporary.glob("*.safetensors"))
        if len(files) == 1:
            os.rename(files[0], temporary / "model.safetensors")
            (temporary / "model.safetensors.index.json").unlink(missing_ok=True)
        _write_config(base, dtype, temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        write_file(temporary / "README.md", card.encode())
        copy_mode(temporary, temporary / "README.md")
        fsync_tree(temporary)
        old = replace_folder(temporary, folder)
        fsync_path(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"the model could not be exported to {folder}: {error}. Free some space or name another folder"
        ) from error
    if old is not None:
        remove_tree(old)


def _write_config(base: PreTrainedModel, dtype: torch.dtype, folder: Path) -> None:
    tied = has_tied_embeddings(base, dict(base.named_parameters(remove_duplicate=False)))
    with exported_config(base, tied):
        base.config.architectures = [type(base).__name__.removeprefix("FSDP")]
        base.config.save_pretrained(folder)
        base.generation_config.save_pretrained(folder)
    set_dtype(folder / "config.json", dtype)

"""A model straight into its shards: each rank reads its own rows from the safetensors files, and no rank has the model whole.

The skeleton is made without memory (torch's meta device), sharded, and filled. Where the files cannot be read so (no safetensors,
names that transformers rearranges while loading), `SkeletonError` says why and the caller loads the model whole. A digest of the
files' weights needs a few rows at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from logra.errors import LograError, ModelError
from logra.head import unwrapped
from logra.sketch.block import blocks_of
from logra.sketch.digest import add_sums, block_sums, combine
from logra.sketch.shards import local, rows_here
from logra.sketch.split import split
from logra.sketch.targets import is_conv1d

_CHUNK = 1 << 24  # numbers of a matrix that are looked at together
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class SkeletonError(LograError):
    """This model cannot be read row by row; it must be loaded whole."""


class Rows:
    """The tensors of a folder's safetensors files, any rows of them."""

    def __init__(self, folder: Path) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        try:
            if index.is_file():
                self._files: dict[str, Path] = {
                    name: folder / file for name, file in json.loads(index.read_bytes())["weight_map"].items()
                }
            elif single.is_file():
                with safe_open(single, "pt") as file:
                    self._files = dict.fromkeys(file.keys(), single)
            else:
                raise SkeletonError(f"{folder} has no safetensors files")
            self._open: dict[Path, Any] = {path: safe_open(path, "pt") for path in sorted(set(self._files.values()))}
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise SkeletonError(f"the safetensors files of {folder} cannot be read: {error}") from error

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def dtype(self, name: str) -> torch.dtype:
        found = self._slice(name).get_dtype()
        if found not in _DTYPES:
            raise SkeletonError(f"{name} is stored as {found}")
        return _DTYPES[found]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, rows: range) -> Tensor:
        """Rows of a tensor, as it is stored."""
        return self._slice(name)[rows.start : rows.stop]

    def _slice(self, name: str) -> Any:
        return self._open[self._files[name]].get_slice(name)


def skeleton(folder: Path, attn_implementation: str) -> tuple[PreTrainedModel, Rows]:
    """(the model without memory, float32, and where its values are). Raises `SkeletonError` if they do not fit each other."""
    rows = Rows(folder)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        if name not in rows.names or rows.shape(name) != tuple(parameter.shape):
            raise SkeletonError(
                f"{folder} has no {name} of shape {tuple(parameter.shape)}: transformers makes it of others"
            )
        if not parameter.ndim:
            raise SkeletonError(f"{name} is a single number, which has no rows")
        rows.dtype(name)
    persistent = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    if persistent:
        raise SkeletonError(f"{folder} has buffers beside its parameters ({persistent[0]})")
    return model, rows


def is_bfloat16(rows: Rows, name: str, part: range) -> bool:
    """Does bfloat16 hold these rows exactly?"""
    if rows.dtype(name) == torch.bfloat16:
        return True
    value = rows.read(name, part).float()
    return torch.equal(value.to(torch.bfloat16).float(), value)


def digest_of_files(model: nn.Module, rows: Rows, names: Sequence[str]) -> str:
    """`logra.sketch.block.digest` of these parameters of a skeleton, from its files."""
    parameters, sums = dict(model.named_parameters(remove_duplicate=False)), {}
    for name, block in blocks_of(model, names).items():
        shape = parameters[name].shape
        is_transposed = len(shape) == 2 and is_conv1d(model.get_submodule(name.rpartition(".")[0]))
        step, parts = max(1, _CHUNK // shape[1:].numel()), []
        for start in range(0, shape[0], step):
            value = rows.read(name, range(start, min(start + step, shape[0]))).float()
            place = {"column_start": start} if is_transposed else {"row_start": start}
            parts.append(block_sums(value.t() if is_transposed else value.view(len(value), -1), name, **place))
        sums[name] = (block.shape, add_sums(*parts))
    return combine(sums)


@torch.no_grad()
def fill(model: nn.Module, rows: Rows, device: torch.device) -> None:
    """Give a sharded skeleton memory and its values. A bfloat16 parameter gets the upper halves of split ones; adapters, which
    have no values in the files, get memory only.

    Raises `SkeletonError` if a buffer is left without a value, `ModelError` for values that are not finite.
    """
    base: PreTrainedModel = unwrapped(model)
    model.to_empty(device=device)
    base.tie_weights()  # each of a tied pair got memory of its own
    _make_buffers(base)
    for name, parameter in base.named_parameters():
        here, place = local(parameter), name.replace(".base_layer.", ".")
        if here.numel() and ".lora_" not in name:
            value = rows.read(place, rows_here(name, parameter)).float()
            if not bool(torch.isfinite(value).all()):
                raise ModelError(f"{place} holds NaN or infinite values: use an undamaged model")
            here.copy_(split(value)[0] if here.dtype == torch.bfloat16 else value)


def read_masters(model: nn.Module, rows: Rows, names: list[str]) -> Mapping[str, Tensor]:
    """Float32 values of this rank's rows, one parameter at a time as it is asked for."""
    parameters = dict(model.named_parameters())
    places = {name: rows_here(name, parameters[name]) for name in names}
    return _Lazy(rows, places)


class _Lazy(Mapping[str, Tensor]):
    def __init__(self, rows: Rows, places: Mapping[str, range]) -> None:
        self._rows, self._places = rows, places

    def __getitem__(self, name: str) -> Tensor:
        return self._rows.read(name, self._places[name]).float()

    def __iter__(self) -> Any:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _make_buffers(model: PreTrainedModel) -> None:
    """Values of the buffers that no file holds (rotary frequencies), by the model's own rule."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)
    for name, buffer in model.named_buffers():
        if not bool(torch.isfinite(buffer).all()):
            raise SkeletonError(f"nothing says what the buffer {name} holds")

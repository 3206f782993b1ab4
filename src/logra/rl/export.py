"""The trained model as an ordinary folder: loads with `from_pretrained`, says in README.md where it comes
from.

Which weights are tied is read off their storage, never off the configuration (peers disagree, and a head that
is not really shared is then lost). The live model is left as it is: its configuration is copied, not
corrected.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from logra.errors import CheckpointError, ModelError
from logra.files import (
    copy_mode,
    fsync_path,
    fsync_tree,
    remove_tree,
    replace_folder,
    temporary_sibling,
    write_file,
)
from logra.sketch.split import split

PACKAGES = ("logra", "torch", "transformers", "datasets", "peft")
CITATION = """@misc{logra,
  title         = {{LoGRA}},
  author        = {Zhang, S. and Zhang, Y. and Hu, J. and Li, Y. and Zhang, H. and Xu, B. and Kautz, J. and
  Dong, Y.}, year          = {2026},
  eprint        = {2610.06647},
  archivePrefix = {arXiv},
}"""


def export_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    *,
    card: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write `folder`, replacing an older one only when the new one is complete. Returns it.

    model: a transformers model, or a peft model around one (exported with its adapters merged into a copy).
    card: see `model_card`.
    dtype: of the floating-point weights; None keeps each as it is, and the widest becomes the
    configuration's.
    state_dict: replaces the model's own values by name (for instance float32 masters); tied names stay tied.
    Parameters, flags, hooks and configuration of `model` are as before, also after a failure. Raises
    CheckpointError if the disk is full, ModelError for a model that is not from transformers.
    """
    folder = Path(folder)
    base, values = _values(model, state_dict, dtype)
    temporary = temporary_sibling(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        _write(temporary, base, values, tokenizer, model_card(card))
        old = replace_folder(temporary, folder)
        fsync_path(folder.parent)
    except (OSError, SafetensorError) as error:
        needed = sum(t.numel() * t.element_size() for t in {id(t): t for t in values.values()}.values())
        raise CheckpointError(
            f"the model could not be exported to {folder}: {error}. It needs about {needed:,} bytes: free "
            f"some space or name another folder"
        ) from error
    finally:
        if temporary.exists():
            remove_tree(temporary)
    if old is not None:
        remove_tree(old)
    return folder


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two tensors exactly if they are the same memory seen the same way."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _values(
    model: nn.Module, given: Mapping[str, Tensor] | None, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The transformers model inside `model` and the tensors to save; tied names hold the same tensor
    object.
    """
    if "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel):
        base, source = _merged(model)
    elif isinstance(model, PreTrainedModel):
        base, source = model, model.state_dict()
    else:
        raise ModelError(
            f"cannot export a {type(model).__name__}: pass a transformers model or a peft model around one"
        )
    given = given or {}
    if unknown := sorted(given.keys() - source.keys()):
        raise ModelError(f"state_dict has names that the model has not: {unknown[:5]}")
    tied: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in source.items():
        tied.setdefault(_identity(tensor), []).append(name)
    values = {}
    for names in tied.values():
        value = next((given[name] for name in names if name in given), source[names[0]]).detach()
        value = cast_weight(value, dtype) if dtype is not None and value.is_floating_point() else value
        values.update(dict.fromkeys(names, value))
    return base, values


def cast_weight(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 to bfloat16 as split weights round, so that an export is what a split trainer or engine computes with."""
    is_split = dtype == torch.bfloat16 and value.dtype == torch.float32
    return split(value)[0] if is_split else value.to(dtype)


def _merged(model: Any) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The base model's tensors with the adapters merged in, layer by layer in copies: nothing is un-merged
    later.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model()
    layers = {f"{name}.": module for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)}
    values = {name: tensor for name, tensor in base.state_dict().items() if not name.startswith(tuple(layers))}
    extra = [name for name in values if ".modules_to_save." in name or ".trainable_tokens_" in name]
    if extra:
        raise ModelError(f"the adapter trains whole modules too ({extra[0]}): export model.merge_and_unload() instead")
    for prefix, module in layers.items():
        merged = copy.deepcopy(module)
        merged.merge()
        values |= {f"{prefix}{key}": value.cpu() for key, value in merged.get_base_layer().state_dict().items()}
    return base, values


def _write(
    folder: Path,
    model: PreTrainedModel,
    values: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
    card: str,
) -> None:
    with exported_config(model, has_tied_embeddings(model, values)):
        model.save_pretrained(folder, state_dict=dict(values))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_file(folder / "README.md", card.encode())
    set_dtype(folder / "config.json", widest(values))
    copy_mode(folder, folder / "README.md")
    fsync_tree(folder)


@contextmanager
def exported_config(model: PreTrainedModel, tied: bool | None) -> Iterator[None]:
    """Lends the model corrected copies of its configurations: `save_pretrained` writes them, and into
    them.
    """
    if not model.can_generate():
        raise ModelError(f"{type(model).__name__} is not a language model: only those can be exported")
    config, generation = model.config, model.generation_config
    model.config = copy.deepcopy(config)
    if tied is not None:
        model.config.tie_word_embeddings = tied
    model.generation_config = _valid_generation(generation)
    try:
        yield
    finally:
        model.config, model.generation_config = config, generation


def has_tied_embeddings(model: PreTrainedModel, values: Mapping[str, Tensor]) -> bool | None:
    """Whether input and output embedding are the same tensor in `values`; None if the model has not both."""
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        return None
    return values[f"{names[id(embedding)]}.weight"] is values[f"{names[id(head)]}.weight"]


def _valid_generation(generation: GenerationConfig) -> GenerationConfig:
    """A copy that may be saved: base models ship a temperature without do_sample, which transformers refuses
    to save.
    """
    out = copy.deepcopy(generation)
    try:
        out.validate(strict=True)
    except ValueError:
        out.do_sample = True
    return out


def widest(values: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype that holds every floating-point weight: the one to load with, so that none is rounded."""
    kinds = {tensor.dtype for tensor in values.values() if tensor.is_floating_point()}
    return functools.reduce(torch.promote_types, kinds) if kinds else torch.float32


def set_dtype(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_file(path, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def model_card(card: Mapping[str, Any]) -> str:
    """README.md with YAML front matter.

    Keys of card, all optional: base_model, dataset, method (text); settings (dict), steps (int), eval_before
    and eval_after (dicts of numbers), tags (list), license (text). Other keys are a ModelError. Local paths
    are shortened to their last part: nobody else has them.
    """
    known = {
        "base_model",
        "dataset",
        "method",
        "settings",
        "steps",
        "eval_before",
        "eval_after",
        "tags",
        "license",
    }
    if card.keys() - known:
        raise ModelError(f"unknown model card keys {sorted(card.keys() - known)}: known are {sorted(known)}")
    base, dataset = (_shown(card.get(key)) for key in ("base_model", "dataset"))
    method = card.get("method", "LoGRA")
    front = {
        "base_model": base,
        "datasets": None if dataset is None else [dataset],
        "library_name": "transformers",
        "license": card.get("license"),
        "pipeline_tag": "text-generation",
        "tags": ["logra", "reinforcement-learning", *card.get("tags", ())],
    }
    sections = [
        "---\n" + yaml.safe_dump({k: v for k, v in front.items() if v is not None}, sort_keys=False) + "---",
        f"# {base or 'A model'}, trained with {method}",
        f"Reinforcement learning with [logra](https://arxiv.org/abs/2610.06647) from `{base or 'unknown'}`"
        + (f" on `{dataset}`" if dataset else "")
        + (f", {card['steps']} steps." if "steps" in card else "."),
    ]
    return "\n\n".join([*sections, *_tables(card, method)]) + "\n"


def _tables(card: Mapping[str, Any], method: str) -> list[str]:
    """The sections of the card below its introduction."""
    sections = []
    before, after = card.get("eval_before") or {}, card.get("eval_after") or {}
    if before or after:
        rows = [(name, _number(before.get(name)), _number(after.get(name))) for name in {**before, **after}]
        sections.append("## Evaluation\n\n" + _table(("metric", "before", "after"), rows))
    settings = {"method": method, **card.get("settings", {})}
    sections.append("## Training\n\n" + _table(("setting", "value"), [(k, _shown(v)) for k, v in settings.items()]))
    versions = [(name, version) for name in PACKAGES if (version := _version(name)) is not None]
    sections.append("## Versions\n\n" + _table(("package", "version"), versions))
    sections.append(f"## Citation\n\n```bibtex\n{CITATION}\n```")
    return sections


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _shown(value: Any) -> Any:
    """Local paths by their last part, everything else as it is."""
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~", ".")) else value


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

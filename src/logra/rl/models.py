"""Loading a model and its tokenizer: float32 weights, no remote code, errors that name the fix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from logra.errors import ModelError
from logra.region import region
from logra.rl.tiny import char_tokenizer, tiny_model

BUILTIN = "builtin:"


def pick_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one, else the CPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device=cuda, but torch sees no CUDA device: use model.device=cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def load_model(
    name: str,
    *,
    revision: str | None = None,
    attn_implementation: str = "sdpa",
    device: str = "auto",
    seed: int = 0,
    keep_bfloat16: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in float32 and its tokenizer, from a folder, the hub, or `builtin:tiny-llama|tiny-gpt2`.

    keep_bfloat16: a model that is stored in bfloat16 stays so, which is all that split weights need.
    Raises `ModelError` if there is no such model, it cannot be read, or it would need remote code.
    """
    if name.startswith(BUILTIN):
        arch = name.removeprefix(BUILTIN).removeprefix("tiny-")
        if arch not in ("llama", "gpt2"):
            raise ModelError(f"no built-in model {name!r}: use builtin:tiny-llama or builtin:tiny-gpt2")
        return tiny_model(arch, seed=seed, spread=0.1).to(pick_device(device)), char_tokenizer()  # type: ignore[arg-type]
    path, options, hint = _whereabouts(name, revision)
    with _named_failure(f"cannot load the model {name!r}", hint):
        dtype: Any = "auto" if keep_bfloat16 else torch.float32
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attn_implementation, **options
        )
        if model.dtype != torch.bfloat16:
            model.float()
    tokenizer = load_tokenizer(name, revision)
    check_finite(model, name)
    return model.to(pick_device(device)), tokenizer


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that is not built in."""
    path, options, hint = _whereabouts(name, revision)
    with _named_failure(f"cannot load the tokenizer of {name!r}", hint):
        return AutoTokenizer.from_pretrained(path, **options)


def model_folder(name: str, revision: str | None = None) -> Path:
    """The folder of a model's files, fetched from the hub if it is not a local one."""
    path, options, hint = _whereabouts(name, revision)
    if Path(path).is_dir():
        return Path(path)
    import huggingface_hub

    with _named_failure(f"cannot fetch the model {name!r}", hint):
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        others = ["consolidated*", "original/*"]  # the same weights in another layout
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=patterns, ignore_patterns=others, **options))


def _whereabouts(name: str, revision: str | None) -> tuple[str, dict[str, Any], str]:
    """(folder or hub name, options for transformers, a hint for errors)."""
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir()
    path = str(Path(name).expanduser()) if looks_local else name
    if looks_local and not (Path(path) / "config.json").is_file():
        raise ModelError(f"no model in {name}: there is no config.json (for the demo model run `make model`)")
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"revision": revision} if revision else {}
    hint = "" if looks_local else " (for the demo model run `make model`; offline, give a local folder)"
    return path, options, hint


@contextlib.contextmanager
def _named_failure(what: str, hint: str) -> Iterator[None]:
    """Whatever transformers and its file readers raise, as one `ModelError` line."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        text = " ".join(str(error).split())[:300]
        raise ModelError(f"{what}: {text}{hint}") from error


def check_finite(model: nn.Module, name: str) -> None:
    """Raise `ModelError` naming the first parameter that holds NaN or infinity."""
    for parameter_name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ModelError(f"{name}: {parameter_name} holds NaN or infinite values: use an undamaged model")


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    """Replace the chat template: Jinja text, or the path of a file that holds it."""
    if template is None:
        return
    path = Path(template).expanduser()
    is_path = "{" not in template
    if is_path and not path.is_file():
        raise ModelError(f"model.chat_template={template!r} is neither a file nor a Jinja template")
    tokenizer.chat_template = path.read_text(encoding="utf-8") if is_path else template


def disable_dropout(model: nn.Module) -> None:
    """Dropout would make the trained log-probs differ from the sampled ones; the configuration is left alone."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def offload_inputs(model: nn.Module) -> None:
    """Keep the inputs of checkpointed layers in host memory between forward and backward pass (pinned where there is CUDA).

    Call it after checkpointing was enabled. Only what a gradient flows through is moved: the hidden states between layers.
    """

    def wrapped(checkpoint: Any) -> Any:
        def run(function: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
                return checkpoint(function, *args, **kwargs)

        return run

    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None:
            module._gradient_checkpointing_func = wrapped(checkpoint)  # type: ignore[assignment]


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    if not tensor.requires_grad or not tensor.is_floating_point():
        return tensor.device, tensor
    with region("offloaded"):
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _from_host(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device, non_blocking=True)


def prepare(model: PreTrainedModel, gradient_checkpointing: bool, offload: bool = False) -> None:
    """Training mode only where checkpointing needs it (transformers looks at the flag), always without dropout.

    offload: see `offload_inputs`; on the CPU, where it would only copy, nothing.
    """
    disable_dropout(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        if offload and model.device.type != "cpu":
            offload_inputs(model)
    else:
        model.eval()

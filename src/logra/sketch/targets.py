"""Which weights are trained: chosen and skipped tensors, each with its shape and the reason.

A target is the weight of an `nn.Linear` (stored out x in) or of a GPT-2 style `Conv1D` (stored in x out). By default every
such module inside a repeated layer of the model is one (attention and MLP projections of a decoder); embeddings, the output
head, norms and biases are not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logra.errors import ModelError
from logra.sketch.shards import local

_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)\.")
_SMALL_HEADS = ("router", "gate", "score", "classifier")


@dataclass(frozen=True)
class Target:
    """One trained matrix. `out_features` x `in_features` is the logical shape; `transposed` says it is stored in x out."""

    name: str
    module: nn.Module
    out_features: int
    in_features: int
    transposed: bool

    @property
    def weight(self) -> nn.Parameter:
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def matrix(self) -> Tensor:
        """The weight as an (out, in) view that shares memory with the parameter; of a sharded one, the rows here."""
        weight = local(self.weight).detach()
        return weight.t() if self.transposed else weight


@dataclass(frozen=True)
class Skipped:
    """A parameter that is not trained, and why."""

    name: str
    shape: tuple[int, ...]
    reason: str


def clean_name(name: str) -> str:
    """A parameter or module name without the components that wrappers add (checkpoint, FSDP, compile)."""
    return _WRAPPERS.sub("", name)


def select_targets(model: nn.Module, targets: Sequence[str] | str | None = None) -> tuple[list[Target], list[Skipped]]:
    """Choose the weights to train.

    targets: None for the default above; a list of module-name suffixes (["q_proj", "mlp.down_proj"]); or one regular
    expression that must match whole module names. A suffix that matches nothing raises `ModelError`.
    """
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise ModelError(f"targets={targets!r} is not a regular expression: {error}") from error
    head = _output_weight(model)
    owners: dict[int, str] = {}
    modules = dict(model.named_modules())
    chosen: list[Target] = []
    skipped: list[Skipped] = []
    for raw_name, parameter in model.named_parameters(remove_duplicate=False):
        name = clean_name(raw_name)
        first = owners.setdefault(id(parameter), name)
        module_name, _, leaf = raw_name.rpartition(".")
        reason = _reason_to_skip(modules[module_name], leaf, clean_name(module_name), parameter, targets)
        if first != name:
            reason = f"the same tensor as {first}"
            chosen = [t for t in chosen if t.weight is not parameter]
        elif parameter is head and reason != "embedding":
            reason = "output head"
        if reason:
            skipped.append(Skipped(name, tuple(parameter.shape), reason))
        else:
            chosen.append(_target(name, modules[module_name], parameter))
    _check(chosen, skipped, targets, modules)
    return chosen, skipped


def _target(name: str, module: nn.Module, parameter: Tensor) -> Target:
    transposed = is_conv1d(module)
    rows, columns = parameter.shape
    return Target(name, module, *((columns, rows) if transposed else (rows, columns)), transposed)


def is_conv1d(module: nn.Module) -> bool:
    """Is this a GPT-2 style Conv1D, whose weight is stored in x out?"""
    # transformers' Conv1D, known by name so that this package needs torch only
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Conv1d)


def _output_weight(model: nn.Module) -> Tensor | None:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    return getattr(head, "weight", None)


def _reason_to_skip(
    module: nn.Module, leaf: str, module_name: str, parameter: Tensor, targets: Sequence[str] | str | None
) -> str:
    if leaf == "bias":
        return "bias"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if parameter.ndim != 2:
        return f"not a matrix ({type(module).__name__})"
    if leaf != "weight" or not (isinstance(module, nn.Linear) or is_conv1d(module)):
        return f"not a Linear or Conv1D weight ({type(module).__name__})"
    if not parameter.is_floating_point():
        return f"quantised storage ({parameter.dtype})"
    return "" if _wanted(module_name, targets) else "not selected"


def _wanted(module_name: str, targets: Sequence[str] | str | None) -> bool:
    if targets is None:
        parts = module_name.split(".")
        return any(part.isdigit() for part in parts) and parts[-1] not in _SMALL_HEADS
    if isinstance(targets, str):
        return re.fullmatch(targets, module_name) is not None
    return any(module_name == suffix or module_name.endswith("." + suffix) for suffix in targets)


def _check(
    chosen: list[Target],
    skipped: list[Skipped],
    targets: Sequence[str] | str | None,
    modules: dict[str, nn.Module],
) -> None:
    if targets is not None and not isinstance(targets, str):
        names = [t.name.removesuffix(".weight") for t in chosen]
        for suffix in targets:
            if not any(name == suffix or name.endswith("." + suffix) for name in names):
                leaves = sorted({n.rpartition(".")[2] for n, m in modules.items() if isinstance(m, nn.Linear)})
                why = [f"{s.name}: {s.reason}" for s in skipped if s.name.removesuffix(".weight").endswith(suffix)]
                raise ModelError(
                    f"target {suffix!r} matches no trainable matrix"
                    + (f" ({'; '.join(why[:3])})" if why else f"; linear modules here: {leaves}")
                )
    if not chosen:
        reasons = sorted({s.reason for s in skipped})
        raise ModelError(
            f"no weight to train was found (targets={targets!r}); skipped because: {reasons}. Name the modules to train: "
            "targets=['q_proj', 'mlp.down_proj'], or a regular expression that matches whole module names"
        )


def check_float32(targets: Sequence[Target]) -> None:
    """Raise `ModelError` unless every target is stored in float32 (steps of 6e-5 vanish in bfloat16, methods.md 1.6)."""
    for target in targets:
        if target.weight.dtype != torch.float32:
            raise ModelError(
                f"{target.name} is stored as {target.weight.dtype}; LoGRA's steps are far below its precision and would "
                "be lost. Load the model with dtype=torch.float32 (compute may still be bfloat16 under autocast), or attach "
                "with weights='split', which keeps in an int16 residual what bfloat16 lacks"
            )

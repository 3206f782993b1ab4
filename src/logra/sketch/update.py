"""The Update: integer factors, row scales and the basis' key. It is the only thing that ever changes a weight.

    W <- (1 - decay) W + (q_u q_a) 2^e

Whoever holds the same weights and applies the same Updates in the same order holds the same weights to the last bit,
whatever the device, kernel, sharding or order of summation (design 2.3). Legend: d out features, k in features, r rank.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logra.errors import UpdateError
from logra.sketch import basis as bases
from logra.sketch import wire
from logra.sketch.quantize import power_of_two
from logra.sketch.targets import clean_name, is_conv1d

_CHUNK = 1 << 20  # elements of a row chunk: the product's temporary stays in cache


@dataclass(frozen=True)
class Factor:
    """One target's part: q (d, r) int8 or int16 and exponent (d,) int8, for a weight of d = out_features rows.

    basis is an explicit int8 (r, k) block, or None where the Update's key says how to draw it.
    """

    name: str
    out_features: int
    in_features: int
    q: Tensor
    exponent: Tensor
    basis: Tensor | None = None


@dataclass(frozen=True)
class Update:
    """One step of the policy, number `index` (0-based), as it is sent, applied and stored.

    basis, seed, basis_index: the kind of basis and its key (logra.sketch.basis.draw). decay: the decoupled weight decay.
    """

    index: int
    basis: str
    basis_index: int
    seed: int
    rank: int
    bits: int
    factors: Mapping[str, Factor]
    decay: float = 0.0

    def to_bytes(self) -> bytes:
        """The wire form: header, integers, checksum; no pickle. Raises `UpdateError` for a basis that is not exact."""
        return wire.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> Update:
        """Read the wire form. Truncated, corrupted or foreign bytes raise `UpdateError`; nothing is half-read."""
        return wire.decode(data, Update, Factor)

    def basis_block(self, name: str, columns: range, device: torch.device | str = "cpu") -> Tensor:
        """The unscaled basis of a target: (r, len(columns)), integers in int8 (float32 for `gaussian`)."""
        explicit = self.factors[name].basis
        if explicit is not None:
            return explicit[:, columns.start : columns.stop].to(device)
        return bases.draw(self.basis, self.seed, name, self.basis_index, range(self.rank), columns, device)


def apply_block(
    weight_dk: Tensor,
    q_dr: Tensor,
    exponent_d: Tensor,
    basis_rk: Tensor,
    decay: float = 0.0,
    *,
    chunk: int = _CHUNK,
) -> None:
    """Apply to any block of rows and columns, in place: weight (d, k) float32, with the matching rows of q and columns of
    the basis. Powers of two are folded into q before the product, which keeps every partial sum exact."""
    scaled_dr = q_dr.to(weight_dk.device, torch.float32) * power_of_two(exponent_d.to(weight_dk.device))[:, None]
    basis = basis_rk.to(weight_dk.device, torch.float32)
    rows = max(1, chunk // max(1, weight_dk.shape[1]))
    product = weight_dk.new_empty(min(rows, len(weight_dk)), weight_dk.shape[1])
    with exact_matmul(q_dr.dtype):
        for start in range(0, len(weight_dk), rows):
            block = weight_dk[start : start + rows]
            delta = torch.mm(scaled_dr[start : start + rows], basis, out=product[: len(block)])
            if decay:
                block.mul_(1.0 - decay)
            block.add_(delta)


@contextlib.contextmanager
def exact_matmul(dtype: torch.dtype) -> Iterator[None]:
    """Full float32 products for 15-bit factors. 8-bit ones are exact under TF32 and bfloat16 inputs too: nothing to do."""
    precision = torch.get_float32_matmul_precision()
    if dtype == torch.int8 or precision == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def apply_update(model: nn.Module, update: Update) -> None:
    """Apply an Update to `model` (float32 targets), bit for bit as the trainer did. All is checked before a weight moves."""
    matrices = _matrices(model, update)
    with torch.no_grad():
        for name, matrix in matrices.items():
            factor = update.factors[name]
            block = update.basis_block(name, range(factor.in_features), matrix.device)
            apply_block(matrix, factor.q, factor.exponent, block, update.decay)


def _matrices(model: nn.Module, update: Update) -> dict[str, Tensor]:
    """The (out, in) views of the weights an Update names; `UpdateError` if one is missing or does not fit."""
    parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    modules = {clean_name(n): m for n, m in model.named_modules(remove_duplicate=False)}
    missing = [name for name in update.factors if name not in parameters]
    if missing:
        raise UpdateError(
            f"update {update.index} names weights this model lacks: {missing[:3]} ({len(missing)} in all)"
        )
    views = {}
    for name, factor in update.factors.items():
        weight = parameters[name].detach()
        matrix = weight.t() if is_conv1d(modules[name.rpartition(".")[0]]) else weight
        if tuple(matrix.shape) != (factor.out_features, factor.in_features):
            raise UpdateError(
                f"update {update.index} expects {name} as {factor.out_features} x {factor.in_features}, "
                f"the model has {tuple(matrix.shape)}: another model?"
            )
        if matrix.dtype != torch.float32:
            raise UpdateError(f"{name} is stored as {matrix.dtype}: exact updates need float32 weights")
        views[name] = matrix
    return views


def digest(model: nn.Module, names: list[str] | None = None) -> str:
    """Hex digest (blake2b, 128 bits) of weights' names, shapes and float32 values; all parameters if `names` is None.

    Equal digests mean equal weights to the last bit, so a stale or drifted holder is detected, not hoped against.
    """
    parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    result = hashlib.blake2b(digest_size=16)
    for name in sorted(parameters if names is None else names):
        if name not in parameters:
            raise UpdateError(f"no weight is called {name!r}")
        weight = parameters[name].detach()
        result.update(f"{name}:{tuple(weight.shape)}:".encode())
        result.update(memoryview(weight.to("cpu", torch.float32).contiguous().numpy().reshape(-1).view("u1")))
    return result.hexdigest()

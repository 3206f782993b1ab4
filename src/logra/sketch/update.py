"""The Update: integer factors, row scales and the basis' key. It is the only thing that ever changes a weight.

    W <- (1 - decay) W + (q_u q_a) 2^e

Whoever holds the same weights and applies the same Updates in the same order holds the same weights to the last bit,
whatever the device, kernel, sharding or order of summation (design 2.3). Legend: d out features, k in features, r rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from logra.errors import WrongBaseError
from logra.sketch import basis as bases
from logra.sketch.quantize import power_of_two

_CHUNK = 1 << 20  # elements of a row chunk: the product's temporary stays in cache


@dataclass(frozen=True)
class Factor:
    """One target's part: q (d, r) int8 or int16 and exponent (d,) int8, for a weight of d = out_features rows.

    basis is an explicit int8 (r, k) block, or None where the Update's key says how to draw it. basis_index, of an aligned
    Update only: the index of the first Update that used this basis; without basis it is the one that travelled in that Update,
    and that a holder has kept (`logra.sketch.block.Block.basis`).
    """

    name: str
    out_features: int
    in_features: int
    q: Tensor
    exponent: Tensor
    basis: Tensor | None = None
    basis_index: int | None = None


@dataclass(frozen=True)
class Update:
    """One step of the policy, number `index` (0-based), as it is sent, applied and stored: version index to index + 1.

    basis, seed, basis_index: the kind of basis and its key (logra.sketch.basis.draw); "aligned" has no key, its bases are in
    the factors and basis_index is the Update's own index. decay: the decoupled weight decay. dense: the new float32 values,
    whole, of parameters that are trained densely beside the targets; logical (out, in) layout, vectors as (n, 1).
    """

    index: int
    basis: str
    basis_index: int
    seed: int
    rank: int
    bits: int
    factors: Mapping[str, Factor]
    decay: float = 0.0
    dense: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Everything that this Update moves: the targets, then the densely trained parameters."""
        return [*self.factors, *self.dense]

    def incremental(self) -> Update:
        """What is sent and stored of it: an aligned basis travels only in the first Update that uses it. Others: as it is."""
        if self.basis != "aligned":
            return self
        factors = {n: f if f.basis_index == self.index else replace(f, basis=None) for n, f in self.factors.items()}
        return replace(self, factors=factors)

    def to_bytes(self, envelope: Mapping[str, Any] | None = None) -> bytes:
        """The wire form: header, integers, checksum; no pickle. Raises `UpdateError` for a basis that is not exact.

        envelope: a JSON object that travels in the header (`logra.sync.Packet` puts run, base and step there).
        """
        from logra.sketch import wire

        return wire.encode(self, envelope)

    @staticmethod
    def from_bytes(data: bytes) -> Update:
        """Read the wire form. Truncated, corrupted or foreign bytes raise `DamagedUpdateError`; nothing is half-read."""
        from logra.sketch import wire

        return wire.decode(data)

    def basis_block(self, name: str, columns: range, device: torch.device | str = "cpu") -> Tensor:
        """The unscaled basis of a target: (r, len(columns)), integers in int8 (float32 for `gaussian`).

        Raises `WrongBaseError` for an aligned one that travelled in an earlier Update."""
        factor = self.factors[name]
        if factor.basis is not None:
            return factor.basis[:, columns.start : columns.stop].to(device)
        if self.basis == "aligned":
            raise WrongBaseError(
                f"update {self.index} goes on with the basis of {name} that travelled in update {factor.basis_index}: apply it "
                "to blocks that have kept it (logra.sync.Replica)"
            )
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
    q_dr, power_d = q_dr.to(weight_dk.device), power_of_two(exponent_d.to(weight_dk.device))
    basis = basis_rk.to(weight_dk.device, torch.float32)
    rows = max(1, chunk // max(1, weight_dk.shape[1]))
    product = weight_dk.new_empty(min(rows, len(weight_dk)), weight_dk.shape[1])
    with exact_matmul(q_dr.dtype):
        for start in range(0, len(weight_dk), rows):
            block = weight_dk[start : start + rows]
            scaled = q_dr[start : start + rows].to(torch.float32).mul_(power_d[start : start + rows, None])
            delta = torch.mm(scaled, basis, out=product[: len(block)])
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

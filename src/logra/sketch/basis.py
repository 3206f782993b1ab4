"""Sketch bases: A (r x k), independent of the batch, drawn before the accumulation window (LoGRA, arXiv 2610.06647).

`random`: A_ij = +-1/sqrt(r). Stored as int8 signs; the factor 1/sqrt(r) is applied to the sketch, so that what is merged is
an exact integer product (design 2.3). `gaussian`: A_ij ~ N(0, 1/r), for the paper's ablation only; it is floating-point, not
bit-portable, and refused where exactness is promised. Both give E[A^T A] = I, so S A is an unbiased estimate of G.
`aligned` is not drawn but tracked: logra.sketch.aligned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from logra import hashing
from logra.errors import UpdateError
from logra.region import region

KINDS = ("random", "gaussian", "aligned")
_TOGETHER = 16  # enough to hide the cost of a call, few enough that the words of a pass are small beside the bases


def basis_key(seed: int, name: str, index: int) -> int:
    """The hash key of target `name`'s basis for update `index` (0-based)."""
    return hashing.derive_key(seed, "basis", name, index)


def draw(
    kind: str,
    seed: int,
    name: str,
    index: int,
    rows: range,
    columns: range,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A block of the unscaled basis: int8 signs for `random`, float32 N(0, 1) for `gaussian`. Times 1/sqrt(r) it is A."""
    key = basis_key(seed, name, index)
    if kind == "random":
        return hashing.signs(key, rows, columns, device)
    if kind == "gaussian":
        return _gaussian(key, rows, columns, device)
    raise UpdateError(f"unknown basis {kind!r}: use one of {KINDS}")


def draw_all(
    kind: str,
    seed: int,
    names: Sequence[str],
    index: int,
    rows: range,
    columns: Sequence[range],
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """`draw` for several targets, the same bits, `_TOGETHER` of them in one pass where the kind allows it."""
    if kind != "random":
        return [draw(kind, seed, name, index, rows, c, device) for name, c in zip(names, columns, strict=True)]
    blocks: list[Tensor] = []
    for start in range(0, len(names), _TOGETHER):
        some = slice(start, start + _TOGETHER)
        keys = [basis_key(seed, name, index) for name in names[some]]
        blocks += hashing.signs_of_many(keys, rows, columns[some], device)
    return blocks


def scale(rank: int) -> float:
    """1/sqrt(r), the factor between the unscaled block of `draw` and A."""
    return 1.0 / math.sqrt(rank)


def _gaussian(key: int, rows: range, columns: range, device: torch.device | str) -> Tensor:
    row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device)[:, None]
    column = torch.arange(columns.start, columns.stop, dtype=torch.int64, device=device)[None, :]
    first, second, *_ = hashing.philox((column, row, 0, 2), key)  # Box-Muller needs two uniforms in (0, 1]
    radius = torch.sqrt(-2.0 * torch.log((first.double() + 1.0) * 2.0**-32))
    return (radius * torch.cos(second.double() * (2.0 * math.pi * 2.0**-32))).float()


class DrawnBases:
    """The bases of all targets where a key determines them; drawn when first used after an update.

    columns: k by name. refresh: new ones after every update; else those of update 0 stay.
    """

    def __init__(
        self, kind: str, columns: Mapping[str, int], *, rank: int, seed: int, refresh: bool, device: torch.device | str
    ):
        self.kind, self.columns, self.rank, self.seed = kind, dict(columns), rank, seed
        self.refreshes, self.device = refresh, device
        self._blocks: dict[str, Tensor] = {}
        self._drawn = -1  # the index they were drawn for

    def basis_index(self, index: int) -> int:
        """The index in the key of the bases that update `index` uses."""
        return index if self.refreshes else 0

    def block(self, name: str, index: int) -> Tensor:
        """The unscaled A of update `index`, (r, k): int8 signs for `random`, float32 for `gaussian`."""
        index = self.basis_index(index)
        if self._drawn != index:
            columns = [range(count) for count in self.columns.values()]
            self._blocks, self._drawn = {}, -1  # first, so that two sets never exist at once
            with region("basis"):
                blocks = draw_all(
                    self.kind, self.seed, list(self.columns), index, range(self.rank), columns, self.device
                )
            self._blocks, self._drawn = dict(zip(self.columns, blocks, strict=True)), index
        return self._blocks[name]

    def scale(self, name: str) -> float:
        """1/sqrt(r)."""
        return scale(self.rank)

    def explicit(self, name: str) -> tuple[Tensor | None, int | None]:
        """Nothing: an Update names the key."""
        return None, None

    def observer(self, name: str, index: int) -> None:
        """Nothing is taken in."""

    def collected(self, index: int) -> list[Tensor]:
        """Nothing."""
        return []

    def forget(self) -> None:
        """Nothing was collected."""

    def following(self, index: int, totals: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """The next bases are drawn, and have nothing in common with these."""
        return {}

    def take(self, bases: Mapping[str, Any]) -> None:
        """Nothing to put in force."""

    def held(self) -> list[Tensor]:
        """The tensors in memory now."""
        return list(self._blocks.values())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Nothing: seed and index are all there is."""
        return {}, {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""

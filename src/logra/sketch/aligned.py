"""Aligned bases (ours, beyond the paper): A's rows span the dominant subspace of the layer's inputs, tracked online.

The gradient G = H^T X of a layer has its row space in the span of the inputs X, and language-model activations are strongly
low-rank: a few of their principal directions hold most of G. One power step, Y = X^T W X A^T, from what the backward pass has
at hand anyway, and a QR decomposition give the next basis (orthogonal iteration, Oja's subspace rule).

A is kept as integers times a power of two a row, A = 2^e_i q_i with |q| <= 127: so it can be sent and merged exactly
(design 2.3).

What it costs while a target is due (all of them in the first `START` updates, later one in `every`): its input x (N, k) stays
for the backward pass, and Y, (k, r) float32, until the next bases are made. Layers that share an input (q, k and v; gate and
up) share the kept tensor in float32 and in a bfloat16 model; under autocast from float32 each keeps its own bfloat16 copy.
A third more saved activations without checkpointing (of Llama-like layers; a fifth under autocast, which saves more anyway);
with it, one layer's inputs at a time, during its own backward.

Legend: N tokens, d out features, k in features, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from logra import hashing
from logra.errors import UpdateError
from logra.region import region
from logra.sketch.basis import basis_key
from logra.sketch.capture import Observer
from logra.sketch.quantize import power_of_two
from logra.sketch.saved import fitting

LARGEST = 127
SPREAD = 2  # the powers of two by which the scales of a basis' rows differ at most
START = 2  # updates after which every basis is refreshed: from random signs to the inputs' subspace
MEMORY = 0.8  # what the energies of the past count at the next refresh
_FLOOR = 1e-6  # of all energy: what the old basis weighs where there is nothing else


def start_block(seed: int, name: str, rank: int, columns: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(q (r, k) int8, scale (r,) float32) before any input was seen: random signs, rows of a norm from 1 to 2."""
    q = hashing.signs(basis_key(seed, name, 0), range(rank), range(columns), device)
    exponent = -((columns.bit_length() - 1) // 2)
    return q, torch.full((rank,), 2.0**exponent, dtype=torch.float32, device=device)


def power_step(x_Nk: Tensor, grad_Nd: Tensor, projected_Nr: Tensor) -> Tensor:
    """Y = X^T W (X A^T), (k, r) float32, with W = diag(||h_n||): a token counts as much as its output gradient.

    With the squares, X^T W X would be the expectation of G^T G if the h_n of different tokens were uncorrelated, and its
    leading directions the best basis there is; but a few tokens would decide. The norm itself captures as much of a later
    batch's gradient, and more than equal weights (docs/results.md). Padding, and tokens without influence on the loss, have
    h_n = 0 and drop out.
    """
    weighted_Nr = projected_Nr.float() * torch.linalg.vector_norm(grad_Nd, dim=1, keepdim=True, dtype=torch.float32)
    if x_Nk.is_cuda and x_Nk.dtype != torch.float32:
        return torch.mm(x_Nk.t(), weighted_Nr.to(x_Nk.dtype), out_dtype=torch.float32)
    return x_Nk.t().float() @ weighted_Nr


def next_basis(
    y_kr: Tensor, previous_rk: Tensor, energy_r: Tensor, explore_er: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(the next A (r, k) with orthonormal rows, their energies (r,) of sum 1), float32, from one batch's Y.

    QR of Y / sum ||Y_j|| + MEMORY A^T diag(energy): the past, as the rank sees it, fades with MEMORY a refresh. It costs
    nothing, keeps the axes steady, so that moments carried over keep their meaning (overlap of two bases in a row: 0.99 of 1,
    without it 0.80; docs/results.md), and fills up where Y has fewer directions than r. Columns are processed in order and
    keep their signs. explore (e, k): rows that take the place of the last e, made orthogonal to the rest.
    """
    columns = y_kr / y_kr.abs().amax()  # first, so that no square over- or underflows
    columns = columns / torch.linalg.vector_norm(columns, dim=0).sum()
    columns = columns + previous_rk.t() * (MEMORY * energy_r + _FLOOR)
    if explore_er is not None:
        columns[:, -len(explore_er) :] = explore_er.t() * _FLOOR
    q_kr, r_rr = torch.linalg.qr(columns)
    diagonal = r_rr.diagonal()
    sign = torch.where((q_kr * previous_rk.t()).sum(0) < 0, -1.0, 1.0)
    return (q_kr * sign).t().contiguous(), diagonal.abs() / diagonal.abs().sum()


def to_integers(basis_rk: Tensor) -> tuple[Tensor, Tensor]:
    """(q (r, k) int8, scale (r,) float32 powers of two), q scale about A, |q| <= 127.

    The step is the finest that holds a row's largest element, but at most 2^SPREAD finer than the coarsest row's: U takes the
    scales in before it is rounded with one exponent a row, so their spread costs U what it gains A. An A with coarser integers
    is as good a basis, since it is what S, the step and every holder use.
    """
    _, exponent = torch.frexp(basis_rk.abs().amax(1) / LARGEST)
    scale_r = power_of_two(exponent.clamp(int(exponent.max()) - SPREAD, 127).clamp(min=-126))
    return torch.round(basis_rk / scale_r[:, None]).to(torch.int8), scale_r


@dataclass(frozen=True)
class Basis:
    """The basis of one target. q (r, k) int8; scale (r,) float32, powers of two; energy (r,) float32, of the past batches;
    index: the first update that uses it."""

    q: Tensor
    scale: Tensor
    energy: Tensor
    index: int

    @property
    def matrix(self) -> Tensor:
        """A (r, k) float32."""
        return self.q.float() * self.scale[:, None]


class AlignedBases:
    """The bases of all targets: in force, and what accumulates towards the next ones.

    columns: k by name. every: updates between two refreshes of one target; targets take turns, so that no update refreshes
    all (but the first `START`). explore: rows drawn at random in the orthogonal complement at each refresh.
    """

    def __init__(
        self,
        columns: Mapping[str, int],
        *,
        rank: int,
        seed: int,
        every: int = 8,
        explore: int = 0,
        device: torch.device | str = "cpu",
    ):
        self.rank, self.seed, self.every, self.explore = rank, seed, every, explore
        self.turn = {name: number for number, name in enumerate(columns)}
        nothing = torch.zeros(rank, dtype=torch.float32, device=device)
        self.bases = {n: Basis(*start_block(seed, n, rank, k, device), nothing, 0) for n, k in columns.items()}
        self.pending: dict[str, Tensor] = {}  # Y, (k, r) float32

    def block(self, name: str, index: int) -> Tensor:
        """The unscaled basis (r, k) int8 in force."""
        return self.bases[name].q

    def scale(self, name: str) -> Tensor:
        """(r,) float32: the factor of each row, a power of two."""
        return self.bases[name].scale

    def basis_index(self, index: int) -> int:
        """Each target has its own; an Update as a whole names itself."""
        return index

    def explicit(self, name: str) -> tuple[Tensor, int]:
        """What an Update carries: (q (r, k) int8, the first update that used it)."""
        return self.bases[name].q, self.bases[name].index

    def is_due(self, name: str, index: int) -> bool:
        """Whether update number `index` collects inputs for the next basis of this target."""
        return index < START or (index + self.turn[name]) % self.every == 0

    def observer(self, name: str, index: int) -> Observer | None:
        """What takes in the inputs of update number `index`; None if this target is not due."""
        return partial(self.observe, name) if self.is_due(name, index) else None

    def observe(self, name: str, x_Nk: Tensor, grad_Nd: Tensor, projected_Nr: Tensor) -> None:
        """Take in one microbatch: the layer's input, its output gradient, and x A^T."""
        with region("basis"):
            step = power_step(x_Nk, grad_Nd, projected_Nr)
        if name in self.pending:
            self.pending[name].add_(step)
        else:
            self.pending[name] = step

    def collected(self, index: int) -> list[Tensor]:
        """What update `index` adds up for its next bases: Y (k, r) of every target that is due, zeros if nothing came."""
        due = self._due(index)
        for name in due:
            if name not in self.pending:
                q = self.bases[name].q
                self.pending[name] = torch.zeros(q.shape[::-1], dtype=torch.float32, device=q.device)
        return [self.pending[name] for name in due]

    def _due(self, index: int) -> list[str]:
        return [name for name in self.bases if self.is_due(name, index)]

    def forget(self) -> None:
        """Drop what was collected."""
        self.pending.clear()

    def following(self, index: int, totals: Sequence[Tensor] | None = None) -> dict[str, Basis]:
        """The next bases where inputs were collected, for update `index` on. Nothing is changed.

        totals: what stands for `collected`, in its order, if it was summed over ranks.
        """
        found = {}
        pending = self.pending if totals is None else dict(zip(self._due(index - 1), totals, strict=True))
        for name, y in pending.items():
            if not bool(torch.isfinite(y).all()) or not bool(y.any()):
                continue  # nothing was seen; what is not finite is reported by the sketch
            old = self.bases[name]
            matrix, energy = next_basis(y, old.matrix, old.energy, self._explore(name, index))
            if bool(torch.isfinite(matrix).all()):
                found[name] = Basis(*to_integers(matrix), energy, index)
        return found

    def take(self, bases: Mapping[str, Basis]) -> None:
        """Put bases in force, and forget what was collected."""
        self.bases |= bases
        self.forget()

    def _explore(self, name: str, index: int) -> Tensor | None:
        if not self.explore:
            return None
        key = hashing.derive_key(self.seed, "explore", name, index)
        q = self.bases[name].q
        return hashing.signs(key, range(self.explore), range(q.shape[1]), q.device).float()

    def held(self) -> list[Tensor]:
        """The tensors in memory now: bases in force, and what is collected for the next."""
        parts = [part for basis in self.bases.values() for part in (basis.q, basis.scale, basis.energy)]
        return [*parts, *self.pending.values()]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, plain values): copies of everything that decides the next steps."""
        tensors = {f"basis_next.{name}": y.clone() for name, y in self.pending.items()}
        for name, basis in self.bases.items():
            tensors |= {f"{key}.{name}": getattr(basis, part).clone() for key, part in _SAVED.items()}
        return tensors, {"basis_index": {name: basis.index for name, basis in self.bases.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Strict; `UpdateError` names what does not fit, and nothing is changed then."""
        index, version = state.get("basis_index"), state["update_index"]
        if not isinstance(index, dict) or index.keys() != self.bases.keys():
            raise UpdateError("the saved sketcher lacks the index of its aligned bases")
        if not all(type(i) is int and 0 <= i <= version for i in index.values()):
            raise UpdateError(f"the saved sketcher has bases of updates that do not exist before version {version}")
        loaded, pending = {}, {}
        for name, own in self.bases.items():
            parts = {part: _take(state, f"{key}.{name}", getattr(own, part)) for key, part in _SAVED.items()}
            loaded[name] = Basis(**parts, index=index[name])
            if f"basis_next.{name}" in state:
                pending[name] = _take(state, f"basis_next.{name}", own.matrix.t())
        self.bases, self.pending = loaded, pending


_SAVED = {"basis": "q", "basis_scale": "scale", "basis_energy": "energy"}  # name in the state, field


def _take(state: Mapping[str, Any], key: str, like: Tensor) -> Tensor:
    saved = fitting(state, key, like)
    if saved.dtype == torch.float32 and not bool(torch.isfinite(saved).all()):
        raise UpdateError(f"the saved sketcher's {key!r} is not finite")
    return saved.to(like.device, copy=True)

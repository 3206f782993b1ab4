"""Aligned bases (ours, beyond the paper): A's rows span the dominant subspace of the layer's inputs, tracked online.

The gradient G = H^T X of a layer has its row space in the span of the inputs X, and language-model activations are strongly
low-rank: a few of their principal directions hold most of G. One power step, Y = X^T W X A^T, from what the backward pass has
at hand anyway, and a QR decomposition give the next basis (orthogonal iteration, Oja's subspace rule).

A is kept as integers times a power of two a row, A = 2^e_i q_i with |q| <= 127: so it can be sent and merged exactly
(design 2.3). Legend: N tokens, d out features, k in features, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from logra import hashing
from logra.errors import UpdateError
from logra.sketch.capture import Observer
from logra.sketch.quantize import power_of_two

LARGEST = 127
START = 2  # updates after which every basis is refreshed: from random signs to the inputs' subspace
MEMORY = 0.8  # what the energies of the past count at the next refresh
_FLOOR = 1e-6  # of all energy: what the old basis weighs where there is nothing else


def start_block(seed: int, name: str, rank: int, columns: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(q (r, k) int8, scale (r,) float32) before any input was seen: random signs, rows of a norm near 1."""
    q = hashing.signs(hashing.derive_key(seed, "basis", name, 0), range(rank), range(columns), device)
    exponent = -((columns.bit_length() - 1) // 2)
    return q, torch.full((rank,), 2.0**exponent, dtype=torch.float32, device=device)


def power_step(x_Nk: Tensor, grad_Nd: Tensor, projected_Nr: Tensor) -> Tensor:
    """Y = X^T W (X A^T), (k, r) float32, with W = diag(||h_n||): a token counts as much as its output gradient.

    With the squares, X^T W X would be the expectation of G^T G if the h_n of different tokens were uncorrelated, and its
    leading directions the best basis there is; but a few tokens would decide. The norm itself captures as much of a later
    batch's gradient, and more than equal weights (docs/results.md). Padding, and tokens without influence on the loss, have
    h_n = 0 and drop out.
    """
    weight_N = torch.linalg.vector_norm(grad_Nd, dim=1, dtype=torch.float32)
    return x_Nk.t().float() @ (projected_Nr.float() * weight_N[:, None])


def next_basis(
    y_kr: Tensor, previous_rk: Tensor, energy_r: Tensor, explore_er: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(the next A (r, k) with orthonormal rows, their energies (r,) of sum 1), float32, from one batch's Y.

    QR of Y / sum ||Y_j|| + MEMORY A^T diag(energy): the past, as the rank sees it, fades with MEMORY a refresh. It costs
    nothing, keeps the axes steady, so that moments carried over keep their meaning (overlap of two bases in a row: 0.99 of 1,
    without it 0.80; docs/results.md), and fills up where Y has fewer directions than r. Columns are processed in order and
    keep their signs. explore (e, k): rows that take the place of the last e, made orthogonal to the rest.
    """
    columns = y_kr / torch.linalg.vector_norm(y_kr, dim=0).sum()
    columns = columns + previous_rk.t() * (MEMORY * energy_r + _FLOOR)
    if explore_er is not None:
        columns[:, -len(explore_er) :] = explore_er.t() * _FLOOR
    q_kr, r_rr = torch.linalg.qr(columns)
    diagonal = r_rr.diagonal()
    sign = torch.where((q_kr * previous_rk.t()).sum(0) < 0, -1.0, 1.0)
    return (q_kr * sign).t().contiguous(), diagonal.abs() / diagonal.abs().sum()


def to_integers(basis_rk: Tensor) -> tuple[Tensor, Tensor]:
    """(q (r, k) int8, scale (r,) float32 powers of two), q scale about A with the finest step that keeps |q| <= 127."""
    _, exponent = torch.frexp(basis_rk.abs().amax(1) / LARGEST)
    scale_r = power_of_two(exponent.clamp(-126, 127))
    return torch.round(basis_rk / scale_r[:, None]).to(torch.int8), scale_r


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
        self.index = dict.fromkeys(columns, 0)  # of the first update that uses the basis in force
        self.q: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}
        self.energies: dict[str, Tensor] = {}  # (r,) float32
        for name, count in columns.items():
            self.q[name], self.scales[name] = start_block(seed, name, rank, count, device)
            self.energies[name] = torch.zeros(rank, dtype=torch.float32, device=device)
        self.pending: dict[str, Tensor] = {}  # Y, (k, r) float32

    def block(self, name: str, index: int) -> Tensor:
        """The unscaled basis (r, k) int8 in force."""
        return self.q[name]

    def scale(self, name: str) -> Tensor:
        """(r,) float32: the factor of each row, a power of two."""
        return self.scales[name]

    def basis_index(self, index: int) -> int:
        """Each target has its own; an Update as a whole names itself."""
        return index

    def explicit(self, name: str) -> tuple[Tensor, int]:
        """What an Update carries: (q (r, k) int8, the first update that used it)."""
        return self.q[name], self.index[name]

    def basis(self, name: str) -> Tensor:
        """A (r, k) float32."""
        return self.q[name].float() * self.scales[name][:, None]

    def is_due(self, name: str, index: int) -> bool:
        """Whether update number `index` collects inputs for the next basis of this target."""
        return index < START or (index + self.turn[name]) % self.every == 0

    def observer(self, name: str, index: int) -> Observer | None:
        """What takes in the inputs of update number `index`; None if this target is not due."""
        return partial(self.observe, name) if self.is_due(name, index) else None

    def observe(self, name: str, x_Nk: Tensor, grad_Nd: Tensor, projected_Nr: Tensor) -> None:
        """Take in one microbatch: the layer's input, its output gradient, and x A^T."""
        step = power_step(x_Nk, grad_Nd, projected_Nr)
        if name in self.pending:
            self.pending[name].add_(step)
        else:
            self.pending[name] = step

    def collected(self, index: int) -> list[Tensor]:
        """What update `index` adds up for its next bases: Y (k, r) of every target that is due, zeros if nothing came."""
        for name, q in self.q.items():
            if self.is_due(name, index) and name not in self.pending:
                self.pending[name] = torch.zeros(q.shape[::-1], dtype=torch.float32, device=q.device)
        return [self.pending[name] for name in self.q if name in self.pending]

    def forget(self) -> None:
        """Drop what was collected."""
        self.pending.clear()

    def refresh(self, index: int) -> dict[str, Tensor]:
        """Take the next bases where inputs were collected, for update `index` on; the overlaps A_old A_new^T (r, r) by name."""
        overlaps = {}
        for name, y in self.pending.items():
            if not bool(torch.isfinite(y).all()) or not bool(y.any()):
                continue  # nothing was seen; what is not finite is reported by the sketch
            old = self.basis(name)
            basis, self.energies[name] = next_basis(y, old, self.energies[name], self._explore(name, index))
            self.q[name], self.scales[name] = to_integers(basis)
            self.index[name] = index
            overlaps[name] = old @ self.basis(name).t()
        self.forget()
        return overlaps

    def _explore(self, name: str, index: int) -> Tensor | None:
        if not self.explore:
            return None
        key = hashing.derive_key(self.seed, "explore", name, index)
        q = self.q[name]
        return hashing.signs(key, range(self.explore), range(q.shape[1]), q.device).float()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, plain values): copies of everything that decides the next steps."""
        tensors = {f"basis.{name}": q.clone() for name, q in self.q.items()}
        tensors |= {f"basis_scale.{name}": scale.clone() for name, scale in self.scales.items()}
        tensors |= {f"basis_energy.{name}": energy.clone() for name, energy in self.energies.items()}
        tensors |= {f"basis_next.{name}": y.clone() for name, y in self.pending.items()}
        return tensors, {"basis_index": dict(self.index)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Strict; `UpdateError` names what does not fit, and nothing is changed then."""
        index = state.get("basis_index")
        if not isinstance(index, dict) or index.keys() != self.index.keys():
            raise UpdateError("the saved sketcher lacks the index of its aligned bases")
        loaded: dict[str, Tensor] = {}
        for name, q in self.q.items():
            like = {f"basis.{name}": q, f"basis_scale.{name}": self.scales[name]}
            like[f"basis_energy.{name}"] = self.energies[name]
            if f"basis_next.{name}" in state:
                like[f"basis_next.{name}"] = torch.empty(q.shape[::-1], dtype=torch.float32, device=q.device)
            for key, own in like.items():
                saved: Any = state.get(key)
                if not isinstance(saved, torch.Tensor) or (saved.shape, saved.dtype) != (own.shape, own.dtype):
                    raise UpdateError(f"the saved sketcher lacks a fitting {key!r} tensor of shape {tuple(own.shape)}")
                loaded[key] = saved.to(own.device, copy=True)
        self.index = {name: int(index[name]) for name in self.index}
        self.q = {name: loaded[f"basis.{name}"] for name in self.q}
        self.scales = {name: loaded[f"basis_scale.{name}"] for name in self.scales}
        self.energies = {name: loaded[f"basis_energy.{name}"] for name in self.q}
        pending = {name: loaded.get(f"basis_next.{name}") for name in self.q}
        self.pending = {name: y for name, y in pending.items() if y is not None}

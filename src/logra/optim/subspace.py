"""Bases of a gradient's leading singular directions: exact or randomised, on either side, and what is seen through them.

Legend: G (p, q) gradient, r rank. Side "right": P (r, q), R = G P^T (p, r). Side "left": P (p, r), R = P^T G (r, q).
Side "both": both, R = U^T G V^T (r, r). Rows of a right P and columns of a left one are orthonormal.
Source: GaLore (arXiv 2403.03507) and its code; the range finder is Halko, Martinsson and Tropp (arXiv 0909.4061), algorithms
4.4 and 5.1 with one power step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logra import hashing

SIDES = {"std", "reverse_std", "left", "right", "full"}  # the names of GaLore's proj_type
_OVERSAMPLING = 8


def side(shape: tuple[int, ...], proj_type: str) -> str:
    """Which side is projected: "std" the smaller one, so that the moments are r x max(p, q)."""
    if proj_type in ("left", "right"):
        return proj_type
    if proj_type == "full":
        return "both"
    is_tall = shape[0] >= shape[1]
    return "right" if is_tall == (proj_type == "std") else "left"


def basis_shape(shape: tuple[int, ...], rank: int, where: str) -> tuple[int, int]:
    """(r, q) on the right, (p, r) on the left; r at most the smaller side."""
    rank = min(rank, *shape)
    return (rank, shape[1]) if where == "right" else (shape[0], rank)


def projected_shape(shape: tuple[int, ...], rank: int, where: str) -> tuple[int, int]:
    rank = min(rank, *shape)
    return {"right": (shape[0], rank), "left": (rank, shape[1]), "both": (rank, rank)}[where]


def leading(gradient_pq: Tensor, rank: int, where: str) -> Tensor:
    """P of the r leading singular directions, by a full (thin) SVD, as GaLore's code has it. where: "left" or "right"."""
    left, _, right = torch.linalg.svd(gradient_pq, full_matrices=False)
    rank = min(rank, *gradient_pq.shape)
    return right[:rank] if where == "right" else left[:, :rank]


def leading_randomised(gradient_pq: Tensor, rank: int, where: str, key: int) -> Tensor:
    """`leading` in O(p q r): the range of G^T G G^T Omega, then the SVD of what of G lies in it.

    Omega adds the rows of G with random signs into as many sums as wanted (a count sketch, which costs one pass). key: of the
    signs.
    """
    matrix = gradient_pq if where == "right" else gradient_pq.t()
    rows, columns = matrix.shape
    rank = min(rank, rows, columns)
    wide = min(rank + _OVERSAMPLING, rows, columns)
    sums = _sums(matrix, wide, key)
    size = torch.linalg.vector_norm(sums).clamp(
        min=torch.finfo(torch.float32).tiny
    )  # about |G|: else its powers underflow
    sample = torch.linalg.qr((sums / size).t()).Q
    sample = torch.linalg.qr(matrix.t() @ ((matrix @ sample) / size) / size).Q
    seen = (matrix @ sample) / size
    turn = torch.linalg.eigh(seen.t() @ seen).eigenvectors.flip(1)[:, :rank]
    basis = (sample @ turn).t()
    return basis if where == "right" else basis.t()


def _sums(matrix: Tensor, count: int, key: int) -> Tensor:
    """(count, columns): row i of the matrix is added to sum i % count with a random sign."""
    signs = hashing.signs(key, range(1), range(len(matrix)), matrix.device)[0].to(matrix.dtype)[:, None]
    sums = torch.zeros((count, matrix.shape[1]), dtype=matrix.dtype, device=matrix.device)
    for start in range(0, len(matrix), count):
        rows = slice(start, min(start + count, len(matrix)))
        sums[: rows.stop - start].addcmul_(matrix[rows], signs[rows])
    return sums


def project(gradient_pq: Tensor, basis: Tensor, where: str) -> Tensor:
    """R of one side."""
    return gradient_pq @ basis.t() if where == "right" else basis.t() @ gradient_pq


def factors(projected: Tensor, basis: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """(left, right) with left @ right = the (p, q) matrix that `projected` stands for."""
    return (projected, basis) if where == "right" else (basis, projected)


def overlap(old: Tensor, new: Tensor, where: str) -> Tensor:
    """P_old P_new^T, (r, r): the old coordinates of the new directions."""
    return old @ new.t() if where == "right" else old.t() @ new

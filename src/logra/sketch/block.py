"""Blocks: what every holder of weights has. A block is some rows and columns of one matrix, with exact float32 meaning.

The trainer's targets, a row shard under FSDP2, the slice of a fused parameter in a tensor-parallel engine, a replica on a
host: all are blocks, and all apply an Update by the same code, bit for bit (design 2.3, 2.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logra.errors import MissingBasisError, UpdateError, WrongBaseError
from logra.sketch import digest as digests
from logra.sketch.shards import Shards, local, rows_here, shards_of
from logra.sketch.split import bind_again, check_bound, merge, split
from logra.sketch.targets import clean_name, is_conv1d
from logra.sketch.update import Factor, Update, apply_block

_CHUNK = 1 << 20  # elements merged at once: no full-size float32 temporary exists


@dataclass
class Block:
    """Rows x columns of one matrix in its logical (out, in) layout; vectors are (n, 1).

    value: (rows, columns), often a view (transposed, or a slice of a fused parameter); float32, or bfloat16 `hi`.
    residual: int16 `lo` of a bfloat16 value, on any device. Without it a bfloat16 block can be read, not updated.
    shape: of the whole matrix. row_start, column_start: where the block begins in it.
    basis, basis_index: the aligned basis in force, int8 (rank, columns of this block), and the first Update that used it;
    None where none is known. Updates that go on with a basis leave it out.
    """

    name: str
    value: Tensor
    residual: Tensor | None = None
    shape: tuple[int, int] = (-1, -1)
    row_start: int = 0
    column_start: int = 0
    basis: Tensor | None = None
    basis_index: int | None = None

    def __post_init__(self) -> None:
        if self.shape == (-1, -1):
            self.shape = (self.value.shape[0], self.value.shape[1])
        if self.rows.stop > self.shape[0] or self.columns.stop > self.shape[1]:
            raise UpdateError(f"the block of {self.name} reaches beyond its matrix of {self.shape}")
        self.hold(self.basis, self.basis_index)

    def hold(self, basis: Tensor | None, basis_index: int | None) -> None:
        """Take a basis as the one in force (None, None: none is known). Raises `UpdateError` if it cannot be this block's."""
        if (basis is None) != (basis_index is None):
            raise UpdateError(f"{self.name} has a basis without the index of its first Update, or the other way round")
        if basis is not None:
            if basis.dtype != torch.int8 or basis.ndim != 2 or basis.shape[1] != len(self.columns):
                raise UpdateError(
                    f"{self.name} needs a basis of int8 (rank, {len(self.columns)}), not {basis.dtype} {tuple(basis.shape)}"
                )
            basis = basis.to(self.value.device)
        self.basis, self.basis_index = basis, basis_index

    @property
    def rows(self) -> range:
        return range(self.row_start, self.row_start + self.value.shape[0])

    @property
    def columns(self) -> range:
        return range(self.column_start, self.column_start + self.value.shape[1])

    def check(self, update: Update) -> None:
        """Raise `UpdateError` unless `update` can be applied: the right shape, its basis, float32 or split storage."""
        factor, dense = update.factors.get(self.name), update.dense.get(self.name)
        if factor is None and dense is None:
            raise WrongBaseError(f"update {update.index} has nothing for {self.name}: another model, or other targets?")
        shape = tuple(dense.shape) if dense is not None else (factor.out_features, factor.in_features)  # type: ignore[union-attr]
        if shape != self.shape:
            raise WrongBaseError(
                f"update {update.index} expects {self.name} as {shape[0]} x {shape[1]}, here it is {self.shape}: another model?"
            )
        if factor is not None and update.basis == "aligned":
            self._check_basis(update.index, factor)
        self._check_bound()
        if self.residual is None and self.value.dtype != torch.float32:
            raise UpdateError(
                f"{self.name} is stored as {self.value.dtype}: exact updates need float32 weights, or split ones (bfloat16 "
                "with their int16 residual; those of an attached model are in Sketcher.blocks())"
            )

    def _check_basis(self, index: int, factor: Factor) -> None:
        """Raise `MissingBasisError` unless an aligned factor brings its basis, or goes on with the one that is held here."""
        rank = factor.q.shape[1]
        if factor.basis_index is None:
            raise UpdateError(f"update {index} does not say which Update brought the basis of {self.name}")
        if factor.basis is not None:
            if tuple(factor.basis.shape) != (rank, factor.in_features):
                raise WrongBaseError(
                    f"update {index} has a basis of shape {tuple(factor.basis.shape)} for {self.name}, not "
                    f"{(rank, factor.in_features)}"
                )
            return
        if self.basis is None or self.basis_index != factor.basis_index:
            held = "none is held" if self.basis is None else f"the one of update {self.basis_index} is held"
            raise MissingBasisError(
                f"update {index} goes on with the basis of {self.name} that travelled in update {factor.basis_index}, and here "
                f"{held}: apply the Updates in order from that one on, or start from an anchor or a checkpoint, which hold it"
            )
        if self.basis.shape[0] != rank:
            raise WrongBaseError(
                f"update {index} has rank {rank}, the basis held for {self.name} {self.basis.shape[0]}"
            )

    def apply(self, update: Update, basis: Tensor | None = None) -> None:
        """Apply the matching part of an Update in place, bit for bit as every other holder does.

        basis: the unscaled (r, columns) block, if it is at hand; else it is taken from the Update, drawn, or the one in force.
        Split blocks are merged, moved and split again by row chunks, with the residual streamed from the host where it lives
        there. An aligned basis that the Update brings is in force from then on.
        """
        dense = update.dense.get(self.name)
        if dense is not None:
            self.load(dense[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop])
            return
        factor = update.factors[self.name]
        is_new = update.basis == "aligned" and factor.basis is not None
        block = self._basis_for(update) if basis is None else basis
        rows = slice(self.rows.start, self.rows.stop)
        q, exponent = factor.q[rows].to(self.value.device), factor.exponent[rows].to(self.value.device)
        with torch.no_grad():
            if self.residual is None:
                apply_block(self.value, q, exponent, block, update.decay)
            else:
                self._apply_split(q, exponent, block, update.decay)
        if is_new and factor.basis is not self.basis:  # a copy: the sender may refresh its own in place
            self.hold(block.to(self.value.device, torch.int8, copy=True), factor.basis_index)

    def _apply_split(self, q: Tensor, exponent: Tensor, basis: Tensor, decay: float) -> None:
        assert self.residual is not None
        basis = basis.to(self.value.device, torch.float32)
        for chunk in self._chunks():
            master = self._merged(chunk)
            apply_block(master, q[chunk], exponent[chunk], basis, decay)
            self._store(chunk, master)
        bind_again(self.value, self.residual)

    def _basis_for(self, update: Update) -> Tensor:
        if update.basis == "aligned" and update.factors[self.name].basis is None and self.basis is not None:
            return self.basis
        return update.basis_block(self.name, self.columns, self.value.device)

    def load(self, master: Tensor) -> None:
        """Set from float32 values (rows, columns)."""
        with torch.no_grad():
            if self.residual is None:
                self.value.copy_(master)
                return
            for chunk in self._chunks():
                self._store(chunk, master[chunk].to(self.value.device, torch.float32))
            bind_again(self.value, self.residual)

    def master(self) -> Tensor:
        """A float32 copy of the block, on the value's device."""
        if self.residual is None:
            return self.value.detach().to(torch.float32, copy=True)
        self._check_bound()
        result = torch.empty(self.value.shape, dtype=torch.float32, device=self.value.device)
        for chunk in self._chunks():
            result[chunk] = self._merged(chunk)
        return result

    def sums(self) -> digests.Sums:
        """This block's part of the digest (logra.sketch.digest): parts of disjoint blocks add up."""
        value = self.value.detach()
        if self.residual is None and value.dtype == torch.float32:
            return digests.block_sums(value, self.name, self.row_start, self.column_start)
        self._check_bound()
        parts = [
            digests.block_sums(self._merged(chunk), self.name, self.row_start + chunk.start, self.column_start)
            for chunk in self._chunks()
        ]
        return digests.add_sums(*parts)

    def _check_bound(self) -> None:
        if self.residual is not None:
            check_bound(self.name, self.value, self.residual)

    def _chunks(self) -> Iterable[slice]:
        step = max(1, _CHUNK // max(1, self.value.shape[1]))
        return (slice(start, start + step) for start in range(0, len(self.value), step))

    def _merged(self, chunk: slice) -> Tensor:
        value = self.value[chunk].detach()
        if self.residual is None:
            return value.to(torch.float32)
        return merge(value, self.residual[chunk].to(value.device, non_blocking=True))

    def _store(self, chunk: slice, master: Tensor) -> None:
        hi, lo = split(master)
        assert self.residual is not None
        self.value[chunk].copy_(hi)
        self.residual[chunk].copy_(lo, non_blocking=self.residual.is_pinned())


def matrix_view(module: nn.Module, parameter: Tensor) -> Tensor:
    """A parameter, or its rows on this rank, as a two-dimensional (out, in) view that shares its memory; vectors are (n, 1)."""
    data = local(parameter).detach()
    if is_conv1d(module) and data.ndim == 2:
        return data.t()
    return data.view(data.shape[0] if data.ndim else 1, -1)


def block_of(name: str, module: nn.Module, parameter: Tensor, residual: Tensor | None = None) -> Block:
    """A parameter, or the rows of it that lie on this rank, as a view of its memory. residual: of the same rows."""
    shape = (parameter.shape[0] if parameter.ndim else 1, parameter.shape[1:].numel())
    if is_conv1d(module) and parameter.ndim == 2:
        shape = (shape[1], shape[0])
        return Block(
            name, matrix_view(module, parameter), residual, shape, column_start=rows_here(name, parameter).start
        )
    return Block(name, matrix_view(module, parameter), residual, shape, row_start=rows_here(name, parameter).start)


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}


def blocks_of(
    model: nn.Module, names: Iterable[str] | None = None, residuals: Mapping[str, Tensor] | None = None
) -> dict[str, Block]:
    """Matrices of a model by name, views of its memory (sharded: the rows here); all parameters if `names` is None.

    residuals: int16 `lo` of the split ones, in the logical layout. Raises `WrongBaseError` naming what the model lacks.
    """
    parameters = _parameters(model)
    modules = {clean_name(n): m for n, m in model.named_modules(remove_duplicate=False)}
    chosen = list(parameters if names is None else names)
    missing = [name for name in chosen if name not in parameters]
    if missing:
        raise WrongBaseError(
            f"this model lacks {', '.join(missing[:3])} ({len(missing)} missing in all): another model?"
        )
    residuals = residuals or {}
    return {
        name: block_of(name, modules[name.rpartition(".")[0]], parameters[name], residuals.get(name)) for name in chosen
    }


def apply_blocks(blocks: Mapping[str, Block], update: Update, bases: Mapping[str, Tensor] | None = None) -> None:
    """Apply an Update to every block; blocks and Update must name the same matrices. All is checked before one moves."""
    missing = sorted(set(update.names) - blocks.keys())
    if missing:
        raise WrongBaseError(
            f"update {update.index} moves {missing[0]} and {len(missing) - 1} more that are not held here: another model?"
        )
    for block in blocks.values():
        block.check(update)
    for name, block in blocks.items():
        block.apply(update, None if bases is None else bases.get(name))
    if any(b.residual is not None and b.residual.is_pinned() for b in blocks.values()):
        torch.cuda.synchronize()  # the host may read residuals from here on


def apply_update(model: nn.Module, update: Update) -> None:
    """Apply an Update to `model` (float32 targets), bit for bit as the trainer did. All is checked before a weight moves."""
    apply_blocks(blocks_of(model, update.names), update)


def digest_blocks(blocks: Mapping[str, Block], shards: Shards | None = None) -> str:
    """Hex digest (128 bits) of whole matrices' names, shapes and float32 values; see `logra.sketch.digest`.

    shards: who holds the other rows; then a collective call, with the same result on every rank.
    """
    sums = {name: block.sums() for name, block in blocks.items()}
    if shards is not None:
        flat = iter(shards.add_integers([value for pair in sums.values() for value in pair]))
        sums = {name: (next(flat), next(flat)) for name in sums}
    return digests.combine({name: (block.shape, sums[name]) for name, block in blocks.items()})


def digest(model: nn.Module, names: Iterable[str] | None = None) -> str:
    """Hex digest of a model's weights (all if `names` is None): equal digests mean equal weights to the last bit.

    A stale or drifted holder is detected by it, not hoped against. Weights that an attached sketcher holds split must be asked
    through it (`Sketcher.digest`): the model alone has only their upper halves. Of a sharded model it is a collective call.
    """
    blocks = blocks_of(model, names)
    return digest_blocks(
        blocks, shards_of({n: p for n, p in _parameters(model).items() if n in blocks}) if blocks else None
    )

"""Row shards (FSDP2's DTensor): which rows of a matrix lie here, and the collectives of one sharded step.

Every rank sees its own tokens and adds up a whole sketch of them, (sum d, r). `Shards.reduce` sums these over all ranks in
one flat collective, and each rank gets the rows whose weights it holds; there the optimizer's state lives and the step is
made; `Shards.gather` gives every rank the factors of the whole step, bit for bit the same, so that all make one Update.

Legend: d rows of a matrix, N ranks that split the rows, p = ceil(d / N) rows at most on one (torch.chunk's rule, FSDP2's),
T = sum of p over all matrices, D = sum of d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logra.errors import ConfigError

_MASK64 = (1 << 64) - 1
# torch 2.13 renames them
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def local(tensor: Any) -> Tensor:
    """The part of a tensor that lies on this rank: its own memory. A plain tensor is all here."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with (
        torch.no_grad()
    ):  # the memory itself, whose in-place changes are counted; with gradients it would be a view of its own
        return tensor.to_local()


def sharding(name: str, parameter: Any) -> int | None:
    """The mesh dimension that splits a parameter's rows; None if it is whole here. Raises `ConfigError` for other splits."""
    if not hasattr(parameter, "placements"):
        return None
    dims = [i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if not dims:
        return None
    if len(dims) == 1 and parameter.placements[dims[0]].is_shard(0):
        return dims[0]
    raise ConfigError(
        f"{name} is placed as {parameter.placements}: only rows split over one mesh dimension are supported (FSDP2's default), "
        "no tensor parallelism"
    )


def rows_of(count: int, ranks: int) -> list[range]:
    """Which of `count` rows each rank has: torch.chunk's rule."""
    most = -(-count // ranks) if count else 0
    return [range(min(rank * most, count), min((rank + 1) * most, count)) for rank in range(ranks)]


def rows_here(name: str, parameter: Any) -> range:
    """The rows (of dimension 0) of a parameter that lie on this rank."""
    dim = sharding(name, parameter)
    count = parameter.shape[0] if parameter.ndim else 1
    if dim is None:
        return range(count)
    mesh = parameter.device_mesh
    return rows_of(count, mesh.size(dim))[mesh.get_local_rank(dim)]


def whole(tensor: Any) -> Tensor:
    """A tensor whole, in host memory: of a sharded one a collective call, and on all ranks but the first it is empty."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    full = tensor.full_tensor()
    return full.cpu() if dist.get_rank() == 0 else full.new_empty(0, device="cpu")


class Shards:
    """The rows of stacked matrices over the ranks. parameters: the weights by name, all DTensors of one mesh, in stacked order.

    `here`: where each matrix's rows stand in this rank's stacked tensors, (T, columns); what is beyond them, up to p, is zero.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        name, first = next(iter(parameters.items()))
        dim, mesh = sharding(name, first), first.device_mesh
        assert dim is not None
        self.group, self.ranks, self.rank = mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim)
        others = [i for i in range(mesh.ndim) if i != dim]
        self.replicas = mesh.get_group(others[0]) if others else None  # HSDP: copies of the shards
        if len(others) > 1:
            raise ConfigError(
                f"a mesh of {mesh.ndim} dimensions is not supported: one that shards, one that replicates"
            )
        # where collectives and steps happen; shards themselves may lie in host memory (offload)
        kind = mesh.device_type
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self._counts: dict[str, int] = {}
        self.rows: dict[str, range] = {}
        self.here: dict[str, slice] = {}
        self.total = 0
        for name, parameter in parameters.items():
            if sharding(name, parameter) != dim or parameter.device_mesh != mesh:
                raise ConfigError(
                    f"{name} is not sharded as the other targets are: shard all over one mesh (fully_shard)"
                )
            self._counts[name] = parameter.shape[0]
            self.rows[name] = rows_of(parameter.shape[0], self.ranks)[self.rank]
            self.here[name] = slice(self.total, self.total + len(self.rows[name]))
            self.total += -(-parameter.shape[0] // self.ranks)

    def reduce(self, stacked_Dc: Tensor) -> Tensor:
        """The sum over all ranks, the rows that lie here: (T, c)."""
        result = stacked_Dc.new_empty(self.total, stacked_Dc.shape[1])
        _reduce_scatter(result, self._by_rank(stacked_Dc).flatten(0, 1), group=self.group)
        if self.replicas is not None:
            dist.all_reduce(result, group=self.replicas)
        return result

    def take(self, stacked_Dc: Tensor) -> Tensor:
        """The rows that lie here of what every rank has whole: (T, c)."""
        return self._by_rank(stacked_Dc)[self.rank].clone()

    def gather(self, own_Tc: Tensor) -> Tensor:
        """The whole (D, c) of what lies on the ranks, the same on each."""
        columns = own_Tc.shape[1]
        whole = own_Tc.new_empty(self.ranks * self.total, columns)
        _all_gather(whole, own_Tc.contiguous(), group=self.group)
        by_rank, parts, start = whole.view(self.ranks, self.total, columns), [], 0
        for count in self._counts.values():
            most = -(-count // self.ranks)
            parts.append(by_rank[:, start : start + most].reshape(-1, columns)[:count])
            start += most
        return torch.cat(parts)

    def gather_rows(self, own: Tensor, count: int) -> Tensor:
        """One matrix or vector of `count` rows from what lies on the ranks."""
        own = own.to(self.device)
        most = -(-count // self.ranks)
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        whole = own.new_empty(self.ranks * most, *own.shape[1:])
        _all_gather(whole, padded, group=self.group)
        return whole[:count]

    def sums(self, values: Sequence[float], *, over_ranks: bool = False) -> list[float]:
        """Sums over the shards, of numbers that replicas have alike; over_ranks: over all ranks, replicas too. In float64."""
        total = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.group)
        if over_ranks and self.replicas is not None:
            dist.all_reduce(total, group=self.replicas)
        return total.tolist()

    def total_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over all ranks, as new tensors, by one collective."""
        if not tensors:
            return []
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        if self.replicas is not None:
            dist.all_reduce(flat, group=self.replicas)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def from_first(self, tensor: Tensor) -> Tensor:
        """Every rank takes the values of the first one, in place: what QR gives may differ in the last bit between devices."""
        dist.broadcast(tensor, group=self.group, group_src=0)
        if self.replicas is not None:
            dist.broadcast(tensor, group=self.replicas, group_src=0)
        return tensor

    def add_integers(self, values: Sequence[int]) -> list[int]:
        """Sums over the shards modulo 2^64 of numbers in [0, 2^64)."""
        signed = [value - (1 << 64) if value >> 63 else value for value in values]
        total = torch.tensor(signed, dtype=torch.int64, device=self.device)
        dist.all_reduce(total, group=self.group)
        return [value & _MASK64 for value in total.tolist()]

    def _by_rank(self, stacked_Dc: Tensor) -> Tensor:
        """(N, T, c): the rows in the order of the ranks that hold them, each matrix's padded with zeros."""
        columns = stacked_Dc.shape[1]
        result = stacked_Dc.new_zeros(self.ranks, self.total, columns)
        start = place = 0
        for count in self._counts.values():
            most = -(-count // self.ranks)
            for rank, rows in enumerate(rows_of(count, self.ranks)):
                result[rank, place : place + len(rows)] = stacked_Dc[start + rows.start : start + rows.stop]
            start, place = start + count, place + most
        return result


def shards_of(parameters: Mapping[str, Any]) -> Shards | None:
    """The shards of parameters that are split over ranks; None where all are whole here. Raises `ConfigError` for a mixture."""
    split = [name for name, parameter in parameters.items() if sharding(name, parameter) is not None]
    if not split:
        return None
    whole = sorted(parameters.keys() - set(split))
    if whole:
        raise ConfigError(f"{split[0]} is sharded and {whole[0]} is not: shard all targets over one mesh (fully_shard)")
    return Shards(parameters)

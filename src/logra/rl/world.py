"""The ranks of a run. Each executes the same `Trainer.fit` on the same data; what may differ is computed once and shared.

Rank 0 talks to rollout servers, scores, logs and writes; every rank then holds the same rollouts and advantages, takes its own
rows of the batch, and steps the shards of the weights that lie on it. Objects travel by pickle, between processes that one
launcher started; nothing is read from outside.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from logra.errors import ConfigError, LograError
from logra.rl.step import Tally

T = TypeVar("T")


class LostRankError(LograError):
    """Another rank ended: killed, out of memory, or with an error of its own, which its log tells."""


class World:
    """One rank alone. `Ranks` is several."""

    rank, size = 0, 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, produce: Callable[[], T]) -> T:
        """What `produce` gives or raises on rank 0, on every rank."""
        return produce()

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        return [value]

    def add(self, tally: Tally) -> None:
        """Sum a tally over all ranks, in place."""


class Ranks(World):
    """The ranks that torchrun started. replicas: groups that each hold all shards (HSDP); 1: one group of all ranks."""

    def __init__(self, device: torch.device, replicas: int = 1, timeout_s: float = 1800.0) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.size % replicas:
            raise ConfigError(
                f"{self.size} ranks do not divide into distributed.replicas={replicas} groups of equal size"
            )
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        timeout = datetime.timedelta(seconds=timeout_s)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timeout)
        # on the host: no device is busy while rollouts are awaited
        self.objects = dist.new_group(backend="gloo", timeout=timeout)
        shape = (self.size,) if replicas == 1 else (replicas, self.size // replicas)
        names = ("shard",) if replicas == 1 else ("replicate", "shard")
        self.mesh: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.host_mesh = self.mesh if device.type == "cpu" else init_device_mesh("cpu", shape, mesh_dim_names=names)

    def share(self, produce: Callable[[], T]) -> T:
        box: list[Any] = [None]
        if self.is_first:
            try:
                box = [(True, produce())]
            except Exception as error:
                self._send([(False, _portable(error))])
                raise
        self._send(box)
        is_good, value = box[0]
        if not is_good:
            value.is_shared = True  # the first rank reports it
            raise value
        return value

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with _lost():
            dist.all_gather_object(values, value, group=self.objects)
        return values

    def add(self, tally: Tally) -> None:
        parts = self.gather((dict(tally.sums), tally.maxima))
        tally.sums.clear()
        tally.maxima.clear()
        for sums, maxima in parts:
            for name, value in sums.items():
                tally.add(name, value)
            for name, value in maxima.items():
                tally.peak(name, value)

    def _send(self, box: list[Any]) -> None:
        with _lost():
            dist.broadcast_object_list(box, src=0, group=self.objects)


class _lost:
    """Turns what torch.distributed raises when a peer is gone into one line."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if isinstance(error, RuntimeError):  # torch.distributed's errors are of it
            raise lost_rank(error) from error


def lost_rank(error: BaseException | str) -> LostRankError:
    return LostRankError(
        f"another rank of this run ended ({' '.join(str(error).split())[:200]}): its own log, above or below, says why. "
        "Start the run again with --resume auto: it goes on after the last finished step"
    )


def is_distributed_error(error: BaseException) -> bool:
    """Did a collective fail, most likely because a peer is gone?"""
    text = str(error).lower()
    words = ("connection closed by peer", "connection reset", "gloo", "nccl", "process group", "broken pipe")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


def _portable(error: Exception) -> Exception:
    """An exception that pickle takes, as it is if possible."""
    import pickle

    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return LograError(f"rank 0: {type(error).__name__}: {error}")


def under_launcher() -> bool:
    """Was this process started by torchrun, or alike, as one of several?"""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def deal(costs: Sequence[int], ranks: int, together: int = 1, prompts: Sequence[int] | None = None) -> list[list[int]]:
    """Row indices for each rank, at most ceil(rows / ranks) of them: the longest first, each to the rank that has the fewest
    tokens and still has room. Within a rank long rows come first, so that rows of like length share a microbatch.

    costs: tokens of each row. together: so many rows in a row share a prompt, and are computed faster side by side
    (`logra.rl.packing`); they stay together where every rank then gets as many, and in their order where not. prompts: tokens of
    their prompts, which count once then.
    """
    if together > 1 and len(costs) % (together * ranks) == 0:
        shared = prompts or [0] * len(costs)
        starts = range(0, len(costs), together)
        whole = deal([sum(costs[i : i + together]) - sum(shared[i + 1 : i + together]) for i in starts], ranks)
        return [[block * together + i for block in blocks for i in range(together)] for blocks in whole]
    room = -(-len(costs) // ranks)
    rows: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min((r for r in range(ranks) if len(rows[r]) < room), key=lambda r: (loads[r], r))
        rows[rank].append(row)
        loads[rank] += costs[row]
    return [sorted(own) for own in rows] if together > 1 else rows

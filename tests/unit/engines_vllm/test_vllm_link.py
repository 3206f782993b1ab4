"""The trainer's side of the weight transfer, against workers that are replicas in this process."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from logra.errors import ConfigError, UpdateError, UpdateOrderError, WrongBaseError
from logra.rl.engines.vllm_link import Link, TransferError, combine_parts, worker_words
from logra.sketch.block import Block, apply_blocks, digest_blocks
from logra.sketch.update import Factor, Update
from logra.sync.anchors import Anchor, AnchorInfo
from logra.sync.packet import Packet
from logra.sync.replica import Replica


class Workers:
    """`Control` over two replicas. fail: call by its name and number that fails."""

    def __init__(self, blocks: Callable[[], dict[str, Block]], *, takes_bytes: bool = True) -> None:
        self.blocks, self.takes_bytes = blocks, takes_bytes
        self.replicas: list[Replica] = []
        self.calls: list[str] = []
        self.labels: list[str] = []
        self.fail: set[str] = set()
        self.infos: list[dict[str, Any]] = []
        self.logprobs_mode = "processed_logprobs"

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise TransferError(f"{name} failed")

    def init(self, info: dict[str, Any]) -> None:
        self._note("init")
        self.info = info
        is_base = digest_blocks(self.blocks()) == info["base"]
        place = {"version": 0 if is_base else -1, "run": info["run"], "base": info["base"]}
        self.replicas = [Replica(self.blocks(), **place) for _ in range(2)]

    def pause(self) -> None:
        self._note("pause")

    def start(self) -> None:
        self._note("start")

    def update(self, info: dict[str, Any]) -> None:
        self._note("update")
        self.infos.append(info)
        data = info.get("data")
        data = base64.b64decode(data) if isinstance(data, str) else data
        for replica in self.replicas:
            try:
                if info["kind"] == "anchor":
                    described = AnchorInfo.from_dict(info["info"])
                    where = Path(info["path"]) if "path" in info else None
                    with Anchor.from_file(described, where) if where else Anchor.from_bytes(described, data) as anchor:
                        replica.load_anchor(anchor)
                else:
                    replica.apply(Path(info["path"]).read_bytes() if "path" in info else data)
            except UpdateError as error:
                raise TransferError(str(error)) from error

    def finish(self, label: str) -> None:
        self._note("finish")
        self.labels.append(label)

    def drop_caches(self) -> None:
        self._note("drop_caches")

    def resume(self) -> None:
        self._note("resume")

    def call(self, method: str) -> list[Any]:
        if method == "logra_sums":
            return [
                [[n, *b.shape, 0, len(b.rows), 0, len(b.columns), *map(str, b.sums())] for n, b in r.blocks.items()]
                for r in self.replicas
            ]
        return [self._status(replica) for replica in self.replicas]

    def _status(self, replica: Replica) -> dict[str, Any]:
        status = {"run": replica.run, "version": -1, "problem": None, "applied": 0, "missing": [], "unexpected": []}
        try:
            status["version"] = replica.version
        except UpdateError as error:
            status["problem"] = str(error)
        return status | {"logprobs_mode": self.logprobs_mode, "max_model_len": 99}


def make_blocks() -> dict[str, Block]:
    draw = torch.Generator().manual_seed(0)
    return {name: Block(name, torch.randn(6, 4, generator=draw)) for name in ("a", "b")}


class Trainer:
    """basis: "random", or "aligned", which changes with every third Update."""

    def __init__(self, basis: str = "random") -> None:
        self.blocks, self.basis = make_blocks(), basis
        self.version = 0

    def digest(self) -> str:
        return digest_blocks(self.blocks)

    def step(self) -> Update:
        draw = torch.Generator().manual_seed(self.version)
        factors = {}
        for name in self.blocks:
            q = torch.randint(-9, 10, (6, 2), dtype=torch.int8, generator=draw)
            factors[name] = Factor(name, 6, 4, q, torch.full((6,), -8, dtype=torch.int8), *self._basis_of(name))
        update = Update(self.version, self.basis, self.version, 3, 2, 8, factors)
        apply_blocks(self.blocks, update)
        self.version += 1
        return update

    def _basis_of(self, name: str) -> tuple[torch.Tensor | None, int | None]:
        if self.basis == "random":
            return None, None
        first = self.version // 3 * 3
        draw = torch.Generator().manual_seed(100 + 10 * first + ord(name))
        return torch.randint(-99, 100, (2, 4), dtype=torch.int8, generator=draw), first


@pytest.fixture(params=["random", "aligned"])
def trainer(request: pytest.FixtureRequest) -> Trainer:
    return Trainer(request.param)


_OPEN: list[Link] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


def begun(trainer: Trainer, workers: Workers, **arguments) -> Link:
    link = Link(workers, run="a1", masters=lambda: trainer.blocks, digest=trainer.digest, **arguments)
    _OPEN.append(link)
    link.begin()
    return link


def test_a_transfer_is_one_transaction(trainer: Trainer) -> None:
    workers = Workers(make_blocks)
    link = begun(trainer, workers)
    workers.calls.clear()
    link.publish(1, trainer.step())
    assert workers.calls == ["pause", "start", "update", "finish", "drop_caches", "resume"]
    assert (link.version, link.label(), workers.labels) == (1, "a1:1", ["a1:0", "a1:1"])
    assert link.worker_digest() == trainer.digest()
    assert workers.info["targets"] == [["a", 6, 4], ["b", 6, 4]]
    link.check()


def test_nothing_is_sampled_before_version_0_is_acknowledged(trainer: Trainer) -> None:
    link = Link(Workers(make_blocks), run="a1", masters=lambda: trainer.blocks, digest=trainer.digest)
    with pytest.raises(UpdateOrderError, match="not acknowledged version 0"):
        link.check()


def test_other_base_weights_are_replaced_at_version_0(trainer: Trainer) -> None:
    workers = Workers(lambda: {n: Block(n, torch.ones(6, 4)) for n in "ab"})
    link = begun(trainer, workers)
    link.check()
    assert [i["kind"] for i in workers.infos] == ["anchor"] and link.worker_digest() == trainer.digest()


def test_a_resumed_trainer_must_anchor_first(trainer: Trainer) -> None:
    base = trainer.digest()
    for _ in range(3):
        trainer.step()
    workers = Workers(lambda: {n: Block(n, torch.ones(6, 4)) for n in "ab"})
    link = begun(trainer, workers, base=base)
    with pytest.raises(UpdateOrderError, match="not those that the run began with"):
        link.check()
    link.publish(3, None)
    link.check()
    link.publish(4, trainer.step())
    assert link.worker_digest() == trainer.digest() and link.version == 4


def test_bases_travel_once_and_with_every_anchor() -> None:
    trainer, workers = Trainer("aligned"), Workers(make_blocks)
    link = begun(trainer, workers)
    for version in range(1, 6):
        link.publish(version, trainer.step())
    explicit = [Packet.from_bytes(info["data"]).update.factors["a"].basis is not None for info in workers.infos]
    assert explicit == [True, False, False, True, False]
    trainer.step()
    link.publish(6, None)  # an Update was lost; the next one brings its basis, and those after it do not
    for version in (7, 8):
        link.publish(version, trainer.step())
    link.publish(9, None)
    link.publish(10, _at(trainer, 9))
    trainer.step()
    link.publish(11, None)
    update = trainer.step()
    assert update.incremental().factors["a"].basis is None
    link.publish(12, update)
    assert link.worker_digest() == trainer.digest()


def test_without_the_bases_an_update_is_refused_and_an_anchor_of_blocks_mends_it() -> None:
    trainer, workers = Trainer("aligned"), Workers(make_blocks)
    base = trainer.digest()
    trainer.step()
    link = begun(trainer, workers, base=base)
    masters = link.masters
    link.masters = lambda: {name: block.master() for name, block in trainer.blocks.items()}  # values alone
    link.publish(1, None)
    before = [digest_blocks(replica.blocks) for replica in workers.replicas]
    with pytest.raises(
        TransferError, match="goes on with the basis of a that travelled in update 0, and here none is held"
    ):
        link.publish(2, trainer.step())
    assert [digest_blocks(replica.blocks) for replica in workers.replicas] == before
    with pytest.raises(UpdateOrderError, match="cannot sample"):
        link.check()
    link.masters = masters
    link.publish(2, None)
    link.publish(3, trainer.step())
    link.check()
    assert link.worker_digest() == trainer.digest()


def test_an_anchor_is_loaded_only_where_it_is_needed(trainer: Trainer) -> None:
    workers = Workers(make_blocks)
    link = begun(trainer, workers)
    link.publish(0, None)
    assert workers.infos == []
    link.publish(7, None)
    assert len(workers.infos) == 1 and link.version == 7
    trainer.blocks["a"].value[0, 0] += 1
    link.publish(7, None)
    assert len(workers.infos) == 2 and link.worker_digest() == trainer.digest()


@pytest.mark.parametrize("call", ["pause", "start", "update", "finish", "drop_caches", "resume"])
def test_after_any_failure_nothing_is_sampled_until_an_anchor(trainer: Trainer, call: str) -> None:
    workers = Workers(make_blocks)
    link = begun(trainer, workers)
    workers.fail.add(call)
    with pytest.raises(TransferError, match=f"{call} failed"):
        link.publish(1, trainer.step())
    workers.fail.clear()
    with pytest.raises(UpdateOrderError, match=f"{call} failed.*publish"):
        link.check()
    with pytest.raises(UpdateOrderError, match="takes no Update"):
        link.publish(2, trainer.step())
    link.publish(2, None)
    link.check()
    assert link.worker_digest() == trainer.digest()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_worker_that_missed_an_update_is_found(trainer: Trainer, rank: int) -> None:
    workers = Workers(make_blocks)
    link = begun(trainer, workers)
    link.publish(1, trainer.step())
    workers.replicas[rank] = Replica(make_blocks(), run="a1", base=link.base)
    with pytest.raises(UpdateOrderError, match=f"worker {rank} is at version 0, the trainer at 1: it missed an Update"):
        link.check()
    with pytest.raises(WrongBaseError, match="different copies of a"):
        link.worker_digest()


def test_digests_travel_at_intervals_and_are_compared(trainer: Trainer) -> None:
    workers = Workers(make_blocks)
    link = begun(trainer, workers, digest_every=2)
    for version in (1, 2, 3, 4):
        link.publish(version, trainer.step())
    packets = [Packet.from_bytes(info["data"]) for info in workers.infos]
    assert [p.digest is not None for p in packets] == [False, True, False, True]
    assert packets[0].parent == link.base and packets[3].parent == packets[2].checksum
    update = trainer.step()
    with torch.no_grad():
        trainer.blocks["b"].value[2, 2] += 1e-3
    with pytest.raises(UpdateError, match="digest"):
        link.publish(5, Packet(update, "a1", link.base, 5, trainer.digest()))
    with pytest.raises(UpdateOrderError):
        link.check()


def test_text_only_controls_get_base64_or_files(trainer: Trainer, tmp_path: Path) -> None:
    workers = Workers(make_blocks, takes_bytes=False)
    link = begun(trainer, workers)
    link.publish(1, trainer.step())
    link.publish(5, None)
    link.folder, link.inline_bytes = tmp_path, 10
    link.publish(6, Packet(_at(trainer, 5), "a1", link.base, 6))
    link.publish(9, None)
    assert [("path" in i, isinstance(i.get("data"), str)) for i in workers.infos] == [
        (False, True),
        (False, True),
        (True, False),
        (True, False),
    ]
    assert list(tmp_path.iterdir()) == []


def _at(trainer: Trainer, index: int) -> Update:
    trainer.version = index
    return trainer.step()


def test_packets_may_be_left_to_the_workers_to_fetch(trainer: Trainer) -> None:
    workers = Workers(make_blocks)
    link = begun(trainer, workers, by_index=True)
    workers.fail.add("update")
    with pytest.raises(TransferError):
        link.publish(1, trainer.step())
    assert workers.infos == []
    workers.fail.clear()
    with pytest.raises(UpdateError):
        link.publish(1, object())
    link.publish(1, None)
    assert workers.infos[0]["kind"] == "anchor"


def test_misuse_is_refused(trainer: Trainer) -> None:
    link = begun(trainer, Workers(make_blocks))
    with pytest.raises(UpdateOrderError, match="leads to version 1, not to 2"):
        link.publish(2, trainer.step())
    link.publish(1, None)
    with pytest.raises(UpdateError, match="publishes Updates"):
        link.publish(2, {"a": 1})
    workers = Workers(make_blocks)
    workers.logprobs_mode = "raw_logprobs"
    with pytest.raises(ConfigError, match="processed_logprobs"):
        begun(Trainer(), workers)


def test_missing_parts_are_found() -> None:
    block = Block("a", torch.randn(4, 4))
    part = ["a", 8, 4, 0, 4, 0, 4, *map(str, block.sums())]
    with pytest.raises(WrongBaseError, match="16 of the 32 values of a"):
        combine_parts([part])


def test_a_workers_words_are_taken_out_of_the_wrapping() -> None:
    text = "Call failed: Worker failed with error 'update 4 isn't next', please check the stack trace above"
    assert worker_words(text) == "update 4 isn't next"
    assert worker_words("plain") == "plain"

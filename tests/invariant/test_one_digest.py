"""200 random Updates on every kind of holder of the weights: one digest (design 2.3, 2.4, 2.7).

Aligned ones change a basis now and then, each target in its turn, and leave it out of the packets in between.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import logra
from logra.rl.tiny import tiny_model
from logra.sketch import digest as digests
from logra.sketch.block import Block, apply_blocks, blocks_of
from logra.sketch.sketcher import attach
from logra.sketch.update import Factor, Update
from logra.sync import Journal, MemoryLog, Publisher, Replica, Subscriber, bring_to, serve

COUNT, RANK, SEED = 200, 8, 11
MODELS = {
    "llama untied": {"arch": "llama"},
    "llama tied": {"arch": "llama", "tied": True},
    "gpt2 tied": {"arch": "gpt2", "tied": True},
    "gpt2 untied": {"arch": "gpt2"},
}

SUBSCRIBER = """
import sys, torch
from logra.rl.tiny import tiny_model
from logra.sketch.block import blocks_of
from logra.sync import HttpSource, Replica, Subscriber
import logra
torch.set_num_threads(2)  # another thread count than the trainer's
url, token, arch, tied, count, names = *sys.argv[1:6], sys.argv[6].split(",")
model = tiny_model(arch, tied=tied == "True")
with HttpSource(url, token) as source:
    subscriber = Subscriber(source, Replica(blocks_of(model, names)), "child")
    subscriber.sync(0)
    ack = subscriber.follow(until=int(count))
print(logra.digest(model, names), ack.applied, ack.missing_count, ack.unexpected_count)
"""


def aligned_basis(number: int, columns: int, index: int) -> tuple[torch.Tensor, int]:
    """The basis that Update `index` uses for target `number`, and the Update it was new in."""
    first = max(i for i in range(index + 1) if i == 0 or (i + number) % 7 == 0)
    generator = torch.Generator().manual_seed(SEED * 100_000 + first * 1000 + number)
    return torch.randint(-127, 128, (RANK, columns), generator=generator).to(torch.int8), first


def random_update(index: int, blocks: dict[str, Block], dense: list[str], basis: str = "random") -> Update:
    """Random integers and scales of RL size (relative steps near 1e-3), sometimes with weight decay; dense values whole."""
    generator = torch.Generator().manual_seed(SEED * 1000 + index)
    bits = 8 if index % 3 else 15
    dtype, top = (torch.int8, 127) if bits == 8 else (torch.int16, 16383)
    factors = {}
    for number, (name, block) in enumerate(blocks.items()):
        if name in dense:
            continue
        rows, columns = block.shape
        q = torch.randint(-top, top + 1, (rows, RANK), generator=generator).to(dtype)
        exponent = torch.randint(-26, -18, (rows,), generator=generator).to(torch.int8) - (7 if bits == 15 else 0)
        explicit = (
            torch.randint(-100, 101, (RANK, columns), generator=generator).to(torch.int8) if index % 5 == 4 else None
        )
        origin = None
        if basis == "aligned":
            explicit, origin = aligned_basis(number, columns, index)
        factors[name] = Factor(name, rows, columns, q, exponent, explicit, origin)
    values = {n: blocks[n].master() + torch.randn(blocks[n].shape, generator=generator) * 1e-3 for n in dense}
    decay = 1e-3 if index % 4 == 0 else 0.0
    return Update(index, basis, index, SEED, RANK, bits, factors, decay, values)


def shards(model, names: list[str], axis: int) -> list[dict[str, Block]]:
    """Two holders, each with its own copy of half of the rows (0) or columns (1) of every matrix."""
    holders: list[dict[str, Block]] = [{}, {}]
    for name, block in blocks_of(model, names).items():
        cut = block.shape[axis] // 2 + 1 if block.shape[axis] > 1 else 1  # uneven on purpose
        parts = [slice(0, cut), slice(cut, None)]
        for holder, part in zip(holders, parts, strict=True):
            place = (part, slice(None)) if axis == 0 else (slice(None), part)
            start = {("row_start", "column_start")[axis]: part.start}
            holder[name] = Block(name, block.value[place].clone(), shape=block.shape, **start)
    return holders


def combined(holders: list[dict[str, Block]]) -> str:
    return digests.combine(
        {n: (b.shape, digests.add_sums(*(h[n].sums() for h in holders))) for n, b in holders[0].items()}
    )


@pytest.mark.parametrize(
    ("kind", "basis"), [*((kind, "random") for kind in MODELS), ("llama untied", "aligned"), ("gpt2 tied", "aligned")]
)
def test_200_updates_leave_one_digest_everywhere(kind, basis):
    arch, tied = MODELS[kind]["arch"], MODELS[kind].get("tied", False)
    trainer = tiny_model(arch, tied=tied)
    split_model = tiny_model(arch, tied=tied)
    sketcher = attach(split_model, rank=RANK, weights="split", residual="cpu")
    dense = ["lm_head.weight" if arch == "llama" and not tied else "transformer.wte.weight"]
    dense = dense if arch == "gpt2" or not tied else ["model.embed_tokens.weight"]
    dense += [n for n, _ in trainer.named_parameters() if "norm" in n or "ln_" in n][:2]
    names = sketcher.names + dense
    mine = blocks_of(trainer, names)
    split_blocks = sketcher.blocks() | blocks_of(split_model, dense)
    by_rows, by_columns = shards(trainer, names, 0), shards(trainer, names, 1)
    before, left_out = logra.digest(trainer, names), 0
    log = MemoryLog(run="ab12", base=before, targets=[[n, *b.shape] for n, b in mine.items()])
    with serve(log) as server:
        arguments = [server.url, server.token, arch, str(tied), str(COUNT), ",".join(names)]
        child = subprocess.Popen(
            [sys.executable, "-c", SUBSCRIBER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        )  # fmt: skip
        try:
            publisher = Publisher(log)
            publisher.wait_for(["child"], version=0, timeout_s=120)  # before the first step
            for index in range(COUNT):
                update = random_update(index, mine, dense, basis)
                apply_blocks(mine, update)
                digest = logra.digest(trainer, names) if index % 50 == 49 else None
                sent = publisher.publish(update, index + 1, digest).to_bytes()
                factors = logra.Update.from_bytes(sent).factors.values()
                assert basis == "random" or {f.basis is None for f in factors if f.basis_index < index} <= {True}
                left_out += sum(f.basis is None for f in factors)
                for holder in (split_blocks, *by_rows, *by_columns):
                    apply_blocks(holder, logra.Update.from_bytes(sent))
            out, err = child.communicate(timeout=120)
        finally:
            child.kill()
    assert child.returncode == 0, err
    assert basis == "random" or left_out > 0.8 * COUNT * len(sketcher.names)
    found = {
        "trainer": logra.digest(trainer, names),
        "split, residual on the host": digests.combine({n: (b.shape, b.sums()) for n, b in split_blocks.items()}),
        "two row shards": combined(by_rows),
        "two column shards": combined(by_columns),
        "subscriber in another process": out.split()[0],
    }
    assert set(found.values()) == {found["trainer"]} and found["trainer"] != before, found
    assert out.split()[1:] == [str(len(names)), "0", "0"]
    untouched = [n for n, _ in trainer.named_parameters() if n not in names]
    assert logra.digest(trainer, untouched) == logra.digest(tiny_model(arch, tied=tied), untouched)
    for name, parameter in trainer.named_parameters():
        if name in sketcher.names:
            assert torch.equal(sketcher.masters()[name], parameter)


def test_one_flipped_bit_in_one_update_is_seen():
    """The check above can fail: a holder that got one integer wrong has another digest."""
    model, other = tiny_model(), tiny_model()
    sketcher = attach(model, rank=RANK)
    update = random_update(0, sketcher.blocks(), [])
    apply_blocks(sketcher.blocks(), update)
    next(iter(update.factors.values())).q[0, 0] ^= 1
    logra.apply_update(other, update)
    assert logra.digest(other, sketcher.names) != sketcher.digest()


LAST = 40


def start_point(kind: str, at: int, log: Journal, model, names: list[str]) -> Replica:
    """A replica that begins at version `at` with what it finds there: other weights and no bases, or those of a checkpoint."""
    blocks, info = blocks_of(model, names), log.info()
    if kind == "checkpoint":  # as `Sketcher.state_dict` and an export have it, after `at` Updates
        earlier = blocks_of(tiny_model(), names)
        bring_to(log, Replica(earlier), at)
        for number, (name, block) in enumerate(blocks.items()):
            block.load(earlier[name].master())
            block.hold(*aligned_basis(number, block.shape[1], at))  # the next Update's, as a sketcher has them
        return Replica(blocks, version=at, run=info.run, base=info.base, head=log.head_at(at))
    for block in blocks.values():
        block.value.zero_()
    replica = Replica(blocks, version=at, run=info.run, base=info.base)
    with log.read_anchor(at) as anchor:
        replica.load_anchor(anchor)
    return replica


def test_aligned_updates_lead_on_from_every_start_point(tmp_path):
    """The base, anchors, checkpoints; a trainer that goes back, in a new process as it were; a journal that was compacted."""
    trainer, names = tiny_model(), attach(tiny_model(), rank=RANK).names
    mine = blocks_of(trainer, names)
    digests = [logra.digest(trainer, names)]
    with Journal.create(
        tmp_path, run="ab12", base=digests[0], targets=[[n, *b.shape] for n, b in mine.items()], segment_bytes=100_000
    ) as log:
        publisher = Publisher(log)
        reader = Subscriber(log, Replica(blocks_of(tiny_model(), names)), "witness")  # through it all

        def train(until: int) -> None:
            for index in range(log.next, until):
                update = random_update(index, mine, [], "aligned")
                apply_blocks(mine, update)
                digests.append(logra.digest(trainer, names))
                publisher.publish(update, index + 1, digests[-1])
                if (index + 1) % 5 == 0:
                    log.write_anchor(index + 1, mine, digests[-1])

        train(22)
        reader.sync()
        log.truncate(17)
        del digests[18:]
        resumed = tiny_model()  # the trainer again, from version 16, where its checkpoint was
        replica = start_point("checkpoint", 16, log, resumed, names)
        bring_to(log, replica, 17)
        trainer, mine = resumed, replica.blocks
        train(LAST)
        assert reader.sync().digest == digests[LAST]
        for at in range(5, LAST, 5):
            for kind in ("anchor", "checkpoint"):
                replica = start_point(kind, at, log, tiny_model(), names)
                goal = min(LAST, at + 4)
                assert bring_to(log, replica, goal) == goal and replica.digest() == digests[goal], (kind, at)
        first = log.compact(31)
        assert 0 < first <= 30 and log.oldest == 30
        late = Replica(blocks_of(tiny_model(), names))
        assert bring_to(log, late) == LAST and late.digest() == digests[LAST]

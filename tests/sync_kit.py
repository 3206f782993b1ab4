"""What the tests of logra.sync share: tiny blocks, random Updates, a trainer that publishes them.

Updates are of `BASIS`: "random", or "aligned" with bases that change now and then, each in its turn. Modules run their tests with
both by `both_bases`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from logra.sketch.block import Block, apply_blocks, digest_blocks
from logra.sketch.split import split
from logra.sketch.update import Factor, Update
from logra.sync import Journal, MemoryLog, Publisher

RUN = "0123456789abcdef"
TOKEN = "a-token-for-tests-only"
SHAPES = {"layers.0.q.weight": (12, 8), "layers.0.up.weight": (20, 8), "norm.weight": (8, 1)}
DENSE = "norm.weight"
TARGETS = [[name, *shape] for name, shape in SHAPES.items()]
RANK = 4
BASIS = "random"
EVERY = 3  # Updates between two changes of an aligned basis


def use(basis: str) -> None:
    """Make Updates of this basis from here on."""
    global BASIS
    BASIS = basis


def both_bases():
    """A fixture: the tests that use it run with either kind of Updates."""

    @pytest.fixture(params=["random", "aligned"])
    def basis(request):
        use(request.param)
        yield request.param
        use("random")

    return basis


def make_blocks(seed: int = 0, kind: str = "fp32", scale: float = 0.05) -> dict[str, Block]:
    """The base model: three blocks. kind: fp32, split, or transposed (a view as of a Conv1D)."""
    generator = torch.Generator().manual_seed(seed)
    blocks = {}
    for name, shape in SHAPES.items():
        master = torch.randn(shape, generator=generator) * scale
        if kind == "split":
            blocks[name] = Block(name, *split(master))
        elif kind == "transposed":
            blocks[name] = Block(name, master.t().contiguous().t())
        else:
            blocks[name] = Block(name, master)
    return blocks


def make_update(index: int, salt: int = 0) -> Update:
    """Update `index`, the same each time for the same salt: integer factors for two matrices, values for the dense one."""
    generator = torch.Generator().manual_seed(1000 * salt + index)
    factors = {}
    for name, (rows, columns) in SHAPES.items():
        if name != DENSE:
            q = torch.randint(-127, 128, (rows, RANK), generator=generator).to(torch.int8)
            exponent = torch.randint(-24, -18, (rows,), generator=generator).to(torch.int8)
            factors[name] = Factor(name, rows, columns, q, exponent, *make_basis(name, index, salt))
    dense = {DENSE: torch.randn(SHAPES[DENSE], generator=generator)}
    return Update(index, BASIS, index, 7, RANK, 8, factors, 1e-3 if index % 3 == 0 else 0.0, dense)


def make_basis(name: str, index: int, salt: int = 0) -> tuple[torch.Tensor | None, int | None]:
    """The basis that Update `index` uses and the Update it was new in; (None, None) unless `BASIS` is "aligned"."""
    if BASIS != "aligned":
        return None, None
    number = list(SHAPES).index(name)
    first = max((i for i in range(index + 1) if (i + number) % EVERY == 0), default=0)
    generator = torch.Generator().manual_seed(1_000_000 + 10_000 * salt + 100 * first + number)
    return torch.randint(-127, 128, (RANK, SHAPES[name][1]), generator=generator).to(torch.int8), first


def base_digest(seed: int = 0) -> str:
    return digest_blocks(make_blocks(seed))


def digest_at(version: int, salt: int = 0) -> str:
    """The digest after `version` Updates, found without logra.sync."""
    blocks = make_blocks()
    for index in range(version):
        apply_blocks(blocks, make_update(index, salt))
    return digest_blocks(blocks)


class Trainer:
    """Applies and publishes the Updates of `make_update` to a log."""

    def __init__(self, log: Journal | MemoryLog, salt: int = 0) -> None:
        self.log, self.salt = log, salt
        self.blocks = make_blocks()
        self.publisher = Publisher(log)
        self.version = 0

    def go_to(self, version: int) -> None:
        """Apply, without publishing, what was published before."""
        while self.version < version:
            apply_blocks(self.blocks, make_update(self.version, self.salt))
            self.version += 1

    def train(self, count: int = 1, digest_every: int = 1) -> None:
        for _ in range(count):
            update = make_update(self.version, self.salt)
            apply_blocks(self.blocks, update)
            digest = digest_blocks(self.blocks) if (self.version + 1) % digest_every == 0 else None
            self.publisher.publish(update, step=self.version + 1, digest=digest)
            self.version += 1

    def anchor(self) -> None:
        self.log.write_anchor(self.version, self.blocks, digest_blocks(self.blocks))


def new_journal(folder: Path, **options: int) -> Journal:
    return Journal.create(folder, run=RUN, base=base_digest(), targets=TARGETS, **options)


def new_memory(**options: int) -> MemoryLog:
    return MemoryLog(run=RUN, base=base_digest(), targets=TARGETS, **options)

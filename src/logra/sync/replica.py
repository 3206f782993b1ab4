"""A replica: weights and their place in one run's history. It takes what follows and refuses everything else."""

from __future__ import annotations

from collections.abc import Mapping

from logra.errors import UpdateError, UpdateOrderError, WrongBaseError
from logra.sketch.block import Block, apply_blocks, digest_blocks
from logra.sync.anchors import Anchor
from logra.sync.packet import Packet


class ForkedError(UpdateOrderError):
    """An Update follows on another history than the replica's: the trainer was resumed from an earlier version."""


class Replica:
    """Blocks of a model, and how many Updates of which run they have seen.

    Damage, gaps, replays, other branches, runs, base models and sketch bases are refused before anything moves. If applying fails
    midway, or leads to another digest than the trainer's, the weights are of no version: the replica is then poisoned, and
    every later use raises until an anchor is loaded over it.

    blocks: everything that can move, by name; whole matrices, or one holder's shards of them. Those of a version above 0 hold
    the aligned bases in force (from an anchor or a checkpoint), if Updates are of such.
    version, run, base, head: the place in history. base is computed from whole blocks at version 0 (and compared, if given);
    it must be given for shards and for later versions. run and head (the last packet's checksum) are learnt from the first
    packet if None. Not thread-safe.
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        *,
        version: int = 0,
        run: str | None = None,
        base: str | None = None,
        head: str | None = None,
    ) -> None:
        if not blocks:
            raise UpdateError("a replica needs at least one block")
        self.blocks = dict(blocks)
        self._version, self._run = version, run
        self._poison: str | None = None
        self._digest: str | None = None
        if base is None and (version != 0 or not self.whole):
            raise UpdateError(
                "the base digest can only be computed from whole matrices at version 0: give base=, as every packet of the run "
                "has it"
            )
        if version == 0 and self.whole:
            actual = self.digest()
            if base is not None and base != actual:
                raise WrongBaseError(f"these weights have the digest {actual}, not {base}: another base model")
            base = actual
        assert base is not None
        self._base = base
        self._head = base if version == 0 else head

    @property
    def version(self) -> int:
        """Updates applied."""
        self._check_usable()
        return self._version

    @property
    def last_version(self) -> int:
        """`version`, also of a poisoned replica: what it was before it failed."""
        return self._version

    @property
    def run(self) -> str | None:
        """The run whose Updates it takes; None before the first."""
        return self._run

    @property
    def base(self) -> str:
        """Digest at version 0."""
        return self._base

    @property
    def head(self) -> str | None:
        """Checksum of the packet applied last."""
        return self._head

    @property
    def whole(self) -> bool:
        """Whether all blocks are whole matrices, so that digests can be computed here alone."""
        return all(tuple(b.value.shape) == tuple(b.shape) for b in self.blocks.values())

    @property
    def known_digest(self) -> str | None:
        """The digest at this version if it has been computed already; None otherwise."""
        self._check_usable()
        return self._digest

    def digest(self) -> str:
        """The digest of the blocks as they are; whole matrices only."""
        self._check_usable()
        if not self.whole:
            raise UpdateError("shards have no digest of their own: combine their sums with those of the other holders")
        if self._digest is None:
            self._digest = digest_blocks(self.blocks)
        return self._digest

    def check(self, packet: Packet) -> None:
        """Raise unless `packet` is the next one of this history. Nothing moves."""
        self._check_usable()
        index = packet.index
        if self._run is not None and packet.run != self._run:
            raise WrongBaseError(f"update {index} belongs to run {packet.run}, this replica follows run {self._run}")
        if packet.base != self._base:
            raise WrongBaseError(
                f"update {index} is for weights that began as {packet.base}, these began as {self._base}: another base model"
            )
        if index < self._version:
            raise UpdateOrderError(f"update {index} is a replay: this replica is at version {self._version} already")
        if index > self._version:
            raise UpdateOrderError(
                f"update {index} leaves a gap: update {self._version} comes next; it was lost, or is late (reordered)"
            )
        if packet.parent is not None and self._head is not None and packet.parent != self._head:
            raise ForkedError(
                f"update {index} follows on another history than this replica's: the trainer went back and took another way "
                f"before version {index}. Load an anchor, or begin again from the base model"
            )

    def apply(self, packet: Packet | bytes) -> None:
        """Apply the next packet, exactly. Raises `DamagedUpdateError`, `UpdateOrderError`, `WrongBaseError` (see `check`)."""
        self._check_usable()
        packet = packet if isinstance(packet, Packet) else Packet.from_bytes(packet)
        self.check(packet)
        self._check_model(packet)
        self._poison, self._digest = f"applying update {packet.index} failed midway", None
        apply_blocks(self.blocks, packet.update)
        self._poison = None
        self._version, self._run, self._head = packet.version, packet.run, packet.checksum
        if packet.digest is not None and self.whole:
            self._compare(packet.digest, f"update {packet.index}")

    def load_anchor(self, anchor: Anchor) -> None:
        """Set everything to the values of an anchor and hold its bases, forwards or back; mends a poisoned replica. Checks the
        digest."""
        info = anchor.info
        if info.base != self._base or (self._run is not None and info.run != self._run):
            raise WrongBaseError(
                f"anchor {info.version} belongs to run {info.run} on base {info.base}, this replica to run {self._run} on "
                f"base {self._base}"
            )
        odd = sorted(set(anchor.names) ^ self.blocks.keys())
        odd += [n for n, b in self.blocks.items() if n not in odd and anchor.shape(n) != tuple(b.shape)]
        if odd:
            raise WrongBaseError(
                f"anchor {info.version} is of another model: {len(odd)} names or shapes differ, {', '.join(odd[:3])} first"
            )
        bases = {name: anchor.basis(name, block.columns) for name, block in self.blocks.items()}
        self._poison, self._digest = f"loading anchor {info.version} failed midway", None
        for name, block in self.blocks.items():
            block.load(anchor.tensor(name, block.rows, block.columns))
            block.hold(*bases[name])
        self._poison = None
        self._version, self._run, self._head = info.version, info.run, info.head
        if self.whole:
            self._compare(info.digest, f"anchor {info.version}")

    def _check_model(self, packet: Packet) -> None:
        # apply_blocks checks everything too; this comes before the poison is set
        names = packet.update.names
        odd = sorted(set(names) ^ self.blocks.keys())
        if odd:
            what = "moves, and is not held here" if odd[0] in names else "does not move, and is held here"
            raise WrongBaseError(f"update {packet.index}: {odd[0]} is one of {len(odd)} that it {what}: another model?")
        for block in self.blocks.values():
            block.check(packet.update)

    def _compare(self, expected: str, what: str) -> None:
        actual = self.digest()
        if actual != expected:
            self._poison = f"after {what} the digest is {actual}, the trainer's is {expected}"
            raise UpdateError(
                f"{self._poison}: these weights are not the policy. They were changed by something else, or began differently. "
                "Load an anchor, or begin again from the base model"
            )

    def _check_usable(self) -> None:
        if self._poison is not None:
            raise UpdateError(
                f"this replica is unusable ({self._poison}): load an anchor over it, or begin again from the base model"
            )

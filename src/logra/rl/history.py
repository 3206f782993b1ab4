"""A run's history: every applied Update in its journal, and a killed run continued at its last finished step.

A checkpoint holds all weights and is written now and then; the journal gets each Update as it is applied, and the trainer's
small state after each step. Weights of the last step = weights of the last checkpoint (or the base model) + the Updates since.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from logra.errors import CheckpointError, UpdateError, UpdateOrderError, UserError
from logra.files import remove_tree, temporary_sibling
from logra.rl.methods.logra import LograMethod
from logra.rl.world import World
from logra.sketch.block import Block, digest
from logra.sketch.targets import clean_name
from logra.sketch.update import Update
from logra.sync.journal import HEADER, Journal, JournalBusyError
from logra.sync.packet import Packet
from logra.sync.publisher import Publisher
from logra.sync.replay import bring_to
from logra.sync.replica import Replica
from logra.sync.state import JSON as STATE
from logra.sync.state import TailState

logger = logging.getLogger(__name__)

_BASIS = "method.sketcher.basis."  # and the name of the target: in the tensors of a checkpoint


def hold_bases(blocks: Mapping[str, Block], tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Let blocks hold the aligned bases that were in force at a checkpoint (nothing to do for other bases).

    tensors, state: of the checkpoint. Raises `CheckpointError` if they do not fit.
    """
    for name, index in (state["method"]["sketcher"].get("basis_index") or {}).items():
        try:
            blocks[name].hold(tensors[_BASIS + name], int(index))
        except (KeyError, UpdateError) as error:
            raise CheckpointError(f"the checkpoint lacks a fitting basis of {name}: {error}") from error


def has_journal(folder: Path) -> bool:
    return (folder / HEADER).is_file()


def frozen_digest(model: nn.Module, moving: Collection[str]) -> str:
    """Digest of the float32 values of every parameter that never moves."""
    return digest(model, _frozen(model, moving))


def _frozen(model: nn.Module, moving: Collection[str]) -> list[str]:
    """The parameters that never move, a tied one under its first name."""
    names = [clean_name(name) for name, _ in model.named_parameters()]
    return [name for name in names if name not in moving]


def is_base(folder: Path, model: nn.Module, digest_of: Callable[[nn.Module, list[str]], str] = digest) -> bool:
    """Whether a model has the weights, moving and frozen, that the journal began with (True where that is not known).

    digest_of: gives the digest of some of its parameters, where the model itself is without values.
    """
    try:
        with Journal.open(folder) as journal:
            info = journal.info()
    except UserError:  # unreadable: whoever opens it for writing says so
        return True
    names = [name for name, _, _ in info.targets]
    same = info.origin > 0 or digest_of(model, names) == info.base
    return same and digest_of(model, _frozen(model, names)) == info.model.get("frozen")


def find_tail(folder: Path, after_step: int, version: int) -> TailState | None:
    """The state of the last finished step, if the journal leads to a step beyond `after_step` with its `version`.

    Where it should and cannot, because something is damaged or missing, the log says so; and if there is no checkpoint to fall
    back on (after_step 0), `CheckpointError`: beginning again would drop the history.
    """
    if not has_journal(folder) and not any(folder.glob("segment_*")):
        return None
    try:
        with Journal.open(folder) as journal:
            state, reason = journal.read_state()
            origin = journal.info().origin
            has_history = max(journal.steps(), default=0) > 1 or (folder / STATE).exists() or origin > 0
            if state is not None and state.step > after_step:
                reason = _unreadable(journal, version, state.version)
    except UserError as error:
        state, reason, has_history = None, str(error), True
    if state is not None and not reason:
        return state if state.step > after_step else None
    if after_step == 0 and has_history:
        raise CheckpointError(
            f"the run cannot be continued: {reason}; and there is no checkpoint. Restore the file; or move {folder} away and "
            "start again as the run was started (logra checkout writes the policy of any step whose updates are whole)"
        )
    logger.warning("continuing from step %d: %s", after_step, reason)
    return None


def _unreadable(journal: Journal, start: int, stop: int) -> str:
    """Why the Updates between two versions cannot all be read; empty if they can (or an anchor leads over them)."""
    try:
        if start < journal.first:
            anchors = [anchor.version for anchor in journal.anchors if anchor.version <= stop]
            if not anchors:
                return f"the anchor that {journal.folder} begins with is gone or damaged"
            start = anchors[-1]
            journal.read_anchor(start).close()
        for index in range(start, stop):
            Packet.from_bytes(journal.read(index))
    except UpdateError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Policy:
    """What a journal must know of a policy: digests of what moves and of what never does; (name, rows, columns) of the former."""

    digest: str
    frozen: str
    table: list[tuple[str, int, int]]

    @staticmethod
    def of(method: LograMethod) -> Policy:
        """Where weights are sharded, a collective call."""
        blocks = method.blocks()
        table = [(name, *block.shape) for name, block in blocks.items()]
        return Policy(method.digest(), frozen_digest(method.model, blocks), table)


def open_journal(
    folder: Path,
    policy: Policy,
    *,
    version: int,
    step: int,
    model: Mapping[str, Any],
    tail: TailState | None = None,
) -> Journal:
    """The run's journal for writing, made if there is none. The policy is that of `version`, after `step`.

    A new one that begins at a later version has no anchor yet, which it needs: the base model does not lead there. model:
    name_or_path and revision; the digest of what never moves is added. tail: where the run goes on from, if the journal
    is to lead beyond `version`. Raises `UpdateError` if the journal began with other weights, moving or frozen. One that is
    unreadable, or does not reach `version`, is moved aside (a checkpoint has the weights then) and a new one begins there.
    """
    if folder.is_dir() and any(folder.iterdir()):
        try:
            journal = Journal.open(folder, write=True)
        except JournalBusyError:
            raise
        except UserError as error:
            if step == 0:
                raise
            _move_aside(folder, version, str(error))
        else:
            is_unused = tail is None and journal.next == journal.info().origin and journal.read_state()[0] is None
            if is_unused and not _is_that_of(journal, policy, version):
                journal.close()
                remove_tree(folder)  # of a start that made no update, perhaps of another model
            else:
                reason = _why_anew(journal, policy, version, model, tail)
                if not reason:
                    return journal
                journal.close()
                _move_aside(folder, version, reason)
    return Journal.create(
        folder,
        run=secrets.token_hex(16),
        base=policy.digest,
        targets=[list(row) for row in policy.table],
        model={**model, "frozen": policy.frozen},
        origin=version,
        origin_step=step,
    )


def _move_aside(folder: Path, version: int, why: str) -> None:
    aside = temporary_sibling(folder, "aside")
    os.rename(folder, aside)
    logger.warning("%s. A new journal begins at version %d; the old one is now %s", why, version, aside)


def _is_that_of(journal: Journal, policy: Policy, version: int) -> bool:
    """Whether a journal without updates is of these very weights and targets."""
    info = journal.info()
    same = info.origin == version and info.base == policy.digest and info.model.get("frozen") == policy.frozen
    return same and sorted(info.targets) == sorted(policy.table)


def _why_anew(
    journal: Journal,
    policy: Policy,
    version: int,
    model: Mapping[str, Any],
    tail: TailState | None,
) -> str:
    """Why the journal cannot be continued from `version`; empty if it can. Closes it and raises if the base model changed."""
    info = journal.info()
    if info.model.get("frozen") != policy.frozen or (version == info.origin and policy.digest != info.base):
        journal.close()
        raise UpdateError(
            f"the weights of {model.get('name_or_path')} are not those that {journal.folder} began with: the base model has "
            "changed. Restore it, or start a new run in another output_dir"
        )
    if info.next < version:
        problem = f" ({info.problem})" if info.problem else ""
        return (
            f"{journal.folder} ends at version {info.next}, the weights are at {version}: Updates are missing{problem}"
        )
    if version < journal.oldest and tail is None:
        return f"{journal.folder} holds only versions from {journal.oldest} on"
    return ""


def replica_at(journal: Journal, blocks: Mapping[str, Block], version: int, goal: int) -> Replica:
    """A replica that the journal can bring to `goal`. blocks: of version `version`, with the aligned bases in force, or of the
    base model where the journal begins later: an anchor is loaded over them then. Raises `UpdateError` of the kind that says what
    is wrong."""
    info = journal.info()
    if version < info.origin:
        anchors = [anchor.version for anchor in info.anchors if anchor.version <= goal]
        if not anchors:
            raise UpdateOrderError(
                f"{journal.folder} begins at version {info.origin} with an anchor that is gone or damaged: nothing leads to "
                f"version {goal}"
            )
        replica = Replica(blocks, version=info.origin, run=info.run, base=info.base)
        with journal.read_anchor(anchors[-1]) as anchor:
            replica.load_anchor(anchor)
        return replica
    head = None
    with contextlib.suppress(UpdateError):  # compacted away: the way leads over an anchor then
        head = journal.head_at(version)
    return Replica(blocks, version=version, run=info.run, base=info.base, head=head)


def replay(journal: Journal, method: LograMethod, version: int, tail: TailState) -> None:
    """Bring the method's weights from `version`, whose bases it holds, to the tail's by the journal's Updates, each checked."""
    try:
        bring_to(journal, replica_at(journal, method.blocks(), version, tail.version), tail.version)
    except UpdateError as error:
        raise CheckpointError(
            f"the run cannot be continued at step {tail.step}: {error}. Name its last checkpoint to continue from there "
            "(--resume RUN/checkpoints/step_N)"
        ) from error


class History:
    """The trainer's recorder, see `logra.rl.trainer.Recorder`. Over several ranks each has one, and all call it alike.

    journal: None on every rank but the first. digest_every: Updates between digests in the packets (0: none); those of last_step
    have one too. anchor_every, keep_anchors: Updates between anchors, and how many are kept, older history being dropped (0: no
    anchors; None: all kept).
    """

    def __init__(
        self,
        journal: Journal | None,
        method: LograMethod,
        *,
        digest_every: int = 10,
        anchor_every: int = 0,
        keep_anchors: int | None = None,
        last_step: int = 0,
        world: World | None = None,
    ):
        self._journal, self.method, self.last_step = journal, method, last_step
        self.digest_every, self.anchor_every, self.keep_anchors = digest_every, anchor_every, keep_anchors
        self.world = world or World()
        self.publisher = None if journal is None else Publisher(journal, tolerant=True)

    @property
    def journal(self) -> Journal:
        """On the first rank."""
        assert self._journal is not None
        return self._journal

    def begin(self) -> None:
        """Write the anchor that a new journal begins with where the base model does not lead."""
        self._anchor_if(lambda: 0 < self.journal.info().origin == self.journal.next and not self.journal.anchors)

    def go_back(self, version: int, *, served: bool) -> None:
        """Drop what lies beyond `version`, which the run now does again. served: then leave an anchor, where there is none, from
        which subscribers that were further on can start again."""

        def drop() -> bool:
            was_beyond = self.journal.next > version
            self.journal.truncate(version)
            return served and was_beyond and not self.journal.anchors

        self._anchor_if(drop)

    def _anchor_if(self, is_wanted: Callable[[], bool]) -> None:
        """Write an anchor of the version in place, if the first rank finds that one is wanted."""
        if self.world.share(is_wanted):
            digest, blocks = self.method.digest(), self.method.whole_blocks()
            self.world.share(lambda: self.journal.write_anchor(self.method.num_updates, blocks, digest))

    def start(self, subscribers: int, timeout_s: float) -> None:
        """Wait until that many subscribers have acknowledged the version the trainer starts from."""
        # where the journal begins the publisher knows it: it is the base digest
        is_known = self.world.share(lambda: self.journal.next == self.journal.info().origin)
        digest = None if is_known else self.method.digest()

        def wait() -> None:
            assert self.publisher is not None
            if digest is not None:
                self.publisher.know(self.journal.next, digest)
            if subscribers:
                self.publisher.wait_for(subscribers, self.journal.next, timeout_s)

        self.world.share(wait)

    def finish(self, timeout_s: float) -> None:
        """Let subscribers reach the last version before the server goes; says who has not."""
        if self.publisher is None:
            return
        late = self.publisher.drain(timeout_s)
        if late:
            logger.warning("the run is over, and not at its last version: %s", ", ".join(late))

    def record(self, update: Update, step: int) -> Packet | None:
        """None on every rank but the first, which alone sends it on."""
        version = update.index + 1
        is_anchor = self.anchor_every > 0 and version % self.anchor_every == 0
        is_digest = self.digest_every > 0 and (version % self.digest_every == 0 or step == self.last_step)
        digest = self.method.digest() if is_anchor or is_digest else None
        blocks = self.method.whole_blocks() if is_anchor else None
        sent: list[Packet] = []

        def write() -> None:
            assert self.publisher is not None
            sent.append(self.publisher.publish(update, step, digest))
            if blocks is not None and digest is not None:
                self.journal.write_anchor(version, blocks, digest)

        self.world.share(write)
        return sent[0] if sent else None

    def finish_step(self, step: int, num_updates: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        def write() -> None:
            self.journal.write_state(step, num_updates, tensors, state)
            self._drop_old()

        self.world.share(write)

    def _drop_old(self) -> None:
        """Only now: until the new state was written, a killed run would have gone on from before the anchor."""
        anchors = self.journal.anchors
        if self.keep_anchors is not None and len(anchors) > self.keep_anchors:
            self.journal.compact(anchors[-self.keep_anchors].version)

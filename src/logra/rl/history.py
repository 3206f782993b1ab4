"""A run's history: every applied Update in its journal, and a killed run continued at its last finished step.

A checkpoint holds all weights and is written now and then; the journal gets each Update as it is applied, and the trainer's
small state after each step. Weights of the last step = weights of the last checkpoint (or the base model) + the Updates since.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from logra.errors import CheckpointError, UpdateError
from logra.files import remove_tree, temporary_sibling
from logra.rl.methods.logra import LograMethod
from logra.sketch.block import digest
from logra.sketch.targets import clean_name
from logra.sketch.update import Update
from logra.sync.journal import HEADER, Journal
from logra.sync.packet import Packet
from logra.sync.publisher import Publisher
from logra.sync.replay import bring_to
from logra.sync.replica import Replica
from logra.sync.state import TailState

logger = logging.getLogger(__name__)


def has_journal(folder: Path) -> bool:
    return (folder / HEADER).is_file()


def frozen_digest(model: nn.Module, moving: Collection[str]) -> str:
    """Digest of the float32 values of every parameter that never moves (a tied one under its first name)."""
    names = [clean_name(name) for name, _ in model.named_parameters()]
    return digest(model, [name for name in names if name not in moving])


def is_base(folder: Path, model: nn.Module) -> bool:
    """Whether a model has the weights, moving and frozen, that the journal began with (True where it began later)."""
    with Journal.open(folder) as journal:
        info = journal.info()
    names = [name for name, _, _ in info.targets]
    same = info.origin > 0 or digest(model, names) == info.base
    return same and frozen_digest(model, names) == info.model.get("frozen")


def find_tail(folder: Path, after_step: int) -> TailState | None:
    """The state of the last finished step, if the journal has one of a step beyond `after_step`; says why not in the log."""
    if not has_journal(folder):
        return None
    with Journal.open(folder) as journal:
        state, reason = journal.read_state()
    if state is None:
        logger.warning("continuing from step %d: %s", after_step, reason)
        return None
    return state if state.step > after_step else None


def open_journal(
    folder: Path,
    method: LograMethod,
    *,
    version: int,
    step: int,
    model: Mapping[str, Any],
    tail: TailState | None = None,
) -> Journal:
    """The run's journal for writing, made if there is none. The method's weights are those of `version`, after `step`.

    model: name_or_path and revision; the digest of what never moves is added. tail: where the run goes on from, if the journal
    is to lead beyond `version`. Raises `UpdateError` if the journal began with other weights, moving or frozen, or lacks
    Updates that led to `version`. One whose history before that was compacted away is begun anew at `version`.
    """
    frozen = frozen_digest(method.model, method.blocks())
    if has_journal(folder):
        journal = Journal.open(folder, write=True)
        try:
            _check_base(journal, method, version, frozen, model)
            if version >= journal.oldest or tail is not None:
                return journal
        except BaseException:
            journal.close()
            raise
        logger.warning(
            "%s holds only versions from %d on: going back to version %d begins a new journal",
            folder,
            journal.oldest,
            version,
        )
        journal.close()
        doomed = temporary_sibling(folder, "del")
        os.rename(folder, doomed)
        remove_tree(doomed)
    blocks = method.blocks()
    journal = Journal.create(
        folder,
        run=secrets.token_hex(16),
        base=method.digest(),
        targets=[[name, *block.shape] for name, block in blocks.items()],
        model={**model, "frozen": frozen},
        origin=version,
        origin_step=step,
    )
    if version:  # the base model does not lead here: the journal begins with these weights
        journal.write_anchor(version, blocks, journal.info().base)
    return journal


def _check_base(journal: Journal, method: LograMethod, version: int, frozen: str, model: Mapping[str, Any]) -> None:
    """Raise `UpdateError` unless the journal belongs to the method's weights of `version`."""
    info = journal.info()
    if info.model.get("frozen") != frozen or (version == info.origin and method.digest() != info.base):
        raise UpdateError(
            f"the weights of {model.get('name_or_path')} are not those that {journal.folder} began with: the base model has "
            "changed. Restore it, or start a new run in another output_dir"
        )
    if journal.next < version:
        raise UpdateError(
            f"{journal.folder} ends at version {journal.next}, the weights are at {version}: Updates are missing"
            f"{f' ({info.problem})' if info.problem else ''}. Delete {journal.folder} to go on without that history"
        )


def replay(journal: Journal, method: LograMethod, version: int, tail: TailState) -> None:
    """Bring the method's weights from `version` to the tail's by the journal's Updates, each checked."""
    info = journal.info()
    head = None
    with contextlib.suppress(UpdateError):  # compacted away: the way leads over an anchor then
        head = journal.head_at(version)
    replica = Replica(method.blocks(), version=version, run=info.run, base=info.base, head=head)
    try:
        bring_to(journal, replica, tail.version)
    except UpdateError as error:
        raise CheckpointError(
            f"the run cannot be continued at step {tail.step}: {error}. Name its last checkpoint to continue from there "
            "(--resume RUN/checkpoints/step_N)"
        ) from error


class History:
    """The trainer's recorder. See `logra.rl.trainer.Recorder`.

    digest_every: Updates between digests in the packets (0: none). anchor_every, keep_anchors: Updates between anchors, and how
    many are kept, older history being dropped (0: no anchors; None: all kept).
    """

    def __init__(
        self,
        journal: Journal,
        method: LograMethod,
        *,
        digest_every: int = 10,
        anchor_every: int = 0,
        keep_anchors: int | None = None,
    ):
        self.journal, self.method = journal, method
        self.digest_every, self.anchor_every, self.keep_anchors = digest_every, anchor_every, keep_anchors
        self.publisher = Publisher(journal)

    def start(self, subscribers: int, timeout_s: float) -> None:
        """Wait until that many subscribers have acknowledged the version the trainer starts from."""
        self.publisher.know(self.journal.next, self.method.digest())
        if subscribers:
            self.publisher.wait_for(subscribers, self.journal.next, timeout_s)

    def record(self, update: Update, step: int) -> Packet:
        version = update.index + 1
        is_anchor = self.anchor_every > 0 and version % self.anchor_every == 0
        is_digest = self.digest_every > 0 and version % self.digest_every == 0
        digest = self.method.digest() if is_anchor or is_digest else None
        packet = self.publisher.publish(update, step, digest)
        if is_anchor and digest is not None:
            self.journal.write_anchor(version, self.method.blocks(), digest)
        return packet

    def finish_step(self, step: int, num_updates: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.journal.write_state(step, num_updates, tensors, state)
        self._drop_old()

    def _drop_old(self) -> None:
        """Only now: until the new state was written, a killed run would have gone on from before the anchor."""
        anchors = self.journal.anchors
        if self.keep_anchors is not None and len(anchors) > self.keep_anchors:
            self.journal.compact(anchors[-self.keep_anchors].version)

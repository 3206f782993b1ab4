"""`logra checkout` and `logra journal`: the policy at any step of a run, and what its journal holds."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from logra import config as cfg
from logra.cli.console import Console
from logra.errors import CheckpointError, UserError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from logra.rl.checkpoint import Checkpoint
    from logra.rl.run_dir import RunDir
    from logra.sync.journal import Journal


def checkout(run: str, step: int, output: str | None, dtype: str | None) -> int:
    """Write the policy after `step` as a Hugging Face folder. Returns the exit code; errors are raised."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    from logra.rl.run_dir import RunDir

    folder = RunDir(Path(run))
    target = Path(output) if output is not None else folder.path / "checkouts" / f"step_{step}"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already: give another --output, or delete it")
    config = _config_of(folder)
    with _journal_of(folder, config) as journal:
        version = _version_at(journal, folder, step)
        digest = _write(journal, folder, config, step, version, target, dtype)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"wrote {target}: step {step}, {version} updates, digest {digest}", markup=False)
    return 0


def _config_of(folder: RunDir) -> cfg.Config:
    if not folder.config.is_file():
        raise CheckpointError(f"{folder.path} is no run folder: it has no config.yaml")
    return cfg.load_config(folder.config)


def _journal_of(folder: RunDir, config: cfg.Config) -> Journal:
    from logra.rl.history import has_journal
    from logra.sync.journal import Journal

    if not has_journal(folder.journal):
        raise CheckpointError(
            f"{folder.path} has no journal ({_why_no_journal(config)}): only its checkpoints are there"
        )
    return Journal.open(folder.journal)


def _why_no_journal(config: cfg.Config) -> str:
    if config.method.name != "logra":
        return f"method {config.method.name} makes no updates"
    if config.method.basis == "gaussian":
        return "updates of a gaussian basis cannot be stored"
    return "journal.enabled is false" if not config.journal.enabled else "it was deleted, or the run has not begun"


def _version_at(journal: Journal, folder: RunDir, step: int) -> int:
    """The number of updates after `step`; `CheckpointError` if the run has not got there, or the journal lacks some of them."""
    last = last_step(journal, folder)
    if not 0 <= step <= last:
        raise CheckpointError(f"{folder.path} has steps 0 to {last}, there is no step {step}")
    version, newest = journal.version_at(step), max(journal.steps(), default=0)
    expected = _updates_at(folder, step)
    if expected is None and step > newest:  # steps without an update of their own, if the state says so
        state, reason = journal.read_state()
        expected = version if state is not None and state.step >= step and not reason else -1
    if expected not in (None, version):
        raise CheckpointError(
            f"{journal.folder} ends at step {newest} with {version} updates; those that led to step {step} are missing"
            + (f" ({problem})" if (problem := journal.info().problem) else "")
        )
    return version


def _updates_at(folder: RunDir, step: int) -> int | None:
    """The number of updates after `step` as the metrics have it; None where they do not."""
    from logra.rl.run_dir import read_metrics

    if step == 0:
        return 0
    records = read_metrics(folder.metrics) if folder.metrics.is_file() else []
    return next((int(r["num_updates"]) for r in records if r.get("step") == step and "num_updates" in r), None)


def last_step(journal: Journal, folder: RunDir) -> int:
    """The last step that the journal, the metrics or a checkpoint knows of."""
    from logra.rl.checkpoint import CheckpointStore
    from logra.rl.run_dir import read_metrics

    state, _ = journal.read_state()
    steps = [0, *journal.steps(), *CheckpointStore(folder.checkpoints).steps()]
    steps += [state.step] if state is not None else []
    if folder.metrics.is_file():
        steps += [int(r["step"]) for r in read_metrics(folder.metrics) if isinstance(r.get("step"), int)]
    return max(steps)


def _write(
    journal: Journal, folder: RunDir, config: cfg.Config, step: int, version: int, target: Path, dtype: str | None
) -> str:
    """Start from the nearest checkpoint at or before the version, or the base model; apply the Updates; export."""
    import torch

    from logra.build import model_card
    from logra.build.history import version_of
    from logra.errors import WrongBaseError
    from logra.rl.export import export_model
    from logra.rl.history import frozen_digest, hold_bases, replica_at
    from logra.rl.models import load_model, set_chat_template
    from logra.sketch.block import blocks_of
    from logra.sync.replay import bring_to

    info = journal.info()
    checkpoint = _nearest(folder, step)
    name, revision = (str(checkpoint.path / "model"), None) if checkpoint else _base(config, info.model)
    model, tokenizer = load_model(name, revision=revision, device="cpu", seed=config.seed)
    set_chat_template(tokenizer, None if checkpoint else config.model.chat_template)
    blocks = blocks_of(model, [target_name for target_name, _, _ in info.targets])
    if frozen_digest(model, blocks) != info.model.get("frozen"):
        raise CheckpointError(
            f"{name} is not the model this run began with: weights that never move differ. Restore it"
        )
    if checkpoint is not None:
        hold_bases(blocks, checkpoint.tensors, checkpoint.state)
    try:
        replica = replica_at(journal, blocks, version_of(checkpoint), version)
    except WrongBaseError as error:
        raise CheckpointError(
            f"{name} is not the model this run began with ({error}). Restore it, or choose a step after a checkpoint"
        ) from error
    bring_to(journal, replica, version)
    card = model_card(config, step)
    export_model(model, tokenizer, target, card=card, dtype=None if dtype is None else getattr(torch, dtype))
    return replica.digest()


def _base(config: cfg.Config, recorded: Mapping[str, Any]) -> tuple[str, str | None]:
    """The base model; a folder that was named relative to another directory by its whole path."""
    name, folder = config.model.name_or_path, recorded.get("folder")
    if folder is not None and not Path(name).expanduser().is_dir() and Path(folder).is_dir():
        return folder, None
    return name, config.model.revision


def _nearest(folder: RunDir, step: int) -> Checkpoint | None:
    """The newest unharmed checkpoint up to `step`; None: the base model."""
    from logra.rl.checkpoint import CheckpointStore, load_checkpoint

    for number, path in reversed(CheckpointStore(folder.checkpoints).steps().items()):
        if number > step:
            continue
        try:
            return load_checkpoint(path)
        except CheckpointError as error:
            logger.warning("passed over: %s", error)
    return None


def journal(run: str, *, verify: bool, compact: int | None, as_json: bool) -> int:
    """Show what a run's journal holds; read all of it (verify); drop history before an anchor (compact)."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    from logra.rl.run_dir import RunDir

    folder = RunDir(Path(run))
    config = _config_of(folder)
    console = Console(highlight=False, soft_wrap=True)
    if compact is not None:
        with _journal_of(folder, config) as log:
            version = _version_at(log, folder, compact)
        _compact(folder, version)
    with _journal_of(folder, config) as log:
        facts = _facts(log, folder)
        if verify:
            _verify(log, folder)
            facts["verified"] = "whole: every update and anchor, and the state of the last step"
    if as_json:
        print(json.dumps(facts))
        return 0
    table = Table(show_header=False, box=None)
    for key, value in facts.items():
        table.add_row(key.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    console.print(table)
    return 0


def _compact(folder: RunDir, version: int) -> None:
    from logra.sync.journal import Journal

    with Journal.open(folder.journal, write=True) as log:
        log.compact(version)


def _verify(log: Journal, folder: RunDir) -> None:
    """Read every update, anchor and the state, compare with the rest of the run; `DamagedUpdateError` lists the faults."""
    from logra.errors import DamagedUpdateError, UpdateError
    from logra.sync.packet import Packet

    info, found = log.info(), []
    if info.problem:
        found.append(info.problem)
    for index in range(info.first, info.next):
        try:
            Packet.from_bytes(log.read(index))
        except UpdateError as error:
            found.append(str(error))
    for path in sorted(log.folder.glob("anchor_*.json")):
        try:
            log.read_anchor(int(path.stem.removeprefix("anchor_"))).close()
        except UpdateError as error:
            found.append(str(error))
    state, reason = log.read_state()
    if state is None:
        found.append(reason)
    last = last_step(log, folder)
    expected = _updates_at(folder, last)
    if expected is not None and expected > info.next:
        found.append(
            f"{folder.path} made {expected} updates by step {last}, the journal ends after {info.next}: updates are missing"
        )
    if found:
        raise DamagedUpdateError("the journal is not whole:\n" + "\n".join(f"  - {what}" for what in found[:20]))


def _facts(log: Journal, folder: RunDir) -> dict[str, Any]:
    from logra.rl.checkpoint import CheckpointStore

    info = log.info()
    checkpoints = CheckpointStore(folder.checkpoints).steps()
    sizes = [sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) for path in checkpoints.values()]
    facts: dict[str, Any] = {
        "run": info.run,
        "last_step": last_step(log, folder),
        "first_update": info.first,
        "updates": info.next - info.first,
        "bytes_per_update": info.packet_bytes,
        "journal_bytes": sum(f.stat().st_size for f in folder.journal.rglob("*") if f.is_file()),
        "anchors": [anchor.version for anchor in info.anchors],
    }
    if sizes and info.packet_bytes:
        facts |= {
            "checkpoint_bytes": max(sizes),
            "checkpoint_to_update": round(max(sizes) / info.packet_bytes, 1),
        }
    if info.problem:
        facts["problem"] = info.problem
    return facts

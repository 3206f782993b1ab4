"""Where a run continues, and its journal."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from logra import config as cfg
from logra.errors import CheckpointError, ConfigError
from logra.rl.checkpoint import Checkpoint, CheckpointStore
from logra.rl.history import History, Policy, find_tail, has_journal, open_journal, replay
from logra.rl.methods.base import Method, below
from logra.rl.methods.logra import LograMethod
from logra.rl.run_dir import RunDir
from logra.rl.world import World
from logra.sync.http import Server, serve
from logra.sync.journal import Journal
from logra.sync.state import TailState
from logra.sync.token import load_or_make_token

logger = logging.getLogger(__name__)


def read_checkpoint(
    store: CheckpointStore, path: Path | None, config: cfg.Config, verified: Path | None = None
) -> Checkpoint | None:
    """The checkpoint at `path`, of the same configuration. verified: one that need not be hashed again."""
    if path is None:
        return None
    checkpoint = store.load(path, verify=path != verified)
    if checkpoint.step > config.train.steps:
        raise ConfigError(
            f"{path} has {checkpoint.step} steps done, more than train.steps={config.train.steps}: raise train.steps, or "
            "resume from an earlier checkpoint"
        )
    _check_identity(path, checkpoint.state["identity"], config)
    return checkpoint


def read_tail(folder: RunDir, checkpoint: Checkpoint | None, config: cfg.Config) -> TailState | None:
    """Where the journal leads beyond the checkpoint; only where the run as such is resumed, not a checkpoint by name."""
    if has_journal(folder.journal) and not config.keeps_journal:
        raise ConfigError(f"{folder.path} keeps a journal: resume with journal.enabled, or delete {folder.journal}")
    is_whole_run = config.resume == "auto" or Path(config.resume).resolve() == folder.path.resolve()
    if not is_whole_run:
        return None
    if not config.keeps_journal:
        return None
    tail = find_tail(folder.journal, checkpoint.step if checkpoint else 0, version_of(checkpoint))
    if tail is None:
        return None
    if tail.step > config.train.steps:
        raise ConfigError(f"{folder.path} has {tail.step} steps done: raise train.steps={config.train.steps}")
    _check_identity(folder.journal, tail.values["identity"], config)
    return tail


def version_of(checkpoint: Checkpoint | None) -> int:
    """The number of updates in a checkpoint of method logra."""
    return int(checkpoint.state["method"]["sketcher"]["update_index"]) if checkpoint else 0


def build_history(
    config: cfg.Config,
    folder: RunDir,
    method: Method,
    checkpoint: Checkpoint | None,
    tail: TailState | None,
    closers: list[Callable[[], None]],
    world: World,
) -> History | None:
    """The journal, open for writing, with the method's weights brought to the tail. The method's state is the checkpoint's."""
    if not config.keeps_journal or not isinstance(method, LograMethod):
        return None
    version = version_of(checkpoint)
    if checkpoint is not None:
        # not left to the trainer: the bases in force are needed where the journal leads on, and for its first anchor
        own = below("method.", checkpoint.tensors)
        method.load_state(own, checkpoint.state["method"])
    name = config.model.name_or_path
    local = Path(name).expanduser()
    model = {"name_or_path": name, "revision": config.model.revision}
    if local.is_dir():
        model["folder"] = str(local.resolve())  # for `logra checkout` from another directory
    policy, step = Policy.of(method), checkpoint.step if checkpoint else 0
    opened: list[Journal] = []

    def open_it() -> None:
        opened.append(open_journal(folder.journal, policy, version=version, step=step, model=model, tail=tail))
        closers.append(opened[0].close)

    world.share(open_it)
    section = config.journal
    history = History(
        opened[0] if opened else None,
        method,
        digest_every=section.digest_every,
        anchor_every=section.anchor_every,
        keep_anchors=section.keep_anchors,
        last_step=config.train.steps,
        world=world,
    )
    history.begin()
    if tail is not None:
        with contextlib.nullcontext(opened[0]) if opened else Journal.open(folder.journal) as journal:
            replay(journal, method, version, tail)
    return history


def _check_identity(path: Path, identity: Mapping[str, Any], config: cfg.Config) -> None:
    changed = cfg.differences(identity, cfg.identity(config))
    if changed:
        raise CheckpointError(
            f"{path} was written under another configuration: {'; '.join(changed[:5])}. "
            "Resume with the same values, or start a new run in another output_dir"
        )


def sync_token(section: cfg.Sync, folder: RunDir) -> tuple[str, Path] | None:
    """The bearer token and its file, if the journal is to be served; one is made in the run folder if none is given."""
    if not section.serve:
        return None
    given = Path(section.token_file).expanduser() if section.token_file else None
    if given is not None and not given.is_file():
        raise ConfigError(f"sync.token_file={given} does not exist: write a token of at least 16 characters into it")
    path = given or folder.path / "sync_token"
    return load_or_make_token(path), path


def start_serving(section: cfg.Sync, token: tuple[str, Path], history: History) -> Server:
    """Serve the journal, as it is when the run begins: nothing of a branch that was left is ever served."""
    server = serve(history.journal, token[0], host=section.host, port=section.port)
    logger.warning("serving policy updates at %s, token in %s", server.url, token[1])
    return server

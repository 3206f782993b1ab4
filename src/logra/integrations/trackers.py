"""Metric trackers: tensorboard, wandb, trackio. Each package is imported only when its tracker is asked for.

A tracker that cannot start is an error before training; one that fails later is switched off and reported
once, and training goes on: `metrics.jsonl` has everything anyway.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from logra.errors import ConfigError

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where metrics go. Neither method raises once training runs."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of one step. Values that are no finite number are left out."""
        ...

    def close(self) -> None:
        """Flush and end. May be called twice."""
        ...


def make_trackers(
    names: Sequence[str],
    *,
    project: str | None,
    run_name: str,
    folder: Path,
    config: Mapping[str, Any],
    resume_step: int | None = None,
) -> list[Tracker]:
    """Start the trackers `names` ("tensorboard", "wandb", "trackio"); repeated names count once.

    folder: the run folder; tensorboard writes to `tensorboard/` in it, wandb to `wandb/`.
    config: JSON-able, shown by the trackers that show configurations.
    resume_step: the step a resumed run continues from; the same wandb and trackio run goes on, and
    tensorboard hides what was logged after it.
    Raises ConfigError for an unknown name, a missing package, or a tracker that does not start.
    """
    unknown = [name for name in names if name not in _STARTERS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], _STARTERS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(_STARTERS)}"
        raise ConfigError(f"unknown tracker {unknown[0]!r}: {hint}")
    trackers: list[Tracker] = []
    for name in dict.fromkeys(names):
        module = _import(name)
        try:
            sink = _STARTERS[name](module, project, run_name, Path(folder), dict(config), resume_step)
        except Exception as error:  # whatever a third-party package raises when it does not start
            for tracker in trackers:
                tracker.close()
            raise ConfigError(
                f"the tracker {name} did not start ({type(error).__name__}: {error}): mend its setup or take "
                f"it out of the list of trackers"
            ) from error
        trackers.append(_Guarded(name, *sink))
    return trackers


class _Guarded:
    """Keeps a failing tracker from stopping the training it watches."""

    def __init__(self, name: str, log: Callable[[int, dict[str, float]], None], close: Callable[[], None]) -> None:
        self.name = name
        self._log: Callable[[int, dict[str, float]], None] | None = log
        self._close: Callable[[], None] | None = close

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See `Tracker.log`."""
        if self._log is None:
            return
        try:
            self._log(step, numbers(metrics))
        except Exception as error:  # a tracker may fail in any way; training must not
            self._log = None
            self._report(f"failed at step {step} and is switched off for the rest of the run", error)

    def close(self) -> None:
        """See `Tracker.close`."""
        close, self._close, self._log = self._close, None, None
        if close is None:
            return
        try:
            close()
        except Exception as error:
            self._report("failed while closing; its last metrics may be missing there", error)

    def _report(self, what: str, error: Exception) -> None:
        logger.warning(
            "the tracker %s %s (%s: %s). metrics.jsonl has all metrics.",
            self.name,
            what,
            type(error).__name__,
            error,
        )


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among `metrics`, also one-element tensors, as floats; the rest is left out."""
    out = {}
    for name, value in metrics.items():
        if callable(getattr(value, "item", None)):
            value = value.item()
        if isinstance(value, bool | int | float) and math.isfinite(value):
            out[name] = float(value)
    return out


_Sink = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]


def _start_tensorboard(
    module: Any,
    project: str | None,
    run_name: str,
    folder: Path,
    config: dict[str, Any],
    resume_step: int | None,
) -> _Sink:
    purge = None if resume_step is None else resume_step + 1
    writer = module.SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=purge)

    def log(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _start_wandb(
    module: Any,
    project: str | None,
    run_name: str,
    folder: Path,
    config: dict[str, Any],
    resume_step: int | None,
) -> _Sink:
    # None leaves project and mode to WANDB_PROJECT and WANDB_MODE.
    run = module.init(
        project=project,
        name=run_name,
        dir=str(folder),
        config=config,
        id=_run_id(folder, resume_step),
        resume="allow",
    )
    # wandb drops what is logged for an earlier step than its last one; a step metric lets a resumed run step
    # back.
    run.define_metric("*", step_metric="step")
    return lambda step, metrics: run.log({**metrics, "step": step}), run.finish


def _start_trackio(
    module: Any,
    project: str | None,
    run_name: str,
    folder: Path,
    config: dict[str, Any],
    resume_step: int | None,
) -> _Sink:
    resume = "never" if resume_step is None else "allow"
    run = module.init(project=project or "logra", name=run_name, config=config, resume=resume)
    return lambda step, metrics: run.log(metrics, step=step), run.finish


_STARTERS: dict[str, Callable[..., _Sink]] = {
    "tensorboard": _start_tensorboard,
    "wandb": _start_wandb,
    "trackio": _start_trackio,
}
_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise ConfigError(
            f"the tracker {name} needs a package that is not installed ({error}): pip install 'logra[{name}]'"
        ) from error


def _run_id(folder: Path, resume_step: int | None) -> str:
    """The wandb id of this run, kept in its folder so that a resumed run goes on under the same one."""
    path = folder / "wandb_id.txt"
    if resume_step is not None and path.is_file():
        return path.read_text().strip()
    folder.mkdir(parents=True, exist_ok=True)
    name = uuid.uuid4().hex[:8]
    path.write_text(name + "\n")
    return name

"""`logra train`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from logra import config as cfg


def train(recipe: str, flags: Sequence[str], *, dry_run: bool, plain: bool) -> int:
    """Resolve, validate, train, export. Returns the exit code; errors are raised."""
    config = cfg.load_config(recipe, flags)
    if dry_run:
        print(cfg.to_yaml(config), end="")
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    import transformers

    from logra.cli.allocator import keep_freed_memory

    transformers.utils.logging.disable_progress_bar()
    from logra.cli.plan import refuse
    from logra.rl.world import is_distributed_error, lost_rank, under_launcher

    is_alone = not under_launcher()
    is_first = is_alone or os.environ["RANK"] == "0"
    if is_first:  # the others wait for it, and end with it
        refuse(config, 1 if is_alone else int(os.environ["WORLD_SIZE"]))
    if config.model.device != "cuda":
        keep_freed_memory()
    if not is_alone:
        signal.signal(signal.SIGTERM, _stopped)
    try:
        _train(config, plain, is_first)
    except RuntimeError as error:
        if is_alone or not is_distributed_error(error):
            raise
        raise lost_rank(error) from error
    return 0


def _stopped(*_: object) -> None:
    """torchrun ends the ranks that are left when one has failed."""
    from logra.rl.world import lost_rank

    print(f"logra: {lost_rank('stopped by the launcher')}", file=sys.stderr, flush=True)
    os._exit(143)  # the others are gone: nothing can be closed together with them


def _train(config: cfg.Config, plain: bool, is_first: bool) -> None:
    from logra.build import build_run
    from logra.cli.progress import Display

    run = build_run(config)
    try:
        if not is_first:
            run.fit()
            return
        with Display(run, plain=plain) as display:
            run.trainer.listeners.append(display)
            final = run.fit()
        display.summary(final)
    finally:
        run.close()

"""`logra train`."""

from __future__ import annotations

import logging
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
    from logra.build import build_run
    from logra.cli.plan import refuse
    from logra.cli.progress import Display

    refuse(config)
    if config.model.device != "cuda":
        keep_freed_memory()
    run = build_run(config)
    try:
        with Display(run, plain=plain) as display:
            run.trainer.listeners.append(display)
            final = run.fit()
        display.summary(final)
    finally:
        run.close()
    return 0

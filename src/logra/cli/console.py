"""The terminal, as every command prints to it."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """rich's console, but a reader that goes away (`| head -1`) ends in `BrokenPipeError`, which `main` turns into 141."""

    def on_broken_pipe(self) -> None:
        raise

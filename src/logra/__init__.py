"""logra: reinforcement learning of language models in memory people have.

The names below load on first use, so that `import logra` and `logra --help` stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logra.sketch.block import apply_update, digest
    from logra.sketch.sketcher import Proposal, Sketcher, attach
    from logra.sketch.update import Update
    from logra.trust.kl import measure_kl, predict_kl

_HOME = {
    "Proposal": "logra.sketch.sketcher",
    "Sketcher": "logra.sketch.sketcher",
    "attach": "logra.sketch.sketcher",
    "Update": "logra.sketch.update",
    "apply_update": "logra.sketch.block",
    "digest": "logra.sketch.block",
    "measure_kl": "logra.trust.kl",
    "predict_kl": "logra.trust.kl",
}

__all__ = ["Proposal", "Sketcher", "Update", "apply_update", "attach", "digest", "measure_kl", "predict_kl"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'logra' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

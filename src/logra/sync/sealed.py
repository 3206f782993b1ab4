"""Small JSON files that carry their own hash, so that damage is found before a value is believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_KEY = "seal"


def seal(body: Mapping[str, Any]) -> bytes:
    """A JSON object with the sha256 of its content beside it. Raises TypeError for values that JSON has no form for."""
    content = json.loads(json.dumps(dict(body)))
    return json.dumps(content | {_KEY: _hash(content)}, indent=1).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """The content; raises ValueError if it is not what was sealed."""
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict) or content.pop(_KEY, None) != _hash(content):
        raise ValueError("its hash does not match: it was damaged or edited")
    return content


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

"""The bearer token of the HTTP transport: made, kept in a private file, checked."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from logra.errors import UserError

_TOKEN = re.compile(r"[!-~]{16,512}")


def check_token(token: str) -> str:
    """Raise `UserError` unless `token` is 16 to 512 visible ASCII characters. The token itself is never in the message."""
    if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
        raise UserError("a token is 16 to 512 visible ASCII characters without blanks; leave it out to have one made")
    return token


def load_or_make_token(path: Path | str) -> str:
    """The token in the file `path`, which only its owner may read; made if there is no such file.

    Raises `UserError` if others may read it, or it holds no token.
    """
    path = Path(path)
    if path.exists():
        return _load(path)
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was quicker: its token counts
            os.link(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write the token file {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return _load(path)


def _load(path: Path) -> str:
    try:
        if not path.is_file():
            raise UserError("it is no file")
        if path.stat().st_mode & 0o077:
            raise UserError("others may read this token file: run chmod 600 on it, or delete it to have a new one made")
        return check_token(path.read_text(encoding="ascii").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the token file {path}: {error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error

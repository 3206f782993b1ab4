"""The HTTP transport, subscriber's side. Needs `pip install 'logra[sync]'`."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from logra.errors import DamagedUpdateError, UpdateError, UpdateOrderError, UserError
from logra.sync.acknowledge import Acknowledgement
from logra.sync.anchors import Anchor, check_hash
from logra.sync.log import LogInfo, NotYetError
from logra.sync.token import check_token

MAX_PACKET_BYTES = 4 << 30
_MAX_JSON = 32 << 20
_WAIT_S = 20.0  # of one request for a packet that is not made yet
_PAUSE_S = (0.05, 2.0)  # first and longest pause between two tries

_T = TypeVar("_T")


class UnreachableError(UpdateError):
    """The publisher cannot be reached."""


class HttpSource:
    """A log on another machine. A context manager. Not thread-safe.

    url: of the server, or of the TLS proxy before it. token: the server's. patience_s: how long connection errors are tried
    again (with growing pauses) before `UnreachableError`; nothing else is ever tried again. timeout_s: of one silent
    connection. max_packet_bytes: larger packets are refused. folder: where anchors are kept while they are loaded (None: the
    system's temporary folder). verify: as httpx takes it, for an https:// address with a private certificate.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        patience_s: float = 30.0,
        timeout_s: float = 30.0,
        max_packet_bytes: int = MAX_PACKET_BYTES,
        folder: Path | str | None = None,
        verify: Any = True,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise UserError(f"the HTTP transport needs {error.name}: pip install 'logra[sync]'") from error
        if not url.startswith(("http://", "https://")):
            raise UserError(f"the publisher's address begins with http:// or https://, not {url!r:.80}")
        self.url = url.rstrip("/")
        self._httpx = httpx
        self._patience_s, self._max_packet_bytes, self._folder = patience_s, max_packet_bytes, folder
        self._client = httpx.Client(
            headers={"authorization": f"Bearer {check_token(token)}"},
            timeout=httpx.Timeout(timeout_s + _WAIT_S, connect=min(5.0, timeout_s)),
            follow_redirects=False,  # the token goes to no other address
            trust_env=False,
            verify=verify if self.url.startswith("https://") else False,  # loading certificates takes half a second
        )

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> HttpSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def info(self) -> LogInfo:
        data = self._get("/info", {}, _MAX_JSON)
        try:
            return LogInfo.from_dict(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise DamagedUpdateError(f"{self.url} describes its log in a way that cannot be read: {error}") from error

    def read(self, index: int, timeout_s: float = 0.0) -> bytes:
        deadline = time.monotonic() + timeout_s
        while True:
            wait = max(0.0, min(_WAIT_S, deadline - time.monotonic()))
            try:
                return self._get(f"/packets/{int(index)}", {"wait": f"{wait:.3f}"}, self._max_packet_bytes)
            except NotYetError:
                if time.monotonic() >= deadline:
                    raise

    def read_anchor(self, version: int) -> Anchor:
        """Streamed into a temporary file, which `Anchor.close` deletes; its hash is compared with what /info says."""
        infos = {anchor.version: anchor for anchor in self.info().anchors}
        if version not in infos:
            raise UpdateOrderError(f"there is no anchor of version {version}: there are {sorted(infos)}")
        info = infos[version]

        def fetch() -> Path:
            handle, name = tempfile.mkstemp(prefix="logra_anchor_", suffix=".safetensors", dir=self._folder)
            try:
                with open(handle, "wb") as file:
                    check_hash(info, *self._stream(f"/anchors/{version}", {}, info.bytes, file.write))
            except BaseException:
                os.unlink(name)
                raise
            return Path(name)

        try:
            path = self._patiently(fetch)
        except OSError as error:
            raise UpdateError(
                f"anchor {version} could not be kept on disk while it is loaded: {error}. Make room"
            ) from error
        try:
            return Anchor.from_file(info, path, verify=False, cleanup=lambda: path.unlink(missing_ok=True))
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def acknowledge(self, ack: Acknowledgement) -> None:
        def post() -> None:
            response = self._client.post(
                self.url + "/acknowledgements", content=ack.to_json(), headers={"content-type": "application/json"}
            )
            if response.status_code != 200:
                self._raise(response.status_code, response.content)

        self._patiently(post)

    def _get(self, path: str, query: dict[str, str], limit: int) -> bytes:
        def fetch() -> bytes:
            pieces: list[bytes] = []
            self._stream(path, query, limit, pieces.append)
            return b"".join(pieces)

        return self._patiently(fetch)

    def _stream(self, path: str, query: dict[str, str], limit: int, take: Callable[[bytes], Any]) -> tuple[str, int]:
        """Hand the body to `take` in pieces; returns its sha256 (hex) and size. Raises for any status but 200."""
        digest, size = hashlib.sha256(), 0
        headers = {"accept-encoding": "identity"}
        with self._client.stream("GET", self.url + path, params=query, headers=headers) as response:
            if response.status_code != 200:
                self._raise(response.status_code, _head(response))
            for piece in response.iter_raw(1 << 20):
                size += len(piece)
                if size > limit:
                    raise UpdateError(f"{self.url}{path} sends more than the {limit} bytes that are accepted")
                digest.update(piece)
                take(piece)
        return digest.hexdigest(), size

    def _patiently(self, action: Callable[[], _T]) -> _T:
        """Run `action`, again and again while the connection fails, for `patience_s`."""
        deadline, pause = time.monotonic() + self._patience_s, _PAUSE_S[0]
        while True:
            try:
                return action()
            except (self._httpx.TransportError, _BusyError) as error:
                if time.monotonic() + pause > deadline:
                    raise UnreachableError(
                        f"the publisher at {self.url} cannot be reached ({error or type(error).__name__}). Check that the "
                        "trainer runs, and the address"
                    ) from error
            except self._httpx.HTTPError as error:
                raise UpdateError(
                    f"the publisher at {self.url} answers in a way that is not understood: {error}"
                ) from error
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S[1])

    def _raise(self, status: int, body: bytes) -> None:
        """Turn an answer that is no success into the error it stands for."""
        try:
            answer = json.loads(body)
            kind, text = str(answer["kind"]), str(answer["error"])[:2000]
        except (ValueError, KeyError, TypeError, RecursionError):
            kind, text = "", ""
        if status == 401:
            raise UserError(f"{self.url} refuses the token: use the one in the run's token file")
        if status == 503 and not kind:
            raise _BusyError("the server is busy")
        errors = {
            "not_yet": NotYetError,
            "order": UpdateOrderError,
            "damaged": DamagedUpdateError,
            "refused": UpdateError,
        }
        if kind in errors:
            raise errors[kind](f"{self.url}: {text}")
        if status == 404:
            raise UserError(f"{self.url} serves no log: check the address")
        raise UpdateError(f"{self.url} answers with status {status}: {text or 'no reason given'}")


class _BusyError(Exception):
    """The server has as many connections as it takes; as good as a connection error."""


def _head(response: Any) -> bytes:
    """The first bytes of an error's body."""
    body = b""
    for piece in response.iter_raw(1 << 16):
        body += piece
        if len(body) > 1 << 16:
            break
    return body

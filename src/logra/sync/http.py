"""The HTTP transport, trainer's side: serves a log to subscribers on other machines. Needs `pip install 'logra[sync]'`.

    GET  /info                        what there is (JSON)
    GET  /packets/{index}?wait=S      one packet; waits up to S seconds for one that is not made yet
    GET  /anchors/{version}           one anchor's file
    POST /acknowledgements            where a subscriber stands (JSON, at most 64 KiB)

Every route wants `Authorization: Bearer TOKEN`, compared in constant time. Packets carry their own checksum, anchors are hashed
in /info. Nothing a client sends becomes a path: versions are integers, names are matched against a strict pattern.

The server listens on the loopback address and speaks plain HTTP. Between machines put a reverse proxy with TLS before it, and
give subscribers its https:// address; for nginx:

    location / { proxy_pass http://127.0.0.1:8765; proxy_read_timeout 60s; proxy_buffering off; }

Listening on another address without TLS shows the token and the weights' changes to whoever can read the traffic.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO

from logra.errors import DamagedUpdateError, UpdateError, UpdateOrderError, UserError
from logra.sync.acknowledge import MAX_BYTES, Acknowledgement
from logra.sync.http_source import HttpSource
from logra.sync.log import Log, NotYetError
from logra.sync.token import check_token, load_or_make_token

__all__ = ["HttpSource", "Server", "is_loopback", "make_app", "serve"]

MAX_WAIT_S = 30.0
MAX_CONNECTIONS = 256
SILENCE_S = 10.0  # a connection that has not sent a whole request head by then is closed
_BODY_TIMEOUT_S = 10.0
_POLL_S = 0.02
_CHUNK = 1 << 20
_HANG_UP = {"connection": "close"}  # else the rest of the body would be read, however long it is
_NUMBER = re.compile(r"\d{1,18}")


def _needs_extra(error: ImportError) -> UserError:
    return UserError(f"the HTTP transport needs {error.name}: pip install 'logra[sync]'")


class Server:
    """A running server; `serve` makes it. `url` and `token` are what a subscriber needs. A context manager."""

    def __init__(self, app: Any, sock: socket.socket, token: str) -> None:
        import uvicorn

        self.token = token
        host, port = sock.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._closing = app.closing
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            http="h11",
            loop="asyncio",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        )
        self._server = _make_server(config)
        self._socket = sock
        self._thread = threading.Thread(target=self._run, name="logra-sync-http", daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise UpdateError(f"the server on {self.url} did not start")
            time.sleep(0.005)

    def close(self) -> None:
        """Stop serving; waits for answers under way, not for those that wait for a packet."""
        self._closing.set()
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._socket.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])


def _make_server(config: Any) -> Any:
    """uvicorn's server, which also closes connections that say nothing: it counts them, and has no limit for a first request."""
    import uvicorn

    class Impatient(uvicorn.Server):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._silent_since: dict[Any, float] = {}

        async def on_tick(self, counter: int) -> bool:
            if counter % 10 == 0:
                self._close_silent()
            return await super().on_tick(counter)

        def _close_silent(self) -> None:
            now = time.monotonic()
            silent = {c for c in self.server_state.connections if getattr(c, "cycle", self) is None}
            self._silent_since = {c: self._silent_since.get(c, now) for c in silent}
            for connection, since in self._silent_since.items():
                if now - since > SILENCE_S and connection.transport is not None:
                    connection.transport.close()

    return Impatient(config)


def serve(
    log: Log, token: str | None = None, *, host: str = "127.0.0.1", port: int = 0, token_file: Path | str | None = None
) -> Server:
    """Serve `log` in a thread of this process. port: 0 takes a free one.

    token: what subscribers must show. None: the one in `token_file`, made there if need be (mode 0600), or a new one without a
    file; `Server.token` tells it. Raises `UserError` for an address that is not loopback without a token given by the user, and
    for an address that cannot be had.
    """
    if token is None and not is_loopback(host):
        raise UserError(
            f"listening on {host} opens the run to other machines: give a token of your own (sync.token_file), and put a reverse "
            "proxy with TLS before it. Or listen on 127.0.0.1"
        )
    if token is None:
        token = secrets.token_urlsafe(32) if token_file is None else load_or_make_token(token_file)
    app = make_app(log, token)
    return Server(app, _listen(host, port), token)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # asyncio sets TCP_NODELAY only if told the protocol
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
    except (OSError, OverflowError) as error:
        sock.close()
        raise UserError(
            f"cannot listen on {host}, port {port}: {error}. Choose another sync.host or sync.port"
        ) from error
    return sock


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_app(log: Log, token: str) -> Any:
    """The ASGI application, for those who run it in a server of their own. Raises `UserError` without the extra."""
    try:
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ImportError as error:
        raise _needs_extra(error) from error
    routes = _Routes(log)
    app = Starlette(
        routes=[
            Route("/info", routes.info, methods=["GET"]),
            Route("/packets/{number}", routes.packet, methods=["GET"]),
            Route("/anchors/{number}", routes.anchor, methods=["GET"]),
            Route("/acknowledgements", routes.acknowledge, methods=["POST"]),
        ]
    )
    return _Guard(app, check_token(token), routes.closing)


class _Guard:
    """Turns away whoever does not show the token, before anything else is looked at."""

    def __init__(self, app: Callable[..., Awaitable[None]], token: str, closing: threading.Event) -> None:
        self.app, self.closing = app, closing
        self._expected = hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        token = shown[0][7:] if len(shown) == 1 and shown[0][:7].lower() == b"bearer " else b""
        if hmac.compare_digest(hashlib.sha256(token).digest(), self._expected):
            await self.app(scope, receive, send)
            return
        response = _answer(
            401, "unauthorized", "the token is missing or wrong", _HANG_UP | {"www-authenticate": "Bearer"}
        )
        await response(scope, receive, send)


class _Routes:
    """The handlers. Whatever touches the log runs in a worker thread."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.closing = threading.Event()

    async def info(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        try:
            return JSONResponse((await asyncio.to_thread(self.log.info)).to_dict())
        except UserError as error:
            return _failure(error)

    async def packet(self, request: Any) -> Any:
        index = _number(request.path_params["number"])
        if index is None:
            return _answer(404, "no_number", "a packet has a number")
        deadline = time.monotonic() + _wait(request.query_params.get("wait", "0"))
        while True:
            try:
                return _streaming(*await asyncio.to_thread(self.log.stream, index))
            except NotYetError as error:
                if time.monotonic() >= deadline or self.closing.is_set() or await request.is_disconnected():
                    return _failure(error)
            except UserError as error:
                return _failure(error)
            await asyncio.sleep(_POLL_S)

    async def anchor(self, request: Any) -> Any:
        version = _number(request.path_params["number"])
        if version is None:
            return _answer(404, "no_number", "an anchor has a version number")
        try:
            return _streaming(*await asyncio.to_thread(self.log.stream_anchor, version))
        except UserError as error:
            return _failure(error)

    async def acknowledge(self, request: Any) -> Any:
        from starlette.requests import ClientDisconnect

        try:
            body = await asyncio.wait_for(_body(request), _BODY_TIMEOUT_S)
            if body is None:
                return _answer(413, "too_large", f"an acknowledgement has at most {MAX_BYTES} bytes", _HANG_UP)
            await asyncio.to_thread(self.log.acknowledge, Acknowledgement.from_json(body))
        except (TimeoutError, ClientDisconnect):
            return _answer(408, "slow", f"the request took more than {_BODY_TIMEOUT_S:g} s", _HANG_UP)
        except UserError as error:
            return _failure(error)
        return _answer(200, "ok", "")


async def _body(request: Any) -> bytes | None:
    """The request's body; None as soon as it is longer than allowed."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            return None
    return body


def _streaming(file: BinaryIO, size: int) -> Any:
    from starlette.responses import StreamingResponse

    async def pieces() -> AsyncIterator[bytes]:
        left = size
        with file:
            while left:
                piece = await asyncio.to_thread(file.read, min(_CHUNK, left))
                if not piece:
                    return  # shorter than promised: the client sees the connection end and asks again
                left -= len(piece)
                yield piece

    return StreamingResponse(pieces(), headers={"content-length": str(size)}, media_type="application/octet-stream")


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


def _wait(text: str) -> float:
    """Seconds to wait; 0 for what is no such number (a NaN would wait for ever)."""
    try:
        wait = float(text[:20])
    except ValueError:
        return 0.0
    return min(wait, MAX_WAIT_S) if wait > 0 else 0.0


def _failure(error: UserError) -> Any:
    for kind, status, name in (
        (NotYetError, 404, "not_yet"),
        (UpdateOrderError, 404, "order"),
        (DamagedUpdateError, 500, "damaged"),
    ):
        if isinstance(error, kind):
            return _answer(status, name, str(error))
    return _answer(400, "refused", str(error))


def _answer(status: int, kind: str, text: str, headers: dict[str, str] | None = None) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse({"kind": kind, "error": text}, status_code=status, headers=headers)

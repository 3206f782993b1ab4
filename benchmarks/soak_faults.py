"""The faults of the soak: which, where and when, drawn by a seed; and the proxy between trainer and engine that makes them."""

from __future__ import annotations

import http.client
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KINDS = ("kill_engine", "kill_rank", "drop_request", "drop_answer", "delay", "duplicate")
GENERATE = "inference/v1/generate"
ROUTES = {  # and how often each is hit: mostly where weights move
    "pause": 1, "start_weight_update": 3, "update_weights": 5, "finish_weight_update": 5, "reset_prefix_cache": 1, "resume": 1,
    "collective_rpc": 3, GENERATE: 3,
}  # fmt: skip
_UPSTREAM_S = 120.0


@dataclass(frozen=True)
class Fault:
    """One fault, after step `step`.

    route: it hits the next request of that route; None: a kill by the clock, wherever the run is `seconds` later.
    how: of kills on a route, "before" or "after" the engine has seen the request; of duplicates whose answer the trainer gets,
    "first" or "second", or "late" for a second copy that arrives `seconds` after the first one was answered. rank: the victim
    of kill_rank. away_s: how long a killed engine stays away. seconds: of a delay.
    """

    step: int
    kind: str
    route: str | None = None
    how: str = ""
    rank: int = 0
    seconds: float = 0.0
    away_s: float = 0.0


def schedule(steps: int, every: int, seed: int, kinds: Sequence[str] = KINDS, longest_s: float = 3.0) -> list[Fault]:
    """A fault every `every` steps, before the last one. Kinds come as from a deck of cards, so that none is rare."""
    draw, deck, faults = random.Random(seed), list[str](), list[Fault]()
    for step in range(every, steps, every):
        if not deck:
            deck = draw.sample(list(kinds), len(kinds))
        faults.append(_fault(step, deck.pop(), draw, longest_s))
    return faults


def _fault(step: int, kind: str, draw: random.Random, longest_s: float) -> Fault:
    (route,) = draw.choices(list(ROUTES), list(ROUTES.values()))
    seconds = round(draw.uniform(longest_s / 3, longest_s), 3)
    if kind in ("drop_request", "drop_answer"):
        return Fault(step, kind, route)
    if kind == "delay":
        return Fault(step, kind, route, seconds=seconds)
    if kind == "duplicate":
        return Fault(step, kind, route, draw.choice(("first", "second", "late")), seconds=seconds)
    by_clock, how = draw.random() < 0.5, draw.choice(("before", "after"))
    rank, away_s = draw.randrange(2), round(draw.uniform(0, 2), 3)
    clock_s = round(draw.uniform(0, 0.5), 3)
    if kind == "kill_rank":
        away_s = 0.0
    else:
        rank = 0
    if by_clock:
        return Fault(step, kind, seconds=clock_s, rank=rank, away_s=away_s)
    return Fault(step, kind, route, how, rank=rank, away_s=away_s)


class Proxy:
    """An HTTP server on a loopback port that passes everything on to `upstream`, but for the fault that is armed.

    upstream: the engine's port; None: it is gone, and connections break.
    """

    def __init__(self) -> None:
        self.upstream: int | None = None
        self._mutex = threading.Lock()
        self._armed: tuple[Fault, Callable[[], None]] | None = None
        self.fired_at: float | None = None  # monotonic; of the fault armed last
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def arm(self, fault: Fault, kill: Callable[[], None] = lambda: None) -> None:
        """The next request of the fault's route is hit, once. kill: what kills, for faults that do."""
        with self._mutex:
            self.fired_at, self._armed = None, (fault, kill)

    def disarm(self) -> None:
        with self._mutex:
            self._armed = None

    def take(self, route: str) -> tuple[Fault, Callable[[], None]] | None:
        with self._mutex:
            if self._armed is None or self._armed[0].route != route:
                return None
            armed, self._armed = self._armed, None
            self.fired_at = time.monotonic()
            return armed

    def forward(self, method: str, path: str, body: bytes) -> tuple[int, bytes] | None:
        """The engine's answer; None if there is none."""
        port = self.upstream
        if port is None:
            return None
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_UPSTREAM_S)
        try:
            connection.request(method, path, body or None, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a trainer that was killed leaves broken connections


class _Handler(BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"  # connections are kept, as by vLLM
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer(self._forward())

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
        armed = self.owner.take(self.path.partition("?")[0].strip("/"))
        self._answer(self._forward() if armed is None else self._hit(*armed))

    body = b""

    def _forward(self) -> tuple[int, bytes] | None:
        return self.owner.forward(self.command, self.path, self.body)

    def _hit(self, fault: Fault, kill: Callable[[], None]) -> tuple[int, bytes] | None:
        """What the trainer gets; None: its connection breaks."""
        if fault.kind == "drop_request":
            return None
        if fault.kind == "delay":
            time.sleep(fault.seconds)
        if fault.how == "before":
            kill()
        answer = self._forward()
        if fault.how == "after":
            kill()
        if fault.kind == "duplicate":
            if fault.how == "late":
                forward = (self.command, self.path, self.body)
                timer = threading.Timer(fault.seconds, self.owner.forward, forward)
                timer.daemon = True
                timer.start()
            else:
                again = self._forward()
                answer = again if fault.how == "second" else answer
        return None if fault.kind == "drop_answer" else answer

    def _answer(self, answer: tuple[int, bytes] | None) -> None:
        if answer is None:
            self.close_connection = True
            with suppress(OSError):  # the trainer was faster
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        status, data = answer
        try:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass

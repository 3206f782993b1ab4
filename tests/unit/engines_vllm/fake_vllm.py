"""A vLLM server over HTTP without vLLM: the routes that our engine uses, over a tiny model that a replica moves.

`kill` is what SIGKILL is to a real one: open connections break, new ones are refused; `start` after it is a new process,
which has the base weights and follows no run.
"""

from __future__ import annotations

import base64
import copy
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from logra.errors import UpdateError
from logra.rl.engines.sampling import choose
from logra.sketch.block import Block, apply_blocks, blocks_of, digest_blocks
from logra.sketch.targets import select_targets
from logra.sketch.update import Factor, Update
from logra.sync.anchors import Anchor, AnchorInfo
from logra.sync.memory import MemoryLog
from logra.sync.publisher import Publisher
from logra.sync.replica import Replica


class FakeVLLM:
    """One server. delay_s: before each answer of the generate route. on_generate: called with the number of that request.

    wrong: bodies of answers are passed through it (by route), to falsify them. max_model_len, url: as they say.
    """

    def __init__(self, base: PreTrainedModel, names: list[str]) -> None:
        self.base, self.names = copy.deepcopy(base), names
        self.delay_s, self.max_model_len = 0.0, 250
        self.on_generate: Callable[[int], None] = lambda number: None
        self.wrong: dict[str, Callable[[Any], Any]] = {}
        self.calls: list[str] = []
        self._sockets: set[socket.socket] = set()
        self.num_generated = self.num_running = self.most_running = 0
        self._mutex = threading.RLock()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self, *, afresh: bool = True) -> None:
        """afresh: a new process; else the one that was cut off can be reached again."""
        if afresh:
            self.model = copy.deepcopy(self.base)
            self.replica: Replica | None = None
            self.problem: str | None = None
            self.label = "default"
        self._sockets = set[socket.socket]()
        fake = self

        class Handler(_Handler):
            server_of_it = fake
            process = self.model  # a request belongs to the process that took it

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def start_from_other_weights(self) -> None:
        """As from another folder: what moves differs."""
        with torch.no_grad():
            for block in blocks_of(self.base, self.names).values():
                block.value.mul_(1.5)
        self.start()

    def kill(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.socket.close()
        with self._mutex:
            for each in self._sockets:
                with suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.shutdown(socket.SHUT_RDWR)
            self._sockets.clear()

    # -- routes -------------------------------------------------------------------------------------------------------

    def answer(self, path: str, body: Any) -> Any:
        self.calls.append(path)
        if path == "/inference/v1/generate":
            return self._generate(body["token_ids"], body["sampling_params"])
        with self._mutex:
            if path == "/init_weight_transfer_engine":
                self._init(body["init_info"])
            elif path == "/update_weights":
                self._update(body["update_info"])
            elif path == "/finish_weight_update":
                self.label = body["weight_version"]
            elif path == "/reset_prefix_cache":
                return {"success": True}
            elif path == "/collective_rpc":
                return {"results": [self._status() if body["method"] == "logra_status" else self._sums()]}
            elif path not in ("/pause", "/resume", "/start_weight_update", "/abort_requests"):
                raise KeyError(path)
        return {}

    def _init(self, info: dict[str, Any]) -> None:
        if self.replica is not None:
            raise UpdateError(f"this vLLM already follows run {info['run']}")
        assert [name for name, _, _ in info["targets"]] == self.names
        blocks = blocks_of(self.model, self.names)
        is_base = digest_blocks(blocks) == info["base"]
        self.replica = Replica(blocks, version=0 if is_base else -1, run=info["run"], base=info["base"])
        self.problem = None if is_base else "another base"

    def _update(self, info: dict[str, Any]) -> None:
        assert self.replica is not None
        data = Path(info["path"]).read_bytes() if "path" in info else base64.b64decode(info["data"])
        if info["kind"] == "anchor":
            with Anchor.from_bytes(AnchorInfo.from_dict(info["info"]), data) as anchor:
                self.replica.load_anchor(anchor)
            self.problem = None
        elif self.problem is not None:
            raise UpdateError(self.problem)
        else:
            self.replica.apply(data)

    def _status(self) -> dict[str, Any]:
        settings = {"logprobs_mode": "processed_logprobs", "max_model_len": self.max_model_len}
        settings |= {"applied": 0, "missing": [], "unexpected": []}
        if self.replica is None:
            return {"run": "", "head": None, "version": -1, "problem": "no run was begun here", **settings}
        problem, version = self.problem, -1
        try:
            version = self.replica.version
        except UpdateError as error:
            problem = str(error)
        return {
            "run": self.replica.run, "head": self.replica.head, "version": version, "problem": problem, **settings,
        }  # fmt: skip

    def _sums(self) -> list[list[Any]]:
        assert self.replica is not None
        return [
            [name, *b.shape, 0, len(b.rows), 0, len(b.columns), *map(str, b.sums())]
            for name, b in self.replica.blocks.items()
        ]

    def _generate(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        with self._mutex:
            self.num_generated += 1
            number = self.num_generated
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        try:
            self.on_generate(number)
            time.sleep(self.delay_s)
            with self._mutex:
                return {"choices": [self._sample(prompt, params)]}
        finally:
            with self._mutex:
                self.num_running -= 1

    def _sample(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        uniforms = torch.from_numpy(np.random.default_rng(params["seed"]).random(params["max_tokens"]))
        ids, content = list(prompt), []
        for uniform in uniforms:
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
            token, logp = choose(logits, uniform[None], params["temperature"], params["top_p"])
            ids.append(int(token))
            content.append({"logprob": float(logp)})
            if ids[-1] in params["stop_token_ids"]:
                break
        return {
            "token_ids": ids[len(prompt) :],
            "logprobs": {"content": content},
            "finish_reason": "stop" if ids[-1] in params["stop_token_ids"] else "length",
            "weight_versions": [{"version": self.label}],
        }


class _Handler(BaseHTTPRequestHandler):
    server_of_it: FakeVLLM
    process: PreTrainedModel

    def do_GET(self) -> None:
        self._send(200, {})

    def do_POST(self) -> None:
        fake = self.server_of_it
        with fake._mutex:
            fake._sockets.add(self.connection)
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        path = self.path.partition("?")[0]
        try:
            answer = fake.answer(path, body)
            answer = fake.wrong.get(path, lambda answer: answer)(answer)
        except (UpdateError, KeyError) as error:
            self._send(500, {"detail": str(error)})
        else:
            if fake.model is self.process and fake._server is not None:  # else it died meanwhile
                self._send(200, answer)
        finally:
            with fake._mutex:
                fake._sockets.discard(self.connection)

    def _send(self, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class Trainer:
    """A model that moves by random Updates, and the log that they are kept in. salt: another one takes another way."""

    def __init__(self, model: PreTrainedModel, *, everything: bool = False, salt: int = 0) -> None:
        self.model, self.salt = model, salt
        targets, _ = select_targets(model)
        self.target_names = [target.name for target in targets]
        self.transposed = [target.name for target in targets if target.transposed]
        rest = [name for name, _ in model.named_parameters() if name not in self.target_names]
        self.names = [*self.target_names, *(rest if everything else [])]
        self.version = 0
        table = [[name, *block.shape] for name, block in self.blocks().items()]
        self.log = MemoryLog(run="a1", base=self.digest(), targets=table)
        self.publisher = Publisher(self.log)

    def blocks(self) -> dict[str, Block]:
        return blocks_of(self.model, self.names)

    def digest(self) -> str:
        return digest_blocks(self.blocks())

    def step(self) -> Any:
        """The packet of the next Update, which is applied here."""
        blocks, factors = self.blocks(), {}
        draw = torch.Generator().manual_seed(self.version + 1000 * self.salt)
        for name in self.target_names:
            rows, columns = blocks[name].shape
            q = torch.randint(-7, 8, (rows, 4), dtype=torch.int8, generator=draw)
            factors[name] = Factor(name, rows, columns, q, torch.full((rows,), -9, dtype=torch.int8))
        update = Update(self.version, "random", self.version, 7, 4, 8, factors)
        apply_blocks(blocks, update)
        self.version += 1
        return self.publisher.publish(update, self.version)

    def link(self) -> dict[str, Any]:
        return {
            "run": "a1", "base": self.log.info().base, "masters": self.blocks, "digest": self.digest,
            "head": lambda: self.log.head, "transposed": self.transposed,
        }  # fmt: skip

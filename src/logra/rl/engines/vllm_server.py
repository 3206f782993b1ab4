"""Rollouts by a vLLM server (engine: vllm, server mode). Its weights follow the trainer's by Updates; see `vllm_link`.

The server is vLLM's own, started with what `vllm_serve.serve_options` and `SERVE_ENVIRONMENT` say. Its weight-transfer routes
(VLLM_SERVER_DEV_MODE) have no authentication: whoever reaches the port can change weights, so it must be reachable by the
trainer alone (loopback, a private network, a proxy that checks). The key for the generate route comes from an environment
variable and is in no message and no log of ours. Needs httpx (`pip install 'logra[sync]'`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from logra.errors import ConfigError, ModelError
from logra.rl.engines.base import Interrupted, check_sampling
from logra.rl.engines.vllm_base import LinkedEngine
from logra.rl.engines.vllm_link import Link, TransferError, worker_words
from logra.rl.engines.vllm_requests import Answer, Request, make_requests, oldest, to_rollout
from logra.rl.engines.vllm_serve import KEY_VARIABLE
from logra.rl.types import Prompt, Rollout, Sampling
from logra.sync.acknowledge import Acknowledgement
from logra.sync.log import Log

_CONNECT_S = 5.0
_DROP_S = 10.0
_RPC_S = 10.0
_AWAY = (502, 503, 504)  # a proxy without a server behind it, or one that starts or ends


class UnavailableError(TransferError):
    """The server could not be reached or did not answer in time: a later try, or another server, may do."""


class VLLMServerEngine(LinkedEngine):
    """Samples with the vLLM server at `url`.

    model: folder of the base weights, as the server has it. eos_token_ids: see `LinkedEngine`. link: keyword arguments of
    `vllm_link.Link` (run, masters, digest, ...); without a folder that both machines see, and without by_index, everything
    travels inside the requests. timeout_s: of one request. patience_s: how
    long to wait at the start for a server that is still loading. concurrency: most requests in flight. connect: whether to
    wait for the server and take it up now; else `join` does (see `logra.rl.engines.fleet`). midway: see `publishes_midway`.
    """

    def __init__(
        self,
        url: str,
        model: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: Sequence[int] | None = None,
        timeout_s: float = 600.0,
        patience_s: float = 300.0,
        concurrency: int = 64,
        connect: bool = True,
        midway: bool = False,
        **link: Any,
    ) -> None:
        super().__init__(model, tokenizer, eos_token_ids)
        self.url, self.concurrency = url, concurrency
        self._http = _Http(url, timeout_s)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="vllm-request")
        self._is_aborted = threading.Event()
        self._moving = threading.Lock()  # a transfer, or what must not see one half done
        self._http.is_midway = midway
        self.link = Link(self._http, **link)
        if not connect:
            return
        try:
            self._http.wait_until_up(patience_s)
            self.link.join()
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling) -> list[Rollout]:
        """See `VLLMEngine.generate`. Raises `Interrupted` after `abort`."""
        check_sampling(sampling, num_rollouts)
        self.check_lengths(prompts, sampling.max_new_tokens)
        with self._moving:
            self.link.check()
            first = self.version
        requests = self.requests(prompts, num_rollouts, sampling)
        try:
            answers = list(self._pool.map(self._ask, requests))
        finally:
            self.rearm()
        with self._moving:
            versions = {self.link.label(version): version for version in range(first, self.version + 1)}
        return [self._rollout(request, answer, versions) for request, answer in zip(requests, answers, strict=True)]

    def _rollout(self, request: Request, answer: Answer, versions: Mapping[str, int]) -> Rollout:
        version, answer = oldest(request, answer, versions)
        return to_rollout(request, answer, version, self.link.label(version), self.eos_token_ids, self.tokenizer)

    def requests(self, prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling) -> list[Request]:
        """What `generate` asks for, in its order."""
        return make_requests(prompts, num_rollouts, sampling, self.eos_token_ids)

    def sample(self, request: Request) -> Rollout:
        """One rollout. Raises `UnavailableError`, and `UpdateOrderError` if another version than ours sampled it. Thread-safe."""
        version, label = self.version, self.link.label()
        return to_rollout(request, self._ask(request), version, label, self.eos_token_ids, self.tokenizer)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and response; 0 before the server was joined."""
        return self.link.max_model_len

    def is_up(self, timeout_s: float) -> bool:
        """Whether the server is there and answers a call of its workers within `timeout_s` each."""
        return self._http.is_up(timeout_s)

    def join(self) -> None:
        """Take up the server as it is: fresh, or one that has followed this run; see `Link.join`."""
        self.link.join()

    def catch_up(self, version: int, log: Log | None, *, is_live: bool) -> None:
        """Join the server and bring it to `version`, whatever it holds; see `Link.catch_up`."""
        self.link.catch_up(version, log, is_live=is_live)

    def check(self) -> None:
        """Raise unless every worker is at this version, whole; see `Link.check`."""
        self.link.check()

    @property
    def publishes_midway(self) -> bool:
        """See `RemoteEngine`: vLLM freezes what is in flight, and reads it again with the new weights before it goes on."""
        return self._http.is_midway

    def abort(self) -> None:
        """See `RemoteEngine.abort`. Requests still on their way to the server end by themselves; nobody reads their answers."""
        self._is_aborted.set()
        self._http.abort()

    def rearm(self) -> None:
        """The call that `abort` was for has ended: requests are sent again."""
        self._is_aborted.clear()

    def publish(self, version: int, update: object | None) -> None:
        """Bring the server to `version`; see `Link.publish`. It is paused meanwhile, and cached prefixes are dropped."""
        with self._moving:
            self.link.publish(version, update)

    def digest(self) -> str:
        """The digest of the server's float32 weights, as they are now."""
        return self.link.worker_digest()

    def acknowledgements(self) -> list[Acknowledgement]:
        """Each worker's word on where it stands."""
        return self.link.acknowledgements()

    def sleep(self) -> None:
        """Free the server's accelerator until `wake`. The server must run with --enable-sleep-mode."""
        self._http.post("/sleep", query={"level": "1"})

    def wake(self) -> None:
        """Undo `sleep`."""
        self._http.post("/wake_up")

    def close(self) -> None:
        """Close the connections; the server runs on. May be called twice."""
        self._pool.shutdown(cancel_futures=True)
        self._http.close()
        self.link.close()

    def _ask(self, request: Request) -> Answer:
        if self._is_aborted.is_set():
            raise Interrupted
        body = {"token_ids": list(request.prompt.token_ids), "sampling_params": request.params}
        try:
            choice = self._http.post("/inference/v1/generate", body)["choices"][0]
            if choice["finish_reason"] == "abort" and self._is_aborted.is_set():
                raise Interrupted
            ids = choice["token_ids"] or []
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            labels = [span["version"] for span in choice["weight_versions"] or []]
            return Answer(ids, logprobs, choice["finish_reason"], labels)
        except (KeyError, IndexError, TypeError) as error:
            raise ModelError(f"vLLM's answer cannot be read ({error!r}): is the server vLLM 0.32 or later?") from error


class _Http:
    """`Control` of a server, and its generate route. Thread-safe."""

    takes_bytes = False
    is_midway = False  # whether a transfer lets requests wait instead of waiting for them

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigError("a vLLM server is reached with httpx: pip install 'logra[sync]'") from error
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the vLLM server's address begins with http:// or https://, not {url!r:.80}")
        key = os.environ.get(KEY_VARIABLE)
        self.url, self._httpx = url.rstrip("/"), httpx
        self._client = httpx.Client(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # the key goes to no proxy
        )

    def post(self, path: str, body: Any = None, query: dict[str, str] | None = None) -> Any:
        """The answer's JSON. Raises `TransferError` with the server's words."""
        try:
            response = self._client.post(self.url + path, json=body, params=query)
        except self._httpx.HTTPError as error:
            raise UnavailableError(f"the vLLM server at {self.url} does not answer {path}: {error!r}") from error
        if response.status_code != 200:
            kind = UnavailableError if response.status_code in _AWAY else TransferError
            words = worker_words(response.text)
            raise kind(f"the vLLM server at {self.url} refused {path} ({response.status_code}): {words:.2000}")
        try:
            return response.json()
        except ValueError as error:
            raise UnavailableError(f"the vLLM server at {self.url} answers {path} with no JSON: {error}") from error

    def is_up(self, timeout_s: float) -> bool:
        body = {"method": "logra_status"}
        try:
            health = self._client.get(self.url + "/health", timeout=timeout_s)
            if health.status_code != 200:
                return False
            # a server may be healthy while its engine hangs; whatever this answers, it does answer
            self._client.post(self.url + "/collective_rpc", json=body, timeout=max(timeout_s, _RPC_S))
        except self._httpx.HTTPError:
            return False
        return True

    def wait_until_up(self, patience_s: float) -> None:
        """Return when the server is ready. Raises `TransferError` if it is not within `patience_s`."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                if self._client.get(self.url + "/health").status_code == 200:
                    return
            except self._httpx.TransportError:
                pass  # not listening yet
            if time.monotonic() >= deadline:
                raise TransferError(
                    f"no vLLM server was ready at {self.url} within {patience_s:g} s: start one with vllm serve"
                )
            time.sleep(0.2)

    def abort(self) -> None:
        """End all requests in flight. Raises nothing: a server that is gone has none."""
        with suppress(self._httpx.HTTPError):
            self._client.post(self.url + "/abort_requests", json={}, timeout=_RPC_S)

    def init(self, info: dict[str, Any]) -> None:
        self.post("/init_weight_transfer_engine", {"init_info": info})

    def pause(self) -> None:
        # keep: running requests are frozen, and lose what the old weights cached of them (vLLM 0.32: core.py, _reset_caches)
        self.post("/pause", query={"mode": "keep" if self.is_midway else "wait"})

    def start(self) -> None:
        self.post("/start_weight_update")

    def update(self, info: dict[str, Any]) -> None:
        self.post("/update_weights", {"update_info": info})

    def finish(self, label: str) -> None:
        self.post("/finish_weight_update", {"weight_version": label})

    def drop_caches(self) -> None:
        deadline = time.monotonic() + _DROP_S
        while not self.post("/reset_prefix_cache")["success"]:  # the last step before the pause may still be under way
            if time.monotonic() >= deadline:
                raise TransferError("the vLLM server did not drop its prefix cache: requests are still running")
            time.sleep(0.05)

    def resume(self) -> None:
        self.post("/resume")

    def call(self, method: str) -> list[Any]:
        """Reads only, so it may be asked twice: after an error of its own (500) the server drops the connection it was sent on,
        and the next request there is reset."""
        try:
            return self.post("/collective_rpc", {"method": method})["results"]
        except UnavailableError as error:
            if not isinstance(error.__cause__, self._httpx.ReadError | self._httpx.RemoteProtocolError):
                raise
            return self.post("/collective_rpc", {"method": method})["results"]

    def close(self) -> None:
        self._client.close()

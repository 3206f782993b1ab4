"""What is asked of vLLM for each rollout, and what is made of its answer. The same in process and over HTTP; no vLLM here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from logra.errors import DataError, ModelError, NonFiniteError, UpdateOrderError
from logra.hashing import derive_key
from logra.rl.types import Prompt, Rollout, Sampling


@dataclass(frozen=True)
class Request:
    """One rollout to be sampled. params: keyword arguments of vLLM's `SamplingParams`, all that matter given explicitly."""

    prompt: Prompt
    index: int
    params: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What vLLM sampled. labels: the weight version of every span of it, as vLLM stamped it."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    labels: Sequence[str]


def make_requests(
    prompts: Sequence[Prompt], num_rollouts: int, sampling: Sampling, eos_token_ids: Collection[int]
) -> list[Request]:
    """Prompt-major. Each rollout has its own seed; a prompt id that comes again in the call continues its random streams."""
    seen: Counter[int] = Counter()
    requests = []
    for prompt in prompts:
        for index in range(num_rollouts):
            stream = seen[prompt.id] * num_rollouts + index
            key = derive_key("sample", sampling.seed, sampling.step, prompt.id, stream)
            requests.append(Request(prompt, index, _params(sampling, key >> 1, eos_token_ids)))
        seen[prompt.id] += 1
    return requests


def _params(sampling: Sampling, seed: int, eos_token_ids: Collection[int]) -> dict[str, Any]:
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.temperature > 0 else 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": 0,
        "logprobs": 0,  # those of the sampled id only
        "stop_token_ids": sorted(eos_token_ids),
        "ignore_eos": True,  # only stop_token_ids end a response, whatever vLLM reads in the model folder
        "detokenize": False,
    }


def check_lengths(prompts: Sequence[Prompt], max_new_tokens: int, limit: int) -> None:
    """Raise `DataError` for a prompt without ids, `ModelError` where a prompt and `max_new_tokens` exceed vLLM's limit."""
    for prompt in prompts:
        length = len(prompt.token_ids)
        if length == 0:
            raise DataError(f"prompt {prompt.id} has no token ids; drop it or give the template a BOS token")
        if length + max_new_tokens > limit:
            raise ModelError(
                f"prompt {prompt.id} has {length} tokens; with max_new_tokens {max_new_tokens} that is "
                f"{length + max_new_tokens}, above vLLM's max_model_len {limit}: lower rollout.max_new_tokens "
                "(eval.max_new_tokens), or raise rollout.vllm.max_model_len if the model allows it"
            )


def to_rollout(
    request: Request,
    answer: Answer,
    version: int,
    label: str,
    eos_token_ids: Collection[int],
    tokenizer: PreTrainedTokenizerBase,
) -> Rollout:
    """The rollout of one answer.

    Log-probs are vLLM's "processed" ones: of softmax(logits / temperature). With `top_p` below 1 vLLM scores the narrowed
    distribution, not the full one: such log-probs are of no use to us and become NaN (nothing reads them: top-p is for
    evaluation only). Raises `UpdateOrderError` if any id was sampled by another version than `label`, `NonFiniteError` for
    log-probs that are NaN or infinite.
    """
    ids, prompt = tuple(answer.token_ids), request.prompt
    if set(answer.labels) != {label} or not ids:
        raise UpdateOrderError(
            f"prompt {prompt.id}, rollout {request.index} was sampled by the weights {sorted(set(answer.labels))}, not by "
            f"{label}: something else changed vLLM's weights. Nothing of this call is used"
        )
    if answer.finish_reason not in ("stop", "length"):
        raise ModelError(
            f"vLLM ended prompt {prompt.id}, rollout {request.index} with {answer.finish_reason!r}: see its log"
        )
    logprobs = tuple(float(logp) for logp in answer.logprobs)
    if request.params["top_p"] < 1.0:
        logprobs = (math.nan,) * len(ids)
    elif not all(map(math.isfinite, logprobs)):
        raise NonFiniteError(
            f"the logits of prompt {prompt.id}, rollout {request.index} are NaN or infinite (policy version {version}); the "
            "weights are damaged, overflow their dtype or have diverged: go back to an earlier checkpoint, or lower method.lr"
        )
    is_eos = ids[-1] in eos_token_ids
    kept = ids[:-1] if is_eos else ids
    text = tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    text = text if isinstance(text, str) else "".join(text)
    return Rollout(prompt, request.index, ids, logprobs, "eos" if is_eos else "length", text, version)


def oldest(request: Request, answer: Answer, versions: Mapping[str, int]) -> tuple[int, Answer]:
    """For an answer that an Update came into: the oldest of its versions, and the answer labelled with that one alone.

    versions: label -> version of all that may have sampled it. Log-probs stay those of the version that sampled each id. Raises
    `UpdateOrderError` for any other label.
    """
    strange = set(answer.labels) - versions.keys()
    if strange or not answer.labels:
        raise UpdateOrderError(
            f"prompt {request.prompt.id}, rollout {request.index} was sampled by the weights {sorted(strange)}, not by any of "
            f"{sorted(versions)}: something else changed vLLM's weights. Nothing of this call is used"
        )
    first = min(answer.labels, key=lambda label: versions[label])
    return versions[first], replace(answer, labels=[first])


def pad_id(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> int:
    """Any id of the vocabulary, for places that are masked."""
    return next(i for i in (tokenizer.pad_token_id, *sorted(eos_token_ids), 0) if i is not None)


def end_token_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every end-of-sequence id that the model folder's generation config, its config or the tokenizer names."""
    try:
        named = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # no such file: many folders have none
        named = AutoConfig.from_pretrained(model).get_text_config().eos_token_id
    ids = named if isinstance(named, list) else [named]
    found = {i for i in (*ids, tokenizer.eos_token_id) if i is not None}
    if not found:
        raise ModelError(
            "neither the model folder nor the tokenizer names an end-of-sequence token, so no response could end; use a model "
            "whose tokenizer_config.json or generation_config.json names one (in Python: pass eos_token_ids)"
        )
    return frozenset(found)

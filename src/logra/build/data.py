"""Data, rewards and evaluation from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from transformers import PreTrainedTokenizerBase

from logra import config as cfg
from logra.errors import ConfigError
from logra.rl.data import PromptSet, build_prompts
from logra.rl.engines.base import Engine
from logra.rl.evaluate import EvalResult, evaluate
from logra.rl.rewards.pool import RewardPool
from logra.rl.rewards.spec import RewardSpec
from logra.rl.sources import GENERATED, load_rows
from logra.rl.trainer import Scorer
from logra.rl.types import Prompt, Sampling


def build_data(
    section: cfg.Data, tokenizer: PreTrainedTokenizerBase, seed: int, exclude: Collection[tuple[int, ...]] = ()
) -> PromptSet:
    is_generated = section.name.startswith(GENERATED)
    rows = load_rows(
        section.name,
        split=section.split,
        subset=section.subset,
        params=section.params,
        seed=seed if section.seed is None else section.seed,
        size=section.size if is_generated else None,
    )
    return build_prompts(
        rows,
        tokenizer,
        prompt_column=section.prompt_column,
        answer_column=section.answer_column,
        system_prompt=section.system_prompt,
        prompt_prefix=section.prompt_prefix,
        prompt_suffix=section.prompt_suffix,
        chat=section.chat,
        chat_template_kwargs=section.chat_template_kwargs,
        max_prompt_tokens=section.max_prompt_tokens,
        limit=None if is_generated else section.size,
        exclude=exclude,
    )


def build_eval_data(config: cfg.Config, tokenizer: PreTrainedTokenizerBase) -> Sequence[Prompt]:
    """Held-out prompts: the training data section with `eval.data` laid over it; generated tasks get another seed."""
    if config.eval is None:
        return ()
    given = config.eval.data
    is_generated = config.data.name.startswith(GENERATED)
    own_seed = config.seed if config.data.seed is None else config.data.seed
    base = config.data.model_dump() | {"size": None}
    if (
        given.get("name", config.data.name) != config.data.name
    ):  # another source: what only described the old one does not carry over
        base |= {"subset": None, "split": "train", "params": {}, "seed": None}
    elif is_generated:
        base |= {"seed": own_seed + 1_000_003, "size": config.eval.num_prompts or 100}
    try:
        section = cfg.Data.model_validate({**base, **given})
    except ValueError as error:
        raise ConfigError(f"eval.data does not fit the data section: {error}") from error
    is_same = all(getattr(section, k) == getattr(config.data, k) for k in ("name", "subset", "split", "params"))
    if is_same and (not is_generated or section.seed in (None, own_seed)):
        raise ConfigError(
            "eval would use the training prompts: set eval.data.split, eval.data.name or eval.data.subset, for generated "
            "tasks eval.data.seed (or --eval null to train without evaluation)"
        )
    prompts = build_data(section, tokenizer, config.seed)
    return prompts[: config.eval.num_prompts] if config.eval.num_prompts else prompts


def build_rewards(section: cfg.Rewards) -> RewardPool:
    specs = [
        RewardSpec(f.function, weight=f.weight, name=f.name, kind=f.kind, params=f.params) for f in section.functions
    ]
    return RewardPool(specs, workers=section.workers, timeout_s=section.timeout_s, error_limit=section.error_limit)


def build_evaluator(
    config: cfg.Config, engine: Engine, prompts: Sequence[Prompt], rewards: Scorer
) -> Callable[[], EvalResult]:
    section = config.eval
    assert section is not None
    sampling = Sampling(
        max_new_tokens=section.max_new_tokens or config.rollout.max_new_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        seed=section.seed,
    )

    def run() -> EvalResult:
        return evaluate(
            engine,
            prompts,
            lambda rollouts: rewards.score_rollouts(rollouts).total,
            num_rollouts=section.rollouts_per_prompt,
            ks=section.ks,
            sampling=sampling,
            success_threshold=section.success_threshold,
        )

    return run

"""A trainer for the tests: a float32 model that moves by random Updates, and what an engine needs to know of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from logra.rl.engines.vllm_local import VLLMEngine
from logra.rl.tiny import char_tokenizer, tiny_model
from logra.rl.types import Prompt, Rollout, Sampling
from logra.sketch.block import Block, apply_blocks, blocks_of, digest_blocks
from logra.sketch.targets import select_targets
from logra.sketch.update import Factor, Update

EOS, SECOND_EOS = 1, 9
DENSE = ("model.norm.weight", "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight", "lm_head.weight")
GREEDY = Sampling(16, temperature=0.0)


def peaked_model(arch: str, *, tied: bool = False, seed: int = 0) -> PreTrainedModel:
    """Heads of 32 (the smallest that vLLM takes on CPU), a peaked policy, two end ids: as in the engine contract."""
    # a tied head that is merely large would always repeat the last token: let the layers outweigh the embedding instead
    model = tiny_model(arch, hidden=128, tied=tied, seed=seed, spread=0.1 if tied else 0.02)
    with torch.no_grad():
        if tied:
            model.model.norm.weight.mul_(3)
        else:
            model.get_output_embeddings().weight.mul_(15)
    model.generation_config.eos_token_id = [EOS, SECOND_EOS]
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


class Trainer:
    """Targets get random factors, `dense` parameters random values; `step` applies and returns the Update.

    basis: "random", or "aligned": every third Update brings a target's basis, not the same Updates for all targets.
    """

    def __init__(
        self, model: PreTrainedModel, dense: tuple[str, ...] = (), run: str = "c0ffee", basis: str = "random"
    ) -> None:
        self.model, self.run, self.basis = model, run, basis
        targets, _ = select_targets(model)
        self.transposed = [t.name for t in targets if t.transposed]
        self.target_names = [t.name for t in targets]
        self.dense = dense
        self.names = [*self.target_names, *dense]
        self.version = 0
        self.last: Update | None = None
        self.base = self.digest()

    def blocks(self) -> dict[str, Block]:
        blocks = blocks_of(self.model, self.names)
        for name in self.target_names:
            blocks[name].hold(*self._basis_of(name, blocks[name].shape[1]))
        return blocks

    def _basis_of(self, name: str, columns: int, rank: int = 4) -> tuple[torch.Tensor | None, int | None]:
        """The basis that the next Update uses, and the Update it is new in."""
        if self.basis == "random":
            return None, None
        number = self.target_names.index(name)
        first = max(i for i in range(self.version + 1) if i == 0 or (i + number) % 3 == 0)
        draw = torch.Generator().manual_seed(100_000 + 1000 * first + number)
        return torch.randint(-9, 10, (rank, columns), dtype=torch.int8, generator=draw), first

    def digest(self) -> str:
        return digest_blocks(self.blocks())

    def next_update(self, rank: int = 4, exponent: int = -10) -> Update:
        """Steps large enough to change greedy choices."""
        blocks = self.blocks()
        draw = torch.Generator().manual_seed(self.version)
        factors = {}
        for name in self.target_names:
            rows, columns = blocks[name].shape
            q = torch.randint(-7, 8, (rows, rank), dtype=torch.int8, generator=draw)
            scale = torch.full((rows,), exponent if self.basis == "random" else exponent - 2, dtype=torch.int8)
            factors[name] = Factor(name, rows, columns, q, scale, *self._basis_of(name, columns, rank))
        values = {name: blocks[name].master() for name in self.dense}
        dense = {n: v + 0.02 * torch.randn(v.shape, generator=draw) for n, v in values.items()}
        return Update(self.version, self.basis, self.version, 7, rank, 8, factors, dense=dense)

    def step(self) -> Update:
        update = self.next_update()
        apply_blocks(self.blocks(), update)
        self.version, self.last = self.version + 1, update
        return update

    def engine_arguments(self) -> dict:
        return {"run": self.run, "masters": self.blocks, "digest": self.digest, "transposed": self.transposed}


def start(folder: Path, trainer: Trainer, **options) -> VLLMEngine:
    return VLLMEngine(
        folder,
        char_tokenizer(),
        dtype="float32",
        max_model_len=250,
        max_num_seqs=64,
        enforce_eager=True,
        options=options,
        **trainer.engine_arguments(),
    )


def make_prompts() -> list[Prompt]:
    texts = ["abcdefghij" * 7, "1+1=", "what is 12*3? " * 5]
    return [Prompt(i, text, tuple(char_tokenizer()(text).input_ids)) for i, text in enumerate(texts)]


def expected_logprobs(trainer: Trainer, rollout: Rollout) -> list[float]:
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
    with torch.no_grad():
        logits_TV = trainer.model(input_ids=ids, use_cache=False).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
    chosen = torch.tensor(rollout.token_ids)[:, None]
    return logits_TV.double().log_softmax(-1).gather(-1, chosen)[:, 0].tolist()


def assert_samples_the_policy(engine: VLLMEngine, trainer: Trainer) -> None:
    for rollout in engine.generate(make_prompts(), 1, GREEDY):
        assert rollout.version == trainer.version
        assert rollout.logprobs == pytest.approx(expected_logprobs(trainer, rollout), abs=1e-5)

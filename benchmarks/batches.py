"""Batches of random tokens, for benchmarks of one training step that sample nothing themselves."""

from __future__ import annotations

import torch

from logra.rl.batch import TrainBatch, collate
from logra.rl.types import Prompt, Rollout


def random_ids(rows: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    return torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed)).tolist()


def random_batch(
    rows: int, tokens: int, given: int, vocabulary: int, seed: int, *, pad: int = 0, device: str = "cpu"
) -> TrainBatch:
    """Rows of `given` prompt tokens and a response for the rest, all of one prompt, advantages from -1 to 1."""
    rollouts = []
    for index, row in enumerate(random_ids(rows, tokens, vocabulary, seed)):
        prompt, response = Prompt(0, "", tuple(row[:given]), {}), tuple(row[given:])
        rollouts.append(Rollout(prompt, index, response, (-5.0,) * len(response), "length", "", 0))
    return collate(rollouts, pad, device=device).with_advantages(torch.linspace(-1.0, 1.0, rows))

"""Rollouts as tensors: masks, positions, slices, and one step's gradient however it is split."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logra.errors import ConfigError, DataError, NonFiniteError
from logra.rl.advantages import compute_advantages
from logra.rl.batch import collate
from logra.rl.losses import LOSSES, policy_loss, token_weights, weighted_loss
from logra.rl.tiny import tiny_model
from logra.rl.types import Prompt, Rollout

PAD, EOS = 0, 1
# prompt id, prompt length, completion length, stop
SHAPES = [(0, 3, 1, "eos"), (0, 3, 24, "length"), (1, 17, 5, "eos"), (1, 17, 2, "eos"),
          (2, 1, 13, "eos"), (2, 1, 0, "eos"), (3, 6, 9, "length"), (3, 6, 4, "eos")]  # fmt: skip


def rollout(prompt_id, prompt_ids, ids, stop="eos", index=0, logprobs=None):
    logprobs = tuple(-0.25 * (i + 1) for i in range(len(ids))) if logprobs is None else logprobs
    prompt = Prompt(id=prompt_id, content="", token_ids=tuple(prompt_ids))
    return Rollout(prompt=prompt, index=index, token_ids=tuple(ids), logprobs=logprobs, stop=stop, text="", version=0)


def make(shapes, seed=0, vocabulary=51):
    rng = random.Random(seed)
    prompts = {p: [rng.randrange(3, vocabulary) for _ in range(n)] for p, n, _, _ in shapes}
    out = []
    for index, (p, _, length, stop) in enumerate(shapes):
        ids = [rng.randrange(3, vocabulary) for _ in range(length)]
        if stop == "eos" and ids:
            ids[-1] = EOS
        out.append(rollout(p, prompts[p], ids, stop, index))
    return out


def logps(model, batch):
    """(B, C) log-probabilities of the completion tokens."""
    logits = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
    ).logits
    columns = batch.prompt_ids.shape[1]
    logp = logits[:, columns - 1 : -1].float().log_softmax(-1)
    return logp.gather(-1, batch.completion_ids[..., None])[..., 0]


def test_collate_layout_by_hand():
    batch = collate([rollout(5, [10, 11, 12], [20, EOS]), rollout(9, [13], [21, 22, 23], "length")], PAD)
    assert batch.prompt_ids.tolist() == [[10, 11, 12], [PAD, PAD, 13]]
    assert batch.prompt_mask.tolist() == [[True, True, True], [False, False, True]]
    assert batch.completion_ids.tolist() == [[20, EOS, PAD], [21, 22, 23]]
    assert batch.completion_mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.rollout_logprobs.tolist() == [[-0.25, -0.5, 0.0], [-0.25, -0.5, -0.75]]
    assert batch.rollout_logprobs.dtype == batch.advantages.dtype == batch.weights.dtype == torch.float32
    assert batch.input_ids.tolist() == [[10, 11, 12, 20, EOS, PAD], [PAD, PAD, 13, 21, 22, 23]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 4], [0, 0, 0, 1, 2, 3]]
    assert batch.group_ids.tolist() == [5, 9]
    assert batch.lengths.tolist() == [2, 3]
    assert (len(batch), batch.num_loss_tokens, batch.has_signal) == (2, 5, False)
    assert batch.weights.tolist() == pytest.approx([0.2, 0.2])


def test_pad_equal_to_eos_keeps_exactly_one_eos():
    # pad, eos and ordinary tokens of the same value: only lengths tell them apart
    batch = collate([rollout(0, [EOS, 7], [8, EOS]), rollout(1, [7], [EOS, EOS, 9, 9], "length")], pad_id=EOS)
    masked = torch.where(batch.loss_mask, batch.completion_ids, -1)
    assert masked.tolist() == [[8, EOS, -1, -1], [EOS, EOS, 9, 9]]
    assert batch.prompt_mask.tolist() == [[True, True], [False, True]]
    assert batch.num_loss_tokens == 6


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_mask_truncated_drops_from_loss_and_counts(mask_truncated):
    rollouts = make(SHAPES)
    batch = collate(rollouts, PAD, mask_truncated=mask_truncated)
    live = [len(r.token_ids) for r in rollouts if not (mask_truncated and r.stop == "length")]
    assert batch.num_loss_tokens == sum(live)
    assert batch.dropped.tolist() == [mask_truncated and r.stop == "length" for r in rollouts]
    assert batch.completion_mask.sum() == sum(len(r.token_ids) for r in rollouts), "attention still sees all tokens"
    advantages = torch.linspace(-1, 1, len(batch), dtype=torch.float64)
    batch = batch.with_advantages(advantages, aggregation="sequence")
    num_sequences = sum(n > 0 for n in live)
    expected = [
        1 / (num_sequences * len(r.token_ids)) if r.token_ids and not (mask_truncated and r.stop == "length") else 0.0
        for r in rollouts
    ]
    assert batch.weights.tolist() == pytest.approx(expected)
    assert batch.advantages.tolist() == pytest.approx(advantages.tolist())


def test_with_advantages_drops_rollouts_without_reward():
    batch = collate(make(SHAPES), PAD, mask_truncated=True)
    rewards = torch.tensor([1.0, 0.0, math.nan, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    result = compute_advantages("dr_grpo", rewards, batch.group_ids)
    batch = batch.with_advantages(result.advantages, aggregation="constant", max_new_tokens=24, dropped=result.dropped)
    assert batch.dropped.tolist() == [False, True, True, False, False, False, True, False]
    # rollouts 0, 3, 4 and 7: 5 is empty
    assert batch.weights.tolist() == pytest.approx([1 / 96, 0, 0, 1 / 96, 1 / 96, 0, 0, 1 / 96])
    assert batch.num_loss_tokens == 1 + 2 + 13 + 4
    assert batch.has_signal


def test_signal_needs_an_advantage_on_a_token_in_the_loss():
    batch = collate(make([(0, 2, 3, "length"), (1, 2, 0, "eos"), (2, 2, 2, "eos")]), PAD, mask_truncated=True)
    assert not batch.with_advantages(torch.tensor([1.0, 1.0, 0.0])).has_signal
    assert batch.with_advantages(torch.tensor([0.0, 0.0, 1e-9])).has_signal
    assert not batch.with_advantages(torch.ones(3), dropped=torch.tensor([False, False, True])).has_signal


@settings(deadline=None, derandomize=True)
@given(
    order=st.permutations(range(len(SHAPES))),
    size=st.integers(1, len(SHAPES)),
    take=st.integers(1, len(SHAPES)),
)
def test_slices_keep_every_token_and_trim_padding(order, size, take):
    rollouts = make(SHAPES)
    batch = collate(rollouts, PAD).with_advantages(torch.arange(len(SHAPES)).float(), aggregation="prompt")
    rows = list(order)[:take]
    parts = list(batch.slice(rows).microbatches(size))
    assert [len(part) for part in parts] == [min(size, take - i) for i in range(0, take, size)]
    assert sum(part.num_loss_tokens for part in parts) == sum(len(rollouts[row].token_ids) for row in rows)
    flat = [(part, i) for part in parts for i in range(len(part))]
    for row, (part, i) in zip(rows, flat, strict=True):
        assert part.prompt_ids[i][part.prompt_mask[i]].tolist() == list(rollouts[row].prompt.token_ids)
        assert part.completion_ids[i][part.completion_mask[i]].tolist() == list(rollouts[row].token_ids)
        assert part.rollout_logprobs[i][part.completion_mask[i]].tolist() == list(rollouts[row].logprobs)
        assert part.advantages[i] == row
        assert part.weights[i] == batch.weights[row]
        assert part.group_ids[i] == rollouts[row].prompt.id
    for part in parts:
        assert part.prompt_mask.any(0).all()
        assert part.completion_mask.any(0).all() or part.completion_mask.shape[1] == 1
        assert (part.prompt_mask.long().diff(dim=1) >= 0).all()
        assert (part.completion_mask.long().diff(dim=1) <= 0).all()


def test_slice_takes_tensors_and_nothing():
    batch = collate(make(SHAPES), PAD)
    assert batch.slice(torch.tensor([3, 0])).group_ids.tolist() == [1, 0]
    assert len(batch.slice([])) == 0
    assert list(batch.slice([]).microbatches(2)) == []


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_logps_do_not_depend_on_the_batch(arch):
    model = tiny_model(arch)
    rollouts = make(SHAPES)
    with torch.no_grad():
        batch = collate(rollouts, PAD)
        together = logps(model, batch)
        for row, one in enumerate(rollouts):
            if one.token_ids:
                alone = logps(model, collate([one], PAD))[0]
                torch.testing.assert_close(together[row, : len(one.token_ids)], alone, rtol=0, atol=2e-6)
        if arch == "gpt2":  # the control: without position ids the same comparison fails
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
            wrong = logits[:, batch.prompt_ids.shape[1] - 1 : -1].log_softmax(-1)
            wrong = wrong.gather(-1, batch.completion_ids[..., None])[..., 0]
            assert (wrong - together)[batch.completion_mask].abs().max() > 0.01


def step_gradient(model, batch, kind, size):
    """Gradient of one optimizer step, flattened, and the summed clip metrics."""
    model.zero_grad()
    metrics = {}
    for part in batch.microbatches(size):
        old = part.rollout_logprobs
        loss, counts = policy_loss(kind, logps(model, part), old, part.advantages, part.loss_mask)
        weighted_loss(loss, part.weights).backward()
        metrics = {name: metrics.get(name, 0) + int(value) for name, value in counts.items()}
    return torch.cat([p.grad.flatten() for p in model.parameters()]), metrics


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "constant"])
@pytest.mark.parametrize("mask_truncated", [False, True])
def test_one_by_eight_equals_two_by_four_equals_eight_by_one(kind, aggregation, mask_truncated):
    model = tiny_model("gpt2", hidden=32, layers=1)
    batch = collate(make(SHAPES), PAD, mask_truncated=mask_truncated)
    with torch.no_grad():  # so that ratios lie on both sides of the clip
        noise = torch.randn(batch.rollout_logprobs.shape, generator=torch.Generator().manual_seed(0))
        old = torch.where(batch.completion_mask, logps(model, batch) + 0.3 * noise, 0.0)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.3, math.nan, 0.0], dtype=torch.float64)
    result = compute_advantages("reinforce++", rewards, batch.group_ids)
    batch = batch.with_advantages(result.advantages, aggregation=aggregation, max_new_tokens=24, dropped=result.dropped)
    batch.rollout_logprobs.copy_(old)
    whole, metrics = step_gradient(model, batch, kind, 8)
    assert whole.abs().max() > 1e-4
    for size in (4, 1, 3):
        split, split_metrics = step_gradient(model, batch, kind, size)
        torch.testing.assert_close(split, whole, rtol=0, atol=1e-6)
        assert split_metrics == metrics
    # leaving the dropped rollouts out of the batch altogether is the same step
    rows = [row for row in range(8) if not batch.dropped[row]]
    fewer = batch.slice(rows)
    weights = token_weights(aggregation, fewer.lengths, fewer.group_ids, max_new_tokens=24)
    torch.testing.assert_close(fewer.weights, weights.float())
    torch.testing.assert_close(step_gradient(model, fewer, kind, 8)[0], whole, rtol=0, atol=1e-6)


def test_empty_and_fully_dropped_batch_goes_through_backward():
    model = tiny_model("gpt2", hidden=32, layers=1)
    for shapes in ([(0, 3, 0, "eos"), (1, 2, 0, "eos")], [(0, 3, 4, "length"), (1, 2, 0, "eos")]):
        batch = collate(make(shapes), PAD, mask_truncated=True).with_advantages(torch.ones(2))
        assert batch.completion_ids.shape[1] >= 1
        assert (batch.num_loss_tokens, batch.weights.tolist(), batch.has_signal) == (0, [0.0, 0.0], False)
        gradient, _ = step_gradient(model, batch, "ppo", 1)
        assert (gradient == 0).all()


def test_probe_takes_first_usable_rollouts_and_truncates():
    batch = collate(make(SHAPES), PAD, mask_truncated=True)
    probe = batch.probe(3, max_tokens=10)
    # 2 and 3 have prompts of 17 tokens, 5 is empty
    assert probe.group_ids.tolist() == [0, 0, 2]
    assert probe.lengths.tolist() == [1, 7, 9]
    assert probe.attention_mask.sum(1).tolist() == [4, 10, 10]
    assert (probe.rollout_logprobs[~probe.completion_mask] == 0).all()
    rollouts = make(SHAPES)
    assert probe.completion_ids[1, :7].tolist() == list(rollouts[1].token_ids[:7])
    assert batch.probe(100, max_tokens=1000).lengths.tolist() == [1, 24, 5, 2, 13, 9, 4]
    chosen = batch.probe([7, 5, 2], max_tokens=1000)
    assert chosen.group_ids.tolist() == [3, 1]
    assert chosen.lengths.tolist() == [4, 5]
    assert batch.lengths.tolist() == [1, 24, 5, 2, 13, 0, 9, 4], "the batch itself is untouched"


def test_probe_without_usable_rollout_says_what_to_do():
    batch = collate(make(SHAPES), PAD)
    with pytest.raises(DataError, match="raise the probe's token limit"):
        batch.probe(2, max_tokens=1)
    with pytest.raises(DataError, match="raise the probe's token limit"):
        batch.probe([5], max_tokens=100)


def test_to_moves_every_tensor():
    batch = collate(make(SHAPES), PAD)
    moved = batch.to("meta")
    assert {value.device.type for value in vars(moved).values()} == {"meta"}
    assert {value.device.type for value in vars(collate(make(SHAPES), PAD, device="meta")).values()} == {"meta"}


def test_bad_input_says_what_to_do():
    with pytest.raises(DataError, match="no rollout"):
        collate([], PAD)
    with pytest.raises(DataError, match="rollout 4 of prompt 3: the prompt has no token"):
        collate([rollout(3, [], [5], index=4)], PAD)
    with pytest.raises(DataError, match="2 tokens but 1 log-probs"):
        collate([rollout(3, [4], [5, 6], logprobs=(-1.0,))], PAD)
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        collate([rollout(3, [4], [5, 6], logprobs=(-1.0, -math.inf))], PAD)
    batch = collate(make(SHAPES), PAD)
    with pytest.raises(ConfigError, match="at least 1"):
        next(batch.microbatches(0))
    with pytest.raises(ValueError, match=r"\(8,\)"):
        batch.with_advantages(torch.zeros(3))

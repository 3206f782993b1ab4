"""vLLM follows the trainer by Updates, and is found out whenever it does not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from random_trainer import (
    DENSE,
    GREEDY,
    Trainer,
    assert_samples_the_policy,
    expected_logprobs,
    make_prompts,
    peaked_model,
    save,
    start,
)

from logra.errors import ConfigError, ModelError, UpdateError, UpdateOrderError
from logra.rl.engines.base import Engine
from logra.rl.engines.vllm_link import Link
from logra.rl.engines.vllm_local import VLLMEngine, start_llm
from logra.rl.types import Sampling
from logra.sketch.block import apply_blocks
from logra.sync.packet import Packet


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VLLMEngine, Trainer]]:
    model = peaked_model("llama")
    folder = save(model, tmp_path_factory.mktemp("base"))
    # generation defaults that would shape the distribution, if anything were taken from them
    defaults = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 3.0, "eos_token_id": [1, 9], "max_new_tokens": 2}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    trainer = Trainer(model, DENSE, basis="aligned")
    engine = start(
        folder, trainer, block_size=32, max_num_batched_tokens=300
    )  # prompts fill blocks, so prefixes are cached
    yield engine, trainer
    engine.close()
    engine.close()
    with pytest.raises(ModelError, match="closed"):
        engine.generate(make_prompts(), 1, GREEDY)


@pytest.fixture
def engine(started: tuple[VLLMEngine, Trainer]) -> VLLMEngine:
    engine, trainer = started
    engine.publish(trainer.version, None)
    return engine


@pytest.fixture
def trainer(started: tuple[VLLMEngine, Trainer]) -> Trainer:
    return started[1]


def test_version_0_is_acknowledged_before_the_first_step(started: tuple[VLLMEngine, Trainer]) -> None:
    engine, trainer = started
    assert isinstance(engine, Engine) and engine.version == 0
    (ack,) = engine.acknowledgements()
    assert (ack.run, ack.version, ack.error) == (trainer.run, 0, None)
    assert engine.digest() == trainer.base
    assert_samples_the_policy(engine, trainer)


def test_a_lost_update_is_found_before_its_rollouts_are_used(
    engine: VLLMEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.publish(trainer.version + 1, trainer.step())
    with monkeypatch.context() as patch:  # the trainer believes that this one arrived
        patch.setattr(Link, "_transfer", lambda *_: None)
        patch.setattr(Link, "_describe", lambda *_: None)
        engine.publish(trainer.version + 1, trainer.step())
    assert engine.version == trainer.version
    with pytest.raises(UpdateOrderError, match="missed an Update"):
        engine.generate(make_prompts(), 1, GREEDY)
    with pytest.raises(UpdateOrderError, match="Load an anchor"):
        engine.publish(trainer.version + 1, trainer.next_update())
    engine.publish(trainer.version, None)
    assert_samples_the_policy(engine, trainer)


def test_a_gap_is_refused_and_nothing_is_sampled_until_an_anchor(engine: VLLMEngine, trainer: Trainer) -> None:
    trainer.step()
    with pytest.raises(UpdateError, match="gap"):
        engine.publish(trainer.version + 1, trainer.step())
    with pytest.raises(UpdateOrderError, match="publish"):
        engine.generate(make_prompts(), 1, GREEDY)
    engine.publish(trainer.version, None)
    assert engine.digest() == trainer.digest()
    assert_samples_the_policy(engine, trainer)
    engine.publish(trainer.version + 1, trainer.step())
    assert_samples_the_policy(engine, trainer)


def test_another_run_base_or_model_is_refused_before_anything_moves(engine: VLLMEngine, trainer: Trainer) -> None:
    before, update, version = engine.digest(), trainer.next_update(), trainer.version
    fewer = replace(update, factors=dict(list(update.factors.items())[1:]))
    cases = {
        "run": Packet(update, "dead", trainer.base, 1),
        "another base": Packet(update, trainer.run, "abcd", 1),
        "another model": Packet(fewer, trainer.run, trainer.base, 1),
        "another history": Packet(update, trainer.run, trainer.base, 1, parent="1234"),
        "replay": Packet(trainer.last, trainer.run, trainer.base, 1) if trainer.last else None,
    }
    for word, packet in cases.items():
        if packet is None:
            continue
        with pytest.raises(UpdateError, match=word):
            engine.publish(packet.version, packet)
        assert engine.digest() == before
        if word == "another model":
            (ack,) = engine.acknowledgements()
            assert ack.unexpected == (next(iter(update.factors)),) and ack.applied == 0
        engine.publish(version, None)
    assert_samples_the_policy(engine, trainer)


def test_damage_on_the_way_is_refused(engine: VLLMEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    before, encode = engine.digest(), Packet.to_bytes
    with monkeypatch.context() as patch:
        patch.setattr(Packet, "to_bytes", lambda self: encode(self)[:-40] + bytes(40))
        with pytest.raises(UpdateError, match="corrupted"):
            engine.publish(trainer.version + 1, trainer.next_update())
    assert engine.digest() == before


def test_a_digest_that_differs_is_found(engine: VLLMEngine, trainer: Trainer) -> None:
    update = trainer.next_update()
    with pytest.raises(UpdateError, match="digest"):
        engine.publish(update.index + 1, Packet(update, trainer.run, trainer.base, 1, digest="beef"))
    with pytest.raises(UpdateOrderError):
        engine.generate(make_prompts(), 1, GREEDY)
    engine.publish(trainer.version, None)
    assert engine.digest() == trainer.digest()


def test_cached_prefixes_go_with_the_weights(
    engine: VLLMEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_samples_the_policy(engine, trainer)  # fills the cache
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.link.control), "drop_caches", lambda self: None)
        engine.publish(trainer.version + 1, trainer.step())
    stale = engine.generate(make_prompts()[:1], 1, GREEDY)[0]
    assert stale.logprobs != pytest.approx(expected_logprobs(trainer, stale), abs=1e-3), "nothing was cached: no test"
    engine.publish(trainer.version + 1, trainer.step())
    assert_samples_the_policy(engine, trainer)


def test_large_messages_go_through_a_file(
    engine: VLLMEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine.link, "inline_bytes", 0)
    monkeypatch.setattr(engine.link, "folder", tmp_path / "exchange")
    engine.publish(trainer.version + 1, trainer.step())
    engine.publish(trainer.version + 5, None)
    assert engine.version == trainer.version + 5
    assert list((tmp_path / "exchange").iterdir()) == [], "messages stay no longer than their transfer"
    engine.publish(trainer.version, None)
    assert_samples_the_policy(engine, trainer)


def test_top_p_narrows_the_choice_and_scores_nothing(engine: VLLMEngine, trainer: Trainer) -> None:
    narrow = engine.generate(make_prompts()[1:2], 8, Sampling(4, temperature=1.0, top_p=1e-6))
    greedy = engine.generate(make_prompts()[1:2], 1, Sampling(4, temperature=0.0, top_p=0.5))[0]
    assert {r.token_ids for r in narrow} == {greedy.token_ids}
    assert all(math.isnan(logp) for r in narrow for logp in r.logprobs)
    assert greedy.logprobs == pytest.approx(expected_logprobs(trainer, greedy), abs=1e-5)


def test_nothing_comes_from_the_generation_config(engine: VLLMEngine, trainer: Trainer) -> None:
    rollouts = engine.generate(make_prompts()[1:2], 16, Sampling(6))
    assert len({r.token_ids for r in rollouts}) > 4 and max(len(r.token_ids) for r in rollouts) == 6
    for rollout in rollouts:
        assert rollout.logprobs == pytest.approx(expected_logprobs(trainer, rollout), abs=1e-5)


def test_more_prompts_than_one_forward_pass_takes(engine: VLLMEngine, trainer: Trainer) -> None:
    prompts = [replace(p, id=10 * i + p.id) for i in range(30) for p in make_prompts()]
    rollouts = engine.generate(prompts, 2, Sampling(2))  # 180 x 50 tokens to read, at most 300 at a time
    for rollout in rollouts[-4:]:
        assert rollout.logprobs == pytest.approx(expected_logprobs(trainer, rollout), abs=1e-5)


def test_prompts_that_do_not_fit_are_refused(engine: VLLMEngine) -> None:
    with pytest.raises(ModelError, match="max_model_len 250"):
        engine.generate(make_prompts(), 1, Sampling(240))


def test_sleep_needs_a_colocated_engine(engine: VLLMEngine) -> None:
    with pytest.raises(ConfigError, match="colocated"):
        engine.sleep()


def test_a_second_run_needs_a_fresh_start(engine: VLLMEngine, trainer: Trainer) -> None:
    other = Link(engine.link.control, run="5eed", masters=trainer.blocks, digest=trainer.digest)
    with pytest.raises(UpdateError, match="restart it"):
        other.begin()


def test_options_that_logra_sets_are_refused() -> None:
    with pytest.raises(ConfigError, match="logprobs_mode"):
        start_llm({}, {"logprobs_mode": "raw_logits"})


def test_weights_that_drift_in_the_trainer_are_told_by_the_digest(engine: VLLMEngine, trainer: Trainer) -> None:
    update = trainer.next_update()
    engine.publish(trainer.version + 1, update)
    assert engine.digest() != trainer.digest()
    apply_blocks(trainer.blocks(), update)
    trainer.version += 1
    assert engine.digest() == trainer.digest()


def test_a_loader_that_fails_midway_leaves_nothing_to_sample(
    engine: VLLMEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the worker shares this process here (VLLM_ENABLE_V1_MULTIPROCESSING=0, one rank)
    from logra.integrations.vllm_worker import Checkpoint

    read = Checkpoint.items

    def half(checkpoint: Checkpoint):
        yield from list(read(checkpoint))[:5]
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "items", half)
        with pytest.raises(UpdateError, match="the disk is gone"):
            engine.publish(trainer.version + 1, trainer.step())
    with pytest.raises(UpdateOrderError, match="the disk is gone"):
        engine.generate(make_prompts(), 1, GREEDY)
    engine.publish(trainer.version, None)
    assert_samples_the_policy(engine, trainer)


def test_the_plug_in_is_an_entry_point_of_vllm() -> None:
    names = {point.name: point.value for point in entry_points(group="vllm.general_plugins")}
    assert names["logra"] == "logra.integrations.vllm_plugin:register"
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from logra.integrations.vllm_plugin import register

    register()
    register()
    assert "logra" in WeightTransferEngineFactory._registry

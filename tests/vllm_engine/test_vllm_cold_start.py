"""An engine that took 20 Updates samples what an engine does that is started from the trainer's exported weights."""

from __future__ import annotations

from pathlib import Path

from random_trainer import DENSE, GREEDY, Trainer, assert_samples_the_policy, make_prompts, peaked_model, save, start


def test_twenty_updates_equal_a_cold_start(tmp_path: Path) -> None:
    model = peaked_model("llama")
    trainer = Trainer(model, DENSE)
    engine = start(save(model, tmp_path / "base"), trainer)
    try:
        first = engine.generate(make_prompts(), 1, GREEDY)
        for _ in range(20):
            update = trainer.step()
            engine.publish(trainer.version, update)
            (ack,) = engine.acknowledgements()
            assert (ack.version, ack.applied, ack.missing, ack.unexpected) == (
                trainer.version,
                len(trainer.names),
                (),
                (),
            )
        assert engine.digest() == trainer.digest()
        warm = engine.generate(make_prompts(), 1, GREEDY)
        assert [r.token_ids for r in warm] != [r.token_ids for r in first]
        assert_samples_the_policy(engine, trainer)
    finally:
        engine.close()

    exported = Trainer(model, DENSE, run="abcdef")
    cold_engine = start(save(model, tmp_path / "exported"), exported)
    try:
        cold = cold_engine.generate(make_prompts(), 1, GREEDY)
    finally:
        cold_engine.close()
    for ours, theirs in zip(warm, cold, strict=True):
        assert ours.token_ids == theirs.token_ids and ours.logprobs == theirs.logprobs

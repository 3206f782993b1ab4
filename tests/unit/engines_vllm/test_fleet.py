"""Several servers behind one engine: what becomes of a step when one of them fails, in every way we could think of."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import FakeVLLM, Trainer
from transformers import PreTrainedModel

from logra.errors import ModelError, NonFiniteError, UpdateError, UpdateOrderError, WrongBaseError
from logra.rl.engines.base import Interrupted, RemoteEngine
from logra.rl.engines.fleet import FleetEngine, Live
from logra.rl.engines.fleet_work import MOST_TRIES
from logra.rl.engines.vllm_link import TransferError
from logra.rl.engines.vllm_server import VLLMServerEngine
from logra.rl.tiny import char_tokenizer, tiny_model
from logra.rl.types import Prompt, Rollout, Sampling

PROMPTS = [
    Prompt(i, text, tuple(char_tokenizer()(text).input_ids)) for i, text in enumerate(["1+1=", "abc", "7*8=", "x"])
]
SAMPLING = Sampling(6, temperature=0.8, seed=3)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model(spread=0.1)


@pytest.fixture
def trainer(model: PreTrainedModel) -> Trainer:
    return Trainer(model)


@pytest.fixture
def servers(trainer: Trainer) -> Iterator[list[FakeVLLM]]:
    servers = [FakeVLLM(trainer.model, trainer.names) for _ in range(2)]
    yield servers
    for server in servers:
        server.kill()


Start = Callable[..., FleetEngine]


@pytest.fixture
def start(trainer: Trainer, servers: list[FakeVLLM], tmp_path: Path) -> Iterator[Start]:
    opened: list[FleetEngine] = []

    def make(
        count: int = 2, *, of: Trainer = trainer, timeout_s: float = 20.0, concurrency: int = 4,
        is_placed: bool = True, **options: Any,
    ) -> FleetEngine:  # fmt: skip
        def member(url: str) -> VLLMServerEngine:
            return VLLMServerEngine(
                url, tmp_path, char_tokenizer(), eos_token_ids=[1], connect=False, timeout_s=timeout_s,
                concurrency=concurrency, **of.link(),
            )  # fmt: skip

        urls = [server.url for server in servers[:count]]
        settings = {"log": of.log, "patience_s": 20.0, "retry_s": 0.05, **options}
        opened.append(FleetEngine(urls, member, **settings))
        if is_placed:
            opened[-1].publish(of.version, None)
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def expected(trainer: Trainer, rollout: Rollout) -> list[float]:
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
    with torch.no_grad():
        logits_TV = trainer.model(input_ids=ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].double()
    chosen = torch.tensor(rollout.token_ids)[:, None]
    return (logits_TV / SAMPLING.temperature).log_softmax(-1).gather(-1, chosen)[:, 0].tolist()


def sample(engine: FleetEngine, trainer: Trainer, num_rollouts: int = 4) -> list[Rollout]:
    """One step's rollouts, complete, in order and of the trainer's policy."""
    rollouts = engine.generate(PROMPTS, num_rollouts, SAMPLING)
    assert [(r.prompt.id, r.index) for r in rollouts] == [(p.id, i) for p in PROMPTS for i in range(num_rollouts)]
    for rollout in rollouts:
        assert rollout.version == engine.version == trainer.version
        assert rollout.logprobs == pytest.approx(expected(trainer, rollout), abs=1e-5)
    return rollouts


def ids(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [rollout.token_ids for rollout in rollouts]


def step(engine: FleetEngine, trainer: Trainer, count: int = 1) -> None:
    for _ in range(count):
        packet = trainer.step()
        engine.publish(trainer.version, packet)


def test_work_is_shared_by_prompts_and_samples_do_not_depend_on_it(
    start: Start, servers: list[FakeVLLM], trainer: Trainer
) -> None:
    two = start(concurrency=8)
    assert isinstance(two, RemoteEngine) and two.max_model_len == 250
    asked: list[list[tuple[int, ...]]] = [[], []]
    for server, seen in zip(servers, asked, strict=True):
        server._sample = lambda prompt, params, real=server._sample, seen=seen: (  # type: ignore[method-assign]
            seen.append(tuple(prompt)), real(prompt, params))[1]  # fmt: skip
    together = sample(two, trainer)
    assert [len(seen) for seen in asked] == [8, 8]
    assert not {*asked[0]} & {*asked[1]}, "the rollouts of a prompt are sampled by one server, whose cache has it"
    assert ids(sample(start(1), trainer)) == ids(together)
    assert two.metrics() == {"rollout/servers": 2, "rollout/dropped": 0, "rollout/rejoined": 0}


def test_all_servers_follow_the_trainer(start: Start, servers: list[FakeVLLM], trainer: Trainer) -> None:
    engine = start()
    step(engine, trainer, 3)
    assert engine.digest() == trainer.digest()
    assert [ack.name for ack in engine.acknowledgements()] == ["server-0-vllm-0", "server-1-vllm-0"]
    assert {ack.version for ack in engine.acknowledgements()} == {3}
    sample(engine, trainer)
    assert [server.calls.count("/update_weights") for server in servers] == [3, 3], "Updates, no anchor"


def test_one_killed_in_the_middle_loses_no_rollout(
    start: Start, servers: list[FakeVLLM], trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    step(engine, trainer)
    undisturbed = sample(engine, trainer)
    dead = servers[1]
    dead.on_generate = lambda number: dead.kill() if number == 8 + 3 else None
    assert ids(sample(engine, trainer)) == ids(undisturbed)
    assert engine.metrics() == {"rollout/servers": 1, "rollout/dropped": 1, "rollout/rejoined": 0}
    for _ in range(2):
        step(engine, trainer)
        sample(engine, trainer)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and dead.url in told[0] and "does not answer" in told[0]

    dead.start()  # with the base weights
    time.sleep(0.06)
    before = len(dead.calls)
    step(engine, trainer)
    sample(engine, trainer)
    assert "/init_weight_transfer_engine" in dead.calls[before:] and "/inference/v1/generate" in dead.calls[before:]
    assert engine.metrics() == {"rollout/servers": 2, "rollout/dropped": 1, "rollout/rejoined": 1}
    assert engine.digest() == trainer.digest()


@pytest.mark.parametrize("count", [1, 2])
def test_all_die_and_one_returns(
    start: Start, servers: list[FakeVLLM], trainer: Trainer, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    engine = start(count)
    step(engine, trainer, 2)
    undisturbed = sample(engine, trainer)
    for server in servers[:count]:
        server.on_generate = lambda number, server=server: server.kill() if number == 12 // count else None
        server.num_generated = 0

    def back() -> None:
        while any(server._server is not None for server in servers[:count]):
            time.sleep(0.01)
        time.sleep(0.3)
        servers[0].start()

    helper = threading.Thread(target=back)
    helper.start()
    assert ids(sample(engine, trainer)) == ids(undisturbed)
    helper.join()
    assert sum("no vLLM server is left" in record.getMessage() for record in caplog.records) == 1
    step(engine, trainer)
    sample(engine, trainer)
    assert engine.digest() == trainer.digest()
    assert engine.metrics() == {"rollout/servers": 1, "rollout/dropped": count, "rollout/rejoined": 1}


def test_no_server_for_too_long_is_one_clear_error(start: Start, servers: list[FakeVLLM], trainer: Trainer) -> None:
    engine = start(patience_s=0.3)
    for server in servers:
        server.kill()
    with pytest.raises(TransferError, match=r"0\.3 s \(rollout\.vllm\.patience_s\).*--resume auto") as caught:
        engine.generate(PROMPTS, 2, SAMPLING)
    assert all(server.url in str(caught.value) for server in servers)
    trainer.step()
    engine.publish(1, None)  # which is no failure: the next rollouts are what needs a server
    with pytest.raises(TransferError, match=r"within 0\.1 s.*start one with vllm serve"):
        start(patience_s=0.1)


@pytest.mark.parametrize("live", ["always", "placing", "never"])
@pytest.mark.parametrize("when", ["before a publish", "before sampling"])
def test_a_server_started_anew_between_two_steps_is_recognised(
    start: Start, servers: list[FakeVLLM], trainer: Trainer, when: str, live: Live
) -> None:
    engine = start(live=live)
    step(engine, trainer, 2)
    servers[0].kill()
    servers[0].start()
    if when == "before a publish":
        step(engine, trainer)
    sample(engine, trainer)
    assert engine.metrics() == {"rollout/servers": 2, "rollout/dropped": 1, "rollout/rejoined": 1}
    assert servers[0].num_generated >= 4 and servers[1].num_generated >= 4
    assert engine.digest() == trainer.digest()


def test_a_slow_server_gets_less(start: Start, servers: list[FakeVLLM], trainer: Trainer) -> None:
    engine = start(concurrency=2)
    servers[0].delay_s = 0.2
    started = time.monotonic()
    sample(engine, trainer, 6)
    assert servers[0].num_generated <= 6 and servers[1].num_generated >= 18
    assert time.monotonic() - started < 2.0
    assert max(server.most_running for server in servers) <= 2


def test_a_server_that_hangs_is_left_out_at_its_timeout(
    start: Start, servers: list[FakeVLLM], trainer: Trainer
) -> None:
    engine = start(timeout_s=0.3)
    release = threading.Event()
    servers[0].on_generate = lambda number: (release.wait(5), None)[1]
    sample(engine, trainer)
    assert engine.metrics()["rollout/dropped"] == 1
    release.set()


@pytest.mark.parametrize("fault", ["lost", "twice"])
def test_an_update_that_is_lost_or_comes_twice_is_mended(
    start: Start, servers: list[FakeVLLM], trainer: Trainer, fault: str
) -> None:
    engine = start()
    step(engine, trainer)
    take, server = servers[0]._update, servers[0]

    def faulty(info: dict[str, Any]) -> None:
        server._update = take  # type: ignore[method-assign]
        if fault == "twice":
            take(info)
            take(info)

    server._update = faulty  # type: ignore[method-assign]
    step(engine, trainer)
    assert engine.metrics() == {"rollout/servers": 2, "rollout/dropped": 1, "rollout/rejoined": 1}
    sample(engine, trainer)
    assert engine.digest() == trainer.digest()
    assert server.calls.count("/update_weights") == 2 + (fault == "lost"), "the Update again, no anchor"


def test_answers_of_another_version_are_never_used(start: Start, servers: list[FakeVLLM], trainer: Trainer) -> None:
    engine = start()
    step(engine, trainer)

    def stale(answer: Any) -> Any:
        answer["choices"][0]["weight_versions"][0]["version"] = "a1:0"
        return answer

    servers[1].wrong["/inference/v1/generate"] = stale
    before = ids(sample(engine, trainer))
    assert engine.metrics()["rollout/dropped"] == 1
    servers[1].wrong.clear()
    assert ids(sample(engine, trainer)) == before
    assert engine.metrics()["rollout/rejoined"] == 1


def test_weights_that_differ_are_found_by_the_digest_when_a_server_comes_back(
    start: Start, servers: list[FakeVLLM], trainer: Trainer
) -> None:
    engine = start()
    step(engine, trainer)
    servers[0].kill()
    sample(engine, trainer)
    with torch.no_grad():
        next(iter(servers[0].replica.blocks.values())).value.add_(1)  # type: ignore[union-attr]
    servers[0].start(afresh=False)
    time.sleep(0.06)
    sample(engine, trainer)
    assert engine.metrics()["rollout/servers"] == 2 and engine.digest() == trainer.digest()


def test_off_policy_a_server_comes_back_by_the_log_alone(
    start: Start, servers: list[FakeVLLM], trainer: Trainer
) -> None:
    engine = start(live="placing")
    step(engine, trainer, 3)
    before = ids(sample(engine, trainer))
    servers[0].kill()
    ahead = [trainer.step() for _ in range(2)]  # the trainer's weights are further on than the engine's
    servers[0].start()
    rollouts = engine.generate(PROMPTS, 4, SAMPLING)
    assert ids(rollouts) == before and {r.version for r in rollouts} == {3}
    for version, packet in zip((4, 5), ahead, strict=True):
        engine.publish(version, packet)
    sample(engine, trainer)
    assert engine.metrics() == {"rollout/servers": 2, "rollout/dropped": 1, "rollout/rejoined": 1}


def test_weights_that_may_not_be_read_are_not(start: Start, servers: list[FakeVLLM], trainer: Trainer) -> None:
    first = start()
    step(first, trainer, 2)
    sample(first, trainer)
    link = trainer.link()
    trainer.link = lambda: link | {"digest": _fail}  # type: ignore[method-assign]
    servers[0].kill()
    servers[0].start()
    engine = start(live="never")  # one that begins, one that follows
    step(engine, trainer)
    sample(engine, trainer)
    servers[1].kill()
    servers[1].start()
    sample(engine, trainer)
    assert engine.metrics() == {"rollout/servers": 2, "rollout/dropped": 1, "rollout/rejoined": 1}
    assert engine.digest() == trainer.digest()


def _fail() -> str:
    raise AssertionError("the weights were read")


def test_off_policy_an_anchor_of_the_log_is_used(start: Start, servers: list[FakeVLLM], trainer: Trainer) -> None:
    engine = start(live="placing")
    step(engine, trainer, 2)
    trainer.log.write_anchor(2, trainer.blocks(), trainer.digest())
    step(engine, trainer, 2)
    servers[0].kill()
    servers[0].start_from_other_weights()  # only an anchor makes it the policy
    sample(engine, trainer)
    assert engine.metrics()["rollout/rejoined"] == 1 and engine.digest() == trainer.digest()
    assert servers[0].calls.count("/update_weights") == 4 + 3


def test_off_policy_without_a_way_the_others_go_on(
    start: Start, servers: list[FakeVLLM], trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(live="placing")
    step(engine, trainer)
    servers[0].kill()
    servers[0].start_from_other_weights()
    for _ in range(3):
        sample(engine, trainer)
        time.sleep(0.06)
    assert engine.metrics()["rollout/servers"] == 1
    told = [r.getMessage() for r in caplog.records]
    assert sum("no anchor to start from: restart that vLLM" in text for text in told) == 1


def test_a_resumed_trainer_takes_up_servers_that_are_further_on(
    start: Start, servers: list[FakeVLLM], trainer: Trainer
) -> None:
    step(start(), trainer, 2)
    other = Trainer(tiny_model(spread=0.1), salt=1)  # the same run, gone back to its start
    assert other.log.info().base == trainer.log.info().base
    resumed = start(of=other, is_placed=False)
    with pytest.raises(UpdateOrderError, match="connection was lost"):
        resumed.generate(PROMPTS, 1, SAMPLING)  # of which version the trainer's weights are, only it can say
    resumed.publish(0, None)
    sample(resumed, other)


@pytest.mark.parametrize("live", ["always", "placing"])
def test_a_branch_that_the_trainer_left_is_not_gone_on_with(
    start: Start, servers: list[FakeVLLM], trainer: Trainer, live: Live
) -> None:
    step(start(), trainer, 2)
    servers[0].kill()
    other = Trainer(tiny_model(spread=0.1), salt=1)
    resumed = start(of=other, live=live)
    step(resumed, other, 2)
    servers[0].start(afresh=False)  # at version 2 of this run too
    time.sleep(0.06)
    sample(resumed, other)
    assert resumed.metrics()["rollout/servers"] == 1 + (live == "always")
    assert resumed.digest() == other.digest()


def test_abort_interrupts_and_the_call_can_be_made_again(
    start: Start, servers: list[FakeVLLM], trainer: Trainer
) -> None:
    engine = start()
    expected_ids = ids(sample(engine, trainer))
    for server in servers:
        server.delay_s = 0.3
    threading.Timer(0.1, engine.abort).start()
    started = time.monotonic()
    with pytest.raises(Interrupted):
        engine.generate(PROMPTS, 4, SAMPLING)
    assert time.monotonic() - started < 1.0
    assert "/abort_requests" in servers[0].calls and "/abort_requests" in servers[1].calls
    for server in servers:
        server.delay_s = 0.0
    assert ids(sample(engine, trainer)) == expected_ids
    for server in servers:
        server.kill()
    threading.Timer(0.1, engine.abort).start()
    with pytest.raises(Interrupted):  # also while it waits for a server
        engine.generate(PROMPTS, 4, SAMPLING)
    engine.abort()
    with pytest.raises(Interrupted):  # with no call under way, the next one
        engine.generate(PROMPTS, 4, SAMPLING)
    assert engine.metrics()["rollout/dropped"] == 2


def test_a_request_that_kills_every_server_is_found(start: Start, servers: list[FakeVLLM]) -> None:
    engine = start()

    def poison(server: FakeVLLM) -> None:
        with server._mutex:
            server.kill()
            server.start()

    for server in servers:
        server.on_generate = lambda number, server=server: poison(server)
    with pytest.raises(ModelError, match=rf"prompt \d, rollout \d was asked for {MOST_TRIES} times"):
        engine.generate(PROMPTS, 2, SAMPLING)


def test_what_is_no_fault_of_a_server_is_raised(start: Start, servers: list[FakeVLLM]) -> None:
    engine = start()

    def damaged(answer: Any) -> Any:
        answer["choices"][0]["logprobs"]["content"][0]["logprob"] = float("nan")
        return answer

    for server in servers:
        server.wrong["/inference/v1/generate"] = damaged
    with pytest.raises(NonFiniteError):
        engine.generate(PROMPTS, 2, SAMPLING)
    assert engine.metrics()["rollout/dropped"] == 0


def test_the_trainers_own_mistakes_are_raised(start: Start, trainer: Trainer) -> None:
    engine = start()
    with pytest.raises(UpdateError, match="not dict"):
        engine.publish(1, {})
    with pytest.raises(UpdateOrderError, match="leads to version 1, not to 2"):
        engine.publish(2, trainer.step())
    assert engine.version == 0 and engine.metrics()["rollout/dropped"] == 0


def test_what_a_server_refuses_at_the_start_is_for_the_user(
    start: Start, servers: list[FakeVLLM], trainer: Trainer
) -> None:
    start(1)
    assert servers[0].replica is not None
    servers[0].replica._run = "beef"
    with pytest.raises(WrongBaseError, match=r"has followed run beef.*restart it"):
        start()


def test_a_server_that_is_late_joins_without_having_been_there(
    start: Start, servers: list[FakeVLLM], trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    servers[1].kill()
    engine = start()
    assert "not there yet" in caplog.records[-1].getMessage()
    step(engine, trainer)
    sample(engine, trainer)
    servers[1].start()
    time.sleep(0.06)
    sample(engine, trainer)
    assert engine.metrics() == {"rollout/servers": 2, "rollout/dropped": 0, "rollout/rejoined": 0}


def test_one_that_comes_back_shorter_is_not_used(
    start: Start, servers: list[FakeVLLM], trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    servers[0].kill()
    servers[0].max_model_len = 20
    servers[0].start()
    for _ in range(3):
        sample(engine, trainer)
        time.sleep(0.06)
    assert engine.metrics()["rollout/servers"] == 1 and engine.max_model_len == 250
    assert sum("max_model_len is 20" in record.getMessage() for record in caplog.records) == 1


def test_soak(start: Start, servers: list[FakeVLLM], trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    """A random fault at every other step: nothing is lost, and all agree in the end."""
    caplog.set_level(logging.ERROR)
    engine, draw = start(), torch.Generator().manual_seed(0)
    for number in range(14):
        server = servers[int(torch.randint(2, (), generator=draw))]
        fault = int(torch.randint(6, (), generator=draw))
        if fault == 0:
            server.kill()
        elif fault == 1 and server._server is not None:
            server.kill()
            server.start()
        elif fault == 2 and server._server is not None:
            at = server.num_generated + 3
            server.on_generate = lambda n, server=server, at=at: server.kill() if n == at else None
        for each in servers:
            if each._server is None and number % 2:
                each.start()
        if all(each._server is None for each in servers):
            servers[0].start()
        time.sleep(0.06)
        if fault == 2:
            threading.Timer(0.5, lambda: [each.start() for each in servers if each._server is None]).start()
        sample(engine, trainer, 2)
        step(engine, trainer)
    for server in servers:
        if server._server is None:
            server.start()
    time.sleep(0.06)
    sample(engine, trainer)
    assert engine.digest() == trainer.digest() and engine.metrics()["rollout/servers"] == 2

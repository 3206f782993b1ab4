"""The source of rollouts: which version samples which batch, whatever the timing; and how it ends."""

import random
import threading
import time

import pytest

from logra.errors import ConfigError, MismatchError, UpdateError
from logra.rl.engines.base import Interrupted, RemoteEngine
from logra.rl.rollouts import Ahead, OnPolicy, Order, check_versions, make_source
from logra.rl.sampler import PromptSampler
from logra.rl.types import Prompt, Rollout, Sampling

PROMPTS = [Prompt(i, str(i), (i + 1,), {}) for i in range(10)]


class Engine:
    """Notes what is done to it. delay: seconds of a call, from `random`; gate: if given, sampling waits for it."""

    pad_token_id = 0
    publishes_midway = False

    def __init__(self, delay=0.0, seed=0, gate=None):
        self.version, self.log = 0, []
        self.delay, self.random, self.gate = delay, random.Random(seed), gate
        self.stop, self.started = threading.Event(), threading.Event()
        self.fails = None

    def generate(self, prompts, num_rollouts, sampling):
        self.started.set()
        if self.fails is not None:
            raise self.fails
        version = self.version
        time.sleep(self.delay * self.random.random())
        while self.gate is not None and not self.gate.is_set():
            if self.stop.wait(0.002):
                break
        if self.stop.is_set():
            self.stop.clear()
            self.log.append(("aborted", sampling.step + 1, version))
            raise Interrupted
        self.log.append(("batch", sampling.step + 1, version))
        return [
            Rollout(p, i, (1,), (-1.0,), "eos", f"{sampling.step}", version)
            for p in prompts
            for i in range(num_rollouts)
        ]

    def publish(self, version, update):
        time.sleep(self.delay * self.random.random())
        self.version = version
        self.log.append(("publish", version))

    def check_lengths(self, prompts, max_new_tokens):
        pass

    def abort(self):
        self.stop.set()

    def close(self):
        pass


def order(engine, seed=3):
    return Order(engine, PromptSampler(len(PROMPTS), 4, seed), PROMPTS, 2, Sampling(5, seed=seed))


def run(source, steps, first=0, delay=0.0, seed=0, skipped=(), version=0):
    """A trainer that moves once a step but in the `skipped`; gives, for each step, prompts, staleness and position."""
    chooser, told = random.Random(seed), []
    for step in range(first, steps):
        batch = source.take(step)
        staleness = {version - r.version for r in batch.rollouts}
        told.append(([p.id for p in batch.prompts], staleness, source.state()))
        assert {r.text for r in batch.rollouts} == {str(step)}
        time.sleep(delay * chooser.random())
        if step + 1 not in skipped:
            version += 1
            source.publish(version, f"update {version}")
        source.finish(step + 1)
    return told


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("jitter", [(0.0, 0.0), (0.01, 0.0), (0.0, 0.01), (0.01, 0.01)])
def test_the_version_of_a_batch_depends_on_its_number_alone(ahead, jitter):
    engine = Engine(jitter[0], seed=ahead)
    source = Ahead(order(engine), ahead=ahead, on_update="finish", first=0, last=8)
    told = run(source, 8, delay=jitter[1])
    source.close()
    assert [s for _, s, _ in told] == [{min(t - 1, ahead)} for t in range(1, 9)]
    sampled = {entry[1]: entry[2] for entry in engine.log if entry[0] == "batch"}
    assert sampled == {t: max(0, t - 1 - ahead) for t in range(1, 9)}  # and none beyond the last step


def test_steps_without_an_update_publish_nothing_and_batches_are_fresher():
    engine = Engine(0.003)
    source = Ahead(order(engine), ahead=1, on_update="finish", first=0, last=6)
    told = run(source, 6, skipped=(2, 3))
    source.close()
    assert [s for _, s, _ in told] == [
        {0},
        {1},
        {0},
        {0},
        {1},
        {1},
    ]  # versions before: 0 1 1 1 2 3; of batches: 0 0 1 1 1 2


def test_batches_are_those_of_a_run_without_any_ahead():
    """The same prompts in the same order, keyed by the same steps; and the position is that of the batch that was taken."""
    plain = run(OnPolicy(order(Engine())), 7)
    engine = Engine(0.003)
    source = Ahead(order(engine), ahead=2, on_update="finish", first=0, last=7)
    told = run(source, 7, delay=0.003)
    source.close()
    assert [(ids, position) for ids, _, position in told] == [(ids, position) for ids, _, position in plain]


def test_without_any_ahead_all_is_done_when_it_is_called():
    engine, threads = Engine(), threading.active_count()
    source = make_source(order(engine), ahead=0, on_update="finish", first=0, last=3)
    assert isinstance(source, OnPolicy)
    assert [s for _, s, _ in run(source, 3)] == [{0}] * 3
    expected = [("batch", 1, 0), ("publish", 1), ("batch", 2, 1), ("publish", 2), ("batch", 3, 2), ("publish", 3)]
    assert engine.log == expected and threading.active_count() == threads


def test_closing_gives_the_sampler_back_at_the_last_batch_taken_and_a_new_source_goes_on_from_there():
    plain = run(OnPolicy(order(Engine())), 8)
    engine = Engine(0.002)
    shared = order(engine)
    source = Ahead(shared, ahead=2, on_update="finish", first=0, last=8)
    told = run(source, 3)
    source.close()
    assert shared.sampler.state_dict() == told[-1][2] == plain[2][2]
    engine.publish(3, None)
    source = Ahead(shared, ahead=2, on_update="finish", first=3, last=8)
    more = run(source, 8, first=3, version=3)
    source.close()
    assert [ids for ids, _, _ in told + more] == [ids for ids, _, _ in plain]
    assert [s for _, s, _ in more] == [{0}, {1}, {2}, {2}, {2}]  # what was in flight is sampled anew


@pytest.mark.parametrize("ahead", [1, 2])
def test_an_evaluation_sees_the_newest_version_and_an_idle_engine(ahead):
    for seed in range(3):
        engine = Engine(0.004, seed)
        source = Ahead(order(engine), ahead=ahead, on_update="finish", first=0, last=6)
        with source.exclusive():  # before anything was taken
            assert engine.version == 0 and not engine.started.is_set()
        told = []
        for step in range(6):
            batch = source.take(step)
            told.append({step - r.version for r in batch.rollouts})
            source.publish(step + 1, None)
            source.finish(step + 1)
            if step % 2:
                with source.exclusive():
                    assert engine.version == step + 1
                    before = list(engine.log)
                    time.sleep(0.01)
                    assert engine.log == before
        source.close()
        assert told == [{min(t - 1, ahead)} for t in range(1, 7)]  # evaluating changes no batch


def test_an_error_of_the_engine_reaches_the_trainer_as_it_is():
    engine = Engine()
    source = Ahead(order(engine), ahead=1, on_update="finish", first=0, last=9)
    source.take(0)
    source.publish(1, None)
    engine.fails = UpdateError("the server is gone")
    source.finish(1)
    with pytest.raises(UpdateError, match=r"^the server is gone$"):
        for step in range(1, 4):
            source.take(step)
            source.finish(step + 1)
    with pytest.raises(UpdateError, match="gone"):
        source.take(3)
    with pytest.raises(UpdateError, match="gone"), source.exclusive():
        raise AssertionError("not reached")
    source.close()
    source.close()


def test_a_lost_update_is_found_by_the_exact_version():
    engine = Engine()
    engine.publish = lambda version, update: None
    source = Ahead(order(engine), ahead=1, on_update="finish", first=0, last=9)
    engine.version = 4
    with pytest.raises(MismatchError, match="version 4 of the policy, the trainer is at 5"):
        run(source, 9, version=4)
    source.close()


def wait_in_a_thread(source):
    def wait():
        with pytest.raises(RuntimeError, match="closed"):
            source.take(0)

    waiter = threading.Thread(target=wait)
    waiter.start()
    return waiter


def test_closing_while_the_engine_samples_ends_the_thread():
    engine = Engine(gate=threading.Event())
    source = Ahead(order(engine), ahead=1, on_update="finish", first=0, last=9)
    waiter = wait_in_a_thread(source)
    assert engine.started.wait(2)
    thread = source._thread
    started = time.perf_counter()
    source.close()
    assert time.perf_counter() - started < 1 and not thread.is_alive()
    waiter.join(2)
    assert not waiter.is_alive()


def test_closing_does_not_wait_for_an_engine_that_hangs():
    engine = Engine(gate=threading.Event())
    engine.abort = lambda: None  # it does not listen
    source = Ahead(order(engine), ahead=1, on_update="finish", first=0, last=9, close_s=0.05)
    waiter = wait_in_a_thread(source)
    assert engine.started.wait(2)
    thread = source._thread
    source.close()
    assert thread.is_alive() and thread.daemon
    engine.gate.set()
    thread.join(2)
    assert not thread.is_alive() and len(engine.log) == 1  # it has made nothing more
    waiter.join(2)


@pytest.mark.parametrize("jitter", [(0.01, 0.002), (0.002, 0.01), (0.01, 0.01)])
def test_restart_keeps_prompts_and_order_and_no_batch_is_older_than_with_finish(jitter):
    plain = run(OnPolicy(order(Engine())), 8)
    source = Ahead(order(Engine(jitter[0])), ahead=1, on_update="restart", first=0, last=8)
    told = run(source, 8, delay=jitter[1])
    source.close()
    assert [(ids, position) for ids, _, position in told] == [(ids, position) for ids, _, position in plain]
    assert all(staleness <= {0, 1} for _, staleness, _ in told)


def test_restart_aborts_publishes_and_asks_again():
    gate = threading.Event()
    gate.set()
    engine = Engine(gate=gate)
    source = Ahead(order(engine), ahead=1, on_update="restart", first=0, last=4)
    first = source.take(0)
    wait_for(engine, ("batch", 2, 0))
    second = source.take(1)
    gate.clear()
    engine.started.clear()
    source.finish(1)  # a step without an update: batch 3 begins
    assert engine.started.wait(2)
    source.publish(1, None)
    wait_for(engine, ("publish", 1))
    gate.set()
    source.finish(2)
    third = source.take(2)
    source.close()
    assert {r.version for r in (*first.rollouts, *second.rollouts)} == {0} and {r.version for r in third.rollouts} == {
        1
    }
    assert engine.log[:5] == [("batch", 1, 0), ("batch", 2, 0), ("aborted", 3, 0), ("publish", 1), ("batch", 3, 1)]


def test_an_abort_that_comes_too_late_costs_one_more_try():
    engine = Engine()
    engine.stop.set()
    source = Ahead(order(engine), ahead=1, on_update="restart", first=0, last=2)
    plain = run(OnPolicy(order(Engine())), 1)
    assert [p.id for p in source.take(0).prompts] == plain[0][0]
    source.close()
    assert engine.log[:2] == [("aborted", 1, 0), ("batch", 1, 0)]


def wait_for(engine, entry):
    for _ in range(1000):
        if entry in engine.log:
            return
        time.sleep(0.002)
    raise AssertionError(f"{entry} did not happen: {engine.log}")


def test_engines_that_cannot_are_refused():
    class InProcess:
        version, pad_token_id = 0, 0
        generate = publish = check_lengths = close = lambda *_: None

    with pytest.raises(ConfigError, match=r"rollout\.vllm\.url"):
        make_source(order(InProcess()), ahead=1, on_update="finish", first=0, last=3)
    with pytest.raises(ConfigError, match="on_update=keep"):
        make_source(order(Engine()), ahead=1, on_update="keep", first=0, last=3)
    assert isinstance(Engine(), RemoteEngine)


def test_versions_outside_the_range_are_refused():
    made = [Rollout(PROMPTS[0], 0, (1,), (-1.0,), "eos", "", version) for version in (3, 4, 5)]
    check_versions(made, 6, oldest=3, newest=5)
    with pytest.raises(MismatchError, match=r"step 6: .* version 3 .* at 5 and takes rollouts of 4 and later"):
        check_versions(made, 6, oldest=4, newest=5)
    with pytest.raises(MismatchError, match="version 5 of the policy, the trainer is at 4 and"):
        check_versions(made, 6, oldest=3, newest=4)

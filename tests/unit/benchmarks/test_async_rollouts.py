"""The benchmark of rollouts ahead: valid configurations, figures of the timed steps alone. No server is started."""

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from logra import config as cfg

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
async_rollouts = importlib.import_module("async_rollouts")


def result(steps=6):
    metrics = [
        {
            "step": t, "reward": t / 10, "step_time": 2.0, "time/rollout": 1.0, "time/rollout_wait": 0.5, "num_updates": t,
            "staleness/mean": 1.0, "staleness/max": 1, "skipped_steps": 0,
        }
        for t in range(1, steps + 1)
    ]  # fmt: skip
    ends = [100.0 + 36 * t for t in range(1, steps + 1)]
    cpu = {"trainer_cpu": [t * 1.5 for t in range(steps)], "server_cpu": [t * 0.5 for t in range(steps)]}
    return {"ends": ends, **cpu, "metrics": [*metrics, {"step": steps, "eval/pass@1": 0.5}]}


def test_rates_are_those_after_the_warm_up():
    found = async_rollouts.summarise(result(), 2)
    assert found["updates_per_hour"] == pytest.approx(100) and found["steps_per_hour"] == pytest.approx(100)
    assert found["reward_last_third"] == pytest.approx(0.55) and found["pass@1"] == 0.5
    assert (found["server_cpu_s"], found["trainer_cpu_s"], found["step_s"], found["rollout_s"], found["wait_s"]) == (
        0.5,
        1.5,
        2.0,
        1.0,
        0.5,
    )


def test_arms_differ_only_in_how_far_ahead_they_are(tmp_path):
    options = async_rollouts.parse(["--steps", "7", "--on-update", "restart"])
    made = [
        cfg.make_config(async_rollouts.settings(options, ahead, 5, "http://127.0.0.1:1", tmp_path)) for ahead in (0, 1)
    ]
    assert [c.rollout.ahead for c in made] == [0, 1] and [c.rollout.on_update for c in made] == ["finish", "restart"]
    assert cfg.identity(made[0]) == cfg.identity(made[1]) and made[0].train == made[1].train


@pytest.mark.parametrize(
    ("flags", "words"), [(["--cores", "0", "0"], "two different cores"), (["--cores", "0", "4095"], "different cores")]
)
def test_what_cannot_work_is_refused_before_anything_starts(flags, words, capsys):
    assert async_rollouts.main([*flags, "--no-record"]) == 2
    assert words in capsys.readouterr().err


def test_the_order_of_arms_turns_and_ratios_are_within_a_seed(monkeypatch):
    order, speed = [], {(0, 1): 100.0, (1, 1): 150.0, (0, 2): 200.0, (1, 2): 200.0}

    def run_once(options, ahead, seed):
        order.append((ahead, seed))
        return async_rollouts.summarise(result(), 2) | {"updates_per_hour": speed[ahead, seed]}

    monkeypatch.setattr(async_rollouts, "run_once", run_once)
    options = async_rollouts.parse(["--seeds", "2", "--seed", "1"])
    found = async_rollouts.measure(options, async_rollouts.Console(quiet=True))
    assert order == [(0, 1), (1, 1), (1, 2), (0, 2)]
    assert found["arms"]["1"]["ratios"] == [1.5, 1.0]
    assert found["arms"]["1"]["ratio"] == 1.25 and found["arms"]["0"]["ratio"] == 1.0


def test_computing_of_a_process_and_its_children_is_counted():
    command = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'x = sum(range(6_000_000)); input()'])"
    process = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE)
    try:
        for _ in range(400):
            if async_rollouts.computed_s(process.pid) > 0.06:
                break
            time.sleep(0.01)
        assert 0.06 < async_rollouts.computed_s(process.pid) < 20
    finally:
        process.communicate(b"\n", timeout=20)
    assert async_rollouts.computed_s(process.pid) == 0

"""Trackers: what is logged arrives, what fails does not stop training."""

import builtins
import logging
import math
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from logra.errors import ConfigError
from logra.integrations.trackers import make_trackers, numbers


def start(names, folder, **more):
    settings = {"project": "demo", "run_name": "one", "folder": folder, "config": {"seed": 3}} | more
    return make_trackers(names, **settings)


class FakeRun:
    def __init__(self, **settings):
        self.settings, self.logged, self.metrics, self.finished = settings, [], [], 0
        self.fail_log = self.fail_finish = False

    def define_metric(self, name, step_metric):
        self.metrics.append((name, step_metric))

    def log(self, metrics, step=None):
        if self.fail_log:
            raise ConnectionError("network is gone")
        self.logged.append((step, metrics))

    def finish(self):
        self.finished += 1
        if self.fail_finish:
            raise RuntimeError("cannot finish")


@pytest.fixture
def fake(monkeypatch):
    """Puts a module with `init` under the given name; returns the list of runs it has started."""

    def install(name, error=None):
        runs = []

        def init(**settings):
            if error is not None:
                raise error
            runs.append(FakeRun(**settings))
            return runs[-1]

        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=init))
        return runs

    return install


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_events_can_be_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    (tracker,) = start(["tensorboard"], tmp_path)
    tracker.log(1, {"reward": 0.5, "loss": math.nan, "text": "no", "completions/mean_length": torch.tensor(12)})
    tracker.log(2, {"reward": 0.75, "loss": 1.5})
    assert read_events(tmp_path)["reward"] == [
        (1, 0.5),
        (2, 0.75),
    ]  # before close: a killed run keeps its curves
    tracker.close()
    assert read_events(tmp_path) == {
        "reward": [(1, 0.5), (2, 0.75)],
        "loss": [(2, 1.5)],
        "completions/mean_length": [(1, 12.0)],
    }


def test_a_resumed_tensorboard_hides_what_is_done_again(tmp_path):
    pytest.importorskip("tensorboard")
    (tracker,) = start(["tensorboard"], tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"reward": step})
    tracker.close()
    (tracker,) = start(["tensorboard"], tmp_path, resume_step=1)
    tracker.log(2, {"reward": 20})
    tracker.close()
    assert read_events(tmp_path) == {"reward": [(1, 1.0), (2, 20.0)]}


def test_wandb_gets_the_run_and_its_metrics(tmp_path, fake):
    runs = fake("wandb")
    (tracker,) = start(["wandb"], tmp_path)
    tracker.log(4, {"reward": 1, "flag": True, "none": None})
    tracker.close()
    tracker.close()
    (run,) = runs
    identity = run.settings.pop("id")
    assert run.settings == {
        "project": "demo",
        "name": "one",
        "dir": str(tmp_path),
        "config": {"seed": 3},
        "resume": "allow",
    }
    assert run.metrics == [("*", "step")]
    assert run.logged == [(None, {"reward": 1.0, "flag": 1.0, "step": 4})]
    assert run.finished == 1
    start(["wandb"], tmp_path, resume_step=4)
    assert runs[1].settings["id"] == identity
    start(["wandb"], tmp_path)
    assert runs[2].settings["id"] != identity


def test_trackio_gets_the_run_and_its_metrics(tmp_path, fake):
    runs = fake("trackio")
    for resume_step, resume in ((None, "never"), (7, "allow")):
        (tracker,) = start(["trackio"], tmp_path, resume_step=resume_step, project=None)
        tracker.log(8, {"loss": np.float32(0.5), "bad": math.inf})
        tracker.close()
        run = runs[-1]
        assert run.settings == {"project": "logra", "name": "one", "config": {"seed": 3}, "resume": resume}
        assert (run.logged, run.finished) == ([(8, {"loss": 0.5})], 1)


def test_a_failing_tracker_is_switched_off_and_reported_once(tmp_path, fake, caplog):
    broken, healthy = fake("wandb"), fake("trackio")
    trackers = start(["wandb", "trackio"], tmp_path)
    broken[0].fail_log = broken[0].fail_finish = True
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            for tracker in trackers:
                tracker.log(step, {"reward": step})
    assert [record.getMessage() for record in caplog.records] == [
        "the tracker wandb failed at step 1 and is switched off for the rest of the run "
        "(ConnectionError: network is gone). metrics.jsonl has all metrics."
    ]
    broken[0].fail_log = False
    trackers[0].log(4, {"reward": 4})
    assert broken[0].logged == [] and len(healthy[0].logged) == 3
    caplog.clear()
    for tracker in trackers:
        tracker.close()
        tracker.log(9, {"reward": 9})
    assert [record.getMessage()[:34] for record in caplog.records] == ["the tracker wandb failed while clo"]
    assert len(healthy[0].logged) == 3


def test_a_tracker_that_does_not_start_stops_the_others(tmp_path, fake):
    started = fake("trackio")
    fake("wandb", error=OSError("no key"))
    with pytest.raises(ConfigError, match=r"wandb did not start \(OSError: no key.*take it out"):
        start(["trackio", "wandb"], tmp_path)
    assert started[0].finished == 1


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, name, package):
    real = builtins.__import__

    def without(module, *rest, **more):
        if module.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}")
        return real(module, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    for module in list(sys.modules):
        if module.split(".")[0] == package or module.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, module)
    if name != "tensorboard":
        monkeypatch.setitem(sys.modules, name, None)  # what importlib raises ImportError for
    with pytest.raises(ConfigError, match=rf"pip install 'logra\[{name}\]'"):
        start([name], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_are_refused_before_anything_starts(tmp_path, fake):
    runs = fake("wandb")
    with pytest.raises(ConfigError, match="'tensorbord': did you mean 'tensorboard'"):
        start(["wandb", "tensorbord"], tmp_path)
    with pytest.raises(ConfigError, match="known are tensorboard, wandb, trackio"):
        start(["mlflow"], tmp_path)
    assert runs == [] and start([], tmp_path) == []


def test_a_repeated_name_counts_once(tmp_path, fake):
    runs = fake("wandb")
    assert len(start(["wandb", "wandb"], tmp_path)) == len(runs) == 1


def test_numbers_keeps_finite_numbers_only():
    values = {"i": 1, "f": 0.5, "b": False, "t": torch.tensor([2]), "n": np.int64(3)}
    rest = {"nan": math.nan, "inf": -math.inf, "tn": torch.tensor(math.nan), "s": "x", "none": None, "l": [1]}
    assert numbers({**values, **rest}) == {"i": 1.0, "f": 0.5, "b": 0.0, "t": 2.0, "n": 3.0}


def test_the_module_imports_no_tracker():
    heavy = ("wandb", "trackio", "tensorboard", "torch")
    code = f"import sys, logra.integrations.trackers; print([n for n in {heavy} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr

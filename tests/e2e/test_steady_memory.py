"""Host memory is flat over a long run: nothing is kept from step to step but what the method keeps."""

import gc
from pathlib import Path

import pytest
import torch

from logra import config as cfg
from logra.build import build_run

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
STEPS, WARM_UP = 500, 150


def live_bytes():
    """Of all tensors the collector finds, each storage once."""
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class Watcher:
    def __init__(self):
        self.resident, self.tensors, self.live = [], [], []

    def on_step(self, step, metrics):
        self.resident.append(metrics["memory/rss_bytes"])
        self.tensors.append(metrics["memory/peak_bytes"])
        if step in (WARM_UP, STEPS):
            self.live.append(live_bytes())

    def on_eval(self, step, result):
        pass


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_is_flat_over_500_steps(tmp_path):
    flags = {
        "output_dir": str(tmp_path / "run"), "train.steps": STEPS, "rollout.prompts_per_step": 1,
        "rollout.rollouts_per_prompt": 4, "rollout.max_new_tokens": 2, "eval": None, "checkpoint.every": 0,
        "log.completions": False, "method.basis": "aligned", "method.refresh_every": 4, "trust.measure_every": 50,
        "trust.probe_rollouts": 1,
    }  # fmt: skip
    run = build_run(cfg.make_config(cfg.apply_overrides(cfg.read_yaml(RECIPE), flags)))
    watcher = Watcher()
    run.trainer.listeners.append(watcher)
    try:
        run.fit()
    finally:
        run.close()
    assert len(watcher.resident) == STEPS
    middle, end = (sum(watcher.resident[i : i + 50]) / 50 for i in (WARM_UP, STEPS - 50))
    assert end - middle < 4 << 20, f"resident memory grew by {(end - middle) / 2**20:.1f} MiB over 300 steps"
    assert watcher.live[0] == watcher.live[1] > 0
    assert max(watcher.tensors[WARM_UP:]) <= max(watcher.tensors[:WARM_UP])

"""The gauge of a step: what it reports on the CPU, and what it asks of a CUDA allocator."""

import itertools
import json

import pytest
import torch

from logra.errors import UserError
from logra.memory import gauge as module
from logra.memory.gauge import GRADIENT, PHASES, ROLLOUT, UPDATE, StepGauge, held_bytes


def gauge_of(tmp_path, layer, **options):
    return StepGauge(
        torch.device("cpu"), lambda: {"weights": list(layer.parameters())}, layer.parameters, folder=tmp_path, **options
    )


def run_step(gauge, layer):
    gauge.begin(1)
    with gauge.phase(ROLLOUT):
        torch.zeros(10_000)
    with gauge.watch():
        with gauge.phase(GRADIENT):
            layer(torch.ones(4, 32)).sum().backward()
        with gauge.phase(UPDATE):
            update = layer.weight.detach() * 0.1
            layer.weight.data -= update
    return gauge.metrics()


def test_a_step_on_the_cpu(tmp_path):
    layer = torch.nn.Linear(32, 32, bias=False)
    metrics = run_step(gauge_of(tmp_path, layer), layer)
    assert metrics["memory/weights_bytes"] == 4096 and metrics["memory/gradients_bytes"] == 4096
    assert metrics["memory/peak_bytes"] == metrics["memory/update_peak_bytes"] >= 3 * 4096
    assert metrics["memory/workspace_bytes"] >= 4096 and 0 < metrics["memory/mean_bytes"] < metrics["memory/peak_bytes"]
    assert "memory/rollout_peak_bytes" not in metrics and metrics["memory/rss_bytes"] > 1 << 20
    assert not list(tmp_path.iterdir())


def test_the_timeline_keeps_the_peak(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_POINTS", 5)
    layer = torch.nn.Linear(32, 32, bias=False)
    metrics = run_step(gauge_of(tmp_path, layer, timelines=[1]), layer)
    points = json.loads((tmp_path / "step_000001.json").read_text())["points"]
    assert len(points) <= 5 and {p["phase"] for p in points} <= {"", *PHASES}
    peak = max(points, key=lambda p: sum(p["bytes"].values()))
    assert peak == {"phase": ROLLOUT, "seconds": peak["seconds"], "bytes": {"weights": 4096, "kv_cache": 40_000}}
    assert metrics["memory/rollout_peak_bytes"] == 44_096 > metrics["memory/peak_bytes"]
    assert all(a["seconds"] <= b["seconds"] for a, b in itertools.pairwise(points))


def test_turned_off_it_measures_only_the_process(tmp_path):
    layer = torch.nn.Linear(32, 32, bias=False)
    assert set(run_step(gauge_of(tmp_path, layer, enabled=False, timelines=[1]), layer)) == {"memory/rss_bytes"}


def test_on_cuda_the_allocator_is_asked_in_every_phase(monkeypatch):
    peaks = {ROLLOUT: 700, GRADIENT: 900, UPDATE: 800}
    now = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: now.append(device))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000)
    monkeypatch.setattr(module, "held_bytes", lambda tensors, device: 100 * len(list(tensors)))
    gauge = StepGauge(torch.device("cuda"), lambda: {"weights": [1, 2, 3], "sketch": [1], "residual": []}, list)
    for _ in range(2):
        gauge.begin(1)
        for name, peak in peaks.items():
            monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device, peak=peak: peak)
            with gauge.watch(), gauge.phase(name):
                pass
        metrics = gauge.metrics()
        metrics.pop("memory/rss_bytes")
        assert metrics == {
            "memory/rollout_peak_bytes": 700, "memory/gradient_peak_bytes": 900, "memory/update_peak_bytes": 800,
            "memory/peak_bytes": 900, "memory/reserved_bytes": 1000, "memory/weights_bytes": 300, "memory/sketch_bytes": 100,
            "memory/activations_bytes": 500,
        }  # fmt: skip
    assert len(now) == 6


def test_shared_storages_are_held_once():
    a = torch.zeros(256)
    assert held_bytes([a, a[3:], a.view(16, 16)], torch.device("cpu")) == 1024
    assert held_bytes([a], torch.device("cuda")) == 0


def test_on_cuda_what_goes_in_the_update_is_still_known_at_its_peak(monkeypatch):
    """Gradients, that is; and nothing of an earlier, lower peak stays in the step's numbers."""
    kept = {"gradients": [1, 2], "weights": [1]}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(module, "held_bytes", lambda tensors, device: 100 * len(list(tensors)))
    gauge = StepGauge(torch.device("cuda"), lambda: kept, list)
    gauge.keep("weights", [7])  # a reference
    gauge.begin(1)
    for peak, kind, left in ((500, "sketch", [1]), (800, "gradients", [])):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device, peak=peak: peak)
        with gauge.phase(UPDATE):
            kept.pop("sketch", None)
            kept[kind] = left
    found = {k: v for k, v in gauge.metrics().items() if "peak" not in k and "re" not in k.split("_")[0]}
    assert found["memory/weights_bytes"] == 200 and found["memory/gradients_bytes"] == 200
    assert found["memory/activations_bytes"] == 400 and "memory/sketch_bytes" not in found


def test_a_full_disk_is_told_with_the_way_out(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_atomic", full)
    layer = torch.nn.Linear(32, 32, bias=False)
    with pytest.raises(UserError, match="memory_timelines"):
        run_step(gauge_of(tmp_path, layer, timelines=[1]), layer)

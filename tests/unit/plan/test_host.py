"""Free memory and sizes as people write them."""

import pytest
import torch

from logra.config.sizes import parse_size
from logra.memory import host


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("80GB", 80 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("1000", 1000),
        ("2kb", 2000),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "24 apples", "-1GiB", "0", "GiB", "24Gi"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="no size of memory"):
        parse_size(text)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_PROC", tmp_path)
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:     64 kB\n")
    return tmp_path


def test_without_a_control_group(machine):
    assert host.free_host_memory() == 64 * 1024


def test_a_control_group_with_less(machine):
    (machine / "memory.max").write_text("50000\n")
    (machine / "memory.current").write_text("40000\n")
    assert host.free_host_memory() == 10_000
    (machine / "memory.stat").write_text("anon 1\ninactive_file 5000\n")
    assert host.free_memory(torch.device("cpu")) == 15_000


def test_a_control_group_without_limit(machine):
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("40000\n")
    assert host.free_host_memory() == 64 * 1024


def test_the_first_version_of_control_groups(machine):
    (machine / "memory").mkdir()
    (machine / "memory" / "memory.limit_in_bytes").write_text("30000\n")
    (machine / "memory" / "memory.usage_in_bytes").write_text("10000\n")
    assert host.free_host_memory() == 20_000


def test_a_system_that_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_PROC", tmp_path / "none")
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "none")
    assert host.free_host_memory() is None


def test_an_accelerator_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert host.free_memory(torch.device("cuda")) == 123

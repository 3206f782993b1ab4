"""`logra doctor`: all is well here, a broken part is found, and nothing secret is printed."""

import importlib
import json
import time

import pytest
import torch

from logra.cli import doctor
from logra.cli.main import main


def test_this_installation_is_well_and_json_is_one_object(capsys):
    started = time.perf_counter()
    assert main(["doctor", "--json"]) == 0
    assert time.perf_counter() - started < 30.0  # ten on a free machine
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert [check["name"] for check in found["checks"]] == [name for name, _, _ in doctor.CHECKS]
    assert all(check["ok"] and not check["fix"] for check in found["checks"])
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["machine"]["disk_free_bytes"] > 0


def test_the_table_shows_failures_with_their_fix_and_ends_with_1(monkeypatch, capsys):
    def broken():
        raise RuntimeError("it is\nbroken")

    monkeypatch.setattr(doctor, "CHECKS", (("good", "", lambda: "fine"), ("bad", "mend it", broken)))
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "peft" else "1.2.3")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "ok     good" in out and "fine" in out
    assert "FAILED bad" in out and "RuntimeError: it is. Fix: mend it" in out
    assert "not installed (optional): pip install 'logra[peft]'" in out


def test_no_secret_is_printed(monkeypatch, capsys):
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    monkeypatch.setattr(doctor, "CHECKS", ())
    for name in doctor.VARIABLES:
        monkeypatch.setenv(name, secret)
    for arguments in (["doctor"], ["doctor", "--json"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert secret not in out and "HF_TOKEN" in out


def test_switches_and_numbers_are_shown_but_never_a_token():
    shown = doctor.environment(
        {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "4", "HF_TOKEN": "12345", "OTHER": "1", "HF_HOME": ""}
    )
    assert shown == {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "4", "HF_TOKEN": "(set, not shown)"}


@pytest.mark.parametrize(
    ("module", "name", "replacement", "check"),
    [
        ("logra.hashing", "_WEYL_0", 1, doctor.check_philox),
        ("logra.sketch.block", "apply_update", lambda model, update: None, doctor.check_update),
        ("logra.sketch.update", "power_of_two", lambda e: torch.rand(len(e)), doctor.check_blocks),
        ("logra.trust.kl", "measure_kl", lambda *a, **k: 1.2e-4, doctor.check_kl),
        ("logra.rl.rewards.pool", "RewardPool", None, doctor.check_rewards),
        ("importlib.metadata", "requires", lambda name: ["torch>=99"], doctor.check_packages),
        ("importlib.metadata", "requires", lambda name: ["no-such-package>=1"], doctor.check_packages),
    ],
)
def test_each_check_finds_its_fault(module, name, replacement, check, monkeypatch):
    assert doctor.run_check("x", "fix", check).ok
    monkeypatch.setattr(importlib.import_module(module), name, replacement)
    outcome = doctor.run_check("x", "fix", check)
    assert not outcome.ok and outcome.fix == "fix" and outcome.detail


def test_extras_and_unmet_markers_are_not_required(monkeypatch):
    lines = ['peft>=99; extra == "peft"', 'torch>=99; python_version < "3"', "torch>=2"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines)
    assert doctor.run_check("x", "fix", doctor.check_packages).ok

"""A short soak: two ranks, an engine, and a fault every few steps; everything agrees in the end."""

import importlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.mark.slow
def test_a_run_survives_lost_messages_and_a_killed_engine(tmp_path, capfd):
    soak = importlib.import_module("soak")
    kinds = ["drop_request", "drop_answer", "duplicate", "delay", "kill_engine"]
    flags = ["--steps", "18", "--every", "3", "--kinds", *kinds, "--delay", "0.6", "--patience", "90"]
    record = tmp_path / "record.json"
    code = soak.main([*flags, "--output", str(tmp_path / "soak"), "--record", str(record)])
    log = tmp_path / "soak" / "faults" / "trainer.log"
    assert code == 0, capfd.readouterr().out + log.read_text()[-3000:]
    found = json.loads(record.read_text())["results"]
    assert found["steps"] == 18 and found["digests_compared"] >= 2 and len({*found["digests"].values()}) == 1
    assert [fault["step"] for fault in found["faults"]] == [3, 6, 9, 12, 15]
    assert {fault["kind"] for fault in found["faults"]} == {*kinds}
    assert all(fault["recovery_s"] is not None for fault in found["faults"])
    assert found["dropped"] == found["rejoined"] >= 1 and found["unexpected_stops"] == []

"""`logra launch` without servers: what it prints is what it runs, and its run is that of `logra train`."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(*words):
    command = [sys.executable, "-m", "logra", "launch", "recipes/tiny.yaml", "--cpu", "--rollout-gpus", "0", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


def test_a_launch_on_the_cpu_trains(tmp_path):
    done = launch("--train.steps", "1", "--eval", "null", "--output_dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "# train" and lines[1].startswith(f"{sys.executable} -m logra train recipes/tiny.yaml")
    assert lines[-1] == "[launch] training is done" and any(line.startswith("[train] ") for line in lines)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "reward" in record] == [1]


def test_a_launch_whose_training_fails_has_its_exit_code(tmp_path):
    done = launch("--data.name", str(tmp_path / "nothing.jsonl"), "--output_dir", str(tmp_path / "run"))
    assert done.returncode == 2
    assert any(line.startswith("[train] logra: ") for line in done.stdout.splitlines())

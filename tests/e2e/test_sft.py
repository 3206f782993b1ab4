"""examples/sft.py with the real TRL: it learns, and goes on from a checkpoint as if it had not stopped."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

SCRIPT = Path(__file__).parents[2] / "examples" / "sft.py"


def sft(folder, *flags):
    command = [sys.executable, str(SCRIPT), "--output-dir", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fira", "lora_pre"])
def test_it_learns_and_resumes(name, tmp_path):
    flags = ["--optimizer", name, "--lr", "5e-3", "--steps", "40"]
    output = sft(tmp_path / "straight", *flags)
    before, after = (float(word) for word in output.rsplit("loss ", 1)[1].split(" -> "))
    assert after < 0.8 * before
    assert "AdamW (embedding)" in output and "chosen" in output
    straight = tmp_path / "straight"
    (tmp_path / "stopped").mkdir()
    (straight / "checkpoint-20").rename(tmp_path / "stopped" / "checkpoint-20")
    sft(tmp_path / "stopped", *flags, "--resume")
    ours, theirs = (load_file(f / "checkpoint-40" / "model.safetensors") for f in (tmp_path / "stopped", straight))
    assert all((ours[key] - theirs[key]).abs().max() == 0 for key in theirs)

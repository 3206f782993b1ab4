"""The command line end to end: train a tiny model, evaluate what it left, load it with transformers."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from logra import config as cfg
from logra.cli.main import main

RECIPE = str(Path(__file__).parents[2] / "recipes" / "tiny.yaml")
STEPS = {"logra": 3, "dense": 2, "lora": 2}
SMALL = ["--threads", "1", "--rollout.prompts_per_step", "4", "--eval.num_prompts", "24", "--checkpoint.every", "1"]
METRICS = {
    "step", "reward", "reward_std", "frac_reward_zero_std", "dropped", "loss", "grad_norm", "learning_rate", "entropy",
    "mismatch/kl", "mismatch/max_abs", "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/clipped_ratio", "completions/mean_terminated_length", "sampling/sampling_logp_difference/mean",
    "sampling/importance_sampling_ratio/max", "rewards/format/mean", "rewards/format/std", "skipped_steps", "updates",
    "num_updates", "num_tokens", "step_time", "time/rollout", "time/rollout_wait", "staleness/mean", "staleness/max",
    "memory/peak_bytes", "memory/mean_bytes", "memory/rss_bytes",
    "memory/gradient_peak_bytes", "memory/update_peak_bytes", "memory/weights_bytes",
}  # fmt: skip
TRUST = {"trust/predicted_kl", "trust/measured_kl", "trust/budget", "trust/scale"}
EVALUATION = {
    "eval/pass@1", "eval/avg@1", "eval/mean_length", "eval/clipped_ratio", "eval/unscored_ratio", "eval/num_prompts",
    "eval/version",
}  # fmt: skip
COLUMNS = [
    "step", "prompt_id", "rollout", "prompt", "completion", "reward", "rewards/format", "advantage", "num_tokens", "stop",
    "version",
]  # fmt: skip


@pytest.fixture(scope="module", params=list(STEPS))
def run(request, tmp_path_factory):
    """(folder, method) of a finished run."""
    method, folder = request.param, tmp_path_factory.mktemp("runs") / request.param
    lr = {"logra": "3e-3", "dense": "1e-2", "lora": "3e-2"}[method]
    flags = [
        "--method.name",
        method,
        "--method.lr",
        lr,
        "--train.steps",
        str(STEPS[method]),
        "--output_dir",
        str(folder),
    ]
    assert main(["train", RECIPE, "--plain", *SMALL, *flags]) == 0
    return folder, method


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluated(capsys, *arguments):
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_metrics_have_their_promised_names(run):
    folder, method = run
    steps = [record for record in records(folder) if "reward" in record]
    evals = [record for record in records(folder) if "eval/pass@1" in record]
    assert [record["step"] for record in steps] == [*range(1, STEPS[method] + 1)]
    assert all(record.keys() >= METRICS for record in steps)
    assert (steps[0].keys() >= TRUST) == (method == "logra")
    assert [record["step"] for record in evals] == [0, STEPS[method]]
    assert all(record.keys() == {"step", *EVALUATION} for record in evals)
    assert [record["eval/version"] for record in evals] == [0, steps[-1]["num_updates"]]
    assert steps[-1]["num_updates"] == STEPS[method] and steps[-1]["skipped_steps"] == 0


def test_completions_are_readable_and_agree_with_the_metrics(run):
    folder, method = run
    rewards = {record["step"]: record["reward"] for record in records(folder) if "reward" in record}
    files = sorted((folder / "completions").iterdir())
    assert [path.name for path in files] == [f"step_{step:06d}.parquet" for step in range(1, STEPS[method] + 1)]
    for step, path in enumerate(files, start=1):
        table = pq.read_table(path)
        assert table.column_names == COLUMNS and len(table) == 4 * 8
        assert {*table["step"].to_pylist()} == {step} and {*table["version"].to_pylist()} == {step - 1}
        assert sum(table["reward"].to_pylist()) / len(table) == pytest.approx(rewards[step])


def test_run_checkpoint_and_final_model_evaluate_as_the_run_did(run, capsys):
    folder, method = run
    last = [record for record in records(folder) if "eval/pass@1" in record][-1]
    checkpoint = folder / "checkpoints" / f"step_{STEPS[method]}"
    for model in (folder, checkpoint, checkpoint / "model", folder / "final"):
        found = evaluated(capsys, model)
        assert {key: found[key] for key in last} == last, model


def test_the_base_model_evaluates_as_the_run_did_before_training(run, capsys):
    folder, _ = run
    first = next(record for record in records(folder) if "eval/pass@1" in record)
    found = evaluated(capsys, "builtin:tiny-llama", "--recipe", folder / "config.yaml")
    labels = ("step", "eval/version")
    assert {key: found[key] for key in first if key not in labels} == {
        k: v for k, v in first.items() if k not in labels
    }


def test_training_moved_the_weights_and_the_final_model_loads(run):
    folder, method = run
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    assert model.dtype == torch.float32 and not any("lora" in name for name, _ in model.named_parameters())
    earlier = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / f"step_{STEPS[method] - 1}" / "model")
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, earlier.get_parameter(name))}
    assert moved and all("proj" in name for name in moved)
    ids = tokenizer("1 * 2 =", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()
    assert (
        tokenizer.chat_template and "# builtin:tiny-llama, trained with" in (folder / "final" / "README.md").read_text()
    )


def test_the_written_configuration_is_the_resolved_one(run):
    folder, method = run
    config = cfg.load_config(folder / "config.yaml")
    assert (config.method.name, config.train.steps, config.seed) == (method, STEPS[method], 7)
    assert cfg.load_config(folder / "config.yaml", ["--seed", "7"]) == config


def test_the_finished_run_is_not_started_again(run, capsys):
    folder, method = run
    before = records(folder)
    arguments = ["train", RECIPE, "--plain", *SMALL, "--method.name", method, "--output_dir", str(folder)]
    assert main(arguments) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert records(folder) == before


def test_a_reader_that_goes_away_ends_the_command_with_141(tmp_path):
    """As `logra train ... | head -1` does."""
    import subprocess
    import sys

    recipe = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
    command = [sys.executable, "-m", "logra", "train", str(recipe), "--output_dir", str(tmp_path / "run"), "--plain"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr.read() == b""
    process.stderr.close()

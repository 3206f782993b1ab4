"""What `logra launch` would run: commands, environments, and everything that is refused before anything starts."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from logra import config as cfg
from logra.cli import launch as launcher
from logra.cli import main as front
from logra.cli.launch_plan import Machine, make_plan, options_of, read_recipe
from logra.errors import ConfigError
from logra.rl.engines.vllm_serve import KEY_VARIABLE, SERVE_ENVIRONMENT, serve_options

ROOT = Path(__file__).parents[3]
DEMO, TINY = str(ROOT / "recipes" / "demo.yaml"), str(ROOT / "recipes" / "tiny.yaml")


def plan_of(num_train, num_rollout, *flags, gpus=8, environment=None):
    config = read_recipe(DEMO, flags, num_train, num_rollout, on_cpu=gpus is None)
    names = None if gpus is None else [f"g{number}" for number in range(gpus)]
    machine = Machine(names, "python3", ["vllm", "serve"], environment or {})
    ports = list(range(9001, 9001 + num_rollout))
    return make_plan(config, DEMO, flags, num_train, num_rollout, machine, ports)


def pairs(words):
    """What follows each option."""
    return {word: words[index + 1 : index + 2] for index, word in enumerate(words) if word.startswith("--")}


def test_one_server_for_each_gpu_and_torchrun_for_several_that_train():
    plan = plan_of(4, 4, "--method.lr", "1e-5")
    assert [server.name for server in plan.servers] == ["vllm 0", "vllm 1", "vllm 2", "vllm 3"]
    assert [server.environment["CUDA_VISIBLE_DEVICES"] for server in plan.servers] == ["g4", "g5", "g6", "g7"]
    urls = [server.url for server in plan.servers]
    assert urls == [f"http://127.0.0.1:{port}" for port in (9001, 9002, 9003, 9004)]
    words = plan.trainer.words
    assert plan.trainer.environment == {"CUDA_VISIBLE_DEVICES": "g0,g1,g2,g3"}
    assert words[:6] == ["python3", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert words[6:10] == ["-m", "logra", "train", DEMO]
    flags = words[10:]
    assert flags == [
        "--method.lr", "1e-5", "--rollout.engine", "vllm", "--rollout.vllm.url", json.dumps(urls),
    ]  # fmt: skip
    assert cfg.load_config(DEMO, flags).rollout.vllm.urls == urls
    assert plan_of(1, 1).trainer.words[:5] == ["python3", "-m", "logra", "train", DEMO]


def test_a_servers_command_has_what_the_engine_needs_and_what_the_recipe_says():
    options = {"block_size": 32, "enable_prefix_caching": False, "seed": 3, "hf_overrides": {"a": 1}}
    plan = plan_of(
        1, 4, "--rollout.vllm.tensor_parallel_size", "2", "--rollout.vllm.max_model_len", "512", "--model.dtype", "bfloat16",
        "--rollout.vllm.options", json.dumps(options), "--rollout.vllm.enforce_eager", "true", "--model.revision", "v1",
    )  # fmt: skip
    assert len(plan.servers) == 2
    first, second = plan.servers
    assert [server.environment["CUDA_VISIBLE_DEVICES"] for server in plan.servers] == ["g1,g2", "g3,g4"]
    assert first.environment.items() >= SERVE_ENVIRONMENT.items()
    assert first.words[:3] == ["vllm", "serve", "models/SmolLM2-135M-Instruct"]
    text = " ".join(first.words)
    assert " ".join(serve_options()) in text
    given = pairs(first.words)
    for option, value in {
        "--host": "127.0.0.1", "--port": "9001", "--dtype": "bfloat16", "--max-model-len": "512", "--revision": "v1",
        "--tensor-parallel-size": "2", "--max-num-seqs": "256", "--block-size": "32", "--seed": "3",
        "--hf-overrides": '{"a": 1}',
    }.items():  # fmt: skip
        assert given[option] == [value], option
    assert "--enforce-eager" in given and "--no-enable-prefix-caching" in given
    assert "--gpu-memory-utilization" not in given, "the recipe's default is for an engine beside the trainer"
    assert "--no-enable-chunked-prefill" not in given
    assert pairs(second.words)["--port"] == ["9002"]
    assert pairs(plan_of(1, 1, "--rollout.vllm.memory", "0.7").servers[0].words)["--gpu-memory-utilization"] == ["0.7"]


def test_options_are_written_as_vllm_reads_them():
    assert options_of({"a_b": True, "c": False, "d": None, "e": 1.5, "f": "x y", "g": [1]}) == [
        "--a-b", "--no-c", "--e", "1.5", "--f", "x y", "--g", "[1]",
    ]  # fmt: skip


def test_on_cpus_nothing_is_said_of_gpus():
    plan = plan_of(2, 1, gpus=None)
    assert "CUDA_VISIBLE_DEVICES" not in {**plan.servers[0].environment, **plan.trainer.environment}
    assert plan.servers[0].environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "--no-enable-chunked-prefill" in plan.servers[0].words
    assert pairs(plan.trainer.words)["--model.device"] == ["cpu"]
    mine = plan_of(1, 1, gpus=None, environment={"VLLM_CPU_KVCACHE_SPACE": "1"})
    assert "VLLM_CPU_KVCACHE_SPACE" not in mine.servers[0].environment


def test_without_servers_the_trainer_samples():
    plan = plan_of(2, 0)
    assert plan.servers == [] and plan.trainer.words[-2:] == ["--rollout.engine", "hf"]
    assert plan.trainer.environment == {"CUDA_VISIBLE_DEVICES": "g0,g1"}


def test_what_is_shown_can_be_copied_into_a_shell():
    plan = plan_of(1, 1, "--output_dir", "runs/my run", "--data.prompt_suffix", " it's\n")
    for command in (*plan.servers, plan.trainer):
        words = shlex.split(command.shown())
        settings = dict(word.split("=", 1) for word in words[: len(command.environment)])
        assert settings == command.environment and words[len(command.environment) :] == command.words
    assert plan.shown().splitlines()[0] == "# vllm 0" and "# train" in plan.shown().splitlines()


@pytest.mark.parametrize(
    ("recipe", "numbers", "flags", "message"),
    [
        (DEMO, (0, 1), [], "training needs at least 1"),
        (DEMO, (1, -1), [], "rollouts at least 0"),
        (DEMO, (1, 3), ["--rollout.vllm.tensor_parallel_size", "2"], "not divisible by rollout.vllm.tensor_parallel"),
        (DEMO, (1, 1), ["--rollout.vllm.url", "http://elsewhere:1"], "starts the vLLM servers and sets"),
        (DEMO, (1, 1), ["--rollout.engine", "vllm"], "leave them out"),
        (DEMO, (1, 1), ["--rollout.vllm.colocated", "true"], "servers have their own"),
        (DEMO, (1, 1), ["--rollout.vllm.fetch", "true", "--sync.serve", "true"], "for servers elsewhere"),
        (DEMO, (1, 1), ["--rollout.vllm.options", "{port: 1}"], "port cannot be given there"),
        (DEMO, (1, 1), ["--method.name", "dense"], "follows the trainer by Updates"),
        (DEMO, (1, 1), ["--method.lrr", "1"], "did you mean 'lr'"),
        (TINY, (1, 1), [], "has no folder that a vLLM server could load"),
        (DEMO, (6, 4), [], "6 [+] 4 GPUs are asked for, and 8 are there"),
        ("nowhere.yaml", (1, 1), [], "no recipe at nowhere.yaml"),
    ],
)
def test_what_cannot_run_is_refused_with_the_fix(recipe, numbers, flags, message):
    with pytest.raises(ConfigError, match=message):
        config = read_recipe(recipe, flags, *numbers, on_cpu=False)
        gpus = [str(number) for number in range(8)]
        make_plan(config, recipe, flags, *numbers, Machine(gpus, "python3", ["vllm", "serve"]), [1, 2, 3, 4])


def test_a_recipe_whose_own_url_is_set_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(Path(DEMO).read_text().replace("rollout:\n", "rollout:\n  vllm: {url: 'http://127.0.0.1:1'}\n"))
    with pytest.raises(ConfigError, match="leave them out"):
        read_recipe(str(path), [], 1, 1, on_cpu=True)
    assert read_recipe(str(path), [], 1, 0, on_cpu=True).rollout.engine == "hf"


def test_rollouts_ahead_are_checked_as_they_will_run():
    assert read_recipe(DEMO, ["--rollout.async", "1"], 1, 1, on_cpu=True).rollout.ahead == 1


def test_a_dry_run_prints_the_commands_alone(capsys, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "a-secret-of-ours")
    monkeypatch.chdir(ROOT)
    assert front.main(["launch", DEMO, "--train_gpus", "2", "--rollout-gpus=2", "--dry-run", "--train.steps", "3"]) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if not line.startswith("#")]
    assert len(lines) == 3 and "secret" not in printed and KEY_VARIABLE in printed
    ports = [pairs(shlex.split(line))["--port"][0] for line in lines[:2]]
    assert ports[0] != ports[1]
    assert pairs(shlex.split(lines[2]))["--nproc-per-node"] == ["2"] and "--train.steps 3" in lines[2]


def test_a_package_that_lacks_or_a_python_that_does_not_answer_is_named(tmp_path):
    launcher.check_packages(sys.executable, ("json", "logra"))
    with pytest.raises(ConfigError, match=r"no package vllm.*logra\[vllm\].*--vllm-python"):
        launcher.check_packages(sys.executable, ("vllm_of_a_name_that_is_none",) and _without_vllm())
    with pytest.raises(ConfigError, match="does not answer"):
        launcher.check_packages(str(tmp_path / "python"), ("vllm",))


def _without_vllm():
    if launcher._ask(sys.executable, launcher._FIND.format(names=["vllm"])) == "[]":
        pytest.skip("vLLM is installed here")
    return ("vllm",)


def test_gpus_are_those_that_are_visible(monkeypatch):
    monkeypatch.setattr(launcher, "_ask", lambda python, code: "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launcher.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert launcher.visible_gpus() == ["GPU-a", "GPU-b"]
    monkeypatch.setattr(launcher, "_ask", lambda python, code: "0")
    assert launcher.visible_gpus() == []


def test_vllm_is_started_by_its_script_where_there_is_one(tmp_path):
    python = tmp_path / "python"
    python.write_text("")
    os.chmod(python, 0o755)
    assert launcher.serve_command(str(python), False) == [str(python), "-m", "vllm.entrypoints.cli.main", "serve"]
    (tmp_path / "vllm").write_text("")
    assert launcher.serve_command(str(python), False) == [str(tmp_path / "vllm"), "serve"]
    assert launcher.serve_command(str(python), True)[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]


def test_free_ports_are_different():
    ports = launcher.free_ports(5)
    assert len({*ports}) == 5 and launcher.free_ports(0) == []

"""`logra eval`: which model is meant, by which configuration, and what is printed and written."""

import json
import shutil

import pyarrow.parquet as pq
import pytest

from logra import config as cfg
from logra.cli import evaluate as subject
from logra.cli.main import main
from logra.errors import ModelError
from logra.rl.checkpoint import CheckpointStore
from logra.rl.export import export_model
from logra.rl.run_dir import RunDir
from logra.rl.tiny import char_tokenizer, tiny_model

RECIPE = """
threads: 1
model: {{name_or_path: 'builtin:tiny-llama'}}
data: {{name: '{train}', answer_column: gold}}
reward: {{functions: [{{function: format, params: {{pattern: '[0-9]', mode: search}}}}], workers: 1}}
rollout: {{max_new_tokens: 4}}
eval: {{data: {{name: '{test}'}}, rollouts_per_prompt: 2, ks: [1, 2], temperature: 1.0}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    for name, numbers in (("train", range(4)), ("test", range(4, 9))):
        rows = [{"prompt": f"{i}+{i}=", "gold": str(2 * i)} for i in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(train=folder / "train.jsonl", test=folder / "test.jsonl"))
    return path


@pytest.fixture
def run(recipe, tmp_path):
    """A run with checkpoints of steps 2 and 4; they hold the models of seeds 2 and 4."""
    folder = RunDir(tmp_path / "run")
    folder.path.mkdir()
    folder.write_config(cfg.to_yaml(cfg.load_config(recipe)))
    folder.metrics.write_text(
        '{"step": 2, "num_updates": 1}\n{"step": 4, "num_updates": 3}\n{"step": 4, "eval/pass@1": 0}\n'
    )
    for step in (2, 4):
        CheckpointStore(folder.checkpoints).save(
            step, tensors={}, state={}, write_model=lambda path, step=step: export(path, step)
        )
    return folder.path


def export(folder, step):
    export_model(tiny_model(seed=step, spread=0.1), char_tokenizer(), folder, card={"steps": step})


def evaluated(capsys, *arguments):
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    assert main(["eval", *map(str, arguments)]) == 2
    return capsys.readouterr().err


# -- which model ---------------------------------------------------------------------------------------------


def test_a_run_means_its_newest_checkpoint(run):
    source = subject.find_source(str(run))
    assert (source.model, source.run, source.step) == (str(run / "checkpoints/step_4/model"), run, 4)
    assert "step_4" in source.notes[-1]
    assert subject.version_of(source) == 3


def test_a_checkpoint_that_is_not_whole_is_passed_over_and_named(run):
    (run / "checkpoints/step_4/manifest.json").unlink()
    source = subject.find_source(str(run))
    assert source.step == 2 and subject.version_of(source) == 1
    assert "step_4" in source.notes[0] and "passed over" in source.notes[0]


def test_the_final_model_is_taken_only_when_it_is_newer(run):
    export(run / "final", 4)
    assert subject.find_source(str(run)).model.endswith("step_4/model")
    export(run / "final", 6)
    source = subject.find_source(str(run))
    assert (source.model, source.step, subject.version_of(source)) == (str(run / "final"), 6, None)
    shutil.rmtree(run / "checkpoints")
    export(run / "final", 2)
    assert subject.find_source(str(run)).step == 2


@pytest.mark.parametrize("part", ["checkpoints/step_2", "checkpoints/step_2/model"])
def test_a_checkpoint_is_verified_and_knows_its_run(part, run, monkeypatch):
    monkeypatch.chdir(run.parent)
    source = subject.find_source(f"run/{part}")
    assert (source.step, source.run) == (2, run)
    weights = run / "checkpoints/step_2/model/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match="sha256 differs"):
        subject.find_source(f"run/{part}")


def test_a_model_folder_knows_its_run_only_where_runs_keep_models(run, recipe):
    export(run / "final", 4)
    assert subject.find_source(str(run / "final")).run == run
    export(run / "other", 4)
    assert subject.find_source(str(run / "other")) == subject.Source(str(run / "other"))


def test_a_hub_name_and_a_built_in_model_belong_to_no_run():
    for name in ("gpt2", "some-org/some-model", "builtin:tiny-llama"):
        assert subject.find_source(name) == subject.Source(name)


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    with pytest.raises(ModelError, match="did you mean run/checkpoints"):
        subject.find_source("run/checkpoint")
    for name in ("./nothing", "/nothing/at/all", "a/b/c"):
        with pytest.raises(ModelError, match="there is no folder"):
            subject.find_source(name)
    with pytest.raises(ModelError, match="is a file"):
        subject.find_source("run/config.yaml")
    with pytest.raises(ModelError, match="no run folder"):
        subject.find_source("run/checkpoints")


# -- mistakes ------------------------------------------------------------------------------------------------


def test_mistakes_end_with_2_and_their_fix(run, recipe, tmp_path, capsys):
    tiny = "builtin:tiny-llama"
    assert "add --recipe" in refused(capsys, tiny)
    assert "no recipe at" in refused(capsys, tiny, "--recipe", tmp_path / "none.yaml")
    assert "no eval section" in refused(capsys, run, "--eval", "null")
    assert "leave out --model.name_or_path" in refused(capsys, run, "--model.name_or_path", "x")
    assert "did you mean 'num_prompts'" in refused(capsys, run, "--eval.num_promts", 5)
    assert "name a .parquet file" in refused(capsys, run, "--output", tmp_path / "out.csv")
    assert "make it first" in refused(capsys, run, "--output", tmp_path / "none" / "out.parquet")
    assert "training prompts" in refused(capsys, run, "--eval.data", "{}")
    assert "cannot load the model 'no-such-model'" in refused(capsys, "no-such-model", "--recipe", recipe)


def test_unusable_checkpoints_end_with_2(run, capsys):
    (run / "checkpoints/step_4/manifest.json").unlink()
    assert "did not finish" in refused(capsys, run / "checkpoints/step_4")
    shutil.rmtree(run / "checkpoints/step_2")
    err = refused(capsys, run)
    assert "no whole checkpoint" in err and "passed over" in err and "step_4" in err
    CheckpointStore(run / "checkpoints").save(5, tensors={}, state={})
    assert "holds no model" in refused(capsys, run)


# -- what comes out ------------------------------------------------------------------------------------------


def test_the_checkpoints_weights_are_what_is_evaluated(run, recipe, tmp_path, capsys):
    def completions(*arguments):
        output = tmp_path / "out.parquet"
        found = evaluated(capsys, *arguments, "--output", output, "--eval.max_new_tokens", 30)
        return found, pq.read_table(output)["completion"].to_pylist()

    own, own_texts = completions(run)
    assert (own["step"], own["eval/version"], own["eval/num_prompts"]) == (4, 3, 5)
    assert own["model"] == str(run / "checkpoints/step_4/model")
    base, base_texts = completions("builtin:tiny-llama", "--recipe", recipe, "--seed", 4)
    assert (base["step"], base["eval/version"]) == (None, None)
    labels = ("model", "step", "eval/version")
    assert {k: v for k, v in own.items() if k not in labels} == {k: v for k, v in base.items() if k not in labels}
    assert own_texts == base_texts
    assert completions(run / "checkpoints/step_2")[1] != own_texts


def test_equal_seeds_give_equal_rollouts_and_other_seeds_do_not(run, tmp_path, capsys):
    tables = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        evaluated(capsys, run, "--output", tmp_path / f"{name}.parquet", "--eval.seed", seed)
        tables.append(pq.read_table(tmp_path / f"{name}.parquet"))
    assert tables[0].equals(tables[1])
    assert not tables[0].equals(tables[2])


def test_the_written_rollouts_agree_with_what_is_printed(run, tmp_path, capsys):
    output = tmp_path / "out.parquet"
    output.write_text("an older file")
    found = evaluated(capsys, run, "--output", output, "--eval.num_prompts", 3)
    rows = pq.read_table(output).to_pylist()
    assert {path.name for path in tmp_path.iterdir()} == {"out.parquet", "run"}
    assert len(rows) == 6 and found["eval/num_prompts"] == 3
    assert [*rows[0]] == [
        "step", "prompt_id", "rollout", "prompt", "completion", "reward", "rewards/format", "advantage", "num_tokens",
        "stop", "version",
    ]  # fmt: skip
    assert {(row["step"], row["version"], row["advantage"]) for row in rows} == {(4, 3, None)}
    assert sum(row["reward"] for row in rows) / 6 == pytest.approx(found["eval/avg@2"])
    solved = [max(row["reward"] for row in rows[i : i + 2]) for i in range(0, 6, 2)]
    assert sum(solved) / 3 == pytest.approx(found["eval/pass@2"])
    assert sum(row["num_tokens"] for row in rows) / 6 == pytest.approx(found["eval/mean_length"])


def test_a_disk_that_is_full_leaves_the_older_file(run, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out.parquet"
    output.write_text("an older file")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("logra.rl.run_dir.write_atomic", full)
    assert "No space left" in refused(capsys, run, "--output", output)
    assert output.read_text() == "an older file"
    assert {path.name for path in tmp_path.iterdir()} == {"out.parquet", "run"}


def test_the_table_names_what_was_evaluated_and_its_numbers(run, capsys):
    assert main(["eval", str(run), "--eval.num_prompts", "2"]) == 0
    shown = capsys.readouterr()
    lines = {line[:16].strip(): line[16:].strip() for line in shown.out.splitlines()}
    assert lines["step"] == "4" and lines["policy version"] == "3" and lines["prompts"] == "2 x 2 rollouts"
    assert {"pass@1", "pass@2", "avg@2", "mean length", "clipped ratio", "unscored ratio"} <= lines.keys()
    assert f"evaluating {run}/checkpoints/step_4" in shown.err


def test_a_run_in_progress_can_be_evaluated_and_is_left_alone(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with RunDir(run) as training:
        training.open("auto")
        assert evaluated(capsys, run)["step"] == 4
        with pytest.raises(ValueError, match="being written"):
            RunDir(run).open("auto")
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    del after[run / ".lock"]
    assert {path: t for path, t in after.items() if path != run} == {
        path: t for path, t in before.items() if path != run
    }


def test_reward_workers_end_when_the_evaluation_fails(run, capsys, monkeypatch):
    closed = []
    from logra.rl.rewards.pool import RewardPool

    close = RewardPool.close
    monkeypatch.setattr(RewardPool, "close", lambda self: closed.append(self) or close(self))
    assert "max_position_embeddings" in refused(capsys, run, "--eval.max_new_tokens", 500)
    assert len(closed) == 1


def test_an_exported_models_own_chat_template_is_used(run, capsys):
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("chat_template: null", "chat_template: gone.jinja"))
    assert "gone.jinja" in config.read_text()
    assert evaluated(capsys, run)["step"] == 4
    assert "gone.jinja" in refused(capsys, run, "--model.chat_template", "gone.jinja")

"""What a user can get wrong in `logra train`: exit code 2, a message with the fix, and nothing half-written."""

import json

import pytest

from logra.cli.main import main
from logra.rl.tiny import char_tokenizer, tiny_model

RECIPE = """
threads: 1
model: {{name_or_path: 'builtin:tiny-llama'}}
data: {{name: '{data}', answer_column: gold}}
reward: {{functions: [{{function: format, params: {{pattern: '^[0-9]'}}}}], workers: 1}}
rollout: {{prompts_per_step: 2, rollouts_per_prompt: 2, max_new_tokens: 2}}
method: {{rank: 8}}
train: {{steps: 1}}
"""


@pytest.fixture
def recipe(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "gold": str(2 * i)}) + "\n" for i in range(4)))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(data=data))
    return path


@pytest.fixture(scope="module")
def model_without_template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tokenizer = char_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


def refused(capsys, recipe, out, *flags):
    """The message of a refused run; at most an empty folder with its lock is left of it."""
    assert main(["train", str(recipe), "--plain", "--output_dir", str(out), *flags]) == 2
    assert not out.exists() or {path.name for path in out.iterdir()} <= {".lock"}
    err = capsys.readouterr().err
    assert err.startswith("logra: ") and "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method.rnak", "8"], "did you mean 'rank'?"),
        (["--train.rank", "8"], "did you mean method.rank?"),
        (["--dryrun", "true"], "dryrun: unknown key"),
        (["--method.lr", "banana"], "method.lr: Input should be a valid number"),
        (["--method.lr", "-1e-5"], "greater than 0"),
        (["--train.steps"], "--train.steps needs a value"),
        (["--rollout.top_p", "0.9"], "leave top_p at 1"),
        (["--rollout.prompts_per_step", "3", "--algorithm.updates_per_step", "2"], "not divisible"),
        (["--data.prompt_column", "question"], "set prompt_column to one of the columns found, ['prompt', 'gold']"),
        (["--data.answer_column", "solution"], "set answer_column to one of"),
        (["--data.name", "./no.jsonl"], "no such file"),
        (["--data.max_prompt_tokens", "1"], "raise data.max_prompt_tokens"),
        (["--reward.functions.0.function", "formt"], "did you mean"),
        (["--reward.functions.0.function", "no_module.reward"], "no module 'no_module'"),
        (["--method.rank", "65"], "use rank <= 64"),
        (["--method.targets", "[nothing]"], "nothing"),
        (["--model.name_or_path", "builtin:tiny-bert"], "use builtin:tiny-llama"),
        (["--model.name_or_path", "./no/model"], "no config.json"),
        (["--model.chat_template", "no_file.jinja"], "neither a file nor a Jinja template"),
        (["--eval.num_prompts", "2"], "eval would use the training prompts"),
        (["--resume", "no_checkpoint"], "neither a checkpoint"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(flags, words, recipe, tmp_path, capsys):
    assert words in refused(capsys, recipe, tmp_path / "run", *flags)


def test_a_missing_recipe_is_refused(tmp_path, capsys):
    assert "no recipe at" in refused(capsys, tmp_path / "none.yaml", tmp_path / "run")


def test_messages_without_a_chat_template_are_refused(recipe, model_without_template, tmp_path, capsys):
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "gold": "2"}) + "\n")
    flags = ["--model.name_or_path", str(model_without_template), "--data.name", str(chat)]
    assert "the prompt is a list of messages" in refused(capsys, recipe, tmp_path / "run", *flags)


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(recipe, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "config.yaml").write_text("seed: 1\n")
    assert main(["train", str(recipe), "--output_dir", str(run)]) == 2
    assert "resume=auto" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n' and (run / "config.yaml").read_text() == "seed: 1\n"
    assert {path.name for path in run.iterdir()} == {".lock", "metrics.jsonl", "config.yaml"}


def test_an_output_dir_that_cannot_be_made_is_refused(recipe, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert main(["train", str(recipe), "--output_dir", str(tmp_path / "file" / "run")]) == 2
    assert "Choose another output_dir" in capsys.readouterr().err

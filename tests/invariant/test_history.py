"""The journal of a run: the policy at any step bit for bit, and a killed run continued at its last finished step."""

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from logra import config as cfg
from logra.build import build_run
from logra.cli.main import main
from logra.errors import CheckpointError, ConfigError, UpdateError
from logra.rl.tiny import char_tokenizer, tiny_model
from logra.sketch.block import blocks_of, digest
from logra.sync import HttpSource, Replica, Subscriber
from logra.sync.journal import Journal
from logra.sync.packet import Packet

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
TIMES = {"step_time", "time/rollout", "time/rollout_wait"}  # and the memory of the process
SMALL = {
    "train.steps": 4,
    "eval": None,
    "rollout.prompts_per_step": 4,
    "rollout.rollouts_per_prompt": 4,
    "checkpoint.every": 0,
    "log.completions": False,
}
ALIGNED = {"method.basis": "aligned", "method.refresh_every": 3}


@pytest.fixture(params=["random", "aligned"])
def basis(request, monkeypatch):
    """The tests that use it run with drawn bases, and with aligned ones, which Updates bring only where they are new."""
    for name, value in ALIGNED.items() if request.param == "aligned" else ():
        monkeypatch.setitem(SMALL, name, value)
    return request.param


def settings(folder, **flags):
    return cfg.make_config(cfg.apply_overrides(cfg.read_yaml(RECIPE), {"output_dir": str(folder)} | SMALL | flags))


def train(folder, stop=None, on_step=None, **flags):
    """Run; stop: after so many steps of the plan, as a kill would. Returns the trainer."""
    run = build_run(settings(folder, **flags))
    try:
        if on_step is not None:
            run.trainer.listeners.append(on_step(run))
        if stop is None:
            run.fit()
        else:
            object.__setattr__(run.trainer.plan, "steps", stop)
            object.__setattr__(run.trainer.plan, "checkpoint_every", 0)
            run.trainer.fit()
        return run.trainer
    finally:
        run.close()


def records(folder):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in TIMES and not k.startswith("memory/")} for line in lines
    ]


class Digests:
    """Listens: the digest of all that can move, after each step."""

    def __init__(self, run):
        self.method, self.found = run.trainer.method, [run.trainer.method.digest()]
        Digests.last = self.found

    def on_step(self, step, metrics):
        self.found.append(self.method.digest())

    def on_eval(self, step, result):
        pass


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"method.weights": "split", "model.dtype": "bfloat16", "method.residual": "cpu"},
        {"model.name_or_path": "builtin:tiny-gpt2", "method.dense_params": ["norms", "head"]},
        ALIGNED | {"method.dense_params": ["norms"]},
    ],
    ids=["fp32", "split", "gpt2 with dense parameters", "aligned"],
)
def test_any_step_of_100_is_rebuilt_bit_for_bit(flags, tmp_path, capsys):
    """Checkpoints every 40 steps, anchors every 30, and neither: the journal leads to every step, from wherever is nearest."""
    run = tmp_path / "run"
    flags |= {"train.steps": 100, "checkpoint.every": 40, "journal.anchor_every": 30, "rollout.max_new_tokens": 4}
    flags |= {"rollout.prompts_per_step": 2}
    trainer = train(run, on_step=Digests, **flags)
    digests = Digests.last
    assert len(digests) == 101 and len(set(digests)) > 50  # a step without signal moves nothing
    with Journal.open(run / "journal") as journal:
        names = [name for name, _, _ in journal.info().targets]
        every = [journal.version_at(step) for step in range(101)]
        assert [r["num_updates"] for r in records(run)] == every[1:]
        size = journal.info().packet_bytes
    chosen = [0, 1, 100, *random.Random(3).sample(range(2, 100), 9)]
    for step in chosen:
        folder = tmp_path / f"at{step}"
        assert main(["checkout", str(run), "--step", str(step), "--output", str(folder)]) == 0
        assert digest(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), names) == digests[step], step
        assert digests[step] in capsys.readouterr().out
    checkpoint = sum(f.stat().st_size for f in (run / "checkpoints").glob("step_100/**/*") if f.is_file())
    print(f"bytes: {size:,} an update in the journal, {checkpoint:,} a checkpoint: {checkpoint / size:.1f} times")
    assert trainer.method.digest() == digests[100]
    assert size < checkpoint


@pytest.mark.usefixtures("basis")
@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("weights", ["fp32", "split"])
def test_resumed_at_the_last_step_without_a_checkpoint_there(every, weights, tmp_path):
    """Stopped after step 4: only the journal knows of it. The next start continues with step 5, bit for bit."""
    flags = {
        "train.steps": 5,
        "method.weights": weights,
        "model.dtype": "bfloat16" if weights == "split" else "float32",
    }
    straight = train(tmp_path / "straight", **flags)
    folder = tmp_path / "stopped"
    train(folder, stop=3, **flags)
    if every:
        run = build_run(settings(folder, resume="auto", **flags))
        run.trainer.save()  # a checkpoint of step 3
        run.close()
    train(folder, stop=4, resume="auto", **flags)
    run = build_run(settings(folder, resume="auto", **flags))
    assert run.trainer.step == 4
    run.close()
    resumed = train(folder, resume="auto", **flags)
    assert resumed.method.digest() == straight.method.digest()
    assert records(folder) == records(tmp_path / "straight")
    with Journal.open(folder / "journal") as one, Journal.open(tmp_path / "straight" / "journal") as other:
        assert one.next == other.next == straight.method.num_updates


@pytest.mark.usefixtures("basis")
def test_going_back_to_a_named_checkpoint_drops_the_later_history(tmp_path):
    flags = {"train.steps": 6, "checkpoint.every": 3}
    straight = train(tmp_path / "straight", **flags)
    folder = tmp_path / "run"
    train(folder, **flags)
    resumed = train(folder, resume=str(folder / "checkpoints" / "step_3"), **flags)
    assert resumed.method.digest() == straight.method.digest()
    with Journal.open(folder / "journal") as journal:
        assert journal.next == straight.method.num_updates
        assert journal.steps() == sorted(set(journal.steps()))


class Follower(threading.Thread):
    """A subscriber over HTTP in this process, slower than the trainer. stranger: with other weights."""

    def __init__(self, folder, name, stranger=False):
        super().__init__(daemon=True)
        self.folder, self.who = folder, name
        self.model = tiny_model(seed=8 if stranger else 7, spread=0.1)  # not in the thread: torch has one generator
        self.error = self.digest = self.version = None

    def run(self):
        try:
            self.follow()
        except Exception as error:
            self.error = error

    def follow(self):
        token = self.folder / "sync_token"
        while not token.exists():
            time.sleep(0.01)
        with HttpSource(f"http://127.0.0.1:{PORT}", token.read_text().strip(), patience_s=60) as source:
            names = [name for name, _, _ in source.info().targets]
            subscriber = Subscriber(source, Replica(blocks_of(self.model, names)), self.who)
            subscriber.sync()
            while subscriber.version < 4:
                time.sleep(1.0)
                subscriber.sync()
            self.version, self.digest = subscriber.version, subscriber.replica.digest()


with socket.socket() as _free:
    _free.bind(("127.0.0.1", 0))
    PORT = _free.getsockname()[1]


def test_subscribers_of_a_run_reach_its_end_and_a_stranger_is_only_logged(tmp_path, caplog):
    folder = tmp_path / "run"
    follower, stranger = Follower(folder, "evaluator"), Follower(folder, "stranger", stranger=True)
    follower.start()
    stranger.start()
    flags = {"sync.serve": True, "sync.port": PORT, "sync.subscribers": 1, "sync.timeout_s": 60.0}
    trainer = train(folder, **flags)
    follower.join(timeout=60)
    stranger.join(timeout=60)
    assert follower.error is None and follower.digest == trainer.method.digest()
    assert "another base model" in str(stranger.error) and "stranger" in caplog.text
    assert "not at its last version: evaluator" not in caplog.text
    assert (folder / "sync_token").stat().st_mode & 0o777 == 0o600
    secret = (folder / "sync_token").read_text().strip()
    assert secret not in caplog.text and secret not in (folder / "config.yaml").read_text()


def test_nobody_comes(tmp_path):
    flags = {"sync.serve": True, "sync.subscribers": 1, "sync.timeout_s": 0.2}
    with pytest.raises(UpdateError, match="1 more of 1 subscribers"):
        train(tmp_path / "run", **flags)
    assert train(tmp_path / "run").step == 4  # nothing had begun: the folder is free


@pytest.mark.usefixtures("basis")
def test_going_back_leaves_an_anchor_for_subscribers_that_were_further_on(tmp_path):
    folder = tmp_path / "run"
    train(folder, **{"checkpoint.every": 2})
    run = build_run(
        settings(folder, resume=str(folder / "checkpoints" / "step_2"), **{"sync.serve": True, "checkpoint.every": 2})
    )
    try:
        assert [a.version for a in run.history.journal.anchors] == [2] and run.history.journal.next == 2
    finally:
        run.close()


def test_checkout_from_another_directory_finds_a_relative_model(tmp_path, monkeypatch):
    (tmp_path / "here" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    char_tokenizer().save_pretrained("base")
    tiny_model(seed=7, spread=0.1).save_pretrained("base")
    train("run", **{"model.name_or_path": "base"})
    monkeypatch.chdir(tmp_path)
    assert main(["checkout", "here/run", "--step", "2"]) == 0


def test_a_damaged_state_falls_back_to_the_checkpoint(tmp_path, caplog):
    straight = train(tmp_path / "straight")
    folder = tmp_path / "run"
    train(folder, stop=3)
    run = build_run(settings(folder, resume="auto"))
    run.trainer.save()
    run.close()
    train(folder, stop=4, resume="auto")
    state = next((folder / "journal").glob("state_*.safetensors"))
    state.write_bytes(b"half" + state.read_bytes()[4:])
    run = build_run(settings(folder, resume="auto"))
    assert run.trainer.step == 3 and "damaged" in caplog.text
    run.close()
    assert train(folder, resume="auto").method.digest() == straight.method.digest()


@pytest.mark.usefixtures("basis")
def test_a_new_folder_from_another_runs_checkpoint_begins_its_own_journal(tmp_path):
    flags = {"train.steps": 6, "checkpoint.every": 4}
    straight = train(tmp_path / "straight", on_step=Digests, **flags)
    digests = Digests.last
    branch = tmp_path / "branch"
    train(branch, resume=str(tmp_path / "straight" / "checkpoints" / "step_4"), **flags | {"checkpoint.every": 0})
    with Journal.open(branch / "journal") as journal:
        info = journal.info()
        assert info.origin == info.anchors[0].version > 0 and info.base == digests[4]
    for step in (4, 5, 6):
        assert main(["checkout", str(branch), "--step", str(step)]) == 0
        model = AutoModelForCausalLM.from_pretrained(branch / "checkouts" / f"step_{step}", dtype=torch.float32)
        assert digest(model, straight.method.sketcher.names) == digests[step]
    assert main(["checkout", str(branch), "--step", "3"]) == 2


@pytest.mark.usefixtures("basis")
@pytest.mark.parametrize("every", [0, 2])
def test_a_branch_killed_before_its_own_checkpoint_goes_on(every, tmp_path, capsys):
    """Its journal begins with an anchor; the base model alone does not lead there."""
    flags = {"train.steps": 5, "algorithm.updates_per_step": 2}
    straight = train(tmp_path / "straight", **flags | {"checkpoint.every": 2, "checkpoint.keep": 5})
    branch, source = tmp_path / "branch", str(tmp_path / "straight" / "checkpoints" / "step_2")
    flags["checkpoint.every"] = every
    run = build_run(settings(branch, resume=source, **flags))
    run.close()
    with pytest.raises(CheckpointError, match="start again as the run was started"):
        build_run(settings(branch, resume="auto", **flags))
    run = build_run(settings(branch, resume=source, **flags))  # the same command once more
    object.__setattr__(run.trainer.plan, "steps", 3)
    object.__setattr__(run.trainer.plan, "checkpoint_every", 0)
    run.trainer.fit()
    run.close()
    assert train(branch, resume="auto", **flags).method.digest() == straight.method.digest()
    assert main(["checkout", str(branch), "--step", "5"]) == 0
    for anchor in (branch / "journal").glob("anchor_*"):
        anchor.unlink()
    for checkpoint in (branch / "checkpoints").glob("step_*"):
        checkpoint.rename(tmp_path / f"gone_{checkpoint.name}")
    capsys.readouterr()
    assert main(["checkout", str(branch), "--step", "5", "--output", str(tmp_path / "again")]) == 2
    assert "anchor that is gone" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="gone or damaged"):
        build_run(settings(branch, resume="auto", **flags))


@pytest.mark.parametrize("kind", ["fp32", "split", "split beside"])
def test_the_kl_to_the_reference_is_zero_in_the_first_step(kind, tmp_path):
    flags = {"algorithm.kl_coef": 0.05, "model.name_or_path": "builtin:tiny-gpt2", "train.steps": 1}
    flags |= {} if kind == "fp32" else {"method.weights": "split", "model.dtype": "bfloat16"}
    flags |= {"method.dense_params": ["norms", "embeddings"]} if kind == "split beside" else {}
    train(tmp_path / "run", **flags)
    assert records(tmp_path / "run")[0]["kl"] == 0.0


@pytest.mark.parametrize("changed", ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_other_base_weights_are_refused(tmp_path, changed):
    """Trained ones, and frozen ones, which no Update would ever show."""
    model, tokenizer = tmp_path / "model", __import__("logra.rl.tiny", fromlist=["x"])
    tokenizer.char_tokenizer().save_pretrained(model)
    tokenizer.tiny_model(seed=7, spread=0.1).save_pretrained(model)
    flags = {"model.name_or_path": str(model)}
    train(tmp_path / "run", stop=2, **flags)
    other = tokenizer.tiny_model(seed=7, spread=0.1)
    other.get_parameter(changed).data[3, 5] += 0.01
    other.save_pretrained(model)
    with pytest.raises(UpdateError, match=r"not those that .* began with"):
        build_run(settings(tmp_path / "run", resume="auto", **flags))
    assert main(["checkout", str(tmp_path / "run"), "--step", "1"]) == 2


def test_a_reference_is_only_taken_from_the_same_base(tmp_path):
    folder, model = tmp_path / "model", tiny_model(seed=7, spread=0.1)
    char_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    flags = {"model.name_or_path": str(folder), "algorithm.kl_coef": 0.05, "checkpoint.every": 2}
    straight = train(tmp_path / "straight", **flags)
    train(tmp_path / "run", **flags | {"train.steps": 2})
    model.get_parameter("model.layers.1.mlp.down_proj.weight").data[0, 0] += 0.5
    model.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="not the model this run began with"):
        build_run(settings(tmp_path / "run", resume="auto", **flags))
    model.get_parameter("model.layers.1.mlp.down_proj.weight").data[0, 0] -= 0.5
    tiny_model(seed=7, spread=0.1).save_pretrained(folder)
    assert train(tmp_path / "run", resume="auto", **flags).method.digest() == straight.method.digest()


def test_a_run_with_a_journal_is_not_continued_without_it(tmp_path):
    train(tmp_path / "run", stop=2)
    with pytest.raises(ConfigError, match=r"journal\.enabled"):
        build_run(settings(tmp_path / "run", resume="auto", **{"journal.enabled": False}))


def damage(folder, what):
    """Harm a journal: its tail, its state, its header, or an Update in the middle. `segments` may be several files."""
    journal = folder / "journal"
    segment = max(journal.glob("segment_*"))
    if what == "lost tail":
        segment.write_bytes(segment.read_bytes()[: segment.stat().st_size // 2])
    elif what == "lost updates":
        segment.unlink()
    elif what == "state":
        flip(journal / "state.json")
    elif what == "header":
        flip(journal / "header.json")
    elif what == "no header":
        (journal / "header.json").unlink()
    else:
        flip(segment)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = ["lost tail", "lost updates", "state", "header", "no header", "update"]


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_journal_never_drops_history_silently(what, tmp_path):
    """Without a checkpoint to fall back on, going on is refused; the files stay as they are."""
    folder = tmp_path / "run"
    train(folder, stop=4)
    damage(folder, what)
    before = {p.name: p.read_bytes() for p in (folder / "journal").iterdir() if p.is_file()}
    with pytest.raises(CheckpointError, match="no checkpoint"):
        build_run(settings(folder, resume="auto", **{"train.steps": 6}))
    after = {p.name: p.read_bytes() for p in (folder / "journal").iterdir() if p.is_file()}
    assert {n: b for n, b in after.items() if n in before and not n.startswith(".")} == {
        n: b for n, b in before.items() if not n.startswith(".")
    }


@pytest.mark.parametrize("what", DAMAGES)
def test_with_a_checkpoint_a_damaged_journal_is_no_hindrance(what, tmp_path, caplog):
    straight = train(tmp_path / "straight", **{"train.steps": 6})
    folder = tmp_path / "run"
    flags = {"train.steps": 6, "checkpoint.every": 3}
    run = build_run(settings(folder, **flags))
    object.__setattr__(run.trainer.plan, "steps", 5)
    run.trainer.fit()
    run.close()
    for step in set(range(6)) - {3}:
        assert not (folder / "checkpoints" / f"step_{step}").exists() or step == 5
    damage(folder, what)
    resumed = train(folder, resume="auto", **flags)
    assert resumed.method.digest() == straight.method.digest()
    assert records(folder) == records(tmp_path / "straight")


@pytest.mark.parametrize("what", ["lost tail", "lost updates", "state", "update"])
def test_checkout_and_verify_notice_what_is_missing(what, tmp_path, capsys):
    folder = tmp_path / "run"
    train(folder)
    assert main(["journal", str(folder), "--verify"]) == 0
    damage(folder, what)
    assert main(["journal", str(folder), "--verify"]) == 2
    assert main(["checkout", str(folder), "--step", "4"]) == (0 if what == "state" else 2)
    assert what == "state" or not (folder / "checkouts").exists()


def test_a_start_that_made_no_update_leaves_no_run(tmp_path):
    run = build_run(settings(tmp_path / "run"))
    run.close()
    other = settings(tmp_path / "run", **{"method.dense_params": ["norms"]})  # not even of the same targets
    build_run(other).close()
    assert train(tmp_path / "run").step == 4


def test_the_last_update_carries_a_digest(tmp_path):
    trainer = train(tmp_path / "run")
    with Journal.open(tmp_path / "run" / "journal") as journal:
        packets = [Packet.from_bytes(journal.read(i)) for i in range(journal.next)]
    assert [p.digest for p in packets[:-1]] == [None] * 3 and packets[-1].digest == trainer.method.digest()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--step", "9"], "steps 0 to 4"),
        (["--step", "-1"], "steps 0 to 4"),
        (["--step", "1", "--output", "{run}/final"], "exists already"),
    ],
)
def test_bad_checkouts(arguments, words, tmp_path, capsys):
    train(tmp_path / "run")
    arguments = [a.replace("{run}", str(tmp_path / "run")) for a in arguments]
    assert main(["checkout", str(tmp_path / "run"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkouts").exists()


def test_runs_without_a_journal_say_so(tmp_path, capsys):
    train(tmp_path / "run", **{"method.name": "dense"})
    assert not (tmp_path / "run" / "journal").exists()
    assert main(["checkout", str(tmp_path / "run"), "--step", "1"]) == 2
    assert "method dense" in capsys.readouterr().err
    assert main(["journal", str(tmp_path / "nothing")]) == 2


@pytest.mark.usefixtures("basis")
def test_the_journal_command(tmp_path, capsys):
    folder = tmp_path / "run"
    train(folder, **{"journal.anchor_every": 2, "checkpoint.every": 4})
    assert main(["journal", str(folder), "--verify", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["updates"] == 4 and facts["anchors"] == [2, 4] and facts["last_step"] == 4 and "verified" in facts
    assert main(["journal", str(folder), "--compact", "3"]) == 0
    capsys.readouterr()
    assert main(["checkout", str(folder), "--step", "1"]) == 2
    assert "compacted" in capsys.readouterr().err
    assert main(["checkout", str(folder), "--step", "3"]) == 0
    segment = max((folder / "journal").glob("segment_*"), key=lambda p: p.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(bytes(data))
    capsys.readouterr()
    assert main(["journal", str(folder), "--verify"]) == 2
    assert "update" in capsys.readouterr().err


@pytest.mark.usefixtures("basis")
@pytest.mark.parametrize("every", [0, 3])
def test_a_kill_between_anchor_and_state_loses_nothing(every, tmp_path, monkeypatch):
    """keep_anchors drops history; not before the state of the step that wrote the anchor is there."""
    flags = {"train.steps": 6, "journal.anchor_every": 2, "journal.keep_anchors": 1, "checkpoint.every": every}
    straight = train(tmp_path / "straight", **flags)
    folder = tmp_path / "run"
    write = Journal.write_state

    def die_at_4(self, step, *rest):
        if step == 4:
            raise KeyboardInterrupt
        write(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write_state", die_at_4)
        with pytest.raises(KeyboardInterrupt):
            train(folder, **flags)
    resumed = train(folder, resume="auto", **flags)
    assert resumed.method.digest() == straight.method.digest()
    assert records(folder) == records(tmp_path / "straight")


@pytest.mark.usefixtures("basis")
def test_going_back_behind_compacted_history_begins_a_new_journal(tmp_path, caplog):
    flags = {"train.steps": 6, "checkpoint.every": 2, "checkpoint.keep": 5}
    short = {"journal.anchor_every": 2, "journal.keep_anchors": 1}
    straight = train(tmp_path / "straight", on_step=Digests, **flags)
    digests = Digests.last
    folder = tmp_path / "run"
    train(folder, **flags, **short)
    resumed = train(folder, resume=str(folder / "checkpoints" / "step_4"), **flags)
    assert "A new journal begins at version 4" in caplog.text and resumed.method.digest() == straight.method.digest()
    assert sorted(p.name for p in (folder / "checkpoints").glob("step_*")) == ["step_2", "step_4", "step_6"]
    with Journal.open(next(folder.glob("journal.aside-*"))) as old:
        assert old.next == 6  # nothing was deleted
    for step in (4, 5):
        assert main(["checkout", str(folder), "--step", str(step)]) == 0
        model = AutoModelForCausalLM.from_pretrained(folder / "checkouts" / f"step_{step}", dtype=torch.float32)
        assert digest(model, straight.method.sketcher.names) == digests[step]


def test_killed_before_the_first_step_ends_evaluates_once(tmp_path):
    flags = {"eval": {"num_prompts": 4}}
    straight = train(tmp_path / "straight", **flags)
    run = build_run(settings(tmp_path / "run", **flags))
    run.trainer.evaluate()
    run.close()
    resumed = train(tmp_path / "run", resume="auto", **flags)
    assert resumed.method.digest() == straight.method.digest()
    assert records(tmp_path / "run") == records(tmp_path / "straight")


KILLED = {
    "journal alone": {},
    "aligned": ALIGNED | {"checkpoint.every": 5},
    "everything": {
        "checkpoint.every": 5, "journal.anchor_every": 2, "journal.keep_anchors": 1, "eval.num_prompts": 4, "eval.every": 3,
        "log.completions": True, "algorithm.updates_per_step": 2, "method.weights": "split", "model.dtype": "bfloat16",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KILLED)
def test_killed_anywhere_and_continued_equals_uninterrupted(kind, tmp_path):
    """SIGKILL of the real command at random moments: weights, metrics and journal are those of an uninterrupted run."""
    flags = SMALL | {"train.steps": 12, "rollout.max_new_tokens": 4} | KILLED[kind]
    if "eval.num_prompts" in flags:
        del flags["eval"]
    straight = train_command(tmp_path / "straight", flags)
    straight.communicate(timeout=240)
    assert straight.returncode == 0
    folder, chooser, kills = tmp_path / "killed", random.Random(7), 0
    for _ in range(4):
        before = done_steps(folder)
        process = train_command(folder, flags)
        for _ in range(2400):
            if done_steps(folder) > before or process.poll() is not None:
                break
            time.sleep(0.01)
        time.sleep(chooser.uniform(0.0, 0.6))
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert kills
    last = train_command(folder, flags)
    _, errors = last.communicate(timeout=240)
    assert last.returncode == 0, errors
    assert digest(load(folder / "final")) == digest(load(tmp_path / "straight" / "final"))
    assert records(folder) == records(tmp_path / "straight")
    with Journal.open(folder / "journal") as one, Journal.open(tmp_path / "straight" / "journal") as other:
        assert (one.first, one.next, one.steps()) == (other.first, other.next, other.steps())
        for index in range(one.first, one.next):
            mine, theirs = (Packet.from_bytes(journal.read(index)) for journal in (one, other))
            assert mine.update.to_bytes() == theirs.update.to_bytes() and mine.digest == theirs.digest


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train_command(folder, flags):
    command = [
        sys.executable,
        "-m",
        "logra",
        "train",
        str(RECIPE),
        "--output_dir",
        str(folder),
        "--resume",
        "auto",
        "--plain",
    ]
    command += [part for key, value in flags.items() for part in (f"--{key}", json.dumps(value))]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def done_steps(folder):
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0

"""The record writer refuses numbers without provenance, NaN, and anything that names the machine."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
record = importlib.import_module("record")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"model": "builtin:tiny-llama", "batch": 8}
RESULTS = {"dense": {"total_s": [1.5, 2.0]}, "ratio": 0.75, "unit": "tokens/s, 1/2, https://example.org/x"}
HARDWARE = {"cpu": "Some CPU @ 2.00GHz", "cores": 2, "threads": 1, "memory_bytes": 1 << 34, "accelerator": "none"}
VERSIONS = {"python": "3.12.0", "torch": "2.13.0", "transformers": "5.19.0", "peft": "0.21.0", "logra": "0.1.0"}


@pytest.fixture(autouse=True)
def fixed_provenance(monkeypatch):
    monkeypatch.setattr(record, "git_state", lambda: {"commit": COMMIT, "dirty": False})
    monkeypatch.setattr(record, "hardware", lambda: dict(HARDWARE))
    monkeypatch.setattr(record, "versions", lambda: dict(VERSIONS))
    monkeypatch.setattr(sys, "argv", ["benchmarks/step_time.py", "--batch", "8"])


def write(path, **changes):
    return record.write_record(path, **{"name": "step_time", "config": CONFIG, "results": RESULTS, "seed": 0} | changes)


def test_a_record_holds_everything_and_is_returned_as_written(tmp_path):
    path = tmp_path / "records" / "x.json"
    written = write(path)
    assert json.loads(path.read_text()) == written
    date = written.pop("date")
    assert len(date) == 20 and date[10] == "T" and date.endswith("Z")
    assert written == {
        "schema": 1,
        "name": "step_time",
        "command": ["python", "benchmarks/step_time.py", "--batch", "8"],
        "git": {"commit": COMMIT, "dirty": False},
        "hardware": HARDWARE,
        "versions": VERSIONS,
        "config": CONFIG,
        "seed": 0,
        "results": RESULTS,
    }
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]  # no temporary file is left


def test_the_default_path_has_name_date_and_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    date = write(None)["date"].replace("-", "").replace(":", "")
    assert [p.name for p in tmp_path.iterdir()] == [f"step_time_{date}_{COMMIT[:10]}.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {}}, "without config"),
        ({"results": {}}, "without results"),
        ({"seed": None}, "integer seed"),
        ({"seed": True}, "integer seed"),
        ({"name": "../x"}, "file name"),
        ({"name": ""}, "file name"),
        ({"results": {"a": [1.0, {"b": float("nan")}]}}, r"record\.results\.a\[1\]\.b is nan"),
        ({"results": {"a": float("-inf")}}, "finite"),
        ({"results": {"a": object()}}, "plain"),
        ({"results": {3: 1.0}}, "keys are strings"),
        ({"results": {"a": "see /srv/data/x"}}, "absolute path"),
        ({"results": {"~/x": 1}}, "absolute path"),
        ({"results": {"a": "C:\\data"}}, "absolute path"),
        ({"config": {"a": "x=/.cache"}}, "absolute path"),
    ],
)
def test_incomplete_or_unfit_records_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "x.json", **changes)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("git_state", {}, "commit"),
        ("git_state", {"commit": "unknown", "dirty": False}, "commit"),
        ("git_state", {"commit": COMMIT}, "commit"),
        ("git_state", {"commit": COMMIT[:10], "dirty": True}, "commit"),
        ("hardware", {}, "hardware"),
        ("hardware", HARDWARE | {"cpu": ""}, "cpu"),
        ("versions", {}, "versions"),
        ("versions", {k: v for k, v in VERSIONS.items() if k != "peft"}, "peft"),
    ],
)
def test_missing_provenance_is_refused_before_measuring(monkeypatch, part, value, message):
    monkeypatch.setattr(record, part, lambda: value)
    with pytest.raises(ValueError, match=message):
        record.begin_record(name="step_time", config=CONFIG, seed=0)


def test_host_and_user_names_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(record.socket, "gethostname", lambda: "build-host-17")
    monkeypatch.setattr(record.getpass, "getuser", lambda: "somebody-long")
    for text in ("on build-host-17", "by somebody-long"):
        with pytest.raises(ValueError, match="names this machine"):
            write(tmp_path / "x.json", results={"note": text})


def test_absolute_paths_of_the_command_and_config_become_relative(tmp_path, monkeypatch):
    inside, outside = str(record.ROOT / "models" / "m"), str(tmp_path / "m")
    monkeypatch.setattr(
        sys, "argv", [str(record.ROOT / "benchmarks" / "step_time.py"), "--model", inside, f"--record={outside}"]
    )
    written = write(
        tmp_path / "x.json", config={"model": inside, "other": [outside], "path": tmp_path / "n", "length": 256}
    )
    assert written["command"] == ["python", "benchmarks/step_time.py", "--model", "models/m", "--record=m"]
    assert written["config"] == {"model": "models/m", "other": ["m"], "path": "n", "length": 256}


def test_an_existing_record_survives_a_refused_one(tmp_path):
    path = tmp_path / "x.json"
    write(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="finite"):
        write(path, results={"a": float("nan")})
    assert path.read_bytes() == before


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def real():
    """The module's own functions, without the fixture's replacements."""
    spec = importlib.util.spec_from_file_location("record_unpatched", record.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_git_state_tells_clean_from_dirty_and_ignores_records(tmp_path, real):
    git(tmp_path, "init", "-q")
    with pytest.raises(ValueError, match="commit"):
        real.git_state(tmp_path)  # nothing committed yet
    (tmp_path / "a.py").write_text("a")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-qm", "a")
    state = real.git_state(tmp_path)
    assert state == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "benchmarks" / "records").mkdir(parents=True)
    (tmp_path / "benchmarks" / "records" / "r.json").write_text("{}")
    assert real.git_state(tmp_path) == state
    (tmp_path / "new.py").write_text("")
    assert real.git_state(tmp_path) == state | {"dirty": True}
    (tmp_path / "new.py").unlink()
    (tmp_path / "a.py").write_text("b")
    assert real.git_state(tmp_path) == state | {"dirty": True}


def test_git_state_outside_a_checkout_is_refused(tmp_path, monkeypatch, real):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match="run from a git checkout"):
        real.git_state(tmp_path)


def test_a_logra_from_elsewhere_is_refused(tmp_path, monkeypatch, real):
    monkeypatch.setattr(real.logra, "__file__", str(tmp_path / "logra" / "__init__.py"))
    with pytest.raises(ValueError, match="not imported from this checkout"):
        real.git_state()


def test_hardware_and_versions_are_complete_here(real):
    found = real.hardware()
    assert set(found) == set(HARDWARE) and all(found.values())
    assert found["memory_bytes"] > 1 << 28
    assert set(real.versions()) == set(VERSIONS)


def test_a_package_that_is_not_installed_is_named(monkeypatch, real):
    monkeypatch.setattr(real, "PACKAGES", ("torch", "no-such-package"))
    with pytest.raises(ValueError, match="no-such-package"):
        real.versions()

"""Reward functions that raise, hang, die, fork or return nonsense: counted, contained, gone afterwards."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from logra.errors import RewardError
from logra.rl.rewards import RewardPool, RewardSpec

FILE = str(Path(__file__).with_name("reward_functions.py"))


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until_gone(pids: list[int], limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)  # a failing test should not leave them either
    assert not alive, f"still running: {alive}"


def wait_for_pids(file: Path, limit_s: float = 10.0) -> list[int]:
    """What the function has written, once the line is complete."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if file.exists() and (text := file.read_text()).endswith("\n"):
            return [int(pid) for pid in text.split()]
        time.sleep(0.02)
    raise AssertionError(f"the function wrote no {file.name}")


def children() -> set[int]:
    """All children of this process, zombies included."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def score(pool: RewardPool, completions: list[str], **columns: list):
    return pool.score(["q"] * len(completions), completions, [[1]] * len(completions), columns)


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("raises", "error", "the judge lost its key"),
        ("exits", "error", "SystemExit"),
        ("dies", "error", "exit code 7"),
        ("segfaults", "error", "exit code -11"),
        ("dies_leaving_the_pipe_open", "error", "exit code 5"),
        ("hangs", "timeout", "no result within 0.5 s"),
        ("hangs_in_c", "timeout", "no result within 0.5 s"),
    ],
)
def test_a_failing_function_is_counted_and_the_others_go_on(name: str, status: str, message: str) -> None:
    limit_s = 0.5 if status == "timeout" else 20.0
    specs = [RewardSpec(f"{FILE}:{name}", weight=0.0, timeout_s=limit_s), RewardSpec(f"{FILE}:lengths")]
    with RewardPool(specs, error_limit=1.0) as pool:
        pool.warmup()
        for _ in range(2):
            start = time.monotonic()
            result = score(pool, ["a", "bc", "def"])
            assert time.monotonic() - start < 10
            assert result.per_function[name] == [None] * 3
            assert result.counts[name][status] == 3
            assert message in result.messages[name]
            assert result.total == [1.0, 2.0, 3.0]


def test_a_failing_function_stops_the_run_by_default() -> None:
    with (
        RewardPool([f"{FILE}:raises"], workers=1) as pool,
        pytest.raises(RewardError, match=r"'raises' failed on 2 of 2(.|\n)*lost its key"),
    ):
        score(pool, ["a", "b"])


def test_a_failed_rollout_has_no_total_but_a_nan_elsewhere_is_not_its_fault() -> None:
    with RewardPool([f"{FILE}:some_nan", f"{FILE}:lengths"]) as pool:
        result = score(pool, ["nan", "ok", "fine"])
    assert result.total == [None, 3.0, 5.0]
    assert result.counts["some_nan"] == {
        "scored": 2, "wrong": 0, "unparseable": 0, "error": 1, "timeout": 0, "abstain": 0,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["too_short", "strings", "tensors", "array", "single_number"])
def test_a_broken_contract_stops_at_once_also_with_the_highest_limit(name: str) -> None:
    with (
        RewardPool([f"{FILE}:{name}", f"{FILE}:lengths"], workers=1, error_limit=1.0) as pool,
        pytest.raises(RewardError, match=name),
    ):
        score(pool, ["a", "b"])


def test_one_rollout_that_hangs_or_kills_costs_itself_only() -> None:
    replies = [str(i) for i in range(24)]
    replies[3], replies[10], replies[17] = "hang", "die", "raise"
    spec = RewardSpec(f"{FILE}:compute_score", kind="verl", timeout_s=1.0)
    with RewardPool([spec], workers=2) as pool:
        result = score(pool, replies, answer=[str(i) for i in range(24)])
    assert result.total == [None if i in (3, 10, 17) else 1.0 for i in range(24)]
    counts = result.counts["compute_score"]
    assert (counts["scored"], counts["timeout"], counts["error"]) == (21, 1, 2)


def test_a_regular_expression_that_never_ends_is_killed() -> None:
    """The interpreter lock is held all the time: no thread or alarm inside the worker could end it."""
    spec = RewardSpec("format", params={"pattern": "(a+)+b"}, timeout_s=1.0)
    with RewardPool([spec], workers=1) as pool:
        result = score(pool, ["ab", "a" * 60, "ab", "c"])
    assert result.total == [1.0, None, 1.0, 0.0]
    assert result.counts["format"]["timeout"] == 1


def test_many_hangs_stop_early() -> None:
    spec = RewardSpec(f"{FILE}:compute_score", kind="verl", timeout_s=0.2)
    with RewardPool([spec], workers=2, error_limit=0.1) as pool:
        start = time.monotonic()
        with pytest.raises(RewardError, match="'compute_score' failed on"):
            score(pool, ["hang"] * 40, answer=["1"] * 40)
        assert time.monotonic() - start < 6  # 40 hangs on two workers would take 4 s and 40 restarts
        assert score(pool, ["1"] * 4, answer=["1"] * 4).total == [1.0] * 4


def test_forked_children_die_with_the_group(tmp_path: Path) -> None:
    with RewardPool([f"{FILE}:forks_and_hangs"], workers=1, timeout_s=1.0, error_limit=1.0) as pool:
        result = score(pool, ["a"], pid_file=[str(tmp_path / "pids")])
    assert result.counts["forks_and_hangs"]["timeout"] == 1
    wait_until_gone(wait_for_pids(tmp_path / "pids"))


def test_a_forked_child_that_returns_too_makes_no_second_answer() -> None:
    with RewardPool([f"{FILE}:forked_child_returns", f"{FILE}:lengths"], workers=1) as pool:
        for _ in range(3):
            assert score(pool, ["a", "bc"]).total == [3.0, 4.0]


def test_a_function_may_use_multiprocessing() -> None:
    with RewardPool([f"{FILE}:pool_inside"], workers=1) as pool:
        assert score(pool, ["1", "2"]).total == [1.0, 2.0]


def test_a_worker_killed_between_calls_is_replaced_without_an_error() -> None:
    with RewardPool([f"{FILE}:pids"], workers=1) as pool:
        (first,) = score(pool, ["a"]).total
        os.kill(int(first or 0), signal.SIGKILL)
        result = score(pool, ["a"])
        assert result.total != [first]
        assert result.counts["pids"]["scored"] == 1


def test_a_module_that_hangs_or_dies_while_loading(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(1000)\ndef f(**kwargs): pass\n")
    (tmp_path / "dead_module.py").write_text("import os; os._exit(4)\ndef f(**kwargs): pass\n")
    with (
        RewardPool([f"{tmp_path}/slow_module.py:f"], workers=1, start_timeout_s=0.7) as pool,
        pytest.raises(RewardError, match=r"did not within 0\.7 s while it loaded"),
    ):
        pool.warmup()
    with (
        RewardPool([f"{tmp_path}/dead_module.py:f"], workers=1) as pool,
        pytest.raises(RewardError, match="exit code 4 while it loaded"),
    ):
        pool.warmup()


def test_a_file_that_starts_a_pool_when_imported_does_not_multiply(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from logra.rl.rewards import RewardPool\n"
        "def f(completions, **kwargs): return [1.0] * len(completions)\n"
        "with RewardPool([f], workers=1) as pool: print(pool.score(['q'], ['a'], [[1]]).total)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "if __name__ == '__main__'" in done.stderr
    script.write_text(script.read_text().replace("with Reward", "if __name__ == '__main__':\n  with Reward"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[1.0]\n"), done.stderr


def test_nothing_is_left_after_close() -> None:
    before = children()
    pool = RewardPool([f"{FILE}:forked_child_returns", f"{FILE}:pids"], workers=2)
    pool.warmup()
    score(pool, ["a"] * 8)
    assert children() > before
    pool.close()
    assert children() == before, "a zombie or a live process is left"


def test_an_interrupted_call_leaves_no_stale_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with RewardPool([f"{FILE}:lengths"], workers=1) as pool:
        pool.warmup()

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pool._crew, "_attend", interrupt)
            with pytest.raises(KeyboardInterrupt):
                score(pool, ["interrupted"])
        assert score(pool, ["a"]).total == [1.0]


PARENT = """
import sys
from logra.rl.rewards import RewardPool

if __name__ == "__main__":
    file, name, pid_file = sys.argv[1:]
    pool = RewardPool([f"{file}:pids", f"{file}:{name}"], workers=2, timeout_s=100)
    pool.warmup()
    print(*[slot.process.pid for slot in pool._crew._slots], pool._crew._guardian._process.pid, flush=True)
    if name == "lengths":
        sys.stdin.read()
    pool.score(["q"], ["a"], [[1]], {"pid_file": [pid_file]})
"""


@pytest.mark.parametrize("name", ["lengths", "hangs_in_c", "forks_and_hangs"])
def test_kill_9_of_the_parent_leaves_nothing(name: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    pid_file = tmp_path / "pids"
    parent = subprocess.Popen(
        [sys.executable, str(script), FILE, name, str(pid_file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None and parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3 and all(is_alive(pid) for pid in pids)
    if name != "lengths":
        pids += wait_for_pids(pid_file)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    wait_until_gone(pids)


def test_a_killed_guardian_is_replaced() -> None:
    with RewardPool([f"{FILE}:dies", f"{FILE}:lengths"], workers=1, error_limit=1.0) as pool:
        pool.warmup()
        guardian = pool._crew._guardian._process
        assert guardian is not None
        guardian.kill()
        guardian.wait()
        assert score(pool, ["a"]).counts["dies"]["error"] == 1
        replaced = pool._crew._guardian._process
        assert replaced is not None and replaced.pid != guardian.pid and replaced.poll() is None


def test_a_forked_copy_of_the_trainer_leaves_the_workers_alone() -> None:
    with RewardPool([f"{FILE}:pids"], workers=1) as pool:
        first = score(pool, ["a"]).total
        child = os.fork()
        if child == 0:
            pool.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert score(pool, ["a"]).total == first

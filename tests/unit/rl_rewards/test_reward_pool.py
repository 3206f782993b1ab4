"""The pool with functions that behave."""

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from logra.errors import RewardError
from logra.rl.rewards import RewardPool, RewardSpec
from logra.rl.types import Prompt, Rollout

FILE = str(Path(__file__).with_name("reward_functions.py"))
SPECS = [
    RewardSpec("numeric_match", params={"extract": "last_integer"}),
    RewardSpec(f"{FILE}:lengths", weight=0.01),
    RewardSpec(f"{FILE}:only_numbers", weight=0.0),
    RewardSpec(f"{FILE}:batch_size", weight=0.0),
    RewardSpec(f"{FILE}:batch_size", weight=0.0, name="chunked", chunk=3),
    RewardSpec(f"{FILE}:modules", weight=0.0),
    RewardSpec(f"{FILE}:main_thread", weight=0.0),
    RewardSpec(f"{FILE}:prints", weight=0.0),
    RewardSpec(f"{FILE}:slow_async", weight=0.0),
    RewardSpec(f"{FILE}:compute_score", weight=0.0, kind="verl"),
    RewardSpec("math_verify", weight=0.0),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    pytest.importorskip("math_verify")
    with RewardPool(SPECS, workers=2) as pool:
        pool.warmup(["answer"])
        yield pool


def score(pool: RewardPool, completions: list[str], answers: list[str]):
    count = len(completions)
    return pool.score(["q"] * count, completions, [[1]] * count, {"answer": answers})


def test_64_rollouts_by_several_functions(pool: RewardPool) -> None:
    replies = [f"it is {i}" if i % 4 else "no idea" for i in range(64)]
    answers = [str(i if i % 2 else i + 1) for i in range(64)]
    start = time.monotonic()
    result = score(pool, replies, answers)
    assert time.monotonic() - start < 5
    assert result.per_function["numeric_match"] == [float(i % 2) for i in range(64)]
    assert result.counts["numeric_match"] == {
        "scored": 32, "wrong": 16, "unparseable": 16, "error": 0, "timeout": 0, "abstain": 0,
    }  # fmt: skip
    assert result.total == [pytest.approx(float(i % 2) + 0.01 * len(reply)) for i, reply in enumerate(replies)]
    assert result.per_function["math_verify"] == [float(i % 2) for i in range(64)]
    assert result.per_function["only_numbers"] == [None] * 64
    assert result.messages == {}


def test_a_function_gets_the_whole_batch_unless_it_asks_for_chunks(pool: RewardPool) -> None:
    result = score(pool, ["1"] * 7, ["1"] * 7)
    assert result.per_function["batch_size"] == [7.0] * 7
    assert result.per_function["chunked"] == [3.0] * 6 + [1.0]


def test_workers_are_light_and_call_in_their_main_thread(pool: RewardPool) -> None:
    result = score(pool, ["1"] * 4, ["1"] * 4)
    assert result.per_function["modules"] == [0.0] * 4, "a worker imported torch or transformers"
    assert result.per_function["main_thread"] == [1.0] * 4


def test_prints_of_a_function_go_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with RewardPool([f"{FILE}:prints"], workers=1) as pool:
        assert pool.score(["q"], ["a"], [[1]]).total == [1.0]
    out, err = capfd.readouterr()
    assert out == ""
    assert "noise on stdout\nraw noise\nxxx" in err


def test_other_threads_may_call_it_also_math_verify(pool: RewardPool) -> None:
    results = {}

    def ask(index: int) -> None:
        results[index] = score(pool, [f"\\boxed{{{index}}}"] * 8, [str(index)] * 8)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(3):
        assert results[index].per_function["math_verify"] == [1.0] * 8
        assert results[index].per_function["lengths"] == [float(len(f"\\boxed{{{index}}}"))] * 8


def test_workers_started_by_a_thread_outlive_it() -> None:
    """The kernel's parent-death signal would kill them when that thread ends."""
    with RewardPool([f"{FILE}:pids"], workers=1) as pool:
        thread = threading.Thread(target=pool.warmup)
        thread.start()
        thread.join()
        time.sleep(0.1)
        first = pool.score(["q"], ["a"], [[1]]).total
        assert first == pool.score(["q"], ["a"], [[1]]).total


def test_a_batch_without_a_known_column_passes_none(pool: RewardPool) -> None:
    result = pool.score(["q"] * 2, ["1"] * 2, [[1]] * 2, {})
    assert result.counts["numeric_match"]["abstain"] == 2


def test_no_rollouts(pool: RewardPool) -> None:
    result = pool.score([], [], [])
    assert result.total == []
    assert result.per_function["lengths"] == []
    assert result.counts["lengths"]["scored"] == 0
    assert result.metrics() == {}


def test_lists_of_different_length_are_refused(pool: RewardPool) -> None:
    with pytest.raises(RewardError, match="1 answer for 2 prompts"):
        pool.score(["q"] * 2, ["1"] * 2, [[1]] * 2, {"answer": ["1"]})
    with pytest.raises(RewardError, match="1 completions for 2 prompts"):
        pool.score(["q"] * 2, ["1"], [[1]] * 2)


def test_columns_that_cannot_travel_are_refused(pool: RewardPool) -> None:
    class Local:
        pass

    for value in (Local(), threading.Lock()):
        with pytest.raises(RewardError, match="cannot be sent"):
            pool.score(["q"], ["1"], [[1]], {"answer": ["1"], "odd": [value]})
    assert score(pool, ["1"], ["1"]).per_function["numeric_match"] == [1.0]


def rollout(content, columns: dict, text: str) -> Rollout:
    return Rollout(Prompt(0, content, (1,), columns), 0, (5, 6, 1), (0.0, 0.0, 0.0), "eos", text, 0)


def test_rollouts_of_mixed_tasks() -> None:
    with RewardPool([f"{FILE}:sees", "numeric_match", RewardSpec("length", params={"target_tokens": 6})]) as pool:
        result = pool.score_rollouts(
            [
                rollout("q", {"answer": "4", "prompt": "q"}, "it is 4"),
                rollout([{"role": "user", "content": "q"}], {"level": 2}, "it is 4"),
            ]
        )
    # plain prompt and completion, a list of three ids, two columns ("prompt" is none); the second is a chat
    assert result.per_function["sees"] == [1 + 10 + 100 + 2000 + 30000, 100 + 2000 + 30000]
    assert result.per_function["numeric_match"] == [1.0, None]
    assert result.per_function["length"] == [-0.5, -0.5]


def test_what_is_wrong_with_a_path_is_said_at_the_start() -> None:
    with (
        RewardPool(["numeric_match", f"{FILE}:lenghts"]) as pool,
        pytest.raises(RewardError, match="'lengths'"),
    ):
        pool.warmup()
    with RewardPool([f"{FILE}:named_only"]) as pool:
        with pytest.raises(RewardError, match="'named_only' needs the column 'answer'; the data has: solution"):
            pool.warmup(["solution"])
        with pytest.raises(RewardError, match="needs the column 'answer'; the data has: no columns"):
            pool.score(["q"], ["a"], [[1]])


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "no reward function"),
        (["numeric_mach"], "no built-in reward 'numeric_mach'; did you mean 'numeric_match'"),
        (["format", "format"], "two reward functions are called 'format'"),
        ([RewardSpec("format", weight=0.0)], "weight 0"),
    ],
)
def test_specs_that_cannot_work_are_refused(specs: list, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        RewardPool(specs)


@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"timeout_s": 0.0}, {"error_limit": 1.5}, {"start_timeout_s": -1.0}]
)
def test_options_that_cannot_work_are_refused(options: dict) -> None:
    with pytest.raises(RewardError, match="workers >= 1"):
        RewardPool(["format"], **options)


def test_closing_twice_and_using_it_afterwards() -> None:
    pool = RewardPool(["numeric_match"], workers=1)
    pool.close()
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.score(["q"], ["1"], [[1]], {"answer": ["1"]})
    with pytest.raises(RewardError, match="closed"):
        pool.warmup()


def test_a_function_object_stands_for_its_path() -> None:
    from logra.rl.rewards.extract import whole

    pool = RewardPool([whole])
    assert pool.specs[0].path == "logra.rl.rewards.extract.whole"
    del pool
    gc.collect()

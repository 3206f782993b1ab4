"""The soak's parts: faults drawn by a seed, a proxy that makes each of them once, figures of memory. Nothing is trained."""

import http.client
import importlib
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from logra.errors import UpdateError
from logra.rl.tiny import tiny_model

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
faults = importlib.import_module("soak_faults")
checks = importlib.import_module("soak_checks")
soak = importlib.import_module("soak")
soak_run = importlib.import_module("soak_run")
Fault = faults.Fault


def test_the_schedule_is_that_of_its_seed_and_leaves_no_kind_out():
    one, two = (faults.schedule(2000, 50, 3) for _ in range(2))
    assert one == two != faults.schedule(2000, 50, 4)
    assert [fault.step for fault in one] == list(range(50, 2000, 50))
    assert set(Counter(fault.kind for fault in one).values()) <= {6, 7}
    for fault in one:
        assert fault.route in faults.ROUTES or (fault.route is None and fault.kind in ("kill_engine", "kill_rank"))
        assert (fault.kind == "delay") <= (1.0 <= fault.seconds <= 3.0) and (fault.kind == "kill_engine") >= (
            fault.away_s > 0
        )
    assert {fault.rank for fault in one if fault.kind == "kill_rank"} == {0, 1}
    assert {fault.kind for fault in faults.schedule(100, 10, 0, ["delay"])} == {"delay"}


@pytest.fixture
def upstream():
    """An engine that answers with the number of the request. Its log: routes, in order."""
    log: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            log.append(self.path)
            data = str(len(log)).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_port, log
    server.shutdown()
    server.server_close()


@pytest.fixture
def proxy(upstream):
    proxy = faults.Proxy()
    proxy.upstream = upstream[0]
    yield proxy
    proxy.close()


def post(proxy, path="/update_weights"):
    """The answer; None if the connection broke."""
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=10)
    try:
        connection.request("POST", path, "{}")
        return int(connection.getresponse().read())
    except (http.client.HTTPException, ConnectionError):
        return None
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("kind", "how", "answer", "seen"),
    [
        ("drop_request", "", None, 0), ("drop_answer", "", None, 1), ("duplicate", "first", 1, 2),
        ("duplicate", "second", 2, 2), ("duplicate", "late", 1, 1),
    ],
)  # fmt: skip
def test_a_message_is_hit_once_on_its_route_alone(proxy, upstream, kind, how, answer, seen):
    proxy.arm(Fault(5, kind, "update_weights", how, seconds=0.3))
    assert post(proxy, "/pause?mode=wait") == 1 and proxy.fired_at is None
    upstream[1].clear()
    assert post(proxy) == answer and upstream[1] == ["/update_weights"] * seen
    assert proxy.fired_at is not None
    assert post(proxy) == seen + 1
    if how == "late":
        deadline = time.monotonic() + 5
        while len(upstream[1]) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(upstream[1]) == 3


def test_a_delay_is_as_long_as_it_says(proxy):
    proxy.arm(Fault(5, "delay", "resume", seconds=0.3))
    started = time.monotonic()
    assert post(proxy, "/resume") == 1 and time.monotonic() - started >= 0.3


@pytest.mark.parametrize(("how", "seen"), [("before", 0), ("after", 1)])
def test_a_kill_comes_before_or_after_the_engine_saw_the_request(proxy, upstream, how, seen):
    at_kill: list[int] = []
    proxy.arm(Fault(5, "kill_rank", "update_weights", how), lambda: at_kill.append(len(upstream[1])))
    assert post(proxy) == 1 and at_kill == [seen]


def test_connections_break_while_the_engine_is_away(proxy, upstream):
    proxy.upstream = None
    assert post(proxy) is None
    proxy.upstream = upstream[0]
    assert post(proxy) == 1


def test_the_engine_is_as_strict_as_vllm(tmp_path):
    engine_module = importlib.import_module("soak_engine")
    model = tiny_model(spread=0.1)
    engine = engine_module.Engine(model)
    try:
        with pytest.raises(UpdateError, match="no run was begun"):
            engine.answer("/start_weight_update", None)
        targets = [["model.layers.0.mlp.up_proj.weight", 128, 64]]
        engine.answer("/init_weight_transfer_engine", {"init_info": {"run": "a1", "base": "00", "targets": targets}})
        with pytest.raises(UpdateError, match="before start_weight_update"):
            engine.answer("/update_weights", {"update_info": {}})
        engine.answer("/start_weight_update", None)
        with pytest.raises(UpdateError, match="already active"):
            engine.answer("/start_weight_update", None)
        engine.problem = None
        with pytest.raises(UpdateError):  # damaged
            engine.answer("/update_weights", {"update_info": {"kind": "packet", "data": "AAAA"}})
        (status,) = engine.answer("/collective_rpc", {"method": "logra_status"})["results"]
        assert "not finished" in status["problem"]
        engine.answer("/finish_weight_update", {"weight_version": "none"})
        (status,) = engine.answer("/collective_rpc", {"method": "logra_status"})["results"]
        assert status["problem"] is None

        engine.answer("/pause", None)
        body = {"token_ids": [5], "sampling_params": {"seed": 1, "max_tokens": 1, "temperature": 1.0, "top_p": 1.0}}
        body["sampling_params"]["stop_token_ids"] = [1]
        thread = threading.Thread(target=engine.answer, args=("/inference/v1/generate", body))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and engine.num_generated == 0
        engine.answer("/resume", None)
        thread.join(10)
        assert engine.num_generated == 1
    finally:
        engine.kill()


def lives(*sizes_of_lives):
    samples, step = [], 0
    for number, sizes in enumerate(sizes_of_lives):
        for size in sizes:
            step += 10
            samples.append({"step": step, "engine": size, "engine_life": number})
    return samples


def test_flatness_is_of_the_longest_life_once_it_has_settled():
    found = checks.flatness(lives([5] * 20, [100 - 50 / (i + 1) for i in range(10)] + [100.0] * 50, [7] * 20), "engine")
    assert (found["from_step"], found["to_step"], found["lives"]) == (210, 800, 3)
    assert found["first_bytes"] == found["last_bytes"] == 100 and found["bytes_per_1000_steps"] == 0
    grows = checks.flatness(lives([1000 + 3 * i for i in range(80)]), "engine")
    assert grows["bytes_per_1000_steps"] == 300 and grows["last_bytes"] > grows["first_bytes"]
    assert checks.flatness([], "engine") is None
    assert not soak.grows(found) and not soak.grows(grows)  # too short to tell
    assert soak.grows(grows | {"from_step": 10, "to_step": 2000})
    assert checks.starts(lives([1] * 5, range(20), range(100, 120)), "engine") == [[160, 10], [360, 110]]


def test_counters_climb_over_starts():
    metrics = [{"dropped": n} for n in (0, 1, 1, 0, 2, 1)]
    assert checks.climbs(metrics, "dropped") == 1 + 2 + 1


def test_steps_are_read_as_they_come_and_again_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    progress = soak_run.Progress(path)
    assert progress.last() == 0
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert progress.last() == 2
    with path.open("a") as file:
        file.write('p": 3}\n')
    assert progress.last() == 3
    shorter = tmp_path / "new"
    shorter.write_text('{"step": 1}\n')
    shorter.replace(path)
    assert progress.last() == 1


def test_what_a_record_may_not_hold_is_left_out():
    assert soak_run.without_paths("Error: /a/b is at http://127.0.0.1:80, 3 of 4") == "Error: ... is at ... 3 of 4"


def test_what_a_fault_costs_may_show_in_the_step_after_the_next():
    metrics = [{"step": step, "step_time": 9.0 if step == 6 else 1.0} for step in range(1, 11)] + [{"step": 10}]
    happened = [
        {"kind": "kill_engine", "hit_after_step": 4, "recovery_s": 0.1},
        {"kind": "kill_engine", "hit_after_step": 7, "recovery_s": 0.3},
        {"kind": "delay", "hit_after_step": 9, "recovery_s": None},
    ]
    soak_run.add_lost(happened, metrics)
    assert [fault["lost_s"] for fault in happened] == [8.0, 0.0, 0.0]
    found = soak.recoveries(happened)
    assert found["kill_engine"] == {
        "count": 2, "recovered": 2, "next_step_median_s": 0.2, "next_step_longest_s": 0.3, "lost_median_s": 4.0,
        "lost_longest_s": 8.0,
    }  # fmt: skip
    assert found["delay"]["recovered"] == 0


@pytest.mark.parametrize("flags", [["--steps", "10", "--every", "10"], ["--every", "0"], ["--twin", "--async", "1"]])
def test_what_makes_no_sense_is_refused(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        soak.main(flags)
    assert stopped.value.code == 2 and "error: --" in capsys.readouterr().err

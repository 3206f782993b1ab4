"""Processes of a launch, with servers and trainers that are a few lines of Python: ends, deaths, signals, and no orphan."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from logra.cli.launch import free_ports

DRIVER = """
import json, os, sys
from logra.cli.launch_plan import Command, LaunchPlan
from logra.cli.main import _report
from logra.cli.supervise import Supervisor
from logra.errors import LograError, UserError
commands = [Command(**each) for each in json.loads(sys.argv[1])]
try:
    sys.exit(Supervisor(LaunchPlan(commands[:-1], commands[-1]), os.environ, secret="s3cret", grace_s=float(sys.argv[2])).run())
except LograError as error:
    sys.exit(_report(error, False, 2 if isinstance(error, UserError) else 1))
"""
# A server with a child that is a session of its own. Its numbers are left in files; the first lines may change what it does.
SERVER = """
import http.server, os, pathlib, subprocess, sys, threading, time
folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
starts = len(list(folder.glob(f"server-{port}-*")))
child = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
(folder / f"server-{port}-{starts}").write_text(f"{os.getpid()} {child.pid}")
print("start", starts, "key", os.environ.get("KEY", ""), flush=True)
def later(seconds, call):
    threading.Timer(seconds, call).start()
def end(code):
    print("ending now", flush=True)
    os._exit(code)
exec(sys.argv[3])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
TRAINER = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
child = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
(folder / "trainer").write_text(f"{os.getpid()} {child.pid}")
print("training", flush=True)
exec(sys.argv[2])
"""


def heard():
    """The tests may run under nohup, or in the background of a shell, where these are ignored."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Launch:
    """servers: what each does; trainer: what it does after its start."""

    def __init__(self, folder: Path, trainer: str, servers: tuple[str, ...] = ("",), grace_s: float = 5.0) -> None:
        self.folder, self.ports = folder, free_ports(len(servers))
        commands = [
            {
                "name": f"vllm {number}",
                "words": [sys.executable, "-c", SERVER, str(folder), str(port), code],
                "url": f"http://127.0.0.1:{port}",
            }
            for number, (port, code) in enumerate(zip(self.ports, servers, strict=True))
        ]
        commands.append({"name": "train", "words": [sys.executable, "-c", TRAINER, str(folder), trainer]})
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(commands), str(grace_s)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "KEY": "s3cret"},
            preexec_fn=heard,
        )  # fmt: skip

    def end(self, timeout_s: float = 20.0) -> tuple[int, list[str]]:
        """Its exit code and lines; nothing that it started is left."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        finally:
            self.process.kill()
            self.process.communicate()
        self.assert_no_orphans()
        return self.process.returncode, output.splitlines()

    def pids(self) -> list[int]:
        return [int(word) for path in self.folder.iterdir() for word in path.read_text().split()]

    def assert_no_orphans(self, within_s: float = 1.0) -> None:
        deadline = time.monotonic() + within_s
        while (left := [pid for pid in self.pids() if is_alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == []
        assert self.pids(), "nothing was started: no test"

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 15
        while not all((self.folder / name).exists() and (self.folder / name).read_text() for name in names):
            assert time.monotonic() < deadline and self.process.poll() is None, names
            time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize(("trainer", "code"), [("", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_the_end_of_training_ends_all_with_its_code(tmp_path, trainer, code):
    found, lines = Launch(tmp_path, trainer, ("", "")).end()
    assert found == code
    assert (
        "[train] training" in lines and "[vllm 0] start 0 key (key)" in lines and "[vllm 1] start 0 key (key)" in lines
    )
    ready = next(i for i, line in enumerate(lines) if line.startswith("[launch] servers are ready"))
    assert ready < lines.index("[train] training"), "training starts when servers are ready"
    assert all(line.startswith(("[train] ", "[vllm ", "[launch] ")) for line in lines)


def test_a_server_that_dies_is_started_again(tmp_path):
    waits = "while not list(folder.glob('server-*-1')): time.sleep(0.02)"
    code, lines = Launch(tmp_path, waits, ("later(0.5, lambda: end(3)) if starts == 0 else None", "")).end()
    assert code == 0
    assert "[launch] vllm 0 ended with exit code 3: started again (1 of 3)" in lines
    assert "[vllm 0] start 1 key (key)" in lines and "[vllm 1] start 1 key (key)" not in lines


def test_a_server_that_dies_too_often_stops_the_run_with_its_last_lines(tmp_path):
    code, lines = Launch(tmp_path, "time.sleep(60)", ("later(0.4 if starts == 0 else 0, lambda: end(3))",)).end()
    assert code == 1
    assert sum("started again" in line for line in lines) == 3
    (index,) = (
        i for i, line in enumerate(lines) if line.startswith("logra: vllm 0 ended with exit code 3, after 3 new")
    )
    assert "ending now" in lines[index + 1 :] and "start 3 key (key)" in lines[index + 1 :]


def test_a_server_that_never_gets_ready_is_for_the_user(tmp_path):
    launch = Launch(tmp_path, "", ("print('no such model', flush=True); sys.exit(4)", ""))
    code, lines = launch.end()
    assert code == 2 and not (tmp_path / "trainer").exists()
    (index,) = (i for i, line in enumerate(lines) if line.startswith("logra: vllm 0 ended with exit code 4 before it"))
    assert "no such model" in lines[index + 1 :]


def test_a_command_that_does_not_exist_is_for_the_user(tmp_path):
    commands = [{"name": "train", "words": [str(tmp_path / "nothing")]}]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(commands), "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "train cannot be started" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_all(tmp_path, number, code):
    told = "signal.signal(signal.SIGINT, lambda *_: (print('asked', flush=True), sys.exit(0))); time.sleep(60)"
    launch = Launch(tmp_path, told, ("", ""))
    launch.wait_for("trainer")
    time.sleep(0.1)
    launch.process.send_signal(number)
    found, lines = launch.end(10)
    assert found == code
    assert f"[launch] stopping: {number.name}" in lines
    assert ("[train] asked" in lines) == (number == signal.SIGINT), "Ctrl-C is handed on as what it is"


def test_a_signal_while_servers_start_ends_all(tmp_path):
    launch = Launch(tmp_path, "", ("time.sleep(60)",))
    launch.wait_for(f"server-{launch.ports[0]}-0")
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end(10)[0] == 143


def test_who_does_not_end_is_killed_after_the_grace(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    launch = Launch(tmp_path, stubborn, grace_s=0.5)
    launch.wait_for("trainer")
    time.sleep(0.2)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end(10)[0] == 143


def test_a_second_signal_ends_the_patience(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    launch = Launch(tmp_path, stubborn, grace_s=30.0)
    launch.wait_for("trainer")
    time.sleep(0.2)
    launch.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end(10)[0] == 143


def test_when_the_launcher_is_killed_nothing_is_left(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    launch = Launch(tmp_path, stubborn, ("", ""), grace_s=0.5)
    launch.wait_for("trainer", *(f"server-{port}-0" for port in launch.ports))
    time.sleep(1.5)  # the guardian looks once a second
    launch.process.kill()
    launch.process.wait(5)
    launch.assert_no_orphans(within_s=8.0)
    launch.process.stdout.close()


def test_a_reader_that_goes_away_ends_all(tmp_path):
    chatter = "[(print('line', n, flush=True), time.sleep(0.01)) for n in range(3000)]"
    launch = Launch(tmp_path, chatter)
    launch.wait_for("trainer")
    launch.process.stdout.close()
    assert launch.process.wait(15) == 141
    launch.assert_no_orphans()


def test_lines_are_whole_also_of_progress_bars_and_odd_bytes(tmp_path):
    says = r"os.write(1, b'a\rb\nc\xff\n'); os.write(2, 'd\u00e9'.encode())"
    code, lines = Launch(tmp_path, says, ()).end()
    assert code == 0
    assert [line for line in lines if line.startswith("[train]")][1:] == [
        "[train] a", "[train] b", "[train] c\ufffd", "[train] d\u00e9",
    ]  # fmt: skip

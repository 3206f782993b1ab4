"""The HTTP transport's own rules: token, limits, addresses, retries, ends."""

import contextlib
import os
import socket
import threading
import time

import pytest

from logra.errors import DamagedUpdateError, UpdateError, UserError
from logra.sync import (
    HttpSource,
    MemoryLog,
    NotYetError,
    Replica,
    Subscriber,
    UnreachableError,
    load_or_make_token,
    serve,
)
from logra.sync.http import is_loopback
from sync_kit import TOKEN, Trainer, digest_at, make_blocks, new_memory

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")


@pytest.fixture
def log():
    return new_memory()


@pytest.fixture
def server(log):
    with serve(log, TOKEN) as server:
        yield server


@pytest.fixture
def source(server):
    with HttpSource(server.url, TOKEN, patience_s=0.5) as source:
        yield source


def request(server, method: str, path: str, token: str | None = TOKEN, **options):
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return httpx.request(method, server.url + path, headers=headers, trust_env=False, timeout=10, **options)


ROUTES = [
    ("GET", "/info"),
    ("GET", "/packets/0"),
    ("GET", "/anchors/0"),
    ("POST", "/acknowledgements"),
    ("GET", "/"),
    ("GET", "/docs"),
]


def test_nothing_answers_without_the_token(server):
    wrong = [
        "wrong-token-of-some-length",
        TOKEN + "x",
        TOKEN[:-1],
        TOKEN.upper(),
        "\N{LATIN SMALL LETTER E WITH ACUTE}" * 16,
    ]
    shown = [
        None,
        b"Bearer",
        TOKEN.encode(),
        b"Basic " + TOKEN.encode(),
        *(b"Bearer " + token.encode() for token in wrong),
    ]
    with httpx.Client(trust_env=False) as client:
        for method, path in ROUTES:
            for value in shown:
                headers = [] if value is None else [(b"authorization", value)]
                response = client.request(method, server.url + path, headers=headers)
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
                assert TOKEN not in response.text and "0123456789abcdef" not in response.text


def test_two_tokens_are_none(server):
    headers = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer other")]
    assert httpx.get(server.url + "/info", headers=headers, trust_env=False).status_code == 401


def test_a_wrong_token_is_said_at_once(server):
    with HttpSource(server.url, "another-token-1234", patience_s=30) as source:
        started = time.monotonic()
        with pytest.raises(UserError, match=r"refuses the token: use the one in the run's token file"):
            source.info()
        assert time.monotonic() - started < 5


def test_only_numbers_name_a_packet(server):
    for name in ("..%2f..%2fetc%2fpasswd", "-1", "1e3", "9" * 5000, "x", "0x1", "%C2%B2", "0/1"):
        for route in ("/packets/", "/anchors/"):
            assert request(server, "GET", route + name).status_code == 404


def test_odd_waits_are_bounded(server, monkeypatch):
    monkeypatch.setattr("logra.sync.http.MAX_WAIT_S", 0.1)
    for wait in ("nan", "-3", "x", "-inf", "inf", "1" * 100):
        started = time.monotonic()
        assert request(server, "GET", f"/packets/0?wait={wait}").status_code == 404
        assert time.monotonic() - started < 2


def test_bodies_are_bounded(server, log):
    assert request(server, "POST", "/acknowledgements", content=b"x" * (64 * 1024 + 1)).status_code == 413

    def endless():
        while True:
            yield b"x" * 4096

    with contextlib.suppress(httpx.TransportError):  # the server may hang up before its answer is read
        assert request(server, "POST", "/acknowledgements", content=endless()).status_code == 413
    assert request(server, "POST", "/acknowledgements", content=b"{}").status_code == 400
    assert request(server, "DELETE", "/info").status_code == 405
    assert not log.acknowledgements()


def test_packets_are_bounded_on_the_client(server, log):
    Trainer(log).train(1)
    with (
        HttpSource(server.url, TOKEN, max_packet_bytes=100) as source,
        pytest.raises(UpdateError, match="more than the 100 bytes"),
    ):
        source.read(0)


def test_other_machines_need_a_token_of_the_users(log, tmp_path):
    with pytest.raises(UserError, match=r"0\.0\.0\.0 opens the run to other machines: give a token.*TLS"):
        serve(log, host="0.0.0.0", token_file=tmp_path / "token")
    assert not (tmp_path / "token").exists()
    assert all(is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""))
    with serve(log, TOKEN, host="0.0.0.0") as server:
        port = server.url.rsplit(":", 1)[1]
        with HttpSource(f"http://127.0.0.1:{port}", TOKEN) as source:
            assert source.info().next == 0


def test_a_port_in_use_is_an_error_at_once(log, server):
    with pytest.raises(UserError, match=r"cannot listen on 127.0.0.1.*Choose another"):
        serve(log, TOKEN, port=int(server.url.rsplit(":", 1)[1]))


def test_tokens_are_made_kept_private_and_checked(log, tmp_path):
    path = tmp_path / "sync_token"
    with serve(log, token_file=path) as server:
        assert path.stat().st_mode & 0o777 == 0o600 and path.read_text().strip() == server.token
        with HttpSource(server.url, server.token) as source:
            assert source.info().next == 0
    assert load_or_make_token(path) == server.token and len(server.token) >= 32
    with serve(log) as other:
        assert other.token != server.token
    os.chmod(path, 0o644)
    with pytest.raises(UserError, match=r"others may read this token file.*chmod 600"):
        load_or_make_token(path)
    os.chmod(path, 0o600)
    path.write_text("short")
    with pytest.raises(UserError, match="16 to 512"):
        serve(log, token_file=path)
    for token in ("short", "with blank in the middle", "x" * 600, "line\nbreak-1234567890"):
        with pytest.raises(UserError, match="16 to 512") as error:
            serve(log, token)
        assert token not in str(error.value)


def test_the_address_is_checked():
    with pytest.raises(UserError, match="begins with http"):
        HttpSource("127.0.0.1:8000", TOKEN)


def test_nobody_there_is_said_after_a_bounded_time():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    started = time.monotonic()
    with (
        HttpSource(url, TOKEN, patience_s=0.3) as source,
        pytest.raises(UnreachableError, match=rf"{url} cannot be reached.*trainer runs"),
    ):
        source.info()
    assert time.monotonic() - started < 3


def test_a_server_that_comes_later_is_reached(log):
    first = serve(log, TOKEN)
    port = int(first.url.rsplit(":", 1)[1])
    with HttpSource(first.url, TOKEN, patience_s=10) as source:
        assert source.info().next == 0
        first.close()
        again = []
        starter = threading.Timer(0.3, lambda: again.append(serve(log, TOKEN, port=port)))
        starter.start()
        assert source.info().next == 0
        starter.join()
        again[0].close()


def test_closing_does_not_wait_for_those_who_wait(log):
    server, answers = serve(log, TOKEN), []

    def wait_long():
        with HttpSource(server.url, TOKEN, patience_s=0.1) as source:
            try:
                source.read(0, timeout_s=1.0)
            except UpdateError as error:
                answers.append(error)

    thread = threading.Thread(target=wait_long)
    thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 2
    thread.join(10)
    assert isinstance(answers[0], (NotYetError, UnreachableError))


def test_a_damaged_answer_is_damage(server, log, source):
    Trainer(log).train(2)
    log._packets[1] = log._packets[1][:50] + b"\0" + log._packets[1][51:]
    with pytest.raises(DamagedUpdateError, match="update 1 arrived damaged"):
        Subscriber(source, Replica(make_blocks()), "a").sync()


def test_a_damaged_anchor_leaves_no_file(server, log, tmp_path):
    trainer = Trainer(log)
    trainer.train(1)
    trainer.anchor()
    info, data = log._anchors[1]
    with HttpSource(server.url, TOKEN, folder=tmp_path) as source:
        with source.read_anchor(1) as anchor:
            assert len(list(tmp_path.iterdir())) == 1 and anchor.info == info
        assert not list(tmp_path.iterdir())
        for broken, match in ((data[:-1], "cut short"), (data[:-1] + b"\xff", "sha256")):
            log._anchors[1] = (info, broken)
            with pytest.raises(DamagedUpdateError, match=match):
                source.read_anchor(1)
        log._anchors[1] = (info, data + b"more")
        with pytest.raises(UpdateError, match="more than the"):
            source.read_anchor(1)
        assert not list(tmp_path.iterdir())
    with (
        HttpSource(server.url, TOKEN, folder=tmp_path / "nowhere") as source,
        pytest.raises(UpdateError, match="kept on disk"),
    ):
        source.read_anchor(1)


def test_a_foreign_server_is_recognised(tmp_path):
    import http.server

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response({"/info": 404, "/packets/0": 302, "/packets/1": 500}[self.path.partition("?")[0]])
            self.send_header("location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, format, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with HttpSource(f"http://127.0.0.1:{server.server_port}/", TOKEN, patience_s=0.2) as source:
                with pytest.raises(UserError, match="serves no log"):
                    source.info()
                for index, status in ((0, 302), (1, 500)):
                    with pytest.raises(UpdateError, match=f"status {status}"):
                        source.read(index)
        finally:
            server.shutdown()
            thread.join()


def test_an_interrupted_transfer_is_asked_for_again(log):
    """A server that hangs up in the middle of the first two answers."""
    Trainer(log).train(1)
    data, calls = log.read(0), []

    def answer(listener):
        for _ in range(3):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                calls.append(1)
                whole = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(data) + data
                connection.sendall(whole if len(calls) == 3 else whole[: len(whole) // 2])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with HttpSource(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN, patience_s=5) as source:
            assert source.read(0) == data
        thread.join()
    assert len(calls) == 3


def test_many_subscribers_at_once(server, log):
    trainer, errors = Trainer(log), []

    def follow(name):
        try:
            with HttpSource(server.url, TOKEN) as source:
                ack = Subscriber(source, Replica(make_blocks()), name).follow(until=5)
                assert ack.digest == digest_at(5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=follow, args=(f"s{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        trainer.train()
        time.sleep(0.02)
    for thread in threads:
        thread.join(30)
    assert not errors
    trainer.publisher.wait_for([f"s{i}" for i in range(6)], 5, timeout_s=1)


def test_connections_that_say_nothing_are_closed(monkeypatch):
    """They count against the limit, so a few hundred of them would shut every subscriber out."""
    monkeypatch.setattr("logra.sync.http.SILENCE_S", 0.5)
    monkeypatch.setattr("logra.sync.http.MAX_CONNECTIONS", 8)
    log = MemoryLog(run="ab", base="cd", targets=[["w", 2, 3]])
    with serve(log) as server, HttpSource(server.url, server.token, patience_s=20) as source:
        assert source.info().run == "ab"
        address = server.url.removeprefix("http://").split(":")
        silent = [socket.create_connection((address[0], int(address[1]))) for _ in range(10)]
        silent[0].sendall(b"GET /info HTTP/1.1\r\n")  # half a head
        with HttpSource(server.url, server.token, patience_s=20) as other:
            assert other.info().run == "ab"
        assert source.info().run == "ab"  # a connection that has been used is kept
        for sock in silent:
            sock.close()

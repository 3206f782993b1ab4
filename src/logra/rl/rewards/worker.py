"""The loop of a worker process: load the functions, then score batches until the pipe closes.

Requests are pickles of the parent's own data. Replies are JSON, so that nothing a reward function returns is
unpickled in the trainer:
    {"ready": [[column, ...], ...]}              once: the columns each function needs
    {"failed": text}                             a function could not be loaded
    {"begun": true}                              it has read a task: what happens now is the task's doing
    {"scores": [[value, status, message], ...]}  the next rollouts of the task
    {"breach": text}                             a function broke its contract
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

from logra.errors import UserError
from logra.rl.rewards.load import ContractError, Loaded, load, traceback_text
from logra.rl.rewards.spec import Score


class Channel:
    """The worker's end of the pipe. A forked child that returns into the loop ends without an answer."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._connection = Connection(descriptor)
        self._owner = os.getpid()

    def receive(self) -> bytes | None:
        """The next request, None once the parent has closed the pipe or is gone."""
        if os.getpid() != self._owner:
            os._exit(0)
        try:
            return self._connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return None

    def send(self, reply: dict[str, Any]) -> None:
        if os.getpid() != self._owner:
            os._exit(0)
        self._connection.send_bytes(json.dumps(reply).encode())


def main(descriptor: int) -> None:
    sys.argv = [""]
    os.dup2(2, 1)  # prints of a reward function are diagnostics; the program's own stdout stays clean
    channel = Channel(descriptor)
    first = channel.receive()
    if first is None:
        return
    try:
        functions = [load(spec) for spec in pickle.loads(first)]
    except UserError as error:
        channel.send({"failed": str(error)})
        return
    channel.send({"ready": [function.needs for function in functions]})
    while (request := channel.receive()) is not None:
        serve(channel, functions, request)


def serve(channel: Channel, functions: list[Loaded], request: bytes) -> None:
    try:
        index, batch = pickle.loads(request)
    except Exception:  # whatever a class of the data does in its own unpickling
        channel.send({"breach": f"the prompts or columns cannot be read by a reward worker:\n{traceback_text()}"})
        return
    channel.send({"begun": True})
    try:
        for scores in functions[index].score(batch):
            channel.send({"scores": [_wire(score) for score in scores]})
    except ContractError as error:
        channel.send({"breach": str(error)})


def _wire(score: Score) -> tuple[float | None, str, str]:
    return score.value, score.status, score.message

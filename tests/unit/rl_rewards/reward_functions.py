"""Reward functions that behave, and ones that do not. Loaded by path in the worker processes."""

import asyncio
import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
import time


def lengths(completions, **kwargs):
    return [float(len(c)) for c in completions]


def named_only(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def scaled(completions, factor=1.0):
    return [factor * len(c) for c in completions]


def batch_size(completions, **kwargs):
    return [len(completions)] * len(completions)


def sees(prompts, completions, completion_ids, **columns):
    """Encodes what it was given, one digit a check."""
    return [
        float(
            isinstance(p, str)
            + 10 * isinstance(c, str)
            + 100 * isinstance(ids, list)
            + 1000 * len(columns)
            + 10000 * len(ids)
        )
        for p, c, ids in zip(prompts, completions, completion_ids, strict=True)
    ]


def chat_content(completions, **kwargs):
    return [float(c[0]["content"]) if c[0]["role"] == "assistant" else None for c in completions]


async def slow_async(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0] * len(completions)


def only_numbers(completions, **kwargs):
    return [1.0 if c.isdigit() else None for c in completions]


def bools(completions, **kwargs):
    return [c == "yes" for c in completions]


def raises(completions, **kwargs):
    raise KeyError("the judge lost its key")


def exits(completions, **kwargs):
    sys.exit(3)


def some_nan(completions, **kwargs):
    return [float("nan") if c == "nan" else float("inf") if c == "inf" else 1.0 for c in completions]


def too_short(completions, **kwargs):
    return [1.0]


def strings(completions, **kwargs):
    return ["1.0"] * len(completions)


def array(completions, **kwargs):
    import numpy

    return numpy.ones(len(completions))


def tensors(completions, **kwargs):
    import torch

    return [torch.tensor(1.0)] * len(completions)


def single_number(completions, **kwargs):
    return 1.0


def hangs(completions, **kwargs):
    time.sleep(1000)


def hangs_in_c(completions, pid_file=(), **kwargs):
    for file in pid_file:
        with open(file, "w") as out:
            out.write(f"{os.getpid()}\n")
    ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the interpreter lock, as a stuck regular expression does


def dies(completions, **kwargs):
    os._exit(7)


def segfaults(completions, **kwargs):
    os.kill(os.getpid(), 11)


def prints(completions, **kwargs):
    print("noise on stdout")
    os.write(1, b"raw noise\n")
    sys.stdout.write("x" * 100_000)
    return [1.0] * len(completions)


def forks_and_hangs(completions, pid_file, **kwargs):
    for file in pid_file:
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(file, "w") as out:
            out.write(f"{os.getpid()} {child} {sleeper.pid}\n")
    time.sleep(1000)


def forked_child_returns(completions, **kwargs):
    """The child comes back out of the function as well, which must not make a second answer."""
    os.fork()
    return [2.0] * len(completions)


def dies_leaving_the_pipe_open(completions, **kwargs):
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(5)


def pool_inside(completions, **kwargs):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(float, [c for c in completions])


def modules(completions, **kwargs):
    return [float("torch" in sys.modules) + 10 * float("transformers" in sys.modules)] * len(completions)


def main_thread(completions, **kwargs):
    return [float(threading.current_thread() is threading.main_thread())] * len(completions)


def pids(completions, **kwargs):
    return [os.getpid()] * len(completions)


def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "die":
        os._exit(9)
    if solution_str == "raise":
        raise ValueError("bad solution")
    score = float(solution_str == ground_truth) + bonus
    return {"score": score, "acc": True} if data_source == "dict" else score


class Judge:
    @staticmethod
    def fair(completions, **kwargs):
        return [0.5] * len(completions)


def positional(completions, /):
    return [1.0] * len(completions)


NOT_CALLABLE = 3

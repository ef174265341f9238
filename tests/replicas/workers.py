"""Runs functions in several processes that are the workers of one MultiWorkerMirroredStrategy.

They are forks of a process that has imported TensorFlow and computed nothing, which is what takes
longest to start.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import pathlib
import pickle
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

# Only for what hangs: a machine that is busy may take long.
_TIMEOUT = 3600
# For the others to go on where one has died. They cannot, so that more seconds would be lost.
_GRACE = 2


def run(
    calls: Sequence[tuple[Callable[..., Any], dict[str, Any]]], count: int, *, may_die: bool = False
) -> list[list]:
    """Calls functions, one after the other, in each of `count` worker processes on 127.0.0.1.

    Args:
        calls: functions of modules, and arguments that can be pickled. A function is called with
            the strategy, the worker's index and its arguments.
        count: int. How many workers.
        may_die: bool. Whether a worker may end before it is done. Defaults to False: that is an
            error with its last lines.

    Returns:
        list, for each call, of lists, for each worker, of what the function returned; None for one
        that did not get that far. Once one worker was killed, the others are, too.
    """
    return _run(calls, free_ports(count), may_die)


def in_own_process(function: Callable[..., Any], **arguments: Any) -> Any:
    """Calls a function in a process of its own, in which TensorFlow has done nothing yet.

    Args:
        function: function of a module.
        **arguments: what it is called with; can be pickled.

    Returns:
        What it returned.
    """
    [[returned]] = _run([(function, arguments)], [], may_die=False)
    return returned


def _run(
    calls: Sequence[tuple[Callable[..., Any], dict[str, Any]]], ports: list[int], may_die: bool
) -> list[list]:
    """Calls functions in a worker for each port, or without any in one process without strategy."""
    count = max(1, len(ports))
    with tempfile.TemporaryDirectory() as folder:
        results = [pathlib.Path(folder) / f"{index}.pickle" for index in range(count)]
        logs = [path.with_suffix(".log") for path in results]
        context = _forkserver()
        # Names, so that nothing is imported before the strategy is made.
        names = [(f.__module__, f.__name__, arguments) for f, arguments in calls]
        processes = [
            context.Process(target=_be_worker, args=(index, results, logs[index], ports, names))
            for index in range(count)
        ]
        for process in processes:
            process.start()
        _wait(processes)
        outputs = "\n".join(f"--- worker {i}\n{log.read_text()}" for i, log in enumerate(logs))
        print(outputs)  # pytest shows it where a test fails
        returned = [pickle.loads(p.read_bytes()) if p.exists() else [] for p in results]
        for i, log in enumerate(logs if not may_die else ()):
            if len(returned[i]) < len(calls):
                raise AssertionError(f"Worker {i} has died:\n{_last_lines(log)}")
    return [[r[i] if i < len(r) else None for r in returned] for i in range(len(calls))]


def start(
    program: str, arguments: Sequence[Sequence[str]], outputs: Sequence[pathlib.Path | None]
) -> list[BaseProcess]:
    """Starts a program as workers on 127.0.0.1.

    Args:
        program: its source. It makes the strategy.
        arguments: for each worker, those of its command line.
        outputs: for each worker, where what it prints goes; None leaves that alone.
    """
    ports = free_ports(len(arguments))
    processes = [
        _forkserver().Process(target=_be_program, args=(program, *each, tf_config(i, ports)))
        for i, each in enumerate(zip(arguments, outputs, strict=True))
    ]
    for process in processes:
        process.start()
    return processes


def tf_config(index: int, ports: list[int]) -> str:
    """What TF_CONFIG says to a worker."""
    workers = [f"127.0.0.1:{port}" for port in ports]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _last_lines(log: pathlib.Path) -> str:
    return "\n".join(log.read_text().splitlines()[-30:])


def _forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.replicas.preloaded"])
    return context


def _wait(processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE)
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.1)
    print("Exit codes:", *[process.exitcode for process in processes])
    for process in processes:
        process.close()


def _be_worker(
    index: int,
    results: list[pathlib.Path],
    log: pathlib.Path,
    ports: list[int],
    calls: list[tuple[str, str, dict[str, Any]]],
) -> None:
    """Is one of the workers, or without ports a process of its own."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import tensorflow as tf

    given: tuple[Any, ...] = ()
    if ports:
        os.environ["TF_CONFIG"] = tf_config(index, ports)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        # Before anything else that TensorFlow does.
        given = tf.distribute.MultiWorkerMirroredStrategy(), index
    import keras_mp
    from tests import speed

    speed.settle()
    returned = []
    for module, name, arguments in calls:
        keras_mp.set_global_policy(None)
        with warnings.catch_warnings():
            warnings.simplefilter("error", keras_mp.MixedPrecisionWarning)
            function = getattr(importlib.import_module(module), name)
            returned.append(function(*given, **arguments))
        partial = results[index].with_suffix(".partial")
        partial.write_bytes(pickle.dumps(returned))
        partial.rename(results[index])
    # Who leaves first would close what the others still read from.
    all_done = [result.with_suffix(".done") for result in results]
    all_done[index].touch()
    while not all(each.exists() for each in all_done):
        time.sleep(0.05)
    if not ports:  # Servers of TensorFlow never end.
        sys.stdout.flush()
        os._exit(0)


def _be_program(
    program: str, arguments: Sequence[str], output: pathlib.Path | None, config: str
) -> None:
    """Is a worker that a program makes."""
    if output is not None:
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
    os.environ["TF_CONFIG"] = config
    sys.argv = ["program.py", *arguments]
    exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})

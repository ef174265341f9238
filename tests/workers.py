"""Runs a function in several processes that are the workers of one MultiWorkerMirroredStrategy.

python -m tests.workers index ports module function arguments result
"""

import contextlib
import importlib
import json
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

_ROOT = pathlib.Path(__file__).parent.parent


def run(function: Callable[..., Any], count: int, timeout: float = 240, **arguments: Any) -> list:
    """Calls a module's function in each of `count` worker processes on 127.0.0.1.

    Args:
        function: called with the strategy, the worker's index and the arguments.
        count: int. How many workers.
        timeout: seconds, after which whoever still runs is killed.
        **arguments: what JSON can hold.

    Returns:
        list, for each worker, of what the function returned; None for one that did not get that
        far. Once one worker was killed, the others are given 20 seconds to notice.
    """
    ports = ",".join(str(port) for port in free_ports(count))
    with tempfile.TemporaryDirectory() as folder:
        results = [pathlib.Path(folder) / f"{index}.pickle" for index in range(count)]
        logs = [path.with_suffix(".log") for path in results]
        processes = [
            _start(index, ports, function, arguments, results[index], logs[index])
            for index in range(count)
        ]
        _wait(processes, timeout)
        outputs = "\n".join(f"--- worker {i}\n{log.read_text()}" for i, log in enumerate(logs))
        print(outputs)  # pytest shows it where a test fails
        return [pickle.loads(p.read_bytes()) if p.exists() else None for p in results]


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


def _start(
    index: int,
    ports: str,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    result: pathlib.Path,
    log: pathlib.Path,
) -> subprocess.Popen:
    names = [function.__module__, function.__name__, json.dumps(arguments), str(result)]
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.workers", str(index), ports, *names],
            cwd=_ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: list[subprocess.Popen], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        if any(process.poll() not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + 20)
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.1)


def main() -> None:
    """Is one of the workers."""
    index, ports, module, function, arguments, result = sys.argv[1:]
    os.environ["TF_CONFIG"] = tf_config(int(index), [int(port) for port in ports.split(",")])
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    # Before anything else that TensorFlow does.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import keras_mp

    with warnings.catch_warnings():
        warnings.simplefilter("error", keras_mp.MixedPrecisionWarning)
        function = getattr(importlib.import_module(module), function)
        returned = function(strategy, int(index), **json.loads(arguments))
    partial = pathlib.Path(result).with_suffix(".partial")
    partial.write_bytes(pickle.dumps(returned))
    partial.rename(result)


if __name__ == "__main__":
    main()

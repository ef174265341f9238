"""Kills workers of a run again and again, and compares what it ends with to an undisturbed run.

The programs are those of docs/replicas.md.
"""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import sklearn.datasets

KILLS = 20
WORKERS = 2
EPOCHS = 300
# So many seconds after its first checkpoint a run is hit, at the latest.
LATEST = 1.0


def programs() -> dict[str, str]:
    """The programs of the page, by the name that stands above them."""
    page = pathlib.Path(__file__).parents[2] / "docs" / "replicas.md"
    return dict(
        re.findall(r"`(\w+\.py)`[^\n]*\n\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    )


def run(kills: int = KILLS) -> dict:
    """Trains with two workers, undisturbed and killed at random, and prints how they differ."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for file, program in programs().items():
            (folder / file).write_text(program)
        digits = sklearn.datasets.load_digits()
        images = (digits.data / 16).astype("float32")
        np.savez(folder / "data.npz", images=images, labels=digits.target.astype("int32"))
        _train(folder, "undisturbed", kills=0)
        killed_in = _train(folder, "killed", kills)
        undisturbed, killed = _state(folder / "undisturbed"), _state(folder / "killed")
    different = [key for key in undisturbed if not np.array_equal(undisturbed[key], killed[key])]
    assert undisturbed.keys() == killed.keys()
    result = {"kills": len(killed_in), "killed_in": killed_in, "compared": len(undisturbed)}
    result |= {"different": different, "counters": _counters(undisturbed)}
    print(f"\nfaults: {len(killed_in)} kills, in the epochs {killed_in} of {EPOCHS}.")
    print(f"{len(undisturbed)} variables were compared, {len(different)} differ: {different}")
    print(f"The counters of both: {result['counters']}")
    return result


def _train(folder: pathlib.Path, name: str, kills: int) -> list[int]:
    """Trains in a subfolder, and returns the epochs in which a worker was killed."""
    command = [sys.executable, "train.py", name, "data.npz", str(EPOCHS)]
    log, state = folder / f"{name}.log", folder / name / "checkpoint"
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "supervise.py", str(WORKERS), "600", name, *command],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
        )
    killed_in: list[int] = []
    while len(killed_in) < kills and supervisor.poll() is None:
        started = re.findall(r"^worker \d+ is process (\d+)$", log.read_text(), re.MULTILINE)
        generation = len(killed_in) + 1
        if len(started) < generation * WORKERS or _epoch(state) <= max([0, *killed_in]):
            time.sleep(0.02)
            continue
        time.sleep(random.uniform(0, LATEST))
        epoch = _epoch(state)
        os.kill(int(random.choice(started[-WORKERS:])), signal.SIGKILL)
        killed_in.append(epoch)
        print(f"killed in epoch {epoch}", flush=True)
    if supervisor.wait():
        raise RuntimeError(log.read_text())
    return killed_in


def _epoch(state: pathlib.Path) -> int:
    found = (
        re.match(r'model_checkpoint_path: "ckpt-(\d+)"', state.read_text())
        if state.exists()
        else None
    )
    return int(found[1]) if found else 0


def _state(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Every variable of the newest checkpoint."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(folder))
    keys = [key for key in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in key]
    return {key: reader.get_tensor(key) for key in sorted(keys)}


def _counters(state: dict[str, np.ndarray]) -> dict[str, float]:
    """The loss scale and all that is counted."""
    return {k.partition("/.")[0]: float(v) for k, v in state.items() if v.ndim == 0}

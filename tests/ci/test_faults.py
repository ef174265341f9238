"""Workers that are killed, compute NaN or stand still: the programs of docs/replicas.md."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.common import once
from tests.models import digits
from tests.replicas import workers

EPOCHS = 8
PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "replicas.md"
PROGRAMS = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.fixture
def files(tmp_path):
    images, labels = digits()
    np.savez(tmp_path / "good.npz", images=images, labels=labels)
    np.savez(tmp_path / "bad.npz", images=np.full_like(images, np.nan), labels=labels)
    return {"good": str(tmp_path / "good.npz"), "bad": str(tmp_path / "bad.npz")}


def start(folder, *files):
    """Starts `train.py`, as a worker for each file."""
    arguments = [[str(folder), file, str(EPOCHS)] for file in files]
    return workers.start(PROGRAMS["train.py"], arguments, [None] * len(files))


def end(processes):
    codes = []
    for process in processes:
        process.join()
        codes.append(process.exitcode)
        process.close()
    return codes


def epoch(folder):
    latest = tf.train.latest_checkpoint(str(folder))
    return int(latest.rpartition("-")[2]) if latest else 0


def wait_for_epoch(folder, number, processes):
    while epoch(folder) < number:
        assert all(process.is_alive() for process in processes)
        time.sleep(0.02)


def state(folder):
    """All variables of the newest checkpoint."""
    assert epoch(folder) == EPOCHS
    reader = tf.train.load_checkpoint(str(folder))
    keys = [key for key in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in key]
    return {key: reader.get_tensor(key) for key in keys}


def test_it_ends_as_an_undisturbed_run(tmp_path, files):
    good, bad = files["good"], files["bad"]
    assert end(start(tmp_path / "undisturbed", good, good)) == [0, 0]
    expected = state(tmp_path / "undisturbed")
    counters = {key.split("/.")[0]: v for key, v in expected.items() if v.ndim == 0}
    assert any(key.endswith("loss_scale") and 1 < v < 2**20 for key, v in counters.items())

    killed = start(tmp_path / "run", good, good)
    wait_for_epoch(tmp_path / "run", 1, killed)
    os.kill(killed[1].pid, signal.SIGSTOP)  # it is slow,
    time.sleep(0.2)
    os.kill(killed[1].pid, signal.SIGCONT)
    wait_for_epoch(tmp_path / "run", 2, killed)
    for process in reversed(killed):  # and is killed.
        process.kill()
    assert end(killed) == [-signal.SIGKILL] * 2
    shutil.copytree(tmp_path / "run", tmp_path / "fewer")
    assert 2 <= epoch(tmp_path / "run") < EPOCHS
    assert end(start(tmp_path / "run", good, good)) == [0, 0]
    resumed = state(tmp_path / "run")
    assert resumed.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(resumed[key], value, key)

    begin = epoch(tmp_path / "fewer")
    healthy, sick = start(tmp_path / "fewer", good, bad)
    assert end([sick]) == [3]
    healthy.kill()
    assert end([healthy]) == [-signal.SIGKILL]
    assert epoch(tmp_path / "fewer") == begin
    assert end(start(tmp_path / "fewer", good)) == [0]
    fewer = state(tmp_path / "fewer")
    for key, value in expected.items():
        # Gradients of 16 samples and of 32 are rounded to float16: some units are on or off then.
        difference = np.mean(np.abs(fewer[key].astype("float64") - value))
        is_counted = value.ndim == 0 and "_tracker" not in key
        assert difference <= (0 if is_counted else 2e-3), key


# What `supervise.py` starts here. Worker 1 has one fault after the other, and worker 0 waits.
WORKER = """
import json, os, pathlib, sys, time
folder, number = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / "checkpoint").touch()
if number == "1":
    starts = folder / "starts"
    count = int(starts.read_text()) + 1 if starts.exists() else 1
    starts.write_text(str(count))
    if count == 1:
        os.kill(os.getpid(), 9)
    if count == 3:
        sys.exit(3)
if len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]) == 2:
    time.sleep(3600)
"""


def supervise(count, patience, folder, *command):
    """Returns what `supervise.py` prints of ends, its last words, and its exit code."""
    program = [sys.executable, "-c", PROGRAMS["supervise.py"]]
    done = subprocess.run(
        [*program, str(count), str(patience), str(folder), sys.executable, "-c", *command],
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if "is process" not in line]
    return lines, done.stderr, done.returncode


@once
def test_the_first_program_of_the_page(tmp_path):
    page = PAGE.read_text()
    program = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    outputs = [tmp_path / f"{i}.txt" for i in range(2)]
    for _ in range(2):  # The second time it finds a checkpoint of the last step.
        assert end(workers.start(program, [[str(tmp_path / "run")]] * 2, outputs)) == [0, 0]
        printed = [file.read_text().strip() for file in outputs]
        assert printed == ["[0.75 1.5 ] 32768.0"] * 2
        assert f"With two workers, both print `{printed[0]}`" in page


@once
def test_all_are_started_again_but_the_one_that_computes_nan(tmp_path):
    lines, _, code = supervise(2, 5, tmp_path, WORKER, str(tmp_path), "{}")
    # On a machine that is slow patience may end more often.
    assert [line for i, line in enumerate(lines) if line not in lines[:i]] == [
        "exit codes [None, -9]: workers [0, 1] go on",
        "exit codes [None, None]: workers [0, 1] go on",
        "exit codes [None, 3]: workers [0] go on",
    ]
    assert code == 0


@once
def test_it_gives_up(tmp_path):
    lines, error, code = supervise(2, 600, tmp_path, "raise SystemExit(3)")
    assert code == 1
    assert lines
    assert "gave up with workers [" in error

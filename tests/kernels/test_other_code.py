"""What is not ours keeps its bits, and what is ours computes the same twice."""

import json
import pathlib
import subprocess
import sys

from tests.common import once

ROOT = pathlib.Path(__file__).parent.parent.parent


def run(program, *arguments):
    command = [sys.executable, "-m", f"tests.kernels.{program}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_is_not_ours_keeps_its_bits():
    """Before `import keras_mp`, after each call of ours, and beside ours."""
    found = json.loads(run("controls")[-1])
    # A kernel of TensorFlow that is not the same twice says nothing.
    assert len(found.pop("unstable without ours")) < 3
    assert len(found) == 5
    assert {call: changed for call, changed in found.items() if changed} == {}


@once
def test_processes_on_a_busy_machine_get_the_same_bits():
    hashes = run("same_bits", "3")
    assert len(hashes) == 3
    assert len(set(hashes)) == 1

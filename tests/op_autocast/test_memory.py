"""What a tape keeps in eager, in a process of its own."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.common import once

pytestmark = once

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import sys
import tensorflow as tf
import keras_mp

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

WIDTH, BATCH, LAYERS = 256, 1024, 16
weights = [tf.Variable(tf.random.normal([WIDTH, WIDTH]) / 16) for _ in range(LAYERS)]
biases = [tf.Variable(tf.zeros([WIDTH])) for _ in range(LAYERS)]

def model(x, add):
    for w, b in zip(weights, biases):
        x = tf.nn.relu(add(x @ w, b))
    return x

x = tf.random.normal([BATCH, WIDTH])
for add in (tf.nn.bias_add, tf.add):
    for enabled in (False, True):
        with keras_mp.autocast("bfloat16", enabled=enabled):
            model(x[:8], add)
            before = resident()
            with tf.GradientTape() as tape:
                y = model(x, add)
            print(resident() - before)
            del tape, y
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="It asks Linux.")
def test_a_tape_keeps_16_bits():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        # So that what is freed is given back at once.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "100000", "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    bias_add, bias_add_16, add, add_16 = map(int, done.stdout.split())
    assert bias_add_16 < 0.7 * bias_add
    assert add_16 < 0.7 * add

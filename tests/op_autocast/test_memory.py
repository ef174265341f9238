"""What a tape keeps in eager, in a process of its own."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.common import needs_onednn, once

pytestmark = once

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import sys
import tensorflow as tf
import keras_mp

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

WIDTH, BATCH, LAYERS = 128, 2048, 20
weights = [tf.Variable(tf.random.normal([WIDTH, WIDTH]) / 11) for _ in range(LAYERS)]
biases = [tf.Variable(tf.zeros([WIDTH])) for _ in range(LAYERS)]

def model(x, add):
    for w, b in zip(weights, biases):
        x = tf.nn.relu(add(x @ w, b))
    return x

x = tf.random.normal([BATCH, WIDTH])
kept = []  # All tapes stay, so that no memory is used a second time.
for add in (tf.nn.bias_add, tf.add):
    for enabled in (False, True):
        with keras_mp.autocast("bfloat16", enabled=enabled):
            for run in range(4):
                if run == 1:
                    before = resident()
                with tf.GradientTape() as tape:
                    y = model(x, add)
                kept.append((tape, y))
        print((resident() - before) // 3)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="It asks Linux.")
@needs_onednn  # TensorFlow's own product of bfloat16 matrices makes float32 copies of them.
def test_a_tape_keeps_16_bits():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    bias_add, bias_add_16, add, add_16 = map(int, done.stdout.split())
    assert bias_add_16 < 0.7 * bias_add
    assert add_16 < 0.7 * add

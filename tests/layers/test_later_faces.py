"""Faces that are made when they are taken are on the tapes that know their tensors."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import MODES, once

K = tf.keras


def of_a_constant(h):
    y = h * 3.0
    with tf.GradientTape() as tape:
        tape.watch(h)
        z = tf.reduce_sum(y * h)
    return tape.gradient(z, h)


def of_what_is_not_recorded(h):
    with tf.GradientTape() as tape:
        tape.watch(h)
        with tape.stop_recording():
            y = h * 3.0
        z = tf.reduce_sum(y) + tf.reduce_sum(h)
    return tape.gradient(z, h)


def of_a_constant_of_an_inner_tape(h):
    with tf.GradientTape() as outer:
        outer.watch(h)
        y = h * 3.0
        with tf.GradientTape() as inner:
            inner.watch(h)
            z = tf.reduce_sum(y * h)
        gradient = inner.gradient(z, h)
    return tf.stack([gradient, outer.gradient(z, h)])


def of_a_constant_in_forward_mode(h):
    y = h * 3.0
    with tf.autodiff.ForwardAccumulator(h, tf.ones_like(h)) as accumulator:
        z = tf.reduce_sum(y * h)
    return accumulator.jvp(z)


def taken_twice(h):
    with tf.GradientTape() as tape:
        tape.watch(h)
        y = h * 3.0
        with tape.stop_recording():
            shift = tf.reduce_sum(y)
        z = tf.reduce_sum(y) + shift
    return tape.gradient(z, h)


def of_an_array_that_changes(h):
    array = np.ones(4, "float32")
    y = h * array
    array[:] = 9.0
    return y / 3.0


class Layer(K.layers.Layer):
    def __init__(self, program, **kwargs):
        super().__init__(**kwargs)
        self.program = program

    def call(self, x):
        # A product has no face.
        return self.program(tf.matmul(x, tf.eye(4, dtype=x.dtype)))


class Rolls(K.layers.Layer):
    """A layer with a position that moves on."""

    def build(self, shape):
        self.position = tf.Variable(0, trainable=False)

    def call(self, x):
        self.position.assign(0)
        y = tf.roll(2.0 * tf.matmul(x, tf.eye(4, dtype=x.dtype)), self.position, 1)
        self.position.assign_add(1)
        return y / 3.0


PROGRAMS = [
    *(of_a_constant, of_what_is_not_recorded, of_a_constant_of_an_inner_tape),
    *(of_a_constant_in_forward_mode, taken_twice, of_an_array_that_changes, Rolls),
]


@once
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_as_in_float32(program, policy, mode):
    def made(dtype):
        if program is Rolls:
            return Rolls(dtype=dtype)
        return Layer(program, dtype=dtype)

    x = tf.constant([[1.0, 2.0, 3.0, 4.0]])
    ours, control = made(keras_mp.Policy(policy)), made("float32")
    ours(x), control(x)
    found = tf.cast(MODES[mode](ours)(x), tf.float32)
    np.testing.assert_allclose(found, MODES[mode](control)(x), rtol=2.0**-8)

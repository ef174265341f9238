"""What is replaced in TensorFlow for regions: only if it works, and only they notice."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import hooks, kernels
from keras_mp.kernels import backward
from keras_mp.op_autocast import region_check
from keras_mp.tensorflow_api import gradients
from tests.common import assert_all_equal, once
from tests.op_autocast.common import normal

pytestmark = once


@pytest.fixture(autouse=True)
def installed():
    """What the first region of a process replaces for good."""
    kernels.install()


@pytest.mark.parametrize("when", ["in a region", "between regions"])
def test_a_function_of_other_code_around_ours_stays(when):
    with keras_mp.autocast("bfloat16"):
        pass
    name, calls = gradients.record_in_graph, []
    ours = name.get()

    def theirs(*args):
        calls.append(args[0])
        return ours(*args)

    x = tf.constant([[3.0]])

    @tf.function
    def differentiate(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with keras_mp.autocast("bfloat16"):
                y = tf.nn.relu(x @ x)
        return tape.gradient(y, x)

    with keras_mp.autocast("bfloat16", enabled=when == "in a region"):
        name.set(theirs)
    try:
        np.testing.assert_array_equal(differentiate(x), [[6.0]])
        with keras_mp.autocast("bfloat16"):
            np.testing.assert_array_equal(differentiate(x), [[6.0]])
        assert name.get() is theirs
        assert calls.count("MatMul") >= 2
    finally:
        name.set(ours)


def test_bitwise_as_without_keras_mp_outside():
    x, w = normal(8, 8), tf.Variable(normal(8, 8, seed=1))

    def step():
        with tf.GradientTape() as tape:
            y = tf.nn.softmax(tf.nn.relu(x @ w) @ w)
            loss = tf.reduce_mean(y**2)
        return [y, loss, tape.gradient(loss, w)]

    before = step() + tf.function(step)()
    with keras_mp.autocast("bfloat16"):
        step()
    after = step() + tf.function(step)()
    assert_all_equal(after, before)


BREAKAGES = [
    ("TFE_Py_FastPathExecute", "float32 product, in eager"),
    ("_apply_op_helper", "float32 product, in a function"),
    ("record_gradient", ""),
    ("make_function_context", "1 traces"),
    ("from_func_graph", "nothing needs"),
]


@pytest.fixture
def unchecked(monkeypatch):
    """A process in which no region was entered."""
    monkeypatch.setattr(region_check._State, "is_checked", False)


@pytest.mark.parametrize(("name", "found"), BREAKAGES)
def test_a_tensorflow_that_does_not_use_a_function_is_refused(name, found, unchecked, monkeypatch):
    door = [row for row in hooks.installed() if getattr(row.place, "attribute", "") == name]
    door = [row for row in door if row in backward.REPLACEMENTS]
    if door:
        hooks.uninstall(door)
    else:
        nothing = region_check._PAIRS._replace(make=lambda original: original)
        hooks.uninstall([region_check._PAIRS])
        monkeypatch.setattr(region_check, "_PAIRS", nothing)
    expected = f"does not know TensorFlow.*{found}"
    try:
        with pytest.raises(RuntimeError, match=expected), keras_mp.autocast("bfloat16"):
            pass
        assert region_check._PAIRS not in hooks.installed()
    finally:
        hooks.install(door)
        monkeypatch.undo()
        hooks.install([region_check._PAIRS])


def test_entered_first_within_a_function_and_a_tape(unchecked):
    w = tf.Variable(normal(2, 2))

    @tf.function
    def function():
        with tf.GradientTape() as tape, keras_mp.autocast("bfloat16"):
            y = w @ w
        return tape.gradient(y, w)

    assert function().dtype == tf.float32
    assert region_check._State.is_checked

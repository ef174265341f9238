"""What is replaced in TensorFlow: only while a region is in force, and only if it works."""

import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import kernels
from keras_mp.op_autocast import hooks
from keras_mp.tensorflow_api import gradients
from keras_mp.tensorflow_api.names import Name
from tests.common import once
from tests.op_autocast.common import normal

pytestmark = once


@pytest.fixture(autouse=True)
def installed():
    """What the first region of a process replaces for good."""
    kernels.install()


def in_place():
    return [hook.name.get() for hook in hooks._HOOKS]


def test_outside_of_a_region_tensorflow_is_its_own():
    own = in_place()
    with keras_mp.autocast("bfloat16"):
        assert all(ours is not each for ours, each in zip(in_place(), own))
        with keras_mp.autocast(enabled=False), keras_mp.autocast("float16"):
            pass
        assert all(ours is not each for ours, each in zip(in_place(), own))
    assert all(now is each for now, each in zip(in_place(), own))
    with keras_mp.autocast(enabled=False):
        assert all(now is each for now, each in zip(in_place(), own))


def test_the_last_region_to_end_takes_the_hooks_away():
    own, entered, end = in_place(), threading.Event(), threading.Event()

    def other():
        with keras_mp.autocast("bfloat16"):
            entered.set()
            end.wait()

    thread = threading.Thread(target=other)
    with keras_mp.autocast("float16"):
        thread.start()
        entered.wait()
    assert in_place()[0] is not own[0]
    # In this thread nothing is autocast, though the hooks are there.
    x = normal(4, 4)
    z = x @ x
    assert not tf.reduce_all(tf.cast(tf.cast(z, "bfloat16"), "float32") == z)
    end.set()
    thread.join()
    assert all(now is each for now, each in zip(in_place(), own))


def test_a_function_of_other_code_around_a_hook_stays():
    hook = hooks._HOOKS[1]
    own = hook.name.get()
    with keras_mp.autocast("bfloat16"):
        ours = hook.name.get()

        def theirs(*args, **kwargs):
            return ours(*args, **kwargs)

        hook.name.set(theirs)
    assert hook.name.get() is theirs
    function = tf.function(lambda x: x @ x)
    x = normal(4, 4)
    np.testing.assert_array_equal(function(x), x @ x)
    with keras_mp.autocast("bfloat16"):
        assert function(x).dtype == tf.float32
        assert hook.name.get() is theirs  # Ours is in it.
    assert hook.name.get() is theirs
    hook.name.set(own)


def test_a_function_that_wraps_a_hook_between_regions():
    hook = next(each for each in hooks._HOOKS if each.name is gradients.record_in_graph)
    own = hook.name.get()

    def wrapped(inner):
        @functools.wraps(inner)
        def call(*args, **kwargs):
            return inner(*args, **kwargs)

        return call

    with keras_mp.autocast("bfloat16"):
        hook.name.set(wrapped(hook.name.get()))
    hook.name.set(wrapped(hook.name.get()))
    x = tf.constant([[3.0]])

    @tf.function
    def differentiate(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with keras_mp.autocast("bfloat16"):
                y = tf.nn.relu(x @ x)
        return tape.gradient(y, x)

    np.testing.assert_array_equal(differentiate(x), [[6.0]])
    with keras_mp.autocast("bfloat16"):
        np.testing.assert_array_equal(differentiate(x), [[6.0]])
    hook.name.set(own)


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
    for found, expected in zip(after, before):
        np.testing.assert_array_equal(found, expected)


BREAKAGES = [
    ("TFE_Py_FastPathExecute", "float32 product, in eager"),
    ("_apply_op_helper", "float32 product, in a function"),
    ("record_gradient", ""),
    ("make_function_context", "1 traces"),
]


@pytest.mark.parametrize(("name", "found"), BREAKAGES)
def test_a_tensorflow_that_does_not_use_a_hook_is_refused(name, found, monkeypatch):
    own = in_place()
    broken = [hook for hook in hooks._HOOKS if hook.name.attribute == name]
    kept = tuple(hook for hook in hooks._HOOKS if hook not in broken)
    monkeypatch.setattr(hooks, "_HOOKS", kept)
    monkeypatch.setattr(hooks._State, "is_checked", False)
    expected = f"does not know TensorFlow.*{found}"
    with pytest.raises(RuntimeError, match=expected), keras_mp.autocast("bfloat16"):
        pass
    monkeypatch.undo()
    assert all(now is each for now, each in zip(in_place(), own))
    with keras_mp.autocast("bfloat16"):
        pass


def test_without_the_hook_on_functions_it_is_refused(monkeypatch):
    monkeypatch.setattr(hooks._State, "is_checked", False)
    hooks._take_back(hooks._PERMANENT)
    other = hooks._Hook(Name(f"{hooks.__name__}._expect"), lambda own: own)
    monkeypatch.setattr(hooks, "_PERMANENT", other)
    with pytest.raises(RuntimeError, match="nothing needs"), keras_mp.autocast("bfloat16"):
        pass
    monkeypatch.undo()
    hooks._put(hooks._PERMANENT)


def test_entered_first_within_a_function_and_a_tape(monkeypatch):
    monkeypatch.setattr(hooks._State, "is_checked", False)
    w = tf.Variable(normal(2, 2))

    @tf.function
    def function():
        with tf.GradientTape() as tape, keras_mp.autocast("bfloat16"):
            y = w @ w
        return tape.gradient(y, w)

    assert function().dtype == tf.float32
    assert hooks._State.is_checked

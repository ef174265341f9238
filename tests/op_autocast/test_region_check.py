"""What is replaced in TensorFlow for regions: only if it works, and only they notice."""

import pytest
import tensorflow as tf

import keras_mp
from keras_mp import hooks, kernels
from keras_mp.op_autocast import region_check
from tests.common import once
from tests.op_autocast.common import normal

pytestmark = once


@pytest.fixture(autouse=True)
def installed():
    """What the first region of a process replaces for good."""
    kernels.install()


BREAKAGES = [
    ("TFE_Py_FastPathExecute", "float32 product, in eager"),
    ("_apply_op_helper", "float32 product, in a function"),
    ("record_gradient", ""),
    ("make_function_context", "1 traces"),
]


@pytest.fixture
def unchecked(monkeypatch):
    """A process in which no region was entered."""
    monkeypatch.setattr(region_check._State, "is_checked", False)


@pytest.mark.parametrize(("name", "found"), BREAKAGES)
def test_a_tensorflow_that_does_not_use_a_function_is_refused(name, found, unchecked):
    rows = [row for row in hooks.installed() if getattr(row.place, "attribute", "") == name]
    assert rows
    hooks.uninstall(rows)
    expected = f"does not know TensorFlow.*{found}"
    try:
        with pytest.raises(RuntimeError, match=expected), keras_mp.autocast("bfloat16"):
            pass
    finally:
        hooks.install(rows)


def test_entered_first_within_a_function_and_a_tape(unchecked):
    w = tf.Variable(normal(2, 2))

    @tf.function
    def function():
        with tf.GradientTape() as tape, keras_mp.autocast("bfloat16"):
            y = w @ w
        return tape.gradient(y, w)

    assert function().dtype == tf.float32
    assert region_check._State.is_checked

"""Optimizers of Keras 2 compile each variable's update by default where there is a GPU."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, value

pytestmark = pytest.mark.skipif(IS_KERAS_3, reason="Keras 3 compiles no single updates.")
K = tf.keras
X, Y = np.ones([4, 3], "float32"), np.ones([4, 2], "float32")


def adam(**kwargs):
    optimizer = K.optimizers.Adam(0.01, **kwargs)
    optimizer.jit_compile = True  # which it turns off without a GPU
    return optimizer


def traces(optimizer):
    return optimizer._update_step_xla.experimental_get_tracing_count()


def make_model(policy):
    policy = keras_mp.Policy(policy)
    K.utils.set_random_seed(0)
    layers = [K.layers.Dense(units, dtype=policy) for units in (5, 2)]
    return K.Sequential([K.Input([3]), *layers])


@pytest.mark.parametrize(
    ("policy", "method"),
    [
        *((policy, None) for policy in ("mixed_bfloat16", "mixed_float16")),
        *(("bfloat16", "split"), ("bfloat16", "stochastic_rounding")),
        *(("float16", method) for method in ("split", "copy", "stochastic_rounding")),
    ],
)
def test_each_variable_is_compiled_once(policy, method):
    found = {}
    for jit_compile in (True, False):
        model, optimizer = make_model(policy), adam()
        optimizer.jit_compile = jit_compile
        given = optimizer
        if method:
            given = keras_mp.MasterWeightOptimizer(optimizer, method, seed=1)
        elif policy == "mixed_float16":
            given = keras_mp.LossScaleOptimizer(optimizer)
        model.compile(given, "mse", run_eagerly=method is None)
        for _ in range(3):
            model.train_on_batch(X, Y)
        assert traces(optimizer) == (len(model.trainable_variables) if jit_compile else 0)
        weights = given.float32_weights() if method else model.trainable_variables
        found[jit_compile] = [value(weight) for weight in weights]
    for compiled, own in zip(found[True], found[False], strict=True):
        np.testing.assert_allclose(compiled, own, atol=1e-5)


def test_a_loop_of_the_program_and_slots():
    model, optimizer = make_model("mixed_bfloat16"), adam()
    variables = model.trainable_variables
    loss = lambda: tf.reduce_mean(tf.cast(model(X), tf.float32) ** 2)  # noqa: E731
    step = steps.unscaled(optimizer, loss, variables)
    for _ in range(3):
        step()
    assert traces(optimizer) == len(variables)
    assert optimizer.iterations == 3
    for momentum in optimizer._momentums:
        assert momentum.dtype == tf.float32
        assert np.abs(momentum.numpy()).max() > 0


def test_a_trace_is_found_for_the_same_variable_in_the_same_dtype():
    layers = make_model("mixed_bfloat16").layers
    runs = []

    @tf.function
    def double(variable):
        value = tf.convert_to_tensor(variable)
        runs.append(value.dtype.name)
        return 2 * value

    for layer in layers:
        for dtype in ("float32", "bfloat16", "float32"):
            with keras_mp.autocast_scope(dtype):
                found = double(layer.kernel)
            assert found.dtype == dtype
            expected = 2 * tf.cast(layer.kernel, dtype)
            np.testing.assert_array_equal(found, expected)
    assert runs == ["float32", "bfloat16"] * 2

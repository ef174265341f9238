"""Layers in float8 on replicas: what they keep of their tensors is no gradient, and not scaled."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, mirrored

pytestmark = pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no float8.")


def sgd():
    return tf.keras.optimizers.SGD(0.1)


def weights_of_replicas(make_optimizer, loop, scales_loss):
    """The values of each weight on both replicas, by path, after four steps."""
    tf.keras.utils.set_random_seed(1)
    strategy = mirrored(2)
    with strategy.scope():
        dense = tf.keras.layers.Dense(4, name="float8")
        layers = [tf.keras.Input([8]), dense, tf.keras.layers.Dense(1, name="out")]
        model = tf.keras.Sequential(layers, name="model")
        dense.quantize("float8")
        optimizer = make_optimizer()
        if loop == "fit":
            model.compile(optimizer, "mse", jit_compile=False)
        else:
            optimizer.build(model.trainable_variables)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    y = x.sum(1, keepdims=True) / 8

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y)) / 2
            loss = optimizer.scale_loss(loss) if scales_loss else loss
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply_gradients(zip(gradients, variables))

    if loop == "fit":
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, epochs=2)
    else:
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat(2)
        run = tf.function(lambda *batch: strategy.run(step, args=batch))
        for batch in strategy.experimental_distribute_dataset(dataset):
            run(*batch)
    results = strategy.experimental_local_results
    return {weight.path: [np.float32(r) for r in results(weight.value)] for weight in model.weights}


@pytest.mark.parametrize(("loop", "scales_loss"), [("fit", False), ("own", True), ("own", False)])
def test_it_trains_as_with_the_optimizers_of_keras(loop, scales_loss):
    def control():
        return tf.keras.optimizers.LossScaleOptimizer(sgd(), 128) if scales_loss else sgd()

    def ours():
        # `fit` scales the loss by itself.
        scale = 128 if scales_loss else 1 if loop == "fit" else 1024
        return keras_mp.LossScaleOptimizer(sgd(), scale)

    expected = weights_of_replicas(control, loop, scales_loss)
    with warnings.catch_warnings():
        if not scales_loss:
            warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
        actual = weights_of_replicas(ours, loop, scales_loss)
    histories = [pair for path, pair in actual.items() if "inputs_amax_history" in path]
    assert all(not np.array_equal(*pair) for pair in histories)
    assert len(histories) == 1
    for path, pair in expected.items():
        np.testing.assert_array_equal(actual[path], pair, err_msg=path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nobody_is_told_to_set_the_policy_that_was_set(dtype):
    with (
        keras_mp.policy_scope(f"float8_from_mixed_{dtype}"),
        warnings.catch_warnings(record=True) as w,
    ):
        warnings.simplefilter("always")
        model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(1)])
        model.compile(keras_mp.LossScaleOptimizer(sgd()), "mse")
    assert [str(each.message) for each in w] == []

"""Programs that are rewritten for a GPU train as in float32 but for rounding.

They run on the CPU, whose kernels compute the same operations in the same dtypes.
"""

import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import graph_rewrite
from tests.common import distance, needs_cuda, once, value
from tests.compat import tf1_program
from tests.grappler import rewritten
from tests.grappler.rewritten import update
from tests.models import digits

V1 = tf.compat.v1
GPUS = ("GPU 6.1", "GPU 7.0", "GPU 8.0", "GPU 9.0")
TENSOR_CORES = GPUS[1:]

pytestmark = needs_cuda


def enable(optimizer):
    """Turns the rewrite to float16 on, whatever is fast on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
        return keras_mp.enable_mixed_precision_graph_rewrite(optimizer, dtype="float16")


@functools.cache
def program():
    """The example of TensorFlow 1.15's documentation: model, batch, and the graph of a step."""
    model = tf.keras.models.Sequential(
        [
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    opt = enable(tf.keras.optimizers.SGD(0.1))
    keras_mp.disable_mixed_precision_graph_rewrite()
    model.compile(loss="sparse_categorical_crossentropy", optimizer=opt, jit_compile=False)
    images, labels = digits()
    model.fit(images[:32], labels[:32], batch_size=32, verbose=0)
    batch = images[32:64], labels[32:64]
    function, arguments = graph_rewrite._step_of_training(model, batch, {})
    return model, batch, arguments, function.get_concrete_function(*arguments)


@pytest.mark.parametrize("device", GPUS)
def test_fit(device):
    model, batch, [data], concrete = program()
    report = graph_rewrite.report(model, *batch, device=device)
    assert report.by_dtype().get("float16", {}).get("MatMul", 0) == 5 * (device in TENSOR_CORES)
    step = rewritten.of_function(concrete, device)
    exact, found = update(model, concrete, data), update(model, step, *tf.nest.flatten(data))
    if device in TENSOR_CORES:
        assert 0 < distance(found, exact) < rewritten.tolerance(report) < 2**-6
    else:
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-7)


def test_a_step_of_fit_that_overflows_in_float16_is_skipped():
    model, _, [data], concrete = program()
    scale = model.optimizer.loss_scale.loss_scale
    before = value(scale)
    scale.assign(2.0**40)
    assert update(model, concrete, data).any()
    step = rewritten.of_function(concrete, "GPU 7.0")
    assert not update(model, step, *tf.nest.flatten(data)).any()
    assert int(model.optimizer.steps_skipped) == 1
    assert value(scale) == 2.0**39
    scale.assign(before)


@once
@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("use_resource", [True, False])
def test_the_graph_of_a_session(device, use_resource):
    with tf.Graph().as_default():
        x, y = V1.placeholder(tf.float32, [None, 8, 8, 1]), V1.placeholder(tf.int32, [None])
        with V1.variable_scope("network", use_resource=use_resource):
            loss = V1.losses.sparse_softmax_cross_entropy(y, tf1_program.network(x, tf.float32))
        opt = V1.train.GradientDescentOptimizer(0.1)
        train = keras_mp.compat.v1.LossScaleOptimizer(opt, 128).minimize(loss)
        found = graph_rewrite.report([train, loss], device=device).by_dtype().get("float16", {})
    counts = [found.get(op, 0) for op in ("Conv2D", "Conv2DBackpropFilter", "MatMul")]
    assert counts == ([1, 1, 3] if device in TENSOR_CORES else [0, 0, 0])

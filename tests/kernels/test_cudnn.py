"""Recurrent layers on GPUs: cuDNN's operations in float32 where their gradients are lost."""

import collections

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.kernels import cudnn, trials
from tests import inside
from tests.common import once
from tests.op_autocast.common import operations

K = tf.keras
FORWARD, BACKWARD = "CudnnRNNV3", "CudnnRNNBackpropV3"
LAYERS = {
    "LSTM": lambda **kwargs: K.layers.LSTM(8, **kwargs),
    "GRU": lambda **kwargs: K.layers.GRU(8, **kwargs),
    "Bidirectional": lambda **kwargs: K.layers.Bidirectional(K.layers.LSTM(8, **kwargs)),
}


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, which loses the gradients in bfloat16; what it was asked."""
    asked = []

    def ask(op, kernel, dtype, case, device):
        asked.append((op, dtype.name, case, device))
        return dtype == tf.bfloat16

    devices = tf.config.list_logical_devices
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: devices("CPU"))
    inside.set_device(monkeypatch, "GPU")
    inside.set_wrong(monkeypatch, cudnn.TABLE, ask)
    return asked


def dtypes_of_step(make, policy):
    """cuDNN's operations in a step of training, with the dtypes in which they would run."""
    with policy if not isinstance(policy, str) else keras_mp.policy_scope(policy):
        layer = make()
        layer.build((None, 5, 4))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.cast(layer(x), tf.float32))
        weights = [getattr(w, "_value", w) for w in layer.trainable_weights]
        return tape.gradient(loss, [x, *weights])

    function = tf.function(step).get_concrete_function(tf.TensorSpec([3, 5, 4]))
    assert {gradient.dtype for gradient in function.structured_outputs} == {tf.float32}
    return set(operations(function.graph, FORWARD, BACKWARD))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_loses_its_gradients_computes_in_float32(gpu, kind, dtype):
    inside = "float32" if dtype == "bfloat16" else dtype
    found = dtypes_of_step(LAYERS[kind], f"mixed_{dtype}")
    assert found == {(FORWARD, inside), (BACKWARD, inside)}
    assert set(gpu) == {(FORWARD, dtype, "gru" if kind == "GRU" else "lstm", "GPU")}


def test_layers_of_others_are_left_alone(gpu):
    dtype = K.mixed_precision.Policy("mixed_bfloat16")
    found = dtypes_of_step(lambda: K.layers.LSTM(8, dtype=dtype), "float32")
    assert found == {(FORWARD, "bfloat16"), (BACKWARD, "bfloat16")}
    assert not gpu


@once
def test_results_are_of_the_dtype_of_the_inputs(gpu):
    """Also of the operations that programs call by their raw names, and of both older ones."""
    del gpu
    x, state, weights = tf.ones([4, 2, 3]), tf.ones([1, 2, 8]), tf.ones([4 * 8 * (3 + 8 + 2)])
    names = {"input": x, "input_h": state, "input_c": state, "params": weights}

    @tf.function
    def run(op, dtype):
        more = {"sequence_lengths": [4, 4]} if op == FORWARD else {}
        given = {name: tf.cast(value, dtype) for name, value in names.items()}
        with keras_mp.autocast_scope(dtype):
            return getattr(tf.raw_ops, op)(**given, **more)

    for op in cudnn.KERNELS:
        for dtype in ("bfloat16", "float32"):
            results = run.get_concrete_function(op, dtype).structured_outputs
            assert [each.dtype for each in results[:3]] == [dtype] * 3
            assert results.output.shape == [4, 2, 8]


Results = collections.namedtuple("Results", ["output", "output_h"])


def recurrence(gradient):
    """An operation like cuDNN's, whose gradients are multiplied by a number."""

    @tf.custom_gradient
    def scaled(x):
        return x, lambda upstream: upstream * tf.cast(gradient(x.dtype), x.dtype)

    def run(input, input_h, params, **_):
        kernel = tf.reshape(scaled(params)[:256], [16, 16])
        hidden, outputs = scaled(input_h)[0], []
        for each in tf.unstack(scaled(input)):
            hidden = tf.tanh(tf.matmul(each + hidden, kernel))
            outputs.append(hidden)
        return Results(tf.stack(outputs), hidden[tf.newaxis])

    return run


@once
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (0.0, False), (1.25, False)])
def test_a_gradient_tells(dtype, factor, is_right):
    kernel = cudnn.KERNELS[FORWARD]
    run = recurrence(lambda of: factor if of == dtype else 1.0)
    found = kernel.result(run, **kernel.example(dtype, "lstm"))
    assert trials.is_right(float(found), kernel.expected) == is_right

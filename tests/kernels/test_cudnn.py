"""Recurrent layers on GPUs: cuDNN's operations in float32 where their gradients are lost."""

import pytest
import tensorflow as tf

import keras_mp
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
    """A machine with a GPU."""
    inside.usual_device()  # It is kept: other tests have the machine's own.
    devices = tf.config.list_logical_devices
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: devices("CPU"))
    inside.set_device(monkeypatch, "GPU")


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
@pytest.mark.usefixtures("gpu")
def test_what_loses_its_gradients_computes_in_float32(kind, dtype):
    inside = "float32" if dtype == "bfloat16" else dtype
    found = dtypes_of_step(LAYERS[kind], f"mixed_{dtype}")
    assert found == {(FORWARD, inside), (BACKWARD, inside)}


@pytest.mark.usefixtures("gpu")
def test_layers_of_others_are_left_alone():
    dtype = K.mixed_precision.Policy("mixed_bfloat16")
    found = dtypes_of_step(lambda: K.layers.LSTM(8, dtype=dtype), "float32")
    assert found == {(FORWARD, "bfloat16"), (BACKWARD, "bfloat16")}


@once
@pytest.mark.usefixtures("gpu")
def test_results_are_of_the_dtype_of_the_inputs():
    """Also of the operations that programs call by their raw names, and of both older ones."""
    x, state, weights = tf.ones([4, 2, 3]), tf.ones([1, 2, 8]), tf.ones([4 * 8 * (3 + 8 + 2)])
    names = {"input": x, "input_h": state, "input_c": state, "params": weights}

    @tf.function
    def run(op, dtype):
        more = {"sequence_lengths": [4, 4]} if op == FORWARD else {}
        given = {name: tf.cast(value, dtype) for name, value in names.items()}
        with keras_mp.autocast_scope(dtype):
            return getattr(tf.raw_ops, op)(**given, **more)

    for op in ("CudnnRNN", "CudnnRNNV2", FORWARD):
        for dtype in ("bfloat16", "float32"):
            results = run.get_concrete_function(op, dtype).structured_outputs
            assert [each.dtype for each in results[:3]] == [dtype] * 3
            assert results.output.shape == [4, 2, 8]

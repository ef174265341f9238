"""Operations are computed in float32 inside where float16 is many times slower."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import kernels
from keras_mp.hardware import turns
from keras_mp.hooks import reach
from keras_mp.kernels import replaced, slow, sums, tables
from tests.common import once

K = tf.keras
LAYERS = {
    "Conv1D": (lambda **kw: K.layers.Conv1D(4, 3, **kw), [2, 8, 3]),
    "Conv2D": (lambda **kw: K.layers.Conv2D(4, 3, **kw), [2, 8, 8, 3]),
    "Conv2DTranspose": (lambda **kw: K.layers.Conv2DTranspose(4, 3, **kw), [2, 8, 8, 3]),
    "Conv3D": (lambda **kw: K.layers.Conv3D(4, 2, **kw), [2, 4, 4, 4, 3]),
    "DepthwiseConv2D": (lambda **kw: K.layers.DepthwiseConv2D(3, **kw), [2, 8, 8, 3]),
    "Dense of a sequence": (lambda **kw: K.layers.Dense(4, **kw), [2, 5, 3]),
    "LayerNormalization": (K.layers.LayerNormalization, [2, 5, 16]),
}


@pytest.fixture(autouse=True)
def installed():
    kernels.install()


@pytest.fixture(params=[True, False], ids=["slow", "fast"])
def answer(request, monkeypatch):
    """What the table says of each kernel."""
    monkeypatch.setattr(slow._TABLE, "_asks", lambda *_: request.param)
    return request.param


def values_and_gradients(layer, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x)
        loss = tf.reduce_sum(tf.cast(y, "float32") ** 3)
    return [y, *tape.gradient(loss, [x, *layer.trainable_variables])]


@pytest.mark.parametrize(
    ("name", "mode"), [*zip([*LAYERS] * 2, itertools.cycle(["eager", "graph", "compiled"]))]
)
def test_layers_are_as_in_float32(name, mode, answer):
    make, shape = LAYERS[name]
    x = tf.random.stateless_uniform(shape, [1, 2])
    exact = make(dtype="float32")
    expected = values_and_gradients(exact, x)
    layer = make(dtype=keras_mp.Policy("mixed_float16"))
    layer(x)
    layer.set_weights(exact.get_weights())
    step = values_and_gradients
    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "compiled")
    output, *gradients = step(layer, x)
    assert output.dtype == "float16"
    assert {each.dtype for each in gradients} == {tf.float32}
    for found, right in zip([output, *gradients], expected):
        scale = float(tf.reduce_max(tf.abs(right)))
        np.testing.assert_allclose(tf.cast(found, "float32"), right, atol=0.005 * scale)


def test_what_is_slow_computes_in_float32(answer):
    function = tf.function(lambda x, w: tf.gradients(tf.nn.conv2d(x, w, 1, "SAME"), [x, w]))
    spec = [tf.TensorSpec([1, 4, 4, 2], "float16"), tf.TensorSpec([3, 3, 2, 2], "float16")]
    graph = function.get_concrete_function(*spec).graph
    found = {
        op.get_attr("T") for op in graph.get_operations() if op.type.startswith("Conv2DBackprop")
    }
    assert found == {tf.float32 if answer else tf.float16}


@pytest.mark.parametrize("op", slow.KERNELS)
def test_the_examples_are_arguments_of_the_function_that_is_replaced(op):
    arguments = slow.KERNELS[op].example(tf.float32, None)
    own, ours = slow.own_function(op), replaced.function_of(op, slow.KERNELS[op])
    found, expected = (tf.nest.flatten(each(**arguments))[0] for each in (ours, own))
    assert np.all(np.isfinite(found))
    np.testing.assert_array_equal(found, expected)


def test_depthwise_convolutions_that_are_slow_compute_in_float32(answer):
    function = tf.function(
        lambda x, w: tf.gradients(tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"), [x, w])
    )
    spec = [tf.TensorSpec([1, 4, 4, 2], "float16"), tf.TensorSpec([3, 3, 2, 1], "float16")]
    graph = function.get_concrete_function(*spec).graph
    found = {
        op.type: op.get_attr("T")
        for op in graph.get_operations()
        if op.type.startswith("DepthwiseConv2dNative")
    }
    if not answer:  # The gradient of a filter may be wrong in float16, and is float32 for that.
        found.pop("DepthwiseConv2dNativeBackpropFilter")
    assert set(found.values()) == {tf.float32 if answer else tf.float16}


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(
    ("dtype", "channels", "options", "expected"),
    [
        ("bfloat16", 12, {}, tf.float32),
        ("bfloat16", 100, {}, tf.float32),
        ("bfloat16", 32, {}, tf.bfloat16),
        ("bfloat16", None, {}, tf.bfloat16),
        ("bfloat16", 12, {"data_format": "NCHW"}, tf.bfloat16),
        ("float16", 12, {}, tf.float16),
        ("float32", 12, {}, tf.float32),
    ],
    ids=str,
)
def test_channels_that_fill_no_vectors_are_normalized_in_float32(
    dtype, channels, options, expected, is_training
):
    shape = [None, channels, 4, 4] if options else [None, 4, 4, channels]

    def normalized(x, scale):
        given = {} if is_training else {"mean": scale, "variance": scale}
        how = {**given, **options, "is_training": is_training}
        y, *_ = tf.compat.v1.nn.fused_batch_norm(x, scale, scale, **how)
        return tf.gradients(y, [x, scale])

    with tables.on_trial({}), reach.entered(dtype):
        graph = (
            tf.function(normalized)
            .get_concrete_function(tf.TensorSpec(shape, dtype), tf.TensorSpec([channels]))
            .graph
        )
    found = {op.get_attr("T") for op in graph.get_operations() if "BatchNorm" in op.type}
    assert found == {expected}


def test_a_normalization_in_float32_is_rounded_once():
    x = tf.random.stateless_normal([8, 4, 4, 12], [1, 2], dtype=tf.bfloat16)
    options = {"scale": tf.fill([12], 1.5), "offset": tf.fill([12], 0.5), "epsilon": 1e-3}
    with reach.entered("bfloat16"):
        found, *statistics = tf.compat.v1.nn.fused_batch_norm(x, **options)
    exact, *expected = tf.compat.v1.nn.fused_batch_norm(tf.cast(x, tf.float32), **options)
    np.testing.assert_array_equal(found, tf.cast(exact, tf.bfloat16))
    np.testing.assert_array_equal(statistics, expected)


@pytest.mark.parametrize(("time", "expected"), [(1.4, False), (1.6, True)])
@pytest.mark.parametrize("op", ["Tanh", "gelu"])
def test_only_what_is_clearly_slower_counts(op, time, expected):
    by_dtype = {"float16": time, "bfloat16": 0.0}
    with tables.on_trial({op: by_dtype}):
        # A chain gains more than it costs.
        assert slow.is_slow(op, "float16") == (expected or op == "gelu")
        assert not slow.is_slow(op, "bfloat16")
        assert not slow.is_slow(op, "float16", device="GPU")
        assert not slow.is_slow("Elu", "float16")


def test_nothing_is_timed(monkeypatch):
    """Neither when a policy is set nor when a model trains, nor when a kernel is asked about."""

    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(turns, "take", fail)
    with keras_mp.policy_scope("mixed_bfloat16"):
        model = K.Sequential([K.Input([8, 8, 1]), K.layers.Conv2D(2, 3, activation="gelu")])
        model.compile("sgd", "mse")
        model.fit(tf.ones([4, 8, 8, 1]), tf.ones([4, 6, 6, 2]), verbose=0)
    assert set(slow.KERNELS) >= {op for op, *_ in slow.slow_kernels()}


ACTIVATIONS = {
    "tanh": tf.tanh,
    "sigmoid": tf.nn.sigmoid,
    "erf": tf.math.erf,
    "exp": tf.exp,
    "leaky relu": tf.nn.leaky_relu,
    "softmax": tf.nn.softmax,
    "max pooling": lambda x: tf.nn.max_pool2d(tf.reshape(x, [1, 8, 8, 4]), 2, 2, "VALID"),
    "einsum": lambda x: tf.einsum("ab,cb->ac", x, x),
    "average pooling": lambda x: tf.nn.avg_pool2d(tf.reshape(x, [1, 8, 8, 4]), 2, 2, "VALID"),
}


def output_and_gradient(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    weights = tf.reshape(tf.linspace(0.5, 1.5, y.shape.num_elements()), y.shape)
    return y, tape.gradient(y, x, output_gradients=tf.cast(tf.cast(weights, "bfloat16"), y.dtype))


@once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_float32_inside_is_no_less_exact(name, dtype, monkeypatch):
    # A small window is averaged in float32 anyway, slow or not.
    monkeypatch.setattr(sums._TABLE, "enabled", False)
    x = tf.cast(3 * tf.random.stateless_normal([8, 32], [3, 4]), dtype)
    exact = output_and_gradient(ACTIVATIONS[name], tf.cast(x, "float64"))

    def errors(is_slow):
        monkeypatch.setattr(slow._TABLE, "_asks", lambda *_: is_slow)
        function = tf.function(lambda x: output_and_gradient(ACTIVATIONS[name], x))
        graph = function.get_concrete_function(x).graph
        casts = [op for op in graph.get_operations() if op.type == "Cast"]
        found = function(x)
        assert all(each.dtype == dtype for each in found)
        return len(casts), [
            np.abs(np.subtract(tf.cast(each, "float64"), right)).mean()
            for each, right in zip(found, exact)
        ]

    (more_casts, patched), (casts, own) = errors(True), errors(False)
    assert more_casts > casts
    for ours, theirs in zip(patched, own):
        assert ours <= theirs * 1.000001


def test_the_switch_leaves_the_kernels_of_tensorflow(monkeypatch):
    monkeypatch.setattr(slow._TABLE, "_asks", lambda *_: True)

    def dtypes():
        function = tf.function(tf.tanh).get_concrete_function(tf.TensorSpec([2], "bfloat16"))
        ops = function.graph.get_operations()
        return {op.get_attr("T") for op in ops if op.type == "Tanh"}

    assert dtypes() == {tf.float32}
    keras_mp.enable_float32_where_faster(False)
    try:
        assert dtypes() == {tf.bfloat16}
    finally:
        keras_mp.enable_float32_where_faster()


@once
def test_compiled_activations_are_as_in_float32(answer):
    x = tf.constant([-2.0, -0.5, 0.25, 3.0], tf.bfloat16)
    step = tf.function(lambda x: output_and_gradient(tf.nn.elu, x), jit_compile=True)
    for found, right in zip(step(x), output_and_gradient(tf.nn.elu, tf.cast(x, "float32"))):
        # Rounded up to three times, by at most 0.4 % each.
        np.testing.assert_allclose(tf.cast(found, "float32"), right, rtol=0.012)


def test_float32_is_not_asked_about(monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(slow._TABLE, "_asks", fail)
    values_and_gradients(K.layers.Conv2D(2, 3), tf.ones([1, 4, 4, 1]))

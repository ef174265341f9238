"""Operations are computed in float32 inside where 16 bits are slower."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import kernels
from keras_mp.hardware import turns
from keras_mp.hooks import reach
from keras_mp.kernels import slow, sums
from keras_mp.support import cpu
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
    """Whether operations are slow in 16 bits."""
    monkeypatch.setattr(slow, "is_slow", lambda *_: request.param)
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
    dtype, channels, options, expected, is_training, monkeypatch
):
    shape = [None, channels, 4, 4] if options else [None, 4, 4, channels]

    def normalized(x, scale):
        given = {} if is_training else {"mean": scale, "variance": scale}
        how = {**given, **options, "is_training": is_training}
        y, *_ = tf.compat.v1.nn.fused_batch_norm(x, scale, scale, **how)
        return tf.gradients(y, [x, scale])

    monkeypatch.setattr(cpu, "has_units", lambda dtype: True)
    with reach.entered(dtype):
        graph = (
            tf.function(normalized)
            .get_concrete_function(tf.TensorSpec(shape, dtype), tf.TensorSpec([channels]))
            .graph
        )
    found = {op.get_attr("T") for op in graph.get_operations() if "BatchNorm" in op.type}
    assert found == {expected}


def test_a_normalization_in_float32_is_rounded_once():
    with reach.entered(None):  # It has lost nothing.
        x = tf.cast(tf.random.stateless_normal([8, 4, 4, 12], [1, 2]), tf.bfloat16)
    options = {"scale": tf.fill([12], 1.5), "offset": tf.fill([12], 0.5), "epsilon": 1e-3}
    with reach.entered("bfloat16"):
        found, *statistics = tf.compat.v1.nn.fused_batch_norm(x, **options)
    exact, *expected = tf.compat.v1.nn.fused_batch_norm(tf.cast(x, tf.float32), **options)
    np.testing.assert_array_equal(found, tf.cast(exact, tf.bfloat16))
    np.testing.assert_array_equal(statistics, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("has_units", [True, False])
def test_the_units_of_the_cpu_decide(has_units, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "has_units", lambda dtype: has_units)
    found = set(slow.slow_operations(dtype))
    gradients = {op for op in slow.OPS if "Backprop" in op}
    assert len(gradients) == 6
    if not has_units:
        assert found == set(slow.OPS)
    else:
        assert found == (gradients if dtype == "float16" else set())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", slow.OPS)
def test_operations_take_float32_where_they_are_slow(op, dtype, monkeypatch):
    monkeypatch.setattr(slow, "is_slow", lambda *_: True)

    def compute(x, image, volume):
        pooled = [pool(image, 2, 2, "VALID") for pool in (tf.nn.max_pool2d, tf.nn.avg_pool2d)]
        pooled += [pool(volume, 2, 2, "VALID") for pool in (tf.nn.max_pool3d, tf.nn.avg_pool3d)]
        filters = tf.ones([3, 3, 2, 2], dtype)
        convolved = [
            tf.nn.conv2d(image, filters, 1, "SAME"),
            tf.nn.depthwise_conv2d(image, filters, [1] * 4, "SAME"),
            tf.nn.conv3d(volume, tf.ones([2, 2, 2, 2, 2], dtype), [1] * 5, "SAME"),
        ]
        scale = tf.ones([2])
        normal = tf.compat.v1.nn.fused_batch_norm(image, scale, scale)[0]
        products = [tf.matmul(x, x, transpose_b=True), tf.matmul(x[0], x[0], transpose_b=True)]
        products.append(tf.einsum("abc,adc->abd", x, x))
        results = [*pooled, *convolved, normal, *products]
        return tf.gradients(results, [x, image, volume, filters])

    with reach.entered(tf.as_dtype(dtype)):
        specs = [tf.TensorSpec(s, dtype) for s in ([2, 4, 3], [2, 4, 4, 2], [2, 4, 4, 4, 2])]
        graph = tf.function(compute).get_concrete_function(*specs).graph
    found = {each.get_attr("T") for each in graph.get_operations() if each.type == op}
    # TensorFlow differentiates what was computed in float32 in float32.
    assert found <= {tf.float32}
    if not op.endswith(("Grad", "Backprop")):
        assert found or "Backprop" in op


def test_nothing_is_timed(monkeypatch):
    """Neither when a policy is set nor when a model trains, nor when a kernel is asked about."""

    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(turns, "take", fail)
    with keras_mp.policy_scope("mixed_bfloat16"):
        model = K.Sequential([K.Input([8, 8, 1]), K.layers.Conv2D(2, 3, activation="gelu")])
        model.compile("sgd", "mse")
        model.fit(tf.ones([4, 8, 8, 1]), tf.ones([4, 6, 6, 2]), verbose=0)


FUNCTIONS = {
    "product": lambda x: x @ tf.reshape(tf.reverse(x, [0]), [32, 8]),
    "max pooling": lambda x: tf.nn.max_pool2d(tf.reshape(x, [1, 8, 8, 4]), 2, 2, "VALID"),
    "einsum": lambda x: tf.einsum("ab,cb->ac", x, tf.ones_like(x)),
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
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_inside_is_no_less_exact(name, dtype, monkeypatch):
    # A small window is averaged in float32 anyway, slow or not.
    monkeypatch.setattr(sums.TABLE, "enabled", False)
    x = tf.cast(3 * tf.random.stateless_normal([8, 32], [3, 4]), dtype)
    exact = output_and_gradient(FUNCTIONS[name], tf.cast(x, "float64"))

    def errors(is_slow):
        monkeypatch.setattr(slow, "is_slow", lambda *_: is_slow)
        function = tf.function(lambda x: output_and_gradient(FUNCTIONS[name], x))
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
    monkeypatch.setattr(slow, "is_slow", lambda *_: True)

    def dtypes():
        x = tf.TensorSpec([2, 2], "bfloat16")
        ops = tf.function(tf.matmul).get_concrete_function(x, x).graph.get_operations()
        return {op.get_attr("T") for op in ops if op.type == "MatMul"}

    assert dtypes() == {tf.float32}
    keras_mp.enable_float32_where_faster(False)
    try:
        assert dtypes() == {tf.bfloat16}
    finally:
        keras_mp.enable_float32_where_faster()


def test_float32_is_not_asked_about(monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(slow, "is_slow", fail)
    values_and_gradients(K.layers.Conv2D(2, 3), tf.ones([1, 4, 4, 1]))

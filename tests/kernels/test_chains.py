"""Activations that are chains of operations run as one cluster, in float32 inside."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import kernels
from keras_mp.kernels import chains, slow
from tests.common import once

# Looked up when they are called, as they are replaced meanwhile.
ACTIVATIONS = {
    "gelu": lambda x: tf.nn.gelu(x),
    "gelu by tanh": lambda x: tf.nn.gelu(x, approximate=True),
    "silu": lambda x: tf.nn.silu(x),
}


@pytest.fixture(autouse=True)
def installed():
    kernels.install()


@pytest.fixture(autouse=True)
def are_slow(monkeypatch):
    """TensorFlow's own chains, and nothing else."""
    asks = set(chains.KERNELS)
    monkeypatch.setattr(slow._TABLE, "_asks", lambda op, *_: op in asks)
    return asks


def output_and_gradient(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return y, tape.gradient(y, x)


def marks(graph):
    """The operations that are marked for XLA, by their cluster."""
    found = {}
    for op in graph.get_operations():
        if "_XlaScope" in op.node_def.attr:
            found.setdefault(op.get_attr("_XlaScope"), set()).add(op.type)
    return list(found.values())


def graph_of(function, spec):
    return tf.function(function).get_concrete_function(spec).graph


@once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_chains_are_nearer_to_the_truth(name, dtype, are_slow):
    function = ACTIVATIONS[name]
    x = tf.cast(tf.linspace(-9.0, 9.0, 4096), dtype)
    exact = function(tf.cast(x, "float64"))
    # The gradient of what is rounded, so that only the derivative's own errors count.
    with tf.GradientTape() as tape:
        wide = tf.cast(x, "float64")
        tape.watch(wide)
        y = function(wide)
    slopes = tape.gradient(y, wide)

    def errors(**options):
        y, gradient = tf.function(lambda x: output_and_gradient(function, x), **options)(x)
        assert y.dtype == gradient.dtype == dtype
        return [
            np.abs(np.subtract(tf.cast(found, "float64"), truth))
            for found, truth in ((y, exact), (gradient, slopes))
        ]

    ours, compiled = errors(), errors(jit_compile=True)
    are_slow.clear()
    own = errors()
    rounding = np.finfo("float16").eps / 2 if dtype == "float16" else 2**-8
    for found, theirs, truth in zip(ours, own, (exact, slopes)):
        assert found.mean() <= theirs.mean()
        # Once rounded; and what 1 + erf(x) and 1 - tanh(x)^2 lose in float32 far below zero.
        assert np.all(found <= rounding * 1.01 * np.abs(truth) + 1e-5)
    for found, same in zip(compiled, ours):
        assert found.mean() <= same.mean() * 1.01


def test_forward_and_backward_are_one_cluster_each():
    spec = tf.TensorSpec([None, 512], "bfloat16")
    forward, backward = marks(graph_of(lambda x: output_and_gradient(tf.nn.gelu, x), spec))
    assert forward == {"Cast", "Const", "Mul", "Erf", "AddV2"}
    assert backward == forward | {"Exp"}


@pytest.mark.parametrize(
    ("function", "spec"),
    [
        (ACTIVATIONS["gelu"], tf.TensorSpec([None, 511], "bfloat16")),
        (ACTIVATIONS["gelu"], tf.TensorSpec(None, "bfloat16")),
        (ACTIVATIONS["gelu"], tf.TensorSpec([512], "float32")),
        (lambda x: tf.nn.silu(x, 1.5), tf.TensorSpec([512], "bfloat16")),
    ],
    ids=["few numbers", "no rank", "float32", "another beta"],
)
def test_others_are_left_as_they_are(function, spec):
    assert not marks(graph_of(function, spec))


def test_eager_activations_are_left_as_they_are(are_slow):
    x = tf.cast(tf.random.stateless_normal([2048], [1, 2]), "bfloat16")
    found = tf.nn.gelu(x)
    are_slow.clear()
    np.testing.assert_array_equal(found, tf.nn.gelu(x))


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_layers_train_on_replicas(name):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        layer = tf.keras.layers.Dense(
            512, activation=name, dtype=keras_mp.Policy("mixed_bfloat16"), use_bias=False
        )
        layer.build([None, 8])

    def gradient(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(layer(x), "float32"))
        return tape.gradient(loss, layer.trainable_variables[0])

    x = tf.random.stateless_normal([4, 8], [1, 2])
    step = tf.function(lambda x: strategy.run(gradient, (x,)))
    assert len(marks(step.get_concrete_function(x).graph)) == 4
    weights = tf.convert_to_tensor(layer.trainable_variables[0])
    with tf.GradientTape() as tape:
        tape.watch(weights)
        y = ACTIVATIONS[name](x @ weights)
    right = tape.gradient(y, weights)
    for found in strategy.experimental_local_results(step(x)):
        assert found.dtype == tf.float32
        np.testing.assert_allclose(found, right, atol=0.02 * np.abs(right).max())


@once
def test_shapes_may_change():
    step = tf.function(lambda x: output_and_gradient(tf.nn.gelu, x))
    step.get_concrete_function(tf.TensorSpec([None, 512], "bfloat16"))
    for rows in range(1, 30):
        x = tf.fill([rows, 512], tf.constant(1, tf.bfloat16))
        for found, right in zip(step(x), output_and_gradient(tf.nn.gelu, tf.cast(x, "float32"))):
            np.testing.assert_allclose(tf.cast(found, "float32"), right, rtol=0.01)


def test_second_derivatives():
    def second(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, gradient = output_and_gradient(tf.nn.silu, x)
        return tape.gradient(gradient, x)

    x = tf.cast(tf.linspace(-4.0, 4.0, 512), "bfloat16")
    found = tf.cast(tf.function(second)(x), "float32")
    np.testing.assert_allclose(found, second(tf.cast(x, "float32")), atol=0.02)


@once
def test_saved_models_compute_and_train_the_same(tmp_path):
    model = tf.Module()
    model.call = tf.function(tf.nn.gelu, input_signature=[tf.TensorSpec([None, 512], "bfloat16")])
    tf.saved_model.save(model, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    x = tf.cast(tf.random.stateless_normal([4, 512], [1, 2]), "bfloat16")
    for found, right in zip(
        output_and_gradient(loaded.call, x), output_and_gradient(model.call, x)
    ):
        np.testing.assert_array_equal(found, right)
    # A program without XLA runs it: nothing must be compiled.
    assert b"_XlaMustCompile" not in (tmp_path / "saved_model.pb").read_bytes()


def test_what_is_timed_is_what_tensorflow_has():
    own = slow.own_function("gelu")
    graph = graph_of(own, tf.TensorSpec([512], "bfloat16"))
    assert not marks(graph)
    assert {op.get_attr("T") for op in graph.get_operations() if op.type == "Mul"} == {tf.bfloat16}

"""Fused where the logits can be found, Keras's own value and one warning where not."""

from itertools import cycle

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import losses
from tests.common import IS_KERAS_3, MODES, Subclassed, differentiated, once, pairs, placed
from tests.steps import our_warnings

K = tf.keras
GRAPHS = ["function", "jit"]
DTYPES = ["float16", "bfloat16", "float32"]

# Logits, the wrong label, and the loss that it costs with its gradient.
ONE_HOT, SPARSE = [[0.0, 1.0]], [1]
CASES = {
    "CategoricalCrossentropy": ("softmax", ONE_HOT, 50, [1, -1]),
    "SparseCategoricalCrossentropy": ("softmax", SPARSE, 50, [1, -1]),
    "CategoricalFocalCrossentropy": ("softmax", ONE_HOT, 12.5, [0.25, -0.25]),
    "BinaryCrossentropy": ("sigmoid", ONE_HOT, 50, [0.5, -0.5]),
    "BinaryFocalCrossentropy": ("sigmoid", ONE_HOT, 50, [0.5, -0.5]),
}


def loss_and_gradient(loss, y_true, logits, predict, mode):
    def function(logits):
        return differentiated(lambda: loss(y_true, predict(logits)), logits)

    found = placed(mode, function)(logits)
    return [None if each is None else each.numpy() for each in found]


def wrong(name, dtype):
    """Logits that are sure of the wrong class, in both directions for a sigmoid."""
    return tf.constant([[50, 0 if CASES[name][0] == "softmax" else -50]], dtype)


@pytest.mark.parametrize(("name", "mode", "dtype"), pairs(CASES, MODES, DTYPES))
def test_exact_at_logits_of_50(name, dtype, mode):
    activation, y_true, expected, expected_gradient = CASES[name]
    loss, predict = getattr(losses, name)(), K.activations.get(activation)
    arguments = (loss, tf.constant(y_true), wrong(name, dtype), predict, mode)
    value, gradient = loss_and_gradient(*arguments)
    assert value.dtype == np.float32
    assert value == expected
    np.testing.assert_array_equal(gradient[0].astype("float32"), expected_gradient)


def flat(p):
    return tf.reshape(p, [-1, 1, p.shape[-1]])


BETWEEN = {
    "cast": lambda p: tf.cast(p, "float32"),
    "casts": lambda p: tf.cast(tf.cast(p, "float32"), "float16"),
    "identity": tf.identity,
    "linear": K.layers.Activation("linear", dtype="float32"),
    "reshape": lambda p: tf.reshape(flat(p), [-1, p.shape[-1]]),
    "expand and squeeze": lambda p: tf.squeeze(tf.expand_dims(p, 1), 1),
    "transpose twice": lambda p: tf.transpose(tf.transpose(p)),
    "check": lambda p: tf.debugging.check_numerics(p, "not finite"),
    "ensure shape": lambda p: tf.ensure_shape(p, [None, 2]),
    "stack": lambda p: tf.squeeze(tf.stack([p]), 0),
    "identity of many": lambda p: tf.identity_n([p * 0, p])[1],
}


def in_graphs(cases):
    """Cases in both kinds of graphs and both dtypes. XLA leaves checks out."""
    found = pairs(cases, GRAPHS, ["float16", "bfloat16"])
    return [case for case in found if case[:2] != ("check", "jit")]


def layers_after(activation):
    return {
        "nothing": [K.layers.Activation(activation)],
        "linear": [K.layers.Activation(activation), K.layers.Activation("linear", dtype="float32")],
        "in float32": [K.layers.Activation(activation, dtype="float32")],
        "dense": [K.layers.Dense(2, activation, kernel_initializer="identity")],
        "dense in float32": [
            K.layers.Dense(2, activation, kernel_initializer="identity", dtype="float32")
        ],
        "reshape": [
            K.layers.Activation(activation),
            K.layers.Reshape([1, 2]),
            K.layers.Reshape([2]),
        ],
    }


MODELS = {
    "sequential": lambda *layers: K.Sequential([K.Input([2]), *layers]),
    "subclassed": Subclassed,
}


def fitted(name, model, layers, **run):
    """The loss that `fit` and `evaluate` agree on, and how many warnings there were."""
    compiled = MODELS[model](*layers)
    compiled.compile(K.optimizers.SGD(0.0), getattr(K.losses, name)(), **run)
    x, y = wrong(name, "float32"), tf.constant(CASES[name][1])
    with our_warnings() as caught:
        values = compiled.fit(x, y, verbose=0, epochs=2).history["loss"]
        (value,) = {*values, compiled.evaluate(x, y, verbose=0)}
    return value, len(caught)


RUNS = [
    ("CategoricalCrossentropy", "mixed_float16", {}),
    ("SparseCategoricalCrossentropy", "mixed_bfloat16", {}),
    ("BinaryCrossentropy", "mixed_float16", {"run_eagerly": True}),
    ("BinaryFocalCrossentropy", "mixed_bfloat16", {"run_eagerly": True}),
    ("CategoricalFocalCrossentropy", "mixed_float16", {"jit_compile": True}),
    ("CategoricalCrossentropy", "mixed_bfloat16", {"jit_compile": True}),
]
FITS = list(zip(cycle(MODELS), cycle(layers_after("sigmoid")), *zip(*RUNS)))


@pytest.mark.parametrize(("model", "layers", "name", "policy", "run"), FITS, ids=str)
def test_defect_6_through_fit(model, layers, name, policy, run):
    keras_mp.set_global_policy(policy)
    activation, _, expected, _ = CASES[name]
    assert fitted(name, model, layers_after(activation)[layers], **run) == (expected, 0)


FIRST, SECOND = np.float32([[50, 0]]), np.float32([[0, 1]])
ALONG_1 = (
    losses.CategoricalCrossentropy(axis=1),
    *(np.tile(of_class.reshape([1, 2, 1]), [3, 1, 4]) for of_class in (SECOND, FIRST)),
)


class Twice(losses.SparseCategoricalCrossentropy):
    """As a user may override what is fused."""

    def call(self, y_true, y_pred):
        return 2 * super().call(y_true, y_pred)


# A loss, labels, logits, what predicts, and the loss that it costs; where only a graph tells.
IN_GRAPHS = {
    **{
        name: (
            *(losses.CategoricalCrossentropy(), SECOND, FIRST),
            *(lambda x, lies=lies: lies(K.activations.softmax(x)), 50),
        )
        for name, lies in BETWEEN.items()
    },
    "along 1": (*ALONG_1, lambda x: tf.nn.softmax(x, axis=1), 50),
    "Keras along 1": (*ALONG_1, lambda x: K.activations.softmax(x, axis=1), 50),
    "permuted": (*ALONG_1, lambda x: swapped(tf.nn.softmax(swapped(x))), 50),
    "reshaped": (
        *ALONG_1,
        lambda x: tf.reshape(tf.nn.softmax(tf.reshape(x, [3, 2, 2, 2]), axis=1), [3, 2, 4]),
        50,
    ),
    "an axis of the size of another": (
        losses.CategoricalCrossentropy(),
        np.eye(3, dtype="float32")[[1, 1, 1]],
        np.tile(np.float32([[[50, 0, 0]]]), [1, 3, 1]),
        lambda x: tf.reshape(tf.nn.softmax(x), [3, 3]),
        50,
    ),
    "a shape that depends on the batch": (
        *(losses.SparseCategoricalCrossentropy(), np.int32([[1]]), FIRST),
        lambda x: tf.reshape(tf.nn.softmax(x), [-1, 1, 2]),
        50,
    ),
    "concatenated": (
        *(losses.CategoricalCrossentropy(), np.tile(SECOND, [2, 1]), FIRST),
        lambda x: concat_twice(tf.nn.softmax(x), 0),
        50,
    ),
    "stacked": (
        *(losses.CategoricalCrossentropy(), np.tile(SECOND, [2, 1, 1]), FIRST),
        lambda x: tf.stack([tf.nn.softmax(x)] * 2),
        50,
    ),
    "stacked along 1": (
        *(losses.CategoricalCrossentropy(), np.tile(SECOND, [1, 2, 1]), FIRST),
        lambda x: tf.stack([tf.nn.softmax(x)] * 2, 1),
        50,
    ),
    "of two labels each": (
        *(losses.BinaryCrossentropy(), np.tile(SECOND, [1, 2]), np.float32([[50, -50]])),
        lambda x: concat_twice(tf.nn.sigmoid(x), -1),
        50,
    ),
    "not of two distributions": (
        *(losses.CategoricalCrossentropy(), np.tile(SECOND, [1, 2]), FIRST),
        lambda x: concat_twice(tf.nn.softmax(x), -1),
        pytest.approx(2 * -np.log(1e-7), rel=1e-2),
    ),
}
ANYWHERE = {
    "labels that are smoothed": (
        *(losses.CategoricalCrossentropy(label_smoothing=0.5), SECOND, FIRST),
        *(K.activations.softmax, 37.5),
    ),
    **{
        # One of the two is right.
        f"binary labels of the shape {list(shape)}": (
            *(losses.BinaryCrossentropy(), np.float32([0, 1]).reshape(shape)),
            *(np.float32([[50], [50]]), K.activations.sigmoid, 25),
        )
        for shape in ([2, 1], [2])
    },
    "a call of the user's": (Twice(), np.int32([1]), FIRST, K.activations.softmax, 100),
}


def swapped(x):
    return tf.transpose(x, [0, 2, 1])


def concat_twice(p, axis):
    return tf.concat([p, p], axis)


def cost(case, mode, dtype):
    loss, labels, logits, predict, expected = case
    found = loss_and_gradient(loss, tf.constant(labels), tf.constant(logits, dtype), predict, mode)
    return found[0], expected


@once
@pytest.mark.parametrize(("name", "mode", "dtype"), in_graphs(IN_GRAPHS))
@pytest.mark.filterwarnings("ignore:.*computed in float16")
def test_the_axis_and_parts_are_found_in_a_graph(name, mode, dtype):
    value, expected = cost(IN_GRAPHS[name], mode, dtype)
    assert value == expected


@pytest.mark.parametrize("name", ANYWHERE)
@pytest.mark.parametrize("mode", MODES)
def test_what_losses_and_labels_may_be(name, mode):
    value, expected = cost(ANYWHERE[name], mode, "float16")
    assert value == expected


# A loss with its arguments, labels, logits, and what predicts.
OTHERS = {
    "a softmax along another axis": (
        *("CategoricalCrossentropy", {"axis": 1}, np.tile(np.eye(4, dtype="float32"), [3, 1, 1])),
        *(np.random.default_rng(0).normal(size=[3, 4, 4]), K.activations.softmax),
    ),
    "a sigmoid": ("CategoricalCrossentropy", {}, ONE_HOT, [[1, -2]], K.activations.sigmoid),
    "a softmax": ("BinaryCrossentropy", {}, ONE_HOT, [[1, -2]], K.activations.softmax),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OTHERS)
def test_another_activation_or_axis_is_not_fused(name, mode):
    loss, options, labels, logits, predict = OTHERS[name]
    labels, logits = tf.constant(labels), tf.constant(logits, "float32")
    ours, stock = (getattr(each, loss)(**options) for each in (losses, K.losses))
    value, _ = loss_and_gradient(ours, labels, logits, predict, mode)
    np.testing.assert_allclose(value, stock(labels, predict(logits).numpy()), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_temporal_outputs(mode):
    logits = tf.constant([[[50, 0], [0, 50], [0, 0]]], tf.float16)
    for loss, labels in [
        (losses.SparseCategoricalCrossentropy(reduction="none"), [[1, 1, 0]]),
        (losses.SparseCategoricalCrossentropy(reduction="none", ignore_class=0), [[1, 1, 0]]),
        (losses.CategoricalCrossentropy(reduction="none"), tf.one_hot([[1, 1, 0]], 2)),
    ]:
        value = placed(mode, lambda x: loss(tf.constant(labels), K.activations.softmax(x)))(logits)
        last = 0 if loss.get_config().get("ignore_class") == 0 else np.log(2)
        np.testing.assert_allclose(value, [[50, 0, last]], rtol=1e-6)


@once
@pytest.mark.parametrize("jit_compile", [False, True])
def test_shapes_that_are_known_only_when_it_runs(jit_compile):
    free = tf.function(
        lambda logits: losses.SparseCategoricalCrossentropy()([1], tf.nn.softmax(logits)),
        input_signature=[tf.TensorSpec([None, None], tf.float16)],
        jit_compile=jit_compile,
    )
    assert free(tf.constant(FIRST, tf.float16)) == 50


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *zip(list(CASES)[1:], [*GRAPHS, "eager", "function"]),
        *(("CategoricalCrossentropy", mode) for mode in MODES),
    ],
)
def test_from_logits_by_mistake(name, mode):
    activation, y_true, expected, _ = CASES[name]
    loss = getattr(losses, name)(from_logits=True)
    predict = K.activations.get(activation)
    arguments = (loss, tf.constant(y_true), wrong(name, "float16"), predict, mode)
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="was given probabilities, the output"):
        assert loss_and_gradient(*arguments)[0] == expected
    assert loss_and_gradient(*arguments)[0] == expected  # and is not said again


NOT_FUSIBLE = {
    "clip": lambda p: tf.clip_by_value(p, 1e-3, 1 - 1e-3),
    "clip after cast": lambda p: tf.clip_by_value(tf.cast(p, "float32"), 1e-3, 1 - 1e-3),
    "temperature": lambda p: p**0.5 / tf.reduce_sum(p**0.5, -1, keepdims=True),
    "stop gradient": tf.stop_gradient,
    "a mean": lambda p: (p + tf.ones_like(p) / 2) / 2,
    "concatenated classes": lambda p: tf.concat([p[:, :1], p[:, 1:]], -1),
    "gather": lambda p: tf.gather(tf.cast(p, "float32"), [0, 1], axis=-1),
    "slice": lambda p: tf.slice(tf.cast(p, "float32"), [0, 0], [2, 2]),
    "own gradient": tf.custom_gradient(lambda p: (tf.identity(p), lambda g: g)),
    "half of the classes": lambda p: tf.reshape(p, [-1, 1]),
}


@once
@pytest.mark.parametrize(
    ("between", "dtype", "mode"),
    # float16 is what is warned about. What is seen in a graph does not depend on who compiles it.
    [
        *zip(NOT_FUSIBLE, ["float16"] * 10, ["jit", *["function"] * 4] * 2),
        *zip(NOT_FUSIBLE, [d for d in DTYPES if d != "float16"], ["function", "jit"]),
    ],
)
def test_what_cannot_be_fused_is_the_stock_value_and_one_warning(between, dtype, mode):
    loss, stock = losses.CategoricalCrossentropy(), K.losses.CategoricalCrossentropy()
    logits = tf.constant([[1, -2], [3, 0]], dtype)

    def predict(logits):
        return NOT_FUSIBLE[between](K.activations.softmax(logits))

    probabilities = placed(mode, predict)(logits)
    labels = tf.one_hot([0, 1], 2)
    if between == "half of the classes":
        loss, stock = losses.BinaryCrossentropy(), K.losses.BinaryCrossentropy()
        labels = tf.reshape(labels, [-1, 1])
    expected = stock(labels, tf.constant(probabilities.numpy().astype("float32")))
    for repeat in range(2):
        with our_warnings() as caught:
            value, _ = loss_and_gradient(loss, labels, logits, predict, mode)
        # Constant folding computes in the dtype, XLA may keep more.
        np.testing.assert_allclose(value, expected, rtol=1e-5 if dtype == "float32" else 1e-2)
        assert len(caught) == (dtype == "float16" and repeat == 0)
    for warning in caught:
        assert "pass from_logits=True" in str(warning.message)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_softmax_in_another_function(dtype):
    loss = losses.SparseCategoricalCrossentropy()
    softmax = tf.function(K.activations.softmax)
    for outer in (tf.function, lambda function: function):
        with our_warnings() as caught:
            value = outer(lambda x: loss([1], softmax(x)))(tf.constant([[50, 0]], dtype))
            assert float(value) == pytest.approx(16.118, rel=1e-4)
        assert len(caught) == (dtype == "float16" and outer is tf.function)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_predictions_without_a_past(dtype):
    loss = losses.SparseCategoricalCrossentropy()
    with our_warnings() as caught:
        for _ in range(3):
            loss([1], tf.constant([[0.75, 0.25]], dtype))
    assert len(caught) == (dtype == "float16")


@pytest.mark.parametrize("name", CASES)
def test_a_float16_activation_behind_a_float32_layer_in_eager(name):
    # 16.118 for 50, which only the values themselves tell of.
    activation, y_true, _, _ = CASES[name]
    with keras_mp.policy_scope("mixed_float16"):
        half = K.layers.Activation(activation)
    linear = K.layers.Activation("linear", dtype="float32")
    wide = K.layers.Activation(activation, dtype="float32")
    logits = tf.constant([[50.0, -50.0]], tf.float16)  # float32 ones would be read exactly
    loss = getattr(losses, name)()
    certain = [0] if y_true is SPARSE else [[1.0, 0.0]]
    for right, layer in ((certain, half), (y_true, wide), (certain, wide)):
        loss(tf.constant(right), linear(layer(logits)))
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="probabilities that were computed in"):
        loss(tf.constant(y_true), linear(half(logits)))
    loss(tf.constant(y_true), linear(half(logits)))  # says so once


def gated(logits):
    """A gate in float16 over probabilities that were computed in float32."""
    gate = tf.cast(tf.nn.sigmoid(logits), tf.float32)
    a, b = (tf.nn.softmax(sign * tf.cast(logits, tf.float32)) for sign in (1, -1))
    return gate * a + (1 - gate) * b


@pytest.mark.parametrize("mode", MODES)
def test_no_warning_from_a_float32_softmax_of_float16_logits(mode):
    arguments = tf.constant(ONE_HOT), tf.constant([[1, 2]], "float16"), gated, mode
    loss_and_gradient(losses.CategoricalCrossentropy(), *arguments)


@pytest.mark.parametrize(
    ("gamma", "options", "mode"),
    pairs([0.0, 0.5, 2.0], [{}, {"alpha": [0.1, 0.2, 0.7]}, {"label_smoothing": 0.1}], MODES),
    ids=str,
)
def test_the_fused_focal_loss_is_the_stock_one_where_that_is_exact(gamma, options, mode):
    logits = tf.constant([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
    labels = tf.one_hot([1, 2], 3)
    ways = (losses, K.activations.softmax), (K.losses, lambda x: tf.nn.softmax(x) * 1.0)
    found = []
    for module, predict in ways:
        loss = module.CategoricalFocalCrossentropy(gamma=gamma, **options)
        found.append(loss_and_gradient(loss, labels, logits, predict, mode))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_a_focal_loss_is_finite_where_it_is_certain(mode):
    loss = losses.CategoricalFocalCrossentropy(gamma=0.5)
    logits = tf.constant([[50.0, 0.0]])
    result = loss_and_gradient(loss, tf.constant([[1.0, 0.0]]), logits, K.activations.softmax, mode)
    assert result[0] == 0
    np.testing.assert_allclose(result[1], [[0, 0]], atol=1e-20)


@pytest.mark.parametrize(
    ("name", "dtype", "mode"),
    [
        *zip(["CategoricalCrossentropy"] * 3, DTYPES, MODES),
        *zip(["CategoricalFocalCrossentropy"] * 3, DTYPES, [*GRAPHS, "eager"]),
    ],
)
def test_a_class_that_a_mask_excludes(name, dtype, mode):
    labels = tf.constant([[0.0, 1.0, 0.0]])
    for mask in (-1e9, -np.inf):  # the same in float16
        logits = tf.constant([[50, 0, mask]], dtype)
        loss = getattr(losses, name)()
        value, gradient = loss_and_gradient(loss, labels, logits, K.activations.softmax, mode)
        assert value == CASES[name][2]
        np.testing.assert_array_equal(gradient[0].astype("float32"), [*CASES[name][3], 0])
        smooth = getattr(losses, name)(label_smoothing=0.1)
        value, gradient = loss_and_gradient(smooth, labels, logits, K.activations.softmax, mode)
        assert np.isfinite(value)
        assert np.isfinite(gradient.astype("float32")).all()


def test_nan_logits_stay_nan_and_say_nothing_of_float16():
    labels, logits = tf.constant(ONE_HOT), tf.constant([[np.nan, 0]], "float16")
    arguments = losses.CategoricalCrossentropy(), labels, logits, K.activations.softmax
    for mode in MODES:
        assert np.isnan(loss_and_gradient(*arguments, mode)[0])


@pytest.mark.skipif(IS_KERAS_3, reason="Ragged losses are of Keras 2.")
@pytest.mark.parametrize("are_labels_ragged", [True, False])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*computed in float16")
def test_ragged_predictions(name, are_labels_ragged):
    activation, _, expected, _ = CASES[name]
    loss = getattr(losses, name)(reduction="none")
    labels = [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]] if name[:6] != "Sparse" else [1, 0, 1]
    lengths = [2, 1] if are_labels_ragged else [1, 1, 1]

    @tf.function
    def function(flat_logits):
        logits = tf.RaggedTensor.from_row_lengths(flat_logits, lengths)
        y_true = tf.RaggedTensor.from_row_lengths(labels, lengths)
        if not are_labels_ragged:
            y_true = y_true.to_tensor()
        return loss(y_true, tf.ragged.map_flat_values(getattr(tf.nn, activation), logits))

    low = 0 if activation == "softmax" else -50
    value = function(tf.constant([[50, low], [low, 50], [50, low]], "float16"))
    flat = value.flat_values if are_labels_ragged else tf.reshape(value, [-1])
    # Keras fills up the others.
    assert np.all(flat == expected) == are_labels_ragged

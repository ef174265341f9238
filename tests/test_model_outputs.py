"""A model that no other layer calls returns float32, as exact as `output_dtype="float32"` would."""

from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import MODES, Mixes, Subclassed, differentiated, eager_and_graph, made, mirrored
from tests.saving.common import COPIES

L = tf.keras.layers
X = np.random.RandomState(0).normal(size=(4, 8)).astype("float32")
IMAGES = np.random.RandomState(0).normal(size=(2, 8, 8, 3)).astype("float32")


class Outer(L.Layer):
    """A layer with another one inside, whose dtypes it notes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        dtypes.append(self.inner(x).dtype.name)
        return self.inner(x)


dtypes = []


def sequential():
    out = L.Dense(5, "softmax", bias_initializer="normal")
    return tf.keras.Sequential([tf.keras.Input([8]), L.Dense(16, "relu"), out])


class Features(tf.keras.Model):
    """A subclassed model with an output of a layer or of an operation, and others made of it."""

    def __init__(self, activation=None):
        super().__init__()
        self.convolution, self.out = L.Conv2D(4, 3), L.Dense(2)
        self.activation = activation

    def call(self, x):
        features = self.convolution(x)
        if self.activation is not None:
            features = self.activation(features)
        logits = self.out(tf.reduce_mean(features, [1, 2]))
        return features, logits, tf.nn.softmax(logits)


def with_features(first, x):
    features = first(x)
    logits = L.Dense(2)(L.GlobalAveragePooling2D()(features))
    return tf.keras.Model(x, [features, logits, L.Softmax()(logits)])


def with_embedding():
    ids = tf.keras.Input([5], dtype="int32")
    features = L.Embedding(7, 3)(ids)
    logits = L.Dense(2)(L.Flatten()(features))
    return tf.keras.Model(ids, [features, logits, L.Activation("softmax")(logits)])


FEATURES = {
    "subclassed": Features,
    "subclassed, an operation": lambda: Features(tf.nn.relu),
    "functional": lambda: with_features(L.Conv2D(4, 3), tf.keras.Input([8, 8, 3])),
    "functional, cast": lambda: with_features(L.ReLU(), tf.keras.Input([8, 8, 3])),
    "embedding": with_embedding,
}


@pytest.mark.parametrize(("name", "mode", "dtype"), eager_and_graph(FEATURES))
def test_gradients_with_respect_to_outputs_are_those_of_float32(name, mode, dtype):
    x = tf.constant([[1, 2, 3, 4, 5]]) if name == "embedding" else tf.constant(IMAGES)
    results = []
    for policy in (f"mixed_{dtype}", "float32"):
        model = made(FEATURES[name], policy)
        model(x)

        @MODES[mode]
        def run(x):
            with tf.GradientTape(persistent=True) as tape:
                if x.dtype.is_floating:
                    tape.watch(x)
                features, logits, probabilities = model(x)
                score, probability = logits[:, 0], probabilities[:, 0]
                both = tf.reduce_sum(score) + tf.reduce_sum(features**2)
            targets = (score, features), (probability, features), (probability, logits)
            found = [tape.gradient(*pair) for pair in (*targets, (both, features))]
            return found, tape.gradient(both, model.trainable_variables)

        results.append(tf.nest.flatten(run(x)))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == tf.float32
        found, expected = map(tf.convert_to_tensor, (found, expected))
        np.testing.assert_allclose(found, expected, atol=0.02 * np.max(np.abs(expected)))


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_gradients_of_outputs_that_nothing_else_was_made_of(mode):
    with keras_mp.policy_scope("mixed_bfloat16"):
        model = FEATURES["functional, cast"]()

    @MODES[mode]
    def run(x):
        with tf.GradientTape() as first:
            first.watch(x)
            features, logits, _ = model(x)
        unconnected = first.gradient(features, [logits, x], unconnected_gradients="zero")
        with tf.GradientTape() as later:
            later.watch([features, logits])
            score = features * 3
        watched_later = later.gradient(score, [features, logits], unconnected_gradients="zero")
        return *unconnected, *watched_later

    zeros, of_x, threes, more_zeros = run(tf.constant(np.abs(IMAGES) + 1))
    np.testing.assert_array_equal(zeros, np.zeros([2, 2]))
    np.testing.assert_array_equal(of_x, np.ones([2, 8, 8, 3]))
    np.testing.assert_array_equal(threes, np.full([2, 8, 8, 3], 3.0))
    np.testing.assert_array_equal(more_zeros, zeros)


@pytest.mark.parametrize("name", ["subclassed", "functional", "functional, cast"])
def test_jacobians_and_tf_gradients_with_respect_to_outputs(name):
    results = []
    for policy in ("mixed_bfloat16", "float32"):
        model = made(FEATURES[name], policy)

        @tf.function
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                features, logits, _ = model(x)
            jacobian = tape.jacobian(logits, features)
            with_stop = tf.gradients(logits + features[:, 0, 0, :2], x, stop_gradients=features)
            return jacobian, *tf.gradients(logits, features), with_stop

        results.append(run(tf.constant(IMAGES)))
    (found, of_logits, stopped), (expected, expected_of_logits, expected_stopped) = results
    np.testing.assert_allclose(found, expected, atol=0.001)
    np.testing.assert_allclose(of_logits, expected_of_logits, atol=0.001)
    assert stopped == expected_stopped == [None]


def in_bfloat16(**policy):
    return made(sequential, keras_mp.Policy("mixed_bfloat16", **policy))


def test_inside_of_another_model_or_layer_nothing_changes():
    with keras_mp.policy_scope("mixed_bfloat16"):
        inner = sequential()
        x = tf.keras.Input([8])
        symbolic = inner(x)
        model = tf.keras.Model(x, L.Dense(2)(Outer(inner)(x)))
    assert symbolic.dtype == "bfloat16"
    dtypes.clear()
    assert (model(X).dtype, inner(X).dtype) == (tf.float32, tf.float32)
    assert dtypes == ["bfloat16"]
    with keras_mp.policy_scope("float32"):
        outer = Outer(inner)
    assert outer(X).dtype == tf.bfloat16


def rounds(x, dtype="bfloat16"):
    """Whether a float32 tensor has only digits that 16 bits hold."""
    return np.array_equal(x, tf.cast(tf.cast(x, dtype), "float32"))


class OwnDense(L.Dense):
    """A product of a program: what Keras's own layers multiply can be made again."""

    def call(self, x):
        return super().call(x)


def functional_in_float32(last):
    with keras_mp.policy_scope("float32"):
        x = tf.keras.Input([8])
        return tf.keras.Model(x, last(x))


ENDS = {
    "Dense, tanh": lambda: [L.Dense(4, "tanh")],
    "Dense, SiLU": lambda: [L.Dense(4, tf.nn.silu)],
    "Dense, sigmoid": lambda: [L.Dense(4, "sigmoid", bias_initializer="normal")],
    "Activation": lambda: [L.Dense(5), L.Activation("softmax")],
    "layer of the program": lambda: [Mixes(lambda x: x * x * x)],
    "layer in a layer": lambda: [Outer(L.Dense(5, "softmax"))],
    "model": lambda: [tf.keras.Sequential([tf.keras.Input([8]), L.Dense(5, "softmax")])],
    "model of float32": lambda: [functional_in_float32(OwnDense(5))],
    "subclassed, with a function": lambda: [L.Dense(5), tf.nn.softmax],
    "EinsumDense": lambda: [L.Reshape([2, 4]), L.EinsumDense("abc,cd->abd", [2, 3], bias_axes="d")],
    "Conv2D": lambda: [L.Reshape([2, 2, 2]), L.Conv2D(2, 2, bias_initializer="normal")],
    "SeparableConv2D": lambda: [L.Reshape([2, 2, 2]), L.SeparableConv2D(2, 2)],
    "Conv2DTranspose": lambda: [L.Reshape([2, 2, 2]), L.Conv2DTranspose(2, 2)],
    "Reshape": lambda: [L.Dense(4), L.Reshape([2, 2]), L.Flatten(), L.Softmax()],
    "Lambda": lambda: [L.Dense(4), L.Lambda(lambda x: tf.nn.softmax(x) - 1)],
    "Rescaling": lambda: [L.Dense(4, "tanh"), L.Rescaling(127.5, 127.5)],
    "TimeDistributed": lambda: [L.Reshape([2, 4]), L.TimeDistributed(L.Dense(4, "tanh"))],
    "normalization": lambda: [L.LayerNormalization()],
    "batches": lambda: [L.BatchNormalization()],
}


@pytest.mark.parametrize(("name", "mode", "dtype"), eager_and_graph(ENDS))
def test_the_last_layers_compute_in_float32_from_16_bits(name, mode, dtype):
    """The activations before them are rounded, the results are not, with gradients in 16 bits."""
    with keras_mp.policy_scope(f"mixed_{dtype}"):
        hidden = tf.keras.Sequential([tf.keras.Input([8]), L.Dense(8, "relu")])
        layers = [hidden, *ENDS[name]()]
        is_subclassed = name.startswith("subclassed")
        model = Subclassed(*layers) if is_subclassed else tf.keras.Sequential(layers)
    with keras_mp.policy_scope("float32"):
        expected = Subclassed(*ENDS[name]())
    model(X)
    expected(X)
    expected.set_weights(model.get_weights()[2:])
    last = model.trainable_variables[2:]

    def loss(y):
        return tf.reduce_sum(tf.sin(y))

    @MODES[mode]
    def run(x):
        rounded = tf.cast(hidden.layers[-1](x), "float32")
        right = differentiated(lambda: expected(rounded), expected.trainable_variables, loss)
        return *differentiated(lambda: model(x), last, loss), *right

    found, gradients, right, of_right = run(tf.constant(X))
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
    for gradient, of_float32 in zip(gradients, of_right, strict=True):
        assert gradient.dtype == tf.float32
        np.testing.assert_allclose(gradient, of_float32, rtol=0.05, atol=0.05)


class OfTheProgram(tf.keras.Model):
    """A class of models that is made of a functional one, and does more in `train_step`."""


def shared_head(x):
    head = L.Dense(8)
    return tf.keras.Model(x, [head(head(x)), head(L.Dense(8)(x))])


def with_later_layers(x):
    features = L.Dense(8, bias_initializer="normal")(x)
    return OfTheProgram(x, {"features": features, "logits": L.Dense(3)(L.Dense(8)(features))})


def nested_in_the_middle(x):
    inner = tf.keras.Sequential([tf.keras.Input([8]), L.Dense(8, "tanh")])
    features = inner(x)
    return tf.keras.Model(x, (features, L.Dense(3)(features)))


SHARED = [shared_head, with_later_layers, nested_in_the_middle]


@pytest.mark.parametrize("make", SHARED)
@pytest.mark.parametrize("mode", MODES)
def test_outputs_that_later_layers_take_are_in_float32_and_have_both_gradients(make, mode):
    results = []
    for policy in ("mixed_bfloat16", "float32"):
        model = made(lambda: make(tf.keras.Input([8])), policy)

        @MODES[mode]
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                first, last = outputs = tf.nest.flatten(model(x))
                loss = tf.reduce_sum(first**2) + tf.reduce_sum(tf.sin(last))
            return outputs, tape.gradient(loss, [first, x, *model.trainable_variables])

        outputs, gradients = run(tf.constant(X))
        results.append([*outputs, *gradients])
    assert not any(map(rounds, results[0][:2]))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == tf.float32
        np.testing.assert_allclose(found, expected, atol=0.03 * np.max(np.abs(expected)))


def test_a_product_at_the_rim_is_computed_once_in_eager_and_in_16_bits_elsewhere():
    class Counting(L.Dense):
        calls = 0

        def call(self, x):
            Counting.calls += 1
            assert self.compute_dtype == "bfloat16"
            assert x.dtype == tf.bfloat16
            return super().call(x)

    with keras_mp.policy_scope("mixed_bfloat16"):
        last = Counting(3)
        model = tf.keras.Sequential([L.Dense(8), last])
    for _ in range(3):
        Counting.calls = 0
        assert not rounds(model(X))
    assert Counting.calls == 1
    assert last.compute_dtype == "bfloat16"
    assert last(model.layers[0](X)).dtype == tf.bfloat16


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_a_functional_model_may_end_in_operations_that_are_no_layers(tmp_path, policy):
    with keras_mp.policy_scope(policy):
        x = tf.keras.Input([8])
        model = tf.keras.Model(x, 2.0 * (1.0 - L.Dense(3, "tanh")(x)))
    weights = model.get_weights()
    # Keras does not save the policy of a model.
    loaded = COPIES[".keras"](model, tmp_path)
    for found in (model(X), model.predict(X, verbose=0), loaded(X)):
        assert found.dtype == "float32"
        np.testing.assert_allclose(found, 2 - 2 * np.tanh(X @ weights[0] + weights[1]), atol=2**-5)


def test_a_policy_or_the_last_layer_can_say_otherwise(tmp_path):
    policy = keras_mp.Policy("mixed_bfloat16", model_outputs=None)
    assert repr(policy) == '<Policy "mixed_bfloat16", model_outputs=None>'
    assert policy != keras_mp.Policy("mixed_bfloat16")
    models = {"policy": in_bfloat16(model_outputs=None), "plain": in_bfloat16()}
    with keras_mp.policy_scope("mixed_bfloat16"):
        for name, dtype in (("layer", "mixed_float16"), ("its policy", policy)):
            layers = [tf.keras.Input([8]), L.Dense(3), L.Dense(2, dtype=dtype)]
            models[name] = tf.keras.Sequential(layers)
    dtypes = {}
    for name, model in models.items():
        loaded = COPIES[".keras"](model, tmp_path)
        dtypes[name] = model(X).dtype.name
        assert loaded(X).dtype == model(X).dtype, name
        np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    expected = {"policy": "bfloat16", "plain": "float32", "layer": "float16"}
    assert dtypes == {**expected, "its policy": "bfloat16"}


@pytest.mark.parametrize("wrong", ["bfloat16", tf.float64, 32])
def test_bad_model_outputs(wrong):
    with pytest.raises((TypeError, ValueError), match=r"`model_outputs`.*Received: model_outputs="):
        keras_mp.Policy("mixed_bfloat16", model_outputs=wrong)


def test_structures_masks_ragged_tensors_and_others():
    class Several(tf.keras.Model):
        def call(self, x):
            low = tf.cast(x, tf.bfloat16)
            ragged = tf.RaggedTensor.from_row_lengths(low, [1, 3])
            return {"a": (low, [x]), "ids": tf.range(2), "none": None, "ragged": ragged}

    with keras_mp.policy_scope("mixed_bfloat16"):
        model = Several()
        masked = tf.keras.Sequential([L.Embedding(5, 4, mask_zero=True), L.Dense(3)])
    found = model(X)
    assert found["a"][0].dtype == found["ragged"].dtype == tf.float32
    assert isinstance(found["a"], tuple)
    assert found["none"] is None
    assert found["ids"].dtype == tf.int32
    y = masked(np.array([[1, 0]]))
    assert y.dtype == tf.float32
    np.testing.assert_array_equal(y._keras_mask, [[True, False]])


def test_on_replicas():
    strategy = mirrored(2)
    with strategy.scope():
        model = in_bfloat16()
    on_replicas = strategy.run(tf.function(lambda: model(X)))
    for each in strategy.experimental_local_results(on_replicas):
        np.testing.assert_allclose(each, model(X), rtol=1e-5)


def test_several_threads_share_a_model():
    model = in_bfloat16()
    expected = model(X)
    with futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(model, [X] * 20):
            np.testing.assert_allclose(found, expected, rtol=1e-6)


class Normal:
    """A distribution, as libraries and programs write them."""

    def __init__(self, loc, scale):
        self.loc, self.scale, self.dtype = loc, scale, loc.dtype
        self.others = {"precisions": [1 / scale]}

    def log_prob(self, value):
        z = (tf.cast(value, self.dtype) - self.loc) / self.scale
        return -0.5 * z * z


class Copied(Normal):
    """One that is made anew of its parameters."""

    def __init__(self, loc, scale, name="copied"):
        super().__init__(loc, scale)
        self.parameters = {"loc": loc, "scale": scale, "name": name}

    def copy(self, **others):
        return type(self)(**{**self.parameters, **others})


class ReturnsObjects(tf.keras.Model):
    def __init__(self, distribution):
        super().__init__()
        self.inner, self.distribution = L.Dense(2), distribution

    def call(self, x):
        loc, scale = tf.split(self.inner(x), 2, axis=1)
        made = self.distribution(loc, tf.nn.softplus(scale))
        return {"normal": made, "none": None, "number": 3}


@pytest.mark.parametrize("distribution", [Normal, Copied])
@pytest.mark.parametrize("mode", MODES)
def test_objects_that_hold_tensors_hold_float32(mode, distribution):
    with keras_mp.policy_scope("mixed_float16"):
        model = ReturnsObjects(distribution)
    model(X)

    @MODES[mode]
    def run(x):
        with tf.GradientTape() as tape:
            found = model(x)
            assert type(found["normal"]) is distribution
            assert (found["none"], found["number"]) == (None, 3)
            precision = found["normal"].others["precisions"][0]
            assert (found["normal"].dtype, precision.dtype) == (tf.float32, tf.float32)
            loss = -tf.reduce_mean(found["normal"].log_prob(tf.fill([4, 1], 4000.0)))
        return loss, tape.gradient(loss, model.trainable_variables)

    loss, gradients = run(tf.constant(X))
    loc, scale = np.split(X @ model.inner.get_weights()[0], 2, axis=1)
    expected = np.mean(0.5 * ((4000 - loc) / np.log1p(np.exp(scale))) ** 2)
    np.testing.assert_allclose(loss, expected, rtol=0.01)
    assert None not in gradients


def test_layers_of_tensorflow_probability_are_known_by_their_name():
    class DistributionLambda(L.Layer):
        __module__ = "tensorflow_probability.python.layers.distribution_layer"

        def call(self, x):
            loc, scale = tf.split(x, 2, axis=1)
            return Normal(loc, tf.nn.softplus(scale))

    with keras_mp.policy_scope("mixed_bfloat16"):
        layer = DistributionLambda()
    assert layer(X[:, :2]).scale.dtype == tf.float32


class CallsItself(tf.keras.Model):
    """Its class defines `__call__` in the place of `call`."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(2, kernel_initializer=tf.keras.initializers.Constant(1.001))
        self.dense.build((None, 4))
        self.built = True

    def __call__(self, x, training=False):
        if tf.reduce_sum(x) > 0:
            return {"y": self.dense(x), "x": x}
        return {"y": -self.dense(x), "x": x}


class InHead(tf.keras.Model):
    """Its class inherits `__call__`, and its model is inside of another one."""

    def __init__(self):
        super().__init__()
        self.inner = CallsItself()

    def call(self, x):
        y = self.inner(x)["y"]
        dtypes.append(y.dtype.name)
        return y


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_whose_class_defines_call(mode, dtype):
    x = tf.fill([3, 4], 100.0)
    with keras_mp.policy_scope(f"mixed_{dtype}"):
        model = type("Inherits", (CallsItself,), {})()
        outer = InHead()
    found = MODES[mode](lambda x: model(x, training=True))(x)
    assert found["y"].dtype == found["x"].dtype == tf.float32
    np.testing.assert_allclose(found["y"], np.full([3, 2], 400.4), rtol=2**-7)
    assert MODES[mode](outer)(x).dtype == tf.float32
    assert dtypes[-1] == dtype


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_static_sizes_stay(policy):
    with keras_mp.policy_scope(policy):
        inputs = L.Input((3, 4))
        models = [Subclassed(L.Dense(5)), tf.keras.Model(inputs, L.Dense(5)(inputs))]
    for model in models:
        model(tf.ones([2, 3, 4]))
        traced = tf.function(model).get_concrete_function(tf.TensorSpec([None, 3, 4]))
        assert traced.outputs[0].shape.as_list() == [None, 3, 5]

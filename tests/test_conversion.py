"""The same model with the same weights under another policy."""

import importlib

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import keras_api
from tests import common
from tests.common import IS_KERAS_3, assert_all_equal, made
from tests.numerics.tools import dtypes

K = tf.keras
BOUNDS = {"float64": 1e-6, "float32": 1e-6, "float16": 2e-2, "bfloat16": 2e-1}


class Scale(K.layers.Layer):
    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor
        self.inner = K.layers.Dense(3, dtype=self.dtype_policy)

    def build(self, shape):
        self.inner.build(shape)
        self.built = True

    def call(self, x):
        return self.factor * self.inner(x)

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


class Gain(keras_mp.layers.Layer):
    def build(self, shape):
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="gain")

    def call(self, x):
        return x * self.gain


def functional():
    """Nested, wrapped, shared, own and Lambda layers, and one that is kept in float32."""
    inputs = K.Input([4, 5])
    shared = K.layers.Dense(5, activation="tanh")
    x = K.layers.TimeDistributed(K.layers.Dense(5))(shared(inputs))
    x = K.layers.TimeDistributed(K.layers.Lambda(lambda z: z * 2))(shared(x))
    x = K.layers.Bidirectional(K.layers.LSTM(2))(x)
    x = K.Sequential([K.Input([4]), K.layers.Dense(2), Gain()])(x)
    x = K.layers.RNN(K.layers.LSTMCell(2))(K.layers.Reshape([1, 2])(x))
    x = Scale(2)(K.layers.BatchNormalization()(x))
    return K.Model(inputs, K.layers.Dense(2, "softmax", dtype="float32")(x))


def sequential():
    return K.Sequential([K.Input([4, 5]), K.layers.Flatten(), K.layers.Dense(3), K.layers.Dense(2)])


def unbuilt():
    return K.Sequential([K.layers.Flatten(), K.layers.Dense(3), K.layers.Dense(2)])


@K.utils.register_keras_serializable("tests")
class Subclassed(K.Model):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.flatten = K.layers.Flatten()
        self.hidden = K.layers.Dense(units)
        self.last = K.layers.Dense(2, dtype="float32")

    def call(self, x):
        return self.last(self.hidden(self.flatten(x)))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


MODELS = {
    "functional": functional,
    "sequential": sequential,
    "unbuilt": unbuilt,
    "subclassed": lambda: Subclassed(3),
}
X = np.random.default_rng(0).normal(size=[3, 4, 5]).astype("float32")


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("functional", "mixed_float16", "float32"),
        ("functional", "mixed_bfloat16", "mixed_float16"),
        ("sequential", "mixed_bfloat16", "float32"),
        ("sequential", "float32", "float64"),
        ("unbuilt", "float32", "mixed_bfloat16"),
        ("subclassed", "mixed_bfloat16", "float32"),
        ("subclassed", "float32", "mixed_bfloat16"),
    ],
)
def test_same_weights_and_nearly_the_same_outputs(model, before, after):
    original = made(MODELS[model], before)
    outputs = tf.cast(original(X), "float32")
    converted = keras_mp.convert(original, after)
    assert type(converted) is type(original)
    if model != "subclassed":  # of which Keras 2 does not keep it
        assert converted.name == original.name
    assert converted.dtype_policy == keras_mp.Policy(after)
    assert keras_mp.global_policy().name == "float32"
    assert_all_equal(original.get_weights(), converted.get_weights())
    coarsest = max(BOUNDS[name.removeprefix("mixed_")] for name in (before, after))
    np.testing.assert_allclose(tf.cast(converted(X), "float32"), outputs, atol=coarsest)
    kept = {layer.name for layer in original.layers if layer.compute_dtype == "float32"}
    for layer in keras_api.flatten_layers(converted):
        was_kept = before != "float32" and layer.name in kept
        was_kept |= layer is getattr(converted, "last", None)  # which the constructor decides
        expected = "float32" if was_kept else after.removeprefix("mixed_")
        if not isinstance(layer, K.layers.InputLayer):
            assert layer.compute_dtype == expected, layer.name
    # In eager: tracing the model takes longer than all of the above.
    converted.compile("sgd", "mse", run_eagerly=True)
    converted.fit(X, np.zeros(converted(X).shape), verbose=0)


def test_integers_are_left_alone():
    inputs = K.Input([3], dtype="int32")
    embedded = K.layers.Embedding(2000, 2)(inputs)
    model = K.Model(inputs, K.layers.Dense(1)(K.layers.Flatten()(embedded)))
    converted = keras_mp.convert(model, "mixed_float16")
    ids = np.array([[1, 1999, 0]])
    assert converted.compute_dtype == converted.layers[-1].compute_dtype == "float16"
    assert converted(ids).dtype == tf.float32
    np.testing.assert_allclose(converted(ids), model(ids), atol=1e-2)


class WithoutConfig(common.Subclassed):
    def get_config(self):
        raise NotImplementedError("It has none.")


class Forgets(Subclassed):
    def __init__(self, units=5, **kwargs):
        super().__init__(units, **kwargs)

    def get_config(self):
        config = super().get_config()
        del config["units"]
        return config


def test_what_cannot_be_converted_says_why():
    with pytest.raises(ValueError, match="since it cannot .*Received: .*It has none"):
        keras_mp.convert(WithoutConfig(K.layers.Dense(1)), "float32")
    forgets = Forgets(3)
    forgets(X)
    with pytest.raises(ValueError, match="has other weights.*Expected shapes.*Received: "):
        keras_mp.convert(forgets, "mixed_bfloat16")
    dense = K.layers.Dense(5)
    inputs = K.Input([4, 5])
    shared_with_a_wrapper = K.Model(inputs, dense(K.layers.TimeDistributed(dense)(inputs)))
    with pytest.raises(ValueError, match="has other weights"):
        keras_mp.convert(shared_with_a_wrapper, "mixed_bfloat16")
    with pytest.raises(TypeError, match="Expected a model.*Received: model=3"):
        keras_mp.convert(3, "float32")
    with pytest.raises(ValueError, match="^Cannot interpret the policy"):
        keras_mp.convert(sequential(), "nonsense")


class LosesUnits(K.layers.Dense):
    def get_config(self):
        return {"name": self.name, "dtype": "float32"}


def test_the_layer_that_is_to_blame_is_named():
    culprit = LosesUnits(2, name="culprit")
    sequential = K.Sequential([K.Input([3]), K.layers.Dense(4), culprit])
    inputs = K.Input([5, 3])
    functional = K.Model(inputs, K.layers.TimeDistributed(sequential)(inputs))
    expected = "since its layer 'culprit' cannot .* the class LosesUnits a `get_config`"
    reason = "TypeError: .*missing 1 required positional argument: 'units'"
    for model in (sequential, functional):
        with pytest.raises(ValueError, match=rf"(?s){expected}.* Received: {reason}") as raised:
            keras_mp.convert(model, "mixed_bfloat16")
        assert isinstance(raised.value.__cause__, TypeError)


def test_a_layer_of_the_name_of_an_operation():
    inputs = K.Input([4])
    model = K.Model(inputs, K.layers.Dense(2)(K.layers.Add()([inputs, inputs]) + 1.0))
    converted, x = keras_mp.convert(model, "mixed_bfloat16"), tf.ones([1, 4])
    assert converted.layers[-1].compute_dtype == "bfloat16"
    np.testing.assert_allclose(tf.cast(converted(x), tf.float32), model(x), rtol=2.0**-5)


def test_a_layer_that_only_an_application_of_keras_has():
    convnext = importlib.import_module(f"{keras_api.ROOT_PACKAGE}.src.applications.convnext")
    model = K.Sequential([K.Input([4]), convnext.LayerScale(0.5, 4, name="scale")])
    assert dtypes(keras_mp.convert(model, "mixed_bfloat16"))["scale"] == "bfloat16"


def named_alike(factor):
    class Block(K.layers.Layer):
        def call(self, x):
            return x * factor

    return Block


def test_classes_of_one_name():
    first, second = named_alike(2.0), named_alike(3.0)
    inner = K.Sequential([K.Input([1]), second(), first()])
    model = K.Sequential([K.Input([1]), first(), K.layers.Dense(1), inner, second()])
    converted = keras_mp.convert(model, "mixed_bfloat16")
    for old, new in zip(
        keras_api.flatten_layers(model), keras_api.flatten_layers(converted), strict=True
    ):
        assert type(old) is type(new)
        assert type(old).__name__ != "Block" or new.compute_dtype == "bfloat16"


@pytest.mark.skipif(IS_KERAS_3, reason="Keras 3 makes an unbuilt model of one.")
def test_a_model_without_weights_yet():
    with pytest.raises(ValueError, match="has no weights yet: build it"):
        keras_mp.convert(K.Sequential([K.layers.Dense(3)]), "float32")


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_what_a_normalization_has_learnt(policy):
    x = np.random.default_rng(0).normal(300, 50, [64, 5]).astype("float32")
    normalization = K.layers.Normalization()
    normalization.adapt(x)
    model = K.Sequential([K.Input([5]), normalization, K.layers.Dense(2)])
    converted = keras_mp.convert(model, policy)
    bound = BOUNDS[policy.removeprefix("mixed_")]
    np.testing.assert_allclose(converted(x), model(x), atol=bound)
    np.testing.assert_allclose(
        tf.cast(converted.layers[0](x), "float32"), normalization(x), atol=bound
    )


def test_a_policy_for_each_path():
    inputs = K.Input([4], name="inputs")
    x = K.layers.Dense(5, name="first")(inputs)
    inner = K.Sequential(
        [K.Input([5]), K.layers.Dense(3, name="a"), Scale(2, name="b")], name="inner"
    )
    x = K.layers.Dense(2, name="last")(inner(x))
    model = K.Model(inputs, x)
    mixed = keras_mp.convert(model, {"": "mixed_bfloat16", "inner": "float32", "last": "float64"})
    found = dtypes(mixed)
    [inside] = [path for path in found if path.startswith("inner/b/")]
    asked = {"first": "bfloat16", "inner/a": "float32", "inner/b": "float32", "last": "float64"}
    assert {**asked, inside: "float32"}.items() <= found.items()
    # The rest stays as it is, and a longer path comes before a shorter one.
    again = keras_mp.convert(mixed, {"inner/a": "mixed_float16"})
    assert {**asked, "inner/a": "float16"}.items() <= dtypes(again).items()
    both = keras_mp.convert(model, {"inner": "mixed_float16", "inner/b": "float32"})
    kept = dtypes(both)
    assert (kept["first"], kept["inner/a"], kept["inner/b"]) == ("float32", "float16", "float32")
    assert_all_equal(model.get_weights(), both.get_weights())
    wrapped = K.Sequential([K.Input([2, 3]), K.layers.TimeDistributed(inner.layers[-1], name="t")])
    path = next(path for path in dtypes(wrapped) if path.startswith("t/"))
    assert dtypes(keras_mp.convert(wrapped, {path: "mixed_float16"}))[path] == "float16"


def test_paths_that_no_config_has():
    model = K.Sequential([K.Input([3]), Scale(2, name="scale")])
    inside = next(path for path in dtypes(model) if path.startswith("scale/"))
    with pytest.raises(ValueError, match=rf"\['{inside}'\].*are made by.*\['', 'scale'\]|'scale'"):
        keras_mp.convert(model, {inside: "mixed_float16"})
    with pytest.raises(ValueError, match=r"has no layers with the paths \['other'\].*'scale'"):
        keras_mp.convert(model, {"other": "mixed_float16"})
    with pytest.raises(ValueError, match="^Cannot interpret the policy"):
        keras_mp.convert(model, {"scale": "nonsense"})


class PassesOn(K.layers.Layer):
    """Keras 3 leaves the name out of its config, since the last argument is not `kwargs`."""

    def __init__(self, factor=2.0, **kw):
        super().__init__(**kw)
        self.factor = factor

    def call(self, x):
        return x * tf.cast(self.factor, x.dtype)


class StaysInFloat16(PassesOn):
    def __init__(self, factor=2.0, **kwargs):
        kwargs["dtype"] = "float16"
        super().__init__(factor, **kwargs)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("functional", [False, True])
def test_layers_whose_config_has_no_name(functional, policy):
    keras_mp.set_global_policy("mixed_float16")
    layers = [K.layers.Dense(3), PassesOn(), K.layers.Dense(1, dtype="float32")]
    model = K.Sequential([K.Input([2]), *layers])
    if functional:
        model = K.Model(model.inputs, model.outputs)
    converted = keras_mp.convert(model, policy)
    dtypes = [layer.compute_dtype for layer in converted.layers if layer.count_params()]
    wanted = keras_mp.Policy(policy).compute_dtype
    assert dtypes == [wanted, "float32"]
    [layer] = [layer for layer in converted.layers if isinstance(layer, PassesOn)]
    assert layer.compute_dtype == wanted


def test_a_layer_that_stays_in_16_bits_is_refused():
    model = K.Sequential([K.Input([2]), StaysInFloat16(name="stubborn")])
    with pytest.raises(ValueError, match=r"its layer 'stubborn' stays in float16.*'float32'"):
        keras_mp.convert(model, "float32")


def test_inputs_in_16_bits_stay_as_they_are():
    inputs = K.Input([2], dtype="bfloat16")
    outputs = K.layers.Dense(1, dtype="mixed_bfloat16")(inputs)
    converted = keras_mp.convert(K.Model(inputs, outputs), "float32")
    assert converted.layers[-1].compute_dtype == "float32"


def named_function(x):
    return tf.nn.relu(x)


def test_lambdas_that_use_tensorflow():
    def nested(x):
        return named_function(x) * 2.0

    i = K.Input((2,))
    x = K.layers.Lambda(lambda x: tf.nn.relu(x) + 1)(i)
    x = K.layers.Lambda(nested, output_shape=lambda shape: shape)(x)
    x = K.Sequential([K.Input((2,)), K.layers.Lambda(named_function)])(x)
    model = K.Model(i, K.layers.Dense(3)(x))
    batch = np.array([[0.5, -1.0]], "float32")
    converted = keras_mp.convert(model, "mixed_bfloat16")
    assert converted.layers[-1].compute_dtype == "bfloat16"
    np.testing.assert_allclose(converted(batch), model(batch), atol=0.1)
    again = keras_mp.convert(converted, "float32")
    np.testing.assert_array_equal(again(batch), model(batch))


def test_a_sequential_model_without_input_reads_float32():
    dense = lambda: tf.keras.layers.Dense(1, kernel_initializer="ones")  # noqa: E731
    x = np.float32([[1990.3], [70000.0]])
    with keras_mp.policy_scope("mixed_float16"):
        model = tf.keras.Sequential([tf.keras.Sequential([dense()]), dense()])
    model(x)
    converted = keras_mp.convert(model, "float32")
    np.testing.assert_array_equal(converted.predict(x, verbose=0), x)
    # Without keras_mp, a loaded model goes by it.
    assert [tf.as_dtype(each.dtype) for each in converted.inputs] == [tf.float32]

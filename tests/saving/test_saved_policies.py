"""What a policy has beyond its name is kept: in copies, in subclasses, and in every format."""

import abc
import copy
import functools
import pickle

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, Subclassed, made
from tests.models import compiled_model
from tests.saving.common import MODELS

keras_2 = pytest.mark.skipif(IS_KERAS_3, reason="Only Keras 2 has it.")

POLICIES = {
    "output dtype": keras_mp.Policy("mixed_float16", output_dtype="float32"),
    "fixed scale": keras_mp.Policy("mixed_float16", 1 / 16),
    "dynamic scale": keras_mp.Policy("mixed_float16", keras_mp.DynamicLossScale(8, 7)),
    "no scale": keras_mp.Policy("mixed_float16", None),
    "scale in float32": keras_mp.Policy("float32", 8),
    "bfloat16": keras_mp.Policy("mixed_bfloat16", output_dtype="float32"),
    "outputs": keras_mp.Policy("mixed_bfloat16", model_outputs=None),
    "float64": keras_mp.Policy("float64"),
}


@tf.keras.utils.register_keras_serializable(package="tests")
class Mine(keras_mp.Policy):
    """A policy with an attribute of its own."""

    def __init__(self, name, factor=2, **kwargs):
        self.before = "before"
        super().__init__(name, **kwargs)
        self.factor = 1
        self.factor = factor

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


class Further(Mine, abc.ABC):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.further = True


POLICIES["subclass"] = Mine("mixed_bfloat16", 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_of_a_policy(policy):
    policy = POLICIES[policy]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(policy, protocol))
        assert (again, type(again)) == (policy, type(policy))
        assert pickle.loads(pickle.dumps(policy.name, protocol)) == policy.name
    assert copy.copy(policy) is copy.deepcopy(policy) is policy
    serialized = tf.keras.utils.serialize_keras_object(policy)
    for again in (
        type(policy).from_config(policy.get_config()),
        tf.keras.utils.deserialize_keras_object(serialized),
    ):
        assert (again, type(again)) == (policy, type(policy))
    layer = tf.keras.layers.Dense(2, dtype=policy)
    assert pickle.loads(pickle.dumps(layer)).dtype_policy == policy


def test_a_subclass_with_attributes_of_its_own():
    for policy in (Mine("mixed_float16", 3), Further("mixed_float16", factor=3)):
        assert (policy.factor, policy.before) == (3, "before")
        assert type(policy).from_config(policy.get_config()) == policy
        assert hash(policy) == hash(type(policy)("mixed_float16", 3))
        assert policy != type(policy)("mixed_float16", 4)
        for name in ("factor", "other"):
            with pytest.raises(AttributeError, match=f"does not change.*{name}=4"):
                setattr(policy, name, 4)
        assert isinstance(policy.loss_scale, keras_mp.DynamicLossScale)
        with keras_mp.policy_scope(policy):
            assert keras_mp.global_policy() is policy
            model = compiled_model()
        assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)


# SavedModels of Keras 2 with layers whose classes are not there when they are loaded.


class Plain(keras_mp.layers.Layer):
    def build(self, _):
        self.kernel = self.add_weight(name="kernel", shape=[2, 2])

    def call(self, x):
        return x @ self.kernel


class WithTraining(Plain):
    def call(self, x, training=None):
        return super().call(x) * (2.0 if training else 1.0)


class WithKeywords(Plain):
    def call(self, x, *, mask=None, scale=1.0):
        return super().call(x) * scale


@keras_2
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("cls", [Plain, WithTraining, WithKeywords])
def test_a_saved_model_of_a_layer_without_its_class(cls, policy, tmp_path):
    x = np.ones([3, 2], "float32")
    with keras_mp.policy_scope(policy):
        layer = cls()
        models = [tf.keras.Sequential([tf.keras.Input((2,)), layer]), Subclassed(cls())]
    # Without its class a layer is a function of 16 bits, which a last layer is not.
    rounded = {"rtol": {"mixed_float16": 2**-10, "mixed_bfloat16": 2**-7}.get(policy, 0)}
    for i, model in enumerate(models):
        expected = [model(x), model(x, training=True)]
        # Saving leaves the layer as it was.
        for _ in range(2):
            model.save(tmp_path / str(i), save_format="tf")
        np.testing.assert_array_equal(model(x), expected[0])
        loaded = tf.keras.models.load_model(tmp_path / str(i))
        found = [loaded(x), loaded(x, training=True)]
        for ours, reference in zip(found, expected):
            assert ours.dtype == reference.dtype
            np.testing.assert_allclose(ours, reference, **rounded)
        np.testing.assert_allclose(loaded.predict(x, verbose=0), expected[0], **rounded)


# A model that was loaded or copied has the policies of the one that was made, and its outputs.


K = tf.keras
L = K.layers
X = np.ones((1, 6), "float32")


def head(**kwargs):
    # It returns what float16 does not hold.
    return L.Dense(1, bias_initializer=K.initializers.Constant(120000.0), **kwargs)


def models_only():
    encoder = K.Sequential([K.Input((6,)), L.Dense(3)])
    decoder = K.Sequential([K.Input((3,)), head()])
    inputs = K.Input((6,))
    return K.Model(inputs, decoder(encoder(inputs)))


def two_policies(policy):
    return K.Sequential([K.Input((6,)), L.Dense(3, dtype=policy), head()])


def one_in_16_bits():
    inputs = K.Input((6,))
    hidden = L.Dense(3)(inputs)
    return K.Model(inputs, [head()(hidden), L.Dense(2, dtype="float16")(hidden)])


# Only layers with ours are in the reach of what keras_mp replaces.
STOCK = {"Keras's own": K.mixed_precision.Policy("mixed_bfloat16")}
STRUCTURES = {
    "models only": models_only,
    **{
        name: functools.partial(two_policies, policy)
        for name, policy in {**POLICIES, **STOCK}.items()
    },
    "one in 16 bits": one_in_16_bits,
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_outputs(make, kind, tmp_path):
    model = made(make, "mixed_float16")
    again = MODELS[kind](model, tmp_path)
    again.set_weights(model.get_weights())
    found, expected = (tf.nest.flatten(each(X)) for each in (again, model))
    dtypes = ["float32", "float16"] if make is one_in_16_bits else ["float32"]
    assert [each.dtype for each in expected] == dtypes
    assert np.all(np.isfinite(expected[0]))
    for each, exact in zip(found, expected, strict=True):
        assert each.dtype == exact.dtype
        np.testing.assert_allclose(each, exact, rtol=2e-3 if each.dtype == "float16" else 2e-6)
    for copied, layer in zip(again.layers, model.layers, strict=True):
        if isinstance(layer, L.Dense):  # Keras does not save the policies of models.
            policy = layer.dtype_policy
            assert type(copied.dtype_policy) is type(policy)
            assert copied.dtype_policy.get_config() == policy.get_config()
            assert repr(copied.dtype_policy) == repr(policy)

"""A model that was loaded or copied has the policies of the one that was made, and its outputs."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.common import made
from tests.saving.common import MODELS
from tests.saving.test_saved_policies import POLICIES

K = tf.keras
L = K.layers
X = np.ones((1, 6), "float32")


def head(**kwargs):
    # It returns what float16 does not hold.
    return L.Dense(1, bias_initializer=K.initializers.Constant(120000.0), **kwargs)


def models_only():
    encoder, decoder = (
        K.Sequential([K.Input((6,)), L.Dense(3)]),
        K.Sequential([K.Input((3,)), head()]),
    )
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
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5:UserWarning")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
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

"""Layers of Keras in 16 bits compute what they do in float32, where kernels are slow or not."""

import numpy as np
import pytest

import keras_mp
from tests import inside
from tests.common import MODES, pairs
from tests.kernels.stock_layers import LAYERS, inputs_of, results_and_gradients


@pytest.fixture(autouse=True)
def in_reach():
    """Only layers are in reach here, not what they are compared with."""


@pytest.mark.parametrize(
    ("name", "mode", "dtype", "are_slow"),
    pairs(LAYERS, MODES, ["float16", "bfloat16"], [True, False]),
)
def test_results_and_gradients_are_those_of_float32(name, mode, dtype, are_slow, monkeypatch):
    inputs, make = inputs_of(name), LAYERS[name][0]
    exact = make(dtype="float32")
    exact(*inputs)
    # From large logits of attention, rounded inputs make other probabilities.
    number = 0.1 if name == "MultiHeadAttention" else 0.5
    weights = [np.full(weight.shape, number) for weight in exact.get_weights()]
    if are_slow:
        inside.set_slow(monkeypatch)
    else:
        inside.forget_operations(monkeypatch)
        inside.set_units(lambda dtype: True, monkeypatch.setattr)
    found, expected = [], []
    for layer, run, values in (
        (exact, "function", expected),
        (make(dtype=keras_mp.Policy(f"mixed_{dtype}")), mode, found),
    ):
        layer(*inputs)
        layer.set_weights(weights)
        of_weights = {"weights": layer.trainable_variables, "wrap": MODES[run]}
        values += results_and_gradients(layer, *inputs, **of_weights)
    # Rounding of what is added up does not grow with the number of terms.
    tolerance = {"float16": 0.005, "bfloat16": 0.03}[dtype]
    # Attention's gradient of a key's bias is zero: a difference of the others.
    least = max(abs(each).max() for each in expected) * (name == "MultiHeadAttention")
    for ours, right in zip(found, expected, strict=True):
        atol = tolerance * max(least, abs(right).max())
        np.testing.assert_allclose(ours, right, rtol=tolerance, atol=atol)

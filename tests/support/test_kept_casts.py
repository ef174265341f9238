"""Casts that XLA keeps are TensorFlow's, bit for bit. `ci/test_compiled_for_gpu.py` has GPUs."""

import numpy as np
import pytest
import tensorflow as tf

from keras_mp.support import kept_casts
from tests.common import once

pytestmark = [
    once,
    pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name),
]

# Each sign, exponent and leading digits, with rests that round up, down, and to even.
RESTS = (0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xEFFF, 0xF000)
UPPER = np.arange(1 << 16, dtype=np.uint32) << 16
VALUES = np.concatenate([UPPER | np.uint32(rest) for rest in RESTS]).view(np.float32)


def bits(values):
    """The bits of numbers, with one NaN for all."""
    values = np.asarray(values)
    found = values.view({2: np.uint16, 4: np.uint32}[values.itemsize]).copy()
    found[np.isnan(values.astype("float32"))] = 0x7FFF
    return found


def rounded(dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return VALUES.astype(dtype.as_numpy_dtype)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_rounding_is_to_nearest_and_to_even(dtype, jit_compile):
    cast = tf.function(lambda x: kept_casts.to_16_bits(x, dtype), jit_compile=jit_compile)
    np.testing.assert_array_equal(bits(cast(tf.constant(VALUES))), bits(rounded(dtype)))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_every_number_of_16_bits_is_that_of_float32(dtype, jit_compile):
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype.as_numpy_dtype)
    cast = tf.function(kept_casts.as_float32, jit_compile=jit_compile)
    np.testing.assert_array_equal(bits(cast(tf.constant(values))), bits(values.astype("float32")))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_what_16_bits_cannot_hold_is_not_finite(dtype, jit_compile):
    test = tf.function(lambda x: kept_casts.is_finite(tf.cast(x, dtype)), jit_compile=jit_compile)
    expected = np.isfinite(rounded(dtype).astype("float32"))
    np.testing.assert_array_equal(test(tf.constant(VALUES)), expected)


def test_other_dtypes_are_tensorflows(dtype):
    del dtype
    for wide in (tf.float32, tf.float64):
        values = tf.constant([1.1, float("inf"), float("nan")], wide)
        found = tf.function(
            lambda x: (kept_casts.as_float32(x), kept_casts.is_finite(x)), jit_compile=True
        )(values)
        np.testing.assert_array_equal(found[0], tf.cast(values, tf.float32))
        np.testing.assert_array_equal(found[1], [True, False, False])


def test_clusters_that_a_user_lets_xla_choose_are_compiled_too(dtype, monkeypatch):
    def operations():
        function = tf.function(lambda x: kept_casts.to_16_bits(x, dtype))
        graph = function.get_concrete_function(tf.TensorSpec([4])).graph
        return {op.type for op in graph.get_operations()}

    assert "Bitcast" not in operations()
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=2")
    assert "Bitcast" in operations()

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.step import replicas
from tests.common import once

pytestmark = once


@pytest.mark.parametrize(
    ("by_name", "by_bool", "expected"),
    [
        (None, None, tf.float16),
        (None, True, tf.float16),
        (None, False, tf.float32),
        ("float16", True, tf.float16),
        ("bfloat16", None, tf.bfloat16),
        (tf.bfloat16, False, tf.bfloat16),
        (tf.float32, False, tf.float32),
    ],
)
def test_two_arguments_that_agree_are_one_dtype(by_name, by_bool, expected):
    assert replicas.reduce_dtype_of(by_name, by_bool) == expected


@pytest.mark.parametrize(("by_name", "by_bool"), [("bfloat16", True), ("float16", False)])
def test_two_that_do_not_are_refused(by_name, by_bool):
    with pytest.raises(ValueError, match="contradict each other") as raised:
        replicas.reduce_dtype_of(by_name, by_bool)
    assert f"Received: reduce_dtype={by_name!r}, aggregate_in_float16={by_bool}" in str(
        raised.value
    )


@pytest.mark.parametrize("bad", [None, True, 1, 3.5, "sixteen", [tf.float16]])
def test_what_is_no_dtype_is_refused(bad):
    with pytest.raises(TypeError, match=r"`reduce_dtype` must be one of .*Received: reduce_dtype="):
        replicas.to_reduce_dtype(bad)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="Received: reduce_dtype='float64'"):
        replicas.to_reduce_dtype("float64")
    with pytest.raises(ValueError, match="`reduce_dtype` must be one of .*Do so.* Received"):
        replicas.to_reduce_dtype("float16", ("bfloat16",), " Do so.")


@pytest.mark.parametrize(
    ("before", "after_true", "after_false"),
    [
        ("float16", "float16", "float32"),
        ("bfloat16", "float16", "bfloat16"),
        ("float32", "float16", "float32"),
    ],
)
def test_setting_aggregate_in_float16(before, after_true, after_false):
    for value, after in ((True, after_true), (False, after_false)):
        scaler = keras_mp.GradScaler(64, reduce_dtype=before)
        scaler.aggregate_in_float16 = value
        assert scaler.reduce_dtype == after
    with pytest.raises(TypeError, match="`aggregate_in_float16` must be a bool"):
        scaler.aggregate_in_float16 = 1

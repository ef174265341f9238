"""What runs in which dtype, in eager and in graphs; what user code sees is float32."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import inside
from tests.common import once
from tests.op_autocast.common import HALF, normal, region

pytestmark = once

X = normal(4, 4)
IMAGE, FILTER = normal(1, 4, 4, 2), normal(3, 3, 2, 2)


def computed_dtype(tensor):
    """The dtype in which a tensor that the program sees as float32 was computed."""
    found = (
        dtype for dtype in HALF if inside.low_precision_of(tensor, tf.as_dtype(dtype)) is not None
    )
    return next(found, "float32")


def computed_in(function, dtype, eager=True):
    """The dtype in which the results of a function were computed. The program gets float32."""
    found = []

    def call(z):
        with region(dtype):
            results = tf.nest.flatten(function(tf.matmul(z, z)))
        found.extend(map(computed_dtype, results))
        assert {result.dtype for result in results} == {tf.float32}
        return results

    call(X) if eager else tf.function(call, autograph=False).get_concrete_function(X)
    return set(found).pop() if len(set(found)) == 1 else found


# By policy: functions of a matrix that was computed in 16 bits.
CASES = {
    "16 bits": {
        "MatMul": lambda z: z @ z,
        "BatchMatMulV2": lambda z: z[None] @ z[None],
        "Einsum": lambda z: tf.einsum("ab,bc->ca", z, X),
        "Conv2D": lambda z: tf.nn.conv2d(IMAGE, FILTER, 1, "SAME"),
        "Conv2DBackpropInput": lambda z: tf.nn.conv2d_transpose(IMAGE, FILTER, [1, 4, 4, 2], 1),
        "AddV2": lambda z: z + z,
        "AddV2 of a number": lambda z: 1.0 + z,
        "AddN": lambda z: tf.add_n([z, z, z]),
        "Mul by a number": lambda z: z * 0.5,
        "BiasAdd": lambda z: tf.nn.bias_add(z, VARIABLE),
        "+ variable": lambda z: z + VARIABLE,
        "+ variable, moved": lambda z: z + tf.reshape(VARIABLE, [1, 4]),
        "Relu": tf.nn.relu,
        "LeakyRelu": tf.nn.leaky_relu,
        "Reshape": lambda z: tf.reshape(z, [-1]),
        "ConcatV2": lambda z: tf.concat([z, z], 0),
        "Pack": lambda z: tf.stack([z, z]),
        "Split": lambda z: tf.split(z, 2),
        "Unpack": tf.unstack,
        "StridedSlice": lambda z: z[1:, ::2],
        "Max": lambda z: tf.reduce_max(z, 0),
        "Maximum": lambda z: tf.maximum(z, 0.0),
        "MaxPool": lambda z: tf.nn.max_pool2d(z[None, ..., None], 2, 2, "VALID"),
        "AvgPool": lambda z: tf.nn.avg_pool2d(z[None, ..., None], 2, 2, "VALID"),
        "GatherV2": lambda z: tf.gather(z, [0, 2]),
        "SelectV2": lambda z: tf.where(X > 0, z, 0.0),
        "ClipByValue": lambda z: tf.raw_ops.ClipByValue(
            t=z, clip_value_min=-1.0, clip_value_max=1.0
        ),
        "Identity": tf.identity,
        "StopGradient": tf.stop_gradient,
        "fused batch norm": lambda z: tf.compat.v1.nn.fused_batch_norm(
            z[None, None], tf.ones([4]), tf.zeros([4])
        )[0],
    },
    "float32": {
        "Softmax": tf.nn.softmax,
        "Pow": lambda z: z**3.0,
        "outer products": lambda z: [
            tf.einsum("a,b->ab", X[0], X[1]),
            tf.tensordot(X[0], X[1], 0),
            tf.matmul(X[:, :1], X[:1]),
        ],
        "RealDiv": lambda z: z / 2.0,
        "Sum": lambda z: tf.reduce_sum(z, 0),
        "loss": lambda z: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(X), z),
        "statistics of fused batch norm": lambda z: tf.compat.v1.nn.fused_batch_norm(
            z[None, None], tf.ones([4]), tf.zeros([4])
        )[1:3],
        "slow on CPUs": lambda z: [tf.tanh(z), tf.sigmoid(z), tf.nn.elu(z), tf.math.erf(z)],
        "+ float32 tensor": lambda z: z + X,
        "concat with float32": lambda z: tf.concat([z, X], 0),
        "where with float32": lambda z: tf.where(X > 0, z, X),
        "of float32 only": lambda z: [X + X, tf.nn.relu(X), tf.reshape(X, [-1]), X * VARIABLE],
    },
}
VARIABLE = tf.Variable([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("expected", CASES)
def test_dtypes(expected, eager, dtype):
    found = {name: computed_in(case, dtype, eager) for name, case in CASES[expected].items()}
    if expected == "16 bits" and dtype == "float16":
        assert [found.pop("AddN"), found.pop("AvgPool")] == ["float32", "float32"]
    expected = dtype if expected == "16 bits" else "float32"
    assert {name: each for name, each in found.items() if each != expected} == {}


# In float16, what might overflow or underflow stays in float32.
RANGE = {
    "z * z": (lambda z: z * z, False),
    "z * 100": (lambda z: z * 100.0, False),
    "z * 2": (lambda z: z * 2.0, True),
    "z * 1e-6": (lambda z: z * 1e-6, False),
    "z * 0": (lambda z: z * 0.0, True),
    "z * variable": (lambda z: z * VARIABLE, False),
    "z - 1e9": (lambda z: z - 1e9, False),
    "where, -inf": (lambda z: tf.where(X > 0, z, -np.inf), False),
    "z + 1": (lambda z: z + 1.0, True),
}


@pytest.mark.parametrize("eager", [True, False])
def test_range_of_float16(eager):
    found = {name: computed_in(case, "float16", eager) for name, (case, _) in RANGE.items()}
    assert found == {name: "float16" if half else "float32" for name, (_, half) in RANGE.items()}
    assert computed_in(lambda z: z * z, "bfloat16", eager) == "bfloat16"


def test_a_bounded_factor_in_float16():
    # Sigmoid is float32 on CPUs unless it is allowed.
    with keras_mp.autocast("float16", allow=["Sigmoid"]):
        z = X @ X
        assert computed_dtype(tf.sigmoid(z) * z) == "float16"
        assert computed_dtype(z * z) == "float32"


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_other_dtypes_are_left_alone(wrap):
    def function():
        with keras_mp.autocast("bfloat16"):
            return [
                tf.cast(X, dtype) @ tf.cast(X, dtype)
                for dtype in ("float64", "int32", "complex64", "float16", "bfloat16")
            ]

    dtypes = [result.dtype.name for result in wrap(function)()]
    assert dtypes == ["float64", "int32", "complex64", "float16", "bfloat16"]


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_16_bit_tensors_of_the_users_meet_float32(wrap):
    def function(half):
        with keras_mp.autocast("bfloat16"):
            return [
                half @ X,
                X @ half,
                half + X,
                X * half,
                tf.concat([half, X], 0),
                tf.maximum(X @ X, half),
                tf.math.squared_difference(half, X),
            ], half > X

    for dtype in HALF:
        results, compared = wrap(function)(tf.cast(X, dtype))
        assert {result.dtype for result in results} == {tf.float32}
        assert compared.dtype == tf.bool
        exact = tf.cast(tf.cast(X, dtype), "float32")
        np.testing.assert_array_equal(results[2], exact + X)
        np.testing.assert_allclose(results[0], exact @ X, atol=0.05)


def test_a_tensor_of_one_region_in_a_region_of_the_other_dtype():
    with keras_mp.autocast("bfloat16"):
        z = X @ X
        with keras_mp.autocast("float16"):
            assert computed_dtype(tf.nn.relu(z)) == "float32"
            assert computed_dtype(z @ z) == "float16"


def test_numbers_lists_and_arrays_as_arguments():
    with keras_mp.autocast("bfloat16"):
        z = tf.matmul([[1.0, 2.0]], np.ones([2, 2], "float32"))
        assert computed_dtype(z) == "bfloat16"
        assert computed_dtype(tf.raw_ops.AddV2(x=z, y=1)) == "bfloat16"
        assert tf.matmul(np.ones([2, 2]), np.ones([2, 2])).dtype == tf.float64


def test_mistakes_are_reported_as_ever():
    def message(dtype):
        with pytest.raises(tf.errors.InvalidArgumentError) as error, region(dtype):
            tf.matmul(normal(2, 3), normal(2, 3))
        return str(error.value)

    assert message("bfloat16") == message(None)
    with pytest.raises(tf.errors.InvalidArgumentError), region("bfloat16"):
        tf.raw_ops.MatMul(a=2.0, b=tf.ones([2, 2]))


def test_an_operation_that_has_no_kernel_runs_in_float32():
    x = normal(1, 2, 2, 2, 1)
    with keras_mp.autocast("float16", allow=["MaxPool3D"]):
        y = tf.nn.max_pool3d(x, 2, 2, "VALID")
    assert y.numpy().item() == tf.reduce_max(x).numpy()

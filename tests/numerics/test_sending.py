"""Whether a GPU waits for what the host sends is read from the graph; no GPU is needed."""

import json

import pytest
import tensorflow as tf

import keras_mp
from tests.common import needs_cuda, once
from tests.numerics.tools import census, dense, sequential

pytestmark = needs_cuda
BOUND = "It is bound by what the host sends"
LAYERS = 6


def small_operations(x):
    for _ in range(200):
        x = tf.tanh(x)
    return x


def large_product(x):
    return small_operations(x[:1]), x @ x


@once
@pytest.mark.parametrize(
    ("function", "shape", "is_bound"),
    [
        (small_operations, [8, 8], True),
        # As many numbers as take a GPU longer than the host takes for each of its operations.
        (small_operations, [8192, 8192], False),
        (large_product, [16384, 16384], False),
        (lambda x: tf.tanh(x) @ x, [8, 8], False),
    ],
)
def test_many_operations_for_little_arithmetic(function, shape, is_bound):
    spec = tf.TensorSpec(shape, "bfloat16")
    found = census(tf.function(function), spec, device="GPU 9.0")
    assert found.sending.is_bound == is_bound
    assert (BOUND in str(found)) == is_bound
    assert ("tf.function(step, jit_compile=True)" in str(found)) == is_bound
    assert json.loads(found.to_json())["sending"]["is_bound"] == is_bound
    # Nothing is said of a machine whose CPU computes.
    if not tf.config.get_visible_devices("GPU"):
        assert census(tf.function(function), spec).sending is None


@once
def test_what_xla_compiles_is_not_sent_one_by_one():
    compiled = tf.function(small_operations, jit_compile=True)
    spec = tf.TensorSpec([8, 8], "float16")
    assert census(compiled, spec, device="GPU 7.0").sending is None
    found = census(tf.function(lambda x: tf.nn.relu(compiled(x))), spec, device="GPU 7.0").sending
    assert (found.operations, found.is_bound) == (1, False)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_what_would_help_a_step_of_fit(policy):
    layers, how = [dense(8)] * LAYERS, {"optimizer": "adam", "jit_compile": False}
    model = sequential(*layers, policy=policy, **how)
    found = keras_mp.numerics.profile(model, (tf.ones([4, 8]), tf.ones([4, 8])), device="GPU 8.0")
    step = ("model.compile(..., jit_compile=True)", "tf.function(step, jit_compile=True)")
    assert found.census.sending.helps == step
    assert (
        found.census.sending.operations > LAYERS * 2 * 10
    )  # Adam alone takes ten for each weight.
    text = " ".join(str(found).split())
    assert BOUND in text

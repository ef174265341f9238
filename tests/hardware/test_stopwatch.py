import math

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import once

pytestmark = once
stopwatch, turns = keras_mp.hardware.stopwatch, keras_mp.hardware.turns


def test_every_dtype_gets_a_speed_for_every_operation(monkeypatch):
    monkeypatch.setattr(stopwatch, "_SECONDS", 0)
    speeds = stopwatch.measure("CPU:0")
    assert list(speeds) == ["matrix product", "convolution"]
    for by_dtype in speeds.values():
        assert list(by_dtype) == ["float32", "bfloat16", "float16"]
        assert all(math.isfinite(speed) and speed > 0 for speed in by_dtype.values())


def test_what_is_computed_is_what_is_counted():
    product, image = next(stopwatch._matrix_products()), next(stopwatch._convolutions())
    a, b = product.arguments
    # Of the output and of two gradients.
    assert product.count == 3 * 2 * a.shape[0] * a.shape[1] * b.shape[1]
    x, kernel = image.arguments
    out, *_ = image.compute(x, kernel)
    assert image.count == 3 * 2 * out.shape.num_elements() * math.prod(kernel.shape[:3])


@pytest.mark.parametrize("is_slow", [True, False])
@pytest.mark.parametrize(
    ("problems", "compute"),
    [
        (stopwatch._matrix_products, tf.linalg.matmul),
        (stopwatch._convolutions, lambda x, k: tf.nn.conv2d(x, k, 1, "SAME")),
    ],
)
def test_what_is_timed_is_the_output_and_both_gradients(problems, compute, is_slow, monkeypatch):
    monkeypatch.setattr("keras_mp.kernels.slow.is_slow", lambda *_: is_slow)
    problem = next(problems())
    arguments = [tf.cast(each, "bfloat16") for each in problem.arguments]
    output, *gradients = problem.compute(*arguments)
    if is_slow:  # Then it is computed in float32: bfloat16's own kernel may lose long sums.
        arguments = [tf.cast(each, "float32") for each in arguments]
        output = tf.cast(output, "float32")
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        y = compute(*arguments)
    for found, right in zip(gradients, tape.gradient(y, arguments, output_gradients=output)):
        np.testing.assert_allclose(
            tf.cast(found, "float32"), tf.cast(right, "float32"), rtol=0.02, atol=4
        )


def test_a_problem_grows_until_it_is_large_enough_or_a_dtype_much_slower(monkeypatch):
    def chosen(seconds):
        """The problem that is chosen, where a turn takes seconds(size, dtype), and the turns."""

        def take_turns(problem, arguments, count):
            assert [arguments[d][0].dtype.name for d in arguments] == list(stopwatch.DTYPES)
            return {d: [seconds(problem.count, d)] * count for d in stopwatch.DTYPES}

        monkeypatch.setattr(stopwatch, "_take_turns", take_turns)
        problems = [stopwatch.Problem(tf.add, (tf.zeros([]),), size) for size in (1, 8, 64)]
        size, turns = stopwatch._race(iter(problems))
        return size, len(turns["float16"])

    assert chosen(lambda size, dtype: 1e-3 * size) == (8, 9)
    assert chosen(lambda size, dtype: 1e-4 * size) == (64, 10)
    assert chosen(lambda size, dtype: 1.0) == (8, 6)
    assert chosen(lambda size, dtype: 1e-4 * (90 if dtype == "float16" else 1)) == (1, 19)


def test_other_load_slows_the_median_turn_and_not_the_fastest():
    taken = {"float32": [1.0, 3.0, 5.0], "bfloat16": [9.0, 9.0, 8.0]}
    assert turns.fastest(taken) == {"float32": 1.0, "bfloat16": 8.0}
    assert turns.medians(taken) == {"float32": 3.0, "bfloat16": 9.0}

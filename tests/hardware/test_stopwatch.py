import math

import pytest
import tensorflow as tf

import keras_mp
from tests import inside
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
    out = image.compute(x, kernel)
    assert image.count == 3 * 2 * out.shape.num_elements() * math.prod(kernel.shape[:3])


@pytest.mark.parametrize("is_slow", [True, False])
@pytest.mark.parametrize("problems", [stopwatch._matrix_products, stopwatch._convolutions])
def test_slow_kernels_are_timed_in_float32(problems, is_slow, monkeypatch):
    inside.set_slow(monkeypatch, is_slow)
    problem = next(problems())
    arguments = [tf.cast(each, "float16") for each in problem.arguments]
    trained = tf.function(lambda: stopwatch._trained(problem, arguments, "float16"))
    operations = trained.get_concrete_function().graph.get_operations()
    products = [op for op in operations if op.type.startswith(("MatMul", "Conv2D"))]
    assert len(products) == 3  # The output and two gradients.
    assert {op.get_attr("T") for op in products} == {tf.float32 if is_slow else tf.float16}


def test_a_problem_grows_until_it_is_large_enough(monkeypatch):
    def chosen(seconds):
        """The size that is chosen, where a turn takes seconds(size, dtype), and its turns."""
        taken = []

        def take_turns(problem, count):
            taken.extend([problem.count] * count)
            return {d: [seconds(problem.count, d)] * count for d in stopwatch.DTYPES}

        monkeypatch.setattr(stopwatch, "_take_turns", take_turns)
        problems = [stopwatch.Problem(tf.add, (tf.zeros([]),), size) for size in (1, 8, 64)]
        speeds = stopwatch._speeds(iter(problems))
        assert speeds == {d: taken[-1] / seconds(taken[-1], d) for d in stopwatch.DTYPES}
        return taken[-1], taken.count(taken[-1]) - 1

    assert chosen(lambda size, dtype: 1e-3 * size) == (8, 9)
    assert chosen(lambda size, dtype: 1e-4 * size) == (64, 10)
    assert chosen(lambda size, dtype: 1.0) == (8, 6)


def test_other_load_slows_the_median_turn_and_not_the_fastest(monkeypatch):
    taken = {"float32": [1.0, 3.0, 5.0], "bfloat16": [9.0, 9.0, 8.0]}
    assert turns.medians(taken) == {"float32": 3.0, "bfloat16": 9.0}
    monkeypatch.setattr(turns, "take", lambda steps, count: {d: [2.0, 1.0] for d in steps})
    x = tf.zeros([1, 1])
    assert set(stopwatch._speeds(iter([stopwatch.Problem(tf.add, (x, x), 8)])).values()) == {8.0}

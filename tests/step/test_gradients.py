import numpy as np
import pytest
import tensorflow as tf

from keras_mp.step import finiteness, gradients
from tests.common import once, placed

pytestmark = once

INF, NAN = float("inf"), float("nan")


def slices(values, indices, dtype=tf.float32):
    values = tf.constant(values, dtype)
    return tf.IndexedSlices(values, tf.constant(indices), tf.constant([9, values.shape[1]]))


def test_scales_that_float16_cannot_hold_do_not_zero_float16_gradients():
    (unscaled,) = gradients.unscale([tf.constant([65504.0], tf.float16)], tf.constant(2.0**17))
    assert float(unscaled[0]) == np.float16(65504 / 2**17)
    (scaled,) = gradients.scale([tf.constant([2.0**-14], tf.float16)], tf.constant(2.0**17))
    assert float(scaled[0]) == 8


def test_all_finite_of_the_rest():
    for good in (
        *([], [None], [tf.constant([1, 2])], [tf.zeros([0, 3])], [tf.constant([1 + 2j])]),
        # Rows of other indices are not added up.
        [slices([[4e4], [4e4], [4e4]], [3, 1, 2], "float16")],
        [slices(np.zeros([0, 1]), np.zeros([0], int), "float16")],
    ):
        assert bool(finiteness.all_finite(good))
    assert not bool(finiteness.all_finite([tf.constant([complex(1, INF)])]))


@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
def test_all_finite_looks_at_sums(mode):
    def judge(*grads):
        return finiteness.all_finite(grads)

    judge = placed(mode, judge)
    # More than float16 holds, as is each sum of two of them.
    assert bool(judge(tf.fill([1000], tf.constant(65504.0, tf.float16)), tf.ones([2])))
    # What cancels is not finite: neither in one gradient, nor in two.
    assert not bool(judge(tf.constant([INF, -INF])))
    assert not bool(judge(tf.constant([INF, 1.0]), tf.constant([[-INF]])))
    assert not bool(judge(tf.constant([INF, 1.0]), tf.constant([-INF, 1.0])))
    # Of unscaled gradients, nobody needs them. XLA adds up those of one shape only.
    assert not bool(judge(*[tf.fill([10], 1e38)] * 5))
    assert bool(judge(tf.fill([10], 1e38))) == (mode == "jit")
    assert bool(judge(tf.fill([10], 1e37), tf.constant(1e300, tf.float64), tf.constant(1.0)))
    assert not bool(judge(tf.ones([2]), tf.constant([NAN], tf.float64)))


@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_all_finite_finds_one_bad_value_among_many_gradients(dtype, mode):
    def judge(grads):
        return finiteness.all_finite(grads)

    judge = placed(mode, judge)
    shapes = [[2], [2], [], [2], [100, 100], [100, 100], [3, 0], [2, 1], []]
    good = [tf.ones(shape, dtype) for shape in shapes]
    assert bool(judge(good))
    for bad in (INF, -INF, NAN):
        assert not bool(judge([*good, None, slices([[bad]], [0], dtype)]))
    for i, gradient in enumerate(good):
        for bad in (INF, NAN) if tf.size(gradient) else ():
            value = tf.concat([tf.reshape(gradient, [-1])[1:], [tf.cast(bad, dtype)]], 0)
            spoilt = tf.reshape(value, gradient.shape)
            assert not bool(judge([*good[:i], spoilt, *good[i + 1 :]])), i


@pytest.mark.parametrize("shape", [None, [None]])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_all_finite_where_the_shape_is_not_known(shape, jit_compile):
    @tf.function(input_signature=[tf.TensorSpec(shape)] * 2, jit_compile=jit_compile)
    def judge(one, other):
        return finiteness.all_finite([one, tf.ones([2, 2]), other])

    assert bool(judge(tf.ones([2]), tf.ones([3])))
    assert not bool(judge(tf.ones([2]), tf.constant([INF, 1.0, 1.0])))


@pytest.mark.parametrize("loss_scale", [3.0, 1000.0])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_unscale_is_as_precise_as_the_gradient(loss_scale, dtype):
    gradient = np.array([1.1, 2.3, -777.7], dtype)
    (unscaled,) = gradients.unscale([tf.constant(gradient)], tf.constant(loss_scale))
    precision = np.finfo(dtype).eps
    np.testing.assert_allclose(unscaled, gradient / loss_scale, rtol=2 * precision)


@pytest.mark.parametrize("loss_scale", [2.0**126, 2.0**-126, 3.0])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_unscale_at_the_ends_of_the_range(loss_scale, dtype):
    gradient = tf.constant([loss_scale, -1.5 * loss_scale, 0.0], dtype)
    (unscaled,) = gradients.unscale([gradient], tf.constant(loss_scale))
    np.testing.assert_allclose(tf.cast(unscaled, tf.float64), [1, -1.5, 0], rtol=2.0**-22)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    ("dtype", "large"), [("float16", 40000.0), ("float32", 2e38), ("float64", 1e308)]
)
def test_all_finite_adds_equal_indices_up_as_an_optimizer_does(dtype, large, jit_compile):
    judge = tf.function(lambda g: finiteness.all_finite([g]), jit_compile=jit_compile)
    twice = slices([[large, 0.0], [0.0, 1.0], [large, 0.0]], [3, 1, 3], dtype)
    assert np.isinf(tf.convert_to_tensor(twice).numpy()).any()
    assert not bool(judge(twice))
    # They meet on the way to a finite sum, in an order that nobody knows.
    assert not bool(judge(slices([[large], [large], [-large]], [3, 3, 3], dtype)))
    assert bool(judge(slices([[large, 1.0], [0.0, 1.0]], [3, 3], dtype)))
    assert not bool(judge(slices([[large, 1.0], [np.nan, 1.0]], [3, 3], dtype)))
    assert bool(judge(slices([[large * 0.4], [large * 0.4]], [3, 3], dtype)))


def test_all_finite_does_not_densify():
    # A dense gradient of this shape would take 4 TB.
    huge = tf.IndexedSlices(
        tf.ones([1, 1024]), tf.constant([7], tf.int64), tf.constant([2**30, 1024], tf.int64)
    )
    assert bool(finiteness.all_finite([huge]))
    (unscaled,) = gradients.unscale([huge], tf.constant(2.0))
    assert float(unscaled.values[0, 0]) == 0.5


def test_what_xla_compiles_grows_with_the_number_of_gradients_and_not_its_square():
    def size(count):
        variables = [tf.Variable(tf.ones([8, 8])) for _ in range(count)]

        @tf.function(jit_compile=True)
        def step(x):
            gradients = [v * x for v in variables]
            finite = finiteness.all_finite(gradients)
            for v, gradient in zip(variables, gradients):
                v.assign(tf.where(finite, v - gradient, v))

        return len(step.experimental_get_compiler_ir(tf.constant(1.0))(stage="optimized_hlo"))

    assert size(32) < 6 * size(8)

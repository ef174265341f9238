import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_mp.master_weights import methods
from tests.common import once, placed

pytestmark = once

BFLOAT16_LARGEST = float(tf.bfloat16.max)
SUBNORMAL = 2.0**-130


def every_upper_half(lower):
    """Finite float32 values with each sign, exponent and leading digits, and these 16 bits."""
    upper = np.arange(1 << 16, dtype=np.uint32)
    bits = (upper << 16) | np.uint32(lower)
    return bits.view(np.float32)


@pytest.mark.parametrize("mode", ["eager", "jit"])
@pytest.mark.parametrize("lower", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234])
def test_a_bfloat16_weight_and_its_remainder_are_the_float32_weight(lower, mode):
    values = every_upper_half(lower)

    def there_and_back(value):
        nearest, *rest = methods.split_bfloat16(value)
        return nearest, methods.join_bfloat16(nearest, *rest)

    nearest, joined = placed(mode, there_and_back)(tf.constant(values))
    # Of the infinities the only one is that with zeros below; what is above is NaN.
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(np.isnan(joined.numpy()), is_nan)
    np.testing.assert_array_equal(np.isnan(nearest.numpy().astype("float32")), is_nan)
    np.testing.assert_array_equal(
        joined.numpy()[~is_nan].view(np.int32), values[~is_nan].view(np.int32)
    )
    # TensorFlow's own cast rounds to nearest, ties to even.
    np.testing.assert_array_equal(
        nearest.numpy()[~is_nan].view(np.int16),
        tf.cast(values[~is_nan], tf.bfloat16).numpy().view(np.int16),
    )


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_any_remainder_leaves_a_weight_that_rounds_to_the_same(mode):
    # As when the weight was set since, by loading a file for one, or pruned.
    nearest = tf.constant([1.0, -1.5, 3e38, 1e-30, 0.0, -0.0, 2.0**-126], tf.bfloat16)
    join = placed(mode, methods.join_bfloat16)
    for remainder, carry in itertools.product((-32768, -32767, -1, 0, 1, 32767), (False, True)):
        remainders = tf.fill(nearest.shape, tf.constant(remainder, tf.int16))
        carries = methods.pack_bits(tf.fill(nearest.shape, carry))
        joined = join(nearest, remainders, carries).numpy()
        rounded = joined.astype(tf.bfloat16.as_numpy_dtype)
        np.testing.assert_array_equal(rounded.view(np.int16), nearest.numpy().view(np.int16))


def in_binades(first, last, count, seed=0):
    generator = np.random.default_rng(seed)
    values = np.ldexp(1 + generator.random(count), generator.integers(first, last, count))
    return (values * generator.choice([-1, 1], count)).astype("float32")


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_a_float16_weight_and_its_remainder_are_the_float32_weight(mode):
    values = np.concatenate([in_binades(-16, 16, 1 << 20), np.float32([0, 65519.99, 2**-16, -1])])
    values = values[np.abs(values) < 65520]

    def there_and_back(value):
        nearest, remainder = methods.split_float16(value)
        return nearest, methods.join_float16(nearest, remainder)

    nearest, joined = placed(mode, there_and_back)(tf.constant(values))
    np.testing.assert_array_equal(joined.numpy(), values)
    np.testing.assert_array_equal(nearest.numpy(), values.astype(np.float16))


def test_of_smaller_float16_weights_digits_below_two_to_the_minus_39_are_lost():
    values = in_binades(-45, -16, 1 << 18)
    joined = methods.join_float16(*methods.split_float16(values)).numpy()
    lost = np.abs(joined.astype("float64") - values)
    assert 0 < lost.max() <= 2.0**-40


def test_float16_weights_keep_zeros_infinities_and_nans():
    values = tf.constant([0.0, -0.0, np.inf, -np.inf, np.nan, 1e9])
    joined = methods.join_float16(*methods.split_float16(values)).numpy()
    np.testing.assert_array_equal(joined, [0, 0, np.inf, -np.inf, np.nan, np.inf])
    np.testing.assert_array_equal(np.signbit(joined[:2]), [False, True])


COUNT = 10_000_000


@pytest.mark.parametrize(
    ("dtype", "value", "mode"),
    [
        (tf.bfloat16, 1 + 2.0**-9, "eager"),
        (tf.bfloat16, 1 + 2.0**-8, "jit"),  # a tie
        (tf.bfloat16, 1 + 2.0**-12, "jit"),
        (tf.bfloat16, -3.3, "eager"),
        (tf.bfloat16, 1e-30, "eager"),
        (tf.bfloat16, SUBNORMAL * (1 + 2.0**-5), "eager"),
        (tf.bfloat16, BFLOAT16_LARGEST * (1 - 2.0**-10), "eager"),
        (tf.float16, 1 + 2.0**-12, "eager"),
        (tf.float16, 1 + 2.0**-11, "jit"),  # a tie
        (tf.float16, -3.3, "jit"),
        (tf.float16, 3e-9, "eager"),  # between 0 and the smallest
        (tf.float16, 2.0**-15 + 2.0**-27, "eager"),
        (tf.float16, 65500.0, "eager"),
    ],
)
def test_stochastic_rounding_is_unbiased(dtype, value, mode):
    value = np.float32(value)
    function = placed(mode, lambda values: stochastic(values, dtype))
    rounded = function(tf.fill([COUNT // 1000, 10, 100], value)).numpy().astype("float64")
    low, high = rounded.min(), rounded.max()
    assert low < float(value) < high
    assert ((rounded == low) | (rounded == high)).all()
    share = (float(value) - low) / (high - low)
    deviation = (high - low) * np.sqrt(share * (1 - share))
    assert abs(rounded.mean() - float(value)) < 4 * deviation / np.sqrt(COUNT)
    # Neither a row nor a column has a mean of its own.
    for axes in ((0, 1), (2,)):
        means = (rounded.mean(axes) - float(value)) / deviation
        count = COUNT / means.size
        assert abs((means**2).mean() * count - 1) < 0.6
        assert np.abs(means).max() < 6 / np.sqrt(count)


@pytest.mark.parametrize("shape", [[], [1], [5], [4, 1], [1, 4], [0, 3], [2, 3, 4]], ids=str)
def test_noise_has_a_shape_and_a_seed(shape):
    shape = tf.TensorShape(shape)
    first, again, other = (
        methods.noise(shape, tf.constant(seed, tf.int64)) for seed in ([1, 2], [1, 2], [1, 3])
    )
    assert first.shape == shape
    assert first.dtype == tf.uint32
    np.testing.assert_array_equal(first, again)
    assert shape.num_elements() == 0 or (first.numpy() != other.numpy()).any()


def test_the_upper_bits_of_noise_have_no_pattern():
    def bits(*seed):
        noise = methods.noise(tf.TensorShape([2000, 500]), tf.constant(seed, tf.int64))
        upper = np.right_shift(noise.numpy(), 16).astype(">u2")
        return np.unpackbits(upper[..., np.newaxis].view(np.uint8), axis=2) - 0.5

    one = bits(1 << 32, 1)
    limit = 5 / np.sqrt(2000 * 500)
    assert 2 * np.abs(one.mean((0, 1))).max() < limit
    # What two of them have in common, of one place and its neighbours, and of other draws.
    others = [np.roll(one, *roll) for roll in ((1, 0), (1, 1), (7, 0), (1, 2))]
    others += [bits(2 << 32, 1), bits(1 << 32, 2)]
    for other in others:
        assert 4 * np.abs((one * other).mean((0, 1))).max() < limit


def stochastic(values, dtype):
    round_at_random = getattr(methods, f"stochastic_{dtype.name}")
    return round_at_random(values, methods.noise(values.shape, tf.constant([3, 4], tf.int64)))


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_what_needs_no_rounding_stays(dtype, mode):
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype.as_numpy_dtype)
    function = placed(mode, lambda values: stochastic(values, dtype))
    rounded = function(tf.constant(values.astype("float32")))
    is_nan = np.isnan(values.astype("float32"))
    np.testing.assert_array_equal(np.isnan(rounded.numpy().astype("float32")), is_nan)
    rounded = rounded.numpy().view(np.int16)
    np.testing.assert_array_equal(rounded[~is_nan], values.view(np.int16)[~is_nan])


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16], ids=lambda dtype: dtype.name)
def test_nothing_finite_becomes_infinite(dtype):
    largest = np.float32(dtype.max)
    above = [np.nextafter(largest, np.float32(np.inf)), np.float32(np.finfo("float32").max)]
    values = tf.repeat(tf.constant([*above, -above[0], -above[1]]), 1000)
    rounded = stochastic(values, dtype).numpy().astype("float32")
    np.testing.assert_array_equal(np.abs(rounded), largest)

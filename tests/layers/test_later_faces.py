"""Faces that are made when they are taken are on the tapes that know their tensors."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import MODES, Mixes, differentiated, once, placed

K = tf.keras


def of_a_constant(h):
    y = h * 3.0
    return differentiated(lambda: tf.reduce_sum(y * h), h)[1]


def of_what_is_not_recorded(h):
    with tf.GradientTape() as tape:
        tape.watch(h)
        with tape.stop_recording():
            y = h * 3.0
        z = tf.reduce_sum(y) + tf.reduce_sum(h)
    return tape.gradient(z, h)


def of_a_constant_of_an_inner_tape(h):
    with tf.GradientTape() as outer:
        outer.watch(h)
        y = h * 3.0
        with tf.GradientTape() as inner:
            inner.watch(h)
            z = tf.reduce_sum(y * h)
        gradient = inner.gradient(z, h)
    return tf.stack([gradient, outer.gradient(z, h)])


def of_a_constant_in_forward_mode(h):
    y = h * 3.0
    with tf.autodiff.ForwardAccumulator(h, tf.ones_like(h)) as accumulator:
        z = tf.reduce_sum(y * h)
    return accumulator.jvp(z)


def taken_twice(h):
    with tf.GradientTape() as tape:
        tape.watch(h)
        y = h * 3.0
        with tape.stop_recording():
            shift = tf.reduce_sum(y)
        z = tf.reduce_sum(y) + shift
    return tape.gradient(z, h)


def of_an_array_that_changes(h):
    array = np.ones(4, "float32")
    y = h * array
    array[:] = 9.0
    return y / 3.0


def of_a_dead_relu(h):
    def logarithm_and_root():
        z = tf.math.log(tf.nn.relu(h - 2.0) + 1e-12)
        return z + tf.sqrt(tf.nn.relu6(h - 2.0) + 1e-12)

    return differentiated(logarithm_and_root, h)[1]


def of_zeros_of_a_relu(h):
    """With respect to activations, as for a map of what a class looks at."""
    with tf.GradientTape() as tape:
        tape.watch(h)
        y = tf.nn.relu(h - 2.0)
        z = tf.reduce_mean(y) + tf.reduce_sum(tf.square(y + 1.0)) + tf.reduce_sum(2.0 * y)
    return tape.gradient(z, y)


def overlap_of_boxes(h):
    """Their areas, in pixels, are beyond float16."""
    corners = tf.reshape(h, [2, 2])
    boxes = tf.concat([tf.sigmoid(corners), 1.0 + tf.sigmoid(corners)], -1) * 1000.0
    x1, y1, x2, y2 = tf.split(boxes, 4, -1)
    area = (x2 - x1) * (y2 - y1)
    width = tf.minimum(x2, tf.transpose(x2)) - tf.maximum(x1, tf.transpose(x1))
    height = tf.minimum(y2, tf.transpose(y2)) - tf.maximum(y1, tf.transpose(y1))
    return width * height / (area + tf.transpose(area) - width * height)


def large_numbers(h):
    return (300.0 * h) * (100.0 * tf.reverse(h, [1]))


def of_large_products(h):
    large = large_numbers(h)
    chosen = tf.where(large > 0.0, large, tf.zeros_like(large))
    return tf.maximum(chosen, 1.0) / 1e4 + tf.reduce_max(large) / 1e4


def of_large_numbers_elsewhere(h):
    large = large_numbers(h)
    row, by_rows = large[0], tf.transpose(large)
    found = [
        *(tf.sort(large), tf.math.top_k(large, 2).values, tf.round(large), tf.floor(large)),
        tf.math.unsorted_segment_max(by_rows, [0, 1, 0, 1], 2),
        tf.math.unsorted_segment_min(by_rows, [0, 1, 0, 1], 2),
        *tf.dynamic_partition(row, [0, 1, 0, 1], 2),
        tf.dynamic_stitch([tf.constant([0, 2]), tf.constant([1, 3])], [row[:2], row[2:]]),
        tf.tensor_scatter_nd_update(row, [[1]], [h[0, 0]]),
        tf.einsum("bi,bi->bi", 300.0 * h, 100.0 * tf.reverse(h, [1])),
    ]
    return tf.concat([tf.reshape(each, [-1]) / 1e4 for each in found], 0)


def of_large_numbers_in_sparse_tensors(h):
    large = large_numbers(h)
    sparse = tf.sparse.from_dense(large)
    moved = [
        *(tf.sparse.transpose(sparse), tf.sparse.concat(0, [sparse, sparse])),
        tf.sparse.slice(sparse, [0, 0], [1, 2]),
        sparse * tf.reverse(h, [1]),
    ]
    found = [
        *map(tf.sparse.to_dense, moved),
        *(tf.sparse.reduce_sum(sparse, 1), tf.sparse.reduce_max(sparse, 1)),
        *(tf.sparse.add(sparse, large), (sparse / h).values),
        tf.sparse.segment_sum(large, [0, 0], [0, 0]),
        tf.sparse.segment_mean(large, [0, 0], [0, 0]),
        tf.sparse.segment_sqrt_n(large, [0, 0], [0, 0]),
    ]
    return tf.concat([tf.reshape(each, [-1]) / 1e4 for each in found], 0)


def of_large_numbers_in_rare_operations(h):
    large, ones = large_numbers(h), [1, 1, 1, 1]
    image = tf.reshape(large, [1, 2, 2, 1])
    found = [
        *(tf.linalg.cross(300.0 * h[:, :3], 100.0 * h[:, 1:]), tf.math.accumulate_n([large] * 2)),
        tf.math.multiply_no_nan(300.0 * h, 200.0 * h),
        *(tf.tensor_scatter_nd_max(large[0], [[0]], [large[0, 1]]), tf.math.bessel_i0(4.0 * h)),
        tf.image.extract_patches(image, [1, 2, 2, 1], ones, ones, "SAME"),
        tf.nn.dilation2d(image, tf.zeros([2, 2, 1], h.dtype), ones, "SAME", "NHWC", ones),
        tf.random.experimental.stateless_shuffle(large[0], [1, 2]),
    ]
    return tf.concat([tf.reshape(each, [-1]) / 1e4 for each in found], 0)


def of_an_image_that_is_turned(h):
    with tf.GradientTape() as tape:
        tape.watch(h)
        turned = tf.raw_ops.ImageProjectiveTransformV3(
            images=tf.reshape(h, [1, 2, 2, 1]),
            transforms=[[1.0, 0.25, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]],
            output_shape=[2, 2],
            fill_value=0.0,
            interpolation="BILINEAR",
        )
        z = tf.reduce_sum(turned)
    return tape.gradient(z, h)


def of_branches(h):
    is_small = tf.reduce_sum(h) < 1.0
    tf.cond(is_small, tf.no_op, tf.no_op)
    large = functools.partial(large_numbers, h)
    found = [
        tf.cond(is_small, lambda: h, large),
        tf.switch_case(tf.cast(is_small, tf.int32), {0: large, 1: lambda: h}, lambda: -h),
        tf.case([(is_small, lambda: h)], large),
    ]
    return tf.concat(found, 0) / 1e4


def of_an_array(h):
    numbers = np.array([0.1, 0.2, 0.3, 0.7], "float32")
    return h + tf.sin(2000.0 * tf.constant(numbers, h.dtype))


def angles(h, positions=None):
    """Positions times frequencies, as for rotary embeddings."""
    if positions is None:
        positions = tf.cast(tf.range(3000, 3004), h.dtype)
    frequencies = tf.constant([1.0, 0.125], h.dtype)
    found = [
        tf.einsum("i,j->ij", positions, frequencies),
        tf.matmul(positions[:, tf.newaxis], frequencies[tf.newaxis]),
        tf.tensordot(positions, frequencies, 0),
        tf.matmul(tf.reshape(h, [4, 1]), positions[tf.newaxis, 2:]),
    ]
    return tf.stack([tf.sin(each) for each in found])


def angles_of_an_array(h):
    return angles(h, tf.constant(np.arange(3000, 3004), h.dtype))


def angles_of_a_list(h):
    return angles(h, tf.constant([3000, 3001, 3002, 3003], h.dtype))


class Rolls(K.layers.Layer):
    """A layer with a position that moves on."""

    def build(self, shape):
        self.position = tf.Variable(0, trainable=False)

    def call(self, x):
        self.position.assign(0)
        y = tf.roll(2.0 * tf.matmul(x, tf.eye(4, dtype=x.dtype)), self.position, 1)
        self.position.assign_add(1)
        return y / 3.0


class ProductOfWeights(K.layers.Layer):
    """A hundred times how far a product of weights is off, and 1."""

    def build(self, shape):
        values = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
        self.kernel = self.add_weight(
            name="kernel", shape=(64, 64), initializer=lambda shape, dtype=None: values
        )

    def call(self, x):
        product = tf.matmul(self.kernel[:1], self.kernel)
        of_products = tf.reduce_sum(self.kernel[0][:, tf.newaxis] * self.kernel, 0)
        return 1.0 + 100.0 * tf.reduce_max(tf.abs(product - of_products))


PROGRAMS = [
    *(of_a_constant, of_what_is_not_recorded, of_a_constant_of_an_inner_tape),
    *(of_a_constant_in_forward_mode, taken_twice, of_an_array_that_changes, Rolls),
    *(of_zeros_of_a_relu, overlap_of_boxes, of_large_products, ProductOfWeights),
    *(of_large_numbers_elsewhere, of_branches, of_an_array),
    *(angles, angles_of_an_array, angles_of_a_list),
]


CASES = [(program, mode) for program in PROGRAMS for mode in MODES]
# In eager, a face of a relu would keep one more tensor.
CASES += [(of_a_dead_relu, mode) for mode in MODES if mode != "eager"]
NOT_IN_XLA = [
    *(of_large_numbers_in_sparse_tensors, of_large_numbers_in_rare_operations),
    of_an_image_that_is_turned,
]
CASES += [(program, mode) for program in NOT_IN_XLA for mode in MODES if mode != "jit"]


@once
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(("program", "mode"), CASES)
def test_it_is_as_in_float32(program, policy, mode):
    def made(dtype):
        if isinstance(program, type):
            return program(dtype=dtype)
        # A product has no face.
        return Mixes(lambda x: program(tf.matmul(x, tf.eye(4, dtype=x.dtype))), dtype=dtype)

    x = tf.constant([[1.0, 2.0, 3.0, 4.0]])
    ours, control = made(keras_mp.Policy(policy)), made("float32")
    ours(x), control(x)
    found = tf.cast(MODES[mode](ours)(x), tf.float32)
    np.testing.assert_allclose(found, MODES[mode](control)(x), rtol=2.0**-7)


# Float32 layers behind 16-bit layers: what nobody has rounded, they read unrounded.


layers = tf.keras.layers
# Neither dtype holds the differences of these numbers.
INPUTS = tf.constant([[30001.0, 29992.0, 30004.0]])


class InCall(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.normalization = layers.LayerNormalization(dtype="float32")

    def call(self, inputs):
        return self.normalization(inputs)


def behind_a_layer():
    last = layers.LayerNormalization(dtype=keras_mp.Policy("float32"))
    return tf.keras.Sequential([tf.keras.Input([3]), layers.Flatten(), last])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("make", [InCall, behind_a_layer])
def test_they_read_what_nobody_has_rounded(make, policy, mode):
    found = []
    for name in ("float32", policy):
        with keras_mp.policy_scope(name):
            model = make()
        model(INPUTS)
        compute = lambda: differentiated(lambda: model(INPUTS)[:, 0], INPUTS)  # noqa: E731
        found.append([*placed(mode, compute)(), model.predict(INPUTS, verbose=0)])
    for right, own in zip(*found, strict=True):
        np.testing.assert_allclose(np.asarray(own), np.asarray(right), rtol=1e-3, atol=1e-4)

"""Functions that lose in 16 bits what none of their kernels would lose alone."""

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import inside
from tests.common import IS_KERAS_3, Mixes, differentiated, once
from tests.op_autocast.operations import alike

ROWS = tf.constant([[300.0, 400.0], [1e-4, 2e-4], [3.0, 4.0]])
IMAGES = tf.constant(np.random.default_rng(0).integers(0, 256, [1, 12, 12, 3]), tf.float32)
OTHERS = tf.clip_by_value(IMAGES + 3.0, 0.0, 255.0)
MANY = tf.fill([70_000, 1], 0.02)
ZEROS = tf.zeros([70_000], tf.int32)
UNIT = IMAGES / 255.0
# Their product is 1: each rounding of it moves the result.
FACTORS = tf.reshape(tf.stack([tf.fill([150], 1.25), tf.fill([150], 0.8)], 1), [-1])
NUMBERS = tf.constant(np.random.default_rng(1).uniform(0, 1, 5000), tf.float32)
LENGTHS = tf.constant([69_000, 1_000])
IN_HALVES = tf.concat([tf.fill([69_000], 0.02), tf.fill([1_000], 200.0)], 0)
ODDS = tf.constant([[-12.3, 2.2, 5.2], [9.0, 1e-5, -4e-3], [60.0, 2.9, -0.9]])
LABELS = tf.constant([[0.0, 1.0, 0.2], [1.0, 0.0, 0.5], [0.9, 0.1, 1.0]])
# Symmetric, far from singular; its powers are beyond float16.
MATRIX = tf.constant([[310.0, 20.5, 7.0], [20.5, 505.0, 60.2], [7.0, 60.2, 402.0]])
VECTORS = tf.constant([[300.0, 2.0], [4.5, 3.1], [1.0, 700.0]])
FRAMES = tf.constant(np.random.default_rng(3).normal(0, 300, [8, 256]), tf.float32)
BOXES = tf.constant(
    [[0.0, 0.0, 300.0, 300.0], [0.0, 30.0, 300.0, 331.0], [0.0, 900.0, 300.0, 999.0]]
)
LARGE = tf.constant(np.random.default_rng(2).integers(0, 256, [1, 180, 180, 1]), tf.float32)


def _seeded(draw: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Draws what a program of its own would draw first."""
    tf.random.set_seed(1)
    return draw()


def slope(function: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    return differentiated(lambda: function(x), x)[1]


PROGRAMS: dict[str, Callable[[Callable[[tf.Tensor], tf.Tensor]], Any]] = {
    **alike("math.softplus math.log_sigmoid nn.elu nn.selu", lambda own, c: own(c(ODDS))),
    "gradients of softsign": lambda c: slope(lambda x: 16384.0 * tf.nn.softsign(x), c(VECTORS)),
    **alike("math.zero_fraction math.reduce_logsumexp", lambda own, c: own(c(MANY))),
    **alike("math.cumprod math.reduce_prod", lambda own, c: own(c(FACTORS))),
    **alike("math.add_n math.accumulate_n", lambda own, c: own([c(MANY[:1])] * 300)),
    **alike(
        "math.unsorted_segment_mean math.unsorted_segment_sqrt_n",
        lambda own, c: own(c(MANY), ZEROS, 1),
    ),
    **alike(
        "linalg.cholesky linalg.eigvalsh linalg.inv linalg.logdet linalg.matrix_rank "
        "linalg.pinv linalg.slogdet linalg.tensor_diag_part",
        lambda own, c: own(c(MATRIX)),
    ),
    **alike("linalg.eigh linalg.lu linalg.svd", lambda own, c: own(c(MATRIX))[0]),
    **alike(
        "linalg.cholesky_solve linalg.lstsq linalg.solve linalg.triangular_solve",
        lambda own, c: own(c(MATRIX), c(VECTORS)),
    ),
    **alike("signal.dct signal.idct", lambda own, c: own(c(FRAMES))),
    **alike(
        "norm linalg.normalize math.l2_normalize math.reduce_variance math.reduce_euclidean_norm",
        lambda own, c: own(c(ROWS), axis=-1),
    ),
    **alike(
        "image.total_variation image.rgb_to_grayscale image.rgb_to_yuv "
        "image.sobel_edges image.image_gradients image.yuv_to_rgb image.rgb_to_yiq "
        "image.yiq_to_rgb image.per_image_standardization",
        lambda own, c: own(c(IMAGES)),
    ),
    **alike("image.rgb_to_hsv image.hsv_to_rgb", lambda own, c: own(c(UNIT))),
    **alike("image.adjust_contrast image.adjust_saturation", lambda own, c: own(c(UNIT), 1.5)),
    **alike("image.ssim image.psnr", lambda own, c: own(c(IMAGES), c(OTHERS), 255.0)),
    **alike(
        "signal.hann_window signal.hamming_window signal.vorbis_window",
        lambda own, c: own(4000, dtype=c(IMAGES).dtype),
    ),
    **alike(
        "signal.kaiser_window signal.kaiser_bessel_derived_window",
        lambda own, c: own(400, dtype=c(IMAGES).dtype),
    ),
    "where": lambda c: tf.where(c(ROWS - ROWS[0, 0])),
    # Large numbers have small inverses.
    "linalg.pinv": lambda c: tf.linalg.pinv(c(tf.abs(FRAMES[:, :12]))),
    "math.bincount": lambda c: tf.math.bincount(ZEROS, c(MANY[:, 0])),
    "math.bincount, dtype": lambda c: tf.math.bincount(ZEROS[:3000], dtype=c(MANY).dtype),
    "sparse.bincount": lambda c: tf.sparse.to_dense(
        tf.sparse.bincount(ZEROS[:, None], c(MANY), axis=0)
    ),
    "math.confusion_matrix": lambda c: tf.math.confusion_matrix(
        ZEROS[:3000], ZEROS[:3000], dtype=c(MANY).dtype
    ),
    "nn.compute_average_loss": lambda c: tf.nn.compute_average_loss(
        c(MANY[:, 0]), global_batch_size=70_000
    ),
    "histogram_fixed_width": lambda c: tf.histogram_fixed_width(c(NUMBERS), [0.0, 1.0], 100),
    "histogram_fixed_width_bins": lambda c: tf.histogram_fixed_width_bins(
        c(NUMBERS), c(tf.constant([0.0, 1.0])), 100
    ),
    "math.reduce_mean": lambda c: tf.reduce_mean(
        tf.RaggedTensor.from_row_lengths(c(IN_HALVES), LENGTHS), axis=1
    ),
    "math.cumulative_logsumexp": lambda c: tf.math.cumulative_logsumexp(c(MANY[:3000])),
    "math.segment_prod": lambda c: tf.math.segment_prod(c(FACTORS), ZEROS[:300]),
    "math.unsorted_segment_prod": lambda c: tf.math.unsorted_segment_prod(
        c(FACTORS), ZEROS[:300], 1
    ),
    "math.lbeta": lambda c: tf.math.lbeta(c(ROWS + 0.5)),
    "nn.log_poisson_loss": lambda c: tf.nn.log_poisson_loss(
        c(LABELS * 40), c(ODDS / 20), compute_full_loss=True
    ),
    "nn.isotonic_regression": lambda c: tf.nn.isotonic_regression(c(MANY[:3000, 0] + 300.0))[0],
    "linalg.det": lambda c: tf.linalg.det(c(MATRIX / 300)),
    "linalg.expm": lambda c: tf.linalg.expm(c(MATRIX / 100)),
    "constant": lambda c: tf.math.log(-tf.math.log(tf.constant([0.99995, 0.3], c(ROWS).dtype))),
    "linalg.diag_part": lambda c: tf.math.log(
        tf.linalg.diag_part(tf.eye(3, dtype=c(ROWS).dtype) * 2001.25) / 2000.0
    ),
    "einsum": lambda c: tf.einsum("ij->i", c(tf.fill([2, 3000], 30.0))) / 1000.0,
    "linalg.qr": lambda c: tf.linalg.qr(c(MATRIX))[1],
    "linalg.trace": lambda c: tf.linalg.trace(c(tf.linalg.diag(ROWS[:, 1] * 100 - 19990))),
    "linalg.tensor_diag": lambda c: tf.linalg.tensor_diag(c(ROWS[:, 1])),
    "AvgPool3D": lambda c: tf.nn.avg_pool3d(c(tf.fill([1, 4, 4, 4, 1], 30000.0)), 4, 4, "VALID"),
    "image.non_max_suppression": lambda c: tf.image.non_max_suppression(
        c(BOXES), c(tf.constant([0.9, 0.8, 0.7])), 3
    ),
    "image.non_max_suppression_with_scores": lambda c: tf.image.non_max_suppression_with_scores(
        c(BOXES), c(tf.constant([0.9, 0.8, 0.7])), 3, soft_nms_sigma=0.3
    ),
    "signal.stft": lambda c: tf.abs(tf.signal.stft(c(FRAMES[:2]), 64, 16)),
    "signal.mdct": lambda c: tf.signal.mdct(c(FRAMES), 64),
    "signal.inverse_mdct": lambda c: tf.signal.inverse_mdct(c(FRAMES[None])),
    "signal.mfccs_from_log_mel_spectrograms": lambda c: tf.signal.mfccs_from_log_mel_spectrograms(
        c(FRAMES / 600.0)
    ),
    "nn.batch_normalization": lambda c: tf.nn.batch_normalization(
        c(ROWS + 3000.0), c(ROWS[0] + 3000.0), c(ROWS[2]), None, None, 1e-3
    ),
    "nn.sufficient_statistics": lambda c: tf.nn.sufficient_statistics(c(ROWS / 2), [0])[1:3],
    "nn.local_response_normalization": lambda c: tf.nn.local_response_normalization(
        c(ROWS)[None, None]
    ),
    "math.reduce_std": lambda c: tf.math.reduce_std(c(ROWS * 5), -1),
    "nn.moments": lambda c: tf.nn.moments(c(ROWS), [-1]),
    "nn.weighted_moments": lambda c: tf.nn.weighted_moments(c(ROWS), [-1], c(ROWS)),
    "nn.l2_loss": lambda c: tf.nn.l2_loss(c(ROWS[:, 1] / 2)),
    "clip_by_norm": lambda c: tf.clip_by_norm(c(ROWS), 5.0),
    "clip_by_global_norm": lambda c: tf.clip_by_global_norm([c(ROWS), None], 5.0)[0][0],
    "linalg.global_norm": lambda c: tf.linalg.global_norm([c(ROWS)]),
    "image.ssim_multiscale": lambda c: tf.image.ssim_multiscale(
        c(LARGE), c(tf.minimum(LARGE + 9.0, 255.0)), 255.0
    ),
    "image.adjust_gamma": lambda c: tf.image.adjust_gamma(c(UNIT), 0.8),
    "image.adjust_hue": lambda c: tf.image.adjust_hue(c(UNIT), 0.2),
    "image.convert_image_dtype": lambda c: tf.image.convert_image_dtype(c(UNIT), tf.uint16),
    "image.convert_image_dtype, dtype": lambda c: tf.image.convert_image_dtype(
        tf.cast(IMAGES * 257.0, tf.uint16), c(IMAGES).dtype
    ),
    "signal.linear_to_mel_weight_matrix": lambda c: tf.signal.linear_to_mel_weight_matrix(
        20, 129, 8000, 20.0, 4000.0, dtype=c(IMAGES).dtype
    ),
    "signal.rfft": lambda c: tf.abs(tf.signal.rfft(c(UNIT[0, 0, 0]))),
    "signal.rfft2d": lambda c: tf.abs(tf.signal.rfft2d(c(UNIT[0, 0]))),
    "signal.rfft3d": lambda c: tf.abs(tf.signal.rfft3d(c(UNIT[0]))),
    "complex": lambda c: tf.abs(tf.complex(c(ROWS), c(ROWS))),
    "math.digamma": lambda c: tf.math.digamma(c(ROWS + 1.0)),
    "range": lambda c: tf.range(3000, dtype=c(MANY).dtype),
    "nn.dropout": lambda c: _seeded(lambda: tf.nn.dropout(c(NUMBERS), 0.99, seed=4)),
    "nn.dropout, rate": lambda c: _seeded(
        lambda: tf.nn.dropout(rate=c(tf.constant(0.3)), x=c(NUMBERS), seed=4)
    ),
    "nn.experimental.stateless_dropout": lambda c: tf.nn.experimental.stateless_dropout(
        c(NUMBERS), 0.8, seed=[1, 2]
    ),
    "nn.experimental.general_dropout": lambda c: tf.nn.experimental.general_dropout(
        c(NUMBERS),
        0.1,
        lambda shape, dtype: tf.random.stateless_uniform(shape, [3, 4], dtype=dtype),
    ),
    "random.categorical": lambda c: tf.random.categorical(c(ODDS * 1000.0), 5),
    "random.stateless_categorical": lambda c: tf.random.stateless_categorical(c(ODDS), 20, [1, 2]),
}


def _rounded(x: tf.Tensor, dtype: Any) -> tf.Tensor:
    """Rounds a tensor as code that is not ours does, so that nothing is left of what it was."""
    with inside.in_reach(None):
        return tf.cast(x, dtype)


def _expect_rounded(found: Any, exact: list[Any], dtype: str) -> None:
    """Expects results in float32, each rounded once to its dtype."""
    for value, right in zip(tf.nest.flatten(found), exact, strict=True):
        np.testing.assert_allclose(
            np.asarray(value, "f4"),
            np.asarray(_rounded(right, value.dtype), "f4"),
            rtol=2 ** (-10 if dtype == "float16" else -7),
            atol=0.1 if value.dtype.is_integer else 1e-7,
        )


@once
@pytest.mark.parametrize("jit_compile", [None, False, True])
def test_a_product_of_a_tensor_with_itself_is_a_sum_of_squares(jit_compile: bool | None) -> None:
    def grams(x: tf.Tensor) -> list[tf.Tensor]:
        return [tf.matmul(x, x, transpose_a=True) / 1000.0, tf.einsum("ij,ik->jk", x, x) / 1000.0]

    compute = grams if jit_compile is None else tf.function(grams, jit_compile=jit_compile)
    with inside.in_reach("float16"):
        found = compute(_rounded(ROWS, tf.float16))
    for gram in found:  # Its sums are infinite in float16.
        np.testing.assert_allclose(np.asarray(gram, "f4"), grams(ROWS)[0], rtol=1e-3)


@once
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_they_compute_in_float32(name: str, dtype: str) -> None:
    program = PROGRAMS[name]
    own: list[Any] = []
    with inside.in_reach(None):
        rounded = tf.nest.flatten(program(lambda x: tf.cast(tf.cast(x, dtype), tf.float32)))
        # TensorFlow itself does not have all of them in 16 bits on this machine.
        with contextlib.suppress(ValueError, TypeError, tf.errors.OpError):
            own = tf.nest.flatten(program(lambda x: _rounded(x, dtype)))
    with inside.in_reach(dtype):
        results = [program(lambda x: _rounded(x, dtype))]
        if dtype == "bfloat16":  # In the regions below functions are traced in float16.
            results.append(tf.function(lambda: program(lambda x: _rounded(x, dtype)))())
    for found in map(tf.nest.flatten, results):
        assert not own or [each.dtype for each in found] == [each.dtype for each in own]
        _expect_rounded(found, rounded, dtype)


# What takes one dtype and returns another one, each an attribute.
OF_TWO_DTYPES: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "isotonic_regression": lambda x: tf.nn.isotonic_regression(x)[0],
    "poisson": lambda x: tf.random.stateless_poisson([5, 3], [1, 2], x[0], dtype=x.dtype),
    "poisson, a seed": lambda x: tf.random.poisson([5], x[0], dtype=x.dtype, seed=3),
    "binomial": lambda x: tf.random.stateless_binomial(
        [5, 3], [1, 2], x[0], tf.zeros_like(x[0]) + 0.3, output_dtype=x.dtype
    ),
}


@once
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", list(OF_TWO_DTYPES))
def test_a_dtype_of_results_alone_is_that_of_the_layer(name: str, dtype: str, mode: str) -> None:
    numbers = tf.constant([[40.0, 3.1, 7.3], [60.0, 1.0, 90.0]])
    of_policies = []
    for policy in ("float32", f"mixed_{dtype}"):
        layer = tf.keras.layers.Lambda(OF_TWO_DTYPES[name], dtype=keras_mp.Policy(policy))
        tf.random.set_seed(1)
        of_policies.append((tf.function(layer) if mode == "function" else layer)(numbers))
    right, found = of_policies
    assert found.dtype == dtype
    _expect_rounded(found, [right], dtype)


@pytest.mark.parametrize("rate", [0.1, 0.8, 0.99, 0.999])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_dropout_keeps_its_share(dtype: str, rate: float) -> None:
    layer = tf.keras.layers.Dropout(rate, seed=5, dtype=keras_mp.Policy(f"mixed_{dtype}"))
    inputs = tf.ones([1000, 1000])
    compiled = tf.function(lambda x: layer(x, training=True), jit_compile=True)
    for run in (lambda x: layer(x, training=True), tf.function(compiled.python_function), compiled):
        outputs, gradients = differentiated(lambda run=run: run(inputs), inputs)
        kept = np.asarray(outputs) != 0
        # Five standard deviations of a share, and of the mean that follows from it.
        error = 5 * np.sqrt(rate * (1 - rate) / kept.size)
        assert abs(kept.mean() - (1 - rate)) < error
        # What is kept is rounded once, to 16 bits.
        factor = np.asarray(tf.cast(_rounded(1 / (1 - rate), dtype), "float32"))
        np.testing.assert_array_equal(np.asarray(outputs), np.where(kept, factor, 0.0))
        np.testing.assert_allclose(np.asarray(gradients), np.where(kept, factor, 0.0), rtol=2**-7)


@once
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_in_a_region_they_are_those_of_float32(name: str) -> None:
    exact = tf.nest.flatten(PROGRAMS[name](lambda x: x))
    with keras_mp.autocast("float16"):
        found = tf.nest.flatten(PROGRAMS[name](lambda x: x))
        traced = tf.nest.flatten(tf.function(lambda: PROGRAMS[name](lambda x: x))())
    # Threads share 70,000 weights as they come, so float32 itself differs from call to call.
    rtol = 1e-3 if name == "math.bincount" else 1e-5
    for value, other, right in zip(found, traced, exact, strict=True):
        np.testing.assert_allclose(value, right, rtol=rtol, atol=1e-6)
        np.testing.assert_allclose(other, right, rtol=rtol, atol=1e-6)


OPS: dict[str, Callable[..., Any]] = {}
if IS_KERAS_3:
    ops = tf.keras.ops
    # What Keras computes by itself in a way of its own. The others are made of TensorFlow's.
    OPS = {
        "corrcoef": lambda c: ops.corrcoef(c(ODDS * 30 + 300.0)),
        "tanh_shrink": lambda c: ops.tanh_shrink(c(ODDS / 30)),
        "quantile": lambda c: ops.quantile(c(tf.range(5000.0)), c(tf.constant([0.25, 0.7]))),
        "logspace": lambda c: ops.logspace(c(ROWS[1]), c(ROWS[2]), 30),
        "binary_crossentropy": lambda c: ops.binary_crossentropy(c(LABELS), c(LABELS[::-1])),
        "moments": lambda c: [ops.moments(c(factor * ROWS), [0]) for factor in (1.0, 4.0)],
        "cross": lambda c: ops.cross(c(MATRIX / 7), c(MATRIX[::-1] / 7.1)),
        "lstsq": lambda c: ops.lstsq(c(MATRIX), c(VECTORS)),
        "stft": lambda c: ops.stft(c(NUMBERS[:1024]), 128, 32, 128),
        "image.gaussian_blur": lambda c: ops.image.gaussian_blur(c(IMAGES)),
        "image.elastic_transform": lambda c: ops.image.elastic_transform(c(IMAGES), seed=1),
        "floor_divide": lambda c: ops.floor_divide(c(ODDS * 30), c(LABELS + 0.7)),
    }


@once
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", list(OPS))
def test_those_of_keras(name: str, dtype: str) -> None:
    try:
        operator.attrgetter(name)(ops)
    except AttributeError:
        pytest.skip("An older Keras does not have it.")

    with inside.in_reach(None):
        right = tf.nest.flatten(OPS[name](lambda x: tf.cast(tf.cast(x, dtype), tf.float32)))
    policy = keras_mp.Policy(f"mixed_{dtype}")
    layer = Mixes(lambda x: OPS[name](lambda x: _rounded(x, dtype)), dtype=policy)
    # One dtype in each. Functions refuse the `if` of one of them, in float32, too, and XLA draws
    # other random numbers.
    function = tf.function(layer, jit_compile=dtype == "bfloat16")
    only_in_eager = ("corrcoef", "image.elastic_transform")
    for run in (layer, *([function] if name not in only_in_eager else ())):
        found = tf.nest.flatten(run(ROWS))
        assert {value.dtype for value in found} == {tf.as_dtype(dtype)}
        _expect_rounded(found, right, dtype)


@once
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: tf.reshape(x, [1, tf.size(x) // 2, 2]),
        lambda x: tf.reshape(x, [tf.size(x, tf.int64)]),
        lambda x: tf.reshape(x[:1, 0], []),
        lambda x: tf.reshape(x, tf.TensorShape([1, 6])),
        lambda x: tf.pad(x, [[0, tf.size(x)], [1, 0]]),
        lambda x: tf.dynamic_stitch([[2, 0], [1]], [x[:2], x[2:]]),
    ],
)
def test_inputs_of_other_dtypes_may_be_lists(compute: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """In eager, too, where TensorFlow makes tensors of them in a slower way."""
    with inside.in_reach(None):
        right = compute(ROWS)

    def widened(x: tf.Tensor) -> tf.Tensor:
        y = compute(x)
        assert y.dtype == tf.float16
        return tf.cast(y, tf.float32)

    layer = Mixes(widened, dtype=keras_mp.Policy("mixed_float16"))
    for run in (layer, tf.function(layer)):
        np.testing.assert_array_equal(run(ROWS), right)


@once
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_classes_that_are_hidden_by_the_lowest_number(policy: str) -> None:
    """It is infinite in 16 bits, and NaN where its probability is multiplied by 0."""
    sampled = (tf.range(3, dtype=tf.int64), tf.fill([4, 1], 0.5), tf.fill([3], 0.5))
    labels = tf.range(4)[:, tf.newaxis]

    def loss(x: tf.Tensor) -> tf.Tensor:
        biases = tf.zeros([4], x.dtype)
        return tf.nn.sampled_softmax_loss(x, biases, labels, x, 3, 4, sampled_values=sampled)

    layer, x = Mixes(loss, dtype=keras_mp.Policy(policy)), tf.eye(4)
    right = loss(x)
    for run in (layer, tf.function(layer)):
        np.testing.assert_allclose(tf.cast(run(x), tf.float32), right, rtol=1e-2)

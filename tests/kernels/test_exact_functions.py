"""Functions that lose in 16 bits what none of their kernels would lose alone."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.hooks import observers, reach
from tests.common import IS_KERAS_3, once

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


PROGRAMS: dict[str, Callable[[Callable[[tf.Tensor], tf.Tensor]], Any]] = {
    "math.unsorted_segment_mean": lambda c: tf.math.unsorted_segment_mean(c(MANY), ZEROS, 1),
    "math.unsorted_segment_sqrt_n": lambda c: tf.math.unsorted_segment_sqrt_n(c(MANY), ZEROS, 1),
    "math.zero_fraction": lambda c: tf.math.zero_fraction(c(MANY)),
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
    "math.reduce_logsumexp": lambda c: tf.reduce_logsumexp(c(MANY)),
    "math.cumulative_logsumexp": lambda c: tf.math.cumulative_logsumexp(c(MANY[:3000])),
    "math.cumprod": lambda c: tf.math.cumprod(c(FACTORS)),
    "math.segment_prod": lambda c: tf.math.segment_prod(c(FACTORS), ZEROS[:300]),
    "math.unsorted_segment_prod": lambda c: tf.math.unsorted_segment_prod(
        c(FACTORS), ZEROS[:300], 1
    ),
    "math.reduce_prod": lambda c: tf.reduce_prod(c(FACTORS)),
    "math.lbeta": lambda c: tf.math.lbeta(c(ROWS + 0.5)),
    "math.add_n": lambda c: tf.add_n([c(MANY[:1])] * 300),
    "math.accumulate_n": lambda c: tf.math.accumulate_n([c(MANY[:1])] * 300),
    "math.softplus": lambda c: tf.math.softplus(c(ODDS)),
    "math.log_sigmoid": lambda c: tf.math.log_sigmoid(c(ODDS)),
    "nn.elu": lambda c: tf.nn.elu(c(ODDS)),
    "nn.selu": lambda c: tf.nn.selu(c(ODDS)),
    "nn.log_poisson_loss": lambda c: tf.nn.log_poisson_loss(
        c(LABELS * 40), c(ODDS / 20), compute_full_loss=True
    ),
    "nn.isotonic_regression": lambda c: tf.nn.isotonic_regression(c(MANY[:3000, 0] + 300.0))[0],
    "linalg.cholesky": lambda c: tf.linalg.cholesky(c(MATRIX)),
    "linalg.cholesky_solve": lambda c: tf.linalg.cholesky_solve(c(MATRIX), c(VECTORS)),
    "linalg.det": lambda c: tf.linalg.det(c(MATRIX / 300)),
    "linalg.eigh": lambda c: tf.linalg.eigh(c(MATRIX))[0],
    "linalg.eigvalsh": lambda c: tf.linalg.eigvalsh(c(MATRIX)),
    "linalg.expm": lambda c: tf.linalg.expm(c(MATRIX / 100)),
    "linalg.inv": lambda c: tf.linalg.inv(c(MATRIX)),
    "linalg.logdet": lambda c: tf.linalg.logdet(c(MATRIX)),
    "linalg.lstsq": lambda c: tf.linalg.lstsq(c(MATRIX), c(VECTORS)),
    "linalg.lu": lambda c: tf.linalg.lu(c(MATRIX))[0],
    "linalg.matrix_rank": lambda c: tf.linalg.matrix_rank(c(MATRIX)),
    "linalg.pinv": lambda c: tf.linalg.pinv(c(MATRIX)),
    "linalg.qr": lambda c: tf.linalg.qr(c(MATRIX))[1],
    "linalg.slogdet": lambda c: tf.linalg.slogdet(c(MATRIX)),
    "linalg.solve": lambda c: tf.linalg.solve(c(MATRIX), c(VECTORS)),
    "linalg.svd": lambda c: tf.linalg.svd(c(MATRIX))[0],
    "linalg.trace": lambda c: tf.linalg.trace(c(tf.linalg.diag(ROWS[:, 1] * 100 - 19990))),
    "linalg.tensor_diag": lambda c: tf.linalg.tensor_diag(c(ROWS[:, 1])),
    "linalg.tensor_diag_part": lambda c: tf.linalg.tensor_diag_part(c(MATRIX)),
    "linalg.triangular_solve": lambda c: tf.linalg.triangular_solve(c(MATRIX), c(VECTORS)),
    "AvgPool3D": lambda c: tf.nn.avg_pool3d(c(tf.fill([1, 4, 4, 4, 1], 30000.0)), 4, 4, "VALID"),
    "image.non_max_suppression": lambda c: tf.image.non_max_suppression(
        c(BOXES), c(tf.constant([0.9, 0.8, 0.7])), 3
    ),
    "image.non_max_suppression_with_scores": lambda c: tf.image.non_max_suppression_with_scores(
        c(BOXES), c(tf.constant([0.9, 0.8, 0.7])), 3, soft_nms_sigma=0.3
    ),
    "signal.stft": lambda c: tf.abs(tf.signal.stft(c(FRAMES[:2]), 64, 16)),
    "signal.dct": lambda c: tf.signal.dct(c(FRAMES)),
    "signal.idct": lambda c: tf.signal.idct(c(FRAMES)),
    "signal.mdct": lambda c: tf.signal.mdct(c(FRAMES), 64),
    "signal.inverse_mdct": lambda c: tf.signal.inverse_mdct(c(FRAMES[None])),
    "signal.mfccs_from_log_mel_spectrograms": lambda c: tf.signal.mfccs_from_log_mel_spectrograms(
        c(FRAMES / 600.0)
    ),
    "math.reduce_euclidean_norm": lambda c: tf.math.reduce_euclidean_norm(c(ROWS), -1),
    "nn.batch_normalization": lambda c: tf.nn.batch_normalization(
        c(ROWS + 3000.0), c(ROWS[0] + 3000.0), c(ROWS[2]), None, None, 1e-3
    ),
    "nn.sufficient_statistics": lambda c: tf.nn.sufficient_statistics(c(ROWS / 2), [0])[1:3],
    "nn.local_response_normalization": lambda c: tf.nn.local_response_normalization(
        c(ROWS)[None, None]
    ),
    "math.l2_normalize": lambda c: tf.math.l2_normalize(c(ROWS), -1),
    "math.reduce_variance": lambda c: tf.math.reduce_variance(c(ROWS), -1),
    "math.reduce_std": lambda c: tf.math.reduce_std(c(ROWS * 5), -1),
    "norm": lambda c: tf.norm(c(ROWS), axis=-1),
    "linalg.normalize": lambda c: tf.linalg.normalize(c(ROWS), axis=-1),
    "nn.moments": lambda c: tf.nn.moments(c(ROWS), [-1]),
    "nn.weighted_moments": lambda c: tf.nn.weighted_moments(c(ROWS), [-1], c(ROWS)),
    "nn.l2_loss": lambda c: tf.nn.l2_loss(c(ROWS[:, 1] / 2)),
    "clip_by_norm": lambda c: tf.clip_by_norm(c(ROWS), 5.0),
    "clip_by_global_norm": lambda c: tf.clip_by_global_norm([c(ROWS), None], 5.0)[0][0],
    "linalg.global_norm": lambda c: tf.linalg.global_norm([c(ROWS)]),
    "image.ssim": lambda c: tf.image.ssim(c(IMAGES), c(OTHERS), 255.0),
    "image.psnr": lambda c: tf.image.psnr(c(IMAGES), c(OTHERS), 255.0),
    "image.total_variation": lambda c: tf.image.total_variation(c(IMAGES)),
    "image.rgb_to_grayscale": lambda c: tf.image.rgb_to_grayscale(c(IMAGES)),
    "image.rgb_to_yuv": lambda c: tf.image.rgb_to_yuv(c(IMAGES)),
    "image.sobel_edges": lambda c: tf.image.sobel_edges(c(IMAGES)),
    "image.ssim_multiscale": lambda c: tf.image.ssim_multiscale(
        c(LARGE), c(tf.minimum(LARGE + 9.0, 255.0)), 255.0
    ),
    "image.image_gradients": lambda c: tf.image.image_gradients(c(IMAGES)),
    "image.yuv_to_rgb": lambda c: tf.image.yuv_to_rgb(c(IMAGES)),
    "image.rgb_to_yiq": lambda c: tf.image.rgb_to_yiq(c(IMAGES)),
    "image.yiq_to_rgb": lambda c: tf.image.yiq_to_rgb(c(IMAGES)),
    "image.rgb_to_hsv": lambda c: tf.image.rgb_to_hsv(c(UNIT)),
    "image.hsv_to_rgb": lambda c: tf.image.hsv_to_rgb(c(UNIT)),
    "image.adjust_contrast": lambda c: tf.image.adjust_contrast(c(UNIT), 1.5),
    "image.adjust_gamma": lambda c: tf.image.adjust_gamma(c(UNIT), 0.8),
    "image.adjust_hue": lambda c: tf.image.adjust_hue(c(UNIT), 0.2),
    "image.adjust_saturation": lambda c: tf.image.adjust_saturation(c(UNIT), 1.5),
    "image.convert_image_dtype": lambda c: tf.image.convert_image_dtype(c(UNIT), tf.uint16),
    "image.convert_image_dtype, dtype": lambda c: tf.image.convert_image_dtype(
        tf.cast(IMAGES * 257.0, tf.uint16), c(IMAGES).dtype
    ),
    "signal.hann_window": lambda c: tf.signal.hann_window(4000, dtype=c(IMAGES).dtype),
    "signal.hamming_window": lambda c: tf.signal.hamming_window(4000, dtype=c(IMAGES).dtype),
    "signal.kaiser_window": lambda c: tf.signal.kaiser_window(400, dtype=c(IMAGES).dtype),
    "signal.kaiser_bessel_derived_window": lambda c: tf.signal.kaiser_bessel_derived_window(
        400, dtype=c(IMAGES).dtype
    ),
    "signal.vorbis_window": lambda c: tf.signal.vorbis_window(4000, dtype=c(IMAGES).dtype),
    "signal.linear_to_mel_weight_matrix": lambda c: tf.signal.linear_to_mel_weight_matrix(
        20, 129, 8000, 20.0, 4000.0, dtype=c(IMAGES).dtype
    ),
    "signal.rfft": lambda c: tf.abs(tf.signal.rfft(c(UNIT[0, 0, 0]))),
    "signal.rfft2d": lambda c: tf.abs(tf.signal.rfft2d(c(UNIT[0, 0]))),
    "signal.rfft3d": lambda c: tf.abs(tf.signal.rfft3d(c(UNIT[0]))),
    "image.per_image_standardization": lambda c: tf.image.per_image_standardization(c(IMAGES)),
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


observers.reach_begins()


def _rounded(x: tf.Tensor, dtype: Any) -> tf.Tensor:
    """Rounds a tensor as code that is not ours does, so that nothing is left of what it was."""
    with reach.entered(None):
        return tf.cast(x, dtype)


@once
@pytest.mark.parametrize("jit_compile", [None, False, True])
def test_a_product_of_a_tensor_with_itself_is_a_sum_of_squares(jit_compile: bool | None) -> None:
    def grams(x: tf.Tensor) -> list[tf.Tensor]:
        return [tf.matmul(x, x, transpose_a=True) / 1000.0, tf.einsum("ij,ik->jk", x, x) / 1000.0]

    compute = grams if jit_compile is None else tf.function(grams, jit_compile=jit_compile)
    with reach.entered(tf.float16):
        found = compute(_rounded(ROWS, tf.float16))
    for gram in found:  # Its sums are infinite in float16.
        np.testing.assert_allclose(np.asarray(gram, "f4"), grams(ROWS)[0], rtol=1e-3)


@once
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_they_compute_in_float32(name: str, dtype: str) -> None:
    program = PROGRAMS[name]
    with reach.entered(None):
        rounded = tf.nest.flatten(program(lambda x: tf.cast(tf.cast(x, dtype), tf.float32)))
    with reach.entered(tf.as_dtype(dtype)):
        results = [program(lambda x: _rounded(x, dtype))]
        if dtype == "bfloat16":  # In the regions below functions are traced in float16.
            results.append(tf.function(lambda: program(lambda x: _rounded(x, dtype)))())
    for found in results:
        for value, right in zip(tf.nest.flatten(found), rounded, strict=True):
            right = _rounded(right, value.dtype)
            np.testing.assert_allclose(
                np.asarray(value, "f4"),
                np.asarray(right, "f4"),
                rtol=2 ** (-10 if dtype == "float16" else -7),
                atol=0.1 if value.dtype.is_integer else 1e-7,
            )


@pytest.mark.parametrize("rate", [0.1, 0.8, 0.99, 0.999])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_dropout_keeps_its_share(dtype: str, rate: float) -> None:
    layer = tf.keras.layers.Dropout(rate, seed=5, dtype=keras_mp.Policy(f"mixed_{dtype}"))
    inputs = tf.ones([1000, 1000])
    compiled = tf.function(lambda x: layer(x, training=True), jit_compile=True)
    for run in (lambda x: layer(x, training=True), tf.function(compiled.python_function), compiled):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = run(inputs)
        gradients = tape.gradient(outputs, inputs)
        kept = np.asarray(outputs) != 0
        # Five standard deviations of a share, and of the mean that follows from it.
        error = 5 * np.sqrt(rate * (1 - rate) / kept.size)
        assert abs(kept.mean() - (1 - rate)) < error
        # What is kept is rounded once, to 16 bits.
        factor = np.asarray(tf.cast(_rounded(1 / (1 - rate), dtype), "float32"))
        np.testing.assert_array_equal(np.asarray(outputs), np.where(kept, factor, 0.0))
        np.testing.assert_allclose(np.asarray(gradients), np.where(kept, factor, 0.0), rtol=2**-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_16_bits_may_begin_orthogonal(dtype: str) -> None:
    layer = tf.keras.layers.LSTM(4, dtype=keras_mp.Policy(dtype))
    layer(tf.ones([2, 3, 4]))
    _, recurrent, _ = (np.asarray(tf.cast(each, "float32")) for each in layer.weights)
    assert tf.as_dtype(layer.weights[1].dtype) == dtype
    np.testing.assert_allclose(recurrent @ recurrent.T, np.eye(4), atol=0.02)


@once
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_results_have_the_dtype_of_those_of_tensorflow(name: str) -> None:
    def dtypes() -> list[tf.DType]:
        found = PROGRAMS[name](lambda x: _rounded(x, tf.float16))
        return [each.dtype for each in tf.nest.flatten(found)]

    try:
        with reach.entered(None):
            own = dtypes()
    except (ValueError, TypeError, tf.errors.NotFoundError, tf.errors.InvalidArgumentError):
        pytest.skip("TensorFlow cannot compute it in float16 on this machine.")
    with reach.entered(tf.float16):
        assert dtypes() == own


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
    QUANTILES = tf.constant([0.25, 0.7])
    OPS = {
        "norm": lambda c: ops.norm(c(ROWS), axis=-1),
        "normalize": lambda c: ops.normalize(c(ROWS), axis=-1),
        "cdist": lambda c: ops.cdist(c(ROWS), c(ROWS + 300.0)),
        "average": lambda c: ops.average(c(MANY * 1e6), axis=0),
        "corrcoef": lambda c: ops.corrcoef(c(ODDS * 30 + 300.0)),
        "nanmean": lambda c: ops.nanmean(c(MANY * 1e6), axis=0),
        "nanvar": lambda c: ops.nanvar(c(ROWS / 2), axis=-1),
        "nanstd": lambda c: ops.nanstd(c(ROWS * 5), axis=-1),
        "squareplus": lambda c: ops.squareplus(c(ROWS)),
        "sparsemax": lambda c: ops.sparsemax(c(ODDS)),
        "tanh_shrink": lambda c: ops.tanh_shrink(c(ODDS / 30)),
        "celu": lambda c: ops.celu(c(ODDS)),
        "sparse_plus": lambda c: ops.sparse_plus(c(ODDS / 9)),
        "sinc": lambda c: ops.sinc(c(ODDS / 90 + 0.1)),
        "trapezoid": lambda c: ops.trapezoid(c(NUMBERS * 30)),
        "quantile": lambda c: ops.quantile(c(tf.range(5000.0)), c(QUANTILES)),
        "nanquantile": lambda c: ops.nanquantile(c(tf.range(5000.0)), c(QUANTILES)),
        "percentile": lambda c: ops.percentile(c(tf.range(5000.0)), c(QUANTILES * 100)),
        "nanpercentile": lambda c: ops.nanpercentile(c(tf.range(5000.0)), c(QUANTILES * 100)),
        "linspace": lambda c: ops.linspace(c(ROWS[1]), c(ROWS[0]), 300),
        "logspace": lambda c: ops.logspace(c(ROWS[1]), c(ROWS[2]), 30),
        "logaddexp2": lambda c: ops.logaddexp2(c(ODDS), c(ODDS - 1.3)),
        "log2": lambda c: ops.log2(c(ROWS + 0.1)),
        "log10": lambda c: ops.log10(c(ROWS + 0.1)),
        "cbrt": lambda c: ops.cbrt(c(ROWS * 90)),
        "hypot": lambda c: ops.hypot(c(ROWS * 90), c(ROWS[::-1] * 90)),
        "deg2rad": lambda c: ops.deg2rad(c(ROWS * 70)),
        "rad2deg": lambda c: ops.rad2deg(c(ROWS)),
        "psnr": lambda c: ops.psnr(c(IMAGES), c(OTHERS), 255.0),
        "binary_crossentropy": lambda c: ops.binary_crossentropy(c(LABELS), c(LABELS[::-1])),
        "categorical_crossentropy": lambda c: ops.categorical_crossentropy(
            c(LABELS), c(ROWS[:, :1] * 100 + LABELS)
        ),
        "moments": lambda c: ops.moments(c(ROWS), [0]),
        "histogram": lambda c: ops.histogram(c(tf.range(1990.0, 2022.0)), 5),
        "cross": lambda c: ops.cross(c(MATRIX / 7), c(MATRIX[::-1] / 7.1)),
        "lstsq": lambda c: ops.lstsq(c(MATRIX), c(VECTORS)),
        "arange": lambda c: ops.arange(0, 3000, 1, dtype=c(ROWS).dtype),
        "stft": lambda c: ops.stft(c(NUMBERS[:1024]), 128, 32, 128),
        "image.gaussian_blur": lambda c: ops.image.gaussian_blur(c(IMAGES)),
        "image.ssim": lambda c: ops.image.ssim(c(IMAGES), c(OTHERS), 255.0),
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

    class Ops(tf.keras.layers.Layer):
        def call(self, x: tf.Tensor) -> Any:
            return OPS[name](lambda x: _rounded(x, dtype))

    with reach.entered(None):
        right = tf.nest.flatten(OPS[name](lambda x: tf.cast(tf.cast(x, dtype), tf.float32)))
    layer = Ops(dtype=keras_mp.Policy(f"mixed_{dtype}"))
    # Functions refuse its `if`, and XLA their branches, in float32, too.
    in_functions = not name.startswith("corrcoef")
    compiles = not name.startswith(("nanquantile", "nanpercentile"))
    # One dtype in each.
    function = tf.function(layer, jit_compile=compiles and dtype == "bfloat16")
    for run in (layer, *([function] if in_functions else ())):
        for value, exact in zip(tf.nest.flatten(run(ROWS)), right, strict=True):
            assert value.dtype == dtype
            with reach.entered(None):  # In reach, what float16 cannot hold stays float32.
                rounded = tf.cast(exact, dtype)
            np.testing.assert_allclose(
                np.asarray(value, "f4"),
                np.asarray(rounded, "f4"),
                rtol=2 ** (-10 if dtype == "float16" else -7),
                atol=1e-7,
            )


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
    with reach.entered(None):
        right = compute(ROWS)

    class Layer(tf.keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            y = compute(x)
            assert y.dtype == tf.float16
            return tf.cast(y, tf.float32)

    layer = Layer(dtype=keras_mp.Policy("mixed_float16"))
    for run in (layer, tf.function(layer)):
        np.testing.assert_array_equal(run(ROWS), right)


@once
def test_gradients_and_what_is_not_ours() -> None:
    x = tf.cast(ROWS, tf.float16)
    with reach.entered(None):
        own = tf.math.l2_normalize(x, -1)  # TensorFlow's: the square of 300 is infinite
    assert float(own[0, 0]) == 0.0
    with reach.entered(tf.float16), tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.math.l2_normalize(x, -1)
    assert float(y[0, 0]) == pytest.approx(0.6, rel=1e-3)
    assert tape.gradient(y, x).dtype == tf.float16

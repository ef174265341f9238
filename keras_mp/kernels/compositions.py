"""Functions of TensorFlow that lose more in 16 bits than each of their kernels.

They count, square and sum in the dtype of their inputs: 70,000 rows are infinitely many in float16,
the square of 300 is infinite, that of 1e-4 is 0. The ELU of -1e-4 is 0. Decompositions of matrices
are NaN, where there is a kernel at all. In layers of 16 bits and in regions of `autocast` such a
function computes in float32 as a whole; its result is rounded once to the dtype in which TensorFlow
returns it: that which was asked for, or that of its inputs, which in a region is float32.

This module needs TensorFlow only.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.hooks import Everywhere, Replacement, reach
from keras_mp.kernels.replaced import in_its_module
from keras_mp.support.dtypes import LOW_PRECISION, LOW_PRECISION_NAMES

# By what is lost in 16 bits.
_COUNTS = (
    *("math.unsorted_segment_mean", "math.unsorted_segment_sqrt_n", "math.zero_fraction"),
    *("math.bincount", "sparse.bincount", "math.confusion_matrix", "nn.compute_average_loss"),
    *("histogram_fixed_width", "histogram_fixed_width_bins"),
)
_EXPONENTIALS = ("math.reduce_logsumexp", "math.cumulative_logsumexp", "math.lbeta")
_PRODUCTS = (
    *("math.cumprod", "math.reduce_prod", "math.segment_prod", "math.unsorted_segment_prod"),
)
# Differences of what is nearly equal, and logarithms of what 16 bits round to 1.
_LOGARITHMS = (
    *("math.softplus", "math.log_sigmoid", "nn.elu", "nn.selu"),
    *("nn.log_poisson_loss", "nn.isotonic_regression"),
    "math.digamma",  # Its gradient has no kernel in 16 bits.
)
_MATRICES = (
    *("linalg.cholesky", "linalg.det", "linalg.eigh", "linalg.eigvalsh", "linalg.expm"),
    *("linalg.inv", "linalg.logdet", "linalg.lstsq", "linalg.lu", "linalg.matrix_rank"),
    *("linalg.pinv", "linalg.qr", "linalg.slogdet", "linalg.solve", "linalg.svd"),
    *("linalg.triangular_solve", "linalg.cholesky_solve", "linalg.trace"),
)
# They move numbers, and have no kernel in bfloat16.
_DIAGONALS = ("linalg.tensor_diag", "linalg.tensor_diag_part")
_SQUARES = (
    *("math.reduce_euclidean_norm", "nn.batch_normalization"),
    *("math.l2_normalize", "math.reduce_variance", "math.reduce_std", "nn.moments", "norm"),
    *("nn.weighted_moments", "nn.sufficient_statistics", "nn.l2_loss", "linalg.normalize"),
    *("clip_by_norm", "clip_by_global_norm", "linalg.global_norm"),
    *("nn.local_response_normalization", "image.per_image_standardization"),
)
# Products of pixels, which go up to 255, and sums of their squares. Areas of boxes.
_IMAGES = (
    *("image.ssim", "image.ssim_multiscale", "image.psnr", "image.total_variation"),
    *("image.sobel_edges", "image.image_gradients", "image.rgb_to_grayscale", "image.rgb_to_yuv"),
    *("image.yuv_to_rgb", "image.rgb_to_yiq", "image.yiq_to_rgb", "image.rgb_to_hsv"),
    *("image.hsv_to_rgb", "image.adjust_contrast", "image.adjust_gamma", "image.adjust_hue"),
    *("image.adjust_saturation", "image.convert_image_dtype"),
    *("image.non_max_suppression", "image.non_max_suppression_with_scores"),
)
# Times in samples and frequencies in hertz, where the caller asks for 16 bits.
_SIGNALS = (
    *("signal.hann_window", "signal.hamming_window", "signal.kaiser_window"),
    *("signal.kaiser_bessel_derived_window", "signal.vorbis_window"),
    "signal.linear_to_mel_weight_matrix",
)
# Their windows and their factors would be rounded before what refuses 16 bits computes in float32.
_TRANSFORMS = (
    *("signal.stft", "signal.dct", "signal.idct", "signal.mdct", "signal.inverse_mdct"),
    "signal.mfccs_from_log_mel_spectrograms",
)
# They have no kernel in 16 bits in graphs, or none in XLA.
_MAKERS = ("range", "random.categorical", "random.stateless_categorical")
# They refuse 16 bits.
_COMPLEX = ("complex",)
_REAL_TRANSFORMS = ("signal.rfft", "signal.rfft2d", "signal.rfft3d")
NAMES = (
    *(*_COUNTS, *_EXPONENTIALS, *_PRODUCTS, *_LOGARITHMS, *_MATRICES, *_DIAGONALS),
    *(*_SQUARES, *_IMAGES),
    *(*_SIGNALS, *_TRANSFORMS, *_REAL_TRANSFORMS, *_COMPLEX, *_MAKERS),
)
# TensorFlow returns float32, whatever the dtype of their inputs.
_OF_FLOAT32 = (
    *("math.zero_fraction", "image.ssim", "image.ssim_multiscale", "image.psnr"),
    *("image.per_image_standardization", *_TRANSFORMS),
)

# They return float32 and send gradients back in the dtype of the images. XLA then meets two dtypes,
# and some have no gradient in 16 bits.
INTERPOLATIONS = ("ResizeBilinear", "ResizeBicubic", "ResizeArea", "ScaleAndTranslate")
# They compare a rate with random numbers in the dtype of their input, of which bfloat16 has 128: a
# rate of 0.99 keeps 0.78 %, one of 0.8 19.5 %. In regions their input is float32.
DROPOUTS = (
    *("nn.dropout", "nn.experimental.stateless_dropout"),
    "nn.experimental.general_dropout",
)
# They add up tensors one by one. So many roundings do no harm.
SUMS_OF_TENSORS = (tf.math.add_n, tf.math.accumulate_n)
_FEW_TENSORS = 8


@functools.cache
def replacements() -> tuple[Replacement, ...]:
    """Returns the rows of these functions."""
    rows = []
    for name in NAMES:
        wide = functools.partial(in_float32, rounds=name not in _OF_FLOAT32)
        rows.append(Replacement(_function(name), wide))
    # It counts in 16 bits where rows have different lengths, and there only.
    rows.append(Replacement(Everywhere(tf.math.reduce_mean), _in_float32_if(_is_ragged)))
    many = _in_float32_if(_are_many)
    rows += [Replacement(Everywhere(original), many) for original in SUMS_OF_TENSORS]
    rows += [Replacement(_function(name), _in_float32_if(_drops_low)) for name in DROPOUTS]
    for name in INTERPOLATIONS:
        original = in_its_module(getattr(tf.raw_ops, name))
        rows.append(Replacement(Everywhere(original), _of_float32_images))
    # It adds up whole windows, and has no kernel for float16 on CPUs.
    rows.append(Replacement(Everywhere(in_its_module(tf.raw_ops.AvgPool3D)), in_float32))
    return tuple(rows)


def _function(name: str) -> Everywhere:
    """Returns the place of a public function of TensorFlow."""
    return Everywhere(operator.attrgetter(name)(tf), (name.rpartition(".")[2],))


def in_float32(original: Callable[..., Any], rounds: bool = True) -> Callable[..., Any]:
    """Returns a function that computes in float32 in layers of 16 bits and in regions.

    Args:
        original: function of tensors.
        rounds: bool. Whether its results are in the dtype of its inputs. Defaults to True.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = tf.nest.flatten((args, kwargs))
        dtype = next(filter(None, (*map(_dtype_asked_for, leaves), *map(_low_dtype, leaves))), None)
        with reach.without_region():
            if dtype is None:
                return original(*args, **kwargs)
            with reach.decided():
                args, kwargs = tf.nest.map_structure(_widened, (args, kwargs))
                result = original(*args, **kwargs)
        return (
            tf.nest.map_structure(functools.partial(_rounded, dtype), result) if rounds else result
        )

    return call


def _of_float32_images(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(images: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_widened(images), *args, **kwargs)

    return call


def _in_float32_if(condition: Callable[..., bool]) -> Callable[..., Any]:
    """Returns `in_float32` for functions whose arguments meet a condition."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        wide = in_float32(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            return (wide if condition(*args, **kwargs) else original)(*args, **kwargs)

        return call

    return wrap


def _is_ragged(input_tensor: Any = None, *args: Any, **kwargs: Any) -> bool:
    del args, kwargs
    return isinstance(input_tensor, tf.RaggedTensor)


def _are_many(inputs: Any = None, *args: Any, **kwargs: Any) -> bool:
    del args, kwargs
    is_many = isinstance(inputs, list | tuple) and len(inputs) > _FEW_TENSORS
    # A float32 tensor among them makes the sum float32 anyway.
    return is_many and all(map(_is_low, inputs))


def _drops_low(x: Any = None, rate: Any = None, *args: Any, **kwargs: Any) -> bool:
    del args, kwargs
    # A float32 tensor beside it is a mixture of dtypes, which is computed in float32 or refused.
    return _is_low(x) and (_is_low(rate) or not tf.is_tensor(rate))


def _dtype_asked_for(value: Any) -> tf.DType | None:
    """Returns a floating-point dtype that is an argument itself: that of the result."""
    if isinstance(value, str) and value in LOW_PRECISION_NAMES:
        return tf.as_dtype(value)
    return value if isinstance(value, tf.DType) and value.is_floating else None


def _low_dtype(value: Any) -> tf.DType | None:
    return tf.as_dtype(value.dtype) if _is_low(value) else None


def _is_low(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype in LOW_PRECISION


def _widened(value: Any) -> Any:
    if _is_low(value):
        return tf.cast(value, tf.float32)
    return tf.float32 if _dtype_asked_for(value) in LOW_PRECISION else value


def _rounded(dtype: tf.DType, value: Any) -> Any:
    is_wide = tf.is_tensor(value) and value.dtype == tf.float32
    return tf.cast(value, dtype) if is_wide else value

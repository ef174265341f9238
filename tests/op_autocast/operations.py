"""Functions of TensorFlow that float32 has in layers, by the inputs that they take.

Those that lose digits in 16 bits are in `tests/kernels/test_exact_functions.py`.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def alike(names: str, call: Callable[[Any, Any], Any]) -> dict[str, Callable[[Any], Any]]:
    """Functions of TensorFlow that are called alike. keras_mp may replace them later."""

    def called(name: str, x: Any) -> Any:
        return call(operator.attrgetter(name)(tf), x)

    return {name: functools.partial(called, name) for name in names.split()}


# Their inputs are between 0.1 and 0.9, in rows of four.
ELEMENTWISE = {
    **alike(
        "math.abs math.acos math.asin math.asinh math.atan math.atanh math.ceil math.cos "
        "math.cosh math.digamma math.erf math.erfc math.erfcinv math.erfinv math.exp math.expm1 "
        "math.floor math.lgamma math.log math.log1p math.log_sigmoid math.ndtri math.negative "
        "math.reciprocal math.rint math.round math.rsqrt math.sigmoid math.sign math.sin "
        "math.sinh math.softplus math.softsign math.sqrt math.square math.tan math.tanh "
        "math.bessel_i0 math.bessel_i0e math.bessel_i1 math.bessel_i1e math.is_finite "
        "math.is_nan math.reciprocal_no_nan math.special.dawsn math.special.expint "
        "math.special.fresnel_cos math.special.fresnel_sin math.special.spence "
        "math.special.bessel_j0 math.special.bessel_j1 math.special.bessel_k0 "
        "math.special.bessel_k1 nn.elu nn.gelu nn.leaky_relu nn.relu nn.relu6 nn.selu nn.silu "
        "nn.softmax nn.log_softmax nn.l2_loss nn.l2_normalize nn.crelu nn.zero_fraction",
        lambda own, x: own(x),
    ),
    "math.acosh": lambda x: tf.math.acosh(x + 1.5),
}
PAIRS = alike(
    "math.add math.subtract math.multiply math.divide math.floordiv math.floormod math.pow "
    "math.maximum math.minimum math.squared_difference math.atan2 math.igamma math.igammac "
    "math.xlogy math.xlog1py math.xdivy math.divide_no_nan math.multiply_no_nan math.nextafter "
    "math.truediv math.greater math.less_equal math.equal math.not_equal math.zeta "
    "truncatediv complex",
    lambda own, x: (
        own(x + 1, x) if "zeta" in own.__name__ or own is tf.complex else own(x, x * 0.5)
    ),
)
REDUCTIONS = {
    **alike(
        "math.reduce_sum math.reduce_mean math.reduce_max math.reduce_min math.reduce_prod "
        "math.reduce_std math.reduce_variance math.reduce_logsumexp math.reduce_euclidean_norm "
        "math.cumsum math.cumprod math.cumulative_logsumexp math.argmax math.argmin norm "
        "linalg.normalize math.lbeta math.count_nonzero math.l2_normalize",
        lambda own, x: own(x, axis=1) if own is not tf.math.lbeta else own(x),
    ),
    **alike("math.top_k", lambda own, x: own(x, 2)),
    **alike("sort argsort reverse", lambda own, x: own(x, [1] if own is tf.reverse else 1)),
    **alike(
        "math.segment_sum math.segment_mean math.segment_max math.segment_min math.segment_prod",
        lambda own, x: own(x, [0, 0, 1, 2]),
    ),
    **alike(
        "math.unsorted_segment_sum math.unsorted_segment_mean math.unsorted_segment_max "
        "math.unsorted_segment_min math.unsorted_segment_prod math.unsorted_segment_sqrt_n",
        lambda own, x: own(x, [0, 2, 1, 2], 3),
    ),
    "math.in_top_k": lambda x: tf.math.in_top_k([0, 1, 2, 3], x, 2),
    "clip_by_value": lambda x: tf.clip_by_value(x, 0.2, 0.6),
}
MATRICES = {
    **alike(
        "linalg.inv linalg.logdet linalg.eigvalsh linalg.expm linalg.adjoint",
        lambda own, x: own(x @ tf.transpose(x) + 2 * tf.eye(4, dtype=x.dtype)),
    ),
    **alike(
        "linalg.diag linalg.tensor_diag linalg.set_diag",
        lambda f, x: f(x, x[0]) if f is tf.linalg.set_diag else f(x[0]),
    ),
    "linalg.band_part": lambda x: tf.linalg.band_part(x, 1, 1),
    "linalg.matvec": lambda x: tf.linalg.matvec(x, x[0]),
    "linalg.cross": lambda x: tf.linalg.cross(x[:, :3], x[:, 1:]),
    "einsum": lambda x: tf.einsum("ij,kj->ik", x, x),
    "tensordot": lambda x: tf.tensordot(x, x, 1),
    "linalg.tridiagonal_solve": lambda x: tf.linalg.tridiagonal_solve(x[:3] + 1, x[0]),
}
IMAGES = {
    name: (lambda x, call=call: call(tf.reshape(x, [1, 4, 4, 1])))
    for name, call in {
        "nn.avg_pool": lambda x: tf.nn.avg_pool(x, 2, 2, "SAME"),
        "nn.max_pool": lambda x: tf.nn.max_pool(x, 2, 2, "SAME"),
        "nn.avg_pool3d": lambda x: tf.nn.avg_pool3d(x[..., None], 2, 2, "SAME"),
        "nn.max_pool3d": lambda x: tf.nn.max_pool3d(x[..., None], 2, 2, "SAME"),
        "nn.conv2d": lambda x: tf.nn.conv2d(x, x[0, :2, :2, :, None], 1, "SAME"),
        "nn.conv3d": lambda x: tf.nn.conv3d(
            x[..., None], x[0, :2, :2, :, None, None], [1] * 5, "SAME"
        ),
        "nn.depthwise_conv2d": lambda x: tf.nn.depthwise_conv2d(
            x, x[0, :2, :2, :, None], [1] * 4, "SAME"
        ),
        "nn.conv2d_transpose": lambda x: tf.nn.conv2d_transpose(
            x, x[0, :2, :2, :, None], [1, 8, 8, 1], 2
        ),
        "nn.dilation2d": lambda x: tf.nn.dilation2d(
            x, x[0, :2, :2], [1] * 4, "SAME", "NHWC", [1] * 4
        ),
        "raw_ops.LRN": lambda x: tf.raw_ops.LRN(input=tf.tile(x, [1, 1, 1, 3])),
        "nn.bias_add": lambda x: tf.nn.bias_add(x, x[0, 0, 0]),
        "nn.space_to_depth": lambda x: tf.nn.space_to_depth(x, 2),
        "nn.fused_batch_norm": lambda x: tf.nn.batch_normalization(x, 0.5, 0.2, None, None, 0.01),
        "image.resize": lambda x: tf.image.resize(x, [8, 8]),
        "image.resize bicubic": lambda x: tf.image.resize(x, [8, 8], "bicubic"),
        "image.resize nearest": lambda x: tf.image.resize(x, [8, 8], "nearest"),
        "image.crop_and_resize": lambda x: tf.image.crop_and_resize(
            x, [[0.0, 0.0, 1.0, 1.0]], [0], [3, 3]
        ),
        "image.grayscale_to_rgb": tf.image.grayscale_to_rgb,
        "image.adjust_brightness": lambda x: tf.image.adjust_brightness(x, 0.1),
        "image.flip_left_right": tf.image.flip_left_right,
        "image.extract_patches": lambda x: tf.image.extract_patches(
            x, [1, 2, 2, 1], [1, 2, 2, 1], [1] * 4, "VALID"
        ),
    }.items()
}


def csr_product(x: Any) -> Any:
    """The square of a part of a matrix, by TensorFlow's operations of sparse matrices."""
    matrix = tf.raw_ops.DenseToCSRSparseMatrix(dense_input=x, indices=[[0, 0], [1, 1]])
    product = tf.raw_ops.SparseMatrixSparseMatMul(a=matrix, b=matrix, type=x.dtype)
    return tf.raw_ops.CSRSparseMatrixToDense(sparse_input=product, type=x.dtype)


OTHERS = {
    "range of tensors": lambda x: tf.range(tf.cast(0, x.dtype), 4, tf.cast(1, x.dtype)) * x,
    "linspace": lambda x: tf.linspace(x[0], x[1], 3),
    "signal.fft": lambda x: tf.abs(tf.signal.fft(tf.complex(x, x))),
    "signal.frame": lambda x: tf.signal.frame(x, 2, 1),
    "quantization.fake_quant_with_min_max_args": lambda x: (
        tf.quantization.fake_quant_with_min_max_args(x, 0.0, 1.0)
    ),
    "quantization.fake_quant_with_min_max_vars": lambda x: (
        tf.quantization.fake_quant_with_min_max_vars(x, 0.0, 1.0)
    ),
    "quantization.fake_quant_with_min_max_vars_per_channel": lambda x: (
        tf.quantization.fake_quant_with_min_max_vars_per_channel(x, [0.0] * 4, [1.0] * 4)
    ),
    "random.stateless_normal": lambda x: tf.random.stateless_normal([4], [1, 2], x, 0.0),
    "math.betainc": lambda x: tf.math.betainc(x, x + 1, tf.stop_gradient(x)),
    "math.polygamma": lambda x: tf.math.polygamma(tf.ones_like(x), x),
    "searchsorted": lambda x: tf.searchsorted(tf.sort(x[0]), x[1]),
    "one_hot": lambda x: tf.one_hot([0, 1], 4, x[0, 0], x[0, 1]),
    "nn.embedding_lookup": lambda x: tf.nn.embedding_lookup(x, [2, 0]),
    "nn.dropout": lambda x: tf.nn.dropout(x, 0.0),
    "nn.softmax_cross_entropy_with_logits": lambda x: tf.nn.softmax_cross_entropy_with_logits(
        tf.one_hot([0, 1, 2, 3], 4, dtype=x.dtype), x
    ),
    "nn.sparse_softmax_cross_entropy_with_logits": lambda x: (
        tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1, 2, 3], x)
    ),
    "nn.sigmoid_cross_entropy_with_logits": lambda x: tf.nn.sigmoid_cross_entropy_with_logits(x, x),
    "nn.log_poisson_loss": lambda x: tf.nn.log_poisson_loss(x, x),
    "nn.ctc_loss": lambda x: tf.nn.ctc_loss([[1]], x[:, None], [1], [4], blank_index=0),
    "nn.ctc_greedy_decoder": lambda x: tf.nn.ctc_greedy_decoder(x[:, None], [4])[1],
    "nn.ctc_beam_search_decoder": lambda x: tf.nn.ctc_beam_search_decoder(x[:, None], [4])[1],
    "where": lambda x: tf.where(x > 0.5, x, 0.0),
    "gather_nd": lambda x: tf.gather_nd(x, [[0, 1]]),
    "tensor_scatter_nd_add": lambda x: tf.tensor_scatter_nd_add(x, [[0]], x[:1]),
    "roll": lambda x: tf.roll(x, 1, 0),
    "pad": lambda x: tf.pad(x, [[1, 1], [0, 0]], "REFLECT"),
    "cast": lambda x: tf.cast(x * 9, tf.int32),
    "ragged product": lambda x: tf.matmul(
        tf.RaggedTensor.from_tensor(x[None], ragged_rank=1), tf.ones([1, 4, 2])
    ).to_tensor(),
    "sparse.add": lambda x: tf.sparse.reduce_sum(
        tf.sparse.add(tf.sparse.from_dense(x), tf.sparse.from_dense(x))
    ),
    "sparse product with float32": lambda x: tf.sparse.sparse_dense_matmul(
        tf.sparse.from_dense(tf.ones([4, 4])), x, adjoint_b=True
    ),
    "sparse matrices": lambda x: csr_product(tf.stop_gradient(x)),
    "sparse product": lambda x: tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(x), x),
}
GROUPS = {
    "elementwise": ELEMENTWISE,
    "pairs": PAIRS,
    "reductions": REDUCTIONS,
    "matrices": MATRICES,
    "images": IMAGES,
    "others": OTHERS,
}
# XLA has no kernel for them, or none for their gradients, in float32 either.
NOT_IN_XLA = {
    *("math.bessel_i0", "math.bessel_i1", "math.special.dawsn", "math.special.expint"),
    *("math.special.fresnel_cos", "math.special.fresnel_sin", "math.special.spence"),
    *("math.special.bessel_j0", "math.special.bessel_j1", "math.special.bessel_k0"),
    *("math.special.bessel_k1", "math.reduce_euclidean_norm", "math.segment_sum"),
    *("math.segment_mean", "math.segment_max", "math.segment_min", "math.segment_prod"),
    *("linalg.expm", "linalg.tridiagonal_solve", "nn.dilation2d", "image.resize bicubic"),
    *("image.crop_and_resize", "nn.ctc_greedy_decoder", "nn.ctc_beam_search_decoder"),
    *("ragged product", "sparse product", "sparse.add"),
    *("sparse product with float32", "sparse matrices"),
}

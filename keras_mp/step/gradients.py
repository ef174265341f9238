"""The arithmetic of loss scaling: scales, unscales, casts and packs gradients.

RFC 293, "LossScaleOptimizer Overview". This module needs TensorFlow only. A gradient is a tensor, a
`tf.IndexedSlices` (which stays sparse) or None (which stays None).
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import scaled_losses
from keras_mp.support import kept_casts
from keras_mp.support.autograph import allow_conversion, do_not_convert
from keras_mp.support.dtypes import is_low

Gradient = tf.Tensor | tf.IndexedSlices | None

# From this many values on, the arithmetic costs more than the call of an operation (measured on 2
# cores).
MANY = 2**13


def convert(gradients: Any, widens: bool = False) -> list[Gradient]:
    """Converts the values of a flat iterable to gradients.

    Args:
        gradients: iterable of tensors, arrays, `tf.IndexedSlices` and None.
        widens: bool. Whether those in 16 bits are cast to float32: small ones would be lost if they
            were unscaled in 16 bits. Defaults to False.

    Returns:
        list of gradients.

    Raises:
        TypeError: a value is something else, or `gradients` is not flat.
    """
    is_one = tf.is_tensor(gradients) or isinstance(gradients, (str, dict))
    flat: Any = None if is_one or not isinstance(gradients, Iterable) else list(gradients)
    if flat is None or any(isinstance(each, (list, tuple, dict, str)) for each in flat):
        raise TypeError(
            "A gradient must be a tensor, a tf.IndexedSlices or None, in a flat list. "
            f"Received: {flat or gradients!r} (of type {type(gradients)})"
        )
    are_ready = (tf.Tensor, tf.IndexedSlices, type(None))
    ready = [g if isinstance(g, are_ready) else tf.convert_to_tensor(g) for g in flat]
    return [
        cast(g, tf.float32) if widens and g is not None and is_low(g.dtype) else g for g in ready
    ]


def scale_loss(loss: tf.Tensor, scaled_by: tf.Tensor) -> tf.Tensor:
    """Multiplies a loss by the loss scale.

    Args:
        loss: float tensor of any shape. A float16 or bfloat16 loss is cast to float32 first, since
            `2**16`, an ordinary loss scale, is infinite in float16.
        scaled_by: float32 scalar tensor.

    Returns:
        The scaled loss, in float32, or in float64 if `loss` is.

    Raises:
        TypeError: `loss` is not a floating-point tensor.
    """
    is_one = not (loss is None or isinstance(loss, (list, tuple, dict)))
    loss = tf.convert_to_tensor(loss) if is_one else loss
    if not (is_one and loss.dtype.is_floating):
        raise TypeError(
            "Only a floating-point loss can be scaled, which is one tensor, or a callable that "
            "returns one; add several losses up before scaling them. "
            f"Received: loss={loss!r} (of type {type(loss)})"
        )
    if loss.dtype.size < tf.float32.size:
        loss = tf.cast(loss, tf.float32)
    scaled = loss * tf.cast(scaled_by, loss.dtype)
    scaled_losses.thread.noted.note_loss(scaled)
    return scaled


def map_loss(function: Callable[[tf.Tensor], tf.Tensor], loss: Any) -> Any:
    """Applies a function to a loss: now, or when a callable loss is called."""
    if tf.is_tensor(loss) or not callable(loss):
        return function(loss)  # pyright: ignore[reportArgumentType]
    user_loss = allow_conversion(loss)
    return do_not_convert(lambda: function(user_loss()))


def scale(
    gradients: Sequence[Gradient], number: tf.Tensor | None, *, divides: bool = False
) -> list[Any]:
    """Multiplies gradients by a number, each in its own dtype.

    Args:
        gradients: sequence of gradients.
        number: float32 scalar tensor; None leaves them as they are.
        divides: bool. Whether they are divided instead: bitwise if the number is a power of two,
            else within one unit in the last place. float32 has to hold its reciprocal.

    Returns:
        list of gradients.
    """
    if number is None:
        return list(gradients)

    @functools.cache
    def factor(dtype: tf.DType) -> tf.Tensor:
        factor = tf.cast(number, dtype)
        return 1 / factor if divides else factor  # A product takes half the time of a quotient.

    def multiply(values: tf.Tensor) -> tf.Tensor:
        dtype = values.dtype
        # A loss scale above 65504 has no finite float16 value, so gradients of low precision are
        # multiplied in float32.
        if dtype.size < tf.float32.size:
            return tf.cast(tf.cast(values, tf.float32) * factor(tf.float32), dtype)
        # In eager the raw operation takes less than half of the operator's time.
        return tf.raw_ops.Mul(x=values, y=factor(dtype))

    return [map_values(multiply, gradient) for gradient in gradients]


unscale = functools.partial(scale, divides=True)


def cast(gradient: Any, dtype: tf.DType) -> Any:
    """Casts a gradient to a dtype."""

    def to_dtype(values: tf.Tensor) -> tf.Tensor:
        # The dtype only serves a sum in 16 bits: the result is cast back, and what overflows must
        # do so although XLA leaves pairs of casts out.
        is_rounded = values.dtype == tf.float32 and is_low(dtype)
        return kept_casts.to_16_bits(values, dtype) if is_rounded else tf.cast(values, dtype)

    return map_values(to_dtype, gradient)


def pack(
    gradients: Sequence[Gradient],
) -> tuple[list[Any], Callable[[list[Any]], list[Gradient]]]:
    """Joins small gradients of one dtype, so that one operation handles them all.

    Args:
        gradients: sequence of gradients.

    Returns:
        tuple of a list of gradients without None, in which large and sparse ones are as they were,
        and of a function that turns such a list back into one gradient for each of `gradients`.
    """
    groups = joined({i: each for i, each in enumerate(gradients) if each is not None})
    # Joined ones are complete when the backward pass ends. Replicas send the first ones last.
    groups.sort(key=len, reverse=True)

    def unpack(packed: list[Any]) -> list[Gradient]:
        # One constant for each shape instead of each gradient makes graphs smaller.
        constant = functools.cache(lambda shape: tf.constant(shape, tf.int32))
        unpacked: dict[int, Any] = {}
        for group, values in zip(groups, packed, strict=True):
            parts = [values]
            if len(group) > 1:
                shapes: list[Any] = [tuple(gradient.shape) for gradient in group.values()]
                parts = tf.split(values, [math.prod(shape) for shape in shapes])
                parts = map(tf.reshape, parts, map(constant, shapes))
            unpacked.update(zip(group, parts))
        return [unpacked.get(i) for i in range(len(gradients))]

    return [concat(list(group.values())) for group in groups], unpack


def checked_pairs(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Checks the pairs that are to be applied, before anything is changed.

    Args:
        pairs: iterable of (gradient, variable) pairs.

    Returns:
        list of pairs of gradients, as `convert` returns them, and variables.

    Raises:
        TypeError: the items are not pairs, or a second element is not a variable.
        ValueError: no variable has a gradient, or the call is in a cross-replica context.
    """
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Gradients are applied in a replica context: call this inside the function that is "
            "passed to `strategy.run`."
        )
    pairs = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or pair[1] is None or isinstance(pair[1], _NO_VARIABLES):
            raise TypeError(
                "Expected (gradient, variable) pairs, such as zip(gradients, variables). "
                f"Received: {pair!r}"
            )
    gradients, variables = convert(g for g, _ in pairs), [v for _, v in pairs]
    if pairs and all(g is None for g in gradients):
        raise ValueError(
            "No gradients provided for any variable. Is the loss computed from them, under the "
            f"tape? Received: None for each of {[v.name for v in variables]}"
        )
    return list(zip(gradients, variables, strict=True))


_NO_VARIABLES = (tf.Tensor, tf.IndexedSlices, float, int, str)


def joined(gradients: dict[int, Any]) -> list[dict[int, Any]]:
    """Groups gradients by their numbers: small tensors of one dtype, and each other.

    Calling an operation for a small one alone would cost more than the arithmetic.
    """
    groups: dict[str | int, dict[int, Any]] = {}
    for i, gradient in gradients.items():
        size = gradient.shape.num_elements() if isinstance(gradient, tf.Tensor) else None
        is_small = size is not None and size < MANY
        # A DType would equal a number.
        groups.setdefault(gradient.dtype.name if is_small else i, {})[i] = gradient
    return list(groups.values())


def concat(gradients: list[Any]) -> Any:
    """Returns one gradient alone, or joins the values of several tensors end to end."""
    if len(gradients) == 1:
        return gradients[0]
    flat = tf.constant([-1])
    return tf.concat([tf.reshape(tensor, flat) for tensor in gradients], 0)


def map_values(fn: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    """Applies a function to the values of a gradient, which stays sparse, or None."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(fn(gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else fn(gradient)


class ScalingTape(tf.GradientTape):
    """A tape that differentiates scaled targets, and unscales their gradients.

    A `LossScaleGradientTape` computes with it. An optimizer that clips the gradient of each example
    while it computes the gradients needs them unscaled: with an unscaled loss and this tape, it
    gets them so.

    Args:
        tape: `tf.GradientTape`, which shares its recording with this one.
        loss_scale: float32 scalar tensor.
    """

    # A slot, since both tapes share one `__dict__`.
    __slots__ = ("_loss_scale",)

    def __init__(self, tape: tf.GradientTape, loss_scale: tf.Tensor) -> None:
        self.__dict__ = vars(tape)
        self._loss_scale = loss_scale

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Computes gradients as `tf.GradientTape.gradient` does.

        `jacobian` calls it, too.
        """
        of_targets = output_gradients
        if of_targets is None:
            of_targets = tf.nest.map_structure(tf.ones_like, target)
        flat = scale(convert(tf.nest.flatten(of_targets)), self._loss_scale)
        scaled = tf.nest.pack_sequence_as(of_targets, flat)
        computed = super().gradient(target, sources, scaled, *args, **kwargs)
        flat = unscale(tf.nest.flatten(computed), self._loss_scale)
        return tf.nest.pack_sequence_as(computed, flat)

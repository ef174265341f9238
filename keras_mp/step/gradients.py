"""The arithmetic of loss scaling: scales and unscales gradients.

RFC 293, "LossScaleOptimizer Overview". This module needs TensorFlow only. A gradient is a tensor, a
`tf.IndexedSlices` (which stays sparse) or None (which stays None).
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import scaled_losses
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
    widen = functools.partial(tf.cast, dtype=tf.float32)
    return [
        map_values(widen, g) if widens and is_low(getattr(g, "dtype", None)) else g for g in ready
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


def checked_pairs(pairs: Iterable[tuple[Any, Any]], may_be_empty: bool = True) -> list[Any]:
    """Checks the pairs that are to be applied, before anything is changed.

    Args:
        pairs: iterable of (gradient, variable) pairs.
        may_be_empty: bool. Whether there may be no pairs at all. Defaults to True.

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
    if all(g is None for g in gradients) and (pairs or not may_be_empty):
        raise ValueError(
            "No gradients provided for any variable. Is the loss computed from them, under the "
            f"tape? Received: no gradient of {[v.name for v in variables]}"
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


def of_verdict(verdict: tf.Tensor) -> tf.Tensor:
    """Returns a number that is summed and tested with gradients: NaN for False."""
    return tf.where(verdict, 0.0, float("nan"))

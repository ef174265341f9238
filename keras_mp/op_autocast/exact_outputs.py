"""Computes a 16-bit tensor as the last layer of a model would in float32.

It goes from the tensor back to one matrix product or convolution: along activations for
probabilities, a bias, and operations that only move numbers. One factor of the product is an
activation, which stays in 16 bits; the other one is a weight, which does not. So the result, and
its gradients, are those that the layer with this product has with `output_dtype="float32"`.
`kernels/again_in_float32.py` knows how a tensor was made. If keras_mp has already computed it in
float32, in the place of a kernel, this module looks through the casts around it.

This module needs TensorFlow only.
"""

from typing import Any

import tensorflow as tf

from keras_mp.hooks import reach
from keras_mp.hooks.reach import Region
from keras_mp.kernels.again_in_float32 import PRODUCTS, Made, how_made
from keras_mp.op_autocast import context_manager
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION

_MOVES = op_table.ops("identities", "reshapes", "views", "moves")
_ADDITIONS = frozenset({"AddV2", "BiasAdd"})
_ACTIVATIONS = op_table.ops("softmax") | {"Sigmoid"}
# A separable convolution is two products with nothing between them.
_FIRST_OF_TWO = op_table.ops("convolutions") & {"DepthwiseConv2dNative"}


class ExactOutputs:
    """Tensors in float32, each one tensor to all that were computed from it."""

    def __init__(self) -> None:
        self._results: dict[int, tf.Tensor | None] = {}
        # An id is that of one object as long as this lives.
        self._kept: list[Any] = []

    def of(self, tensor: Any) -> tf.Tensor | None:
        """Returns what a tensor would be if float32 had made it.

        None means that it is not known.

        Args:
            tensor: a tensor in 16 bits that was made in reach.
        """
        if not _is_floating(tensor):
            return None
        if id(tensor) not in self._results:
            self._kept.append(tensor)
            self._results[id(tensor)] = self._compute(tensor)
        return self._results[id(tensor)]

    def _compute(self, tensor: Any) -> tf.Tensor | None:
        made = how_made(tensor)
        if made is None or (tensor.dtype == tf.float32 and not made.is_decided):
            return None
        if made.op == "Cast":
            source = made.inputs[0]
            if source.dtype in LOW_PRECISION:
                return self.of(source)
            if source.dtype != tf.float32:
                return None
            exact = self.of(source) if made.is_decided else None
            return source if exact is None else exact
        if made.op in PRODUCTS:
            dtype = reach.current() or tensor.dtype
            with context_manager.entered(Region(dtype, gradients_only=True)):
                return _again(made, tf.nest.map_structure(self._factor, made.inputs))
        if made.op in _ADDITIONS:
            return self._with_bias(made)
        if made.op not in _MOVES and made.op not in _ACTIVATIONS:
            return None
        inputs = tf.nest.map_structure(self.of, made.inputs)
        if made.op in _MOVES and all(each is None for each in tf.nest.flatten(inputs)):
            return None
        result = _again(made, tf.nest.map_structure(_or_wide, inputs, made.inputs))
        if hasattr(tensor, "_keras_logits"):
            result._keras_logits = _or_wide(inputs[0], made.inputs[0])
        return result

    def _with_bias(self, made: Made) -> tf.Tensor | None:
        weights = [_weight(each) for each in made.inputs]
        if sum(each is None for each in weights) != 1:
            return None  # A sum of two results, such as a residual, is one in 16 bits.
        pairs = zip(made.inputs, weights)
        inputs = [self.of(each) if weight is None else weight for each, weight in pairs]
        return None if any(each is None for each in inputs) else _again(made, inputs)

    def _factor(self, value: Any) -> Any:
        """Returns a factor of a product in float32. An activation was in 16 bits."""
        made = how_made(value)
        if made is not None and made.op in _FIRST_OF_TWO:
            exact = self.of(value)
        elif made is not None and made.is_decided and _is_widening(made):
            exact = self._factor(made.inputs[0])
        else:
            exact = _weight(value)
        return _or_wide(exact, value)


def _weight(value: Any) -> tf.Tensor | None:
    """Returns the float32 tensor that one was only cast from, or None.

    A weight is such a tensor.
    """
    if not isinstance(value, tf.Tensor):
        wide = _wide(value)  # of a variable, which casts itself no longer
        return wide if _is_floating(wide) and wide.dtype == tf.float32 else None
    made = how_made(value)
    if made is None:
        return None
    if _is_widening(made):
        return _weight(made.inputs[0])
    if made.op == "Cast":
        is_float32 = made.inputs[0].dtype == tf.float32
        return made.inputs[0] if is_float32 and not made.is_decided else None
    if made.op not in _MOVES:
        return None
    before = [_weight(each) if _is_floating(each) else each for each in made.inputs]
    return None if any(each is None for each in before) else _again(made, before)


def _is_widening(made: Made) -> bool:
    return made.op == "Cast" and made.inputs[0].dtype in LOW_PRECISION


def _is_floating(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype in (*LOW_PRECISION, tf.float32)


def _again(made: Made, inputs: list[Any]) -> Any:
    return made.result_among(made.again(inputs))


def _or_wide(exact: tf.Tensor | None, value: Any) -> Any:
    return _wide(value) if exact is None else exact


def _wide(value: Any) -> Any:
    if isinstance(value, tf.Variable) or hasattr(value, "__tf_tensor__"):
        value = tf.convert_to_tensor(value)
    is_low = isinstance(value, tf.Tensor) and value.dtype in LOW_PRECISION
    return tf.cast(value, tf.float32) if is_low else value

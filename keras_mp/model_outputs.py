"""Outputs of a model in float32, though its layers compute in 16 bits.

A model that no other layer calls returns float32 to the program. A cast would only widen numbers
that have been rounded. So while such a model runs, the results of matrix products, of softmax and
of sigmoids, and of what moves or biases them, are noted with the way in which they were made. If
one of them is an output of the model, it is made again in float32, as by a layer with
`output_dtype="float32"`. In a graph nothing is left of the one in 16 bits, which nobody uses; in
eager the last product is computed twice. All other outputs are cast. Gradients with respect to an
output are those of both (`kernels/returned_outputs.py`).

This module needs TensorFlow only.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp import kernels, raw_inputs
from keras_mp.kernels import replaced, returned_outputs
from keras_mp.kernels import softmax_and_cross_entropy as fusion
from keras_mp.op_autocast import context_manager
from keras_mp.support import objects, op_table
from keras_mp.support.attributes import replaced as with_attribute
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.support.once import once
from keras_mp.support.regions import Region

_CAST, _PRODUCT, _MOVE, _ADDITION, _ACTIVATION = "cast", "product", "move", "addition", "activation"
_OPS = {
    _CAST: op_table.ops("casts"),
    _PRODUCT: op_table.ops("matrix products", "convolutions", "transposed convolutions"),
    _MOVE: op_table.ops("identities", "reshapes", "views", "moves"),
    _ADDITION: frozenset({"AddV2", "BiasAdd"}),
    _ACTIVATION: op_table.ops("softmax") | {"Sigmoid"},
}
# A separable convolution is two products with nothing between them.
_FIRST_OF_TWO = op_table.ops("convolutions") & {"DepthwiseConv2dNative"}


class _Origin(NamedTuple):
    """How a 16-bit tensor was made.

    Attributes:
        kind: a key of `_OPS`.
        op: str. The operation.
        function: TensorFlow's function.
        args: its positional arguments.
        kwargs: its other arguments.
    """

    kind: str
    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """Returns all arguments by their names, without that of the operation, which is taken."""
        call = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        return {**call.arguments, "name": None}

    def inputs(self) -> list[Any]:
        """Returns the arguments, and those in lists."""
        return tf.nest.flatten(self.arguments())


class _Notes(threading.local):
    """Whether results are noted in this thread."""

    are_taken = False


_notes = _Notes()


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Context manager for the call of a model whose outputs may be computed again."""
    _install()
    with with_attribute(_notes, "are_taken", True):
        yield


def note_policy(outputs: Any, policy: Any) -> None:
    """Notes the policy of the layer that made a tensor; the innermost layer is the first to.

    Args:
        outputs: what a layer returns.
        policy: its dtype policy.
    """
    if not _notes.are_taken:
        return
    of_layer: list[Any] = [outputs] if isinstance(outputs, tf.Tensor) else tf.nest.flatten(outputs)
    for output in of_layer:
        if _is_low(output) and not hasattr(output, "_keras_mp_policy"):
            output._keras_mp_policy = policy


def widened(outputs: Any, is_to_be: Callable[[Any], bool]) -> Any:
    """Returns the outputs of a model, with float32 in the place of 16 bits.

    Args:
        outputs: structure of tensors and anything else. Objects that hold tensors, such as
            distributions, become others that hold float32.
        is_to_be: tells whether an output is to be float32; takes the policy of the layer that made
            it, or None if that is not known.
    """
    exact: dict[int, Any] = {}

    def widen(output: Any) -> Any:
        is_ragged = isinstance(output, tf.RaggedTensor | tf.SparseTensor)
        if not _is_low(output) and not (is_ragged and output.dtype in LOW_PRECISION):
            return output
        if not is_to_be(getattr(output, "_keras_mp_policy", None)):
            return output
        # A layer for raw data has rounded it.
        result: Any = raw_inputs.before_rounding(output)
        if not _is_float32(result):
            origin, result = _origin(output), _exact(output, exact)
            if result is None:
                result = fusion.cast(output, "float32")
                returned_outputs.note(result, output, is_cast=True)
            elif origin is not None and origin.kind != _CAST:  # Else it was computed from `result`.
                returned_outputs.note(result, output, is_cast=False)
        if hasattr(output, "_keras_mask"):
            result._keras_mask = output._keras_mask
        return result

    before = [outputs] if isinstance(outputs, tf.Tensor) else tf.nest.flatten(outputs)
    after = [objects.widened(each, widen) for each in before]
    for output in filter(_is_low, before):
        # Who keeps an output keeps none of the tensors from which it was made.
        vars(output).pop("_keras_mp_made", None)
    if isinstance(outputs, tf.Tensor):
        return after[0]
    if all(old is new for old, new in zip(before, after)):
        return outputs
    return tf.nest.pack_sequence_as(outputs, after)


def exact(output: Any) -> tf.Tensor | None:
    """Returns what a 16-bit tensor would be if float32 had made it; None if that is not known.

    Args:
        output: a tensor that a layer has made, while a model of ours runs.
    """
    return _exact(output, {})


def _is_float32(value: object) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype == tf.float32


def _is_low(value: object) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype in LOW_PRECISION


def _exact(tensor: Any, known: dict[int, Any]) -> tf.Tensor | None:
    """Returns what a 16-bit tensor would be if float32 had made it; None if that is not known.

    Args:
        tensor: the tensor.
        known: the results by the ids of tensors, so that an output is one tensor to all others.
    """
    if id(tensor) not in known:
        known[id(tensor)] = _computed(tensor, known)
    return known[id(tensor)]


def _computed(tensor: Any, known: dict[int, Any]) -> tf.Tensor | None:
    origin = _origin(tensor)
    if origin is None:
        return None
    low = [each for each in origin.inputs() if _is_low(each)]
    if origin.kind == _CAST:
        return _weight(tensor)
    if origin.kind == _PRODUCT:
        with context_manager.entered(Region(tensor.dtype, gradients_only=True)):
            return _again(origin, [_factor(each, known) for each in low])
    wide = [_weight(each) for each in low]
    if origin.kind == _ADDITION and sum(each is None for each in wide) != 1:
        return None  # A sum of two results, such as a residual, is one in 16 bits.
    wide = [_exact(each, known) if weight is None else weight for each, weight in zip(low, wide)]
    if origin.kind == _ACTIVATION:
        return _with_logits(_again(origin, wide), tensor, low[0], wide[0])
    is_known = all if origin.kind == _ADDITION else any
    return _again(origin, wide) if is_known(each is not None for each in wide) else None


def _with_logits(
    result: tf.Tensor, low: tf.Tensor, low_logits: tf.Tensor, logits: tf.Tensor | None
) -> tf.Tensor:
    if hasattr(low, "_keras_logits"):
        vars(result)["_keras_logits"] = (
            tf.cast(low_logits, tf.float32) if logits is None else logits
        )
    return result


def _origin(tensor: object) -> _Origin | None:
    return getattr(tensor, "_keras_mp_made", None)


def _weight(tensor: object) -> tf.Tensor | None:
    """Returns the float32 tensor that a 16-bit one is only a cast of, such as that of a weight."""
    origin = _origin(tensor)
    if origin is None or origin.kind not in (_CAST, _MOVE):
        return None
    if origin.kind == _CAST:
        wide = [each for each in origin.inputs() if isinstance(each, tf.Tensor)]
        return wide[0] if wide and wide[0].dtype == tf.float32 else None
    before = [_weight(each) for each in origin.inputs() if _is_low(each)]
    if any(each is None for each in before):
        return None
    result = _again(origin, before)  # of a variable, which casts itself no longer
    return result if result.dtype == tf.float32 else None


def _factor(tensor: tf.Tensor, known: dict[int, Any]) -> tf.Tensor | None:
    """Returns a factor of a product in float32, or None if it was in 16 bits."""
    origin = _origin(tensor)
    is_first_of_two = origin is not None and origin.op in _FIRST_OF_TWO
    return _exact(tensor, known) if is_first_of_two else _weight(tensor)


def _again(origin: _Origin, wide: list[tf.Tensor | None]) -> Any:
    """Calls the function with float32 tensors, those of the list where it has them."""
    remaining = iter(wide)

    def widen(value: Any) -> Any:
        known = next(remaining) if _is_low(value) else None
        if known is not None:
            return known
        if isinstance(value, tf.Variable) or hasattr(value, "__tf_tensor__"):
            value = tf.convert_to_tensor(value)
        return tf.cast(value, tf.float32) if _is_low(value) else value

    return origin.function(**tf.nest.map_structure(widen, origin.arguments()))


def _noting(kind: str, op: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    @do_not_convert
    def call(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        if _notes.are_taken and _is_low(result):
            result._keras_mp_made = _Origin(kind, op, own, args, kwargs)
        return result

    return call


@once
def _install() -> None:
    """Lets functions of TensorFlow note what they make, while a model of ours runs."""
    # What is noted is the whole of a kernel's replacement, and none of the casts inside of it.
    kernels.install()
    replacements = []
    for kind, ops in _OPS.items():
        for op in sorted(ops):
            public = getattr(tf.raw_ops, op, None)
            if public is not None:
                own = replaced.in_its_module(public)
                noting = _noting(kind, op, own)
                replacements.append(replaced.Replacement(own, (own.__name__,), noting))
    replaced.replace(replacements)

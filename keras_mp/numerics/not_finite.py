"""The first operation of the forward pass whose result is not finite, and its cause."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.models.layer_paths import native_variable
from keras_mp.numerics import origins
from keras_mp.numerics import results as causes
from keras_mp.numerics.records import LARGEST, SMALLEST
from keras_mp.numerics.results import Observed, Said
from keras_mp.numerics.traced_step import (
    BAD,
    COUNTS,
    ZEROS,
    TracedStep,
    health,
    in_float32,
    is_narrow,
    not_finite_of,
    static_value,
)
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.kept_casts import as_float32

OVERFLOW, UNDERFLOW, IN_ANY_DTYPE = HAZARDS = (
    "an overflow in the forward pass",
    "an underflow in the forward pass",
    "a result that is not finite in any dtype",
)

# Operations that may return zero, or infinity, of numbers that are neither; cheap to compute again.
_AGAIN = op_table.ops(
    *("sums over axes", "products over axes", "multiplications", "squares", "powers", "divisions"),
    *("squared differences", "reciprocals", "exponentials", "logarithms", "softmax", "casts"),
)

_PRODUCTS = op_table.ops("matrix products", "matrix products into another dtype", "convolutions")

_DIVISIONS = op_table.ops("divisions")
_DIVIDING = _DIVISIONS | op_table.ops("reciprocals", "logarithms")
# From where a number is lost to where that matters.
_HANDING_ON = op_table.ops("casts", "identities", "reshapes", "moves", "views", "roots")

# From an input to where it is cast.
_ON_THE_WAY = op_table.ops("casts", "identities", "reshapes")


class Result(NamedTuple):
    """What an operation of the forward pass returns first, without its graph.

    Attributes:
        at: the operation.
        type: str. Its type.
        dtype: str. Of the result.
        is_narrow: whether the result, or what it is made of, has 16 bits or fewer.
        where: str. Its layer.
        inputs: of the results that it takes, their places in the list of all.
        constant: its first number, if it is a constant; else None.
        is_before: whether it was made before the backward pass.
    """

    at: Any
    type: str
    dtype: str
    is_narrow: bool = False
    where: str = ""
    inputs: Sequence[int] = ()
    constant: Any = None
    is_before: bool = True


class _Cause(NamedTuple):
    """Where numbers stop being finite.

    Attributes:
        results: all of the forward pass.
        origin: the place of the one where it began.
        ended: that of the one whose numbers are counted: the first with NaN, if there is one.
        number: float. How many of them are not finite.
        begun: float. How many of the first one are not.
        are: str. What they are, and what follows from it.
        zeros: array. How many numbers of each result are 0 in 16 bits only.
        bad: array. How many numbers of each are not finite in float32 either.
    """

    results: Sequence[Result]
    origin: int
    ended: int
    number: float
    begun: float
    are: str
    zeros: np.ndarray
    bad: np.ndarray

    def counted(self, where: str = "") -> str:
        """Returns words for how many numbers are not finite."""
        return f"{self.number:,.0f} results of {self.results[self.ended].type}{where} {self.are}."


class NotFinite(Observed):
    """The results of a forward pass, of which some may not be finite.

    Args:
        results: all of them.
        inputs: words for the inputs of the batch.
        **numbers: tensors, as `said` takes them.
    """

    def __init__(self, results: Sequence[Result], inputs: Sequence[str], **numbers: Any) -> None:
        self.results, self.inputs, self.numbers = results, inputs, numbers

    def said(
        self,
        loss: float,
        gradients: float,
        counts: np.ndarray,
        exact: np.ndarray,
        sizes: np.ndarray,
        largest_weight: float,
    ) -> Said | None:
        """Names the first operation of the forward pass that is not finite, and its cause.

        Args:
            loss: how many of the numbers that the step returns are not finite.
            gradients: how many numbers of gradients are not.
            counts: array of how many numbers of each result are -inf, inf and NaN.
            exact: array of how many are 0 in 16 bits only, and not finite in float32 either.
            sizes: array with a 0, and the largest magnitude of each input.
            largest_weight: the largest magnitude of a weight.
        """
        results, takes = self.results, [each.inputs for each in self.results]
        nan, is_bad = counts[:, 2] > 0, counts.sum(axis=1) > 0
        is_spoilt = gradients and any(nan[i] and each.is_before for i, each in enumerate(results))
        if not loss and not is_spoilt:
            return None
        computed = [i for i, each in enumerate(results) if each.constant is None and is_bad[i]]
        ended = next(iter(causes.begun(takes, nan, nan) or computed), None)
        if ended is None:
            return None
        origin = causes.begun(takes, is_bad, np.arange(len(results)) == ended)[0]
        number = counts[ended, 2] if nan[ended] else counts[ended].sum()
        what, begun = "NaN" if nan[ended] else "infinite", counts[origin].sum()
        are = f"are {what}; so is the loss"
        if not loss:
            are = f"are {what}; so are gradients, though the loss is not"
        found = _Cause(results, origin, ended, number, begun, are, *exact.T)
        return (
            _constant(found, is_bad)
            or _large_input(found, dict(zip(self.inputs, map(float, sizes[1:]))))
            or _underflow(found)
            or _too_large(found, float(sizes.max()), largest_weight)
        )


def results(step: TracedStep) -> Iterator[Observed]:
    """The loss is infinite or NaN: where did that begin?

    A pooling with the maximum drops NaN, and so the loss may be finite. The gradients are not.
    """
    operations = [o for o in step.forward if o.outputs and o.outputs[0].dtype.is_floating]
    # A metric of Keras 3 may return its variable, which is not of this graph.
    ends = [each for each in tf.nest.flatten(step.result) if isinstance(each, tf.Tensor)]
    ends += [step.scaling.inputs[0]] if step.scaling is not None else []
    ends = [tensor for tensor in ends if tensor.dtype.is_floating]
    if not ends or not any(is_narrow(each.outputs[0].dtype) for each in operations):
        return
    inputs = dict(_named_inputs(step.batch.x))
    weights = [native_variable(weight) for weight in step.model.trainable_weights]
    counts = tf.stack([health(operation.outputs[0]) for operation in operations])
    unknown = tf.one_hot(ZEROS, COUNTS, tf.constant(np.inf, tf.float64))
    exact = tf.stack([_exactly(step, operation, unknown) for operation in operations])
    zeros = tf.maximum(counts[:, ZEROS] - exact[:, ZEROS], 0.0)  # in 16 bits only
    yield NotFinite(
        list(_results(step, operations)),
        list(inputs),
        loss=not_finite_of(ends),
        gradients=not_finite_of(step.backward_products),
        counts=counts[:, BAD],
        exact=tf.cast(tf.stack([zeros, tf.reduce_sum(exact[:, BAD], 1)], 1), tf.int64),
        sizes=_largest(inputs.values()),
        largest_weight=tf.reduce_max(_largest(weights)),
    )


def _results(step: TracedStep, operations: Sequence[tf.Operation]) -> Iterator[Result]:
    places = {operation: i for i, operation in enumerate(operations)}
    # Operations after the backward pass use gradients, which overflow as is planned.
    before = {
        *itertools.takewhile(lambda o: not origins.is_of_backward_pass(o.name), step.operations)
    }
    for operation in operations:
        output, constant = operation.outputs[0], static_value(operation.outputs[0])
        yield Result(
            operation,
            operation.type,
            output.dtype.name,
            any(is_narrow(each.dtype) for each in (*operation.inputs, output)),
            step.where(operation),
            [places[each.op] for each in operation.inputs if each.op in places],
            None if constant is None else next(iter(np.ravel(constant)), 0.0),
            operation in before,
        )


def _largest(values: Iterable[Any]) -> tf.Tensor:
    """Returns the largest magnitude of each tensor, with a 0 before them."""
    return tf.stack([0.0, *(tf.reduce_max(tf.abs(as_float32(each))) for each in values)])


def _exactly(step: TracedStep, operation: tf.Operation, unknown: tf.Tensor) -> tf.Tensor:
    """Returns the `health` of what an operation in 16 bits, or of such numbers, is in float32.

    Products are computed again where something divides by them.

    Args:
        step: TracedStep.
        operation: of the forward pass.
        unknown: what is returned of one that is not computed again.
    """
    output = operation.outputs[0]
    is_low = any(is_narrow(each.dtype) for each in (*operation.inputs, output))
    is_tried = operation.type in _AGAIN and output.shape.num_elements() != 1
    if operation.type in _PRODUCTS:
        is_tried = step.leads_to(output, _DIVIDING, _HANDING_ON, steps=4) is not None
    exact = in_float32(operation) if is_low and is_tried else None
    return unknown if exact is None else health(exact)


def _constant(cause: _Cause, is_bad: np.ndarray) -> Said | None:
    """A constant that 16 bits do not hold."""
    results, origin = cause.results, cause.results[cause.origin]
    dtype = tf.as_dtype(origin.dtype)
    if origin.constant is None or not is_narrow(dtype):
        return None
    # What computes with it first; a cast of it is a constant, too.
    known, user = {cause.origin}, results[cause.ended]
    for i in range(cause.origin + 1, cause.ended + 1):
        if is_bad[i] and known.intersection(results[i].inputs):
            if results[i].constant is None:
                user = results[i]
                break
            known.add(i)
    where = results[cause.ended].where
    counted = cause.counted(f" in {where}" if where != user.where else "")
    return Said(
        user.at,
        "a constant that is infinite in 16 bits",
        f"A constant, such as the -1e9 of a mask, is {origin.constant} in {dtype.name}, and with "
        f"it {counted}",
        causes.CURES["a constant"].format(largest=dtype.max, lowest=dtype.min),
    )


def _named_inputs(x: Any) -> Iterator[tuple[str, tf.Tensor]]:
    """Yields the floating-point inputs of a batch, with words for them."""
    parts: Any = x.items() if isinstance(x, Mapping) else enumerate(tf.nest.flatten(x))
    if tf.is_tensor(x):
        parts = [(None, x)]
    for key, each in parts:
        if tf.is_tensor(each) and each.dtype.is_floating:
            yield "the model's input" + ("" if key is None else f" {key!r}"), each


def _large_input(cause: _Cause, largest: Mapping[str, float]) -> Said | None:
    """An input is cast to 16 bits, which do not hold it."""
    cast = source = cause.results[cause.origin]
    if cast.type != "Cast" or cast.dtype not in LOW_PRECISION_NAMES:
        return None
    while source.type in _ON_THE_WAY and source.inputs:
        source = cause.results[source.inputs[0]]
    dtype = tf.as_dtype(cast.dtype)
    beyond = {name: size for name, size in largest.items() if size > float(dtype.max)}
    if source.type != "Placeholder" or not beyond:
        return None
    name, size = max(beyond.items(), key=lambda each: each[1])
    return Said(
        name,
        "an input that 16 bits do not hold",
        f"It reaches {size:.3g}, and {dtype.name}, to which it is cast, has no larger number than "
        f"{dtype.max:.5g}: {cause.counted()}",
        causes.CURES["an input"],
    )


def _underflow(cause: _Cause) -> Said | None:
    """Numbers became 0 in 16 bits, and something divides by them or takes their logarithm."""
    results, origin = cause.results, cause.results[cause.origin]
    if origin.is_narrow and not cause.bad[cause.origin]:
        return None
    # A quotient is not finite because of its divisor. The nearest come first.
    behind = dict.fromkeys(origin.inputs[-1:] if origin.type in _DIVISIONS else origin.inputs)
    for i in (waiting := list(behind)):
        zeros, maker = cause.zeros[i], results[i]
        if zeros:
            return Said(
                maker.at,
                UNDERFLOW,
                f"{zeros:,} results of {maker.type} are 0 in {maker.dtype}, whose smallest number "
                f"is {SMALLEST[maker.dtype]:.1g}, but not in float32. {origin.type} of them is the "
                f"first result that is not finite: {cause.counted().replace('results of', 'of')}",
                causes.CURES["too small"].format(dtype=maker.dtype),
            )
        # What is computed in float32 can only have been lost where it was made.
        if origin.is_narrow or maker.type in _HANDING_ON:
            waiting += [j for j in dict.fromkeys(maker.inputs) if j not in behind]
            behind.update(dict.fromkeys(maker.inputs))
    return None


def _too_large(cause: _Cause, largest_input: float, largest_weight: float) -> Said | None:
    """The result is beyond the dtype; or for the most part it is not finite in float32 either."""
    origin, in_float32 = cause.results[cause.origin], int(cause.bad[cause.origin])
    in_every_dtype = not origin.is_narrow or 2 * in_float32 >= cause.begun
    if in_every_dtype and (origin.constant is not None or origin.type == "Placeholder"):
        return None
    first = "is the first operation with finite inputs whose results are not finite"
    if in_every_dtype:
        why = f"{origin.type} {first}, in float32, too: {cause.counted()}"
        return Said(origin.at, IN_ANY_DTYPE, why, causes.CURES["not finite"])
    largest = LARGEST.get(origin.dtype)
    beyond = f" (the largest {origin.dtype} is {largest:,.0f})" if largest else ""
    more, cure = "", causes.CURES["too large"]
    if origin.dtype == "float16":
        cure = causes.CURES["too large for float16"]
    if in_float32:
        more = f" {in_float32:,} of its results are not finite in float32, either."
        cure = causes.CURES["too large for float32"]
    later = cure[0].lower() + cure[1:]
    if not largest_weight < causes.LARGE_WEIGHTS:
        more += f" Weights reach {largest_weight:.3g}."
        cure = causes.CURES["weights"] + later
    elif largest_input >= causes.LARGE_INPUTS:
        more += f" The inputs of the batch reach {largest_input:.3g}."
        cure = causes.CURES["inputs"] + later
    why = f"{origin.type} in {origin.dtype} {first}{beyond}: {cause.counted()}{more}"
    return Said(origin.at, OVERFLOW, why, cure)

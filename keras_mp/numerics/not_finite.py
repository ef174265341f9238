"""The first operation of the forward pass whose result is not finite, and its cause."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    ZEROS,
    TracedStep,
    before,
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


class _Cause(NamedTuple):
    """Where numbers stop being finite.

    Attributes:
        origin: the operation where it began.
        ended: that whose numbers are counted: the first with NaN, if there is one.
        number: float. How many of them are not finite.
        begun: float. How many of the first one are not.
        are: str. What they are, and what follows from it.
        spoilt: the operations whose results are not finite, in their order.
        zeros: dict of operations, and how many numbers of each are 0 in 16 bits only.
        bad: dict of operations, and how many numbers of each are not finite in float32 either.
    """

    origin: tf.Operation
    ended: tf.Operation
    number: float
    begun: float
    are: str
    spoilt: Sequence[tf.Operation]
    zeros: Mapping[tf.Operation, int]
    bad: Mapping[tf.Operation, int]

    def counted(self, where: str = "") -> str:
        """Returns words for how many numbers are not finite."""
        return f"{self.number:,.0f} results of {self.ended.type}{where} {self.are}."


@dataclasses.dataclass
class NotFinite(Observed):
    """The results of a forward pass, of which some may not be finite.

    Attributes:
        where: function that returns the layer of an operation.
        operations: those of the forward pass with floating-point results, and whether each was made
            before the backward pass.
        again: those of them that are computed again in float32.
        inputs: words for the inputs of the batch.
        numbers: dict of tensors, as `said` takes them.
    """

    where: Callable[[tf.Operation], str]
    operations: Mapping[tf.Operation, bool]
    again: Sequence[tf.Operation]
    inputs: Sequence[str]
    numbers: dict[str, Any]

    def said(
        self,
        loss: float,
        gradients: float,
        counts: np.ndarray,
        exact: np.ndarray,
        sizes: np.ndarray,
        weights: np.ndarray,
    ) -> Said | None:
        """Names the first operation of the forward pass that is not finite, and its cause.

        Args:
            loss: how many of the numbers that the step returns are not finite.
            gradients: how many numbers of gradients are not.
            counts: array with the `health` of each result.
            exact: the same of those that were computed again.
            sizes: the largest magnitude of each input.
            weights: the largest magnitude of each weight.
        """
        operations, infinities = list(self.operations), counts[:, BAD]
        nan, is_bad = infinities[:, 2] > 0, infinities.sum(axis=1) > 0
        if not loss and not (gradients and (nan & list(self.operations.values())).any()):
            return None
        places = {operation: i for i, operation in enumerate(operations)}
        takes = [[places[o] for o in _made_of(each) if o in places] for each in operations]
        spoilt = [operations[i] for i in np.flatnonzero(is_bad)]
        computed = [places[each] for each in spoilt if _constant_of(each) is None]
        ended = next(iter(causes.begun(takes, nan, nan) or computed), None)
        if ended is None:
            return None
        origin = causes.begun(takes, is_bad, np.arange(len(operations)) == ended)[0]
        number = infinities[ended, 2] if nan[ended] else infinities[ended].sum()
        are = f"are {'NaN' if nan[ended] else 'infinite'}; so is the loss"
        if not loss:
            are = are.replace("so is the loss", "so are gradients, though the loss is not")
        wide = dict(zip(self.again, exact, strict=True))
        zeros = {o: int(counts[places[o], ZEROS] - of[ZEROS]) for o, of in wide.items()}
        bad = {each: int(of[BAD].sum()) for each, of in wide.items()}
        at, begun = (operations[origin], operations[ended]), infinities[origin].sum()
        found = _Cause(*at, number, begun, are, spoilt, zeros, bad)
        return (
            _constant(found, self.where)
            or _large_input(found, dict(zip(self.inputs, map(float, sizes))))
            or _underflow(found)
            or _too_large(found, sizes.max(initial=0.0), weights.max(initial=0.0))
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
    # Operations after the backward pass use gradients, which overflow as is planned.
    before_gradients = {
        *itertools.takewhile(lambda o: not origins.is_of_backward_pass(o.name), step.operations)
    }
    inputs = dict(_named_inputs(step.batch.x))
    again = {each: in_float32(each) for each in operations if _is_tried(step, each)}
    again = {each: exact for each, exact in again.items() if exact is not None}
    numbers = {
        "loss": not_finite_of(ends),
        "gradients": not_finite_of(step.backward_products),
        "counts": tf.stack([health(operation.outputs[0]) for operation in operations]),
        "exact": [*map(health, again.values())],
        "sizes": [*map(_largest, inputs.values())],
        "weights": [_largest(native_variable(each)) for each in step.model.trainable_weights],
    }
    made = {each: each in before_gradients for each in operations}
    yield NotFinite(step.where, made, list(again), list(inputs), numbers)


def _largest(values: Any) -> tf.Tensor:
    return tf.reduce_max(tf.abs(as_float32(values)))


def _made_of(operation: tf.Operation) -> list[tf.Operation]:
    return [each.op for each in operation.inputs]


def _constant_of(operation: tf.Operation) -> np.ndarray | None:
    return static_value(operation.outputs[0])


def _has_16_bits(operation: tf.Operation) -> bool:
    """Whether its result, or what it is made of, has 16 bits or fewer."""
    return any(is_narrow(each.dtype) for each in (*operation.inputs, operation.outputs[0]))


def _is_tried(step: TracedStep, operation: tf.Operation) -> bool:
    """Whether it is computed again in float32. Products are where something divides by them."""
    output = operation.outputs[0]
    is_tried = operation.type in _AGAIN and output.shape.num_elements() != 1
    if operation.type in _PRODUCTS:
        is_tried = step.leads_to(output, _DIVIDING, _HANDING_ON, steps=4) is not None
    return is_tried and _has_16_bits(operation)


def _constant(cause: _Cause, where: Callable[[tf.Operation], str]) -> Said | None:
    """A constant that 16 bits do not hold."""
    value, dtype = _constant_of(cause.origin), cause.origin.outputs[0].dtype
    if value is None or not is_narrow(dtype):
        return None
    # What computes with it first; a cast of it is a constant, too.
    known, user = {cause.origin}, cause.ended
    for each in cause.spoilt:
        if not known.isdisjoint(_made_of(each)):
            if _constant_of(each) is None:
                user = each
                break
            known.add(each)
    layer = where(cause.ended)
    counted = cause.counted(f" in {layer}" if layer != where(user) else "")
    return Said(
        user,
        "a constant that is infinite in 16 bits",
        f"A constant, such as the -1e9 of a mask, is {next(iter(np.ravel(value)), 0.0)} in "
        f"{dtype.name}, and with it {counted}",
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
    dtype = cause.origin.outputs[0].dtype
    if cause.origin.type != "Cast" or dtype.name not in LOW_PRECISION_NAMES:
        return None
    beyond = {name: size for name, size in largest.items() if size > float(dtype.max)}
    if before(cause.origin.outputs[0], _ON_THE_WAY).op.type != "Placeholder" or not beyond:
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
    origin, is_narrow_there = cause.origin, _has_16_bits(cause.origin)
    if is_narrow_there and not cause.bad.get(origin):
        return None
    # A quotient is not finite because of its divisor. The nearest come first.
    makers = _made_of(origin)
    behind = dict.fromkeys(makers[-1:] if origin.type in _DIVISIONS else makers)
    for maker in (waiting := list(behind)):
        if (zeros := cause.zeros.get(maker, 0)) > 0:
            dtype = maker.outputs[0].dtype.name
            return Said(
                maker,
                UNDERFLOW,
                f"{zeros:,} results of {maker.type} are 0 in {dtype}, whose smallest number "
                f"is {SMALLEST[dtype]:.1g}, but not in float32. {origin.type} of them is the "
                f"first result that is not finite: {cause.counted().replace('results of', 'of')}",
                causes.CURES["too small"].format(dtype=dtype),
            )
        # What is computed in float32 can only have been lost where it was made.
        if is_narrow_there or maker.type in _HANDING_ON:
            waiting += [each for each in _made_of(maker) if each not in behind]
            behind.update(dict.fromkeys(_made_of(maker)))
    return None


def _too_large(cause: _Cause, largest_input: float, largest_weight: float) -> Said | None:
    """The result is beyond the dtype; or for the most part it is not finite in float32 either."""
    origin, in_float32 = cause.origin, cause.bad.get(cause.origin, 0)
    in_every_dtype = not _has_16_bits(origin) or 2 * in_float32 >= cause.begun
    is_given = origin.type == "Placeholder" or _constant_of(origin) is not None
    if in_every_dtype and is_given:
        return None
    first = "is the first operation with finite inputs whose results are not finite"
    if in_every_dtype:
        why = f"{origin.type} {first}, in float32, too: {cause.counted()}"
        return Said(origin, IN_ANY_DTYPE, why, causes.CURES["not finite"])
    dtype = origin.outputs[0].dtype.name
    largest = LARGEST.get(dtype)
    beyond = f" (the largest {dtype} is {largest:,.0f})" if largest else ""
    more, cure = "", causes.CURES["too large"]
    if dtype == "float16":
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
    why = f"{origin.type} in {dtype} {first}{beyond}: {cause.counted()}{more}"
    return Said(origin, OVERFLOW, why, cure)

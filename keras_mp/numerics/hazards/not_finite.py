"""The first operation of the forward pass whose result is not finite, and its cause."""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.models.layer_paths import native_variable
from keras_mp.numerics import causes
from keras_mp.numerics.distances import LARGEST, SMALLEST
from keras_mp.numerics.graphs import origins
from keras_mp.numerics.hazards.observed import Observed, Said
from keras_mp.numerics.hazards.traced_step import (
    TracedStep,
    count,
    health,
    in_float32,
    is_narrow,
    static_value,
    widened,
)
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION

# Operations that may return zero, or infinity, of numbers that are neither; cheap to compute again.
_AGAIN = op_table.ops(
    *("sums over axes", "products over axes", "multiplications", "squares", "powers", "divisions"),
    *("squared differences", "reciprocals", "exponentials", "logarithms", "softmax", "casts"),
)

_DIVISIONS = op_table.ops("divisions")

# From an input to where it is cast.
_ON_THE_WAY = op_table.ops("casts", "identities", "reshapes")


class _Again(NamedTuple):
    """What an operation does in float32, on the same inputs.

    Attributes:
        zeros: int. How many results are 0 in 16 bits only.
        bad: int. How many are not finite in float32 either.
    """

    zeros: int = 0
    bad: int = 0


class _Cause(NamedTuple):
    """Where numbers stop being finite.

    Attributes:
        origin: the operation where it began.
        user: the first one that computes with it.
        ended: the one whose results are NaN, or `user` if none are.
        number: int. How many are.
        in_words: "NaN" or "infinite".
        so: str. What follows from it.
    """

    origin: tf.Operation
    user: tf.Operation
    ended: tf.Operation
    number: int
    in_words: str
    so: str = ""


def numbers(step: TracedStep) -> Iterator[Observed]:
    """The loss is infinite or NaN: where did that begin?

    A pooling with the maximum drops NaN, and so the loss may be finite. The gradients are not.
    """
    operations = [o for o in step.forward if o.outputs and o.outputs[0].dtype.is_floating]
    # A metric of Keras 3 may return its variable, which is not of this graph.
    results = [each for each in tf.nest.flatten(step.result) if isinstance(each, tf.Tensor)]
    results += [step.scaling.inputs[0]] if step.scaling is not None else []
    results = [tensor for tensor in results if tensor.dtype.is_floating]
    if not results or not any(is_narrow(each.outputs[0].dtype) for each in operations):
        return
    inputs = dict(_named_inputs(step.batch.x))
    weights = [native_variable(weight) for weight in step.model.trainable_weights]
    again = [(each, exact) for each in operations if (exact := _exactly(each)) is not None]
    gradients = [health(gradient) for gradient in step.backward_products]
    # Operations after the backward pass use gradients, which overflow as is planned.
    before = set(
        itertools.takewhile(lambda o: not origins.is_of_backward_pass(o.name), step.operations)
    )
    yield Observed(
        operations[0],
        step=step,
        operations=operations,
        is_before=np.array([operation in before for operation in operations]),
        again=[operation for operation, _ in again],
        inputs=list(inputs),
        bad=tf.stack([health(result) for result in results]),
        counts=tf.stack([health(operation.outputs[0]) for operation in operations]),
        of_gradients=tf.reduce_sum(gradients, 0) if gradients else tf.zeros([5], tf.float64),
        exact=tf.stack([exact for _, exact in again]) if again else tf.zeros([0, 2], tf.int64),
        sizes=_largest(inputs.values()),
        largest_weight=tf.reduce_max(_largest(weights)),
    )


def judge(
    step: TracedStep,
    operations: list[tf.Operation],
    is_before: np.ndarray,
    again: list[tf.Operation],
    inputs: list[str],
    bad: np.ndarray,
    counts: np.ndarray,
    of_gradients: np.ndarray,
    exact: np.ndarray,
    sizes: np.ndarray,
    largest_weight: float,
) -> Said | None:
    """Names the first operation of the forward pass that is not finite, and its cause."""
    is_lost = bad[:, 2:].any()
    if not is_lost and not (counts[is_before, 4].any() and of_gradients[2:].any()):
        return None
    pairs = zip(counts[:, 2] + counts[:, 3], counts[:, 4])
    found = _first(operations, {op.outputs[0].ref(): pair for op, pair in zip(operations, pairs)})
    if found is None or found.origin in step.explained:
        return None
    so = "so is the loss" if is_lost else "so are gradients, though the loss is not"
    found = found._replace(so=so)
    in_float32 = {each: _Again(*map(int, row)) for each, row in zip(again, exact)}
    named = dict(zip(inputs, map(float, sizes[1:])))
    return (
        _constant(step, found)
        or _large_input(found, named)
        or _underflow(found, in_float32)
        or _in_every_dtype(found, in_float32)
        or _overflow(found, float(sizes.max()), largest_weight)
    )


def _largest(values: Iterable[Any]) -> tf.Tensor:
    """Returns the largest magnitude of each tensor, with a 0 before them."""
    return tf.stack([0.0, *(tf.reduce_max(tf.abs(widened(each))) for each in values)])


def _first(
    operations: list[tf.Operation], counts: Mapping[Hashable, tuple[int, int]]
) -> _Cause | None:
    """Finds the first operation that returns NaN, and its cause."""

    def of(tensor: tf.Tensor) -> tuple[int, int]:
        return counts.get(tensor.ref(), (0, 0))

    # By operation, where an infinity began, and what computed with it first, if it is a constant.
    infinite: dict[tf.Operation, tuple[tf.Operation, tf.Operation]] = {}
    first = None
    for operation in operations:
        i, n = of(operation.outputs[0])
        if not i and not n:
            continue
        begun = next((infinite[t.op] for t in operation.inputs if t.op in infinite), None)
        origin, user = begun or (operation, operation)
        if static_value(user.outputs[0]) is not None:
            user = operation
        if i:
            infinite[operation] = origin, user
            if first is None and static_value(operation.outputs[0]) is None:
                first = _Cause(origin, user, user, int(i), "infinite")
        if n and not any(of(tensor)[1] for tensor in operation.inputs):
            return _Cause(origin, user, operation, int(n), "NaN")
    return first


def _exactly(operation: tf.Operation) -> tf.Tensor | None:
    """Counts what an operation in 16 bits, or one that takes such numbers, returns in float32."""
    output = operation.outputs[0]
    is_low = any(is_narrow(each.dtype) for each in (*operation.inputs, output))
    if not is_low or operation.type not in _AGAIN or output.shape.num_elements() == 1:
        return None
    exact = in_float32(operation)
    if exact is None:
        return None
    zeros = count((widened(output) == 0) & (exact != 0) & tf.math.is_finite(exact))
    return tf.stack([zeros, count(~tf.math.is_finite(exact))])


def _constant(step: TracedStep, cause: _Cause) -> Said | None:
    """A constant that 16 bits do not hold."""
    constant, dtype = static_value(cause.origin.outputs[0]), cause.origin.outputs[0].dtype
    if constant is None or not is_narrow(dtype):
        return None
    user, ended = cause.user, cause.ended
    place = f" in {step.where(ended)}" if step.where(ended) != step.where(user) else ""
    return Said(
        "a constant that is infinite in 16 bits",
        f"A constant, such as the -1e9 of a mask, is {np.ravel(constant)[0]} in {dtype.name}, "
        f"and with it {cause.number:,} results of {ended.type}{place} are {cause.in_words}; "
        f"{cause.so}.",
        causes.CURES["a constant"].format(largest=dtype.max, lowest=dtype.min),
        at=user,
    )


def _named_inputs(x: Any) -> Iterator[tuple[str, tf.Tensor]]:
    """Yields the floating-point inputs of a batch, with words for them."""
    if tf.is_tensor(x):
        named: Iterable[tuple[str, Any]] = [("the model's input", x)]
    elif isinstance(x, Mapping):
        named = ((f"the model's input {key!r}", each) for key, each in x.items())
    else:
        named = ((f"the model's input {i}", each) for i, each in enumerate(tf.nest.flatten(x)))
    for name, each in named:
        if tf.is_tensor(each) and each.dtype.is_floating:
            yield name, each


def _large_input(cause: _Cause, largest: Mapping[str, float]) -> Said | None:
    """An input is cast to 16 bits, which do not hold it."""
    cast = source = cause.origin
    if cast.type != "Cast":
        return None
    while source.type in _ON_THE_WAY and source.inputs:
        source = source.inputs[0].op
    dtype = cast.outputs[0].dtype
    beyond = {name: size for name, size in largest.items() if size > float(dtype.max)}
    if dtype not in LOW_PRECISION or source.type != "Placeholder" or not beyond:
        return None
    name, size = max(beyond.items(), key=lambda each: each[1])
    return Said(
        "an input that 16 bits do not hold",
        f"It reaches {size:.3g}, and {dtype.name}, to which it is cast, has no larger number than "
        f"{dtype.max:.5g}: {cause.number:,} results of {cause.ended.type} are {cause.in_words}; "
        f"{cause.so}.",
        causes.CURES["an input"],
        at=cast,
        where=name,
    )


def _underflow(cause: _Cause, in_float32: Mapping[tf.Operation, _Again]) -> Said | None:
    """Numbers became 0 in 16 bits, and something divides by them or takes their logarithm."""
    if not in_float32.get(cause.origin, _Again()).bad:
        return None
    inputs = list(cause.origin.inputs)
    # A quotient is not finite because of its divisor.
    tensors = inputs[-1:] if cause.origin.type in _DIVISIONS else inputs
    visited = {cause.origin}
    while tensors:
        makers = [each for each in dict.fromkeys(t.op for t in tensors) if each not in visited]
        for maker in makers:
            zeros = in_float32.get(maker, _Again()).zeros
            if zeros:
                dtype = maker.outputs[0].dtype
                return Said(
                    "an underflow in the forward pass",
                    f"{zeros:,} results of {maker.type} are 0 in {dtype.name}, whose smallest "
                    f"number is {SMALLEST[dtype.name]:.1g}, but not in float32. "
                    f"{cause.origin.type} of them is the first result that is not finite: "
                    f"{cause.number:,} of {cause.ended.type} are {cause.in_words}; {cause.so}.",
                    causes.CURES["too small"].format(dtype=dtype.name),
                    at=maker,
                )
        visited.update(makers)
        tensors = [tensor for maker in makers for tensor in maker.inputs]
    return None


def _in_every_dtype(cause: _Cause, in_float32: Mapping[tf.Operation, _Again]) -> Said | None:
    """The result is not finite in float32 either."""
    origin = cause.origin
    is_16_bits = any(is_narrow(t.dtype) for t in (*origin.inputs, origin.outputs[0]))
    if is_16_bits and not in_float32.get(origin, _Again()).bad:
        return None
    if static_value(origin.outputs[0]) is not None or origin.type == "Placeholder":
        return None
    return Said(
        "a result that is not finite in any dtype",
        f"{origin.type} is the first operation with finite inputs whose results are not finite, "
        f"in float32, too: {cause.number:,} results of {cause.ended.type} are {cause.in_words}; "
        f"{cause.so}.",
        causes.CURES["not finite"],
        at=origin,
    )


def _overflow(cause: _Cause, largest_input: float, largest_weight: float) -> Said | None:
    """The result is beyond the dtype."""
    origin = cause.origin
    dtype = origin.outputs[0].dtype
    if not is_narrow(dtype) and not any(is_narrow(t.dtype) for t in origin.inputs):
        return None
    largest = LARGEST.get(dtype.name)
    beyond = f" (the largest {dtype.name} is {largest:,.0f})" if largest else ""
    why = (
        f"{origin.type} in {dtype.name} is the first operation with finite inputs whose results "
        f"are not finite{beyond}: {cause.number:,} results of {cause.ended.type} are "
        f"{cause.in_words}; {cause.so}."
    )
    more, cure = causes.of_overflow(dtype.name, largest_weight, largest_input)
    why += more
    return Said("an overflow in the forward pass", why, cure, at=origin)

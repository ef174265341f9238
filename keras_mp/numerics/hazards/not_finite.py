"""The first operation of the forward pass whose result is not finite, and its cause."""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.layer_paths import native_variable
from keras_mp.numerics.distances import LARGE_INPUTS, LARGE_WEIGHTS, SMALLEST
from keras_mp.numerics.graphs import origins
from keras_mp.numerics.hazards.traced_step import (
    Suspect,
    TracedStep,
    count,
    health,
    in_float32,
    static_value,
    widened,
)
from keras_mp.numerics.results import Finding
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


def not_finite(traced: TracedStep) -> Suspect:
    """The loss is infinite or NaN; names the first such operation of the forward pass.

    A pooling with the maximum drops NaN, and so the loss may be finite. The gradients are not.
    """
    operations = [o for o in traced.forward if o.outputs and o.outputs[0].dtype.is_floating]
    outputs = [operation.outputs[0] for operation in operations]
    if not any(output.dtype in LOW_PRECISION for output in outputs):
        return None
    again = [(each, exact) for each in operations if (exact := _exactly(each)) is not None]
    inputs = list(_named_inputs(traced.batch.x))
    weights = [native_variable(weight) for weight in traced.model.trainable_weights]
    # A metric of Keras 3 may return its variable, which is not of this graph.
    tensors = [each for each in tf.nest.flatten(traced.result) if isinstance(each, tf.Tensor)]
    results = [tensor for tensor in tensors if tensor.dtype.is_floating]
    results += [traced.scaling.inputs[0]] if traced.scaling is not None else []
    if not results:
        return None
    gradients = [health(gradient) for gradient in traced.backward_products]
    # Operations after the backward pass use gradients, which overflow as is planned.
    before = set(
        itertools.takewhile(lambda o: not origins.is_of_backward_pass(o.name), traced.operations)
    )
    is_before = np.array([operation in before for operation in operations])
    bad, counts, of_gradients, exact, *sizes = yield (
        tf.stack([health(result) for result in results]),
        tf.stack([health(output) for output in outputs]),
        tf.reduce_sum(gradients, 0) if gradients else tf.zeros([5], tf.float64),
        tf.stack([exact for _, exact in again]) if again else tf.zeros([0, 2], tf.int64),
        tf.stack([0.0, *(tf.reduce_max(tf.abs(widened(x))) for _, x in inputs)]),
        tf.stack([0.0, *(tf.reduce_max(tf.abs(widened(w))) for w in weights)]),
    )
    is_lost = bad[:, 2:].any()
    if not is_lost and not (counts[is_before, 4].any() and of_gradients[2:].any()):
        return None
    pairs = zip(counts[:, 2] + counts[:, 3], counts[:, 4])
    found = _first(operations, {output.ref(): pair for output, pair in zip(outputs, pairs)})
    if found is None or found.origin in traced.explained:
        return None
    so = "so is the loss" if is_lost else "so are gradients, though the loss is not"
    found = found._replace(so=so)
    in_float32 = {each: _Again(*map(int, row)) for (each, _), row in zip(again, exact)}
    largest_input, largest_weight = (float(np.max(each)) for each in sizes)
    named = {name: float(size) for (name, _), size in zip(inputs, sizes[0][1:])}
    return (
        _constant(traced, found)
        or _large_input(traced, found, named)
        or _underflow(traced, found, in_float32)
        or _in_every_dtype(traced, found, in_float32)
        or _overflow(traced, found, largest_input, largest_weight)
    )


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
    is_low = any(each.dtype in LOW_PRECISION for each in (*operation.inputs, output))
    if not is_low or operation.type not in _AGAIN or output.shape.num_elements() == 1:
        return None
    exact = in_float32(operation)
    if exact is None:
        return None
    zeros = count((output == 0) & (exact != 0) & tf.math.is_finite(exact))
    return tf.stack([zeros, count(~tf.math.is_finite(exact))])


def _constant(traced: TracedStep, cause: _Cause) -> Finding | None:
    """A constant that 16 bits do not hold."""
    constant, dtype = static_value(cause.origin.outputs[0]), cause.origin.outputs[0].dtype
    if constant is None or dtype not in LOW_PRECISION:
        return None
    user, ended = cause.user, cause.ended
    place = f" in {traced.where(ended)}" if traced.where(ended) != traced.where(user) else ""
    return traced.finding(
        user,
        "a constant that is infinite in 16 bits",
        f"A constant, such as the -1e9 of a mask, is {np.ravel(constant)[0]} in {dtype.name}, "
        f"and with it {cause.number:,} results of {ended.type}{place} are {cause.in_words}; "
        f"{cause.so}.",
        f"Use a number that the dtype can represent: at most {dtype.max:.5g}. For a mask, use its "
        f"lowest number, {dtype.min:.5g}, or tf.where on the result.",
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


def _large_input(traced: TracedStep, cause: _Cause, largest: Mapping[str, float]) -> Finding | None:
    """An input is cast to 16 bits, which do not hold it."""
    cast = source = cause.origin
    while source.type in _ON_THE_WAY and source.inputs:
        source = source.inputs[0].op
    dtype = cast.outputs[0].dtype
    beyond = {name: size for name, size in largest.items() if size > float(dtype.max)}
    if cast.type != "Cast" or source.type != "Placeholder" or not beyond:
        return None
    name, size = max(beyond.items(), key=lambda each: each[1])
    return Finding(
        "an input that 16 bits do not hold",
        name,
        traced.line(cast),
        f"It reaches {size:.3g}, and {dtype.name}, to which it is cast, has no larger number than "
        f"{dtype.max:.5g}: {cause.number:,} results of {cause.ended.type} are {cause.in_words}; "
        f"{cause.so}.",
        "Normalize the inputs first, in float32, for example with tf.keras.layers.Normalization "
        "or Rescaling as the first layer.",
    )


def _underflow(
    traced: TracedStep, cause: _Cause, in_float32: Mapping[tf.Operation, _Again]
) -> Finding | None:
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
                return traced.finding(
                    maker,
                    "an underflow in the forward pass",
                    f"{zeros:,} results of {maker.type} are 0 in {dtype.name}, whose smallest "
                    f"number is {SMALLEST[dtype.name]:.1g}, but not in float32. "
                    f"{cause.origin.type} of them is the first result that is not finite: "
                    f"{cause.number:,} of {cause.ended.type} are {cause.in_words}; {cause.so}.",
                    "Compute it in float32, or scale its inputs up. An epsilon must be a number "
                    f"that {dtype.name} can represent.",
                )
        visited.update(makers)
        tensors = [tensor for maker in makers for tensor in maker.inputs]
    return None


def _in_every_dtype(
    traced: TracedStep, cause: _Cause, in_float32: Mapping[tf.Operation, _Again]
) -> Finding | None:
    """The result is not finite in float32 either."""
    origin = cause.origin
    is_16_bits = any(t.dtype in LOW_PRECISION for t in (*origin.inputs, origin.outputs[0]))
    if is_16_bits and not in_float32.get(origin, _Again()).bad:
        return None
    if static_value(origin.outputs[0]) is not None or origin.type == "Placeholder":
        return None
    return traced.finding(
        origin,
        "a result that is not finite in any dtype",
        f"{origin.type} is the first operation with finite inputs whose results are not finite, "
        f"in float32, too: {cause.number:,} results of {cause.ended.type} are {cause.in_words}; "
        f"{cause.so}.",
        "Keep its inputs where its results are finite: for example, with tf.maximum(x, 1e-4) "
        "before a division or a logarithm.",
    )


def _overflow(
    traced: TracedStep, cause: _Cause, largest_input: float, largest_weight: float
) -> Finding | None:
    """The result is beyond the dtype."""
    origin = cause.origin
    dtype = origin.outputs[0].dtype
    if dtype not in LOW_PRECISION and not any(t.dtype in LOW_PRECISION for t in origin.inputs):
        return None
    beyond = f" (the largest {dtype.name} is {dtype.max:,.0f})" if dtype == tf.float16 else ""
    why = (
        f"{origin.type} in {dtype.name} is the first operation with finite inputs whose results "
        f"are not finite{beyond}: {cause.number:,} results of {cause.ended.type} are "
        f"{cause.in_words}; {cause.so}."
    )
    cure = "Compute it in float32, or scale its inputs down."
    if dtype == tf.float16:
        cure = "Compute it in float32, scale its inputs down, or use mixed_bfloat16."
    if not largest_weight < LARGE_WEIGHTS:
        why += f" Weights reach {largest_weight:.3g}."
        cure = (
            "Training has diverged: lower the learning rate, and restart from earlier weights. If "
            f"such weights are intended: {cure[0].lower()}{cure[1:]}"
        )
    elif largest_input >= LARGE_INPUTS:
        why += f" The inputs of the batch reach {largest_input:.3g}."
        cure = (
            "Normalize the inputs first, in float32, for example with "
            f"tf.keras.layers.Normalization. Or: {cure[0].lower()}{cure[1:]}"
        )
    return traced.finding(origin, "an overflow in the forward pass", why, cure)

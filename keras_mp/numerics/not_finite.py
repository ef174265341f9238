"""The first operation of the forward pass whose result is not finite, and its cause."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.models.layer_paths import native_variable
from keras_mp.numerics import origins, traced_step
from keras_mp.numerics import results as causes
from keras_mp.numerics.records import smallest_of
from keras_mp.numerics.results import CURES, Finding, Observed
from keras_mp.numerics.traced_step import BAD, ZEROS, TracedStep, health, is_narrow
from keras_mp.support import op_table
from keras_mp.support.dtypes import LOW_PRECISION
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
# From an input to where it is cast.
_ON_THE_WAY = op_table.ops("casts", "identities", "reshapes")
# From where a number is lost to where that matters.
_HANDING_ON = _ON_THE_WAY | op_table.ops("moves", "views", "roots")


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

    def said(self, loss: float, gradients: float, **of: np.ndarray) -> Finding | None:
        """Names the first operation of the forward pass that is not finite, and its cause.

        Args:
            loss: how many of the numbers that the step returns are not finite.
            gradients: how many numbers of gradients are not.
            **of: counts, the `health` of each result; exact, that of those that were computed
                again; sizes and weights, the largest magnitudes of each input and weight.
        """
        operations, infinities = list(self.operations), of["counts"][:, BAD]
        nan, is_bad = infinities[:, 2] > 0, infinities.sum(axis=1) > 0
        if not loss and not (gradients and (nan & list(self.operations.values())).any()):
            return None
        places = {operation: i for i, operation in enumerate(operations)}
        takes = [[places[o] for o in _made_of(each) if o in places] for each in operations]
        spoilt = zip(is_bad, operations, strict=True)
        is_given = np.array([bad and _constant_of(each) is not None for bad, each in spoilt])
        computed = np.flatnonzero(is_bad & ~is_given)
        ended = next(iter(causes.begun(takes, nan, nan) or computed.tolist()), None)
        if ended is None:
            return None
        origin, *_ = causes.begun(takes, is_bad, np.isin(np.arange(len(takes)), ended))
        users = (i for i in computed if is_given[takes[i]].any())
        number = infinities[ended, 2] if nan[ended] else infinities[ended].sum()
        at, last = operations[origin], operations[ended]
        so = "so is the loss" if loss else "so are gradients, though the loss is not"
        counted = f"{number:,.0f} results of {last.type} are "
        counted += f"{'NaN' if nan[ended] else 'infinite'}; {so}."
        zeros, exact = of["counts"][:, ZEROS], dict(zip(self.again, of["exact"], strict=True))
        lost = {each: int(zeros[places[each]] - wide[ZEROS]) for each, wide in exact.items()}
        in_float32 = int(exact[at][BAD].sum()) if at in exact else 0
        inputs = dict(zip(self.inputs, of["sizes"].tolist(), strict=True))
        given = [of[each].max(initial=0.0) for each in ("sizes", "weights")]
        return (
            _constant(at, operations[next(users, ended)], f"in {self.where(last)}, {counted}")
            or _large_input(at, inputs, counted)
            or _underflow(at, lost, in_float32, counted)
            or _too_large(at, infinities[origin].sum(), in_float32, given, counted)
        )


def results(step: TracedStep) -> Iterator[Observed]:
    """The loss is infinite or NaN: where did that begin?

    A pooling with the maximum drops NaN, and so the loss may be finite. The gradients are not.
    """
    operations = [o for o in step.forward if o.outputs and o.outputs[0].dtype.is_floating]
    # A metric of Keras 3 may return its variable, which is not of this graph.
    ends = [*tf.nest.flatten(step.result), *(step.scaling.inputs[:1] if step.scaling else ())]
    ends = [each for each in ends if isinstance(each, tf.Tensor) and each.dtype.is_floating]
    if not ends or not any(is_narrow(each.outputs[0].dtype) for each in operations):
        return
    # Operations after the backward pass use gradients, which overflow as is planned.
    is_before = lambda each: not origins.is_of_backward_pass(each.name)  # noqa: E731
    early = {*itertools.takewhile(is_before, step.operations)}
    inputs = dict(_named_inputs(step.batch.x))
    tried = {each: traced_step.in_float32(each) for each in operations if _is_tried(step, each)}
    again = {each: exact for each, exact in tried.items() if exact is not None}
    numbers = {
        "loss": traced_step.not_finite_of(ends),
        "gradients": traced_step.not_finite_of(step.backward_products),
        "counts": tf.stack([health(operation.outputs[0]) for operation in operations]),
        "exact": [*map(health, again.values())],
        "sizes": [*map(_largest, inputs.values())],
        "weights": [_largest(native_variable(each)) for each in step.model.trainable_weights],
    }
    made = {each: each in early for each in operations}
    yield NotFinite(step.where, made, list(again), list(inputs), numbers)


def _named_inputs(x: Any) -> Iterator[tuple[str, tf.Tensor]]:
    """Yields the floating-point inputs of a batch, with words for them."""
    parts: Any = [(None, x)] if tf.is_tensor(x) else enumerate(tf.nest.flatten(x))
    for key, each in x.items() if isinstance(x, Mapping) else parts:
        if tf.is_tensor(each) and each.dtype.is_floating:
            yield "the model's input" + ("" if key is None else f" {key!r}"), each


def _largest(values: Any) -> tf.Tensor:
    return tf.reduce_max(tf.abs(as_float32(values)))


def _made_of(operation: tf.Operation) -> list[Any]:
    return [each.op for each in operation.inputs]


def _constant_of(operation: tf.Operation) -> np.ndarray | None:
    return traced_step.static_value(operation.outputs[0])


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


def _constant(origin: tf.Operation, user: Any, counted: str) -> Finding | None:
    """A constant that 16 bits do not hold."""
    value, dtype = _constant_of(origin), origin.outputs[0].dtype
    if value is None or not is_narrow(dtype):
        return None
    why = (
        f"A constant, such as the -1e9 of a mask, is {next(iter(np.ravel(value)), 0.0)} in "
        f"{dtype.name}, and with it, {counted}"
    )
    cure = CURES["a constant"].format(largest=dtype.max, lowest=dtype.min)
    return Finding("a constant that is infinite in 16 bits", user, None, why, cure)


def _large_input(origin: tf.Operation, sizes: Mapping[str, float], counted: str) -> Finding | None:
    """An input is cast to 16 bits, which do not hold it."""
    tensor, dtype = origin.outputs[0], origin.outputs[0].dtype
    name, size = max(sizes.items(), key=lambda each: each[1], default=("", 0.0))
    is_cast = origin.type == "Cast" and dtype in LOW_PRECISION and size > float(dtype.max)
    if not is_cast or traced_step.before(tensor, _ON_THE_WAY).op.type != "Placeholder":
        return None
    why = (
        f"It reaches {size:.3g}, and {dtype.name}, to which it is cast, has no larger number than "
        f"{dtype.max:.5g}: {counted}"
    )
    return Finding("an input that 16 bits do not hold", name, None, why, CURES["an input"])


def _underflow(
    origin: tf.Operation, lost: Mapping[Any, int], in_float32: int, counted: str
) -> Finding | None:
    """Numbers became 0 in 16 bits, and something divides by them or takes their logarithm."""
    is_narrow_there = _has_16_bits(origin)
    if is_narrow_there and not in_float32:
        return None
    # A quotient is not finite because of its divisor. The nearest come first.
    behind = dict.fromkeys(_made_of(origin)[-1 if origin.type in _DIVISIONS else 0 :])
    for maker in (waiting := list(behind)):
        if lost.get(maker, 0) > 0:
            dtype = maker.outputs[0].dtype.name
            why = (
                f"{lost[maker]:,} results of {maker.type} are 0 in {dtype}, whose smallest number "
                f"is {smallest_of(dtype):.1g}, but not in float32. {origin.type} of them is the "
                f"first result that is not finite: {counted}"
            )
            cure = CURES["too small"].format(dtype=dtype)
            return Finding(UNDERFLOW, maker, None, why, cure)
        # What is computed in float32 can only have been lost where it was made.
        if is_narrow_there or maker.type in _HANDING_ON:
            waiting += [each for each in _made_of(maker) if each not in behind]
            behind.update(dict.fromkeys(_made_of(maker)))
    return None


def _too_large(
    origin: Any, begun: float, in_float32: int, given: Sequence[float], counted: str
) -> Finding | None:
    """The result is beyond the dtype; or for the most part it is not finite in float32 either."""
    made, (size, weight) = origin.outputs[0].dtype, given
    first = "is the first operation with finite inputs whose results are not finite"
    if not _has_16_bits(origin) or 2 * in_float32 >= begun:
        is_given = origin.type == "Placeholder" or _constant_of(origin) is not None
        why = f"{origin.type} {first}, in float32, too: {counted}"
        cure = CURES["not finite"]
        return None if is_given else Finding(IN_ANY_DTYPE, origin, None, why, cure)
    beyond = f"(the largest {made.name} is {made.max:.5g})"
    why = f"{origin.type} in {made.name} {first} {beyond}: {counted}"
    cure = CURES["too large for float16" if made == tf.float16 else "too large"]
    if in_float32:
        why += f" {in_float32:,} of its results are not finite in float32, either."
        cure = CURES["too large for float32"]
    if not weight < causes.LARGE_WEIGHTS:
        why += f" Weights reach {weight:.3g}."
        cure = CURES["weights"] + cure[0].lower() + cure[1:]
    elif size >= causes.LARGE_INPUTS:
        why += f" The inputs of the batch reach {size:.3g}."
        cure = CURES["inputs"] + cure[0].lower() + cure[1:]
    return Finding(OVERFLOW, origin, None, why, cure)

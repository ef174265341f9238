"""Runs a model forwards and backwards, and again call by call, on inputs that are given."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.layer_paths import native_variable
from keras_mp.numerics import batches
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.distances import UNIT_ROUNDOFF
from keras_mp.numerics.layer_calls import Call, RandomNumbers, Watch
from keras_mp.support import attributes, marks

LOSS = "loss"


class Run(NamedTuple):
    """What one run of a model left.

    Attributes:
        calls: list of Call, in the order in which they ended; the last one is that of the loss,
            unless the user's own function computes it.
        gradients: dict, of each call's position the gradients of the outputs that are floating
            point numbers, multiplied by the loss scale. None where an output has none.
        weights: dict, of each trainable weight its gradient, not multiplied any more.
        loss: float.
        loss_scale: float.
    """

    calls: list[Call]
    gradients: dict[tuple[int, ...], list[tf.Tensor | None]]
    weights: dict[str, tf.Tensor]
    loss: float
    loss_scale: float

    def is_finite(self) -> bool:
        """Whether all gradients are."""
        return all(np.isfinite(array(gradient)).all() for gradient in self.all_gradients())

    def all_gradients(self) -> list[tf.Tensor]:
        """Those of outputs and of weights, multiplied by the loss scale."""
        of_outputs = tf.nest.flatten(list(self.gradients.values()))
        return [each for each in (*of_outputs, *self.weights.values()) if each is not None]

    def weight_gradients(self) -> dict[str, np.ndarray]:
        """The gradients of weights as arrays, not multiplied any more, by name."""
        return {name: array(each) / self.loss_scale for name, each in self.weights.items()}


class HasLoss(Protocol):
    """A run whose loss scale may be too large."""

    @property
    def loss(self) -> float:
        """The loss, not multiplied by the loss scale."""
        ...

    def is_finite(self) -> bool:
        """Whether all gradients are."""
        ...


ScaledRun = TypeVar("ScaledRun", bound=HasLoss)


def run(
    model: tf.keras.Model,
    batch: Batch,
    loss: Callable[..., tf.Tensor],
    *,
    step: Callable[..., tf.Tensor] | None = None,
    numbers: RandomNumbers,
    training: bool = True,
    loss_scale: float = 1.0,
    change: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> Run:
    """Runs a model forwards and backwards, in eager, and puts back what that assigned.

    Args:
        model: of `tf.keras`.
        batch: Batch.
        loss: called with the model, the batch and what the model returned; returns a scalar.
        step: called with the model and the batch's `x` and `y`, in place of model and loss.
        numbers: shared by the runs that are to be compared.
        training: bool.
        loss_scale: the loss is multiplied by it.
        change: as for `Watch`.
    """
    watch = Watch(numbers, change)

    def of_prediction(prediction: Any) -> tf.Tensor:
        return loss(model, batch, prediction)

    of_prediction.kind = getattr(loss, "kind", LOSS)

    # The tape watches weights only: training computes no gradients of a model's inputs.
    # Training computes no gradients before the first trained weight, so these alone are watched. A
    # model that is not built yet makes them now.
    watched = named_weights(model).values() if model.built else ()
    with (
        as_it_was(model),
        tf.GradientTape(watch_accessed_variables=not model.built) as tape,
    ):
        tape.watch([native_variable(weight) for weight in watched])
        with watch.over(model):
            if step is not None:
                value = step(model, batch.x, batch.y)
            else:
                prediction = model(batch.x, training=training)
                value = watch.run(LOSS, of_prediction, of_prediction, prediction)
        _check_loss(value, LOSS if step is None else "step")
        scaled = tf.cast(value, tf.float32) * loss_scale
        weights = named_weights(model)
        outputs = [floating(call.outputs) for call in watch.calls]
        inputs = [floating((call.args, call.kwargs)) for call in watch.calls]
        found: Any = tape.gradient(scaled, [outputs, inputs, list(weights.values())])
        of_outputs, of_inputs, of_weights = found
    for call, values, gradients in zip(watch.calls, inputs, of_inputs):
        call.trained_through = {id(v) for v, g in zip(values, gradients) if g is not None}
    return Run(
        watch.calls,
        {call.position: each for call, each in zip(watch.calls, of_outputs)},
        {n: tf.convert_to_tensor(g) for n, g in zip(weights, of_weights) if g is not None},
        float(value),
        loss_scale,
    )


def run_at_a_good_scale(make: Callable[[float], ScaledRun], scale: float) -> ScaledRun:
    """Runs something at a loss scale, and at half of it until gradients do not overflow.

    Args:
        make: called with the loss scale; returns what has a `loss` and `is_finite`.
        scale: float. The first loss scale. It is not halved below 1.
    """
    while True:
        made = make(scale)
        if scale <= 1 or not math.isfinite(made.loss) or made.is_finite():
            return made
        scale = max(1.0, scale / 2)


def check_loss_scale(loss_scale: float | None) -> None:
    """Raises a ValueError if a loss scale is given and is below 1 or not finite."""
    if loss_scale is not None and not 1 <= loss_scale < math.inf:
        raise ValueError(
            f"Expected a loss scale that is at least 1. Received: loss_scale={loss_scale!r}"
        )


def _check_loss(value: Any, name: str) -> None:
    if not isinstance(value, tf.Tensor | tf.Variable) or value.shape.rank != 0:
        shape = f", of the shape {value.shape}" if hasattr(value, "shape") else ""
        raise ValueError(
            f"Expected `{name}` to return the loss, a scalar tensor. "
            f"Received: {type(value).__name__}{shape}"
        )


class Replay(NamedTuple):
    """What a layer made of inputs and of upstream gradients that it was given.

    Attributes:
        outputs: list of tensors, those that are floating point numbers.
        gradients: dict, by the name of an input or a weight: those that training computes.
    """

    outputs: list[tf.Tensor]
    gradients: dict[str, tf.Tensor]

    def forward(self) -> dict[str, np.ndarray]:
        """The outputs as arrays, by name."""
        return {f"output {i}": array(output) for i, output in enumerate(self.outputs)}

    def backward(self) -> dict[str, np.ndarray]:
        """The gradients as arrays, by name."""
        return {name: array(gradient) for name, gradient in self.gradients.items()}


def replay(
    call: Call,
    layer: tf.keras.layers.Layer,
    upstream: Sequence[tf.Tensor | None],
    *,
    numbers: RandomNumbers,
    dtype: str | None = None,
    move: Callable[[tf.Tensor], tf.Tensor] = lambda value: value,
    change: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> Replay:
    """Makes a call once more, with the same or with another layer.

    Args:
        call: what was called, with what.
        layer: what to call now.
        upstream: the gradients of its outputs.
        numbers: those that the call drew are drawn again.
        dtype: into which 16-bit numbers are cast first, and gradients last; None leaves them.
        move: called with each floating-point tensor that goes in, forwards and backwards.
        change: as for `Watch`.
    """

    def given(value: Any) -> Any:
        if not (isinstance(value, tf.Tensor) and value.dtype.is_floating):
            return value
        # Not the same object, whose gradient would be that of the run that it comes from.
        cast = tf.cast(value, dtype) if dtype and value.dtype.size < 4 else tf.identity(value)
        return marks.copy(value, move(cast))

    before = call.args, call.kwargs
    args, kwargs = tf.nest.map_structure(given, before)
    pairs = zip(tf.nest.flatten(before), tf.nest.flatten((args, kwargs)))
    inputs = [value for was, value in pairs if id(was) in call.trained_through]
    watch = Watch(numbers, change, call.position)
    with as_it_was(layer), tf.GradientTape() as tape:
        tape.watch(inputs)
        if hasattr(layer, "weights") or hasattr(layer, "call"):
            with watch.over(layer):
                returned = layer(*args, **kwargs)
        else:
            returned = layer(*args, **kwargs)
        outputs = floating(returned)
        weights = named_weights(layer)
    pairs = [
        (output, tf.cast(move(tf.cast(gradient, tf.float32)), output.dtype))
        for output, gradient in zip(outputs, upstream)
        if gradient is not None and gradient.shape == output.shape
    ]
    named = {f"input {i}": value for i, value in enumerate(inputs)} | weights
    if not pairs or not named:
        return Replay(outputs, {})
    found = tape.gradient(
        [output for output, _ in pairs], list(named.values()), [gradient for _, gradient in pairs]
    )
    return Replay(
        outputs,
        {n: tf.convert_to_tensor(g) for n, g in zip(named, found) if g is not None},
    )


@contextlib.contextmanager
def as_it_was(layer: Any) -> Iterator[None]:
    """Puts back what the block assigns to the variables of a layer or model."""
    variables = list(getattr(layer, "variables", ()))
    before = [(variable, variable.numpy()) for variable in variables if hasattr(variable, "assign")]
    try:
        with without_metrics(layer):
            yield
    finally:
        for variable, value in before:
            if not np.array_equal(variable.numpy(), value, equal_nan=value.dtype.kind == "f"):
                variable.assign(value)


@contextlib.contextmanager
def without_metrics(model: Any) -> Iterator[None]:
    """Leaves the metrics of a model or layer as they are, whatever the block shows them.

    To compute the loss that a model is compiled with updates some of them, which fails outside of
    replicas if they belong to a strategy with several.
    """
    metrics = list(getattr(model, "metrics", ()))
    try:
        with contextlib.ExitStack() as stack:
            for metric in metrics:
                stack.enter_context(attributes.replaced(metric, "update_state", _ignore))
            yield
    finally:
        # The first time that a loss is computed, its metrics are made.
        known = {id(metric) for metric in metrics}
        for metric in getattr(model, "metrics", ()):
            if id(metric) not in known:
                metric.reset_state()


def _ignore(*_: Any, **__: Any) -> None:
    pass


def check_finite(reference: Run, batch: Batch) -> None:
    """Raises a ValueError if a run in float32 has a loss that is not finite."""
    if math.isfinite(reference.loss):
        return
    bad = [each.part for each in batches.not_finite(batch)]
    why = "pass a batch with another loss, or see keras_mp.numerics.FirstBadOperation."
    if bad:
        why = f"there are infinite values or NaN in {' and '.join(bad)}."
    raise ValueError(
        f"The loss of a batch is {reference.loss} in float32, so that there is nothing to compare "
        f"with: {why}"
    )


def _shape(tensor: tf.Tensor) -> tuple[int, ...]:
    return cast(tuple[int, ...], tuple(tensor.shape))


def floating(structure: Any) -> list[tf.Tensor]:
    """The floating-point tensors in a structure, each once."""
    flat = tf.nest.flatten(structure)
    found = [v for v in flat if isinstance(v, tf.Tensor) and v.dtype.is_floating]
    return list({id(value): value for value in found}.values())


def signed_mean(structure: Any) -> tf.Tensor:
    """A loss to which every output matters as much, and in which they do not cancel."""
    random = np.random.default_rng(0)
    parts = [
        tf.reduce_mean(tf.cast(output, tf.float32) * random.choice([-1.0, 1.0], _shape(output)))
        for output in floating(structure)
    ]
    return tf.add_n(parts)


def array(value: Any) -> np.ndarray:
    """A tensor as an array in float64, which all that it may hold fits into."""
    return tf.cast(tf.convert_to_tensor(value), tf.float64).numpy()


def kind_of(layer: tf.keras.layers.Layer) -> str:
    """What to call the class of what was called."""
    return type(layer).__name__ if hasattr(layer, "call") else getattr(layer, "kind", LOSS)


def dtype_of(call: Call) -> str:
    """The coarsest dtype of what goes into a call, of what comes out, and that it computes in.

    A model that was loaded may have another policy than the layers inside of it.
    """
    tensors = floating((call.args, call.kwargs, call.outputs))
    dtypes = [value.dtype.name for value in tensors]
    if isinstance(call.layer, tf.keras.layers.Layer):
        dtypes += [layer.compute_dtype for layer in keras_api.flatten_layers(call.layer)]
    return max(
        [dtype for dtype in dtypes if dtype in UNIT_ROUNDOFF] or ["float32"],
        key=UNIT_ROUNDOFF.__getitem__,
    )


def unit_of(call: Call) -> float:
    """The unit roundoff of that dtype."""
    return UNIT_ROUNDOFF[dtype_of(call)]


def named_weights(layer: tf.keras.layers.Layer) -> dict[str, Any]:
    """The trainable weights of a layer or model, by names that a copy of it has as well.

    Keras 3 may give a copy other paths, so it is their order that tells them apart.
    """
    weights = getattr(layer, "trainable_weights", ())
    names = [weight.name.partition(":")[0].rpartition("/")[2] for weight in weights]
    return {
        name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})": weight
        for i, (name, weight) in enumerate(zip(names, weights))
    }

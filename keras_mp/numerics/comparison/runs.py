"""Runs a model forwards and backwards, and single calls of its layers again."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.conversion import compute_dtypes
from keras_mp.layer_calls import model_outputs
from keras_mp.models.layer_paths import native_variable, variables_inside
from keras_mp.numerics import batches
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.comparison.calls import (
    Call,
    Called,
    KeptOperations,
    RandomNumbers,
    Variables,
    Watch,
    floating,
    map_floating,
)
from keras_mp.numerics.comparison.noise import Noise
from keras_mp.numerics.comparison.training_loss import (
    Loss,
    first_scale,
    signed_mean,
    without_metrics,
)
from keras_mp.numerics.distances import UNIT_ROUNDOFF
from keras_mp.support import marks
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

LOSS = "loss"


class Run(NamedTuple):
    """The calls and gradients of one run.

    Attributes:
        model: what was run.
        calls: list of Call, in the order in which they ended; the last one is that of the
            loss, unless a function of the user computes it.
        weights: dict, of each trainable weight its gradient, multiplied by the loss scale.
        loss: float.
        loss_scale: float.
        kept: the operations that ran, if they were kept.
    """

    model: Any
    calls: list[Call]
    weights: dict[str, tf.Tensor]
    loss: float
    loss_scale: float
    kept: KeptOperations | None = None

    @property
    def dtype(self) -> str:
        """The coarsest dtype of all calls."""
        return max((call.dtype for call in self.calls), key=UNIT_ROUNDOFF.__getitem__)

    def is_finite(self) -> bool:
        """Whether all gradients are finite."""
        return are_finite(self.all_gradients())

    def all_gradients(self) -> list[tf.Tensor]:
        """The gradients of outputs and of weights, multiplied by the loss scale."""
        of_outputs = (each for call in self.calls for each in call.gradients if each is not None)
        return [*of_outputs, *self.weights.values()]

    def weight_gradients(self) -> dict[str, np.ndarray]:
        """The unscaled gradients of weights as arrays, by name."""
        return {name: array(each) / self.loss_scale for name, each in self.weights.items()}


@dataclasses.dataclass(eq=False)
class Runner:
    """Runs a model on a batch, as often as needed, and restores the variables that this changes.

    Args:
        model: of `tf.keras`.
        batch: Batch.
        loss: Loss. Defaults to `signed_mean`.
        numbers: RandomNumbers. Runners whose runs are to be compared share them.
        step: called with the model and the batch's `x` and `y`, in place of model and loss.
        training: bool. Whether layers are called with `training=True`.
    """

    model: Any
    batch: Batch
    loss: Loss = signed_mean
    _: dataclasses.KW_ONLY
    numbers: RandomNumbers
    step: Callable[..., tf.Tensor] | None = None
    training: bool = True

    def __post_init__(self) -> None:
        self._first: Run | None = None

    @property
    def name(self) -> str:
        """What is run, and in which dtype."""
        # A model that was loaded may have another policy than its layers.
        # The model that a Sequential of Keras 3 makes when it is first called has the global one.
        dtypes = compute_dtypes(self.model) & {*LOW_PRECISION_NAMES}
        has_its_own = not dtypes or self.model.compute_dtype in dtypes
        name = self.model.dtype_policy.name if has_its_own else " and ".join(sorted(dtypes))
        return f"{self.model.name} in {name}"

    def run(self, loss_scale: float = 1.0, noise: Noise | None = None) -> Run:
        """Runs the model forwards and backwards, in eager. The first run is kept, for all tools.

        Args:
            loss_scale: float. The loss is multiplied by it.
            noise: Noise on inputs and weights, and on what each layer returns.
        """
        if noise is None:
            if self._first is not None and self._first.loss_scale == loss_scale:
                return self._first
            run = self._run(self.batch, loss_scale, Watch(self.numbers))
            self._first = self._first or run
            return run
        with noise.on_weights(self.model):
            batch = self.batch._replace(x=noise.on_inputs(self.batch.x))
            return self._run(batch, loss_scale, Watch(self.numbers, noise.both_ways))

    def run_as_trained(self, loss_scale: float | None = None) -> Run:
        """Runs the model at a loss scale, which is halved until gradients do not overflow.

        Args:
            loss_scale: the first one; None for that with which the model would begin to train.
        """
        scale = first_scale(self.model) if loss_scale is None else loss_scale
        while True:
            run = self.run(scale)
            if scale <= 1 or not math.isfinite(run.loss) or run.is_finite():
                return run
            scale = max(1.0, scale / 2)

    def _run(self, batch: Batch, loss_scale: float, watch: Watch) -> Run:
        is_built = getattr(self.model, "built", False)
        with (
            as_it_was(self.model),
            tf.GradientTape(watch_accessed_variables=not is_built) as tape,
        ):
            value = self._forward(batch, watch, tape)
            scaled = tf.cast(value, tf.float32) * loss_scale
            sources = self._sources(batch)
            outputs = [call.outputs for call in watch.calls]
            inputs = [call.inputs for call in watch.calls]
            found: Any = tape.gradient(scaled, [outputs, inputs, list(sources.values())])
            of_outputs, of_inputs, of_sources = found
        for call, call.gradients, values, found in zip(watch.calls, of_outputs, inputs, of_inputs):
            call.trained_through = {id(v) for v, g in zip(values, found) if g is not None}
        gradients = _known(sources, of_sources)
        return Run(self.model, watch.calls, gradients, float(value), loss_scale)

    def _forward(self, batch: Batch, watch: Watch, tape: tf.GradientTape) -> tf.Tensor:
        """Returns the loss, and leaves the calls that it took in `watch.calls`."""
        # Training computes no gradients before the first trained weight, so the weights alone are
        # watched. A model that is not built yet makes them now, and the tape sees that.
        weights = named_weights(self.model).values() if self.model.built else ()
        tape.watch([native_variable(weight) for weight in weights])
        with watch.over(self.model):
            if self.step is not None:
                value = self.step(self.model, batch.x, batch.y)
            else:
                prediction = self.model(batch.x, training=self.training)
                pairs = zip(watch.calls[-1].outputs, floating(prediction))
                wider = {id(low): wide for low, wide in pairs if low.dtype.size < wide.dtype.size}
                for call in watch.calls:
                    call.is_widened |= call.return_instead(wider)
                kind = "sum of the outputs" if self.loss is signed_mean else LOSS
                loss = functools.partial(self.loss, batch)
                value = watch.run(LOSS, kind, loss, loss, prediction)
        if not isinstance(value, tf.Tensor | tf.Variable) or value.shape.rank != 0:
            name = LOSS if self.step is None else "step"
            shape = f", of the shape {value.shape}" if hasattr(value, "shape") else ""
            raise ValueError(
                f"Expected `{name}` to return the loss, a scalar tensor. "
                f"Received: {type(value).__name__}{shape}"
            )
        return value

    def _sources(self, batch: Batch) -> dict[str, Any]:
        """Returns the tensors beside the outputs of calls whose gradients are computed, by name."""
        del batch
        return named_weights(self.model)


class Replay(NamedTuple):
    """The outputs and gradients of a layer for given inputs and upstream gradients.

    Attributes:
        outputs: list of the floating-point tensors that it returned.
        gradients: dict of the gradients that training computes, by the name of an input or weight.
    """

    outputs: list[tf.Tensor]
    gradients: dict[str, tf.Tensor]


def replay(
    call: Call,
    layer: Called,
    upstream: Sequence[tf.Tensor | None],
    dtype: str | None = None,
    noise: Noise | None = None,
) -> Replay:
    """Makes a call once more, with the same or with another layer, and the same random numbers.

    Args:
        call: what was called, with what.
        layer: what to call now.
        upstream: the gradients of its outputs.
        dtype: to which inputs in 16 bits are cast; None leaves them.
        noise: Noise on inputs, weights, outputs and upstream gradients.
    """

    def moved(value: tf.Tensor) -> tf.Tensor:
        return value if noise is None else noise(value)

    def given(value: tf.Tensor) -> tf.Tensor:
        # A new tensor, since a gradient of the old one would be that of the whole run.
        cast = tf.cast(value, dtype) if dtype and value.dtype.size < 4 else tf.identity(value)
        return marks.copy(value, moved(cast))

    before = call.args, call.kwargs
    watch = Watch(call.numbers or RandomNumbers(), noise and noise.both_ways, call.position)
    with (
        as_it_was(layer),
        noise.on_weights(layer) if noise else contextlib.nullcontext(),
        tf.GradientTape() as tape,
        watch.over(layer),
        model_outputs.as_last(layer) if call.is_widened else contextlib.nullcontext(),
    ):
        args, kwargs = map_floating(given, before)
        pairs = zip(tf.nest.flatten(before), tf.nest.flatten((args, kwargs)))
        inputs = [value for was, value in pairs if id(was) in call.trained_through]
        tape.watch(inputs)
        if hasattr(layer, "call"):
            returned = layer(*args, **kwargs)
        else:
            returned = watch.run(call.path, call.kind, layer, layer, *args, **kwargs)
        if call.is_widened:
            returned = model_outputs.widened(returned, lambda _: True)
        outputs = floating(returned)
        weights = named_weights(layer)
    pairs = [
        (output, moved(tf.cast(gradient, tf.float32)))
        for output, gradient in zip(outputs, upstream)
        if gradient is not None and gradient.shape == output.shape
    ]
    named = {f"input {i}": value for i, value in enumerate(inputs)} | weights
    if not pairs or not named:
        return Replay(outputs, {})
    found = tape.gradient(
        [output for output, _ in pairs],
        list(named.values()),
        [tf.cast(gradient, output.dtype) for output, gradient in pairs],
    )
    return Replay(outputs, _known(named, found))


@contextlib.contextmanager
def as_it_was(layer: Called | Variables) -> Iterator[None]:
    """Restores the variables of a layer or model to the values from before the block."""
    variables = getattr(layer, "variables", ())
    if isinstance(layer, tf.keras.layers.Layer):
        variables = variables_inside(layer)
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        with without_metrics(layer):
            yield
    finally:
        for variable, value in before:
            if not np.array_equal(variable.numpy(), value, equal_nan=value.dtype.kind == "f"):
                variable.assign(value)


def check_finite(run: Run, batch: Batch, needs_loss: bool = True) -> None:
    """Raises a ValueError if the loss of a run is not finite.

    Args:
        run: Run.
        batch: what it was run with.
        needs_loss: bool. Whether to raise also where all numbers of the batch are finite.
    """
    bad = [] if math.isfinite(run.loss) else batches.not_finite(batch)
    why = "pass a batch with another loss, or see what keras_mp.numerics.check finds."
    if bad:
        parts = ", ".join(f"{name} with {count:,} of {size:,}" for name, count, size in bad)
        why = f"there are infinite values or NaN. Received: {parts} not finite"
    if bad or (needs_loss and not math.isfinite(run.loss)):
        raise ValueError(
            f"The loss of a batch is {run.loss} in {run.dtype}, so there is nothing to compare "
            f"with: {why}"
        )


def check_same_calls(run: Run, reference: Run) -> None:
    """Raises a ValueError if two runs have called different layers."""
    if len(run.calls) != len(reference.calls):
        raise ValueError(
            "A model in 16 bits and its reference do not call the same layers. Expected "
            f"{[c.path for c in reference.calls]}. Received: {[c.path for c in run.calls]}"
        )


def array(value: tf.Tensor | tf.Variable | np.ndarray) -> np.ndarray:
    """Returns a tensor as an array of float64, which holds all numbers of the other dtypes."""
    return tf.cast(tf.convert_to_tensor(value), tf.float64).numpy()


def are_finite(tensors: Iterable[tf.Tensor | None]) -> bool:
    """Whether all numbers of the tensors are finite."""
    return all(np.isfinite(array(value)).all() for value in tensors if value is not None)


def named_weights(layer: Called | Variables) -> dict[str, Any]:
    """Returns the trainable weights of a layer or model, by names that a copy of it has as well.

    Keras 3 may give a copy other paths, so equal names are told apart by their order.
    """
    weights = getattr(layer, "trainable_weights", ())
    names = [weight.name.partition(":")[0].rpartition("/")[2] for weight in weights]
    return {
        name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})": weight
        for i, (name, weight) in enumerate(zip(names, weights))
    }


def _known(
    sources: Iterable[str], gradients: Iterable[tf.Tensor | tf.IndexedSlices | None]
) -> dict[str, tf.Tensor]:
    """Returns the gradients that are not None, as dense tensors, by name."""
    pairs = zip(sources, gradients, strict=True)
    return {name: tf.convert_to_tensor(each) for name, each in pairs if each is not None}

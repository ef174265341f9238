"""Histograms of exponents, gathered where the model trains.

Each has a row in a variable on the device: that of a variable's gradient, a layer's output, or the
gradient of that output. Every N steps the values of all of them are
counted, in one branch at the end of the step. The steps between make one comparison. Nothing waits
for the device until it is read.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.hooks import wrapped
from keras_mp.layer_calls import layer_observers, model_outputs
from keras_mp.loss_scale_optimizer import LossScaleOptimizer, wrappers_among
from keras_mp.models import low_precision_weights
from keras_mp.models.layer_paths import layers_by_path, paths_of_weights, variables_by_path
from keras_mp.numerics import patterns
from keras_mp.numerics.histogram import COLUMNS, ROWS, Histogram, count_exponents
from keras_mp.numerics.report import KINDS, Report, Row, RowKey
from keras_mp.step import scaled_losses
from keras_mp.support import attributes, host, marks, messages, observers, op_callbacks, validation
from keras_mp.support.autograph import do_not_convert

_OF_LAYERS = ("output", "output gradient")

# A float32 scalar, or None for 1.
_Scale = tf.Tensor | None
# A tensor that a step has shown; by what its values are still to be divided, and what the loss was
# multiplied by.
_Seen = tuple[tf.Tensor, _Scale, _Scale]
_SeenByRow = Mapping[RowKey, Sequence[_Seen]]


class ExponentHistograms:
    """Gathers histograms of exponents of a model, in a training loop of your own.

    Make it once, in the scope of the strategy if there is one, and put `with histograms.step():`
    around each step, in the function that `strategy.run` runs. Gradients are counted as a
    `keras_mp.LossScaleOptimizer` or a `keras_mp.GradScaler` takes them, before they are tested and
    summed over replicas, and as if they had never been scaled. Those that another optimizer applies
    are counted when its `apply_gradients` is called. `watch` does all this in `fit`.

    Values of a sparse gradient are counted before those of equal indices are added up. Values of
    float64 are counted as the float32 values next to them. Complex values are not counted, nor are
    gradients of outputs inside of a loop or a branch.

    Args:
        model: A model of `tf.keras`, built.
        every: int. The first step is counted, and then one in so many. Defaults to 100.
        optimizer: The optimizer. Defaults to the one that the model is compiled with, if any.
        **choices: what is counted, each a bool or paths, which may be patterns: gradients, outputs,
            output_gradients and weights, as for `watch`. Weights are those when `read` is called,
            with all digits that a `MasterWeightOptimizer` keeps.

    Raises:
        ValueError: `model` is not built, there is no layer with one of the paths, or the optimizer
            is `tf.keras`'s own LossScaleOptimizer.

    Example:

    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([2]), tf.keras.layers.Dense(1, name="dense", use_bias=False)]
    ... )
    >>> optimizer = keras_mp.LossScaleOptimizer("sgd")
    >>> from keras_mp.numerics.counting import ExponentHistograms
    >>> histograms = ExponentHistograms(model, every=1, optimizer=optimizer)
    >>> with histograms.step():
    ...     loss = lambda: tf.reduce_mean(model(tf.ones([4, 2]))) * 2.0**-30
    ...     _ = optimizer.minimize(loss, model.trainable_variables)
    >>> row = histograms.read()["gradient", "dense/kernel"]
    >>> row.histogram.exponents, str(row.histogram.window("float16"))
    ({-30: 2}, '2^6..2^45')
    """

    def __init__(
        self, model: tf.keras.Model, *, every: int = 100, optimizer: Any = None, **choices: Any
    ) -> None:
        if not model.built:
            raise ValueError(
                f"{model.name!r} is not built, so its weights are unknown: call it on a batch."
            )
        self._every = validation.integer("every", every)
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        # Those that scale a loss show their gradients themselves.
        self._plain_optimizers = list(filter(_scales_no_loss, tf.nest.flatten(self.optimizer)))
        layers, variables = layers_by_path(model), variables_by_path(model)
        rows: list[RowKey] = []
        for kind in KINDS:
            name, known = f"{kind}s".replace(" ", "_"), layers if kind in _OF_LAYERS else variables
            choice = choices.get(name, kind in ("gradient", "output"))
            if isinstance(choice, bool):
                paths = [path for path, each in known.items() if choice and _is_shown(each)]
            else:
                paths = patterns.chosen(name, choice, known)
            rows += [(kind, path) for path in paths]
        self._layers = {path: layers[path] for kind, path in rows if kind in _OF_LAYERS}
        # Weights are looked at when it is read.
        self._weights = {path: variables[path][0] for kind, path in rows if kind == "weight"}
        self.places = {row: i for i, row in enumerate(row for row in rows if row[0] != "weight")}
        self.paths = paths_of_weights(model)
        # What each row was computed in.
        self.dtypes = {("gradient", path): of.compute_dtype for path, (_, of) in variables.items()}
        self.misses_gradients = any(kind == "gradient" for kind, _ in rows)
        self._strategy = model.distribute_strategy
        with self._strategy.scope():
            self._steps = host.local_variable("steps", 0)
            self._counted = host.local_variable("counted", 0)
            no_bins = np.zeros([len(self.places), ROWS, COLUMNS], int)
            self._bins = host.local_variable("bins", no_bins)
            # The smallest loss scale at which a value of each row was not finite.
            nowhere = np.full(len(self.places), np.inf)
            self._overflowed_at = host.local_variable("overflowed_at", nowhere, tf.float32)
            self._loss_scale = host.local_variable("loss_scale", 1.0, tf.float32)

    @do_not_convert
    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context manager for one step, in a replica context, in a `tf.function` or in eager.

        Raises:
            ValueError: it is entered around `strategy.run`, and not in the function that this runs.
        """
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                "`step` goes into the function that `strategy.run` runs, where each replica counts."
            )
        number = self._steps.assign_add(1) - 1
        due = tf.equal(number % self._every, 0)
        if tf.executing_eagerly() and not due:
            yield
            return
        step = _Step(self, due)
        with contextlib.ExitStack() as stack:
            stack.enter_context(layer_observers.attached(step, self._layers.items()))
            stack.enter_context(observers.attached(step))
            for optimizer in self._plain_optimizers:
                # Told to the observers of this thread.
                stack.enter_context(wrapped.everywhere(optimizer, "apply_gradients", _told))
            yield
        step.count()

    def is_due(self, step: int, steps: int = 1) -> bool:
        """Whether anything is counted in one of several steps.

        Args:
            step: int. The number of the first of them, from 0.
            steps: int. How many there are. Defaults to 1.
        """
        return step + -step % self._every < step + steps

    def go_on_from(self, step: int) -> None:
        """Sets the number of steps that were made before the next one.

        For programs that enter `step` in some of them only.

        Args:
            step: int.
        """
        for each in self._strategy.experimental_local_results(self._steps):
            each.assign(step)

    def read(self) -> Report:
        """Reads from the device what was counted since the last time, and begins anew.

        It is what the replicas of this worker have counted.

        Returns:
            A `Report`, with a row for each tensor of which a value was counted.
        """
        local = self._strategy.experimental_local_results
        bins = np.sum([each.numpy() for each in local(self._bins)], axis=0)
        overflowed_at = np.min([each.numpy() for each in local(self._overflowed_at)], axis=0)
        numbers = self._steps, self._counted, self._loss_scale
        step, counted, loss_scale = (local(each)[0].numpy().item() for each in numbers)
        for variable, value in ((self._bins, 0), (self._counted, 0), (self._overflowed_at, np.inf)):
            for each in local(variable):
                each.assign(tf.fill(each.shape, tf.constant(value, each.dtype)))
        found = [(row, i) for row, i in self.places.items() if bins[i].any()]
        at = overflowed_at.tolist()
        rows = [Row(*row, self.dtypes.get(row, ""), Histogram(bins[i]), at[i]) for row, i in found]
        if counted:
            weights = low_precision_weights.as_seen(self.optimizer, [*self._weights.values()])
            for path, weight in zip(self._weights, map(tf.convert_to_tensor, weights)):
                rows.append(Row("weight", path, weight.dtype.name, Histogram.count(weight)))
        return Report(rows, step=step, counted=counted, loss_scale=loss_scale)

    def add(self, seen: _SeenByRow, scales: Sequence[_Scale] = (), steps: int = 0) -> None:
        """Counts the values of tensors, on this replica.

        Args:
            seen: tensors by row.
            scales: what the losses of the step were multiplied by.
            steps: int. How many steps have ended.
        """
        self._counted.assign_add(steps)
        scale = next((each for each in reversed(scales) if each is not None), None)
        if scale is not None:
            self._loss_scale.assign(scale)
        if not self.places:
            return
        # Nobody knows which loss a gradient of an output is of: it counts if all were scaled alike.
        first, *others = (1.0 if each is None else each for each in (scale, *scales))
        is_known = tf.cast(tf.reduce_all(tf.equal(others, first)), tf.int64)
        bins = [tf.zeros([ROWS, COLUMNS], tf.int64)] * len(self.places)
        overflowed_at = [tf.constant(np.inf)] * len(self.places)
        for (kind, path), tensors in seen.items():
            place = self.places[kind, path]
            for tensor, divisor, scaled_by in tensors:
                if kind != "gradient":
                    self.dtypes[kind, path] = tensor.dtype.name
                if kind == "output gradient":
                    scaled_by, of_tensor = scale, count_exponents(tensor, scale) * is_known
                else:
                    of_tensor = count_exponents(tensor, divisor)
                bins[place] += of_tensor
                if scaled_by is not None:
                    is_bad = tf.reduce_any(of_tensor[-1] > 0)
                    at = tf.where(is_bad, tf.cast(scaled_by, tf.float32), np.inf)
                    overflowed_at[place] = tf.minimum(overflowed_at[place], at)
        self._bins.assign_add(tf.stack(bins))
        self._overflowed_at.assign(tf.minimum(self._overflowed_at, tf.stack(overflowed_at)))


class _Step(observers.Observer, layer_observers.LayerObserver):
    """The values that one step, or its trace, has shown so far on one replica.

    Args:
        owner: the histograms, whose variables count.
        due: bool scalar tensor. Whether anything is counted in this step.
    """

    def __init__(self, owner: ExponentHistograms, due: tf.Tensor) -> None:
        self._owner, self._due, self._graph = owner, due, host.current_graph()
        self._seen: dict[RowKey, list[_Seen]] = defaultdict(list)
        self._scales: list[_Scale] = []

    def outputs(self, call: layer_observers.LayerCall, outputs: Any) -> Any:
        """Notes what a layer returns, and has the gradient of that noted."""
        if keras_api.is_symbolic():  # Keras only asks for shapes.
            return outputs
        if model_outputs.is_made_again():  # What it has returned before is not used.
            del self._seen.get(("output", call.path), [])[-1:]
        return tf.nest.map_structure(functools.partial(self._output, call.path), outputs)

    def _output(self, path: str, tensor: Any) -> Any:
        if not isinstance(tensor, tf.Tensor) or not tensor.dtype.is_floating:
            return tensor
        row = "output gradient", path
        self._note(("output", path), (tensor, None, None))
        # TensorFlow cannot differentiate a loop whose backward pass assigns to variables.
        if row not in self._owner.places or host.current_graph() is not self._graph:
            return tensor

        @tf.custom_gradient
        def tapped(x: tf.Tensor) -> Any:
            @do_not_convert
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                self._seen[row].append((upstream, None, None))
                return upstream

            return tf.identity(x), gradient

        return marks.copy(tensor, tapped(tensor))

    def gradients(self, pairs: Sequence[Any], divisor: _Scale, scaled_by: _Scale) -> None:
        """Notes the gradients of variables."""
        if host.current_graph() is self._graph:
            self._scales.append(scaled_by)
        for gradient, variable in pairs:
            row = "gradient", self._owner.paths.get(id(variable), "")
            if gradient is not None and row in self._owner.places:
                self._owner.misses_gradients = False
                values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
                self._note(row, (tf.convert_to_tensor(values), divisor, scaled_by))

    def _note(self, row: RowKey, seen: _Seen) -> None:
        if row not in self._owner.places or not seen[0].dtype.is_floating:
            return
        if host.current_graph() is self._graph:
            self._seen[row].append(seen)
        else:
            self._if_due(lambda: self._owner.add({row: [seen]}))

    def count(self) -> None:
        """Counts what was observed, if that is due. Called at the end of the step."""
        if self._owner.misses_gradients:
            self._owner.misses_gradients = False
            messages.warn(
                "No gradient was seen in a step, so only outputs are counted: pass the `optimizer` "
                f"it calls, or `gradients=False`. Received: optimizer={self._owner.optimizer!r}"
            )
        self._if_due(lambda: self._owner.add(self._seen, self._scales, 1))

    @op_callbacks.unobserved()
    def _if_due(self, count: Callable[[], None]) -> None:
        tf.cond(self._due, host.as_one_operation(count), lambda: None)


def _is_shown(layer: Any) -> bool:
    """Whether it is no model, which returns what its layers do, and no cell, which is in a loop."""
    return not isinstance(layer, tf.keras.Model) and not hasattr(layer, "state_size")


def _told(apply_gradients: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply_gradients)
    def told(grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        with _told_once(pairs):
            return apply_gradients(pairs, *args, **kwargs)

    return told


@do_not_convert
def _told_once(pairs: list[tuple[Any, Any]]) -> contextlib.AbstractContextManager[None]:
    """Tells gradients; not those of a step of keras_mp, which does so before and inside."""
    if scaled_losses.thread.is_applying:
        return contextlib.nullcontext()
    observers.tell(observers.Observer.gradients, pairs, None, None)
    others = tuple(each for each in observers.thread.observers if not isinstance(each, _Step))
    return attributes.replaced(observers.thread, "observers", others)


def _scales_no_loss(optimizer: tf.keras.optimizers.Optimizer | None) -> bool:
    """Whether an optimizer scales no loss; raises a ValueError for `tf.keras`'s own wrapper."""
    is_of_keras = isinstance(optimizer, keras_api.KerasLossScaleOptimizer)
    if is_of_keras and not isinstance(optimizer, LossScaleOptimizer):
        raise ValueError(
            "Expected a keras_mp.LossScaleOptimizer, or one that scales no loss: tf.keras's does "
            f"not show by which number a gradient was scaled. Received: optimizer={optimizer!r}"
        )
    return isinstance(optimizer, keras_api.OPTIMIZER_BASES) and not wrappers_among(optimizer)

"""Scales losses in a `train_step` or `fit` whose optimizers scale nothing.

`compile` wraps the optimizers that it is given. A program may train with others: those of a GAN,
one that is assigned after `compile`, or the object that it passed to `compile`. So this module acts
while a user's own `train_step`, `fit` or `train_on_batch` runs. Each `tf.GradientTape` that is made
there scales the target and unscales the gradients, as a `LossScaleGradientTape` does, and computes
gradients that overflow again. Whatever is done with these gradients afterwards, they are those of
the program, without what float16 would lose. Where that would not be exact, a warning says so when
they are applied.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from keras_mp import hooks, keras_api
from keras_mp.hooks import Method, Replacement, When, reach, replica_threads, wrapped
from keras_mp.hooks.once import once
from keras_mp.layer_calls.initial_weights import scaled_layers
from keras_mp.loss_scale_gradient_tape import LossScaleGradientTape
from keras_mp.optimizer_wrapper import OptimizerWrapper
from keras_mp.step import scaled_losses
from keras_mp.step.loss_scales import DynamicLossScale, LossScale
from keras_mp.support import function_graphs, host, messages
from keras_mp.support.attributes import replaced
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import parse

# The program has not asked for a loss scale, so a high one must not end its training.
_MAX_RETRIES = 32
# Below this, float16 begins to lose digits of numbers that are a little smaller.
_SMALL = 2.0**-10


class _Step(scaled_losses.ScaledLosses):
    """The `train_step` or the loop that this thread runs: who has scaled what.

    Attributes:
        model: the model.
        loss_scale: the model's `LossScale`.
        method: str. The method of the model.
        graph: the graph in which the step began; None in eager.
        has_counted: whether a tape has counted this step. A loop of the program has many steps.
    """

    has_counted = False

    def __init__(self, model: tf.keras.Model, loss_scale: LossScale, method: str) -> None:
        super().__init__(loss_scale if isinstance(loss_scale, DynamicLossScale) else None)
        self.model, self.loss_scale, self.method = model, loss_scale, method
        self.graph = host.current_graph()


@contextlib.contextmanager
def entered(
    model: tf.keras.Model, loss_scale: LossScale, method: str = "train_step"
) -> Iterator[None]:
    """Context manager for a user's own `train_step`, or for a method with a loop.

    Args:
        model: the model.
        loss_scale: the scale with which its tapes begin, and which they move.
        method: str. The name of the method of the model. Defaults to `"train_step"`.
    """
    _let_replicas_inherit()
    install()
    step = _Step(model, loss_scale, method)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(scaled_losses.thread, "noted", step))
        stack.enter_context(wrapped.here(tf.GradientTape, "__init__", _scaling))
        stack.enter_context(wrapped.here(tf, "gradients", _noting))
        yield


def _step_of_thread() -> _Step | None:
    step = scaled_losses.thread.noted
    return step if isinstance(step, _Step) else None


@once
def install() -> None:
    """Lets optimizers warn of gradients that nobody has scaled, also outside of steps."""
    places = keras_api.APPLY_METHODS
    hooks.install([Replacement(Method.of(*place), _telling, When.ALWAYS) for place in places])


@once
def _let_replicas_inherit() -> None:
    """Lets the replicas of a loop be part of it.

    A `train_step` runs inside of a replica.
    """
    replica_threads.inherit(
        _step_of_thread,
        lambda of: entered(of.model, of.loss_scale, of.method) if of else contextlib.nullcontext(),
    )


def left() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager for Keras's own step in a loop of the user.

    Such a step scales by itself.
    """
    return replaced(scaled_losses.thread, "noted", scaled_losses.ScaledLosses())


def _scaling(original: Callable[..., None]) -> Callable[..., None]:
    """Returns a constructor of tapes, which turns those of the step into `_StepTape`s."""

    @functools.wraps(original)
    @do_not_convert
    def init(tape: Any, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        step, is_ours = _step_of_thread(), scaled_losses.thread.is_differentiating
        if type(tape) is not _Tape or step is None or is_ours:
            return original(tape, persistent, watch_accessed_variables)
        tape.__class__ = _StepTape
        tape.__init__(step, bool(persistent), watch_accessed_variables)

    return init


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `tf.gradients` that notes that nobody has scaled the gradients."""

    @functools.wraps(original)
    @do_not_convert
    def gradients(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        step = _step_of_thread()
        if step is not None and not step.has_scaled:
            step.note_gradients(tf.nest.flatten(xs), "tf.gradients() scales nothing")
        return original(ys, xs, *args, **kwargs)

    return gradients


# TensorFlow does not have types for all methods of its tape.
_Tape: Any = tf.GradientTape


class _StepTape(LossScaleGradientTape):
    """A `tf.GradientTape` that a `train_step` has made."""

    def __init__(self, step: _Step, persistent: bool, watch_accessed_variables: bool) -> None:
        super().__init__(step.loss_scale, _MAX_RETRIES, persistent, watch_accessed_variables)
        self._step = step
        step.tapes.add(self)

    def __enter__(self) -> "_StepTape":
        if self._tape is None:
            self._scaled_losses: list[tf.Tensor] = []
        return super().__enter__()

    @do_not_convert
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes gradients as `tf.GradientTape` does.

        They are scaled and unscaled if that is exact.
        """
        differentiate = functools.partial(_Tape.gradient, self, target, sources, *args, **kwargs)
        if scaled_losses.thread.is_differentiating:  # jacobian() calls this, and ends the tape.
            return differentiate()
        flat = tf.nest.flatten(sources)
        with self._asked(), replaced(scaled_losses.thread, "is_differentiating", True):
            why_not = None if self._is_scaled(target) else self._why_not(flat)
            self._step.note_gradients(flat, why_not)
            if why_not != "":
                return differentiate()
            compute = functools.partial(self._scaled, target, sources, *args, **kwargs)
            recording = [tape for tape in self._step.tapes if tape._recording]
            if not recording:
                return compute()
            # The other tapes differentiate what TensorFlow computes, not the search for a scale.
            plain = differentiate()
            with contextlib.ExitStack() as stack:
                for tape in recording:
                    stack.enter_context(tape.stop_recording())
                if not any(hasattr(each, "assign") for each in flat):
                    compute = functools.partial(self._scaled_if_small, plain, compute)
                exact = compute()
            return tf.nest.map_structure(_with_derivatives, exact, plain, expand_composites=True)

    def _scaled_if_small(self, gradients: Any, compute: Callable[[], Any]) -> Any:
        """Returns gradients of tensors that are part of a loss, or of other inputs.

        Args:
            gradients: structure of these gradients, unscaled.
            compute: function that returns the gradients, scaled and unscaled again. It is called
                only if 16 bits may have lost some. The scale is chosen by the gradients of the
                loss; these here need not be as small, and mostly one computation will do.
        """
        flat = tf.nest.flatten(gradients, expand_composites=True)
        values = [each for each in flat if each is not None and each.dtype.is_floating]

        def scaled() -> Any:
            with replaced(self, "_moves_scale", False):
                return compute()

        are_small = [tf.reduce_all(tf.abs(value) < _SMALL) for value in values]
        return tf.cond(tf.reduce_all(are_small), scaled, lambda: gradients)

    def jacobian(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes a Jacobian as `tf.GradientTape` does, not scaled."""
        self._step.note_gradients(tf.nest.flatten(sources), "jacobian() scales nothing")
        with self._asked(), replaced(scaled_losses.thread, "is_differentiating", True):
            return _Tape.jacobian(self, target, sources, *args, **kwargs)

    def batch_jacobian(self, target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes a Jacobian of each example as `tf.GradientTape` does, not scaled."""
        self._step.note_gradients([source], "batch_jacobian() scales nothing")
        with self._asked(), replaced(scaled_losses.thread, "is_differentiating", True):
            return _Tape.batch_jacobian(self, target, source, *args, **kwargs)

    def _is_scaled(self, target: Any) -> bool:
        """Whether the program has scaled a target, or what it was computed from."""
        scaled, targets = self._scaled_losses, set(map(id, tf.nest.flatten(target)))
        here = function_graphs.graphs_of_branches(host.current_graph())
        # One is the target, or was scaled in a function, whose graph has ended.
        if any(id(each) in targets or getattr(each, "graph", None) not in here for each in scaled):
            return True
        if not scaled:
            return False
        return any(each is not None for each in _Tape.gradient(self, target, scaled))

    def _counts(self, finite: tf.Tensor) -> bool | tf.Tensor:
        # Several tapes of a step make one good step.
        is_first, self._step.has_counted = not self._step.has_counted, True
        return is_first or self._step.method != "train_step" or tf.logical_not(finite)

    def _why_not(self, sources: list[Any]) -> str:
        """Returns why scaling the target would not be exact; empty if it is exact."""
        if any(parse(getattr(each, "dtype", None)) != tf.float32 for each in sources):
            return "the gradients are in another dtype than float32"
        if tf.distribute.in_cross_replica_context():
            return "gradient() is called outside of the replicas"
        is_one = tf.distribute.get_strategy().num_replicas_in_sync == 1
        if not is_one and host.current_graph() is not self._step.graph:
            return "gradient() is called in a branch or a loop, on several replicas"
        return ""


def _with_derivatives(value: tf.Tensor | None, other: tf.Tensor | None) -> tf.Tensor | None:
    """Returns a gradient with the derivatives of another one, equal but for rounding."""
    if value is None or other is None or value.dtype.is_integer:
        return value
    other = tf.where(tf.math.is_finite(other), other, 0.0)
    return other + tf.stop_gradient(value - other)


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an optimizer's method that applies gradients.

    It warns of gradients that nobody has scaled. In reach it makes what the optimizer lacks at
    once, so that a function is traced once.
    """
    signature = inspect.signature(original)
    _, of_gradients, *_ = signature.parameters

    @functools.wraps(original)
    @do_not_convert
    def apply(*args: Any, **kwargs: Any) -> Any:
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # It raises the error that callers know.
        given, optimizer = call.arguments, args[0]
        pairs = given[of_gradients] = list(given[of_gradients])
        if "trainable_variables" in signature.parameters:  # Keras 3.
            variables = list(given.get("trainable_variables") or ())
            pairs = list(zip(pairs, variables))
            if variables:
                given["trainable_variables"] = variables
        with contextlib.ExitStack() as stack:
            # A wrapper calls its inner optimizer.
            is_first = not scaled_losses.thread.is_applying
            stack.enter_context(replaced(scaled_losses.thread, "is_applying", True))
            if is_first and not isinstance(optimizer, OptimizerWrapper):
                applied = [variable for gradient, variable in pairs if gradient is not None]
                _warn_if_unscaled(optimizer, applied)
            if reach.current() is not None:
                variables = [variable for _, variable in pairs]
                stack.enter_context(keras_api.making_at_once(optimizer, variables))
            return original(*call.args, **call.kwargs)

    return apply


# Optimizers that a warning has named, or that have applied gradients outside of steps of models.
_seen: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _warn_if_unscaled(optimizer: Any, variables: list[Any]) -> None:
    """Warns if gradients of float16 layers are applied that nobody has scaled.

    In a step of a model, tapes know which these are. In a loop of the program's own they are those
    of a program that scales nothing, whose optimizers are looked at once. In reach there, but in no
    step, is the step of a model that `compile` has wrapped.
    """
    step = _step_of_thread()
    if optimizer in _seen:
        return
    if step is None:
        if scaled_losses.thread.noted.has_scaled or reach.current() is not None:
            return
        _seen.add(optimizer)
        where, name, why, layers = "The optimizer", "optimizer", "", list(scaled_layers)
    else:
        variables = [each for each in variables if step.unscaled.get(scaled_losses.key_of(each))]
        if not variables:
            return
        name = _name(step.model, optimizer)
        where = f"In the {step.method} of the model {step.model.name!r}, {name}"
        reason = step.unscaled[scaled_losses.key_of(variables[0])]
        why = f"(keras_mp scales by itself, but not here: {reason}.) "
        layers = keras_api.flatten_layers(step.model)
    layer = _float16_layer(layers, variables)
    if layer is None or keras_api.is_in_keras_wrapper(optimizer):
        return
    _seen.add(optimizer)
    messages.warn(
        f"{where} ({type(optimizer).__name__}) applies gradients of float16 layers, such as "
        f"{layer!r}, of a loss that nobody has scaled: small gradients become zero. {why}Where the "
        "optimizer is made, add:\n"
        f"    {name} = keras_mp.LossScaleOptimizer({name})\n"
        "and scale the loss in the tape, which apply_gradients undoes:\n"
        f"    scaled_loss = {name}.scale_loss(loss)\n"
        "    gradients = tape.gradient(scaled_loss, variables)\n"
        f"    {name}.apply_gradients(zip(gradients, variables))\n"
        "docs/train_step.md has this and other ways."
    )


def _name(model: tf.keras.Model, optimizer: Any) -> str:
    """Returns how the methods of a model refer to an optimizer."""
    if getattr(model, "optimizer", None) is optimizer:
        return "self.optimizer"
    names = [n for n, value in vars(model).items() if value is optimizer and n[0] != "_"]
    return f"self.{names[0]}" if names else "optimizer"


def _float16_layer(layers: Iterable[Any], variables: list[Any]) -> str | None:
    """Returns the name of the first layer in float16 that has one of these variables."""
    keys = {scaled_losses.key_of(variable) for variable in variables}
    for layer in layers:
        if layer.compute_dtype != "float16" or keras_api.layers_inside(layer):
            continue
        if any(scaled_losses.key_of(each) in keys for each in layer.trainable_weights):
            return layer.name
    return None

"""What Keras 3's optimizers are to a step and to wrappers."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.keras_api import keras3_names
from keras_mp.step.optimizer_adapter import Applied, Loss, OptimizerAdapter, Pairs, Tape, VarList
from keras_mp.support import new_variables
from keras_mp.support.attributes import replaced
from keras_mp.support.native_variables import native_variable as native

keras = tf.keras

# The classes that Keras takes for an optimizer.
OPTIMIZER_BASES: tuple[Any, ...] = (keras.optimizers.Optimizer,)
# The private attributes of optimizers that callbacks of Keras read.
READ_BY_CALLBACKS = (
    *("_trainable_variables", "_model_variables_moving_average"),
    "_distribution_strategy",
)
# Whether optimizers clip gradients before replicas sum them.
CLIPS_ON_EACH_REPLICA = True
# A child of optimizers in checkpoints of Keras's own only, or None.
KERAS_LAYOUT_CHILD = "dynamic_scale"


def optimizer_adapter(optimizer: keras.optimizers.Optimizer) -> OptimizerAdapter | None:
    """Returns the adapter of an optimizer of `tf.keras`, or None."""
    return _KerasAdapter(optimizer) if isinstance(optimizer, keras.optimizers.Optimizer) else None


class _Thread(threading.local):
    """Whether this thread applies gradients that a wrapper has summed."""

    is_done = False


_thread = _Thread()


def unless_summed(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps Keras from summing what a wrapper has summed.

    Keras sums inside `apply`, after clipping, and has no public way to leave that out.
    """

    def all_reduce_once(self: Any, grads_and_vars: Any) -> Any:
        return list(grads_and_vars) if _thread.is_done else all_reduce(self, grads_and_vars)

    return all_reduce_once


class _KerasAdapter(OptimizerAdapter):
    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        super().__init__(optimizer)
        self._refuse_second_scale()

    def _refuse_second_scale(self) -> None:
        if self.optimizer.loss_scale_factor is not None:
            raise ValueError(
                "The inner optimizer scales the loss itself. Pass "
                "`loss_scale=` to LossScaleOptimizer instead of `loss_scale_factor=` to the inner "
                f"optimizer. Received: loss_scale_factor={self.optimizer.loss_scale_factor}"
            )

    def build(self, variables: Sequence[Any]) -> None:
        if not self.optimizer.built:
            _build(self.optimizer, variables)
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync == 1:
            return
        # Without it, Keras would sum what is summed.
        keras3_names.sum_gradients.get()
        for variable in self.optimizer.variables:
            if not strategy.extended.variable_created_in_scope(native(variable)):
                raise ValueError(
                    "Make the optimizer in the scope of the strategy that it is used under: "
                    "otherwise Keras 3 gives all replicas one copy of its variables, which each of "
                    f"them changes. Received: variable {variable.path!r} of {self.optimizer!r}"
                )

    def built_variables(self) -> Sequence[Any]:
        if not self.optimizer.built:
            return super().built_variables()
        return keras3_names.trained.of(self.optimizer)

    def compute_gradients(
        self, loss: Loss, var_list: VarList, tape: Tape, grad_loss: tf.Tensor | None
    ) -> list[tuple[Any, Any]]:
        if not callable(loss) and tape is None:
            raise ValueError(
                "`tape` is required where the loss is a tensor. "
                f"Received: loss={loss!r}, tape={tape!r}"
            )
        tape = tape or tf.GradientTape()
        if callable(loss):
            with tape:
                if not callable(var_list):
                    tape.watch([native(v) for v in tf.nest.flatten(var_list)])
                loss = loss()
        if callable(var_list):
            var_list = var_list()
        variables: list[Any] = tf.nest.flatten(var_list)
        of_loss = None if grad_loss is None else [grad_loss]
        gradients = tape.gradient([loss], variables, output_gradients=of_loss)
        return list(zip(gradients, variables))

    def apply(self, grads_and_vars: Pairs, name: str | None, aggregate: bool) -> Applied:
        del name
        self._refuse_second_scale()
        with replaced(_thread, "is_done", not aggregate):
            return self.optimizer.apply_gradients(grads_and_vars)

    def completes_step(self) -> tf.Tensor | None:
        steps = self.optimizer.gradient_accumulation_steps
        if not steps:
            return None
        return tf.equal((native(keras3_names.iterations.of(self.optimizer)) + 1) % steps, 0)

    def totals(self, grads_and_vars: Pairs) -> Pairs:
        of_variable = self._accumulators()
        accumulated = {id(native(v)): (tf.convert_to_tensor(a.value), v) for v, a in of_variable}
        totals = []
        for gradient, variable in grads_and_vars:
            total, _ = accumulated.pop(id(native(variable)), (None, None))
            if gradient is not None:
                gradient = tf.convert_to_tensor(gradient)
                total = gradient if total is None else gradient + total
            totals.append((total, variable))
        return [*totals, *accumulated.values()]

    def drop_accumulated(self) -> None:
        for _, accumulator in self._accumulators():
            accumulator.assign(tf.zeros_like(accumulator.value))
        # Keras counts gradients here; `iterations` are the steps made of them.
        keras3_names.iterations.of(self.optimizer).assign_sub(
            self.optimizer.gradient_accumulation_steps - 1
        )

    def _accumulators(self) -> list[tuple[Any, Any]]:
        optimizer = self.optimizer
        variables, accumulated = keras3_names.trained, keras3_names.accumulated
        pairs = zip(variables.of(optimizer), accumulated.of(optimizer), strict=True)
        return [(variable, a) for variable, a in pairs if a is not None]

    def is_overwritten(self, variable: tf.Variable) -> bool:
        return getattr(variable, "overwrite_with_gradient", False)


def _build(optimizer: keras.optimizers.Optimizer, variables: Iterable[Any]) -> None:
    # What Keras assigns while it builds would be a part of the step.
    with tf.init_scope(), new_variables.made_at_once(), keras.name_scope(optimizer.name):
        optimizer.build(list(variables))


@contextlib.contextmanager
def making_at_once(optimizer: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Context manager for a call that applies gradients.

    What the optimizer lacks is made at once, so that a function is traced once.

    Args:
        optimizer: the optimizer, which is built for `variables`.
        variables: sequence of the variables; empty if they are not known.
    """
    if variables and not optimizer.built and not tf.distribute.has_strategy():
        _build(optimizer, variables)
    yield


def deserialize_optimizer(
    config: dict[str, Any], custom_objects: dict[str, Any] | None = None
) -> keras.optimizers.Optimizer:
    """Makes an optimizer of the result of `serialize_optimizer`.

    Keras's own function knows few classes, and each by a name that a program's may have, too.
    """
    package, _, _ = (config.get("module") or "keras").partition(".")
    if package in ("keras", "tf_keras"):
        found = keras.optimizers.deserialize(dict(config), custom_objects)
        if not isinstance(found, str):  # the name of a class that is not in its table
            return found
    return keras.utils.deserialize_keras_object(config, custom_objects=custom_objects)


def track_variables(variables: Iterable[tf.Variable]) -> None:
    """Lets Keras initialize variables together with its own.

    It is for graphs of TensorFlow 1.
    """
    del variables  # It has no graphs of TensorFlow 1.


def keras_layout(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns a trackable of what ours and Keras's `LossScaleOptimizer` share.

    It has their names in checkpoints of the latter.
    """
    layout: Any = tf.Module()
    layout.inner_optimizer = optimizer.inner_optimizer
    layout.dynamic_scale, layout.step_counter = optimizer.dynamic_scale, optimizer.step_counter
    return layout


# The wrappers of optimizers that scale the loss: ours, and Keras's own. One that is gone wraps
# nothing any more.
_Wrappers = weakref.WeakKeyDictionary[Any, "weakref.ref[Any]"]
_ours, _keras_own = _Wrappers(), _Wrappers()


def _is_in(wrappers: _Wrappers, optimizer: keras.optimizers.Optimizer) -> bool:
    reference = wrappers.get(optimizer)
    return reference is not None and reference() is not None


def is_in_keras_wrapper(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether Keras's own `LossScaleOptimizer` wraps an optimizer, if known."""
    return _is_in(_keras_own, optimizer)


def note_wrapper(
    optimizer: keras.optimizers.Optimizer, wrapper: keras.optimizers.Optimizer
) -> None:
    """Keeps Keras's own `LossScaleOptimizer` from wrapping what ours wraps."""
    _ours[optimizer] = weakref.ref(wrapper)


def noting_what_is_wrapped(init: Callable[..., None]) -> Callable[..., None]:
    """Notes the optimizers that Keras's own wrapper wraps, as Keras 3 does not."""

    def __init__(
        self: Any, inner_optimizer: keras.optimizers.Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        if _is_in(_ours, inner_optimizer):
            raise ValueError(
                "The optimizer is wrapped by a keras_mp.LossScaleOptimizer already "
                "(Model.compile may have done so: look at `model.optimizer`), so the loss "
                "would be scaled twice. Use that one, or make a new optimizer. "
                f"Received: inner_optimizer={inner_optimizer!r}"
            )
        init(self, inner_optimizer, *args, **kwargs)
        _keras_own[inner_optimizer] = weakref.ref(self)

    return __init__

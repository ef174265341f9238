"""What is around the steps of a compiled model.

`fit`, `evaluate` and `predict` call them.
"""

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp import hooks, keras_api
from keras_mp.hooks import Method, Replacement, When, reach
from keras_mp.layer_calls import layer_call
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.models import step_tapes
from keras_mp.policy import Policy
from keras_mp.step import state_rollback
from keras_mp.step.loss_scales import LossScale
from keras_mp.step.scaled_losses import thread
from keras_mp.variables import type_errors


def let_dtypes_mix(model: tf.keras.Model, dtype: tf.DType) -> None:
    """Puts the steps of a model in reach.

    Args:
        model: the model.
        dtype: the 16-bit DType of its policy.
    """
    hooks.install(keras_api.IN_ONE_TRACE)
    for name in ("train_step", "test_step", "predict_step"):
        _surround(model, name, dtype=dtype)


# The loss scales of compiled models that have float16 layers, for tapes of the models' own.
_loss_scales: "weakref.WeakKeyDictionary[tf.keras.Model, LossScale]" = weakref.WeakKeyDictionary()


def scale(model: tf.keras.Model, loss_scale: LossScale | None) -> None:
    """Puts a `training_step` around the `train_step` of a model.

    It also scales what the `train_step` differentiates. It does the same in a user's own `fit` or
    `train_on_batch`, which may have a loop of its own.

    Args:
        model: the model.
        loss_scale: `LossScale` for the tapes of a `train_step` whose optimizers scale nothing, or
            None if these tapes need not scale.
    """
    _loss_scales.pop(model, None)
    if loss_scale is not None:
        _loss_scales[model] = loss_scale
        _scale_loops(model)
    _surround(model, "train_step", is_scaled=True)
    if "reset_metrics" not in vars(model):
        vars(model)["reset_metrics"] = functools.partial(_new_epoch, model)


def scale_own_loops() -> None:
    """Lets the loops of models scale that are never compiled.

    A model that defines `__call__` returns float32.
    """
    step_tapes.install()
    # Keras looks at the arguments of `__init__`.
    hooks.install([Replacement(Method(tf.keras.Model, "__new__"), _with_loops, When.ALWAYS)])


def _with_loops(original: Callable[..., Any]) -> Callable[..., Any]:
    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        model = original(cls, *args, **kwargs)
        policies: tuple[Any, ...] = keras_api.get_global_policy(), kwargs.get("dtype")
        ours = [each for each in policies if isinstance(each, Policy)]
        if ours:
            layer_call.call_of_its_own(cls)
        if any(policy.scales_loss for policy in ours):
            _scale_loops(model)
        return model

    return __new__


def _scale_loops(model: tf.keras.Model) -> None:
    """Puts a function around `fit` and `train_on_batch` of a class with its own."""
    for name in ("fit", "train_on_batch"):
        if getattr(type(model), name) is not getattr(tf.keras.Model, name):
            _surround(model, name)


def _new_epoch(model: tf.keras.Model) -> None:
    """Stands in the place of `reset_metrics`, which `fit` calls where an epoch begins.

    It gives the warnings of skipped steps that XLA has compiled. After the last epoch the optimizer
    gives them, in `finalize_variable_values`.
    """
    for optimizer in wrappers_among(model.optimizer):
        optimizer._scaler.ask()
    type(model).reset_metrics(model)


class _How(NamedTuple):
    """How `_step` calls a step of a model, or a loop of its own.

    Attributes:
        of_instance: what the model had in its place, if it was not the method of its class.
        name: str. The method.
        dtype: the 16-bit DType in which it runs in reach, or None.
        is_scaled: bool. Whether it is a training step whose loss is scaled.
    """

    of_instance: Callable[..., Any] | None
    name: str
    dtype: tf.DType | None = None
    is_scaled: bool = False


def _surround(model: tf.keras.Model, name: str, **how: Any) -> None:
    """Puts `_step` in the place of a step, or changes how it calls that."""
    before: Any = vars(model).get(name)
    is_ours = getattr(before, "func", None) is _step
    known = before.args[1] if is_ours else _How(before, name)
    vars(model)[name] = functools.partial(_step, model, known._replace(**how))


def _step(model: tf.keras.Model, how: _How, *args: Any, **kwargs: Any) -> Any:
    cls = type(model)
    step = how.of_instance or getattr(cls, how.name).__get__(model, cls)
    with contextlib.ExitStack() as around:
        if how.is_scaled or not how.name.endswith("_step"):  # in a loop
            around.enter_context(_scaling_tapes(model, how))
        if how.is_scaled:
            states = keras_api.states(model)
            around.enter_context(state_rollback.training_step(model, states))
            if thread.under_way is not None:  # A graph of TensorFlow 1 has none.
                thread.under_way.watch((args, kwargs))
        if how.dtype is None:
            return step(*args, **kwargs)
        reach.begins()
        try:
            with reach.entered(how.dtype):
                return step(*args, **kwargs)
        except type_errors.ERRORS as error:
            explained = type_errors.explain_refusal(
                error,
                f"The {how.name} of the model {model.name!r} (of type {cls.__name__})",
                'make the layer whose result it uses in float32, with dtype="float32"',
            )
            if explained is None:
                raise
            raise explained.with_traceback(error.__traceback__) from None


def _scaling_tapes(model: tf.keras.Model, how: _How) -> contextlib.AbstractContextManager[None]:
    # `compile` decides for the models that it gets.
    if "train_step" not in vars(model) and model not in _loss_scales:
        policy: Any = model.dtype_policy
        if isinstance(policy, Policy) and policy.scales_loss and policy.compute_dtype == "float16":
            with model.distribute_strategy.scope():
                _loss_scales[model] = copy.deepcopy(policy.loss_scale)
    loss_scale = _loss_scales.get(model)
    if loss_scale is None:
        return contextlib.nullcontext()
    wrappers = wrappers_among(getattr(model, "optimizer", None))
    if wrappers:
        if how.is_scaled and how.of_instance is None and not has_own_train_step(model):
            return step_tapes.left()  # The optimizer scales the loss.
        loss_scale = wrappers[0]._scaler.loss_scale  # It has one by now.
    return step_tapes.entered(model, loss_scale, how.name)


def has_own_train_step(model: tf.keras.Model) -> bool:
    """Whether the class of a model has another `train_step` than Keras's."""
    return type(model).train_step is not tf.keras.Model.train_step

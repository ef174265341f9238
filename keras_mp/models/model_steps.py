"""What is around the steps of a compiled model.

`fit`, `evaluate` and `predict` call them.
"""

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks, keras_api
from keras_mp.hooks import Method, Replacement, When, observers, reach
from keras_mp.layer_calls import layer_call
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.models import step_tapes
from keras_mp.policy import Policy
from keras_mp.step import state_rollback
from keras_mp.step.loss_scales import LossScale
from keras_mp.variables import type_errors

_Step = Callable[..., Any]


def let_dtypes_mix(model: tf.keras.Model, dtype: tf.DType) -> None:
    """Puts the steps of a model in reach.

    Args:
        model: the model.
        dtype: the 16-bit DType of its policy.
    """
    hooks.install(keras_api.IN_ONE_TRACE)
    for name in ("train_step", "test_step", "predict_step"):
        of_instance = vars(model).get(name)
        if getattr(of_instance, "func", None) not in (_in_reach, _train_step):
            vars(model)[name] = functools.partial(_in_reach, model, of_instance, name, dtype)


def _in_reach(
    model: tf.keras.Model,
    of_instance: _Step | None,
    name: str,
    dtype: tf.DType,
    *args: Any,
    **kwargs: Any,
) -> Any:
    cls = type(model)
    step = of_instance or getattr(cls, name).__get__(model, cls)
    observers.reach_begins()
    try:
        with reach.entered(dtype):
            return step(*args, **kwargs)
    except type_errors.ERRORS as error:
        explained = type_errors.explain_refusal(
            error,
            f"The {name} of the model {model.name!r} (of type {cls.__name__})",
            'make the layer whose result it uses in float32, with dtype="float32"',
        )
        if explained is None:
            raise
        raise explained.with_traceback(error.__traceback__) from None


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
    of_instance = vars(model).get("train_step")
    if getattr(of_instance, "func", None) is not _train_step:
        vars(model)["train_step"] = functools.partial(_train_step, model, of_instance)
    if "reset_metrics" not in vars(model):
        vars(model)["reset_metrics"] = functools.partial(_new_epoch, model)
    if loss_scale is not None:
        _scale_loops(model)


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
        of_instance, own = vars(model).get(name), getattr(type(model), name)
        is_ours = getattr(of_instance, "func", None) is _loop
        if own is not getattr(tf.keras.Model, name) and not is_ours:
            vars(model)[name] = functools.partial(_loop, model, of_instance, name)


def _loop(
    model: tf.keras.Model, of_instance: _Step | None, name: str, *args: Any, **kwargs: Any
) -> Any:
    cls = type(model)
    method = of_instance or getattr(cls, name).__get__(model, cls)
    # `compile` decides for the models that it gets.
    if "train_step" not in vars(model) and model not in _loss_scales:
        _scale_as_policy(model)
    loss_scale = _loss_scales.get(model)
    if loss_scale is None:
        return method(*args, **kwargs)
    with step_tapes.entered(model, _scale_of(model, loss_scale), name):
        return method(*args, **kwargs)


def _scale_as_policy(model: tf.keras.Model) -> None:
    policy: Any = model.dtype_policy
    if isinstance(policy, Policy) and policy.scales_loss and policy.compute_dtype == "float16":
        with model.distribute_strategy.scope():
            _loss_scales[model] = copy.deepcopy(policy.loss_scale)


def _new_epoch(model: tf.keras.Model) -> None:
    """Stands in the place of `reset_metrics`, which `fit` calls where an epoch begins.

    It gives the warnings of skipped steps that XLA has compiled. After the last epoch the optimizer
    gives them, in `finalize_variable_values`.
    """
    for optimizer in wrappers_among(model.optimizer):
        optimizer._scaler.report.ask()
    type(model).reset_metrics(model)


def _train_step(model: tf.keras.Model, of_instance: _Step | None, *args: Any, **kwargs: Any) -> Any:
    cls = type(model)
    train_step = of_instance or cls.train_step.__get__(model, cls)
    with (
        _scaling_tapes(model, of_instance),
        state_rollback.training_step(model, keras_api.states(model)),
    ):
        step = state_rollback.under_way()
        if step is not None:  # A graph of TensorFlow 1 has none.
            step.watch((args, kwargs))
        return train_step(*args, **kwargs)


def _scaling_tapes(
    model: tf.keras.Model, of_instance: _Step | None
) -> contextlib.AbstractContextManager[None]:
    loss_scale = _loss_scales.get(model)
    if loss_scale is None:
        return contextlib.nullcontext()
    if wrappers_among(model.optimizer) and _is_keras_own(model, of_instance):
        return step_tapes.left()
    return step_tapes.entered(model, _scale_of(model, loss_scale))


def _scale_of(model: tf.keras.Model, loss_scale: LossScale) -> LossScale:
    """Returns the loss scale of the optimizer that a model has by now.

    Without one, it is the given loss scale.
    """
    wrappers = wrappers_among(getattr(model, "optimizer", None))
    return wrappers[0].loss_scale if wrappers else loss_scale


def has_own_train_step(model: tf.keras.Model) -> bool:
    """Whether the class of a model has another `train_step` than Keras's."""
    return type(model).train_step is not tf.keras.Model.train_step


def _is_keras_own(model: tf.keras.Model, of_instance: _Step | None) -> bool:
    """Whether Keras's own `train_step` trains a model.

    Its optimizer scales the loss.
    """
    while isinstance(of_instance, functools.partial) and of_instance.func is _in_reach:
        of_instance = of_instance.args[1]
    return of_instance is None and not has_own_train_step(model)

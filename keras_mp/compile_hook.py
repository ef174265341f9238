"""The one hook on `Model.compile`, the only place where keras_mp changes anything of Keras.

RFC 293, "A policy's loss scale". The hook is installed when the first `keras_mp.Policy` is made and
leaves alone every model whose policy is not one.
"""

import copy
import functools
import importlib.abc
import importlib.util
import inspect
import sys
import threading
from typing import Any

import tensorflow as tf

from keras_mp import keras_api, losses, messages, regularizers
from keras_mp import loss_scale as loss_scale_lib
from keras_mp.loss_scale_optimizer import (
    LossScaleOptimizer,
    find_loss_scale_optimizer,
    wrapper_of,
)
from keras_mp.optimizer_wrapper import OptimizerWrapper

_lock = threading.Lock()


def install(policy_class: type) -> None:
    """Hooks `Model.compile`, once.

    Args:
        policy_class: class of the policies whose models are to be given loss scaling.
    """
    with _lock:
        _hook(keras_api.COMPILE_OWNER, functools.partial(_compile, policy_class))
        if keras_api.OTHER_PACKAGE in sys.modules:
            _guard_other_keras(policy_class)
        elif not any(isinstance(finder, _OtherKerasWatch) for finder in sys.meta_path):
            sys.meta_path.insert(0, _OtherKerasWatch(policy_class))


def _guard_other_keras(policy_class: type) -> None:
    model_class = getattr(sys.modules[keras_api.OTHER_PACKAGE], "Model", None)
    if model_class is not None:
        owner = next(cls for cls in model_class.__mro__ if "compile" in vars(cls))
        _hook(owner, functools.partial(_refuse_other_keras, policy_class))


class _OtherKerasWatch(importlib.abc.MetaPathFinder):
    """Guards the other Keras once it is imported, where that is after the first policy."""

    def __init__(self, policy_class: type) -> None:
        self._policy_class = policy_class

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Finds the other Keras with the finders after this one, and waits until it is loaded."""
        if fullname != keras_api.OTHER_PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_guard(module: Any) -> None:
                load(module)
                _guard_other_keras(self._policy_class)

            spec.loader.exec_module = load_and_guard
        return spec


def _hook(owner: type, replacement: Any) -> None:
    stock_compile = vars(owner)["compile"]
    if hasattr(stock_compile, "_keras_mp_hook"):
        return

    @functools.wraps(stock_compile)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(stock_compile, self, *args, **kwargs)

    compile._keras_mp_hook = True
    owner.compile = compile


def _compile(policy_class: type, stock_compile: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        call = inspect.signature(stock_compile).bind(*args, **kwargs)
    except TypeError:
        return stock_compile(*args, **kwargs)  # which says what is wrong
    model, policy = args[0], args[0].dtype_policy
    _warn_if_made_in_another_thread(model)
    has_our_policy = isinstance(policy, policy_class)
    if not has_our_policy and not _has_lost_its_policy(model, call):
        result = stock_compile(*args, **kwargs)
        _tell_optimizers(model)
        _warn_if_unscaled(model)
        return result
    with model.distribute_strategy.scope():
        problem = keras_api.why_fit_fails()
    if problem:
        messages.warn(problem)
    call.apply_defaults()
    dtype = "float64" if policy.compute_dtype == "float64" else "float32"
    call.arguments["loss"] = losses.for_compile(call.arguments["loss"], dtype)
    for layer in keras_api.flatten_layers(model):
        regularizers.widen_activity_regularizer(layer)
    if has_our_policy and policy.scales_loss and call.arguments.get("auto_scale_loss", True):
        optimizer = call.arguments["optimizer"]
        with model.distribute_strategy.scope():
            if isinstance(optimizer, (list, tuple)):
                optimizer = type(optimizer)(_wrap(policy, one) for one in optimizer)
            else:
                optimizer = _wrap(policy, optimizer)
        call.arguments["optimizer"] = optimizer
    if has_our_policy:
        result = keras_api.compile_without_wrapping(stock_compile, call)
    else:
        result = stock_compile(*call.args, **call.kwargs)
    keras_api.widen_predictions(model)
    _tell_optimizers(model)
    if not has_our_policy or policy.compute_dtype != "float16":
        _warn_if_unscaled(model)
    return result


def _tell_optimizers(model: Any) -> None:
    for optimizer in tf.nest.flatten(getattr(model, "optimizer", None)):
        if isinstance(optimizer, OptimizerWrapper):
            optimizer.compiled_for(model)


def _has_lost_its_policy(model: Any, call: inspect.BoundArguments) -> bool:
    """Is it a mixed model that Keras has saved without the policy of its own?

    Its layers are mixed, and what it is compiled with is ours.
    """
    scaling = map(find_loss_scale_optimizer, tf.nest.flatten(call.arguments.get("optimizer")))
    given = [*scaling, *tf.nest.flatten(call.arguments.get("loss"))]
    return any(isinstance(each, LossScaleOptimizer | losses.Loss) for each in given) and any(
        layer.compute_dtype in ("float16", "bfloat16") for layer in keras_api.flatten_layers(model)
    )


def _wrap(policy: Any, optimizer: Any) -> Any:
    optimizer = keras_api.get_optimizer(optimizer)
    scaling = find_loss_scale_optimizer(optimizer)
    if scaling is not None and not isinstance(scaling, LossScaleOptimizer):
        messages.warn(
            "The model is compiled with tf.keras's own LossScaleOptimizer, which is left as it is. "
            "keras_mp.LossScaleOptimizer is safer: it judges gradients of all replicas, keeps the "
            "scale between a floor and a ceiling and leaves `iterations` alone on a skipped step. "
            "Pass the inner optimizer to compile() to get it."
        )
    if optimizer is None or scaling is not None:
        return optimizer
    wrapper = wrapper_of(optimizer)
    if wrapper is None:
        return LossScaleOptimizer(optimizer, copy.deepcopy(policy.loss_scale))
    if loss_scale_lib.serialize(wrapper.loss_scale) != loss_scale_lib.serialize(policy.loss_scale):
        messages.warn(
            "The optimizer has been compiled before and keeps the loss scale of that time, "
            f"{wrapper.loss_scale!r}, not the one of the model's policy, {policy.loss_scale!r}. "
            "Pass a new optimizer to compile() to get the latter."
        )
    return wrapper


def _warn_if_unscaled(model: Any) -> None:
    optimizers = tf.nest.flatten(getattr(model, "optimizer", None))
    if all(find_loss_scale_optimizer(optimizer) is not None for optimizer in optimizers):
        return
    half = [
        layer.name
        for layer in keras_api.flatten_layers(model)
        if layer.compute_dtype == "float16" and layer.variable_dtype == "float32"
    ]
    if half:
        messages.warn(
            f"The model {model.name!r} trains without loss scaling although {len(half)} of its "
            f"layers compute in float16 (the first is {half[0]!r}): its own policy is "
            f"{model.dtype_policy.name!r}, and small gradients may vanish. Make the whole model "
            'under keras_mp.set_global_policy("mixed_float16"), or compile it with '
            "keras_mp.LossScaleOptimizer(optimizer)."
        )


def _warn_if_made_in_another_thread(model: Any) -> None:
    if not keras_api.thread_missed_global_policy():
        return
    made_with, policy = model.dtype_policy.name, keras_api.get_global_policy().name
    if made_with != policy:
        messages.warn(
            f"The model {model.name!r} was made with the policy {made_with!r}, not with the global "
            f"one, {policy!r}: Keras 3 keeps a global policy for each thread, and this thread has "
            "not asked for ours. Call keras_mp.global_policy() in it before making the model."
        )


def _refuse_other_keras(
    policy_class: type, stock_compile: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    optimizer = kwargs.get("optimizer", args[0] if args else None)
    policy = keras_api.get_global_policy()
    if (isinstance(policy, policy_class) and policy.should_cast_variables) or any(
        isinstance(o, OptimizerWrapper) for o in tf.nest.flatten(optimizer)
    ):
        raise ValueError(
            f"keras_mp works with `tf.keras`, which is {keras_api.ROOT_PACKAGE} in this process, "
            f"and the model {model.name!r} is one of {keras_api.OTHER_PACKAGE}: neither the policy "
            f"{policy.name!r} nor a keras_mp.LossScaleOptimizer reaches it. Build the model with "
            f"`tf.keras`, or {keras_api.switch_hint()}."
        )
    return stock_compile(model, *args, **kwargs)

"""The one hook on `Model.compile`.

RFC 293, "A policy's loss scale". `import keras_mp` installs the hook, so that it also sees a policy
that was set with `tf.keras`'s own function. Models that have neither a `keras_mp.Policy` nor a
`keras_mp.LossScaleOptimizer` are compiled as before. A model that scales its loss gets its own
`train_step`, around the one of its class. `docs/changes_to_keras.md` lists everything that keras_mp
changes.
"""

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import hooks, keras_api, losses, model_summary
from keras_mp import loss_scale as loss_scale_lib
from keras_mp.hooks import Method, Replacement, When, reach
from keras_mp.loss_scale_optimizer import LossScaleOptimizer, wrapper_of, wrappers_among
from keras_mp.models import layer_paths, low_precision_weights, model_steps
from keras_mp.optimizer_wrapper import OptimizerWrapper
from keras_mp.policy import Policy
from keras_mp.step.loss_scales import LossScale
from keras_mp.support import messages, observers
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.wrappers.inner_optimizers import (
    find_loss_scale_optimizer,
    has_all_reduce,
)

Compile = Callable[..., None]


def install() -> None:
    """Hooks `Model.compile` once, also that of the other Keras if it is imported."""
    rows = [Replacement(Method.of(tf.keras.Model, "compile"), _compiling, When.ALWAYS)]
    model_class = getattr(sys.modules.get(keras_api.OTHER_PACKAGE), "Model", None)
    if model_class is not None:
        place = Method.of(model_class, "compile")
        rows.append(Replacement(place, _refusing_other_keras, When.ALWAYS))
    hooks.install(rows)


def _compiling(keras_compile: Compile) -> Compile:
    def compile(self: tf.keras.Model, *args: Any, **kwargs: Any) -> None:
        observers.tell(observers.Observer.model_is_compiled, self)
        _compile_for_policy(keras_compile, self, *args, **kwargs)
        low_precision_weights.warn_if_updates_are_lost(self)
        observers.tell(observers.Observer.model_was_compiled, self)

    return compile


def _compile_for_policy(
    keras_compile: Compile, model: tf.keras.Model, *args: Any, **kwargs: Any
) -> None:
    try:
        call = inspect.signature(keras_compile).bind(model, *args, **kwargs)
    except TypeError:
        return keras_compile(model, *args, **kwargs)  # It raises an error with the reason.
    policy = model.dtype_policy if isinstance(model.dtype_policy, Policy) else None
    if policy is None:
        _warn_if_set_too_late(model)
    _warn_if_policy_is_not_followed(model, call)
    before = next(iter(wrappers_among(getattr(model, "optimizer", None))), None)
    if policy is None and before is None and not _has_lost_its_policy(model, call):
        _warn_if_set_with_keras(model, call)
        keras_compile(model, *args, **kwargs)
        _tell_optimizers(model)
        return _warn_if_unscaled(model)
    call.apply_defaults()
    dtype = "float64" if model.compute_dtype == "float64" else "float32"
    call.arguments["loss"] = losses.for_compile(call.arguments["loss"], dtype)
    if policy is not None and policy.variable_dtype in LOW_PRECISION_NAMES:
        _wrap_optimizers(call, functools.partial(low_precision_weights.keep_digits, model))
    scaling = _how_to_scale(model, policy, before)
    is_to_scale = call.arguments.get("auto_scale_loss", True)
    if not is_to_scale or _sums_itself(model, call.arguments["optimizer"]):
        scaling = None
    if scaling is not None:
        _wrap_optimizers(call, functools.partial(_wrap, scaling))
    if policy is not None:
        keras_api.compile_without_wrapping(keras_compile, call)
    else:
        keras_compile(*call.args, **call.kwargs)
    keras_api.widen_predictions(model)
    keras_api.patch_fit(model)
    is_scaled = policy is not None and policy.scales_loss
    _tell_optimizers(model, is_scaled, None if scaling is None else scaling["loss_scale"])
    if policy is None or policy.compute_dtype != "float16":
        _warn_if_unscaled(model)
    if policy is not None and policy.low_precision_dtype is not None:
        model_steps.let_dtypes_mix(model, policy.low_precision_dtype)
        _warn_if_clipped_on_each_replica(model)


def _wrap_optimizers(call: inspect.BoundArguments, wrap: Callable[[Any], Any]) -> None:
    """Wraps the optimizer, or each of the optimizers, in the arguments of `compile`."""
    optimizer = call.arguments["optimizer"]
    with call.args[0].distribute_strategy.scope():
        if isinstance(optimizer, (list, tuple)):
            optimizer = type(optimizer)(wrap(one) for one in optimizer)
        else:
            optimizer = wrap(optimizer)
    call.arguments["optimizer"] = optimizer


def _tell_optimizers(
    model: tf.keras.Model, is_scaled: bool = False, loss_scale: LossScale | None = None
) -> None:
    """Tells the optimizers of a model that Keras has compiled it.

    Args:
        model: the model.
        is_scaled: bool. Whether its loss is scaled, even if its optimizers are not those passed to
            `compile`. Defaults to False.
        loss_scale: the `LossScale` that scales it, or None for the one of its optimizer, if any.
    """
    optimizers = getattr(model, "optimizer", None)
    for optimizer in tf.nest.flatten(optimizers):
        if isinstance(optimizer, OptimizerWrapper):
            optimizer.compiled_for(model)
            keras_api.patch_fit(model)
    wrappers = wrappers_among(optimizers)
    for wrapper in wrappers:
        wrapper._scaler.paths = functools.partial(_paths_of_weights, weakref.ref(model))
    if not wrappers and not is_scaled:
        return
    if wrappers:
        loss_scale = wrappers[0].loss_scale
    elif loss_scale is not None:
        with model.distribute_strategy.scope():
            loss_scale = copy.deepcopy(loss_scale)
    is_float16 = model.compute_dtype == "float16" or _float16_layers(model)
    model_steps.scale(model, loss_scale if is_float16 else None)


def _paths_of_weights(reference: "weakref.ref[Any]") -> dict[int, str]:
    model = reference()
    return layer_paths.paths_of_weights(model) if model is not None and model.built else {}


def _has_lost_its_policy(model: tf.keras.Model, call: inspect.BoundArguments) -> bool:
    """Whether Keras has saved a mixed model without the policy of the model itself."""
    return _is_compiled_with_ours(model, call) and any(
        layer.compute_dtype in LOW_PRECISION_NAMES for layer in keras_api.flatten_layers(model)
    )


def _is_compiled_with_ours(model: tf.keras.Model, call: inspect.BoundArguments) -> bool:
    """Whether the old or new `compile` has an optimizer or a loss of keras_mp."""
    optimizers = [call.arguments.get("optimizer"), getattr(model, "optimizer", None)]
    found = tf.nest.flatten([call.arguments.get("loss"), getattr(model, "loss", None)])
    return bool(wrappers_among(optimizers)) or any(isinstance(each, losses.Loss) for each in found)


def _how_to_scale(
    model: tf.keras.Model,
    policy: tf.keras.mixed_precision.Policy | None,
    before: LossScaleOptimizer | None,
) -> dict[str, Any] | None:
    """Returns how to scale a model's loss: as its policy says, else as before.

    Args:
        model: the model.
        policy: the model's `keras_mp.Policy`, or None.
        before: the optimizer that has scaled the model's loss so far, or None.

    Returns:
        Arguments of a `LossScaleOptimizer`, or None for no loss scaling.
    """
    if policy is not None and policy.scales_loss:
        return {"loss_scale": policy.loss_scale}
    # Layers from a file may not follow the policy that was in force when they were loaded.
    has_a_say = policy is not None and (
        policy.compute_dtype == "float16" or not _float16_layers(model)
    )
    if before is None or has_a_say:
        return None
    return {
        "loss_scale": loss_scale_lib.get(loss_scale_lib.serialize(before.loss_scale)),
        "reduce_dtype": before.reduce_dtype,
        "warn_after_skips": before.warn_after_skips,
        "raise_after_skips": before.raise_after_skips,
    }


def _sums_itself(model: tf.keras.Model, optimizers: Any) -> bool:
    """Whether an `AllReduceOptimizer` trains layers that do not follow the policy.

    It happens where a file is loaded under another policy, since Keras does not save the policy of
    a model.
    """
    if not any(map(has_all_reduce, tf.nest.flatten(optimizers))):
        return False
    layers = [
        layer
        for layer in keras_api.flatten_layers(model)
        if layer.built and not keras_api.layers_inside(layer) and layer.weights
    ]
    in_float16 = [layer for layer in layers if layer.compute_dtype == "float16"]
    return model.compute_dtype == "float16" and bool(layers) and not in_float16


def _wrap(
    scaling: dict[str, Any], optimizer: tf.keras.optimizers.Optimizer
) -> tf.keras.optimizers.Optimizer:
    # One of TensorFlow 1, or Keras 2's own around it. In a step with another optimizer tapes scale.
    if isinstance(getattr(optimizer, "optimizer", optimizer), tf.compat.v1.train.Optimizer):
        return optimizer
    optimizer = keras_api.get_optimizer(optimizer)
    original = find_loss_scale_optimizer(optimizer)
    if original is not None and not isinstance(original, LossScaleOptimizer):
        messages.warn(
            "The model is compiled with tf.keras's own LossScaleOptimizer, which is left as it "
            "is. keras_mp.LossScaleOptimizer is safer: it checks the gradients of all replicas, "
            "keeps the scale within bounds, and does not advance `iterations` in a skipped step. "
            "Pass the inner optimizer to compile() to get it."
        )
    if optimizer is None or original is not None:
        return optimizer
    wrapper, loss_scale = wrapper_of(optimizer), scaling["loss_scale"]
    if wrapper is None:
        return LossScaleOptimizer(optimizer, **{**scaling, "loss_scale": copy.deepcopy(loss_scale)})
    if loss_scale_lib.serialize(wrapper.loss_scale) != loss_scale_lib.serialize(loss_scale):
        messages.warn(
            "The optimizer has been compiled before and keeps the loss scale of that time, "
            f"{wrapper.loss_scale!r}, not the one of the model, {loss_scale!r}. Pass a new "
            "optimizer to compile() to get the latter."
        )
    return wrapper


def _float16_layers(model: tf.keras.Model) -> list[str]:
    """Returns the names of layers that compute in float16 with float32 variables."""
    return [
        layer.name
        for layer in keras_api.flatten_layers(model)
        if layer.compute_dtype == "float16" and layer.variable_dtype == "float32"
    ]


def _warn_if_unscaled(model: tf.keras.Model) -> None:
    optimizers = tf.nest.flatten(getattr(model, "optimizer", None))
    if all(find_loss_scale_optimizer(optimizer) is not None for optimizer in optimizers):
        return
    in_float16, region = _float16_layers(model), reach.region()
    if region is not None and region.dtype == tf.float16 and not in_float16:
        messages.warn(
            f"The model {model.name!r} is compiled in a region of `keras_mp.autocast` with "
            "float16, and without loss scaling: small gradients may vanish. Compile it with "
            "keras_mp.LossScaleOptimizer(optimizer), or use bfloat16."
        )
    if in_float16:
        messages.warn(
            f"The model {model.name!r} trains without loss scaling although {len(in_float16)} of "
            f"its layers compute in float16 (the first is {in_float16[0]!r}): its own policy is "
            f"{model.dtype_policy.name!r}, and small gradients may vanish. Make the whole model "
            'under keras_mp.set_global_policy("mixed_float16"), or compile it with '
            "keras_mp.LossScaleOptimizer(optimizer)."
        )


def _warn_if_clipped_on_each_replica(model: tf.keras.Model) -> None:
    """Warns of an optimizer that clips before gradients are summed."""
    replicas = model.distribute_strategy.num_replicas_in_sync
    if not keras_api.CLIPS_ON_EACH_REPLICA or replicas == 1:
        return
    for optimizer in tf.nest.flatten(getattr(model, "optimizer", None)):
        names = ("clipnorm", "global_clipnorm", "clipvalue")
        used = [name for name in names if getattr(optimizer, name, None) is not None]
        if used and find_loss_scale_optimizer(optimizer) is None and not has_all_reduce(optimizer):
            messages.warn(
                f"The model {model.name!r} trains on {replicas} replicas, and {used[0]!r} of its "
                "optimizer clips the gradients of each replica, before they are summed; under "
                "mixed_float16 it clips the sum, and so another norm. To clip the sum here, too: "
                'compile(keras_mp.AllReduceOptimizer(optimizer, reduce_dtype="float32"), ...).'
            )


def _warn_if_policy_is_not_followed(model: tf.keras.Model, call: inspect.BoundArguments) -> None:
    problem = model_summary.policy_not_followed(model, call.arguments.get("optimizer"))
    if problem is None:
        return
    # Under the policy that is in force, layers may well be in float32 on purpose.
    is_of_another = model.dtype_policy.name != keras_api.get_global_policy().name
    if is_of_another or _is_compiled_with_ours(model, call):
        messages.warn(f"The model {model.name!r}: {problem}")


def _warn_if_set_too_late(model: tf.keras.Model) -> None:
    """Warns if the global policy was set after the model was made."""
    policy = keras_api.get_global_policy()
    dtypes = {layer.compute_dtype for layer in keras_api.flatten_layers(model)}
    if policy.compute_dtype in LOW_PRECISION_NAMES and not dtypes & {*LOW_PRECISION_NAMES}:
        messages.warn(
            f"The model {model.name!r} computes in {model.compute_dtype}, since it was made "
            f"before the global policy was set to {policy.name!r}: a layer keeps the policy under "
            f'which it was created. Move the line keras_mp.set_global_policy("{policy.name}") up, '
            "above those that make the model. (A model that is to stay as it is can be made under "
            f'keras_mp.policy_scope("{model.dtype_policy.name}").)'
        )


def _warn_if_set_with_keras(model: tf.keras.Model, call: inspect.BoundArguments) -> None:
    """Warns of a mixed global policy of Keras, unless Keras's wrapper is used as well."""
    policy, original = keras_api.get_global_policy(), model.dtype_policy
    optimizers = tf.nest.flatten(call.arguments.get("optimizer"))
    if (
        not isinstance(policy, Policy)
        and original.name == policy.name
        and original.compute_dtype != original.variable_dtype
        and keras_api.quantized_policy(policy.name) is None  # `set_global_policy` lets it pass.
        and not any(isinstance(each, keras_api.KerasLossScaleOptimizer) for each in optimizers)
    ):
        messages.warn(
            f"The global policy {policy.name!r} was set with the function of tf.keras, so the "
            f"model {model.name!r} gets Keras's own mixed precision, and neither the loss scaling "
            f'nor the losses of keras_mp. Call keras_mp.set_global_policy("{policy.name}") in its '
            "place. (To keep Keras's own, wrap the optimizer yourself, or ignore this.)"
        )


def _refusing_other_keras(keras_compile: Compile) -> Compile:
    def compile(self: tf.keras.Model, *args: Any, **kwargs: Any) -> None:
        optimizer = kwargs.get("optimizer", args[0] if args else None)
        policy = keras_api.get_global_policy()
        if (isinstance(policy, Policy) and policy.should_cast_variables) or any(
            isinstance(each, OptimizerWrapper) for each in tf.nest.flatten(optimizer)
        ):
            raise ValueError(
                f"keras_mp works with `tf.keras`, which is {keras_api.ROOT_PACKAGE} in this "
                f"process, and the model {self.name!r} is one of {keras_api.OTHER_PACKAGE}: "
                f"neither the policy {policy.name!r} nor a keras_mp.LossScaleOptimizer reaches it. "
                f"Build the model with `tf.keras`, or {keras_api.switch_hint()}."
            )
        keras_compile(self, *args, **kwargs)

    return compile

"""Loss scaling for any TensorFlow code.

Many losses and optimizers share one scale.

PyTorch's AMP feature proposal, "Gradient scaling".
"""

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_mp import loss_scale as loss_scale_lib
from keras_mp.step import gradients, replicas
from keras_mp.step.grad_scaler_calls import GradScalerCalls
from keras_mp.step.loss_scales import DynamicLossScale, FixedLossScale, LossScale
from keras_mp.step.scaled_losses import thread
from keras_mp.step.scaled_step import make_step
from keras_mp.step.scaler import SharedScaler
from keras_mp.support import host, observers, validation
from keras_mp.support.autograph import do_not_convert
from keras_mp.wrappers import inner_optimizers
from keras_mp.wrappers.scaler_properties import ScalerProperties

NewScale = float | tf.Tensor | tf.Variable | LossScale


class GradScaler(ScalerProperties, tf.Module):
    """Scales losses, and unscales, judges and applies their gradients.

    It works with any optimizers. A `keras_mp.LossScaleOptimizer` is for one optimizer of
    `tf.keras`. A `GradScaler` is for several optimizers and losses that share one scale, and for
    code without Keras. A training step calls

    - `scale` with its losses, under the tape, as often as it likes;
    - `unscale` with gradients that it wants to look at or to clip, if any;
    - `step` for each optimizer, which sums gradients over replicas, unscales those that are still
      scaled, and applies them, or skips the step if they are not finite;
    - `update` once at the end, which moves the scale.

    Each optimizer gets its own verdict: one whose gradients overflowed is skipped, the others make
    their steps, and the scale backs off. A step that is skipped changes nothing. What the forward
    pass assigned to weights is put back if a `keras_mp.training_step` is around all of it. A fixed
    scale skips nothing, unless `skip_nonfinite` is set.

    A wrong call, such as a second `step` before `update`, is an error. In a `tf.function` in which
    nothing was called before, and where no call elsewhere is known, it is a
    `MixedPrecisionWarning` when the function is traced, and that step is not made.

    The scaler is a `tf.Module`: put it into a `tf.train.Checkpoint` beside the model and the
    optimizers. Make it in the scope of the strategy under which it is used. Threads share one
    training step: `update` is called once for all of them.

    Args:
        loss_scale: `"dynamic"` (the default), a positive number for a fixed scale, or a
            `keras_mp.LossScale`. With None, nothing is scaled, and nothing is skipped unless
            `skip_nonfinite` is set.
        enabled: bool. False has the effect of `loss_scale=None`, whatever the other arguments are:
            the calls stay the same, without loss scaling. Defaults to True.
        skip_nonfinite: bool. Skips steps with a fixed scale too, or without any scale. It is for
            training in bfloat16 or float32 that one bad batch must not end. Defaults to False.
        aggregate_in_float16: bool. Sums float32 gradients over replicas as float16, still scaled,
            in half the bytes. Needs a scale that skips overflowing steps. Defaults to True, unless
            `reduce_dtype` is passed.
        reduce_dtype: `"float16"`, `"bfloat16"`, `"float32"`, or such a DType. The dtype in which
            float32 gradients are summed over replicas: `"float16"` is `aggregate_in_float16=True`.
            Defaults to None, which leaves it to `aggregate_in_float16`.
        warn_after_skips: int, or None for never. The number of steps in a row, in each of which an
            optimizer was skipped, after which to warn. The warning says whether the loss itself is
            non-finite or only its gradients. Defaults to 50.
        raise_after_skips: int, or None for never (the default). The number of skipped steps in a
            row after which training ends with a RuntimeError. In a function it comes as a
            `tf.errors.OpError` with the same text; where XLA compiles the step, it comes as late as
            a warning would.
        name: str. The name of the module.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument has a wrong value, or the current strategy is one under which loss
            scaling does not work.

    Example:

    >>> scaler = keras_mp.GradScaler()
    >>> optimizer = tf.keras.optimizers.SGD(0.25)
    >>> v = tf.Variable(1.0)
    >>> with tf.GradientTape() as tape:
    ...     scaled_loss = scaler.scale(v**2)
    >>> applied = scaler.step(optimizer, [(tape.gradient(scaled_loss, v), v)])
    >>> scaler.update()
    >>> float(v), bool(applied), float(scaler.loss_scale())
    (0.5, True, 32768.0)

    Source: PyTorch's AMP feature proposal, "Gradient scaling"; RFC 293, "LossScaleOptimizer
    Overview".
    """

    _configured: LossScale | None
    _step_calls: GradScalerCalls
    _scaler: SharedScaler

    def __init__(
        self,
        loss_scale: loss_scale_lib.LossScaleArgument = "dynamic",
        *,
        enabled: bool = True,
        skip_nonfinite: bool = False,
        aggregate_in_float16: bool | None = None,
        reduce_dtype: str | tf.DType | None = None,
        warn_after_skips: int | None = 50,
        raise_after_skips: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name or "grad_scaler")
        configured = loss_scale_lib.get(loss_scale)
        self._enabled = validation.boolean("enabled", enabled)
        self._skip_nonfinite = validation.boolean("skip_nonfinite", skip_nonfinite)
        used = configured if enabled and configured is not None else FixedLossScale(1)
        # This is not an ordinary attribute, since checkpoints would contain that.
        vars(self)["_configured"] = configured
        self._step_calls = GradScalerCalls(used, scales=used is configured)
        how = {"warn_after_skips": warn_after_skips, "raise_after_skips": raise_after_skips}
        how |= {"reduce_dtype": reduce_dtype, "aggregate_in_float16": aggregate_in_float16}
        self._scaler = SharedScaler(used, skip_nonfinite=enabled and skip_nonfinite, **how)
        observers.tell(observers.Observer.scaler_was_made)

    enabled = property(lambda self: self._enabled, doc="Whether it scales, or skips, anything.")

    @do_not_convert
    def scale(self, losses: Any) -> Any:
        """Multiplies losses by the loss scale.

        All losses that are scaled between two calls of `update` are multiplied by the same number,
        so that their gradients can be added up.

        Args:
            losses: float tensor of any shape, or a nested structure of them.

        Returns:
            The same structure of tensors, in float32 or wider; `losses` itself if nothing is
            scaled.

        Raises:
            TypeError: a loss is not a floating-point tensor.
        """
        self._check_mode()
        return self._step_calls.scale(losses)

    @do_not_convert
    def unscale(self, grads: Iterable[Any], optimizer: Any = None) -> list[Any]:
        """Divides gradients by the loss scale, so that they can be looked at or clipped.

        `step` then takes them as they are. If one of them is not finite, the step is skipped, even
        if the gradient is made finite afterwards.

        Args:
            grads: iterable of tensors, `tf.IndexedSlices` (which stay sparse) and None.
            optimizer: The optimizer of the gradients, as it will be passed to `step`. It may be
                left out if only one optimizer is used.

        Returns:
            list of the gradients, each in the dtype it came in.

        Raises:
            TypeError: `grads` is not a flat list of gradients.
            ValueError: the gradients are unscaled already, no loss was scaled, or there are several
                optimizers and `optimizer` is None.
        """
        self._check_mode()
        return self._step_calls.unscale(
            gradients.convert(grads), optimizer, may_skip=self._scaler.can_skip
        )

    @do_not_convert
    def step(
        self, optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], *, aggregate: bool = True
    ) -> tf.Tensor:
        """Applies gradients, or skips the step if they are not finite.

        Args:
            optimizer: An optimizer of `tf.keras`, a `tf.compat.v1.train.Optimizer`, an object with
                a method `apply(updates, parameters)`, or a function that takes a list of
                (gradient, variable) pairs.
            grads_and_vars: iterable of (gradient, variable) pairs, scaled or unscaled with
                `unscale`. A gradient may be None.
            aggregate: bool. False where the gradients are summed over replicas already. Defaults
                to True.

        Returns:
            bool scalar tensor, whether the gradients were applied.

        Raises:
            TypeError: `optimizer` is something else, or scales its loss itself.
            ValueError: there are no gradients, it is the second step of the optimizer since the
                last `update`, no loss was scaled since then, or the call is in a cross-replica
                context.
        """
        self._check_mode()
        inner_optimizers.refuse_second(optimizer, "GradScaler")
        adapter = inner_optimizers.adapter_of(optimizer, takes_others=True)
        pairs = gradients.checked_pairs(grads_and_vars, may_be_empty=False)
        adapter.build([variable for _, variable in pairs])
        with self._step_calls.applying(optimizer) as state:
            if state is None:
                return tf.constant(False)
            _, finite = make_step(adapter, pairs, state, self._scaler, aggregate=aggregate)
        return tf.constant(True) if finite is None else finite

    @do_not_convert
    def update(self, new_scale: NewScale | None = None) -> None:
        """Ends the training step: moves a dynamic scale, once for all optimizers.

        The scale backs off if an optimizer was skipped since the last call. If none was, that
        counts as a good step. After `increment_period` good steps the scale grows.

        Args:
            new_scale: int, float, or float scalar tensor, within the bounds of the loss scale,
                which are `2**-24` and `2**126` by default. It sets the scale instead, which must be
                a dynamic one. It may be given without any `step`. In a function, a tensor that is
                out of bounds or not finite leaves the scale as it is. It is ignored where nothing
                is scaled.

        Raises:
            TypeError: `new_scale` is not a number.
            ValueError: no step was made since the last call, `new_scale` is out of bounds, or the
                scale is a fixed one.
        """
        self._check_mode()
        if new_scale is not None:
            new_scale = self._checked_scale(new_scale)
        has_stepped = self._step_calls.update(begins_anew=new_scale is not None)

        if self._scaler.can_skip:
            update = functools.partial(self._scaler.update, has_stepped, new_scale)
            replicas.once_for_all_replicas(update)
        if thread.under_way is not None:
            thread.under_way.begin()

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal scaler.

        The state of the loss scale is not among the arguments; it is in checkpoints.
        """
        return {
            "loss_scale": loss_scale_lib.serialize(self._configured),
            "enabled": self._enabled,
            **self._config_of_scaler(),
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "GradScaler":
        """Makes a scaler from a config.

        Args:
            config: dict of constructor arguments, the result of `get_config`.

        Returns:
            A new scaler, in its initial state.
        """
        return cls(**config)

    def _checked_scale(self, new_scale: Any) -> tf.Tensor | None:
        scale: Any = self._scaler.loss_scale
        if not self._step_calls.scales:
            return None
        if not isinstance(scale, DynamicLossScale):
            raise ValueError(
                "Only a dynamic loss scale can be set. "
                f"Received: new_scale={new_scale!r} with {scale!r}"
            )
        low, high = scale.min_loss_scale, scale.max_loss_scale
        if tf.is_tensor(new_scale) or isinstance(new_scale, LossScale):
            new_scale = tf.cast(tf.convert_to_tensor(new_scale), tf.float64)  # pyright: ignore
            if not tf.executing_eagerly():
                # Comparisons with NaN are False.
                is_valid = (new_scale >= low) & (new_scale <= high)
                return tf.where(is_valid, tf.cast(new_scale, tf.float32), scale())
            new_scale = new_scale.numpy().tolist()
        return tf.constant(
            validation.number("new_scale", new_scale, at_least=low, at_most=high), tf.float32
        )

    def _check_mode(self) -> None:
        if host.in_v1_graph():
            raise RuntimeError(
                "A GradScaler works in eager code and in tf.function. In a graph of TensorFlow 1 "
                "use a keras_mp.LossScaleOptimizer."
            )

"""The optimizer wrapper that scales the loss.

RFC 293, "LossScaleOptimizer Overview" and "LossScaleOptimizer API".
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.loss_scale import DynamicLossScale, LossScaleArgument, required, serialize
from keras_mp.optimizer_wrapper import OptimizerWrapper
from keras_mp.step import gradients
from keras_mp.step.optimizer_adapter import Loss
from keras_mp.step.optimizer_calls import OptimizerCalls
from keras_mp.step.record import GradientState
from keras_mp.step.scaler import Scaler
from keras_mp.support import observers, validation
from keras_mp.support.autograph import do_not_convert
from keras_mp.wrappers import inner_optimizers
from keras_mp.wrappers.scaler_properties import ScalerProperties

_wrappers: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def wrapper_of(optimizer: tf.keras.optimizers.Optimizer) -> "LossScaleOptimizer | None":
    """Returns the `LossScaleOptimizer` that wraps `optimizer`, or None.

    Args:
        optimizer: An optimizer of `tf.keras`.
    """
    return _wrappers.get(optimizer, lambda: None)()


def wrappers_among(optimizers: Any) -> "list[LossScaleOptimizer]":
    """Returns the optimizers of this class that scale the loss of a model.

    Args:
        optimizers: An optimizer, None, or a structure of them, as a model was compiled with.
    """
    found = map(inner_optimizers.find_loss_scale_optimizer, tf.nest.flatten(optimizers))
    return [optimizer for optimizer in found if isinstance(optimizer, LossScaleOptimizer)]


def _of_dynamic(name: str) -> property:
    """Returns a property that the dynamic scale of an optimizer has."""
    doc = f"The `{name}` of a dynamic scale; None for a fixed one."
    return property(lambda optimizer: getattr(optimizer.loss_scale, name, None), doc=doc)


@keras_api.register_serializable
class LossScaleOptimizer(ScalerProperties, OptimizerWrapper, keras_api.KerasLossScaleOptimizer):
    """An optimizer that applies loss scaling, against underflow in float16.

    A step consists of these parts: multiply the loss by the loss scale; compute the gradients; sum
    them over all replicas; find out whether they are finite; divide them by the loss scale; let the
    inner optimizer clip and apply them. If a dynamic scale made a gradient overflow, the step is
    skipped on every replica: weights, slots, averages and `iterations` stay as they are, and the
    scale backs off. What the forward pass assigned to weights, such as moving statistics, is put
    back in `Model.fit`, and elsewhere in a `keras_mp.training_step`. A fixed scale skips nothing. A
    step is skipped if the sum of an unscaled gradient is not finite, which is quicker to find out
    than whether each value is finite. Where gradients are not float32, or XLA compiles the step,
    each value is tested.

    `minimize` and `Model.fit` do all of this, and `Model.compile` wraps the optimizer itself under
    a `keras_mp.Policy` with a loss scale. Loops with a `tf.GradientTape` call `get_scaled_loss` and
    `get_unscaled_gradients` (the RFC's way). Or they call `scale_loss` and then `apply_gradients`
    or `apply` with the gradients as they are (Keras 3's way). Both ways work on both Kerases.

    Everything that Keras's own class offers works too: `dynamic`, `initial_scale`,
    `dynamic_growth_steps` and `dynamic_counter` of TensorFlow 2.4-2.15, `dynamic_scale` and
    `step_counter` of Keras 3. `loss_scale` is a `LossScale`: call it, or use it as the tensor that
    it was in TensorFlow 2.4.

    Args:
        inner_optimizer: The optimizer to wrap: an instance, a name such as `"adam"`, or a config.
        loss_scale: `"dynamic"` (the default), a positive number for a fixed scale, or a
            `keras_mp.LossScale`. None scales nothing, and needs `skip_nonfinite`.
        aggregate_in_float16: bool. Sums float32 gradients over replicas as float16, still scaled,
            in half the bytes. Needs a scale that skips overflowing steps: with a fixed one,
            gradients are summed in float32. Defaults to True, unless `reduce_dtype` is passed.
        reduce_dtype: `"float16"`, `"bfloat16"`, `"float32"`, or such a DType. The dtype in which
            float32 gradients are summed over replicas: `"float16"` is `aggregate_in_float16=True`.
            `"bfloat16"` takes half the bytes with any scale, and rounds to 8 bits instead of 11.
            Defaults to None, which leaves it to `aggregate_in_float16`.
        name: str. Defaults to the inner optimizer's name.
        warn_after_skips: int, or None for never. The number of skipped steps in a row after which
            to warn. The warning says whether the loss itself is non-finite or only its gradients.
            Defaults to 50.
        raise_after_skips: int. The number of skipped steps in a row after which to raise a
            RuntimeError, in a function a `tf.errors.OpError`. Defaults to None, for never.
        skip_nonfinite: bool. Skips steps with a fixed scale too, or without any scale. It is for
            training in bfloat16 or float32 that one bad batch must not end. Defaults to False.
        dynamic: bool. Older spelling: False means a fixed scale of `initial_scale`.
        initial_scale: number. Older spelling of the (initial) scale.
        dynamic_growth_steps: int. Older spelling of the scale's `increment_period`.

    Attributes:
        policy_in_file: str or None. If the optimizer comes from a file: the policy of the 16-bit
            layers of the model with which it was saved.

    Raises:
        TypeError: `inner_optimizer` is not an optimizer of `tf.keras`, or is a
            LossScaleOptimizer itself.
        ValueError: `inner_optimizer` is wrapped already, arguments contradict each other, or the
            current strategy is one under which loss scaling does not work.

    Example:

    >>> optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(0.25))
    >>> v = tf.Variable(1.0)
    >>> _ = optimizer.minimize(lambda: v**2, [v])
    >>> float(v)
    0.5
    >>> with tf.GradientTape() as tape:
    ...     scaled_loss = optimizer.get_scaled_loss(v**2)
    >>> scaled_gradients = tape.gradient(scaled_loss, [v])
    >>> gradients = optimizer.get_unscaled_gradients(scaled_gradients)
    >>> _ = optimizer.apply_gradients(zip(gradients, [v]))
    >>> float(v)
    0.25
    >>> float(optimizer.loss_scale()), int(optimizer.steps_skipped)
    (32768.0, 0)

    Source: RFC 293, "LossScaleOptimizer Overview".
    """

    _step_calls: OptimizerCalls
    policy_in_file: str | None = None

    def __init__(
        self,
        inner_optimizer: tf.keras.optimizers.Optimizer | str | dict[str, Any],
        loss_scale: LossScaleArgument = "dynamic",
        aggregate_in_float16: bool | None = None,
        *,
        reduce_dtype: str | tf.DType | None = None,
        name: str | None = None,
        warn_after_skips: int | None = 50,
        raise_after_skips: int | None = None,
        skip_nonfinite: bool = False,
        **older: Any,
    ) -> None:
        super().__init__(inner_optimizer)
        wrapped = list(inner_optimizers.chain(self.inner_optimizer))
        for each in wrapped:
            whose = "tf.keras's own" if wrapper_of(each) is None else "a"
            if whose == "a" or keras_api.is_in_keras_wrapper(each):
                raise ValueError(
                    f"The optimizer is wrapped by {whose} "
                    "LossScaleOptimizer already (Model.compile may have done so: look at "
                    "`model.optimizer`), so the loss would be scaled twice. Use that one, or make "
                    f"a new optimizer. Received: inner_optimizer={self.inner_optimizer!r}"
                )
        skip_nonfinite = validation.boolean("skip_nonfinite", skip_nonfinite)
        scales = loss_scale is not None or not skip_nonfinite
        loss_scale = loss_scale if scales else 1
        if older:
            from keras_mp.wrappers import older_spellings

            loss_scale = older_spellings.loss_scale_of(loss_scale, **older)
        loss_scale = required(loss_scale, "LossScaleOptimizer", "the inner optimizer itself")
        how: dict[str, Any] = {"warn_after_skips": warn_after_skips}
        how |= {"raise_after_skips": raise_after_skips, "skip_nonfinite": skip_nonfinite}
        how |= {"reduce_dtype": reduce_dtype, "aggregate_in_float16": aggregate_in_float16}
        self._name, self._skip_nonfinite = name, skip_nonfinite
        self._scaler = Scaler(loss_scale, **how)
        self._step_calls = OptimizerCalls(loss_scale, scales)
        keras_api.track_variables({**self._own_variables(), **self._hidden_variables()}.values())
        for child_name, child in self._own_children().items():
            self._track_trackable(child, child_name, overwrite=True)
        for optimizer in wrapped:
            _wrappers[optimizer] = weakref.ref(self)
            if not isinstance(optimizer, OptimizerWrapper):
                keras_api.note_wrapper(optimizer, self)
        observers.tell(observers.Observer.scaler_was_made)

    def _refuse(self, optimizer: Any) -> None:
        inner_optimizers.refuse_second(optimizer, "LossScaleOptimizer")

    @do_not_convert
    def get_scaled_loss(self, loss: Loss) -> Loss:
        """Multiplies the loss by the loss scale.

        Its counterpart is `get_unscaled_gradients`.

        Args:
            loss: float tensor, or a callable without arguments that returns one.

        Returns:
            The scaled loss, in float32 or wider; for a callable, a callable that returns it.

        Raises:
            TypeError: the loss is not a floating-point tensor.
        """
        return gradients.map_loss(functools.partial(self._step_calls.scale, to_apply=False), loss)

    @do_not_convert
    def scale_loss(self, loss: Loss) -> Loss:
        """Multiplies the loss; `apply_gradients` or `apply` then unscales the gradients."""
        return gradients.map_loss(functools.partial(self._step_calls.scale, to_apply=True), loss)

    @do_not_convert
    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """Divides gradients by the loss scale, the counterpart of `get_scaled_loss`.

        Args:
            grads: iterable of tensors, `tf.IndexedSlices` (which stay sparse) and None.

        Returns:
            list of the gradients, each in the dtype it came in.

        Raises:
            TypeError: `grads` is not a flat list of gradients.
            ValueError: the gradients are unscaled already.
        """
        grads = gradients.convert(grads, self._adapter.takes_float32_gradients)
        return self._step_calls.unscale(grads)

    def _whole_step(self, name: str | None, *of_loss: Any) -> Any:
        calls, losses, scaled_by = self._step_calls, list[tf.Tensor](), self._scaler.loss_scale()

        def scale(loss: tf.Tensor) -> tf.Tensor:
            scaled = calls.multiplied(loss, scaled_by)
            losses[:] = [tf.convert_to_tensor(loss)] if tf.is_tensor(loss) else []
            return scaled

        with calls.as_before_an_exception():
            if any(getattr(type(self), m) is not getattr(LossScaleOptimizer, m) for m in _HOOKS):
                return super()._whole_step(name, *of_loss)
            # Nothing is noted: it may come between calls of another step, and leaves that alone.
            scaled = functools.partial(gradients.map_loss, scale)
            pairs = gradients.checked_pairs(self._scaled(scaled, *of_loss))
            state = GradientState(calls.scales, scaled_by if calls.scales else None, losses=losses)
            return self._make_step(pairs, state, self._scaler, name=name)

    def _gradients_of(self, loss: Any, *how: Any) -> list[tuple[Any, Any]]:
        with self._step_calls.as_before_an_exception():
            pairs = self._scaled(self.get_scaled_loss, loss, *how)
            unscaled = self.get_unscaled_gradients([g for g, _ in pairs])
        return [(g, v) for g, (_, v) in zip(unscaled, pairs, strict=True)]

    def _applied(self, pairs: Any, scaled: bool, aggregate: bool, name: str | None) -> Any:
        pairs = gradients.checked_pairs(pairs)
        if not pairs:
            return self.iterations
        calls, by_hand = self._step_calls, [g for g, _ in pairs] if scaled else None
        variables = [v for _, v in pairs]
        with calls.as_before_an_exception(by_hand), calls.applying(variables) as state:
            return self._make_step(pairs, state, self._scaler, aggregate=aggregate, name=name)

    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Lets the inner optimizer set final values, such as averages, if it has any.

        Args:
            var_list: iterable of the model's trainable variables.
        """
        self._scaler.ask()
        super().finalize_variable_values(var_list)

    def _scales_on_tape(self) -> bool:
        """Whether the tape has to scale, as the inner optimizer needs the loss unscaled."""
        return self._step_calls.scales and not self._adapter.only_differentiates

    def _scaled(self, scale: Callable[[Loss], Loss], loss: Loss, *how: Any) -> list[Any]:
        """Computes gradients of a loss that `scale` multiplies.

        An inner optimizer that computes gradients in its own way sees this loss, and its gradients,
        unscaled: the tape scales and unscales.
        """
        _, tape, *_ = how
        with contextlib.nullcontext() if tape is None else tape:
            loss = scale(loss)
        compute = super()._gradients_of
        if not self._scales_on_tape():
            return compute(loss, *how)
        from keras_mp.step import scaling_tape

        widens = self._adapter.takes_float32_gradients
        return scaling_tape.compute(compute, self._scaler.loss_scale(), widens, loss, *how)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal optimizer.

        The config of an optimizer has its current learning rate. In the same way, this one has the
        state of the loss scale, for which an `.h5` file has no other place.
        """
        from keras_mp.wrappers import saved_variables

        return {
            **super().get_config(),
            "name": self._name,
            "loss_scale": serialize(self._scaler.loss_scale) if self._step_calls.scales else None,
            **self._config_of_scaler(),
            **saved_variables.state_of(self, self._own_variables()),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "LossScaleOptimizer":
        """Makes an optimizer from a config of this class, or of Keras's own.

        Args:
            config: dict that `get_config` returned: here, on tf_keras, on Keras 3, or in TensorFlow
                2.2 and 2.3.
            custom_objects: dict from names to the classes that they stand for, for the inner
                optimizer.

        Returns:
            An optimizer.
        """
        config = dict(config)
        if "optimizer" in config:
            config["inner_optimizer"] = config.pop("optimizer")
        saved = config.pop("state", {})
        optimizer = super().from_config(config, custom_objects)
        optimizer.policy_in_file = saved.get("policy")
        own = optimizer._own_variables()
        for name in own.keys() & saved.keys():
            own[name].assign(saved[name])
        return optimizer

    def keras_layout(self) -> Any:
        """Returns an object with the checkpoint layout of Keras's `LossScaleOptimizer`.

        On Keras 2, both classes lay out their checkpoints alike, so this optimizer itself is
        returned. On Keras 3 they do not, so checkpoints of Keras's class are read, and written for
        it, by way of this object.

        Returns:
            An object for `tf.train.Checkpoint`.

        Example:

        >>> import tempfile
        >>> sgd = tf.keras.optimizers.SGD()
        >>> other = tf.keras.mixed_precision.LossScaleOptimizer(sgd, initial_scale=64.0)
        >>> _ = other.apply_gradients([(tf.constant(64.0), tf.Variable(1.0))])
        >>> optimizer = keras_mp.LossScaleOptimizer("sgd")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = tf.train.Checkpoint(optimizer=other).save(directory + "/checkpoint")
        ...     checkpoint = tf.train.Checkpoint(optimizer=optimizer.keras_layout())
        ...     _ = checkpoint.restore(path).expect_partial()
        >>> float(optimizer.loss_scale()), int(optimizer.iterations)
        (64.0, 1)
        """
        return keras_api.keras_layout(self)

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # In checkpoints, the children that both layouts share come before those that differ.
        # Nothing is restored before all children have been looked up.
        if name == keras_api.KERAS_LAYOUT_CHILD:
            raise ValueError(
                "This is a checkpoint of tf.keras's own LossScaleOptimizer, whose layout in Keras "
                "3 differs from that of other optimizers. Restore it with "
                "`tf.train.Checkpoint(optimizer=optimizer.keras_layout()).restore(path)`. Nothing "
                "was restored."
            )
        if name == "base_optimizer":  # as TensorFlow 2.2 and 2.3 call it
            return self.inner_optimizer
        return super()._lookup_dependency(name, *args, **kwargs)  # pyright: ignore

    def _own_variables(self) -> dict[str, tf.Variable]:
        names = ("loss_scale", "num_good_steps", "num_bad_steps") if self.dynamic else ()
        of_scale = {name: getattr(self._scaler.loss_scale, name) for name in names}
        return {"steps_skipped": self._scaler.steps_skipped, **of_scale}

    @property
    def loss_scale_factor(self) -> None:
        """None. That of Keras 3's optimizers would scale the loss again."""
        return None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        raise TypeError(
            "A LossScaleOptimizer scales the loss itself, so it has no `loss_scale_factor`, and "
            "another LossScaleOptimizer cannot wrap it. "
            f"Received: loss_scale_factor={value!r}"
        )

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is a dynamic one."""
        return isinstance(self.loss_scale, DynamicLossScale)

    @property
    def initial_scale(self) -> float:
        """Where a dynamic scale started, or the fixed scale."""
        return float(getattr(self.loss_scale, "initial_loss_scale", self._scaler.loss_scale))

    step_counter = dynamic_counter = _of_dynamic("num_good_steps")
    dynamic_scale = _of_dynamic("loss_scale")

    @_of_dynamic("increment_period").setter
    def dynamic_growth_steps(self, value: int) -> None:
        """Sets the dynamic scale's `increment_period`."""
        if not self.dynamic:
            raise ValueError(
                "A fixed loss scale does not grow. "
                f"Received: dynamic_growth_steps={value!r} with {self._scaler.loss_scale!r}"
            )
        from keras_mp.wrappers import older_spellings

        self._scaler.loss_scale.increment_period = older_spellings.whole(value)

    def get_gradients(self, loss: tf.Tensor, params: Any) -> list[Any]:
        """Returns the unscaled gradients of a loss in a TensorFlow 1 graph.

        Legacy optimizers have this method.

        Args:
            loss: float tensor. Not scaled.
            params: list of variables.

        Returns:
            list of tensors.
        """
        if self._scales_on_tape():
            raise TypeError(
                "The optimizer overrides how gradients are computed, and would see the scaled "
                "loss in a graph of TensorFlow 1. Train in mixed_bfloat16, without loss scaling. "
                f"Received: {self.inner_optimizer!r}"
            )
        scaled = self.inner_optimizer.get_gradients(self.get_scaled_loss(loss), params)
        return self.get_unscaled_gradients(scaled)

    def get_updates(self, loss: tf.Tensor, params: Any) -> list[Any]:
        """Makes a whole step in a TensorFlow 1 graph (legacy optimizers).

        Args:
            loss: float tensor. Not scaled.
            params: list of variables.

        Returns:
            list of the operations that make the step.
        """
        return [self.apply_gradients(zip(self.get_gradients(loss, params), params, strict=True))]


# The methods that a subclass may override to change `minimize`.
_HOOKS = ("apply_gradients", "compute_gradients", "get_scaled_loss", "get_unscaled_gradients")

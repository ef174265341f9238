"""The optimizer wrapper that scales the loss.

RFC 293, "LossScaleOptimizer Overview" and "LossScaleOptimizer API".
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp import all_reduce_optimizer, hardware, keras_api, optimizer_wrapper
from keras_mp import loss_scale as loss_scale_lib
from keras_mp.compat import older_spellings
from keras_mp.grappler import passes
from keras_mp.layer_paths import paths_of_weights
from keras_mp.optimizer_wrapper import OptimizerWrapper, chain
from keras_mp.step import gradients, skipped_steps, state_rollback
from keras_mp.step import reduce_dtype as reduce_dtypes
from keras_mp.step.loss_scale import schedule_of
from keras_mp.step.overflows import Overflow
from keras_mp.step.scaled_step import MovedAtOnce, ScaledStep
from keras_mp.step.step_calls import StepCalls
from keras_mp.support import messages, validation
from keras_mp.support.autograph import allow_conversion, do_not_convert

_wrappers: "weakref.WeakKeyDictionary[Any, weakref.ref[LossScaleOptimizer]]" = (
    weakref.WeakKeyDictionary()
)


def wrapper_of(optimizer: Any) -> "LossScaleOptimizer | None":
    """Returns the `LossScaleOptimizer` that wraps `optimizer`, or None.

    Args:
        optimizer: An optimizer of `tf.keras`.
    """
    reference = _wrappers.get(optimizer)
    return None if reference is None else reference()


def find_loss_scale_optimizer(optimizer: Any) -> Any:
    """Returns what scales the loss among an optimizer and those that it wraps, or None.

    Args:
        optimizer: An optimizer of `tf.keras`, or None.

    Returns:
        A `LossScaleOptimizer`, ours or Keras's own, or None.
    """
    scaling = (o for o in chain(optimizer) if isinstance(o, keras_api.KerasLossScaleOptimizer))
    return next(scaling, None)


def wrappers_among(optimizers: Any) -> "list[LossScaleOptimizer]":
    """Returns those of our class that scale the loss of a model.

    Args:
        optimizers: An optimizer, None, or a structure of them: what a model was compiled with.
    """
    found = map(find_loss_scale_optimizer, tf.nest.flatten(optimizers))
    return [optimizer for optimizer in found if isinstance(optimizer, LossScaleOptimizer)]


@keras_api.register_serializable
class LossScaleOptimizer(OptimizerWrapper, keras_api.KerasLossScaleOptimizer):
    """An optimizer that applies loss scaling, so that float16 gradients do not underflow.

    One step is: multiply the loss by the loss scale; compute the gradients; sum them over all
    replicas; find out whether they are finite; divide them by the loss scale; let the inner
    optimizer clip and apply them. Where a dynamic scale made a gradient overflow, the step is
    skipped on every replica instead: weights, slots, averages and `iterations` stay as they are,
    and the scale backs off. What the forward pass assigned to weights, such as moving statistics,
    is put back in `Model.fit`, and elsewhere in a `keras_mp.training_step`. A fixed scale skips
    nothing. Gradients count as finite if their sums are, unscaled; those of float16, and all where
    XLA compiles the step, if each value is.

    `minimize` and `Model.fit` do all of it, and `Model.compile` wraps the optimizer itself under a
    `keras_mp.Policy` with a loss scale. Loops with a `tf.GradientTape` call `get_scaled_loss` and
    `get_unscaled_gradients` (the RFC's way), or `scale_loss` and then `apply_gradients` or `apply`
    with the gradients as they are (Keras 3's way); on both Kerases either works.

    Everything that Keras's own class offers works too: `dynamic`, `initial_scale`,
    `dynamic_growth_steps` and `dynamic_counter` of TensorFlow 2.4-2.15, `dynamic_scale` and
    `step_counter` of Keras 3. `loss_scale` is a `LossScale`: call it, or use it as the tensor it
    was in TensorFlow 2.4.

    Args:
        inner_optimizer: The optimizer to wrap: an instance, a name such as `"adam"`, or a config.
        loss_scale: `"dynamic"` (the default), a number of at least 1 for a fixed scale, or a
            `keras_mp.LossScale`. None scales nothing, and takes `skip_nonfinite`.
        aggregate_in_float16: bool. Sums float32 gradients over replicas as float16, still scaled,
            in half the bytes. Needs a scale that skips overflowing steps: with a fixed one, they
            are summed in float32. Defaults to True, unless `reduce_dtype` is passed.
        reduce_dtype: `"float16"`, `"bfloat16"`, `"float32"`, or such a DType. In which float32
            gradients are summed over replicas: `"float16"` is `aggregate_in_float16=True`.
            `"bfloat16"` takes half the bytes with any scale, and rounds to 8 bits, not to 11.
            Defaults to None, which leaves it to `aggregate_in_float16`.
        name: str. Defaults to the inner optimizer's name.
        warn_after_skips: int, or None for never. After how many skipped steps in a row to warn, and
            to say whether the loss itself is non-finite or only its gradients. Defaults to 50.
        skip_nonfinite: bool. Skips steps with a fixed scale too, or without one: for training in
            bfloat16 or float32 in which one bad batch must not end it. Defaults to False.
        dynamic: bool. Older spelling: False means a fixed scale of `initial_scale`.
        initial_scale: number. Older spelling of the (initial) scale.
        dynamic_growth_steps: int. Older spelling of the scale's `increment_period`.

    Attributes:
        policy_in_file: str or None. The policy of the 16-bit layers of the model that it was saved
            with, where it comes from a file.

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

    _takes_scaled_gradients = True

    def __init__(
        self,
        inner_optimizer: Any,
        loss_scale: Any = "dynamic",
        aggregate_in_float16: bool | None = None,
        *,
        reduce_dtype: Any = None,
        name: str | None = None,
        warn_after_skips: int | None = 50,
        skip_nonfinite: bool = False,
        dynamic: bool | None = None,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        older_spellings.refuse_arguments_of_inner_optimizers(kwargs)
        if isinstance(inner_optimizer, (str, dict)):
            inner_optimizer = keras_api.get_optimizer(inner_optimizer)
        if find_loss_scale_optimizer(inner_optimizer) is not None:
            raise TypeError(
                "A LossScaleOptimizer cannot wrap a LossScaleOptimizer: the loss would be scaled "
                "twice. Use the one that you have, or wrap its `inner_optimizer`. "
                f"Received: inner_optimizer={inner_optimizer!r}"
            )
        all_reduce_optimizer.refuse_inside(inner_optimizer, "LossScaleOptimizer")
        super().__init__(inner_optimizer)
        wrapped = list(chain(inner_optimizer))
        if any(wrapper_of(optimizer) is not None for optimizer in wrapped):
            raise ValueError(
                "The optimizer is wrapped by a LossScaleOptimizer already (Model.compile may have "
                "done so: look at `model.optimizer`). Use that one, or make a new optimizer. "
                f"Received: inner_optimizer={inner_optimizer!r}"
            )
        if any(keras_api.is_in_keras_wrapper(optimizer) for optimizer in wrapped):
            raise ValueError(
                "The optimizer is wrapped by tf.keras's own LossScaleOptimizer already "
                "(Model.compile wraps it under a mixed_float16 policy of tf.keras: look at "
                "`model.optimizer`), so the loss would be scaled twice. Use that one, or make a "
                f"new optimizer. Received: inner_optimizer={inner_optimizer!r}"
            )
        skip_nonfinite = validation.boolean("skip_nonfinite", skip_nonfinite)
        scales = loss_scale is not None or not skip_nonfinite
        loss_scale = older_spellings.loss_scale_from_arguments(
            loss_scale if scales else 1, dynamic, initial_scale, dynamic_growth_steps
        )
        schedule = schedule_of(loss_scale, skip_nonfinite)
        gradients.check_strategy(may_skip=schedule is not None)
        vars(self).update(
            _name=name,
            _loss_scale=loss_scale,
            # False where there is nothing to scale by, and so no call that could be missing.
            _scales=scales,
            _skip_nonfinite=skip_nonfinite,
            _schedule=schedule,
            _reduce_dtype=reduce_dtypes.from_arguments(reduce_dtype, aggregate_in_float16),
            _skipped=skipped_steps.SkippedSteps(
                validation.integer_or_none("warn_after_skips", warn_after_skips)
            ),
            _calls=StepCalls(),
            policy_in_file=None,
        )
        for child_name, child in self._own_children().items():
            self._track_trackable(child, child_name, overwrite=True)
        for optimizer in wrapped:
            _wrappers[optimizer] = weakref.ref(self)
            if not isinstance(optimizer, OptimizerWrapper):
                keras_api.refuse_keras_wrapper(optimizer, self)
        # Its variables have initialized the devices.
        hardware.warn_if_slow()

    def __repr__(self) -> str:
        how = "" if self.aggregate_in_float16 else f", reduce_dtype={self.reduce_dtype!r}"
        return f"<{type(self).__name__} of {self.inner_optimizer!r}{how}>"

    @property
    def name(self) -> str:
        """The name given to the constructor, or the inner optimizer's."""
        return self._name or super().name

    @property
    def loss_scale(self) -> loss_scale_lib.LossScale:
        """The `LossScale`. `optimizer.loss_scale()` is its value, a float32 scalar tensor.

        On Keras 3, who reads it between two steps may have multiplied the loss by it, so
        `apply_gradients` then divides gradients of a loss that was not scaled otherwise.
        """
        self._note_reading()
        return self._loss_scale

    @property
    def aggregate_in_float16(self) -> bool:
        """Are float32 gradients summed over replicas as float16? May be set at any time."""
        return self._reduce_dtype == tf.float16

    @aggregate_in_float16.setter
    def aggregate_in_float16(self, value: bool) -> None:
        vars(self)["_reduce_dtype"] = reduce_dtypes.after_setting(self._reduce_dtype, value)

    @property
    def reduce_dtype(self) -> str:
        """In which dtype float32 gradients are summed over replicas. May be set at any time.

        A `tf.function` that was traced before it was set keeps the old one.
        """
        return self._reduce_dtype.name

    @reduce_dtype.setter
    def reduce_dtype(self, value: Any) -> None:
        vars(self)["_reduce_dtype"] = reduce_dtypes.get(value)

    @property
    def skip_nonfinite(self) -> bool:
        """Are steps skipped whatever the loss scale? A dynamic one skips them anyway."""
        return self._skip_nonfinite

    @property
    def steps_skipped(self) -> tf.Tensor:
        """How many steps were skipped so far, an int64 scalar tensor."""
        self._collect_reports()
        # A tensor: of a mirrored variable, Python would take any value for true.
        return tf.convert_to_tensor(self._skipped.total)

    @property
    def last_step_skipped(self) -> tf.Tensor:
        """Was the last step skipped? A bool scalar tensor."""
        self._collect_reports()
        if self._schedule is None:
            return tf.constant(False)
        return tf.convert_to_tensor(self._schedule.num_bad_steps) > 0

    @property
    def last_overflow(self) -> Overflow | None:
        """Whose gradients were not finite in the step that was skipped last; None if none was.

        A `keras_mp.Overflow`: which step it was, each variable's Inf and NaN on each replica, also
        of other workers, and whether the loss itself was finite. Its `str` is a table. What counts
        are gradients before they are clipped: those of `get_unscaled_gradients`, if it was called.

        It is looked for when a step is skipped, not in good steps, and kept on the device until it
        is read. It is no part of checkpoints. A fixed scale skips nothing, so it finds nothing.

        Raises:
            RuntimeError: it is read in a graph.

        Example:

        >>> optimizer, v = keras_mp.LossScaleOptimizer("sgd"), tf.Variable([1.0, 2.0], name="v")
        >>> _ = optimizer.minimize(lambda: tf.reduce_sum(v * [1.0, float("inf")]), [v])
        >>> overflow = optimizer.last_overflow
        >>> overflow.step, overflow.variables, overflow.gradients[0].infs, overflow.loss_is_finite
        (1, ['v'], 1, False)
        """
        self._collect_reports()
        return self._skipped.last_overflow()

    @property
    def warn_after_skips(self) -> int | None:
        """After how many skipped steps in a row to warn; None for never.

        A `tf.function` that was traced before it was set keeps the old number.
        """
        return self._skipped.warn_after

    @warn_after_skips.setter
    def warn_after_skips(self, value: int | None) -> None:
        self._skipped.warn_after = validation.integer_or_none("warn_after_skips", value)

    @property
    def loss_scale_factor(self) -> None:
        """None. Keras 3's optimizers have one, which would scale once more."""
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
        """Is the loss scale a dynamic one?"""
        return isinstance(self._loss_scale, loss_scale_lib.DynamicLossScale)

    @property
    def initial_scale(self) -> float:
        """Where a dynamic scale started, or the fixed scale."""
        self._note_reading()
        if self.dynamic:
            return self._loss_scale.initial_loss_scale
        return float(self._loss_scale)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The dynamic scale's `increment_period`, read and write; None for a fixed scale."""
        return self._loss_scale.increment_period if self.dynamic else None

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, value: int) -> None:
        if not self.dynamic:
            raise ValueError(
                "A fixed loss scale does not grow. "
                f"Received: dynamic_growth_steps={value!r} with {self._loss_scale!r}"
            )
        self._loss_scale.increment_period = older_spellings.whole(value)

    @property
    def dynamic_counter(self) -> tf.Variable | None:
        """The dynamic scale's `num_good_steps`; None for a fixed scale."""
        return self._loss_scale.num_good_steps if self.dynamic else None

    @property
    def step_counter(self) -> tf.Variable | None:
        """`dynamic_counter` under Keras 3's name."""
        return self.dynamic_counter

    @property
    def dynamic_scale(self) -> tf.Variable | None:
        """The dynamic scale's variable; None for a fixed scale."""
        self._note_reading()
        return self._loss_scale.loss_scale if self.dynamic else None

    @do_not_convert
    def get_scaled_loss(self, loss: Any) -> Any:
        """Multiplies the loss by the loss scale. `get_unscaled_gradients` is its counterpart.

        Args:
            loss: float tensor, or a callable without arguments that returns one.

        Returns:
            The scaled loss, in float32 or wider; for a callable, a callable that returns it.

        Raises:
            TypeError: the loss is not a floating-point tensor.
        """
        loss_scale = self._loss_scale()
        scaled = self._scale(loss, loss_scale)
        if self._scales:
            self._calls.scaled(loss_scale, to_apply=False)
        return scaled

    @do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Multiplies the loss by the loss scale; `apply_gradients` or `apply` then unscale.

        Args:
            loss: float tensor, or a callable without arguments that returns one.

        Returns:
            The scaled loss, in float32 or wider; for a callable, a callable that returns it.

        Raises:
            TypeError: the loss is not a floating-point tensor.
        """
        loss_scale = self._loss_scale()
        scaled = self._scale(loss, loss_scale)
        if self._scales:
            self._calls.scaled(loss_scale, to_apply=True)
        return scaled

    @do_not_convert
    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """Divides gradients by the loss scale. `get_scaled_loss` is its counterpart.

        Args:
            grads: iterable of tensors, `tf.IndexedSlices` (which stay sparse) and None.

        Returns:
            list of the gradients, each in the dtype it came in.

        Raises:
            TypeError: `grads` is not a flat list of gradients.
            ValueError: the gradients are unscaled already.
        """
        grads = gradients.convert(grads)
        if not self._scales:
            return grads
        self._calls.refuse_results(grads, "get_unscaled_gradients")
        if self._adapter.takes_float32_gradients:
            grads = gradients.to_float32(grads)
        unscaled = gradients.unscale(grads, self._scaled_by())
        self._calls.unscaled()
        self._calls.returned(unscaled)
        self._calls.saw_unscaled(unscaled)
        return unscaled

    @do_not_convert
    def minimize(
        self,
        loss: Any,
        var_list: Any,
        tape: tf.GradientTape | None = None,
        grad_loss: tf.Tensor | None = None,
        name: str | None = None,
    ) -> Any:
        """Does a whole step: scales the loss, computes, unscales and applies the gradients.

        Args:
            loss: float tensor, or a callable without arguments that returns one. Not scaled.
            var_list: list of variables, one variable, or a callable that returns either.
            tape: `tf.GradientTape` under which a tensor `loss` was computed.
            grad_loss: tensor. The gradient for `loss`; not for the new optimizers of tf_keras.
            name: str. Name of the operation.

        Returns:
            `iterations`, or in a TensorFlow 1 graph the operation that makes the step.
        """
        if any(getattr(type(self), m) is not getattr(LossScaleOptimizer, m) for m in _HOOKS):
            return super().minimize(loss, var_list, tape, grad_loss, name)
        with self._calls.one_whole_step():
            pairs = gradients.checked_pairs(
                self._gradients(self._scale, loss, var_list, tape, grad_loss)
            )
            if not pairs:
                return self.iterations
            return self._step(pairs, scaled=self._scales, aggregate=True, name=name)

    @do_not_convert
    def compute_gradients(
        self,
        loss: Any,
        var_list: Any,
        tape: tf.GradientTape | None = None,
        grad_loss: tf.Tensor | None = None,
    ) -> list[tuple[Any, Any]]:
        """Computes gradients with the loss scaled, and unscales them: the first half of `minimize`.

        Args:
            loss: float tensor, or a callable without arguments that returns one. Not scaled.
            var_list: list of variables, one variable, or a callable that returns either.
            tape: `tf.GradientTape` under which a tensor `loss` was computed.
            grad_loss: tensor. The gradient for `loss`; not for the new optimizers of tf_keras.

        Returns:
            list of (gradient, variable) pairs.
        """
        pairs = self._gradients(self.get_scaled_loss, loss, var_list, tape, grad_loss)
        unscaled = self.get_unscaled_gradients([g for g, _ in pairs])
        return [(g, v) for g, (_, v) in zip(unscaled, pairs, strict=True)]

    def get_gradients(self, loss: tf.Tensor, params: Any) -> list[Any]:
        """Gradients in a TensorFlow 1 graph (legacy optimizers): scales the loss and unscales them.

        Args:
            loss: float tensor. Not scaled.
            params: list of variables.

        Returns:
            list of tensors.
        """
        scaled = self.inner_optimizer.get_gradients(self.get_scaled_loss(loss), params)
        return self.get_unscaled_gradients(scaled)

    def get_updates(self, loss: tf.Tensor, params: Any) -> list[Any]:
        """A whole step in a TensorFlow 1 graph (legacy optimizers).

        Args:
            loss: float tensor. Not scaled.
            params: list of variables.

        Returns:
            list of the operations that make the step.
        """
        return [self.apply_gradients(zip(self.get_gradients(loss, params), params, strict=True))]

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        *,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Sums gradients over replicas, and applies them or skips the step.

        Gradients are unscaled here if the loss was scaled with `scale_loss`, and taken as they are
        if `get_scaled_loss` and `get_unscaled_gradients` were called. A call that is missing is
        reported with a `MixedPrecisionWarning`.

        Args:
            grads_and_vars: iterable of (gradient, variable) pairs. A gradient may be None.
            name: str. Name of the operation.
            skip_gradients_aggregation: bool. True where the gradients are summed already.
            experimental_aggregate_gradients: bool. False means the same.

        Returns:
            `iterations`, or in a TensorFlow 1 graph the operation that makes the step.

        Raises:
            ValueError: no variable has a gradient, or the call is in a cross-replica context.
        """
        pairs = gradients.checked_pairs(grads_and_vars)
        if not pairs:
            return self.iterations
        scaled = self._scales and self._calls.resolve(variable for _, variable in pairs)
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        unclipped = self._calls.take_unscaled()
        return self._step(pairs, scaled=scaled, unclipped=unclipped, aggregate=aggregate, name=name)

    def begin_step(self) -> None:
        """Says that a step begins: nobody has scaled its loss by what was read before.

        `Model.fit` says so itself; so callbacks may log the loss scale.
        """
        self._calls.begin()

    def stateless_apply(self, *args: Any, **kwargs: Any) -> Any:
        """Not on the TensorFlow backend: says what Keras says."""
        return self.inner_optimizer.stateless_apply(*args, **kwargs)

    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Lets the inner optimizer set the final values, where it has any: averages, for one.

        Args:
            var_list: iterable of the model's trainable variables.
        """
        self._collect_reports()
        super().finalize_variable_values(var_list)

    def save_own_variables(self, store: Any) -> None:
        """Saves the loss scale's state, beside what the inner optimizer saves.

        Args:
            store: dict-like, of names and arrays.
        """
        self._collect_reports()
        super().save_own_variables(store)
        for name, variable in self._state().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads what `save_own_variables` saved, or what an optimizer that is not wrapped did.

        Args:
            store: dict-like, of names and arrays. What it does not hold stays as it is, with a
                warning.

        Raises:
            ValueError: the variables are those of another optimizer.
        """
        super().load_own_variables(store)
        saved, state = set(store.keys()), self._state()
        for name in saved & set(state):
            state[name].assign(store[name][()])
        missing = sorted(set(state) - saved)
        if missing:
            messages.warn(
                f"The file holds no {', '.join(missing)} for the optimizer, so they stay as "
                "they are: it was saved without loss scaling, with another kind of loss scale, or "
                f"with another LossScaleOptimizer. Expected {sorted(state)}. Received: "
                f"{sorted(saved)}"
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal optimizer.

        As the config of an optimizer has its learning rate of that moment, this one has the loss
        scale's state: an `.h5` file has no other place for it.
        """
        config = {
            "name": self._name,
            "inner_optimizer": keras_api.serialize_optimizer(self.inner_optimizer),
            "loss_scale": loss_scale_lib.serialize(self._loss_scale) if self._scales else None,
            "aggregate_in_float16": self.aggregate_in_float16,
            "reduce_dtype": self.reduce_dtype,
            "warn_after_skips": self.warn_after_skips,
            "skip_nonfinite": self._skip_nonfinite,
        }
        with tf.init_scope():
            if tf.executing_eagerly():
                state = {name: tf.convert_to_tensor(v) for name, v in self._state().items()}
                config["state"] = {name: value.numpy().item() for name, value in state.items()}
                config["state"]["policy"] = self._policy_of_model()
        return config

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "LossScaleOptimizer":
        """Makes an optimizer from a config of this class, or of Keras's own.

        Args:
            config: dict that `get_config` returned, here, on tf_keras, on Keras 3 or in TensorFlow
                2.2 and 2.3.
            custom_objects: dict of names and the classes they stand for, for the inner optimizer.

        Returns:
            An optimizer.
        """
        config = dict(config)
        inner = config.pop("inner_optimizer", None) or config.pop("optimizer")
        if isinstance(inner, dict):
            inner = keras_api.deserialize_optimizer(inner, custom_objects=custom_objects)
        saved = config.pop("state", {})
        optimizer = cls(inner, **config)
        optimizer.policy_in_file = saved.get("policy")
        for name, variable in optimizer._state().items():
            if name in saved:
                variable.assign(saved[name])
        return optimizer

    def keras_layout(self) -> Any:
        """Returns what checkpoints of Keras's own `LossScaleOptimizer` hold, under their names.

        That of tf_keras lays its checkpoints out as this one does, which is itself returned there.
        That of Keras 3 does not, so its checkpoints are read, and written for it, by way of this.

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
        # What checkpoints call the children that the two layouts share comes before what tells the
        # layouts apart, and is not restored before all have been looked up.
        if name == keras_api.KERAS_LAYOUT_CHILD:
            raise ValueError(
                "This is a checkpoint of tf.keras's own LossScaleOptimizer, whose layout in Keras "
                "3 is not that of other optimizers. Restore it with "
                "`tf.train.Checkpoint(optimizer=optimizer.keras_layout()).restore(path)`. Nothing "
                "was restored."
            )
        if name == older_spellings.INNER_CHILD:
            return self.inner_optimizer
        return super()._lookup_dependency(name, *args, **kwargs)

    def _own_children(self) -> dict[str, Any]:
        """What a checkpoint holds of the wrapper, beside the inner optimizer's own children."""
        return {
            "loss_scale": self._loss_scale,
            "steps_skipped": self._skipped.total,
        }

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        # Optimizers of tf_keras list their children once, which may have been before they were
        # wrapped.
        children = {**super()._trackable_children(save_type, **kwargs), **self._own_children()}
        if save_type == "savedmodel":  # which holds functions, and all that these use
            children.update({**self._skipped.variables(), **self._calls.variables()})
            if self._schedule is not None and not self.dynamic:
                children["skips_in_a_row"] = self._schedule.num_bad_steps
        return children

    def _state(self) -> dict[str, tf.Variable]:
        state = {"steps_skipped": self._skipped.total}
        if self.dynamic:
            scale = self._loss_scale
            state["loss_scale"] = scale.loss_scale
            state["num_good_steps"] = scale.num_good_steps
            state["num_bad_steps"] = scale.num_bad_steps
        return state

    def _policy_of_model(self) -> str | None:
        """The policy of the layers that compute in 16 bits; of the file where there is no model."""
        model = self._model()
        if model is None:
            return self.policy_in_file
        layers = [each for each in keras_api.flatten_layers(model) if each is not model]
        half = (each for each in layers if each.compute_dtype in ("float16", "bfloat16"))
        return next((each.dtype_policy.name for each in half), None)

    def _names_of(self, variables: Sequence[Any]) -> list[str | None]:
        """The paths of variables in the model that is trained, None for others."""
        model = self._model()
        paths = {} if model is None or not model.built else paths_of_weights(model)
        return [paths.get(id(variable)) for variable in variables]

    def _scale(self, loss: Any, loss_scale: tf.Tensor | None = None) -> Any:
        if callable(loss) and not tf.is_tensor(loss):
            users = allow_conversion(loss)
            return do_not_convert(lambda: self._scale(users()))
        if not self._scales:
            self._calls.saw(tf.convert_to_tensor(loss), tf.constant(1.0))
            return loss
        self._calls.refuse_results([loss], "get_scaled_loss")
        if loss_scale is None:
            loss_scale = self._loss_scale()
        scaled = gradients.scale_loss(loss, loss_scale)
        self._calls.saw(tf.convert_to_tensor(loss), loss_scale)
        self._calls.returned([scaled])
        return scaled

    def _note_reading(self) -> None:
        wrappers = __file__, optimizer_wrapper.__file__
        if keras_api.APPLY_TAKES_SCALED_GRADIENTS and messages.is_users_call(*wrappers):
            self._calls.read()

    def _scaled_by(self) -> tf.Tensor:
        return self._calls.scaled_by(self._loss_scale)

    def _unscaled_early(self, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        pairs = list(pairs)
        is_scaled = self._calls.unscale_early()
        if is_scaled is False:
            return pairs
        divisor = tf.where(is_scaled, self._scaled_by(), 1.0)
        grads = [g for g, _ in pairs]
        if self._adapter.takes_float32_gradients:
            grads = gradients.to_float32(grads)
        grads = gradients.unscale(grads, divisor)
        self._calls.saw_unscaled(grads)
        return [(g, v) for g, (_, v) in zip(grads, pairs, strict=True)]

    def _gradients(
        self,
        scale: Callable[[Any], Any],
        loss: Any,
        var_list: Any,
        tape: tf.GradientTape | None,
        grad_loss: tf.Tensor | None,
    ) -> list[tuple[Any, Any]]:
        is_tape = isinstance(tape, tf.GradientTape)
        with tape if is_tape else contextlib.nullcontext():
            loss = scale(loss)
        return super().compute_gradients(loss, var_list, tape, grad_loss)

    @do_not_convert
    def _step(
        self,
        pairs: list[tuple[Any, Any]],
        *,
        scaled: bool | tf.Tensor,
        unclipped: list[Any] | None = None,
        aggregate: bool,
        name: str | None,
    ) -> Any:
        self._collect_reports()
        passes.warn_if_compiled()
        # Again, since the optimizer may have been made outside of the strategy's scope.
        gradients.check_strategy(may_skip=self._schedule is not None)
        self.build([variable for _, variable in pairs])
        verdicts = None
        if self._schedule is not None:
            verdicts = MovedAtOnce(self._schedule, self._skipped)
        reduce_dtype = self._reduce_dtype
        if reduce_dtype == tf.float16 and not self._scales:
            reduce_dtype = tf.float32
        step = ScaledStep(self._adapter, verdicts, reduce_dtype, names=self._names_of)
        operation, _ = step.make(
            pairs,
            scaled=scaled,
            scaled_by=self._scaled_by(),
            losses=self._calls.take_losses(),
            unclipped=unclipped,
            aggregate=aggregate,
            name=name,
        )
        state_rollback.step_is_over()
        return self.iterations if operation is None else operation

    def _collect_reports(self) -> None:
        self._calls.collect_reports()
        self._skipped.collect_reports()


# What a subclass may override to have a say in `minimize`.
_HOOKS = ("apply_gradients", "compute_gradients", "get_scaled_loss", "get_unscaled_gradients")

"""Loss scaling for TensorFlow 1's optimizers, as in `tf.contrib.mixed_precision`.

Loss scale managers move the loss scale: `next_exponential_state` is the schedule, the managers hold
its state, and `ManagedLossScale` lets a step move it. The step of the `LossScaleOptimizer` is that
of `keras_mp.step`. This module needs TensorFlow only.
"""

import abc
import functools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp import loss_scale as loss_scale_lib
from keras_mp.step import gradients, strategies
from keras_mp.step.loss_scales import LossScale, state_variable
from keras_mp.step.optimizer_adapter import Loss
from keras_mp.step.other_adapters import V1Optimizer
from keras_mp.step.record import GradientState, Notebook
from keras_mp.step.scaled_step import make_step
from keras_mp.step.scaler import Scaler
from keras_mp.step.schedule import LARGEST, SMALLEST, LossScaleState, bad_steps_after
from keras_mp.support import host, messages, observers, trackables, validation
from keras_mp.support.autograph import do_not_convert
from keras_mp.wrappers.scaler_properties import ScalerProperties

__all__ = ["ExponentialUpdateLossScaleManager", "FixedLossScaleManager", "LossScaleManager"]
__all__ += ["LossScaleOptimizer", "ManagedLossScale", "next_exponential_state"]

_checked_scale = functools.partial(validation.number, at_least=SMALLEST, at_most=LARGEST)


class LossScaleManager(tf.Module, abc.ABC):
    """Decides how the loss scale moves. Subclass it for a schedule of your own.

    Unlike with a `keras_mp.FixedLossScale`, a step whose gradients are not finite is skipped under
    every manager. It is a `tf.Module`: a `tf.train.Checkpoint` of the optimizer holds the variables
    among its attributes.

    Example:

    >>> class Falling(keras_mp.compat.v1.LossScaleManager):
    ...     def __init__(self):
    ...         self.value = tf.Variable(1024.0, trainable=False)
    ...     def get_loss_scale(self):
    ...         return self.value
    ...     def update_loss_scale(self, finite_grads):
    ...         return self.value.assign(tf.where(finite_grads, self.value, self.value / 2.0))
    >>> sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    >>> optimizer = keras_mp.compat.v1.LossScaleOptimizer(sgd, Falling())
    >>> v = tf.Variable(1.0)
    >>> optimizer.minimize(lambda: v * float("inf"))
    >>> float(optimizer.loss_scale())
    512.0

    Source: TensorFlow 1, `tf.contrib.mixed_precision.LossScaleManager`.
    """

    @abc.abstractmethod
    def get_loss_scale(self) -> Any:
        """Returns the loss scale, a scalar tensor or variable of float32."""

    @abc.abstractmethod
    def update_loss_scale(self, finite_grads: bool | tf.Tensor) -> Any:
        """Moves the loss scale after a step.

        Args:
            finite_grads: bool scalar tensor. Whether the gradients of all replicas were finite.

        Returns:
            In a graph of TensorFlow 1 the operation that moves it; elsewhere nothing is expected.
        """


class FixedLossScaleManager(LossScaleManager):
    """Keeps the loss scale as it is.

    Args:
        loss_scale: int or float, from 2**-126 to 2**126.

    Raises:
        TypeError: `loss_scale` is not a number.
        ValueError: `loss_scale` is out of range.

    Example:

    >>> manager = keras_mp.compat.v1.FixedLossScaleManager(5000)
    >>> float(manager.get_loss_scale())
    5000.0

    Source: TensorFlow 1, `tf.contrib.mixed_precision.FixedLossScaleManager`.
    """

    def __init__(self, loss_scale: float) -> None:
        super().__init__()
        self._loss_scale = _checked_scale("loss_scale", loss_scale)

    def get_loss_scale(self) -> tf.Tensor:
        """Returns the loss scale, a float32 scalar tensor."""
        return tf.constant(self._loss_scale, tf.float32)

    def update_loss_scale(self, finite_grads: bool | tf.Tensor) -> Any:
        """Does nothing.

        Args:
            finite_grads: bool scalar tensor.
        """
        del finite_grads
        return tf.no_op()


def next_exponential_state(
    state: LossScaleState,
    finite: Any,
    *,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int,
    incr_ratio: float,
    decr_ratio: float,
) -> LossScaleState:
    """Returns the next state of an `ExponentialUpdateLossScaleManager`: its schedule.

    ::

        finite:      good steps += 1
                     at incr_every_n_steps good ones: scale *= incr_ratio, unless that is infinite;
                     good steps = bad steps = 0
        not finite:  bad steps += 1, good steps = 0
                     at decr_every_n_nan_or_inf bad ones: scale *= decr_ratio, but not below 1;
                     bad steps = 0

    So good steps are counted in a row, but bad ones are not: a good step does not reset them.

    Args:
        state: LossScaleState before the step.
        finite: bool scalar tensor, or bool. Whether all gradients of the step were finite.
        incr_every_n_steps: int. Good steps after which the scale grows.
        decr_every_n_nan_or_inf: int. Bad steps after which it shrinks.
        incr_ratio: float above 1.
        decr_ratio: float between 0 and 1.

    Returns:
        LossScaleState after the step, of tensors.

    Example:

    >>> from keras_mp.compat import v1
    >>> state = keras_mp.loss_scale.LossScaleState(64.0, num_good_steps=7, num_bad_steps=1)
    >>> after = v1.next_exponential_state(
    ...     state, False, incr_every_n_steps=10, decr_every_n_nan_or_inf=2, incr_ratio=2,
    ...     decr_ratio=0.5)
    >>> float(after.loss_scale), int(after.num_good_steps), int(after.num_bad_steps)
    (32.0, 0, 0)

    Source: TensorFlow 1, `tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager`.
    """
    finite = tf.convert_to_tensor(finite)
    scale = tf.convert_to_tensor(state.loss_scale, tf.float32)
    good = tf.where(finite, state.num_good_steps + 1, 0)
    bad = tf.where(finite, state.num_bad_steps, state.num_bad_steps + 1)
    grows = finite & (good >= incr_every_n_steps)
    shrinks = ~finite & (bad >= decr_every_n_nan_or_inf)
    grown, shrunk = scale * incr_ratio, tf.maximum(scale * decr_ratio, tf.minimum(scale, 1.0))
    scale = tf.where(grows & tf.math.is_finite(grown), grown, tf.where(shrinks, shrunk, scale))
    return LossScaleState(scale, *(tf.where(grows | shrinks, 0, count) for count in (good, bad)))


class ExponentialUpdateLossScaleManager(LossScaleManager):
    """Moves the loss scale by factors: up after good steps, down after bad ones.

    The exact rules are the pure function `keras_mp.compat.v1.next_exponential_state`. Its variables
    have the names and dtypes that they had in TensorFlow 1, so checkpoints of that time load.

    Args:
        init_loss_scale: int or float, from 2**-126 to 2**126. Where the scale starts.
        incr_every_n_steps: int, at least 1. Good steps in a row after which the scale grows.
        decr_every_n_nan_or_inf: int, at least 1. Bad steps after which it shrinks; good ones may
            lie between. Defaults to 2.
        incr_ratio: int or float above 1. The factor by which it grows. Defaults to 2.
        decr_ratio: float between 0 and 1. The factor by which it shrinks, not below 1. Defaults to
            0.8.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.

    Example:

    >>> manager = keras_mp.compat.v1.ExponentialUpdateLossScaleManager(1000, 2000)
    >>> manager.update_loss_scale(tf.constant(False))
    >>> manager.update_loss_scale(tf.constant(False))
    >>> float(manager.get_loss_scale())
    800.0

    Source: TensorFlow 1, `tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager`.
    """

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
    ) -> None:
        super().__init__()
        initial = _checked_scale("init_loss_scale", init_loss_scale)
        count = functools.partial(validation.integer, below=2**31)
        self._next_state = functools.partial(
            next_exponential_state,
            incr_every_n_steps=count("incr_every_n_steps", incr_every_n_steps),
            decr_every_n_nan_or_inf=count("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf),
            incr_ratio=validation.number("incr_ratio", incr_ratio, above=1),
            decr_ratio=validation.number("decr_ratio", decr_ratio, above=0, below=1),
        )
        self.loss_scale = state_variable(initial, tf.float32, "loss_scale")
        self.good_steps = state_variable(0, tf.int32, "good_steps")
        self.bad_steps = state_variable(0, tf.int32, "bad_steps")

    def get_loss_scale(self) -> tf.Variable:
        """Returns the loss scale, a float32 scalar variable."""
        return self.loss_scale

    def update_loss_scale(self, finite_grads: bool | tf.Tensor) -> Any:
        """Moves the loss scale after a step.

        Args:
            finite_grads: bool scalar tensor, or bool.

        Returns:
            In a graph of TensorFlow 1 the operation that moves it, else None.
        """
        state = LossScaleState(self.loss_scale, self.good_steps, self.bad_steps)
        after = self._next_state(state, finite_grads)
        moved = [v.assign(value, read_value=False) for v, value in zip(state, after, strict=True)]
        return tf.group(*moved) if host.in_v1_graph() else None


class ManagedLossScale(LossScale):
    """The loss scale of a manager, which a step moves.

    Attributes:
        num_bad_steps: int64 variable, the number of steps skipped in a row.

    Args:
        manager: `LossScaleManager`.

    Example:

    >>> manager = keras_mp.compat.v1.FixedLossScaleManager(128)
    >>> keras_mp.compat.v1.ManagedLossScale(manager)()
    <tf.Tensor: shape=(), dtype=float32, numpy=128.0>
    """

    moves = True

    def __init__(self, manager: LossScaleManager) -> None:
        super().__init__(name="managed_loss_scale")
        self._manager = manager
        self.num_bad_steps = state_variable(0, tf.int64, "steps_skipped_in_a_row")

    manager = property(lambda self: self._manager, doc="The `LossScaleManager`. Read-only.")

    def __call__(self) -> tf.Tensor:
        """Returns the current scale, a float32 scalar tensor."""
        return tf.cast(self._manager.get_loss_scale(), tf.float32)

    def move(
        self,
        finite: bool | tf.Tensor,
        loss_is_finite: bool | tf.Tensor = False,
        when: bool | tf.Tensor = True,
    ) -> list[Any]:
        """Lets the manager move the scale, as a step does.

        Args:
            finite: bool, or bool scalar tensor. Whether all gradients were finite.
            loss_is_finite: not used.
            when: bool, or bool scalar tensor. If it is False, nothing is moved. Defaults to True.

        Returns:
            list of operations.
        """
        del loss_is_finite

        def move() -> list[Any]:
            operation = self._manager.update_loss_scale(tf.convert_to_tensor(finite))
            skipped = bad_steps_after(self.num_bad_steps, finite)
            counted = self.num_bad_steps.assign(skipped, read_value=False)
            return [each for each in (operation, counted) if each is not None]

        if when is True:
            return move()
        tf.cond(when, lambda: move().clear(), lambda: None)  # the manager assigns by itself
        return []

    def get_config(self) -> dict[str, Any]:
        """Returns `{"manager": ...}`."""
        return {"manager": self._manager}


_Optimizer = tf.compat.v1.train.Optimizer
_TensorFlowWrapper = tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer

_wrapped: "weakref.WeakSet[Any]" = weakref.WeakSet()


def scales_loss(optimizer: Any) -> bool:
    """Whether a TensorFlow 1 optimizer, or one around it, scales the loss.

    Args:
        optimizer: Any.

    Example:

    >>> sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    >>> optimizer = keras_mp.compat.v1.LossScaleOptimizer(sgd)
    >>> keras_mp.compat.v1.scales_loss(optimizer), keras_mp.compat.v1.scales_loss(sgd)
    (True, True)
    """
    if not isinstance(optimizer, _Optimizer):
        return False
    return isinstance(optimizer, (LossScaleOptimizer, _TensorFlowWrapper)) or optimizer in _wrapped


class _Computed(NamedTuple):
    """What `compute_gradients` has computed in one graph, or in eager code.

    Attributes:
        computed: the ids of their variables. In eager, without those that were applied.
        is_applied: whether a graph has applied its gradients itself.
    """

    computed: frozenset[int] = frozenset()
    is_applied: bool = False

    def bare(self) -> "_Computed":
        """Returns itself, which has no tensors."""
        return self

    def has_begun(self) -> bool:
        return bool(self.computed) and not self.is_applied


class LossScaleOptimizer(ScalerProperties, trackables.DelegatingTrackable, _Optimizer):
    """An optimizer of TensorFlow 1 with loss scaling, against underflow in float16.

    `minimize`, and `compute_gradients` followed by `apply_gradients`, multiply the loss by the loss
    scale, and divide the gradients by it. Where a gradient is not finite, on any replica, the step
    is skipped on all of them: variables, slots and `global_step` stay as they are, and the scale
    moves. Only a `keras_mp.FixedLossScale`, or a number, skips nothing.

    It works in a `tf.Graph` with sessions, with variables of TensorFlow 1 and 2, in eager code, in
    `tf.function`, and under `MirroredStrategy` of `tf.distribute` and of
    `tf.compat.v1.distribute`. A checkpoint, of `tf.train.Checkpoint` or of a `Saver`, is one of the
    inner optimizer, with the loss scale's state beside it.

    Gradients have to come from `compute_gradients`: those of `tf.gradients` and `tf.GradientTape`
    are not of a scaled loss. If none of them can come from there, `apply_gradients` warns.

    Args:
        opt: A `tf.compat.v1.train.Optimizer`.
        loss_scale: `"dynamic"` (the default), a positive number for a fixed scale, a
            `keras_mp.LossScale`, one of `tf.compat.v1.mixed_precision`, or a `LossScaleManager`.
        loss_scale_manager: `LossScaleManager`. TensorFlow 1's name of `loss_scale`.
        aggregate_in_float16: bool. Sums float32 gradients over replicas as float16, still scaled,
            where steps can be skipped. Defaults to True.
        warn_after_skips: int, or None for never. After how many skipped steps in a row to warn;
            graphs of TensorFlow 1 do not. Defaults to 50.

    Raises:
        TypeError: `opt` is not an optimizer of TensorFlow 1, or scales the loss itself.
        ValueError: `opt` is wrapped already, or loss scaling does not work under the strategy.

    Example:

    >>> with tf.Graph().as_default():
    ...     v = tf.compat.v1.get_variable("v", initializer=1.0)
    ...     manager = keras_mp.compat.v1.ExponentialUpdateLossScaleManager(2**15, 1000)
    ...     optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.25)
    ...     optimizer = keras_mp.compat.v1.LossScaleOptimizer(optimizer, manager)
    ...     train_op = optimizer.minimize(v**2)
    ...     with tf.compat.v1.Session() as session:
    ...         session.run(tf.compat.v1.global_variables_initializer())
    ...         session.run(train_op)
    ...         print(session.run(v))
    0.5

    Source: TensorFlow 1, `tf.contrib.mixed_precision.LossScaleOptimizer`.
    """

    def __init__(
        self,
        opt: tf.compat.v1.train.Optimizer,
        loss_scale: loss_scale_lib.LossScaleArgument | LossScaleManager = "dynamic",
        *,
        loss_scale_manager: LossScaleManager | None = None,
        aggregate_in_float16: bool = True,
        warn_after_skips: int | None = 50,
    ) -> None:
        if not isinstance(opt, _Optimizer):
            raise TypeError(
                "Expected a tf.compat.v1.train.Optimizer; for an optimizer of tf.keras there is "
                f"keras_mp.LossScaleOptimizer. Received: opt={opt!r} (of type {type(opt)})"
            )
        if scales_loss(opt):
            error = ValueError if opt in _wrapped else TypeError
            raise error(
                "The optimizer already scales the loss, or is already wrapped by a "
                "LossScaleOptimizer, so the loss would be scaled twice. Use the one that you have, "
                f"or its inner optimizer, or create a new optimizer. Received: opt={opt!r}"
            )
        if loss_scale_manager is not None and loss_scale != "dynamic":
            raise ValueError(
                "Pass `loss_scale` or `loss_scale_manager`, not both. Received: "
                f"loss_scale={loss_scale!r}, loss_scale_manager={loss_scale_manager!r}"
            )
        given = loss_scale if loss_scale_manager is None else loss_scale_manager
        managed = ManagedLossScale(given) if isinstance(given, LossScaleManager) else given
        instead = "the inner optimizer itself"
        loss_scale = loss_scale_lib.required(managed, "LossScaleOptimizer", instead)
        if not type(opt).compute_gradients.__module__.startswith("tensorflow."):
            messages.warn(
                f"{type(opt).__name__} has a `compute_gradients` of its own, which sees the loss "
                "scaled. If it clips gradients there, or adds noise to them, use bfloat16 without "
                "loss scaling."
            )
        strategies.check(may_skip=True)
        self._trackable = opt
        _Optimizer.__init__(self, use_locking=False, name=opt.get_name())
        self._scaler = Scaler(
            loss_scale,
            aggregate_in_float16=aggregate_in_float16,
            warn_after_skips=warn_after_skips,
        )
        # For warnings. It is in Python, so it costs a step nothing.
        self._notebook = Notebook(_Computed())
        _wrapped.add(opt)
        observers.tell(observers.Observer.scaler_was_made)

    inner_optimizer = property(lambda self: self._trackable, doc="The optimizer that is wrapped.")
    get_name, get_slot, get_slot_names = map(
        trackables.delegated, ("get_name", "get_slot", "get_slot_names")
    )

    @do_not_convert
    def minimize(
        self,
        loss: Loss,
        global_step: tf.Variable | None = None,
        var_list: Iterable[Any] | None = None,
        gate_gradients: int = _Optimizer.GATE_OP,
        aggregation_method: int | None = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: tf.Tensor | None = None,
    ) -> tf.Operation | None:
        """Makes a whole step.

        It scales the loss, and computes, unscales and applies the gradients.

        Args:
            loss: float tensor, or a callable without arguments that returns one; in eager it has
                to be a callable. Not scaled.
            global_step: variable that a step which is made increments, or None.
            var_list: list of variables. Defaults to the trainable ones of the graph, or to those
                that `loss` reads.
            gate_gradients: `GATE_NONE`, `GATE_OP` or `GATE_GRAPH`.
            aggregation_method: one of `tf.AggregationMethod`.
            colocate_gradients_with_ops: bool.
            name: str. Name of the operation.
            grad_loss: tensor. The gradient for `loss`.

        Returns:
            In a graph of TensorFlow 1 the operation that makes the step, else None.

        Raises:
            ValueError: no variable has a gradient.
        """
        how = gate_gradients, aggregation_method, colocate_gradients_with_ops
        if any(getattr(type(self), m) is not getattr(LossScaleOptimizer, m) for m in _HOOKS):
            return super().minimize(loss, global_step, var_list, *how, name, grad_loss)
        pairs, state = self._scaled_gradients(loss, grad_loss, var_list, *how)
        return self._step(_checked(pairs), state, global_step, name=name)

    @do_not_convert
    def compute_gradients(
        self,
        loss: Loss,
        var_list: Iterable[Any] | None = None,
        gate_gradients: int = _Optimizer.GATE_OP,
        aggregation_method: int | None = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: tf.Tensor | None = None,
    ) -> list[tuple[Any, Any]]:
        """Computes gradients of the scaled loss, and unscales them.

        It is the first half of `minimize`.

        Args:
            loss: float tensor, or a callable without arguments that returns one. Not scaled.
            var_list: list of variables. Defaults to the trainable ones of the graph, or to those
                that `loss` reads.
            gate_gradients: `GATE_NONE`, `GATE_OP` or `GATE_GRAPH`.
            aggregation_method: one of `tf.AggregationMethod`.
            colocate_gradients_with_ops: bool.
            grad_loss: tensor. The gradient for `loss`.

        Returns:
            list of (gradient, variable) pairs. A gradient may be None.
        """
        how = gate_gradients, aggregation_method, colocate_gradients_with_ops
        pairs, state = self._scaled_gradients(loss, grad_loss, var_list, *how)
        unscaled = gradients.unscale([g for g, _ in pairs], state.scaled_by)
        computed = self._notebook.page().step.computed.union(id(v) for _, v in pairs)
        self._notebook.note(_Computed(computed))
        return [(g, v) for g, (_, v) in zip(unscaled, pairs, strict=True)]

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
    ) -> tf.Operation | None:
        """Sums gradients over replicas, and applies them or skips the step.

        Args:
            grads_and_vars: iterable of (gradient, variable) pairs, unscaled as `compute_gradients`
                returns them. A gradient may be None.
            global_step: variable that a step which is made increments, or None.
            name: str. Name of the operation.
            skip_gradients_aggregation: bool. True where the gradients are summed already.

        Returns:
            In a graph of TensorFlow 1 the operation that makes the step, else None.

        Raises:
            ValueError: no variable has a gradient, or the call is in a cross-replica context.
        """
        pairs = _checked(grads_and_vars)
        applied = {id(v) for _, v in pairs}
        page, own = self._notebook.current(), self._notebook.page()
        computed = page.step.computed
        # What another thread or function has computed is presumed to be what is applied here.
        is_known = page is own and tf.executing_eagerly()
        if computed.isdisjoint(applied) if is_known else not computed:
            messages.warn(
                "apply_gradients() received gradients that compute_gradients() did not compute: "
                "their loss was not scaled, and small gradients may have vanished in float16. Do "
                "not use tf.gradients or tf.GradientTape with this optimizer: call `minimize`, or "
                "compute_gradients() and then apply_gradients()."
            )
        state = GradientState(scaled_by=self._scaler.loss_scale())
        how = {"name": name, "aggregate": not skip_gradients_aggregation}
        operation = self._step(pairs, state, global_step, **how)
        left = own.step.computed - applied if tf.executing_eagerly() else own.step.computed
        own.step = _Computed(left, is_applied=not tf.executing_eagerly())
        return operation

    def variables(self) -> list[tf.Variable]:
        """Returns the inner optimizer's variables and those of the loss scale."""
        return [*self.inner_optimizer.variables(), *self.loss_scale_variables()]

    def loss_scale_variables(self) -> list[tf.Variable]:
        """Returns the variables that the inner optimizer does not have.

        A `Saver` without them reads a checkpoint of a program that did not scale the loss.
        """
        return [*self._scaler.loss_scale.variables, self._scaler.steps_skipped]

    def _scaled_gradients(
        self, loss: Loss, grad_loss: Any, *how: Any
    ) -> tuple[list[tuple[Any, Any]], GradientState]:
        losses, scaled_by = list[tf.Tensor](), self._scaler.loss_scale()

        def scale(loss: tf.Tensor) -> tf.Tensor:
            losses.append(tf.convert_to_tensor(loss))
            return gradients.scale_loss(loss, scaled_by)

        if grad_loss is not None:  # It is widened like the loss.
            [grad_loss] = gradients.convert([tf.convert_to_tensor(grad_loss)], widens=True)
        scaled, given = gradients.map_loss(scale, loss), dict(zip(_HOW, how, strict=True))
        pairs = self.inner_optimizer.compute_gradients(scaled, grad_loss=grad_loss, **given)
        return pairs, GradientState(True, scaled_by, losses=losses)

    def _step(self, pairs: Any, state: GradientState, global_step: Any, **how: Any) -> Any:
        # Checked again, since the optimizer may have been made outside of the strategy's scope.
        strategies.check(may_skip=True)
        adapter = V1Optimizer(self.inner_optimizer, global_step)
        adapter.build([variable for _, variable in pairs])
        train_ops = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
        before = list(train_ops)
        operation, _ = make_step(adapter, pairs, state, self._scaler, **how)
        if operation is None:
            return None
        train_op = tf.group(operation, name=how["name"] or self.get_name())
        # In place of the operations that the inner optimizer has added, which are in a branch.
        train_ops[:] = [*before, train_op]
        return train_op

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "base_optimizer":  # as TensorFlow's own wrapper calls it
            return self.inner_optimizer
        own = self._own_children().get(name)
        return super()._lookup_dependency(name, *args, **kwargs) if own is None else own


# What `compute_gradients` takes besides the loss.
_HOW = ("var_list", "gate_gradients", "aggregation_method", "colocate_gradients_with_ops")
# The methods that a subclass may override to change `minimize`.
_HOOKS = ("compute_gradients", "apply_gradients")


def _checked(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Checks the pairs to apply, and leaves out variables without a gradient."""
    return [(g, v) for g, v in gradients.checked_pairs(pairs, may_be_empty=False) if g is not None]

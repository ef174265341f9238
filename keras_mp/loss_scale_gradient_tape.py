"""A gradient tape that scales the loss, and computes overflowing gradients again.

RFC 293, "LossScaleGradientTape". This module needs TensorFlow only.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp import loss_scale as loss_scale_lib
from keras_mp.grad_scaler import GradScaler
from keras_mp.step import finiteness, replicas, scaled_losses
from keras_mp.step.loss_scales import DynamicLossScale
from keras_mp.step.scaling_tape import ScalingTape
from keras_mp.step.schedule import MIN_LOSS_SCALE
from keras_mp.support import host, validation
from keras_mp.support.autograph import do_not_convert
from keras_mp.tensorflow_api import graphs


class LossScaleGradientTape(tf.GradientTape):
    """A `tf.GradientTape` whose gradients are those of a scaled loss, unscaled.

    If a gradient is not finite, `gradient` computes all gradients again at half the scale, from the
    same forward pass, so that the batch is not lost. It is for runs in which a skipped step
    matters. If the loss itself is not finite, or nothing helps, the gradients are returned as they
    are.

    A dynamic scale stays where the gradients were finite. With several replicas, each looks for its
    own scale, and then all of them take the smallest. With a `LossScale`, only this tape moves the
    scale: a finite `gradient` counts as a good step. With a `GradScaler`, `GradScaler.step` takes
    the gradients as they are, and skips those that nothing has helped; `GradScaler.update` counts
    the step.

    The tape keeps the results of the forward pass until `gradient` returns, as a persistent tape
    does. Only `gradient` scales. In a `tf.function`, gradients of gradients that were computed
    again are NaN.

    Args:
        loss_scale: A `keras_mp.GradScaler`, a `keras_mp.LossScale`, `"dynamic"`, or a number for a
            fixed scale, at which each search starts.
        max_retries: int of at least 0. How often to compute again. Defaults to 16.
        persistent: bool. Whether `gradient` may be called more than once. Defaults to False.
        watch_accessed_variables: bool, as in `tf.GradientTape`. Defaults to True.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument has a wrong value.

    Example:

    >>> loss_scale = keras_mp.DynamicLossScale(2**20)
    >>> v = tf.Variable(3.0)
    >>> with keras_mp.LossScaleGradientTape(loss_scale) as tape:
    ...     loss = tf.cast(tf.cast(v, tf.float16) ** 2, tf.float32)
    >>> float(tape.gradient(loss, v)), float(loss_scale())
    (6.0, 8192.0)

    Source: RFC 293, "LossScaleGradientTape".
    """

    def __init__(
        self,
        loss_scale: loss_scale_lib.LossScaleArgument | GradScaler,
        max_retries: int = 16,
        persistent: bool = False,
        watch_accessed_variables: bool = True,
    ) -> None:
        # The tape has to be persistent, to compute gradients again.
        super().__init__(persistent=True, watch_accessed_variables=watch_accessed_variables)
        self._scaler: GradScaler | None = None
        if isinstance(loss_scale, GradScaler):
            self._scaler, self._loss_scale = loss_scale, loss_scale._scaler.loss_scale
        else:
            self._loss_scale = loss_scale_lib.required(
                loss_scale, "LossScaleGradientTape", "a tf.GradientTape"
            )
        self._max_retries = validation.integer("max_retries", max_retries, at_least=0)
        self._is_kept = validation.boolean("persistent", persistent)
        self._moves_scale = True

    @do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Computes gradients of the scaled target, and unscales them.

        It computes them again until they are finite.

        Args:
            target: float tensor, or a nested structure of them.
            sources: variable or tensor, or a nested structure of them.
            output_gradients: tensors, one for each of `target`, by which the gradients of that
                target are multiplied. They are not scaled.
            unconnected_gradients: the result for sources on which `target` does not depend.

        Returns:
            The structure of `sources`, of gradients or None.

        Raises:
            RuntimeError: the tape is not persistent and was used.
            ValueError: the call is in a cross-replica context.
        """
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                "LossScaleGradientTape.gradient() is called in a replica context: inside the "
                "function that is passed to `strategy.run`."
            )
        if self._scaler is not None:
            self._scaler._step_calls.refuse_tape_beside_scale()
        with self._asked():
            return self._scaled(target, sources, output_gradients, unconnected_gradients)

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Raises an error, since it would not be scaled; use a `tf.GradientTape`."""
        raise NotImplementedError("Only gradient() scales. Use a tf.GradientTape for jacobians.")

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Raises an error, since it would not be scaled; use a `tf.GradientTape`."""
        self.jacobian()

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Context manager in which gradients are computed.

        What is computed there will not be differentiated, and the tape is over then, unless it may
        be asked again.
        """
        if self._tape is None:
            raise RuntimeError(
                "A gradient tape can be used for one call of gradient(), unless it is made with "
                "persistent=True."
            )
        if not self._is_kept:
            self.__exit__(None, None, None)
        yield
        if not self._is_kept:
            self._watched_variables, self._tape = self._tape.watched_variables(), None

    def _scaled(
        self, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Does what `gradient` says."""
        targets = [self._widened(each) for each in tf.nest.flatten(target)]
        if output_gradients is not None:
            flat = tf.nest.flatten(output_gradients)
            output_gradients = [tf.cast(f, t.dtype) for f, t in zip(flat, targets, strict=True)]

        def compute(scale: tf.Tensor) -> list[Any]:
            tape = ScalingTape(self, scale)
            return tf.nest.flatten(
                tape.gradient(targets, sources, output_gradients, *args, **kwargs)
            )

        return tf.nest.pack_sequence_as(sources, self._search(compute, targets))

    def _widened(self, target: Any) -> tf.Tensor:
        """Casts a 16-bit target to float32 on the tape, since a scale may overflow it."""
        target = tf.convert_to_tensor(target)
        if not target.dtype.is_floating or target.dtype.size >= tf.float32.size:
            return target
        with contextlib.nullcontext() if self._recording else self:
            return tf.cast(target, tf.float32)

    def _search(self, compute: Callable[[tf.Tensor], list[Any]], targets: list[tf.Tensor]) -> list:
        """Computes gradients at the highest scale that works, not above the current one."""
        scaled_losses.thread.noted.has_scaled = True
        loss_is_finite = finiteness.all_finite(targets)
        start = self._loss_scale()
        floor = getattr(self._loss_scale, "min_loss_scale", MIN_LOSS_SCALE)
        lowest = tf.maximum(start * 0.5**self._max_retries, floor)
        first = compute(start)
        positions = [i for i, gradient in enumerate(first) if gradient is not None]

        def goes_on(scale: tf.Tensor, finite: tf.Tensor, *grads: Any) -> tf.Tensor:
            return loss_is_finite & tf.logical_not(finite) & (scale > lowest)

        def again(scale: tf.Tensor, finite: tf.Tensor, *grads: Any) -> tuple:
            scale = tf.maximum(scale * 0.5, floor)
            again = compute(scale)
            for i in positions:
                _set_shapes(again[i], first[i])
            return scale, finiteness.all_finite(again), *(again[i] for i in positions)

        state = (start, finiteness.all_finite(first), *(first[i] for i in positions))
        if self._max_retries:
            state = _rare_loop(goes_on, again, state)
        scale, finite, *found = state
        if self._moves_scale and isinstance(self._loss_scale, DynamicLossScale):
            self._move(start, scale, finite, loss_is_finite)
        if self._scaler is not None:
            self._scaler._step_calls.by_tape(targets)
        present = iter(found)
        return [None if each is None else _of_shape(each, next(present)) for each in first]

    def _counts(self, finite: tf.Tensor) -> bool | tf.Tensor:
        """Whether gradients move the scale as those of a step do."""
        del finite
        return self._scaler is None  # A GradScaler counts by itself.

    def _move(
        self, start: tf.Tensor, scale: tf.Tensor, finite: tf.Tensor, loss_is_finite: tf.Tensor
    ) -> None:
        """Moves the scale to where the gradients of all replicas were finite."""
        loss_scale: Any = self._loss_scale
        if replicas.are_several():
            from keras_mp.step import strategies

            own = [tf.cast(each, tf.float32) for each in (scale, finite, loss_is_finite)]
            scale, *verdicts = tf.unstack(tf.reduce_min(strategies.gather(tf.stack(own)), 0))
            finite, loss_is_finite = (verdict > 0 for verdict in verdicts)

        def count() -> None:
            loss_scale.move(finite, loss_is_finite, when)

        when, has_fallen = self._counts(finite), finite & (scale < start)
        move = functools.partial(tf.cond, has_fallen, lambda: loss_scale.fall_to(scale), count)
        replicas.once_for_all_replicas(move)


def _rare_loop(
    goes_on: Callable[..., tf.Tensor], body: Callable[..., Any], state: Sequence[Any]
) -> Any:
    """Is `tf.while_loop` for a loop that mostly ends before its first turn.

    Otherwise TensorFlow would go through all operations of the loop before the first step.

    Args:
        goes_on: function of the state, which returns a bool scalar tensor.
        body: function of the state, which returns the next one.
        state: sequence of tensors.

    Returns:
        The last state.
    """
    if host.is_compiled_by_xla():
        # XLA fails where a loop has the same constants as an earlier one, unless it is in a call.
        return host.as_one_operation(lambda: tf.while_loop(goes_on, body, state))()
    return graphs.kept_whole(lambda: tf.while_loop(goes_on, body, state))


def _of_shape(known: Any, gradient: Any) -> Any:
    """Returns a gradient from a loop, of the dense shape that XLA knows outside of it."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.IndexedSlices(gradient.values, gradient.indices, known.dense_shape)


def _set_shapes(gradient: Any, known: Any) -> None:
    """Gives a gradient from a loop the static shape that it has outside of it."""
    parts = [tf.nest.flatten(each, expand_composites=True) for each in (gradient, known)]
    for part, known_part in zip(*parts):
        if not tf.executing_eagerly():
            part.set_shape(known_part.shape)

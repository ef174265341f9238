"""The properties of what has a `Scaler`: an optimizer, or a `GradScaler`.

RFC 293, "LossScaleOptimizer API".
"""

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mp.step import replicas, scaled_losses
from keras_mp.step.loss_scales import LossScale
from keras_mp.step.record import Calls
from keras_mp.support import validation

if TYPE_CHECKING:
    from keras_mp.step.overflow import Overflow


class ScalerProperties:
    """The properties of an object with a `Scaler`, and its children in checkpoints."""

    _scaler: Any = None
    _step_calls: Calls | None = None
    _skip_nonfinite = False

    @property
    def loss_scale(self) -> LossScale:
        """The `LossScale`. Call it for its value, a float32 scalar tensor.

        Without loss scaling it is a `FixedLossScale(1)`.
        """
        scaled_losses.thread.noted.knows_scale = True
        return self._scaler.loss_scale

    @property
    def skip_nonfinite(self) -> bool:
        """Whether steps are skipped with every loss scale.

        With a dynamic one, they always are.
        """
        return self._skip_nonfinite

    @property
    def aggregate_in_float16(self) -> bool:
        """Whether float32 gradients are summed over replicas as float16.

        It may be set at any time.
        """
        return self._scaler.reduce_dtype == tf.float16

    @aggregate_in_float16.setter
    def aggregate_in_float16(self, value: bool) -> None:
        if validation.boolean("aggregate_in_float16", value) is not self.aggregate_in_float16:
            self._scaler.reduce_dtype = tf.float16 if value else tf.float32

    @property
    def reduce_dtype(self) -> str:
        """The dtype in which float32 gradients are summed over replicas.

        It may be set at any time. A `tf.function` keeps the dtype that was set when it was traced.
        """
        return self._scaler.reduce_dtype.name

    @reduce_dtype.setter
    def reduce_dtype(self, value: str | tf.DType) -> None:
        self._scaler.reduce_dtype = replicas.to_reduce_dtype(value)

    @property
    def steps_skipped(self) -> tf.Tensor:
        """The number of steps skipped so far, an int64 scalar tensor.

        With a `GradScaler`, the steps of all optimizers count.
        """
        self._scaler.ask()
        # A tensor, since in Python a mirrored variable is true whatever its value.
        return tf.convert_to_tensor(self._scaler.steps_skipped)

    @property
    def last_step_skipped(self) -> tf.Tensor:
        """Whether the last step was skipped, a bool scalar tensor.

        With a `GradScaler`, it tells whether any optimizer was skipped before the last `update`. It
        is False for a step that was skipped only for want of examples. Gradients that are
        accumulated for a later step do not change it.
        """
        self._scaler.ask()
        if not self._scaler.can_skip:
            return tf.constant(False)
        return tf.convert_to_tensor(self._scaler.skips_in_a_row) > 0

    @property
    def last_overflow(self) -> "Overflow | None":
        """The gradients that were not finite in the last skipped step, or None.

        It is a `keras_mp.Overflow`: which step it was, the Inf and NaN of each variable on each
        replica (also those of other workers), and whether the loss itself was finite. Its `str` is
        a table. Gradients are counted as they were before the program clipped them: as
        `get_unscaled_gradients`, or `unscale` of a `GradScaler`, returned them. A `GradScaler`
        reports one optimizer, which its variables identify.

        Gradients are searched only when a step is skipped, and the result stays on the device until
        it is read. It is not part of checkpoints. With a fixed scale no step is skipped, unless
        `skip_nonfinite` is set, so there is no report. Graphs of TensorFlow 1 make no reports
        either.

        Raises:
            RuntimeError: it is read in a graph.

        Example:

        >>> optimizer, v = keras_mp.LossScaleOptimizer("sgd"), tf.Variable([1.0, 2.0], name="v")
        >>> _ = optimizer.minimize(lambda: tf.reduce_sum(v * [1.0, float("inf")]), [v])
        >>> overflow = optimizer.last_overflow
        >>> overflow.step, overflow.variables, overflow.gradients[0].infs, overflow.loss_is_finite
        (1, ['v'], 1, False)
        """
        return self._scaler.last()

    @property
    def warn_after_skips(self) -> int | None:
        """The number of skipped steps in a row after which to warn; None for never.

        A `tf.function` keeps the number that was set when it was traced.
        """
        return self._scaler.warn_after

    @warn_after_skips.setter
    def warn_after_skips(self, value: int | None) -> None:
        self._scaler.set_limits(value, self.raise_after_skips)

    @property
    def raise_after_skips(self) -> int | None:
        """The number of skips in a row after which to raise an error; None for never.

        A `tf.function` keeps the number that was set when it was traced.
        """
        return self._scaler.raise_after

    @raise_after_skips.setter
    def raise_after_skips(self, value: int | None) -> None:
        self._scaler.set_limits(self.warn_after_skips, value)

    def _config_of_scaler(self) -> dict[str, Any]:
        """Returns the arguments about sums and skipped steps."""
        names = ("aggregate_in_float16", "reduce_dtype", "skip_nonfinite", "warn_after_skips")
        names += ("raise_after_skips",) if self.raise_after_skips is not None else ()
        return {name: getattr(self, name) for name in names}

    def _own_children(self) -> dict[str, Any]:
        """Returns the children in checkpoints, besides those of a wrapped optimizer."""
        return {"loss_scale": self._scaler.loss_scale, "steps_skipped": self._scaler.steps_skipped}

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        # Optimizers of tf_keras list their children only once, perhaps before they are wrapped.
        others = super()._trackable_children(save_type, **kwargs)  # pyright: ignore
        # A SavedModel holds functions, and all that these use.
        hidden = self._hidden_variables() if save_type == "savedmodel" else {}
        return {**others, **self._own_children(), **hidden}

    def _hidden_variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        of_calls = {} if self._step_calls is None else self._step_calls.variables()
        return {**self._scaler.variables(), **of_calls}

"""The optimizer wrapper that sums gradients in bfloat16, without loss scaling.

RFC 293, "All-reducing in float16", for runs in bfloat16 and float32. `LossScaleOptimizer` does the
same for runs that scale the loss.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.hooks import observers
from keras_mp.optimizer_wrapper import OptimizerWrapper
from keras_mp.step import gradients, replicas
from keras_mp.step.scaled_step import ScaledStep
from keras_mp.support.autograph import do_not_convert
from keras_mp.wrappers.inner_optimizers import chain, refuse_all_reduce

_CHOICES = ("bfloat16", "float32")
_HINT = (
    " Gradients in float16 have to be scaled: use LossScaleOptimizer(optimizer, "
    "reduce_dtype='float16')."
)


@keras_api.register_serializable
class AllReduceOptimizer(OptimizerWrapper):
    """An optimizer that sums float32 gradients over replicas in bfloat16.

    That takes half the bytes. It is for training without loss scaling, in `mixed_bfloat16` or
    float32, under `MultiWorkerMirroredStrategy` or `MirroredStrategy`. (A `LossScaleOptimizer` has
    its own `reduce_dtype`.) Nothing wraps an optimizer with it automatically.

    Gradients are rounded to 8 significant bits on their way: each replica's before they are added,
    and then their sum. Clipping, weight decay and averages see the sum, in float32. float16
    gradients are summed in the same dtype; bfloat16 and float64 gradients are summed in their own.
    With one replica, nothing is summed or rounded. Steps are never skipped.

    Args:
        inner_optimizer: The optimizer to wrap: an instance, a name such as `"adam"`, or a config.
        reduce_dtype: `"bfloat16"` (the default) or `"float32"`, or such a DType. The dtype in which
            float32 gradients are summed.
        jit_compile: bool. Lets XLA compile the update, as in `OptimizerWrapper`. Defaults to False.

    Raises:
        TypeError: `inner_optimizer` is not an optimizer of `tf.keras`, or is one that sums
            gradients itself: a `LossScaleOptimizer`, or another of this class.
        ValueError: `reduce_dtype` is another dtype, such as float16, which needs loss scaling.

    Example:

    >>> optimizer = keras_mp.AllReduceOptimizer(tf.keras.optimizers.SGD(0.25))
    >>> v = tf.Variable(1.0)
    >>> _ = optimizer.minimize(lambda: v**2, [v])
    >>> float(v), optimizer.reduce_dtype
    (0.5, 'bfloat16')

    Source: RFC 293, "All-reducing in float16"; PyTorch, `MixedPrecision(reduce_dtype=)`.
    """

    _is_all_reduce = True

    def __init__(
        self,
        inner_optimizer: tf.keras.optimizers.Optimizer | str | dict[str, Any],
        reduce_dtype: str | tf.DType = "bfloat16",
        *,
        jit_compile: bool = False,
    ) -> None:
        if isinstance(inner_optimizer, (str, dict)):
            inner_optimizer = keras_api.get_optimizer(inner_optimizer)
        refuse_all_reduce(inner_optimizer, "AllReduceOptimizer")
        if any(isinstance(o, keras_api.KerasLossScaleOptimizer) for o in chain(inner_optimizer)):
            raise TypeError(
                "A LossScaleOptimizer sums gradients itself, while they are scaled: use its "
                "`reduce_dtype` instead of an AllReduceOptimizer. "
                f"Received: inner_optimizer={inner_optimizer!r}"
            )
        super().__init__(inner_optimizer, jit_compile)
        self.reduce_dtype = reduce_dtype

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name} of {self.inner_optimizer!r}, reduce_dtype={self.reduce_dtype!r}>"

    @property
    def reduce_dtype(self) -> str:
        """The dtype in which float32 gradients are summed over replicas.

        It may be set at any time. A `tf.function` keeps the dtype that was set when it was traced.
        """
        return self._reduce_dtype.name

    @reduce_dtype.setter
    def reduce_dtype(self, value: str | tf.DType) -> None:
        self._set_own(_reduce_dtype=replicas.to_reduce_dtype(value, _CHOICES, _HINT))

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        *,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Sums gradients over replicas, and lets the inner optimizer apply them.

        Args:
            grads_and_vars: iterable of (gradient, variable) pairs. A gradient may be None.
            name: str. Name of the operation.
            skip_gradients_aggregation: bool. True where the gradients are summed already.
            experimental_aggregate_gradients: bool. False is the older spelling of
                `skip_gradients_aggregation=True`.

        Returns:
            `iterations`, or in a TensorFlow 1 graph the operation that makes the step.

        Raises:
            ValueError: no variable has a gradient, or the call is in a cross-replica context.
        """
        pairs = gradients.checked_pairs(grads_and_vars)
        if not pairs:
            return self.iterations
        self.build([variable for _, variable in pairs])
        if replicas.number_of_workers() > 1:
            grads, facts = [gradient for gradient, _ in pairs], {"reduce_dtype": self.reduce_dtype}
            observers.tell(observers.Observer.workers_meet, self, grads, facts)
        operation, _ = ScaledStep(self._adapter, reduce_dtype=self._reduce_dtype).make(
            pairs,
            aggregate=experimental_aggregate_gradients and not skip_gradients_aggregation,
            name=name,
        )
        return self.iterations if operation is None else operation

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal optimizer."""
        return {**super().get_config(), "reduce_dtype": self.reduce_dtype}

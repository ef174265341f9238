"""How a step has its gradients applied, by whatever applies them.

The optimizers of `tf.keras` have their adapters in `keras_api`, all else in `other_adapters`.
"""

import abc
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import gradients
from keras_mp.step.compiled_update import CompiledUpdates, Pairs
from keras_mp.support import host
from keras_mp.support.dtypes import LOW_PRECISION

Loss = tf.Tensor | Callable[[], tf.Tensor]
VarList = tf.Variable | Iterable[Any] | Callable[[], Any]
# What applying gradients returns: only TensorFlow 1 has to run an operation.
Applied = tf.Operation | tf.Variable | None


class OptimizerAdapter(abc.ABC):
    """Drives what applies gradients.

    Only `apply` has to be written. What else a subclass overrides is what a step, or a wrapper of
    the optimizer, would otherwise not know of it.

    Args:
        optimizer: What applies gradients.

    Attributes:
        unscales_and_skips: Whether its `update` takes scaled gradients and the verdicts, and skips
            a step by itself.
        takes_float32_gradients: Whether gradients in 16 bits are cast to float32 before they are
            unscaled, so that small ones stay.
        is_revived_without_state: Whether a model that is loaded from a SavedModel has new slots.
        is_saved_by_keras: Whether Keras saves its variables, in `.keras` and `.weights.h5` files.
        jit_compile: Whether XLA is to compile the update, as one function.
        only_differentiates: Whether gradients of a scaled loss are the gradients times the scale:
            not so where the optimizer clips those of each example as it computes them.
        overrides_minimize: Whether the optimizer does something of its own in `minimize`.
    """

    unscales_and_skips = False
    takes_float32_gradients = False
    is_revived_without_state = False
    is_saved_by_keras = True
    jit_compile = False
    only_differentiates = True
    overrides_minimize = False

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def hyperparameters(self) -> frozenset[str]:
        """Names of the attributes that a wrapper reads and writes on the optimizer."""
        try:
            with tf.init_scope():
                names = self.optimizer.get_config().keys() - {"name", "is_legacy_optimizer"}
        except NotImplementedError:
            names = {"learning_rate"}
        return frozenset(name for name in names if hasattr(self.optimizer, name))

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the optimizer's variables, outside of any function that is being traced."""
        del variables

    def built_variables(self) -> Sequence[Any]:
        """The variables that the optimizer was built with, where it can tell."""
        raise ValueError(
            "Pass the variables together with the gradients. "
            f"Received: trainable_variables=None for {type(self.optimizer)}"
        )

    def compute_gradients(
        self,
        loss: Loss,
        var_list: VarList,
        tape: tf.GradientTape | None,
        grad_loss: tf.Tensor | None,
    ) -> list[tuple[Any, Any]]:
        """The first half of `minimize`: a list of (gradient, variable) pairs."""
        del loss, var_list, tape, grad_loss
        raise TypeError(f"Compute the gradients with a tape. Received: {self.optimizer!r}")

    def custom_aggregation(self) -> Callable[[list[tuple[Any, Any]]], Pairs] | None:
        """The user's own way of reducing (gradient, variable) pairs, or None."""
        return None

    @abc.abstractmethod
    def apply(self, grads_and_vars: Pairs, name: str | None, aggregate: bool) -> Applied:
        """Lets the optimizer clip, decay and apply; `aggregate` says whether it reduces first."""

    @functools.cached_property
    def _compiled(self) -> CompiledUpdates:
        return CompiledUpdates(self.optimizer, self.hyperparameters())

    def update(
        self,
        grads_and_vars: Pairs,
        name: str | None,
        *,
        divisor: tf.Tensor | None = None,
        verdicts: Sequence[tf.Tensor] = (),
    ) -> Applied:
        """Lets the optimizer apply gradients that are summed, compiled where that is asked for.

        Args:
            grads_and_vars: sequence of (gradient, variable) pairs.
            name: str. Name of the operation.
            divisor: float32 scalar tensor. By what the gradients are divided before. Defaults to
                None, where they are not scaled.
            verdicts: bool scalar tensors, for what skips a step by itself: it is to be made if all
                are True.

        Returns:
            What `apply` returns; where it is compiled, the optimizer's count of steps.
        """
        del verdicts

        def apply(pairs: Pairs) -> Applied:
            return self.apply(pairs, name, aggregate=False)

        if self.jit_compile and not host.is_compiled_by_xla():
            self.build([variable for _, variable in grads_and_vars])
            if self._compiled.make(apply, grads_and_vars, divisor):
                return getattr(self.optimizer, "iterations", None)
        if divisor is not None:
            unscaled = gradients.unscale([g for g, _ in grads_and_vars], divisor)
            grads_and_vars = list(zip(unscaled, (v for _, v in grads_and_vars), strict=True))
        return apply(grads_and_vars)

    def widened(self, grads: list[gradients.Gradient]) -> list[gradients.Gradient]:
        """Gradients as the optimizer takes them: if in float32, small ones stay when unscaled."""
        if not self.takes_float32_gradients:
            return grads
        return gradients.cast(grads, LOW_PRECISION, tf.float32)

    def accumulates(self) -> bool:
        """Whether a step is made of the gradients of several calls of `apply`."""
        return False

    def completes_step(self) -> tf.Tensor:
        """Whether the next gradients are the last of a step, a bool scalar."""
        return tf.constant(True)

    def totals(self, grads_and_vars: Pairs) -> Pairs:
        """What a step would be made of: gradients with what was accumulated before them.

        After the pairs that are given come those of which only something was accumulated.
        """
        return grads_and_vars

    def steps_made(self) -> tf.Tensor | None:
        """How many steps were made so far, an int64 scalar, or None where none are counted."""
        iterations = getattr(self.optimizer, "iterations", None)
        return None if iterations is None else tf.cast(tf.convert_to_tensor(iterations), tf.int64)

    def drop_accumulated(self) -> None:
        """Forgets what was accumulated, in the place of the gradients that complete a step."""
        return

    def is_overwritten(self, variable: tf.Variable) -> bool:
        """Whether what comes as the variable's gradient is its new value."""
        del variable
        return False


class DelegatingAdapter(OptimizerAdapter):
    """An adapter around another one, which it asks for all that a subclass does not override.

    Args:
        optimizer: What applies gradients.
        inner: The other adapter.
    """

    def __init__(self, optimizer: Any, inner: OptimizerAdapter) -> None:
        super().__init__(optimizer)
        self._inner = inner


for _name in (
    *("is_revived_without_state", "is_saved_by_keras"),
    *("takes_float32_gradients", "only_differentiates", "hyperparameters"),
    *("built_variables", "compute_gradients", "custom_aggregation", "steps_made"),
    *("accumulates", "completes_step", "totals", "drop_accumulated", "is_overwritten"),
):
    setattr(DelegatingAdapter, _name, property(operator.attrgetter(f"_inner.{_name}")))

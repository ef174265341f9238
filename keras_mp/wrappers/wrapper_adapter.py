"""The adapter by which an optimizer wrapper calls another one inside of it."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step.optimizer_adapter import Applied, DelegatingAdapter, Loss, Pairs, VarList


class WrapperAdapter(DelegatingAdapter):
    """A wrapper that is wrapped itself.

    Args:
        wrapper: An `OptimizerWrapper`.
    """

    # The wrapper saves the variables that Keras does not save.
    is_saved_by_keras = True

    def __init__(self, wrapper: tf.keras.optimizers.Optimizer) -> None:
        super().__init__(wrapper, wrapper._adapter)

    @property
    def only_differentiates(self) -> bool:
        return self.optimizer._only_differentiates()

    @property
    def overrides_minimize(self) -> bool:
        return self.optimizer._overrides_minimize()

    def hyperparameters(self) -> frozenset[str]:
        return self.optimizer._hyperparameters

    def build(self, variables: Sequence[Any]) -> None:
        self.optimizer.build(variables)

    def compute_gradients(
        self,
        loss: Loss,
        var_list: VarList,
        tape: tf.GradientTape | None,
        grad_loss: tf.Tensor | None,
    ) -> list[tuple[Any, Any]]:
        return self.optimizer.compute_gradients(loss, var_list, tape, grad_loss)

    def apply(self, grads_and_vars: Pairs, name: str | None, aggregate: bool) -> Applied:
        return self.optimizer.apply_gradients(
            grads_and_vars, name=name, skip_gradients_aggregation=not aggregate
        )

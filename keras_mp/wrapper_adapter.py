"""How an optimizer wrapper is driven by one that wraps it."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step.optimizer_adapter import OptimizerAdapter, Pairs


class WrapperAdapter(OptimizerAdapter):
    """A wrapper that is wrapped itself."""

    @property
    def is_revived_without_state(self) -> bool:
        return self.optimizer._adapter.is_revived_without_state

    @property
    def takes_float32_gradients(self) -> bool:
        return self.optimizer._adapter.takes_float32_gradients

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
        loss: Any,
        var_list: Any,
        tape: tf.GradientTape | None,
        grad_loss: tf.Tensor | None,
    ) -> list[tuple[Any, Any]]:
        return self.optimizer.compute_gradients(loss, var_list, tape, grad_loss)

    def apply(self, grads_and_vars: Pairs, name: str | None, aggregate: bool) -> Any:
        return self.optimizer.apply_gradients(
            grads_and_vars, name=name, skip_gradients_aggregation=not aggregate
        )


def _ask_innermost(name: str) -> Callable[..., Any]:
    def method(self: WrapperAdapter, *args: Any) -> Any:
        return getattr(self.optimizer._adapter, name)(*args)

    return method


for _name in (
    *("built_variables", "custom_aggregation", "is_overwritten"),
    *("accumulates", "completes_step", "totals", "drop_accumulated"),
):
    setattr(WrapperAdapter, _name, _ask_innermost(_name))

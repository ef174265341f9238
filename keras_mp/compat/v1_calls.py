"""The calls of an optimizer of TensorFlow 1. This module needs TensorFlow only."""

import threading
import weakref
from typing import Any

import tensorflow as tf

from keras_mp.step import call_states
from keras_mp.step.loss_scales import LossScale
from keras_mp.step.optimizer_calls import OptimizerCalls
from keras_mp.support import host


class V1Calls(OptimizerCalls):
    """`compute_gradients` scales the loss and unscales the gradients; `apply_gradients` may not.

    Python alone knows of the calls, which cost a step nothing. Gradients that another function may
    have computed are presumed to be right.
    """

    _needs_variables = False

    def __init__(self, loss_scale: LossScale) -> None:
        super().__init__(loss_scale)
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._threads: set[int] = set()

    def computed(self) -> None:
        """Notes a call of `compute_gradients`."""
        graph = host.current_graph()
        self._threads.add(threading.get_ident())
        if graph is not None:
            self._graphs.add(graph)
        self._note(call_states.COMPUTED)

    def _is_mine(self, graph: tf.Graph) -> bool:
        # A graph of TensorFlow 1 may apply what it has computed once as often as it likes.
        return graph is None and super()._is_mine(graph)

    def _presumed(self, graph: tf.Graph | None) -> int:
        if graph is None:
            is_of_another = bool(self._open_graphs) or threading.get_ident() not in self._threads
        else:
            is_of_another = isinstance(graph, tf.__internal__.FuncGraph)
        while graph is not None:
            if graph in self._graphs:
                return call_states.COMPUTED
            graph = getattr(graph, "outer_graph", None)
        if is_of_another and self._threads:
            return call_states.COMPUTED
        last = self._mine.facts
        return last if isinstance(last, int) else 0

    def _missing_call(self, facts: int) -> str:
        return (
            "apply_gradients() was given gradients that compute_gradients() has not computed: "
            "their loss was not scaled, and small ones may have vanished in float16. Do not use "
            "tf.gradients or tf.GradientTape with this optimizer: call `minimize`, or "
            "compute_gradients() and then apply_gradients()."
        )

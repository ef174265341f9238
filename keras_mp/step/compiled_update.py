"""Updates as one function that XLA compiles: one pass over weights, slots and gradients.

What an optimizer of Keras does with a weight is some ten operations, each of which goes through
memory once. XLA makes one loop of them. It rounds some results elsewhere in the last digit, so it
is asked for. This module needs TensorFlow only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import replicas
from keras_mp.step.gradients import Gradient, unscale
from keras_mp.support import host, messages

Pairs = Sequence[tuple[Any, Any]]

_Update = Callable[[Pairs], Any]


class CompiledUpdates:
    """The compiled updates of an optimizer: a function for each list of variables.

    Args:
        optimizer: the optimizer, or a wrapper of one.
        names: names of the hyperparameters.
    """

    def __init__(self, optimizer: Any, names: Iterable[str]) -> None:
        self._optimizer, self._names = optimizer, frozenset(names)
        self._functions: dict[Any, Any] = {}
        self._said: set[str] = set()

    def make(self, update: _Update, pairs: Pairs, scaled_by: tf.Tensor | None) -> bool:
        """Makes an update, unless it cannot be compiled, which it says once.

        Args:
            update: makes the update, given unscaled (gradient, variable) pairs.
            pairs: sequence of (gradient, variable) pairs, of variables that are built.
            scaled_by: float32 scalar tensor by which the gradients are to be divided, or None.

        Returns:
            Whether it was made.
        """
        reason = _why_not([gradient for gradient, _ in pairs])
        if reason is None:
            tensors = [] if scaled_by is None else [scaled_by]
            tensors += [_shaped(gradient, v) for gradient, v in pairs if gradient is not None]
            function, reason = self._function(update, pairs, tensors, scaled_by is not None)
            if reason is None:
                function(*tensors)
                return True
        if reason not in self._said:
            self._said.add(reason)
            messages.warn(f"The update is made as without jit_compile=True: {reason}.")
        return False

    def _function(
        self, update: _Update, pairs: Pairs, tensors: Sequence[tf.Tensor], is_scaled: bool
    ) -> tuple[Any, str | None]:
        """The compiled function, and why there is none."""
        variables = [variable for _, variable in pairs]
        has_gradient = [gradient is not None for gradient, _ in pairs]
        key = (
            tuple(map(id, variables)),
            tuple(has_gradient),
            is_scaled,
            replicas.local_id(),
            *self._settings(),
        )
        if key not in self._functions:

            def compute(*tensors: tf.Tensor) -> None:
                given = unscale(tensors[1:], tensors[0]) if is_scaled else tensors
                values = iter(given)
                grads = [next(values) if has else None for has in has_gradient]
                with replicas.alone():
                    update(list(zip(grads, variables, strict=True)))

            function = tf.function(compute, autograph=False, jit_compile=True)
            self._functions[key] = function, _why_not_compiled(function, tensors)
        return self._functions[key]

    def _settings(self) -> Iterator[Any]:
        """What a trace takes for constant: hyperparameters that are no variables."""
        optimizer = self._optimizer
        while optimizer is not None:
            values = vars(optimizer)
            for name in sorted(self._names & values.keys()):
                if isinstance(values[name], (bool, int, float, str)):
                    yield name, values[name]
            rate = values.get("_learning_rate")
            yield rate if callable(rate) else None  # a schedule
            optimizer = values.get("_trackable")


def _why_not(grads: Sequence[Gradient]) -> str | None:
    if host.in_v1_graph():
        return "XLA does not compile functions in a graph of TensorFlow 1"
    if isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy):
        return "under ParameterServerStrategy the variables are on other machines"
    if any(isinstance(gradient, tf.IndexedSlices) for gradient in grads):
        return "there are sparse gradients (tf.IndexedSlices), as embeddings have them"
    return None


def _why_not_compiled(function: Any, tensors: Sequence[tf.Tensor]) -> str | None:
    """Why XLA cannot compile a function; None if it can. Computes nothing."""
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    with tf.init_scope():
        try:
            function.experimental_get_compiler_ir(*specs)(stage="hlo")
        except Exception as error:  # whatever an optimizer of the user's does in a graph
            return f"XLA cannot compile it ({str(error).strip().partition(chr(10))[0]})"
    return None


def _shaped(gradient: tf.Tensor, variable: Any) -> tf.Tensor:
    """A gradient with all of its shape: XLA has to know it."""
    is_known = gradient.shape.is_fully_defined()
    return gradient if is_known else tf.ensure_shape(gradient, variable.shape)

"""Updates as one function that XLA compiles.

It makes one pass over weights, slots and gradients. An optimizer of Keras updates a weight by some
ten operations, each of which goes through memory once. XLA makes one loop of them. Since it rounds
the last digit of some results differently, it is an option. This module needs TensorFlow only.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import replicas
from keras_mp.step.gradients import Gradient, unscale
from keras_mp.support import host, messages, selection

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

    def compiled(
        self,
        update: _Update,
        pairs: Pairs,
        divisor: tf.Tensor | None,
        verdict: tf.Tensor | None = None,
    ) -> Callable[[], None] | None:
        """Returns a function that makes an update; None if XLA cannot compile it.

        If XLA cannot compile it, a warning says so once.

        Args:
            update: function that makes the update, given unscaled (gradient, variable) pairs.
            pairs: sequence of (gradient, variable) pairs, of variables that are built.
            divisor: float32 scalar tensor, the number that unscales the gradients, or None.
            verdict: bool scalar tensor. If it is False, all variables keep their values. Defaults
                to None, for True.
        """
        reason = _why_not()
        if reason is None:
            given = {"divisor": divisor, "verdict": verdict}
            scalars = {name: scalar for name, scalar in given.items() if scalar is not None}
            tensors = list(scalars.values())
            tensors += [part for gradient, v in pairs for part in _parts(gradient, v)]
            function, reason = self._function(update, pairs, tensors, tuple(scalars))
            if reason is None:
                return lambda: function(*tensors)
        if reason not in self._said:
            self._said.add(reason)
            messages.warn(f"XLA does not compile the update: {reason}.")
        return None

    def _function(
        self,
        update: _Update,
        pairs: Pairs,
        tensors: Sequence[tf.Tensor],
        scalars: tuple[str, ...],
    ) -> tuple[Any, str | None]:
        """Returns the compiled function, and the reason if it cannot be compiled.

        Args:
            update: as in `compiled`.
            pairs: as in `compiled`.
            tensors: the arguments of the function.
            scalars: the names of the first of these arguments, "divisor" and "verdict".
        """
        variables = [variable for _, variable in pairs]
        kinds = [_kind(gradient) for gradient, _ in pairs]
        key = (
            tuple(map(id, variables)),
            tuple(kinds),
            scalars,
            replicas.local_id(),
            *self._settings(),
        )
        if key not in self._functions:

            def compute(*tensors: tf.Tensor) -> None:
                parts = iter(tensors)
                given = {name: next(parts) for name in scalars}
                grads = [_gradient(kind, parts, v) for kind, v in zip(kinds, variables)]
                if "divisor" in given:
                    grads = unscale(grads, given["divisor"])
                judged = contextlib.nullcontext()
                if "verdict" in given:
                    judged = selection.writes_only_if(given["verdict"])
                with replicas.updating_alone(), judged:
                    update(list(zip(grads, variables, strict=True)))

            function = tf.function(
                compute, autograph=False, jit_compile=True, reduce_retracing=True
            )
            self._functions[key] = function, _why_not_compiled(function, tensors)
        return self._functions[key]

    def _settings(self) -> Iterator[Any]:
        """Yields the constants of a trace: hyperparameters that are not variables."""
        optimizer = self._optimizer
        while optimizer is not None:
            values = vars(optimizer)
            for name in sorted(self._names & values.keys()):
                if isinstance(values[name], (bool, int, float, str)):
                    yield name, values[name]
            rate = values.get("_learning_rate")
            yield rate if callable(rate) else None  # It is a schedule.
            optimizer = values.get("_trackable")


def _why_not() -> str | None:
    if host.in_v1_graph():
        return "XLA does not compile functions in a graph of TensorFlow 1"
    if isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy):
        return "under ParameterServerStrategy the variables are on other machines"
    return None


def _why_not_compiled(function: Any, tensors: Sequence[tf.Tensor]) -> str | None:
    """Returns why XLA cannot compile a function, or None if it can.

    Nothing is computed.
    """
    # A sparse gradient may have any number of rows.
    shapes = ([1 if size is None else size for size in tensor.shape] for tensor in tensors)
    specs = [tf.TensorSpec(shape, tensor.dtype) for shape, tensor in zip(shapes, tensors)]
    with tf.init_scope():
        try:
            operations = function.get_concrete_function(*specs).graph.get_operations()
            if any(operation.type.startswith("Unique") for operation in operations):
                # XLA compiles it, but with some numbers of rows it fails at run time.
                return "it adds up equal rows of sparse gradients, as optimizers of Keras 2 do"
            function.experimental_get_compiler_ir(*specs)(stage="hlo")
        except Exception as error:  # A user's optimizer may raise anything.
            return f"XLA cannot compile it ({str(error).strip().partition(chr(10))[0]})"
    return None


def _kind(gradient: Gradient) -> str:
    if gradient is None:
        return "none"
    return "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"


def _parts(gradient: Gradient, variable: tf.Variable) -> list[tf.Tensor]:
    """Returns the tensors of a gradient for XLA, with shapes as far as they are known."""
    if gradient is None:
        return []
    shape = tf.TensorShape(variable.shape)
    if isinstance(gradient, tf.IndexedSlices):
        rows = gradient.indices.shape.concatenate(shape[1:])
        return [tf.ensure_shape(gradient.values, rows), gradient.indices]
    is_known = gradient.shape.is_fully_defined()
    return [gradient if is_known else tf.ensure_shape(gradient, shape)]


def _gradient(kind: str, parts: Iterator[tf.Tensor], variable: Any) -> Gradient:
    """Returns the gradient that `_parts` took apart."""
    if kind == "none":
        return None
    if kind == "dense":
        return next(parts)
    values, indices = next(parts), next(parts)
    return tf.IndexedSlices(values, indices, tf.constant(list(variable.shape), indices.dtype))

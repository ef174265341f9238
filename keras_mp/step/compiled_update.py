"""Updates as one function that XLA compiles.

It makes one pass over weights, slots and gradients. An optimizer of Keras updates a weight by some
ten operations, each of which goes through memory once. XLA makes one loop of them. Since it rounds
the last digit of some results differently, it is an option. Where it can, XLA compiles all from the
verdict on the gradients on. This module needs TensorFlow only.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import replicas, scaled_losses
from keras_mp.step.gradients import Gradient, unscale
from keras_mp.step.optimizer_adapter import Applied, OptimizerAdapter, Pairs
from keras_mp.step.scaled_step import Decision, ReplicaStep
from keras_mp.step.updating_alone import updating_alone
from keras_mp.support import host, messages, selection

_Update = Callable[[Pairs], Any]


class CompiledUpdates:
    """The compiled updates of an optimizer: a function for each list of variables.

    Args:
        adapter: the adapter of the optimizer, or of a wrapper of one.
    """

    def __init__(self, adapter: OptimizerAdapter) -> None:
        self._adapter, self._names = adapter, adapter.hyperparameters()
        self._functions: dict[Any, Any] = {}
        self._said: set[str] = set()

    def update(
        self,
        pairs: Pairs,
        name: str | None,
        divisor: tf.Tensor | None = None,
        verdict: tf.Tensor | None = None,
    ) -> Applied:
        """Lets the optimizer apply summed gradients, in a compiled update if there is one.

        Args:
            pairs: sequence of (gradient, variable) pairs.
            name: str. Name of the operation.
            divisor: float32 scalar tensor. The number that unscales the gradients. Defaults to
                None, for gradients that are unscaled.
            verdict: bool scalar tensor. If it is False, an update that XLA compiles does not make
                the step. Defaults to None, for True.

        Returns:
            The result of the optimizer; for a compiled update, its count of steps.
        """
        apply = functools.partial(self._apply, name)
        if not host.is_compiled_by_xla():
            make = self._compiled(apply, pairs, divisor, verdict)
            if make is not None:
                make()
                return getattr(self._adapter.optimizer, "iterations", None)
        if divisor is not None:
            unscaled = unscale([gradient for gradient, _ in pairs], divisor)
            pairs = list(zip(unscaled, (v for _, v in pairs), strict=True))
        return apply(pairs)

    def makes(self, step: ReplicaStep) -> bool:
        """Makes a step, where XLA can compile all from the verdict on.

        With several replicas, which decide outside, only the update is compiled. It then takes the
        verdict, which `step.update_selects` says. In eager code the verdict is known anyway.

        Returns:
            Whether the step was made.
        """
        adapter, state, several = self._adapter, step.step.state, replicas.are_several()
        if step.step.handler is None or adapter.accumulates():
            return False
        if tf.executing_eagerly() or host.in_v1_graph() or host.is_compiled_by_xla():
            return False
        if several and (replicas.number_of_workers() > 1 or state.is_allowed is not None):
            return False
        pairs = list(zip(step.sums.one_by_one(), step.variables))
        apply = functools.partial(self._apply, None)
        verdict = tf.constant(True) if several else None
        if self._compiled(apply, pairs, step.sums.divisor, verdict) is None:
            return False
        if several:
            step.update_selects = True
            return False
        step.noted = step.noted and step.noted.for_xla()

        def finish() -> Any:
            step.judge(False)
            Decision(step.finite, state.is_allowed, [step], step.apply).carry_out()
            return step.finite

        step.finite = tf.function(finish, autograph=False, jit_compile=True)()
        return True

    def let_update_select(self, decision: Decision) -> None:
        """Calls an update that makes or skips the step itself, and handles the outcome."""
        decision.apply()
        with selection.selecting():
            dataclasses.replace(decision, apply=lambda: None).carry_out()

    def _apply(self, name: str | None, pairs: Pairs) -> Applied:
        with scaled_losses.applying():
            return self._adapter.apply(pairs, name, aggregate=False)

    def _compiled(
        self,
        update: _Update,
        pairs: Pairs,
        divisor: tf.Tensor | None,
        verdict: tf.Tensor | None,
    ) -> Callable[[], None] | None:
        """Returns a function that makes an update; None if XLA cannot compile it.

        If XLA cannot compile it, a warning says so once.

        Args:
            update: function that makes the update, given unscaled (gradient, variable) pairs.
            pairs: as in `update`.
            divisor: as in `update`.
            verdict: as in `update`. If it is False, all variables keep their values.
        """
        self._adapter.build([variable for _, variable in pairs])
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
            update: as in `_compiled`.
            pairs: as in `_compiled`.
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
                with updating_alone(), judged:
                    update(list(zip(grads, variables, strict=True)))

            function = tf.function(
                compute, autograph=False, jit_compile=True, reduce_retracing=True
            )
            self._functions[key] = function, _why_not_compiled(function, tensors)
        return self._functions[key]

    def _settings(self) -> Iterator[Any]:
        """Yields the constants of a trace: hyperparameters that are not variables."""
        optimizer = self._adapter.optimizer
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

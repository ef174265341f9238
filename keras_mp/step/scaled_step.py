"""One step with scaled gradients: sum them, judge them, unscale them, apply them or skip the step.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". An `OutcomeHandler` moves the
scale and counts skipped steps.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import (
    finiteness,
    gradients,
    overflows,
    replicas,
    state_rollback,
    workers,
)
from keras_mp.step.calls import GradientState
from keras_mp.step.gradients import Gradient, Sums
from keras_mp.step.optimizer_adapter import OptimizerAdapter
from keras_mp.step.outcomes import OutcomeHandler
from keras_mp.support import attributes, host, selection

Observer = Callable[[Sequence[tuple[Any, Any]], "tf.Tensor | None", "tf.Tensor | None"], None]


class _Thread(threading.local):
    observers: tuple[Observer, ...] = ()


_thread = _Thread()


def observing(observer: Observer) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that shows gradients, before anything is done to them.

    Args:
        observer: called for each step that this thread, a replica's, makes inside, with the
            (gradient, variable) pairs, the number that unscales them and the factor of the loss
            (float32 scalar tensors, or None).
    """
    return attributes.replaced(_thread, "observers", (*_thread.observers, observer))


def observers_of_this_thread() -> tuple[Observer, ...]:
    """Returns the observers of the steps that this thread makes."""
    return _thread.observers


class ScaledStep:
    """A step of a replica.

    Attributes:
        adapter: the `OptimizerAdapter`, which applies the gradients.
        state: the `GradientState` of the gradients.
        handler: the `OutcomeHandler`; None if no step is ever skipped.
        names: takes variables and returns the users' names for them, None for unknown ones.
        kept: the values to restore if the step is skipped.
        inputs: what the model was given, as far as it is known.
        unclipped: the gradients as they were when they were unscaled; empty if they were not
            changed since then.
        variables: the variables of the gradients that are tested.
        sent: the `Sums` as sent to the all-reduce; without an all-reduce, those that are tested.
        totals: the `Sums` that are tested; None if these are `sent`.
        to_apply: the `Sums` that are applied.
        finite: bool scalar tensor, the verdict; None if no step is ever skipped.
        update_selects: whether the update takes the verdict, and is called in any case.

    Args:
        adapter: `OptimizerAdapter`, built.
        state: `GradientState`. Defaults to that of gradients that were never scaled.
        handler: `OutcomeHandler`, or None (the default).
        reduce_dtype: DType in which float32 gradients are summed over replicas. float16 is used
            only if they are scaled and a step may be skipped. Defaults to float32.
        names: as the attribute, or None (the default).
    """

    def __init__(
        self,
        adapter: OptimizerAdapter,
        state: GradientState | None = None,
        handler: OutcomeHandler | None = None,
        reduce_dtype: tf.DType = tf.float32,
        names: overflows.Names | None = None,
    ) -> None:
        self.adapter, self.handler, self.names = adapter, handler, names
        self.state = GradientState() if state is None else state
        self._reduce_dtype = reduce_dtype
        self.unclipped: list[Gradient] = []
        # A branch that unpacks gradients itself has fewer inputs.
        self.sent: Sums | None = None
        self.totals: Sums | None = None
        self.to_apply = Sums([])
        self.finite: tf.Tensor | None = None
        self.update_selects = False

    def make(
        self,
        pairs: Sequence[tuple[Gradient, Any]],
        *,
        aggregate: bool = True,
        name: str | None = None,
    ) -> tuple[tf.Operation | None, tf.Tensor | None]:
        """Makes the step, once, in a replica context.

        Args:
            pairs: sequence of (gradient, variable) pairs.
            aggregate: bool. Whether the gradients are to be summed over replicas.
            name: str. Name of the operation.

        Returns:
            tuple of the operation that makes the step in a TensorFlow 1 graph, else None, and of
            the verdict, a bool scalar tensor that is the same on every replica; None where no step
            is skipped.
        """
        adapter, state = self.adapter, self.state
        for observe in observers_of_this_thread():
            observe(pairs, state.divisor(), state.scaled_by)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        self.kept = state_rollback.keep(variables if self.handler else ())
        self.inputs = state_rollback.inputs()
        if state.unclipped:
            self.unclipped = gradients.changed_since(state.unclipped, grads)
            state.unclipped.clear()
        new_values = self._take_new_values(grads, variables)
        if adapter.takes_float32_gradients:
            grads = adapter.widened(grads)
        # Of a batch without examples, statistics are not finite, though gradients may be.
        has_examples = state_rollback.has_examples() if self.kept else None
        # Such a verdict is one more gradient, a mark, which is summed and tested with them.
        for is_good in (state.was_finite, has_examples):
            if is_good is not None:
                grads.append(tf.where(is_good, 0.0, float("nan")))
        sums = self._summed(grads, variables, aggregate)
        # A compiled update unscales in its own pass over the gradients.
        has_replicas = replicas.are_several()
        update_unscales = adapter.jit_compile and not (
            has_replicas or sums.are_packed or new_values or adapter.accumulates()
        )
        if not update_unscales:
            sums = sums.unscaled()
        if new_values or adapter.accumulates():
            sums = Sums([new_values.get(i, g) for i, g in enumerate(sums.one_by_one())])

        def apply(step: ScaledStep) -> Any:
            pairs = list(zip(step.to_apply.one_by_one(), variables, strict=True))
            verdicts = [step.finite, step.state.is_allowed] if step.update_selects else []
            verdicts = [each for each in verdicts if each is not None]
            return adapter.update(pairs, name, divisor=step.to_apply.divisor, verdicts=verdicts)

        def judge_and_carry_out() -> tf.Operation | None:
            tested = sums.unscaled() if selection.is_without_branches() else sums
            self.to_apply = dataclasses.replace(tested, count=len(variables))
            self._judge(tested, variables, aggregate)
            verdicts = self.finite, state.is_allowed
            return replicas.decide_for_all_replicas(_carry_out, verdicts, self, apply)

        is_compiled = self._is_compiled_with_verdict(sums, variables)
        self.update_selects = is_compiled and has_replicas
        if not is_compiled or has_replicas:
            return judge_and_carry_out(), self.finite

        def compute() -> tf.Tensor | None:
            judge_and_carry_out()
            return self.finite

        self.inputs = [_summary(each) for each in self.inputs]
        self.finite = tf.function(compute, autograph=False, jit_compile=True)()
        return None, self.finite

    def _is_compiled_with_verdict(self, sums: Sums, variables: list[Any]) -> bool:
        """Whether XLA compiles an update that is told whether the gradients are finite.

        It compiles the verdict and the outcome together with it, unless there are replicas: these
        decide outside. In eager code the verdict is known anyway.
        """
        adapter = self.adapter
        if not adapter.jit_compile or self.handler is None or adapter.accumulates():
            return False
        if tf.executing_eagerly() or host.in_v1_graph() or host.is_compiled_by_xla():
            return False
        has_replicas = replicas.are_several()
        if has_replicas and (workers.are_several() or self.state.is_allowed is not None):
            return False
        pairs = list(zip(sums.one_by_one(), variables))
        return adapter.can_compile(pairs, sums.divisor, judged=has_replicas)

    def _take_new_values(self, grads: list[Gradient], variables: list[Any]) -> dict[int, Gradient]:
        """Moves new values of variables, which are not gradients, out of `grads`.

        They were never scaled. If they were divided with the gradients, that is undone.
        """
        values = {}
        for i, variable in enumerate(variables):
            if grads[i] is not None and self.adapter.is_overwritten(variable):
                is_divided = self.state.is_divided()
                values[i], grads[i] = grads[i], None
                if is_divided is not False:
                    factor = tf.where(is_divided, self.state.scaled_by, 1.0)
                    [values[i]] = gradients.scale([values[i]], factor)
        return values

    def _summed(self, grads: list[Gradient], variables: list[Any], aggregate: bool) -> Sums:
        """Sums gradients over replicas, and the marks that follow those of the variables."""
        divisor = self.state.divisor()
        as_given = Sums(grads, divisor)
        count = len(variables)
        has_replicas = replicas.are_several()
        custom = self.adapter.custom_aggregation()
        if aggregate and custom:
            grads = as_given.unscaled().values
            marks = grads[count:]
            if has_replicas:
                marks = replicas.all_reduce(marks, tf.float32)
            self.sent = Sums(grads[:count])
            summed = custom(list(zip(grads[:count], variables, strict=True)))
            return Sums([*(g for g, _ in summed), *marks])
        if not aggregate or not has_replicas:
            return as_given
        packed, unpack = gradients.pack(grads)
        scaled_by, reduce_dtype = self.state.scaled_by, self._reduce_dtype
        if reduce_dtype == tf.float16:
            if self.handler is None or scaled_by is None:
                # Small values vanish if they are not scaled, and a sum that overflows is harmless
                # only if the step can be skipped.
                reduce_dtype = tf.float32
            elif divisor is not scaled_by:
                factor = scaled_by if divisor is None else scaled_by / divisor
                packed, divisor = gradients.scale(packed, factor), scaled_by
        given = packed if self.handler else gradients.cast(packed, [tf.float16], tf.float32)
        given = workers.with_scale(given, scaled_by, divisor)
        sent = gradients.cast(given, [tf.float32], reduce_dtype)
        summed = gradients.cast_as(replicas.all_reduce(sent, tf.float32), given)
        summed = workers.checked(summed, scaled_by)
        if self.handler:
            self.sent = Sums(sent[: len(packed)], None, unpack, count)
        return Sums(summed, divisor, lambda sums: unpack(gradients.cast_as(sums, packed)))

    def _judge(self, sums: Sums, variables: list[Any], aggregate: bool) -> None:
        """Tests whether all gradients and marks are finite, on all replicas."""
        if self.handler is None:
            return
        count, tested, self.variables = len(variables), sums.values, variables
        if self.sent is None:
            self.sent = self.to_apply
        else:
            self.totals = self.to_apply
        if self.adapter.accumulates():
            pairs = self.adapter.totals(list(zip(tested[:count], variables, strict=True)))
            self.variables = [variable for _, variable in pairs]
            self.totals = Sums([total for total, _ in pairs])
            tested = [*self.totals.values, *tested[count:]]
        divisor = sums.divisor
        if divisor is not None and selection.is_without_branches():
            tested, divisor = gradients.unscale(tested, divisor), None
        finite: Any = finiteness.all_finite(tested)
        if divisor is not None:
            # Unscaled gradients are finite where scaled ones are, unless the scale is below 1.
            of_scaled = finite
            finite = tf.cond(
                of_scaled & (divisor < 1),
                lambda: finiteness.all_finite(gradients.unscale(tested, divisor)),
                lambda: of_scaled,
            )
        if not aggregate and replicas.are_several():
            finite = replicas.agree(finite)
        self.finite = finite

    def release(self) -> None:
        """Releases the values that only a skipped step needs, which take memory in eager."""
        self.kept.release()
        if tf.executing_eagerly():
            self.unclipped.clear()
            self.inputs = []
            self.sent = self.totals = None

    def replica_values(self) -> overflows.ReplicaValues:
        """Returns the values in which a skipped step counts Inf and NaN."""
        sent = [] if self.sent is None else self.sent.one_by_one()
        return overflows.ReplicaValues(self.state.losses, self.unclipped, sent, self.inputs)


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision on a step, once for all replicas: it is made, skipped, or refused.

    Each branch does only its own work, so that a good step has little to do.

    Attributes:
        finite: bool scalar tensor, the verdict; None if no step is ever skipped.
        is_allowed: that of the `GradientState`.
        steps: the `ScaledStep`s of all replicas at hand.
        apply: function that lets each replica apply its gradients.
    """

    finite: tf.Tensor | None
    is_allowed: tf.Tensor | None
    steps: Sequence[ScaledStep]
    apply: Callable[[], Any]

    def carry_out(self) -> tf.Operation | None:
        """Carries out the decision, in a TensorFlow 1 graph as the operation that it returns."""
        first = self.steps[0]
        adapter = first.adapter
        if first.update_selects:
            # The update makes or skips the step itself. Here only the outcome is handled.
            applied = _operation(self.apply())
            with selection.selecting():
                return _operation([applied, self._choose(lambda: None, lambda: None)])
        if self.finite is None or not adapter.accumulates():
            return self._choose(self._make, adapter.drop_accumulated)
        # A step is made of all gradients that were accumulated. If some of them are not finite, it
        # is skipped when it is complete.
        return tf.cond(
            adapter.completes_step(),
            lambda: self._choose(self._make, adapter.drop_accumulated),
            lambda: self._unless_refused(self._add),
        )

    def _choose(self, make: Callable[[], Any], drop: Callable[[], None]) -> tf.Operation | None:
        handler = self.steps[0].handler
        if self.finite is None or handler is None:
            return self._unless_refused(lambda: _operation([make()]))

        handler.watch()

        def good() -> tf.Operation | None:
            return _operation([make(), *handler.good()])

        def skip() -> tf.Operation | None:
            seen = self._seen()
            drop()
            put_back = self._put_back()
            weights = [weight for step in self.steps for weight in step.kept.weights]
            with tf.control_dependencies(put_back):
                noted = handler.bad(seen, self._loss_is_finite(seen), weights)
            return _operation([*put_back, *noted])

        is_one = host.in_v1_graph() or _replicas_may_meet() or selection.is_without_branches()
        if not is_one:
            skip = host.as_one_operation(skip)
        if self.is_allowed is None:
            return selection.choose(self.finite, good, skip)
        # One number is copied to the host, for both verdicts.
        outcome = tf.where(self.is_allowed, tf.where(self.finite, 0, 2), 1)
        return selection.choose_among(outcome, [good, self._refuse, skip])

    def _unless_refused(self, step: Callable[[], Any]) -> tf.Operation | None:
        if self.is_allowed is None:
            return step()
        return selection.choose(self.is_allowed, step, self._refuse)

    def _refuse(self) -> tf.Operation | None:
        put_back = self._put_back()
        self.steps[0].state.refuse()
        return _operation(put_back)

    def _make(self) -> tf.Operation | None:
        for step in self.steps:
            if step.handler is not None:
                step.release()
        return _operation(self.apply())

    def _add(self) -> tf.Operation | None:
        """Lets the optimizer accumulate the gradients, which the complete step tests."""
        operations = [_operation(self.apply())]
        if any(step.kept for step in self.steps):
            put_back = tf.cond(
                self.finite, lambda: _operation([]), lambda: _operation(self._put_back())
            )
            operations.append(put_back)
        handler = self.steps[0].handler
        return _operation([*operations, *(handler.accumulated() if handler else [])])

    def _put_back(self) -> list[tf.Operation]:
        return [operation for step in self.steps for operation in step.kept.put_back()]

    def _seen(self) -> overflows.NonFiniteCounts | None:
        """Counts Inf and NaN on all replicas. Called in the branch that skips."""
        if host.in_v1_graph():
            return None
        first = self.steps[0]
        totals = None if first.totals is None else first.totals.one_by_one()
        steps_made = first.adapter.steps_made()
        counts = overflows.count_not_finite([step.replica_values() for step in self.steps], totals)
        inputs = [each.name for each in first.inputs]
        return overflows.NonFiniteCounts(
            first.variables, inputs, counts, totals is not None, steps_made, first.names
        )

    def _loss_is_finite(self, seen: overflows.NonFiniteCounts | None) -> tf.Tensor:
        """Returns whether the losses of all replicas are known to be finite, a bool scalar."""
        if seen is not None:
            return seen.loss_is_finite()
        losses = [loss for step in self.steps for loss in step.state.losses]
        count = tf.distribute.get_strategy().num_replicas_in_sync
        if len(self.steps) < count or not all(step.state.losses for step in self.steps):
            return tf.constant(False)
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(loss)) for loss in losses])


def _carry_out(*what: Any) -> tf.Operation | None:
    return Decision(*what).carry_out()


def _replicas_may_meet() -> bool:
    """Whether several replicas or workers run this code, each for itself."""
    if not tf.distribute.has_strategy():
        return False
    return not tf.distribute.in_cross_replica_context() or workers.are_several()


def _operation(result: Any) -> tf.Operation | None:
    """Returns the result of a branch of `tf.cond`: an operation in TensorFlow 1, else None."""
    if not host.in_v1_graph():
        return None
    of_replicas = tf.distribute.get_strategy().experimental_local_results(result)
    return tf.group(*(each for each in tf.nest.flatten(of_replicas) if each is not None))


def _summary(given: state_rollback.Input) -> state_rollback.Input:
    """Returns an input of two numbers, of which the same can be said as of all.

    XLA would compile anew for each shape of an input.
    """
    values = tf.cast(given.value, tf.float32)
    return given._replace(value=tf.stack([tf.reduce_max(tf.abs(values)), tf.reduce_sum(values)]))

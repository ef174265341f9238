"""A step sums scaled gradients, unscales and tests them, and applies or skips.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". Read it downward:
`ScaledStep.make` combines the gradients of all replicas, tests them, and lets a `Decision` make or
skip the step on all replicas. An `OutcomeHandler` moves the scale and counts skipped steps.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.hooks import observers
from keras_mp.step import finiteness, gradients, overflows, replicas, state_rollback, workers
from keras_mp.step.calls import GradientState
from keras_mp.step.gradients import Gradient, Sums
from keras_mp.step.optimizer_adapter import OptimizerAdapter, Pairs
from keras_mp.step.outcomes import OutcomeHandler
from keras_mp.support import host, selection

_NEVER_SCALED = GradientState()


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """A step of a replica.

    Args:
        adapter: `OptimizerAdapter`, built, which applies the gradients.
        state: `GradientState` of the gradients. Defaults to the state of gradients that were never
            scaled.
        handler: `OutcomeHandler`; None (the default) if no step is ever skipped.
        reduce_dtype: DType in which float32 gradients are summed over replicas. float16 is used
            only if the gradients are scaled and a step may be skipped. Defaults to float32.
        names: takes variables and returns the users' names for them; or None (the default).
    """

    adapter: OptimizerAdapter
    state: GradientState = _NEVER_SCALED
    handler: OutcomeHandler | None = None
    reduce_dtype: tf.DType = tf.float32
    names: overflows.Names | None = None

    def make(
        self, pairs: Pairs, *, aggregate: bool = True, name: str | None = None
    ) -> tuple[tf.Operation | None, tf.Tensor | None]:
        """Makes the step, once, in a replica context.

        Args:
            pairs: sequence of (gradient, variable) pairs.
            aggregate: bool. Whether the gradients are to be summed over replicas.
            name: str. Name of the operation.

        Returns:
            tuple of the operation that makes the step in a TensorFlow 1 graph, else None; and of
            the verdict, a bool scalar tensor that is the same on every replica, or None where no
            step is skipped.
        """
        state = self.state
        observers.tell(observers.Observer.gradients, pairs, state.divisor(), state.scaled_by)
        step = self._combined(pairs, aggregate, name)
        if self._is_compiled_with_verdict(step):
            # Several replicas decide outside of the update that XLA compiles.
            step.update_selects = replicas.are_several()
            if not step.update_selects:
                step.inputs = [_summary(each) for each in step.inputs]
                compiled = tf.function(
                    lambda: self._finish(step, aggregate)[1], autograph=False, jit_compile=True
                )
                return None, compiled()
        return self._finish(step, aggregate)

    def _finish(
        self, step: "ReplicaStep", aggregate: bool
    ) -> tuple[tf.Operation | None, tf.Tensor | None]:
        """Tests the gradients and agrees with other replicas, which then decide as one."""
        step.judge(aggregate)
        operation = replicas.decide_for_all_replicas(
            lambda *given: Decision(*given).carry_out(),
            (step.finite, self.state.is_allowed),
            step,
            ReplicaStep.apply,
        )
        return operation, step.finite

    def _combined(self, pairs: Pairs, aggregate: bool, name: str | None) -> "ReplicaStep":
        """Sums the gradients of all replicas, and keeps what a skipped step needs.

        The sums are unscaled, unless the update unscales them. For variables that are overwritten,
        the new values stand in place of gradients.
        """
        adapter, variables = self.adapter, [v for _, v in pairs]
        kept = state_rollback.keep(variables if self.handler else ())
        has_examples = state_rollback.has_examples()
        unclipped = gradients.changed_since(self.state.unclipped, [g for g, _ in pairs])
        if self.state.unclipped:
            self.state.unclipped.clear()
        grads, new_values = self._split(pairs)
        grads = [*adapter.widened(grads), *self._verdicts(kept, has_examples)]
        sums, sent = self._sum(grads, variables, aggregate)
        is_one_by_one = bool(new_values) or adapter.accumulates()
        # A compiled update unscales in its own pass over the gradients.
        if replicas.are_several() or is_one_by_one or not adapter.jit_compile:
            sums = sums.unscaled()
        if is_one_by_one:
            sums = Sums([new_values.get(i, g) for i, g in enumerate(sums.one_by_one())])
        inputs = state_rollback.inputs()
        return ReplicaStep(self, variables, sums, sent, kept, inputs, has_examples, unclipped, name)

    def _split(self, pairs: Pairs) -> tuple[list[Gradient], dict[int, Gradient]]:
        """Splits gradients from new values, which some variables have in their place.

        New values were never scaled. If they were divided along with the gradients, that is undone.

        Returns:
            tuple of the gradients, which are None for these variables, and of the new values by
            position.
        """
        grads, values = [g for g, _ in pairs], {}
        for i, (gradient, variable) in enumerate(pairs):
            if gradient is not None and self.adapter.is_overwritten(variable):
                is_divided = self.state.is_divided()
                values[i], grads[i] = gradient, None
                if is_divided is not False:
                    factor = tf.where(is_divided, self.state.scaled_by, 1.0)
                    [values[i]] = gradients.scale([gradient], factor)
        return grads, values

    def _verdicts(
        self, kept: state_rollback.Kept, has_examples: tf.Tensor | None
    ) -> list[Gradient]:
        """Returns verdicts as gradients (NaN for False), summed and tested with others."""
        # Statistics of a batch without examples are not finite, though its gradients may be.
        is_marked = has_examples is not None and kept.may_have_changed()
        verdicts = self.state.was_finite, has_examples if is_marked else None
        return [tf.where(is_good, 0.0, float("nan")) for is_good in verdicts if is_good is not None]

    def _sum(
        self, grads: list[Gradient], variables: list[Any], aggregate: bool
    ) -> tuple[Sums, Sums | None]:
        """Sums gradients over replicas, and the marks that follow the gradients.

        Returns:
            tuple of the sums, and of what this replica sent to the others; None if it sent nothing.
        """
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
            summed = custom(list(zip(grads[:count], variables, strict=True)))
            return Sums([*(g for g, _ in summed), *marks]), Sums(grads[:count])
        if not aggregate or not has_replicas:
            return as_given, None
        packed, unpack = gradients.pack(grads)
        scaled_by, reduce_dtype = self.state.scaled_by, self.reduce_dtype
        if reduce_dtype == tf.float16:
            if self.handler is None or scaled_by is None:
                # Unscaled, small values would vanish; and a sum that overflows is harmless only if
                # the step can be skipped.
                reduce_dtype = tf.float32
            elif divisor is not scaled_by:
                factor = scaled_by if divisor is None else scaled_by / divisor
                packed, divisor = gradients.scale(packed, factor), scaled_by
        given = packed if self.handler else gradients.cast(packed, [tf.float16], tf.float32)
        given = workers.with_scale(given, scaled_by, divisor)
        sent = gradients.cast(given, [tf.float32], reduce_dtype)
        summed = gradients.cast_as(replicas.all_reduce(sent, tf.float32), given)
        summed = workers.checked(summed, scaled_by)
        sums = Sums(summed, divisor, lambda sums: unpack(gradients.cast_as(sums, packed)))
        return sums, Sums(sent[: len(packed)], None, unpack, count)

    def _is_compiled_with_verdict(self, step: "ReplicaStep") -> bool:
        """Whether XLA compiles an update along with the verdict on its gradients.

        It compiles the verdict and the outcome together with the update. With several replicas,
        which decide outside, the update is only told the verdict. In eager code the verdict is
        known anyway.
        """
        adapter = self.adapter
        if not adapter.jit_compile or self.handler is None or adapter.accumulates():
            return False
        if tf.executing_eagerly() or host.in_v1_graph() or host.is_compiled_by_xla():
            return False
        has_replicas = replicas.are_several()
        if has_replicas and (workers.are_several() or self.state.is_allowed is not None):
            return False
        pairs = list(zip(step.sums.one_by_one(), step.variables))
        return adapter.can_compile(pairs, step.sums.divisor, judged=has_replicas)


@dataclasses.dataclass
class ReplicaStep:
    """The step of a replica, with gradients combined with those of other replicas.

    Attributes:
        step: the `ScaledStep`.
        variables: the variables of the gradients.
        sums: the `Sums` that are applied, followed by marks.
        sent: the `Sums` that this replica sent to the others; None if it sent none.
        kept: the values to restore if the step is skipped.
        inputs: what the model was given, as far as it is known.
        has_examples: bool scalar tensor; None if that is certain, or not known.
        unclipped: the gradients as they were when they were unscaled; empty if they have not
            changed since then.
        name: str or None. The name of the operation.
        update_selects: bool. Whether the update takes the verdict, and is called in any case.
        finite: bool scalar tensor, the verdict; None if there is none.
        totals: the `Sums` that were tested; None if the gradients of this replica were.
        tested: the variables of the gradients that were tested, some of them accumulated before.
    """

    step: ScaledStep
    variables: Sequence[Any]
    sums: Sums
    sent: Sums | None
    kept: state_rollback.Kept
    inputs: list[state_rollback.Input]
    has_examples: tf.Tensor | None
    unclipped: list[Gradient]
    name: str | None = None
    update_selects: bool = False
    finite: tf.Tensor | None = None
    totals: Sums | None = None
    tested: Sequence[Any] = ()

    def judge(self, aggregate: bool) -> None:
        """Tests whether all gradients and marks are finite, on all replicas."""
        adapter, tested, count = self.step.adapter, self.sums, len(self.variables)
        may_skip = self.step.handler is not None
        if selection.is_without_branches() or (may_skip and not _is_as_finite(tested)):
            tested = tested.unscaled()
        self.sums = dataclasses.replace(tested, count=count)
        if not may_skip:
            return
        values, self.tested = tested.values, self.variables
        self.totals = None if self.sent is None else self.sums
        if adapter.accumulates():
            pairs = adapter.totals(list(zip(values[:count], self.variables, strict=True)))
            self.tested, self.totals = [v for _, v in pairs], Sums([total for total, _ in pairs])
            values = [*self.totals.values, *values[count:]]
        finite: Any = finiteness.all_finite(values)
        if not aggregate and replicas.are_several():
            finite = replicas.agree(finite)
        self.finite = finite

    def apply(self) -> Any:
        """Lets the optimizer apply the gradients."""
        to_apply = list(zip(self.sums.one_by_one(), self.variables, strict=True))
        verdict = self.finite if self.update_selects else None
        return self.step.adapter.update(
            to_apply, self.name, divisor=self.sums.divisor, verdict=verdict
        )

    def release(self) -> None:
        """Releases values that only a skipped step needs; in eager they take memory."""
        self.kept.release()
        if tf.executing_eagerly():
            self.unclipped, self.inputs = [], []
            self.sent = self.totals = None

    def values(self) -> overflows.ReplicaValues:
        """Returns the values in which a skipped step counts Inf and NaN."""
        # If the branch that skips unpacks the gradients itself, it has fewer inputs.
        own = (self.sent or self.sums).one_by_one()
        losses = self.step.state.losses
        return overflows.ReplicaValues(losses, self.unclipped, own, self.inputs, self.has_examples)


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision on a step: make, skip or refuse it.

    It is one for all replicas that meet, and one for each where they decide alike by themselves.
    Each branch only does its own work, so that a good step has little to do.

    Attributes:
        finite: bool scalar tensor, the verdict; None if no step is ever skipped.
        is_allowed: as in `GradientState`.
        steps: the `ReplicaStep`s of all replicas that are at hand.
        apply: function that lets each replica apply its gradients.
    """

    finite: tf.Tensor | None
    is_allowed: tf.Tensor | None
    steps: Sequence[ReplicaStep]
    apply: Callable[[], Any]

    @property
    def _step(self) -> ScaledStep:
        """The first replica's step, for all that is the same on all replicas."""
        return self.steps[0].step

    def carry_out(self) -> tf.Operation | None:
        """Carries out the decision.

        In a TensorFlow 1 graph, the operation that it returns carries it out.
        """
        adapter = self._step.adapter
        if self.steps[0].update_selects:
            # The update itself makes or skips the step. Only the outcome is handled here.
            applied = _operation(self.apply())
            with selection.selecting():
                return _operation([applied, self._choose(lambda: None, lambda: None)])
        if self.finite is None or not adapter.accumulates():
            return self._choose(self._make, adapter.drop_accumulated)
        # The gradients that were accumulated make up one step. If some of them are not finite, the
        # step is skipped when it is complete.
        return tf.cond(
            adapter.completes_step(),
            lambda: self._choose(self._make, adapter.drop_accumulated),
            lambda: self._unless_refused(self._add),
        )

    def _choose(self, make: Callable[[], Any], drop: Callable[[], None]) -> tf.Operation | None:
        handler = self._step.handler
        if self.finite is None or handler is None:
            return self._unless_refused(lambda: _operation([make()]))

        handler.watch()

        def good() -> tf.Operation | None:
            return _operation([make(), *handler.good()])

        def skip() -> tf.Operation | None:
            seen = self._seen()
            drop()
            put_back = self._put_back()
            with tf.control_dependencies(put_back):
                noted = handler.bad(seen, self._loss_is_finite(seen))
            return _operation([*put_back, *noted])

        # A function of its own could not meet other replicas, nor be part of a graph of TensorFlow
        # 1. Where there are no branches, it would save nothing.
        must_stay = host.in_v1_graph() or _replicas_may_meet() or selection.is_without_branches()
        if not must_stay:
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
        self._step.state.refuse()
        return _operation(put_back)

    def _make(self) -> tf.Operation | None:
        for step in self.steps:
            step.release()
        return _operation(self.apply())

    def _add(self) -> tf.Operation | None:
        """Lets the optimizer accumulate the gradients; the complete step tests them."""
        operations = [_operation(self.apply())]
        if any(step.kept for step in self.steps):
            put_back = tf.cond(
                self.finite, lambda: _operation([]), lambda: _operation(self._put_back())
            )
            operations.append(put_back)
        handler = self._step.handler
        return _operation([*operations, *(handler.accumulated() if handler else [])])

    def _put_back(self) -> list[tf.Operation]:
        return [operation for step in self.steps for operation in step.kept.put_back()]

    def _seen(self) -> overflows.SkippedStep | None:
        """Looks for Inf and NaN on all replicas; called in the branch that skips."""
        if host.in_v1_graph():
            return None
        first = self.steps[0]
        totals = first.totals and first.totals.one_by_one()
        steps_made = self._step.adapter.steps_made()
        counts, zeros = overflows.count_not_finite([step.values() for step in self.steps], totals)
        inputs = [each.name for each in first.inputs]
        weights = [weight for step in self.steps for weight in step.kept.weights]
        return overflows.SkippedStep(
            weights,
            first.tested,
            inputs,
            counts,
            zeros,
            has_total=totals is not None,
            steps_made=steps_made,
            names=self._step.names,
            may_be_empty=first.has_examples is not None,
        )

    def _loss_is_finite(self, seen: overflows.SkippedStep | None) -> tf.Tensor:
        """Returns whether the losses of all replicas are known to be finite.

        It is a bool scalar.
        """
        if seen is not None:
            return seen.loss_is_finite()
        of_replicas = [step.step.state.losses for step in self.steps]
        count = tf.distribute.get_strategy().num_replicas_in_sync
        if len(self.steps) < count or not all(of_replicas):
            return tf.constant(False)
        return tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(loss)) for losses in of_replicas for loss in losses]
        )


def _is_as_finite(sums: Sums) -> bool:
    """Whether gradients are sure to be finite after unscaling if they are before."""
    # Only a scale below 1 makes them larger. While a graph is built, the scale is unknown.
    return tf.executing_eagerly() and (sums.divisor is None or bool(sums.divisor >= 1))


def _replicas_may_meet() -> bool:
    """Whether several replicas or workers run this code, each for itself."""
    if not tf.distribute.has_strategy():
        return False
    return not tf.distribute.in_cross_replica_context() or workers.are_several()


def _operation(result: Any) -> tf.Operation | None:
    """Returns the result of a branch: an operation in TensorFlow 1, else None."""
    if not host.in_v1_graph():
        return None
    of_replicas = tf.distribute.get_strategy().experimental_local_results(result)
    return tf.group(*(each for each in tf.nest.flatten(of_replicas) if each is not None))


def _summary(given: state_rollback.Input) -> state_rollback.Input:
    """Returns two numbers in place of an input.

    What is looked for in the input can be seen from them. XLA would compile anew for each shape of
    an input.
    """
    values = tf.cast(given.value, tf.float32)
    return given._replace(value=tf.stack([tf.reduce_max(tf.abs(values)), tf.reduce_sum(values)]))

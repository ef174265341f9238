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
from keras_mp.step import finiteness, gradients, replicas, scaled_losses, under_way
from keras_mp.step.calls import GradientState
from keras_mp.step.gradients import Gradient, Sums
from keras_mp.step.optimizer_adapter import OptimizerAdapter, Pairs
from keras_mp.step.outcomes import OutcomeHandler
from keras_mp.step.scaler import Scaler
from keras_mp.step.summing import summed
from keras_mp.support import host, selection

_NEVER_SCALED = GradientState()


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """A step of a replica.

    Args:
        adapter: `OptimizerAdapter`, built, which applies the gradients.
        state: `GradientState` of the gradients. Defaults to the state of gradients that were never
            scaled.
        scaler: the `Scaler` of the step; None (the default) if nothing is scaled or skipped.
        reduce_dtype: DType in which float32 gradients are summed over replicas without a scaler.
            Defaults to float32.
        model: function that returns the model that is trained, or None; None (the default) if there
            is no model.
    """

    adapter: OptimizerAdapter
    state: GradientState = _NEVER_SCALED
    scaler: Scaler | None = None
    reduce_dtype: tf.DType = tf.float32
    model: Callable[[], Any] | None = None

    @property
    def handler(self) -> OutcomeHandler | None:
        """The `OutcomeHandler`; None if no step is ever skipped."""
        return self.scaler and self.scaler.handler

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
        state, scaler, divisor = self.state, self.scaler, self.state.divisor()
        if scaler is not None:
            scaler.begin_step([gradient for gradient, _ in pairs], state.scaled)
        observers.tell(observers.Observer.gradients, pairs, divisor, state.scaled_by)
        step = self._combined(pairs, divisor, aggregate, name)
        step.judge(aggregate)
        is_whole = self.handler is None or not self.adapter.accumulates()
        carry_out = Decision.carry_out if is_whole else Decision.accumulate
        operation = replicas.decide_for_all_replicas(
            lambda *given: carry_out(Decision(*given)),
            (step.finite, state.is_allowed),
            step,
            ReplicaStep.apply,
        )
        if scaler is not None:
            scaler.end_step()
        return operation, step.finite

    def _combined(
        self, pairs: Pairs, divisor: tf.Tensor | None, aggregate: bool, name: str | None
    ) -> "ReplicaStep":
        """Sums the gradients of all replicas, and keeps what a skipped step needs.

        The sums are unscaled. For variables that are overwritten, the new values stand in place of
        gradients.
        """
        adapter, scaler, variables = self.adapter, self.scaler, [v for _, v in pairs]
        under, noted = under_way.thread.step, None
        kept = under.keep(variables if self.handler else ())
        has_examples = under.has_examples()
        if self.handler is not None:
            noted = self.handler.before(self.state, pairs, kept)
        if self.state.unclipped:
            self.state.unclipped.clear()
        grads, new_values = self._split(pairs)
        grads = [*adapter.widened(grads), *self._verdicts(kept, has_examples)]
        sums, sent = Sums(grads, divisor), None
        if aggregate:
            sums, sent = summed(
                sums,
                variables,
                adapter,
                scaled_by=self.state.scaled_by,
                reduce_dtype=scaler.reduce_dtype if scaler else self.reduce_dtype,
                may_skip=self.handler is not None,
            )
        is_one_by_one = bool(new_values) or adapter.accumulates()
        sums = sums.unscaled()
        if is_one_by_one:
            sums = Sums([new_values.get(i, g) for i, g in enumerate(sums.one_by_one())])
        return ReplicaStep(self, variables, sums, sent, kept, noted, has_examples, name)

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

    def _verdicts(self, kept: under_way.Kept, has_examples: tf.Tensor | None) -> list[Gradient]:
        """Returns verdicts as gradients (NaN for False), summed and tested with others."""
        # Statistics of a batch without examples are not finite, though its gradients may be.
        is_marked = has_examples is not None and kept.may_have_changed()
        verdicts = self.state.was_finite, has_examples if is_marked else None
        return [tf.where(is_good, 0.0, float("nan")) for is_good in verdicts if is_good is not None]


@dataclasses.dataclass
class ReplicaStep:
    """The step of a replica, with gradients combined with those of other replicas.

    Attributes:
        step: the `ScaledStep`.
        variables: the variables of the gradients.
        sums: the `Sums` that are applied, followed by marks.
        sent: the `Sums` that this replica sent to the others; None if it sent none.
        kept: the values to restore if the step is skipped.
        noted: what `SkipObserver.before` has noted.
        has_examples: bool scalar tensor; None if that is certain, or not known.
        name: str or None. The name of the operation.
        finite: bool scalar tensor, the verdict; None if there is none.
        totals: the `Sums` that were tested; None if the gradients of this replica were.
        tested: the variables of the gradients that were tested, some of them accumulated before.
    """

    step: ScaledStep
    variables: Sequence[Any]
    sums: Sums
    sent: Sums | None
    kept: under_way.Kept
    noted: Any
    has_examples: tf.Tensor | None
    name: str | None = None
    finite: tf.Tensor | None = None
    totals: Sums | None = None
    tested: Sequence[Any] = ()

    def judge(self, aggregate: bool) -> None:
        """Tests whether all gradients and marks are finite, on all replicas."""
        adapter, tested, count = self.step.adapter, self.sums, len(self.variables)
        self.sums = dataclasses.replace(tested, count=count)
        if self.step.handler is None:
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
        adapter = self.step.adapter
        pairs = list(zip(self.sums.one_by_one(), self.variables, strict=True))
        with scaled_losses.applying():
            return adapter.apply(pairs, self.name, aggregate=False)

    def release(self) -> None:
        """Releases values that only a skipped step needs; in eager they take memory."""
        self.kept.release()
        if tf.executing_eagerly():
            self.noted = self.sent = self.totals = None


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
        """Makes, skips or refuses the step.

        In a TensorFlow 1 graph, the operation that it returns does so.
        """
        adapter, handler = self._step.adapter, self._step.handler

        def good() -> tf.Operation | None:
            for step in self.steps:
                step.release()
            return _operation([self.apply(), *(handler.good() if handler else [])])

        if self.finite is None or handler is None:
            return self._unless_refused(good)

        handler.watch()

        def skip() -> tf.Operation | None:
            seen = handler.seen(self.steps)
            adapter.drop_accumulated()
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

    def accumulate(self) -> tf.Operation | None:
        """Accumulates the gradients, or carries out the step that they complete.

        If some of its gradients are not finite, the step is skipped when it is complete.
        """
        return tf.cond(
            self._step.adapter.completes_step(),
            self.carry_out,
            lambda: self._unless_refused(self._add),
        )

    def _unless_refused(self, step: Callable[[], Any]) -> tf.Operation | None:
        if self.is_allowed is None:
            return step()
        return selection.choose(self.is_allowed, step, self._refuse)

    def _refuse(self) -> tf.Operation | None:
        put_back = self._put_back()
        self._step.state.refuse()
        return _operation(put_back)

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

    def _loss_is_finite(self, seen: Any) -> tf.Tensor:
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


def _replicas_may_meet() -> bool:
    """Whether several replicas or workers run this code, each for itself."""
    if not tf.distribute.has_strategy():
        return False
    return not tf.distribute.in_cross_replica_context() or replicas.number_of_workers() > 1


def _operation(result: Any) -> tf.Operation | None:
    """Returns the result of a branch: an operation in TensorFlow 1, else None."""
    if not host.in_v1_graph():
        return None
    of_replicas = tf.distribute.get_strategy().experimental_local_results(result)
    return tf.group(*(each for each in tf.nest.flatten(of_replicas) if each is not None))

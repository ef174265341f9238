"""A step sums scaled gradients, unscales and tests them, and applies or skips.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". Read `make_step` downward: it
combines the gradients of all replicas, tests them, makes or skips the step on all replicas, moves
the scale and notes a skipped step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.hooks import observers
from keras_mp.step import finiteness, gradients, replicas, scaled_losses, under_way
from keras_mp.step.calls import GradientState
from keras_mp.step.gradients import Gradient, Sums
from keras_mp.step.not_finite import UNKNOWN, count_of_replicas
from keras_mp.step.optimizer_adapter import OptimizerAdapter, Pairs
from keras_mp.step.scaler import Scaler
from keras_mp.step.skip_report import SkippedStep
from keras_mp.step.state_rollback import KeptValues, name_of, read
from keras_mp.step.summing import summed
from keras_mp.support import features, host, variable_ops
from keras_mp.tensorflow_api import graphs
from keras_mp.tensorflow_api.features import WITHOUT_BRANCHES

Operation = tf.Operation | None
_NEVER_SCALED = GradientState()


@dataclasses.dataclass
class _Replica:
    """What a replica takes to where all replicas meet.

    Attributes:
        state: the `GradientState` of its gradients.
        sums: the `Sums` that are applied.
        kept: the values to restore if the step is skipped.
        has_examples: bool scalar tensor; None if that is certain, or not known.
        own: the gradients that it has computed, as it sent them or as they were before the user
            clipped them, in which values that are not finite are counted.
        totals: the gradients that were tested, if these are others.
        tested: the variables of the gradients that were tested.
    """

    state: GradientState
    sums: Sums
    kept: under_way.Kept
    has_examples: tf.Tensor | None
    own: Callable[[], Sequence[Gradient]]
    totals: Callable[[], Sequence[Gradient]] | None
    tested: Sequence[Any]

    def release(self) -> None:
        """Releases values that only a skipped step needs; in eager they take memory."""
        self.kept.release()
        if tf.executing_eagerly():
            self.own, self.totals = lambda: (), None


def make_step(
    adapter: OptimizerAdapter,
    pairs: Pairs,
    state: GradientState = _NEVER_SCALED,
    scaler: Scaler | None = None,
    *,
    reduce_dtype: tf.DType = tf.float32,
    aggregate: bool = True,
    name: str | None = None,
    paths: Callable[[], dict[int, str]] = dict,
) -> tuple[Operation, tf.Tensor | None]:
    """Makes a step of a replica, once, in a replica context.

    Args:
        adapter: `OptimizerAdapter`, built, which applies the gradients.
        pairs: sequence of (gradient, variable) pairs.
        state: `GradientState` of the gradients. Defaults to the state of gradients that were never
            scaled.
        scaler: the `Scaler` of the step; None (the default) if nothing is scaled or skipped.
        reduce_dtype: DType in which float32 gradients are summed over replicas without a scaler.
            Defaults to float32.
        aggregate: bool. Whether the gradients are to be summed over replicas.
        name: str. Name of the operation.
        paths: function that returns the names of variables that are known, by their ids. Defaults
            to none.

    Returns:
        tuple of the operation that makes the step in a TensorFlow 1 graph, else None; and of the
        verdict, a bool scalar tensor that is the same on every replica, or None where no step is
        skipped.
    """
    variables, may_skip = [v for _, v in pairs], scaler is not None and scaler.can_skip
    if scaler is not None:
        scaler.begin_step([gradient for gradient, _ in pairs], state.scaled)
        reduce_dtype = scaler.reduce_dtype
    divisor = state.scaled_by if state.scaled else None
    observers.tell(observers.Observer.gradients, pairs, divisor, state.scaled_by)

    # Combine the gradients of all replicas, and verdicts with them. For variables that are
    # overwritten, the new values stand in place of gradients.
    under = under_way.thread.step
    kept, has_examples = under.keep(variables, adapter.optimizer, may_skip), under.has_examples()
    grads, new_values = _split(adapter, state, pairs)
    unclipped = _changed_since(state.unclipped, grads) if state.unclipped else []
    if state.unclipped:
        state.unclipped.clear()
    marks = _marks(state, kept, has_examples)
    sums, sent = Sums([*adapter.widened(grads), *marks], divisor), None
    if aggregate:
        how = {"scaled_by": state.scaled_by, "reduce_dtype": reduce_dtype, "may_skip": may_skip}
        sums, sent = summed(sums, variables, adapter, **how)
    sums = sums.unscaled()
    if new_values or adapter.accumulates():
        sums = Sums([new_values.get(i, g) for i, g in enumerate(sums.one_by_one())])

    # Test them. The verdict is the same on every replica.
    values, finite, tested, totals = sums.values, None, variables, sums if sent else None
    sums = dataclasses.replace(sums, count=len(variables))
    if may_skip:
        if adapter.accumulates():
            single = list(zip(values[: len(variables)], variables, strict=True))
            of_totals, tested = zip(*adapter.totals(single), strict=True)
            values, totals = [*of_totals, *values[len(variables) :]], Sums(list(of_totals))
        finite = finiteness.all_finite(values)
        if not aggregate and replicas.are_several():
            finite = replicas.agree(finite)

    def own() -> Sequence[Gradient]:
        return unclipped or (sent or sums).one_by_one()

    of_totals = None if totals is None else dataclasses.replace(totals, count=len(tested))
    replica = _Replica(
        *(state, sums, kept, has_examples, own, of_totals and of_totals.one_by_one, tested)
    )

    # Make or skip the step, once for all replicas.
    def apply(replica: _Replica) -> Any:
        with scaled_losses.applying():
            single = list(zip(replica.sums.one_by_one(), variables, strict=True))
            return adapter.apply(single, name, aggregate=False)

    def decide(
        finite: tf.Tensor | None, steps: Sequence[_Replica], apply: Callable[[], Any]
    ) -> Operation:
        def make() -> Operation:
            for each in steps:
                each.release()
            return _operation([apply(), *(scaler.outcome(True) if scaler and may_skip else ())])

        def skip() -> Operation:
            assert scaler is not None
            skipped = _skipped(adapter, steps, paths)
            adapter.drop_accumulated()
            put_back = [operation for each in steps for operation in each.kept.put_back()]
            with tf.control_dependencies(put_back):
                return _operation([*put_back, *scaler.outcome(False, skipped)])

        def select() -> Operation:
            assert scaler is not None
            assert finite is not None
            skipped = _skipped(adapter, steps, paths)
            _write_if(finite, apply)
            for each in steps:
                each.kept.put_back(finite)
            scaler.outcome(finite, skipped)

        def accumulate() -> Operation:
            operations = [_operation(apply())]
            if any(each.kept for each in steps):
                put_back = lambda: _operation([op for r in steps for op in r.kept.put_back()])  # noqa: E731
                operations.append(tf.cond(finite, lambda: _operation([]), put_back))
            return _operation([*operations, *(scaler.accumulated() if scaler else ())])

        def complete() -> Operation:
            may_select = host.is_compiled_by_xla() and features.is_on(WITHOUT_BRANCHES)
            may_select = may_select and not adapter.accumulates()
            if may_select and not tf.distribute.in_cross_replica_context():
                return select()
            # A function of its own could not meet other replicas, nor be part of a graph of
            # TensorFlow 1.
            must_stay = host.in_v1_graph() or _replicas_may_meet()
            return tf.cond(finite, make, skip if must_stay else host.as_one_operation(skip))

        if finite is None:
            return make()
        if not adapter.accumulates():
            return complete()
        return tf.cond(adapter.completes_step(), complete, accumulate)

    operation = replicas.decide_for_all_replicas(decide, (finite,), replica, apply)
    if scaler is not None:
        scaler.end_step()
    return operation, finite


def _split(
    adapter: OptimizerAdapter, state: GradientState, pairs: Pairs
) -> tuple[list[Gradient], dict[int, Gradient]]:
    """Splits gradients from new values, which some variables have in their place.

    New values were never scaled. If they were divided along with the gradients, that is undone.

    Returns:
        tuple of the gradients, which are None for these variables, and of the new values by
        position.
    """
    grads, values = [g for g, _ in pairs], {}
    for i, (gradient, variable) in enumerate(pairs):
        if gradient is not None and adapter.is_overwritten(variable):
            values[i], grads[i] = gradient, None
            if state.is_divided and state.scaled_by is not None:
                [values[i]] = gradients.scale([gradient], state.scaled_by)
    return grads, values


def _marks(
    state: GradientState, kept: under_way.Kept, has_examples: tf.Tensor | None
) -> list[Gradient]:
    """Returns verdicts as gradients (NaN for False), summed and tested with others."""
    # Statistics of a batch without examples are not finite, though its gradients may be.
    is_marked = has_examples is not None and kept.may_have_changed()
    verdicts = state.was_finite, has_examples if is_marked else None
    return [tf.where(is_good, 0.0, float("nan")) for is_good in verdicts if is_good is not None]


def _changed_since(before: Sequence[Gradient], now: Sequence[Gradient]) -> list[Gradient]:
    """Returns gradients as they were before the user changed (e.g. clipped) them.

    `before` are the gradients that the user was given, in their order. The result is empty if none
    has changed, or if the two do not correspond.
    """
    old = [gradient for gradient in before if gradient is not None]
    new = {i: gradient for i, gradient in enumerate(now) if gradient is not None}
    pairs = list(zip(old, new.values()))
    if len(old) != len(new) or all(_dense(a) is _dense(b) for a, b in pairs):
        return []
    if not all(a.shape.is_compatible_with(b.shape) for a, b in pairs):
        return []
    aligned: list[Gradient] = [None] * len(now)
    for i, gradient in zip(new, old):
        aligned[i] = gradient
    return aligned


def _dense(gradient: Gradient) -> tf.Tensor | None:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _skipped(
    adapter: OptimizerAdapter, steps: Sequence[_Replica], paths: Callable[[], dict[int, str]]
) -> SkippedStep:
    """Looks for Inf and NaN in a step that is skipped, or, without branches, may be."""
    first, count = steps[0], tf.distribute.get_strategy().num_replicas_in_sync

    def names(variables: Sequence[Any]) -> list[str]:
        known = paths()
        return [known.get(id(variable)) or name_of(variable) for variable in variables]

    if host.in_v1_graph():
        losses = [loss for each in steps for loss in each.state.losses]
        is_known = len(steps) == count and all(each.state.losses for each in steps)
        finite = [tf.reduce_all(tf.math.is_finite(loss)) for loss in losses]
        loss_is_finite = tf.reduce_all(finite) if is_known else tf.constant(False)
        return SkippedStep((), names, None, False, None, loss_is_finite, True)
    of_replicas = [(each.state.losses, each.own(), each.has_examples) for each in steps]
    totals = first.totals and first.totals()
    counts = count_of_replicas(of_replicas, totals, len(first.tested))
    loss_is_finite = tf.reduce_all(tf.equal(counts[:count, 0], 0))
    has_overflowed: Any = True
    if first.has_examples is not None:
        has_examples = counts[:count, 0, 0] > UNKNOWN - 1
        is_bad = tf.reduce_any(tf.not_equal(counts[:, 1:], 0), [1, 2])
        has_cause = tf.reduce_any(is_bad[:count] & has_examples)
        if totals is not None:
            has_cause |= is_bad[-1] & tf.logical_not(tf.reduce_any(is_bad[:count]))
        has_overflowed = has_cause | tf.reduce_all(has_examples)
    return SkippedStep(
        first.tested,
        names,
        counts,
        totals is not None,
        adapter.steps_made(),
        loss_is_finite,
        has_overflowed,
    )


def _write_if(finite: tf.Tensor, update: Callable[[], Any]) -> None:
    """Lets a function write to variables on a condition, without a branch.

    On a GPU, a branch copies its condition to the host, which waits for it. XLA makes one pass of
    an update and of the selection of new or old values.
    """

    def write() -> None:
        update()

    traced = tf.function(write, autograph=False).get_concrete_function()
    written = [
        outside
        for outside, inside in traced.graph.captures
        if inside.dtype == tf.resource
        and not all(variable_ops.only_reads(op, inside) for op in inside.consumers())
    ]
    dtypes = [graphs.handle_data(handle).shape_and_type[0].dtype for handle in written]
    kept = KeptValues([(h, read(h, dtype)) for h, dtype in zip(written, dtypes, strict=True)])
    traced()
    kept.put_back(finite)


def _replicas_may_meet() -> bool:
    """Whether several replicas or workers run this code, each for itself."""
    if not tf.distribute.has_strategy():
        return False
    return not tf.distribute.in_cross_replica_context() or replicas.number_of_workers() > 1


def _operation(result: Any) -> Operation:
    """Returns the result of a branch: an operation in TensorFlow 1, else None."""
    if not host.in_v1_graph():
        return None
    of_replicas = tf.distribute.get_strategy().experimental_local_results(result)
    return tf.group(*(each for each in tf.nest.flatten(of_replicas) if each is not None))

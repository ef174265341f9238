"""A step sums scaled gradients, unscales and tests them, and applies or skips.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". Read `make_step` downward: it
combines the gradients of all replicas, tests them, makes or skips the step on all replicas, moves
the scale and notes a skipped step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import finiteness, gradients, kept_values, replicas
from keras_mp.step.gradients import Gradient
from keras_mp.step.optimizer_adapter import OptimizerAdapter, Pairs
from keras_mp.step.record import GradientState
from keras_mp.step.scaled_losses import thread
from keras_mp.step.scaler import Scaler
from keras_mp.support import attributes, features, host, observers
from keras_mp.tensorflow_api import graphs
from keras_mp.tensorflow_api.features import WITHOUT_BRANCHES

Operation = tf.Operation | None
_NEVER_SCALED = GradientState()


@dataclasses.dataclass
class _Replica:
    """What a replica takes to where all replicas meet.

    TensorFlow would take a tuple or a list apart there.

    Attributes:
        losses: its losses, as far as they are known.
        sums: function that returns the gradients that are applied. A branch takes fewer inputs if
            it separates small ones itself.
        kept: the values to restore if the step is skipped.
        has_examples: bool scalar tensor; None if that is certain, or not known.
        own: function that returns the gradients that it has computed, as it sent them or as they
            were before the user clipped them, in which values that are not finite are counted.
    """

    losses: Sequence[tf.Tensor]
    sums: Callable[[], Sequence[Gradient]]
    kept: kept_values.Kept
    has_examples: tf.Tensor | None
    own: Callable[[], Sequence[Gradient]]


def make_step(
    adapter: OptimizerAdapter,
    pairs: Pairs,
    state: GradientState = _NEVER_SCALED,
    scaler: Scaler | None = None,
    *,
    reduce_dtype: tf.DType = tf.float32,
    aggregate: bool = True,
    name: str | None = None,
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

    Returns:
        tuple of the operation that makes the step in a TensorFlow 1 graph, else None; and of the
        verdict, a bool scalar tensor that is the same on every replica, or None where no step is
        skipped.
    """
    given, variables = [g for g, _ in pairs], [v for _, v in pairs]
    may_skip, count, together = scaler is not None and scaler.can_skip, len(pairs), None
    divisor, under_way = state.scaled_by if state.scaled else None, thread.under_way
    if scaler is not None:
        observers.tell(observers.Observer.step_begins)
        reduce_dtype = scaler.reduce_dtype
    if tf.distribute.has_strategy():
        from keras_mp.step import strategies

        facts = {"reduce_dtype": reduce_dtype.name, "gradients are still scaled": state.scaled}
        strategies.check_step(scaler, adapter.optimizer, given, facts)
        together = strategies if replicas.are_several() else None
    observers.tell(observers.Observer.gradients, pairs, divisor, state.scaled_by)
    kept, has_examples = [], None
    if under_way is not None:
        kept, has_examples = under_way.keep(variables, adapter.optimizer, may_skip)

    # Combine the gradients of all replicas, and verdicts with them. For variables that are
    # overwritten, new values stand in place of gradients. If these were divided along with
    # gradients, that is undone: they were never scaled.
    new = [i for i, g in enumerate(given) if g is not None and adapter.is_overwritten(variables[i])]
    multiplied_by = state.scaled_by if state.is_divided else None
    new_values = dict(zip(new, gradients.scale([given[i] for i in new], multiplied_by)))
    grads = [None if i in new_values else gradient for i, gradient in enumerate(given)]
    unclipped = _before_clipping(state.unclipped, grads) if state.unclipped else []
    verdicts = [] if state.was_finite is None else [state.was_finite]
    if has_examples is not None and kept:
        # Statistics of a batch without examples are not finite, though its gradients may be.
        changed = kept_values.may_have_changed(kept)
        verdicts.append(has_examples if changed else tf.constant(True))
    grads = gradients.convert(grads, adapter.takes_float32_gradients)
    combined, unpack, sent = [*grads, *map(gradients.of_verdict, verdicts)], list, None
    custom = adapter.custom_aggregation() if aggregate else None
    is_summed = together is not None and aggregate and not custom
    if together is not None and is_summed:
        how = state.scaled_by, divisor, reduce_dtype, may_skip
        combined, unpack, sent = together.sum_scaled(combined, *how)
    else:
        combined = gradients.unscale(combined, divisor)
    if custom:
        sent = combined[:count]
        summed = list(custom(list(zip(sent, variables))))
        if [id(v) for _, v in summed] != [*map(id, variables)]:  # some only, or in another order
            of_variable = {id(v): g for g, v in summed}
            summed = [(of_variable.get(id(v)), v) for v in variables]
        combined[:count] = [gradient for gradient, _ in summed]

    def sums() -> list[Gradient]:
        return [new_values.get(i, each) for i, each in enumerate(unpack(combined)[:count])]

    # Test them. The verdict is the same on every replica.
    finite, tested, totals, completes = None, variables, sums if sent else None, None
    if may_skip:
        tests, completes = [*combined, *new_values.values()], adapter.completes_step()
        if completes is not None:
            of_step, tested = zip(*adapter.totals(list(zip(sums(), variables))), strict=True)
            tests, totals = [*of_step, *unpack(combined)[count:]], lambda: of_step
        finite = finiteness.all_finite(tests)
        if together is not None and not is_summed:
            finite = together.agree(finite)
    own = (lambda: unclipped) if unclipped else (lambda: unpack(sent)[:count]) if sent else sums
    replica = _Replica(state.losses, sums, kept, has_examples, own)

    # Make or skip the step, once for all replicas.
    def apply(replica: _Replica) -> Any:
        with attributes.replaced(thread, "is_applying", True):
            return adapter.apply(list(zip(replica.sums(), variables)), name, aggregate=False)

    def decide(steps: Sequence[_Replica], apply_on_each: Callable[[], Any]) -> Operation:
        moved: Any = scaler
        is_moved = may_skip and state.moved_scale is moved.loss_scale

        def put_back(unless: Any) -> None:
            for each in steps:
                kept_values.put_back(each.kept, unless)

        def make() -> Operation:
            if tf.executing_eagerly():  # An update copies each value that is held.
                for each in steps:
                    each.kept.clear()
            applied = apply_on_each()
            return _operation([applied, *(moved.outcome(True, None, is_moved) if may_skip else ())])

        def skip(unless: Any = False) -> Operation:
            from keras_mp.step import skip_report

            skipped = skip_report.counted(adapter, steps, tested, totals)
            if completes is not None:
                adapter.drop_accumulated()
            put_back(unless)
            return _operation(moved.outcome(unless, skipped, is_moved))

        def accumulate() -> Operation:
            applied = apply_on_each()
            put_back(finite)
            return _operation([applied, *moved.accumulated()])

        def complete() -> Operation:
            # A function of its own could not ask other replicas what was not finite there, nor be
            # part of a graph of TensorFlow 1.
            count = tf.distribute.get_strategy().num_replicas_in_sync
            may_move = len(steps) == count and not host.in_v1_graph()
            skip_whole = host.as_one_operation(skip) if may_move else skip
            return graphs.kept_whole(lambda: tf.cond(finite, make, skip_whole))

        if finite is None:
            return make()
        if completes is not None:
            return tf.cond(completes, complete, accumulate)
        is_compiled = host.is_compiled_by_xla() and features.is_on(WITHOUT_BRANCHES)
        if not is_compiled or tf.distribute.in_cross_replica_context():
            return complete()
        from keras_mp.step import without_branches

        without_branches.write_if(finite, apply_on_each)
        return skip(finite)

    operation = replicas.decide_for_all_replicas(decide, replica, apply)
    if under_way is not None and scaler is not None and not scaler.is_shared:
        under_way.begin()
    return operation, finite


def _before_clipping(old: list[Any], grads: Sequence[Any]) -> list[Gradient]:
    """Returns gradients as they were before the user changed (e.g. clipped) them.

    The result is empty if none has changed, or if those that the user was given do not correspond.
    """
    before, now = [g for g in old if g is not None], [g for g in grads if g is not None]
    old.clear()
    pairs = list(zip(before, now))
    if len(before) != len(now) or all(a is b for a, b in pairs):
        return []
    fit = all(a.shape.is_compatible_with(b.shape) for a, b in pairs)
    return [None if g is None else before.pop(0) for g in grads] if fit else []


def _operation(result: Any) -> Operation:
    """Returns the result of a branch: an operation in TensorFlow 1, else None."""
    if not host.in_v1_graph():
        return None
    of_replicas = tf.distribute.get_strategy().experimental_local_results(result)
    return tf.group(*(each for each in tf.nest.flatten(of_replicas) if each is not None))

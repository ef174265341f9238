"""A step sums scaled gradients, unscales and tests them, and applies or skips.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". Read `make_step` downward: it
combines the gradients of all replicas, tests them, makes or skips the step on all replicas, moves
the scale and notes a skipped step.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.hooks import observers
from keras_mp.step import finiteness, gradients, replicas
from keras_mp.step.gradients import Gradient
from keras_mp.step.kept_values import KeptValues, read
from keras_mp.step.optimizer_adapter import OptimizerAdapter, Pairs
from keras_mp.step.record import GradientState
from keras_mp.step.scaled_losses import thread
from keras_mp.step.scaler import Scaler
from keras_mp.step.skip_report import SkippedStep
from keras_mp.support import attributes, features, host, variable_ops
from keras_mp.tensorflow_api import graphs
from keras_mp.tensorflow_api.features import WITHOUT_BRANCHES

Operation = tf.Operation | None
_NEVER_SCALED = GradientState()


class _Replica(NamedTuple):
    """What a replica takes to where all replicas meet.

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
    kept: KeptValues
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
    variables, may_skip = [v for _, v in pairs], scaler is not None and scaler.can_skip
    if scaler is not None:
        observers.tell(observers.Observer.step_begins)
        # Checked again, since the scaler may have been made outside of the strategy's scope.
        replicas.check_strategy(may_skip)
        reduce_dtype = scaler.reduce_dtype
    if replicas.number_of_workers() > 1:
        facts = {"loss_scale": scaler and scaler.loss_scale, "reduce_dtype": reduce_dtype.name}
        facts["gradients are still scaled"] = state.scaled
        owner, grads = scaler or adapter.optimizer, [gradient for gradient, _ in pairs]
        observers.tell(observers.Observer.workers_meet, owner, grads, facts)
    divisor = state.scaled_by if state.scaled else None
    observers.tell(observers.Observer.gradients, pairs, divisor, state.scaled_by)
    kept, has_examples, under_way = KeptValues(), None, thread.under_way
    if under_way is not None:
        kept = under_way.keep(variables, adapter.optimizer, may_skip)
        has_examples = under_way.has_examples()

    # Combine the gradients of all replicas, and verdicts with them. For variables that are
    # overwritten, the new values stand in place of gradients.
    new_values = _new_values(adapter, state, pairs)
    grads = [None if i in new_values else gradient for i, (gradient, _) in enumerate(pairs)]
    unclipped = _changed_since(state.unclipped, grads)
    if state.unclipped:
        state.unclipped.clear()
    packed, unpack, sent = [*adapter.widened(grads), *_marks(state, kept, has_examples)], list, None
    custom = adapter.custom_aggregation() if aggregate else None
    if custom or (aggregate and replicas.are_several()):
        packed, unpack, sent = _summed(packed, variables, custom, state, reduce_dtype, may_skip)
    else:
        packed = gradients.unscale(packed, divisor)
    completes = adapter.completes_step()
    if new_values or completes is not None:
        packed = [new_values.get(i, gradient) for i, gradient in enumerate(unpack(packed))]
        unpack = list

    def sums() -> list[Gradient]:
        return unpack(packed)[: len(pairs)]

    # Test them. The verdict is the same on every replica.
    finite, tested, totals, values = None, variables, sums if sent else None, packed
    if may_skip:
        if completes is not None:
            of_totals, tested = zip(*adapter.totals(list(zip(sums(), variables))), strict=True)
            totals, values = lambda: of_totals, [*of_totals, *packed[len(pairs) :]]
        finite = finiteness.all_finite(values)
        if not aggregate and replicas.are_several():
            finite = replicas.agree(finite)
    own = (lambda: unclipped) if unclipped else sent or sums
    replica = _Replica(state.losses, sums, kept, has_examples, own)

    # Make or skip the step, once for all replicas.
    def apply(replica: _Replica) -> Any:
        with attributes.replaced(thread, "is_applying", True):
            return adapter.apply(list(zip(replica.sums(), variables)), name, aggregate=False)

    def outcome(finite: Any, skipped: SkippedStep | None = None) -> list[Any]:
        assert scaler is not None
        return scaler.outcome(finite, skipped, state.moved_scale is scaler.loss_scale)

    def decide(steps: Sequence[_Replica], apply_on_each: Callable[[], Any]) -> Operation:
        def put_back(unless: tf.Tensor | None = None) -> None:
            for each in steps:
                each.kept.put_back(unless)

        def make() -> Operation:
            for each in steps:
                each.kept.release()
            applied = apply_on_each()
            return _operation([applied, *(outcome(True) if may_skip else ())])

        def skip() -> Operation:
            skipped = _skipped(adapter, steps, tested, totals)
            if completes is not None:
                adapter.drop_accumulated()
            put_back()
            return _operation(outcome(False, skipped))

        def accumulate() -> Operation:
            applied = apply_on_each()
            put_back(finite)
            return _operation([applied, *(scaler.accumulated() if scaler else ())])

        def complete() -> Operation:
            # A function of its own could not ask other replicas what was not finite there, nor be
            # part of a graph of TensorFlow 1.
            count = tf.distribute.get_strategy().num_replicas_in_sync
            must_stay = host.in_v1_graph() or len(steps) < count
            return tf.cond(finite, make, skip if must_stay else host.as_one_operation(skip))

        if finite is None:
            return make()
        if completes is not None:
            return tf.cond(completes, complete, accumulate)
        is_compiled = host.is_compiled_by_xla() and features.is_on(WITHOUT_BRANCHES)
        if not is_compiled or tf.distribute.in_cross_replica_context():
            return complete()
        # Without a branch. The optimizer writes, and the old values are put back.
        skipped = _skipped(adapter, steps, tested, totals)
        _write_if(finite, apply_on_each)
        put_back(finite)
        return _operation(outcome(finite, skipped))

    operation = replicas.decide_for_all_replicas(decide, replica, apply)
    if under_way is not None and scaler is not None and not scaler.is_shared:
        under_way.begin()
    return operation, finite


def _summed(
    grads: list[Gradient],
    variables: list[Any],
    custom: Callable[..., Pairs] | None,
    state: GradientState,
    reduce_dtype: tf.DType,
    may_skip: bool,
) -> tuple[list[Gradient], Callable[[list[Gradient]], list[Gradient]], Callable[[], Any]]:
    """Sums gradients over replicas while they are scaled, and the marks of these.

    RFC 293, "All-reducing in float16".

    Returns:
        tuple of the sums, unscaled, small ones of them joined; of a function that separates these;
        and of one that returns the gradients that this replica has sent to the others.
    """
    scaled_by = state.scaled_by
    divisor = scaled_by if state.scaled else None
    if custom:
        unscaled = gradients.unscale(grads, divisor)
        own, marks = unscaled[: len(variables)], unscaled[len(variables) :]
        if replicas.are_several():
            marks = replicas.all_reduce(marks)
        sums = custom(list(zip(own, variables, strict=True)))
        return [*(gradient for gradient, _ in sums), *marks], list, lambda: own
    packed, unpack = gradients.pack(grads)
    if reduce_dtype == tf.float16:
        if not may_skip or scaled_by is None:
            # Unscaled, small values would vanish; and a sum that overflows is harmless only if the
            # step can be skipped.
            reduce_dtype = tf.float32
        elif divisor is None:
            packed, divisor = gradients.scale(packed, scaled_by), scaled_by
    wide = packed if may_skip else gradients.cast(packed, [tf.float16], tf.float32)
    sent = gradients.cast(wide, [tf.float32], reduce_dtype)
    sums = gradients.cast_as(replicas.all_reduce(sent), wide)
    # They are unscaled while they are packed: one operation for many small gradients.
    sums = gradients.cast_as(gradients.unscale(sums, divisor), packed)
    return sums, unpack, lambda: unpack(sent)[: len(variables)]


def _new_values(
    adapter: OptimizerAdapter, state: GradientState, pairs: Pairs
) -> dict[int, Gradient]:
    """Returns, by position, the new values that come in place of gradients.

    New values were never scaled. If they were divided along with the gradients, that is undone.
    """
    values = {
        i: gradient
        for i, (gradient, variable) in enumerate(pairs)
        if gradient is not None and adapter.is_overwritten(variable)
    }
    if values and state.is_divided and state.scaled_by is not None:
        values = dict(zip(values, gradients.scale(list(values.values()), state.scaled_by)))
    return values


def _marks(
    state: GradientState, kept: KeptValues, has_examples: tf.Tensor | None
) -> list[Gradient]:
    """Returns verdicts as gradients (NaN for False), summed and tested with others."""
    verdicts = [] if state.was_finite is None else [state.was_finite]
    if has_examples is not None and kept:
        # Statistics of a batch without examples are not finite, though its gradients may be.
        verdicts.append(has_examples if kept.may_have_changed() else tf.constant(True))
    return [tf.where(is_good, 0.0, float("nan")) for is_good in verdicts]


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
    adapter: OptimizerAdapter,
    steps: Sequence[_Replica],
    tested: Sequence[Any],
    totals: Callable[[], Sequence[Gradient]] | None,
) -> SkippedStep:
    """Looks for Inf and NaN in a step that is skipped, or, without branches, may be.

    Args:
        adapter: the adapter of the optimizer.
        steps: the replicas of this process, or this one.
        tested: the variables of the gradients that were tested.
        totals: function that returns the gradients that were tested, if these are not those that
            replicas have computed.
    """
    count = tf.distribute.get_strategy().num_replicas_in_sync
    if host.in_v1_graph():  # Nothing is noted of gradients there, which a branch need not be given.
        tested, totals, steps = (), None, [each._replace(own=tuple) for each in steps]
    of_replicas = [(each.losses, each.own(), each.has_examples) for each in steps]
    counts = finiteness.count_of_replicas(of_replicas, totals and totals(), len(tested))
    loss_is_finite = tf.reduce_all(tf.equal(counts[:count, 0], 0))
    has_overflowed: Any = True
    if steps[0].has_examples is not None:
        has_examples = counts[:count, 0, 0] > finiteness.UNKNOWN - 1
        is_bad = tf.reduce_any(tf.not_equal(counts[:count, 1:], 0), [1, 2])
        has_cause = tf.reduce_any(is_bad & has_examples)
        has_overflowed = has_cause | tf.reduce_all(has_examples)
    made = adapter.steps_made()
    return SkippedStep(tested, counts, made, loss_is_finite, has_overflowed)


def _write_if(finite: tf.Tensor, update: Callable[[], Any]) -> None:
    """Lets a function write to variables on a condition, without a branch.

    On a GPU, a branch copies its condition to the host, which waits for it. XLA makes one pass of
    an update and of the selection of new or old values.
    """

    def write() -> None:
        update()

    traced = tf.function(write, autograph=False).get_concrete_function()
    written = [
        (outside, graphs.handle_data(outside))
        for outside, inside in traced.graph.captures
        if inside.dtype == tf.resource
        and not all(variable_ops.only_reads(op, inside) for op in inside.consumers())
    ]
    # The table in which a tool notes what it has seen has no such data, and keeps it.
    kept = KeptValues(
        [
            (handle, read(handle, data.shape_and_type[0].dtype))
            for handle, data in written
            if data is not None and data.shape_and_type
        ]
    )
    traced()
    kept.put_back(finite)


def _operation(result: Any) -> Operation:
    """Returns the result of a branch: an operation in TensorFlow 1, else None."""
    if not host.in_v1_graph():
        return None
    of_replicas = tf.distribute.get_strategy().experimental_local_results(result)
    return tf.group(*(each for each in tf.nest.flatten(of_replicas) if each is not None))

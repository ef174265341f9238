"""A step sums scaled gradients, unscales and tests them, and applies or skips.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". Read `make_step` downward: it
combines the gradients of all replicas, tests them, makes or skips the step on all replicas, moves
the scale and notes a skipped step.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.hooks import observers
from keras_mp.step import finiteness, gradients, kept_values, replicas
from keras_mp.step.gradients import Gradient
from keras_mp.step.optimizer_adapter import OptimizerAdapter, Pairs
from keras_mp.step.record import GradientState
from keras_mp.step.scaled_losses import thread
from keras_mp.step.scaler import Scaler
from keras_mp.step.skip_report import SkippedStep
from keras_mp.support import attributes, features, host, variable_ops
from keras_mp.support.autograph import do_not_convert
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
    may_skip, count = scaler is not None and scaler.can_skip, len(pairs)
    divisor, under_way = state.scaled_by if state.scaled else None, thread.under_way
    if scaler is not None:
        observers.tell(observers.Observer.step_begins)
        # Checked again, since the scaler may have been made outside of the strategy's scope.
        replicas.check_strategy(may_skip)
        reduce_dtype = scaler.reduce_dtype
    if replicas.number_of_workers() > 1:
        facts = {"loss_scale": scaler and scaler.loss_scale, "reduce_dtype": reduce_dtype.name}
        facts["gradients are still scaled"] = state.scaled
        observers.tell(observers.Observer.workers_meet, scaler or adapter.optimizer, given, facts)
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
    packed, unpack, sent = [*grads, *map(_as_gradient, verdicts)], list, None
    custom = adapter.custom_aggregation() if aggregate else None
    are_several = replicas.are_several()
    if aggregate and are_several and not custom:
        # They are summed while they are scaled. In float16 small values would vanish otherwise; and
        # a sum that overflows is harmless only if the step can be skipped.
        packed, unpack = gradients.pack(packed)
        if reduce_dtype == tf.float16 and (not may_skip or state.scaled_by is None):
            reduce_dtype = tf.float32
        elif reduce_dtype == tf.float16 and divisor is None:
            packed, divisor = gradients.scale(packed, state.scaled_by), state.scaled_by
        dtypes = [each.dtype for each in packed]
        wide = [tf.float32 if d == tf.float16 and not may_skip else d for d in dtypes]
        to_send = [reduce_dtype if d == tf.float32 else d for d in wide]
        sent = list(map(gradients.cast, map(gradients.cast, packed, wide), to_send))
        packed = list(map(gradients.cast, replicas.all_reduce(sent), wide))
        # They are unscaled while they are packed: one operation for many small gradients.
        packed = list(map(gradients.cast, gradients.unscale(packed, divisor), dtypes))
    else:
        packed = gradients.unscale(packed, divisor)
    if custom:
        sent, marks = packed[:count], packed[count:]
        marks = replicas.all_reduce(marks) if are_several else marks
        packed = [*(g for g, _ in custom(list(zip(sent, variables)))), *marks]

    def sums() -> list[Gradient]:
        return [new_values.get(i, each) for i, each in enumerate(unpack(packed)[:count])]

    # Test them. The verdict is the same on every replica.
    finite, tested, totals, completes = None, variables, sums if sent else None, None
    if may_skip:
        tests, completes = [*packed, *new_values.values()], adapter.completes_step()
        if completes is not None:
            of_step, tested = zip(*adapter.totals(list(zip(sums(), variables))), strict=True)
            tests, totals = [*of_step, *unpack(packed)[count:]], lambda: of_step
        finite = finiteness.all_finite(tests)
        if not aggregate and are_several:
            finite = tf.math.is_finite(*replicas.all_reduce([_as_gradient(finite)]))
    own = (lambda: unclipped) if unclipped else (lambda: unpack(sent)[:count]) if sent else sums
    replica = _Replica(state.losses, sums, kept, has_examples, own)

    # Make or skip the step, once for all replicas.
    def apply(replica: _Replica) -> Any:
        with attributes.replaced(thread, "is_applying", True):
            return adapter.apply(list(zip(replica.sums(), variables)), name, aggregate=False)

    def decide(steps: Sequence[_Replica], apply_on_each: Callable[[], Any]) -> Operation:
        moved: Any = scaler

        def put_back(unless: Any) -> None:
            for each in steps:
                kept_values.put_back(each.kept, unless)

        def end(finite: Any) -> list[Any]:
            skipped = None
            if finite is not True:
                skipped = _skipped(adapter, steps, tested, totals)
                if completes is not None:
                    adapter.drop_accumulated()
                put_back(finite)
            return moved.outcome(finite, skipped, state.moved_scale is moved.loss_scale)

        def make() -> Operation:
            if tf.executing_eagerly():  # An update copies each value that is held.
                for each in steps:
                    each.kept.clear()
            return _operation([apply_on_each(), *(end(True) if may_skip else ())])

        def accumulate() -> Operation:
            applied = apply_on_each()
            put_back(finite)
            return _operation([applied, *moved.accumulated()])

        def skip() -> Operation:
            return _operation(end(False))

        def complete() -> Operation:
            # A function of its own could not ask other replicas what was not finite there, nor be
            # part of a graph of TensorFlow 1.
            count = tf.distribute.get_strategy().num_replicas_in_sync
            may_move = len(steps) == count and not host.in_v1_graph()
            return tf.cond(finite, make, host.as_one_operation(skip) if may_move else skip)

        if finite is None:
            return make()
        if completes is not None:
            return tf.cond(completes, complete, accumulate)
        is_compiled = host.is_compiled_by_xla() and features.is_on(WITHOUT_BRANCHES)
        if not is_compiled or tf.distribute.in_cross_replica_context():
            return complete()
        # Without a branch. The optimizer writes, and the old values are put back.
        _write_if(finite, apply_on_each)
        return _operation(end(finite))

    operation = replicas.decide_for_all_replicas(decide, replica, apply)
    if under_way is not None and scaler is not None and not scaler.is_shared:
        under_way.begin()
    return operation, finite


def _as_gradient(verdict: tf.Tensor) -> tf.Tensor:
    """Returns a number that is summed and tested with gradients: NaN for False."""
    return tf.where(verdict, 0.0, float("nan"))


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


def _skipped(
    adapter: OptimizerAdapter, steps: Sequence[_Replica], tested: Sequence[Any], totals: Any
) -> SkippedStep:
    """Counts Inf and NaN on all replicas in a step that is skipped.

    Without branches, it is one that may be.

    Args:
        adapter: the adapter of the optimizer.
        steps: the replicas of this process, or this one.
        tested: the variables of the gradients that were tested. Those that a replica has no
            gradients of count as finite.
        totals: function that returns the gradients that were tested, if these are not those that
            replicas have computed. They are the same on all replicas.
    """
    strategy, in_v1 = tf.distribute.get_strategy(), host.in_v1_graph()
    if in_v1:  # Nothing is noted of gradients there, which a branch need not be given.
        tested, totals = (), None
    rows = []
    for i, each in enumerate(steps):
        own = () if in_v1 else each.own()
        all_of = [*own, *[None] * (len(tested) - len(own))]
        with tf.device(strategy.extended.worker_devices[i] if len(steps) > 1 else None):
            rows.append(finiteness.count(list(each.losses), all_of, each.has_examples))
    if len(rows) == strategy.num_replicas_in_sync:
        counts = tf.stack(rows)
    else:
        gather = do_not_convert(lambda: replicas.gather(rows[replicas.local_id() % len(rows)]))
        if tf.distribute.in_cross_replica_context():
            gather = functools.partial(strategy.extended.call_for_each_replica, gather)
        counts, *_ = strategy.experimental_local_results(gather())
    losses = counts[:, 0]
    has_overflowed: Any = True
    if steps[0].has_examples is not None:
        has_examples = losses[:, 0] > finiteness.UNKNOWN - 1
        has_cause = tf.reduce_any(tf.not_equal(counts[:, 1:], 0), [1, 2]) & has_examples
        has_overflowed = tf.reduce_any(has_cause) | tf.reduce_all(has_examples)
    if totals is not None:
        counts = tf.concat([counts, [finiteness.count([], list(totals()), None)]], 0)
    is_finite = tf.reduce_all(tf.equal(losses, 0))
    return SkippedStep(tested, counts, adapter.steps_made(), is_finite, has_overflowed)


# What operations that change a variable get in a step that is skipped.
_NO_CHANGE = {"AssignAddVariableOp": -0.0, "AssignSubVariableOp": 0.0}
_WRITES = {"AssignVariableOp", *_NO_CHANGE}


def _write_if(finite: tf.Tensor, update: Callable[[], Any]) -> None:
    """Lets a function write to variables on a condition, without a branch.

    On a GPU, a branch copies its condition to the host, which waits for it. XLA makes one pass of
    an update and of the selection of what is written. Selected after the update, old values would
    be copied for each variable that is computed from another, as with momentum.
    """

    def write() -> None:
        update()
        graph: Any = tf.compat.v1.get_default_graph()
        for outside, inside in [*graph.captures]:
            for op in inside.consumers():
                if op.type not in _WRITES or op.inputs[0] is not inside:
                    continue
                new, no_change = op.inputs[1], _NO_CHANGE.get(op.type)
                with graph.outer_graph.as_default():
                    is_value = no_change is None
                    old = read(outside, new.dtype) if is_value else tf.cast(no_change, new.dtype)
                graphs.update_input(op, 1, tf.where(finite, new, old))

    read = kept_values.read
    traced = tf.function(write, autograph=False).get_concrete_function()
    kept: kept_values.Kept = []
    for outside, inside in traced.graph.captures:
        is_done = (
            op.type in _WRITES or variable_ops.only_reads(op, inside) for op in inside.consumers()
        )
        # The table in which a tool notes what it has seen has no such data, and keeps it.
        data = graphs.handle_data(outside) if inside.dtype == tf.resource else None
        if data is not None and data.shape_and_type and not all(is_done):
            kept.append((outside, read(outside, data.shape_and_type[0].dtype)))
    traced()
    kept_values.put_back(kept, finite)


def _operation(result: Any) -> Operation:
    """Returns the result of a branch: an operation in TensorFlow 1, else None."""
    if not host.in_v1_graph():
        return None
    of_replicas = tf.distribute.get_strategy().experimental_local_results(result)
    return tf.group(*(each for each in tf.nest.flatten(of_replicas) if each is not None))

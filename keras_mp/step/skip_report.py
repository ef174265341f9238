"""What is counted and noted of a skipped step: which gradients were not finite.

All that a report needs is noted in the branch that skips, in one small variable for each list of
variables that steps were made with. `overflow` is what users read of a note, and `skip_warnings`
what they are told of many; neither is imported before.

This module needs TensorFlow only.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.step import finiteness, replicas
from keras_mp.step.gradients import Gradient, concat, joined
from keras_mp.step.loss_scales import state_variable
from keras_mp.step.optimizer_adapter import OptimizerAdapter
from keras_mp.support import host, kept_casts, messages, new_variables
from keras_mp.support.dtypes import is_low

# The dtype of counts, which are exact up to 2**53. GPUs have no kernels that sum up int64 segments,
# so the host would have to wait for the counts.
COUNTS = tf.float64
# They stand in place of counts: of values that were only found, not counted; of a loss that is not
# known; and of one of a replica without examples.
UNCOUNTED, UNKNOWN, NO_EXAMPLES = -1.0, -1e6, -2e6
# The beginning of a note: the number of skipped steps so far, including those before a restored
# checkpoint; how many of them were the optimizer's; how many were skipped in a row; and the loss
# scale.
HEADER = 4
# Half of the last hundred steps were skipped if the first of the last 50 skips was less than 100
# steps ago. A note has the numbers of these steps, the last one first, which are -1 for an
# optimizer that counts none.
HALF = 50
TIMES = HEADER + HALF
NO_TIME = -1


class SkippedStep(NamedTuple):
    """What is known about a skipped step, on all replicas.

    Attributes:
        variables: list of the variables whose gradients were computed.
        counts: `COUNTS` tensor of shape [rows, 1 + variables, 2], the same on every replica. Each
            replica has a row, which begins with its losses; a last row may be for sums of them.
        steps_made: int64 scalar tensor, the steps of the optimizer so far, or None.
        loss_is_finite: bool scalar tensor. Whether the losses of all replicas are known to be
            finite.
        has_overflowed: bool, or bool scalar tensor. False if the step was skipped only because
            replicas had no examples: a smaller loss scale would change nothing.
    """

    variables: Sequence[Any]
    counts: tf.Tensor
    steps_made: tf.Tensor | None
    loss_is_finite: tf.Tensor
    has_overflowed: bool | tf.Tensor


class Note(NamedTuple):
    """The note of the last skipped step with the gradients of a list of variables.

    Attributes:
        vector: variable of `COUNTS`. It has the header, the numbers of the last 50 skipped steps,
            and the counts of the last one.
        variables: references to the variables.
        names: the names of the variables.
        sizes: the numbers of their values; None where that is not known.
        strategy: the strategy under which the steps are made.
    """

    vector: tf.Variable
    variables: list[weakref.ref[Any]]
    names: list[str]
    sizes: list[int | None]
    strategy: tf.distribute.Strategy

    def is_alive(self) -> bool:
        """Whether there may be another step with these variables."""
        return all(refer() is not None for refer in self.variables)


def counted(
    adapter: OptimizerAdapter, steps: Sequence[Any], tested: Sequence[Any], totals: Any
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
            rows.append(count(list(each.losses), all_of, each.has_examples))
    if len(rows) == strategy.num_replicas_in_sync:
        counts = tf.stack(rows)
    else:
        from keras_mp.step import strategies

        counts = strategies.gather_rows(rows)
    losses = counts[:, 0]
    has_overflowed: Any = True
    if steps[0].has_examples is not None:
        has_examples = losses[:, 0] > UNKNOWN - 1
        has_cause = tf.reduce_any(tf.not_equal(counts[:, 1:], 0), [1, 2]) & has_examples
        has_overflowed = tf.reduce_any(has_cause) | tf.reduce_all(has_examples)
    if totals is not None:
        counts = tf.concat([counts, [count([], list(totals()), None)]], 0)
    is_finite = tf.reduce_all(tf.equal(losses, 0))
    return SkippedStep(tested, counts, adapter.steps_made(), is_finite, has_overflowed)


@host.shared_operation
def count(
    losses: Sequence[tf.Tensor], gradients: Sequence[Gradient], has_examples: tf.Tensor | None
) -> tf.Tensor:
    """Counts infinite values, and NaNs.

    There is a row of two numbers for the losses, then one for each gradient. Where XLA
    compiles, every step does so: values are only found, but for scalars.
    """
    tested, rows = [*losses, *gradients], [tf.zeros([2], COUNTS)] * (len(losses) + len(gradients))
    counted = {i: g for i, g in enumerate(tested) if not (g is None or g.dtype.is_integer)}
    if host.is_compiled_by_xla():
        for i in [i for i, gradient in counted.items() if gradient.shape.rank != 0]:
            # The sums that the verdict needs anyway: XLA reads the gradient once for both.
            is_finite = finiteness.all_finite([counted.pop(i)])
            rows[i] = tf.fill([2], tf.where(is_finite, tf.constant(0, COUNTS), UNCOUNTED))
    for group in joined(counted):
        values = concat(list(group.values()))
        values = values.values if isinstance(values, tf.IndexedSlices) else values
        values = tf.abs(values) if values.dtype.is_complex else values
        values = kept_casts.as_float32(values) if is_low(values.dtype) else values
        kinds = [tf.cast(f(values), COUNTS) for f in (tf.math.is_inf, tf.math.is_nan)]
        if len(group) == 1:
            counts = [tf.stack([tf.reduce_sum(kind) for kind in kinds])]
        else:
            sizes = [each.shape.num_elements() for each in group.values()]
            whose, number = np.repeat(np.arange(len(group)), sizes), tf.constant(len(group))
            sums = tf.math.unsorted_segment_sum(tf.stack(kinds, 1), tf.constant(whose), number)
            counts = tf.unstack(sums)
        for i, row in zip(group, counts):
            rows[i] = row
    loss = tf.add_n(rows[: len(losses)]) if losses else tf.fill([2], tf.constant(UNKNOWN, COUNTS))
    if has_examples is not None:
        loss = tf.where(has_examples, loss, tf.constant(NO_EXAMPLES, COUNTS))
    return tf.stack([loss, *rows[len(losses) :]])


def noted(
    scaler: Any, skipped: SkippedStep, finite: bool | tf.Tensor, loss_scale: tf.Tensor
) -> list[Any]:
    """Notes a skipped step that was counted, and warns if it is time.

    Args:
        scaler: the `Scaler` of the step.
        skipped: the step.
        finite: False, in the branch that skips; a bool scalar tensor where there is none.
        loss_scale: float32 scalar tensor, the scale of the step.

    Returns:
        list of the operations that note.
    """
    if host.in_v1_graph():  # A `Saver` would save all variables.
        return []
    vector = _note_of(scaler, skipped).vector
    before = tf.convert_to_tensor(vector)
    read = (scaler.steps_skipped, scaler.skips_in_a_row, loss_scale)
    total, in_a_row, scale = (tf.cast(tf.convert_to_tensor(v), COUNTS) for v in read)
    own, time = before[1] + 1 if scaler.is_shared else total, tf.constant(NO_TIME, COUNTS)
    if skipped.steps_made is not None:
        time = tf.cast(skipped.steps_made, COUNTS) + own
    # Several optimizers count a step of all where that ends.
    header = tf.stack([total, own, in_a_row + int(scaler.is_shared), scale])
    counts = tf.reshape(skipped.counts, [-1])
    after = tf.concat([header, [time], before[HEADER : TIMES - 1], counts], 0)
    noted = [vector.assign(host.chosen(finite, lambda: before, lambda: after), read_value=False)]
    if (scaler.warn_after or scaler.raise_after) and not host.is_compiled_by_xla():
        line = messages.users_line()
        if tf.executing_eagerly():
            scaler.ask(line)
        elif replicas.local_id() == 0:
            with tf.control_dependencies(noted):
                tf.py_function(lambda: scaler.ask(line), [], [])
    return noted


def _note_of(scaler: Any, skipped: SkippedStep) -> Note:
    variables, size = skipped.variables, skipped.counts.shape.num_elements() or 0
    key = (size, *map(id, variables))
    note = scaler.notes.get(key)
    if note is None or not note.is_alive():
        vector = new_variables.outside_of_functions(
            lambda: state_variable(np.zeros(TIMES + size), COUNTS, "overflow")
        )
        paths, strategy = scaler.paths(), tf.distribute.get_strategy()
        names = [paths.get(id(v)) or name_of(v) for v in variables]
        sizes = [tf.TensorShape(v.shape).num_elements() for v in variables]
        note = Note(vector, [*map(weakref.ref, variables)], names, sizes, strategy)
        living = {k: each for k, each in scaler.notes.items() if each.is_alive()}
        scaler.notes = {**living, key: note}
    return note


def name_of(variable: Any) -> str:
    """Returns the name that the user knows.

    Keras 3 has paths, which tell layers apart.

    Args:
        variable: a variable of any kind. If a distributed one were asked for an attribute that it
            lacks, outside of replicas, it would be read in the graph.
    """
    first, *_ = tf.distribute.get_strategy().experimental_local_results(variable)
    return getattr(first, "path", None) or first.name.partition(":")[0]

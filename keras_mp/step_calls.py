"""Was the loss scaled, and were the gradients unscaled? Exactly once each, or somebody hears of it.

RFC 293, "LossScaleOptimizer Overview": the four steps, and who performs them.
"""

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from keras_mp import host, keras_api, messages


class Made(enum.IntEnum):
    """How the gradients were made that are applied next."""

    UNKNOWN = 0
    SCALED = 1  # by get_scaled_loss, so get_unscaled_gradients is to come
    SCALED_TO_APPLY = 2  # by scale_loss, so apply_gradients unscales
    UNSCALED = 3
    ONLY_UNSCALED = 4
    APPLIED_SCALED = 5  # No call yet since gradients were applied, which were still scaled ...
    APPLIED_UNSCALED = 6  # ... or were not.
    REPORTED_SCALED = 7  # The same, and that a call is missing was said already.
    REPORTED_UNSCALED = 8


# Indexed rather than called: AutoGraph converts what a tf.function calls, and fails on the latter.
_ALL = tuple(Made)

_AFTER_UNSCALING = {
    made: Made.UNSCALED
    if made in (Made.SCALED, Made.SCALED_TO_APPLY, Made.UNSCALED)
    else Made.ONLY_UNSCALED
    for made in Made
}
_IS_SCALED = {
    Made.UNKNOWN: keras_api.APPLY_TAKES_SCALED_GRADIENTS,
    Made.SCALED: True,
    Made.SCALED_TO_APPLY: True,
    Made.UNSCALED: False,
    Made.ONLY_UNSCALED: False,
    Made.APPLIED_SCALED: True,
    Made.APPLIED_UNSCALED: False,
    Made.REPORTED_SCALED: True,
    Made.REPORTED_UNSCALED: False,
}
_REPORTED = (Made.REPORTED_SCALED, Made.REPORTED_UNSCALED)
_APPLIED = (Made.APPLIED_SCALED, Made.APPLIED_UNSCALED, *_REPORTED)


def _misses_a_call(made: Made, goes_on: bool) -> bool:
    """Is it wrong to apply now? `goes_on` says that it is another part of the same step."""
    is_complete = made in (Made.SCALED_TO_APPLY, Made.UNSCALED)
    return not is_complete and not (goes_on and made in (Made.ONLY_UNSCALED, *_APPLIED))


def _after_applying(made: Made, goes_on: bool) -> Made:
    if made in (Made.UNKNOWN, *_APPLIED) and _misses_a_call(made, goes_on):
        return Made.REPORTED_SCALED if _IS_SCALED[made] else Made.REPORTED_UNSCALED
    return Made.APPLIED_SCALED if _IS_SCALED[made] else Made.APPLIED_UNSCALED


class _Mine(threading.local):
    """What one thread remembers. MirroredStrategy runs each replica in a thread of its own.

    Attributes:
        graph: reference to the graph in which the last call was made; None for eager.
        made: what that call led to; None where that is known only at run time.
        applied: ids of the variables of the step so far.
        is_interleaved: was it begun while one of the other way was under way?
        loss: the loss of the step under way.
        scaled_by: what it was multiplied by.
        results: what the last call returned.
    """

    graph: weakref.ref[Any] | None = None
    made: Made | None = Made.UNKNOWN
    applied: frozenset[int] = frozenset()
    is_interleaved = False
    loss: tf.Tensor | None = None
    scaled_by: tf.Tensor | None = None
    results: tuple[weakref.ref[Any], ...] = ()


class StepCalls:
    """Which of the calls that belong to one step were made since the last step.

    Each thread remembers what it did itself, in eager or in the graph that it is building, which
    decides where the step is made there too. Where gradients come from another function, Python may
    not have run since; so a variable remembers as well, and decides when the step is made.
    """

    def __init__(self) -> None:
        self._mine = _Mine()
        self._made = host.local_variable("made", int(Made.UNKNOWN))
        self._scaled_by = host.local_variable("scaled_by", 1.0, tf.float32)
        # Graphs in which calls were made and gradients were not applied.
        self._open_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._some_function_only_applies = False
        self._reports = host.Mailbox(lambda made, line: messages.warn(_missing(_ALL[made]), line))

    def scaled(self, scaled_by: tf.Tensor, *, to_apply: bool) -> None:
        """Notes that the loss was scaled, which begins a step.

        Args:
            scaled_by: float32 scalar tensor.
            to_apply: bool. Will `apply_gradients` unscale, rather than `get_unscaled_gradients`?
        """
        mine = self._mine
        is_under_way = mine.made in (Made.SCALED, Made.SCALED_TO_APPLY, Made.UNSCALED)
        mine.is_interleaved = is_under_way and (mine.made is Made.SCALED_TO_APPLY) != to_apply
        mine.applied = frozenset()
        self._open(Made.SCALED_TO_APPLY if to_apply else Made.SCALED)
        if host.runs_by_itself():
            self._scaled_by.assign(scaled_by, read_value=False)

    def unscaled(self) -> None:
        """Notes that gradients were unscaled."""
        made = self._made_here()
        if made is not None:
            self._open(_AFTER_UNSCALING[made])
        else:
            self._open(_look_up(_AFTER_UNSCALING, self._made))

    def unscale_early(self) -> bool | tf.Tensor:
        """Notes that gradients are unscaled which `apply_gradients` would, before others see them.

        Returns:
            Has that to be done? A bool scalar tensor where it is known only when the function runs.
        """
        made = self._made_here()
        if made is None:
            is_scaled = tf.equal(self._made, int(Made.SCALED_TO_APPLY))
            self._note(tf.where(is_scaled, tf.cast(Made.UNSCALED, tf.int64), self._made))
            return is_scaled
        if made is Made.SCALED_TO_APPLY:
            self._open(Made.UNSCALED)
        return made is Made.SCALED_TO_APPLY

    @contextlib.contextmanager
    def beside_the_step(self) -> Iterator[None]:
        """A context in which a whole step is made, which does not disturb one that is under way."""
        mine = self._mine
        kept = mine.loss, mine.scaled_by, mine.results
        try:
            yield
        finally:
            mine.loss, mine.scaled_by, mine.results = kept
            mine.applied = frozenset()

    def saw(self, loss: tf.Tensor, scaled_by: tf.Tensor) -> None:
        """Remembers the loss of this step as it is before it is scaled, and the scale."""
        self._mine.loss, self._mine.scaled_by = loss, scaled_by

    def take_loss(self) -> tf.Tensor | None:
        """The loss of this step, if it is known here. Only once."""
        loss, self._mine.loss = self._mine.loss, None
        return loss if _is_of_this_graph(loss) else None

    def scaled_by(self, loss_scale: Callable[[], tf.Tensor]) -> tf.Tensor:
        """What the loss of this step was multiplied by.

        The loss scale may have moved since: other steps were made, or a part of this one.

        Args:
            loss_scale: returns the current one, a float32 scalar tensor.

        Returns:
            float32 scalar tensor; the current scale where no loss was scaled.
        """
        if _is_of_this_graph(self._mine.scaled_by):
            return self._mine.scaled_by
        if not host.runs_by_itself():
            return loss_scale()
        was_scaled = {m: m not in (Made.UNKNOWN, Made.ONLY_UNSCALED, *_REPORTED) for m in Made}
        is_known = tf.cast(_look_up(was_scaled, self._made), tf.bool)
        return tf.where(is_known, self._scaled_by, loss_scale())

    def returned(self, results: Iterable[Any]) -> None:
        """Remembers what the user gets."""
        self._mine.results = tuple(weakref.ref(r) for r in results if r is not None)

    def refuse_results(self, values: Iterable[Any], method: str) -> None:
        """Refuses to do the same once more.

        Args:
            values: iterable of what the user passed.
            method: str. The method's name.

        Raises:
            ValueError: one of them is what the last call returned.
        """
        results = {id(ref()) for ref in self._mine.results}
        if any(value is not None and id(value) in results for value in values):
            raise ValueError(
                f"{method}() was given what is scaled, or unscaled, already: do so once. "
                f"Received: {values!r}"
            )

    def variables(self) -> dict[str, tf.Variable]:
        """The variables of which a checkpoint knows nothing, by name."""
        return {
            "made": self._made,
            "scaled_by": self._scaled_by,
            "call_report": self._reports.letter,
        }

    def resolve(self, variables: Iterable[Any]) -> bool | tf.Tensor:
        """Ends the step; warns of missing calls.

        Args:
            variables: iterable of what the gradients are applied to.

        Returns:
            Are the gradients still scaled? A bool scalar tensor where that is known only when the
            function runs.
        """
        applied, before = frozenset(id(v) for v in variables), self._mine.applied
        # Other variables than just before: the same step may go on.
        goes_on = bool(before) and before.isdisjoint(applied) and not self._mine.is_interleaved
        self._mine.applied = before | applied if goes_on else applied
        made = self._made_here()
        if made is None:
            return self._resolve_at_run_time(goes_on)
        if _misses_a_call(made, goes_on):
            messages.warn(_missing(made))
            self._mine.applied, self._mine.scaled_by = frozenset(), None
        self._close(_after_applying(made, goes_on))
        return _IS_SCALED[made]

    def collect_reports(self) -> None:
        """Says what functions that XLA compiled had to say."""
        self._reports.collect()

    def _resolve_at_run_time(self, goes_on: bool) -> tf.Tensor:
        self._some_function_only_applies = True
        if host.is_compiled_by_xla():
            self._report_while_tracing(goes_on)
        made = tf.convert_to_tensor(self._made)
        after = _look_up({m: _after_applying(m, goes_on) for m in Made}, made)
        is_news = {m: _misses_a_call(m, goes_on) and m not in _REPORTED for m in Made}
        self._reports.watch()
        self._reports.post(made, when=tf.cast(_look_up(is_news, made), tf.bool))
        self._close(after)
        return tf.cast(_look_up(_IS_SCALED, made), tf.bool)

    def _report_while_tracing(self, goes_on: bool) -> None:
        """Says now what is known now, since a compiled function cannot say it when it runs."""
        if self._mine.made not in (*_APPLIED, Made.UNKNOWN):
            return
        with tf.init_scope():
            if not tf.executing_eagerly():
                return
            made = self._read()
            if _misses_a_call(made, goes_on):
                messages.warn(_missing(made))
                self._made.assign(int(_after_applying(made, goes_on)), read_value=False)

    def _made_here(self) -> Made | None:
        """What was made so far, or None where only the variable knows, at run time."""
        graph, mine = host.current_graph(), self._mine
        if graph is None:
            crosses = self._some_function_only_applies or bool(self._open_graphs)
            if mine.graph is None and mine.made is not Made.UNKNOWN and not crosses:
                return mine.made
            return self._read()
        if mine.graph is not None and mine.graph() is graph and mine.made is not None:
            return mine.made
        return None if host.runs_by_itself() else Made.UNKNOWN

    def _read(self) -> Made:
        return _ALL[int(tf.convert_to_tensor(self._made))]

    def _open(self, made: Made | tf.Tensor) -> None:
        graph = host.current_graph()
        if graph is not None:
            self._open_graphs.add(graph)
        self._note(made)

    def _close(self, made: Made | tf.Tensor) -> None:
        graph = host.current_graph()
        if graph is not None:
            self._open_graphs.discard(graph)
        self._note(made)

    def _note(self, made: Made | tf.Tensor) -> None:
        graph = host.current_graph()
        self._mine.graph = None if graph is None else weakref.ref(graph)
        self._mine.made = made if isinstance(made, Made) else None
        if host.runs_by_itself():
            value = int(made) if isinstance(made, Made) else made
            self._made.assign(value, read_value=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepCalls":
        return StepCalls()

    def __reduce__(self) -> tuple[Any, ...]:
        return StepCalls, ()


def _is_of_this_graph(tensor: tf.Tensor | None) -> bool:
    return tensor is not None and getattr(tensor, "graph", None) is host.current_graph()


def _look_up(table: dict[Made, int], made: Any) -> tf.Tensor:
    values = [int(table[m]) for m in Made]
    return tf.gather(tf.constant(values, tf.int64), tf.convert_to_tensor(made))


def _missing(made: Made) -> str:
    if made is Made.ONLY_UNSCALED:
        return (
            "get_unscaled_gradients() was called and get_scaled_loss() was not, so the "
            "gradients of this step are too small by the loss scale, unless the loss was "
            f"multiplied by hand. Call both:{_EXAMPLE}"
        )
    if made is Made.SCALED:
        return (
            "get_scaled_loss() was called and get_unscaled_gradients() was not; "
            "apply_gradients() has divided the gradients by the loss scale instead. If they "
            f"were divided by hand too, this step is too small. Call both:{_EXAMPLE}"
        )
    if _IS_SCALED[made]:
        return (
            "The loss was not scaled before apply_gradients(), which has divided the gradients "
            "by the loss scale all the same: this step is too small, unless the loss was "
            "scaled in another thread, or multiplied by hand. Scale the loss where "
            f"the gradients are computed:{_EXAMPLE}"
        )
    return (
        "Neither get_scaled_loss() nor get_unscaled_gradients() was called before "
        "apply_gradients(), so, unless they were called in another thread, this "
        "step was made without loss scaling and small float16 gradients may have vanished. "
        f"Call both, or `minimize`:{_EXAMPLE}"
    )


_EXAMPLE = """
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(loss_fn())
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
    optimizer.apply_gradients(zip(gradients, variables))"""

"""Was the loss scaled, and were the gradients unscaled? Exactly once each, or somebody hears of it.

RFC 293, "LossScaleOptimizer Overview": the four steps, and who performs them.
"""

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import overflows
from keras_mp.step.knowledge import Knowledge
from keras_mp.support import host, messages


class Facts(enum.IntFlag):
    """What is known of the step that is made next. No fact: nothing has happened yet.

    A call adds a fact. Applying ends the step: it leaves `APPLIED`, beside which the facts of the
    next step gather, until a call shows that the next step has begun::

        get_scaled_loss            LOSS_SCALED
        scale_loss                 LOSS_SCALED, APPLY_UNSCALES
        get_unscaled_gradients     UNSCALED
        apply_gradients            APPLIED; APPLIED_SCALED if it was given scaled gradients;
                                   REPORTED if it warned that no call had been made

    A step is right with LOSS_SCALED and one of APPLY_UNSCALES and UNSCALED.
    """

    LOSS_SCALED = enum.auto()
    APPLY_UNSCALES = enum.auto()
    UNSCALED = enum.auto()
    APPLIED = enum.auto()
    APPLIED_SCALED = enum.auto()
    REPORTED = enum.auto()


_OF_THE_LAST_STEP = Facts.APPLIED | Facts.APPLIED_SCALED | Facts.REPORTED

# Indexed rather than called: AutoGraph converts what a tf.function calls, and fails on the latter.
_ALL = tuple(map(Facts, range(2 ** len(Facts))))


def _misses_a_call(facts: Facts, goes_on: bool) -> bool:
    """Is it wrong to apply now? `goes_on` says that it is another part of the step just applied."""
    if Facts.LOSS_SCALED in facts:
        return not facts & (Facts.APPLY_UNSCALES | Facts.UNSCALED)
    return not (goes_on and facts & (Facts.APPLIED | Facts.UNSCALED))


def _is_scaled(facts: Facts, goes_on: bool) -> bool:
    """Are the gradients still scaled that are applied now?"""
    if Facts.UNSCALED in facts or Facts.LOSS_SCALED in facts:
        return Facts.UNSCALED not in facts
    return goes_on and Facts.APPLIED_SCALED in facts


def _after_applying(facts: Facts, goes_on: bool) -> Facts:
    after = Facts.APPLIED
    if _is_scaled(facts, goes_on):
        after |= Facts.APPLIED_SCALED
    if _misses_a_call(facts, goes_on) and not facts & (Facts.LOSS_SCALED | Facts.UNSCALED):
        after |= Facts.REPORTED
    return after


def _is_news(facts: Facts, goes_on: bool) -> bool:
    """Is something wrong that was not said of the last step?"""
    was_said = Facts.REPORTED in facts and (
        (Facts.APPLIED_SCALED in facts) == _is_scaled(facts, goes_on)
    )
    return _misses_a_call(facts, goes_on) and not was_said


def _after_unscaling(facts: Facts) -> Facts:
    return facts & ~_OF_THE_LAST_STEP | Facts.UNSCALED


def _after_unscaling_early(facts: Facts) -> Facts:
    return facts | Facts.UNSCALED if _apply_unscales(facts) else facts


def _apply_unscales(facts: Facts) -> bool:
    return Facts.APPLY_UNSCALES in facts and Facts.UNSCALED not in facts


def _knows_its_scale(facts: Facts) -> bool:
    """Was the loss of this step, or of the one of which another part may come, scaled by us?"""
    return Facts.LOSS_SCALED in facts or (Facts.APPLIED in facts and Facts.REPORTED not in facts)


class _Mine(threading.local):
    """What one thread remembers. MirroredStrategy runs each replica in a thread of its own.

    Attributes:
        applied: ids of the variables of the step so far.
        is_interleaved: was it begun while one of the other way was under way?
        loss: the loss of the step under way.
        scaled_by: what it was multiplied by.
        results: what the last call returned.
        unscaled: returns the gradients of the step under way as they were when they were unscaled.
    """

    applied: frozenset[int] = frozenset()
    is_interleaved = False
    loss: tf.Tensor | None = None
    scaled_by: tf.Tensor | None = None
    results: tuple[weakref.ref[Any], ...] = ()
    unscaled: Callable[[], list[Any]] = list


class StepCalls:
    """Which of the calls that belong to one step were made since the last step.

    What a thread did itself decides where the step is made there too. Where gradients come from
    another function, the variable decides when the step is made.
    """

    def __init__(self) -> None:
        self._mine = _Mine()
        self._known = Knowledge()
        self._scaled_by = host.local_variable("scaled_by", 1.0, tf.float32)
        self._reports = host.HostCallback(
            lambda numbers, line: messages.warn(_missing(_ALL[numbers[0]]), line), size=1
        )

    def scaled(self, scaled_by: tf.Tensor, *, to_apply: bool) -> None:
        """Notes that the loss was scaled, which begins a step.

        Args:
            scaled_by: float32 scalar tensor.
            to_apply: bool. Will `apply_gradients` unscale, rather than `get_unscaled_gradients`?
        """
        mine = self._mine
        before = _ALL[self._known.of_last_call or 0]
        is_under_way = Facts.LOSS_SCALED in before
        mine.is_interleaved = is_under_way and _apply_unscales(before) != to_apply
        mine.applied, mine.unscaled = frozenset(), list
        facts = Facts.LOSS_SCALED | Facts.APPLY_UNSCALES if to_apply else Facts.LOSS_SCALED
        self._known.note(facts, is_open=True)
        mine.scaled_by = scaled_by
        if not host.in_v1_graph():
            self._scaled_by.assign(scaled_by, read_value=False)

    def unscaled(self) -> None:
        """Notes that gradients were unscaled."""
        facts = self._known_facts()
        if facts is not None:
            self._known.note(_after_unscaling(facts), is_open=True)
        else:
            after = _look_up(_after_unscaling, self._known.at_run_time())
            self._known.note(after, is_open=True)

    def unscale_early(self) -> bool | tf.Tensor:
        """Notes that gradients are unscaled which `apply_gradients` would, before others see them.

        Returns:
            Has that to be done? A bool scalar tensor where it is known only when the function runs.
        """
        facts = self._known_facts()
        if facts is None:
            before = self._known.at_run_time()
            self._known.note(_look_up(_after_unscaling_early, before))
            return tf.cast(_look_up(_apply_unscales, before), tf.bool)
        if _apply_unscales(facts):
            self._known.note(_after_unscaling_early(facts), is_open=True)
        return _apply_unscales(facts)

    @contextlib.contextmanager
    def one_whole_step(self) -> Iterator[None]:
        """A context in which one call, `minimize`, makes a step from its loss to its end.

        It may come between the calls of another step, which goes on afterwards as if nothing had
        been.
        """
        mine = self._mine
        kept = mine.loss, mine.scaled_by, mine.results, mine.unscaled
        try:
            yield
        finally:
            mine.loss, mine.scaled_by, mine.results, mine.unscaled = kept
            mine.applied = frozenset()

    def saw(self, loss: tf.Tensor, scaled_by: tf.Tensor) -> None:
        """Remembers the loss of this step as it is before it is scaled, and the scale."""
        self._mine.loss, self._mine.scaled_by = loss, scaled_by

    def take_losses(self) -> list[tf.Tensor]:
        """The loss of this step, if it is known here. Only once."""
        loss, self._mine.loss = self._mine.loss, None
        return [loss] if _is_of_this_graph(loss) else []

    def saw_unscaled(self, grads: Sequence[Any]) -> None:
        """Remembers the gradients of this step as they are before the user may clip them."""
        self._mine.unscaled = overflows.remember(grads)

    def take_unscaled(self) -> list[Any]:
        """The gradients of this step as they were, if they are known here. Only once."""
        unscaled, self._mine.unscaled = self._mine.unscaled(), list
        return unscaled

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
        if host.in_v1_graph():
            return loss_scale()
        is_known = tf.cast(_look_up(_knows_its_scale, self._known.at_run_time()), tf.bool)
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
                f"{method}() was given values that are already scaled or unscaled: call it once. "
                f"Received: {values!r}"
            )

    def variables(self) -> dict[str, tf.Variable]:
        """The variables of which a checkpoint knows nothing, by name."""
        return {
            "facts": self._known.variable,
            "scaled_by": self._scaled_by,
            "call_report": self._reports.buffer,
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
        facts = self._known_facts()
        if facts is None:
            return self._resolve_at_run_time(goes_on)
        if _misses_a_call(facts, goes_on):
            messages.warn(_missing(facts))
            self._mine.applied, self._mine.scaled_by = frozenset(), None
        self._known.note(_after_applying(facts, goes_on), is_open=False)
        return _is_scaled(facts, goes_on)

    def collect_reports(self) -> None:
        """Says what functions that XLA compiled had to say."""
        self._reports.collect()

    def _resolve_at_run_time(self, goes_on: bool) -> tf.Tensor:
        self._known.are_looked_up = True
        if host.is_compiled_by_xla():
            self._report_while_tracing(goes_on)
        facts = self._known.at_run_time()
        after = _look_up(_after_applying, facts, goes_on)
        self._reports.watch()
        is_news = tf.cast(_look_up(_is_news, facts, goes_on), tf.bool)
        self._reports.post(facts[tf.newaxis], when=is_news)
        self._known.note(after, is_open=False)
        return tf.cast(_look_up(_is_scaled, facts, goes_on), tf.bool)

    def _report_while_tracing(self, goes_on: bool) -> None:
        """Says now what is known now, since a compiled function cannot say it when it runs."""
        mine = self._known.of_last_call
        if mine is None or mine & (Facts.LOSS_SCALED | Facts.UNSCALED):
            return
        with tf.init_scope():
            if not tf.executing_eagerly():
                return
            facts = _ALL[self._known.read()]
            if _misses_a_call(facts, goes_on):
                messages.warn(_missing(facts))
                after = _after_applying(facts, goes_on)
                self._known.variable.assign(int(after), read_value=False)

    def _known_facts(self) -> Facts | None:
        """What is known so far, or None where only the variable knows, at run time."""
        facts = self._known.here(since=int(~_OF_THE_LAST_STEP))
        return None if facts is None else _ALL[facts]

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepCalls":
        return StepCalls()

    def __reduce__(self) -> tuple[Any, ...]:
        return StepCalls, ()


def _is_of_this_graph(tensor: tf.Tensor | None) -> bool:
    return tensor is not None and getattr(tensor, "graph", None) is host.current_graph()


def _look_up(answer: Callable[..., int], facts: Any, *args: Any) -> tf.Tensor:
    """Asks in a graph what a function of `Facts` answers; an int64 scalar tensor."""
    answers = [int(answer(each, *args)) for each in _ALL]
    return tf.gather(tf.constant(answers, tf.int64), tf.convert_to_tensor(facts))


def _missing(facts: Facts) -> str:
    if Facts.LOSS_SCALED in facts:
        return (
            "get_scaled_loss() was called and get_unscaled_gradients() was not; "
            "apply_gradients() has divided the gradients by the loss scale instead. If they "
            f"were divided by hand too, this step is too small. Call both:{_EXAMPLE}"
        )
    if Facts.UNSCALED in facts:
        return (
            "get_unscaled_gradients() was called and get_scaled_loss() was not, so the "
            "gradients of this step are too small by the loss scale, unless the loss was "
            f"multiplied by hand. Call both:{_EXAMPLE}"
        )
    return (
        "Neither get_scaled_loss() nor get_unscaled_gradients() was called before "
        "apply_gradients(), so the gradients were applied as they are: this step was made without "
        "loss scaling, and small float16 gradients may have vanished. If the loss was multiplied "
        "by the loss scale by hand, say so: apply_gradients(..., scaled=True). Else call both, or "
        f"`minimize`:{_EXAMPLE}"
    )


_EXAMPLE = """
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(loss_fn())
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
    optimizer.apply_gradients(zip(gradients, variables))"""

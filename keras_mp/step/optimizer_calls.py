"""The calls of a `LossScaleOptimizer`.

RFC 293, "LossScaleOptimizer Overview": the four steps, by the user and by the optimizer.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import call_states as states
from keras_mp.step import gradients, unclipped
from keras_mp.step.call_states import UNNAMED
from keras_mp.step.calls import Calls
from keras_mp.step.gradient_state import GradientState
from keras_mp.support import host, messages


class OptimizerCalls(Calls):
    """The calls of a `LossScaleOptimizer`. A missing call is reported, and the step is made.

    If one thread made all calls of a step in one graph, or in eager, its own record is used and
    not the variable.
    """

    def begin(self, scaled_by: tf.Tensor, *, to_apply: bool) -> None:
        """Records that the loss is scaled. This begins a step.

        Args:
            scaled_by: float32 scalar tensor.
            to_apply: bool. True if `apply` unscales, False if `unscale` does.
        """
        mine = self._mine
        before = mine.facts if isinstance(mine.facts, int) else 0
        is_under_way = states.has_begun(before) and bool(before & states.SCALED)
        mine.is_interleaved = is_under_way and states.apply_unscales(before) != to_apply
        mine.applied = frozenset()
        mine.unscaled.clear()
        self._note(states.SCALED | (states.TO_APPLY if to_apply else 0))
        self._note_scale(scaled_by)

    def begin_by_hand(self, grads: Sequence[Any]) -> None:
        """Records that the user has multiplied the loss of these gradients by the loss scale."""
        self._refuse_results(grads, "apply_gradients(scaled=True)")
        self.begin(self._loss_scale(), to_apply=True)

    def scale(self, loss: Any, scaled_by: tf.Tensor | None = None) -> tf.Tensor:
        """Multiplies a loss by `scaled_by`, or by the current loss scale."""
        self._refuse_results([loss], "get_scaled_loss")
        scaled_by = self._loss_scale() if scaled_by is None else scaled_by
        scaled = gradients.scale_loss(loss, scaled_by)
        self._mine.losses, self._mine.scaled_by = (tf.convert_to_tensor(loss),), scaled_by
        self._remember_results([scaled])
        return scaled

    def unscale(self, grads: Sequence[Any], *, by_tape: bool = False) -> list[Any]:
        """Divides gradients by the loss scale of the step, unless the tape has done so."""
        self._refuse_results(grads, "get_unscaled_gradients")
        _, facts = self._so_far()
        unscaled = list(grads)
        if not by_tape:
            unscaled = gradients.unscale(grads, self._scale_of_step(facts))
        self._note(_ask(states.after_unscaling, facts))
        self._remember_results(unscaled)
        self._mine.unscaled[UNNAMED] = unclipped.remember(unscaled)
        return unscaled

    def unscale_early(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Unscales gradients that `apply` would unscale, before a wrapper sees them."""
        _, facts = self._so_far()
        is_scaled = _ask(states.apply_unscales, facts)
        if is_scaled is False:
            return grads
        divisor = tf.where(is_scaled, self._scale_of_step(facts), 1.0)
        self._note(_ask(states.after_unscaling_early, facts))
        unscaled = gradients.unscale(grads, divisor)
        self._mine.unscaled[UNNAMED] = unclipped.remember(unscaled)
        return unscaled

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[Callable[[tf.Tensor, bool], GradientState]]:
        """Context manager in which one call, `minimize`, makes a whole step.

        It may come between the calls of another step, which it does not affect.

        Yields:
            A function that returns the `GradientState`, given the factor of the loss, and whether
            the gradients are still scaled by it.
        """
        mine = self._mine
        kept = mine.losses, mine.scaled_by, mine.results
        try:
            yield lambda by, scaled: GradientState(scaled, by, lambda: not scaled, self.losses())
        finally:
            mine.losses, mine.scaled_by, mine.results = kept
            mine.applied = frozenset()

    @contextlib.contextmanager
    def apply(self, optimizer: Any, variables: Iterable[Any]) -> Iterator[GradientState]:
        """Context manager in which the step is made. Records it, and warns of missing calls.

        Args:
            optimizer: not used.
            variables: iterable of the variables that the gradients are applied to.
        """
        del optimizer
        mine, applied = self._mine, frozenset(id(v) for v in variables)
        goes_on = bool(mine.applied) and mine.applied.isdisjoint(applied)
        goes_on = goes_on and not mine.is_interleaved
        mine.applied = mine.applied | applied if goes_on else applied
        _, facts = self._so_far()
        scaled_by = self._scale_of_step(facts)
        if not isinstance(facts, int):
            self._warn_at_run_time(facts, goes_on)
        elif states.misses_a_call(facts, goes_on):
            messages.warn(states.missing_call(facts))
            mine.applied = frozenset()
        scaled = _ask(states.is_scaled, facts, goes_on)
        self._note(_ask(states.after_applying, facts, goes_on), ends=True)
        losses, mine.losses = self.losses(), ()
        is_divided = functools.partial(_ask, states.is_divided, facts, goes_on)
        yield GradientState(
            scaled, scaled_by, is_divided, losses, mine.unscaled.pop(UNNAMED, list)()
        )

    def _scale_of_step(self, facts: int | tf.Tensor) -> tf.Tensor:
        """Returns the factor by which the loss of this step was multiplied.

        The loss scale may have moved since then, by other steps or by a part of this one.
        """
        mine = self._mine
        if mine.scaled_by is not None and self._is_mine(host.current_graph()):
            return mine.scaled_by
        is_known = self._has_variables and _ask(states.knows_its_scale, facts)
        if not tf.is_tensor(is_known):
            return tf.convert_to_tensor(self._scaled_by) if is_known else self._loss_scale()
        return tf.where(is_known, self._scaled_by, self._loss_scale())

    def _remember_results(self, results: Iterable[Any]) -> None:
        self._mine.results = tuple(weakref.ref(r) for r in results if r is not None)

    def _refuse_results(self, values: Iterable[Any], method: str) -> None:
        """Refuses results of the last call, which would be scaled or unscaled twice."""
        results = {id(ref()) for ref in self._mine.results}
        if any(value is not None and id(value) in results for value in values):
            raise ValueError(
                f"{method}() was given values that are already scaled or unscaled: call it once. "
                f"Received: {values!r}"
            )

    def _warn_at_run_time(self, facts: tf.Tensor, goes_on: bool) -> None:
        if host.is_compiled_by_xla():
            self._warn_while_tracing(goes_on)
        self._reports.watch()
        self._reports.post(facts[tf.newaxis], when=_ask(states.is_news, facts, goes_on))

    def _warn_while_tracing(self, goes_on: bool) -> None:
        """Warns while tracing, since a compiled function cannot warn when it runs."""
        last = self._mine.facts
        if not isinstance(last, int) or states.has_begun(last):
            return
        with tf.init_scope():
            if not tf.executing_eagerly():
                return
            facts = self._read()
            if states.misses_a_call(facts, goes_on):
                messages.warn(states.missing_call(facts))
                self._facts.assign(states.after_applying(facts, goes_on), read_value=False)

    def _report(self, numbers: list[int], line: messages.Line | None) -> None:
        messages.warn(states.missing_call(numbers[0]), line)


def _ask(rule: Callable[..., Any], facts: int | tf.Tensor, *args: Any) -> Any:
    """Evaluates a function of a step's state, in Python or by a look-up in a graph."""
    if isinstance(facts, int):
        return rule(facts, *args)
    answers = tf.constant([rule(each, *args) for each in states.ALL_OF_ONE])
    answers = answers if answers.dtype == tf.bool else tf.cast(answers, tf.int64)
    return tf.gather(answers, facts)

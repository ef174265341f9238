"""The calls of a step: what Python knows of them, in each graph and in eager code.

They scale the loss, and unscale its gradients exactly once (RFC 293, "LossScaleOptimizer
Overview"). `OptimizerCalls` are the calls of a `LossScaleOptimizer`, and `GradScalerCalls` those of
a `GradScaler`. The table in `tests/step/test_contract.py` tells what follows from which calls.

A graph is built for one order of calls, which is known while it is traced. In ::

    gradients = compute()  # a function that calls `scale_loss`
    apply(gradients)       # a function that calls `apply_gradients`

the second function has not seen the first call. It goes by the last calls that were seen elsewhere
when it is traced. Only numbers, such as the factor of the loss, go from graph to graph in
variables.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step import replicas
from keras_mp.step.gradients import Gradient
from keras_mp.support import function_graphs, host


class GradientState(NamedTuple):
    """What is known about the gradients of a step.

    Attributes:
        scaled: bool. Whether they are still scaled.
        scaled_by: float32 scalar tensor, the factor of the loss. It is the current loss scale if no
            loss was scaled, and None if the optimizer scales no loss.
        is_divided: bool. Whether a call has divided the gradients by that factor.
        losses: the losses of this replica, as far as they are known.
        unclipped: the gradients of this replica as they were when they were unscaled, before the
            user may have clipped them; empty if they are unknown. A step empties the list.
            Otherwise the list would, in eager, keep them in memory while the step is made.
        was_finite: bool scalar tensor. An earlier verdict on gradients of this replica, which may
            have changed since; None if there was none.
        moved_scale: the loss scale that a tape has moved by them already; None if there is none.
    """

    scaled: bool = False
    scaled_by: tf.Tensor | None = None
    is_divided: bool = False
    losses: Sequence[tf.Tensor] = ()
    unclipped: list[Gradient] | tuple[()] = ()
    was_finite: tf.Tensor | None = None
    moved_scale: Any = None


class Page:
    """What one graph, or eager code, knows of the step that is under way.

    Attributes:
        step: a named tuple, which says whether it `has_begun`, and is `bare` without tensors.
        time: int. When the last call was noted, in calls; 0 if none was.
        replica: int or None. The number of the replica that makes the calls; None without replicas.
        is_eager: bool. Whether it is of eager code.
        before_branches: the number of operations that the graph had before the branches of a
            condition made calls, and the step and the time that were known then.
        inside: set of the pages of functions that the graph calls. It may call them again, without
            a trace.
        results: weak references to the results of the last call.
    """

    before_branches: tuple[int, Any, int] = (-1, None, 0)
    results: tuple["weakref.ref[Any]", ...] = ()

    def __init__(self, step: Any, time: int = 0) -> None:
        self.step, self.time, self.replica = step, time, replicas.number()
        self.is_eager = host.current_graph() is None
        self.inside: weakref.WeakSet[Page] = weakref.WeakSet()


class Notebook:
    """The `Page` of each graph, and of eager code.

    Attributes:
        is_shared: whether all threads make one step together in eager code. Otherwise each makes
            its own; replicas always do.

    Args:
        new: the step of which nothing is known.
    """

    is_shared = False

    def __init__(self, new: Any) -> None:
        self._new = new
        # Keeps the page of the last step alive: its thread may be gone when the step goes on.
        self._last: Page | None = None
        self._all: list[weakref.ref[Page]] = []
        self._times = itertools.count(1)
        self._keras_mp_notes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def page(self) -> Page:
        """Returns the page of the graph that is being built, or of eager code.

        A graph in another one begins with what is known there.
        """
        graph = host.current_graph()
        if graph is None and replicas.number() is None and not self.is_shared:
            return self._of(threading.current_thread())
        # Replicas have a new thread in each `run`.
        return self._of(self if graph is None else graph)

    def current(self, prefers: Callable[[Any], bool] = lambda step: True) -> Page:
        """Returns the page that a call goes by.

        Args:
            prefers: function that returns whether the call could be made in a step that was begun.
                Such steps are preferred to others. Defaults to any step.

        Returns:
            The page of this graph or of eager code, unless nothing was called here: then that where
            a step was begun last. A graph whose step is over goes by the functions that it calls.
            If the tensors of a page cannot be used here, it is a new page without them, whose time
            is 0.
        """
        own = self.page()
        if own.step.has_begun() and (prefers(own.step) or not own.is_eager):
            return own
        living = [page for refer in list(self._all) if (page := refer()) is not None]
        if own.time and not own.is_eager:
            living = list(own.inside)
        begun = [page for page in living if page.step.has_begun()]
        if own.replica is not None:
            begun = [page for page in begun if page.replica in (own.replica, None)]
        found = max(begun, key=lambda each: (prefers(each.step), each.time), default=own)
        is_here = found is own or (found.is_eager and own.is_eager)
        return found if is_here else Page(found.step.bare())

    def note(self, step: Any) -> None:
        """Notes a step after a call, here and in the graphs around.

        What the body of a loop does, or a function that is called, is done where it is called.
        """
        page, graph = self.page(), host.current_graph()
        page.step, page.time = step, next(self._times)
        if page.is_eager:
            self._last = page
        while (graph := _function_around(graph)) is not None:
            around = self._of(graph)
            around.step, around.time = step.bare(), page.time

    def forget(self) -> None:
        """Forgets the step of eager code on all replicas."""
        self._keras_mp_notes.clear()

    def _of(self, owner: Any) -> Page:
        """Returns the page that a graph, a thread or this notebook has, of this replica.

        The owner itself has it, so that it keeps no graph alive.
        """
        if not hasattr(owner, "_keras_mp_notes"):
            owner._keras_mp_notes = weakref.WeakKeyDictionary()
        of_replicas, replica = owner._keras_mp_notes.setdefault(self, {}), replicas.number()
        if replica not in of_replicas:
            page = of_replicas.setdefault(replica, Page(*self._known_around(owner)))
            self._all.append(weakref.ref(page, self._all.remove))
            is_called = function_graphs.is_trace(owner)
            while is_called and (owner := _function_around(owner)) is not None:
                self._of(owner).inside.add(page)
        return of_replicas[replica]

    def _known_around(self, owner: Any) -> tuple[Any, int]:
        """Returns the step that is known where a graph begins, and its time.

        Of the branches of a condition, one runs: each goes by what was known before.
        """
        graph = _function_around(owner)
        if graph is None:
            return self._new, 0
        around, size = self._of(graph), len(graph.get_operations())
        known = around.step, around.time if around.step.has_begun() else 0
        if not function_graphs.is_branch(owner):
            return known
        if around.before_branches[0] != size:
            around.before_branches = size, *known
        return around.before_branches[1:]


class Calls(Notebook):
    """The calls of a step, and what is known of them.

    Args:
        loss_scale: function that returns the current loss scale, a float32 scalar tensor.
        scales: bool. Whether these calls scale the loss. Otherwise they keep the losses, return
            what they are given, and find no call wrong or missing. Defaults to True.
    """

    # The step of which nothing is known.
    new: Any

    def __init__(self, loss_scale: Callable[[], tf.Tensor], scales: bool = True) -> None:
        super().__init__(self.new)
        self._loss_scale, self.scales = loss_scale, scales
        # The factor of the losses, for functions that go on with a step that was begun elsewhere.
        # A graph of TensorFlow 1 would save the variable.
        self._scaled_by: Any = None
        if scales and not host.in_v1_graph():
            self._scaled_by = host.local_variable("scaled_by", 1.0, tf.float32)

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {} if self._scaled_by is None else {"scaled_by": self._scaled_by}

    def _scale_of(self, step: Any) -> tf.Tensor:
        """Returns the factor by which the losses of a step were multiplied.

        The loss scale may have moved since then, by other steps or by another part of this one.
        """
        if step.scaled_by is not None:
            return step.scaled_by
        if self._scaled_by is None or host.in_v1_graph():
            return self._loss_scale()
        return tf.convert_to_tensor(self._scaled_by)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._loss_scale, self.scales)


def _function_around(graph: Any) -> Any:
    outer = getattr(graph, "outer_graph", None)
    return outer if function_graphs.is_of_function(outer) else None

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

import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import tensorflow as tf

from keras_mp.step import replicas
from keras_mp.step.gradients import Gradient
from keras_mp.support import function_graphs, host

LossScaleValue = Callable[[], tf.Tensor]


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


class Notes:
    """What is known of the step that is under way in one graph, or in eager code.

    Attributes:
        time: int. When the last call was noted, in calls; 0 if none was.
        is_eager: bool. Whether they are of eager code.
        is_elsewhere: bool. Whether they are of code whose tensors cannot be used here.
        replica: int or None. The number of the replica that makes the calls; None without replicas.
        losses: the losses of the step.
        scaled_by: the factor of the losses, a float32 scalar tensor; None if it is not known here.
        before_branches: what was known before the branches of a condition made calls, and the
            number of operations that the graph had then.
    """

    time = 0
    is_eager = is_elsewhere = False
    replica: int | None = None
    losses: tuple[tf.Tensor, ...] = ()
    scaled_by: tf.Tensor | None = None
    before_branches: tuple[int, dict[str, Any]] = (-1, {})

    # The attributes that have tensors.
    tensors: tuple[str, ...] = ("losses", "scaled_by")

    def has_begun(self) -> bool:
        """Whether a step has begun, and is not over."""
        return False

    def drop_tensors(self) -> None:
        """Forgets the tensors."""
        for name in self.tensors:
            vars(self).pop(name, None)


N = TypeVar("N", bound=Notes)


class Notebook(Generic[N]):
    """The `Notes` of each graph, and of eager code.

    Attributes:
        new: the class of the notes.
        is_shared: whether all threads make one step together in eager code. Otherwise each makes
            its own; replicas always do.
    """

    new: Callable[[], N]
    is_shared = False

    def __init__(self) -> None:
        # The last notes of a thread, which may be gone when its step goes on.
        self._last: N | None = None
        self._all: list[weakref.ref[N]] = []
        self._times = itertools.count(1)
        self._keras_mp_notes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def notes(self) -> N:
        """Returns the notes of the graph that is being built, or of eager code."""
        graph = host.current_graph()
        if graph is None and replicas.number() is None and not self.is_shared:
            return self._of(threading.current_thread())
        # Replicas have a new thread in each `run`.
        return self._of(self if graph is None else graph)

    def current(self, prefers: Callable[[N], bool] = lambda notes: True) -> N:
        """Returns the notes that a call goes by.

        Args:
            prefers: function that returns whether the call could be made where a step was begun.
                Such steps are preferred to others. Defaults to any step.

        Returns:
            The notes of this graph or of eager code, unless nothing was called here: then of a
            graph around this one, or else those where a step was begun last, without tensors that
            cannot be used here.
        """
        own = self.notes()
        graph: Any = host.current_graph()
        if (own.has_begun() and prefers(own)) or (graph is not None and own.time):
            return own
        while _has_function_around(graph):
            around = self._around(graph)
            if around.has_begun():
                return around
            graph = graph.outer_graph  # pyright: ignore[reportOptionalMemberAccess]
        living = [notes for notes in [refer() for refer in self._all] if notes is not None]
        begun = [
            each
            for each in living
            if each.has_begun()
            and (each.replica == own.replica or None in (each.replica, own.replica))
        ]
        if not begun:
            return own
        found = max(begun, key=lambda each: (prefers(each), each.time))
        if not (found.is_eager and tf.executing_eagerly()):
            found = copy.copy(found)
            found.is_elsewhere = True
            found.drop_tensors()
        return found

    def note(self, **known: Any) -> None:
        """Notes what is known after a call, here and in the graphs around.

        What the body of a loop does, or a function that is called, is done where it is called.
        """
        own, time, graph = self.notes(), next(self._times), host.current_graph()
        vars(own).update(known, time=time)
        if own.is_eager:
            self._last = own
        while _has_function_around(graph):
            around, count = self._of(graph.outer_graph), _size(graph.outer_graph)
            if function_graphs.is_branch(graph) and around.before_branches[0] != count:
                around.before_branches = count, dict(vars(around))
            vars(around).update(known, time=time)
            around.drop_tensors()
            graph = graph.outer_graph

    def _around(self, graph: Any) -> N:
        """Returns the notes of the graph around one.

        Of the branches of a condition, one runs: each goes by what was known before.
        """
        around = self._of(graph.outer_graph)
        count, known = around.before_branches
        if not function_graphs.is_branch(graph) or count != _size(graph.outer_graph):
            return around
        before = self.new()
        vars(before).update(known)
        return before

    def forget(self) -> None:
        """Forgets the step of eager code on all replicas."""
        self._keras_mp_notes.clear()

    def _of(self, owner: Any) -> N:
        """Returns the notes that a graph, a thread or this notebook has, of this replica.

        The owner itself has them, so that they keep no graph alive.
        """
        if not hasattr(owner, "_keras_mp_notes"):
            owner._keras_mp_notes = weakref.WeakKeyDictionary()
        of_replicas = owner._keras_mp_notes.setdefault(self, {})
        replica = replicas.number()
        if replica not in of_replicas:
            notes = of_replicas.setdefault(replica, self.new())
            notes.replica, notes.is_eager = replica, host.current_graph() is None
            living = (refer for refer in self._all if refer() is not None)
            self._all = [*living, weakref.ref(notes)]
        return of_replicas[replica]


class Calls(Notebook[N]):
    """The calls of a step, and what is known of them.

    Args:
        loss_scale: function that returns the current loss scale, a float32 scalar tensor.
        scales: bool. Whether these calls scale the loss. Otherwise they keep the losses, return
            what they are given, and find no call wrong or missing. Defaults to True.
    """

    def __init__(self, loss_scale: LossScaleValue, scales: bool = True) -> None:
        super().__init__()
        self._loss_scale, self.scales = loss_scale, scales
        # The factor of the losses, for functions that go on with a step that was begun elsewhere.
        # A graph of TensorFlow 1 would save the variable.
        self._scaled_by: Any = None
        if scales and not host.in_v1_graph():
            self._scaled_by = host.local_variable("scaled_by", 1.0, tf.float32)

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        return {} if self._scaled_by is None else {"scaled_by": self._scaled_by}

    def _scale_of(self, step: N) -> tf.Tensor:
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


def _has_function_around(graph: Any) -> bool:
    return function_graphs.is_of_function(graph) and function_graphs.is_of_function(
        graph.outer_graph
    )


def _size(graph: Any) -> int:
    return len(graph.get_operations())

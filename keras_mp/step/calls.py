"""The record of the calls of a step, by which gradients are scaled and unscaled exactly once.

`call_states` has the states. This module stores a state: in Python if Python runs with the step,
which is in eager and within one graph; else in a variable.

The variable is needed if gradients come from another `tf.function`, whose Python code ran long ago.
In ::

    gradients = compute()  # a function that calls `scale_loss`
    apply(gradients)       # a function that calls `apply_gradients`

both are traced once. Later a function that also calls `get_unscaled_gradients` may replace
`compute`. Then Python, which ran when `apply` was traced, does not know if the gradients are scaled
(`test_the_dialect_may_change_between_functions_traced_once`).
"""

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.step import call_states as states
from keras_mp.step.gradient_state import GradientState
from keras_mp.support import host, messages

LossScaleValue = Callable[[], tf.Tensor]


class _CallState(threading.local):
    """The calls of one thread. MirroredStrategy runs each replica in a thread of its own.

    Attributes:
        graph: weak reference to the graph of the last call; None in eager.
        facts: the state after that call: an int, or a tensor of that graph; None if only the
            variable has it.
        certain: the facts that are true for every value of the tensor.
        uses: the number of operations of the graph that took the variable then.
        scaled_by: the factor of the losses, a tensor of that graph.
        losses: the losses that were scaled.
        unscaled: by the number of an optimizer, a function that returns its gradients as they were
            when they were unscaled.
        applied: ids of the variables of the step so far.
        is_interleaved: whether the step began while another one was under way that unscales at
            the other call (`apply` or `unscale`).
        results: weak references to the results of the last call.
    """

    graph: weakref.ref[Any] | None = None
    facts: int | tf.Tensor | None = 0
    certain = 0
    uses = 0
    scaled_by: tf.Tensor | None = None
    losses: tuple[tf.Tensor, ...] = ()
    applied: frozenset[int] = frozenset()
    is_interleaved = False
    results: tuple[weakref.ref[Any], ...] = ()

    def __init__(self) -> None:
        self.unscaled: dict[int, Callable[[], list[Any]]] = {}


class Calls:
    """The calls of the step that is under way, recorded by thread, by graph and in a variable.

    Args:
        loss_scale: function that returns the current loss scale, a float32 scalar tensor.
    """

    # The length of a report.
    _report_size = 1
    # Whether calls are also recorded in variables, for functions that run without Python.
    _needs_variables = True
    # Whether all threads make one step together. Otherwise each makes its own.
    _is_shared = False

    def __init__(self, loss_scale: LossScaleValue) -> None:
        self._loss_scale = loss_scale
        self._mine = _CallState()
        # A graph of TensorFlow 1 saves all variables that it has, and makes its calls once.
        self._has_variables = self._needs_variables and not host.in_v1_graph()
        if self._has_variables:
            self._facts = host.local_variable("facts", 0)
            self._scaled_by = host.local_variable("scaled_by", 1.0, tf.float32)
            self._reports = host.HostCallback(self._report, size=self._report_size)
        # Whether a function was traced that reads the facts from the variable. Then eager code
        # reads them there too, since it cannot know when that function runs.
        self._are_looked_up = False
        # Graphs in which calls were made that have not led to the end of a step.
        self._open_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._latest_thread: int | None = None

    def losses(self) -> list[tf.Tensor]:
        """Returns the unscaled losses of this step, as far as they are known here."""
        return [loss for loss in self._mine.losses if _is_of_this_graph(loss)]

    def callback(self) -> host.HostCallback | None:
        """Returns the callback that reports wrong calls in graphs; None if there is none."""
        return self._reports if self._has_variables else None

    def collect_reports(self) -> None:
        """Gives the warnings of functions that XLA has compiled, which cannot call Python."""
        if self._has_variables:
            self._reports.collect()

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that are not part of checkpoints, by name."""
        if not self._has_variables:
            return {}
        return {
            "facts": self._facts,
            "scaled_by": self._scaled_by,
            "call_report": self._reports.buffer,
        }

    def _so_far(self) -> tuple[int, Any]:
        """Returns the certain facts and all facts, a tensor if only the variable has them."""
        mine, graph = self._mine, host.current_graph()
        if self._is_mine(graph):
            return mine.certain, mine.facts
        if not self._are_variables_in_use():
            return 0, 0
        if graph is None:
            facts = self._read()
            return facts, facts
        self._are_looked_up = True
        return 0, tf.convert_to_tensor(self._facts)

    def _are_variables_in_use(self) -> bool:
        return self._has_variables and not host.in_v1_graph()

    def _is_mine(self, graph: tf.Graph) -> bool:
        """Whether this thread made the last call here, and no function may have made one since."""
        mine = self._mine
        # A dead reference to a graph does not mean eager code.
        was_here = mine.graph is None if graph is None else mine.graph and mine.graph() is graph
        if mine.facts is None or not was_here:
            return False
        if graph is not None:
            # A function may have been called that is not traced again.
            return mine.uses == self._uses(graph)
        if self._is_shared and self._latest_thread != threading.get_ident():
            return False
        has_begun = isinstance(mine.facts, int) and states.has_begun(mine.facts)
        return has_begun and not self._are_looked_up and not self._open_graphs

    def _uses(self, graph: tf.Graph) -> int:
        """Returns how many operations of a graph take the variable of the facts; calls do."""
        if tf.distribute.in_cross_replica_context() or not self._are_variables_in_use():
            return -1
        handle = self._facts.handle
        inside = [inner for outer, inner in graph.captures if outer is handle]
        return sum(len(tensor.consumers()) for tensor in inside)

    def _read(self) -> int:
        return int(tf.convert_to_tensor(self._facts))

    def _note(
        self, facts: int | tf.Tensor, certain: int | None = None, *, ends: bool = False
    ) -> None:
        """Records the state after a call.

        Args:
            facts: int, or int64 scalar tensor.
            certain: int. The facts that are true for every value of the tensor. None drops the
                tensor, which would keep its graph alive; then only the variable has the state.
            ends: bool. Whether the call ends a step, so that no step stays open in its graph.
        """
        mine, graph = self._mine, host.current_graph()
        if graph is not None:
            (self._open_graphs.discard if ends else self._open_graphs.add)(graph)
        if self._are_variables_in_use():
            self._facts.assign(facts, read_value=False)
        self._latest_thread = threading.get_ident()
        mine.facts = None if tf.is_tensor(facts) and certain is None else facts
        mine.certain = facts if isinstance(facts, int) else certain or 0
        mine.graph = None if graph is None else weakref.ref(graph)
        mine.uses = 0 if graph is None else self._uses(graph)

    def _note_scale(self, scaled_by: tf.Tensor) -> None:
        self._mine.scaled_by = scaled_by
        if self._are_variables_in_use():
            self._scaled_by.assign(scaled_by, read_value=False)

    def _report(self, numbers: list[int], line: messages.Line | None) -> None:
        """Warns of a wrong call, given the numbers that were posted."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Calls":
        return type(self)(copy.deepcopy(self._loss_scale, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._loss_scale,)


class NoCalls(Calls):
    """Calls that do nothing, for an optimizer that scales no loss or records calls itself."""

    _needs_variables = False

    def begin(self, scaled_by: tf.Tensor, *, to_apply: bool) -> None:
        """Does nothing."""

    def begin_by_hand(self, grads: Sequence[Any]) -> None:
        """Does nothing: the loss scale is 1."""

    def by_tape(self) -> None:
        """Does nothing."""

    def scale(self, losses: Any, scaled_by: tf.Tensor | None = None) -> Any:
        """Returns the loss, or the losses, as they are."""
        self._mine.losses = tuple(each for each in tf.nest.flatten(losses) if tf.is_tensor(each))
        return losses

    def unscale(self, grads: list[Any], *details: Any, by_tape: bool = False) -> list[Any]:
        """Returns the gradients as they are."""
        return grads

    def unscale_early(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Returns the gradients as they are."""
        return grads

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[Callable[[tf.Tensor, bool], GradientState]]:
        """Yields a function that returns the state of gradients that are not scaled."""
        yield lambda scaled_by, scaled: GradientState(losses=self.losses())

    @contextlib.contextmanager
    def apply(self, optimizer: Any, variables: Iterable[Any]) -> Iterator[GradientState]:
        """Yields the state of gradients that are not scaled."""
        yield GradientState(losses=self.losses())

    def update(self) -> tuple[bool, Callable[[], None]]:
        """Ends the step, whatever was called."""
        return True, lambda: None


def _is_of_this_graph(tensor: tf.Tensor | None) -> bool:
    return tensor is not None and getattr(tensor, "graph", None) is host.current_graph()

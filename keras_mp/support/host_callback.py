"""Calls Python from inside of a graph, for rare events.

Where no event happens it costs nothing, except in functions around one that XLA compiles, which
count their calls in the host's memory. This module needs TensorFlow only.
"""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_mp.support import function_graphs, host, messages, new_variables

# A collection in a graph that XLA compiles: the callbacks whose buffers the graph around it looks
# into, with their replicas.
_LOOKED_INTO = "keras_mp_looked_into"
_LONGEST_PERIOD = 50


class HostCallback:
    """Carries a few numbers from a graph to a Python function.

    Eager code and ordinary graphs call the function at once. If the event can be foreseen, graphs
    instead leave the numbers in a variable, the buffer, and look into it when the event may have
    happened. A graph that XLA compiles cannot call Python, and leaves all numbers in the buffer.
    The function around it, if there is one (as in `Model.fit` of Keras 3), looks there before its
    calls 1, 2, 4, 8, 16 and 32, and then before each 50th. `collect` looks as well. On a GPU, each
    look is a wait.

    Attributes:
        buffer: int64 variable. The first element is 1 if numbers were left, else 0; the numbers
            follow.

    Args:
        read: function that takes the numbers, a list of int, and the line of the program that they
            are about, or None if XLA compiled the function.
        size: int. The number of numbers.
        beside: another callback, or None (the default). The function around a compiled one looks
            into both buffers at once.
        is_urgent: function that returns whether to look before each call. By default it never is.
        foresee: function that takes the numbers of a `post`, and returns after how many more posts
            the event may happen. By default no event is foreseen.
    """

    def __init__(
        self,
        read: Callable[[list[int], messages.Line | None], None],
        *,
        size: int,
        beside: "HostCallback | None" = None,
        is_urgent: Callable[[], bool] | None = None,
        foresee: Callable[[list[int]], int] | None = None,
    ) -> None:
        self._read, self._is_urgent, self._foresee = read, is_urgent, foresee
        # By replica: when the function around a compiled one looks, and when `post` does.
        self._turns: dict[int | None, _Turns] = {}
        self._turns_of_posts: dict[int | None, _Turns] = {}
        self.buffer = host.local_variable("buffer", [0] * (1 + size))
        self.is_watched = False
        self._together: list[HostCallback] = beside._together if beside is not None else []
        self._together.append(self)

    def post(self, numbers: tf.Tensor, when: tf.Tensor) -> None:
        """Sends numbers if the event has happened.

        Args:
            numbers: int64 tensor of shape [size].
            when: bool scalar tensor. Whether it has happened.
        """
        is_compiled = host.is_compiled_by_xla()
        if not is_compiled and (self._foresee is None or tf.executing_eagerly()):
            tf.cond(
                when, lambda: self._call_with_line(numbers, messages.users_line()), lambda: None
            )
            return
        # A selection: XLA would turn a branch that calls no Python into one anyway.
        left = tf.concat([[1], numbers], 0)
        self.buffer.assign(tf.where(when, left, self.buffer), read_value=False)
        if not is_compiled:
            self.is_watched = True
            look = functools.partial(self._look, numbers, messages.users_line())
            _turns_of(self._turns_of_posts).take(look)

    def look_next_time(self) -> None:
        """Makes the next `post` of a graph look, whatever was foreseen."""
        with tf.init_scope():
            for turns in self._turns_of_posts.values():
                turns.left.assign(tf.ones([], tf.int64), read_value=False)

    def watch(self) -> None:
        """Prepares for numbers that `post` leaves in the buffer.

        Called outside of the branch.
        """
        if not host.is_compiled_by_xla():
            return
        for each in self._together:
            each.is_watched = True
        inner = tf.compat.v1.get_default_graph()
        graph = inner.outer_graph
        while function_graphs.is_of_function(graph):
            # The graph that calls a compiled function is itself marked as compiled during the
            # trace; `control_dependencies(None)` takes the mark away.
            with graph.as_default(), tf.control_dependencies(None):
                if not host.is_compiled_by_xla():
                    replica = _replica_id()
                    looked_into = inner.get_collection_ref(_LOOKED_INTO)
                    if (self, replica) not in looked_into:
                        looked_into += [(each, replica) for each in self._together]
                        self._look_seldom()
                    return
            inner, graph = graph, graph.outer_graph

    def _look_seldom(self) -> None:
        if any(each._is_urgent is not None and each._is_urgent() for each in self._together):
            _look_into(self._together)
            return
        _turns_of(self._turns).take(functools.partial(_deliver, self._together))

    def variables(self, name: str) -> dict[str, tf.Variable]:
        """Returns the variables, by names that begin with `name`."""
        of_replicas = {
            f"{name}_{which}_{kind}{replica or 0}": variable
            for kind, of_kind in (("", self._turns), ("post_", self._turns_of_posts))
            for replica, turns in of_kind.items()
            for which, variable in vars(turns).items()
        }
        return {name: self.buffer, **of_replicas}

    def collect(self) -> None:
        """Delivers the numbers in the buffer.

        Costs nothing if no function leaves any there.
        """
        if self.is_watched and tf.executing_eagerly():
            _look_into([self])

    def _call_with_line(self, numbers: tf.Tensor, line: messages.Line) -> None:
        _call_python(lambda received: self._read(received, line), numbers)

    def _look(self, numbers: tf.Tensor, line: messages.Line) -> tf.Tensor:
        """Delivers what was left.

        Returns after how many more posts to look again.
        """
        left = tf.convert_to_tensor(self.buffer)
        self.buffer.assign(tf.zeros_like(left), read_value=False)

        def look(left: tf.Tensor, numbers: tf.Tensor) -> int:
            is_left, *event = left.numpy().tolist()
            if is_left:
                self._read(event, line)
            assert self._foresee is not None
            return self._foresee(numbers.numpy().tolist())

        return tf.ensure_shape(tf.py_function(look, [left, numbers], tf.int64), [])

    def _deliver(self, left: tf.Tensor) -> None:
        # This is an operation of the graph, so it runs before other numbers are left there.
        self.buffer.assign(tf.zeros_like(left), read_value=False)

        def read(received: list[int]) -> None:
            is_left, *numbers = received
            if is_left:
                self._read(numbers, None)

        _call_python(read, left)


class _Turns:
    """Decides, in the host's memory, when it is time to do something again.

    Attributes:
        left: int64 variable. The number of calls until the next time.
        period: int64 variable. The number of calls from the next time to the one after.
    """

    def __init__(self) -> None:
        def variable(name: str) -> tf.Variable:
            with tf.device("CPU:0"):
                return tf.Variable(tf.ones([], tf.int64), trainable=False, name=name)

        # A strategy would place them on the devices of the replicas.
        self.left, self.period = new_variables.outside_of_functions(
            lambda: (variable("left"), variable("period"))
        )

    def take(self, act: Callable[[], tf.Tensor | None]) -> None:
        """Calls a function if it is time.

        Args:
            act: function that returns the number of calls until the next time, an int64 scalar
                tensor; or None for twice as many as before, up to `_LONGEST_PERIOD`.
        """

        def take() -> None:
            left = act()
            with tf.device("CPU:0"):
                if left is None:
                    left = tf.convert_to_tensor(self.period)
                    longer = tf.minimum(2 * left, _LONGEST_PERIOD)
                    self.period.assign(longer, read_value=False)
                self.left.assign(left, read_value=False)

        with tf.device("CPU:0"):
            is_time = self.left.assign_sub(1) <= 0

        tf.cond(is_time, take, lambda: None)


def _turns_of(replicas: dict[int | None, _Turns]) -> _Turns:
    """Returns the turns of the replica that is traced."""
    replica = _replica_id()
    if replica not in replicas:
        replicas[replica] = _Turns()
    return replicas[replica]


def _look_into(callbacks: Sequence[HostCallback]) -> None:
    are_left = [tf.not_equal(tf.convert_to_tensor(each.buffer)[0], 0) for each in callbacks]
    is_any_left = functools.reduce(tf.logical_or, are_left)
    tf.cond(is_any_left, lambda: _deliver(callbacks), lambda: None)


def _deliver(callbacks: Sequence[HostCallback]) -> None:
    for each in callbacks:
        each._deliver(tf.convert_to_tensor(each.buffer))


def _replica_id() -> int | None:
    """Returns the number of the replica that is traced, or None without replicas."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return None
    number = tf.get_static_value(tf.convert_to_tensor(context.replica_id_in_sync_group))
    return None if number is None else int(number)


def _call_python(function: Callable[[list[int]], None], numbers: tf.Tensor) -> None:
    def call(numbers: tf.Tensor) -> None:
        function(numbers.numpy().tolist())

    if tf.executing_eagerly():
        call(numbers)
    else:
        tf.py_function(call, [numbers], [])

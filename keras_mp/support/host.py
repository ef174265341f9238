"""Calls of Python from inside of a graph, for rare events.

This module needs TensorFlow only. Without an event it costs nothing, except for one comparison in
each step in functions around one that XLA compiles.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.support import messages, op_callbacks

# The collection, in a graph that XLA compiles, of the callbacks that the graph around it looks
# into, with their replicas.
_LOOKED_INTO = "keras_mp_looked_into"


class HostCallback:
    """Carries a few numbers from a graph to a Python function.

    Eager code and ordinary graphs call the function at once. A graph that XLA compiles cannot call
    Python, so it leaves the numbers in a variable, the buffer. The function around the compiled
    one, if there is one (as in `Model.fit` of Keras 3), looks there the next time it runs, and so
    does `collect`.

    Attributes:
        buffer: int64 variable. First 1 if numbers were left, else 0; then the numbers.

    Args:
        read: function that takes the numbers, a list of int, and the line of the program that they
            are about, or None if XLA compiled the function.
        size: int. The number of numbers.
        beside: another callback, or None (the default). The function around a compiled one looks
            into both at once, since it waits for each look on a GPU.
    """

    def __init__(
        self,
        read: Callable[[list[int], messages.Line | None], None],
        *,
        size: int,
        beside: "HostCallback | None" = None,
    ) -> None:
        self._read = read
        self.buffer = local_variable("buffer", [0] * (1 + size))
        self._is_watched = False
        self._together: list[HostCallback] = beside._together if beside is not None else []
        self._together.append(self)

    def post(self, numbers: tf.Tensor, when: tf.Tensor) -> None:
        """Sends numbers if the event has happened.

        Args:
            numbers: int64 tensor of shape [size].
            when: bool scalar tensor. Whether it has happened.
        """
        if is_compiled_by_xla():
            # A selection, since XLA would make one of a branch that calls no Python.
            left = tf.concat([[1], numbers], 0)
            self.buffer.assign(tf.where(when, left, self.buffer), read_value=False)
        else:
            tf.cond(when, lambda: self._tell(numbers, messages.users_line()), lambda: None)

    def watch(self) -> None:
        """Prepares for numbers that `post` leaves in the buffer. Called outside of the branch."""
        if not is_compiled_by_xla():
            return
        self._is_watched = True
        inner = tf.compat.v1.get_default_graph()
        graph = inner.outer_graph
        while isinstance(graph, tf.__internal__.FuncGraph):
            # The graph that calls a compiled function is marked as compiled meanwhile;
            # `control_dependencies(None)` takes the mark away.
            with graph.as_default(), tf.control_dependencies(None):
                if not is_compiled_by_xla():
                    replica = _replica_id()
                    looked_into = inner.get_collection_ref(_LOOKED_INTO)
                    if (self, replica) not in looked_into:
                        looked_into += [(each, replica) for each in self._together]
                        _look_into(self._together)
                    return
            inner, graph = graph, graph.outer_graph

    def collect(self) -> None:
        """Delivers the numbers in the buffer. Costs nothing if XLA has compiled no function."""
        if self._is_watched and tf.executing_eagerly():
            _look_into([self])

    def _tell(self, numbers: tf.Tensor, line: messages.Line) -> None:
        _call_python(lambda received: self._read(received, line), numbers)

    def _deliver(self, left: tf.Tensor) -> None:
        # In the graph, so that it runs before other numbers are left there.
        self.buffer.assign(tf.zeros_like(left), read_value=False)

        def read(received: list[int]) -> None:
            is_left, *numbers = received
            if is_left:
                self._read(numbers, None)

        _call_python(read, left)


def _look_into(callbacks: Sequence[HostCallback]) -> None:
    lefts = [tf.convert_to_tensor(each.buffer) for each in callbacks]

    def deliver() -> None:
        for each, left in zip(callbacks, lefts, strict=True):
            each._deliver(left)

    is_any_left = functools.reduce(tf.logical_or, [tf.not_equal(left[0], 0) for left in lefts])
    tf.cond(is_any_left, deliver, lambda: None)


def _replica_id() -> int | None:
    """Returns the number of the replica that is traced; None without replicas."""
    context = tf.distribute.get_replica_context()
    return context and tf.get_static_value(context.replica_id_in_sync_group)


def _call_python(function: Callable[[list[int]], None], numbers: tf.Tensor) -> None:
    def call(numbers: tf.Tensor) -> None:
        function(numbers.numpy().tolist())

    if tf.executing_eagerly():
        call(numbers)
    else:
        tf.py_function(call, [numbers], [])


def local_variable(name: str, value: Any, dtype: tf.DType = tf.int64) -> tf.Variable:
    """Makes a variable that each replica reads and writes for itself.

    Args:
        name: str.
        value: number or list of numbers. The initial value.
        dtype: DType. Defaults to int64.
    """
    with tf.init_scope():
        return tf.Variable(
            value,
            dtype=dtype,
            name=name,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )


def as_one_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes one operation of a function, since even a branch that is not taken costs by operation.

    Args:
        function: function of structures of tensors, which may assign to variables.

    Returns:
        The same in eager; in a graph, a function that makes one operation each time it is called.
    """
    return function if tf.executing_eagerly() else _one_operation(function)


def shared_operation(
    function: Callable[..., Any], signature: Sequence[tf.TensorSpec] | None = None
) -> Callable[..., Any]:
    """Decorates a function as `as_one_operation` does, for all callers: it is traced once.

    A trace for arguments of some shapes and dtypes is kept for as long as the process runs.

    Args:
        function: function of structures of tensors, which depends on nothing else except whether
            XLA compiles it.
        signature: sequence of TensorSpec, one for each argument, which is traced in place of the
            arguments' own shapes and dtypes. Defaults to none.

    Returns:
        The decorated function.
    """
    operations = [_one_operation(function, signature) for _ in range(2)]

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if tf.executing_eagerly():
            return function(*args)
        # Observers of the first caller would stay in the trace that all others run.
        with op_callbacks.unobserved():
            return operations[is_compiled_by_xla()](*args)

    return call


def _one_operation(
    function: Callable[..., Any], signature: Sequence[tf.TensorSpec] | None = None
) -> Callable[..., Any]:
    return tf.function(
        function,
        input_signature=signature,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )


def is_compiled_by_xla() -> bool:
    """Whether XLA compiles the function that is being traced."""
    return tf.__internal__.get_enclosing_xla_context() is not None


def in_v1_graph() -> bool:
    """Whether a graph of TensorFlow 1 is being built, which a session runs."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def current_graph() -> Any:
    """Returns the graph that is being built, or None in eager."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

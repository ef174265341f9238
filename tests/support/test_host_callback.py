"""From a graph to Python: at once where that is possible, else the next time somebody looks."""

import pytest
import tensorflow as tf

from keras_mp.support.host_callback import HostCallback
from tests.common import once

pytestmark = once


class Reader:
    def __init__(self, beside=None, is_urgent=True):
        self.numbers, self.lines = [], []
        self.mailbox = HostCallback(
            self.read, size=1, beside=beside and beside.mailbox, is_urgent=lambda: is_urgent
        )

    def read(self, numbers, line):
        self.numbers += numbers
        self.lines.append(line)

    def step(self, number):
        """Sends a number that is not zero."""
        self.mailbox.watch()
        self.mailbox.post(number[tf.newaxis], when=tf.not_equal(number, 0))


def test_eager():
    reader = Reader()
    for number in (0, 3, 0, 4):
        reader.step(tf.constant(number, tf.int64))
    assert reader.numbers == [3, 4]


def test_function():
    reader = Reader()
    function = tf.function(reader.step)
    for number in (0, 3, 0, 4):
        function(tf.constant(number, tf.int64))
    assert reader.numbers == [3, 4]
    assert {line.file for line in reader.lines} == {__file__}


def test_a_function_that_has_nothing_to_say_runs_no_python():
    function = tf.function(Reader().step)
    graph = function.get_concrete_function(tf.constant(0, tf.int64)).graph
    assert "EagerPyFunc" not in {op.type for op in graph.get_operations()}
    assert "EagerPyFunc" in {
        n.op for f in graph.as_graph_def().library.function for n in f.node_def
    }


def test_what_xla_compiles_has_no_branch():
    function = tf.function(Reader().step, jit_compile=True)
    graph = function.get_concrete_function(tf.constant(0, tf.int64)).graph
    assert not {"If", "StatelessIf"} & {op.type for op in graph.get_operations()}


def test_two_are_looked_into_at_once():
    """On a GPU, the host waits for each look."""
    first = Reader()
    second = Reader(beside=first)

    @tf.function(jit_compile=True)
    def compiled(number):
        first.step(number)
        second.step(number - 1)
        first.mailbox.watch()

    around = tf.function(lambda number: compiled(number))
    graph = around.get_concrete_function(tf.TensorSpec([], tf.int64)).graph
    assert [op.type for op in graph.get_operations()].count("If") == 1
    for number in (0, 1, 2, 1, 0):
        around(tf.constant(number, tf.int64))
    for each in (first, second):
        each.mailbox.collect()
    assert first.numbers == [1, 2, 1]
    assert second.numbers == [-1, 1, -1]


def test_what_is_not_urgent_is_looked_for_seldom():
    reader = Reader(is_urgent=False)
    compiled = tf.function(reader.step, jit_compile=True)
    around = tf.function(lambda number: compiled(number))
    calls = 200
    for number in range(1, calls + 1):
        around(tf.constant(number, tf.int64))
    # Before each of these calls, it finds what the one before it has left.
    assert reader.numbers == [1, 3, 7, 15, 31, 63, 113, 163]
    reader.mailbox.collect()
    assert reader.numbers[-1] == calls
    graph = around.get_concrete_function(tf.TensorSpec([], tf.int64)).graph
    [condition] = [op.inputs[0] for op in graph.get_operations() if op.type == "If"]
    assert "CPU:0" in condition.op.device  # so a GPU is not asked


def test_what_is_foreseen_is_looked_for_then():
    found = []
    callback = HostCallback(
        lambda numbers, line: found.append((numbers[0], line.file if line else None)),
        size=2,
        foresee=lambda numbers: numbers[1] - numbers[0] % numbers[1],
    )

    @tf.function
    def step(number, every):
        callback.post(tf.stack([number, every]), tf.equal(number % every, 0))

    def steps(first, last, every=5):
        for number in range(first, last):
            step(tf.constant(number, tf.int64), tf.constant(every, tf.int64))
        return [number for number, _ in found]

    assert [steps(1, 5), steps(5, 6), steps(6, 10), steps(10, 11)] == [[], [5], [5], [5, 10]]
    # What nobody foresaw waits for the next time, or for whoever asks.
    assert steps(11, 15, every=3) == [5, 10]
    callback.collect()
    assert [number for number, _ in found] == [5, 10, 12]
    callback.look_next_time()
    assert steps(18, 19, every=3) == [5, 10, 12, 18]
    assert [file for _, file in found] == [__file__, __file__, None, __file__]
    # It counts in the host's memory, so a GPU is not asked.
    graph = step.get_concrete_function(*[tf.TensorSpec([], tf.int64)] * 2).graph
    [condition] = [op.inputs[0] for op in graph.get_operations() if op.type == "If"]
    assert "CPU:0" in condition.op.device


def test_compiled_by_xla_alone():
    reader = Reader()
    function = tf.function(reader.step, jit_compile=True)
    for number in (0, 3, 0):
        function(tf.constant(number, tf.int64))
    assert reader.numbers == []
    reader.mailbox.collect()
    reader.mailbox.collect()
    assert reader.numbers == [3]


@pytest.mark.parametrize("loop", [False, True])
def test_compiled_by_xla_inside_a_function(loop):
    reader = Reader()
    compiled = tf.function(reader.step, jit_compile=True)

    @tf.function
    def around(number):
        if loop:
            for _ in tf.range(2):
                compiled(number)
        else:
            compiled(number)

    for number in (3, 0, 5):
        around(tf.constant(number, tf.int64))
    reader.mailbox.collect()
    assert reader.numbers == ([3, 3, 5, 5] if loop else [3, 5])


def test_compiled_by_xla_inside_what_xla_compiles():
    reader = Reader()
    inner = tf.function(reader.step)
    middle = tf.function(lambda number: inner(number), jit_compile=True)
    around = tf.function(lambda number: middle(number))
    for number in (3, 0):
        around(tf.constant(number, tf.int64))
    assert reader.numbers == [3]


def test_collecting_is_free_where_nothing_was_compiled():
    reader = Reader()
    tf.function(reader.step)(tf.constant(3, tf.int64))
    # Reads no variable: it is not even there any more.
    del reader.mailbox.buffer
    reader.mailbox.collect()

"""Conditions without a branch: each write to a variable is made, or leaves the old value."""

import numpy as np
import pytest
import tensorflow as tf

from keras_mp.support import selection
from tests.common import once

pytestmark = once

# A number too small for a processor that flushes, a zero with a sign, and a NaN with digits.
ODD = np.array([1e-42, -0.0, np.inf, np.nan], np.float32)


def assign(v):
    v.assign(tf.fill(v.shape, tf.constant(np.nan)))


def add(v):
    v.assign_add(tf.ones(v.shape))
    v.assign_sub(v * 2)


def add_rows(v):
    v.scatter_add(tf.IndexedSlices(tf.constant([1.0, 2.0, np.inf]), tf.constant([2, 1, 2])))


def in_a_loop(v):
    tf.while_loop(lambda i: i < 3, lambda i: (v.assign_add(tf.ones(v.shape)), i + 1)[1:], [0])


def in_a_branch(v):
    tf.cond(v[3] > 0, lambda: v.assign(-v), lambda: v.assign(v + 1))


def in_a_function(v):
    tf.function(add)(v)


def by_a_kernel(v):
    tf.raw_ops.ResourceApplyGradientDescent(var=v.handle, alpha=0.5, delta=tf.ones(v.shape))


WRITES = [assign, add, add_rows, in_a_loop, in_a_branch, in_a_function, by_a_kernel]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_is_made_or_leaves_every_bit(write):
    v, control = tf.Variable(ODD), tf.Variable(ODD)

    @tf.function(jit_compile=True)
    def step(is_chosen):
        selection.choose(is_chosen, lambda: write(v), lambda: None)

    step(tf.constant(False))
    np.testing.assert_array_equal(v.numpy().view(np.int32), ODD.view(np.int32))
    step(tf.constant(True))
    tf.function(lambda: write(control), jit_compile=True)()
    np.testing.assert_array_equal(v.numpy(), control.numpy())
    assert not np.array_equal(v.numpy(), ODD, equal_nan=True)


def test_one_inside_of_another():
    v = tf.Variable([0, 0, 0])

    def add_to(i):
        return lambda: v.assign_add(tf.one_hot(i, 3, dtype=tf.int32))

    @tf.function(jit_compile=True)
    def step(outer, inner):
        selection.choose(outer, add_to(0), lambda: selection.choose(inner, add_to(1), add_to(2)))
        v.assign_add([10, 10, 10])

    for outer in (True, False):
        for inner in (True, False):
            v.assign([0, 0, 0])
            step(tf.constant(outer), tf.constant(inner))
            assert np.argmax(v.numpy()) == (0 if outer else 1 if inner else 2)
            assert sum(v.numpy()) == 31
    types = {op.type for op in step.get_concrete_function(True, True).graph.get_operations()}
    assert not types & {"If", "StatelessIf"}


def test_the_graph_is_as_before_even_after_an_exception():
    def fail():
        raise ValueError("in the branch")

    @tf.function(jit_compile=True)
    def step(is_chosen):
        graph = tf.compat.v1.get_default_graph()
        before = graph._create_op_internal
        with pytest.raises(ValueError, match="in the branch"):
            selection.choose(is_chosen, fail, lambda: None)
        assert graph._create_op_internal == before

    step(tf.constant(True))


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_elsewhere_it_is_a_branch(mode):
    v = tf.Variable(0.0)

    def step(is_chosen):
        selection.choose(is_chosen, lambda: v.assign(1.0), lambda: v.assign(2.0))

    if mode == "function":
        step = tf.function(step)
    step(tf.constant(True))
    assert float(v) == 1
    step(tf.constant(False))
    assert float(v) == 2

"""Where code runs: what XLA compiles, and operations that callers share."""

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.support import host
from tests.common import once

pytestmark = once


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_shared_operation_is_traced_once_for_each_shape(jit_compile):
    traced = []

    @host.shared_operation
    def double(value):
        traced.append((value.shape.rank, host.is_compiled_by_xla()))
        return 2 * value

    assert double(tf.constant(3)).numpy() == 6  # in eager it is called
    traced.clear()
    for _ in range(2):
        function = tf.function(lambda: (double(tf.constant(3)), double(tf.constant([3, 4]))))
        compiled = tf.function(function.python_function, jit_compile=jit_compile)
        for each in (function, compiled):
            scalar, vector = each()
            assert scalar.numpy() == 6
            assert vector.numpy().tolist() == [6, 8]
    kinds = {False, jit_compile}
    assert sorted(traced) == sorted((rank, kind) for rank in (0, 1) for kind in kinds)


@pytest.mark.parametrize("observer", ["ours", "TensorFlow's"])
def test_what_is_shared_is_not_traced_with_an_observer_of_the_first_caller(observer):
    shared = host.shared_operation(lambda x: tf.math.log(x) + 1)

    def count():
        function = tf.function(lambda x: shared(x))
        graph = function.get_concrete_function(tf.constant([0.0])).graph.as_graph_def()
        return [len(function.node_def) for function in graph.library.function]

    if observer == "ours":
        with pytest.raises(keras_mp.numerics.NotFiniteError), keras_mp.numerics.watch():
            tf.function(lambda x: tf.sqrt(shared(x)))(tf.constant([0.0]))
    else:
        tf.debugging.enable_check_numerics()
        count()
        tf.debugging.disable_check_numerics()
    fresh = host.shared_operation(lambda x: tf.math.log(x) + 1)
    found, shared = count(), fresh
    assert found == count()
    assert len(found) == 1

"""The table of operations: each stands once, and TensorFlow has it."""

from collections import Counter

import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from keras_mp.support import op_table
from tests.common import once

pytestmark = once

OPS = [op for ops in op_table.BY_KIND.values() for op in ops]

# On TensorFlow's lists for the graph rewrite, but of kernels that its wheel does not have.
ELSEWHERE = {
    *("FastUnsortedSegmentMax", "FusedConv2DBiasActivation", "FusedSparseConvGpuV2", "Mha"),
    *("MhaV2", "Pmlp", "Tmlp", "TmlpV2", "TmlpV3", "VoxelMax"),
}


def test_an_operation_is_of_one_kind():
    assert [op for op, times in Counter(OPS).items() if times > 1] == []


def test_tensorflow_has_each_operation():
    assert {op for op in OPS if op_def_registry.get(op) is None} <= ELSEWHERE


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("Conv2D", lambda x: tf.nn.conv2d(x, tf.zeros([3, 3, 2, 2]), 1, "SAME")),
        ("MaxPool", lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME")),
        ("BiasAdd", lambda x: tf.nn.bias_add(tf.zeros([4, 2]), x[0, 0, 0])),
        ("Tanh", tf.tanh),
    ],
)
def test_gradients_are_what_tensorflow_computes_them_with(op, function):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [1, 4, 4, 2])
        tf.gradients(function(x), [x])
    types = {each.type for each in graph.get_operations()}
    assert op in types
    assert types & set(op_table.gradients_of(op))


def test_an_operation_whose_gradient_is_made_of_others():
    assert op_table.gradients_of("Exp") == ()

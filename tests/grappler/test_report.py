"""What is said of a graph is what runs."""

from collections import Counter

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import keras_mp
from keras_mp import graph_rewrite
from tests.common import needs_bfloat16_rewrite, once

pytestmark = [once, needs_bfloat16_rewrite]

X = tf.constant(tf.reshape(tf.range(64.0) / 64, [8, 8]))


def rewrite():
    keras_mp.enable_mixed_precision_graph_rewrite(tf.keras.optimizers.SGD(), dtype="bfloat16")


@pytest.fixture
def rewriting():
    rewrite()


def report(function, *args):
    return graph_rewrite.report(tf.function(function), *args)


def whys(result):
    return {each.op: each.why for each in result.operations if each.why}


WEIGHT = tf.Variable(tf.eye(8))


def step(x):
    """A step of training with a loop, a branch and a variable that is assigned."""
    with tf.GradientTape() as tape:
        h = tf.nn.relu(tf.matmul(x, WEIGHT))
        for _ in tf.range(2):
            h = tf.tanh(tf.matmul(h, WEIGHT)) + 1.0
        h = tf.matmul(h, h) if tf.reduce_sum(x) > 0 else h
        loss = tf.reduce_mean(tf.nn.log_softmax(h))
    WEIGHT.assign_sub(0.1 * tape.gradient(loss, WEIGHT))
    return loss


def test_it_is_the_graph_that_runs(rewriting):
    before = WEIGHT.numpy()
    found = Counter((each.op, each.dtype) for each in report(step, X).operations)
    assert (WEIGHT.numpy() == before).all()  # A report runs nothing.
    with context.collect_graphs() as graphs:
        tf.function(step)(X)
    assert (WEIGHT.numpy() != before).any()
    assert found["MatMul", "bfloat16"] == 8
    # Grappler takes constants that two places share from either.
    kinds = {"MatMul", "Relu", "ReluGrad", "Tanh", "LogSoftmax", "Exp", "AssignSubVariableOp"}
    ran = Counter()
    for node in (node for graph in graphs for node in graph.node if node.op in kinds):
        dtype = node.attr["T" if "T" in node.attr else "dtype"].type
        ran[node.op, tf.as_dtype(dtype).name] += 1
    assert {key: n for key, n in found.items() if key[0] in kinds} == ran


def test_why_operations_stay_in_float32(rewriting):
    def function(x):
        denied = tf.exp(tf.matmul(x, x))
        after = tf.tanh(denied) * 2.0
        lonely = tf.sqrt(x)
        special = tf.math.special.bessel_j0(x)
        no_kernel = tf.raw_ops.Inv(x=tf.linalg.matmul(x, x))
        return tf.matmul(no_kernel, x), after, lonely, special, tf.matmul(x, x)

    found = whys(report(function, X))
    assert found["Exp"] == "on the deny list"
    assert found["Tanh"] == found["Mul"] == "after Exp"
    assert found["Sqrt"] == "not among operations of the allow list"
    assert found["BesselJ0"] == "on no list"
    assert "MatMul" not in found


def test_what_has_no_kernel():
    graph_rewrite.change_op_lists(infer=["Betainc"])
    try:
        rewrite()
        assert whys(report(tf.math.betainc, X, X, X))["Betainc"] == "no bfloat16 kernel"
        keras_mp.disable_mixed_precision_graph_rewrite()
    finally:
        graph_rewrite.change_op_lists()


def test_what_is_kept_for_its_sum(monkeypatch):
    monkeypatch.setattr(graph_rewrite, "_with_wrong_sums", lambda dtype: {"Tanh", "BiasAddGrad"})
    rewrite()
    found = whys(report(lambda x: tf.matmul(tf.tanh(tf.matmul(x, x)), x), X))
    assert found["Tanh"] == "kept for its sum"


def test_casts_and_what_was_in_16_bits_before(rewriting):
    def function(x):
        half = tf.matmul(tf.cast(x, tf.bfloat16), tf.cast(x, tf.bfloat16))
        return tf.exp(tf.matmul(x, 2.0 * x)), half

    found = report(function, X)
    assert found.before == 2  # the user's cast and product
    assert found.by_dtype()["bfloat16"]["MatMul"] == 2
    assert found.casts == {"bfloat16": 2, "float32": 1}


def test_what_xla_compiles_is_not_rewritten(rewriting):
    called = tf.function(lambda x: tf.tanh(tf.matmul(x, x)))
    inner = tf.function(lambda x: tf.matmul(called(x), x), jit_compile=True)
    found = report(lambda x: inner(tf.matmul(x, x)), X)
    assert {each.why for each in found.operations if each.op == "MatMul"} == {"", "XLA compiles it"}
    found = graph_rewrite.report(inner, X)
    assert set(whys(found).values()) == {"XLA compiles it"}
    assert found.casts == {"bfloat16": 0, "float32": 0}


def test_the_table(rewriting):
    def f(x):
        return tf.exp(tf.tanh(tf.matmul(x, x))) + tf.sqrt(x)

    head, _, columns, *rows = str(report(f, X)).splitlines()
    assert head.startswith("Graph rewrite of f: 2 of 5 floating-point operations compute in bf")
    assert head.endswith("Casts put in: 1 to bfloat16, 1 to float32")
    assert columns.split() == ["operation", "bfloat16", "others", "why", "not"]
    assert [row.split()[:3] for row in rows][:2] == [["AddV2", "0", "1"], ["Exp", "0", "1"]]
    assert rows[0].endswith("after Exp")
    assert max(map(len, rows)) < 100


def test_a_small_tensor_from_outside(rewriting):
    """TensorFlow passes it as an argument, though the graph has a constant in its place."""
    ids = tf.constant([0, 1])
    found = report(lambda x: tf.gather(tf.matmul(x, x), ids), X)
    assert found.by_dtype()["bfloat16"]["MatMul"] == 1


def test_an_empty_graph(rewriting):
    found = report(lambda: tf.constant(1.0))
    assert found.by_dtype() in ({}, {"float32": {"Identity": 1}})
    assert str(found)

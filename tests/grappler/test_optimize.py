"""What TensorFlow would do on a GPU, on a machine that has none."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import graph_rewrite
from keras_mp.grappler import op_lists, optimize, passes
from keras_mp.grappler import report as reports
from tests.common import needs_bfloat16_rewrite, needs_cuda, once
from tests.grappler import rewritten as rewritten_graphs

V1 = tf.compat.v1

pytestmark = [once, needs_cuda]

GPUS = ("GPU 7.0", "GPU 8.0", "GPU 9.0")
X = tf.constant(np.random.default_rng(0).normal(size=[8, 8]).astype("float32") / 4)


@tf.function
def classify(x, w):
    return tf.nn.softmax(tf.matmul(tf.nn.relu(tf.matmul(x, w)), w))


@pytest.mark.parametrize("device", GPUS)
def test_a_gpu_with_tensor_cores_computes_in_float16(device):
    report = graph_rewrite.report(classify, X, X, device=device)
    in_float16 = report.by_dtype()["float16"]
    follows = in_float16.pop("Softmax", 0)  # TensorFlow 2.16 leaves it in float32.
    assert in_float16 == {"MatMul": 2, "Relu": 1}
    assert report.casts == {"float16": 2, "float32": 1}
    assert (report.dtype, report.device) == ("float16", device)
    start = f"Graph rewrite of classify on a {device}: {3 + follows} of 4 floating-"
    assert str(report).startswith(start)


def test_an_older_gpu_stays_in_float32():
    report = graph_rewrite.report(classify, X, X, device="GPU 6.1")
    assert report.by_dtype() == {"float32": {"MatMul": 2, "Relu": 1, "Softmax": 1}}
    assert {each.why for each in report.operations} == {"not on a GPU that is fast, or fetched"}


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("BatchMatMulV2", lambda x: tf.matmul(x[0], x[0])),
        ("Conv3D", lambda x: tf.nn.conv3d(x, x, [1] * 5, "SAME")),
        ("DepthwiseConv2dNative", lambda x: tf.nn.depthwise_conv2d(x[0], x[0], [1] * 4, "SAME")),
    ],
)
def test_operations_that_older_versions_of_cuda_compute_slowly(op, function):
    """The GPU has the versions of CUDA and cuDNN for which TensorFlow was built."""
    report = graph_rewrite.report(tf.function(function), tf.ones([4] * 5), device="GPU 7.0")
    assert report.by_dtype()["float16"][op] == 1


def test_what_the_program_places_on_the_cpu_stays_there():
    @tf.function
    def function(x):
        y = tf.nn.relu(tf.matmul(x, x))
        with tf.device("CPU:0"):
            return tf.nn.relu(tf.matmul(y, y))

    by_dtype = graph_rewrite.report(function, X, device="GPU 8.0").by_dtype()
    assert by_dtype["float16"]["MatMul"] == by_dtype["float32"]["MatMul"] == 1


def test_what_has_no_kernel_for_gpus_is_not_placed_there():
    graph = reports.of_function(
        tf.function(lambda x: tf.strings.as_string(tf.matmul(x, x))).get_concrete_function(X)
    )
    nodes = optimize._placed(graph).graph_def.node
    kinds = {node.op: node.device.split(":")[-2] for node in nodes}
    assert (kinds["MatMul"], kinds["AsString"]) == ("GPU", "CPU")
    assert not any(node.device for node in graph.graph_def.node)


def test_the_lists_count():
    def function(x):
        return tf.matmul(tf.tanh(tf.matmul(x, x)), x)

    def dtype_of_tanh():
        report = graph_rewrite.report(tf.function(function), X, device="GPU 7.0")
        return next(each.dtype for each in report.operations if each.op == "Tanh")

    assert dtype_of_tanh() == "float16"
    op_lists.change({"deny": ["Tanh"]})
    try:
        assert dtype_of_tanh() == "float32"
    finally:
        op_lists.change({})


@needs_bfloat16_rewrite
def test_a_rewrite_to_bfloat16_does_not_reach_a_gpu():
    passes.turn_on("bfloat16")
    try:
        report = graph_rewrite.report(classify, X, X, device="GPU 9.0")
    finally:
        passes.turn_off()
    assert report.dtype == "bfloat16"
    assert "bfloat16" not in report.by_dtype()


def test_what_a_session_runs():
    with tf.Graph().as_default():
        x = V1.placeholder(tf.float32, [8, 8])
        w = V1.get_variable("w", [8, 8])
        loss = tf.reduce_mean(tf.matmul(tf.nn.relu(tf.matmul(x, w)), w))
        optimizer = keras_mp.compat.v1.LossScaleOptimizer(V1.train.GradientDescentOptimizer(0.1))
        train = optimizer.minimize(loss)
        report = graph_rewrite.report([train, loss], device="GPU 7.0")
        older = graph_rewrite.report([train, loss], device="GPU 6.1")
    assert report.by_dtype()["float16"]["MatMul"] == 5
    assert "float16" not in older.by_dtype()


@pytest.mark.parametrize(
    "device", ["GPU", "gpu 7.0", "CPU 7.0", "GPU 7", "GPU 7.\u0660", "7.0", 7.0]
)
def test_what_is_no_gpu(device):
    with pytest.raises(ValueError, match="Expected a GPU and its compute capability.*device="):
        graph_rewrite.report(classify, X, X, device=device)


def test_a_tensorflow_without_cuda(monkeypatch):
    monkeypatch.setattr(tf.sysconfig, "get_build_info", dict)
    with pytest.raises(ValueError, match="built without CUDA"):
        graph_rewrite.report(classify, X, X, device="GPU 7.0")


def runs_on_this_cpu(graph, inputs):
    """Runs a rewritten graph as it is: its operations for the GPU have kernels for CPUs, too."""
    definition = rewritten_graphs.for_this_cpu(graph)
    results = [f"{node.name}:0" for node in graph.node if node.op == "_Retval"]
    arguments = {node.attr["index"].i: node.name for node in graph.node if node.op == "_Arg"}
    config = V1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default(), V1.Session(config=config) as session:
        tf.import_graph_def(definition, name="")
        feeds = {f"{arguments[i]}:0": value.numpy() for i, value in enumerate(inputs)}
        return session.run(results, feeds)


def step(x, w, labels):
    """The loss of a small network, and its gradient."""
    with tf.GradientTape() as tape:
        tape.watch(w)
        logits = tf.matmul(tf.nn.relu(tf.matmul(x, w)), w)
        losses = tf.nn.softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_mean(losses)
    return loss, tape.gradient(loss, w)


@pytest.mark.parametrize("device", GPUS)
def test_the_rewritten_graph_computes_the_same_but_for_rounding(device):
    labels = tf.eye(8)
    concrete = tf.function(step).get_concrete_function(X, X, labels)
    rewritten = optimize_for(concrete, device)
    products = [node for node in rewritten.node if node.op == "MatMul"]
    assert {node.attr["T"].type for node in products} == {tf.float16.as_datatype_enum}
    assert len(products) == 5
    for found, exact in zip(runs_on_this_cpu(rewritten, [X, X, labels]), concrete(X, X, labels)):
        error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert found.dtype == np.float32
        assert 0 < error < 2**-9
    older = runs_on_this_cpu(optimize_for(concrete, "GPU 6.1"), [X, X, labels])
    np.testing.assert_allclose(older[1], concrete(X, X, labels)[1], rtol=1e-5, atol=1e-7)


def optimize_for(concrete, device):
    return reports.optimized(reports.of_function(concrete), "float16", device)

"""What TensorFlow would do on a GPU, on a machine that has none."""

import pytest
import tensorflow as tf

import keras_mp
from keras_mp import graph_rewrite
from tests.common import needs_bfloat16_rewrite, needs_cuda, once
from tests.grappler import rewritten

pytestmark = [once, needs_cuda]

GPUS = ("GPU 7.0", "GPU 8.0", "GPU 9.0")
X = tf.eye(8)


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
    function = tf.function(lambda x: tf.strings.as_string(tf.matmul(x, x)))
    kinds = rewritten.placed(function.get_concrete_function(X))
    assert (kinds["MatMul"], kinds["AsString"]) == ("GPU", "CPU")


@needs_bfloat16_rewrite
def test_a_rewrite_to_bfloat16_does_not_reach_a_gpu():
    keras_mp.enable_mixed_precision_graph_rewrite(tf.keras.optimizers.SGD(), dtype="bfloat16")
    report = graph_rewrite.report(classify, X, X, device="GPU 9.0")
    assert report.dtype == "bfloat16"
    assert "bfloat16" not in report.by_dtype()


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

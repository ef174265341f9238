"""What is counted is what is in the graph."""

import json
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, Subclassed, needs_bfloat16_rewrite, needs_cuda, once
from tests.numerics.tools import census, dense, sequential

K = tf.keras
L = K.layers


# What a product takes.

CASES = {
    "MatMul": (lambda a: a @ tf.ones([4, 5]), [[3, 4]], 2 * 3 * 4 * 5),
    "MatMul, transposed": (
        lambda a: tf.matmul(a, tf.ones([5, 3]), transpose_a=True, transpose_b=True),
        [[3, 4]],
        2 * 4 * 3 * 5,
    ),
    "BatchMatMul": (lambda a: tf.matmul(a, a, adjoint_b=True), [[2, 3, 4]], 2 * 2 * 3 * 3 * 4),
    "BatchMatMul of one matrix": (lambda a: a @ tf.ones([7, 4, 5]), [[3, 4]], 2 * 7 * 3 * 4 * 5),
    "Einsum": (lambda a: tf.einsum("bij,jk->bik", a, tf.ones([4, 5])), [[2, 3, 4]], 240),
    "Einsum with an ellipsis": (
        lambda a: tf.einsum("...ij,...jk->...ik", a, tf.ones([7, 4, 5])),
        [[2, 1, 3, 4]],
        2 * 14 * 3 * 4 * 5,
    ),
    "Conv2D": (
        lambda a: tf.nn.conv2d(a, tf.ones([3, 3, 4, 6]), 1, "SAME"),
        [[2, 8, 8, 4]],
        2 * 2 * 8 * 8 * 6 * 3 * 3 * 4,
    ),
    "Conv2D in groups": (
        lambda a: tf.nn.conv2d(a, tf.ones([3, 3, 2, 6]), 1, "SAME"),
        [[2, 8, 8, 4]],
        2 * 2 * 8 * 8 * 6 * 3 * 3 * 2,
    ),
    "Conv3D": (
        lambda a: tf.nn.conv3d(a, tf.ones([3, 3, 3, 2, 5]), [1] * 5, "VALID"),
        [[1, 4, 4, 4, 2]],
        2 * 8 * 5 * 27 * 2,
    ),
    "DepthwiseConv2D": (
        lambda a: tf.nn.depthwise_conv2d(a, tf.ones([3, 3, 4, 2]), [1] * 4, "SAME"),
        [[2, 8, 8, 4]],
        2 * 2 * 8 * 8 * 8 * 9,
    ),
}


@once
@pytest.mark.parametrize("name", CASES)
def test_the_work_of_a_product(name):
    function, shapes, expected = CASES[name]
    found = census(function, *(tf.TensorSpec(shape) for shape in shapes))
    assert found.work() == {"float32": expected}


@once
def test_the_work_of_a_forward_and_a_backward_pass():
    kernel, weights = tf.Variable(tf.ones([3, 3, 4, 6])), tf.Variable(tf.ones([384, 5]))

    @tf.function
    def step(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            x = tf.nn.conv2d(images, kernel, 1, "SAME")
            loss = tf.reduce_sum(tf.reshape(x, [2, -1]) @ weights)
        return loss, tape.gradient(loss, [images, kernel, weights])

    counted = Counter()
    for each in census(step, tf.TensorSpec([2, 8, 8, 4])).operations:
        counted[each.op] += each.work
    convolution, product = 2 * 2 * 64 * 6 * 36, 2 * 2 * 384 * 5
    assert {op: work for op, work in counted.items() if work} == {
        "Conv2D": convolution,
        "Conv2DBackpropInput": convolution,
        "Conv2DBackpropFilter": convolution,
        "MatMul": 3 * product,
    }


@once
def test_calls_loops_and_branches():
    weight = tf.eye(4)

    @tf.function
    def inner(x):
        return x @ weight

    @tf.function
    def outer(x, flag, which):
        def body(x):
            x = tf.while_loop(lambda x: True, lambda x: [inner(x)], [x])[0]
            return [tf.cond(flag, lambda: x @ weight @ weight, lambda: x @ weight)]

        x = tf.while_loop(lambda x: True, body, [inner(x)])[0]
        x = tf.switch_case(which, [lambda: x, lambda: x @ weight @ weight @ weight, lambda: -x])
        return tf.cond(flag, lambda: x @ weight @ weight, lambda: x @ weight)

    specs = tf.TensorSpec([3, 4]), tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.int32)
    found = census(outer, *specs)
    assert found.work() == {"float32": (1 + (1 + 2) + 3 + 2) * 2 * 3 * 4 * 4}


@once
def test_a_loop_of_which_nothing_tells_how_often_it_turns():
    def loop(x, count):
        for _ in tf.range(count):
            x = x @ x
        x = tf.scan(lambda x, row: x @ row, tf.ones([5, 4, 4]), x)[-1]  # Of this one the rows do.
        return tf.while_loop(lambda x: tf.reduce_sum(x) < 9, lambda x: [x @ x], [x])[0]

    found = census(tf.function(loop), tf.TensorSpec([4, 4]), tf.TensorSpec([], tf.int32))
    is_least = [each.is_least for each in found.operations if each.work]
    assert sorted(is_least) == [False, True, True]
    assert found.work() == {"float32": (2 + 5) * 2 * 4**3}
    text = found.to_text(None)
    assert "of some loops is unknown. They are counted once: outside of layers (products: 2" in text
    assert "the program (a loop, counted once)" in text


@once
def test_functions_that_were_loaded(tmp_path):
    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([4, 4])])
        def loop(self, x):
            for _ in tf.range(5):
                x = self.product(x)
            return tf.cond(x[0, 0] > 0, lambda: self.product(x), lambda: x)

        @tf.function
        def product(self, x):
            return x @ x

    module, work = Module(), {"float32": 2 * 2 * 4**3}
    assert census(module.loop).work() == work
    tf.saved_model.save(module, str(tmp_path))
    assert census(tf.saved_model.load(str(tmp_path)).loop).work() == work
    # The operations of an imported graph know no lines.
    graph = module.product.get_concrete_function(tf.TensorSpec([4, 4])).graph.as_graph_def()
    imported = tf.compat.v1.wrap_function(
        lambda x: tf.graph_util.import_graph_def(graph, {"x": x}, ["Identity:0"]),
        [tf.TensorSpec([4, 4])],
    )
    assert census(imported).work() == {"float32": 2 * 4**3}


@needs_bfloat16_rewrite
@once
def test_the_graph_rewrite_is_named():
    keras_mp.enable_mixed_precision_graph_rewrite(K.optimizers.SGD(), dtype="bfloat16")
    found = census(lambda x: x @ x, tf.TensorSpec([64, 64]))
    assert found.work() == {"float32": 2 * 64**3}
    assert "The graph rewrite is on, and makes more of it bfloat16" in str(found)


@once
@needs_cuda
def test_products_on_tensor_cores():
    def function(x, w):
        return tf.matmul(tf.nn.relu(tf.matmul(x, w)), w)

    x, w = tf.ones([7, 8], "float16"), tf.ones([8, 8], "float16")
    found = census(tf.function(function), x, w, device="GPU 7.0")
    assert found.work() == {"float16": 2 * 2 * 7 * 8 * 8}
    lines = found.to_text(None).splitlines()
    assert lines[0] == "Census of function on a GPU 7.0"
    assert "Tensor cores take 100% of the multiplications." in lines
    [odd] = [each for each in lines if each.startswith("100% of the multiplications have sizes")]
    assert "no multiples of 8: 7 x 8 x 8. Round units" in odd
    assert json.loads(found.to_json())["device"] == "GPU 7.0"
    assert census(tf.matmul, x[:0], w[:, :7], device="GPU 7.0").work() == {}


@needs_cuda
def test_products_in_float32_on_tensor_cores():
    """A GPU from 8.0 on takes them as TensorFloat-32, unless the program has turned that off."""
    said = "They also take the 100% in float32, as TensorFloat-32"
    product, x = tf.function(lambda x: tf.matmul(x, x)), tf.ones([8, 8])
    assert said in str(census(product, x, device="GPU 8.0"))
    assert said not in str(census(product, x, device="GPU 7.0"))
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        assert said not in str(census(product, x, device="GPU 8.0"))
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


@needs_cuda
def test_the_tensor_cores_of_each_generation():
    def function(x):
        y, z = tf.cast(x, "bfloat16"), tf.cast(x, "float16")
        return tf.matmul(y, y), tf.matmul(z, z)

    for device, share in (("GPU 6.1", "0%"), ("GPU 7.5", "50%"), ("GPU 8.0", "100%")):
        found = str(census(tf.function(function), tf.ones([8, 8]), device=device))
        assert f"take {share} of the multiplications" in found
        assert "no multiples" not in found
    with pytest.raises(ValueError, match="Expected a GPU and its compute capability"):
        census(tf.function(function), tf.ones([8, 8]), device="A100")


def test_reasons_in_a_region_of_autocast(monkeypatch):
    monkeypatch.setattr("keras_mp.kernels.slow.is_slow", lambda *_: False)

    @tf.function
    @keras_mp.autocast("bfloat16")
    def function(x):
        return tf.exp(x @ x)

    found = census(function, tf.TensorSpec([8, 8]))
    whys = {(each.op, each.dtype): each.why for each in found.operations}
    assert whys["MatMul", "bfloat16"].startswith("autocast: 16 bits make matrix products")
    assert whys["Exp", "float32"].startswith("autocast: overflows")


class Widens(L.Layer):
    def __init__(self):
        super().__init__(name="widens")
        self.dense = L.Dense(8, name="dense")

    def call(self, x):
        return tf.cast(tf.cast(self.dense(x), tf.float32) * 2.0, tf.bfloat16)


CONVOLUTION, INNER, HEAD = 2 * 4 * 36 * 4 * 27, 2 * 4 * 36 * 4 * 8, 2 * 4 * 288 * 5


def test_the_work_of_a_training_step_by_layer_in_sentences_and_json(kernels_of_tensorflow):
    layers = [lambda: L.Conv2D(4, 3, padding="same", name="conv"), Widens, L.Flatten]
    loss = K.losses.SparseCategoricalCrossentropy(from_logits=True)
    how = {"shape": [6, 6, 3], "policy": "mixed_bfloat16", "loss": loss, "name": "small"}
    model = sequential(*layers, dense(5, dtype="float32", name="head"), **how)
    before = model.get_weights()
    found = census(model, (np.ones([4, 6, 6, 3], "float32"), np.arange(4, dtype="int32")))
    for value, now in zip(before, model.get_weights()):  # Nothing has run.
        np.testing.assert_array_equal(value, now)
    # The gradient with respect to the images is not needed, and left out.
    assert found.work() == {"bfloat16": 2 * CONVOLUTION + 3 * INNER, "float32": 3 * HEAD}
    for layer, work in (("widens/dense", 3 * INNER), ("head", 3 * HEAD)):
        assert sum(each.work for each in found.operations if each.layer == layer) == work
    text = found.to_text(None)
    assert text.startswith("Census of the training step of 'small'\nOf the multiplications, ")
    assert "in float32 (policy float32: head)" in text
    read = json.loads(found.to_json())
    assert read["work"] == found.work()
    assert len(read["operations"]) == len(found.operations)


def test_the_work_of_a_recurrent_layer():
    model = sequential(lambda: L.LSTM(4, name="lstm"), dense(2, name="head"), shape=[7, 3])
    found = census(model, (tf.ones([2, 7, 3]), tf.ones([2, 2])))
    # Four gates; the input needs no gradient, the first state does for its loop.
    of_input, of_state, head = 2 * 2 * 3 * 4 * 4, 2 * 2 * 4 * 4 * 4, 2 * 2 * 4 * 2
    forwards, backwards = of_input + of_state, of_input + 2 * of_state
    # In the function of Keras 2 it is computed, unless grappler leaves it out; nothing tells there
    # how often the loop of the backward pass runs.
    backwards = 7 * backwards if IS_KERAS_3 else backwards + of_input
    assert found.work() == {"float32": 7 * forwards + backwards + 3 * head}
    assert any(each.is_least for each in found.operations) == (not IS_KERAS_3)
    layers = {each.layer.partition("/")[0] for each in found.operations if each.work}
    assert layers == {"lstm", "head"}


@once
def test_what_cannot_be_counted_is_refused():
    with pytest.raises(TypeError, match="and a batch, .* 0 positional and 0 other arguments"):
        census(K.Sequential([K.Input([8]), L.Dense(4)]))
    with pytest.raises(TypeError, match="Expected a model .* Received: 3"):
        census(3)


@once
def test_shapes_that_are_not_known_count_nothing():
    found = census(lambda x: x @ x, tf.TensorSpec([None, None]))
    assert found.work() == {}
    assert [(each.op, each.dtype) for each in found.operations] == [("MatMul", "float32")]
    assert census(tf.function(lambda: None)).operations == ()
    said = "The shapes of some products are unknown. They are not counted: outside of layers"
    assert found.to_text(None).splitlines()[1] == f"{said} (products: 1, layers: 1)."


def _with_a_model_inside():
    inputs, layers = tf.keras.Input([8]), tf.keras.layers
    inner = tf.keras.Sequential([tf.keras.Input([8]), layers.Dense(8, name="two")], name="inner")
    outputs = layers.Activation("softmax")(inner(layers.Dense(8, name="one")(inputs)))
    return tf.keras.Model(inputs, outputs)


def _sequential():
    return sequential(dense(8, name="one"), dense(8, name="two"), loss=None)


def _subclassed():
    return Subclassed(L.Dense(8, name="one"), L.Dense(8, name="two"))


@pytest.mark.parametrize("make", [_sequential, _subclassed, _with_a_model_inside])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_what_makes_the_outputs_is_in_float32_since_the_model_returns_that(
    make, policy, monkeypatch, kernels_of_tensorflow
):
    monkeypatch.setattr("keras_mp.kernels.slow.is_slow", lambda *_: False)
    with keras_mp.policy_scope(policy):
        model = make()
        model(tf.ones([4, 8]))
        model.compile("sgd", "mse")
    graph = census(model, (tf.ones([4, 8]), tf.ones([4, 8])))
    products = [each for each in graph.operations if each.work]
    layers = [each.layer.rpartition("/")[2] for each in products]
    assert sorted(layers) == ["one"] * 2 + ["two"] * 3
    wide = [(layer, each.why) for layer, each in zip(layers, products) if each.dtype == "float32"]
    assert wide == [("two", "the model returns float32")]


# Whether a GPU waits for what the host sends is read from the graph; no GPU is needed.


BOUND = "It is bound by what the host sends"
LAYERS = 6


def small_operations(x):
    for _ in range(200):
        x = tf.tanh(x)
    return x


def large_product(x):
    return small_operations(x[:1]), x @ x


@needs_cuda
@once
@pytest.mark.parametrize(
    ("function", "shape", "is_bound"),
    [
        (small_operations, [8, 8], True),
        # As many numbers as take a GPU longer than the host takes for each of its operations.
        (small_operations, [8192, 8192], False),
        (large_product, [16384, 16384], False),
        (lambda x: tf.tanh(x) @ x, [8, 8], False),
    ],
)
def test_many_operations_for_little_arithmetic(function, shape, is_bound):
    spec = tf.TensorSpec(shape, "bfloat16")
    found = census(tf.function(function), spec, device="GPU 9.0")
    assert found.sending.is_bound == is_bound
    assert (BOUND in str(found)) == is_bound
    assert ("tf.function(step, jit_compile=True)" in found.to_text(None)) == is_bound
    assert json.loads(found.to_json())["sending"]["is_bound"] == is_bound
    # Nothing is said of a machine whose CPU computes.
    if not tf.config.get_visible_devices("GPU"):
        assert census(tf.function(function), spec).sending is None


@needs_cuda
@once
def test_what_xla_compiles_is_not_sent_one_by_one():
    compiled = tf.function(small_operations, jit_compile=True)
    spec = tf.TensorSpec([8, 8], "float16")
    assert census(compiled, spec, device="GPU 7.0").sending is None
    found = census(tf.function(lambda x: tf.nn.relu(compiled(x))), spec, device="GPU 7.0").sending
    assert (found.operations, found.is_bound) == (1, False)


@needs_cuda
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_what_would_help_a_step_of_fit(policy):
    layers, how = [dense(8)] * LAYERS, {"optimizer": "adam", "jit_compile": False}
    model = sequential(*layers, policy=policy, **how)
    found = keras_mp.numerics.profile(model, (tf.ones([4, 8]), tf.ones([4, 8])), device="GPU 8.0")
    step = ("model.compile(..., jit_compile=True)", "tf.function(step, jit_compile=True)")
    assert found.census.sending.helps == step
    # Adam alone takes ten for each weight.
    assert found.census.sending.operations > LAYERS * 2 * 10
    assert BOUND in found.to_text(None)

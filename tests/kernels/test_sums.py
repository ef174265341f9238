"""Sums of 16-bit numbers are what a float32 sum, rounded once, would be."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import hooks
from keras_mp.hooks import reach
from keras_mp.kernels import sums, trials
from tests.common import once, placed

K = tf.keras
ROWS = 10_000
DTYPES = ("bfloat16", "float16")
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-10}
KERNELS = [
    pytest.param(op, dtype, case, id=f"{op}-{dtype}-{case}")
    for op, kernel in sums.KERNELS.items()
    for dtype in DTYPES
    for case in kernel.cases
]
# XLA does not compile them.
NOT_IN_XLA = (
    *("SegmentSum", "SegmentMean", "SparseTensorDenseMatMul", "ResizeNearestNeighborGrad"),
)


@pytest.fixture(autouse=True)
def installed():
    hooks.install(sums.replacements())
    yield
    keras_mp.enable_float32_sums()


def gradients(layer, *inputs, mode="eager"):
    def step(*inputs):
        with tf.GradientTape() as tape:
            y = layer(*inputs)
        found = tape.gradient(y, layer.trainable_variables, tf.ones_like(y))
        return [tf.convert_to_tensor(g) for g in found]

    return [g.numpy() for g in placed(mode, step)(*inputs)]


def bias_gradient(dtype, x=None):
    x = tf.ones([ROWS, 4], dtype) if x is None else x
    bias = tf.zeros([4], dtype)
    with tf.GradientTape() as tape:
        tape.watch(bias)
        y = tf.nn.bias_add(x, bias)
    return tape.gradient(y, bias)


LAYERS = {
    "Dense": (lambda **kw: K.layers.Dense(2, **kw), [ROWS, 1]),
    "Conv1D": (lambda **kw: K.layers.Conv1D(2, 1, **kw), [100, 100, 1]),
    "Conv2D": (lambda **kw: K.layers.Conv2D(2, 1, **kw), [4, 50, 50, 1]),
    "Conv3D": (lambda **kw: K.layers.Conv3D(2, 1, **kw), [4, 50, 50, 1, 1]),
    "DepthwiseConv2D": (lambda **kw: K.layers.DepthwiseConv2D(2, **kw), [ROWS, 2, 2, 2]),
    "EinsumDense": (
        lambda **kw: K.layers.EinsumDense("abc,cd->abd", [None, 2], bias_axes="d", **kw),
        [100, 100, 1],
    ),
    "LSTM": (lambda **kw: K.layers.LSTM(1, **kw), [ROWS, 1, 1]),
    "MultiHeadAttention": (
        lambda **kw: K.layers.MultiHeadAttention(1, 2, **kw),
        [ROWS // 2, 2, 2],
    ),
    "LayerNormalization": (lambda **kw: K.layers.LayerNormalization(**kw), [ROWS, 4]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_stock_layers(name):
    make, shape = LAYERS[name]
    x = tf.random.stateless_uniform(shape, [1, 2], 0.5, 1.5)
    inputs = (x, x) if name == "MultiHeadAttention" else (x,)
    exact = make(dtype="float32")
    exact(*inputs)
    exact.set_weights([np.full(w.shape, 0.5) for w in exact.get_weights()])
    expected = gradients(exact, *inputs, mode="function")
    largest = max(abs(g).max() for g in expected)
    modes = ("eager", "function", "jit") if name == "Dense" else ("function",)
    # float16 stops where something is broadcast; the LSTM's bias is added by `BiasAdd`.
    for dtype in DTYPES if name != "LSTM" else ["bfloat16"]:
        layer = make(dtype=keras_mp.Policy(f"mixed_{dtype}"))
        layer(*inputs)
        layer.set_weights(exact.get_weights())
        for mode in modes:
            for found, right in zip(gradients(layer, *inputs, mode=mode), expected):
                # Rounding of what is added up does not grow with the number of terms.
                np.testing.assert_allclose(found, right, rtol=0.03, atol=0.03 * largest)
        if name == "Dense":
            assert found[0] == {"bfloat16": 9984, "float16": ROWS}[dtype]


@once
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_the_switch(mode):
    keras_mp.enable_float32_sums(False)
    own = float(tf.raw_ops.BiasAddGrad(out_backprop=tf.ones([ROWS, 4], "bfloat16"))[0])
    assert placed(mode, lambda: bias_gradient("bfloat16"))()[0] == own
    keras_mp.enable_float32_sums()
    assert placed(mode, lambda: bias_gradient("bfloat16"))()[0] == 9984


def last_value(op, dtype, case, mode, raw=False):
    """Computes the example of a kernel, of which nothing is known before it runs."""
    kernel = sums.KERNELS[op]
    arguments = kernel.example(tf.as_dtype(dtype), case)
    tensors = {name: value for name, value in arguments.items() if tf.is_tensor(value)}

    def run(tensors):
        compute = trials.in_its_module(getattr(tf.raw_ops, op))
        return trials.last_value(compute(**{**arguments, **tensors}))

    with reach.entered(None if raw else reach.current()):
        return float(placed(mode, run)(tensors)), kernel.expected


def is_right(found, expected):
    return found == pytest.approx(expected, rel=0.05)


@once
@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
@pytest.mark.parametrize(("op", "dtype", "case"), KERNELS)
def test_results_are_right_on_this_machine(op, dtype, case, mode):
    if mode == "jit" and op in NOT_IN_XLA:
        pytest.skip("XLA does not compile it.")
    assert is_right(*last_value(op, dtype, case, mode))


@once
@pytest.mark.parametrize(("op", "dtype", "case"), KERNELS)
def test_results_are_right_where_the_kernel_answers_otherwise(op, dtype, case, monkeypatch):
    if tf.as_dtype(dtype) in sums.KERNELS[op].wrong_in_xla:
        pytest.skip("It is not asked.")
    answer = not sums.TABLE.is_wrong(op, dtype, case)
    modes = [] if op in NOT_IN_XLA else ["jit"]
    # A machine whose kernel is right can only be imitated with a kernel that is.
    if answer or is_right(*last_value(op, dtype, case, "eager", raw=True)):
        modes += ["eager", "function"]
    if not modes:
        pytest.skip("TensorFlow's kernel is wrong on this machine.")
    monkeypatch.setattr(sums.TABLE, "_asks", lambda *_: answer)
    for mode in modes:
        assert is_right(*last_value(op, dtype, case, mode))


@once
@pytest.mark.parametrize(("op", "dtype", "case"), KERNELS)
def test_what_is_known_of_xla(op, dtype, case):
    if op in NOT_IN_XLA:
        with pytest.raises(tf.errors.InvalidArgumentError):
            last_value(op, dtype, case, "jit", raw=True)
        return
    known = tf.as_dtype(dtype) not in sums.KERNELS[op].wrong_in_xla
    assert is_right(*last_value(op, dtype, case, "jit", raw=True)) == known


@once
def test_what_cannot_be_wrong():
    assert not sums.TABLE.is_wrong("Sum", "float16", False)
    assert not sums.TABLE.is_wrong("Cumsum", "float64")
    assert not sums.TABLE.is_wrong("ScatterNd", "float32")


@once
def test_the_private_function_is_where_tensorflow_calls_it():
    ours, raw = trials.in_its_module(tf.raw_ops.BiasAddGrad), tf.raw_ops.BiasAddGrad
    assert inspect.unwrap(ours).__code__ is inspect.unwrap(raw).__code__


@once
def test_asking_takes_no_more_memory_for_many_axes(monkeypatch):
    asked = []

    def fill(sizes, value):
        asked.append(np.prod(sizes))
        return tf.ones([1] * len(sizes))

    monkeypatch.setattr(tf, "fill", fill)
    for pattern in ((True, False), (False, True) * 4, (True, False) * 5):
        sums.KERNELS["Sum"].example(tf.float16, pattern)
    assert max(asked) <= 2**24


@once
@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
def test_softmax_over_more_classes_than_float16_counts(mode):
    def function(logits):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            log = tf.nn.log_softmax(logits)[0, 0]
        return tf.nn.softmax(logits)[0, 0], log, tape.gradient(log, logits)[0, 0]

    logits = tf.zeros([1, 70_000], tf.float16)
    run = placed(mode, function)
    for found, expected in zip(run(logits), (1 / 70_000, -np.log(70_000), 1 - 1 / 70_000)):
        assert float(found) == pytest.approx(expected, rel=0.01)
    # Not counted where it cannot happen.
    few = tf.function(tf.nn.softmax).get_concrete_function(logits[:, :60_000])
    assert "Cast" not in {op.type for op in few.graph.get_operations()}


@once
@pytest.mark.parametrize("size", [8, 16, 64])
def test_average_pooling_over_large_windows(size):
    x = tf.fill([1, size, size, 1], tf.constant(30.0, tf.float16))
    for mode in ("eager", "function"):
        pooled = placed(mode, lambda x: tf.nn.avg_pool2d(x, size, size, "VALID"))(x)
        assert float(pooled[0, 0, 0, 0]) == 30


@once
@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
def test_average_pooling_of_large_numbers(mode):
    x = tf.fill([1, 6, 6, 1], tf.constant(60000.0, tf.float16))
    for padding in ("VALID", "SAME"):
        pooled = placed(mode, lambda x: tf.nn.avg_pool2d(x, 3, 2, padding))(x)
        np.testing.assert_array_equal(pooled, tf.fill(pooled.shape, 60000.0))


@once
def test_nothing_changes_where_tensorflow_is_right():
    def operations(dtype, enabled):
        keras_mp.enable_float32_sums(enabled)
        step = tf.function(
            lambda: (bias_gradient(dtype), tf.reduce_mean(tf.ones([9, 4], dtype), 1))
        )
        return [op.type for op in step.get_concrete_function().graph.get_operations()]

    for dtype in ("float32", "float64"):
        assert operations(dtype, True) == operations(dtype, False)
    for dtype in DTYPES:
        is_wrong = sums.TABLE.is_wrong("BiasAddGrad", dtype, "NHWC")
        assert ("BiasAddGrad" in operations(dtype, True)) == (not is_wrong)


IDS = np.zeros(ROWS, "int32")
FUNCTIONS = {
    "sum": lambda x: tf.reduce_sum(x, 0)[0],
    "mean": lambda x: tf.reduce_mean(x, 0)[0] * 64,
    "euclidean norm": lambda x: tf.math.reduce_euclidean_norm(x, 0)[0] * 32,
    "cumsum": lambda x: tf.cumsum(x)[-1, 0],
    "segment_sum": lambda x: tf.math.segment_sum(x, IDS)[0, 0],
    "segment_mean": lambda x: tf.math.segment_mean(x, IDS)[0, 0] * 64,
    "unsorted_segment_sum": lambda x: tf.math.unsorted_segment_sum(x, IDS, 2)[0, 0],
    "scatter_nd": lambda x: tf.scatter_nd(IDS[:, None], x, [2, 3])[0, 0],
    "tensor_scatter_nd_add": lambda x: tf.tensor_scatter_nd_add(
        tf.zeros([2, 3], x.dtype), IDS[:, None], x
    )[0, 0],
    "IndexedSlices": lambda x: tf.convert_to_tensor(tf.IndexedSlices(x, tf.constant(IDS), [2, 3]))[
        0, 0
    ],
    "gather": lambda x: of_zeros(lambda table: tf.gather(table, IDS), [2, 3], x)[0, 0],
    "broadcast": lambda x: of_zeros(lambda offset: x + offset, [3], x)[0],
    "scale": lambda x: of_zeros(lambda scale: tf.ones_like(x) * scale, [3], x)[0],
    "tile": lambda x: of_zeros(lambda offset: tf.tile(offset, [ROWS, 1]), [1, 3], x)[0, 0],
    "bias, channels first": lambda x: of_zeros(
        lambda bias: tf.nn.bias_add(x[..., None], bias, data_format="NCHW"), [3], x[..., None]
    )[0],
    "upsampling": lambda x: of_zeros(
        lambda image: tf.image.resize(image, [100, 100], "nearest"),
        [1, 1, 1, 3],
        tf.reshape(x, [1, 100, 100, 3]),
    )[0, 0, 0, 0],
}


def of_zeros(function, shape, upstream):
    argument = tf.zeros(shape, upstream.dtype)
    with tf.GradientTape() as tape:
        tape.watch(argument)
        y = function(argument)
    return tf.convert_to_tensor(tape.gradient(y, argument, upstream))


@once
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_random_numbers(name, dtype):
    x = tf.cast(tf.random.stateless_uniform([ROWS, 3], [1, 2]), dtype)
    exact = x.numpy().astype("float64")[:, 0]
    right = {"mean": 64 * exact.mean(), "segment_mean": 64 * exact.mean()}.get(name, exact.sum())
    if name == "euclidean norm":
        right = 32 * np.sqrt((exact**2).sum())
    for mode in ("eager", "function"):
        found = float(placed(mode, FUNCTIONS[name])(x))
        assert found == pytest.approx(right, rel=ROUNDING[dtype])


@once
def test_shapes_that_are_not_known():
    for shape in ([None, None], None):
        signature = [tf.TensorSpec(shape, "bfloat16")]
        step = tf.function(lambda x: bias_gradient("bfloat16", x), input_signature=signature)
        assert step(tf.ones([ROWS, 4], "bfloat16"))[0] == 9984
        signature = [tf.TensorSpec(shape, "float16")]
        step = tf.function(lambda x: tf.reduce_sum(x, 0), input_signature=signature)
        assert step(tf.ones([ROWS, 4], "float16"))[0] == ROWS


@once
def test_a_step_that_is_exported(tmp_path):
    module = tf.Module()
    module.step = tf.function(lambda x: bias_gradient("bfloat16", x))
    x = tf.ones([ROWS, 4], "bfloat16")
    module.step(x)
    tf.saved_model.save(module, str(tmp_path))
    keras_mp.enable_float32_sums(False)
    assert tf.saved_model.load(str(tmp_path)).step(x)[0] == 9984


@once
def test_kernels_are_asked_in_a_graph_of_tensorflow_1_too():
    cases = [("BiasAddGrad", "bfloat16", "NHWC"), ("Sum", "bfloat16", (True, False))]
    trials.is_result_wrong.cache_clear()
    with tf.Graph().as_default():
        in_graph = [sums.TABLE.is_wrong(*case) for case in cases]
    trials.is_result_wrong.cache_clear()
    assert in_graph == [sums.TABLE.is_wrong(*case) for case in cases]


@once
def test_second_derivatives():
    x = tf.ones([300, 2], tf.bfloat16)
    with tf.GradientTape() as outer:
        outer.watch(x)
        of_bias = of_zeros(lambda bias: tf.nn.bias_add(tf.zeros_like(x), bias), [2], x)
        squares = tf.reduce_sum(of_bias**2)
    np.testing.assert_array_equal(outer.gradient(squares, x).numpy().astype("float32"), 600)

"""In layers and steps of keras_mp what TensorFlow refuses in 16 bits is computed in float32."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import inside
from tests.common import MODES, Mixes, Weighs, differentiated, eager_and_graph, once, placed
from tests.op_autocast import operations

L = tf.keras.layers
WIDE = tf.constant([[1.5, 2.5]])
X = np.array([[1.0, 3.0]], "float32")
MIXTURES = {
    "+": lambda x: x + WIDE,
    "+ reversed": lambda x: WIDE + x,
    "-": lambda x: x - WIDE,
    "*": lambda x: x * WIDE,
    "/": lambda x: x / WIDE,
    "/ reversed": lambda x: WIDE / x,
    "**": lambda x: x**WIDE,
    "%": lambda x: x % WIDE,
    "@": lambda x: x @ tf.transpose(WIDE),
    "maximum": lambda x: tf.maximum(x, WIDE),
    "concat": lambda x: tf.concat([x, WIDE], 0),
    "stack": lambda x: tf.stack([x, WIDE]),
    "where": lambda x: tf.where(x > 2, x, WIDE),
    "where reversed": lambda x: tf.where(x > 2, WIDE, x),
    "tensordot": lambda x: tf.tensordot(x, tf.transpose(WIDE), 1),
    "bias_add": lambda x: tf.nn.bias_add(x, WIDE[0]),
    "conv1d": lambda x: tf.nn.conv1d(x[:, :, None], WIDE[None], 1, "SAME"),
    "clip_by_value": lambda x: tf.clip_by_value(x, WIDE - 1, WIDE),
    "add_n": lambda x: tf.add_n([x, WIDE]),
    "a list as one tensor": lambda x: tf.exp([x, WIDE]),
    "squared_difference": lambda x: tf.math.squared_difference(x, WIDE),
    "scatter": lambda x: tf.tensor_scatter_nd_update(x, [[0]], WIDE * 2),
    "divide_no_nan": lambda x: tf.math.divide_no_nan(x, WIDE),
    "convert_to_tensor": lambda x: tf.convert_to_tensor(x, dtype=tf.float32),
    "convert_to_tensor by name": lambda x: tf.convert_to_tensor(x, dtype="float32"),
    "assert_type": lambda x: tf.debugging.assert_type(x, tf.float32) or x + WIDE,
    "raw_ops": lambda x: tf.raw_ops.AddV2(x=tf.raw_ops.Mul(x=WIDE, y=x), y=x),
    "raw_ops of a list": lambda x: tf.raw_ops.ConcatV2(values=[x, WIDE], axis=0),
    "a nested expression": lambda x: x + WIDE * (x - WIDE),
}
# In a graph TensorFlow makes a float32 tensor of what comes first.
NUMBERS = {
    "maximum": lambda x: tf.maximum(0.5, x),
    "subtract": lambda x: tf.subtract(1.0, x),
    "truediv": lambda x: tf.truediv(1.0, x),
    "where": lambda x: tf.where(x > 2, 0.5, x),
    "greater": lambda x: tf.where(tf.greater(2.0, x), x, 2 * x),
    "squared_difference": lambda x: tf.math.squared_difference(1.0, x),
    "multiply_no_nan": lambda x: tf.math.multiply_no_nan(0.5, x),
    "a number of numpy": lambda x: tf.minimum(np.float32(2.5), x),
    "an array": lambda x: tf.multiply(np.array([0.5, 2.0], "float32"), x),
    "a list": lambda x: tf.pow([2.0, 0.5], x),
    "linspace": lambda x: tf.linspace(0.5, x[0, 1], 3)[None],
    "one_hot": lambda x: tf.one_hot([1], 2, on_value=0.5, off_value=x[0, 0]) * x,
}
WEIGHT = np.array([[0.5, 2.0], [1.5, 1.0]], "float32")
# A weight that appears in 16 bits has all digits of float32 in what TensorFlow has in float32 only.
OF_WEIGHTS = {
    "complex": lambda w: tf.abs(tf.complex(w, w)),
    "inv": lambda w: tf.linalg.inv(w),
    # TensorFlow reads it in the middle of a function.
    "linalg.expm": lambda w: tf.linalg.expm(w),
    "digamma": lambda w: tf.math.digamma(w),
    "stateless_normal": lambda w: tf.random.stateless_normal([2, 2], [1, 2], w, 0.0),
    "einsum with an array": lambda w: tf.einsum("ij,jk->ik", w, WEIGHT),
    "an array before it": lambda w: tf.matmul(WEIGHT, w),
}


@tf.custom_gradient
def doubled(x):
    """Its gradient is float32, whatever x is."""

    def gradient(upstream):
        return 2.0 * tf.cast(upstream, tf.float32)

    return 2 * x, gradient


def written(x):
    array = tf.TensorArray(tf.float32, 2)
    return array.write(0, x).write(1, WIDE).stack()


CONTROL_FLOW = {
    "cond": lambda x: tf.cond(x[0, 0] > 0, lambda: x, lambda: WIDE),
    "a dict of cond": lambda x: tf.cond(
        x[0, 0] < 0, lambda: {"a": x, "b": WIDE}, lambda: {"a": WIDE, "b": x}
    )["b"],
    "switch_case": lambda x: tf.switch_case(tf.size(x) - 2, [lambda: x, lambda: WIDE]),
    "while_loop": lambda x: tf.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, y * WIDE), (0, x), maximum_iterations=3
    )[1],
    "TensorArray.write": written,
    "TensorArray.unstack": lambda x: tf.TensorArray(tf.float32, 1).unstack(x).stack(),
    "map_fn": lambda x: tf.map_fn(lambda row: row * WIDE[0], x),
    "scan": lambda x: tf.scan(lambda a, b: a * b * WIDE[0], tf.concat([x, x], 0)),
    "foldl": lambda x: tf.foldl(lambda a, b: a + b * WIDE[0], tf.concat([x, x], 0)),
    "a custom gradient": lambda x: doubled(x) + x * x,
}


def run(layer, mode):
    @MODES[mode]
    def differentiate(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            low = tf.cast(x, layer.compute_dtype)
            tape.watch(low)
            y = layer(low)
            loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
        return y, tape.gradient(loss, [x, low])

    return differentiate(tf.constant(X))


@functools.cache
def in_float32(function):
    """The result and the gradient that float32 has, in eager, for all modes and dtypes."""
    result, (gradient, _) = run(Mixes(function, dtype="float32"), "eager")
    return result, gradient


@pytest.mark.parametrize(("name", "mode", "dtype"), eager_and_graph(MIXTURES | CONTROL_FLOW))
def test_the_result_is_that_of_float32(name, mode, dtype):
    function = {**MIXTURES, **CONTROL_FLOW}[name]
    expected, of_x = in_float32(function)
    layer = Mixes(function, dtype=keras_mp.Policy(f"mixed_{dtype}"))
    found, (gradient, of_low) = run(layer, mode)
    # TensorFlow itself multiplies matrices of bfloat16 and float32, and returns bfloat16.
    assert found.dtype == tf.float32 or name in ("@", "tensordot", *CONTROL_FLOW)
    np.testing.assert_allclose(tf.cast(found, tf.float32), expected, rtol=2**-7)
    assert (gradient.dtype, of_low.dtype) == (tf.float32, dtype)
    np.testing.assert_allclose(gradient, of_x, rtol=2**-6)


@pytest.mark.parametrize(("name", "mode", "dtype"), eager_and_graph(NUMBERS))
def test_a_number_has_the_dtype_of_the_tensor_beside_it(name, mode, dtype):
    expected, of_x = in_float32(NUMBERS[name])
    policy = keras_mp.Policy(f"mixed_{dtype}")
    found, (gradient, _) = run(Mixes(NUMBERS[name], dtype=policy), mode)
    assert found.dtype == dtype
    np.testing.assert_allclose(tf.cast(found, tf.float32), expected, rtol=2**-6)
    np.testing.assert_allclose(gradient, of_x, rtol=2**-5)


# What float32 gives is computed once, in eager.
@functools.cache
def results_of(names, policy, mode="eager"):
    """What functions of a matrix return, each a list, and the gradient of their sum."""
    functions = [function for group in operations.GROUPS.values() for function in group.items()]
    functions = [function for name, function in functions if name in names]
    layer = Mixes(lambda x: [function(x) for function in functions], dtype=policy)
    x = tf.constant(np.random.default_rng(0).uniform(0.1, 0.9, [4, 4]), tf.float32)

    def call(x):
        results = tf.nest.map_structure(lambda y: tf.abs(y) if y.dtype.is_complex else y, layer(x))
        return [tf.nest.flatten(each) for each in results]

    def loss(results):
        floats = [y for each in results for y in each if y.dtype.is_floating]
        return tf.add_n([tf.reduce_sum(tf.cast(y, tf.float32)) for y in floats])

    return MODES[mode](lambda x: differentiated(lambda: call(x), x, loss))(x)


@once
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", operations.GROUPS)
def test_what_float32_computes_runs_in_16_bits(group, mode):
    names = tuple(operations.GROUPS[group])
    if mode == "jit":
        names = tuple(name for name in names if name not in operations.NOT_IN_XLA)
    expected, of_float32 = results_of(names, "float32")
    for dtype in ("float16", "bfloat16"):
        found, gradient = results_of(names, keras_mp.Policy(f"mixed_{dtype}"), mode)
        assert gradient.dtype == tf.float32
        atol = 0.01 * np.abs(of_float32).max()
        np.testing.assert_allclose(gradient, of_float32, rtol=0.05, atol=atol)
        for name, results, right in zip(names, found, expected, strict=True):
            for each, exact in zip(results, right, strict=True):
                each, exact = (tf.cast(value, tf.float32) for value in (each, exact))
                np.testing.assert_allclose(each, exact, rtol=0.05, atol=0.02, err_msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_weights_in_what_is_of_float32(mode):
    left_out = operations.NOT_IN_XLA if mode == "jit" else ()
    functions = [function for name, function in OF_WEIGHTS.items() if name not in left_out]

    def computed(_, weight):
        return [function(weight) for function in functions]

    for dtype, rtol in (("float16", 2**-10), ("bfloat16", 2**-7)):
        layer = Weighs(computed, [2, 2], dtype=keras_mp.Policy(f"mixed_{dtype}"))
        layer.set_weights([WEIGHT])
        layer(tf.constant(X))
        for function, found in zip(functions, MODES[mode](layer)(tf.constant(X))):
            expected = function(tf.constant(WEIGHT))
            np.testing.assert_allclose(tf.cast(found, tf.float32), expected, rtol=rtol)


# For a number of NumPy in a list, generated code takes its slower way at once.
@pytest.mark.parametrize("size", [2, np.int64(2)])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_kernel_is_missing_in_float16_only(mode, size):
    images = np.arange(64, dtype="float32").reshape(1, 4, 4, 4, 1)
    layer = Mixes(
        lambda x: tf.nn.pool(x, [size, 1, 1], "MAX", strides=[1, 1, 1], padding="VALID"),
        dtype=keras_mp.Policy("mixed_float16"),
    )
    found = MODES[mode](lambda: layer(images))()
    np.testing.assert_array_equal(tf.cast(found, tf.float32), images[:, 1:])


def test_branches_that_float32_refuses_raise_the_error_of_tensorflow():
    layer = Mixes(
        lambda x: tf.cond(x[0, 0] > 0, lambda: x, lambda: tf.constant("a")),
        dtype=keras_mp.Policy("mixed_bfloat16"),
    )
    with pytest.raises(TypeError, match="different types"):
        tf.function(layer)(tf.constant(X))


def test_variables_and_steps():
    class Blends(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = L.Dense(2)
            self.factor = tf.Variable([2.0, 3.0])

        def call(self, x):
            return self.inner(x) * self.factor

        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                low = self.inner(x)
                loss = tf.reduce_mean((low - x) * self.factor)
                dtypes.append((low.dtype.name, loss.dtype.name))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"loss": loss}

    dtypes = []
    with keras_mp.policy_scope("mixed_bfloat16"):
        model = Blends()
    model.compile("sgd", "mse")
    model.fit(X, X, verbose=0)
    assert dtypes[-1] == ("bfloat16", "float32")
    assert model(X).dtype == tf.float32


@pytest.mark.parametrize("mode", MODES)
def test_what_is_assigned_to_a_float32_variable(mode):
    total = tf.Variable([[0.0, 0.0]])
    layer = Mixes(
        lambda x: total.assign(x) + total.assign_add(x) + total.assign_sub(value(x), False),
        dtype=keras_mp.Policy("mixed_bfloat16"),
    )

    def value(x):
        return x / 2

    low = tf.cast(X, "bfloat16")
    MODES[mode](lambda: layer(low))()
    np.testing.assert_array_equal(total, X * 1.5)
    narrow = tf.Variable(low)
    layer.function = lambda x: narrow.assign(tf.cast(x, tf.float32))
    with pytest.raises(ValueError, match="conversion requested dtype bfloat16"):
        MODES[mode](lambda: layer(low))()
    with pytest.raises(ValueError, match="conversion requested dtype float32"):
        total.assign(low)


class Network(tf.keras.layers.Layer):
    """A layer that a loop calls, and whose method it calls."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(2, kernel_initializer="identity")

    def build(self, shape):
        self.dense.build(shape)
        self.bias = self.add_weight(shape=[2], initializer="zeros", name="bias")

    def call(self, x):
        return self.dense(x)

    def step(self, x):
        return self.dense(x) + self.bias


def network(policy):
    with keras_mp.policy_scope(policy):
        layer = Network()
    layer.build((1, 2))
    return layer


OUT_OF_REACH = {
    **{name: function for name, function in MIXTURES.items() if name != "assert_type"},
    **{name: NUMBERS[name] for name in ("maximum", "truediv", "multiply_no_nan", "a list")},
    **{name: CONTROL_FLOW[name] for name in ("cond", "while_loop", "TensorArray.write")},
    "after moves": lambda x: tf.stop_gradient(tf.reshape(x[:, :], [1, 2])) * WIDE + x,
    "rows": lambda x: tf.gather(x, [0]) * WIDE,
    "<": lambda x: tf.where(x < WIDE, x, 2 * x) * WIDE,
    "a function": lambda x: tf.function(lambda x: x * WIDE)(x),
    "a function's result": lambda x: tf.function(lambda x: 2 * x)(x) * WIDE,
    "a function of float32": lambda x: DOUBLED(x) * WIDE,
    "a gradient": lambda x: of_square(x) * WIDE,
    "an assignment": lambda x: VARIABLE.assign(x) + x,
    "a loss": lambda x: tf.keras.losses.Huber()(WIDE, x),
    "a cross entropy": lambda x: tf.nn.softmax_cross_entropy_with_logits(WIDE, x),
    "one in 16 bits": lambda x: tf.nn.softmax_cross_entropy_with_logits(x, x) * WIDE,
    "a mean in 16 bits": lambda x: tf.nn.moments(x, [1])[0] * WIDE,
}
DOUBLED = tf.function(lambda x: 2.0 * x, input_signature=[tf.TensorSpec([1, 2])])
VARIABLE = tf.Variable([[0.0, 0.0]])


def of_square(x):
    return differentiated(lambda: x * x, x)[1]


@functools.cache
def out_of_reach(name, method, policy, mode):
    layer = network(policy)

    @MODES[mode]
    def differentiate(x):
        call = lambda: OUT_OF_REACH[name](getattr(layer, method)(x))  # noqa: E731
        return differentiated(call, x, lambda y: tf.cast(y, tf.float32) ** 2)

    return differentiate(tf.constant(X))


@pytest.mark.parametrize("method", ["__call__", "step"])
@pytest.mark.parametrize(("name", "mode", "dtype"), eager_and_graph(OUT_OF_REACH))
def test_out_of_reach_a_tensor_of_ours_meets_float32(name, mode, dtype, method):
    expected, of_x = out_of_reach(name, method, "float32", "eager")
    found, gradient = out_of_reach(name, method, f"mixed_{dtype}", mode)
    np.testing.assert_allclose(tf.cast(found, tf.float32), expected, rtol=2**-6)
    np.testing.assert_allclose(gradient, of_x, rtol=2**-5)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_elsewhere_16_bits_are_refused_as_ever(mode):
    """Of others, beside ours, and in our layers what float32 refuses, too."""
    layer = network("mixed_float16")
    low, refused = tf.cast(X, tf.float16), (TypeError, tf.errors.InvalidArgumentError)

    def others(x):
        assert layer(x).dtype == tf.float16
        return tf.cast(x, tf.float16) * WIDE

    for function in (
        lambda: others(tf.constant(X)),
        lambda: low + WIDE,
        lambda: tf.linalg.inv(tf.cast(WEIGHT, tf.bfloat16)),
        lambda: Mixes(lambda x: x + tf.cast(WIDE, tf.float64), dtype=layer.dtype_policy)(X),
    ):
        with pytest.raises(refused):
            MODES[mode](function)()
    with pytest.raises(TypeError):
        tf.function(lambda: tf.maximum(0.5, low))()
    for dtype in ("float32", layer.dtype_policy):
        with pytest.raises(Exception, match="Incompatible shapes|must be broadcastable|Dimensions"):
            Mixes(lambda x: x + tf.ones([3, 3]), dtype=dtype)(X)


def test_a_fault_of_keras_mp_is_not_hidden(monkeypatch):
    def fails(*_):
        raise TypeError("a fault")

    layer = Mixes(tf.linalg.inv, dtype=keras_mp.Policy("mixed_float16"))
    inside.set_widening(monkeypatch, fails)
    with pytest.raises(TypeError, match="a fault"):
        layer(tf.ones([2, 2], tf.float16))


# Functions that were written for float32 get float32 from a layer of 16 bits.


TWO_ROWS = np.array([[1.0, 3.0], [0.5, 0.1]], "float32")
SPEC = tf.TensorSpec([None, 2], tf.float32, name="x")


@tf.function(input_signature=[SPEC])
def twice(x):
    return 2.0 * x


@tf.function(input_signature=[{"x": SPEC, "y": SPEC}])
def added(inputs):
    return inputs["x"] + inputs["y"]


@tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.float32)])
def of_ragged(x):
    return 2.0 * tf.reshape(x.flat_values, [2, 2])


concrete = tf.function(lambda x: 2.0 * x).get_concrete_function(SPEC)
FUNCTIONS = {
    "an input_signature": twice,
    "by keyword": lambda x: twice(x=x),
    "a structure": lambda x: added({"x": x, "y": x}),
    "a ragged tensor": lambda x: of_ragged(tf.RaggedTensor.from_tensor(x)),
    "a concrete function": concrete,
    "a concrete function by keyword": lambda x: concrete(x=x),
}
# XLA does not call Python.
OF_PYTHON = {
    "py_function": lambda x: tf.py_function(lambda x: x * 2, [x], tf.float32),
    "py_function of a list": lambda x: tf.py_function(lambda x: [x * 2], [x], [tf.float32])[0],
    "py_function as a decorator": lambda x: tf.py_function(Tout=tf.float32)(lambda x: x * 2)(x),
    "numpy_function": lambda x: tf.numpy_function(lambda x: x * 2, [x], tf.float32),
    "py_func": lambda x: tf.compat.v1.py_func(lambda x: x * 2, [x], tf.float32),
    "of 16 bits": lambda x: tf.py_function(lambda x: x * 2, [x], x.dtype),
    "of integers": lambda x: tf.numpy_function(
        lambda x: np.full([2, 2], x.dtype.itemsize, "int32"), [x], tf.int32
    ),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A SavedModel with a function and a signature."""
    module, folder = tf.Module(), str(tmp_path_factory.mktemp("saved"))
    module.factor = tf.Variable(2.0)
    module.by_name = tf.function(lambda x: {"y": x * module.factor}, input_signature=[SPEC])
    module.traced = tf.function(lambda x: x * module.factor)
    module.traced.get_concrete_function(SPEC)
    tf.saved_model.save(module, folder, signatures=module.by_name)
    return tf.saved_model.load(folder)


def check(function, mode, dtype, gradient=True):
    expected = function(tf.constant(TWO_ROWS))
    layer = Mixes(function, dtype=keras_mp.Policy(f"mixed_{dtype}"))

    def differentiate(x):
        return differentiated(lambda: layer(x), x) if gradient else (layer(x), None)

    found, of_x = placed(mode, differentiate)(tf.constant(TWO_ROWS))
    np.testing.assert_allclose(tf.cast(found, tf.float32), expected, rtol=2**-7)
    if gradient:
        assert of_x.dtype == tf.float32
        np.testing.assert_array_equal(of_x, np.full([2, 2], 2.0))
    return found


@once
@pytest.mark.parametrize(("name", "mode", "dtype"), eager_and_graph(FUNCTIONS))
def test_functions(name, mode, dtype):
    assert check(FUNCTIONS[name], mode, dtype).dtype == tf.float32


@once
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_functions_of_a_saved_model(loaded, mode, dtype):
    signature = loaded.signatures["serving_default"]
    for function in (
        lambda x: signature(x=x)["y"],
        lambda x: loaded.by_name(x)["y"],
        loaded.traced,
    ):
        assert check(function, mode, dtype).dtype == tf.float32


@once
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("name", OF_PYTHON)
def test_functions_of_python(name, mode):
    for dtype in ("float16", "bfloat16"):
        is_differentiable = name.startswith("py_function")
        check(OF_PYTHON[name], mode, dtype, is_differentiable)


@pytest.mark.parametrize("mode", MODES)
def test_weights(mode):
    def added(x, weight):
        return x + twice(tf.convert_to_tensor(weight)) + twice(weight * 1.0)

    layer = Weighs(added, [2, 2], dtype=keras_mp.Policy("mixed_bfloat16"))
    layer.build([None, 2])
    np.testing.assert_allclose(placed(mode, layer)(tf.constant(TWO_ROWS)), TWO_ROWS + 4, rtol=2**-7)


@once
def test_elsewhere_they_refuse_16_bits():
    Mixes(twice, dtype=keras_mp.Policy("mixed_float16"))(TWO_ROWS)
    low = tf.constant(TWO_ROWS, tf.float16)
    with pytest.raises((TypeError, ValueError)):
        twice(low)
    with pytest.raises(tf.errors.InvalidArgumentError):
        concrete(x=low)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.py_function(lambda x: x * 2, [low], tf.float32)


@once
def test_functions_of_16_bits_get_16_bits():
    half = tf.function(lambda x: 2 * x, input_signature=[tf.TensorSpec([None, 2], tf.float16)])
    layer = Mixes(half, dtype=keras_mp.Policy("mixed_float16"))
    assert layer(tf.constant(TWO_ROWS)).dtype == tf.float16

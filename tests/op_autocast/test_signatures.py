"""Functions that were written for float32 get float32 from a layer of 16 bits."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import MODES, Mixes, differentiated, eager_and_graph, once, placed

X = np.array([[1.0, 3.0], [0.5, 0.1]], "float32")
SPEC = tf.TensorSpec([None, 2], tf.float32, name="x")


@tf.function(input_signature=[SPEC])
def doubled(x):
    return 2.0 * x


@tf.function(input_signature=[{"x": SPEC, "y": SPEC}])
def added(inputs):
    return inputs["x"] + inputs["y"]


@tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.float32)])
def of_ragged(x):
    return 2.0 * tf.reshape(x.flat_values, [2, 2])


concrete = tf.function(lambda x: 2.0 * x).get_concrete_function(SPEC)
FUNCTIONS = {
    "an input_signature": doubled,
    "by keyword": lambda x: doubled(x=x),
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
    expected = function(tf.constant(X))
    layer = Mixes(function, dtype=keras_mp.Policy(f"mixed_{dtype}"))

    def differentiate(x):
        return differentiated(lambda: layer(x), x) if gradient else (layer(x), None)

    found, of_x = placed(mode, differentiate)(tf.constant(X))
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
    class Layer(tf.keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=[2, 2], initializer="ones", name="kernel")

        def call(self, x):
            return x + doubled(tf.convert_to_tensor(self.kernel)) + doubled(self.kernel * 1.0)

    layer = Layer(dtype=keras_mp.Policy("mixed_bfloat16"))
    layer.build([None, 2])
    np.testing.assert_allclose(placed(mode, layer)(tf.constant(X)), X + 4, rtol=2**-7)


@once
def test_elsewhere_they_refuse_16_bits():
    Mixes(doubled, dtype=keras_mp.Policy("mixed_float16"))(X)
    low = tf.constant(X, tf.float16)
    with pytest.raises((TypeError, ValueError)):
        doubled(low)
    with pytest.raises(tf.errors.InvalidArgumentError):
        concrete(x=low)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.py_function(lambda x: x * 2, [low], tf.float32)


@once
def test_functions_of_16_bits_get_16_bits():
    half = tf.function(lambda x: 2 * x, input_signature=[tf.TensorSpec([None, 2], tf.float16)])
    layer = Mixes(half, dtype=keras_mp.Policy("mixed_float16"))
    assert layer(tf.constant(X)).dtype == tf.float16

"""Regions: nesting, threads, decorators, errors, and what is said of them."""

import copy
import threading
from concurrent import futures

import pytest
import tensorflow as tf

import keras_mp
from tests import inside
from tests.common import once
from tests.op_autocast.common import is_rounded, normal

pytestmark = once


def is_autocast(dtype="bfloat16"):
    """Is a product that is made now rounded to the dtype?"""
    product = tf.matmul(normal(4, 4), normal(4, 4, seed=1))
    assert product.dtype == tf.float32
    return is_rounded(product, dtype)


def test_regions_nest_and_end_with_an_exception():
    assert not is_autocast()
    with keras_mp.autocast("bfloat16"):
        assert is_autocast()
        with keras_mp.autocast(enabled=False):
            assert not is_autocast()
            assert not is_autocast("float16")
            with keras_mp.autocast("float16"):
                assert is_autocast("float16")
                assert not is_autocast()
        assert is_autocast()
    assert not is_autocast()
    region = keras_mp.autocast("bfloat16")
    with region, region:
        assert is_autocast()
    with pytest.raises(KeyError), region:
        raise KeyError
    assert not is_autocast()
    assert keras_mp.autocast_state().dtype is None


def test_decorator():
    @keras_mp.autocast("bfloat16")
    def product(x, *, y):
        """Documentation."""
        return is_autocast() and x + y

    assert product(1, y=2) == 3
    assert (product.__name__, product.__doc__) == ("product", "Documentation.")
    assert not is_autocast()


def test_decorator_with_autograph():
    @keras_mp.autocast("bfloat16")
    def function(x):
        if tf.reduce_sum(x) > 0:
            x = x * 2.0
        return tf.matmul(x, x)

    x = tf.constant([[1.0 + 2**-10]])
    assert tf.function(function)(x).numpy().item() == 4.0


@pytest.mark.parametrize("jit_compile", [False, True])
def test_decorator_of_a_tf_function(jit_compile):
    """It does what `with` does around each call."""

    @tf.function(jit_compile=jit_compile)
    def function(x):
        """Documentation."""
        if tf.reduce_sum(x) > 0:
            x = x * 2.0
        return tf.matmul(x, x)

    decorated = keras_mp.autocast("bfloat16")(function)
    x = tf.constant([[1.0 + 2**-10]])
    exact = function(x)
    with keras_mp.autocast("bfloat16"):
        expected = function(x)
    assert decorated(x).numpy().item() == expected.numpy().item()
    # The XLA of TensorFlow 2.16 leaves out casts.
    assert expected.numpy().item() == 4.0 or jit_compile
    assert exact.numpy().item() != 4.0
    assert function(x).numpy().item() == exact.numpy().item()
    assert decorated.experimental_get_tracing_count() == 2  # one for each of both regions
    assert (decorated.__name__, decorated.__doc__) == ("function", "Documentation.")
    assert decorated.get_concrete_function(x)(x).numpy().item() == expected.numpy().item()
    assert tf.function(lambda x: (decorated(x), x))(x)[0].numpy().item() == expected.numpy().item()
    assert not is_autocast()


def test_decorator_of_a_tf_function_that_is_a_method():
    class Product(tf.Module):
        w = None

        @keras_mp.autocast("bfloat16")
        @tf.function
        def __call__(self, x):
            if self.w is None:
                self.w = tf.Variable(x)
            return tf.matmul(x, self.w)

    x = tf.constant([[1.0 + 2**-10]])
    for product in (Product(), Product()):  # Each makes a variable when it is traced first.
        assert product(x).numpy().item() == 1.0
        assert product.w.dtype == tf.float32
        assert product.__call__.get_concrete_function(x)(x).numpy().item() == 1.0


def test_a_decorated_tf_function_is_saved_as_a_signature(tmp_path):
    class Product(tf.Module):
        @keras_mp.autocast("bfloat16")
        @tf.function(input_signature=[tf.TensorSpec([1, 1])])
        def product(self, x):
            return tf.matmul(x, x)

    module, x = Product(), tf.constant([[1.0 + 2**-10]])
    signature = module.product.get_concrete_function()
    tf.saved_model.save(module, str(tmp_path), signatures=signature)
    served = tf.saved_model.load(str(tmp_path)).signatures["serving_default"](x)
    assert served["output_0"].numpy().item() == module.product(x).numpy().item() == 1.0
    assert copy.deepcopy(module).product(x).numpy().item() == 1.0


def test_region_in_a_function_that_autograph_converts():
    @tf.function
    def function(x):
        with keras_mp.autocast("bfloat16"):
            y = x
            if tf.reduce_sum(x) > 0:
                y = tf.matmul(x, x)
        return y, tf.matmul(x, x)

    rounded, exact = function(tf.constant([[1.0 + 2**-10]]))
    assert rounded.numpy().item() == 1.0 != exact.numpy().item()


def test_threads_that_enter_and_leave_at_the_same_time():
    wrong, barrier = [], threading.Barrier(4)

    def work(dtype):
        barrier.wait()
        for _ in range(20):
            with keras_mp.autocast(dtype):
                if not is_autocast(dtype):
                    wrong.append(dtype)
            if is_autocast(dtype):
                wrong.append(None)

    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, ["bfloat16", "float16"] * 2))
    assert not wrong


def test_state():
    assert keras_mp.autocast_state() == (None, (), ())
    region = keras_mp.autocast("float16", deny=["Einsum"])
    assert repr(region) == "autocast('float16', enabled=True, allow=[], deny=['Einsum'])"
    with keras_mp.autocast(tf.float16, allow=["Tanh"], deny=["MatMul", "Einsum"]):
        state = keras_mp.autocast_state()
        assert state.dtype == tf.float16
        assert (state.allow, state.deny) == (("Tanh",), ("Einsum", "MatMul"))
        with keras_mp.autocast(enabled=False):
            assert keras_mp.autocast_state().dtype is None


def test_allow_and_deny():
    x = normal(4, 4)
    with keras_mp.autocast("bfloat16", deny=["MatMul"]):
        assert not is_autocast()
        tanh = tf.tanh(x)
    with keras_mp.autocast("bfloat16", allow=["Tanh"]):
        rounded = tf.tanh(x)
    assert rounded.dtype == tanh.dtype == tf.float32
    assert tf.reduce_all(rounded == tf.cast(tf.tanh(tf.cast(x, "bfloat16")), "float32"))
    assert tf.reduce_all(tanh == tf.tanh(x))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dtype": "float32"}, ValueError, "'bfloat16' or 'float16'.*dtype='float32'"),
        ({"dtype": "mixed_bfloat16"}, ValueError, "Did you mean 'bfloat16'.*'mixed_bfloat16'"),
        ({"dtype": 7.5}, ValueError, "Received: dtype=7.5"),
        ({"enabled": 1}, TypeError, "must be a bool.*enabled=1"),
        ({"enabled": tf.constant(True)}, TypeError, "must be a bool"),
        ({"allow": ["Softmaxx"]}, ValueError, "no operation 'Softmaxx'.*mean 'Softmax'"),
        ({"deny": ["matmul"]}, ValueError, "no operation 'matmul'.*mean 'MatMul'"),
        ({"allow": [3]}, ValueError, "no operation 3"),
        ({"allow": "Tanh"}, TypeError, "must be a list.*allow='Tanh'"),
        ({"allow": ["StringJoin"]}, ValueError, "'StringJoin' does not take tensors of bfloat16"),
        ({"allow": ["Sum"]}, ValueError, "'Sum' adds up"),
        ({"allow": ["Tanh"], "deny": ["Tanh"]}, ValueError, "both: .*Tanh"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        keras_mp.autocast(**{"dtype": "bfloat16", **arguments})


def test_a_dtype_that_is_fast_here(monkeypatch):
    monkeypatch.setattr(keras_mp.hardware.devices, "best_policy", lambda: ("mixed_float16", ""))
    with keras_mp.autocast():
        assert keras_mp.autocast_state().dtype == tf.float16


def test_where_no_dtype_is_fast_it_is_said_once(monkeypatch):
    monkeypatch.setattr(keras_mp.hardware.devices, "best_policy", lambda: ("float32", ""))
    inside.forget_warning_of_regions()
    region = keras_mp.autocast()
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="leaves everything in float32"), region:
        assert not is_autocast()
    with keras_mp.autocast(), region:
        assert not is_autocast()


def test_a_measurement_is_not_autocast(monkeypatch):
    found = []
    measure = lambda device: found.append(keras_mp.autocast_state().dtype)  # noqa: E731
    monkeypatch.setattr("keras_mp.hardware.stopwatch.measure", measure)
    with keras_mp.autocast("bfloat16"):
        keras_mp.hardware._measured.__wrapped__("CPU:0")
    assert found == [None]


def test_table_for_a_device():
    everywhere, cpu = keras_mp.autocast_ops(), keras_mp.autocast_ops("float16", "CPU")
    assert everywhere.keys() == cpu.keys()
    assert list(cpu) == sorted(cpu)
    assert everywhere["Tanh"].policy == "infer"
    assert cpu["Tanh"].policy == "deny"
    assert cpu["MatMul"].policy == "allow"
    # TensorFlow has this kernel in bfloat16 only.
    assert (cpu["MaxPool3D"].policy, everywhere["MaxPool3D"].policy) == ("deny", "clear")
    with pytest.raises(ValueError, match="device='TPU'"):
        keras_mp.autocast_ops(device="TPU")


def test_pinned_inputs():
    seen = []

    @keras_mp.autocast_inputs("float16")
    @tf.custom_gradient
    def double(x):
        seen.append((x.dtype.name, keras_mp.autocast_state().dtype))

        def gradient(upstream):
            seen.append((upstream.dtype.name, keras_mp.autocast_state().dtype))
            return upstream * 2

        return x * 2, gradient

    x = normal(2, 2)
    for wrap in (lambda f: f, tf.function):
        function = wrap(lambda x: double(x))
        with tf.GradientTape() as tape, keras_mp.autocast("bfloat16"):
            tape.watch(x)
            y = function(x)
            gradient = tape.gradient(y, x)
        assert y.dtype == gradient.dtype == tf.float32
        assert tf.reduce_all(gradient == 2.0)
    assert len(seen) >= 4
    assert set(seen) == {("float16", None)}
    seen.clear()
    assert double(x).dtype == tf.float32
    assert seen == [("float32", None)]


def test_pinned_to_float32():
    pinned = keras_mp.autocast_inputs("float32")(lambda x, k: (x.dtype.name, tf.matmul(x, k)))
    x = normal(3, 3)
    with keras_mp.autocast("bfloat16"):
        dtype, product = pinned(tf.cast(x, "bfloat16"), k=x)
    assert dtype == "float32"
    assert tf.reduce_all(product == tf.matmul(tf.cast(tf.cast(x, "bfloat16"), "float32"), x))
    with pytest.raises(ValueError, match="float64"):
        keras_mp.autocast_inputs("float64")


def test_what_cannot_be_decorated():
    with pytest.raises(TypeError, match="not a class: decorate its methods"):

        @keras_mp.autocast("bfloat16")
        class Module(tf.Module):
            pass

    with pytest.raises(TypeError, match="with parentheses"):
        keras_mp.autocast(lambda x: x)

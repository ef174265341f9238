"""LSTMs in 16 bits: what Keras computes, nearer to float64, in one loop of small products."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.kernels import recurrent
from tests import inside
from tests.common import IS_KERAS_3, MODES, differentiated, distances, once, pairs, unscaled
from tests.kernels.stock_layers import results_and_gradients
from tests.op_autocast.common import operations

K = tf.keras
BATCH, TIME, FEATURES, UNITS = 6, 9, 5, 8


@pytest.fixture
def calls(monkeypatch):
    """How many times the loop was run in the place of Keras's."""
    runs = []
    forward = recurrent._forward
    monkeypatch.setattr(recurrent, "_forward", lambda *args: runs.append(1) or forward(*args))
    return runs


def data(features=FEATURES):
    random = np.random.default_rng(0)
    x = random.normal(size=[BATCH, TIME, features])
    return x.astype(np.float32)


def layers(policy, **kwargs):
    layer = K.layers.LSTM(UNITS, dtype=policy, **kwargs)
    layer.build((None, TIME, FEATURES))
    return layer


def of_run(layer, x, mode):
    """What a layer returns, and the gradients of its inputs and weights."""
    wrap, weights = MODES[mode], layer.trainable_variables
    return results_and_gradients(layer, tf.constant(x), weights=weights, wrap=wrap)


KWARGS = {
    "all": {"return_sequences": True, "return_state": True},
    "backwards": {"go_backwards": True, "return_sequences": True},
    "last": {},
}
SPEEDS = [("bfloat16", False), ("bfloat16", True), ("float16", True)]


@pytest.mark.parametrize(("kind", "mode", "returned"), pairs(SPEEDS, ["eager", "function"], KWARGS))
def test_as_keras_and_at_least_as_exact(kind, mode, returned, calls, monkeypatch, request):
    (dtype, are_slow), kwargs = kind, KWARGS[returned]
    inside.set_slow(monkeypatch, are_slow)
    policy = unscaled(dtype)
    exact, ours = layers("float64", **kwargs), layers(policy, **kwargs)
    ours.set_weights(exact.get_weights())
    found = of_run(ours, data(), mode)
    assert len(calls) == 1
    request.getfixturevalue("kernels_of_tensorflow")
    keras_own = of_run(ours, data(), mode)
    assert len(calls) == 1
    expected = of_run(exact, data().astype(np.float64), "eager")
    assert [each.shape for each in found] == [each.shape for each in keras_own]
    # The sum over all of them: of one, the rounding of the last digit may decide.
    of_ours, of_keras = sum(distances(found, expected)), sum(distances(keras_own, expected))
    assert of_ours < of_keras * 1.05
    assert max(distances(found, expected)) < {"bfloat16": 0.02, "float16": 0.003}[dtype]


def test_states_that_are_given_have_gradients(calls):
    layer = layers(keras_mp.Policy("mixed_bfloat16"), return_state=True)
    exact = layers("float32", return_state=True)
    exact.set_weights(layer.get_weights())
    random = np.random.default_rng(1)
    states = [tf.constant(random.normal(size=[BATCH, UNITS]), tf.float32) for _ in range(2)]

    def of_states(layer, dtype):
        begin = [tf.cast(each, dtype) for each in states]
        return results_and_gradients(lambda *s: layer(data(), initial_state=list(s)), *begin)

    assert max(distances(of_states(layer, "bfloat16"), of_states(exact, "float32"))) < 0.02
    assert len(calls) == 1


@pytest.mark.parametrize(
    "kwargs",
    [
        {"unroll": True},
        {"activation": "relu"},
        {"recurrent_activation": "tanh"},
        {"use_bias": False},
        {"recurrent_dropout": 0.5},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_other_lstms_are_left_to_keras(kwargs, calls, monkeypatch):
    inside.set_slow(monkeypatch, False)
    layers(keras_mp.Policy("mixed_bfloat16"), **kwargs)(data())
    layers(keras_mp.Policy("mixed_bfloat16"))(data(), mask=np.ones([BATCH, TIME], bool))
    layers("float32")(data())
    layers(unscaled("float16"))(data())
    assert not calls


@pytest.mark.skipif(not IS_KERAS_3, reason="The loops of Keras 2 call no cell.")
def test_a_cell_whose_call_was_replaced_is_called(calls):
    layer = layers(keras_mp.Policy("mixed_bfloat16"))
    cell, times = layer.cell, []
    call = cell.call
    cell.call = lambda *args, **kwargs: times.append(1) or call(*args, **kwargs)
    layer(data())
    assert times
    assert not calls


@once
def test_functions_that_xla_compiles_are_left_to_keras(calls):
    layer = layers(keras_mp.Policy("mixed_bfloat16"), return_sequences=True)
    results = tf.function(layer, jit_compile=True)(tf.constant(data()))
    assert results.shape == [BATCH, TIME, UNITS]
    assert not calls


def test_dropout_of_inputs(calls):
    layer = layers(keras_mp.Policy("mixed_bfloat16"), dropout=0.5, return_sequences=True)
    first, second = (
        np.array(tf.cast(layer(data(), training=t), tf.float32)) for t in (True, False)
    )
    assert len(calls) == 2
    assert np.abs(first - second).max() > 0.01


@pytest.mark.parametrize("features", [FEATURES, None])
def test_sizes_that_are_not_known(features, calls):
    layer = layers(keras_mp.Policy("mixed_bfloat16"), return_sequences=True)
    layer(data())
    function = tf.function(layer, input_signature=[tf.TensorSpec([None, None, features])])
    for x in (data(), data()[:2, :3]):
        np.testing.assert_array_equal(
            tf.cast(function(x), tf.float32), tf.cast(layer(x), tf.float32)
        )
    assert len(calls) == 4


@once
def test_second_derivatives():
    layer = layers(keras_mp.Policy("mixed_bfloat16"))
    exact = layers("float32")
    exact.set_weights(layer.get_weights())

    def second(layer):
        x = tf.constant(data())
        total = lambda y: tf.reduce_sum(tf.cast(y, tf.float32))  # noqa: E731
        gradient = lambda: differentiated(lambda: layer(x), x, total)[1]  # noqa: E731
        return differentiated(gradient, x, lambda g: tf.reduce_sum(g**2))[1]

    for each in (second, tf.function(second)):
        assert distances([each(layer).numpy()], [second(exact).numpy()])[0] < 0.05


@once
def test_a_saved_step_goes_on(tmp_path, calls):
    layer = layers(keras_mp.Policy("mixed_bfloat16"), return_sequences=True)
    module = tf.Module()
    module.layer = layer
    module.run = tf.function(layer, input_signature=[tf.TensorSpec([None, TIME, FEATURES])])
    x = tf.constant(data())
    y, before = differentiated(lambda: module.run(x), x)
    tf.saved_model.save(module, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    z, after = differentiated(lambda: loaded.run(x), x)
    np.testing.assert_array_equal(tf.cast(y, tf.float32), tf.cast(z, tf.float32))
    np.testing.assert_array_equal(before, after)
    assert calls


@once
@pytest.mark.parametrize("runs", ["cond", "while_loop", "map_fn", "closed over"])
def test_in_control_flow_and_of_tensors_that_a_function_closes_over(runs, calls):
    with inside.in_reach(None):
        rounded = tf.cast(data(), tf.bfloat16)
    bodies = {
        "closed over": lambda run, x: run(rounded) * tf.reduce_sum(x),
        "cond": lambda run, x: tf.cond(x[0, 0, 0] < 9, lambda: run(x), lambda: 2 * run(x)),
        "while_loop": lambda run, x: tf.while_loop(
            lambda i, _: i < 2, lambda i, y: (i + 1, y + run(x)), (0, tf.zeros([BATCH, UNITS]))
        )[1],
        "map_fn": lambda run, x: tf.map_fn(lambda row: run(row[None])[0], x),
    }
    ours, exact = layers(unscaled("bfloat16")), layers("float32")
    exact.set_weights(ours.get_weights())

    def results(layer):
        run = lambda x: tf.cast(layer(x), tf.float32)  # noqa: E731
        call, weights = functools.partial(bodies[runs], run), layer.trainable_variables
        return results_and_gradients(call, tf.constant(data()), weights=weights, wrap=tf.function)

    assert max(distances(results(ours), results(exact))) < 0.02
    assert calls


# On GPUs: cuDNN's operations in float32 where their gradients are lost.


FORWARD, BACKWARD = "CudnnRNNV3", "CudnnRNNBackpropV3"
LAYERS = {
    "LSTM": lambda **kwargs: K.layers.LSTM(8, **kwargs),
    "GRU": lambda **kwargs: K.layers.GRU(8, **kwargs),
    "Bidirectional": lambda **kwargs: K.layers.Bidirectional(K.layers.LSTM(8, **kwargs)),
}


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU."""
    inside.usual_device()  # It is kept: other tests have the machine's own.
    devices = tf.config.list_logical_devices
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: devices("CPU"))
    inside.set_device(monkeypatch, "GPU")


def dtypes_of_step(make, policy):
    """cuDNN's operations in a step of training, with the dtypes in which they would run."""
    with policy if not isinstance(policy, str) else keras_mp.policy_scope(policy):
        layer = make()
        layer.build((None, 5, 4))

    def step(x):
        total = lambda y: tf.reduce_sum(tf.cast(y, tf.float32))  # noqa: E731
        return differentiated(lambda: layer(x), [x, *layer.trainable_weights], total)[1]

    function = tf.function(step).get_concrete_function(tf.TensorSpec([3, 5, 4]))
    assert {gradient.dtype for gradient in function.structured_outputs} == {tf.float32}
    return set(operations(function.graph, FORWARD, BACKWARD))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.usefixtures("gpu")
def test_what_loses_its_gradients_computes_in_float32(kind, dtype):
    inside = "float32" if dtype == "bfloat16" else dtype
    found = dtypes_of_step(LAYERS[kind], f"mixed_{dtype}")
    assert found == {(FORWARD, inside), (BACKWARD, inside)}


@pytest.mark.usefixtures("gpu")
def test_layers_of_others_are_left_alone():
    dtype = K.mixed_precision.Policy("mixed_bfloat16")
    found = dtypes_of_step(lambda: K.layers.LSTM(8, dtype=dtype), "float32")
    assert found == {(FORWARD, "bfloat16"), (BACKWARD, "bfloat16")}


@once
@pytest.mark.usefixtures("gpu")
def test_results_are_of_the_dtype_of_the_inputs():
    """Also of the operations that programs call by their raw names, and of both older ones."""
    x, state, weights = tf.ones([4, 2, 3]), tf.ones([1, 2, 8]), tf.ones([4 * 8 * (3 + 8 + 2)])
    names = {"input": x, "input_h": state, "input_c": state, "params": weights}

    @tf.function
    def run(op, dtype):
        more = {"sequence_lengths": [4, 4]} if op == FORWARD else {}
        given = {name: tf.cast(value, dtype) for name, value in names.items()}
        with keras_mp.autocast_scope(dtype):
            return getattr(tf.raw_ops, op)(**given, **more)

    for op in ("CudnnRNN", "CudnnRNNV2", FORWARD):
        for dtype in ("bfloat16", "float32"):
            results = run.get_concrete_function(op, dtype).structured_outputs
            assert [each.dtype for each in results[:3]] == [dtype] * 3
            assert results.output.shape == [4, 2, 8]

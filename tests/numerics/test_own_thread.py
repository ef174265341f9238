"""The tools draw no random numbers of the program, and other threads notice nothing of them."""

import random
import threading
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.numerics import own_thread
from tests import common
from tests.numerics.tools import audit, census, compare, sequential, step_times

L = tf.keras.layers


class Drawing(L.Layer):
    """Draws in each way that TensorFlow and Keras have."""

    def call(self, x):
        drawn = tf.random.normal([4]) + tf.cast(tf.random.uniform([4], 0, 9, tf.int32), tf.float32)
        drawn += tf.random.get_global_generator().uniform([4])
        drawn += tf.random.gamma([4], 1.0) + tf.random.poisson([4], 1.0)
        drawn += tf.random.uniform([4], seed=3)
        if common.IS_KERAS_3:
            drawn += tf.keras.random.uniform([4])
        return x + tf.cast(drawn, x.dtype)


def made(seed=0):
    if common.IS_KERAS_3:
        # Keras 3.12 does not seed the generator of `keras.random` again: here a new one is made.
        tf.keras.utils.clear_session(free_memory=False)
    tf.keras.utils.set_random_seed(seed)
    if common.IS_KERAS_3:
        tf.keras.random.uniform([1])
    tf.random.get_global_generator().reset_from_seed(seed)
    layers = [L.Dense(4, name="a"), L.Dropout(0.5), L.Dropout(0.5, seed=7), Drawing()]
    return sequential(*layers, L.Dense(1, name="b"), shape=[4])


X, Y = tf.ones([4, 4]), tf.ones([4, 1])


TOOLS = {
    "compare": lambda model: compare(model, X, Y, policy="mixed_float16"),
    "tune": lambda model: keras_mp.numerics.tune(model, (X, Y), dtype="bfloat16"),
    "audit": lambda model: audit(model, (X, Y)),
    "census": lambda model: census(model, (X, Y)),
    "step_times": lambda model: step_times(model, (X, Y), steps=1),
}


@pytest.fixture(autouse=True)
def custom_objects():
    with tf.keras.utils.custom_object_scope({"Drawing": Drawing}):
        yield


def drawn_next(model):
    """Numbers from each source that a program can draw from."""
    drawn = [np.random.rand(), random.random(), *tf.random.uniform([2]).numpy()]
    drawn += [*tf.random.normal([1], seed=3).numpy()]
    drawn += [*tf.random.get_global_generator().uniform([2]).numpy()]
    drawn += [np.sum(model(X, training=True)), L.Dense(2)(X).numpy().sum()]
    return [float(each) for each in drawn]


@pytest.fixture(scope="module")
def drawn_without_a_tool():
    with tf.keras.utils.custom_object_scope({"Drawing": Drawing}):
        return drawn_next(made())


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_the_program_draws_what_it_would_have_drawn(tool, drawn_without_a_tool):
    model = made()
    TOOLS[tool](model)
    assert drawn_next(model) == drawn_without_a_tool


def run_together(*work):
    """Runs functions in threads that begin together, and returns their results."""
    begin = threading.Barrier(len(work))

    def run(function):
        begin.wait()
        return function()

    with futures.ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(run, work))


def replaced():
    """What tools replace, as the modules of TensorFlow have it."""
    from tensorflow.python.eager.polymorphic_function import polymorphic_function
    from tensorflow.python.framework import random_seed
    from tensorflow.python.ops import gen_random_ops, gen_stateless_random_ops_v2

    modules = (gen_random_ops, gen_stateless_random_ops_v2, random_seed)
    found = [value for module in modules for value in vars(module).values() if callable(value)]
    return [*found, vars(polymorphic_function.Function)["_run_functions_eagerly"]]


def test_a_thread_that_trains_beside_gets_the_same_bits():
    tf.keras.utils.set_random_seed(0)
    observed, was_eager = made(1), []

    def train(steps=12):
        model = made()
        optimizer = tf.keras.optimizers.SGD(1e-4)

        @tf.function
        def step():
            was_eager.append(tf.executing_eagerly())
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(X, training=True) - Y) ** 2)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return loss

        losses = []
        for _ in range(steps):
            losses += [float(step()), np.random.rand(), float(tf.random.uniform([]))]
        is_trained.set()
        assert np.isfinite(losses).all()
        return losses + [float(tf.reduce_sum(each)) for each in model.get_weights()]

    def observe():
        count = 0
        while not is_trained.is_set() or not count:
            # Not yet with a copy: `made` clears what Keras knows of custom objects.
            compare(observed, X, Y, reference=observed)
            compare(observed, X, Y, policy="mixed_bfloat16")
            count += 1
        return count

    is_trained, before = threading.Event(), replaced()
    expected = train()
    is_trained.clear()
    trained, _ = run_together(train, observe)
    assert trained == expected
    assert not any(was_eager)
    assert replaced() == before
    assert not tf.config.functions_run_eagerly()
    assert all("call" not in vars(layer) for layer in observed.layers)


def test_a_layer_may_call_its_arguments_as_the_tools_call_theirs():
    was_eager = []

    class Named(L.Layer):
        @tf.function
        def call(self, x, path=1.0, kind=2.0, layer=3.0, call=4.0):
            was_eager.append(tf.executing_eagerly())
            return tf.vectorized_map(lambda row: row * (path + kind + layer + call), x)

    class Around(L.Layer):
        def __init__(self):
            super().__init__()
            self.named = Named()

        def call(self, x):
            return self.named(x, path=2.0, kind=3.0, layer=4.0, call=5.0)

    model = sequential(Around(), L.Dense(1), shape=[4], loss=None)
    was_eager.clear()
    assert compare(model, X, reference=model).layers[0].path.endswith("named")
    assert was_eager  # so that the operations inside of functions are seen
    assert all(was_eager)
    with keras_mp.numerics.watch(model):
        model(X)


def test_warnings_of_copies_are_left_out_in_this_thread_only():
    messages = keras_mp.support.messages

    def warned():
        with own_thread.without_warnings():
            messages.warn("a")

    with pytest.warns(keras_mp.MixedPrecisionWarning) as found:
        run_together(warned, lambda: messages.warn("b"))
    assert [str(each.message) for each in found] == ["b"]

"""`jit_compile=True`: the same update as one function, or a warning and the usual one."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, NAMESPACES, make_optimizer, mirrored, value

# What Keras says of the variable without a gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")

WRAPPERS = {
    "OptimizerWrapper": keras_mp.OptimizerWrapper,
    "LossScaleOptimizer": keras_mp.LossScaleOptimizer,
    "AllReduceOptimizer": keras_mp.AllReduceOptimizer,
    "MasterWeightOptimizer": keras_mp.MasterWeightOptimizer,
}
INNER = {
    "clipped by norm": lambda: tf.keras.optimizers.Adam(0.01, clipnorm=1.0),
    "clipped by value": lambda: tf.keras.optimizers.RMSprop(0.01, clipvalue=0.1),
    "clipped together": lambda: tf.keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0),
    "decayed and averaged": lambda: tf.keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True),
    "scheduled": lambda: tf.keras.optimizers.Adam(
        tf.keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
}
if "legacy" in NAMESPACES:
    INNER["legacy"] = lambda: make_optimizer("legacy.Adam", clipnorm=1.0)

# XLA takes its time: every wrapper once, and every inner optimizer where steps may be skipped.
CASES = [*zip(WRAPPERS, INNER, [False, True] * 2)]
CASES += [("LossScaleOptimizer", inner, True) for inner in INNER if inner != CASES[1][1]]
# The other way around.
OTHER_MODES = [(wrap, "scheduled", not in_function) for wrap, _, in_function in CASES[:4]]


def variables(dtype=tf.float32):
    random = np.random.RandomState(0)
    shapes = [33, 17], [17], [3]
    return [tf.Variable(tf.cast(random.normal(size=shape), dtype)) for shape in shapes]


def loss_of(weights, x):
    first, second, _ = (tf.cast(weight, tf.float32) for weight in weights)
    return x * tf.reduce_sum(first**2) + tf.reduce_sum(tf.sin(second))


def all_of(optimizer, weights):
    """Weights as the inner optimizer sees them, its variables, and how many steps it made."""
    if isinstance(optimizer, keras_mp.MasterWeightOptimizer):
        weights = [*optimizer.float32_weights(), *weights]
        slots = keras_mp.OptimizerWrapper.variables.fget(optimizer)
    else:
        slots = optimizer.variables
    return [np.float32(value(v)) for v in (*weights, *slots, optimizer.iterations)]


def trained(wrap, inner, in_function, xs=(1.0, 2.0, 3.0), **kwargs):
    """The state after some steps. The last variable has no gradient."""
    weights = variables(tf.bfloat16 if wrap is keras_mp.MasterWeightOptimizer else tf.float32)
    optimizer = wrap(inner(), **kwargs)
    optimizer.build(weights)

    def step(x):
        optimizer.minimize(lambda: loss_of(weights, x), weights)

    if in_function:
        step = tf.function(step)
    for x in xs:
        step(tf.constant(x))
    return all_of(optimizer, weights)


def assert_near(these, those):
    for this, other in zip(these, those, strict=True):
        np.testing.assert_allclose(this, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("wrap", "inner", "in_function"), [*OTHER_MODES, *CASES])
def test_it_is_the_same_update(wrap, inner, in_function):
    wrap, inner = WRAPPERS[wrap], INNER[inner]
    seed = {"seed": 1} if wrap is keras_mp.MasterWeightOptimizer else {}
    # Whoever compiles it, eager code says what it is.
    expected = trained(wrap, inner, in_function=False, **seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error", keras_mp.MixedPrecisionWarning)
        found = trained(wrap, inner, in_function, jit_compile=True, **seed)
    assert_near(found, expected)


@pytest.mark.parametrize(
    ("method", "slot_dtype"),
    [("split", "float32"), ("copy", "float32"), ("stochastic_rounding", "bfloat16")],
)
def test_weights_in_16_bits_are_joined_and_split_inside(method, slot_dtype):
    arguments = {"method": method, "slot_dtype": slot_dtype, "seed": 1}
    wrap = keras_mp.MasterWeightOptimizer
    expected = trained(wrap, INNER["scheduled"], False, **arguments)
    found = trained(wrap, INNER["scheduled"], True, jit_compile=True, **arguments)
    # Stochastic rounding draws other numbers in XLA: in three steps, three times up or down.
    is_stochastic = method == "stochastic_rounding" or slot_dtype == "bfloat16"
    tolerance = 3 * 2**-7 if is_stochastic else 1e-6
    for this, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(this, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_a_skipped_step_changes_nothing(in_function):
    arguments = keras_mp.LossScaleOptimizer, INNER["clipped by norm"], in_function
    expected = trained(*arguments, xs=(1.0, 3.0), jit_compile=True)
    found = trained(*arguments, xs=(1.0, np.inf, np.nan, 3.0), jit_compile=True)
    for this, other in zip(found, expected, strict=True):
        if this.shape != ():  # the loss scale has moved
            np.testing.assert_array_equal(this, other)
    assert found[-1] == expected[-1] == 2


@pytest.mark.parametrize("compiled", ["update", "step", "update of replicas"])
def test_a_skipped_step_is_reported(compiled):
    keras_mp.set_global_policy("mixed_float16")
    strategy = mirrored(2) if "replicas" in compiled else tf.distribute.get_strategy()
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1, name="head")])
        optimizer = keras_mp.LossScaleOptimizer(
            tf.keras.optimizers.SGD(), jit_compile="update" in compiled
        )
        model.compile(optimizer, "mse", jit_compile=compiled == "step")
    before, x, y = model.get_weights(), np.ones([4, 2], "float32"), np.ones([4, 1], "float32")
    # XLA of TensorFlow 2.16 leaves casts to float16 out: 99,999 would be finite in its products.
    for bad, said in ((1e30, "'x' (above 65504)"), (np.nan, "'x' (Inf or NaN)")):
        x[1] = bad
        model.fit(x, y, verbose=0)
        overflow = optimizer.last_overflow
        assert "head/kernel" in overflow.variables
        assert {gradient.infs for gradient in overflow.gradients} == {None}
        assert [str(row) for row in overflow.inputs] == [said]
        assert said in overflow.summary
        assert "head/kernel" in str(overflow)
    assert int(optimizer.steps_skipped) == 2
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_gradients_are_unscaled_inside():
    weights, inner = variables(), tf.keras.optimizers.SGD(1.0)
    optimizer = keras_mp.LossScaleOptimizer(inner, 1024, jit_compile=True)
    before = [value(weight) for weight in weights]
    gradients = [tf.fill(weight.shape, 1024.0) for weight in weights]
    optimizer.apply_gradients(zip(gradients, weights), scaled=True)
    for old, weight in zip(before, weights):
        np.testing.assert_array_equal(value(weight), old - 1)


@pytest.mark.parametrize(
    ("wrap", "in_function"),
    [
        ("OptimizerWrapper", True),
        ("LossScaleOptimizer", False),
        ("LossScaleOptimizer", True),
        ("AllReduceOptimizer", True),
        ("MasterWeightOptimizer", False),
    ],
)
def test_replicas_update_alike(wrap, in_function):
    wrap = WRAPPERS[wrap]

    def run(**kwargs):
        strategy = mirrored(2)
        with strategy.scope():
            low = wrap is keras_mp.MasterWeightOptimizer
            weights = variables(tf.bfloat16 if low else tf.float32)
            if wrap is keras_mp.LossScaleOptimizer:
                kwargs["loss_scale"] = keras_mp.DynamicLossScale(initial_loss_scale=64.0)
            optimizer = wrap(tf.keras.optimizers.AdamW(0.01, use_ema=True), **kwargs)
            optimizer.build(weights)

        def step(x):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            x *= 1 + tf.cast(replica, tf.float32)
            with tf.GradientTape() as tape:
                loss = loss_of(weights, x)
                if isinstance(optimizer, keras_mp.LossScaleOptimizer):
                    loss = optimizer.scale_loss(loss)
            gradients = tape.gradient(loss, weights[:2])
            optimizer.apply_gradients(zip(gradients, weights[:2]))

        def on_replicas(x):
            strategy.run(step, args=(x,))

        if in_function:
            on_replicas = tf.function(on_replicas)
        for x in (1.0, np.inf, 2.0) if "loss_scale" in kwargs else (1.0, 2.0):
            on_replicas(tf.constant(x))
        for weight in weights:
            first, second = strategy.experimental_local_results(weight)
            np.testing.assert_array_equal(np.float32(first), np.float32(second))
        return all_of(optimizer, weights)

    expected = run()
    with warnings.catch_warnings():
        warnings.simplefilter("error", keras_mp.MixedPrecisionWarning)
        found = run(jit_compile=True)
    assert_near(found, expected)
    assert found[-1] == 2


def test_hyperparameters_may_be_set_between_steps():
    weight = tf.Variable(0.0)
    optimizer = keras_mp.OptimizerWrapper(tf.keras.optimizers.SGD(1.0), jit_compile=True)
    optimizer.apply_gradients([(tf.constant(4.0), weight)])
    assert float(weight) == -4
    optimizer.learning_rate = 0.5
    optimizer.apply_gradients([(tf.constant(4.0), weight)])
    assert float(weight) == -6
    optimizer.clipvalue = 1.0
    optimizer.apply_gradients([(tf.constant(4.0), weight)])
    assert float(weight) == -6.5
    optimizer.jit_compile = False
    optimizer.apply_gradients([(tf.constant(4.0), weight)])
    assert float(weight) == -7


class Unusual(tf.keras.optimizers.SGD):
    """What it does needs Python, which XLA has not."""

    def update_step(self, gradient, variable, learning_rate=None):
        gradient = tf.py_function(lambda g: 2 * g, [gradient], tf.float32)
        variable.assign_sub(tf.reshape(gradient, variable.shape))


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_what_cannot_be_compiled_is_said_once(in_function):
    weight = tf.Variable(tf.zeros([4, 2]))
    optimizer = keras_mp.LossScaleOptimizer(Unusual(1.0), 64, jit_compile=True)

    def step():
        optimizer.minimize(lambda: tf.reduce_sum(weight / 2), [weight])

    if in_function:
        step = tf.function(step)
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="XLA cannot compile it"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error", keras_mp.MixedPrecisionWarning)
        step()
    np.testing.assert_array_equal(value(weight), np.full([4, 2], -2))


@pytest.mark.parametrize(
    ("wrap", "inner", "in_function"),
    # RMSprop adds to some rows of a variable, which those in 16 bits do in their own way. The
    # others among the wrappers leave rows to the one that may skip steps. A schedule sees no rows.
    [
        *(case for case in CASES if case[0] == "LossScaleOptimizer" and case[1] != "scheduled"),
        *(case for case in CASES if case[0] == "MasterWeightOptimizer"),
        ("MasterWeightOptimizer", "clipped by value", False),
    ],
)
def test_sparse_gradients(wrap, inner, in_function):
    wrap, inner = WRAPPERS[wrap], INNER[inner]

    def run(in_function, **kwargs):
        low = wrap is keras_mp.MasterWeightOptimizer
        weights = variables(tf.bfloat16 if low else tf.float32)[:2]
        optimizer = wrap(inner(), **kwargs)
        optimizer.build(weights)

        def step(rows, x):
            def loss():
                embedding, bias = (tf.gather(weights[0], rows), weights[1])
                return tf.reduce_mean((tf.cast(embedding + bias, tf.float32) - x) ** 2)

            optimizer.minimize(loss, weights)

        if in_function:
            any_rows = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([])]
            step = tf.function(step, input_signature=any_rows)
        # Another number of rows is compiled anew.
        for rows in ([1, 3, 1], [0, 0, 2], *([[5]] if inner is INNER["clipped by value"] else [])):
            step(tf.constant(rows), tf.constant(1.0))
        return all_of(optimizer, weights)

    expected = run(in_function=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", keras_mp.MixedPrecisionWarning)
        found = run(in_function, jit_compile=True)
    assert ["equal rows" in str(each.message) for each in said] == ([] if IS_KERAS_3 else [True])
    assert_near(found, expected)


@pytest.mark.skipif(not IS_KERAS_3, reason="Only Keras 3 accumulates gradients.")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_gradients_are_accumulated(wrap):
    def inner():
        return tf.keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)

    expected = trained(wrap, inner, False, xs=(1.0, 2.0, 3.0, 4.0))
    assert_near(trained(wrap, inner, True, xs=(1.0, 2.0, 3.0, 4.0), jit_compile=True), expected)


def test_an_update_that_xla_compiles_anyway_is_left_to_it():
    weight = tf.Variable([1.0, 2.0])
    optimizer = keras_mp.OptimizerWrapper(tf.keras.optimizers.SGD(1.0), jit_compile=True)
    optimizer.build([weight])

    @tf.function(jit_compile=True)
    def step():
        optimizer.apply_gradients([(weight / 2, weight)])

    step()
    np.testing.assert_array_equal(value(weight), [0.5, 1.0])


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_config_has_it_only_if_it_is_set(wrap):
    optimizer = wrap(tf.keras.optimizers.SGD(1.0))
    assert optimizer.jit_compile is False
    assert "jit_compile" not in optimizer.get_config()
    assert wrap.from_config(optimizer.get_config()).jit_compile is False
    compiled = wrap(tf.keras.optimizers.SGD(1.0), jit_compile=True)
    assert wrap.from_config(compiled.get_config()).jit_compile is True


def test_it_is_a_bool():
    with pytest.raises(TypeError, match="jit_compile"):
        keras_mp.OptimizerWrapper(tf.keras.optimizers.SGD(1.0), jit_compile="yes")


def test_fit_saves_and_goes_on(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(1)])
    optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.Adam(0.1), jit_compile=True)
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.ones([8, 4], np.float32)
    model.fit(x, x[:, :1], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.jit_compile is True
    for each in (model, loaded):
        each.fit(x, x[:, :1], verbose=0)
    for this, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(this, other, rtol=1e-6)

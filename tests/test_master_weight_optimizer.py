import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import op_selector

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, assert_all_equal, made, mirrored, once, placed, value
from tests.models import (
    FAMILIES,
    NAMESPACES,
    OPTIMIZERS,
    chain,
    classifier,
    compiled_model,
    digits,
    make_optimizer,
    state,
    variables_of,
)
from tests.saving.common import load, save

pytestmark = pytest.mark.filterwarnings("ignore:The global policy .bfloat16. keeps variables")
keras_3_only = pytest.mark.skipif(not IS_KERAS_3, reason="Keras 3 has it.")

NAMES = (
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl"),
    *("Lion", "Lamb", "Adafactor"),
)


def namespace(family):
    return tf.keras.optimizers.legacy if family == "legacy" else tf.keras.optimizers


ALL = [f"{each}.{name}" for each in NAMESPACES for name in NAMES if hasattr(namespace(each), name)]
ADAMS = [name.replace("SGD", "Adam") for name in FAMILIES]


def build(optimizer, variables):
    """Builds an optimizer of any family."""
    keras_mp.OptimizerWrapper(optimizer).build(variables)


def master_weights_in(optimizer):
    return next(o for o in chain(optimizer) if isinstance(o, keras_mp.MasterWeightOptimizer))


class Run:
    """A linear model with a kernel in 16 bits and a bias in float32, and what trains it."""

    def __init__(self, name, dtype, mode="eager", *, replicas=1, wrap=None, **how):
        kinds = {each: how.pop(each) for each in ("method", "slot_dtype") if each in how}
        generator = np.random.default_rng(0)
        kernel = tf.cast(generator.normal(0, 0.1, [16, 5]), tf.bfloat16 if dtype is None else dtype)
        self.strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
        with self.strategy.scope():
            self.begin = tf.cast(kernel, tf.float32).numpy()
            self.kernel = tf.Variable(kernel if dtype else self.begin)
            self.bias = tf.Variable(tf.zeros([5]))
            optimizer = make_optimizer(name, **{"learning_rate": 1e-3, **how})
            if dtype is not None:
                optimizer = keras_mp.MasterWeightOptimizer(optimizer, **kinds, seed=7)
            self.optimizer = optimizer if wrap is None else wrap(optimizer)
            build(self.optimizer, [self.kernel, self.bias])
        self.inputs = tf.constant(generator.normal(size=[8, 16]), tf.float32)
        way = steps.minimize if wrap is keras_mp.LossScaleOptimizer else steps.unscaled
        step = way(self.optimizer, self.loss, [self.kernel, self.bias])
        self.make_step = placed(mode, lambda i: self.strategy.run(step, (i,)))

    def loss(self, i):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        inputs = self.inputs + 0.01 * i + tf.cast(replica, tf.float32)
        product = tf.matmul(tf.cast(inputs, tf.bfloat16), tf.cast(self.kernel, tf.bfloat16))
        return tf.reduce_sum((tf.cast(product, tf.float32) + self.bias) ** 2)

    def train(self, steps):
        for i in range(steps):
            self.make_step(tf.constant(i, tf.float32))
        return self

    def float32_weights(self):
        return [value(w) for w in master_weights_in(self.optimizer).float32_weights()]

    def state(self):
        return state(chain(self.optimizer)[-1])


# XLA contracts products and sums of theirs otherwise, so that the last bit may differ.
CONTRACTED = [
    name for name in ("new.RMSprop", "new.Adagrad", "new.Adafactor", "new.Lamb") if name in ALL
]
MODES = itertools.cycle(["eager", "function"])
DECAY = tf.keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5)
OPTIONS = [
    {"learning_rate": DECAY},
    *({"clipnorm": 0.1}, {"clipvalue": 0.01}, {"global_clipnorm": 0.1}),
    # Legacy optimizers do not have these.
    {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
    {"weight_decay": 0.1},
]


def case(name, mode, count=12, marks=(), **how):
    words = [f"{key}={getattr(x, '__name__', x)}" for key, x in how.items() if x is not DECAY]
    return pytest.param(name, mode, count, how, marks=marks, id=" ".join([name, mode, *words]))


def cases():
    yield from (case(name, next(MODES)) for name in ALL)
    for name in (name for name in ALL if name.split(".")[1] in ("SGD", "Adam")):
        yield from (case(name, "function", 50, method=method) for method in ("split", "copy"))
    for name in ADAMS:
        for options in OPTIONS[: 4 if name.startswith("legacy") else None]:
            yield case(name, next(MODES), 9, **options)
    # With two replicas the update is in a branch, where SGD of Keras 2 adds to the weight.
    for name in OPTIMIZERS:
        yield case(name, next(MODES), 6, replicas=2)
        yield case(name, "function", 6, replicas=2, wrap=keras_mp.LossScaleOptimizer)
    for name in ADAMS:
        for mode, replicas in (("eager", 1), ("function", 1), ("eager", 2)):
            wrap = {"wrap": keras_mp.LossScaleOptimizer, "replicas": replicas}
            yield case(name, mode, 6, once, **wrap)
        yield case(name, "function", 6, once, replicas=2, wrap=keras_mp.AllReduceOptimizer)
    for mode in ("eager", "function"):
        for wrap in (None, keras_mp.LossScaleOptimizer):
            how = {"gradient_accumulation_steps": 3, "wrap": wrap}
            yield case("new.Adam", mode, 9, keras_3_only, **how)
    # Half of them: digits are joined and split around any update in the same way.
    for name in (*[name for name in ALL if name not in CONTRACTED][::2], *CONTRACTED[::2]):
        yield case(name, "jit", 6, once)


@functools.cache
def needs_casts_in_xla():
    """Skips where XLA does not round if float32 weights are cast, as that of TensorFlow 2.16."""
    cast = tf.function(lambda x: tf.cast(tf.cast(x, "bfloat16"), "float32"), jit_compile=True)
    if float(cast(tf.constant(1 + 2.0**-20))) != 1:
        pytest.skip("XLA leaves out the casts of float32 weights, so its results are others.")


@pytest.mark.parametrize(("name", "mode", "count", "how"), [*cases()])
def test_it_trains_as_with_float32_variables(name, mode, count, how):
    if mode == "jit":
        needs_casts_in_xla()
    ours = Run(name, tf.bfloat16, mode, **how).train(count)
    theirs = Run(name, None, mode, **how).train(count)
    expected = value(theirs.kernel)
    found = ours.float32_weights()[0]
    if mode == "jit" and name in CONTRACTED:
        np.testing.assert_allclose(found, expected, rtol=0, atol=6 * 2.0**-25)
    else:
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(value(ours.bias), value(theirs.bias))
        assert_all_equal(ours.state(), theirs.state())
    assert np.abs(expected - theirs.begin).max() > 0
    for each in ours.strategy.experimental_local_results(ours.kernel):
        np.testing.assert_array_equal(value(each), tf.cast(found, tf.bfloat16).numpy())


def test_slots_of_weights_that_cast_themselves_are_in_float32():
    # Keras 2 makes the weights of this layer so, whatever the policy, and those of most others not.
    layer = tf.keras.layers.GroupNormalization(2, dtype=keras_mp.Policy("bfloat16"))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(layer(tf.random.normal([4, 6])), tf.float32) ** 3)
    optimizer = keras_mp.MasterWeightOptimizer(make_optimizer("new.SGD"))
    weights = layer.trainable_weights
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    slots = [v for v in optimizer.inner_optimizer.variables if tuple(v.shape) == (6,)]
    assert len(slots) == 2
    assert {tf.as_dtype(each.dtype) for each in slots} == {tf.float32}


@pytest.mark.parametrize("method", ["split", "copy", "stochastic_rounding"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_may_be_set_to_zero(dtype, method):
    for mode in ("eager", "jit"):
        run = Run("new.SGD", dtype, mode, method=method, momentum=0.0).train(3)
        kernel = run.kernel.numpy().astype("float32")
        run.kernel.assign(tf.cast(kernel * (np.arange(16)[:, None] % 2), dtype))
        begin = value(run.kernel).astype("float32")
        np.testing.assert_allclose(run.float32_weights()[0], begin, rtol=2**-8, atol=2**-25)
        run.train(1)
        moved = value(run.kernel).astype("float32") - begin
        assert 0 < np.abs(moved).max() < 0.5, mode


def beside_float32(make, gradient, inner, mode="eager", steps=1):
    """Makes steps with a bfloat16 weight and with a float32 one; returns both in float32."""
    results = []

    def apply(optimizer, gradient, v):
        optimizer.apply_gradients([(gradient, v)])

    for dtype in (tf.bfloat16, tf.float32):
        v, optimizer = make(dtype), inner()
        if dtype == tf.bfloat16:
            optimizer = keras_mp.MasterWeightOptimizer(optimizer)
        build(optimizer, [v])
        step = placed(mode, lambda o=optimizer, d=dtype, v=v: apply(o, gradient(d), v))
        for _ in range(steps):
            step()
        results.append(value(v if dtype == tf.float32 else optimizer.float32_weights()[0]))
    np.testing.assert_array_equal(*results)
    return results[0]


@pytest.mark.parametrize("name", ADAMS)
def test_constraints_are_kept(name):
    most = 1 + 2.0**-12
    found = beside_float32(
        lambda d: tf.Variable([1.0, 2.0], dtype=d, constraint=lambda w: tf.minimum(w, most)),
        lambda dtype: tf.constant([-1.0, 1.0], dtype),
        lambda: make_optimizer(name, 2.0**-10),
    )
    assert found.max() == most


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_gradients(name, mode):
    def gradient(dtype):
        values = tf.constant([[1.0] * 3, [0.25] * 3, [3.0] * 3], dtype)
        return tf.IndexedSlices(values, tf.constant([1, 3, 1]), tf.constant([4, 3]))

    found = beside_float32(
        lambda dtype: tf.Variable(tf.cast(tf.reshape(tf.range(12.0), [4, 3]), dtype)),
        gradient,
        lambda: make_optimizer(name, 1e-3),
        *(mode, 5),
    )
    np.testing.assert_array_equal(found[0], [0, 1, 2])
    assert found[1, 0] != 3


@keras_3_only
def test_what_is_overwritten_with_a_gradient_is_left_alone():
    scale = tf.keras.Variable([1.0], name="scale")
    scale.overwrite_with_gradient = True
    weight = tf.keras.Variable([1.0], dtype="bfloat16", name="weight")
    optimizer = keras_mp.MasterWeightOptimizer(tf.keras.optimizers.SGD(2.0**-12))
    gradients = [tf.constant([1.0], tf.bfloat16), tf.constant([5.0])]
    optimizer.apply_gradients(zip(gradients, [weight, scale]))
    assert float(scale.numpy()[0]) == 5
    assert float(optimizer.float32_weights()[0][0]) == 1 - 2.0**-12


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_remainders_and_slots_alone(name, mode):
    run = Run(name, tf.bfloat16, mode, wrap=keras_mp.LossScaleOptimizer).train(2)
    before = [value(v) for v in run.optimizer.variables]
    weights = run.float32_weights()
    run.make_step(tf.constant(float("inf")))
    assert bool(run.optimizer.last_step_skipped)
    assert_all_equal(before, run.optimizer.variables)
    assert_all_equal(weights, run.float32_weights())


@pytest.mark.parametrize("calls", ["minimize", "keras_3", "rfc", "scaler"])
@pytest.mark.parametrize("name", FAMILIES)
def test_small_float16_gradients_are_unscaled_in_float32(name, calls):
    v = tf.Variable([1.0], dtype=tf.float16)
    optimizer = keras_mp.MasterWeightOptimizer(make_optimizer(name, 2.0**20, momentum=0.0))

    def loss():
        # As a float16 number 2**-30, which is scaled to 2**-15, would be 0.
        return tf.cast(v[0], tf.float32) * 2.0**-30

    if calls == "scaler":
        steps.scaler(keras_mp.GradScaler(2.0**15), optimizer, loss, [v])()
    else:
        steps.WAYS[calls](keras_mp.LossScaleOptimizer(optimizer, 2.0**15), loss, [v])()
    [weight] = optimizer.float32_weights()
    assert float(weight[0]) == 1 - 2.0**-10


@pytest.mark.parametrize("method", ["split", "copy"])
@pytest.mark.parametrize("name", ADAMS)
def test_float16_weights_train_as_in_float32(name, method):
    ours = Run(name, tf.float16, "function", method=method)
    theirs = Run(name, None, "function")
    theirs.kernel.assign(tf.cast(ours.kernel, tf.float32))
    ours.train(12), theirs.train(12)
    [weight, _] = ours.float32_weights()
    # Below 2**-16, of which there are none here, digits would be lost.
    np.testing.assert_allclose(weight, value(theirs.kernel), rtol=2.0**-8, atol=2.0**-10)
    np.testing.assert_array_equal(value(ours.kernel), weight.astype("float16"))


def rounded_run(seed, name="new.SGD", mode="function", replicas=1, count=100, steps=3):
    """A weight of ones after steps that are smaller than its last digit, rounded at random."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        v = tf.Variable(tf.ones([count], tf.bfloat16))
        sgd = make_optimizer(name, RATE, momentum=0.0)
        optimizer = keras_mp.MasterWeightOptimizer(sgd, "stochastic_rounding", seed=seed)
        build(optimizer, [v])

    def replica_step():
        gradient = tf.fill([count], tf.constant(1 / replicas, v.dtype))
        optimizer.apply_gradients([(gradient, v)])

    step = placed(mode, lambda: strategy.run(replica_step))
    for _ in range(steps):
        step()
    return v


# An eighth of what separates 1 from the next smaller number.
RATE = 2.0**-11


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("name", FAMILIES)
def test_updates_that_are_rounded_stochastically_arrive_on_average(name, mode):
    v = tf.cast(rounded_run(1, name, mode, count=20000, steps=10), tf.float32)
    mean, deviation = float(tf.reduce_mean(v)), float(tf.math.reduce_std(v))
    assert deviation > 0
    assert abs(mean - (1 - 10 * RATE)) < 4 * deviation / np.sqrt(20000)


@once
def test_a_seed_decides_how_weights_are_rounded():
    first = rounded_run(1).numpy()
    np.testing.assert_array_equal(first, rounded_run(1).numpy())
    np.testing.assert_array_equal(first, rounded_run(1, mode="eager").numpy())
    assert (first != rounded_run(2).numpy()).any()


def test_all_replicas_round_alike():
    # The first replica looks for float16 layers that nobody scales, which must leave no trace.
    keras_mp.set_global_policy("mixed_float16")
    narrow = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(4)])
    v = rounded_run(1, replicas=2)
    assert narrow.built
    first, second = mirrored(2).experimental_local_results(v)
    np.testing.assert_array_equal(first.numpy(), second.numpy())
    np.testing.assert_array_equal(first.numpy(), rounded_run(1).numpy())


def test_without_a_seed_set_random_seed_decides():
    def seed_of():
        return keras_mp.MasterWeightOptimizer("sgd").get_config()["seed"]

    tf.keras.utils.set_random_seed(3)
    first, second = seed_of(), seed_of()
    tf.keras.utils.set_random_seed(3)
    assert first == seed_of() != second


@once
@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
@pytest.mark.parametrize("name", ADAMS)
def test_slots_in_bfloat16(name, mode):
    if mode == "jit":
        needs_casts_in_xla()
    ours = Run(name, tf.bfloat16, mode, slot_dtype="bfloat16").train(3)
    theirs = Run(name, None, mode).train(3)
    for our, their in zip(ours.state()[2:], theirs.state()[2:], strict=True):
        assert np.all(np.abs(our - their) <= 2.0**-6 * np.abs(their) + 1e-30)
        if our.shape == (16, 5):
            np.testing.assert_array_equal(our, tf.cast(our, tf.bfloat16).numpy().astype("float32"))
    [weight, _] = ours.float32_weights()
    np.testing.assert_allclose(weight, value(theirs.kernel), rtol=0, atol=1e-4)


def dtype_in_memory(variable):
    variable = variable if isinstance(variable, tf.Variable) else variable.value
    return getattr(variable, "stored", variable).dtype


@pytest.mark.parametrize("name", ALL)
def test_slots_of_weights_in_16_bits_alone_are_in_16_bits(name):
    shapes = [[], [4], [3, 4]]  # A scalar, and a row and a column as Adafactor keeps them.
    weights = [tf.Variable(tf.ones(shape, tf.bfloat16)) for shape in shapes]
    float32 = [tf.Variable(tf.ones(shape)) for shape in shapes]
    made = {}
    for variables in (weights, float32, [*weights, *float32]):
        inner = namespace(name.split(".")[0]).__dict__[name.split(".")[1]]()
        optimizer = keras_mp.MasterWeightOptimizer(inner, slot_dtype="bfloat16")
        optimizer.build(variables)
        of_inner = variables_of(inner)
        made[len(variables), variables is float32] = [*map(dtype_in_memory, of_inner)]
        shared = ("iteration", "learning_rate", "product", "cache")
        for each in of_inner:
            if any(word in each.name for word in shared) or variables is float32:
                assert dtype_in_memory(each) != tf.bfloat16, each.name
        for variable in variables:
            optimizer.apply_gradients([(tf.ones_like(variable) / 2, variable)])
    *_, (both, _) = made
    halves = made[3, False].count(tf.bfloat16)
    assert made[both, False].count(tf.bfloat16) == halves
    if name.split(".")[1] not in ("SGD", "Adafactor"):
        assert halves % 3 == 0 < halves


@pytest.mark.parametrize("name", ADAMS)
def test_a_second_moment_in_bfloat16_neither_stands_still_nor_vanishes(name):
    # (1 - 0.999) of what is far from it is less than half of bfloat16's last digit.
    count = 4000
    v = tf.Variable(tf.zeros([count], tf.bfloat16))
    adam = make_optimizer(name, 1e-6)
    optimizer = keras_mp.MasterWeightOptimizer(adam, slot_dtype="bfloat16", seed=1)
    build(optimizer, [v])

    @tf.function
    def step(gradient):
        optimizer.apply_gradients([(tf.fill([count], gradient), v)])

    step(tf.constant(1.0, tf.bfloat16))
    for _ in range(200):
        step(tf.constant(0.5, tf.bfloat16))
    *_, second = (each for each in state(chain(optimizer)[-1]) if each.shape == (count,))
    expected = 0.999**200 * 0.001 + (1 - 0.999**200) * 0.25
    error = second.std() / np.sqrt(count)
    assert second.std() > 0
    assert abs(second.mean() - expected) < 4 * error


def test_bad_arguments():
    for name, *arguments in (
        ("method", "kahan"),
        ("slot_dtype", "split", "float16"),
        ("slot_dtype", "split", "int"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be one of"):
            keras_mp.MasterWeightOptimizer("sgd", *arguments)


def test_the_wrong_order():
    masters = keras_mp.MasterWeightOptimizer
    for wrapper in (keras_mp.LossScaleOptimizer, keras_mp.AllReduceOptimizer, masters):
        with pytest.raises(TypeError, match=f"goes inside of a {wrapper.__name__}"):
            masters(wrapper("sgd"))


def test_a_graph_of_tensorflow_1_is_refused():
    with tf.Graph().as_default():
        v = tf.compat.v1.get_variable("v", [1], tf.bfloat16, use_resource=True)
        optimizer = keras_mp.MasterWeightOptimizer(make_optimizer(FAMILIES[-1]))
        with pytest.raises(RuntimeError, match="not in a graph of TensorFlow 1"):
            optimizer.apply_gradients([(tf.ones([1], tf.bfloat16), v)])


def make_model(name, policy, wrap=None, method="split", slots="float32", **compile):
    # A mixed model would compute its output from float32 weights, which the other has not got.
    model = made(lambda: classifier(8), keras_mp.Policy(policy, model_outputs=None))
    generator = np.random.default_rng(0)
    weights = [generator.normal(0, 0.1, w.shape) for w in model.get_weights()]
    model.set_weights([tf.cast(tf.cast(w, tf.bfloat16), tf.float32).numpy() for w in weights])
    optimizer = make_optimizer(name, 0.01)
    if policy == "bfloat16":
        optimizer = keras_mp.MasterWeightOptimizer(optimizer, method, slots, seed=3)
    loss = keras_mp.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer if wrap is None else wrap(optimizer), loss, **compile)
    return model


def step(model, i):
    x, y = digits()
    model.reset_metrics()  # Keras 3.12 returns their means over all batches so far.
    return model.train_on_batch(x[32 * i : 32 * i + 32], y[32 * i : 32 * i + 32])


def float32_weights(model):
    return [value(w) for w in master_weights_in(model.optimizer).float32_weights()]


@pytest.mark.parametrize("wrap", [None, keras_mp.LossScaleOptimizer])
@pytest.mark.parametrize("name", [*ADAMS, pytest.param("new.Muon", marks=keras_3_only)])
def test_fit_trains_a_bfloat16_model_as_a_mixed_one(name, wrap):
    # Muon looks at the paths of variables.
    if "Muon" in name and tuple(map(int, tf.keras.__version__.split(".")[:2])) < (3, 13):
        pytest.skip("Muon itself fails on TensorFlow with Keras 3.12.")
    x, y = digits()
    models = [make_model(name, policy, wrap) for policy in ("bfloat16", "mixed_bfloat16")]
    for model in models:
        model.fit(x[:320], y[:320], batch_size=32, epochs=3, shuffle=False, verbose=0)
    assert models[0].history.history["loss"] == models[1].history.history["loss"]
    ours, theirs = models
    assert_all_equal(float32_weights(ours), theirs.trainable_variables)
    for our, their in zip(ours.trainable_variables, theirs.trainable_variables, strict=True):
        assert tf.as_dtype(our.dtype) == tf.bfloat16
        np.testing.assert_array_equal(value(our), tf.cast(value(their), tf.bfloat16).numpy())


@once
@keras_3_only
@pytest.mark.parametrize(
    ("method", "slots"),
    [("split", "float32"), ("copy", "bfloat16"), ("stochastic_rounding", "float32")],
)
def test_lora_trains_its_own_weights_and_a_bias_only(method, slots):
    x, y = digits()
    policies = ("bfloat16", "mixed_bfloat16")
    models = [make_model("new.Adam", policy, None, method, slots) for policy in policies]
    for model in models:
        frozen, tuned = model.layers
        frozen.trainable = False
        tuned.enable_lora(2)
        tf.keras.utils.set_random_seed(1)
        initial = tf.cast(tf.random.normal(tuned.lora_kernel_a.shape), tf.bfloat16)
        tuned.lora_kernel_a.assign(tf.cast(initial, tuned.lora_kernel_a.dtype))
        before = [value(v) for v in model.non_trainable_variables]
        model.compile(model.optimizer, model.loss)
        model.fit(x[:320], y[:320], batch_size=32, shuffle=False, verbose=0)
        assert_all_equal(before, model.non_trainable_variables)
        assert len(model.trainable_variables) == 3
    ours, theirs = models
    built = master_weights_in(ours.optimizer).as_float32(ours.trainable_variables)
    assert all(tf.as_dtype(v.dtype) == tf.float32 for v in built)
    for our, their in zip(float32_weights(ours), theirs.trainable_variables, strict=True):
        # Weights of LoRA are in float32, at least in mixed_bfloat16, where Keras multiplies them
        # with each other in float32.
        is_rounded = method == "stochastic_rounding" or slots == "bfloat16"
        np.testing.assert_allclose(our, value(their), rtol=0, atol=0.02 if is_rounded else 5e-4)
    assert np.abs(value(theirs.layers[1].lora_kernel_b)).max() > 0.01


# Keras 2 reads no bfloat16 from its files, and Keras 3 none from .h5 files.
FORMS = ["keras", "weights", "checkpoint"] if IS_KERAS_3 else ["checkpoint"]


# Each kind in one form, and one of them in every form.
KINDS = [
    (None, "split", "float32"),
    (None, "copy", "float32"),
    (None, "stochastic_rounding", "float32"),
    (None, "split", "bfloat16"),
    (keras_mp.LossScaleOptimizer, "split", "float32"),
]
FILES = dict.fromkeys([*zip(KINDS, itertools.cycle(FORMS)), *((KINDS[-1], form) for form in FORMS)])


@pytest.mark.parametrize(("kind", "form"), FILES)
@pytest.mark.parametrize("name", ADAMS)
def test_training_goes_on_from_a_file(name, kind, form, tmp_path):
    wrap, method, slots = kind
    make = lambda: make_model(name, "bfloat16", wrap, method, slots, run_eagerly=True)  # noqa: E731
    model = make()
    for i in range(3):
        step(model, i)
    loaded = load(save(model, form, str(tmp_path / "model")), form, make)
    assert master_weights_in(loaded.optimizer).method == method
    for i in range(3, 6):
        assert step(model, i) == step(loaded, i)
    assert_all_equal(float32_weights(loaded), float32_weights(model))
    assert int(value(loaded.optimizer.iterations)) == 6


@pytest.mark.parametrize("form", sorted({"checkpoint", "weights"} & {*FORMS}))
@pytest.mark.parametrize("name", ADAMS)
def test_a_file_of_another_method_is_refused(name, form, tmp_path):
    model = make_model(name, "bfloat16", method="copy", run_eagerly=True)
    step(model, 0)
    other = make_model(name, "bfloat16", run_eagerly=True)
    path = save(model, form, str(tmp_path / "model"))
    with pytest.raises(ValueError, match="by another method"):
        load(path, form, lambda: other)
    step(other, 0)
    other.optimizer.assign_float32_weights(model.optimizer.float32_weights())
    assert_all_equal(float32_weights(other), float32_weights(model))


@pytest.mark.parametrize("method", ["split"] if IS_KERAS_3 else ["split", "stochastic_rounding"])
def test_fit_on_replicas_builds_it_with_the_first_step(method):
    """In a `fit` of Keras 2 that is on each replica, where nothing of one variable can be made."""
    weights = []
    for is_built in (False, True):
        with mirrored(2).scope():
            tf.keras.utils.set_random_seed(0)
            dense = tf.keras.layers.Dense(2, dtype="bfloat16", bias_initializer="ones")
            adam = tf.keras.optimizers.Adam(0.01)
            optimizer = keras_mp.MasterWeightOptimizer(adam, method, seed=1)
            model = compiled_model(dense, inputs=4, optimizer=optimizer, jit_compile=False)
            if is_built:
                optimizer.build(model.trainable_variables)
        x = np.random.default_rng(0).normal(size=[32, 4]).astype(np.float32)
        model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0, shuffle=False)
        weights.append([np.asarray(weight) for weight in optimizer.float32_weights()])
    for lazily, early in zip(*weights, strict=True):
        np.testing.assert_array_equal(lazily, early)
        assert not np.isin(lazily, (0, 1)).any()


@pytest.mark.skipif(IS_KERAS_3, reason="Keras 2 has both.")
def test_a_saved_model_with_a_legacy_optimizer_is_refused(tmp_path):
    model = make_model("legacy.Adam", "bfloat16", run_eagerly=True)
    step(model, 0)
    with pytest.raises(ValueError, match="leave the optimizer out"):
        model.save(tmp_path / "model", save_format="tf")
    model.save(tmp_path / "model", save_format="tf", include_optimizer=False)
    served = tf.keras.models.load_model(tmp_path / "model")
    assert_all_equal(served.get_weights(), model.get_weights())


@pytest.mark.parametrize("name", ADAMS)
def test_set_weights_takes_what_get_weights_gives(name):
    models = [make_model(name, "bfloat16", run_eagerly=True) for _ in range(2)]
    step(models[0], 0), step(models[1], 1)
    models[1].set_weights(models[0].get_weights())
    weights = [value(v) for v in models[0].optimizer.variables]
    models[1].optimizer.set_weights(weights)
    assert_all_equal(float32_weights(models[1]), float32_weights(models[0]))
    with pytest.raises(ValueError, match="for another model"):
        models[1].optimizer.set_weights(weights[:-1])


def small_model(policy, dtype=None):
    with keras_mp.policy_scope(policy):
        layers = [tf.keras.layers.Dense(3, dtype=dtype), tf.keras.layers.Dense(1, dtype=dtype)]
        return tf.keras.Sequential([tf.keras.Input((2,)), *layers])


@pytest.mark.filterwarnings("ignore:The global policy .float16. keeps variables")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_compile_wraps_under_a_policy_in_16_bits(name, dtype, infos):
    model = small_model(dtype)
    inner = make_optimizer(name)
    model.compile(inner, "mse")
    [message] = infos.messages
    assert dtype in message
    assert "MasterWeightOptimizer" in message
    assert isinstance(model.optimizer, keras_mp.MasterWeightOptimizer)
    assert model.optimizer.inner_optimizer is inner
    before = model.optimizer
    model.compile(before, "mse")
    assert model.optimizer is before
    # Inside of the loss scaling.
    model = small_model(keras_mp.Policy(dtype, loss_scale="dynamic"))
    model.compile(make_optimizer(name), "mse")
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    assert isinstance(model.optimizer.inner_optimizer, keras_mp.MasterWeightOptimizer)


def test_compile_warns_of_what_other_models_in_16_bits_lose():
    model = small_model(None, dtype="bfloat16")
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="beta_2=0.999 is 1") as warned:
        model.compile(tf.keras.optimizers.Adam(beta_2=0.999), "mse")
    assert "below 1/256 of a weight" in str(warned[0].message)
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="has 2 layers whose variables"):
        model.compile(keras_mp.LossScaleOptimizer("sgd"), "mse")
    model.compile(keras_mp.MasterWeightOptimizer("adam"), "mse")
    frozen = small_model(None, dtype="bfloat16")
    frozen.trainable = False
    frozen.compile("adam", "mse")


@pytest.mark.parametrize("method", ["split", "copy"])
@pytest.mark.parametrize("name", ADAMS)
def test_convert_takes_all_digits_with_it(name, method):
    model = make_model(name, "bfloat16", keras_mp.LossScaleOptimizer, method, run_eagerly=True)
    mixed = make_model(name, "mixed_bfloat16", run_eagerly=True)
    for i in range(3):
        step(model, i), step(mixed, i)
    expected = float32_weights(model)
    for policy in ("float32", "mixed_bfloat16"):
        converted = keras_mp.convert(model, policy)
        assert_all_equal(converted.get_weights(), expected)
    # And back.
    back = keras_mp.convert(mixed, "bfloat16")
    back.compile(keras_mp.MasterWeightOptimizer(make_optimizer(name), method), "mse")
    back.optimizer.build(back.trainable_variables)
    back.optimizer.assign_float32_weights(mixed.trainable_variables)
    assert_all_equal(float32_weights(back), mixed.trainable_variables)


def test_the_summary_says_how_digits_are_kept():
    model = make_model(FAMILIES[0].replace("SGD", "Adam"), "bfloat16")
    lines = []
    keras_mp.summary(model, lines.append)
    assert "Adam sees float32 weights: method 'split', slots in float32." in lines
    model.optimizer.build(model.trainable_variables)
    keras_mp.summary(model, lines.append)
    assert any("12.1" in line and "bytes a weight" in line for line in lines)


@pytest.mark.parametrize(
    ("method", "slots", "expected"),
    [
        ("split", "float32", 12.125),
        ("copy", "float32", 14),
        ("split", "bfloat16", 8.125),
        ("stochastic_rounding", "bfloat16", 6),
    ],
)
@pytest.mark.parametrize("name", ADAMS)
def test_bytes_a_weight(name, method, slots, expected):
    v = tf.Variable(tf.zeros([4096], tf.bfloat16))
    optimizer = keras_mp.MasterWeightOptimizer(make_optimizer(name), method, slots)
    assert optimizer.bytes_a_weight() is None
    build(optimizer, [v])
    # The counter, the learning rate and the seed are 20 bytes at most.
    assert 0 <= optimizer.bytes_a_weight() - expected < 0.01


@pytest.mark.parametrize("method", ["split", "copy", "stochastic_rounding"])
@pytest.mark.parametrize("name", ADAMS)
def test_in_a_graph_one_weight_after_the_other_is_seen_in_float32(name, method):
    weights = [tf.Variable(tf.ones([4, 3 + i], tf.bfloat16)) for i in range(3)]
    optimizer = keras_mp.MasterWeightOptimizer(make_optimizer(name), method)
    build(optimizer, weights)

    @tf.function
    def step():
        gradients = [tf.ones(w.shape, tf.bfloat16) for w in weights]
        optimizer.apply_gradients(zip(gradients, weights))

    graph = step.get_concrete_function().graph
    handles = {id(outside): inside for outside, inside in graph.captures}
    written = None
    for weight in weights:
        uses = handles[id(weight.handle)].consumers()
        read = next(op for op in uses if op.type == "ReadVariableOp")
        before = op_selector.get_backward_walk_ops([read], inclusive=False, control_inputs=True)
        assert written is None or written in before
        written = next(op for op in uses if op.type == "AssignVariableOp")

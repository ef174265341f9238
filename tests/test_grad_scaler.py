"""One scale for several losses and optimizers of any kind, beside the same program in float32."""

import copy
import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import assert_all_equal, mirrored, once, placed, value
from tests.models import FAMILIES, batches, make_optimizer
from tests.steps import Doubled, by_replica, on_replicas
from tests.test_step_tapes import Trained, by_scaler

GROWING = functools.partial(keras_mp.DynamicLossScale, 2.0**10, 2)


class Momentum(tf.Module):
    """Sonnet's way: two lists, and slots that are made with the first updates."""

    def __init__(self, rate):
        super().__init__()
        self.rate, self.slots = rate, []

    def apply(self, updates, parameters):
        if not self.slots:
            self.slots.extend(tf.Variable(tf.zeros(p.shape), trainable=False) for p in parameters)
        for update, parameter, slot in zip(updates, parameters, self.slots, strict=True):
            slot.assign(0.5 * slot + tf.convert_to_tensor(update))
            parameter.assign_sub(self.rate * slot)


KINDS = {
    **{name: functools.partial(make_optimizer, name) for name in FAMILIES},
    "wrapper": lambda rate: Doubled(make_optimizer(FAMILIES[0], rate / 2)),
    "v1": lambda rate: tf.compat.v1.train.MomentumOptimizer(rate, 0.5),
    "two lists": Momentum,
    "function": steps.by_hand,
}


def apply(optimizer, pairs):
    """Makes a step without us."""
    if hasattr(optimizer, "apply_gradients"):
        optimizer.apply_gradients(pairs)
    elif hasattr(optimizer, "apply"):
        optimizer.apply(*zip(*pairs))
    else:
        optimizer(pairs)


def program(kind):
    """An optimizer, a dense variable and an embedding, and their loss."""
    dense, table = variables = [tf.Variable([1.0, -2.0]), tf.Variable(tf.ones([3, 2]))]

    def loss(factor):
        rows = tf.gather(table, [2, 0, 2])
        return factor * (tf.reduce_sum(dense**2) + tf.reduce_sum(rows) * 0.25)

    return KINDS[kind](0.125), variables, loss


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((kind, ["eager", "function"][i % 2]) for i, kind in enumerate(KINDS)),
        (FAMILIES[0], "jit"),
        ("two lists", "jit"),
    ],
)
def test_every_kind_of_optimizer_equals_float32(kind, mode):
    scaler = keras_mp.GradScaler(GROWING())
    (ours, variables, loss), (control, expected, of_control) = program(kind), program(kind)
    step = placed(mode, steps.scaler(scaler, ours, loss, variables))
    control_step = steps.taped(of_control, expected, functools.partial(apply, control))
    for factor in (1.0, np.inf, np.nan, 0.5, 0.25, -np.inf):
        step(tf.constant(factor))
        assert bool(scaler.last_step_skipped) == (not np.isfinite(factor))
        if np.isfinite(factor):
            control_step(tf.constant(factor))
        # Where a step may be skipped, XLA rounds in other places.
        slots, others = (getattr(each, "slots", []) for each in (ours, control))
        for a, b in zip([*variables, *slots], [*expected, *others], strict=True):
            np.testing.assert_allclose(value(a), value(b), rtol=1e-6 if mode == "jit" else 0)
    assert float(scaler.loss_scale()) == 2.0**10 / 2 / 2 * 2 / 2
    assert int(scaler.steps_skipped) == 3
    if kind in FAMILIES:
        assert int(ours.iterations) == 3


def tape_gradient(scaler, v, factor):
    with tf.GradientTape() as tape:
        loss = scaler.scale(tf.reduce_sum(v) * factor)
    return tape.gradient(loss, v)


def sgd(rate=1.0):
    return make_optimizer(FAMILIES[-1], rate, momentum=0.0)


def test_what_is_scaled_before_an_update_is_scaled_by_one_number():
    scale = keras_mp.DynamicLossScale(2.0**10)
    scaler, v = keras_mp.GradScaler(scale), tf.Variable(1.0)
    total = tape_gradient(scaler, v, 1.0)
    scale.loss_scale.assign(4.0)  # by somebody else, in the middle of a step
    total += tape_gradient(scaler, v, 1.0)
    assert float(total) == 2 * 2.0**10
    scaler.step(sgd(0.125), [(total, v)])
    assert float(v) == 1 - 2 * 0.125


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize(
    ("arguments", "skips"),
    [
        ({"loss_scale": 64}, False),
        ({"loss_scale": None}, False),
        ({"enabled": False}, False),
        ({"loss_scale": None, "skip_nonfinite": True}, True),
        ({"loss_scale": 64, "skip_nonfinite": True}, True),
        ({"loss_scale": 64, "skip_nonfinite": True, "enabled": False}, False),
    ],
    ids=repr,
)
def test_a_verdict_without_a_scale_that_moves(mode, arguments, skips):
    scaler, v, loss = keras_mp.GradScaler(**arguments), tf.Variable(1.0), tf.constant(1.0)
    scales = arguments.get("enabled", True) and arguments.get("loss_scale", 1) is not None
    assert (scaler.scale(loss) is loss) == (not scales)
    way = steps.scaler(scaler, sgd(0.25), lambda f: v * f, [v], "scaler that unscales")
    step = placed(mode, way)
    step(tf.constant(1.0))
    assert float(v) == 0.75
    step(tf.constant(np.nan))
    assert bool(scaler.last_step_skipped) == np.isfinite(v.numpy()) == skips
    assert float(scaler.loss_scale()) == (64 if scales else 1)
    assert int(scaler.steps_skipped) == skips


def test_the_losses_of_a_step_are_known_where_nothing_is_scaled():
    scaler, optimizer, v = keras_mp.GradScaler(None, skip_nonfinite=True), sgd(), tf.Variable(1.0)
    wrapper = keras_mp.LossScaleOptimizer(sgd(), None, skip_nonfinite=True)
    bad = [(tf.constant(np.nan), v)]
    for factors in ((np.nan, 1.0), (1.0, 2.0)):
        losses = [scaler.scale(v * factor) for factor in factors]
        assert float(losses[1]) == factors[1]
        scaler.step(optimizer, bad)
        assert scaler.last_overflow.loss_is_finite is bool(np.isfinite(factors).all())
        scaler.update()
    for _ in range(2):  # Nor need the calls be made.
        scaler.step(optimizer, bad)
    assert int(scaler.steps_skipped) == 4
    wrapper.minimize(lambda: 0.5 * v, [v])
    for loss, is_finite in ((None, None), (tf.constant(2.0), True), (None, None)):
        if loss is not None:
            wrapper.scale_loss(loss)
        wrapper.apply_gradients(bad)
        assert wrapper.last_overflow.loss_is_finite is is_finite


def test_update_with_a_new_scale():
    scale = keras_mp.DynamicLossScale(64, increment_period=3)
    scaler, v = keras_mp.GradScaler(scale), tf.Variable(1.0)
    scaler.update(128)  # without a step
    assert float(scale()) == 128
    for new in (None, tf.constant(3.0)):
        scaler.step(sgd(), [(tape_gradient(scaler, v, 0.0), v)])
        scaler.update(new)
    for wrong in (2.0**127, 2.0**-25, np.nan, np.inf):
        for new in (wrong, tf.constant(wrong), tf.Variable(wrong)):
            with pytest.raises(ValueError, match="new_scale"):
                scaler.update(new)
    with pytest.raises(TypeError, match="new_scale"):
        scaler.update(tf.constant([1.0]))
    assert float(scale()) == 3
    assert int(scale.num_good_steps) == 0
    with pytest.raises(ValueError, match="Only a dynamic"):
        keras_mp.GradScaler(64).update(32)


@pytest.mark.parametrize("mode", ["function", "jit"])
def test_what_is_no_scale_leaves_it_as_it_is_in_a_function(mode):
    scaler = keras_mp.GradScaler(keras_mp.DynamicLossScale(64, max_loss_scale=128))
    update = placed(mode, scaler.update)
    for wrong in (np.nan, np.inf, 0.0, 2.0**-25, 256.0):
        update(tf.constant(wrong))
        assert float(scaler.loss_scale()) == 64
    update(tf.constant(128.0))
    assert float(scaler.loss_scale()) == 128


@pytest.mark.parametrize("arguments", [{"enabled": False}, {"loss_scale": None}])
def test_a_new_scale_of_what_scales_nothing_is_ignored(arguments):
    scaler = keras_mp.GradScaler(**arguments)
    scaler.update(8.0)
    tf.function(scaler.update)(tf.constant(8.0))
    assert float(scaler.loss_scale()) == 1


def test_losses_come_in_any_structure():
    scaler = keras_mp.GradScaler(4)
    losses = {"a": tf.constant(1.0, tf.float16), "b": (tf.constant([2.0], tf.float64), 3.0)}
    scaled = scaler.scale(losses)
    assert scaled["a"].dtype == tf.float32
    assert scaled["b"][0].dtype == tf.float64
    assert tf.nest.map_structure(lambda t: np.sum(t.numpy()), scaled) == {"a": 4, "b": (8, 12)}
    for wrong in (tf.constant(1), None, (tf.constant(1.0), None)):
        with pytest.raises(TypeError, match="loss"):
            scaler.scale(wrong)


def test_what_are_no_gradients_of_variables_is_refused():
    scaler, v = keras_mp.GradScaler(4), tf.Variable([1.0, 2.0])
    scaler.scale(tf.constant(1.0))
    gradient = tf.constant([4.0, 4.0])
    for none in ([], [(None, v)]):
        with pytest.raises(ValueError, match="gradients"):
            scaler.step(sgd(), none)
    for wrong in (gradient, [gradient], [(v, gradient)], [(gradient, v, v)], [(gradient, None)], 3):
        with pytest.raises(TypeError, match="variable. pairs"):
            scaler.step(sgd(), wrong)
    assert bool(scaler.step(sgd(), [(gradient, v)]))
    np.testing.assert_array_equal(v.numpy(), [0, 1])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: keras_mp.LossScaleOptimizer(sgd()),
        lambda: Doubled(keras_mp.LossScaleOptimizer(sgd())),
        lambda: tf.keras.mixed_precision.LossScaleOptimizer(make_optimizer("new.SGD")),
        lambda: tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0),
            tf.compat.v1.mixed_precision.FixedLossScale(2.0),
        ),
        lambda: keras_mp.compat.v1.LossScaleOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0)
        ),
        lambda: "sgd",
        lambda: None,
        lambda: tf.compat.v1.train.GradientDescentOptimizer,
    ],
)
def test_what_is_no_optimizer_or_scales_by_itself_is_refused(wrong):
    scaler, v = keras_mp.GradScaler(), tf.Variable(1.0)
    gradient = tape_gradient(scaler, v, 1.0)
    with pytest.raises(TypeError, match="Received: optimizer="):
        scaler.step(wrong(), [(gradient, v)])
    assert float(v) == 1


@once
def test_an_optimizer_of_the_other_keras_is_refused():
    import tf_keras

    scaler = keras_mp.GradScaler()
    with pytest.raises(TypeError, match="TF_USE_LEGACY_KERAS"):
        scaler.step(tf_keras.optimizers.SGD(), [(tf.constant(1.0), tf.Variable(1.0))])


def test_a_graph_of_tensorflow_1_is_refused():
    scaler = keras_mp.GradScaler()
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="graph of TensorFlow 1"):
        scaler.scale(tf.constant(1.0))


def test_arguments_are_checked_and_come_back_from_the_config():
    for arguments in ({"enabled": 1}, {"skip_nonfinite": None}, {"aggregate_in_float16": "no"}):
        with pytest.raises(TypeError, match="must be a bool"):
            keras_mp.GradScaler(**arguments)
    with pytest.raises(ValueError, match="contradict each other"):
        keras_mp.GradScaler(aggregate_in_float16=False, reduce_dtype="float16")
    scaler = keras_mp.GradScaler(
        keras_mp.DynamicLossScale(64, 3),
        skip_nonfinite=True,
        reduce_dtype="bfloat16",
        warn_after_skips=None,
        name="mine",
    )
    scaler.warn_after_skips = 3
    copied = keras_mp.GradScaler.from_config(scaler.get_config())
    assert copied.get_config() == scaler.get_config()
    given = {"skip_nonfinite": True, "reduce_dtype": "bfloat16", "warn_after_skips": 3}
    assert copied.get_config().items() >= {**given, "name": "mine", "enabled": True}.items()
    assert float(copied.loss_scale()) == float(copy.deepcopy(scaler).loss_scale()) == 64
    scaler.aggregate_in_float16 = True
    assert scaler.reduce_dtype == "float16"
    disabled = keras_mp.GradScaler(enabled=False)
    assert disabled.get_config()["loss_scale"] is not None
    assert float(disabled.loss_scale()) == 1


def test_a_checkpoint_holds_the_state(tmp_path):
    unused = tf.train.Checkpoint(scaler=keras_mp.GradScaler(enabled=False))
    names = {name for name, _ in tf.train.list_variables(unused.save(str(tmp_path / "unused")))}
    assert [name for name in names if name.startswith("scaler/")] == [
        "scaler/steps_skipped/.ATTRIBUTES/VARIABLE_VALUE"
    ]

    def make():
        scaler, v = keras_mp.GradScaler(GROWING()), tf.Variable(1.0)
        return scaler, v, steps.scaler(scaler, sgd(), lambda factor: v * factor, [v])

    scaler, v, step = make()
    step(np.inf)
    step(0.5)
    path = tf.train.Checkpoint(scaler=scaler, v=v).save(str(tmp_path / "checkpoint"))
    names = {name for name, _ in tf.train.list_variables(path) if name.startswith("scaler")}
    assert {name.split("/.ATT")[0].split("/", 1)[1] for name in names} == {
        "loss_scale/current_loss_scale",
        "loss_scale/good_steps",
        "loss_scale/bad_steps",
        "steps_skipped",
    }
    scaler, v, step = make()
    tf.train.Checkpoint(scaler=scaler, v=v).restore(path).assert_consumed()
    assert float(scaler.loss_scale()) == 2.0**9
    assert int(scaler.steps_skipped) == 1
    step(0.5)
    assert float(scaler.loss_scale()) == 2.0**10  # it is the second good step
    assert float(v) == 0


@once
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_bad_replica_skips_one_optimizer_everywhere(mode):
    with mirrored(2).scope():
        scaler = keras_mp.GradScaler(GROWING())
        optimizers = [sgd(0.25), make_optimizer(FAMILIES[0], 0.25, momentum=0.0)]
        variables = [tf.Variable([1.0, 2.0]), tf.Variable(4.0)]
        for optimizer, v in zip(optimizers, variables):
            keras_mp.OptimizerWrapper(optimizer).build([v])

    def step(factors):
        with tf.GradientTape(persistent=True) as tape:
            losses = [tf.reduce_sum(v) * f for v, f in zip(variables, tf.unstack(factors))]
            scaled = scaler.scale(losses)
        gradients = [tape.gradient(s, v) for s, v in zip(scaled, variables)]
        # Only this replica sees before the sum what is hidden then.
        [first] = scaler.unscale(gradients[:1], optimizers[0])
        gradients[0] = tf.clip_by_value(first, -10, 10)
        steps = zip(optimizers, gradients, variables)
        applied = [scaler.step(o, [(g, v)]) for o, g, v in steps]
        scaler.update()
        return applied

    step = on_replicas(step, mode)
    values = [np.float32([1, 2]), np.float32(4)]
    for factors in ([[1, 1], [2, 3]], [[1, 1], [np.inf, 1]], [[1, 1], [1, np.nan]]):
        applied = step(tf.constant(factors, tf.float32))
        good = np.isfinite(factors).all(axis=0)
        for i, total in enumerate(np.sum(factors, axis=0)):
            assert by_replica(applied[i]) == [good[i], good[i]]
            values[i] = values[i] - 0.25 * total if good[i] else values[i]
            assert_all_equal(by_replica(variables[i]), [values[i]] * 2)
    assert float(scaler.loss_scale()) == 2.0**8
    assert int(scaler.steps_skipped) == 2


@once
@pytest.mark.parametrize("kind", ["v1", "function", "two lists"])
def test_replicas_without_keras(kind):
    with mirrored(2).scope():
        # Of what assigns by itself in a replica, TensorFlow wants to know how to aggregate it.
        aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        v = tf.Variable([1.0, 2.0], aggregation=aggregation)
        scaler, optimizer = keras_mp.GradScaler(GROWING()), KINDS[kind](0.25)
        if kind == "two lists":
            optimizer.slots.append(tf.Variable(tf.zeros(2), False, aggregation=aggregation))

    @on_replicas
    def step(factor):
        scaler.step(optimizer, [(tape_gradient(scaler, v, factor), v)])

    for factors in ([np.nan, 1.0], [1.0, 2.0]):
        step(tf.constant(factors))
        scaler.update()  # outside of `run`
    assert_all_equal(by_replica(v), [np.float32([1, 2]) - 0.25 * 3] * 2)
    assert float(scaler.loss_scale()) == 2.0**9
    assert int(scaler.steps_skipped) == 1


@once
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_skipped_step_puts_back_what_the_forward_pass_wrote(mode):
    statistic, weights = tf.Variable(0.0, trainable=False), [tf.Variable(1.0) for _ in range(2)]
    scaler, optimizers = keras_mp.GradScaler(GROWING()), [steps.by_hand(), steps.by_hand()]

    def step(factors):
        with keras_mp.training_step(statistic, weights):
            with tf.GradientTape(persistent=True) as tape:
                statistic.assign(0.5 * statistic + 1.0)
                scaled = scaler.scale([w * f for w, f in zip(weights, tf.unstack(factors))])
            for optimizer, loss, weight in zip(optimizers, scaled, weights):
                scaler.step(optimizer, [(tape.gradient(loss, weight), weight)])
            scaler.update()

    step, seen = placed(mode, step), []
    for factors in ([1.0, 1.0], [1.0, np.nan], [np.inf, np.nan], [1.0, 1.0]):
        step(tf.constant(factors))
        seen.append(float(statistic))
    assert seen == [1, 1, 1, 1.5]  # In the second step, one of two was good.


@pytest.mark.parametrize("how", [{"run_eagerly": True}, {}, {"jit_compile": True}])
def test_batches_without_examples_leave_the_scale_of_a_train_step(how):
    keras_mp.set_global_policy("mixed_float16")
    statistics, optimizer = tf.keras.layers.BatchNormalization(), sgd(0.1)
    model = Trained(by_scaler, [statistics, tf.keras.layers.Dense(1)])
    optimizer.scaler = scaler = keras_mp.GradScaler()
    model.compile(optimizer, **how)
    x, y = np.ones([4, 2], "float32"), np.ones([4, 1], "float32")
    model(x)
    model.fit(batches((x, y), *[(x[:0], y[:0])] * 3), verbose=0, shuffle=False)
    assert (float(scaler.loss_scale()), int(scaler.steps_skipped)) == (2.0**15, 3)
    assert [loss.kind for loss in scaler.last_overflow.losses] == ["no examples"]
    model.fit(batches((x * np.inf, y)), verbose=0, shuffle=False)
    assert float(scaler.loss_scale()) == 2.0**14
    assert np.isfinite(value(statistics.moving_mean)).all()

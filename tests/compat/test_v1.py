"""Loss scaling for TensorFlow 1's optimizers: graphs, sessions, eager, functions, replicas."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import MODES, mirrored, once, placed, value
from tests.models import batches, compiled_model
from tests.steps import by_replica, on_replicas

V1, v1 = tf.compat.v1, keras_mp.compat.v1
INF = float("inf")
pytestmark = once


def sgd(rate=0.25):
    return V1.train.GradientDescentOptimizer(rate)


def adam():
    return V1.train.AdamOptimizer(0.1)


def wrapped(inner=None, loss_scale="dynamic", **kwargs):
    return v1.LossScaleOptimizer(inner or sgd(), loss_scale, **kwargs)


def growing():
    return keras_mp.DynamicLossScale(8, increment_period=2)


def growing_by(scale=8, every=1, **ratios):
    return v1.ExponentialUpdateLossScaleManager(scale, every, **ratios)


@contextlib.contextmanager
def session(graph=None):
    with V1.Session(graph=graph) as opened:
        opened.run(V1.global_variables_initializer())
        yield opened


# What it is.


def test_it_is_an_optimizer_of_tensorflow_1():
    inner = adam()
    optimizer = wrapped(inner)
    assert isinstance(optimizer, V1.train.Optimizer)
    assert optimizer.inner_optimizer is inner
    assert optimizer.get_name() == inner.get_name() == "Adam"
    assert optimizer.GATE_OP == V1.train.Optimizer.GATE_OP


@pytest.mark.parametrize(
    ("loss_scale", "scale", "kind"),
    [
        ("dynamic", 2**15, keras_mp.DynamicLossScale),
        (64, 64, keras_mp.FixedLossScale),
        (keras_mp.DynamicLossScale(16), 16, keras_mp.DynamicLossScale),
        (v1.FixedLossScaleManager(32), 32, v1.ManagedLossScale),
        (v1.ExponentialUpdateLossScaleManager(128, 10), 128, v1.ManagedLossScale),
    ],
    ids=["dynamic", "number", "LossScale", "fixed manager", "manager"],
)
def test_what_a_loss_scale_may_be(loss_scale, scale, kind):
    optimizer = wrapped(loss_scale=loss_scale)
    assert isinstance(optimizer.loss_scale, kind)
    assert float(optimizer.loss_scale()) == scale
    v = tf.Variable(1.0)
    optimizer.minimize(lambda: v**2)
    assert float(v) == 0.5


def test_the_argument_of_tensorflow_1():
    manager = v1.FixedLossScaleManager(32)
    assert v1.LossScaleOptimizer(sgd(), loss_scale_manager=manager).loss_scale.manager is manager
    with pytest.raises(ValueError, match="not both"):
        v1.LossScaleOptimizer(sgd(), 8, loss_scale_manager=manager)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: wrapped(tf.keras.optimizers.SGD()), TypeError, "there is keras_mp.LossScale"),
        (lambda: wrapped(wrapped()), TypeError, "already scales the loss"),
        (
            lambda: wrapped(V1.mixed_precision.MixedPrecisionLossScaleOptimizer(sgd(), 8)),
            TypeError,
            "already scales the loss",
        ),
        (lambda: wrapped(loss_scale=None), ValueError, "needs a loss scale"),
        (lambda: wrapped(loss_scale=0), ValueError, "at least 1.17"),
        (lambda: wrapped(warn_after_skips=0), ValueError, "warn_after_skips=0"),
        (lambda: wrapped(aggregate_in_float16=1), TypeError, "must be a bool"),
        (lambda: v1.FixedLossScaleManager(0), ValueError, "at least 1.17"),
        (lambda: v1.FixedLossScaleManager("8"), TypeError, "must be an int or a float"),
        (lambda: growing_by(scale=float("nan")), ValueError, "must be finite"),
        (lambda: growing_by(every=0), ValueError, "incr_every_n_steps=0"),
        (lambda: growing_by(every=1.5), TypeError, "must be an int"),
        (lambda: growing_by(decr_every_n_nan_or_inf=0), ValueError, "decr_every_n_nan_or_inf=0"),
        (lambda: growing_by(incr_ratio=1), ValueError, "above 1"),
        (lambda: growing_by(decr_ratio=1), ValueError, "below 1"),
        (v1.LossScaleManager, TypeError, "abstract"),
    ],
)
def test_wrong_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_an_optimizer_is_wrapped_once():
    inner = sgd()
    outer = wrapped(inner)
    with pytest.raises(ValueError, match="already wrapped by a LossScaleOptimizer"):
        wrapped(inner)
    del outer


# Steps.


def after_steps(where, make, factors, loss=tf.square):
    """A weight after each step of a loss that is multiplied, and what is known of all steps."""

    def known(optimizer, v, count):
        slots = [optimizer.get_slot(v, name) for name in optimizer.get_slot_names()]
        if isinstance(optimizer, v1.LossScaleOptimizer):
            of_steps = optimizer.steps_skipped, optimizer.last_step_skipped
            return [count, *slots, *of_steps, optimizer.loss_scale()]
        return [count, *slots]

    values = []
    if where == "graph":
        with tf.Graph().as_default():
            v, count = V1.get_variable("v", initializer=1.0), V1.train.create_global_step()
            factor, optimizer = V1.placeholder(tf.float32, []), make()
            train = optimizer.minimize(factor * loss(v), count, name="train")
            assert train.name == "train"
            assert V1.get_collection(V1.GraphKeys.TRAIN_OP) == [train]
            with session() as run:
                for each in factors:
                    run.run(train, {factor: each})
                    values.append(run.run(v))
                return values, run.run(known(optimizer, v, count))
    v, count, optimizer = tf.Variable(1.0), tf.Variable(0, dtype=tf.int64), make()

    def step(factor):
        optimizer.minimize(lambda: factor * loss(v), count, [v])

    step = placed(where, step)
    for each in factors:
        step(tf.constant(each))
        values.append(float(v))
    return values, [float(each) for each in known(optimizer, v, count)]


@pytest.mark.parametrize("where", [*MODES, "graph"])
def test_steps_are_made_and_skipped(where):
    values, known = after_steps(
        where, lambda: wrapped(adam(), growing()), (1.0, INF, 2.0, 3.0, INF)
    )
    (first, second, third), of_control = after_steps(where, adam, (1.0, 2.0, 3.0))
    assert values == pytest.approx([first, first, second, third, third], rel=1e-6)
    # Two steps were skipped, the last one, too: 8, 4, and after two good ones 8, 4.
    assert known == pytest.approx([*of_control, 2, 1, 4], rel=1e-6)


def test_arguments_of_compute_gradients_reach_the_inner_optimizer():
    seen = {}

    class Spy(V1.train.GradientDescentOptimizer):
        def compute_gradients(self, loss, var_list=None, **kwargs):
            seen.update(kwargs)
            return super().compute_gradients(loss, var_list, **kwargs)

    with tf.Graph().as_default():
        v = V1.get_variable("v", initializer=[1.0, 2.0])
        with pytest.warns(keras_mp.MixedPrecisionWarning, match="Spy has a `compute_gradients` of"):
            optimizer = wrapped(Spy(0.25))
        arguments = {
            "gate_gradients": optimizer.GATE_GRAPH,
            "aggregation_method": tf.AggregationMethod.EXPERIMENTAL_TREE,
            "colocate_gradients_with_ops": True,
        }
        [(gradient, _)] = optimizer.compute_gradients(
            v**2, [v], grad_loss=tf.constant([1.0, 10.0]), **arguments
        )
        assert {key: seen[key] for key in arguments} == arguments
        with session() as run:
            assert run.run(gradient).tolist() == [2, 40]


def test_a_narrow_loss_is_widened():
    optimizer = wrapped(loss_scale=2.0**14)
    v = tf.Variable(1.0)
    seen = []

    def loss():
        seen.append(tf.cast(v, tf.float16) * 3)
        return seen[-1]

    pairs = optimizer.compute_gradients(loss, [v], grad_loss=tf.constant(0.5, tf.float16))
    assert seen[0].dtype == tf.float16
    assert float(pairs[0][0]) == 1.5
    with pytest.raises(TypeError, match="Only a floating-point loss"):
        optimizer.compute_gradients(lambda: tf.cast(v, tf.int32), [v])


def test_gradients_may_be_sparse_and_none():
    optimizer = wrapped(loss_scale=growing())
    table, unused = tf.Variable(tf.ones([4, 2])), tf.Variable(1.0)

    def loss():
        return tf.reduce_sum(tf.gather(table, [1, 1, 3]))

    pairs = optimizer.compute_gradients(loss, [table, unused])
    assert isinstance(pairs[0][0], tf.IndexedSlices)
    assert pairs[1][0] is None
    optimizer.apply_gradients(pairs)
    assert table.numpy()[:, 0].tolist() == [1, 0.5, 1, 0.75]
    [(gradient, _)] = optimizer.compute_gradients(loss, [table])
    bad = tf.IndexedSlices(gradient.values * INF, gradient.indices, gradient.dense_shape)
    optimizer.apply_gradients([(bad, table)])
    assert table.numpy()[:, 0].tolist() == [1, 0.5, 1, 0.75]
    # Rows whose sum overflows, too.
    optimizer.compute_gradients(loss, [table])
    rows = tf.IndexedSlices(tf.fill([2, 2], 3e38), tf.constant([0, 0]), tf.constant([4, 2]))
    optimizer.apply_gradients([(rows, table)])
    assert table.numpy()[:, 0].tolist() == [1, 0.5, 1, 0.75]
    for pairs in ([], [(None, unused)]):
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            optimizer.apply_gradients(pairs)


@pytest.mark.parametrize("dtype", [tf.float64, tf.float16])
def test_gradients_of_other_dtypes(dtype):
    optimizer = wrapped(loss_scale=growing())
    v = tf.Variable(1.0, dtype=dtype)
    [(gradient, _)] = optimizer.compute_gradients(lambda: tf.cast(v, tf.float32) ** 2, [v])
    assert (gradient.dtype, float(gradient)) == (dtype, 2)
    optimizer.apply_gradients([(gradient, v)])
    assert float(v) == 0.5


def test_a_fixed_scale_skips_nothing_and_a_fixed_manager_does():
    v = tf.Variable(1.0)
    managed = wrapped(loss_scale=v1.FixedLossScaleManager(8))
    managed.minimize(lambda: v * INF)
    assert (float(v), int(managed.steps_skipped), float(managed.loss_scale())) == (1, 1, 8)
    fixed = wrapped(loss_scale=8)
    fixed.minimize(lambda: v * INF)
    assert (float(v), int(fixed.steps_skipped)) == (-INF, 0)
    assert not bool(fixed.last_step_skipped)


class Halving(v1.LossScaleManager):
    """A manager as somebody may have written it, who knows of no base class."""

    def __init__(self):
        self.scale = tf.Variable(64.0, trainable=False)

    def get_loss_scale(self):
        return self.scale

    def update_loss_scale(self, finite_grads):
        halved = lambda: self.scale.assign(self.scale / 2)  # noqa: E731
        return tf.cond(finite_grads, lambda: self.scale.assign(self.scale), halved)


@pytest.mark.parametrize("where", ["eager", "function", "graph"])
@pytest.mark.parametrize(
    "manager",
    [Halving, lambda: growing_by(64, 3, decr_every_n_nan_or_inf=1, decr_ratio=0.5)],
    ids=["of somebody's own", "ours"],
)
def test_a_manager_is_told_of_each_step(where, manager):
    make = lambda: wrapped(loss_scale=manager())  # noqa: E731
    values, (*_, scale) = after_steps(where, make, (1.0, INF, 2.0, INF), tf.identity)
    assert (scale, values[-1]) == (16, 0.25)


def test_what_a_subclass_overrides_has_a_say_in_minimize():
    class Doubled(v1.LossScaleOptimizer):
        def compute_gradients(self, *args, **kwargs):
            return [(2 * g, v) for g, v in super().compute_gradients(*args, **kwargs)]

    v = tf.Variable(1.0)
    Doubled(sgd()).minimize(lambda: v**2)
    assert float(v) == 0


def test_many_skipped_steps_are_reported():
    optimizer = wrapped(warn_after_skips=2)
    v = tf.Variable(1.0)
    optimizer.minimize(lambda: v * INF)
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="2 steps in a row were skipped"):
        optimizer.minimize(lambda: v * INF)


# Misuse.


def test_gradients_of_a_graph_are_noticed():
    with tf.Graph().as_default():
        v = V1.get_variable("v", initializer=1.0)
        optimizer = wrapped()
        with pytest.warns(keras_mp.MixedPrecisionWarning, match="Do not use tf.gradients"):
            optimizer.apply_gradients(zip(tf.gradients(v**2, [v]), [v]))


def test_what_is_no_misuse():
    optimizer = wrapped()
    v, w = tf.Variable(1.0), tf.Variable(1.0)
    # One computation, applied in two parts.
    first, second = optimizer.compute_gradients(lambda: v**2 + w**2, [v, w])
    optimizer.apply_gradients([first])
    optimizer.apply_gradients([second])
    # In a graph, where a branch applies.
    with tf.Graph().as_default():
        u = V1.get_variable("u", initializer=1.0)
        optimizer = wrapped()
        pairs = optimizer.compute_gradients(u**2, [u])
        tf.cond(tf.constant(True), lambda: optimizer.apply_gradients(pairs), tf.no_op)


# Replicas.


@pytest.mark.parametrize("inner", [sgd, adam])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_one_verdict_for_all_replicas(inner, mode):
    with mirrored(2).scope():
        v = tf.Variable(1.0)
        steps = tf.Variable(
            0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
        )
        optimizer = wrapped(inner(), growing())

    def step(factor):
        optimizer.minimize(lambda: factor * v, steps, [v])

    run = on_replicas(step, mode)
    control, other = inner(), tf.Variable(1.0)
    for factors in ([1.0, 2.0], [1.0, INF], [float("nan"), 1.0], [1.0, 1.0]):
        run(tf.constant(factors))
        if np.isfinite(sum(factors)):
            control.minimize(lambda: sum(factors) * other, var_list=[other])
        assert by_replica(v) == pytest.approx([float(other)] * 2, rel=1e-6)
    assert int(value(steps)) == 2
    assert int(optimizer.steps_skipped) == 2
    assert float(optimizer.loss_scale()) == 2


def test_the_cross_replica_context_is_refused():
    with mirrored(2).scope():
        v = tf.Variable(1.0)
        optimizer = wrapped()
        with pytest.raises(ValueError, match="in a replica context"):
            optimizer.apply_gradients([(tf.constant(1.0), v)])


# Files.


def trained(make, name="v", steps=3):
    """An optimizer, and a variable that it has trained."""
    v = tf.Variable([1.0, 2.0], name=name)
    optimizer = make()
    for _ in range(steps):
        optimizer.minimize(lambda: tf.reduce_sum(v**2), var_list=[v])
    return v, optimizer


def slots(optimizer, v):
    return [optimizer.get_slot(v, name).numpy().tolist() for name in optimizer.get_slot_names()]


@pytest.mark.parametrize("saved", ["float32", "ours", "stock"])
@pytest.mark.parametrize("restored_first", [False, True])
def test_checkpoints(saved, restored_first, tmp_path):
    make = {
        "float32": adam,
        "ours": lambda: wrapped(adam(), growing()),
        "stock": lambda: V1.mixed_precision.MixedPrecisionLossScaleOptimizer(adam(), 8),
    }[saved]
    v, optimizer = trained(make)
    inner = optimizer._optimizer if saved == "stock" else optimizer
    path = tf.train.Checkpoint(v=v, optimizer=optimizer).save(tmp_path / "checkpoint")
    w, other = trained(lambda: wrapped(adam(), growing()), steps=0 if restored_first else 1)
    status = tf.train.Checkpoint(v=w, optimizer=other).restore(path)
    if restored_first:
        other.minimize(lambda: tf.reduce_sum(w**2), var_list=[w])
        inner.minimize(lambda: tf.reduce_sum(v**2), var_list=[v])
    if saved == "ours":
        status.assert_existing_objects_matched()
        assert float(other.loss_scale()) == float(optimizer.loss_scale())
    assert w.numpy().tolist() == v.numpy().tolist()
    assert slots(other, w) == slots(inner, v)
    both = other.inner_optimizer, getattr(inner, "inner_optimizer", inner)
    of_other, of_inner = ([float(b) for b in each._get_beta_accumulators()] for each in both)
    assert of_other == of_inner


def test_a_checkpoint_of_ours_loads_without_loss_scaling(tmp_path):
    v, optimizer = trained(lambda: wrapped(adam(), growing()))
    path = tf.train.Checkpoint(v=v, optimizer=optimizer).save(tmp_path / "checkpoint")
    w, plain = trained(adam, steps=1)
    tf.train.Checkpoint(v=w, optimizer=plain).restore(path).assert_existing_objects_matched()
    assert slots(plain, w) == slots(optimizer, v)


def graph_of(make):
    with tf.Graph().as_default() as graph:
        v = V1.get_variable("v", initializer=[1.0, 2.0])
        optimizer = make()
        train = optimizer.minimize(v**2)
    return graph, v, optimizer, train


def test_variables_are_the_inner_ones_and_the_scale_s_as_a_saver_names_them(tmp_path):
    plain, v, _, train = graph_of(adam)
    with plain.as_default(), session(plain) as run:
        run.run(train)
        after = run.run(v)
        path = V1.train.Saver().save(run, str(tmp_path / "plain"))
    names = {name for name, _ in tf.train.list_variables(path)}
    graph, v, optimizer, _ = graph_of(lambda: wrapped(adam(), growing()))
    with graph.as_default(), session(graph) as run:
        every = {each.op.name for each in V1.global_variables()}
        ours = {each.op.name for each in optimizer.loss_scale_variables()}
        assert every == names | ours
        assert {each.op.name for each in optimizer.variables()} == every - {"v"}
        assert ours == {"current_loss_scale", "good_steps", "bad_steps", "steps_skipped"}
        kept = [each for each in V1.global_variables() if each.op.name not in ours]
        V1.train.Saver(kept).restore(run, path)
        assert run.run(v).tolist() == after.tolist()


def test_a_monitored_session_with_hooks(tmp_path):
    for until in (3, 6):
        with tf.Graph().as_default():
            v = V1.get_variable("v", initializer=1.0)
            step = V1.train.get_or_create_global_step()
            optimizer = wrapped(adam(), v1.ExponentialUpdateLossScaleManager(8, 2))
            train = optimizer.minimize(v**2, step)
            hooks = [V1.train.StopAtStepHook(last_step=until), V1.train.NanTensorHook(v)]
            calls = 0
            with V1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), hooks=hooks, save_checkpoint_steps=1
            ) as run:
                while not run.should_stop():
                    run.run(train)
                    calls += 1
            assert calls == 3
    reader = tf.train.load_checkpoint(str(tmp_path))
    assert reader.get_tensor("global_step") == 6
    assert reader.get_tensor("loss_scale") == 64
    assert "v/Adam" in reader.get_variable_to_shape_map()


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("kind", ["bare", "fixed", "dynamic"])
def test_a_session_runs_a_step_on_replicas(kind, bad):
    # One that is made in the graph would sum without collectives in all later tests, too.
    strategy = mirrored(2)
    with tf.Graph().as_default(), strategy.scope():
        step_count = V1.train.get_or_create_global_step()
        manager = v1.ExponentialUpdateLossScaleManager(8, 100, 1, decr_ratio=0.5)
        scale = manager if kind == "dynamic" else 8.0
        v = V1.get_variable("v", initializer=[1.0, 2.0], use_resource=True)
        optimizer = V1.train.GradientDescentOptimizer(0.25)
        if kind != "bare":
            optimizer = v1.LossScaleOptimizer(optimizer, scale)

        def step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            factor = tf.where(tf.equal(replica, 1) & bad, np.float32(np.inf), 1.0)
            return optimizer.minimize(lambda: tf.reduce_sum(v**2) * factor, step_count)

        train = tf.group(*strategy.experimental_local_results(strategy.run(step)))
        with session() as run:
            run.run(train)
            values = run.run(strategy.experimental_local_results(v))
            if kind == "dynamic":
                assert run.run([step_count, manager.get_loss_scale()]) == [not bad, 4 if bad else 8]
    expected = [0.0, 0.0] if not bad else [1.0, 2.0] if kind == "dynamic" else [-np.inf] * 2
    for each in values:
        np.testing.assert_array_equal(each, expected)


def test_a_skipped_step_puts_back_what_was_written_since_the_last_one():
    optimizer, v, statistic = wrapped(), tf.Variable(1.0), tf.Variable(0.0, trainable=False)
    with keras_mp.training_step(statistic):
        for factor in (1.0, float("nan")):
            statistic.assign_add(1.0)
            optimizer.minimize(lambda factor=factor: v * factor, var_list=[v])
    assert (float(v), float(statistic), int(optimizer.steps_skipped)) == (0.75, 1.0, 1)


# Loss scale managers: their schedules, in eager, in functions and in graphs.


SLOW = {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2, "decr_ratio": 0.5}
FAST = {"incr_every_n_steps": 1, "decr_every_n_nan_or_inf": 1}


@pytest.mark.parametrize(
    ("first", "arguments", "verdicts", "scales", "good", "bad"),
    [
        # What is not given is as in TensorFlow 1.
        (100, {"incr_every_n_steps": 1}, "+--", [200, 200, 160], "000", "010"),
        (8, SLOW, "+++++++", [8, 8, 16, 16, 16, 32, 32], "1201201", "0000000"),
        # Good steps are counted in a row, and bad ones are not.
        (8, SLOW, "-++-+-++-", [8, 8, 8, 4, 4, 4, 4, 4, 2], "012010120", "111001110"),
        (8, SLOW, "-+++-", [8, 8, 8, 16, 16], "01200", "11101"),
        (3.5, {**FAST, "incr_ratio": 1.5}, "++", [5.25, 7.875], "00", "00"),
        (1.5, {**FAST, "decr_ratio": 0.8}, "---", [np.float32(1.2), 1, 1], "000", "000"),
        (0.5, FAST, "--+", [0.5, 0.5, 1], "000", "000"),  # below 1 from the start
        (2.0**126, FAST, "++-", [2.0**127, 2.0**127, np.float32(0.8) * 2.0**127], "000", "000"),
    ],
)
def test_the_schedule(first, arguments, verdicts, scales, good, bad):
    manager = v1.ExponentialUpdateLossScaleManager(first, **arguments)
    found = []
    for verdict in verdicts:
        manager.update_loss_scale(tf.constant(verdict == "+"))
        numbers = manager.get_loss_scale(), manager.good_steps, manager.bad_steps
        found.append(tuple(number.numpy() for number in numbers))
    assert found == [*zip(scales, map(int, good), map(int, bad))]


def test_in_a_graph_an_update_is_an_operation_and_variables_have_their_names():
    with tf.Graph().as_default():
        manager = v1.ExponentialUpdateLossScaleManager(8, 2)
        assert isinstance(manager.update_loss_scale(tf.constant(True)), tf.Operation)
        names = [v.op.name for v in V1.global_variables()]
        assert names == ["loss_scale", "good_steps", "bad_steps"]


def test_a_manager_is_saved_with_its_variables(tmp_path):
    manager = v1.ExponentialUpdateLossScaleManager(8, 2)
    manager.update_loss_scale(True)
    path = tf.train.Checkpoint(manager=manager).save(tmp_path / "checkpoint")
    other = v1.ExponentialUpdateLossScaleManager(1, 2)
    tf.train.Checkpoint(manager=other).restore(path).assert_consumed()
    assert (float(other.get_loss_scale()), int(other.good_steps)) == (8, 1)


@pytest.mark.parametrize("how", [{"run_eagerly": True}, {"jit_compile": False}])
def test_a_batch_without_examples_is_not_counted(how):
    keras_mp.set_global_policy("mixed_float16")
    manager = growing_by(2.0**10, 100, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    loss_scale = v1.ManagedLossScale(manager)
    layers = tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)
    optimizer = keras_mp.LossScaleOptimizer("sgd", loss_scale)
    model = compiled_model(*layers, optimizer=optimizer, **how)
    x = np.ones([2, 2], "float32")
    inputs = [x, x[:0], x * np.inf, x[:0], x * np.inf]
    model.fit(batches(*((each, each[:, :1]) for each in inputs)), verbose=0, shuffle=False)
    assert int(model.optimizer.steps_skipped) == 4
    assert float(loss_scale()) == 2.0**9

"""Replicas are logical CPU devices; they are as real to TensorFlow as GPUs are."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, mirrored, once, pairs, value
from tests.models import FAMILIES, digits, make_optimizer
from tests.op_autocast.common import operations
from tests.steps import by_replica

INF, NAN = float("inf"), float("nan")


WAYS = ["rfc", "keras_3", "minimize"]


def scaling(name, loss_scale="dynamic", *, initial=1.0, rate=1.0, **arguments):
    """An optimizer without momentum that scales losses, and a variable, of two replicas."""
    with mirrored(2).scope():
        v, inner = tf.Variable(initial), make_optimizer(name, rate, momentum=0.0)
        optimizer = keras_mp.LossScaleOptimizer(inner, loss_scale, **arguments)
        optimizer.build([v])
    return optimizer, v


def assert_same_everywhere(variable, count=2):
    first, *others = by_replica(variable, count)
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize(
    ("name", "replicas"),
    [(FAMILIES[-1], 2), ("new.Adam", 4), (FAMILIES[-1].replace("SGD", "RMSprop"), 2)],
)
def test_replicas_equal_one_device_with_the_whole_batch(name, replicas):
    # Defect 2: Keras 3 clips each replica's gradient before the sum.
    images, labels = digits()
    clip = {"clipnorm": 0.05}
    if name.endswith("RMSprop"):
        clip["epsilon"] = 1e-3  # with less, RMSprop amplifies the rounding of the sum

    def train(count, wrap=None):
        strategy = mirrored(count) if count > 1 else tf.distribute.get_strategy()
        with strategy.scope():
            w = tf.Variable(tf.zeros([64, 10]))
            optimizer = make_optimizer(name, 0.01, **clip)
            optimizer, way = (wrap(optimizer), steps.rfc) if wrap else (optimizer, steps.unscaled)

        def loss(x, y):
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x @ w)
            return tf.reduce_mean(losses) / count

        step = way(optimizer, loss, [w])
        step = steps.on_replicas(step, count=count) if count > 1 else tf.function(step)
        for i in range(5):
            part = slice(64 * i, 64 * i + 64)
            batch = [tf.constant(each[part]) for each in (images, labels)]
            step(*(tf.stack(tf.split(each, count)) if count > 1 else each for each in batch))
        if count > 1:
            assert_same_everywhere(w, count)
        return value(w)

    control = train(1)
    in_float32 = functools.partial(keras_mp.LossScaleOptimizer, aggregate_in_float16=False)
    ours = train(replicas, in_float32)
    # Sums of 2 to 4 float32 numbers in another order: a few ulps (6e-8) of each gradient, which
    # Adam's and RMSprop's division by the gradient's own size turns into as many of the step.
    np.testing.assert_allclose(ours, control, rtol=1e-4, atol=2e-6)
    assert np.abs(control).max() > 5e-4
    in_float16 = train(replicas, keras_mp.LossScaleOptimizer)
    # float16 rounds gradients to 2**-11, 5e-4 of their size, and of a small one Adam makes a
    # whole step; the bound is what 5 steps of 0.01 times that rounding can come to.
    assert np.abs(in_float16 - control).mean() < 1e-4


def collective_dtypes(function, *args):
    """The dtypes that the all-reduces of a traced function send."""
    graph = function.get_concrete_function(*args).graph
    return {dtype for _, dtype in operations(graph, "CollectiveReduceV2", "NcclAllReduce")}


SENT = [
    ("dynamic", "float16", "float16"),
    ("dynamic", "float32", "float32"),
    # With a fixed scale nothing is skipped, so nothing may overflow on the way.
    (64, "float16", "float32"),
    (64, "bfloat16", "bfloat16"),
]


@pytest.mark.parametrize(("name", "way", "case"), pairs(FAMILIES, WAYS, SENT))
def test_what_crosses_the_wire(name, way, case):
    loss_scale, reduce_dtype, sent = case
    optimizer, v = scaling(name, loss_scale)
    optimizer.reduce_dtype = reduce_dtype
    step = steps.WAYS[way](optimizer, lambda: tf.reduce_sum(v**2), [v])
    assert collective_dtypes(steps.on_replicas(step)) == {sent}


@once
@pytest.mark.parametrize(
    ("loss_scale", "skip"), [(64, False), (64, True), (None, True), ("dynamic", False)]
)
def test_sums_in_bfloat16_need_no_scale_that_skips(loss_scale, skip):
    # 1e-9 is zero in float16, 1e5 infinite; neither has 8 bits only.
    how = {"reduce_dtype": "bfloat16", "skip_nonfinite": skip}
    optimizer, v = scaling(FAMILIES[-1], loss_scale, initial=[0.0, 0.0], **how)
    loss = lambda: tf.reduce_sum(v * [1e-9, 1e5])  # noqa: E731
    steps.on_replicas(steps.minimize(optimizer, loss, [v]))()
    exact = np.array([2e-9, 2e5])
    errors = np.abs(-value(v) - exact) / exact
    assert (errors > 2**-12).all()
    assert (errors < 2**-8).all()
    assert int(optimizer.steps_skipped) == 0


# What is not scaled is not narrowed.
@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ({"loss_scale": 64, "reduce_dtype": tf.bfloat16}, "bfloat16"),
        ({"loss_scale": None, "skip_nonfinite": True}, "float32"),
    ],
)
def test_the_sums_of_a_scaler(arguments, sent):
    with mirrored(2).scope():
        v, scaler = tf.Variable(0.0), keras_mp.GradScaler(**arguments)

    def apply(pairs):
        for gradient, variable in pairs:
            variable.assign_sub(gradient)

    step = steps.scaler(scaler, apply, lambda: v * (1 + 2.0**-9), [v])
    assert collective_dtypes(steps.on_replicas(step)) == {sent}


@once
def test_large_gradients_are_sent_in_packs():
    # The second gradient, which is computed first, fills a pack; the small ones wait for the last.
    sizes = [2**13, 2**21 + 1, 5, 7]
    with mirrored(2).scope():
        variables = [tf.Variable(tf.zeros([size])) for size in sizes]
        variables += [tf.Variable(tf.zeros([size], tf.float16)) for size in (3, 2)]
        optimizer = keras_mp.LossScaleOptimizer(make_optimizer(FAMILIES[0], 1.0, momentum=0.0))

    def loss():
        return tf.add_n([tf.reduce_sum(tf.cast(v, tf.float32)) for v in variables]) * 0.25

    step = steps.on_replicas(steps.minimize(optimizer, loss, variables))
    graph = step.get_concrete_function().graph
    sums = [op for op in graph.get_operations() if op.type == "CollectiveReduceV2"]
    elements = {op.inputs[0].shape.num_elements() for op in sums if op.inputs[0].shape.rank}
    assert elements == {2**21 + 1, 2**13 + 12 + 5}
    step()
    for v in variables:
        assert_same_everywhere(v)
        assert set(value(v)) == {-0.5}


@once
def test_what_a_decision_costs_does_not_grow_with_gradients(name):
    # A branch is given each of its inputs, and each operation of the one that is not taken is
    # still passed over.
    def inputs_and_operations_of_skip(count):
        with mirrored(2).scope():
            variables = [tf.Variable(tf.ones([3])) for _ in range(count)]
            optimizer = keras_mp.LossScaleOptimizer(make_optimizer(name))

        def loss():
            return tf.add_n([tf.reduce_sum(v) for v in variables])

        step = steps.on_replicas(steps.minimize(optimizer, loss, variables))
        graph = step.get_concrete_function().graph
        [decision] = [op for op in graph.get_operations() if op.type in ("If", "StatelessIf")]
        skip = decision.get_attr("else_branch").name
        [branch] = [f for f in graph.as_graph_def().library.function if f.signature.name == skip]
        return len(decision.inputs), len(branch.node_def)

    (few_inputs, few_operations), (inputs, operations) = map(inputs_and_operations_of_skip, (2, 12))
    # Of each replica the variable and, where the optimizer has one, its slot.
    assert inputs - few_inputs <= 10 * 2 * 2
    assert operations == few_operations


def test_small_gradients_survive_the_float16_reduction(name):
    # 1e-9 is zero in float16; scaled by 2**15 it is not.
    optimizer, v = scaling(name, rate=2.0**20)
    for way in WAYS:
        v.assign(1.0)
        steps.on_replicas(steps.WAYS[way](optimizer, lambda: v * 1e-9, [v]))()
        assert 1 - value(v) == pytest.approx(2 * 2**20 * 1e-9, rel=1e-2)


def test_an_overflow_of_the_float16_sum_skips_the_step(name):
    optimizer, v = scaling(name, initial_scale=2.0**16)
    step = steps.on_replicas(steps.rfc(optimizer, lambda: v * 0.75, [v]))
    # 0.75 * 2**16 fits into float16, twice that does not.
    step()
    assert value(v) == 1
    assert float(optimizer.loss_scale) == 2**15
    step()
    assert value(v) == -0.5


@pytest.mark.parametrize(
    "how", [{"skip_gradients_aggregation": True}, {"experimental_aggregate_gradients": False}]
)
def test_gradients_that_the_user_has_summed(name, how):
    optimizer, v = scaling(name, 64, initial=[1.0])

    def apply(pairs):
        [gradient, _] = zip(*pairs)
        summed = tf.distribute.get_replica_context().all_reduce("sum", list(gradient))
        optimizer.apply_gradients(zip(summed, [v]), **how)

    way = apply, optimizer.get_scaled_loss, optimizer.get_unscaled_gradients
    steps.on_replicas(steps.taped(lambda: tf.reduce_sum(v * 0.125), [v], *way))()
    np.testing.assert_array_equal(value(v), [0.75])


def test_not_summed_but_one_verdict_all_the_same(name):
    optimizer, v = scaling(name, initial=[1.0])

    @steps.on_replicas
    def step(gradient):
        optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply_gradients([(gradient, v)], skip_gradients_aggregation=True)

    for gradients, bad in (
        ([[NAN], [0.5]], [(0, 1)]),
        ([[0.5], [NAN]], [(1, 1)]),
        ([[NAN], [NAN]], [(0, 1), (1, 1)]),
    ):
        step(tf.constant(gradients))
        assert by_replica(v) == [[1], [1]]
        found = optimizer.last_overflow.gradients
        assert [(each.place.replica, each.nans) for each in found] == bad
    assert int(optimizer.steps_skipped) == 3


@once
@pytest.mark.skipif(IS_KERAS_3, reason="Optimizers of Keras 3 have no such method.")
def test_an_aggregation_that_sums_nothing_has_one_verdict_all_the_same(name):
    class Local(tf.keras.optimizers.SGD):
        def aggregate_gradients(self, grads_and_vars):
            return grads_and_vars

    with mirrored(2).scope():
        optimizer = keras_mp.LossScaleOptimizer(Local(1.0), 1, skip_nonfinite=True)
        v = tf.Variable([1.0])

    @steps.on_replicas
    def step(gradient):
        optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply_gradients([(gradient, v)])

    for gradients in ([[NAN], [0.5]], [[0.5], [NAN]]):
        step(tf.constant(gradients))
        assert by_replica(v) == [[1], [1]]
    step(tf.constant([[0.5], [0.25]]))
    assert by_replica(v) == [[0.5], [0.75]]
    assert int(optimizer.steps_skipped) == 2


def test_cross_replica_context_is_refused(name):
    optimizer, v = scaling(name)
    with mirrored(2).scope():
        optimizer.scale_loss(tf.constant(1.0))
        with pytest.raises(ValueError, match="inside the function that is passed to"):
            optimizer.apply_gradients([(tf.constant(1.0), v)])


def central_storage():
    return tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])


def test_central_storage(name):
    strategy = central_storage()
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])
        optimizer = keras_mp.LossScaleOptimizer(
            make_optimizer(name, 0.125, momentum=0.5), keras_mp.DynamicLossScale(64)
        )
        optimizer.build([v])

    @tf.function
    def step(factors):
        replica = lambda: tf.distribute.get_replica_context().replica_id_in_sync_group  # noqa: E731
        factor = lambda: tf.gather(factors, replica())  # noqa: E731
        strategy.run(lambda: optimizer.minimize(lambda: tf.reduce_sum(v) * factor(), [v]))

    if name.startswith("legacy"):  # tf_keras's legacy optimizers want to sum themselves there.
        with pytest.raises(NotImplementedError, match="not supported for ParameterServerStrategy"):
            step(tf.constant([1.0, 2.0]))
        return
    seen = []
    for factors in ([1.0, 2.0], [1.0, INF], [NAN, 1.0], [1.0, 1.0]):
        step(tf.constant(factors))
        seen.append((*value(v), float(optimizer.loss_scale), int(optimizer.steps_skipped)))
    good = 0.625, 1.625
    assert seen == [(*good, 64, 0), (*good, 32, 1), (*good, 16, 2), (0.1875, 1.1875, 16, 2)]
    assert int(value(optimizer.iterations)) == 2


def test_variables_cast_themselves_under_central_storage():
    strategy = central_storage()
    keras_mp.set_global_policy("mixed_bfloat16")
    with strategy.scope():
        v = keras_mp.autocast_variable(tf.Variable([1 + 2.0**-10, 2.0]))
        layer = tf.keras.layers.Dense(2, kernel_initializer="ones")
        layer.build((None, 2))

    @tf.function
    def read():
        def replica_read():
            with keras_mp.autocast_scope(tf.bfloat16):
                cast = tf.convert_to_tensor(v)
            with keras_mp.autocast(tf.bfloat16):
                product = tf.linalg.matvec([[1.0, 0.0]], v)
            return cast, product, layer(v[tf.newaxis])

        return strategy.run(replica_read)

    for results in zip(*map(strategy.experimental_local_results, read()), strict=True):
        cast, product, of_layer = results
        assert (cast.dtype, of_layer.dtype) == (tf.bfloat16, tf.bfloat16)
        assert (product.dtype, float(product[0])) == (tf.float32, 1)
        assert of_layer.numpy().tolist() == [[3, 3]]


def test_a_strategy_that_nobody_knows_is_refused(name):
    class Strategy(tf.distribute.Strategy):
        def __init__(self):
            super().__init__(tf.distribute.OneDeviceStrategy("CPU:0").extended)

    with (
        Strategy().scope(),
        pytest.raises(ValueError, match="MirroredStrategy, OneDeviceStrategy") as raised,
    ):
        keras_mp.LossScaleOptimizer(make_optimizer(name))
    assert "Received: " in str(raised.value)


@pytest.mark.parametrize(
    "make", [lambda: tf.distribute.OneDeviceStrategy("CPU:0"), lambda: mirrored(1)]
)
def test_strategies_of_one_device(name, make):
    strategy = make()
    with strategy.scope():
        v = tf.Variable(1.0)
        optimizer = keras_mp.LossScaleOptimizer(make_optimizer(name, 1.0, momentum=0.0))
    step = steps.rfc(optimizer, lambda: v * 0.5, [v])
    tf.function(lambda: strategy.run(step))()
    assert value(v) == 0.5


@pytest.mark.parametrize("way", WAYS)
def test_a_fixed_scale_sums_float16_gradients_in_float32(name, way):
    # 2 * 40 * 1024 has no float16 value; 80 has.
    initial = tf.constant([1.0, 2.0], tf.float16)
    optimizer, v = scaling(name, 1024, initial=initial, rate=0.125)
    steps.on_replicas(steps.WAYS[way](optimizer, lambda: tf.reduce_sum(v) * 40, [v]))()
    assert_same_everywhere(v)
    np.testing.assert_array_equal(value(v), [-9, -8])


@pytest.mark.skipif(not IS_KERAS_3, reason="tf_keras copes with it.")
def test_an_optimizer_made_outside_of_the_scope_is_refused(name):
    optimizer = keras_mp.LossScaleOptimizer(make_optimizer(name))
    with mirrored(2).scope():
        v = tf.Variable([1.0, 2.0])
    optimizer.build([v])
    with pytest.raises(ValueError, match="in the scope of the strategy"):
        mirrored(2).run(lambda: optimizer.minimize(lambda: tf.reduce_sum(v), [v]))
    assert_same_everywhere(v)
    np.testing.assert_array_equal(value(v), [1, 2])


@once
def test_without_a_strategy_nobody_is_met(monkeypatch):
    # A merge call would make TensorFlow convert the update of each variable.
    def fail(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(type(tf.distribute.get_replica_context()), "merge_call", fail)
    optimizer, v = keras_mp.LossScaleOptimizer("sgd"), tf.Variable(1.0)
    optimizer.build([v])
    tf.function(steps.minimize(optimizer, lambda: v * 2, [v]))()

"""What docs/compat_v1.md says of `tf.compat.v1.mixed_precision`, line by line, and of ours."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import keras_mp
from keras_mp.compat import v1
from tests.common import IS_KERAS_3, mirrored, needs_bfloat16_rewrite, once, value

V1 = tf.compat.v1
STOCK = V1.mixed_precision
INF = float("inf")


def sgd():
    return V1.train.GradientDescentOptimizer(0.25)


def adam():
    return V1.train.AdamOptimizer(0.1)


def both(inner=sgd, loss_scale="dynamic"):
    """TensorFlow's own wrapper and ours, each around an optimizer of its own."""
    stock = loss_scale
    if isinstance(loss_scale, keras_mp.LossScale):
        stock = loss_scale.to_compat_v1()
    return (
        STOCK.MixedPrecisionLossScaleOptimizer(inner(), stock),
        v1.LossScaleOptimizer(inner(), loss_scale),
    )


@once
def test_a_sum_over_replicas_that_overflows():
    after = []
    for i in range(2):
        with mirrored(2).scope():
            v = tf.Variable(1.0)
            optimizer = both(loss_scale=keras_mp.DynamicLossScale(1))[i]
        mirrored(2).run(lambda: optimizer.minimize(lambda: 3e38 * v, var_list=[v]))
        after.append(float(value(v)))
    assert after == [-INF, 1]


@once
def test_sparse_rows_whose_sum_overflows():
    rows = tf.IndexedSlices(tf.constant([[3e38], [3e38]]), tf.constant([0, 0]), tf.constant([1, 1]))
    after = []
    for optimizer in both():
        v = tf.Variable([[1.0]])
        pairs = optimizer.compute_gradients(lambda: v * 1.0, [v])
        optimizer.apply_gradients([(rows, v) for _, v in pairs])
        after.append(float(v[0, 0]))
    assert abs(after[0]) > 1e38
    assert after[1] == 1


@once
def test_variables_in_float16():
    v = tf.Variable(1.0, dtype=tf.float16)
    loss = lambda: tf.cast(v, tf.float32) * 0.25  # noqa: E731
    stock, ours = both(loss_scale=1024)
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected to be a half tensor"):
        stock.compute_gradients(loss, [v])
    [(gradient, _)] = ours.compute_gradients(loss, [v])
    assert gradient.dtype == tf.float16
    assert float(gradient) == 0.25


@once
def test_slots():
    found = []
    for optimizer in both(adam):
        v = tf.Variable(1.0)
        optimizer.minimize(lambda: v**2, var_list=[v])
        found.append((optimizer.get_slot_names(), optimizer.get_slot(v, "m") is not None))
    assert found == [([], False), (["m", "v"], True)]


@once
def test_a_checkpoint_of_a_float32_run(tmp_path):
    v, plain = tf.Variable(1.0), adam()
    for _ in range(3):
        plain.minimize(lambda: v**2, var_list=[v])
    path = tf.train.Checkpoint(v=v, optimizer=plain).save(tmp_path / "checkpoint")
    same = []
    for optimizer in both(adam):
        w = tf.Variable(1.0)
        optimizer.minimize(lambda: w**2, var_list=[w])
        tf.train.Checkpoint(v=w, optimizer=optimizer).restore(path).expect_partial()
        inner = getattr(optimizer, "_optimizer", None) or optimizer.inner_optimizer
        same.append(float(inner.get_slot(w, "m")) == float(plain.get_slot(v, "m")))
    assert same == [False, True]


@once
def test_skipped_steps_are_counted():
    for optimizer, counted in zip(both(), (None, 1), strict=True):
        v = tf.Variable(1.0)
        optimizer.minimize(lambda: v * INF, var_list=[v])
        assert float(v) == 1
        count = getattr(optimizer, "steps_skipped", None)
        assert (count if count is None else int(count)) == counted


@once
@pytest.mark.filterwarnings("ignore:apply_gradients.. was given")
def test_gradients_that_were_not_scaled(recwarn):
    said = []
    for optimizer in both():
        recwarn.clear()
        optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
        said.append(len(recwarn))
    assert said == [0, 1]


@once
def test_wrapped_twice():
    stock = STOCK.MixedPrecisionLossScaleOptimizer(both(loss_scale=64)[0], 64)
    assert isinstance(stock, V1.train.Optimizer)
    with pytest.raises(TypeError, match="scaled twice"):
        v1.LossScaleOptimizer(both(loss_scale=64)[1], 64)


@once
def test_a_fixed_scale_and_a_bad_step():
    """Without a manager both apply it; only a manager of TensorFlow 1 skips it."""
    optimizers = [*both(loss_scale=8), v1.LossScaleOptimizer(sgd(), v1.FixedLossScaleManager(8))]
    after = []
    for optimizer in optimizers:
        v = tf.Variable(1.0)
        optimizer.minimize(lambda: v * INF, var_list=[v])
        after.append(float(v))
    assert after == [-INF, -INF, 1]


# The graph rewrite.


def stock_enable(optimizer):
    return STOCK.enable_mixed_precision_graph_rewrite(optimizer)


def our_enable(optimizer):
    return keras_mp.enable_mixed_precision_graph_rewrite(optimizer, dtype="bfloat16")


@pytest.fixture(autouse=True)
def stock_is_off_again():
    yield
    if tf.__internal__.train.is_mixed_precision_graph_rewrite_enabled():
        STOCK.disable_mixed_precision_graph_rewrite()


def off():
    keras_mp.keras_api.set_global_policy(None)
    if keras_mp.grappler.passes.enabled_dtype() is not None:
        keras_mp.disable_mixed_precision_graph_rewrite()
    else:
        STOCK.disable_mixed_precision_graph_rewrite()


@needs_bfloat16_rewrite
def test_optimizers_of_keras():
    with pytest.raises(ValueError, match="must be an instance of a tf.train.Optimizer"):
        stock_enable(tf.keras.optimizers.SGD())
    our_enable(tf.keras.optimizers.SGD())


@needs_bfloat16_rewrite
@once
def test_a_graph_on_a_cpu():
    dtypes = []
    for enable in (stock_enable, our_enable):
        enable(sgd())
        with context.collect_graphs() as graphs:
            tf.function(lambda x: tf.matmul(x, x))(tf.ones([8, 8]))
        nodes = [node for graph in graphs for node in graph.node if node.op == "MatMul"]
        dtypes.append({tf.as_dtype(node.attr["T"].type).name for node in nodes})
        off()
    in_float16 = keras_mp.hardware.cpu_takes_float16_rewrite()
    assert dtypes == [{"float16" if in_float16 else "float32"}, {"bfloat16"}]


def set_stock_policy(name):
    if IS_KERAS_3:
        tf.keras.config.set_dtype_policy(name)
    else:
        tf.keras.mixed_precision.set_global_policy(name)


@pytest.mark.parametrize("enable", [stock_enable, our_enable], ids=["stock", "ours"])
def test_a_mixed_policy_before(enable):
    set_stock_policy("mixed_float16")
    if enable is stock_enable and IS_KERAS_3:
        enable(sgd())  # silent
    else:
        with pytest.raises(ValueError, match="mixed"):
            enable(sgd())


@needs_bfloat16_rewrite
def test_a_mixed_policy_after():
    stock_enable(sgd())
    if IS_KERAS_3:
        set_stock_policy("mixed_float16")  # silent
    else:
        with pytest.raises(ValueError, match="graph rewrite has already been enabled"):
            set_stock_policy("mixed_float16")
    off()
    our_enable(sgd())
    with pytest.raises(ValueError, match="The graph rewrite to bfloat16 is on"):
        keras_mp.set_global_policy("mixed_float16")
    # Set with Keras's own function, it is refused when a model has it.
    if IS_KERAS_3:
        set_stock_policy("mixed_float16")
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        with pytest.raises(ValueError, match="The graph rewrite to bfloat16 is on"):
            model.compile("sgd", "mse")


@needs_bfloat16_rewrite
@once
def test_the_gradient_of_a_bias():
    kernel, bias = tf.Variable(tf.ones([2, 3])), tf.Variable(tf.zeros([3]))
    output, x = tf.Variable(tf.ones([3, 1])), tf.ones([10_000, 2])

    def gradient():
        with tf.GradientTape() as tape:
            h = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, kernel), bias))
            loss = tf.reduce_sum(tf.matmul(h, output))
        return tape.gradient(loss, [bias, kernel])

    our_enable(sgd())
    found = [tf.function(gradient)()[0].numpy()]
    off()
    keras_mp.grappler.passes.turn_on("bfloat16")  # and nothing else, as tf.config does
    found.append(tf.function(gradient)()[0].numpy())
    assert found[0].tolist() == [10_000] * 3
    if keras_mp.kernels.sums.TABLE.is_wrong("BiasAddGrad", "bfloat16", "NHWC"):
        assert np.all(found[1] < 1_000)

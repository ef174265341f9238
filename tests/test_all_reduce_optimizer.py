import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, MODES, assert_all_equal, mirrored, placed, value
from tests.models import compiled_model, digits, make_optimizer, sgd
from tests.replicas.test_distribution import assert_same_everywhere, collective_dtypes

# Neither term has 8 bits only, nor has their sum.
TERMS = [1 + 2.0**-9, 1 + 2.0**-6 + 2.0**-9]
ROUNDED_SUM = 2 + 2.0**-6


def times(v, term):
    return tf.reduce_sum(v) * tf.cast(term, v.dtype)


def on_replicas(inner, initial, dtype="bfloat16", loss_of=times, **how):
    """Lets two replicas make a step with a loss of `v` and the replica's term."""
    with mirrored(2).scope():
        v, optimizer = tf.Variable(initial), keras_mp.AllReduceOptimizer(inner(), dtype)
        optimizer.build([v])

    apply = functools.partial(optimizer.apply_gradients, **how)
    step = steps.on_replicas(steps.taped(lambda term: loss_of(v, term), [v], apply))
    sent = collective_dtypes(step, tf.constant(TERMS))
    step(tf.constant(TERMS))
    assert_same_everywhere(v)
    return value(v), sent


# Other dtypes travel as they are.
@pytest.mark.parametrize(
    ("initial", "dtype", "total", "sent"),
    [
        ([0.0, 1.0], "bfloat16", ROUNDED_SUM, "bfloat16"),
        ([0.0, 1.0], tf.float32, sum(TERMS), "float32"),
        (np.array([0.0, 1.0]), "bfloat16", sum(TERMS), "float64"),
    ],
    ids=str,
)
def test_gradients_are_summed_in_the_dtype(name, initial, dtype, total, sent):
    moved, found = on_replicas(lambda: sgd(name), initial, dtype)
    np.testing.assert_array_equal(moved, [-total, 1 - total])
    assert found == {sent}


def test_gradients_are_clipped_after_they_were_summed(name):
    moved, _ = on_replicas(lambda: sgd(name, clipvalue=1.5), [0.0])
    assert moved == [-1.5]


def test_sparse_gradients_stay_sparse(name):
    rows = lambda v, term: times(tf.gather(v, [1, 1]), term)  # noqa: E731
    moved, _ = on_replicas(lambda: sgd(name), [0.0, 0.0, 0.0], loss_of=rows)
    np.testing.assert_array_equal(moved, [0, -2 * ROUNDED_SUM, 0])


@pytest.mark.parametrize(
    "how", [{"skip_gradients_aggregation": True}, {"experimental_aggregate_gradients": False}]
)
def test_what_the_user_has_summed_is_not_summed(name, how):
    same = lambda v, term: times(v, TERMS[0])  # noqa: E731
    moved, sent = on_replicas(lambda: sgd(name), [0.0], loss_of=same, **how)
    assert (moved, sent) == ([-TERMS[0]], set())


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("mode", MODES)
def test_one_replica_needs_no_sum(name, mode):
    optimizer, v, w = keras_mp.AllReduceOptimizer(sgd(name)), tf.Variable(0.0), tf.Variable(1.0)

    def step():
        optimizer.minimize(lambda: v * TERMS[0] + 0 * w, [v, w])
        optimizer.apply_gradients([(tf.constant(1.0), v), (None, w)])

    optimizer.build([v, w])
    placed(mode, step)()
    assert (float(v), float(w)) == (-1 - TERMS[0], 1)
    assert int(value(optimizer.iterations)) == 2
    # A bad gradient is applied: nothing is skipped.
    optimizer.apply_gradients([(tf.constant(np.inf), v)])
    assert float(v) == -np.inf


def test_the_dtype_can_be_set(name):
    optimizer = keras_mp.AllReduceOptimizer(sgd(name))
    optimizer.reduce_dtype = "float32"
    assert optimizer.reduce_dtype == "float32"
    with pytest.raises(ValueError, match=r"use LossScaleOptimizer\(optimizer, reduce_dty"):
        optimizer.reduce_dtype = tf.float16
    with pytest.raises(TypeError, match="Received: reduce_dtype=None"):
        keras_mp.AllReduceOptimizer(sgd(name), None)


def test_what_sums_gradients_itself_is_not_wrapped_nor_wraps(name):
    optimizer = keras_mp.AllReduceOptimizer(sgd(name))
    deeper = keras_mp.OptimizerWrapper(optimizer)
    for wrap in (keras_mp.AllReduceOptimizer, keras_mp.LossScaleOptimizer):
        for each in (optimizer, deeper):
            with pytest.raises(TypeError, match=f"The {wrap.__name__} .* sums .* twice"):
                wrap(each)
    with pytest.raises(TypeError, match="The GradScaler .* sums gradients over replicas"):
        keras_mp.GradScaler(64).step(deeper, [(tf.constant(1.0), tf.Variable(1.0))])
    for scaling in (keras_mp.LossScaleOptimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        if scaling is not keras_mp.LossScaleOptimizer and name.startswith("legacy"):
            continue
        with pytest.raises(TypeError, match="to the one that scales the loss"):
            keras_mp.AllReduceOptimizer(scaling(sgd(name)))


def test_a_model_that_scales_its_loss_says_what_to_pass(name):
    keras_mp.set_global_policy(keras_mp.Policy("float32", loss_scale=64))
    with pytest.raises(TypeError, match="Pass `reduce_dtype` to the one that scales"):
        compiled_model(optimizer=keras_mp.AllReduceOptimizer(sgd(name)))


def train(name, make):
    images, labels = digits()
    keras_mp.set_global_policy("mixed_bfloat16")
    with mirrored(2).scope():
        tf.keras.utils.set_random_seed(1)
        dense = tf.keras.layers.Dense(10, dtype="float32")
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = make(make_optimizer(name, 0.1))
        model = compiled_model(dense, inputs=64, optimizer=optimizer, loss=loss)
    model.fit(images[:256], labels[:256], batch_size=64, verbose=0, shuffle=False)
    return model


def test_fit_and_save(name, tmp_path):
    model = train(name, keras_mp.AllReduceOptimizer)
    assert isinstance(model.optimizer, keras_mp.AllReduceOptimizer)
    control = train(name, lambda optimizer: optimizer).get_weights()
    for ours, exact in zip(model.get_weights(), control, strict=True):
        assert 0 < np.abs(ours - exact).max() < 2**-7 * np.abs(exact).max()
    for ending in (".keras", ".h5"):
        if ending == ".keras" and name.startswith("legacy"):
            continue
        path = str(tmp_path / f"model{ending}")
        model.save(path)
        loaded = tf.keras.models.load_model(path)
        optimizer = loaded.optimizer
        assert isinstance(optimizer, keras_mp.AllReduceOptimizer)
        assert optimizer.reduce_dtype == "bfloat16"
        assert int(value(optimizer.iterations)) == 4
        assert_all_equal(optimizer.variables, model.optimizer.variables)
        # The model itself follows the policy that is in force, and its layers do not.
        with keras_mp.policy_scope("mixed_float16"):
            loaded = tf.keras.models.load_model(path)
        assert isinstance(loaded.optimizer, keras_mp.AllReduceOptimizer)
    # A checkpoint is one of the inner optimizer.
    tf.train.Checkpoint(optimizer=model.optimizer).save(str(tmp_path / "checkpoint"))
    inner = make_optimizer(name)
    keras_mp.OptimizerWrapper(inner).build(tf.keras.models.clone_model(model).trainable_variables)
    tf.train.Checkpoint(optimizer=inner).restore(
        tf.train.latest_checkpoint(str(tmp_path))
    ).expect_partial()
    assert int(value(inner.iterations)) == 4


@pytest.mark.skipif(not IS_KERAS_3, reason="Only Keras 3 accumulates gradients.")
def test_accumulated_gradients_make_a_step():
    optimizer, v = tf.keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), tf.Variable(0.0)
    optimizer = keras_mp.AllReduceOptimizer(optimizer)
    for _ in range(2):
        optimizer.apply_gradients([(tf.constant(1.0), v)])
    assert (float(v), int(value(optimizer.iterations))) == (-1, 1)

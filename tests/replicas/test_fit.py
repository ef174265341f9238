"""`fit`, `evaluate` and `predict` by several workers equal those of one with the whole batch."""

import os

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3
from tests.models import FAMILIES, digits, make_optimizer
from tests.replicas import workers

BATCH = 12
# The last batch leaves all workers but one without a sample.
VALIDATION = slice(200, 237)


def compiled(strategy, cls=tf.keras.Sequential, **kwargs):
    keras_mp.set_global_policy(keras_mp.Policy("float32", loss_scale="dynamic"))
    with strategy.scope():
        tf.keras.utils.set_random_seed(1)
        model = cls([tf.keras.Input((64,)), tf.keras.layers.Dense(10)])
        # That of a half is not the half of it.
        iou = tf.keras.metrics.MeanIoU(10, sparse_y_pred=False, name="iou")
        model.compile(
            make_optimizer(FAMILIES[-1], 0.1),
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", iou],
            **kwargs,
        )
        model.optimizer.aggregate_in_float16 = False
    return model


class Batches(tf.keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: float(value) for name, value in logs.items()})


def even(strategy, index, folder):
    """Arrays in batches that all workers share evenly; validation in batches that they do not."""
    del index
    images, labels = digits()
    model, batches = compiled(strategy), Batches()
    best = tf.keras.callbacks.ModelCheckpoint(
        os.path.join(folder, "best.keras"), monitor="val_loss", save_best_only=True
    )
    history = model.fit(
        images[: 4 * BATCH],
        labels[: 4 * BATCH],
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
        sample_weight=np.linspace(0, 2, 4 * BATCH, dtype="float32"),
        validation_data=(images[VALIDATION], labels[VALIDATION]),
        callbacks=[keras_mp.callbacks.LossScaleMonitor(), batches, best],
    )
    return {
        "history": history.history,
        "batches": batches.logs,
        "weights": model.get_weights(),
        "predicted": model.predict(images[VALIDATION], batch_size=BATCH, verbose=0),
        "evaluated": model.evaluate(
            images[VALIDATION], labels[VALIDATION], batch_size=BATCH, verbose=0, return_dict=True
        ),
    }


def by_steps(strategy, index):
    """A dataset without an end, which an epoch does not begin anew; two steps at a time."""
    del index
    data = tf.data.Dataset.from_tensor_slices(digits()).batch(BATCH, drop_remainder=True).repeat()
    model = compiled(strategy, steps_per_execution=2)
    history = model.fit(
        data,
        epochs=2,
        steps_per_epoch=4,
        shuffle=False,
        validation_data=data,
        validation_steps=2,
        verbose=0,
    )
    images = digits()[0][VALIDATION]
    predicted = model.predict(images, batch_size=BATCH, steps=2, verbose=0)
    return {"history": history.history, "weights": model.get_weights(), "predicted": predicted}


def uneven(strategy, index):
    """Training with a last batch of which the workers get different shares, or none."""
    del index
    data = tf.data.Dataset.from_tensor_slices(tuple(each[VALIDATION] for each in digits()))
    data = data.batch(BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = data.with_options(options)
    shares = [
        strategy.experimental_local_results(images)[0].shape[0]
        for images, _ in strategy.experimental_distribute_dataset(data)
    ]
    model = compiled(strategy)
    history = model.fit(data, epochs=1, shuffle=False, verbose=0)
    return shares, {"history": history.history, "weights": model.get_weights()}


class OwnLogs(tf.keras.Sequential):
    def train_step(self, data):
        loss = super().train_step(data)["loss"]
        return {"loss": loss, "vector": tf.ones([2]) * tf.cast(self.index, tf.float32)}


def own_logs(strategy, index):
    """A `train_step` that returns what no metric has; and one batch for each worker."""
    images, labels = digits()
    model = compiled(strategy, cls=OwnLogs)
    model.index = index
    history = model.fit(images[:BATCH], labels[:BATCH], batch_size=BATCH, verbose=0)
    vector = np.mean(history.history["vector"])
    model = compiled(strategy, run_eagerly=True)
    share = slice(index * 4, index * 4 + 4)
    return vector, model.train_on_batch(images[share], labels[share], return_dict=True)


def in_bfloat16(strategy, index):
    """The outputs of a model in bfloat16, in batches that workers share unevenly."""
    del index
    keras_mp.set_global_policy(keras_mp.Policy("mixed_bfloat16", model_outputs=None))
    with strategy.scope():
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(10)])
        model.compile("sgd", "mse")
    predicted = model.predict(digits()[0][VALIDATION], batch_size=BATCH, verbose=0)
    tensor = tf.constant([[1.5, float("nan")]], tf.bfloat16)
    gathered = strategy.gather(tensor, axis=0) if strategy.num_replicas_in_sync > 1 else tensor
    dtypes = predicted.dtype.name, gathered.dtype.name
    return dtypes, predicted.astype("float32"), tf.cast(gathered, tf.float32).numpy()


def close(mine, expected):
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), mine, expected
    )


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What each of two workers returns: {name: list}, and the folder in which they write."""
    folder = str(tmp_path_factory.mktemp("fit"))
    calls = {"even": (even, {"folder": folder}), "in bfloat16": (in_bfloat16, {})}
    if IS_KERAS_3:
        calls |= {"by steps": (by_steps, {}), "own logs": (own_logs, {})}
    else:
        calls["uneven"] = (uneven, {})
    return {**dict(zip(calls, workers.run(list(calls.values()), 2))), "folder": folder}


def test_fit_equals_that_of_one_worker(together, tmp_path):
    expected = even(tf.distribute.get_strategy(), 0, str(tmp_path))
    assert expected["history"]["loss_scale"] == [2**15, 2**15]
    if not IS_KERAS_3:
        # Keras 2 multiplies what it tells callbacks of a batch by the number of workers.
        expected["batches"] = tf.nest.map_structure(lambda value: value * 2, expected["batches"])
    for result in together["even"]:
        close(result, expected)


def test_outputs_in_bfloat16(together):
    dtypes, expected, _ = in_bfloat16(tf.distribute.get_strategy(), 0)
    assert dtypes == ("bfloat16", "bfloat16")
    for of_worker, predicted, gathered in together["in bfloat16"]:
        assert of_worker == dtypes
        np.testing.assert_allclose(predicted, expected, rtol=2**-7, atol=2**-7)
        np.testing.assert_array_equal(gathered, [[1.5, np.nan]] * 2)


def test_the_chief_alone_writes_a_model(together):
    assert os.listdir(together["folder"]) == ["best.keras"]
    saved = tf.keras.models.load_model(os.path.join(together["folder"], "best.keras"))
    result = together["even"][0]
    assert np.argmin(result["history"]["val_loss"]) == 1
    close(saved.get_weights(), result["weights"])
    assert int(saved.optimizer.iterations) == 8


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 runs several steps by itself.")
def test_epochs_of_so_many_steps(together):
    alone = by_steps(tf.distribute.get_strategy(), 0)
    for result in together["by steps"]:
        close(result, alone)


@pytest.mark.skipif(IS_KERAS_3, reason="There three do, in `test_workers.py`.")
def test_two_share_unevenly(together):
    check_uneven(together["uneven"])


def check_uneven(of_workers):
    """The gradient is the mean of the workers', and the metrics are those of all samples."""
    images, labels = (each[VALIDATION] for each in digits())
    shares = np.transpose([each for each, _ in of_workers])
    assert [sum(batch) for batch in shares] == [12, 12, 12, 1]
    assert 0 in shares[-1]
    model = compiled(tf.distribute.get_strategy())
    optimizer, begin, losses, right = make_optimizer(FAMILIES[-1], 0.1), 0, [], []
    for batch in shares:
        with tf.GradientTape() as tape:
            means = []
            for share in batch:
                logits = model(images[begin : begin + share])
                its_labels = labels[begin : begin + share]
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(its_labels, logits)
                means.append(tf.math.divide_no_nan(tf.reduce_sum(each), share))
                losses.extend(each)
                right.extend(np.argmax(logits, -1) == its_labels)
                begin += share
            loss = tf.add_n(means) / len(means)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    for _, result in of_workers:
        close(result["weights"], model.get_weights())
        close(result["history"]["loss"], [np.mean(losses)])
        close(result["history"]["accuracy"], [np.mean(right)])


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 sums them.")
def test_what_no_metric_has_is_averaged(together):
    (mean, logs), (same, _) = together["own logs"]
    assert mean == same == 0.5
    images, labels = digits()
    model = compiled(tf.distribute.get_strategy())
    close(logs, model.train_on_batch(images[:8], labels[:8], return_dict=True))

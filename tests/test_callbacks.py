"""What the loss scale does, in logs and in TensorBoard's files."""

import collections
import contextlib
import csv
import inspect
import math
import pathlib
import re
import types

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, mirrored, once
from tests.models import FAMILIES, compiled_model, make_optimizer

K = tf.keras
LossScaleMonitor = keras_mp.callbacks.LossScaleMonitor
write_loss_scale = keras_mp.callbacks.write_loss_scale
NAMES = ["loss_scale", "steps_skipped"]

ONES = np.ones([16, 1], "float32")
# Of four batches, the third overflows with a scale above 3.
BAD = np.where(np.arange(16)[:, None] // 4 == 2, 1e38, 1).astype("float32")


def scaled(optimizer=None, **kwargs):
    """An optimizer whose scale moves soon: it doubles after 3 good steps."""
    optimizer = optimizer or K.optimizers.SGD(0.0)
    scale = keras_mp.DynamicLossScale(initial_loss_scale=64, increment_period=3)
    return keras_mp.LossScaleOptimizer(optimizer, scale, **kwargs)


def linear(optimizer=None, **kwargs):
    """A model; in eager, since tracing it takes longer than what most tests do with it."""
    how = {"optimizer": optimizer or scaled(), "loss": "mae", **(kwargs or {"run_eagerly": True})}
    return compiled_model(K.layers.Dense(1, kernel_initializer="ones"), inputs=1, **how)


def fit(model, callbacks, x=BAD, **kwargs):
    kwargs = {"verbose": 0, "epochs": 3, "shuffle": False, **kwargs}
    return model.fit(x, ONES, 4, callbacks=callbacks, **kwargs)


# Of three epochs. The third step of each is skipped, which halves the scale.
SCALES = [32.0, 32.0, 32.0]
SKIPPED = [1, 2, 3]


class Recorder(K.callbacks.Callback):
    """Keeps the logs of batches and epochs as another callback sees them."""

    def __init__(self):
        super().__init__()
        self.batches, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


@once
def test_the_last_overflow_of_each_epoch_is_kept_and_logged(infos):
    monitor, model = LossScaleMonitor(), linear()
    fit(model, [monitor])
    fit(model, [monitor], x=ONES, epochs=1)
    assert [overflow.step for overflow in monitor.overflows] == [3, 7, 11]
    assert [len(overflow.variables) for overflow in monitor.overflows] == [1, 1, 1]
    assert infos.messages == [o.summary for o in monitor.overflows]


@pytest.mark.parametrize("update_freq", ["epoch", 1, 3])
def test_everything_that_reads_logs_shows_them(tmp_path, capsys, update_freq):
    recorder, name = Recorder(), "{epoch}-{loss_scale:.0f}-{steps_skipped}.weights.h5"
    often = 1 if update_freq == 1 else "epoch"
    others = [
        K.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        K.callbacks.TensorBoard(str(tmp_path / "board"), write_graph=False, update_freq=often),
        K.callbacks.ModelCheckpoint(str(tmp_path / name), save_weights_only=True),
        K.callbacks.History(),
        recorder,
    ]
    monitor = LossScaleMonitor(update_freq)
    callbacks = [monitor, *others]
    optimizer = scaled(K.optimizers.SGD(K.optimizers.schedules.ExponentialDecay(0.0, 4, 0.9)))
    model, how = linear(optimizer), {"verbose": 2, "validation_data": (ONES, ONES)}
    history = fit(model, callbacks, **how).history
    assert history["loss_scale"] == SCALES
    assert history["steps_skipped"] == SKIPPED
    assert {type(value) for value in history["loss_scale"]} == {float}
    assert {type(value) for value in history["steps_skipped"]} == {int}
    assert {"loss", "val_loss"} < history.keys()
    assert not any(name.startswith("val_") and name[4:] in NAMES for name in history)
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["loss_scale"] for row in rows] == ["32.0"] * 3
    assert [row["steps_skipped"] for row in rows] == ["1", "2", "3"]
    written = scalars(tmp_path / "board" / "train")
    assert written["epoch_loss_scale"] == dict(enumerate(SCALES))
    assert written["epoch_steps_skipped"] == dict(enumerate(SKIPPED))
    assert "epoch_learning_rate" in written  # of a schedule
    names = sorted(path.name for path in tmp_path.glob("*.weights.h5"))
    assert names == ["1-32-1.weights.h5", "2-32-2.weights.h5", "3-32-3.weights.h5"]
    printed = capsys.readouterr().out
    assert re.findall(r"steps_skipped: ([\d.e+]+)", printed) == [f"{n:.4f}" for n in SKIPPED]
    assert [logs["steps_skipped"] for logs in recorder.epochs] == SKIPPED
    batches = [[logs.get(name) for name in NAMES] for logs in recorder.batches]
    if update_freq == "epoch":
        assert batches == [[None, None]] * 12
        return
    assert batches[1:4] == [[64, 0], [32, 1], [32, 1]]
    if update_freq == 3:
        assert monitor.history["step"] == [0, 3, 4, 7, 8, 11, 12]
    else:
        assert [*written["batch_loss_scale"].values()][:4] == [64, 64, 32, 32]


@once
def test_the_order_is_the_users(capsys):
    recorder, monitor, another = Recorder(), LossScaleMonitor(1), LossScaleMonitor()
    callbacks = [recorder, monitor, another]
    history = fit(linear(), callbacks, verbose=2).history
    assert callbacks == [recorder, monitor, another]
    assert [each.history["step"] for each in callbacks[1:]] == [list(range(13)), [0, 4, 8, 12]]
    assert not any(logs.keys() & set(NAMES) for logs in (*recorder.batches, *recorder.epochs))
    assert [history[name] for name in NAMES] == [SCALES, SKIPPED]
    assert capsys.readouterr().out.count("steps_skipped: ") == 3


PROGBAR_ARGUMENTS = inspect.signature(K.utils.Progbar).parameters


@pytest.mark.parametrize("update_freq", ["epoch", 1])
def test_progress_bars_show_the_value_and_not_its_mean(capsys, update_freq):
    model, callbacks = linear(), [LossScaleMonitor(update_freq)]
    if update_freq == 1 and not IS_KERAS_3:
        callbacks.append(K.callbacks.ProgbarLogger("steps", stateful_metrics=NAMES))
    model.fit(BAD, ONES, 4, shuffle=False, callbacks=callbacks, verbose=1)
    shown = re.findall(r"loss_scale: ([\d.]+)", capsys.readouterr().out)
    if update_freq == 1 and IS_KERAS_3 and "stateless_metrics" not in PROGBAR_ARGUMENTS:
        assert shown[0] == "64.0000"  # Keras 3 before 3.15 shows means.
        return
    assert shown[-1] == "32.0000"
    assert set(shown) <= {"64.0000", "32.0000"}


def scalars(folder):
    """What TensorBoard would show: {name: {step: value}}."""
    found = collections.defaultdict(dict)
    for path in sorted(pathlib.Path(folder).glob("*tfevents*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                assert value.metadata.plugin_data.plugin_name == "scalars"
                found[value.tag][event.step] = float(tf.make_ndarray(value.tensor))
    return found


class CountingScale(keras_mp.DynamicLossScale):
    """Counts how often Python asks for the value, and so waits for the device."""

    reads = 0

    def __call__(self):
        type(self).reads += tf.executing_eagerly()
        return super().__call__()


@once
@pytest.mark.parametrize(("update_freq", "reads"), [("epoch", 1 + 3), (2, 1 + 3 * (2 + 1))])
def test_the_device_is_asked_no_more_often_than_promised(monkeypatch, update_freq, reads):
    monkeypatch.setattr(CountingScale, "reads", 0)
    # Without the warning, which is foreseen from the scale.
    inner = K.optimizers.SGD(0.0)
    optimizer = keras_mp.LossScaleOptimizer(inner, CountingScale(), warn_after_skips=None)
    model = linear(optimizer, run_eagerly=False)
    fit(model, [LossScaleMonitor(update_freq)])
    assert CountingScale.reads == reads


@pytest.mark.skipif(IS_KERAS_3, reason="Keras 3 waits for every batch, whoever is there.")
@pytest.mark.parametrize("update_freq", ["epoch", 2])
def test_logs_of_batches_stay_tensors(update_freq):
    class Recorder(K.callbacks.TerminateOnNaN):  # which takes tensors
        def on_train_batch_end(self, batch, logs=None):
            assert isinstance(logs["loss"], tf.Tensor)

    fit(linear(run_eagerly=False), [LossScaleMonitor(update_freq), Recorder()])


def nested():
    class Outer(keras_mp.OptimizerWrapper):
        pass

    return Outer(scaled(Outer(K.optimizers.SGD(0.0))))


# By step, of which the third of each epoch is skipped.
BY_STEP = {
    "step": list(range(13)),
    "loss_scale": [64, 64, 64, 32, 32, 32, 64, 32, 32, 32, 64, 32, 32],
    "steps_skipped": [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3],
}
WAYS = {
    "a graph": {"run_eagerly": False},
    "XLA": {"jit_compile": True},
    "two steps": {"steps_per_execution": 2},
    "replicas": {"run_eagerly": False},
}


@pytest.mark.parametrize("way", [*WAYS, *FAMILIES, "nested"])
def test_ways_to_run_and_optimizers(way):
    with mirrored(2).scope() if way == "replicas" else contextlib.nullcontext():
        inner = make_optimizer(way if way in FAMILIES else "new.SGD", 0.0)
        optimizer = nested() if way == "nested" else scaled(inner)
        model = linear(optimizer, **WAYS.get(way, {"run_eagerly": True}))
    every = 2 if way in ("replicas", "two steps") else 1
    monitor = LossScaleMonitor(update_freq=every if way == "replicas" else 1)
    history = fit(model, [monitor]).history
    assert [history[name] for name in NAMES] == [SCALES, SKIPPED]
    assert monitor.history == {name: values[::every] for name, values in BY_STEP.items()}


def test_evaluate_and_predict_are_left_alone():
    monitor, model = LossScaleMonitor(1), linear()
    found = model.evaluate(ONES, ONES, callbacks=[monitor], verbose=0, return_dict=True)
    assert found.keys() == {"loss"}
    model.predict(ONES, callbacks=[monitor], verbose=0)
    assert monitor.history == {"step": [], "loss_scale": [], "steps_skipped": []}


def test_a_second_fit_goes_on_and_another_model_begins_anew():
    monitor, model = LossScaleMonitor(), linear()
    fit(model, [monitor], epochs=1)
    history = fit(model, [monitor], initial_epoch=1, epochs=3)
    assert history.epoch == [1, 2]
    assert history.history["steps_skipped"] == [2, 3]
    assert monitor.history["step"] == [0, 4, 8, 12]
    assert monitor.history["steps_skipped"] == [0, 1, 2, 3]
    fit(linear(), [monitor], epochs=1)
    assert monitor.history == {"step": [0, 4], "loss_scale": [64, 32], "steps_skipped": [0, 1]}


@once
def test_an_interrupted_run_starts_where_it_was_restored(tmp_path):
    class Interrupt(K.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    backup = K.callbacks.BackupAndRestore(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        fit(linear(), [backup, Interrupt()])
    monitor = LossScaleMonitor()
    fit(linear(), [backup, monitor])
    assert monitor.history["step"] == [4, 8, 12]
    assert monitor.history["steps_skipped"] == SKIPPED


def test_a_loop_that_calls_the_callbacks_itself():
    model, recorder = linear(), Recorder()
    callbacks = K.callbacks.CallbackList([LossScaleMonitor(1), recorder], model=model)
    callbacks.on_epoch_begin(0)
    for batch in range(2):
        callbacks.on_train_batch_begin(batch)
        callbacks.on_train_batch_end(batch, {"loss": 1.0})
    callbacks.on_epoch_end(0, {"loss": 1.0})
    expected = {"loss": 1.0, "loss_scale": 64.0, "steps_skipped": 0}
    assert [*recorder.batches, *recorder.epochs] == [expected] * 3
    alone = LossScaleMonitor(1)  # It needs no list, and no logs.
    alone.set_model(model)
    alone.on_train_begin()
    alone.on_train_batch_end(0)
    alone.on_epoch_end(0)
    assert alone.history["loss_scale"] == [64]


def test_of_several_optimizers_the_first_that_scales():
    monitor, second = LossScaleMonitor(), scaled()
    model = types.SimpleNamespace(optimizer=[K.optimizers.SGD(), second, scaled()])
    second.loss_scale.loss_scale.assign(2)
    monitor.set_model(model)
    monitor.on_epoch_end(0)
    assert monitor.history["loss_scale"] == [2]


@pytest.mark.parametrize("kind", ["float16", "stock"])
def test_without_loss_scaling_in_float16_it_warns_and_changes_nothing(kind):
    optimizer = K.optimizers.SGD(0.0)
    if kind == "stock":
        optimizer = K.mixed_precision.LossScaleOptimizer(optimizer)
    else:
        keras_mp.set_global_policy(keras_mp.Policy("mixed_float16", loss_scale=None))
    model, monitor = linear(optimizer), LossScaleMonitor(1)
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="nothing to show.*Received") as caught:
        history = fit(model, [monitor], x=ONES)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert history.history.keys() == {"loss"}
    assert monitor.history["step"] == []


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_program_with_a_flag_for_the_dtype_may_always_have_it(policy):
    keras_mp.set_global_policy(policy)
    optimizer, monitor = K.optimizers.SGD(0.0), LossScaleMonitor(1)
    model = compiled_model(inputs=1, optimizer=optimizer)
    assert fit(model, [monitor], x=ONES).history.keys() == {"loss"}  # Warnings are errors.
    assert monitor.history["step"] == []
    write_loss_scale(optimizer)


@pytest.mark.parametrize(
    ("update_freq", "error"),
    [("batch", ValueError), (0, ValueError), (1.5, TypeError), (True, TypeError)],
)
def test_bad_frequencies_are_refused(update_freq, error):
    with pytest.raises(error, match=f"update_freq.*Received: update_freq={update_freq!r}"):
        LossScaleMonitor(update_freq)


def loop(make, folder, in_function=True, step=None, replicas=1):
    """What is written of four steps, of which the third overflows."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        v, optimizer = tf.Variable(1.0), make()
        optimizer.build([v])
    make_step = steps.minimize(optimizer, lambda factor: v * factor, [v])

    def train_step(factor):
        strategy.run(make_step, (factor,))
        write_loss_scale(optimizer, step)

    train_step = tf.function(train_step) if in_function else train_step
    with tf.summary.create_file_writer(str(folder)).as_default() as writer:
        for factor in (1.0, 1.0, math.inf, 1.0):
            train_step(tf.constant(factor))
        writer.close()
    return scalars(folder)


@pytest.mark.parametrize(
    ("in_function", "replicas"), [(False, 1), (True, 1), pytest.param(True, 2, marks=once)]
)
@pytest.mark.parametrize("make", [scaled, nested])
def test_own_loop(tmp_path, in_function, replicas, make):
    assert loop(make, tmp_path, in_function, replicas=replicas) == {
        "loss_scale": {1: 64, 2: 64, 3: 32, 4: 32},
        "steps_skipped": {1: 0, 2: 0, 3: 1, 4: 1},
    }


@once
def test_own_loop_with_a_step_of_its_own(tmp_path):
    step = tf.Variable(10, dtype=tf.int64)
    tf.summary.experimental.set_step(step)
    try:
        assert loop(scaled, tmp_path / "default")["loss_scale"] == {10: 32}
    finally:
        tf.summary.experimental.set_step(None)
    assert loop(scaled, tmp_path / "given", step=7)["steps_skipped"] == {7: 1}


def test_own_loop_without_loss_scaling(tmp_path):
    keras_mp.set_global_policy("mixed_float16")
    with tf.summary.create_file_writer(str(tmp_path)).as_default() as writer:
        with pytest.warns(keras_mp.MixedPrecisionWarning, match="nothing to write"):
            write_loss_scale(K.optimizers.SGD())
        writer.flush()
    assert not scalars(tmp_path)
    with pytest.raises(TypeError, match="Expected an optimizer.*Received: optimizer=3"):
        write_loss_scale(3)

"""Histograms that are gathered while a model trains: of what, when, and nothing else changes."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, mirrored, once
from tests.numerics.test_reports import distributions
from tests.numerics.tools import ExponentHistograms, Histogram, count_exponents, histogram_of

K = tf.keras
watch = keras_mp.numerics.watch


def small_model(policy="mixed_float16", units=3):
    with keras_mp.policy_scope(policy):
        inputs = K.Input([4])
        x = K.layers.Dense(units, activation="relu", name="first")(inputs)
        x = K.Sequential([K.Input([units]), K.layers.Dense(2, name="second")], name="inner")(x)
        return K.Model(inputs, K.layers.Activation("linear", dtype="float32", name="last")(x))


def data(count=8):
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=[count, size]).astype(np.float32) for size in (4, 2))


def training_step(model, optimizer, histograms, x, y):
    """A step that returns what the histograms should have seen."""
    with histograms.step():
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = optimizer.scale_loss(tf.reduce_mean((outputs - y) ** 2))
        scaled = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(scaled, model.trainable_variables))
    return outputs, scaled


def scaling(scale=2.0**12, **kwargs):
    return keras_mp.LossScaleOptimizer(K.optimizers.SGD(0.1), scale, **kwargs)


@once
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_device_counts_as_numpy_does(jit_compile):
    values = np.concatenate(list(distributions().values()))
    count = tf.function(count_exponents, jit_compile=jit_compile)
    expected = histogram_of(values)
    assert Histogram(count(tf.constant(values)).numpy().reshape(expected.bins.shape)) == expected


@once
def test_16_bit_values_are_counted_exactly():
    every = tf.bitcast(tf.cast(tf.range(2**16), tf.uint16), tf.float16)
    # Few values are looked at one by one.
    for values in (every, every[::-7], tf.concat([every, every[99:999]], 0)):
        bins = count_exponents(values, tf.constant(8.0)).numpy()
        bins = bins.reshape(histogram_of([]).bins.shape)
        with np.errstate(invalid="ignore"):  # as NumPy says of NaN
            expected = histogram_of(values.numpy().astype(np.float32) / 8)
        assert Histogram(bins) == expected


@pytest.mark.parametrize("how", ["eager", "function", pytest.param("xla", marks=once)])
def test_a_loop_of_ones_own(how):
    model, optimizer, (x, y) = small_model(), scaling(), data()
    histograms = ExponentHistograms(model, every=2, optimizer=optimizer)
    optimizer.build(model.trainable_variables)
    step = training_step
    if how != "eager":
        step = tf.function(step, jit_compile=how == "xla")
    seen = [step(model, optimizer, histograms, x, y) for _ in range(3)]
    report = histograms.read()
    assert (report.step, report.counted, report.loss_scale) == (3, 2, 2.0**12)
    gradients = ["first/kernel", "first/bias", "inner/second/kernel", "inner/second/bias"]
    outputs = ["first", "inner/second", "last"]
    rows = [("gradient", path) for path in gradients] + [("output", path) for path in outputs]
    assert [(row.kind, row.path) for row in report.rows] == rows
    assert [row.dtype for row in report.rows[4:]] == ["float16", "float16", "float32"]
    for place, path in enumerate(gradients):
        values = [scaled[place].numpy().ravel() / 2.0**12 for _, scaled in (seen[0], seen[2])]
        assert report["gradient", path].histogram == histogram_of(np.concatenate(values))
        assert report["gradient", path].dtype == "float16"
    values = [outputs.numpy().ravel() for outputs, _ in (seen[0], seen[2])]
    assert report["output", "last"].histogram == histogram_of(np.concatenate(values))
    assert "call" not in vars(model.layers[1])
    empty = histograms.read()
    assert (empty.step, empty.counted, empty.rows) == (3, 0, [])


@pytest.mark.parametrize("how", ["get_unscaled_gradients", "minimize", "not ours", "summed"])
def test_gradients_are_seen_once_and_unscaled_however_they_come(how):
    is_plain = how in ("not ours", "summed")
    model, (x, y) = small_model("mixed_bfloat16" if is_plain else "mixed_float16"), data()
    optimizer = K.optimizers.SGD(0.0) if is_plain else scaling()
    if how == "summed":
        optimizer = keras_mp.AllReduceOptimizer(optimizer)
    variables = model.trainable_variables
    histograms = ExponentHistograms(
        model, every=1, outputs=["first"], output_gradients=["last"], optimizer=optimizer
    )
    mse = lambda: tf.reduce_mean((model(x) - y) ** 2)  # noqa: E731
    with tf.GradientTape() as tape:
        outputs = model(x)
        tape.watch(outputs)
        loss = tf.reduce_mean((outputs - y) ** 2)
    expected = tape.gradient(loss, outputs)
    with histograms.step():
        if how == "minimize":
            optimizer.minimize(mse, variables)
        else:
            with tf.GradientTape() as tape:
                loss = mse() if is_plain else optimizer.get_scaled_loss(mse())
            gradients = tape.gradient(loss, variables)
            if not is_plain:
                gradients = optimizer.get_unscaled_gradients(gradients)
            optimizer.apply_gradients(zip(gradients, variables))
    report = histograms.read()
    assert report["output gradient", "last"].histogram == histogram_of(expected.numpy())
    # The gradient of the last bias is the sum of those of the outputs.
    bias = report["gradient", "inner/second/bias"].histogram
    assert -8 < min(bias.exponents) < 2
    assert bias.total == 2
    assert report.loss_scale == (1.0 if is_plain else 2.0**12)
    assert "apply_gradients" not in vars(optimizer)
    assert [row.path for row in report.rows if row.kind == "output"] == ["first"]


def test_a_scaler_shows_gradients_once_and_two_may_look():
    model, (x, y) = small_model(), data()
    scaler, optimizer = keras_mp.GradScaler(), K.optimizers.SGD(0.1)
    variables = model.trainable_variables
    both = [ExponentHistograms(model, every=1, optimizer=optimizer) for _ in range(2)]
    with both[0].step(), both[1].step():
        with tf.GradientTape() as tape:
            loss = scaler.scale(tf.reduce_mean((model(x) - y) ** 2) / 64)
        scaler.step(optimizer, zip(tape.gradient(loss, variables), variables))
        scaler.update()
    for report in (histograms.read() for histograms in both):
        assert report["gradient", "inner/second/bias"].histogram.total == 2
        assert report["output", "last"].histogram.total == 8 * 2
        assert report.loss_scale == 2.0**15


@once
@pytest.mark.parametrize(("scales", "counted"), [((8, 8), 2), ((8, 2), 0), ((8, None), 0)])
def test_gradients_of_outputs_are_counted_if_all_losses_are_scaled_alike(scales, counted):
    model, (x, y) = small_model(), data()
    optimizers = [K.optimizers.SGD() if each is None else scaling(each) for each in scales]
    rows = {"outputs": False, "output_gradients": ["last"]}
    histograms = ExponentHistograms(model, every=1, optimizer=optimizers, **rows)
    mse = lambda: tf.reduce_mean((model(x) - y) ** 2)  # noqa: E731
    with histograms.step():
        for each, scale in zip(optimizers, scales):
            made = steps.unscaled if scale is None else steps.rfc
            made(each, mse, model.trainable_variables)()
    report = histograms.read()
    found = [row.histogram.total for row in report.rows if "output" in row.kind]
    assert sum(found) == counted * 8 * 2
    assert report["gradient", "inner/second/bias"].histogram.total == 2 * 2


def test_an_overflow_is_remembered_with_its_scale():
    model, (x, y) = small_model(), data()
    optimizer = scaling("dynamic")
    histograms = ExponentHistograms(model, every=1, outputs=False, optimizer=optimizer)
    for scale in (2.0**30, 2.0**20, 2.0**2):
        optimizer.loss_scale.loss_scale.assign(scale)
        training_step(model, optimizer, histograms, x, y)
    report = histograms.read()
    row = report["gradient", "first/kernel"]
    assert row.overflowed_at == 2.0**20
    assert row.histogram.infinities + row.histogram.nans > 0
    assert row.window("float16").high <= 19
    assert report.window("float16").high <= 19
    # What bfloat16 would have made of it, nothing tells.
    assert row.window("bfloat16").high > 100


class Own(K.callbacks.Callback):
    """Counts the calls of what `fit` runs by itself."""

    def on_train_begin(self, logs=None):
        self.calls, self.function = 0, self.model.train_function
        self.model.train_function = self.call

    def call(self, iterator):
        self.calls += 1
        return self.function(iterator)


def test_fit_is_watched_and_left_as_it_was():
    (x, y), monitor = data(16), watch(every=3, output_gradients=["last"])
    x, y = x / 8, y / 8  # with which nothing overflows
    with keras_mp.policy_scope("mixed_float16"):
        model = small_model()
        model.compile(K.optimizers.SGD(0.01), "mse")
    before, own = vars(model)["train_step"], Own()
    model.fit(x, y, 4, epochs=2, callbacks=[own, monitor], verbose=0)
    assert read_by(monitor) == [(4, 2), (8, 1)]
    # What does not count is Keras's own, and it is there again.
    assert own.calls == 8 - 3
    assert model.train_function == own.call
    assert vars(model)["train_step"] is before
    report = monitor.report()
    assert (report.step, report.counted) == (8, 3)
    assert report.loss_scale == 2.0**15
    assert report["output", "last"].histogram.total == 3 * 4 * 2
    assert report["output gradient", "last"].histogram.total == 3 * 4 * 2
    assert max(report["output gradient", "last"].histogram.exponents) < 4
    assert report["gradient", "first/kernel"].histogram.total == 3 * 4 * 3
    model.fit(x, y, 4, verbose=0)
    assert (own.calls, len(monitor.history)) == (8 - 3 + 4, 2)
    assert "call" not in vars(model.get_layer("first"))
    model.fit(x, y, 16, callbacks=[monitor], verbose=0)
    assert [report.step for report in monitor.history] == [4, 8, 9]


def compiled_for_fit(**how):
    model = small_model("mixed_bfloat16")
    model.compile(K.optimizers.SGD(0.01), "mse", jit_compile=False, **how)
    return model


def read_by(monitor):
    """When it was read, and how many steps were counted by then."""
    return [(report.step, report.counted) for report in monitor.history]


def test_several_steps_in_one_execution_and_a_fit_that_fails():
    (x, y), monitor = data(16), watch(every=4)
    # With several replicas Keras 3 cannot run its own loop of steps.
    strategy = tf.distribute.get_strategy() if IS_KERAS_3 else mirrored(2)
    with strategy.scope():
        model = compiled_for_fit(steps_per_execution=3)
    with pytest.raises(ValueError, match="Expected one `watch`"):
        model.fit(x, y, 2, callbacks=[watch(), monitor], verbose=0)
    # The last of three executions of an epoch has two steps.
    model.fit(x, y, 2, epochs=2, callbacks=[monitor], verbose=0)
    assert read_by(monitor) == [(8, 2), (16, 2)]
    assert monitor.report()["output", "last"].histogram.total == 4 * 2 * 2


@once
def test_an_execution_of_several_steps_is_read_when_one_of_them_is_due():
    monitor = watch(every=1, read_freq=2)
    compiled_for_fit(steps_per_execution=3).fit(*data(12), 2, callbacks=[monitor], verbose=0)
    assert read_by(monitor) == [(3, 3), (6, 3)]


@once
def test_a_fit_after_one_that_failed_does_not_count():
    class Fails(K.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("as a user's callback may")

    model, (x, y), monitor = compiled_for_fit(), data(8), watch(every=1)
    with pytest.raises(RuntimeError, match="as a user's"):
        model.fit(x, y, 2, callbacks=[monitor, Fails()], verbose=0)
    counted = monitor._in_fit
    model.fit(x, y, 2, verbose=0)
    assert counted.read().counted == 1
    assert getattr(model.train_function, "__self__", None) is not monitor
    model.fit(x, y, 2, callbacks=[monitor], verbose=0)
    assert [report.counted for report in monitor.history] == [4]


def test_a_model_that_runs_eagerly_and_has_another_optimizer():
    model, monitor = compiled_for_fit(run_eagerly=True), watch(every=2, read_freq=2)
    before = vars(model)["train_step"]
    model.fit(*data(16), 4, callbacks=[monitor], verbose=0)
    assert read_by(monitor) == [(2, 1), (4, 1)]
    assert monitor.report()["gradient", "inner/second/bias"].histogram.total == 4
    assert vars(model)["train_step"] is before


class Subclassed(K.Model):
    def __init__(self):
        super().__init__()
        self.dense = K.layers.Dense(2, name="dense")

    def call(self, x):
        if tf.reduce_sum(x) > 1e9:  # for AutoGraph
            x = -x
        return self.dense(x)


@pytest.mark.skipif(IS_KERAS_3, reason="Keras 3 converts nothing, and builds first.")
def test_a_model_that_is_built_by_its_first_batch():
    (x, y), monitor = data(16), watch(every=2)
    model = Subclassed()
    model.compile("sgd", "mse")
    model.fit(x, y, 4, callbacks=[monitor], verbose=0)
    assert read_by(monitor) == [(3, 2)]  # of the three after the first batch
    assert monitor.report()["output", "dense"].histogram.total == 2 * 4 * 2


@once
def test_sparse_gradients_and_loops():
    with keras_mp.policy_scope("mixed_float16"):
        model = K.Sequential(
            [
                K.Input([5], dtype="int32"),
                K.layers.Embedding(7, 3, name="embedding"),
                K.layers.RNN(K.layers.SimpleRNNCell(2, name="cell"), name="rnn"),
            ]
        )
    optimizer, x = scaling(), tf.constant([[0, 1, 2, 3, 3]])
    every = {"outputs": ["rnn", "rnn/cell"], "output_gradients": ["rnn/cell"]}
    histograms = ExponentHistograms(model, every=1, optimizer=optimizer, **every)

    @tf.function
    def step():
        with histograms.step():
            loss = lambda: tf.reduce_mean(tf.cast(model(x), tf.float32))  # noqa: E731
            optimizer.minimize(loss, model.trainable_variables)

    step()
    report = histograms.read()
    assert report["gradient", "embedding/embeddings"].histogram.total == 5 * 3
    assert report["output", "rnn"].histogram.total == 2
    assert report["output", "rnn/cell"].histogram.total >= 5 * 2
    assert "output gradient" not in {row.kind for row in report.rows}
    cells = ExponentHistograms(model, optimizer=optimizer)
    assert ("output", "rnn/cell") not in cells.places


def test_each_replica_counts_its_own():
    strategy = mirrored(2)
    with strategy.scope():
        model, optimizer = small_model(), scaling("dynamic")
        histograms = ExponentHistograms(model, every=2, optimizer=optimizer)
    x, y = data()
    x[4:] *= np.float32(1e6)  # which overflows on the second one only
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    batches = strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def step(batch):
        strategy.run(lambda x, y: training_step(model, optimizer, histograms, x, y)[0], batch)

    for _ in range(2):
        step(next(iter(batches)))
    report = histograms.read()
    assert (report.step, report.counted) == (2, 1)
    assert report["output", "last"].histogram.total == 8 * 2
    row = report["gradient", "inner/second/bias"]
    bad = row.histogram.infinities + row.histogram.nans
    assert (row.histogram.total, bad, row.overflowed_at) == (2 * 2, 2, 2.0**15)
    with strategy.scope(), pytest.raises(ValueError, match="strategy.run"), histograms.step():
        pass


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(TypeError, match="Expected a model of `tf.keras`.*Received: model=3"):
        watch(3)
    with pytest.raises(ValueError, match="is not built"):
        ExponentHistograms(K.Sequential([K.layers.Dense(1)]))
    model = small_model("float32")
    with pytest.raises(ValueError, match="'first', 'inner', 'inner/second'.*Received: \\['third'"):
        ExponentHistograms(model, outputs="third")
    stock = K.mixed_precision.LossScaleOptimizer(K.optimizers.SGD())
    with pytest.raises(ValueError, match="Expected a keras_mp.LossScaleOptimizer"):
        ExponentHistograms(model, optimizer=stock)
    with pytest.raises(ValueError, match="read_freq='batch'"):
        watch(read_freq="batch")
    with pytest.raises(ValueError, match="Nothing was read yet"):
        watch().report()


def test_gradients_that_nobody_shows_are_missed():
    model, (x, _) = small_model("mixed_bfloat16"), data()
    histograms = ExponentHistograms(model, every=1)
    told = pytest.warns(keras_mp.MixedPrecisionWarning, match="Received: optimizer=None")
    with told, histograms.step():
        model(x)
    with histograms.step():  # It is said once.
        model(x)
    assert {row.kind for row in histograms.read().rows} == {"output"}


def test_an_error_in_a_step_leaves_nothing_behind():
    model, optimizer = small_model(), scaling()
    histograms = ExponentHistograms(model, every=1, optimizer=optimizer)
    with pytest.raises(tf.errors.InvalidArgumentError), histograms.step():
        tf.linalg.matmul(model(data()[0]), tf.ones([9, 9]))
    assert "call" not in vars(model.layers[1])
    assert histograms.read().counted == 0
    with pytest.warns(keras_mp.MixedPrecisionWarning), histograms.step():
        pass  # Nothing is seen.
    assert histograms.read().counted == 1

"""Four questions, four tools: `check`, `watch`, `tune` and `profile`."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import common, models
from tests.common import Times, once
from tests.numerics.tools import batches, compiled, dense, main, saved, sequential

L = tf.keras.layers
check, tune, watch = keras_mp.numerics.check, keras_mp.numerics.tune, keras_mp.numerics.watch
X = np.random.default_rng(0).normal(size=[16, 8]).astype("float32")
Y = np.random.default_rng(1).normal(size=[16, 1]).astype("float32")


class Logarithm(L.Layer):
    def call(self, x):
        return tf.math.log(tf.nn.relu(x))


class NoConfig(L.Layer):
    """A layer whose config has no name."""

    def __init__(self, **kwargs):
        super().__init__(dtype=kwargs.get("dtype"))

    def call(self, x):
        y = x * 400
        return x * tf.matmul(y[:, None], y[:, :, None])[:, 0] / 160_000


def small_model(*layers, policy="mixed_float16", **how):
    return sequential(*layers, dense(1, dtype="float32", name="head"), policy=policy, **how)


def test_nothing_of_the_model_is_changed():
    model = small_model(L.BatchNormalization, lambda: L.Dropout(0.5), dense(4), optimizer="adam")
    model.fit(X, Y, verbose=0)
    before = [variable.copy() for variable in models.training_state(model)]
    check(model, (X, Y))
    common.assert_all_equal(models.training_state(model), before)
    assert all("call" not in vars(layer) for layer in model.layers)
    assert not tf.config.functions_run_eagerly()


def test_large_inputs_of_the_batch_are_named():
    large = small_model(dense(512, kernel_initializer="ones"))
    first = check(large, (X * 1e4, Y)).findings[0]
    assert "inputs of the batch" in first.why
    assert "Normalize" in first.cure


@common.once
def test_bfloat16_is_no_cure_where_it_is_the_policy_or_no_dtype_helps():
    for policy in ("mixed_float16", "mixed_bfloat16"):
        found = check(small_model(Logarithm, policy=policy), (X, Y)).findings
        assert "bfloat16" not in found[0].cure
    large = small_model(lambda: L.Lambda(lambda x: x * 1e30), policy="mixed_bfloat16")
    found = check(large, (X * 1e9, Y)).findings
    assert "bfloat16" not in found[0].cure


CLASSES = np.arange(8) % 4, np.ones(8, "float32")


def transposed(x):
    x = L.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu")(x)
    x = L.SeparableConv2D(8, 3, padding="same")(L.DepthwiseConv2D(3, padding="same")(x))
    return L.GlobalAveragePooling2D()(x)


def mobile(x):
    """A block of MobileNetV2."""
    x = L.ReLU(6.0)(L.BatchNormalization()(L.Conv2D(8, 3, strides=2, padding="same")(x)))
    y = L.ReLU(6.0)(L.BatchNormalization()(L.Conv2D(16, 1)(x)))
    y = L.ReLU(6.0)(L.BatchNormalization()(L.DepthwiseConv2D(3, padding="same")(y)))
    x = L.Add()([x, L.BatchNormalization()(L.Conv2D(8, 1)(y))])
    return L.GlobalAveragePooling2D()(x)


def attention(x):
    x = L.Reshape([16, 16])(x)
    x = L.LayerNormalization()(x + L.MultiHeadAttention(2, 8, dropout=0.1)(x, x))
    return L.GlobalAveragePooling1D()(x)


# What is trained for is the image or a number; the classes of the mobile net have weights.
SOUND = {
    "attention": attention,
    "autoencoder": lambda x: L.Dense(256)(L.Dense(8, "relu")(L.Dense(32, "relu")(L.Flatten()(x)))),
    "lstm": lambda x: L.Bidirectional(L.LSTM(8))(L.Reshape([2, 128])(x)),
    "mobile": mobile,
    "transposed": transposed,
}


# Whether operations are slow in 16 bits, so that keras_mp computes in float32 inside of them.
SLOW, FAST = True, False
KERNELS = [
    *((kind, "mixed_float16", SLOW) for kind in SOUND),
    *((kind, "mixed_bfloat16", SLOW) for kind in ("lstm", "mobile")),
    *((kind, "mixed_bfloat16", FAST) for kind in ("attention", "autoencoder", "transposed")),
]


@pytest.fixture
def kernels(request, monkeypatch):
    monkeypatch.setattr("keras_mp.kernels.slow.is_slow", lambda *_: request.param)


@pytest.mark.parametrize(("kind", "policy", "kernels"), KERNELS, indirect=["kernels"])
def test_nothing_is_found_in_sound_models(kind, policy, kernels):
    tf.keras.utils.set_random_seed(0)
    images = np.random.default_rng(0).normal(size=[8, 8, 8, 4]).astype("float32")
    head, loss, labels = {
        "autoencoder": (L.Flatten, "mse", [images.reshape(8, -1)]),
        "mobile": (dense(4, "softmax"), "sparse_categorical_crossentropy", CLASSES),
    }.get(kind, (dense(1), "mse", [Y[:8]]))
    with keras_mp.policy_scope(policy):
        image = tf.keras.Input([8, 8, 4])
        model = tf.keras.Model(image, head()(SOUND[kind](image)))
        model.compile("sgd", loss, metrics=["accuracy"] if kind == "mobile" else None)
    found = check(model, (images, *labels))
    assert (found.findings, found.notes) == ((), ()), str(found)
    assert found.advice() == ([], {}, None)
    # Nor is anything near one.
    for layer in found.comparison.layers:
        assert layer.output is None or layer.output.units < 1.5, layer


def test_a_float32_model_is_looked_at_under_a_policy_with_all_of_its_loss():
    inputs = tf.keras.Input([8])
    outputs = {name: L.Dense(1, name=name)(inputs) for name in ("a", "b")}
    model = tf.keras.Model(inputs, outputs)
    model.compile("sgd", {"a": "mse", "b": "mse"}, loss_weights={"a": 1.0, "b": 0.0})
    copy = compiled(model, "mixed_float16")
    assert copy.get_compile_config()["loss_weights"] == {"a": 1.0, "b": 0.0}
    labels = {"a": Y, "b": Y}
    assert check(model, (X, labels), policy="mixed_float16").findings == ()


@common.once
def test_gradients_that_are_zero_are_not_called_small():
    policy = common.unscaled("float16")
    model = sequential(dense(1, kernel_initializer="zeros"), policy=policy)
    assert check(model, (X, 0 * Y)).findings == ()


@common.once
def test_a_scale_that_has_to_fall_is_a_finding_if_it_is_fixed():
    def found(optimizer):
        model = small_model(dense(8), optimizer=optimizer)
        return [each.where for each in check(model, (X * 8, Y)).findings]

    assert found("sgd") == []
    fixed = keras_mp.FixedLossScale(2.0**15)
    assert found(keras_mp.LossScaleOptimizer("sgd", fixed))[-1:] == ["the loss scale"]


def test_layers_without_a_name_in_their_config_are_named_as_in_the_model():
    model = small_model(NoConfig)
    name = model.layers[0].name
    checked = check(model, (X, Y))
    assert [each.where.partition(" ")[0] for each in checked.findings] == [name]
    advice = checked.advice()
    assert advice.policies == {name: "float32"}
    copy = keras_mp.convert(model, advice.policies)
    assert copy.layers[0].name == name
    assert copy.layers[0].compute_dtype == "float32"


def test_a_model_is_watched_in_fit_and_in_a_loop():
    model = small_model(dense(8, name="dense"), jit_compile="auto" if common.IS_KERAS_3 else None)
    watching = watch(model, every=1)
    with watching:
        model.fit(X, Y, 4, verbose=0, callbacks=[watching])
    assert watching.report().counted == 4
    assert not watching.found
    assert "dense/kernel" in str(watching)
    assert json.loads(watching.to_json())["report"]["counted"] == 4
    optimizer = keras_mp.LossScaleOptimizer("sgd")
    own = watch(model, optimizer, every=1, outputs=False)
    with own.step():
        optimizer.minimize(lambda: tf.reduce_mean(model(X)), model.trainable_variables)
    assert own.report().counted == 1
    with pytest.raises(ValueError, match="model=None"):
        watch().step()


@common.once
@pytest.mark.parametrize("x", [X, X * 1e6, np.full_like(X, np.nan)], ids=["log", "large", "nan"])
def test_what_comes_of_an_operation_that_was_named_is_not_named_again(x):
    model = small_model(Logarithm)
    watching = watch(model, raises=False)
    with pytest.warns(keras_mp.MixedPrecisionWarning), watching:
        model.fit(x, Y, 16, epochs=2, verbose=0)
    assert len(watching.found) == 1
    assert "OptionalGetValue" not in str(watching)


def test_one_batch_is_cut_to_tune_with():
    model = small_model(dense(8), policy="float32")
    for batch in ((X, Y), [(X, Y)], (X, Y, np.ones(16))):
        tuned = tune(model, batch)
        assert tuned.policies[""] == "mixed_float16"
        assert len(tuned.errors) == len(tuned.held_out) == 1


@common.once
def test_several_optimizers_and_a_scaler_are_known_to_a_block():
    model, scaler = small_model(dense(8)), keras_mp.GradScaler()
    weights = model.trainable_variables
    optimizers = [tf.keras.optimizers.SGD(), tf.keras.optimizers.Adam()]
    watching = watch(model, [*optimizers, scaler])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = scaler.scale(tf.reduce_mean(tf.square(model(X * 16) - Y)))
        scaler.step(optimizers[0], zip(tape.gradient(loss, weights), weights))
        scaler.update()

    with watching:
        step()
    assert watching.planned == 1


MODULE = """
import tensorflow as tf

class Halved(tf.keras.layers.Layer):
    def call(self, x):
        return x / 2

def own_metric(y, predictions):
    return tf.reduce_mean(y)
"""


def test_commands_import_the_layers_of_a_model(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_layers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_layers

    policy = "mixed_bfloat16"  # without a loss scale, whose operations take longest to trace
    model = small_model(own_layers.Halved, policy=policy, metrics=[own_layers.own_metric])
    files = saved(tmp_path, model, x=X, y=Y)
    assert main(["check", *files, "--import", "own_layers"]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert main(["watch", *files, "--import", "own_layers", "--no-outputs"]) == 0
    printed = capsys.readouterr().out
    assert [kind for kind in ("gradient", "weight", "output") if kind in printed] == [
        *("gradient", "weight")
    ]
    # Another machine: nothing is timed.
    report = tmp_path / "profile.json"
    arguments = ["--import", "own_layers", "--device", "GPU 8.0", "--json", os.fspath(report)]
    assert main(["profile", *files, *arguments]) == 0
    assert "training step" in json.loads(report.read_text())["census"]["name"]
    with pytest.raises(SystemExit):
        main(["check", *files, "--import", "no_such_module"])
    with pytest.raises(SystemExit):
        main(["check", *files])
    assert "--import MODULE" in capsys.readouterr().err


def test_watch_is_told_a_number_or_a_name(tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(watch, "on_train_begin", lambda self, logs=None: made.append(self))
    files = saved(tmp_path, small_model(dense(1), policy="mixed_bfloat16"), x=X, y=Y)
    for text, frequency in (("2", 2), ("epoch", "epoch")):
        assert main(["watch", *files, "--read-freq", text]) == 0
        assert made.pop().read_freq == frequency
    with pytest.raises(SystemExit, match="2"):
        main(["watch", *files, "--read-freq", "day"])
    assert "read_freq" in capsys.readouterr().err


def test_commands_do_without_a_metric_that_is_missing(tmp_path, capsys):
    def missing(y, predictions):
        return tf.reduce_mean(y)

    files = saved(tmp_path, small_model(dense(8), metrics=[missing]), x=X, y=Y)
    assert main(["check", *files, "--loss", "mse"]) == 0
    if common.IS_KERAS_3:
        assert "--import MODULE" in capsys.readouterr().err


@common.once
def test_a_checkpoint_is_compared_and_the_loss_scale_is_looked_at():
    model = small_model(dense(8, name="dense"))
    other = keras_mp.convert(model, "float32")
    assert check(model, (X, Y), reference=other).findings == ()
    other.layers[0].set_weights([weight * 2 for weight in other.layers[0].get_weights()])
    checked = check(model, (X, Y), reference=other)
    assert checked.findings[0].where.startswith("dense")
    assert checked.findings[0].why.startswith("Its weights differ from those of the reference")
    assert checked.report["gradient", "dense/kernel"].dtype == "float16"


def test_a_reference_that_is_not_compiled_adds_the_losses_of_its_own_layers():
    model = small_model(dense(8, kernel_regularizer=tf.keras.regularizers.L2(1.0)))
    assert check(model, (X, Y), reference=keras_mp.convert(model, "float32")).findings == ()


def test_a_loss_that_is_a_function_has_weights_as_in_compile():
    def squares(y, predictions):
        return tf.reduce_mean((predictions - y) ** 2, -1)

    model, batch = small_model(dense(8), loss=None), (X, Y, 1.0 + np.arange(16) % 4)
    found = [check(model, batch, loss=loss) for loss in (squares, "mse")]
    assert found[0].notes == ()
    assert found[0].comparison.losses == pytest.approx(found[1].comparison.losses)
    assert tune(model, batch, loss=squares).policies[""] == "mixed_float16"


# What is wrong with a batch, and what the tools make of several.

K = tf.keras


class Pairs(K.utils.Sequence):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.full([1], index), np.zeros([1])


@once
def test_what_are_several_batches():
    model = mixed_model()
    x, y = np.ones([4, 2]), np.zeros([4, 1])
    inputs = {"a": x, "scalar": tf.constant(1.0), "none": None}
    for one in (x, (x, y), [x], {"a": x}, (inputs, y), tf.ones([2])):
        assert len(batches.listed(model, one)) == 1
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    for several, shapes in (
        ([(x, y), (x,)], [[(4, 2), (4, 1)], [(4, 2)]]),
        (((x, y)[i] for i in range(2)), [[(4, 2)], [(4, 1)]]),
        (iter([(x, y)]), [[(4, 2), (4, 1)]]),
        (dataset, [[(2, 2), (2, 1)]] * 2),
        (dataset.map(lambda x, y: x), [[(2, 2)]] * 2),
        (Pairs(), [[(1,), (1,)]] * 2),
    ):
        found = batches.listed(model, several)
        assert [[tuple(part.shape) for part in batch.data] for batch in found] == shapes
    with pytest.raises(ValueError, match=r"a dataset that ends: pass dataset.take\(4\)"):
        batches.listed(model, dataset.repeat())
    with pytest.raises(ValueError, match="at least one batch"):
        batches.listed(model, iter(()))


def mixed_model(policy=None):
    """A layer that overflows where numbers are large."""
    layers = lambda: Times(1000.0, name="large"), dense(1, name="dense")
    return sequential(*layers, shape=[2], policy=policy, name="model")


def test_what_is_no_batch():
    model = mixed_model("mixed_float16")
    x, y = np.ones([4, 2]), np.zeros([4, 1])
    dataset = tf.data.Dataset.from_tensors((x, y))
    for batch, error, message in (
        (None, TypeError, "Expected a batch as `fit` takes it"),
        ((dataset, y), TypeError, r"Expected a batch as `fit` takes it.*next\(iter"),
        ((x, y, y, y), ValueError, "a tuple of 4"),
        ([x, y], ValueError, "Received a list of 2. For x and y, pass a tuple"),
        ((x[:0], y[:0]), ValueError, r"values in it. Received: x of the shape \(0, 2\)"),
        (({"a": x, "b": x[:, :0]}, y), ValueError, "values in it. Received: x of the shape"),
        ((tf.RaggedTensor.from_row_lengths([], []), y), ValueError, "values in it. Received: x of"),
        ((x[:, :1], y), ValueError, r"suit the training step of .model.. Received: x of the .*1\)"),
    ):
        for tool in (keras_mp.numerics.check, keras_mp.numerics.profile):
            with pytest.raises(error, match=message):
                tool(model, batch)


def pairs_of(*sizes):
    return [(np.full([4, 2], size, "float32"), np.ones([4, 1], "float32")) for size in sizes]


def test_check_has_the_worst_of_several_batches():
    model = mixed_model("mixed_float16")
    found = pairs_of(0.003, 100.0, 0.007)
    checked = keras_mp.numerics.check(model, iter(found))
    each = [keras_mp.numerics.check(model, one) for one in found]
    assert checked.comparison.batches == 3
    assert not each[0].findings
    assert checked.comparison.findings[0].path == each[1].comparison.findings[0].path == "large"
    assert "the worst of 3 batches" in " ".join(str(checked.comparison).split())
    assert [one.hazard for one in checked.findings] == [one.hazard for one in each[1].findings]
    assert ", on 1 of 3 batches." in " ".join(str(checked).split())
    sound = keras_mp.numerics.check(model, [found[0], found[2]])
    others = [max(row.units for row in one.comparison.layers) for one in (each[0], each[2])]
    assert max(row.units for row in sound.comparison.layers) == max(others)
    row = "output", "large"
    infinite = [one.report[row].fate("float16").infinite for one in (checked, *each)]
    assert infinite == [8, 0, 8, 0]
    assert checked.report[row].histogram.total == 24
    assert checked.advice().policies == {"large": "float32"}

"""Every built-in loss beside Keras's own; labels, own losses, compile, saving."""

import copy
import inspect
import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import losses
from tests.common import IS_KERAS_3, MODES, made, once, pairs, placed
from tests.models import compiled_model

STOCK = {
    name: value
    for name, value in vars(tf.keras.losses).items()
    if inspect.isclass(value)
    and issubclass(value, tf.keras.losses.Loss)
    and value is not tf.keras.losses.Loss
}
BATCH, CLASSES = 4, 5

random = np.random.default_rng(0)
VALUES = random.uniform(0.05, 0.95, [BATCH, CLASSES])
POSITIVE = random.uniform(0.05, 0.95, [BATCH, CLASSES])
ONE_HOT = np.eye(CLASSES)[[0, 2, 4, 2]]
IDS = np.array([0, 2, 4, 2])
# More frames than labels, and all label ids below the number of classes.
FRAMES = random.uniform(0.05, 0.95, [BATCH, 6, CLASSES])
SENTENCES = np.array([[1, 2, 3], [4, 1, 0], [2, 0, 0], [3, 4, 0]])
SMOOTH = {"label_smoothing": 0.1}
LOGITS = {"from_logits": True}
BY_CLASS, FOCAL = {"alpha": [0.1, 0.2, 0.3, 0.2, 0.2]}, {"alpha": 0.3, "gamma": 0.5}
BALANCED = {"apply_class_balancing": True, "alpha": 0.3, "gamma": 1.5}
# Losses without arguments of their own.
PLAIN = "MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError KLDivergence LogCosh"
PLAIN += " MeanSquaredLogarithmicError Poisson"

# Labels, predictions and options of each; a loss new in Keras has to be added here.
CASES = {
    "BinaryCrossentropy": (ONE_HOT, VALUES, [{}, LOGITS, SMOOTH, {"axis": 0}]),
    "BinaryFocalCrossentropy": (ONE_HOT, VALUES, [{}, LOGITS, SMOOTH, BALANCED]),
    "CTC": (SENTENCES, FRAMES, [{}]),
    "CategoricalCrossentropy": (ONE_HOT, VALUES, [{}, LOGITS, SMOOTH, {"axis": 0}]),
    "CategoricalFocalCrossentropy": (ONE_HOT, VALUES, [{}, LOGITS, SMOOTH, FOCAL, BY_CLASS]),
    "CategoricalGeneralizedCrossEntropy": (IDS, VALUES, [{}, {"q": 0.7}]),
    "CategoricalHinge": (ONE_HOT, VALUES, [{}]),
    "Circle": (IDS, VALUES, [{}, {"gamma": 2.0, "margin": 0.2, "remove_diagonal": False}]),
    "CosineSimilarity": (POSITIVE, VALUES, [{}, {"axis": 0}]),
    "Dice": (ONE_HOT, VALUES, [{}, {"axis": 1}]),
    "Hinge": (ONE_HOT, VALUES, [{}]),
    "Huber": (POSITIVE, VALUES, [{}, {"delta": 0.1}]),
    **dict.fromkeys(PLAIN.split(), (POSITIVE, VALUES, [{}])),
    "SparseCategoricalCrossentropy": (IDS, VALUES, [{}, LOGITS, {"ignore_class": 2}]),
    "SquaredHinge": (ONE_HOT, VALUES, [{}]),
    "Tversky": (ONE_HOT, VALUES, [{}, {"alpha": 0.3, "beta": 0.7, "axis": 1}]),
}
HERE = sorted(STOCK)
OPTIONS = [(name, options) for name in HERE for options in CASES[name][2]]
WEIGHTS = np.array([0.0, 1.0, 2.0, 0.5])
MASK = np.array([True, True, False, True])


def case(name, dtype="float32"):
    """The labels and the predictions of a loss, the latter rounded to a dtype."""
    y_true, y_pred, _ = CASES[name]
    label_dtype = "float64" if dtype == "float64" else "float32"
    if y_true.dtype.kind == "f":
        y_true = tf.constant(y_true, label_dtype)
    return tf.constant(y_true), tf.cast(tf.constant(y_pred), dtype)


def outcomes(loss, y_true, y_pred, mode="eager"):
    """The loss and its gradients: plain, with weights, masked, with both; errors by their type.

    In a function only what works is traced: the plain one and the one that has most.
    """

    def compute(weighted, masked, y_true, y_pred):
        with tf.GradientTape() as tape:
            tape.watch(y_pred)
            predictions = tf.identity(y_pred)
            if masked:
                predictions._keras_mask = tf.constant(MASK)
            weights = tf.constant(WEIGHTS, "float32") if weighted else None
            value = loss(y_true, predictions, weights)
        return value, tape.gradient(value, y_pred)

    results = {}
    for variant in itertools.product((False, True), repeat=2):
        try:
            results[variant] = compute(*variant, y_true, y_pred)
        except (TypeError, ValueError, tf.errors.OpError) as error:
            results[variant] = (type(error),)
    if mode == "eager":
        return results
    # The first and the last of those that work: the plain one and, mostly, that with both.
    _, *work = (variant for variant, result in results.items() if len(result) == 2)
    work = [(False, False), *work[-1:]]
    together = placed(mode, lambda *args: [compute(*variant, *args) for variant in work])
    return dict(zip(work, together(y_true, y_pred), strict=True))


def assert_same(ours, stock, max_ulp=0):
    """Asserts that two `outcomes` are bitwise equal, or nearly."""
    assert any(tf.is_tensor(each[0]) for each in stock.values())
    for key, expected in stock.items():
        for is_gradient, (one, other) in enumerate(zip(ours[key], expected, strict=True)):
            if isinstance(other, type):
                assert one is other
                continue
            assert one.dtype == other.dtype
            if max_ulp and one.dtype in (tf.float32, tf.float64):
                np.testing.assert_array_max_ulp(one.numpy(), other.numpy(), max_ulp)
            else:
                np.testing.assert_array_equal(one, other, err_msg=str((key, is_gradient)))


def test_every_loss_of_keras_has_one_of_ours():
    assert set(STOCK) <= set(CASES)
    for name, stock in STOCK.items():
        ours = getattr(losses, name)
        assert issubclass(ours, stock)
        assert issubclass(ours, losses.Loss)
        assert ours.__name__ == name
        assert ours.__module__ == "keras_mp.losses"
        arguments = [p for p in inspect.signature(stock).parameters if p != "dtype"]
        assert list(inspect.signature(ours).parameters) == [*arguments, "dtype"]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_float32_is_bitwise_stock(name, options):
    y_true, y_pred = case(name)
    # Ours passes the reduction on.
    every = ["sum_over_batch_size", "sum", "none"]
    for reduction in every if name == "Huber" else every[len(name) % 3 :][:1]:
        stock = STOCK[name](reduction=reduction, **options)
        ours = getattr(losses, name)(reduction=reduction, **options)
        assert_same(outcomes(ours, y_true, y_pred), outcomes(stock, y_true, y_pred))


# All losses share the cast; XLA and functions see it in some of each kind.
@pytest.mark.parametrize(
    ("name", "mode", "dtype"),
    [
        *zip(HERE, itertools.cycle(["eager"]), itertools.cycle(["float16", "bfloat16"])),
        *zip(HERE[::3], itertools.cycle(["function"]), itertools.cycle(["bfloat16", "float16"])),
        ("CategoricalCrossentropy", "jit", "float16"),
        ("BinaryFocalCrossentropy", "jit", "bfloat16"),
        ("Poisson", "jit", "float16"),
        ("SquaredHinge", "jit", "bfloat16"),
        *(("SparseCategoricalCrossentropy", mode, "float32") for mode in MODES),
    ],
)
def test_16_bit_predictions_are_widened(name, dtype, mode):
    y_true, y_pred = case(name, dtype)
    options = LOGITS if "from_logits" in inspect.signature(STOCK[name]).parameters else {}
    stock = STOCK[name](**options)

    def widened(y_true, y_pred, weights):
        wide = tf.cast(y_pred, tf.float32)
        if hasattr(y_pred, "_keras_mask"):
            wide._keras_mask = y_pred._keras_mask
        return stock(y_true, wide, weights)

    ours = outcomes(getattr(losses, name)(**options), y_true, y_pred, mode)
    # XLA may fuse two graphs of the same operations in two ways.
    max_ulp = 2 if mode == "jit" else 0
    assert_same(ours, outcomes(widened, y_true, y_pred, mode), max_ulp)


# In the base class, which is the same for all of them, however the function is run.
@once
@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "eager") for name in HERE), ("Huber", "function"), ("Huber", "jit")]
    + [("SparseCategoricalCrossentropy", mode) for mode in ("function", "jit")],
)
def test_float64_stays_float64(name, mode):
    y_true, y_pred = case(name, "float64")
    ours = outcomes(getattr(losses, name)(dtype="float64"), y_true, y_pred, mode)
    reference = STOCK[name](dtype="float64") if IS_KERAS_3 else STOCK[name]()
    if isinstance(reference, tf.keras.losses.Huber) and not IS_KERAS_3:
        tf.keras.backend.set_floatx("float64")  # to which this one casts
    stock = outcomes(reference, y_true, y_pred, mode)
    assert_same(ours, stock)
    if name != "CTC":  # TensorFlow has it in float32 only
        value = ours[False, False][0].numpy()
        in_float32 = getattr(losses, name)()(y_true, y_pred)
        assert value.dtype == np.float64
        assert in_float32.dtype == tf.float32
        assert value == pytest.approx(float(in_float32), rel=1e-5)
        assert value != np.float64(np.float32(value))


@pytest.mark.parametrize("name", HERE)
def test_every_argument_survives_a_config(name):
    options = CASES[name][2][-1]
    loss = getattr(losses, name)(**options, reduction="sum", name="mine", dtype="float64")
    config = loss.get_config()
    assert config.items() >= {**options, "reduction": "sum", "name": "mine"}.items()
    assert config["dtype"] == "float64"
    for again in (
        type(loss).from_config(config),
        copy.deepcopy(loss),
        tf.keras.losses.deserialize(tf.keras.losses.serialize(loss)),
    ):
        assert type(again) is type(loss)
        assert again.get_config() == config
        assert again(*case(name)).numpy() == loss(*case(name)).numpy()
    assert repr(loss).startswith(f"<{name}(")
    assert "dtype='float64'" in repr(loss)


@pytest.mark.parametrize("name", HERE)
def test_a_stock_loss_becomes_ours_with_all_its_arguments(name):
    for options in CASES[name][2]:
        arguments = {**options, "reduction": "sum", "name": "mine"}
        ours = losses.get(STOCK[name](**arguments))
        assert type(ours) is getattr(losses, name)
        assert ours.get_config() == getattr(losses, name)(**arguments).get_config()
    ours = losses.get(STOCK[name]().fn)
    assert type(ours) is getattr(losses, name)
    assert type(losses.get(STOCK[name])) is getattr(losses, name)
    assert type(losses.get(name)) is getattr(losses, name)
    if name != "CategoricalGeneralizedCrossEntropy":  # which Keras knows by no name
        assert type(losses.get(STOCK[name]().fn.__name__)) is getattr(losses, name)


def test_get_by_other_names():
    assert type(losses.get("mse")) is losses.MeanSquaredError
    assert losses.get("MAE").name == "MAE"
    assert losses.get(None) is None
    assert losses.get(tf.keras.losses.Huber(2.0), dtype="float64").get_config()["delta"] == 2
    config = tf.keras.losses.serialize(losses.Huber(3.0))
    assert losses.get(config).get_config()["delta"] == 3
    ours = losses.Poisson()
    assert losses.get(ours) is ours
    with pytest.raises(ValueError, match="nonsense"):
        losses.get("nonsense")


@pytest.mark.parametrize("make", [losses.Loss, losses.MeanSquaredError, losses.Crossentropy])
def test_dtype(make):
    assert make().dtype == make(dtype=None).dtype == "float32"
    assert make(dtype=tf.float64).dtype == "float64"
    assert make(dtype=np.float32).dtype == "float32"
    assert make(dtype=keras_mp.Policy("mixed_bfloat16")).dtype == "bfloat16"
    for bad in ("int32", "nonsense", 3.5, tf.string):
        with pytest.raises(ValueError, match="must be a floating-point dtype.*Received: dtype="):
            make(dtype=bad)


@pytest.mark.skipif(not IS_KERAS_3, reason="Losses of Keras 2 have no dtype.")
def test_a_dtype_by_position_and_of_a_stock_loss():
    assert losses.MeanSquaredError("sum", "name", "float64").dtype == "float64"
    assert losses.get(tf.keras.losses.Huber(dtype="float64")).dtype == "float64"
    assert losses.get(tf.keras.losses.Huber(dtype="float16")).dtype == "float32"


class Recorder(losses.Loss):
    """A loss that remembers what it was given."""

    def call(self, y_true, y_pred):
        self.given = y_true, y_pred
        return tf.reduce_sum(tf.nest.flatten(y_pred)[0])


def dtypes_given(y_true, y_pred, **kwargs):
    loss = Recorder(**kwargs)
    loss(y_true, y_pred)
    return tf.nest.map_structure(lambda each: each.dtype.name, loss.given)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_what_a_loss_of_ones_own_is_given(dtype):
    half = tf.constant([1.0], tf.float16)
    for label, expected in [
        (half, dtype),
        (np.array([1.0]), dtype),
        ([[0.5]], dtype),
        (tf.constant([2**24 + 1]), "int32"),
        (np.array([1], "uint8"), "uint8"),
        ([1], "int32"),
        (tf.constant([True]), "bool"),
        (["a"], "string"),
    ]:
        assert dtypes_given(label, half, dtype=dtype) == (expected, dtype)
    nested = {"a": half, "b": [np.array([1]), half]}
    assert dtypes_given(nested, [half, np.array([1.0])], dtype=dtype) == (
        {"a": dtype, "b": ["int64", dtype]},
        [dtype, dtype],
    )


@once
@pytest.mark.parametrize(
    ("mode", "id_", "label_dtype"),
    [
        *pairs(MODES, [2049, 65537], ["int32", "int64", "uint32"]),
        ("function", 2**24 + 1, "int64"),  # half a gigabyte
    ],
)
def test_class_ids_are_exact(id_, label_dtype, mode):
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def at_id_alone(y_true):
        logits = tf.one_hot([id_], 2**24 + 2, tf.constant(8.0, tf.float16), dtype=tf.float16)
        return loss(y_true, logits)

    function = placed(mode, at_id_alone)
    hit = function(tf.constant([id_], label_dtype))
    miss = function(tf.constant([id_ - 1], label_dtype))
    assert float(miss[0] - hit[0]) == pytest.approx(8, rel=1e-5)


def test_integer_labels_give_what_float_ones_give():
    for name in HERE:
        y_true, y_pred = CASES[name][:2]
        if set(np.unique(y_true)) <= set(range(CLASSES)):
            loss = getattr(losses, name)()
            expected = loss(y_true.astype("float32"), y_pred).numpy()
            for dtype in ("int32", "int64", "uint8"):
                assert loss(y_true.astype(dtype), y_pred).numpy() == expected
            if set(np.unique(y_true)) <= {0, 1}:
                assert loss(y_true.astype(bool), y_pred).numpy() == expected


@pytest.mark.skipif(IS_KERAS_3, reason="Ragged losses are of Keras 2.")
def test_ragged_targets():
    y_pred = tf.RaggedTensor.from_row_lengths(tf.constant(VALUES[[0, 1, 2, 3, 0, 1]]), [2, 1, 3])
    y_true, half = tf.cast(y_pred > 0.5, tf.float32), tf.cast(y_pred, tf.float16)
    stock = tf.keras.losses.get("mse")(y_true, tf.cast(half, tf.float32))
    got = losses.MeanSquaredError(reduction="none")(y_true, half)
    np.testing.assert_array_equal(got.to_tensor(), stock.to_tensor())


def model_of(outputs=1, **kwargs):
    inputs = tf.keras.Input([3])
    layers = [tf.keras.layers.Dense(2, name=f"out{i}", **kwargs) for i in range(outputs)]
    outputs = [layer(inputs) for layer in layers]
    return tf.keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0])


def compiled(policy, loss, **arguments):
    """A model that is compiled under a policy."""
    keras_mp.set_global_policy(policy)
    model = model_of(**arguments)
    model.compile("sgd", loss)
    return model


def test_compile_turns_built_in_losses_into_ours():
    stock = tf.keras.losses.Huber(delta=3.0)
    for given in ("huber", tf.keras.losses.Huber, stock, stock.fn, losses.Huber()):
        assert type(compiled("mixed_bfloat16", given).loss) is losses.Huber
    assert losses.for_compile(stock, "float32").get_config()["delta"] == 3
    nested = {"a": ["mse", None], "b": {"c": stock, "d": ("mae", "mse")}}
    converted = losses.for_compile(nested, "float32")
    tf.nest.assert_same_structure(nested, converted)
    assert all(isinstance(each, losses.Loss | None) for each in tf.nest.flatten(converted))
    assert compiled("float64", "mse").loss.dtype == "float64"


def test_compile_leaves_losses_alone_without_our_policy():
    model = compiled(None, "mse", dtype="mixed_bfloat16" if IS_KERAS_3 else None)
    assert model.loss == "mse"
    assert not isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    model = model_of()
    model.compile(keras_mp.LossScaleOptimizer("sgd"), "mse", metrics=["mse"])
    assert model.loss == "mse"


def test_compile_lets_keras_complain_about_what_it_does_not_know():
    with pytest.raises(ValueError, match="nonsense"):
        compiled("mixed_float16", "nonsense").fit(np.ones([2, 3]), np.ones([2, 2]), verbose=0)


X = random.normal(size=[8, 3]).astype("float32")
Y = 300 * random.normal(size=[8, 2]).astype("float32")


@pytest.mark.parametrize(
    ("loss", "eager"),
    [
        (["mse", "huber"], True),
        (["mse", None], True),
        ("mae", False),
        ({"out0": tf.keras.losses.MeanSquaredError, "out1": losses.LogCosh()}, False),
    ],
    ids=["list", "None", "name", "dict"],
)
def test_several_outputs_train_as_in_float32(loss, eager):
    if IS_KERAS_3 and isinstance(loss, list) and None in loss:
        pytest.skip("Keras 3 wants a loss for each label.")
    how = {"loss_weights": [1, 0.5] if tf.nest.is_nested(loss) else None, "run_eagerly": eager}
    histories = []
    for policy, each in (("mixed_bfloat16", loss), (None, losses.for_compile(loss, "float32"))):
        model = made(lambda: model_of(2), policy)
        with keras_mp.policy_scope(policy):
            model.compile(tf.keras.optimizers.SGD(0.0), each, **how)
        histories.append(model.fit(X, [Y, Y], verbose=0).history)
    ours, reference = histories
    assert ours == {key: pytest.approx(values, rel=1e-2) for key, values in reference.items()}


@pytest.mark.skipif(IS_KERAS_3, reason="Keras 3 refuses a loss without an output.")
def test_a_loss_for_an_output_that_is_not_there_is_left_out():
    keras_mp.set_global_policy("mixed_bfloat16")
    inputs = tf.keras.Input([3])
    model = tf.keras.Model(inputs, {"a": tf.keras.layers.Dense(2)(inputs)})
    model.compile("sgd", {"a": "mse", "zz": "mse"})
    model.fit(X, {"a": Y}, verbose=0)


def echo(loss, **arguments):
    """A float16 model that returns its inputs."""
    keras_mp.set_global_policy("mixed_float16")
    how = {"optimizer": tf.keras.optimizers.SGD(0.0), "loss": loss, **arguments}
    return compiled_model(tf.keras.layers.Activation("linear"), inputs=1, **how)


def test_labels_that_float16_cannot_hold_reach_the_loss():
    model = echo("mae", metrics=["mae"])
    loss, metric = model.evaluate(np.zeros([4, 1]), np.full([4, 1], 100_001.0), verbose=0)
    assert loss == metric == 100_001
    weights = np.full([4], 100_000.0)
    loss, _ = model.evaluate(np.ones([4, 1]), np.zeros([4, 1]), sample_weight=weights, verbose=0)
    assert loss == 100_000


def test_a_float64_loss_gets_float64_labels():
    model = echo(Recorder(dtype="float64"), run_eagerly=True)
    y = np.array([[1 + 2.0**-40]])
    model.test_on_batch(np.ones([1, 1]), tf.constant(y))
    label, prediction = model.loss.given
    assert (label.dtype, prediction.dtype) == (tf.float64, tf.float64)
    assert label.numpy() == y


@pytest.mark.parametrize("model_outputs", ["float32", None])
@pytest.mark.parametrize("eager", [True, False])
def test_defect_13_metrics_see_float32(model_outputs, eager):
    policy = keras_mp.Policy("mixed_float16", model_outputs=model_outputs)
    labels, results = np.eye(3, dtype="float32")[random.integers(0, 3, 8)], []
    for each in (policy, "float32"):
        keras_mp.set_global_policy(each)
        model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Activation("tanh")])
        metrics = tf.keras.metrics
        model.compile(
            *(tf.keras.optimizers.SGD(0.0), "mse"),
            metrics=["mse", "accuracy", tf.keras.losses.MeanAbsoluteError().fn],
            weighted_metrics=[metrics.MeanSquaredError(), metrics.TopKCategoricalAccuracy(k=2)],
            run_eagerly=eager,
        )
        # Neither a rounded prediction nor the square of 400 is right in float16.
        how = {"sample_weight": np.arange(8.0), "verbose": 0}
        results.append([model.evaluate(X, y, **how) for y in (labels, 400 * labels)])
    assert np.shape(results) == (2, 2, 6)
    np.testing.assert_allclose(*results, rtol=1e-6)


def test_ones_own_function_gets_what_stock_gives():
    given = []

    def my_loss(y_true, y_pred):
        given.append((y_true.dtype.name, y_pred.dtype.name))
        return tf.reduce_mean(tf.square(tf.cast(y_true, y_pred.dtype) - y_pred), axis=-1)

    class Mine(tf.keras.losses.MeanSquaredError):
        pass

    for loss in (my_loss, Mine(), losses.as_float32(my_loss)):
        model = compiled("mixed_float16", loss)
        assert model.loss is loss
        model.train_on_batch(X, Y)
        assert given[-1] == ("float32", "float32")


def test_as_float32_casts_only_tensors():
    @losses.as_float32
    def given(*args, **kwargs):
        return args, kwargs

    assert given.__name__ == "given"
    (half, array, (integer,), number), kwargs = given(
        tf.ones([1], tf.bfloat16), np.ones(1), [tf.constant(1)], 2.5, k={"a": tf.ones([], "half")}
    )
    assert half.dtype == array.dtype == kwargs["k"]["a"].dtype == tf.float32
    assert integer.dtype == tf.int32
    assert number == 2.5


@pytest.mark.parametrize(
    "bad", [3, "mse", tf.keras.losses.Huber(), tf.keras.metrics.Mean(), tf.keras.losses.Huber]
)
def test_as_float32_refuses(bad):
    with pytest.raises(TypeError, match="for functions and regularizers.*Received: "):
        losses.as_float32(bad)


@pytest.mark.parametrize(
    ("fitting", "y_true", "y_pred"),
    [
        (losses.BinaryCrossentropy, np.ones([BATCH, 1], "int64"), VALUES[:, :1]),
        (losses.SparseCategoricalCrossentropy, IDS, VALUES),
        (losses.SparseCategoricalCrossentropy, IDS[:, None], VALUES),
        (losses.CategoricalCrossentropy, ONE_HOT, VALUES),
    ],
)
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_the_cross_entropy_that_fits_the_shapes(fitting, y_true, y_pred, mode):
    loss = losses.Crossentropy()
    value = placed(mode, loss)(tf.constant(y_true), tf.constant(y_pred))
    np.testing.assert_allclose(value, fitting()(y_true, y_pred), rtol=1e-6)
    assert losses.Crossentropy.from_config(loss.get_config()).get_config() == loss.get_config()


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no such name.")
@pytest.mark.parametrize("name", ["crossentropy", "ce", "CE"])
def test_crossentropy_by_name(name):
    model = compiled("mixed_bfloat16", name, activation="softmax")
    assert type(model.loss) is losses.Crossentropy
    model.fit(X, np.array([0, 1] * 4), verbose=0)


def test_a_loss_of_ones_own_is_saved_with_its_dtype():
    loss = Recorder(reduction="sum", name="mine", dtype="float64")
    config = loss.get_config()
    assert config == {"name": "mine", "reduction": "sum", "dtype": "float64"}
    assert Recorder.from_config(config).get_config() == config

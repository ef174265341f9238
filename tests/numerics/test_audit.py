"""Defects that are planted in models are found and named, and clean models get an empty report."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import keras_api
from tests import steps
from tests.common import once
from tests.numerics.tools import audit, census, dense, of_keras, operations, sequential

# A number that is made in float16 by way of NumPy is infinite there: a Python number is not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")

K = tf.keras
L = K.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 16)).astype("float32")
CLASSES = np.arange(8, dtype="int32") % 4
FROM_LOGITS = K.losses.SparseCategoricalCrossentropy(from_logits=True)


def line_of(function, text):
    """The number of the line in this file that has a text, and is in a function or class."""
    with open(__file__) as file:
        lines = file.read().splitlines()
    start = next(i for i, line in enumerate(lines) if f" {function}(" in line)
    return next(i for i in range(start, len(lines)) if text in lines[i]) + 1


def found(model, batch):
    """{name of a hazard: finding}."""
    report = audit(model, batch)
    assert report.to_text(rows=None).count("Cure:") == len(report.findings)
    return {finding.hazard: finding for finding in report.findings}


def narrow(dtype):
    """The mixed policy of a dtype, whose models return it."""
    return keras_mp.Policy(f"mixed_{dtype}", model_outputs=None)


def classifier(*layers, dtype="float16", **kwargs):
    """A model of these layers, with logits in float32, under a mixed policy."""
    head, policy = dense(4, dtype="float32"), f"mixed_{dtype}"
    return sequential(*layers, head, shape=[16], policy=policy, loss=FROM_LOGITS, **kwargs)


class Counter(tf.keras.metrics.Metric):
    """A metric whose result is its variable."""

    def __init__(self):
        super().__init__(name="counter")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(self.count + 1)

    def result(self):
        return self.count


@once
def test_the_operations_of_a_layer_are_listed_for_who_adds_a_hazard():
    lines = operations(classifier(square, dense(16)), (X, CLASSES), "square").splitlines()
    assert "square: Square(float16(8, 16)) -> float16(8, 16)" in lines
    assert {line.partition(":")[0] for line in lines} == {"square"}


class Counting(L.Layer):
    """Counts how often it is traced."""

    traces = 0

    def call(self, x):
        self.traces += not tf.executing_eagerly()
        return tf.minimum(x * 1e5, 1.0)


def test_a_step_is_traced_once_for_batches_of_equal_shapes():
    def audited(*given):
        model = classifier(lambda: Counting(name="count"), dense(16))
        before = model.get_layer("count").traces
        report = audit(model, list(given))
        return model.get_layer("count").traces - before, report

    small, large, short = ((x, CLASSES[: len(x)]) for x in (X * 1e-3, X, X[:4]))
    (times, sound), (once_, report) = audited(small), audited(small, large)
    assert once_ == times
    assert audited(small, short)[0] == 2 * times
    # Each batch has its own numbers.
    assert not sound.findings
    [finding] = report.findings
    assert finding.why.endswith(", on 1 of 2 batches.")


def test_a_step_is_run_with_grappler_where_it_cannot_be_without(monkeypatch):
    def refuse(**arguments):
        raise tf.errors.UnimplementedError(None, None, "Not on this device.")

    def findings():
        return audit(classifier(square), (10 * X, CLASSES)).findings

    found = findings()
    monkeypatch.setattr(tf.raw_ops, "StatefulPartitionedCall", refuse)
    assert [each.hazard for each in findings()] == [each.hazard for each in found] != []


class MaskedRows(L.Layer):
    def call(self, x):
        scores = tf.where(x > 100, x, x * 0 + x.dtype.as_numpy_dtype(-1e9))
        return tf.stack([tf.nn.softmax(scores) * x, x], 1)


@once
def test_nan_that_a_pooling_drops():
    layers = [dense(16), lambda: MaskedRows(name="rows"), L.MaxPooling1D, L.Flatten]
    finding = found(classifier(*layers), (X, CLASSES))["a constant that is infinite in 16 bits"]
    assert finding.where == "rows"
    # Some machines' kernels drop NaN beside a number, others pass it on to the loss.
    rows = tf.constant([[[float("nan")], [1.0]]], tf.float16)
    drops = bool(tf.reduce_all(tf.math.is_finite(tf.nn.max_pool1d(rows, 2, 2, "VALID"))))
    gradients = "so are gradients, though the loss is not" if drops else "so is the loss"
    assert f"results of Softmax are NaN; {gradients}" in finding.why


class Sum(L.Layer):
    def call(self, x):
        return x + tf.reduce_sum(x * x, -1, keepdims=True)


def test_the_layer_of_two_with_one_name_of_keras():
    layers = [lambda: Sum(name="sum"), dense(16), lambda: Sum(name="sum_1")]
    finding = found(classifier(*layers), (200 * X, CLASSES))["an overflow in the forward pass"]
    assert finding.where == "sum"


def times_1e6(x):
    return x * x.dtype.as_numpy_dtype(1e6)


@once
@pytest.mark.parametrize(
    "layer", [lambda: L.Lambda(times_1e6, name="lam"), dense(4, activation=times_1e6, name="lam")]
)
@pytest.mark.parametrize("is_last", [False, True])
def test_a_constant_is_found_where_it_is_used(layer, is_last):
    layers = [dense(4, name="aa"), layer, *([] if is_last else [dense(4, name="bb")])]
    model = sequential(*layers, shape=[16], policy="mixed_float16")
    findings = found(model, (X, X[:, :4]))
    finding = findings["a constant that is infinite in 16 bits"]
    assert finding.where == "lam"
    assert finding.line.number == line_of("times_1e6", "dtype(1e6)")
    assert ("in bb, " in finding.why) != is_last


class Square(L.Layer):
    def call(self, x):
        return tf.square(x * 100.0) * 1e-6


def square():
    """A layer of Keras's own policy: one of keras_mp squares in float32."""
    return Square(name="square", dtype=of_keras())


class Widened(L.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=[shape[-1], 16])

    def call(self, x):
        return tf.matmul(tf.cast(x, tf.float32), tf.cast(self.kernel, tf.float32))


class Bare(L.Layer):
    def __init__(self):
        super().__init__(name="bare")
        self.kernel = tf.Variable(tf.eye(16), name="kernel")

    def call(self, x):
        return tf.matmul(tf.cast(x, tf.float32), self.kernel)


def test_layers_in_float32_cost_time_which_profile_tells():
    """They lose nothing, and hide nothing."""
    model = classifier(
        dense(64, name="large"),
        dense(16, dtype="float32", name="odd"),
        lambda: Widened(name="widened"),
        Bare,
        loss_weights=1024.0,
    )
    [(hazard, finding)] = found(model, (X, CLASSES)).items()
    assert hazard == "a loss multiplied by a number"
    assert finding.where == "the training step, outside of layers"
    assert "multiplied by 1024, and then by the loss scale, 32768" in finding.why
    told = {}
    for each in census(model, (X, CLASSES)).operations:
        if each.work and each.dtype == "float32":
            told.setdefault(each.layer, (each.why, each.line))
    against = "the layer's code, against its policy mixed_float16"
    assert told["odd"][0] == "policy float32"
    for layer in (Widened, Bare):
        line = __file__, line_of(layer.__name__, "tf.matmul")
        assert told[layer.__name__.lower()] == (against, line)


def test_a_metric_that_returns_its_variable_weights_of_losses_float64_and_constants_are_sound():
    model = classifier(dense(16), metrics=[Counter()], loss_weights=100.0)
    assert not found(model, (X.astype("float64"), CLASSES))
    constant = np.full([8, 16], 0.3, "float32")
    assert not found(classifier(dense(16), dtype="bfloat16"), (constant, CLASSES))


def test_a_long_sum():
    model = sequential(dense(4, name="last"), shape=[4], policy=narrow("bfloat16"))
    batch = np.zeros([4096, 4], "float32"), np.full([4096, 4], 3, "float32")
    assert not found(model, batch)
    keras_mp.enable_float32_sums(False)
    finding = found(model, batch)["a long sum in 16 bits"]
    assert finding.where == "last"
    assert "adds up 4,096 numbers in bfloat16" in finding.why


class OwnLoss(K.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = tf.reduce_mean(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def test_a_loss_in_16_bits():
    # A step of a model of keras_mp computes losses in float32.
    model = OwnLoss([K.Input([4]), L.Dense(4, dtype=of_keras("bfloat16"))])
    model.compile("sgd")
    # All are classified well: a loss of log(1 + 3 exp(-7)), of which log sees 1.
    model.set_weights([7 * np.eye(4), np.zeros(4)])
    finding = found(model, (np.eye(4)[CLASSES], CLASSES))["a loss in 16 bits"]
    assert finding.line.number == line_of("OwnLoss", "sparse_softmax")
    assert "adds up 4 numbers in bfloat16" in finding.why
    assert "in float32 it is 0.00273" in finding.why


@once
def test_labels_with_as_many_numbers_as_there_are_probabilities():
    def loss(labels, probabilities):
        p = tf.clip_by_value(tf.cast(probabilities, tf.float32), 1e-7, 1.0)
        ids = tf.cast(labels[:, ::2], tf.int32)  # The others are no class.
        return -tf.reduce_mean(tf.math.log(tf.gather(p, ids, batch_dims=2)), -1)

    keras_mp.set_global_policy(narrow("bfloat16"))
    layers = [L.Dense(8, name="head"), L.Reshape([4, 2]), L.Activation("softmax")]
    model = sequential(*layers, shape=[16], loss=loss)
    model.set_weights([np.zeros([16, 8]), np.float32([20.0, 0.0] * 4)])
    assert not found(model, (X, np.float32([[0, 1] * 4] * 8)))


@once
def test_a_sigmoid_before_a_logarithm():
    def loss(labels, probabilities):
        p = tf.clip_by_value(tf.cast(probabilities, tf.float32), 1e-7, 1 - 1e-7)
        labels = tf.reshape(tf.cast(labels, tf.float32), tf.shape(p))
        return -tf.reduce_mean(labels * tf.math.log(p) + (1 - labels) * tf.math.log(1 - p), -1)

    head = L.Dense(1, "sigmoid", name="head", dtype=of_keras("bfloat16"))
    model = sequential(head, shape=[16], policy=narrow("bfloat16"), loss=loss)
    model.set_weights([np.zeros([16, 1]), np.full([1], 8.0)])
    # 1 - p is 3e-4, and p is 1 in bfloat16.
    finding = found(model, (X, np.zeros(8, "float32")))["a sigmoid in 16 bits"]
    assert finding.where == "head"
    assert not found(model, (X, np.ones(8, "float32")))


@once
def test_outputs_that_cannot_express_the_labels():
    model = sequential(dense(1), shape=[16], policy=narrow("float16"))
    years = np.linspace(20_000, 20_010, 8, dtype="float32")[:, None]
    finding = found(model, (X, years))["outputs in 16 bits"]
    assert "of the variance is lost" in finding.why
    assert not found(model, (X, years - 20_000))
    assert "8 are infinite" in found(model, (X, years * 4))["outputs in 16 bits"].why
    assert not found(model, (X, np.full([8, 1], 20_003.0, "float32")))


class Clips(K.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(FROM_LOGITS(y, self(x, training=True)))
            scaled = self.optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        gradients = self.change(gradients)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}

    def change(self, gradients):
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        return self.optimizer.get_unscaled_gradients(gradients)


class ClipsLater(Clips):
    def change(self, gradients):
        gradients = self.optimizer.get_unscaled_gradients(gradients)
        return tf.clip_by_global_norm(gradients, 1.0)[0]


def with_own_step(cls):
    with keras_mp.policy_scope("mixed_float16"):
        model = cls([K.Input([16]), L.Dense(16), L.Dense(4, dtype="float32")])
        model.compile("sgd")
    return model


def test_clipping_before_unscaling():
    finding = found(with_own_step(Clips), (X, CLASSES))["clipping before unscaling"]
    assert finding.line.number == line_of("Clips", "tf.clip_by_global_norm")
    assert "loss scale, 32768" in finding.why
    assert not found(with_own_step(ClipsLater), (X, CLASSES))


def test_an_optimizer_with_an_epsilon_below_the_dtype():
    layers = [L.Dense(16, "relu", dtype="float16"), L.Dense(4, dtype="float16")]
    model = K.Sequential([K.Input([16], dtype="float16"), *layers])
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="epsilon=1e-08 is 0"):
        model.compile(K.optimizers.Adam(epsilon=1e-8), FROM_LOGITS)
    findings = found(model, (X, CLASSES))
    assert list(findings) == ["an epsilon that is 0 in 16 bits"]
    finding = findings["an epsilon that is 0 in 16 bits"]
    assert finding.where == "the optimizer (Adam)"
    assert "the dtype of 4 variables" in finding.why


@once
def test_an_epsilon_of_zero_is_one_cause_and_one_finding():
    model = classifier(dense(16, "relu"), optimizer=K.optimizers.Adam(epsilon=0.0))
    # The gradient of a weight that no example uses is 0, and 0 / (0 + 0) is NaN.
    x = np.where(np.arange(16) == 3, 0.0, X).astype(np.float32)
    [(hazard, finding)] = found(model, (x, CLASSES)).items()
    assert hazard == "an epsilon that is 0"
    assert "0 in float32, the dtype of 4 variables: after one step" in finding.why
    # Where every weight has a gradient it does no harm.
    assert not found(model, (X, CLASSES))


class DividesOnAnotherLine(L.Layer):
    def __init__(self, epsilon=1e-8, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def call(self, x):
        below = tf.reduce_sum(x * x, -1, keepdims=True) + self.epsilon
        above = x * 2
        return above / below


@once
def test_an_epsilon_and_the_division_that_it_was_for_are_one_finding():
    rows = np.where(np.arange(8)[:, np.newaxis] == 2, 0.0, X).astype(np.float32)
    divides = functools.partial(DividesOnAnotherLine, dtype=of_keras())
    made_by_numpy = functools.partial(DividesOnAnotherLine, np.float16(1e-8))
    assert list(found(classifier(made_by_numpy), (rows, CLASSES))) == [
        "an epsilon that is 0 in 16 bits"
    ]
    findings = found(classifier(divides), (rows, CLASSES))
    [(hazard, finding)] = findings.items()
    assert hazard == "an epsilon that is 0 in 16 bits"
    assert finding.line == (__file__, line_of("DividesOnAnotherLine", "+ self.epsilon"))
    assert "Of 8 values of this batch 1 are 0 then." in finding.why
    assert not found(classifier(divides), (X, CLASSES))


class Selects(DividesOnAnotherLine):
    def call(self, x):
        quotient = super().call(x)
        return tf.where(tf.math.is_finite(quotient), quotient, tf.zeros_like(x))


@once
def test_an_epsilon_whose_quotients_are_selected_away_does_no_harm_until_there_are_gradients():
    rows = np.where(np.arange(8)[:, np.newaxis] == 2, 0.0, X).astype(np.float32)
    layers = dense(16), functools.partial(Selects, name="selects", dtype=of_keras())
    [(hazard, finding)] = found(classifier(*layers), (rows, CLASSES)).items()
    assert (hazard, finding.where) == ("an epsilon that is 0 in 16 bits", "selects")
    assert not found(sequential(*layers, shape=[16], policy="mixed_float16", loss=None), rows)


class DividesByARelu(L.Layer):
    def call(self, x):
        above = tf.maximum(x, tf.zeros([], x.dtype))
        return tf.where(x > 0, x / above, tf.zeros_like(x))


@once
def test_a_maximum_with_a_true_zero_is_no_epsilon():
    hazards = found(classifier(DividesByARelu), (X, CLASSES))
    assert "an epsilon that is 0 in 16 bits" not in hazards


@once
def test_a_softmax_whose_probabilities_are_gathered_and_clipped():
    def cross_entropy(y, probabilities):
        of_label = tf.gather(probabilities, tf.cast(tf.reshape(y, [-1]), tf.int32), batch_dims=1)
        return -tf.math.log(tf.clip_by_value(tf.cast(of_label, tf.float32), 1e-7, 1.0))

    keras_mp.set_global_policy(narrow("float16"))
    model = sequential(L.Dense(4), L.Softmax(dtype=of_keras()), shape=[16], loss=cross_entropy)
    model.set_weights([50 * np.eye(16, 4), np.zeros(4)])
    assert "a softmax in 16 bits" in found(model, (X, CLASSES))


@pytest.mark.filterwarnings("ignore:The model .* has 2 layers whose variables are in bfloat16")
def test_a_step_that_cannot_be_skipped():
    policy = keras_mp.Policy("mixed_float16", loss_scale=2.0**40)
    model = sequential(dense(16), dense(4), shape=[16], policy=policy, loss=FROM_LOGITS)
    # And nothing about the forward pass, whose loss is finite.
    [(hazard, finding)] = found(model, (X, CLASSES)).items()
    assert hazard == "a step that cannot be skipped"
    assert "loss scale 1.09951e+12" in finding.why
    assert np.isfinite(model.get_weights()[0]).all()


@tf.custom_gradient
def straight_through(x):
    return tf.round(x), lambda upstream: tf.cast(upstream, tf.float32) * 2.0


class Rounds(L.Layer):
    def call(self, x):
        return straight_through(tf.tanh(x))


@once
def test_a_custom_gradient_without_dtypes():
    """Of a layer with Keras's own policy: in those of keras_mp the gradient is rounded."""
    rounds = functools.partial(Rounds, dtype=K.mixed_precision.Policy("mixed_float16"))
    finding = found(classifier(dense(16), rounds), (X, CLASSES))["a custom gradient without dtypes"]
    assert finding.where == "rounds"
    assert finding.line == (__file__, line_of("Rounds", "straight_through"))
    assert "float16" in finding.why
    assert "user code" not in finding.why


def test_a_batch_that_does_not_suit_the_model():
    suits = "suit the training step of 'clf'. Received: "
    for batch, message in (
        ((X[:, :3], CLASSES), r"x of the shape \(8, 3\); y of the shape \(8,\). .*incompatible"),
        ((X, CLASSES[:5]), r"y of the shape \(5,\)"),
        ((X, CLASSES, np.ones([5], "float32")), r"sample_weight of the shape \(5,\)"),
        ((X, CLASSES + 9), "The error is: Received a label value of 12"),
        (X, r"x of the shape \(8, 16\)\. The error is: .*(None|Target data is missing)"),
    ):
        with pytest.raises(ValueError, match=suits + ".*" + message) as raised:
            audit(classifier(dense(16), name="clf"), batch)
        assert len(str(raised.value).splitlines()) == 1


class Fails(L.Layer):
    def call(self, x):
        raise KeyError("positions")


def test_other_errors_are_left_alone():
    with pytest.raises((KeyError, RuntimeError), match="positions"):
        audit(K.Sequential([Fails()]), X)


# Programs that Keras's own policies train on wrong numbers, and those of keras_mp do not.


YEARS = np.arange(1990, 2022, dtype="float32")[:, None] * np.ones([1, 2], "float32")
ROWS = np.array([[300.0, 400.0], [310.0, 200.0], [500.0, 310.0], [280.0, 640.0]], "float32")
IDS = np.array([[257, 2049], [3001, 3999], [4001, 259]] * 8, "float32")
MANY = np.full([2, 70_000], 0.02, "float32")


class SegmentMeans(L.Layer):
    def call(self, x):
        ids = tf.zeros([70_000], tf.int32)
        return tf.transpose(tf.math.unsorted_segment_mean(tf.transpose(x), ids, 1))


class LooksUp(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rows = L.Embedding(5000, 4)

    def call(self, ids):
        return tf.reduce_sum(self.rows(ids), 1)


# The first layers of models, of which the first loses numbers; inputs; and the dtype.
PROGRAMS = {
    "UnitNormalization": (lambda: [L.UnitNormalization()], ROWS, "float16"),
    "Embedding": (lambda: [LooksUp()], IDS, "float16"),
    "segment means": (lambda: [SegmentMeans()], MANY, "float16"),
    "Rescaling": (lambda: [L.Rescaling(1 / 65535)], YEARS * 35, "bfloat16"),
}


def _findings(layers, x, policy):
    """What `check` finds in the first layer of a model with a policy, which may be Keras's own."""
    K.utils.set_random_seed(1)
    with keras_api.policy_scope(policy), steps.our_warnings():
        model = K.Sequential([K.Input(x.shape[1:]), *layers(), L.Dense(1)])
        model.compile("sgd", "mse")
    checked = keras_mp.numerics.check(model, (x, np.ones([len(x), 1], "float32")))
    return [each for each in checked.findings if model.layers[0].name in each.where]


@pytest.mark.parametrize("name", PROGRAMS)
def test_check_finds_them_under_keras_own_policies_only(name):
    *program, dtype = PROGRAMS[name]
    found = _findings(*program, of_keras(dtype))
    assert found
    assert "float32" in found[0].cure
    assert not _findings(*program, keras_mp.Policy(f"mixed_{dtype}"))

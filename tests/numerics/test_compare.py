"""Two dtypes side by side: planted defects are named, and honest models have none."""

import math
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import common
from tests.numerics import tools
from tests.numerics.tools import Quantity, compare, dense, main, of_keras, runners, sequential

# A number that is made in float16 by way of NumPy is infinite there: a Python number is not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")

L = tf.keras.layers


def constant(value, like):
    return tf.constant(value, like.dtype)


def epsilon_of_zero(x):
    mean = tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean((x - mean) ** 2, -1, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + constant(1e-8, x))


def long_sum(x):
    rows = tf.repeat(tf.reduce_max(tf.abs(x[:, :1]), 0, keepdims=True) + 1, 100_000, 0)
    return x + tf.reduce_sum(rows, 0, keepdims=True) * 1e-5


def products(x):
    return x + tf.matmul(x[:, tf.newaxis] * 1000, x[:, :, tf.newaxis] * 999)[:, 0] * 1e-6


def einsum(x):
    made = tf.fill([8, 3, 2], constant(100.0, x))
    pairs = tf.einsum("abc,cde->abde", tf.reshape(x * 1000, [-1, 2, 8]), made)
    return x + tf.reduce_sum(pairs) * 0


def square(x):
    return tf.sqrt(tf.square(x * 400) + 1) / 400


def shifted(x):
    return (x + 3000) - 3000


def mask_of_minus_1e9(x):
    keep = tf.cast(tf.range(x.shape[-1]) < 4, x.dtype)
    return tf.nn.softmax(x * keep + (1 - keep) * x.dtype.as_numpy_dtype(-1e9))


def small_steps(x):
    return tf.sqrt(tf.reduce_sum(tf.square(x * 1e-4), -1, keepdims=True)) * 1e4 * x


def far_positions(x):
    return x + tf.sin(tf.cast(tf.range(5000, 5000 + x.shape[-1]), x.dtype))


@tf.custom_gradient
def gradient_that_overflows(x):
    return tf.identity(x), lambda d: d * 60_000 * 60_000 / 3.6e9


@tf.custom_gradient
def gradient_that_underflows(x):
    return tf.identity(x), lambda d: d * constant(1e-9, d) * 1e4 * 1e4


DEFECTS = {
    epsilon_of_zero: ("forward", "a constant of 1e-08: 0 in float16"),
    long_sum: ("forward", "Overflow: Sum (a sum over 100,000 values)"),
    einsum: ("forward", "Overflow: Einsum (a sum over 8 values) reaches"),
    products: ("forward", "Overflow: BatchMatMulV2 (a sum over 16 values)"),
    square: ("forward", "Overflow: Square reaches"),
    shifted: ("forward", "Cancellation: Sub of numbers of about 3e+03"),
    mask_of_minus_1e9: ("forward", "a constant of 1e+09: infinite in float16"),
    small_steps: ("forward", "of the results of Square are 0 in float16"),
    far_positions: ("forward", "Sin of numbers of about 5.01e+03, which are multiples of 4"),
    gradient_that_overflows: ("backward", "Overflow: Mul reaches"),
    gradient_that_underflows: ("backward", "a constant of 1e-09: 0 in float16"),
}


class Planted(L.Layer):
    """A layer with a defect. Its config has the function's number, since Keras saves no others."""

    functions: ClassVar[list] = []

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        if callable(function):
            self.functions.append(function)
            function = len(self.functions) - 1
        self.function = function

    def call(self, x):
        return self.functions[self.function](x)

    def get_config(self):
        return {**super().get_config(), "function": self.function}

    def compute_output_shape(self, shape):
        return shape


def small_model(*layers, **kwargs):
    return sequential(dense(16, "relu"), *layers, dense(3), name="model", **kwargs)


def model_with(defect):
    """A model whose layer with a defect has Keras's policy: that of keras_mp mends most of them."""
    planted = Planted(defect, name="planted", dtype=of_keras())
    return small_model(planted, policy="mixed_float16")


def batch(rows=16):
    x = np.random.default_rng(0).normal(size=[rows, 8]).astype("float32")
    x[:2] = 0
    return x, np.zeros([rows, 3], "float32")


# Which Keras it is makes a difference to the model, not to what is wrong in it.
@common.once
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_planted_defect_is_the_first_that_is_named(defect):
    comparison = compare(model_with(defect), *batch())
    direction, what = DEFECTS[defect]
    first = comparison.findings[0]
    assert (first.path, first.hazard) == ("planted", f"a difference in the {direction} pass")
    assert what in first.why
    assert (first.where, first.line.file) == ("planted (Planted)", __file__)
    assert [finding.path for finding in comparison.findings] == ["planted"]
    text = str(comparison)
    assert f"test_compare.py:{first.line.number})" in text
    assert max(map(len, text.splitlines())) <= 100
    # What was found comes before what it has spoilt.
    assert text.partition("\nLayer ")[2].splitlines()[1].startswith("planted (Planted)")


def test_a_gradient_that_16_bits_cut_is_missing_in_the_layer_before():
    cuts = model_with(lambda x: tf.stop_gradient(x) if x.dtype == tf.float16 else x)
    [finding] = compare(cuts, *batch()).findings
    first = cuts.layers[0].name
    assert (finding.path, finding.hazard) == (first, "a difference in the backward pass")
    assert "Its gradient in float16 is missing" in finding.why


@common.once
def test_what_is_made_of_nan_is_not_blamed():
    # The pooling makes finite numbers of NaN: the largest there are, which overflow behind it.
    rows = [L.Reshape([4, 4]), L.MaxPooling1D(), L.Flatten()]
    model = small_model(Planted(mask_of_minus_1e9, name="planted"), *rows, L.Dense(64))
    comparison = compare(model, *batch(), policy="mixed_float16")
    assert [finding.path for finding in comparison.findings] == ["planted"]


@common.once
def test_a_layer_whose_cast_overflows_is_named_and_none_around_it():
    large = Planted(lambda x: x * 1e6, name="large", dtype="float32")
    model = sequential(large, dense(3, name="casts"), dense(3), policy="mixed_float16")
    [finding] = compare(model, *batch()).findings
    assert (finding.path, finding.why) == ("casts", "What it takes is beyond float16.")


@common.once
def test_saturation_in_bfloat16_is_named():
    comparison = compare(
        small_model(Planted(shifted, name="planted")), *batch(), policy="mixed_bfloat16"
    )
    assert comparison.findings[0].path == "planted"
    assert "multiples of 2e+01 in bfloat16" in comparison.findings[0].why


def clean(comparison, units=1.5):
    """No finding, and nothing near one: what is further is a few units at most."""
    assert comparison.findings == [], str(comparison)
    assert str(comparison).startswith("Rounding explains all differences. ")
    assert len(str(comparison).splitlines()) <= 2
    for layer in comparison.layers:
        assert layer.output is None or layer.output.units < units, layer
    return comparison


class MaskedScores(L.Layer):
    """As others write attention: in float32, with a mask among its inputs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts = [L.Dense(8, dtype=self.dtype_policy, name=name) for name in "qkv"]

    def build(self, shapes):
        for layer in self.parts:
            layer.build(shapes[0])
        self.built = True

    def call(self, inputs):
        x, mask = inputs
        q, k, v = (tf.cast(layer(x), tf.float32) for layer in self.parts)
        scores = tf.matmul(q, k, transpose_b=True) - 1e30 * (1 - tf.cast(mask, tf.float32))
        return tf.cast(tf.matmul(tf.nn.softmax(scores), v), x.dtype)


@common.once
def test_a_mask_among_the_inputs_and_a_gradient_of_zero_are_sound():
    x, mask = tf.keras.Input([5, 8]), tf.keras.Input([1, 5])
    model = tf.keras.Model([x, mask], L.Dense(3)(MaskedScores(name="scores")([x, mask])))
    values = np.random.default_rng(0).normal(size=[4, 5, 8]).astype("float32")
    keep = np.tile([1.0, 1.0, 1.0, 0.0, 0.0], [4, 1, 1]).astype("float32")
    # The bias of the keys has no gradient: a softmax does not see it.
    clean(compare(model, [values, keep], policy="mixed_bfloat16"))


@common.once
def test_a_deep_net_in_float16_drifts_and_is_sound():
    layers = [L.Dense(12, "relu", kernel_initializer="he_normal") for _ in range(16)]
    comparison = clean(compare(small_model(*layers), *batch(), policy="mixed_float16"))
    assert len(comparison.layers) == 18 + 2  # the model and the loss
    drift = [layer.output.relative for layer in comparison.layers]
    assert drift[-3] > 3 * drift[0]


def test_both_draw_the_same_numbers():
    model = small_model(L.Dropout(0.5), L.GaussianNoise(0.3))
    comparison = clean(compare(model, *batch(), policy="mixed_float16"))
    assert comparison.layers[1].kind == "Dropout"
    # Were other numbers dropped, it would be off by more than its size.
    assert 0 < comparison.layers[2].output.relative < 1e-3


def test_a_layer_with_random_numbers_of_its_own_is_not_blamed():
    numbers = np.random.default_rng(0)

    class Own(L.Layer):
        def call(self, x):
            drawn = tf.numpy_function(lambda: np.float32(numbers.random()), [], tf.float32)
            return x * tf.cast(tf.ensure_shape(drawn, []), x.dtype)

    model = sequential(dense(4), Own, dense(1), policy="mixed_float16")
    found = compare(model, np.ones([8, 8], "float32"), np.ones([8, 1], "float32"))
    assert not [each for each in found.findings if "amplifies" in each.why]


def test_metrics_are_as_they_were():
    strategy = common.mirrored(2)
    with strategy.scope():
        inputs = tf.keras.Input([8])
        outputs = {name: L.Dense(3, name=name)(inputs) for name in ("one", "two")}
        model = tf.keras.Model(inputs, outputs)
        model.compile("sgd", {"one": "mse", "two": "mse"})
    x, y = batch()
    labels = {"one": y, "two": y}
    assert not compare(model, x, labels, policy="mixed_float16").findings  # never trained
    model.evaluate(x, labels, verbose=0)
    variables = [variable for metric in model.metrics for variable in metric.variables]
    before = [variable.numpy() for variable in variables]
    assert any(before)
    compare(model, x, labels, policy="mixed_float16")
    assert [variable.numpy() for variable in variables] == before
    model.evaluate(x, labels, verbose=0)
    assert [variable.numpy() for variable in variables] == pytest.approx(before)


@common.once
def test_the_layer_that_has_rounded_is_blamed_and_not_one_in_float32_behind_it():
    far = Planted(lambda x: x + 1000, name="far", dtype=of_keras())
    norm = L.LayerNormalization(name="norm", dtype="float32")
    [finding] = compare(small_model(far, norm, policy="mixed_float16"), *batch()).findings
    assert finding.path == "far"
    assert "`norm` amplifies rounding by" in finding.why
    assert '{"far": "float32"}' in finding.cure


@common.once
def test_units_are_those_of_rounding():
    def off(x):
        return x * (1 + 100 * 2.0**-11) if x.dtype == tf.float16 else x

    model = small_model(Planted(off, name="planted"))
    found = compare(model, *batch(), policy="mixed_float16")
    honest, layer = found.layers[:2]
    assert honest.output.relative < 2**-11
    assert layer.output.relative == pytest.approx(100 * 2.0**-11, rel=0.02)
    # Noise of up to two unit roundoffs, once before and once after.
    assert 100 / (2 * math.sqrt(2)) < found.findings[0].units < 100


@common.once
def test_a_gradient_that_is_zero_but_for_rounding():
    zero, rounded = np.array([1e-9, -1e-9]), np.array([2e-6, 1e-6])

    def distance(values, reference, explained, beside=0.0):
        of = Quantity(None, reference, 0, explained, beside)
        return Quantity(None, values, 0).distance(of, 2**-8)

    assert distance(rounded, zero, 1e-9).units > 1000
    found = distance(rounded, zero, 1e-9, 1e-3)
    assert found.units < 1
    assert found.relative > 1000
    # What is not larger than the gradient itself has to be explained by noise.
    value, wrong = np.array([1e-9, 1e-9]), np.array([1e-9, 1.5e-9])
    assert distance(wrong, value, 1e-12, 1.0).units > 80
    assert distance(zero * np.inf, zero, 0.0, 1.0).units == math.inf
    # What noise explains as a whole is no number that hides those of other tensors.
    assert distance(zero * np.inf, zero, math.inf).units == 0


@common.once
@pytest.mark.parametrize("shift", [30, 300])
def test_it_falls_no_further_than_it_has_to(shift):
    x, y = batch()
    model = small_model(Planted(lambda x: x * 30))
    narrow = keras_mp.convert(model, "mixed_float16")
    narrow.compile(keras_mp.LossScaleOptimizer("sgd"), "mse")
    [runner, _] = runners(narrow, x, y + shift)
    found = runner.run_as_trained(2.0**15).loss_scale
    assert 1 < found < 2**15
    assert runner.run(found).is_sound
    assert not runner.run(2 * found).is_sound


def large_kernel(*layers, trainable):
    """The gradients of what comes before its last layer overflow in float16 at any loss scale."""
    kernel = tf.keras.initializers.Constant(6e4)
    large = L.Dense(1, kernel_initializer=kernel, name="large", trainable=trainable)
    return sequential(*layers, large, loss=None)


def test_gradients_that_training_does_not_compute_do_not_count():
    x, y = np.full([4, 8], 1e-4, np.float32), np.zeros([4, 1], np.float32)
    # The outputs as the last layer makes them: those in float32 are made again after it.
    policy = keras_mp.Policy("mixed_float16", model_outputs=None)
    how = {"policy": policy, "loss": lambda y, prediction: tf.reduce_sum(4 * prediction)}
    frozen = [common.Times(1.0), L.Dense(8, "relu", trainable=False)]
    # Those of the model's inputs, also behind layers without trained weights.
    for layers in ([], frozen):
        assert compare(large_kernel(*layers, trainable=True), x, y, **how).findings == []
    trained = L.Dense(8, "relu", kernel_initializer="ones", name="trained")
    first = compare(large_kernel(trained, trainable=False), x, y, **how).findings[0]
    assert (first.path, first.hazard) == ("large", "a difference in the backward pass")


@common.once
def test_weights_in_float16_keep_what_the_loss_scale_has_kept():
    model = sequential(L.Dense(1, name="dense", dtype="float16"), loss=None)
    x, y = np.full([64, 8], 2.0**-6, np.float32), np.zeros([64, 1], np.float32)

    def small(y, prediction):
        return tf.reduce_mean(tf.cast(prediction, tf.float32)) * 2.0**-20

    comparison = compare(model, x, y, loss=small)
    assert comparison.findings == []
    assert comparison.layers[0].gradient.relative < 1e-3


def test_a_loop_of_ones_own():
    def step(model, x, y):
        error = tf.cast(model(x, training=True), tf.float32) - y
        return tf.reduce_mean(error**2)

    comparison = compare(model_with(square), *batch(), step=step)
    assert comparison.findings[0].path == "planted"
    assert "loss" not in [layer.path for layer in comparison.layers]


class Subclassed(tf.keras.Model):
    """Its own code overflows, not that of a layer; labels and inputs are dicts."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = tf.keras.Sequential([L.Dense(4), L.Dropout(0.5)])
        self.last = L.Dense(4)

    def call(self, inputs, training=None):
        x = self.last(self.inner(inputs["x"], training=training)) * 400
        return {"y": tf.math.log(1 + tf.matmul(x, 2 * x, transpose_b=True) ** 2)}


def test_what_a_model_does_between_its_layers_is_its_own():
    wide = Subclassed()
    with keras_mp.policy_scope(keras_mp.Policy("mixed_float16", model_outputs=None)):
        narrow = Subclassed(name="mine")
        x = {"x": batch()[0]}
        narrow(x)
    wide(x)
    wide.set_weights(narrow.get_weights())
    comparison = compare(narrow, x, reference=wide)
    first = comparison.findings[0]
    assert first.path == "mine"
    assert first.why.startswith("Overflow: MatMul")
    assert 'create the layer with dtype="float32"' in first.cure


def test_a_loss_takes_weights_of_samples_and_computes_in_float32():
    model, (x, y) = small_model(), batch()
    whole, half = np.ones(16, "float32"), np.full(16, 0.5, "float32")
    for loss, weights in ((None, (whole, half)), ("mse", (None, half))):
        found = [compare(model, x, y, w, policy="mixed_float16", loss=loss) for w in weights]
        assert not found[0].findings
        assert found[1].losses[1] == pytest.approx(found[0].losses[1] / 2)
    # The squares of these errors overflow in float16.
    assert not compare(model, x, y + 300, loss="mse", policy="mixed_float16").findings


@common.once
def test_shapes_that_depend_on_numbers():
    pick = Planted(lambda x: tf.boolean_mask(x, x[:, 0] > 1), name="planted")
    model = sequential(pick, dense(3), loss=None)
    x, _ = batch(rows=64)
    # Noise moves some of them to the other side.
    x[:, 0] = 1 + np.linspace(-0.002, 0.002, 64)
    assert {each.path for each in compare(model, x, policy="mixed_float16").findings} <= {"planted"}


def test_what_cannot_be_compared():
    with pytest.raises(TypeError, match="Expected a model of `tf.keras`"):
        keras_mp.numerics.check(tf.Module(), tf.ones([1, 2]))
    with pytest.raises(ValueError, match="does not compute in 16 bits"):
        keras_mp.numerics.check(small_model(), batch())
    with pytest.raises(ValueError, match="do not call the same layers"):
        compare(small_model(), *batch(), policy="mixed_float16", reference=small_model(L.ReLU()))


def test_what_a_step_has_to_be():
    model, (x, y) = small_model(), batch()
    for step, what in ((lambda *_: None, "None"), (lambda m, x, y: m(x), r".*shape=\(16, 3\)")):
        with pytest.raises(ValueError, match=f"`step` to return the loss.* Received: {what}"):
            compare(model, x, y, policy="mixed_float16", step=step)


def test_the_last_layer_is_named_where_its_gradient_overflows():
    """What it returns does not: the model computes that in float32."""
    layers = dense(8, "relu", name="first"), dense(1, name="last")
    model = sequential(*layers, policy="mixed_float16")
    kernel, bias = model.layers[-1].get_weights()
    model.layers[-1].set_weights([np.full_like(kernel, 3e4), bias])
    comparison = compare(model, batch()[0], np.zeros([16, 1], np.float32))
    [finding] = comparison.findings
    assert (finding.path, finding.hazard) == ("last", "a difference in the backward pass")
    assert "Overflow: MatMul reaches" in finding.why
    [last] = [layer for layer in comparison.layers if layer.path == "last"]
    assert last.output.units < 2


@common.once
def test_nothing_is_said_of_what_is_not_finite():
    model, (x, y) = small_model(), batch()
    for bad in ((x * math.nan, y), (x, y + math.inf)):
        assert not compare(model, *bad, policy="mixed_float16").is_judged
    # It handles them.
    keep = Planted(lambda x: tf.where(tf.math.is_nan(x), tf.zeros_like(x), x), name="keep")
    handling = sequential(keep, dense(3))
    assert compare(handling, x * math.nan, y, policy="mixed_float16").is_judged
    model.layers[0].set_weights([weight * math.nan for weight in model.layers[0].get_weights()])
    comparison = compare(model, x, y, policy="mixed_float16")
    assert not comparison.is_judged
    assert "Nothing can be said" in str(comparison)


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.filterwarnings("ignore::keras_mp.MixedPrecisionWarning")
def test_layers_in_16_bits_in_a_model_in_float32(dtype):
    tf.keras.utils.set_random_seed(0)
    inner = tf.keras.Sequential([tf.keras.Input([8]), L.Dense(8, dtype=dtype), L.Dense(8)])
    comparison = compare(sequential(inner, dense(3)), *batch())
    assert not comparison.findings
    narrow = dtype.removeprefix("mixed_")
    around = {layer.dtype for layer in comparison.layers if layer.kind == "Sequential"}
    assert around == {narrow}


@common.once
def test_files_that_cannot_be_used(tmp_path, capsys):
    small_model().save(tmp_path / "model.keras")
    np.savez(tmp_path / "batch.npz", images=1)
    model, data = str(tmp_path / "model.keras"), str(tmp_path / "batch.npz")
    for arguments, message in (
        (["none.keras", data], "none.keras cannot be loaded"),
        ([model, "none.npz"], "none.npz cannot be loaded"),
        ([model, data], "Expected arrays named x, y and sample_weight"),
        ([model, data, "--json", "a.txt"], "must be a .json file"),
    ):
        with pytest.raises(SystemExit) as raised:
            main(["check", *arguments])
        assert raised.value.code == 2
        assert message in capsys.readouterr().err
    inputs = np.ones([16, 8], "float32")
    for policy, labels in (("mixed_float16", [5, 3]), ("missing.json", [16, 3])):
        np.savez(tmp_path / "batch.npz", x=inputs, y=np.zeros(labels))
        with pytest.raises(SystemExit) as raised:
            main(["check", model, data, "--policy", policy])
        assert raised.value.code == 2
        assert "model.keras cannot be checked: " in capsys.readouterr().err
    np.savez(tmp_path / "batch.npz", x=inputs, y=np.full([16, 3], math.nan))
    with pytest.raises(SystemExit, match="2"):
        main(["check", model, data])  # It computes in float32.
    assert "pass policy=" in capsys.readouterr().err
    assert main(["check", model, data, "--policy", "mixed_float16"]) == 1
    printed = capsys.readouterr().out
    assert "policy mixed_float16: " in printed
    assert "a batch that is not finite" in printed
    np.savez(tmp_path / "batch.npz", **{"x.a": [1.0], "x.b": [2.0], "y": [0.0]})
    batch = keras_mp.numerics.commands.load_batch(data)
    assert (sorted(batch.x), batch.y.tolist()) == (["a", "b"], [0.0])


def test_a_loss_that_amplifies_is_not_0_times_as_far_off():
    keras_mp.set_global_policy("mixed_bfloat16")
    model = sequential(L.Rescaling(1.0), L.Dense(1), shape=[1])
    model.set_weights([np.ones([1, 1]), np.zeros([1])])
    x = np.linspace(300, 301, 8)[:, None]
    [finding] = keras_mp.numerics.check(model, (x, x + 0.01)).findings
    assert finding.where == "loss (loss)"
    assert "amplifies rounding" in finding.why
    assert "Cast to float32 in the loss" in finding.cure
    assert "0 times as far" not in finding.why


@common.once
def test_what_rounding_leaves_of_zero_is_not_lost():
    found = np.array([1.0, 0.0])
    assert tools.underflow(found, np.array([1.0, 2.0**-29])) == 0.0
    assert tools.underflow(found, np.array([1.0, 2.0**-15])) == 0.5

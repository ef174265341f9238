"""What `check` says first, where, and what to paste: the cause before what follows from it."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import common
from tests.common import once
from tests.numerics.tools import dense, main, of_keras, saved, sequential

K, L = tf.keras, tf.keras.layers
check, watch = keras_mp.numerics.check, keras_mp.numerics.watch
NotFiniteError = keras_mp.numerics.NotFiniteError
X = np.random.default_rng(5).normal(size=[32, 24]).astype("float32")
Y = np.random.default_rng(6).integers(0, 4, 32).astype("int32")
FROM_LOGITS = K.losses.SparseCategoricalCrossentropy(from_logits=True)


def line_with(text):
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


LOGITS = dense(4, dtype="float32", name="logits")


def made(*layers, policy="mixed_float16", head=LOGITS, **how):
    K.utils.set_random_seed(3)
    how = {"loss": FROM_LOGITS, "shape": [24], "name": "net", **how}
    return sequential(*layers, head, policy=policy, **how)


def relu(name):
    return dense(24, "relu", name=name)


def log_loss(y, p):
    labels = tf.one_hot(tf.cast(tf.reshape(y, [-1]), tf.int32), 4)
    logs = tf.math.log(tf.clip_by_value(tf.cast(p, tf.float32), 1e-7, 1.0))
    return -tf.reduce_sum(labels * logs, -1)


def test_what_the_loss_makes_of_rounded_probabilities_is_no_second_finding():
    policy = keras_mp.Policy("mixed_float16", model_outputs=None)
    head = dense(4, "softmax", name="head", dtype=of_keras())
    model = made(relu("in"), policy=policy, loss=log_loss, head=head)
    wrong = np.asarray(model(X * 12), "float32").argmin(-1).astype("int32")
    [finding] = check(model, (X * 12, wrong)).findings
    assert (finding.hazard, finding.where) == ("a softmax in 16 bits", "head")
    assert "from_logits=True" in finding.cure


class Off(L.Layer):
    def call(self, x):
        return (x + tf.cast(3000.0, x.dtype)) - tf.cast(3000.0, x.dtype)


class Inside(L.Layer):
    """A layer whose config has no policy for the one inside of it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.off = Off(name="off", dtype=self.dtype_policy)

    def build(self, shape):
        self.off.build(shape)
        self.built = True

    def call(self, x):
        return self.off(x)


@pytest.mark.parametrize(("layer", "name", "path"), [(Off, "off", ""), (Inside, "around", "/off")])
def test_a_difference_has_a_line_and_a_cure_that_can_be_pasted(layer, name, path):
    model = made(relu("in"), lambda: layer(name=name))
    checked = check(model, (X, Y))
    [finding] = checked.findings
    assert finding.path == name + path
    assert finding.line == (__file__, line_with("return (x + tf.cast(3000.0"))
    assert str(checked).count("test_findings.py:") == 1
    [described] = json.loads(checked.to_json())["findings"]
    assert described["line"] == {"file": __file__, "number": finding.line.number}
    assert f'{{"{name}": "float32"}}' in finding.cure
    line = finding.cure[finding.cure.index("keras_mp.convert(") : -1]
    assert not check(eval(line), (X, Y), loss=FROM_LOGITS).findings


class Adds(L.Layer):
    def call(self, x):
        return tf.add(x, tf.ones([24], tf.float64))


class Late(K.Model):
    def __init__(self):
        super().__init__(name="late")
        self.adds = Adds(name="adds")
        self.last = L.Dense(4, dtype="float32")

    def call(self, x):
        return self.last(self.adds(x))


@pytest.mark.parametrize("is_built", [False, True])
def test_a_step_that_cannot_be_traced_has_the_layer_the_line_the_dtypes_and_a_cure(is_built):
    with keras_mp.policy_scope("mixed_float16"):
        model = Late()
        model.compile("sgd", FROM_LOGITS)
    if is_built:
        with pytest.raises((TypeError, ValueError, tf.errors.InvalidArgumentError)):
            model(X)
        model.built = True
    checked = check(model, (X, Y))
    [finding] = checked.findings
    assert (finding.hazard, finding.where) == ("dtypes that do not fit", "adds")
    assert finding.line == (__file__, line_with("return tf.add(x, tf.ones"))
    for text in ("float64", "float16", "AddV2", "'adds' computes in float16"):
        assert text in finding.why
    assert "self.compute_dtype" in finding.cure
    assert len(checked.notes) == 1


def tiny_loss(y, p):
    return FROM_LOGITS(y, p) * 2.0**-30


@once
def test_a_scale_that_is_too_small_comes_first_with_one_figure():
    checked = check(made(relu("a"), relu("b"), loss=tiny_loss), (X, Y))
    [finding] = checked.findings
    assert finding.where == "the loss scale"
    scale = checked.advice().loss_scale
    exponent = int(np.log2(scale))
    assert scale == 2.0**exponent > 2.0**15
    assert f"DynamicLossScale(2.0**{exponent})" in finding.cure
    assert f"loss scale at 2^{exponent}:" in finding.why
    loud = made(relu("a"), relu("b"), loss=tiny_loss)
    loud.compile(keras_mp.LossScaleOptimizer("sgd", keras_mp.DynamicLossScale(scale)), tiny_loss)
    assert check(loud, (X, Y)).findings == ()


@pytest.mark.parametrize(
    ("how", "missing"),
    [
        ({}, "pass `loss`, or compile the model"),
        ({"loss": FROM_LOGITS, "labels": None}, "pass (x, y)"),
        ({"step": lambda model, x, y: tf.reduce_mean(model(x))}, "pass `loss` in its place"),
    ],
    ids=["loss", "labels", "step"],
)
def test_what_was_not_looked_at_is_said_with_the_missing_argument(how, missing):
    policy = "mixed_float16"
    model = sequential(dense(8), dense(4), shape=[24], policy=policy, loss=None)
    labels = how.pop("labels", Y)
    checked = check(model, (X, labels) if labels is not None else X, **how)
    assert checked.findings == ()
    [note] = checked.notes
    assert "loss scales" in note
    assert missing in note
    assert f"Not looked at: {note}"[:60] in " ".join(str(checked).split())
    with pytest.raises(ValueError, match="not run at its loss scale. .*") as raised:
        checked.advice()
    assert missing in str(raised.value)


class Needs(L.Layer):
    """A layer that is not made from its config."""

    def __init__(self, function):
        super().__init__(name="needs")
        self.function = function

    def call(self, x):
        return self.function(x)

    def get_config(self):
        return super().get_config()


@pytest.mark.parametrize("is_built", [False, True])
def test_the_layer_that_cannot_be_made_again_is_named(is_built):
    with keras_mp.policy_scope("mixed_float16"):
        inputs = [K.Input([24])] if is_built else []
        model = K.Sequential([*inputs, Needs(tf.identity), L.Dense(4)])
        model.compile("sgd", FROM_LOGITS)
    [note] = check(model, (X, Y)).notes
    assert "its layer 'needs' cannot be recreated" in note
    assert "give the class Needs a `get_config`" in note


def test_a_model_that_its_first_call_builds_is_looked_at_as_a_whole():
    with keras_mp.policy_scope("mixed_float16"):
        model = K.Sequential([L.Dense(8, "relu"), L.Dense(4)])
        model.compile("sgd", FROM_LOGITS)
    checked = check(model, (X, Y))
    assert (checked.findings, checked.notes) == ((), ())
    assert checked.comparison.reference == f"{model.name} in float32"
    assert [type(layer).__name__ for layer in model.layers] == ["Dense", "Dense"]
    assert keras_mp.convert(model, "float32")(X).dtype == tf.float32


def test_the_json_and_the_command_have_all_that_the_text_has(tmp_path, monkeypatch):
    model = made(dense(8, name="dense"), loss="mse")
    checked = check(model, (X, X[:, :4]))
    described = json.loads(checked.to_json())
    [kernel] = [row for row in described["report"]["rows"] if row["path"] == "dense/kernel"]
    assert (kernel["kind"], kernel["dtype"], kernel["lost"]) == ("gradient", "float16", 0.0)
    advice, said = checked.advice(), described["advice"]
    assert (said["sentences"], said["loss_scale"]) == (advice.sentences, advice.loss_scale)
    files, report = saved(tmp_path, model, x=X, y=X[:, :4]), tmp_path / "report.json"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "float32").mkdir()  # It is no reference.
    assert main(["check", *files, "--json", str(report)]) == 0
    assert json.loads(report.read_text())["advice"] == said


@once
def test_a_command_has_the_arguments_of_its_tool(capsys):
    for command, flags in {
        "check": ("--policy", "--no-training", "--reference", "--loss"),
        "watch": ("--every", "--no-weights", "--exclude", "--read-freq", "--epochs"),
        "tune": ("--seed", "--leave-out", "--tolerance", "--batch-size"),
        "profile": ("--steps", "--device"),
    }.items():
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out
        assert [flag for flag in flags if flag not in text] == []


class OverflowsWhereItIsCast(L.Layer):
    def call(self, x):
        return x * 1e6


def test_a_cast_of_a_layer_that_overflows_has_the_path_of_the_layer():
    first = lambda: OverflowsWhereItIsCast(name="large", dtype="float32")  # noqa: E731
    found = check(made(first, relu("second")), (X, Y)).findings
    assert (found[0].hazard, found[0].path) == ("an overflow in the forward pass", "second")


class RunsInAGraphOnly(L.Layer):
    def call(self, x):
        if tf.executing_eagerly():
            raise RuntimeError("This layer does not run in eager.")
        return x


@once
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_findings_are_kept_where_a_layer_does_not_run_in_eager():
    checked = check(made(lambda: TrueMask(), lambda: RunsInAGraphOnly(name="graph")), (X, Y))
    assert [each.hazard for each in checked.findings] == ["a constant that is infinite in 16 bits"]
    sound = check(made(relu("in"), lambda: RunsInAGraphOnly(name="graph")), (X, Y))
    assert sound.findings == ()
    assert "does not run in eager" in str(sound.notes)


class TrueMask(L.Layer):
    def call(self, x):
        return tf.nn.softmax(x + x.dtype.as_numpy_dtype(-1e9) * tf.cast(x < 0, x.dtype))


class OffOnOddFeatures(L.Layer):
    def call(self, x):
        off = (x + tf.cast(3000.0, x.dtype)) - tf.cast(3000.0, x.dtype)
        return tf.where(tf.range(1024) % 2 == 1, off, x)


@once
def test_every_feature_of_a_large_output_counts():
    layers = [lambda: L.Dense(1024, name="wide"), lambda: OffOnOddFeatures(name="odd")]
    checked = check(made(*layers), (np.repeat(X, 8, 0), np.repeat(Y, 8, 0)))
    assert [each.path for each in checked.findings] == ["odd"]


@once
def test_what_is_watched_in_bfloat16_is_told_of_bfloat16():
    model, watching = made(relu("in"), policy="mixed_bfloat16"), watch(every=1)
    model.fit(X, Y, 32, verbose=0, callbacks=[watching])
    assert "bfloat16 at a loss scale" in str(watching)


# Gradients that no dtype and no loss scale makes finite, though the loss is.


class Root(L.Layer):
    """Its gradient is that of a root at 0. It counts how often it runs in eager, in 16 bits."""

    count = 0

    def call(self, x):
        Root.count += tf.executing_eagerly() and x.dtype.size == 2
        return tf.sqrt(x - x) + x

    def compute_output_shape(self, shape):
        return shape


def with_a_root(policy, scale=4.0):
    layers = dense(6, name="first"), lambda: Root(name="root"), dense(2, name="last")
    # The loss scale falls to 1 in a few steps.
    optimizer = keras_mp.LossScaleOptimizer("sgd", keras_mp.DynamicLossScale(scale))
    optimizer = optimizer if policy == "mixed_float16" else "sgd"
    return sequential(*layers, shape=[24], policy=policy, optimizer=optimizer)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_check_knows_that_no_loss_scale_helps(dtype):
    Root.count = 0
    found = check(with_a_root(f"mixed_{dtype}", 2.0**15), (X, X[:, :2]))
    [finding] = found.findings
    assert finding.hazard == "a result that is not finite in any dtype"
    assert finding.where.startswith("first/")
    assert "No loss scale helps" in finding.why
    assert "numerics.watch" in finding.cure
    assert "dynamic" not in str(found.advice())
    assert Root.count <= 8


def test_its_cure_names_the_operation():
    with pytest.raises(NotFiniteError, match="backward pass") as raised, watch():
        with_a_root("mixed_bfloat16").fit(X, X[:, :2], verbose=0)
    assert re.search(r"SqrtGrad in \S*root", str(raised.value))


# Layers that cast to 8 bits: each tool says what that does to the numbers, and none fails.


class Quantized(L.Layer):
    def __init__(self, to, **kwargs):
        super().__init__(name="quantized", **kwargs)
        self.to = getattr(tf.dtypes.experimental, to)

    def get_config(self):
        return {"to": self.to.name, "dtype": self.dtype_policy}

    def call(self, x):
        return tf.cast(tf.reshape(tf.cast(x, self.to), [-1, 24]), x.dtype)


def quantized(to, policy):
    return sequential(lambda: Quantized(to), dense(4), shape=[24], policy=policy)


ONES = np.ones([32, 4], "float32")


@once
def test_an_overflow_of_8_bits_is_named_by_check_and_by_watch():
    model = quantized("float8_e4m3fn", "mixed_bfloat16")
    first = check(model, (1000 * X, ONES)).findings[0]
    assert (first.hazard, first.where) == ("an overflow in the forward pass", "quantized")
    assert "the largest float8_e4m3fn is 448" in first.why
    with pytest.raises(NotFiniteError, match="Cast in quantized"), watch(model):
        model.fit(1000 * X, ONES, verbose=0)


@once
def test_8_bits_are_watched_and_profiled():
    model = quantized("float8_e5m2", "mixed_float16")
    watching = watch(model, every=1, output_gradients=True)
    with watching:
        model.fit(X, ONES, verbose=0, callbacks=[watching])
    assert watching.report()["output", "quantized"].histogram.total == X.size
    assert keras_mp.numerics.profile(model, (X, ONES), steps=0).census.work()


# A subclassed model whose output is what a layer of Keras returns, which is called once more.


class Net(K.Model):
    """Two layers, of which the second makes the output."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = L.Dense(8, "relu", name="hidden")
        # It returns what float16 does not hold.
        self.head = L.Dense(2, bias_initializer=tf.constant_initializer(120000.0), name="head")

    def call(self, x):
        return self.head(self.hidden(x))

    def get_config(self):
        return {}


class Two(Net):
    def call(self, x):
        hidden = self.hidden(x)
        return {"y": self.head(hidden), "hidden": hidden}


def subclassed(cls, dtype):
    model = common.made(cls, f"mixed_{dtype}")
    model.compile("sgd", "mse")
    model(X)
    return model


@pytest.mark.parametrize(("cls", "dtype"), [(Net, "float16"), (Two, "float16"), (Two, "bfloat16")])
def test_a_subclassed_model_is_compared_with_float32(cls, dtype):
    y = np.full([32, 2], 120000.0, "float32")
    labels = {"y": y, "hidden": np.ones([32, 8], "float32")} if cls is Two else y
    found = check(subclassed(cls, dtype), (X, labels))
    assert not found.findings, found
    rows = {row.path: row for row in found.comparison.layers}
    # Of what the model returns. The output of the first call has no gradient.
    assert rows["head"].gradient is not None
    assert rows["head"].dtype == dtype


def test_watch_counts_each_output_once():
    model = subclassed(Net, "float16")
    model.head.bias.assign([0.0, 0.0])
    watched = watch(every=1, output_gradients=True)
    model.fit(X, X[:, :2], batch_size=32, callbacks=[watched], verbose=0)
    for kind in ("output", "output gradient"):
        assert watched.report()[kind, "head"].histogram.total == 32 * 2

"""Policies that `tune` finds hold, on the batches that it looked at and on those held out."""

import json
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import Times, assert_all_equal, once
from tests.numerics.tools import Norm, commands, dtypes, main, saved, sequential

K = tf.keras
L = tf.keras.layers
tune = keras_mp.numerics.tune


def batches(count=4, size=1.0, seed=0):
    random = np.random.default_rng(seed)
    x, y = (lambda n=n: random.normal(size=[8, n]).astype("float32") for n in (6, 2))
    return [(size * x(), y()) for _ in range(count)]


def model_with_norm():
    layers = [Times(300.0, name="rescaling"), Norm(name="norm"), L.Dense(16, "relu", name="first")]
    layers += [L.Dropout(0.5, name="dropout"), L.Dense(2, name="last")]
    return sequential(*layers, shape=[6], name="model")


def test_the_layer_that_overflows_stays_in_float32_and_all_others_do_not(tmp_path):
    model = model_with_norm()
    before = model.get_weights()
    tuned = tune(model, batches())
    assert {path for path, policy in tuned.policies.items() if policy == "float32"} == {"norm"}
    assert tuned.share == pytest.approx(1024 / 1072)
    assert (len(tuned.errors), len(tuned.held_out)) == (3, 1)
    assert all(0 < each.largest <= 0.05 for each in (*tuned.errors, *tuned.held_out))
    rows = {layer.path: layer for layer in tuned.layers}
    assert rows["norm"].reason.endswith(" off")
    assert (rows["first"].multiplications, rows["last"].multiplications) == (8 * 6 * 16, 8 * 16 * 2)
    assert_all_equal(model.get_weights(), before)
    assert tune(model, batches()) == tuned
    # What it made is what its policies make, as a dict, as JSON and as itself; and can be saved.
    path = tmp_path / "policies.json"
    text = tuned.to_json(path)
    assert json.loads(text)["policies"] == tuned.policies
    plain = json.dumps(tuned.policies)
    for policy in (tuned, tuned.policies, text, path, str(path), plain):
        assert dtypes(keras_mp.convert(model, policy)) == dtypes(tuned.model)
    x, _ = batches(1)[0]
    tuned.model.save(tmp_path / "mixed.keras")
    loaded = K.models.load_model(tmp_path / "mixed.keras")
    assert dtypes(loaded) == dtypes(tuned.model)
    np.testing.assert_array_equal(tuned.model.predict(x), loaded.predict(x))
    text = str(tuned)
    assert "model: 4 of 5 layers in mixed_float16, 95.5% of the multiplications" in text
    assert re.search(r"^norm \(Norm\) +float32 +48 +(outputs|gradients of) ", text, re.MULTILINE)
    assert 1 <= tuned.loss_scale <= 2.0**15
    assert f"; initial loss scale: {tuned.loss_scale:g}" in text
    assert max(map(len, text.splitlines())) <= 100
    assert len(tuned.to_text(rows=None).splitlines()) == 10 + 5
    assert repr(tuned).startswith("<Tuned: model: 4 of 5 layers in mixed_float16, ")


@once
def test_bfloat16_holds_what_float16_does_not():
    tuned = tune(model_with_norm(), batches(2), dtype="bfloat16", tolerance=0.1)
    assert set(tuned.policies.values()) == {"mixed_bfloat16"}
    assert tuned.loss_scale is None
    assert tuned.model.layers[-1].compute_dtype == "bfloat16"


@once
def test_layers_go_back_for_the_batches_that_are_kept_aside():
    # Small numbers do not overflow, so that only a batch that is held out tells.
    model, held_out, small = model_with_norm(), batches(1, seed=1), batches(1, size=0.01)
    assert "float32" not in tune(model, small, held_out=batches(1, 0.01)).policies.values()
    tuned = tune(model, small, held_out=held_out)
    assert tuned.policies["norm"] == "float32"
    [norm] = [layer for layer in tuned.layers if layer.path == "norm"]
    assert norm.reason.startswith("held out: ")
    assert all(each.largest <= 0.05 for each in tuned.held_out)


def results(model, x, y, scale):
    """Predictions, loss and the gradients of each Dense, as a loop of one's own has them."""
    with tf.GradientTape() as tape:
        predictions = tf.cast(model(x, training=False), tf.float32)
        loss = tf.reduce_mean((predictions - y) ** 2)
        scaled = loss * scale
    gradients = tape.gradient(scaled, model.trainable_variables)
    flat = [np.ravel(each) / scale for each in gradients]
    of_layers = [np.concatenate(pair) for pair in zip(flat[::2], flat[1::2], strict=True)]
    return [predictions, loss, *of_layers]


@once
def test_the_promise_holds_where_it_is_measured_by_other_means():
    inputs = K.Input([6])
    x = L.Dense(16, "tanh", name="first")(Times(300.0, name="rescaling")(inputs))
    x = L.Dense(16, "tanh", name="second")(Norm(name="norm")(x))
    model = K.Model(inputs, L.Dense(2, name="last")(x))
    model.compile("sgd", "mse")
    small, aside = batches(2, size=0.01), batches(2, size=0.02, seed=1)
    for tolerance in (8e-4, 4e-3):
        tuned = tune(model, small, held_out=aside, tolerance=tolerance)
        for x, y in (*small, *aside):
            mixed, exact = results(tuned.model, x, y, 2.0**15), results(model, x, y, 1.0)
            for value, right in zip(mixed, exact, strict=True):
                assert np.linalg.norm(value - right) <= tolerance * np.linalg.norm(right)
        assert (tolerance > 1e-3) == (tuned.share == 1.0)


@once
def test_no_tolerance_no_16_bits():
    tuned = tune(model_with_norm(), batches(2), tolerance=1e-9)
    # What changes no number may still go: the next layer reads what a preprocessing layer returns
    # unrounded.
    in_16_bits = {layer.path for layer in tuned.layers if layer.is_in_16_bits}
    assert in_16_bits <= {"dropout", "rescaling"}
    assert all(each.largest <= 1e-9 for each in (*tuned.errors, *tuned.held_out))


def nested(shared=True):
    inner = K.Sequential([K.Input([6]), L.Dense(6, name="a"), L.Dense(6, name="b")], name="inner")
    inputs = K.Input([6])
    x = inner(inputs)
    x = L.LayerNormalization(name="norm")(inner(x) if shared else x)
    x = L.Bidirectional(L.GRU(3), name="around")(L.Reshape([3, 2], name="reshape")(x))
    model = K.Model(inputs, L.Dense(2, name="head")(x), name="outer")
    model.compile("sgd", "mse")
    return model


@once
def test_nested_models_shared_layers_and_patterns():
    model = nested()
    tuned = tune(model, batches(2), leave_out=["inner/b", "*norm*"])
    found = dtypes(tuned.model)
    units = {layer.path: layer for layer in tuned.layers}
    assert set(units) == {"inner/a", "inner/b", "norm", "reshape", "around", "head"}
    for path, policy in tuned.policies.items():
        inside = [dtype for each, dtype in found.items() if each == path]
        inside += [dtype for each, dtype in found.items() if path == "around" and path in each]
        assert set(inside) <= {"float32" if policy == "float32" else "float16"}, path
    assert {path for path, unit in units.items() if not unit.is_in_16_bits} == {"inner/b", "norm"}
    assert units["norm"].reason == "left out, or not included"
    # It is called twice.
    assert units["inner/a"].multiplications == 2 * 8 * 6 * 6
    assert units["around"].multiplications > 0
    tuned = tune(model, batches(2), include=["inner", "head"], leave_out="a")
    assert [layer.path for layer in tuned.layers if layer.is_in_16_bits] == ["inner/b", "head"]


class Subclassed(K.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(2)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return {"name": self.name}


def test_what_cannot_be_tuned_says_why():
    model, few = model_with_norm(), batches(2)
    subclassed = Subclassed(name="subclassed")
    subclassed(few[0][0])
    for arguments, error, message in (
        ((tf.Module(), few), TypeError, "Expected a model of `tf.keras`"),
        ((model, tuple(part[:1] for part in few[0])), ValueError, "one with two samples"),
        ((model, [(x,) for x, _ in few]), ValueError, "with labels, and a loss"),
        (
            (model, [(x * np.nan, y) for x, y in few]),
            ValueError,
            "finite loss in float32. Received one whose loss is nan: keras_mp.numerics.check",
        ),
        ((subclassed, few), ValueError, "are created by the layer or model that contains them"),
    ):
        with pytest.raises(error, match=message):
            tune(*arguments)
    for options, message in (
        ({"dtype": "float8"}, "Received: dtype='float8'"),
        ({"tolerance": 0}, "`tolerance` must be finite and above 0"),
        ({"include": "nothing*"}, r"patterns of them, for `include`.*'norm'.*'nothing\*'"),
        ({"leave_out": "*"}, "at least one layer that may compute in 16 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            tune(model, few, **options)
    with pytest.raises(ValueError, match="a JSON object that maps paths"):
        keras_mp.convert(model, '{"policies": {"norm": 3}}')


class Stubborn(L.Layer):
    def call(self, x):
        if x.dtype != tf.float32:
            raise TypeError(f"Expected float32. Received: {x.dtype}")
        return x


@once
def test_a_layer_that_does_not_run_in_16_bits():
    model = K.Sequential([K.Input([6]), Stubborn(name="stubborn"), L.Dense(2, name="dense")])
    with pytest.raises(ValueError, match="does not run in mixed_float16. Name the layers"):
        tune(model, batches(2), loss="mse")
    tuned = tune(model, batches(2), loss="mse", leave_out="stubborn")
    assert tuned.policies == {"": "mixed_float16", "stubborn": "float32", "dense": "mixed_float16"}


class Stopping(L.Layer):
    def call(self, x):
        return x if x.dtype == tf.float32 else tf.stop_gradient(x)


@once
def test_a_gradient_that_is_missing_in_16_bits_is_infinitely_far_off():
    model = sequential(L.Dense(2, name="dense"), Stopping(name="stopping"), shape=[6])
    [_, stopping] = tune(model, batches(2)).layers
    assert (stopping.policy, stopping.reason) == ("float32", "gradients of dense not finite")


@once
def test_the_example_of_the_page():
    page = pathlib.Path(__file__).parents[2] / "docs" / "numerics.md"
    section = page.read_text().partition("## A policy for each layer")[2]
    [program] = re.findall(r"```python\n([^`]*tune\([^`]*)```", section)
    names = {"keras_mp": keras_mp, "model": model_with_norm(), "batches": batches(2)}
    exec(program, names)
    assert dtypes(names["mixed"]) == dtypes(names["tuned"].model)


@once
def test_the_command(tmp_path, capsys, monkeypatch):
    model = model_with_norm()
    x, y = (np.concatenate(parts) for parts in zip(*batches()))
    files = saved(tmp_path, model, x=x, y=y)
    outputs = [str(tmp_path / name) for name in ("mixed.keras", "policies.json")]
    options = ["--batch-size", "8", "--output", outputs[0], "--json", outputs[1], "--all-rows"]
    monkeypatch.setattr(commands.text_tables, "MOST", 1)
    assert main(["tune", *files, *options, "--tolerance", "0.1", "--leave-out", "last"]) == 0
    printed = capsys.readouterr().out
    assert "to_text(rows=None)" not in printed
    assert "batches tuned on: 3, worst" in printed
    assert "batches held out: 1, mean" in printed
    wanted = {"rescaling": "float16", "norm": "float32", "first": "float16", "last": "float32"}
    assert wanted.items() <= dtypes(K.models.load_model(outputs[0])).items()
    assert wanted.items() <= dtypes(keras_mp.convert(model, outputs[1])).items()
    assert main(["check", *files, "--policy", outputs[1]]) in (0, 1)
    assert main(["tune", *files, "--batch-size", "8", "--include", "norm"]) == 1
    assert "to_text(rows=None)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["tune", *files, "--batch-size", "0"])
    assert "must be at least 1" in capsys.readouterr().err

"""What a batch loses at several scales is what it loses when a model really runs at them."""

import json

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import once
from tests.numerics.tools import what_if

K = tf.keras


def model_with_dropout(policy="mixed_float16"):
    with keras_mp.policy_scope(policy):
        return layers_with_dropout()


def layers_with_dropout():
    inputs = K.Input([8])
    x = K.layers.Dense(8, name="dense")(inputs)
    x = K.layers.BatchNormalization(name="normalization")(K.layers.Dropout(0.5, name="dropout")(x))
    return K.Model(inputs, K.layers.Dense(1, dtype="float32", name="head")(x))


def batch():
    rng = np.random.default_rng(0)
    return rng.normal(size=[16, 8]).astype(np.float32), rng.normal(size=[16, 1]).astype(np.float32)


def really_run(model, x, y, scale):
    """Gradients of a model, scaled, as a loop of one's own has them."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.cast(model(x), tf.float32) - y) ** 2) * scale
    return [tf.cast(g, tf.float32).numpy() for g in tape.gradient(loss, model.trainable_variables)]


def test_its_numbers_are_those_of_really_running():
    names = [f"dense_{place}" for place in range(3)]
    model = K.Sequential([K.Input([8]), *(K.layers.Dense(8, name=name) for name in names)])
    # Gradients become smaller and smaller.
    model.set_weights([weight / 1024 for weight in model.get_weights()])
    x, y = batch()
    mse = lambda y, predictions: tf.reduce_mean((tf.cast(predictions, tf.float32) - y) ** 2)  # noqa: E731
    scales = [1.0, 2.0**12, 2.0**30]
    result = what_if(model, x, y, loss=mse, scales=scales)
    expected = really_run(model, x, y, 1.0)
    mixed = keras_mp.convert(model, "mixed_float16")
    paths = [f"{name}/{which}" for name in names for which in ("kernel", "bias")]
    for scale in scales:
        for path, gradient, right in zip(paths, really_run(mixed, x, y, scale), expected):
            lost, counts = result[scale]["gradient", path], right != 0
            assert lost.values == counts.sum()
            assert lost.zero == (counts & (gradient == 0)).sum()
            assert lost.infinite == (~np.isfinite(gradient)).sum()
            is_small = (gradient != 0) & (np.abs(gradient) < 2.0**-14)
            assert lost.subnormal == (counts & is_small).sum()
            if np.isfinite(gradient).all():
                error = np.linalg.norm(gradient / scale - right) / np.linalg.norm(right)
                np.testing.assert_allclose(lost.error, error, rtol=1e-3)
    assert result[1.0]["gradient", "dense_0/kernel"].zero > 0
    assert result[2.0**30]["gradient", "dense_2/kernel"].infinite > 0
    assert [scale for scale in scales if not result.losses(scale)] == [2.0**12]
    # What is known of float32 says the same.
    assert result.reference["gradient", "dense_0/kernel"].window("float16").low > 0


def test_a_compiled_model_with_random_numbers_is_replayed_and_left_alone():
    x, y = batch()
    model = model_with_dropout()
    model.compile("sgd", "mse")
    before = [w.copy() for w in model.get_weights()]
    for each in ("float16", "bfloat16"):
        result = what_if(model, x, y, dtype=each, scales=[2.0**5])
        found = result[2.0**5]
        assert found == what_if(model, x, y, dtype=each, scales=[2.0**5])[2.0**5]
        # Another mask of dropout would change half of the values.
        assert found["output", "dropout"].error < 0.02
        assert found["output", "dropout"].infinite == 0
        assert found["gradient", "head/kernel"].error < 0.1
        assert result.computed_in["gradient", "dense/kernel"] == each
        assert result.computed_in["output", "dense"] == each
        assert result.computed_in["output", "head"] == "float32"
    for was, weight in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(was, weight)


@once
def test_tables_and_files(tmp_path):
    x, y = batch()
    model = model_with_dropout()
    model.compile("sgd", "mse")
    result = what_if(model, x, y, scales=[1.0, 2.0**5])
    for text in (str(result), result.to_text(rows=None)):
        first, head, *rows = text.splitlines()
        assert first.startswith("float16: no gradient loses more than 0.1 % at ")
        assert head.split() == ["gradient,", "float16", "2^0", "2^5"]
        assert len([row for row in rows if "/" in row]) == 6
    assert "more rows" in result.to_text(rows=2)
    result.to_json(tmp_path / "a.json")
    runs = json.loads((tmp_path / "a.json").read_text())
    runs = runs["runs"]
    assert [run["scale"] for run in runs] == [1, 2**5]
    assert len(runs[0]["rows"]) == len(result[1.0])


@once
def test_layers_that_were_kept_in_float32_stay_there():
    x, y = batch()
    runs = {"loss": "mse", "scales": [1.0]}
    in_float32 = keras_mp.convert(model_with_dropout(), "float32")
    kept = dict.fromkeys(("dense", "dropout", "normalization"), "float32")
    # Outputs of a model are float32 in any case.
    for model, of_dense, of_head in (
        (in_float32, "float16", "float16"),
        (keras_mp.convert(model_with_dropout(), {"dense": "float32"}), "float32", "float32"),
        (keras_mp.convert(model_with_dropout(), kept), "float32", "float32"),
    ):
        result = what_if(model, x, y, **runs)
        found = result.computed_in
        assert found["gradient", "dense/kernel"] == found["output", "dense"] == of_dense
        assert found["gradient", "head/kernel"] == of_head
        assert found["output", "head"] == "float32"
        says_so = str(result).startswith("float16: nothing is computed in it, and no gradient")
        assert says_so == ("float16" not in found.values())
    assert says_so
    assert str(keras_mp.numerics.exponents.advise.advise(result)) == "Nothing is lost."


@once
def test_the_loss_scale_is_that_of_training():
    x, y = batch()
    model = model_with_dropout()
    runs = {"loss": "mse", "scales": [1.0]}
    assert what_if(model, x, y, **runs).loss_scale == 2.0**15
    model.compile(keras_mp.LossScaleOptimizer("sgd", 1024.0))
    assert what_if(model, x, y, **runs).loss_scale == 1024.0


@once
def test_what_cannot_be_run_is_refused():
    model = model_with_dropout()
    with pytest.raises(ValueError, match="power of two"):
        what_if(model, *batch(), scales=[3])
    x, y = batch()
    mse = K.losses.MeanSquaredError()
    with pytest.raises(ValueError, match=r"values in it. Received: x of the shape \(0,"):
        what_if(model, x[:0], y[:0], loss=mse)
    with pytest.raises(
        ValueError, match="nan in float32.* infinite values or NaN. Received: x with 128 of 128 not"
    ):
        what_if(model, x * np.nan, y, loss=mse)
    with pytest.raises(
        ValueError, match="inf in float32.* infinite values or NaN. Received: y with 16 of 16 not"
    ):
        what_if(model, x, y + np.inf, loss=mse)
    with pytest.raises(ValueError, match="pass a batch with another loss"):
        what_if(model, x, y, loss=lambda y, p: tf.reduce_mean(p) * np.inf)


@once
def test_a_loss_by_name():
    model, (x, y) = model_with_dropout(), batch()
    named = what_if(model, x, y, loss="mse", scales=[1.0])
    model.compile("sgd", "mse")
    compiled = what_if(model, x, y, scales=[1.0])
    assert named[1.0] == compiled[1.0]


def test_a_layer_for_raw_data_loses_what_its_result_loses_when_it_is_rounded():
    """It computes in float32, which the observers of its `call` would see."""
    inputs = K.Input([4])
    with keras_mp.policy_scope("mixed_float16"):
        x = K.layers.Rescaling(1e6, name="large")(inputs)
        x = K.layers.Dense(4, name="dense", dtype="float32")(x)
        x = K.layers.Flatten(name="flat")(x)
        model = K.Model(inputs, K.layers.Dense(1, name="head", dtype="float32")(x))
    mse = lambda y, predictions: tf.reduce_mean((predictions - y) ** 2)  # noqa: E731
    x, y = tf.ones([2, 4]), tf.ones([2, 1])
    result = what_if(model, x, y, loss=mse, scales=[1.0])
    assert result[1.0]["output", "large"].infinite == 8
    result = what_if(model, x / 1e6, y, loss=mse, scales=[2.0**30])
    assert result.computed_in["output gradient", "flat"] == "float16"
    assert result[2.0**30]["output gradient", "flat"].infinite == 8

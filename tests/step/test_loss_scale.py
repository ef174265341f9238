import copy
import math
import pickle
import re

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import loss_scale as loss_scale_lib
from tests.common import mirrored


def run(scale, verdicts):
    """Moves a scale, by a good step for each `+` and a bad one for each `-`.

    Returns the scales, and how many good and bad steps are counted, after each.
    """
    scales, good, bad = [], "", ""
    for verdict in verdicts:
        scale.assign(scale.next_state(scale(), tf.constant(verdict == "+")))
        scales.append(float(scale))
        good += str(int(scale.num_good_steps))
        bad += str(int(scale.num_bad_steps))
    return scales, good, bad


PERIOD, EACH = {"increment_period": 3}, {"increment_period": 1}


@pytest.mark.parametrize(
    ("arguments", "verdicts", "scales", "good", "bad"),
    [
        (PERIOD, "+++++++", [8, 8, 16, 16, 16, 32, 32], "1201201", "0000000"),
        ({**EACH, "multiplier": 4}, "+++", [32, 128, 512], "000", "000"),
        (PERIOD, "++-+++", [8, 8, 4, 4, 4, 8], "120120", "001000"),
        ({"backoff_multiplier": 0.25}, "--", [2, 1], "00", "12"),
        ({"multiplier": 4}, "-", [2], "0", "1"),
        ({"hysteresis": 2}, "-+---+-", [8, 8, 8, 4, 2, 2, 2], "0100010", "1012301"),
        ({"increment_period": 2, "hysteresis": 5}, "+-+", [8, 8, 8], "101", "010"),
        ({}, "-----", [4, 2, 1, 1, 1], "00000", "12345"),
        ({"min_loss_scale": 3}, "---", [4, 3, 3], "000", "123"),
        ({**EACH, "max_loss_scale": 20}, "+++", [16, 20, 20], "000", "000"),
        ({**EACH, "multiplier": 2.0**123}, "+++", [2.0**126] * 3, "000", "000"),
    ],
)
def test_the_schedule(arguments, verdicts, scales, good, bad):
    assert run(keras_mp.DynamicLossScale(8, **arguments), verdicts) == (scales, good, bad)


def test_a_period_lowered_below_the_counter_grows_at_once():
    scale = keras_mp.DynamicLossScale(8, increment_period=10)
    scale.num_good_steps.assign(1500)
    assert run(scale, "++") == ([16, 16], "01", "00")


def test_state_is_assignable_and_not_replaceable():
    scale = keras_mp.DynamicLossScale(8)
    scale.loss_scale.assign(256.0)
    assert float(scale()) == 256
    for name in ("loss_scale", "num_good_steps", "initial_loss_scale", "multiplier", "hysteresis"):
        with pytest.raises(AttributeError):
            setattr(scale, name, 3)


ARGUMENTS = {
    **{"initial_loss_scale": 64, "increment_period": 10, "multiplier": 4, "hysteresis": 3},
    **{"backoff_multiplier": 0.25, "min_loss_scale": 2, "max_loss_scale": 99, "tolerance": 0.25},
}


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        *((keras_mp.FixedLossScale, {"loss_scale_value": value}) for value in (128, 0.25)),
        *((keras_mp.DynamicLossScale, each) for each in ({"initial_loss_scale": 0.25}, ARGUMENTS)),
        (keras_mp.DynamicLossScale, {}),
    ],
)
def test_config_round_trip(cls, arguments):
    scale = cls(**arguments)
    again = cls.from_config(scale.get_config())
    assert again.get_config() == scale.get_config()
    assert scale.get_config().items() >= arguments.items()
    assert {name: getattr(again, name) for name in arguments} == arguments
    assert repr(again) == repr(scale)
    serialized = loss_scale_lib.serialize(scale)
    assert loss_scale_lib.serialize(loss_scale_lib.get(serialized)) == serialized
    if not arguments:
        assert serialized == loss_scale_lib.DEFAULT_DYNAMIC


def test_a_checkpoint_has_the_state_and_the_keys_of_keras(tmp_path):
    scale = keras_mp.DynamicLossScale(64, increment_period=5, min_loss_scale=16)
    run(scale, "--+-")
    path = tf.train.Checkpoint(scale=scale).save(str(tmp_path / "ckpt"))
    keys = {key.split("/")[1] for key, _ in tf.train.list_variables(path) if "scale/" in key}
    assert keys == {"current_loss_scale", "good_steps", "bad_steps"}  # and no history
    again = keras_mp.DynamicLossScale(64, increment_period=5, min_loss_scale=16)
    tf.train.Checkpoint(scale=again).restore(path).assert_consumed()
    assert (float(again), int(again.num_bad_steps)) == (16, 1)
    assert run(again, "-") == ([16], "0", "2")


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copy_has_its_own_state(copied_by):
    scale = keras_mp.DynamicLossScale(64, increment_period=7)
    run(scale, "+--")
    copied = copied_by(scale)
    assert (float(copied), int(copied.num_bad_steps.numpy())) == (16, 2)
    copied.loss_scale.assign(1.0)
    assert float(scale) == 16
    assert copied.increment_period == 7


def test_made_inside_a_function_that_is_traced():
    scales = []

    @tf.function
    def trace():
        if not scales:
            scales.append(keras_mp.DynamicLossScale(4))
        return scales[0]()

    assert float(trace()) == 4


@pytest.mark.parametrize("make", [keras_mp.FixedLossScale, keras_mp.DynamicLossScale])
def test_stands_for_its_tensor(make):
    scale = make(8)
    assert float(scale) == 8
    assert scale.numpy() == 8
    assert float(tf.convert_to_tensor(scale)) == 8
    assert tf.cast(scale, tf.float64).dtype == tf.float64
    loss = tf.constant([0.5, 1.0])
    np.testing.assert_array_equal(loss * scale, [4, 8])
    np.testing.assert_array_equal(scale * loss, [4, 8])
    np.testing.assert_array_equal(loss / scale, [1 / 16, 1 / 8])
    assert float(2.0 * scale) == 16
    assert float(1.0 / scale) == 0.125
    assert float(scale**2 - 1) == 63
    assert [float(scale // 3), float(scale % 3)] == [2, 2]
    assert [float(20 // scale), float(20 % scale)] == [2, 4]
    assert float(-scale) == -8
    assert bool(scale > 7)
    assert bool(scale <= 8)
    assert int(scale) == float(abs(scale)) == 8
    assert f"{scale:.1f}" == "8.0"
    assert scale.dtype == tf.float32
    assert scale.shape == ()
    np.testing.assert_array_equal(np.asarray(scale), np.float32(8))
    np.testing.assert_array_equal(np.array([1.0, 2.0]) * scale, [8, 16])
    np.testing.assert_allclose(scale, 8)
    assert np.sqrt(scale) == np.sqrt(8).astype("float32")


def test_follows_the_dtype_of_what_it_multiplies():
    for dtype in (tf.float16, tf.bfloat16, tf.float64):
        product = tf.constant(0.5, dtype) * keras_mp.FixedLossScale(8)
        assert product.dtype == dtype
        assert float(product) == 4
        assert (keras_mp.FixedLossScale(8) * tf.constant(0.5, dtype)).dtype == dtype


def test_get_converts_what_stands_for_a_loss_scale():
    assert loss_scale_lib.get(None) is None
    fixed = keras_mp.FixedLossScale(2)
    assert loss_scale_lib.get(fixed) is fixed
    assert isinstance(loss_scale_lib.get("dynamic"), keras_mp.DynamicLossScale)
    for number in (1, 64, 64.0, 0.25, np.float32(0.25), np.int64(64)):
        scale = loss_scale_lib.get(number)
        assert isinstance(scale, keras_mp.FixedLossScale)
        assert scale.loss_scale_value == float(number)


@pytest.mark.parametrize(
    "scale",
    [
        keras_mp.FixedLossScale(32),
        keras_mp.DynamicLossScale(),
        keras_mp.DynamicLossScale(64, 9, 4.0),
    ],
    ids=repr,
)
def test_the_old_objects_are_made_and_taken_back(scale):
    old = scale.to_compat_v1()
    assert type(old) is getattr(tf.compat.v1.mixed_precision, type(scale).__name__)
    assert float(old()) == float(scale)
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="was converted"):
        back = loss_scale_lib.get(old)
    assert loss_scale_lib.serialize(back) == loss_scale_lib.serialize(scale)


def test_what_the_old_objects_cannot_have_is_an_error():
    for name in ARGUMENTS.keys() - {"initial_loss_scale", "increment_period", "multiplier"}:
        scale = keras_mp.DynamicLossScale(64, **{name: ARGUMENTS[name]})
        with pytest.raises(ValueError, match=f"cannot move like this one.*{name}"):
            scale.to_compat_v1()
    for scale in (keras_mp.FixedLossScale(0.25), keras_mp.DynamicLossScale(0.25)):
        with pytest.raises(ValueError, match=r"at least 1. Received: .*=0.25"):
            scale.to_compat_v1()
    manager = keras_mp.compat.v1.FixedLossScaleManager(8)
    with pytest.raises(ValueError, match="have a counterpart"):
        keras_mp.compat.v1.ManagedLossScale(manager).to_compat_v1()


UNKNOWN = {"class_name": "Nope", "config": {}}
BAD = [1e-39, 0, -1, math.nan, math.inf, 1e39, 10**400, "fixed", UNKNOWN]


@pytest.mark.parametrize(
    ("error", "value"),
    [*((ValueError, bad) for bad in BAD), *((TypeError, bad) for bad in (True, [1]))],
    ids=repr,
)
def test_get_refuses_and_shows_the_value(error, value):
    with pytest.raises(error, match=re.escape(repr(value))):
        loss_scale_lib.get(value)


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        *((ValueError, "initial_loss_scale", bad) for bad in (2.0**-25, math.nan, math.inf)),
        *((TypeError, "initial_loss_scale", bad) for bad in ("8", True)),
        *((ValueError, "increment_period", bad) for bad in (0, 2**63)),
        *((TypeError, "increment_period", bad) for bad in (2.5, True)),
        *((ValueError, "multiplier", bad) for bad in (1, 0.5, math.inf)),
        *((ValueError, "backoff_multiplier", bad) for bad in (1.0, 0.0)),
        (ValueError, "hysteresis", 0),
        *((ValueError, "min_loss_scale", bad) for bad in (1e-60, 0, 2.0**16)),
        *((ValueError, "max_loss_scale", bad) for bad in (2.0**14, math.inf)),
        *((ValueError, "tolerance", bad) for bad in (-0.1, 1, 1.5, math.nan)),
        *((TypeError, "tolerance", bad) for bad in ("0.1", None)),
    ],
    ids=repr,
)
def test_dynamic_refuses_and_shows_the_value(error, name, value):
    with pytest.raises(error, match=r"Received: .*="):
        keras_mp.DynamicLossScale(**{name: value})


def test_classes_of_one_name_are_told_apart():
    ours = keras_mp.DynamicLossScale

    class DynamicLossScale(ours):
        def __init__(self, start):
            super().__init__(start)

        def get_config(self):
            return {"start": self.initial_loss_scale}

    theirs = DynamicLossScale(64)
    policy = keras_mp.Policy("mixed_float16")
    assert type(policy.loss_scale) is type(loss_scale_lib.get("dynamic")) is ours
    assert type(loss_scale_lib.get(loss_scale_lib.DEFAULT_DYNAMIC)) is ours
    again = loss_scale_lib.get(loss_scale_lib.serialize(theirs))
    assert type(again) is DynamicLossScale
    assert float(again) == 64
    old = tf.compat.v1.mixed_precision.DynamicLossScale(32)
    with pytest.warns(keras_mp.MixedPrecisionWarning):
        assert type(loss_scale_lib.get(old)) is ours


def test_a_class_of_a_file_is_found_in_another_module():
    class Moved(keras_mp.FixedLossScale):
        pass

    config = {"loss_scale_value": 8.0}
    for name in ("Moved", "elsewhere.Moved"):
        again = loss_scale_lib.get({"class_name": name, "config": config})
        assert type(again) is Moved
    copied = type("Moved", (keras_mp.FixedLossScale,), {"__module__": "elsewhere"})
    again = loss_scale_lib.get({"class_name": "elsewhere.Moved", "config": config})
    assert type(again) is copied
    with pytest.raises(ValueError, match="Unknown loss scale class"):
        loss_scale_lib.get({"class_name": "Moved", "config": config})


def test_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        keras_mp.LossScale()


def test_text_shows_the_current_value():
    scale = keras_mp.DynamicLossScale(64, increment_period=3)
    run(scale, "-")
    assert f"{scale}" == str(np.float32(32))
    assert f"{scale:.2e}" == "3.20e+01"
    assert repr(scale).startswith("DynamicLossScale(loss_scale=32.0, initial_loss_scale=64.0, ")
    fixed = keras_mp.FixedLossScale(128)
    assert (f"{fixed}", repr(fixed)) == ("128.0", "FixedLossScale(loss_scale_value=128.0)")
    texts = []

    def traced():
        texts.extend([repr(scale), f"{scale}"])
        return scale() * 2

    # In a graph they say what does not change.
    for jit_compile in (False, True):
        assert float(tf.function(traced, jit_compile=jit_compile)()) == 64
    with tf.Graph().as_default():
        texts.append(repr(scale))
    assert len(set(texts)) == 1
    assert texts[0].startswith("DynamicLossScale(initial_loss_scale=64.0, ")


def test_text_of_replicas():
    strategy = mirrored(2)
    with strategy.scope():
        scale = keras_mp.DynamicLossScale(64)
        scale.loss_scale.assign(8)
        assert f"{scale}" == "8.0"
    texts = []
    strategy.run(lambda: texts.append(f"{scale}"))
    assert texts == ["8.0"] * 2


class Halving(keras_mp.LossScale):
    def __call__(self):
        return tf.constant(0.5)

    def get_config(self):
        return {"by": 2}


class Unreadable(keras_mp.LossScale):
    def __call__(self):
        raise RuntimeError("not now")

    def get_config(self):
        return {}


def test_text_of_loss_scales_of_one_s_own():
    assert repr(Unreadable()) == f"{Unreadable()}" == "Unreadable()"
    assert repr(Halving()) == "Halving(loss_scale=0.5, by=2)"
    assert f"{Halving()}" == "0.5"

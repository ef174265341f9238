"""Where the time of a step goes, and what is proposed of what was tried."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import hardware
from tests.common import once, value
from tests.numerics.tools import StepTimes, class_of, dense, sequential, step_times

L = tf.keras.layers
X, Y = np.ones([4, 8], "float32"), np.ones([4, 3], "float32")

POLICIES = "mixed_bfloat16", "float32"
POLICY = 'keras_mp.set_global_policy("{}"), before the model is made'
XLA = "model.compile(..., jit_compile=True)"
HEAD = 'dtype=keras_mp.Policy("mixed_bfloat16", output_dtype="float32"), of layer \'head\''


@pytest.fixture(autouse=True)
def _best_policy(monkeypatch):
    monkeypatch.setattr(hardware, "best_policy", lambda: "mixed_bfloat16")


def model_of(policy, **how):
    layers = dense(16), dense(3, name="head", dtype="float32")
    return sequential(*layers, policy=policy, **how)


def test_events_of_the_profiler_have_classes():
    expected = {
        "model/dense/MatMul:_MklNativeFusedMatMul": "products",
        "model/conv2d/Conv2D:_FusedConv2D": "products",
        "gradient_tape/conv2d/Conv2D/Conv2DBackpropFilter:Conv2DBackpropFilter": "products",
        "model/dense/Cast:Cast": "casts",
        "model/gelu/Erf:Erf": "elementwise",
        "gradient_tape/TanhGrad:TanhGrad": "elementwise",
        "gradient_tape/AddN_3:AddN": "reductions",
        "model/bn/FusedBatchNormV3:_MklNativeFusedBatchNormV3": "reductions",
        "gradient_tape/FusedBatchNormGradV3:FusedBatchNormGradV3": "reductions",
        "while/TensorListPushBack:TensorListPushBack": "loops",
        "model/reshape:Reshape": "rest",
        "model/pool:MaxPool": "rest",
        "update_of_weights/adam/Mul_3:Mul": "update",
        "CpuExecutable::ExecuteAsyncOnStream": "compiled",
        "ExecutorState::Process": None,
        "ThunkExecutor": None,
    }
    assert {event: class_of(event) for event in expected} == expected


@once
@pytest.mark.parametrize(
    ("policy", "optimizer", "expected"),
    [
        (
            "mixed_bfloat16",
            lambda: keras_mp.OptimizerWrapper(tf.keras.optimizers.SGD()),
            [POLICY.format("float32"), HEAD, XLA],
        ),
        (
            "mixed_float16",
            "sgd",
            [*map(POLICY.format, POLICIES), HEAD.replace("bfloat16", "float16"), XLA],
        ),
    ],
)
def test_what_is_tried(policy, optimizer, expected):
    model = model_of(policy, optimizer=optimizer if optimizer == "sgd" else optimizer())
    before = [value(each) for each in model.weights]
    profiled = keras_mp.numerics.profile(model, (X, Y), steps=1)
    dtype = policy.removeprefix("mixed_")
    if keras_mp.kernels.slow.is_slow("MatMul", tf.as_dtype(dtype)):
        dtype = "float32"  # as keras_mp computes it here
    assert dtype in profiled.census.work()
    assert re.fullmatch("<Profile: A step of 'sequential.*:>", repr(profiled))  # in one line
    assert json.loads(profiled.to_json())["times"]["seconds"] > 0
    found = profiled.times
    assert list(found.tried) == expected
    assert all(isinstance(seconds, float) for seconds in found.tried.values())
    for old, weight in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value(weight), old)
    assert int(value(model.optimizer.iterations)) == 0
    assert found.seconds > 0
    assert found.classes["products"] > 0
    assert found.classes["casts"] > 0
    assert max(found.classes["update"], found.classes["compiled"]) > 0


@once
def test_what_saves_most_is_proposed(monkeypatch):
    def medians(taken):
        assert {len(each) for each in taken.values()} == {5}
        return {"": 1.0, POLICY.format("float32"): 2.0, HEAD: 0.98, XLA: 0.7}

    monkeypatch.setattr("keras_mp.hardware.turns.medians", medians)
    found = step_times(model_of("mixed_bfloat16"), (X, Y), steps=5)
    assert [change.what for change in found.changes] == [XLA]
    assert found.changes[0].seconds == pytest.approx(0.3)
    assert "300 ms: model.compile(..., jit_compile=True)" in str(found)
    assert "float32" not in str(found).partition("What saves 3% or more")[2]


class NotInFloat32(L.Layer):
    def call(self, x):
        if self.compute_dtype == "bfloat16":
            raise RuntimeError("no such kernel here")
        return x


@once
def test_what_cannot_be_tried_is_said_and_the_rest_is_tried():
    found = step_times(sequential(dense(3), NotInFloat32), (X, Y), steps=1)
    failed = found.tried[POLICY.format("mixed_bfloat16")]
    assert "no such kernel here" in failed
    assert "Could not be tried: keras_mp.set_global_policy" in str(found)
    assert isinstance(found.tried[XLA], float)
    assert len(found.tried) == 2


def test_bad_arguments():
    model = model_of("float32")
    with pytest.raises(ValueError, match="Received: steps=0"):
        step_times(model, (X, Y), steps=0)
    with pytest.raises(ValueError, match="at least 0 .*Received: steps=-1"):
        keras_mp.numerics.profile(model, (X, Y), steps=-1)
    assert keras_mp.numerics.profile(model, (X, Y), steps=0).times is None
    assert keras_mp.numerics.profile(sequential(dense(3), loss=None), (X, Y)).times is None
    assert str(StepTimes("m", 1.0, {}, {}, ())).endswith("copy of the model:\n  nothing")

"""Choosing a Keras, in processes of their own; and the private API that keras_mp leans on."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import keras_api
from tests.common import FAMILIES, IS_KERAS_3, make_optimizer, once


@pytest.fixture(scope="module")
def raised():
    """What programs find in processes of their own: {name: list of messages}."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.keras_api.programs"],
        cwd=pathlib.Path(__file__).parents[2],
        env={
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_USE_LEGACY_KERAS": "0" if IS_KERAS_3 else "1",
        },
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_scope_without_any_policy_does_the_same(raised):
    is_same, *found = raised["a_scope_before_a_policy"]
    assert is_same
    # Beside float32, a weight has all of its digits.
    assert found == [["float32", float(np.float32(1 / 3))]] * 2


def test_bound_to_what_tf_keras_is():
    assert keras_api.ROOT_PACKAGE == tf.keras.Model.__module__.split(".")[0]
    assert keras_api.OTHER_PACKAGE != keras_api.ROOT_PACKAGE


def offered(module):
    """What a module defines, or imports from its parts, by name; functions as they are defined."""
    folder = pathlib.Path(keras_api.__file__).parent
    found = {}
    for node in ast.parse((folder / f"{module}.py").read_text()).body:
        part = getattr(node, "module", None) or ""
        if isinstance(node, ast.ImportFrom) and part.startswith("keras_mp.keras_api."):
            of_part = offered(part.rpartition(".")[2])
            found |= {each.asname or each.name: of_part[each.name] for each in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = getattr(node, "targets", None) or [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return {name: node for name, node in found.items() if not name.startswith("_")}


def parameters(node):
    arguments = node.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


@once
def test_both_modules_offer_what_is_used():
    used = set()
    for path in pathlib.Path(keras_mp.__file__).parent.rglob("*.py"):
        used |= set(re.findall(r"\bkeras_api\.([A-Za-z_]+)", path.read_text()))
    of_both = {"keras", "predictions", *offered("__init__")}  # the first are parts of module names
    ours, theirs = offered("keras3"), offered("keras2")
    assert used <= of_both | (ours.keys() & theirs.keys())
    for name in used - of_both:
        if isinstance(ours[name], ast.FunctionDef):
            assert parameters(ours[name]) == parameters(theirs[name]), name
            assert ast.get_docstring(ours[name]), name


@once
@pytest.mark.parametrize(
    ("program", "messages"),
    [
        ("backend_not_installed", ["set KERAS_BACKEND=tensorflow"]),
        ("no_tf_keras", ["pip install tf_keras=="]),
        (
            "not_supported",
            [
                "Set KERAS_BACKEND=tensorflow",
                "keras_mp needs TensorFlow 2.16 or later",
                'Run `pip install "keras>=3.12"`. Received: keras 3.4.1',
                'Run `pip install "keras>=3.12"`. Received: keras 3.3.0',
            ],
        ),
    ],
)
def test_what_cannot_work_says_what_to_set(raised, program, messages):
    for error, message in zip(raised[program], messages, strict=True):
        assert message in error


def test_a_model_of_the_other_keras(raised):
    [*_, early] = raised["other_keras_before_a_policy"]
    [late] = raised["other_keras_after_a_policy"]
    for error in (early, late):
        assert f"keras_mp works with `tf.keras`, which is {keras_api.ROOT_PACKAGE}" in error
        assert keras_api.switch_hint() in error


def test_what_is_not_mixed_may_be_of_the_other_keras(raised):
    accepted, wrapper, inner, _ = raised["other_keras_before_a_policy"]
    assert accepted == "compiled"
    assert wrapper.startswith("keras_mp works with `tf.keras`")
    assert inner.startswith("Expected an optimizer of `tf.keras`")
    assert keras_api.switch_hint() in wrapper
    assert keras_api.switch_hint() in inner


def test_compile_owner_defines_compile():
    assert "compile" in vars(keras_api.COMPILE_OWNER)
    assert issubclass(tf.keras.Model, keras_api.COMPILE_OWNER)


def test_flatten_layers_goes_all_the_way_down():
    inner = tf.keras.Sequential([tf.keras.layers.Dense(1, name="deep")])
    names = [layer.name for layer in keras_api.flatten_layers(tf.keras.Sequential([inner]))]
    assert "deep" in names


@pytest.mark.parametrize("name", FAMILIES)
def test_built_variables(name):
    variables = [tf.Variable(1.0)]
    adapter = keras_api.optimizer_adapter(make_optimizer(name))
    with pytest.raises(ValueError, match="Pass the variables together with the gradients"):
        adapter.built_variables()
    adapter.build(variables)
    if IS_KERAS_3:
        assert adapter.built_variables()[0] is variables[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_own_aggregation_is_recognized(name):
    optimizer = make_optimizer(name)
    assert keras_api.optimizer_adapter(optimizer).custom_aggregation() is None
    if IS_KERAS_3:
        return

    method = "_aggregate_gradients" if name.startswith("legacy") else "aggregate_gradients"
    own = type("Own", (type(optimizer),), {method: lambda self, pairs: pairs})
    aggregation = keras_api.optimizer_adapter(own(0.1)).custom_aggregation()
    assert aggregation([(1, 2)]) == [(1, 2)]


def test_autocast_scope_is_the_one_of_keras():
    layer = tf.keras.layers.Dense(1, dtype="mixed_float16")
    layer.build([None, 1])
    assert keras_api.autocast_dtype() is None
    with keras_api.autocast_scope(tf.float16):
        assert keras_api.autocast_dtype() == tf.float16
        assert tf.convert_to_tensor(layer.kernel).dtype == tf.float16
        with keras_api.autocast_scope(None):
            assert keras_api.autocast_dtype() is None
            assert tf.convert_to_tensor(layer.kernel).dtype == tf.float32
            wide = tf.keras.layers.Dense(1, dtype="float64")
            wide.build([None, 1])
            assert wide.kernel.dtype == tf.float64


class Weights(keras_api.BaseLayer):
    def call(self, x):
        return x


def test_base_layer_casts_no_inputs_and_makes_variables_that_cast_themselves():
    layer = Weights(dtype="mixed_float16")
    weights = [layer.add_weight(shape=(2,), autocast=autocast) for autocast in (True, False)]
    assert layer(tf.ones([2])).dtype == tf.float32
    assert layer.weights[0] is weights[0]
    (inner,) = keras_api.autocast_variables(weights)
    assert isinstance(inner, keras_mp.AutoCastVariable)
    inner.assign([3.0, 4.0])
    assert weights[0].numpy().tolist() == [3, 4]


def test_arguments_of_a_loss_are_all_there():
    arguments = keras_api.arguments_of_loss(tf.keras.losses.Huber(delta=2.0, reduction="sum"))
    dtype = {"dtype": "float32"} if IS_KERAS_3 else {}
    assert arguments == {"delta": 2.0, "reduction": "sum", "name": "huber_loss", **dtype}


def test_every_built_in_loss_wraps_a_function():
    assert "fn" in vars(keras_api.LossFunctionWrapper(len))
    assert keras_api.LossFunctionWrapper.__mro__[1] is tf.keras.losses.Loss


def test_predictions_are_widened_by_the_containers_of_keras():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    keras_api.widen_predictions(model)
    names = ("_compile_metrics",) if IS_KERAS_3 else ("compiled_loss", "compiled_metrics")
    for name in names:
        container = getattr(model, name)
        assert type(container).__name__.startswith("_Wide")
        assert type(container).__mro__[1].__module__.endswith("compile_utils")


def test_is_symbolic():
    asked = []

    class Asks(tf.keras.layers.Layer):
        def call(self, x):
            asked.append(keras_api.is_symbolic())
            return x

    layer = Asks()
    layer(tf.keras.Input([1]))
    layer(tf.ones([1, 1]))
    assert asked == [IS_KERAS_3, False]

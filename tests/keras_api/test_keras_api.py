"""Choosing a Keras, in processes of their own; and the private API that keras_mp leans on."""

import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest
import tensorflow as tf

import keras_mp
from keras_mp import keras_api
from keras_mp.keras_api import interface
from tests.common import FAMILIES, IS_KERAS_3, make_optimizer

OTHER = {"TF_USE_LEGACY_KERAS": "1" if IS_KERAS_3 else "0"}


def python(code, **environment):
    """Runs code in a new process; returns what it printed, on both streams."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return run.stdout


HIDE_TF_KERAS = """
import sys
sys.modules["tf_keras"] = None
import keras_mp
"""

# One process for what only looks different: it takes long to start. No other backend is installed
# for the tests, and keras_mp sees no more of one than its name.
NOT_SUPPORTED = """
import sys
from unittest import mock
import keras
import tensorflow as tf

private = {"keras.src.backend.common.symbolic_scope": None}
for patch in (
    mock.patch.object(tf.keras.backend, "backend", lambda: "jax"),
    mock.patch.object(tf, "__version__", "2.15.1"),
    mock.patch.object(keras, "__version__", "3.4.1"),
    # The version is looked at before anything is imported that it may not have.
    mock.patch.object(keras, "__version__", "3.3.0"),
):
    with patch, mock.patch.dict(sys.modules, private if keras.__version__ == "3.3.0" else {}):
        try:
            import keras_mp
        except ImportError as error:
            print("ImportError", error)
    for name in [name for name in sys.modules if name.partition(".")[0] == "keras_mp"]:
        del sys.modules[name]
"""


def test_bound_to_what_tf_keras_is():
    assert keras_api.ROOT_PACKAGE == tf.keras.Model.__module__.split(".")[0]
    assert keras_api.OTHER_PACKAGE != keras_api.ROOT_PACKAGE


# The other module is compared in the run of the other Keras.
def test_the_module_of_this_keras_has_the_interface():
    for name in interface.NAMES:
        offered = getattr(keras_api, name)
        expected = vars(interface.KerasApi).get(name)
        if not inspect.isfunction(expected):
            continue
        _, *parameters = inspect.signature(expected).parameters.values()
        found = [*inspect.signature(offered).parameters.values()]
        # Keras's own functions may take more, and name a first argument in their own way.
        assert len(found) >= len(parameters), name
        for ours, theirs in list(zip(parameters, found, strict=False))[1:]:
            assert ours.name == theirs.name, name
        for more in found[len(parameters) :]:
            assert more.default is not more.empty or more.kind == more.VAR_KEYWORD, name


def test_the_interface_names_all_that_is_used():
    used = set()
    for path in pathlib.Path(keras_mp.__file__).parent.rglob("*.py"):
        used |= set(re.findall(r"\bkeras_api\.([A-Za-z_]+)", path.read_text()))
    others = {"ROOT_PACKAGE", "OTHER_PACKAGE", "check_model", "switch_hint", "NAME"}
    of_both = {"COMPILE_OWNER", "KerasLossScaleOptimizer", "get_optimizer", "serialize_optimizer"}
    of_both |= {"flatten_layers", "layers_inside", "states"}
    modules = {"interface", "keras"}  # keras2 and keras3
    assert set(interface.NAMES) <= used
    assert used - others - of_both - modules <= set(interface.NAMES)


@pytest.mark.skipif(not IS_KERAS_3, reason="The answer does not depend on this process's Keras.")
@pytest.mark.parametrize(
    ("code", "environment", "messages"),
    [
        ("import keras_mp", {"KERAS_BACKEND": "jax"}, ["set KERAS_BACKEND=tensorflow"]),
        (HIDE_TF_KERAS, {"TF_USE_LEGACY_KERAS": "1"}, ["pip install tf_keras=="]),
        (
            NOT_SUPPORTED,
            {},
            [
                "Set KERAS_BACKEND=tensorflow",
                "keras_mp needs TensorFlow 2.16 or later",
                'Run `pip install "keras>=3.12"`. Received: keras 3.4.1',
                'Run `pip install "keras>=3.12"`. Received: keras 3.3.0',
            ],
        ),
    ],
    ids=["backend not installed", "no tf_keras", "not supported"],
)
def test_what_cannot_work_says_what_to_set(code, environment, messages):
    errors = python(code, **environment).split("ImportError")[-len(messages) :]
    for error, message in zip(errors, messages, strict=True):
        assert message in error


WRONG_MODEL = """
import sys
import tensorflow as tf
import keras_mp
{early}
keras_mp.set_global_policy("{policy}")
finders = list(sys.meta_path)
import {other}
assert sys.meta_path == finders
{again}
for make_optimizer in ({optimizers}):
    try:
        model = {other}.Sequential([{other}.layers.Dense(1)])
        model.compile(make_optimizer(), "mse")
        print("COMPILED")
    except (TypeError, ValueError) as error:
        print("REFUSED", error)
"""


@pytest.mark.parametrize("early", [True, False])
def test_a_model_of_the_other_keras(early):
    other = keras_api.OTHER_PACKAGE
    # Nobody watches imports: it is seen when the next policy is set.
    again = "" if early else "keras_mp.set_global_policy(keras_mp.global_policy())"
    early = f"import {other}" if early else ""
    policy, optimizers = "mixed_float16", "lambda: 'sgd',"
    code = WRONG_MODEL.format(
        other=other, policy=policy, optimizers=optimizers, early=early, again=again
    )
    output = python(code)
    assert f"REFUSED keras_mp works with `tf.keras`, which is {keras_api.ROOT_PACKAGE}" in output
    assert keras_api.switch_hint() in output


def test_what_is_not_mixed_may_be_of_the_other_keras():
    other = keras_api.OTHER_PACKAGE
    optimizers = f"""
    lambda: "sgd",
    lambda: keras_mp.LossScaleOptimizer("sgd"),
    lambda: keras_mp.LossScaleOptimizer({other}.optimizers.SGD()),
    """
    code = WRONG_MODEL.format(
        other=other, policy="float32", optimizers=optimizers, early=f"import {other}", again=""
    )
    accepted, wrapper, inner = re.split("(?:^|\n)(?=REFUSED|COMPILED)", python(code))[1:]
    assert accepted.strip() == "COMPILED"
    assert wrapper.startswith("REFUSED keras_mp works with `tf.keras`")
    assert inner.startswith("REFUSED Expected an optimizer of `tf.keras`")
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

"""Choosing a Keras, in processes of their own; and what its doors offer."""

import ast
import json
import pathlib
import re

import numpy as np
import pytest

import keras_mp
from keras_mp import keras_api
from tests.common import IS_KERAS_3, once, run_program


@pytest.fixture(scope="module")
def raised():
    """What programs find in processes of their own: {name: list of messages}."""
    is_legacy = "0" if IS_KERAS_3 else "1"
    printed = run_program("-m", "tests.keras_api.programs", TF_USE_LEGACY_KERAS=is_legacy)
    return json.loads(printed.splitlines()[-1])


def test_a_scope_without_any_policy_does_the_same(raised):
    is_same, *found = raised["a_scope_before_a_policy"]
    assert is_same
    # Beside float32, a weight has all of its digits.
    assert found == [["float32", float(np.float32(1 / 3))]] * 2


def test_a_program_configures_its_devices_after_its_policy(raised):
    assert raised["devices_after_a_policy"] == [True] * 3


def offered(start):
    """What modules define whose names begin so, by name; private names of Keras apart."""
    found = {}
    for path in pathlib.Path(keras_api.__file__).parent.glob(f"{start}*.py"):
        if path.stem.endswith("_names") != start.endswith("_names"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = getattr(node, "targets", None) or [node.target]
                each = [name for target in targets for name in ast.walk(target)]
                found |= {name.id: node for name in each if isinstance(name, ast.Name)}
    return {name: node for name, node in found.items() if not name.startswith("_")}


def parameters(node):
    arguments = node.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


@once
def test_both_modules_offer_what_is_used():
    texts = [p.read_text() for p in pathlib.Path(keras_mp.__file__).parent.rglob("*.py")]
    found = re.findall(r"\bkeras_api\.(names\.)?([A-Za-z_]+)", "\n".join(texts))
    used = {name for of_names, name in found if not of_names}
    # The first are modules, or parts of their names.
    of_both = {"keras", "models", "names", "predictions", "shared_features"}
    of_both |= offered("__init__").keys() | offered("models").keys()
    ours, theirs = offered("keras3"), offered("keras2")
    assert used <= of_both | (ours.keys() & theirs.keys())
    names = {name for of_names, name in found if of_names}
    assert names <= offered("keras3_names").keys() & offered("keras2_names").keys()
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

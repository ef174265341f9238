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

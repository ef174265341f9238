"""Every private name of TensorFlow and Keras is in one table, and is where the table says."""

import ast
import functools
import importlib
import inspect
import json
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
import tensorflow as tf

import keras_mp
from keras_mp import hooks
from tests import inside, private_names, without_names
from tests.common import IS_KERAS_3, once
from tests.inside import FEATURES

K = tf.keras
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "private_names.md"
HERE = {"TensorFlow", "both Kerases", "Keras 3" if IS_KERAS_3 else "Keras 2"}
ELSEWHERE = {"Keras 2" if IS_KERAS_3 else "Keras 3"}

# Names of the package's own that a base class of another class of the package has as well, or that
# it gives to functions of the user's.
OWN = {"_dtype", "_runs_in_the_policy"}


class Row(NamedTuple):
    name: str
    of: str
    why: str
    tried_by: str


ROWS = [
    Row(name, section.partition("\n")[0], why, tried_by)
    for section in PAGE.read_text().split("\n## ")[1:]
    for name, why, tried_by in re.findall(r"^- `(.*?)`: (.*?)(?:: `(.*)`)?$", section, re.M)
]


find = functools.cache(private_names.find)


def found():
    return {name: where for name, where in find().items() if name not in OWN}


def test_the_table_has_every_name():
    missing = {name: where for name, where in found().items() if name not in {r.name for r in ROWS}}
    assert not missing, f"Add to {PAGE.name}: {missing}"


def test_the_table_has_no_name_that_is_not_used():
    assert not [row.name for row in ROWS if row.of in HERE and row.name not in found()]


@once
def test_rows_are_complete_and_sorted():
    assert {row.of for row in ROWS} == HERE | ELSEWHERE
    assert [row.name for row in ROWS] == [
        name
        for of in ("TensorFlow", "both Kerases", "Keras 3", "Keras 2")
        for name in sorted({row.name for row in ROWS if row.of == of})
    ]
    assert all(row.why and (row.tried_by or "." in row.name) for row in ROWS)


def test_own_names_are_used():
    assert OWN <= find().keys()


# What expressions in the table use.


def source(of):
    """The source of an object, or of the module of that name."""
    if isinstance(of, str):
        return inspect.getsource(importlib.import_module(of))
    return inspect.getsource(inspect.unwrap(of))


def built(optimizer):
    optimizer.build([K.Variable([1.0])])
    return optimizer


def compiled():
    model = K.Sequential([K.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def attributes(function):
    """Names of the attributes of all operations in the graph of a function of a number."""
    graph = tf.function(function).get_concrete_function(tf.TensorSpec([])).graph
    return {name for op in graph.get_operations() for name in op.node_def.attr}


VARIABLE = tf.Variable(1.0)


def reads_in_a_branch(x):
    return tf.cond(x > 0, lambda: x * VARIABLE, lambda: x)


def resolve(path):
    """What a dotted path stands for."""
    return inside.Name(path).get()


@pytest.mark.parametrize("row", [row for row in ROWS if row.of in HERE], ids=lambda row: row.name)
def test_it_is_where_it_was(row):
    result = eval(row.tried_by, {**globals(), "sys": sys}) if row.tried_by else resolve(row.name)
    assert result is not None
    assert result is not False
    assert not isinstance(result, list) or result


# What keras_mp changes of others.

REPLACED = ("replaced", "attributes.replaced")
# What is set through a name of the doors.
NAMED = re.compile(r"\b(keras\d_names|graphs)\.(\w+)\.(?:set_of\((?!self)|set\(|attribute\b)")


def changes():
    """Private attributes, and classes, that the package sets on objects that are not its own."""
    for path in sorted(private_names.ROOT.rglob("*.py")):
        for door, name in NAMED.findall(path.read_text()):
            package = "tensorflow_api" if door == "graphs" else "keras_api"
            module = importlib.import_module(f"keras_mp.{package}.{door}")
            attribute = getattr(module, name).attribute
            if attribute.startswith("_"):
                yield attribute
        for node in ast.walk(ast.parse(path.read_text())):
            is_set = isinstance(getattr(node, "ctx", None), ast.Store)
            if isinstance(node, ast.Attribute) and is_set and ast.unparse(node.value) != "self":
                if node.attr == "__class__":
                    yield getattr(node.value, "attr", "AutoCastWeight")
                elif node.attr.startswith("_") and not node.attr.startswith("__"):
                    yield node.attr
            elif isinstance(node, ast.Subscript) and is_set:
                of = re.fullmatch(r"vars\((\w+)\)", ast.unparse(node.value))
                if of and of[1] != "self" and isinstance(node.slice, ast.Constant):
                    yield node.slice.value
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in REPLACED:
                owner, name, *_ = node.args
                # A `threading.local` of ours is our own, as `self` is. Names that a loop gives are
                # in no literal.
                is_ours = ast.unparse(owner).endswith("thread") or ast.unparse(owner) == "self"
                if not is_ours and isinstance(name, ast.Constant):
                    yield ast.literal_eval(name)


@once
def test_the_page_of_changes_has_each():
    page = PAGE.with_name("changes_to_keras.md").read_text()
    changed = set(changes())
    assert {"_get_optimizer", "_is_wrapped_by_loss_scale_optimizer"} < changed
    assert {"AutoCastWeight", "_compile_metrics"} < changed
    assert {name for name in changed if f"`{name}`" not in page} == set()


@once
def test_the_page_of_changes_has_each_function_that_is_replaced():
    page = PAGE.with_name("changes_to_keras.md").read_text()
    with keras_mp.policy_scope("mixed_bfloat16"), keras_mp.autocast("bfloat16"):
        tf.keras.layers.Dense(1, dtype=keras_mp.Policy("mixed_bfloat16"))(tf.ones([1, 1]))
    # Rows of whole lists, which the page names.
    lists = {"keras_mp.kernels.functions"}
    replaced = set()
    for row in hooks.installed():
        if getattr(row.make, "func", row.make).__module__ not in lists:
            names_of_place = "__name__", "attribute", "name"
            place = getattr(row.place, "function", row.place)
            replaced |= {getattr(place, each) for each in names_of_place if hasattr(place, each)}
    assert len(replaced) > 40
    assert {name for name in replaced if not re.search(rf"\b{name}\b", page)} == set()


@once
def test_what_a_maintainer_of_keras_would_refuse_is_not_there():
    source = "".join(path.read_text() for path in private_names.ROOT.rglob("*.py"))
    assert "meta_path" not in source
    assert "f_locals" not in source


# Names that a TensorFlow or Keras may lack.

# What cannot be right without a name, and ends with an error that says which one is missing.
REFUSED = {"TFOptimizer._all_reduce_sum_gradients": {"two replicas"}}


def batches():
    """Names of the same features: without one of them, none of their code runs.

    Six such groups share a process, but for what is refused, and for the float32 faces, without
    which hardly another feature is asked.
    """
    found = {}
    for name in sorted({name.path for feature in FEATURES for name in feature.names}):
        of_name = [each for each in FEATURES if name in {one.path for one in each.names}]
        found.setdefault(tuple(each.title for each in of_name), []).append(name)
    alone, shared = [], []
    for titles, names in found.items():
        is_refused = any(name.endswith(tuple(REFUSED)) for name in names)
        of_faces = any("float32 faces" in title for title in titles)
        (alone if is_refused or of_faces else shared).append((titles, names))
    return [[group] for group in alone] + [shared[i : i + 6] for i in range(0, len(shared), 6)]


@pytest.fixture(scope="module")
def server():
    """A process that has imported TensorFlow, and forks another one for each name."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.without_names"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process


def run_without(process, names):
    """What the parts of the core program say without these names, and the warnings."""
    process.stdin.write(f"{' '.join(names)}\n")
    process.stdin.flush()
    lines = iter(process.stdout.readline, "")
    found = next(line for line in lines if without_names.MARK in line)
    return json.loads(found.partition(without_names.MARK)[2])


@pytest.mark.parametrize("batch", batches(), ids=lambda batch: batch[0][0][0])
def test_without_names_only_their_features_are_off(batch, server):
    names = [name for _, of_group in batch for name in of_group]
    results, warnings = run_without(server, names)
    failed = {part: result for part, result in results.items() if result != "passed"}
    refused = [parts for end, parts in REFUSED.items() for name in names if name.endswith(end)]
    assert failed.keys() <= set().union(*refused), failed
    is_named = [f"has no `{name}`" for name in names]
    assert all(any(each in result for each in is_named) for result in failed.values())
    # Each feature says once that it is off, and what that means.
    off = [warning for warning in warnings if "does without a feature" in warning]
    assert len(off) == len(set(off)) <= sum(len(titles) for titles, _ in batch)
    for warning in off:
        assert any(
            all(f"has no `{name}`" in warning for name in of_group)
            for titles, of_group in batch
            if any(title in warning for title in titles)
        ), warning


def test_with_all_names_all_features_are_on():
    assert [line for feature in FEATURES for line in feature.missing()] == []


def test_wrappers_set_no_attribute_of_a_base_class_of_tensorflow():
    v1 = keras_mp.compat.v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
    variable = keras_mp.autocast_variable(tf.Variable(1.0))
    for each in (keras_mp.LossScaleOptimizer("sgd"), v1, variable):
        assert not isinstance(each, tf.__internal__.tracking.DelegatingTrackableMixin)

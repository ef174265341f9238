"""Programs go on where a private name of TensorFlow or Keras is missing, and say what is off."""

import json
import subprocess
import sys

import pytest
import tensorflow as tf

import keras_mp
from tests import without_names
from tests.inside import FEATURES

# What cannot be right without a name, and ends with an error that says which one is missing.
REFUSED = {
    "TFOptimizer._all_reduce_sum_gradients": {"two replicas"},
}


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

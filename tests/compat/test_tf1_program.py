"""TensorFlow 1's own kind of program, in a process that has no eager code."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests.common import TAKES_BFLOAT16_REWRITE, needs_bfloat16_rewrite, once, run_program

pytestmark = once

KINDS = ["float32", "contrib"]
if TAKES_BFLOAT16_REWRITE:
    KINDS.append("rewrite")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    arguments = "tests.compat.tf1_program", str(folder), *KINDS
    printed = run_program("-m", *arguments, TF_USE_LEGACY_KERAS="1")
    return json.loads(printed.splitlines()[-1]), folder


def test_digits_are_learnt_as_well_as_in_float32(results):
    results, _ = results
    assert results["float32"]["accuracy"] > 0.85
    for kind in KINDS[1:]:
        assert abs(results[kind]["accuracy"] - results["float32"]["accuracy"]) <= 0.01
        assert results[kind]["global_step"] == results["float32"]["global_step"] == 80
        assert results[kind]["ref variables"] == 3


def test_bad_steps_are_skipped_and_the_scale_moves(results):
    contrib = results[0]["contrib"]
    assert contrib["unchanged"]
    assert (contrib["skipped"], results[0]["sparse"]) == (2, True)
    # 80 good steps: twice as large, twice. Two bad ones: 0.8 of that.
    assert contrib["scale"] == pytest.approx(2**17 * 0.8)


@needs_bfloat16_rewrite
def test_the_graph_is_rewritten(results):
    rewritten = results[0]["rewrite"]["bfloat16"]
    assert rewritten["Conv2D"] >= 1
    assert rewritten["MatMul"] >= 3


def test_files_have_the_names_of_float32_and_the_scale_s(results):
    _, folder = results
    names = {
        kind: {name for name, _ in tf.train.list_variables(f"{folder}/{kind}")} for kind in KINDS
    }
    assert names["float32"] > {"kernel", "kernel/Adam", "beta1_power"}
    assert names.get("rewrite", names["float32"]) == names["float32"]
    own = {"loss_scale", "good_steps", "bad_steps", "steps_skipped", "steps_skipped_in_a_row"}
    assert names["contrib"] == names["float32"] | own


def test_fit_of_keras_2_without_eager_code(results):
    results = results[0]["fit"]
    np.testing.assert_allclose(results["ours"], results["bare"], rtol=1e-6)
    np.testing.assert_allclose(results["fixed"], results["bare"], rtol=1e-6)
    assert results["bare"][-1] < results["bare"][0]
    assert results["skipped"] > 0
    assert results["scale"] == 2.0 ** (20 - results["skipped"])

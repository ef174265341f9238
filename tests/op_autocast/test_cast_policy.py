"""The cast policies against the lists of the installed TensorFlow, and docs/autocast.md."""

import pathlib
import re
from collections import Counter

import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

import keras_mp
from keras_mp.support import op_table
from tests.common import once
from tests.inside import OPERATIONS_OF_REGIONS as ROWS
from tests.inside import POLICIES_OF_REGIONS as POLICIES
from tests.inside import SUMS

pytestmark = once

HEADER = pathlib.Path(tf.sysconfig.get_include()) / (
    "tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h"
)
LISTS = {"AllowList": "allow", "InferList": "infer", "DenyList": "deny", "ClearList": "clear"}


def tensorflows_lists():
    """What TensorFlow's graph rewrite does: its lists by operation, for GPUs and for CPUs."""
    text = HEADER.read_text()
    found = {}
    for cls in re.findall(r"class (AutoMixedPrecisionLists\w+) :", text):
        body = text[text.index(f"class {cls} ") :].partition("\n};")[0]
        for method, name in LISTS.items():
            of_list = body[body.index(f"{method}() override") :].partition("\n  }\n\n")[0]
            for op in re.findall(r'"(\w+)"', of_list):
                if not op.endswith("LIST"):
                    found.setdefault(op, set()).add(name)
    for op in re.findall(r'"(TensorList\w+)"', text):
        found.setdefault(op, set()).add("clear")
    return found


# What our policy stands for in TensorFlow's lists, where the reason is not that they differ.
SAME = {"promote": "deny"}


def test_the_table_has_every_operation_of_tensorflows_lists():
    lists = tensorflows_lists()
    assert len(lists) > 200
    assert (lists["MatMul"], lists["Mean"]) == ({"allow"}, {"deny", "infer"})
    assert not sorted(lists.keys() - ROWS.keys())
    missing = {op for op in ROWS if not hasattr(tf.raw_ops, op)}
    assert {ROWS[op].policy for op in missing} == {"none"}


# TensorFlow's list and our policy, where they differ. The reason is in the table.
DIFFERENCES = {
    ("allow", "none"),
    ("clear", "none"),
    ("clear", "promote"),
    ("deny", "none"),
    ("infer", "none"),
    ("infer", "deny"),
    ("infer", "promote"),
}


def test_differences_from_tensorflows_lists_are_those_that_are_known():
    found = {}
    for op, names in tensorflows_lists().items():
        row = ROWS[op]
        if SAME.get(row.policy, row.policy) not in names and row.policy not in names:
            found.setdefault((min(names), row.policy), []).append(op)
    assert found.keys() == DIFFERENCES, found
    # Nothing that TensorFlow thinks dangerous runs in 16 bits.
    assert found["deny", "none"] == ["SaveV2"]


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_is_used_and_each_row_has_a_reason(policy):
    rows = [row for row in ROWS.values() if row.policy == policy]
    assert rows
    assert all(len(row.why) > 10 for row in rows)


def test_nothing_that_adds_up_wrongly_in_16_bits_runs_in_16_bits():
    for dtype in ("bfloat16", "float16"):
        rows = keras_mp.autocast_ops(dtype, "CPU")
        right = {"AvgPool"} if dtype == "bfloat16" else set()
        policies = {rows[op].policy for op in (SUMS.keys() & rows.keys()) - right}
        assert policies <= {"deny", "none"}


PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "autocast.md").read_text()


def test_the_table_is_that_of_the_package():
    groups = {}
    for op, row in ROWS.items():
        groups.setdefault(row, []).append(f"`{op}`")
    rows = ["| policy | operations | why |", "| -- | -- | -- |"]
    rows += [f"| {row.policy} | {', '.join(ops)} | {row.why} |" for row, ops in groups.items()]
    assert "\n".join(rows) in PAGE
    for policy, meaning in POLICIES.items():
        assert f"- **{policy}**: {meaning}" in PAGE


# The table of operations: each stands once, and TensorFlow has it.

OPS = [op for ops in op_table.BY_KIND.values() for op in ops]

# On TensorFlow's lists for the graph rewrite, but of kernels that its wheel does not have.
ELSEWHERE = {
    *("FastUnsortedSegmentMax", "FusedConv2DBiasActivation", "FusedSparseConvGpuV2", "Mha"),
    *("MhaV2", "Pmlp", "Tmlp", "TmlpV2", "TmlpV3", "VoxelMax"),
}


def test_an_operation_is_of_one_kind():
    assert [op for op, times in Counter(OPS).items() if times > 1] == []


def test_tensorflow_has_each_operation():
    assert {op for op in OPS if op_def_registry.get(op) is None} <= ELSEWHERE


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("Conv2D", lambda x: tf.nn.conv2d(x, tf.zeros([3, 3, 2, 2]), 1, "SAME")),
        ("MaxPool", lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME")),
        ("BiasAdd", lambda x: tf.nn.bias_add(tf.zeros([4, 2]), x[0, 0, 0])),
        ("Tanh", tf.tanh),
    ],
)
def test_gradients_are_what_tensorflow_computes_them_with(op, function):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [1, 4, 4, 2])
        tf.gradients(function(x), [x])
    types = {each.type for each in graph.get_operations()}
    assert op in types
    assert types & set(op_table.gradients_of(op))


def test_an_operation_whose_gradient_is_made_of_others():
    assert op_table.gradients_of("Exp") == ()

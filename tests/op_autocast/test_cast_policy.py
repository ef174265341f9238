"""The cast policies against the lists of the installed TensorFlow."""

import pathlib
import re

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.kernels import cast_policy, sums
from tests.common import once

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


def test_tensorflows_lists_are_read():
    lists = tensorflows_lists()
    assert len(lists) > 200
    assert lists["MatMul"] == {"allow"}
    assert lists["Mean"] == {"deny", "infer"}
    assert lists["TensorListStack"] == {"clear"}
    assert lists["ZerosLike"] == {"clear"}


def test_the_table_has_every_operation_of_tensorflows_lists():
    assert not sorted(tensorflows_lists().keys() - cast_policy.ROWS.keys())


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
        row = cast_policy.ROWS[op]
        if SAME.get(row.policy, row.policy) not in names and row.policy not in names:
            found.setdefault((min(names), row.policy), []).append(op)
    assert found.keys() == DIFFERENCES, found
    # Nothing that TensorFlow thinks dangerous runs in 16 bits.
    assert found["deny", "none"] == ["SaveV2"]


@pytest.mark.parametrize("policy", cast_policy.POLICIES)
def test_each_policy_is_used_and_each_row_has_a_reason(policy):
    rows = [row for row in cast_policy.ROWS.values() if row.policy == policy]
    assert rows
    assert all(len(row.why) > 10 for row in rows)


def test_a_kind_has_one_policy():
    groups = [kinds for reasons in cast_policy._KINDS.values() for kinds in reasons.values()]
    listed = ", ".join(groups).split(", ")
    assert len(listed) == len(set(listed))
    missing = {op for op in cast_policy.ROWS if not hasattr(tf.raw_ops, op)}
    assert all(cast_policy.ROWS[op].policy == "none" for op in missing)
    others = cast_policy.BOUNDED | cast_policy.SLOW_ON_CPU
    assert others <= cast_policy.ROWS.keys()


def test_nothing_that_adds_up_wrongly_in_16_bits_runs_in_16_bits():
    for dtype in ("bfloat16", "float16"):
        rows = keras_mp.autocast_ops(dtype, "CPU")
        right = {"AvgPool"} if dtype == "bfloat16" else set()
        policies = {rows[op].policy for op in (sums.KERNELS.keys() & rows.keys()) - right}
        assert policies <= {"deny", "none"}

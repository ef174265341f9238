"""The table against the lists of the installed TensorFlow, and against TensorFlow's operations."""

import pathlib
import re

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.kernels import sums
from keras_mp.op_autocast import op_table
from tests.common import once

pytestmark = once

HEADER = pathlib.Path(tf.sysconfig.get_include()) / (
    "tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h"
)
LISTS = {"AllowList": "allow", "InferList": "infer", "DenyList": "deny", "ClearList": "clear"}


def tensorflows_lists():
    """What TensorFlow's graph rewrite does: its verdicts by operation, for GPUs and for CPUs."""
    text = HEADER.read_text()
    found = {}
    for cls in re.findall(r"class (AutoMixedPrecisionLists\w+) :", text):
        body = text[text.index(f"class {cls} ") :].partition("\n};")[0]
        for method, verdict in LISTS.items():
            of_list = body[body.index(f"{method}() override") :].partition("\n  }\n\n")[0]
            for op in re.findall(r'"(\w+)"', of_list):
                if not op.endswith("LIST"):
                    found.setdefault(op, set()).add(verdict)
    for op in re.findall(r'"(TensorList\w+)"', text):
        found.setdefault(op, set()).add("clear")
    return found


# What our verdict stands for in TensorFlow's lists, where the reason is not that they differ.
SAME = {"promote": "deny"}


def test_tensorflows_lists_are_read():
    lists = tensorflows_lists()
    assert len(lists) > 200
    assert lists["MatMul"] == {"allow"}
    assert lists["Mean"] == {"deny", "infer"}
    assert lists["TensorListStack"] == {"clear"}
    assert lists["ZerosLike"] == {"clear"}


def test_the_table_has_every_operation_of_tensorflows_lists():
    assert not sorted(tensorflows_lists().keys() - op_table.ROWS.keys())


# TensorFlow's verdict and ours, where they differ. The reason is in the table.
DIFFERENCES = {
    ("allow", "apart"),
    ("clear", "apart"),
    ("clear", "promote"),
    ("deny", "apart"),
    ("infer", "apart"),
    ("infer", "deny"),
    ("infer", "promote"),
}


def test_differences_from_tensorflows_lists_are_those_that_are_known():
    found = {}
    for op, verdicts in tensorflows_lists().items():
        row = op_table.ROWS[op]
        if SAME.get(row.verdict, row.verdict) not in verdicts and row.verdict not in verdicts:
            found.setdefault((min(verdicts), row.verdict), []).append(op)
    assert found.keys() == DIFFERENCES, found
    # Nothing that TensorFlow thinks dangerous runs in 16 bits.
    assert found["deny", "apart"] == ["SaveV2"]


@pytest.mark.parametrize("verdict", op_table.VERDICTS)
def test_each_verdict_is_used_and_each_row_has_a_reason(verdict):
    rows = [row for row in op_table.ROWS.values() if row.verdict == verdict]
    assert rows
    assert all(len(row.why) > 10 for row in rows)


def test_operations_exist_and_stand_once():
    listed = [
        op for groups in op_table._TABLE.values() for ops in groups.values() for op in ops.split()
    ]
    assert len(listed) == len(set(listed))
    missing = {op for op in listed if not hasattr(tf.raw_ops, op)}
    assert all(op_table.ROWS[op].verdict == "apart" or op == "FusedPadConv2D" for op in missing)
    others = op_table.BOUNDED | op_table.SLOW_ON_CPU | op_table.VIEWS | op_table.GRADIENTS.keys()
    assert others <= op_table.ROWS.keys()


def test_nothing_that_adds_up_wrongly_in_16_bits_runs_in_16_bits():
    for dtype in ("bfloat16", "float16"):
        rows = keras_mp.autocast_ops(dtype, "CPU")
        right = {"AvgPool"} if dtype == "bfloat16" else set()
        verdicts = {rows[op].verdict for op in (sums.KERNELS.keys() & rows.keys()) - right}
        assert verdicts <= {"deny", "apart"}

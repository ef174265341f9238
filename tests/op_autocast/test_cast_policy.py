"""The cast policies against the lists of the installed TensorFlow, and docs/autocast.md."""

import pathlib
import re

import pytest
import tensorflow as tf

import keras_mp
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


def test_the_programs_print_what_the_page_says(capsys):
    names = {}
    expected = []
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        expected += re.findall(r"print\(.*\)  # (.*)$", block, re.MULTILINE)
        exec(compile(block, "autocast.md", "exec"), names)
    assert capsys.readouterr().out.splitlines() == expected
    assert len(expected) == 3


def test_the_table_is_that_of_the_package():
    groups = {}
    for op, row in ROWS.items():
        groups.setdefault(row, []).append(f"`{op}`")
    rows = ["| policy | operations | why |", "| -- | -- | -- |"]
    rows += [f"| {row.policy} | {', '.join(ops)} | {row.why} |" for row, ops in groups.items()]
    assert "\n".join(rows) in PAGE
    for policy, meaning in POLICIES.items():
        assert f"- **{policy}**: {meaning}" in PAGE

"""The lists of operations, as TensorFlow has them, and changes of them."""

import os

import pytest

from keras_mp.grappler import op_lists
from tests.common import needs_bfloat16_rewrite, once

pytestmark = once

PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"


@pytest.fixture(autouse=True)
def as_before():
    yield
    op_lists.change({})
    assert [name for name in os.environ if name.startswith(PREFIX)] == []


@pytest.mark.parametrize(
    "dtype", ["float16", pytest.param("bfloat16", marks=needs_bfloat16_rewrite)]
)
def test_lists_are_tensorflow_s(dtype):
    lists = op_lists.read(dtype)
    assert list(lists) == ["allow", "infer", "deny", "clear"]
    assert {"MatMul", "Conv2D"} <= lists["allow"]
    assert {"AddV2", "Tanh"} <= lists["infer"]
    assert {"Exp", "SparseSoftmaxCrossEntropyWithLogits"} <= lists["deny"]
    assert {"Relu", "Reshape"} <= lists["clear"]
    assert ("Sum" in lists["deny"]) == (dtype == "float16")
    assert len(set().union(*lists.values())) == sum(map(len, lists.values()))
    assert op_lists._PROBE not in set().union(*lists.values())


def test_an_operation_is_on_the_list_that_it_was_put_on_and_on_no_other():
    op_lists.change({"deny": ["MatMul", "Tanh"], "none": ["Relu"], "allow": ["Exp"]})
    lists = op_lists.read("float16")
    homes = {op: [name for name in lists if op in lists[name]] for op in ("MatMul", "Tanh", "Exp")}
    assert homes == {"MatMul": ["deny"], "Tanh": ["deny"], "Exp": ["allow"]}
    assert not any("Relu" in ops for ops in lists.values())
    op_lists.change({"deny": ["Tanh"]})
    assert "MatMul" in op_lists.read("float16")["allow"]
    op_lists.change({})
    assert op_lists.read("float16")["infer"] >= {"Tanh"}


def test_what_somebody_has_set_in_the_environment_stays(monkeypatch):
    monkeypatch.setenv(f"{PREFIX}DENYLIST_ADD", "Tan,Atan")
    monkeypatch.setenv(f"{PREFIX}WHITELIST_ADD", "Softmax")
    monkeypatch.setenv(f"{PREFIX}GRAYLIST_REMOVE", "Softmax")
    op_lists.change({"clear": ["Atan"], "infer": ["Softmax"]})
    lists = op_lists.read("float16")
    assert "Tan" in lists["deny"]
    assert "Atan" in lists["clear"]
    assert "Softmax" in lists["infer"]
    op_lists.change({})
    assert os.environ[f"{PREFIX}DENYLIST_ADD"] == "Atan,Tan"
    assert "Softmax" in op_lists.read("float16")["allow"]


def test_what_is_kept_out_is_on_no_list_but_where_it_was_put():
    op_lists.change({"deny": ["Exp"]})
    op_lists.keep_out(["Tanh", "Relu"])
    try:
        lists = op_lists.read("float16")
        assert not any({"Tanh", "Relu"} & ops for ops in lists.values())
        op_lists.change({"clear": ["Relu"]})
        assert op_lists.kept_out() == {"Tanh"}
        lists = op_lists.read("float16")
        assert "Relu" in lists["clear"]
        assert not any("Tanh" in ops for ops in lists.values())
    finally:
        op_lists.keep_out([])
    assert "Tanh" in op_lists.read("float16")["infer"]


def test_an_operation_on_two_lists_is_an_error(monkeypatch):
    monkeypatch.setenv(f"{PREFIX}DENYLIST_ADD", "MatMul")
    with pytest.raises(RuntimeError, match="put an operation on two of them"):
        op_lists.read("float16")

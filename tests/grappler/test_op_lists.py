"""The lists of operations, as TensorFlow has them, and changes of them."""

import os

import pytest
import tensorflow as tf

import keras_mp
from keras_mp import graph_rewrite
from tests.common import needs_bfloat16_rewrite, once

pytestmark = once

PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"


@pytest.fixture(autouse=True)
def as_before():
    yield
    graph_rewrite.change_op_lists()
    assert [name for name in os.environ if name.startswith(PREFIX)] == []


@pytest.mark.parametrize(
    "dtype", ["float16", pytest.param("bfloat16", marks=needs_bfloat16_rewrite)]
)
def test_lists_are_tensorflow_s(dtype):
    lists = graph_rewrite.op_lists(dtype)
    assert list(lists) == ["allow", "infer", "deny", "clear"]
    assert {"MatMul", "Conv2D"} <= lists["allow"]
    assert {"AddV2", "Tanh"} <= lists["infer"]
    assert {"Exp", "SparseSoftmaxCrossEntropyWithLogits"} <= lists["deny"]
    assert {"Relu", "Reshape"} <= lists["clear"]
    assert ("Sum" in lists["deny"]) == (dtype == "float16")
    every = set().union(*lists.values())
    assert len(every) == sum(map(len, lists.values()))
    assert "BesselI0e" not in every  # with which TensorFlow is asked


def test_an_operation_is_on_the_list_that_it_was_put_on_and_on_no_other():
    graph_rewrite.change_op_lists(deny=["MatMul", "Tanh"], none=["Relu"], allow=["Exp"])
    lists = graph_rewrite.op_lists()
    homes = {op: [name for name in lists if op in lists[name]] for op in ("MatMul", "Tanh", "Exp")}
    assert homes == {"MatMul": ["deny"], "Tanh": ["deny"], "Exp": ["allow"]}
    assert not any("Relu" in ops for ops in lists.values())
    graph_rewrite.change_op_lists(deny=["Tanh"])
    assert "MatMul" in graph_rewrite.op_lists()["allow"]
    graph_rewrite.change_op_lists()
    assert "Tanh" in graph_rewrite.op_lists()["infer"]


def test_what_somebody_has_set_in_the_environment_stays(monkeypatch):
    monkeypatch.setenv(f"{PREFIX}DENYLIST_ADD", "Tan,Atan")
    monkeypatch.setenv(f"{PREFIX}WHITELIST_ADD", "Softmax")
    monkeypatch.setenv(f"{PREFIX}GRAYLIST_REMOVE", "Softmax")
    graph_rewrite.change_op_lists(clear=["Atan"], infer=["Softmax"])
    lists = graph_rewrite.op_lists()
    assert "Tan" in lists["deny"]
    assert "Atan" in lists["clear"]
    assert "Softmax" in lists["infer"]
    graph_rewrite.change_op_lists()
    assert os.environ[f"{PREFIX}DENYLIST_ADD"] == "Tan,Atan"
    assert "Softmax" in graph_rewrite.op_lists()["allow"]


@pytest.mark.filterwarnings("ignore::keras_mp.MixedPrecisionWarning")  # of this machine
def test_what_is_kept_out_is_on_no_list_but_where_it_was_put(monkeypatch):
    monkeypatch.setattr(graph_rewrite, "_with_wrong_sums", lambda dtype: {"Tanh", "Relu"})
    graph_rewrite.change_op_lists(deny=["Exp"], clear=["Relu"])
    keras_mp.enable_mixed_precision_graph_rewrite(tf.keras.optimizers.SGD(), dtype="float16")
    lists = graph_rewrite.op_lists()
    assert "Relu" in lists["clear"]
    assert not any("Tanh" in ops for ops in lists.values())
    keras_mp.disable_mixed_precision_graph_rewrite()
    assert "Tanh" in graph_rewrite.op_lists()["infer"]


@needs_bfloat16_rewrite
def test_while_the_rewrite_is_on_lists_are_those_of_its_dtype_and_stay():
    assert "Sum" in graph_rewrite.op_lists()["deny"]
    keras_mp.enable_mixed_precision_graph_rewrite(tf.keras.optimizers.SGD(), dtype="bfloat16")
    assert "Sum" in graph_rewrite.op_lists()["infer"]
    with pytest.raises(RuntimeError, match="cannot be changed while the graph rewrite is on"):
        graph_rewrite.change_op_lists(deny=["Relu"])
    keras_mp.disable_mixed_precision_graph_rewrite()


def test_an_operation_on_two_lists_is_an_error(monkeypatch):
    monkeypatch.setenv(f"{PREFIX}DENYLIST_ADD", "MatMul")
    with pytest.raises(RuntimeError, match="put an operation on two of them"):
        graph_rewrite.op_lists()
    monkeypatch.undo()


def test_names_that_are_no_operations_or_come_twice():
    with pytest.raises(ValueError, match=r"\['Matmul'\]"):
        graph_rewrite.change_op_lists(deny=["Matmul"])
    with pytest.raises(ValueError, match=r"each once. Received: \['MatMul'\]"):
        graph_rewrite.change_op_lists(deny=["MatMul"], allow=["MatMul", "Tanh"])
    with pytest.raises(TypeError, match="must be a list of names"):
        graph_rewrite.change_op_lists(deny="MatMul")
    with pytest.raises(ValueError, match="Received: dtype='float32'"):
        graph_rewrite.op_lists("float32")

"""Which layers count as layers that assign to their weights."""

import types

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.layer_calls import master_writes
from tests.common import once


class Assigner:
    """Something else with a method of that name, such as a table."""

    def assign(self, x):
        return 2 * x


class Notes(tf.keras.layers.Layer):
    """Notes the dtypes of its inputs."""

    def __init__(self, **kwargs):
        super().__init__(dtype=keras_mp.Policy("mixed_float16"), **kwargs)
        self.dtypes = []

    def build(self, shape):
        self.weight = self.add_weight(shape=[2], trainable=False, name="weight")
        self.count = tf.Variable(0, trainable=False)

    def call(self, x):
        self.dtypes.append(x.dtype.name)
        return self.compute(x)


class OfAWeight(Notes):
    def compute(self, x):
        self.weight.assign(self.weight * 0.9)
        return x


class OfALocalVariable(Notes):
    def compute(self, x):
        weight = self.weight
        weight.assign(weight * 0.9)
        return x


class OfAnother(Notes):
    def __init__(self):
        super().__init__()
        self.assigner = Assigner()
        self.more = types.SimpleNamespace(assigner=self.assigner)

    def compute(self, x):
        return self.assigner.assign(x) + self.more.assigner.assign(x)


class OfACount(Notes):
    def __init__(self):
        super().__init__()
        self.seen = tf.Variable(0, trainable=False)

    def compute(self, x):
        self.seen.assign(self.seen + 1)
        return x


@pytest.mark.parametrize(
    ("cls", "dtype"),
    [
        (OfAWeight, "float32"),
        (OfALocalVariable, "float32"),
        (OfAnother, "float16"),
        (OfACount, "float16"),
    ],
)
def test_only_floating_point_variables_count(cls, dtype):
    layer = cls()
    for _ in range(2):
        assert layer(tf.ones([1, 2])).dtype == tf.float16
    assert {*layer.dtypes} == {dtype}


@once
def test_a_function_without_a_module():
    namespace = {}
    exec("def without_module(x): return 2 * x", namespace)
    function = namespace["without_module"]
    function.__module__ = None

    class Layer(tf.keras.layers.Layer):
        compute = staticmethod(function)

        def call(self, x):
            return self.compute(x)

    layer = Layer(dtype=keras_mp.Policy("mixed_float16"))
    assert layer(tf.ones([1])).numpy() == [2.0]


@once
def test_owners():
    assert master_writes.owners(OfAnother) == {("assigner",), ("more", "assigner")}
    assert master_writes.owners(OfALocalVariable) == {()}
    assert not master_writes.owners(tf.keras.layers.Dense)

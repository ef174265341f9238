"""A subclassed model whose output is what a layer of Keras returns, which is called once more."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import made

L = tf.keras.layers
X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")


class Net(tf.keras.Model):
    """Two layers, of which the second makes the output."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = L.Dense(8, "relu", name="hidden")
        # It returns what float16 does not hold.
        self.head = L.Dense(2, bias_initializer=tf.constant_initializer(120000.0), name="head")

    def call(self, x):
        return self.head(self.hidden(x))

    def get_config(self):
        return {}


class Two(Net):
    def call(self, x):
        hidden = self.hidden(x)
        return {"y": self.head(hidden), "hidden": hidden}


def compiled(cls, dtype):
    model = made(cls, f"mixed_{dtype}")
    model.compile("sgd", "mse")
    model(X)
    return model


def labels(cls):
    y = np.full([16, 2], 120000.0, "float32")
    return {"y": y, "hidden": np.ones([16, 8], "float32")} if cls is Two else y


@pytest.mark.parametrize(("cls", "dtype"), [(Net, "float16"), (Two, "float16"), (Two, "bfloat16")])
def test_check_compares_it_with_float32(cls, dtype):
    found = keras_mp.numerics.check(compiled(cls, dtype), (X, labels(cls)))
    assert not found.findings, found
    rows = {row.path: row for row in found.comparison.layers}
    # Of what the model returns. The output of the first call has no gradient.
    assert rows["head"].gradient is not None
    assert rows["head"].dtype == dtype


def test_watch_counts_each_output_once():
    model = compiled(Net, "float16")
    model.head.bias.assign([0.0, 0.0])
    watched = keras_mp.numerics.watch(every=1, output_gradients=True)
    model.fit(X, X[:, :2], batch_size=16, callbacks=[watched], verbose=0)
    for kind in ("output", "output gradient"):
        assert watched.report()[kind, "head"].histogram.total == 16 * 2

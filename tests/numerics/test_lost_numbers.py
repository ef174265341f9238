"""Programs that Keras's own policies train on wrong numbers: `check` names the layer and a cure.

Under a policy of keras_mp each of them is right, and `check` has nothing to say about them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import keras_api
from tests import steps
from tests.common import IS_KERAS_3
from tests.numerics.tools import of_keras

K = tf.keras
L = K.layers

YEARS = np.arange(1990, 2022, dtype="float32")[:, None] * np.ones([1, 2], "float32")
ROWS = np.array([[300.0, 400.0], [310.0, 200.0], [500.0, 310.0], [280.0, 640.0]], "float32")
IDS = np.array([[257, 2049], [3001, 3999], [4001, 259]] * 8, "float32")
MANY = np.full([2, 70_000], 0.02, "float32")
PADDED = np.where(np.arange(6)[:, None] < 3, 2.0, -999.0) * np.ones([4, 6, 2], "float32")


class SegmentMeans(L.Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        ids = tf.zeros([70_000], tf.int32)
        return tf.transpose(tf.math.unsorted_segment_mean(tf.transpose(x), ids, 1))


class LooksUp(L.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows = L.Embedding(5000, 4)

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self.rows(ids), 1)


class Program(NamedTuple):
    """A layer that loses numbers under Keras's own policies.

    Attributes:
        layers: makes the first layers of a model; the first one loses.
        x: the inputs.
        dtype: in which it loses.
        keras: the Kerases of which it does.
    """

    layers: Callable[[], list[Any]]
    x: np.ndarray
    dtype: str = "float16"
    keras: tuple[int, ...] = (2, 3)


PROGRAMS = {
    "UnitNormalization": Program(lambda: [L.UnitNormalization()], ROWS),
    "Embedding": Program(lambda: [LooksUp()], IDS),
    "Masking": Program(
        lambda: [L.Masking(-999.0), L.GlobalAveragePooling1D()], PADDED, "bfloat16", (3,)
    ),
    "segment means": Program(lambda: [SegmentMeans()], MANY),
    "Discretization": Program(
        lambda: [L.Discretization(bin_boundaries=[1999.5, 2010.5], output_mode="one_hot")],
        YEARS[:, :1],
        "bfloat16",
        (3,),
    ),
    "Rescaling": Program(lambda: [L.Rescaling(1 / 65535)], YEARS * 35, "bfloat16"),
    "BatchNormalization": Program(lambda: [L.BatchNormalization()], YEARS, "bfloat16"),
}
HERE = {name: each for name, each in PROGRAMS.items() if (3 if IS_KERAS_3 else 2) in each.keras}


def _findings(program: Program, policy: Any) -> list[Any]:
    """What `check` finds in the first layer of a model with a policy, which may be Keras's own."""
    K.utils.set_random_seed(1)
    with keras_api.policy_scope(policy), steps.our_warnings():
        model = K.Sequential([K.Input(program.x.shape[1:]), *program.layers(), L.Dense(1)])
        model.compile("sgd", "mse")
    checked = keras_mp.numerics.check(model, (program.x, np.ones([len(program.x), 1], "float32")))
    return [each for each in checked.findings if model.layers[0].name in each.where]


@pytest.mark.parametrize("name", HERE)
def test_check_finds_them_under_keras_own_policies_only(name: str) -> None:
    program = HERE[name]
    found = _findings(program, of_keras(program.dtype))
    assert found
    assert "float32" in found[0].cure
    assert not _findings(program, keras_mp.Policy(f"mixed_{program.dtype}"))

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, mirrored

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def cached_strategy(monkeypatch):
    """One strategy for each set of devices: TensorFlow would mix up the collectives of two."""
    strategy = mirrored(2)
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda devices=None: strategy)


def test_every_block_runs_in_order(cached_strategy, capsys):
    names = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert len(BLOCKS) == 4
    assert capsys.readouterr().out.splitlines()[-1] == "[1. 2.]"
    assert isinstance(names["model"].optimizer, keras_mp.LossScaleOptimizer)


@pytest.mark.skipif(not IS_KERAS_3, reason="It is Keras 3 that loses the model.")
def test_stock_keras_3_does_what_the_readme_says(cached_strategy):
    names = {"tf": tf, "keras_mp": keras_mp}
    exec(compile(BLOCKS[-1], "README.md", "exec"), names)
    stock = tf.keras.mixed_precision.LossScaleOptimizer
    weights = names["weights_after_one_bad_replica"](stock)
    np.testing.assert_array_equal(weights, [-np.inf, -np.inf])


def test_the_commands_are_those_of_ci():
    ci = (pathlib.Path(__file__).parent.parent / ".ci" / "run").read_text()
    command = 'pip install ".[test]" && python -m tests'
    assert command in README
    assert command in ci

"""Regions are refused where TensorFlow does not use the functions that they replace."""

import subprocess
import sys

import pytest

from tests.common import once

pytestmark = once

BREAKAGES = {"TFE_Py_FastPathExecute": "'eager': False", "_apply_op_helper": "'a function': False"}
PROGRAM = """
import inspect
import keras_mp
from keras_mp import hooks, kernels
kernels.install()
for row in hooks.installed():
    if getattr(row.place, "attribute", "") == "{name}":
        row.place.set(inspect.unwrap(row.place.get()))
with keras_mp.autocast("bfloat16"):
    pass
"""


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_tensorflow_that_does_not_use_a_function_is_refused(name):
    program = [sys.executable, "-c", PROGRAM.format(name=name)]
    error = subprocess.run(program, capture_output=True, text=True).stderr
    assert "RuntimeError: `keras_mp.autocast` does not know TensorFlow" in error
    assert BREAKAGES[name] in error

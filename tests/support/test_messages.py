"""Warnings that Python's default filter shows once are shown once for each line of each file."""

import os
import threading
import warnings

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.support import messages
from tests.common import once

pytestmark = once


def test_equal_lines_of_two_files_are_two_lines():
    lines = [messages.Line(file, 7) for file in ("train.py", "evaluate.py", "train.py")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for line in lines:
            messages.warn("a message of this test", line)
    assert [warning.filename for warning in caught] == ["train.py", "evaluate.py"]


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (__file__, None),
        (tf.__file__, "tensorflow"),
        (keras_mp.__file__, "keras_mp"),
        (threading.__file__, "python"),
        (os.path.join("site-packages", "optree", "ops.py"), "python"),
        ("__autograph_generated_file.py", "python"),
        (os.path.join(os.path.dirname(keras_mp.__file__), "__main__.py"), None),
    ],
    ids=["program", "tensorflow", "keras_mp", "python", "optree", "autograph", "main"],
)
def test_files_of_libraries(file, library):
    assert messages.library_of(file) == library
    assert messages.is_library(file) is (library is not None)

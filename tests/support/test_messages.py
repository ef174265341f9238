"""Warnings that Python's default filter shows once are shown once for each line of each file."""

import io
import os
import sys
import threading
import time
import warnings

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.support import messages, progress
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


# The line that says how far a tool is.


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_is_told_what_takes_long(monkeypatch, stream):
    monkeypatch.setattr("sys.stderr", stream())
    monkeypatch.setattr(progress, "_PATIENCE", 0.01)
    monkeypatch.setattr(progress, "_PERIOD", 0.02)
    with progress.Progress("what_if", parts=2) as shown:
        shown.begin("in float32")
        shown.begin("in float16")
        while stream is Terminal and not shown_text():
            time.sleep(0.01)
    if stream is Terminal:
        first, *_, last = shown_text().split("\r")[1:]
        assert first.rstrip() == "what_if: in float16 (2 of 2), 0 s"
        # The line is empty again.
        assert (shown_text().split("\r")[-2].strip(), last) == ("", "")
    else:
        assert shown_text() == ""


def shown_text():
    return sys.stderr.getvalue()


def test_what_is_quick_says_nothing(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    with progress.Progress("what_if", parts=1) as shown:
        shown.begin("in float32")
    assert shown_text() == ""

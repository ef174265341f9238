"""The line that says how far a tool is."""

import io
import sys
import time

import pytest

from keras_mp.support import progress
from tests.common import once


class Terminal(io.StringIO):
    def isatty(self):
        return True


@once
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


@once
def test_what_is_quick_says_nothing(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    with progress.Progress("what_if", parts=1) as shown:
        shown.begin("in float32")
    assert shown_text() == ""

"""Warnings that Python's default filter shows once are shown once for each line of each file."""

import warnings

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

"""The page of what the tools print is what they print."""

import re

import pytest

from benchmarks import screens
from keras_mp.support import text_tables
from tests.common import once

PAGE = screens.PAGE.read_text()


@once
@pytest.mark.parametrize("name", list(screens.MODELS))
def test_the_page_shows_what_is_printed(name):
    of_model = PAGE.partition(f"## {name}\n")[2].partition("\n## ")[0]
    shown = dict(re.findall(r"### `([^\n]*)`\n\n```\n(.*?)\n```\n", of_model, re.DOTALL))
    for screen in screens.screens(name):
        lines = screen.text.splitlines()
        # Advice is sentences.
        assert "advise" in screen.call or max(map(len, lines)) <= text_tables.WIDTH
        # Numbers, and which rows are the worst, are those of a machine.
        assert masked(lines[0]) == masked(shown[screen.call].splitlines()[0]), screen.call
        assert abs(len(lines) - len(shown[screen.call].splitlines())) <= 5


def masked(line):
    return re.sub(r"[\d^.,]+.*", "#", line)

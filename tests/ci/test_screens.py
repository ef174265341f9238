"""The page of what the tools print is what they print."""

import re

import pytest

from benchmarks import screens
from keras_mp.support import text_tables
from tests.common import once

PAGE = screens.PAGE.read_text()


def shown(name):
    """The section of a model: {call: what it printed}."""
    of_model = PAGE.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    return dict(re.findall(r"#### `([^\n]*)`\n\n```\n(.*?)\n```\n", of_model, re.DOTALL))


def widths(call, text):
    # Advice is sentences.
    return [] if "advice" in call else [len(line) for line in text.splitlines()]


@once
def test_the_page_shows_what_is_printed():
    # The tools look at MobileNetV2 for minutes, and say the same kinds of things.
    on_page = shown("transformer")
    printed = {screen.call: screen.text for screen in screens.screens("transformer")}
    assert on_page.keys() == printed.keys()
    for call, text in printed.items():
        assert max(widths(call, text), default=0) <= text_tables.WIDTH
        lines, expected = text.splitlines(), on_page[call].splitlines()
        # Numbers, and which rows are the worst, are those of a machine.
        assert masked(lines[0]) == masked(expected[0]), call
        assert abs(len(lines) - len(expected)) <= 5


@once
@pytest.mark.parametrize("name", list(screens.MODELS))
def test_sections_of_the_page_have_the_same_calls_and_fit_a_terminal(name):
    assert shown(name).keys() == shown("transformer").keys() != set()
    for call, text in shown(name).items():
        assert max(widths(call, text), default=0) <= text_tables.WIDTH, call


def masked(line):
    return re.sub(r"[\d^.,]+.*", "#", line)

"""The page of what the tools print is what they print."""

import re

from benchmarks import screens
from keras_mp.support import text_tables
from tests.common import once

PAGE = screens.PAGE.read_text()


def shown():
    """The section: {call: what it printed}."""
    section = PAGE.partition("\n## Output of the tools\n")[2]
    return dict(re.findall(r"### `([^\n]*)`\n\n```\n(.*?)\n```\n", section, re.DOTALL))


def widths(call, text):
    # Advice is sentences.
    return [] if "advice" in call else [len(line) for line in text.splitlines()]


@once
def test_the_page_shows_what_is_printed():
    on_page = shown()
    printed = {screen.call: screen.text for screen in screens.screens()}
    assert on_page.keys() == printed.keys()
    for call, text in printed.items():
        for of in (text, on_page[call]):
            assert max(widths(call, of), default=0) <= text_tables.WIDTH
        lines, expected = text.splitlines(), on_page[call].splitlines()
        # Numbers, and which rows are the worst, are those of a machine.
        assert masked(lines[0]) == masked(expected[0]), call
        assert abs(len(lines) - len(expected)) <= 5


def masked(line):
    return re.sub(r"[\d^.,]+.*", "#", line)

"""Tables as text: what is left out of those that are shortened."""

import pytest

from keras_mp.support import text_tables
from keras_mp.support.text_tables import RankedRow
from tests.common import once


@once
def test_names_of_repeated_blocks_are_one():
    names = [f"block_{i}/dense_{2 * i}/kernel" for i in (0, 1, 2, 5, 7, 9)] + ["head/kernel"]
    [(name, group), (other, _)] = text_tables.merged(names, str)
    assert name == "block_[0-2,5,...,9]/dense_[0,2,...,18]/kernel"
    assert (len(group), other) == (6, "head/kernel")
    # What differs in something else does not belong together.
    assert len(text_tables.merged(names, str, lambda name: "5" in name)) == 3


@once
def test_a_row_of_equal_layers_has_the_cells_of_the_worst():
    rows = [RankedRow((f"a_{i}", str(i), ""), (i,)) for i in (1, 3, 2)] + [
        RankedRow(("b", "9", ""))
    ]
    lines = list(text_tables.shortened(("layer", "lost", "empty"), rows, most=1))
    assert lines == ["layer    lost", "a_[1-3]     3", "... and 1 more row: to_text(rows=None)"]
    lines = list(text_tables.shortened(("layer", "lost", "empty"), rows, most=None))
    assert [line.split()[0] for line in lines] == ["layer", "a_1", "a_3", "a_2", "b"]


@once
@pytest.mark.parametrize("lengths", [(150, 10), (150, 150), (10, 200)], ids=str)
def test_no_line_is_too_wide(lengths):
    cells = tuple("ab" * (length // 2) for length in lengths)
    [_, line] = text_tables.shortened(("", "", "n"), [RankedRow((*cells, "12"))], left=(0, 1))
    assert len(line) == 100
    assert line.endswith("  12")
    assert line.count("...") == sum(length > 90 for length in lengths)

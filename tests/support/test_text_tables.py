"""Tables as text: what is left out of those that are shortened."""

from keras_mp.support import text_tables
from tests.common import once


@once
def test_names_of_repeated_blocks_are_one():
    names = [f"block_{i}/dense_{2 * i}/kernel" for i in (0, 1, 2, 5, 7, 9)] + ["head/kernel"]
    [(name, group), (other, _)] = text_tables.merged(names, str)
    assert name == "block_[0-2,5,...,9]/dense_[0,2,...,18]/kernel"
    assert (len(group), other) == (6, "head/kernel")
    # What differs in something else does not belong together.
    assert len(text_tables.merged(names, str, lambda name: "5" in name)) == 3

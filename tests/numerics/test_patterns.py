"""One kind of patterns chooses layers, variables and operations."""

import pytest

from tests.common import once
from tests.numerics.tools import patterns

PATHS = ["block", "block/dense_1", "block/dense_1/kernel", "head/kernel", "odd[1]"]


@once
@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("block", PATHS[:3]),
        ("dense_*", PATHS[1:3]),
        ("*/kernel", PATHS[2:4]),
        ("kernel", PATHS[2:4]),
        ("odd[1]", PATHS[4:]),
        (["head", "odd*"], PATHS[3:]),
    ],
)
def test_a_path_a_name_and_what_is_inside(pattern, found):
    assert patterns.chosen("outputs", pattern, PATHS) == found

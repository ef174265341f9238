"""Where numbers begin to be not finite, by which operation takes what of which."""

import numpy as np
import pytest

from keras_mp.numerics.results import begun

# 0 -> 1 -> 2 -> 4, and 3 -> 4.
TAKES = [(), (0,), (1,), (), (2, 3)]


@pytest.mark.parametrize(
    ("bad", "matters", "expected"),
    [
        ([], [4], []),
        ([1, 2, 4], [4], [1]),
        ([1, 2], [4], []),
        ([1, 2, 3, 4], [4], [1, 3]),
        ([1, 2, 3, 4], [2], [1]),
        ([0, 2, 4], [0, 4], [0, 2]),
    ],
    ids=["nothing", "chain", "no_effect", "two", "one_matters", "once_more"],
)
def test_what_begins_and_matters(bad, matters, expected):
    def among(places):
        return np.isin(np.arange(5), places)

    assert begun(TAKES, among(bad), among(matters)) == expected
    assert begun(TAKES, among(bad), among(matters), np.zeros(5, bool)) == []
    everywhere = begun(TAKES, among(bad), among(matters), np.ones(5, bool))
    assert {*expected} <= {*everywhere}

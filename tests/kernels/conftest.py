"""Operations that a test runs by themselves count as those of a layer of keras_mp."""

from collections.abc import Iterator

import pytest

from tests import inside


@pytest.fixture(autouse=True)
def in_reach() -> Iterator[None]:
    """Runs a test in the reach of what keras_mp replaces."""
    with inside.in_reach("bfloat16"):
        yield

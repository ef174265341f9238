"""Columns of text. This module needs nothing but Python."""

from collections.abc import Collection, Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> Iterator[str]:
    """Yields the lines of a table.

    Args:
        rows: the cells of each line, the header's first.
        left: ints. The columns that are aligned to the left; the others are aligned to the right.
            Defaults to the first.

    Example:

    >>> from keras_mp.support import columns
    >>> for line in columns.aligned([("dtype", "casts"), ("float16", "2")]):
    ...     print(line)
    dtype    casts
    float16      2
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()

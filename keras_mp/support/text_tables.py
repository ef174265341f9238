"""Tables as text, with aligned columns, and the worst rows of large tables.

A model has hundreds of layers, too many for a table that one reads. All tools leave rows out by
`shortened`: the rows of equal layers in repeated blocks become one, the worst come first, and the
last line says how many are missing.
"""

import itertools
import re
import textwrap
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from keras_mp.support.columns import aligned

# The default number of rows, and the largest number of characters in a line.
MOST, WIDTH = 10, 100

# Texts are not cut to fewer characters.
_NARROWEST = 12

_Item = TypeVar("_Item")


class RankedRow(NamedTuple):
    """A row of a table that may be shortened.

    Attributes:
        cells: tuple of str.
        rank: tuple of numbers: the row with the larger tuple is worse.
        alike: a value that is the same for rows of equal layers.
    """

    cells: tuple[str, ...]
    rank: tuple[float, ...] = ()
    alike: Hashable = ()


def shortened(
    header: Sequence[str],
    rows: Sequence[RankedRow],
    most: int | None = MOST,
    left: Collection[int] = (0,),
    name: int = 0,
) -> Iterator[str]:
    """Yields the lines of a table of the worst rows, at most 100 characters wide.

    Rows of equal layers become one, with the cells of the worst of them. Empty columns are left
    out, and long texts are cut in the middle.

    Args:
        header: the titles of the columns.
        rows: sequence of `RankedRow`s.
        most: int, the highest number of rows; None for all rows, unchanged and of any width.
        left: ints. The columns of texts, which are aligned to the left. Defaults to the first.
        name: int. The column of paths. Defaults to the first.

    Example:

    >>> from keras_mp.support import text_tables
    >>> rows = [text_tables.RankedRow((f"block_{i}/dense", str(i)), (i,)) for i in range(4)]
    >>> rows += [text_tables.RankedRow(("head", "0"), (0,))]
    >>> for line in text_tables.shortened(("layer", "lost"), rows, most=1):
    ...     print(line)
    layer              lost
    block_[0-3]/dense     3
    ... and 1 more row: to_text(rows=None)
    """
    if most is None:
        yield from aligned([header, *(row.cells for row in rows)], left)
        return
    groups = merged(
        sorted(rows, key=lambda row: row.rank, reverse=True),
        lambda row: row.cells[name],
        lambda row: (row.alike, *(cell == "" for cell in row.cells)),
    )
    worst = [(title, group[0].cells) for title, group in groups[:most]]
    lines = [header, *((*cells[:name], title, *cells[name + 1 :]) for title, cells in worst)]
    columns = dict(enumerate(zip(*lines, strict=True)))
    used = {i: column for i, column in columns.items() if i == name or any(column[1:])}
    widths = {i: max(map(len, column)) for i, column in used.items()}
    texts = [i for i in left if i in used]
    while sum(widths.values()) + 2 * (len(widths) - 1) > WIDTH:
        widest = max(texts, key=lambda i: widths[i])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    cut = [[fitted(cell, widths[i]) for cell in column] for i, column in used.items()]
    yield from aligned([*zip(*cut, strict=True)], [[*used].index(i) for i in texts])
    yield from more(sum(len(group) for _, group in groups[most:]))


def more(count: int, what: str = "row") -> Iterator[str]:
    """Yields a line that says how many rows are missing, if any are.

    Args:
        count: int. The number of missing rows.
        what: str. The word for one of them. Defaults to "row".
    """
    if count:
        yield f"... and {count} more {what}{'s' * (count > 1)}: to_text(rows=None)"


def merged(
    items: Iterable[_Item],
    name: Callable[[_Item], str],
    alike: Callable[[_Item], Hashable] = lambda item: (),
) -> list[tuple[str, list[_Item]]]:
    """Groups items whose names differ only in numbers, as in repeated blocks.

    Args:
        items: iterable of items. Groups come in the order of their first items.
        name: function of an item that returns its name.
        alike: function of an item that returns a value, which is the same within a group.

    Returns:
        list of tuples of a name for all of a group, and the group.

    Example:

    >>> from keras_mp.support import text_tables
    >>> text_tables.merged(["a_1/b", "c", "a_2/b", "a_4/b"], str)
    [('a_[1-2,4]/b', ['a_1/b', 'a_2/b', 'a_4/b']), ('c', ['c'])]
    >>> [(name, _)] = text_tables.merged([f"a_{i}/b_{2 * i}" for i in (0, 1, 3, 5, 7)], str)
    >>> name == "a_[0-1,3,...,7]/b_[0,2,...,14]"
    True
    >>> text_tables.merged(["a_1", "a_2"], str, lambda name: "2" in name)
    [('a_1', ['a_1']), ('a_2', ['a_2'])]
    """
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault((re.sub(r"\d+", "#", name(item)), alike(item)), []).append(item)
    return [(_common_name([name(each) for each in group]), group) for group in groups.values()]


def wrapped(text: str, indent: str = "") -> list[str]:
    """Breaks a text into lines that are no wider than a table.

    Args:
        text: str, of one line.
        indent: str. The beginning of all lines but the first. Defaults to an empty one.
    """
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]


def fitted(text: str, width: int) -> str:
    """Cuts a text in the middle, to `width` characters at most."""
    if len(text) <= width:
        return text
    end = 2 * (width - 3) // 3
    return f"{text[: width - 3 - end]}...{text[-end:]}"


def _common_name(names: Sequence[str]) -> str:
    """Returns one name for names that differ only in numbers."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else f"[{_ranges(part)}]" for part in parts)


def _ranges(numbers: Iterable[str]) -> str:
    ordered = enumerate(sorted(set(map(int, numbers))))
    # In a run of numbers without gaps, the difference to the index stays the same.
    runs = itertools.groupby(ordered, lambda pair: pair[1] - pair[0])
    ends = [(pairs[0][1], pairs[-1][1]) for pairs in (list(run) for _, run in runs)]
    texts = [f"{low}-{high}" if high > low else f"{low}" for low, high in ends]
    return ",".join(texts if len(texts) <= 3 else [*texts[:2], "...", texts[-1]])

"""What the results of all tools have in common: findings, a text, and JSON."""

import csv
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, cast

from keras_mp.support import text_tables
from keras_mp.support.messages import Line


class Finding(NamedTuple):
    """Something that is wrong with a model in 16 bits.

    Attributes:
        hazard: str. Its name.
        where: str. The path of the layer, or what else it is about.
        line: the line of a program, or None where only libraries had a part in it.
        why: str. Why it matters, with what was measured on the batch.
        cure: str. What to change.
        units: float. How many times as far from the reference as rounding explains; None for a
            hazard, whose numbers `why` has.

    Example:

    >>> from keras_mp.numerics import Finding
    >>> print(Finding("a loss in 16 bits", "loss", None, "It is 2 % off.", "Cast to float32."))
    a loss in 16 bits, in loss
        It is 2 % off.
        Cure: Cast to float32.
    """

    hazard: str
    where: str
    line: Line | None
    why: str
    cure: str
    units: float | None = None

    @property
    def path(self) -> str:
        """`where` without what stands in parentheses: the path, if it is a layer."""
        return self.where.partition(" (")[0]

    @property
    def place(self) -> Hashable:
        """The hazard, the layer and the line: equal for findings about the same thing."""
        return self.hazard, self.where, self.line

    def __str__(self) -> str:
        at = ""
        if self.line is not None and not self.where.endswith(f"({self.line.short})"):
            at = f" ({self.line.file}:{self.line.number})"
        return f"{self.hazard}, in {self.where}{at}\n    {self.why}\n    Cure: {self.cure}"


class Result:
    """The result of a tool. `str` of it, and `print`, give a text."""

    def to_text(self, rows: int | None = text_tables.MOST) -> str:
        """Returns what `print` shows.

        Args:
            rows: int. How many findings, or rows of a table, are shown at most; None for all of
                them. Defaults to 10.

        Returns:
            str of several lines, of at most 100 characters each unless `rows` is None.
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as dicts, lists, strings and numbers, as JSON has them.

        Infinity is the string "inf" in JSON, which has no such number.
        """
        return dataclasses.asdict(cast(Any, self))

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """Returns all of it as JSON, and writes it to a file.

        Args:
            path: of the file. Defaults to none.
        """
        text = json.dumps(plain(self.to_dict()), indent=1)
        if path is not None:
            pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def rows_of_csv(self) -> Iterable[Sequence[Any]]:
        """Yields the header and the lines of `to_csv`."""
        raise NotImplementedError

    def to_csv(self, path: str | os.PathLike) -> None:
        """Writes a line for each row, with all that was measured of it.

        Args:
            path: of the file.
        """
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(self.rows_of_csv())

    def __str__(self) -> str:
        return self.to_text()


def plain(value: Any) -> Any:
    """Returns a result as dicts, lists, strings and numbers."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

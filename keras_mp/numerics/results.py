"""What the results of all tools have in common: a text, and JSON."""

import csv
import os
from collections.abc import Iterable, Sequence
from typing import Any

from keras_mp.support import json_text, text_tables


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

        Infinity is the string "inf", since JSON has no such number.
        """
        raise NotImplementedError

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """Returns all of it as JSON, and writes it to a file.

        Args:
            path: of the file. Defaults to none.
        """
        return json_text.to_json(json_text.plain(self.to_dict()), path)

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

"""Results of tools as JSON."""

import json
import math
import os
from typing import Any


def to_json(described: Any, path: str | os.PathLike | None = None) -> str:
    """Returns the JSON of a result, and writes it to a file if a path is given.

    Args:
        described: the result, as `plain` returns it.
        path: the path of the file. By default none is written.
    """
    text = json.dumps(described, indent=1)
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    return text


def plain(value: Any) -> Any:
    """Returns a result as dicts, lists, strings and numbers.

    Infinity is the string "inf", since JSON has no such number.

    Example:

    >>> from keras_mp.numerics import json_text
    >>> json_text.plain({"errors": (1.0, float("inf"))})
    {'errors': [1.0, 'inf']}
    """
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

"""What all tools have in common: findings, their causes and cures, a text, and JSON."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from keras_mp.support import text_tables
from keras_mp.support.messages import Line

# What a comparison finds, by the side.
DIFFERENCES = {side: f"a difference in the {side} pass" for side in ("forward", "backward")}


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

    def __str__(self) -> str:
        at = f" ({self.line.file}:{self.line.number})" if self.line else ""
        return f"{self.hazard}, in {self.where}{at}\n    {self.why}\n    Cure: {self.cure}"


class Result:
    """The result of a tool. `str` of it, and `print`, give a text."""

    def to_text(self, rows: int | None = text_tables.MOST) -> str:
        """Returns what `print` shows.

        Args:
            rows: int. How many findings, or rows of a table, are shown at most, the worst first;
                None for all of them, in their order. Defaults to 10.

        Returns:
            str of several lines, of at most 100 characters each unless `rows` is None.
        """
        return "\n".join(self._lines(rows)).rstrip()

    def _lines(self, rows: int | None) -> Iterable[str]:
        """Returns its lines."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as dicts, lists, strings and numbers, as JSON has them.

        Infinity is the string "inf", since JSON has no such number.
        """
        fields = (each.name for each in dataclasses.fields(cast(Any, self)) if each.compare)
        return plain({name: getattr(self, name) for name in fields})

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """Returns all of it as JSON, and writes it to a file.

        Args:
            path: of the file. Defaults to none.
        """
        text = json.dumps(plain(self.to_dict()), indent=1)
        if path is not None:
            pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {str(self).splitlines()[0]}>"


def listed(found: Sequence[Finding], rows: int | None) -> Iterator[str]:
    """Yields the lines of findings, those of equal layers in repeated blocks once.

    Args:
        found: findings.
        rows: int. How many are shown at most; None for all, each by itself.
    """
    alike = lambda each: (each.hazard, each.cure, rows is None and id(each))  # noqa: E731
    groups = text_tables.merged(found, lambda each: each.where, alike)
    for i, (where, group) in enumerate(groups[:rows], 1):
        times = f"{len(group)} times. The first: " * (len(group) > 1)
        text = f"[{i}] {group[0]._replace(where=where, why=times + group[0].why)}"
        yield ""
        for line in text.splitlines():
            yield from text_tables.wrapped(line, "    ")
    if left := len(found) - sum(len(group) for _, group in groups[:rows]):
        yield from ["", *text_tables.more(left, "finding")]


def of_batches(found: Sequence[Iterable[Finding]]) -> list[Finding]:
    """Returns what was found on some batches: the worst of each place, and on how many it was."""
    places: dict[Any, dict[int, Finding]] = {}
    for i, findings in enumerate(found):
        for each in findings:
            places.setdefault(each[:3], {}).setdefault(i, each)
    worst = [(max(of.values(), key=lambda e: e.units or 0), len(of)) for of in places.values()]
    on = f", on {{}} of {len(found)} batches." if len(found) > 1 else "."
    return [e._replace(why=e.why.removesuffix(".") + on.format(count)) for e, count in worst]


def plain(value: Any) -> Any:
    """Returns a result, or a part of one, as dicts, lists, strings and numbers."""
    for method in ("to_dict", "_asdict"):
        value = getattr(value, method)() if hasattr(value, method) else value
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# Inputs of a batch, and weights, that make an overflow their own: networks begin with numbers of
# about 1, and few that train have weights of more than 10.
LARGE = {"The inputs of the batch": 1000.0, "Weights": 100.0}

_NORMALIZE = "Normalize the inputs first, in float32: tf.keras.layers.Normalization or Rescaling."

# By cause, what to change.
CURES = {
    "Weights": "Training has diverged: lower the learning rate, and restart from earlier weights. "
    "If such weights are intended: ",
    "The inputs of the batch": f"{_NORMALIZE} Or: ",
    "an input": _NORMALIZE,
    "a constant": "Use a number that the dtype can represent: at most {largest:.5g}. For a mask, "
    "use its lowest number, {lowest:.5g}, or tf.where on the result.",
    "too large": "Compute it in float32, or scale its inputs down; or, in place of float16, use "
    "mixed_bfloat16.",
    "too large for float32": "Scale its inputs down: float32 alone is not enough.",
    "too small": "Compute it in float32, or scale its inputs up. An epsilon must be a number that "
    "{dtype} can represent.",
    "not finite": "Keep its inputs where its results are finite: for example, with "
    "tf.maximum(x, 1e-4) before a division or a logarithm.",
    "dtypes": "Cast there to self.compute_dtype, and make variables with `add_weight`, which casts "
    'them; or create the layer with dtype="float32".',
    "a custom gradient": "Let the gradient function of tf.custom_gradient return gradients in the "
    "dtypes of its inputs: tf.cast(gradient, x.dtype).",
}


class Observed(NamedTuple):
    """Something in a traced step that may be a hazard, with what tells whether it is one.

    Attributes:
        numbers: dict of tensors of the graph, which are computed together with the step.
        said: function of these numbers. It returns the finding; None if they show that nothing was
            lost. Its place may be an operation, whose layer and line `audit` adds.
    """

    numbers: dict[str, Any]
    said: Callable[..., Finding | None]


def observed(at: Any, hazard: str, why: str, cure: str, matters: Any = True, **of: Any) -> Observed:
    """Returns something that is a hazard if it does harm.

    Args:
        at: an operation, or words for what it is about.
        hazard: str. Its name.
        why: str. Why it matters, with the names of numbers in braces, as `str.format` takes them.
        cure: str. What to change.
        matters: whether it does harm: a tensor of the graph, or True.
        **of: tensors of the graph.
    """

    def said(matters: bool, **numbers: Any) -> Finding | None:
        return Finding(hazard, at, None, why.format(**numbers), cure) if matters else None

    return Observed({"matters": matters, **of}, said)


def begun(
    inputs: Sequence[Sequence[int]], is_bad: np.ndarray, matters: np.ndarray, begins: Any = None
) -> list[int]:
    """Returns the operations where numbers begin to be not finite, and reach what matters.

    Args:
        inputs: of each operation, the places of those before it whose results it takes.
        is_bad: array of bool: whose results are not finite.
        matters: array of bool: whose results must be finite.
        begins: array of bool: which have finite inputs. Defaults to what `is_bad` says of them.
    """
    reaches, found = is_bad & matters, []
    for i in reversed(np.flatnonzero(is_bad)):
        bad = [j for j in inputs[i] if is_bad[j]]
        if reaches[i]:
            reaches[bad] = True
            if not bad if begins is None else begins[i]:
                found.append(int(i))
    return found[::-1]

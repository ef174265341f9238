"""How slow 16-bit kernels are on this CPU, as a table says.

No clock in the program ever decides it. The table that ships with keras_mp (`measured.py`) has the
times by the kind of the CPU. A program may name a file in its place, which
`python -m keras_mp.hardware --tune FILE` has written. The same table gives the same numbers, on any
machine and however busy it is.

This module needs TensorFlow only.
"""

import contextlib
import functools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from keras_mp.kernels import measured
from keras_mp.support import cpu
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

# By operation and dtype: how many times as long as in float32; 0 if it cannot be run.
Times = dict[str, dict[str, float]]

VARIABLE = "KERAS_MP_TABLE"
_FORMAT = 1


class Table(NamedTuple):
    """Times of kernels on a CPU.

    Attributes:
        times: by operation and dtype, how many times as long as float32's with casts they take;
            matrix products and convolutions with their gradients also under these names.
        source: str. Where the table is from, for people.
        is_of_kind: bool. Whether such CPUs were measured.
    """

    times: Mapping[str, Mapping[str, float]]
    source: str
    is_of_kind: bool = True

    def time(self, op: str, dtype: str) -> float:
        """Returns how many times as long as in float32 an operation takes; 0 if not known."""
        return self.times.get(op, {}).get(dtype, 0.0)


class _Named:
    """The table that the program has named."""

    table: Table | None = None


_named = _Named()


def use(path: str | os.PathLike[str] | None) -> None:
    """Takes the table of a file, or for None that of keras_mp, from this call on.

    Args:
        path: the file, or None.

    Raises:
        ValueError: it is no such file.
    """
    _named.table = None if path is None else _read(pathlib.Path(path), f"path={str(path)!r}")


@contextlib.contextmanager
def on_trial(times: Times) -> Iterator[None]:
    """A context manager with a table that is still being made."""
    before, _named.table = _named.table, Table(times, "a table on trial")
    try:
        yield
    finally:
        _named.table = before


def current() -> Table:
    """Returns the table in use.

    It is that of `use`, that of the environment, or that of keras_mp.

    Raises:
        ValueError: the environment names no such file.
    """
    return _of_process() if _named.table is None else _named.table


def of_file(times: Mapping[str, Mapping[str, float]], machine: Mapping[str, Any]) -> str:
    """Returns the text of a file with the times of a machine.

    Args:
        times: by operation and dtype.
        machine: a description of the machine, for people.
    """
    found = {"format": _FORMAT, "machine": machine, "times": times}
    return json.dumps(found, indent=1) + "\n"


@functools.cache
def _of_kind(kind: str) -> Table:
    source = "keras_mp's table for CPUs of the kind"
    if kind in measured.BY_KIND:
        return Table(measured.BY_KIND[kind], f"{source} {kind!r}")
    below = measured.NEAREST_BELOW.get(kind)
    if below is not None:
        why = f"the nearest one below {kind!r}, which was not measured"
        return Table(measured.BY_KIND[below], f"{source} {below!r}, {why}", is_of_kind=False)
    source = f"keras_mp's table for CPUs of kinds that were not measured ({kind})"
    return Table(_slow_on_all(), source, is_of_kind=False)


def _slow_on_all() -> Times:
    """Returns, for kernels, the shortest times of all CPUs.

    Slow is only what is slow on each of them.
    """
    return {
        op: {
            dtype: min(times[op][dtype] for times in measured.BY_KIND.values())
            for dtype in LOW_PRECISION_NAMES
        }
        for op in next(iter(measured.BY_KIND.values()))
        if op not in (measured.MATRIX_PRODUCT, measured.CONVOLUTION)
    }


@functools.cache
def _of_process() -> Table:
    """Returns the table for the whole process.

    It is the one that the environment names, or else that of keras_mp.
    """
    # TensorFlow also reads once what the environment says of oneDNN.
    path = os.environ.get(VARIABLE)
    if not path:
        return _of_kind(cpu.kind())
    return _read(pathlib.Path(path), f"{VARIABLE}={path!r}")


def _read(path: pathlib.Path, received: str) -> Table:
    try:
        found = json.loads(path.read_text())
        if found["format"] != _FORMAT:
            raise ValueError(f"its format is {found['format']!r}")
        times = {
            op: {dtype: float(by_dtype[dtype]) for dtype in LOW_PRECISION_NAMES}
            for op, by_dtype in found["times"].items()
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            "Expected a file that `python -m keras_mp.hardware --tune FILE` has written. "
            f"Received: {received} ({error!r})"
        ) from error
    numbers = [number for by_dtype in times.values() for number in by_dtype.values()]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError(f"Expected times of at least 0. Received: {received}")
    return Table({**_of_kind(cpu.kind()).times, **times}, f"the table in {path}")

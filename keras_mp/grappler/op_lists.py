"""The lists by which TensorFlow's passes choose operations, and changes to them.

TensorFlow 1.15, `auto_mixed_precision_lists.h`. The lists are in TensorFlow's C++, which reads
environment variables each time that it rewrites a graph; so nothing here has a copy of them.
"""

import os
import pathlib
import re
import tempfile
import threading
from collections.abc import Collection, Mapping

import tensorflow as tf

from keras_mp.grappler import optimize
from keras_mp.grappler.passes import PASSES
from keras_mp.support import cpu

_NAMES = ("allow", "infer", "deny", "clear")
_PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
_ALLOWED = f"{_PREFIX}ALLOWLIST_ADD"

# Without a suitable GPU the pass of float16 does nothing. This one has the same lists.
_TRIED_WITH = {**PASSES, "float16": "auto_mixed_precision_cpu"}

# An operation that is on no list, for the pass to find.
_PROBE = "BesselI0e"

_lock = threading.Lock()
# What undoes the changes that were made here to the environment.
_undo: dict[str, str | None] = {}
# The list on which each operation was put by `change`, and those that `keep_out` has taken off.
_changed: dict[str, str] = {}
_kept: dict[str, str] = {}


def can_be_read(dtype: str) -> bool:
    """Whether TensorFlow shows its lists: for bfloat16 only where it rewrites to it.

    Args:
        dtype: str, "float16" or "bfloat16".
    """
    return dtype == "float16" or cpu.takes_rewrite(dtype)


def read(dtype: str) -> dict[str, frozenset[str]]:
    """Asks TensorFlow for its lists.

    Args:
        dtype: str, "float16" or "bfloat16".

    Returns:
        dict of "allow", "infer", "deny", "clear" and the names of operations.

    Raises:
        RuntimeError: TensorFlow does not tell, as when an operation is on two lists, or where they
            cannot be read.
    """
    if not can_be_read(dtype):
        raise RuntimeError(
            "TensorFlow rewrites graphs to bfloat16 on CPUs with AVX512 or AVX-NE-CONVERT only, "
            "and with oneDNN (TF_ENABLE_ONEDNN_OPTS=1). On others it leaves graphs in float32, and "
            f"shows no lists. Received: dtype={dtype!r}"
        )
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.optimizers.append(_TRIED_WITH[dtype])
    config.graph_options.rewrite_options.min_graph_nodes = -1  # however small the graph
    # The pass writes no lists unless it has something to do.
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [8])
        tf.identity(getattr(tf.raw_ops, _PROBE)(x=x), name="result")
    # It writes them into a folder that an environment variable names, for debugging.
    with _lock, tempfile.TemporaryDirectory() as folder:
        allowed = ",".join(filter(None, (os.environ.get(_ALLOWED), _PROBE)))
        before = _set({f"{_PREFIX}LOG_PATH": folder, _ALLOWED: allowed})
        try:
            optimize.graph(config, optimize.with_fetches(graph.as_graph_def(), ["result"]))
        finally:
            _set(before)
        text = "".join(each.read_text() for each in pathlib.Path(folder).glob("paintbuckets*.txt"))
    found = {
        name.lower(): frozenset(ops.split()) - {_PROBE}
        for name, ops in re.findall(r"^(\w+)List:\n((?:\w+\n)*)", text, re.MULTILINE)
    }
    if found.keys() != {*_NAMES}:
        raise RuntimeError(
            "TensorFlow's lists of operations cannot be read. Do the environment variables "
            f"{_PREFIX}* put an operation on two of them? Expected {_NAMES}. Received: "
            f"{sorted(found)}"
        )
    return {name: found[name] for name in _NAMES}


def change(changes: Mapping[str, Collection[str]]) -> None:
    """Puts operations on lists, and undoes what was changed here before.

    Args:
        changes: mapping of the name of a list, or "none", to names of operations, which are taken
            from all other lists.

    Raises:
        TypeError: one is a str in place of names.
        ValueError: TensorFlow has no such operation, or one is named twice.
    """
    for name, ops in changes.items():
        if isinstance(ops, str):
            raise TypeError(f"`{name}` must be a list of names. Received: {name}={ops!r}")
    named = [op for ops in changes.values() for op in ops]
    unknown = [op for op in named if not (hasattr(tf.raw_ops, op) or op.startswith("_"))]
    twice = sorted({op for op in named if named.count(op) > 1})
    if unknown or twice:
        raise ValueError(
            "Expected names of TensorFlow's operations, as in tf.raw_ops, each once. Received: "
            f"{unknown or twice}"
        )
    _write(_changed, {op: name for name, ops in changes.items() for op in ops})


def keep_out(ops: Collection[str]) -> None:
    """Takes operations off all lists, but for those that `change` has put on one.

    Those that were taken off before are put back.

    Args:
        ops: names of operations.
    """
    _write(_kept, dict.fromkeys(ops, "none"))


def kept_out() -> frozenset[str]:
    """Returns operations that `keep_out` has taken off, and `change` has put nowhere."""
    return frozenset(_kept.keys() - _changed.keys())


def _write(own: dict[str, str], ops: Mapping[str, str]) -> None:
    with _lock:
        _set(_undo)
        _undo.clear()
        own.clear()
        own.update(ops)
        wanted = _kept | _changed
        if not wanted:
            return
        # TensorFlow reads those with its older names of the lists after the others.
        variables = {
            name: {*value.split(",")} - {"", *wanted}
            for name, value in os.environ.items()
            if name.startswith(_PREFIX) and name.endswith(("LIST_ADD", "LIST_REMOVE"))
        }
        for op, target in wanted.items():
            for name in _NAMES:
                verb = "ADD" if name == target else "REMOVE"
                variables.setdefault(f"{_PREFIX}{name.upper()}LIST_{verb}", set()).add(op)
        _undo.update(_set({name: ",".join(sorted(each)) for name, each in variables.items()}))


def _set(variables: Mapping[str, str | None]) -> dict[str, str | None]:
    """Sets environment variables, or removes them, and returns what they were."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update({name: value for name, value in variables.items() if value})
    return before

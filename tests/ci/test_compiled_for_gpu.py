"""What XLA's compiler for GPUs makes of code that computes on with what it has rounded.

It needs no GPU, but XLA's compiler for them: `.ci/run gpu`, or an environment that
`KERAS_MP_GPU_COMPILER` names, which `python -m benchmarks gpu_compiled` makes.
"""

import os
import pathlib
import subprocess
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import gpu_compiled, gpu_compiled_steps
from keras_mp.master_weights import methods
from keras_mp.numerics import histogram
from keras_mp.step import finiteness, skip_report, strategies
from keras_mp.support import kept_casts
from tests.ci import gpu_compiler
from tests.ci.test_gpu_compiled import COMPILER, needs_compiler
from tests.common import ROOT, once

pytestmark = [once, needs_compiler]

GENERATOR = np.random.default_rng(0)
# Without bits of float16's subnormal numbers that no method keeps, and beyond float16's largest.
MANY = (GENERATOR.normal(size=999) * 2.0 ** GENERATOR.integers(-12, 17, 999)).astype("float32")
MANY[:7] = [0, np.inf, np.nan, 65519.9, 65520, 1e-9, 3e38]
KEPT = MANY[7:][np.abs(MANY[7:]) < 65504]
KEPT = KEPT[np.abs(KEPT) > 2**-13]
FINITE = np.where(np.abs(MANY) < 65504, MANY, 1)
NOISE = GENERATOR.integers(0, 2**32, KEPT.size, dtype=np.uint32)


class Case(NamedTuple):
    """A function that is compiled; its arguments; what makes its results right."""

    function: Callable[..., object]
    arguments: list[np.ndarray]
    is_right: Callable[..., object]


def equals(expected):
    return lambda found: np.testing.assert_array_equal(found, expected)


def cases_of(dtype):
    as_numpy = dtype.as_numpy_dtype
    with np.errstate(over="ignore"):
        rounded = MANY.astype(as_numpy).astype("float32")
    kept = KEPT.astype(as_numpy).astype("float32")
    last_digit = {tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7}[dtype]
    copy, stochastic = (methods.method(each, dtype) for each in ("copy", "stochastic_rounding"))
    split, join = (getattr(methods, f"{verb}_{dtype.name}") for verb in ("split", "join"))

    def cast(values):
        return tf.cast(values, dtype)

    def bits_of(values):
        return np.asarray(values).astype(as_numpy).view(np.uint16)

    def copied(bits, values):
        return copy.join(tf.bitcast(bits, dtype), values)

    def is_neighbour(found):
        equals(found.astype(as_numpy).astype("float32"))(found)
        assert (np.abs(found - KEPT) < np.abs(KEPT) * last_digit).all()

    def rows(values):
        return tf.IndexedSlices(
            tf.reshape(cast(values), [-1, 1]), tf.range(values.shape[0]), tf.constant([999, 1])
        )

    def has_fates(found):
        bins = found.reshape(histogram.ROWS, histogram.COLUMNS)
        assert bins[0].sum() == (rounded == 0).sum()
        assert bins[-1, 0] == np.isinf(rounded).sum()
        assert histogram.Histogram(bins) == histogram.Histogram.count(tf.constant(rounded))

    cases = {
        "to 16 bits": Case(
            lambda x: tf.cast(kept_casts.to_16_bits(x, dtype), tf.float32), [MANY], equals(rounded)
        ),
        "as float32": Case(lambda x: kept_casts.as_float32(cast(x)), [MANY], equals(rounded)),
        "split, join": Case(lambda x: join(*split(x)), [KEPT], equals(KEPT)),
        "split": Case(lambda x: tf.cast(split(x)[0], tf.float32), [KEPT], equals(kept)),
        "remainder": Case(
            lambda x: split(x)[1], [KEPT], lambda found: equals(split(tf.constant(KEPT))[1])(found)
        ),
        "copy": Case(copied, [bits_of(KEPT), KEPT], equals(KEPT)),
        "copy, set since": Case(copied, [bits_of(kept / 2), KEPT], equals(kept / 2)),
        "copy, twice": Case(lambda x: copy.join(*copy.split(x, None)), [KEPT], equals(KEPT)),
        "stochastic rounding": Case(
            lambda x, noise: stochastic.join(*stochastic.split(x, lambda: noise)),
            [KEPT, NOISE],
            is_neighbour,
        ),
        "histogram": Case(lambda x: histogram.count_exponents(cast(x)), [MANY], has_fates),
        "reduction": Case(
            lambda x: strategies.cast(strategies.cast(x, dtype), x.dtype), [MANY], equals(rounded)
        ),
        "counts": Case(
            # What XLA compiles does not count them.
            lambda x: skip_report.count([], [cast(x)], None)[1],
            [MANY],
            equals([skip_report.UNCOUNTED] * 2),
        ),
    }
    for name, test in {
        "finite": lambda x: finiteness.all_finite([cast(x)]),
        "finite, flags": lambda x: skip_report.count([], [cast(x)], None)[1, 0] >= 0,
        "finite, rows": lambda x: finiteness.all_finite([rows(x)]),
    }.items():
        largest = FINITE.copy()
        largest[0] = 65520 if dtype == tf.float16 else 3.4e38
        cases[name] = Case(test, [FINITE], equals(True))
        cases[f"{name}, overflow"] = Case(test, [largest], equals(False))
    return {f"{name}, {dtype.name}": case for name, case in cases.items()}


CASES = {**cases_of(tf.float16), **cases_of(tf.bfloat16)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of each case, from what XLA has compiled for a GPU."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        # What packs bits rounds nothing, and the CPU cannot read how XLA writes it.
        patch.setattr(methods, "pack_bits", lambda bits: bits)
        patch.setattr(methods, "unpack_bits", lambda bits, shape: bits)
        for i, (function, arguments, _) in enumerate(CASES.values()):
            hlo = gpu_compiled_steps.hlo(function, *map(tf.constant, arguments))
            (folder / f"{i}.hlo").write_bytes(hlo)
            np.savez(folder / f"{i}.npz", *arguments)
    program = pathlib.Path(gpu_compiler.__path__[0]) / "run.py"
    python = gpu_compiled.compiler(COMPILER)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    subprocess.run([python, program, folder], check=True, env=environment)
    return {name: np.load(folder / f"{i}.results.npz")["arr_0"] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_what_is_rounded_stays_rounded(name, results):
    CASES[name].is_right(results[name])

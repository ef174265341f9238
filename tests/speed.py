"""What tests take this CPU for: one with 16-bit units, whatever it has.

Without units for a dtype keras_mp computes products in float32, and warns that 16 bits are slow.
Tests, their workers and the programs that they start would differ between machines by it. This is
the one place that decides for all of them; tests of the units and of the warning describe a
machine of their own (`tests/hardware/test_hardware.py`, `tests/kernels/test_slow.py`).

`KERAS_MP_TEST_UNITS` names the dtypes that have units, for example "none": with it `.ci/run` tests
what a CPU without units computes.
"""

import os
import warnings

import keras_mp
from tests import inside

UNITS = os.environ.get("KERAS_MP_TEST_UNITS", "float16 bfloat16").split()


def settle() -> None:
    """Decides for this process, and lets it count as warned."""
    inside.set_units(lambda dtype: dtype in UNITS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
        for dtype in ("float16", "bfloat16"):
            keras_mp.hardware.warn_if_slow(dtype)

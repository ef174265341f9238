"""What tests hear of the speed of this machine: nothing, whatever is fast here.

keras_mp warns once in a process of a policy that is slower than float32, and warnings are errors in
tests and in their workers. This is the one place that takes the warning away; tests of the warning
describe a machine, and a process in which nobody was warned (`tests/hardware/test_hardware.py`).
"""

import warnings

import keras_mp


def say_nothing() -> None:
    """Lets this process count as warned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
        for dtype in ("float16", "bfloat16"):
            keras_mp.hardware.warn_if_slow(dtype)

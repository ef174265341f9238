"""Machines whose speeds are known, for tests that must not depend on how fast this one is."""

from keras_mp.hardware import cache

# Two of those whose CPU has instructions for bfloat16 and for float16.
XEON = {
    "matrix product": {"float32": 275e9, "bfloat16": 154e9, "float16": 250e9},
    "convolution": {"float32": 84e9, "bfloat16": 53e9, "float16": 80e9},
}
EPYC = {
    "matrix product": {"float32": 200e9, "bfloat16": 380e9, "float16": 20e9},
    "convolution": {"float32": 100e9, "bfloat16": 170e9, "float16": 10e9},
}


def pretend(speeds, folder, monkeypatch):
    """Makes a cache folder say that somebody has measured this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    cache.write(cache.describe("CPU"), speeds, {})
    assert cache.read(cache.describe("CPU")) == (speeds, {})

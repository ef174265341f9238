"""What a histogram says of a dtype is what converting the values to that dtype gives."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import once
from tests.numerics.tools import EVERYWHERE, FORMATS, Histogram, Window

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def allow_conversion(values, dtype, scale):
    """What NumPy and ml_dtypes make of the values."""
    values = values[np.isfinite(values) & (values != 0)]
    with np.errstate(over="ignore", under="ignore"):
        # The product is exact in float64.
        result = (values.astype(np.float64) * scale).astype(DTYPES[dtype])
        back = result.astype(np.float64)
    tiny = float(ml_dtypes.finfo(DTYPES[dtype]).smallest_normal)
    is_subnormal = (back != 0) & (np.abs(back) < tiny)
    return len(values), (back == 0).sum(), is_subnormal.sum(), (~np.isfinite(back)).sum()


def borders():
    """Each border of each dtype at many exponents, with the float32 values beside it."""
    ones = np.float32([1, 1.75, 1.8125, 1.875, *(2 - 2.0**-n for n in (7, 8, 10, 11))])
    at = np.concatenate([ones * np.float32(2.0**e) for e in range(-140, 127)])
    beside = [np.nextafter(at, np.float32(np.inf)), np.nextafter(at, np.float32(0))]
    return np.concatenate([at, *beside]).astype(np.float32)


def distributions():
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    return {
        "normal": rng.normal(size=20_000).astype(np.float32),
        "lognormal": np.exp(rng.normal(-12, 6, 20_000)).astype(np.float32),
        "any": any_bits,
        "subnormal": rng.integers(0, 2**23, 5_000, dtype=np.uint32).view(np.float32),
        "borders": borders(),
        "zeros and others": np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1]),
        "nothing": np.float32([]),
    }


@once
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", list(distributions()))
def test_fates_are_those_of_a_conversion(name, dtype):
    values = distributions()[name]
    for exponent in (-130, -24, -1, 0, 1, 7, 15, 24, 60):
        scale, exact = 2.0**exponent, values
        if dtype == "bfloat16":
            # ml_dtypes converts by way of float32, so what that rounds would be rounded twice.
            with np.errstate(over="ignore", invalid="ignore"):
                scaled = values.astype(np.float64) * scale
                is_exact = scaled.astype(np.float32) == scaled
            exact = values[is_exact | (np.abs(scaled) >= 2.0**128)]
        fate = Histogram.of(exact).fate(dtype, scale)
        assert fate == allow_conversion(exact, dtype, scale), exponent


@once
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("seed", range(5))
def test_a_window_ends_where_something_is_lost(dtype, seed):
    rng = np.random.default_rng(seed)
    values = np.exp(rng.normal(rng.uniform(-20, 5), rng.uniform(0, 3), 300)).astype(np.float32)
    low, high = Histogram.of(values).window(dtype)
    zero = [allow_conversion(values, dtype, 2.0**exponent)[1] for exponent in (low - 1, low)]
    infinite = [allow_conversion(values, dtype, 2.0**exponent)[3] for exponent in (high, high + 1)]
    assert zero[0] > 0 == zero[1]
    assert infinite[0] == 0 < infinite[1]


@once
def test_a_window_may_let_a_share_go():
    values = np.float32([2.0**-40] + [2.0**-20] * 99)
    histogram = Histogram.of(values)
    assert histogram.window("float16") == Window(16, 35)
    assert histogram.window("float16", tolerance=0.01) == Window(-4, 35)
    assert histogram.window("float16", tolerance=0.0099) == Window(16, 35)


@once
def test_windows_of_what_has_no_ends():
    nothing = Histogram.of([0.0, np.nan, np.inf])
    assert nothing.window("float16") == EVERYWHERE
    assert str(nothing.window("float16")) == "any"
    wide = Histogram.of([1e-30, 1e30])
    assert wide.window("float16").is_empty
    assert str(wide.window("float16")) == "none"
    assert str(Window(6, 13)) == "2^6..2^13"
    assert str(Window(-300, 13)) == "up to 2^13"
    assert str(Window(6, 300)) == "from 2^6"


@once
def test_windows_meet_and_know_how_far_a_scale_is_from_their_ends():
    assert Window(3, 9) & Window(5, 12) == Window(5, 9)
    assert Window(5, 9).margins(2.0**6) == (1, 3)
    assert Window(5, 9).margins(2.0**10) == (5, -1)


@once
def test_what_is_counted():
    histogram = Histogram.of(np.float32([0, -0.0, 1, -1.5, 3, np.inf, -np.inf, np.nan]))
    assert (histogram.total, histogram.zeros) == (8, 2)
    assert (histogram.infinities, histogram.nans) == (2, 1)
    assert histogram.exponents == {0: 2, 1: 1}
    assert histogram.fate("float16").share("zero") == 0
    assert Histogram.of([]).fate("float16").share("zero") == 0.0


@once
def test_values_are_counted_while_a_function_is_traced_and_in_a_region():
    values = distributions()["lognormal"]
    counted = []
    with keras_mp.autocast("float16"):
        counted.append(Histogram.of(values))
        tf.function(lambda: counted.append(Histogram.of(values))).get_concrete_function()
    assert counted == [Histogram.of(values)] * 2


@once
def test_histograms_add_up():
    a, b = np.float32([0, 1e-30, 4]), np.float32([4, np.nan])
    assert Histogram.of(a) + Histogram.of(b) == Histogram.of([*a, *b])
    assert Histogram.of(a) != Histogram.of(b)
    assert Histogram(Histogram.of(a).bins) == Histogram.of(a)


@once
def test_what_cannot_be_said_is_refused():
    histogram = Histogram.of([1.0])
    with pytest.raises(ValueError, match=r"2.0\*\*9 and 2.0\*\*10. Received: scale=1000"):
        histogram.fate("float16", 1000)
    with pytest.raises(ValueError, match="power of two.*Received: scale=-2"):
        histogram.fate("float16", -2)
    with pytest.raises(ValueError, match="'bfloat16'.*Received: dtype='float32'"):
        histogram.window("float32")

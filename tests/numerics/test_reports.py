"""Reports: what they say of many rows, as text and in files."""

import json

import ml_dtypes
import numpy as np
import pytest

import keras_mp
from tests.common import once
from tests.numerics.tools import EVERYWHERE, FORMATS, Row, Window, histogram_of

pytestmark = once


def row(kind="gradient", path="dense/kernel", dtype="float16", values=(2.0**-30, 1.0), **kwargs):
    return Row(kind, path, dtype, histogram_of(np.float32(values)), **kwargs)


def report(*rows, step=100, counted=10, loss_scale=1024.0):
    return keras_mp.numerics.Report(rows, step=step, counted=counted, loss_scale=loss_scale)


def test_the_window_of_all_gradients():
    small, large = row(values=[2.0**-30]), row(path="b", values=[2.0**10])
    output = row("output", "dense", values=[1e-30])
    both = report(small, large, output)
    assert small.window("float16") == Window(6, 45)
    assert both.window("float16") == Window(6, 5)
    assert report(small, output).window("float16") == Window(6, 45)
    # What is computed in float32 is none of float16's business, in a model in which some is not.
    wide = row(path="c", dtype="float32", values=[1e-30])
    assert report(small, wide).window("float16") == Window(6, 45)
    assert report(wide).window("float16").low > 70
    # What has overflowed in float16 at 2^12 was too large for that.
    seen = row(values=[2.0**-30, np.inf], overflowed_at=2.0**12)
    assert seen.window("float16") == Window(6, 11)
    assert seen.window("bfloat16").high > 100


def test_the_table_has_a_line_for_each_row():
    text = report(row(values=[0, 2.0**-30, 2.0**-40, 8]), row("output", "dense")).table()
    lines = text.splitlines()
    head = " ".join(lines[: lines.index("")])
    # What was zero may have been anything.
    assert head.startswith(
        "float16 at a loss scale of 2^10; in 10 of 100 steps; no gradient loses more than 0.1 % "
        "at: none. The zeros of 1 gradients"
    )
    cells = [line.split() for line in lines[lines.index("") + 1 :]]
    fine = " ".join(str(report(row(values=[2.0**-30, 2.0**4]), loss_scale=64.0)).split())
    margins = "(the loss scale is 2^0 times the low end and 2^-5 times the high end)"
    assert f"steps; no gradient loses more than 0.1 % at: 2^6..2^11 {margins}" in fine
    zero, to_zero = ["25.0", "%"], ["33.3", "%"]
    assert cells[1][:4] == ["gradient", "dense/kernel", "float16", "4"]
    assert cells[1][4:] == [*zero, "2^-40..2^3", *to_zero, *to_zero, "none"]
    # An output is not scaled.
    assert cells[2][-3:] == ["50.0", "%", "2^6..2^15"]
    assert "<0.1 %" in str(report(row(values=[2.0**-60, *[1.0] * 2000])))


def test_what_is_printed_are_the_worst_rows():
    blocks = [row(path=f"block_{i}/attention/kernel", values=[1.0, 2.0]) for i in range(12)]
    others = [row(path=name, values=[2.0**-3]) for name in "abcdefghijklmn"]
    lossy = row(path="block_7/up/kernel", values=[2.0**-60, 1.0])
    wide = row("output gradient", "very_long_name/" * 20, "bfloat16", [2.0**-40, 2.0**70])
    noise = row(path="block_3/attention/bias", values=[2.0**-50])
    text = str(report(*blocks, *others, lossy, wide, noise))
    assert max(map(len, text.splitlines())) <= 100
    lines = text.splitlines()[text.splitlines().index("") + 2 :]
    # An overflow, a loss, and then those that are nearest to one.
    assert lines[0].startswith("output gradient  very_l")
    assert lines[1].split()[:2] == ["gradient", "block_7/up/kernel"]
    assert "block_[0-11]/attention/kernel" in lines[2]
    assert [line.split()[1] for line in lines[3:10]] == list("abcdefg")
    assert lines[10:] == ["... and 8 more rows: to_text(rows=None)"]
    every = report(*blocks, *others, lossy, wide, noise).to_text(rows=None)
    assert every.count("block_") == 14
    assert "block_3/attention/bias (noise)" in every


def test_reports_add_up():
    first = report(row(), row("output", "a"), step=50, loss_scale=8.0)
    second = report(row(overflowed_at=64.0), row(path="new/kernel"), step=100, loss_scale=4.0)
    for both in (first + second, second + first):
        assert (both.step, both.counted, both.loss_scale) == (100, 20, 4.0)
        kinds = [(each.kind, each.path) for each in both.rows]
        gradients = [("gradient", "dense/kernel"), ("gradient", "new/kernel")]
        assert kinds == [*gradients, ("output", "a")]
        assert both["gradient", "dense/kernel"].histogram == histogram_of([2.0**-30, 1.0] * 2)
        assert both["gradient", "dense/kernel"].overflowed_at == 64
    with pytest.raises(KeyError, match=r"\('output', 'a'\).*Received: \('output', 'b'\)"):
        both["output", "b"]


def test_json_has_how_many_values_have_which_exponent():
    values = [0, 2.0**-30, 2.0**-30, 1e-42, np.inf, np.nan, 7]
    described = json.loads(report(row(values=values, overflowed_at=8.0)).to_json())
    assert (described["step"], described["counted"], described["loss_scale"]) == (100, 10, 1024.0)
    [found] = described["rows"]
    assert (found["kind"], found["path"], found["overflowed_at"]) == ("gradient", "dense/kernel", 8)
    counts = {"-140": 1, "-30": 2, "2": 1, "zero": 1, "inf": 1, "nan": 1}
    assert found["histogram"] == counts


# What a histogram says of a dtype is what converting the values to that dtype gives.


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
        fate = histogram_of(exact).fate(dtype, scale)
        assert fate == allow_conversion(exact, dtype, scale), exponent
        assert 0 <= fate.share("zero") <= 1


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("seed", range(5))
def test_a_window_ends_where_something_is_lost(dtype, seed):
    rng = np.random.default_rng(seed)
    values = np.exp(rng.normal(rng.uniform(-20, 5), rng.uniform(0, 3), 300)).astype(np.float32)
    low, high = histogram_of(values).window(dtype)
    zero = [allow_conversion(values, dtype, 2.0**exponent)[1] for exponent in (low - 1, low)]
    infinite = [allow_conversion(values, dtype, 2.0**exponent)[3] for exponent in (high, high + 1)]
    assert zero[0] > 0 == zero[1]
    assert infinite[0] == 0 < infinite[1]


def test_a_window_may_let_a_share_go():
    values = np.float32([2.0**-40] + [2.0**-20] * 99)
    histogram = histogram_of(values)
    assert histogram.window("float16") == Window(16, 35)
    assert histogram.window("float16", tolerance=0.01) == Window(-4, 35)
    assert histogram.window("float16", tolerance=0.0099) == Window(16, 35)


def test_windows_of_what_has_no_ends():
    nothing = histogram_of([0.0, np.nan, np.inf])
    assert nothing.window("float16") == EVERYWHERE
    assert str(nothing.window("float16")) == "any"
    wide = histogram_of([1e-30, 1e30])
    assert wide.window("float16").is_empty
    assert str(wide.window("float16")) == "none"
    assert str(Window(6, 13)) == "2^6..2^13"
    assert str(Window(-300, 13)) == "up to 2^13"
    assert str(Window(6, 300)) == "from 2^6"


def test_what_cannot_be_said_is_refused():
    histogram = histogram_of([1.0])
    with pytest.raises(ValueError, match=r"2.0\*\*9 and 2.0\*\*10. Received: scale=1000"):
        histogram.fate("float16", 1000)
    with pytest.raises(ValueError, match="power of two.*Received: scale=-2"):
        histogram.fate("float16", -2)
    with pytest.raises(ValueError, match="'bfloat16'.*Received: dtype='float32'"):
        histogram.window("float32")

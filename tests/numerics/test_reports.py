"""Reports: what they say of many rows, as text and in files."""

import json

import numpy as np
import pytest

import keras_mp
from tests.common import once
from tests.numerics.tools import Histogram, Row, Window


def row(kind="gradient", path="dense/kernel", dtype="float16", values=(2.0**-30, 1.0), **kwargs):
    return Row(kind, path, dtype, Histogram.of(np.float32(values)), **kwargs)


def report(*rows, step=100, counted=10, loss_scale=1024.0):
    return keras_mp.numerics.Report(rows, step=step, counted=counted, loss_scale=loss_scale)


@once
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


@once
def test_the_table_has_a_line_for_each_row():
    text = report(row(values=[0, 2.0**-30, 2.0**-40, 8]), row("output", "dense")).table()
    lines = text.splitlines()
    head = " ".join(lines[: lines.index("")])
    # What was zero may have been anything.
    assert head.startswith(
        "float16 at a loss scale of 2^10; 10 of 100 steps counted; of the values that are left, no "
        "gradient loses more than 0.1 % at: none The zeros of 1 gradients"
    )
    cells = [line.split() for line in lines[lines.index("") + 1 :]]
    fine = " ".join(str(report(row(values=[2.0**-30, 2.0**4]), loss_scale=64.0)).split())
    margins = "(the loss scale is 2^0 times the low end and 2^-5 times the high end)"
    assert f"counted; no gradient loses more than 0.1 % at: 2^6..2^11 {margins}" in fine
    zero, to_zero = ["25.0", "%"], ["33.3", "%"]
    assert cells[1][:4] == ["gradient", "dense/kernel", "float16", "4"]
    assert cells[1][4:] == [*zero, "2^-40..2^3", *to_zero, *to_zero, "none"]
    # An output is not scaled.
    assert cells[2][-3:] == ["50.0", "%", "2^6..2^15"]
    assert "<0.1 %" in str(report(row(values=[2.0**-60, *[1.0] * 2000])))


@once
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


@once
def test_reports_add_up():
    first = report(row(), row("output", "a"), step=50, loss_scale=8.0)
    second = report(row(overflowed_at=64.0), row(path="new/kernel"), step=100, loss_scale=4.0)
    for both in (first + second, second + first):
        assert (both.step, both.counted, both.loss_scale) == (100, 20, 4.0)
        kinds = [(each.kind, each.path) for each in both.rows]
        gradients = [("gradient", "dense/kernel"), ("gradient", "new/kernel")]
        assert kinds == [*gradients, ("output", "a")]
        assert both["gradient", "dense/kernel"].histogram.total == 4
        assert both["gradient", "dense/kernel"].overflowed_at == 64
    with pytest.raises(KeyError, match=r"\('output', 'a'\).*Received: \('output', 'b'\)"):
        both["output", "b"]


@once
def test_json_has_how_many_values_have_which_exponent():
    values = [0, 2.0**-30, 2.0**-30, 1e-42, np.inf, np.nan, 7]
    described = json.loads(report(row(values=values, overflowed_at=8.0)).to_json())
    assert (described["step"], described["counted"], described["loss_scale"]) == (100, 10, 1024.0)
    [found] = described["rows"]
    assert (found["kind"], found["path"], found["overflowed_at"]) == ("gradient", "dense/kernel", 8)
    counts = {"-140": 1, "-30": 2, "2": 1, "zero": 1, "inf": 1, "nan": 1}
    assert found["histogram"] == counts

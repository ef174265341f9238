"""Pictures of what was measured."""

import sys

import matplotlib
import numpy as np
import pytest

from keras_mp.numerics import Report, figures
from keras_mp.numerics.lost import Lost, WhatIf
from tests.common import once
from tests.numerics.test_reports import report, row

matplotlib.use("agg")
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def lines(ax):
    return {line.get_label(): line.get_ydata() for line in ax.lines}


@once
def test_histograms_of_one_report():
    ax = figures.histograms(report(row(), row(path="b", values=[4.0] * 3), row("output", "c")))
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["dense/kernel", "b"]
    [image] = ax.images
    picture = image.get_array()
    assert (picture[1, 0], picture[31, 0], picture[33, 1]) == (0.5, 0.5, 1.0)
    assert picture.count() == 3
    # 2^-25 rounds to zero, 2^-14 is the smallest normal number, 2^16 is infinite; at 2^10.
    borders = {name: values[0] for name, values in lines(ax).items()}
    expected = {"zero below": -35, "fewer digits below": -24, "infinite above": 6}
    assert borders == expected
    assert ax.get_ylim() == (-41, 7)


@once
def test_a_histogram_over_time():
    history = [report(row(), step=step) for step in (10, 20)]
    ax = figures.histograms(history, path="dense/kernel", dtype="bfloat16")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["10", "20"]
    assert ax.get_xlabel() == "step"
    assert "gradient dense/kernel" in ax.get_title()
    with pytest.raises(ValueError, match="Pass `path`"):
        figures.histograms(history)
    with pytest.raises(ValueError, match="no values of the kind 'output'"):
        figures.histograms(history[0], kind="output")


@once
def test_a_heat_map():
    fine, half = Lost(4, 0, 0, 0, 0.0), Lost(4, 2, 0, 0, 0.5)
    infinite = Lost(4, 0, 0, 3, float("inf"))
    rows = [("gradient", "a"), ("gradient", "b"), ("output", "c")]
    lost = {
        ("float16", 1.0): dict(zip(rows, [half, fine, fine])),
        ("float16", 2.0**10): dict(zip(rows, [fine, infinite, fine])),
    }
    empty = Report([], step=1, counted=1, loss_scale=1.0)
    ax = figures.heat_map(WhatIf(empty, lost, {"float16": {}}, {}))
    [image] = ax.images
    np.testing.assert_array_equal(image.get_array().filled(-1), [[0.5, 0], [0, -1]])
    texts = [(text.get_text(), text.get_position()) for text in ax.texts]
    assert texts == [("50", (0, 0)), ("inf", (1, 1))]
    # Next to nothing is another color than nothing and than a tenth.
    shades = [image.norm(share) for share in (0, 0.001, 0.1, 1)]
    assert np.diff(shades).min() > 0.1
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2^0", "2^10"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]


@once
def test_of_many_rows_the_worst_are_drawn():
    rows = [row(path=f"layer_{i}/kernel", values=[2.0**-i, 1.0]) for i in range(64)]
    ax = figures.histograms(report(*rows, loss_scale=1000.0))
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == [f"layer_{i}/kernel" for i in range(44, 64)]
    assert "(the worst 20 of 64)" in ax.get_title()
    history = [report(rows[0], step=step) for step in range(64)]
    ax = figures.histograms(history, path="layer_0/kernel")
    assert [label.get_text() for label in ax.get_xticklabels()] == [f"{4 * i}" for i in range(16)]
    lost = {("gradient", f"{'long' * i}/kernel"): Lost(100, i, 0, 0, 0.0) for i in range(64)}
    empty = Report([], step=1, counted=1, loss_scale=1.0)
    ax = figures.heat_map(WhatIf(empty, {("float16", 1.0): lost}, {"float16": {}}, {}))
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert (len(labels), max(map(len, labels))) == (40, 32)
    assert "(the worst 40 of 64)" in ax.get_title()


@once
def test_the_window_and_the_path_of_the_scale_through_it():
    reports = [report(row(), step=10, loss_scale=64.0), report(row(), step=20, loss_scale=128.0)]
    drawn = lines(figures.window(reports))
    assert [list(drawn[name]) for name in ("too small below", "overflows above")] == [
        [6, 6],
        [15, 15],
    ]
    assert list(drawn["loss scale"]) == [6, 7]
    history = {"step": [0, 5, 20], "loss_scale": [4.0, 8.0, 16.0]}
    drawn = lines(figures.window(reports, history=history))
    assert list(drawn["loss scale"]) == [2, 3, 4]
    nothing = report(row(values=[0.0]), step=30)
    drawn = lines(figures.window([*reports, nothing]))
    assert list(drawn["too small below"]) == [6, 6, 4]
    with pytest.raises(ValueError, match="at least one report"):
        figures.window([])


@once
def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="keras_mp.numerics.figures needs matplotlib: pip insta"):
        figures.window([report(row())])


@once
def test_updates_have_the_border_from_which_they_arrive():
    ax = figures.histograms(report(row("update", values=[2.0**-30, 1.0])), kind="update")
    assert {name: values[0] for name, values in lines(ax).items()} == {"lost below": -11}
    assert "loss scale" not in ax.get_title()

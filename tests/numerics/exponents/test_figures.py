"""Pictures of what was measured."""

import sys

import matplotlib
import pytest

from keras_mp.numerics import watch
from tests.common import once
from tests.numerics.exponents.test_reports import report, row

matplotlib.use("agg")
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def lines(ax):
    return {line.get_label(): line.get_ydata() for line in ax.lines}


def window(reports, **how):
    watching = watch()
    watching.history += reports
    return watching.plot(**how)


@once
def test_histograms_of_one_report():
    ax = report(row(), row(path="b", values=[4.0] * 3), row("output", "c")).plot()
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
def test_of_many_rows_the_worst_are_drawn():
    rows = [row(path=f"layer_{i}/kernel", values=[2.0**-i, 1.0]) for i in range(64)]
    ax = report(*rows, loss_scale=1000.0).plot()
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == [f"layer_{i}/kernel" for i in range(44, 64)]
    assert "(the worst 20 of 64)" in ax.get_title()
    with pytest.raises(ValueError, match="no values of the kind 'output'"):
        report(*rows).plot(kind="output")


@once
def test_the_window_and_the_path_of_the_scale_through_it():
    reports = [report(row(), step=10, loss_scale=64.0), report(row(), step=20, loss_scale=128.0)]
    drawn = lines(window(reports))
    assert [list(drawn[name]) for name in ("too small below", "overflows above")] == [
        [6, 6],
        [15, 15],
    ]
    assert list(drawn["loss scale"]) == [6, 7]
    history = {"step": [0, 5, 20], "loss_scale": [4.0, 8.0, 16.0]}
    drawn = lines(window(reports, history=history))
    assert list(drawn["loss scale"]) == [2, 3, 4]
    nothing = report(row(values=[0.0]), step=30)
    drawn = lines(window([*reports, nothing]))
    assert list(drawn["too small below"]) == [6, 6, 4]
    with pytest.raises(ValueError, match="at least one report"):
        window([])


@once
def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="numerics.watch needs matplotlib: pip install"):
        window([report(row())])


@once
def test_updates_have_the_border_from_which_they_arrive():
    ax = report(row("update", values=[2.0**-30, 1.0])).plot(kind="update")
    assert {name: values[0] for name, values in lines(ax).items()} == {"lost below": -11}
    assert "loss scale" not in ax.get_title()

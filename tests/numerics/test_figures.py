"""Pictures of what was measured."""

import sys

import matplotlib
import pytest

from keras_mp.numerics import watch
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


def window(reports, **how):
    watching = watch()
    watching.history += reports
    ax = watching.plot(**how)
    ax.figure.canvas.draw()
    return ax


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

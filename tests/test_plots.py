"""Pictures of the loss scale, and of its window."""

import pathlib
import re
import sys

import matplotlib
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import plots
from tests.common import once
from tests.numerics.test_reports import report, row

matplotlib.use("agg")
from matplotlib import pyplot as plt

EVERY_STEP = {
    "step": [0, 1, 2, 3, 4],
    "loss_scale": [64.0, 32.0, 32.0, 16.0, 32.0],
    "steps_skipped": [5, 6, 6, 7, 7],
}
EVERY_TEN = {
    "step": [100, 110, 120, 130],
    "loss_scale": [64.0, 32.0, 32.0, 8.0],
    "steps_skipped": [0, 1, 1, 4],
}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def lines(ax):
    return {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in ax.lines}


def heights(ax):
    return {name: [y for _, y in points] for name, points in lines(ax).items()}


def numbers(ax):
    return {text.xy: text.get_text() for text in ax.texts}


def test_each_step_that_was_skipped_is_marked():
    ax = plots.loss_scale(EVERY_STEP)
    assert lines(ax) == {
        "loss scale": [(0, 64), (1, 32), (2, 32), (3, 16), (4, 32)],
        "steps skipped since the point before": [(1, 32), (3, 16)],
    }
    assert not numbers(ax)
    assert ax.get_title() == "Loss scale (skipped steps: 2 of 4)"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss scale (powers of 2)")
    assert ax.get_yscale() == "log"
    ax.figure.canvas.draw()
    shown = [label.get_text() for label in ax.get_yticklabels()]
    assert [f"2^{{{n}}}" in "".join(shown) for n in (4, 5, 6)] == [True] * 3
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(lines(ax))


def test_steps_between_two_points_are_counted():
    ax = plots.loss_scale(EVERY_TEN)
    assert lines(ax)["steps skipped since the point before"] == [(110, 32), (130, 8)]
    assert numbers(ax) == {(130, 8.0): "3"}
    assert ax.get_title() == "Loss scale (skipped steps: 4 of 30)"


@pytest.mark.parametrize("scale", [1.0, 1000.0, 2.0**127])
def test_a_scale_that_never_moves_has_an_axis_too(scale):
    ax = plots.loss_scale({"step": [0, 9], "loss_scale": [scale] * 2, "steps_skipped": [0, 0]})
    ax.figure.canvas.draw()
    assert ax.get_ylim() == (scale / 2, scale * 2)
    assert ax.get_title() == "Loss scale (skipped steps: 0 of 9)"
    assert list(lines(ax)) == ["loss scale"]


def test_long_runs_stay_readable():
    count = 1000
    history = {
        "step": list(range(0, 10 * count, 10)),
        "loss_scale": [2.0 ** (n % 60) for n in range(count)],
        "steps_skipped": list(range(0, 3 * count, 3)),
    }
    ax = plots.loss_scale(history)
    assert ax.lines[0].get_marker() == "None"
    assert not ax.texts


def test_what_fit_leaves_behind():
    monitor = keras_mp.callbacks.LossScaleMonitor()
    monitor.history.update(EVERY_STEP)
    assert lines(plots.loss_scale(monitor)) == lines(plots.loss_scale(EVERY_STEP))
    history = tf.keras.callbacks.History()
    history.epoch = [2, 3]  # of a run that goes on
    history.history = {"loss": [2.0, 1.0], "loss_scale": [32.0, 16.0], "steps_skipped": [3, 5]}
    ax = plots.loss_scale(history)
    assert lines(ax)["loss scale"] == [(3, 32), (4, 16)]
    assert lines(ax)["steps skipped since the point before"] == [(4, 16)]
    assert (ax.get_xlabel(), ax.get_title()) == ("epoch", "Loss scale (skipped steps: 2)")
    history.epoch = [0, 1]
    assert lines(plots.loss_scale(history)) == lines(plots.loss_scale(history.history))


def test_axes_of_the_users_own():
    figure, axes = plt.subplots(2)
    assert plots.loss_scale(EVERY_STEP, axes[1]) is axes[1]
    assert plots.loss_scale(EVERY_STEP, ax=axes[0]) is axes[0]
    assert plt.get_fignums() == [figure.number]


@pytest.mark.parametrize(
    "history",
    [{}, {"loss": [1.0]}, {"step": [], "loss_scale": [], "steps_skipped": []}, None, "adam"],
    ids=repr,
)
def test_without_a_loss_scale_it_says_what_it_expects(history):
    with pytest.raises(ValueError, match="LossScaleMonitor among its callbacks.*Received: "):
        plots.loss_scale(history)


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'pip install "keras-mp\[tutorials\]"'):
        plots.loss_scale(EVERY_STEP)
    with pytest.raises(ImportError, match="numerics.watch needs matplotlib: pip install"):
        window([report(row())])


def window(reports, **how):
    watching = keras_mp.numerics.watch()
    watching.history += reports
    ax = watching.plot(**how)
    ax.figure.canvas.draw()
    return ax


@once
def test_the_window_and_the_path_of_the_scale_through_it():
    reports = [report(row(), step=10, loss_scale=64.0), report(row(), step=20, loss_scale=128.0)]
    seen = heights(window(reports))
    assert (seen["too small below"], seen["overflows above"]) == ([6, 6], [15, 15])
    assert seen["loss scale"] == [6, 7]
    history = {"step": [0, 5, 20], "loss_scale": [4.0, 8.0, 16.0]}
    assert heights(window(reports, history=history))["loss scale"] == [2, 3, 4]
    nothing = report(row(values=[0.0]), step=30)
    assert heights(window([*reports, nothing]))["too small below"] == [6, 6, 4]
    with pytest.raises(ValueError, match="Nothing was read yet"):
        window([])


@once
def test_importing_keras_mp_imports_no_matplotlib():
    modules = [path.read_text() for path in pathlib.Path(keras_mp.__file__).parent.rglob("*.py")]
    assert any(re.search(r"^ +from matplotlib import", module, re.M) for module in modules)
    # What is indented only functions and type checkers import.
    assert not any(re.search(r"^(from|import) matplotlib", module, re.M) for module in modules)

"""The data of `benchmarks parity`: what scikit-learn, statsmodels and Python bring along.

Each function returns a training and a test part, which are the same in every run.
"""

import functools
import inspect
import pydoc_data.topics
from typing import Any

import numpy as np

Parts = tuple[tuple[Any, ...], tuple[Any, ...]]


def _random_parts(count: int, *arrays: np.ndarray) -> Parts:
    """The first `count` rows of a permutation, and the others."""
    order = np.random.default_rng(0).permutation(len(arrays[0]))
    return tuple(tuple(a[rows] for a in arrays) for rows in (order[:count], order[count:]))


@functools.cache
def digits(count: int) -> Parts:
    """Images of 8x8, with pixels from 0 to 16, and which digits they are."""
    import sklearn.datasets

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = images.astype("float32").reshape(-1, 8, 8, 1)
    return _random_parts(count, images, labels.astype("int32"))


def diabetes() -> Parts:
    """Ten measurements of patients, and how far their disease went on in a year, 25 to 346."""
    import sklearn.datasets

    features, targets = sklearn.datasets.load_diabetes(return_X_y=True, scaled=False)
    return _random_parts(300, features.astype("float32"), targets.astype("float32")[:, None])


def affairs() -> Parts:
    """Answers of married women to a magazine, by column, and whether they had an affair."""
    import statsmodels.datasets

    table = statsmodels.datasets.fair.load_pandas().data
    columns = table.drop(columns="affairs").to_numpy("float32")
    had_one = (table["affairs"].to_numpy() > 0).astype("float32")[:, None]
    (x, y), (test_x, test_y) = _random_parts(4000, columns, had_one)
    names = list(table.columns.drop("affairs"))
    return tuple(
        ({name: part[:, i : i + 1] for i, name in enumerate(names)}, labels)
        for part, labels in ((x, y), (test_x, test_y))
    )


def _forecasts(series: np.ndarray, window: int, ahead: int, share: float = 0.7) -> Parts:
    """Windows of a series, and its value some steps later; what comes last is the test."""
    count = len(series) - window - ahead + 1
    windows = np.stack([series[i : i + window] for i in range(count)])[..., None]
    later = series[window + ahead - 1 :][:, None]
    cut = int(share * count)
    # No value that the test asks for is in a window that was trained on.
    return (windows[: cut - ahead], later[: cut - ahead]), (windows[cut:], later[cut:])


def sunspots() -> Parts:
    """Twelve years of sunspots, 0 to 190 a year, and the next year."""
    import statsmodels.datasets

    table = statsmodels.datasets.sunspots.load_pandas().data
    return _forecasts(table["SUNACTIVITY"].to_numpy("float32"), window=12, ahead=1)


def carbon_dioxide() -> Parts:
    """Sixteen months of carbon dioxide in the air, 313 to 374 ppm, and three months later."""
    import statsmodels.datasets

    table = statsmodels.datasets.co2.load_pandas().data
    monthly = table["co2"].resample("MS").mean().interpolate()
    return _forecasts(monthly.to_numpy("float32"), window=16, ahead=3)


def photographs() -> Parts:
    """Gray patches of 16x16 of two photographs, 0 to 255; the test has their right quarter."""
    import sklearn.datasets

    photographs = np.stack(sklearn.datasets.load_sample_images().images)
    gray = photographs.astype("float32").mean(-1)
    cut = gray.shape[2] * 3 // 4

    def patches(part: np.ndarray) -> np.ndarray:
        rows, columns = part.shape[1] // 16, part.shape[2] // 16
        part = part[:, : rows * 16, : columns * 16].reshape(2, rows, 16, columns, 16)
        return part.transpose(0, 1, 3, 2, 4).reshape(-1, 16, 16, 1)

    return (patches(gray[:, :, :cut]),), (patches(gray[:, :, cut:]),)


def _characters(text: str, window: int, test: int) -> Parts:
    """Windows of characters, each with the window one further; the end is the test."""
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype("int32")
    count = (len(codes) - 1) // window
    inputs = codes[: count * window].reshape(count, window)
    labels = codes[1 : count * window + 1].reshape(count, window)
    return (inputs[:-test], labels[:-test]), (inputs[-test:], labels[-test:])


@functools.cache
def help_pages(window: int) -> Parts:
    """Characters of Python's help."""
    topics = pydoc_data.topics.topics
    return _characters("\n".join(topics[name] for name in sorted(topics)), window, test=200)


@functools.cache
def source_code(window: int) -> Parts:
    """Characters of modules of Python's library."""
    import argparse
    import collections
    import statistics

    modules = (argparse, collections, statistics)
    return _characters("\n".join(map(inspect.getsource, modules)), window, test=200)


def contexts(length: int) -> Parts:
    """So many characters of Python's help, and the one that comes next."""
    (lines, _), (test_lines, _) = help_pages(48)

    def cut(lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        windows = np.lib.stride_tricks.sliding_window_view(lines.ravel(), length + 1)
        return windows[:, :-1], windows[:, -1]

    return cut(lines), cut(test_lines)

"""`benchmarks parity`, with few steps. What models learn in them is not asserted."""

import math

import numpy as np
import pytest

from benchmarks import common
from benchmarks.acceptance import parity, parity_data, parity_page, parity_tasks
from keras_mp import keras_api
from tests.common import once

KERAS = "Keras 3" if keras_api.ROOT_PACKAGE == "keras" else "tf_keras"


@pytest.fixture(autouse=True)
def untrained(monkeypatch):
    """The language model that is tuned begins with weights that were not trained."""

    def pretrained():
        model = parity_tasks.characters().make()
        return [weight.numpy() for weight in model.weights]

    monkeypatch.setattr(parity_tasks, "_pretrained", pretrained)


def test_runs_are_written_and_not_made_again(tmp_path, capsys):
    path = tmp_path / "parity.jsonl"
    tasks = ["GAN", parity.LONG]
    parity.measure(KERAS, path, 1, tasks, most_steps=2)
    written = parity.read(path)
    assert [(row["task"], row["variant"]) for row in written] == [
        (task, variant) for task in tasks for variant in parity.VARIANTS
    ]
    assert not [row for row in written if "error" in row or not math.isfinite(row["quality"])]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    parity.measure(KERAS, path, 1, tasks, most_steps=2)
    assert len(parity.read(path)) == len(lines)
    again = parity.read(path)[-1]
    assert {**again, "seconds": 0} == {**written[0], "seconds": 0}
    parity_page.print_tables(written)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| GAN")]
    assert rows[0].count(" ± ") == 1 + 2 * (len(parity.VARIANTS) - 1)


@pytest.mark.parametrize("name", parity_tasks.TASKS)
def test_a_task_is_trained_and_judged(name, tmp_path):
    task = parity_tasks.TASKS[name]()._replace(steps=2)
    weights = parity._first_weights(task, 0)
    trainer = parity.Trainer(task, "mixed_bfloat16", str(tmp_path))
    result = trainer.train(0, weights)
    assert math.isfinite(result["quality"])
    assert result["seconds"] > 0
    moved = [np.any(a != b) for a, b in zip(weights, trainer.model.get_weights(), strict=True)]
    assert sum(moved) >= 2


@pytest.mark.parametrize("variant", ["mixed_float16", "bfloat16", "Keras's mixed_float16"])
def test_a_seed_does_not_depend_on_those_before(variant, tmp_path):
    # The first steps overflow, so the loss scale has to be set back, too.
    task = parity_tasks.regression()._replace(steps=12)
    weights = [parity._first_weights(task, seed) for seed in range(2)]
    trainer = parity.Trainer(task, variant, str(tmp_path))
    results = [trainer.train(seed, weights[seed]) for seed in (0, 1, 0)]
    first, other, again = ((r["quality"], r["skipped"]) for r in results)
    assert first == again != other
    assert (first[1] > 0) == (variant != "bfloat16")


def test_a_policy_that_raises_is_a_result(monkeypatch, tmp_path):
    def fails(**_):
        raise TypeError("no such dtype\nat this line")

    task = parity_tasks.regression()._replace(make=fails)
    assert list(parity._train(task, "mixed_float16", {0: [], 3: []})) == [
        (seed, {"error": "TypeError: no such dtype"}) for seed in (0, 3)
    ]


def runs(is_error, **qualities):
    rows = [
        {"variant": variant, "seed": seed, "quality": q, "measure": "m", "is_error": is_error}
        for variant, of_seeds in qualities.items()
        for seed, q in enumerate(of_seeds)
    ]
    return parity_page.Runs(rows)


@once
@pytest.mark.parametrize(("is_error", "more"), [(True, "worse"), (False, "better")])
def test_differences_are_those_of_the_same_seed(is_error, more):
    found = runs(
        is_error, float32=[1.0, 5.0, 9.0], up=[1.1, 5.1, 9.4], off=[1.1, 5.1, 8.8], nan=[math.nan]
    )
    mean, error = found.difference("up")
    assert mean == pytest.approx(0.2)
    assert error == pytest.approx(0.1)
    assert parity_page._cell(found, "up") == "5.2 ± 4.2 (+0.20 ± 0.10)"
    assert [found.verdict(variant) for variant in ("off", "nan")] == ["", "worse"]
    further = runs(is_error, float32=[1.0, 5.0, 9.0], up=[1.3, 5.1, 9.3])
    assert further.verdict("up") == more


@once
def test_what_raised_is_in_the_table():
    found = parity_page.Runs(
        [{"variant": "a", "seed": 0, "error": "TypeError", "measure": "m", "is_error": True}]
    )
    assert (parity_page._cell(found, "a"), found.verdict("a")) == ("TypeError", "worse")
    assert (parity_page._cell(found, "b"), parity_page._costs(found, "a")) == ("-", "-")


@once
def test_forecasts_are_of_what_was_not_trained_on():
    series = np.arange(100, dtype="float32")
    (x, y), (test_x, test_y) = parity_data._forecasts(series, window=5, ahead=3)
    np.testing.assert_array_equal(x[0, :, 0], series[:5])
    np.testing.assert_array_equal(y[:, 0] - x[:, -1, 0], 3)
    assert y.max() < test_y.min()
    assert len(x) > 2 * len(test_x) > 0


@once
def test_rows_of_epochs_have_each_row_once():
    rows = parity_tasks.rows_of_epochs(np.random.default_rng(0), 5, 12)
    assert sorted(rows[:5]) == sorted(rows[5:10]) == [0, 1, 2, 3, 4]
    assert len(rows) == 12


@once
def test_both_kerases_train_side_by_side(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(parity, "RESULTS", tmp_path / "parity.jsonl")
    monkeypatch.setattr(
        common, "in_own_process", lambda *arguments, keras: asked.append((*arguments[3:], keras))
    )
    assert parity.run(seeds=2, only=["GAN"]) == []
    assert sorted(asked) == [("2", "GAN", "Keras 3"), ("2", "GAN", "tf_keras")]

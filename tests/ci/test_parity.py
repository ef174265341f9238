"""`benchmarks parity`, with few steps. What models learn in them is not asserted."""

import math

import numpy as np
import pytest

from benchmarks.acceptance import one_line, one_line_programs, parity, parity_page, parity_tasks
from keras_mp import keras_api

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


# Programs of other people's kinds, with one line.

# Each program in one dtype here: `python -m benchmarks third_party` runs both.
CASES = [(name, one_line.DTYPES[i % 2]) for i, name in enumerate(one_line_programs.PROGRAMS)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_program_trains_as_in_float32(monkeypatch, name, dtype):
    monkeypatch.setattr(one_line_programs, "STEPS", 3)
    monkeypatch.setattr(one_line, "DTYPES", (dtype,))
    results = one_line.measure([name])[name]
    assert one_line.verdict(results, dtype) == "ok"

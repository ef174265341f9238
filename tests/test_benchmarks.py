"""The benchmarks run. What they time is not asserted; what they count is."""

import json
import pathlib
import subprocess
import sys

from benchmarks import casts

ROOT = pathlib.Path(__file__).parent.parent


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_rounding_shows_why_gradients_are_scaled(tmp_path):
    output = tmp_path / "benchmarks.json"
    done = run("rounding", "--output", str(output))
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())["rounding"]
    assert list(results) == ["2", "4", "8"]
    for of_count in results.values():
        assert len(of_count) == 12  # orders of magnitude
        assert all(r["scaled"] < 1e-3 and r["float32"] < 1e-6 for r in of_count.values())
        assert of_count["-9"]["lost"] == 1
        assert of_count["-6"]["naive"] > 10 * of_count["-6"]["scaled"]
        assert of_count["0"]["naive"] < 1e-3


def test_a_weight_that_is_read_often_is_cast_once(monkeypatch):
    monkeypatch.setattr(casts, "REPEATS", 1)
    results = casts.measure()
    counts = {
        case: {name: variant["casts"] for name, variant in variants.items()}
        for case, variants in results.items()
    }
    # One is the cast of the input.
    assert counts == {
        "50 reads in a row": {"stock": 51, "keras_mp": 2},
        "a loop of 50 steps": {"stock": 51, "keras_mp": 51, "keras_mp, weights_cast_once": 2},
    }


def test_a_wrong_name_is_refused():
    done = run("speed")
    assert done.returncode == 2
    assert "there are ['casts', 'rounding', 'verdict', 'wire']" in done.stderr

"""The benchmarks run. What they time is not asserted; what they count is."""

import json
import pathlib
import subprocess
import sys

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


def test_a_wrong_name_is_refused():
    done = run("speed")
    assert done.returncode == 2
    assert "there are ['rounding', 'verdict', 'wire']" in done.stderr

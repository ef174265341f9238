"""Programs of other people's kinds train with one line as in float32."""

import pytest

from benchmarks.acceptance import one_line, one_line_programs

# Each program in one dtype here: `python -m benchmarks third_party` runs both.
CASES = [(name, one_line.DTYPES[i % 2]) for i, name in enumerate(one_line_programs.PROGRAMS)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_program_trains_as_in_float32(monkeypatch, name, dtype):
    monkeypatch.setattr(one_line_programs, "STEPS", 3)
    monkeypatch.setattr(one_line, "DTYPES", (dtype,))
    results = one_line.measure([name])[name]
    assert one_line.verdict(results, dtype) == "ok"


def test_what_is_wrong_is_said():
    exact = {"losses": [2.0, 1.0], "warnings": [], "is_finite": True}
    far = {**exact, "losses": [2.0, 1.5]}
    assert one_line.verdict({"float32": exact, "float16": far}, "float16") == "too far"
    loud = {**exact, "warnings": ["Nobody has scaled."]}
    assert one_line.verdict({"float32": exact, "float16": loud}, "float16") == "Nobody has scaled."
    failed = {"error": "TypeError: no"}
    assert one_line.verdict({"float32": failed, "float16": exact}, "float16").startswith("float32")

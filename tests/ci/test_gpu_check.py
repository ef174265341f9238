"""The check for machines on which keras_mp has not been run."""

import json

import keras_mp
from tests.common import once
from tests.gpu import __main__ as program
from tests.gpu import machine, page, promises, replicas, steps
from tests.gpu.promises import Promise

WIDTH = 100  # of a page


def broken(found):
    return {each["name"]: each["figure"] for each in found["promises"] if not each["kept"]}


@once
def test_all_that_is_promised_is_kept_here(tmp_path, capsys):
    output = tmp_path / "check.json"
    assert program.main(["--quick", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert broken(found) == {}
    assert {each["name"] for each in found["promises"]} > set(promises.PROMISES)
    assert found["steps"]["MLP"]["step"].keys() == set(steps.VARIANTS)
    # The last one has a path, which may be long.
    *lines, last = capsys.readouterr().out.splitlines()
    assert str(output) in last
    assert max(map(len, lines)) <= WIDTH
    intact = sum(line.startswith("kept  ") for line in lines)
    assert f"{intact} of {intact} promises are kept." in lines


def test_what_raises_is_broken_and_the_rest_goes_on_and_a_gpu_is_named(monkeypatch, tmp_path):
    def raises():
        raise OSError("the first line\nthe second line")

    gpu = machine.devices.Gpu("NVIDIA A100-SXM4-80GB", (8, 0))
    monkeypatch.setattr(machine.devices, "gpus", lambda: [gpu])
    monkeypatch.setattr(steps, "measure", lambda quick: {})
    monkeypatch.setattr(keras_mp.hardware, "speeds", lambda anew: None)
    monkeypatch.setattr(replicas, "judged_in_own_process", list)
    judged = {
        "is wrong": lambda: (False, "2, not 1"),
        "raises": raises,
        "is right": lambda: (1, ""),
    }
    monkeypatch.setattr(promises, "PROMISES", judged)
    output = tmp_path / "check.json"
    assert program.main(["--output", str(output)]) == 1
    found = json.loads(output.read_text())
    assert broken(found) == {"is wrong": "2, not 1", "raises": "OSError: the first line"}
    *_, line, libraries = found["machine"]
    assert line == "GPU: NVIDIA A100-SXM4-80GB (compute capability 8.0)"
    assert libraries.startswith("driver ")
    assert libraries.endswith("; TensorFloat-32 on")


def test_the_page_of_a_gpu():
    by_dtype = {"float32": 1e12, "bfloat16": 4e12, "float16": 2e12}
    of_model = {"step": dict(zip(steps.VARIANTS, (0.2, 0.1, 0.05, 0.1, 0.1), strict=True))}
    found = {
        "machine": ["CPU: " + "AVX512-BF16, " * 10],
        "quick": False,
        "promises": [Promise("something", True, "long " * 40)._asdict()],
        "kernels": [],
        "speeds": {"matrix product": by_dtype},
        "steps": {"MLP": of_model, "ResNet": "MemoryError: no memory"},
    }
    lines = list(page.lines(found))
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    assert "4,000 (4.00)" in text
    assert "50 (0.25)" in text
    assert "ResNet" not in text

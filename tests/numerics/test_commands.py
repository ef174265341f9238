"""`python -m keras_mp check`, as CI starts it."""

import json

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.numerics.tools import dense, main, saved, sequential

K = tf.keras


@pytest.fixture
def files(tmp_path):
    """A saved model that predicts a number in 16 bits, and a batch that it cannot express."""
    policy = keras_mp.Policy("mixed_bfloat16", model_outputs=None)
    model = sequential(dense(1), shape=[4], policy=policy, name="prices")
    model.save(tmp_path / "model.keras")
    labels = np.linspace(1000, 1003, 6, dtype="float32")[:, None]
    np.savez(tmp_path / "bad.npz", x=np.ones([6, 4], "float32"), y=labels)
    np.savez(tmp_path / "good.npz", x=np.ones([6, 4], "float32"), y=labels - 1000)
    return tmp_path


def test_the_exit_status(files, capsys):
    model, report = str(files / "model.keras"), files / "report.json"
    assert main(["check", model, str(files / "good.npz")]) == 0
    assert "policy mixed_bfloat16: nothing found." in capsys.readouterr().out
    arguments = ["--json", str(report), "--all-rows"]
    assert main(["check", model, str(files / "bad.npz"), *arguments]) == 1
    printed = capsys.readouterr().out
    assert "outputs in 16 bits" in printed
    assert ", compared with prices in float32" in printed
    assert json.loads(report.read_text())["findings"][0]["hazard"] == "outputs in 16 bits"


def test_a_model_that_was_saved_in_float32(tmp_path, capsys):
    # Float16 does not hold these inputs.
    batch = {"x": np.full([6, 4], 1e6, "float32"), "y": np.ones([6, 1])}
    arguments = ["check", *saved(tmp_path, sequential(dense(1), shape=[4]), **batch)]
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "pass policy=" in capsys.readouterr().err
    assert main([*arguments, "--policy", "mixed_float16"]) == 1
    assert "policy mixed_float16: " in capsys.readouterr().out


@pytest.mark.parametrize(("text", "frequency"), [("2", 2), ("epoch", "epoch")])
def test_a_number_or_a_name(files, text, frequency, monkeypatch):
    made = []
    watch = keras_mp.numerics.watch
    monkeypatch.setattr(watch, "on_train_begin", lambda self, logs=None: made.append(self))
    model, batch = str(files / "model.keras"), str(files / "good.npz")
    assert main(["watch", model, batch, "--read-freq", text]) == 0
    assert [each.read_freq for each in made] == [frequency]


def test_a_name_that_is_none(files, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["watch", str(files / "model.keras"), str(files / "good.npz"), "--read-freq", "day"])
    assert "read_freq" in capsys.readouterr().err

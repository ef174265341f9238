"""`python -m keras_mp watch` takes a number or a name."""

import numpy as np
import pytest

import keras_mp
from tests.numerics.tools import dense, main, saved, sequential


@pytest.fixture
def files(tmp_path):
    """A saved model, and a batch."""
    model = sequential(dense(1), shape=[4], policy="mixed_bfloat16")
    return saved(tmp_path, model, x=np.ones([6, 4], "float32"), y=np.zeros([6, 1], "float32"))


@pytest.mark.parametrize(("text", "frequency"), [("2", 2), ("epoch", "epoch")])
def test_a_number_or_a_name(files, text, frequency, monkeypatch):
    made = []
    watch = keras_mp.numerics.watch
    monkeypatch.setattr(watch, "on_train_begin", lambda self, logs=None: made.append(self))
    assert main(["watch", *files, "--read-freq", text]) == 0
    assert [each.read_freq for each in made] == [frequency]


def test_a_name_that_is_none(files, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["watch", *files, "--read-freq", "day"])
    assert "read_freq" in capsys.readouterr().err

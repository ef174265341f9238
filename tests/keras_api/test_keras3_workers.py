"""What is mended for several workers, without any; `tests/replicas/test_fit.py` starts them."""

import types

import pytest
import tensorflow as tf

from tests.common import IS_KERAS_3

if not IS_KERAS_3:
    pytest.skip("It is for Keras 3.", allow_module_level=True)

from keras_mp.keras_api import keras3_workers


@pytest.fixture
def model():
    return tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])


def test_one_worker_needs_nothing(model):
    keras3_workers.patch_fit(model)
    assert "fit" not in vars(model)


def test_what_keras_has_mended_is_left_alone(model, monkeypatch):
    monkeypatch.setattr(keras3_workers.replicas, "number_of_workers", lambda strategy: 2)
    keras3_workers.patch_fit(model)
    assert {"fit", "_maybe_symbolic_build", "_make_function"} <= vars(model).keys()
    monkeypatch.setattr(keras3_workers, "_reduces_an_axis", lambda: False)
    del vars(model)["_make_function"]
    keras3_workers.patch_fit(model)
    assert "_make_function" not in vars(model)


@pytest.mark.parametrize("is_chief", [True, False])
def test_callbacks_write_on_the_chief_and_after_fit(model, tmp_path, is_chief):
    strategy = types.SimpleNamespace(extended=types.SimpleNamespace(should_checkpoint=is_chief))
    backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    checkpoint = tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"))
    for callback in (backup, checkpoint):
        callback.set_model(model)
    (tmp_path / "backup").mkdir()
    with keras3_workers._writes_on_the_chief([backup, checkpoint], strategy):
        backup.on_epoch_end(0, {})
        checkpoint.on_epoch_end(0, {})
        assert any((tmp_path / "backup").iterdir()) == is_chief
        assert (tmp_path / "model.keras").exists() == is_chief
        backup.on_train_end()
        assert (tmp_path / "backup").exists() != is_chief
    checkpoint.on_epoch_end(1, {})
    assert (tmp_path / "model.keras").exists()
    assert backup.delete_checkpoint

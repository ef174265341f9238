"""The package as a whole: what it shows."""

import inspect

import keras_mp


def test_dir_shows_the_public_names_and_nothing_else():
    assert dir(keras_mp) == sorted(keras_mp.__all__)
    assert [name for name, _ in inspect.getmembers(keras_mp)] == sorted(keras_mp.__all__)


def test_what_is_not_shown_can_be_imported():
    assert keras_mp.keras_api.ROOT_PACKAGE in ("keras", "tf_keras")

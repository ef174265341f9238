"""Files of models in every form."""

import copy
import pickle

import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3


def through_file(name):
    def save_and_load(model, folder):
        model.save(folder / name)
        return tf.keras.models.load_model(folder / name)

    return save_and_load


# How a model is made of another one, and of a folder for files.
COPIES = {
    ".keras": through_file("model.keras"),
    ".h5": through_file("model.h5"),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "deepcopy": lambda model, _: copy.deepcopy(model),
}
# Without the state of an optimizer.
MODELS = {
    **COPIES,
    **({} if IS_KERAS_3 else {"SavedModel": through_file("model")}),
    "JSON": lambda model, _: tf.keras.models.model_from_json(model.to_json()),
    "clone_model": lambda model, _: tf.keras.models.clone_model(model),
}
ENDINGS = {"weights": ".weights.h5", "keras": ".keras", "h5": ".h5", "saved_model": ""}


def set_policy(name, initial_scale=2.0**5, increment_period=3):
    """Sets a policy with a scale that moves; by default no step is skipped."""
    scale = keras_mp.DynamicLossScale(initial_scale, increment_period)
    keras_mp.set_global_policy(keras_mp.Policy(name, scale if name == "mixed_float16" else None))


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def save(model, form, path):
    """Saves a model and its optimizer; returns where they are."""
    if form == "checkpoint":
        return checkpoint(model).save(path)
    path += ENDINGS[form]
    if form == "weights":
        model.save_weights(path)
    elif form == "saved_model":
        model.save(path, save_format="tf")
    else:
        model.save(path)
    return path


def load(path, form, make=None):
    """Returns the model of a file; where that is of weights only, of one that is made."""
    if form not in ("checkpoint", "weights"):
        model = tf.keras.models.load_model(path)
        model.run_eagerly = True  # .h5 files do not say so.
        return model
    model = make()
    if form == "checkpoint":
        checkpoint(model).restore(path).expect_partial()
    else:
        model.optimizer.build(model.trainable_variables)
        model.load_weights(path)
    return model

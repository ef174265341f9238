"""Keras 2 in TensorFlow 1's mode, a part of `tf1_program.py`: what `fit` has logged."""

import numpy as np
import tensorflow as tf

import keras_mp


def fit(wrap, loss="mse"):
    """Trains a small model with an optimizer that `wrap` returns; returns the losses, and it."""
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.layers.Dense(3, activation="relu"), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential([tf.keras.layers.Input([4]), *layers])
    model.compile(wrap(tf.keras.optimizers.legacy.Adam(0.1)), loss)
    x = np.random.default_rng(0).normal(size=[32, 4]).astype("float32")
    history = model.fit(x, x[:, :1], 8, epochs=3, verbose=0, shuffle=False)
    return history.history["loss"], model


def results():
    """The losses of `fit` with and without loss scaling, and what is known of skipped steps."""
    bare, _ = fit(lambda optimizer: optimizer)
    ours, _ = fit(keras_mp.LossScaleOptimizer)
    fixed, _ = fit(lambda optimizer: keras_mp.LossScaleOptimizer(optimizer, 8))
    _, model = fit(
        lambda optimizer: keras_mp.LossScaleOptimizer(
            optimizer, keras_mp.DynamicLossScale(2.0**20)
        ),
        loss=lambda y, p: tf.reduce_mean(tf.cast(tf.cast((y - p) ** 2, tf.float16), tf.float32)),
    )
    value = tf.keras.backend.get_value
    skipped, after = value(model.optimizer.steps_skipped), value(model.optimizer.loss_scale())
    scaling = {"skipped": int(skipped), "scale": float(after)}
    return {"bare": bare, "ours": ours, "fixed": fixed, **scaling}

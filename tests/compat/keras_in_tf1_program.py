"""Keras 2 in TensorFlow 1's mode, a process of its own: prints what `fit` has logged, as JSON."""

import json

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


def main():
    tf.compat.v1.disable_v2_behavior()
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
    print(
        json.dumps(
            {"bare": bare, "ours": ours, "fixed": fixed}
            | {"skipped": int(skipped), "scale": float(after)}
        )
    )


if __name__ == "__main__":
    main()

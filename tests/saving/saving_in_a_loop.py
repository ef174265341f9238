"""Trains a small model and saves a checkpoint after each step, until somebody kills it."""

import sys

import numpy as np
import tensorflow as tf

import keras_mp


def make() -> tuple[tf.keras.Model, tf.train.Checkpoint]:
    """Makes the model, the same in each process, and what is saved of it."""
    scale = keras_mp.DynamicLossScale(2.0**20, increment_period=3)
    keras_mp.set_global_policy(keras_mp.Policy("mixed_float16", scale))
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential([tf.keras.Input([64]), tf.keras.layers.Dense(64)])
    model.compile("adam", "mse", run_eagerly=True)  # So it starts sooner.
    model.optimizer.build(model.trainable_variables)
    return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def step(model: tf.keras.Model) -> None:
    """Makes one training step, the same in each process."""
    x = np.linspace(-1, 1, 8 * 64, dtype="float32").reshape(8, 64)
    model.train_on_batch(x, x**2)


def main(folder: str) -> None:
    """Saves and saves."""
    model, checkpoint = make()
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    while True:
        step(model)
        manager.save()
        print("saved", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

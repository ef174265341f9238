"""Processes that train the same models on a busy machine: their weights' hashes, one in a line.

A program; its argument is the number of processes. They share the import.
"""

import hashlib
import os
import sys
import threading
import warnings

import tensorflow as tf

import keras_mp

K = tf.keras
L = K.layers


def convolutions() -> K.Model:
    inputs = x = K.Input([12, 12, 2])
    for activation in ("gelu", "elu", "selu", "tanh"):
        x = L.Conv2D(4, 3, padding="same", activation=activation)(x)
    x = L.AveragePooling2D(2)(L.BatchNormalization()(x))
    return K.Model(inputs, L.Dense(2)(L.Flatten()(L.MaxPooling2D(2)(x))))


def sequences() -> K.Model:
    inputs = K.Input([6, 8])
    x = L.MultiHeadAttention(2, 4)(inputs, inputs)
    x = L.LSTM(4)(L.LayerNormalization()(x))
    return K.Model(inputs, L.Dense(2, activation="softmax")(x))


MODELS = ((convolutions, "float16"), (sequences, "bfloat16"))


def digest() -> str:
    K.utils.set_random_seed(1)
    tf.config.experimental.enable_op_determinism()
    found = hashlib.sha256()
    for make, dtype in MODELS:
        keras_mp.set_global_policy(f"mixed_{dtype}")
        model = make()
        model.compile("sgd", "mse")
        x = tf.random.stateless_normal([16, *model.input_shape[1:]], [1, 2])
        model.fit(x, tf.random.stateless_normal([16, 2], [3, 4]), 8, verbose=0)
        for weight in model.get_weights():
            found.update(weight.tobytes())
    return found.hexdigest()


def main() -> None:
    """Starts the processes one after the other, each while the ones before still run."""
    warnings.simplefilter("ignore")
    children = []
    for i in range(int(sys.argv[1])):
        child = os.fork()
        if child == 0:
            # One write: `print` makes two where Python does not buffer, and lines get mixed.
            os.write(sys.stdout.fileno(), f"{digest()}\n".encode())
            os._exit(0)
        children.append(child)
        if i == 0:  # It is alone for a while, and has company then.
            threading.Event().wait(2)
    assert not any(os.waitpid(child, 0)[1] for child in children)


if __name__ == "__main__":
    main()

"""Processes that train the same models on a busy machine: their weights' hashes, one in a line.

A program; its argument is the number of processes. They share the import.
"""

import hashlib
import os
import sys
import threading
import warnings

import tensorflow as tf

from tests.kernels import calls_of_ours

K = tf.keras


def digest() -> str:
    K.utils.set_random_seed(1)
    tf.config.experimental.enable_op_determinism()
    found = hashlib.sha256()
    for dtype in ("float16", "bfloat16"):
        model = calls_of_ours.model_of(dtype)
        calls_of_ours.train(model, epochs=4)
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

"""Whether TensorFlow computes with oneDNN, its library for CPUs. Needs no TensorFlow."""

import os


def is_on() -> bool:
    """Whether the environment leaves oneDNN on, which is the default."""
    return os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1").lower() not in ("0", "false")

"""What keras_mp replaces in TensorFlow and Keras, by one installer, and when it acts."""

from keras_mp.hooks.installer import (
    Everywhere,
    Method,
    Replacement,
    When,
    caller,
    install,
    installed,
    uninstall,
)

__all__ = [
    "Everywhere",
    "Method",
    "Replacement",
    "When",
    "caller",
    "install",
    "installed",
    "uninstall",
]

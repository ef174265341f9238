"""What keras_mp replaces in TensorFlow and Keras, and when that acts.

One installer does all of it.
"""

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

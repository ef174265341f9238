"""The variable of TensorFlow inside of a variable of Keras 3.

This module needs TensorFlow only.
"""

from typing import Any

import tensorflow as tf


def native_variable(variable: Any) -> Any:
    """Returns the `tf.Variable` in a variable of Keras 3.

    Any other variable is returned itself.
    """
    inside = getattr(variable, "value", None)
    return inside if isinstance(inside, tf.Variable) else variable

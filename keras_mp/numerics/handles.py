"""Variables by their handles, without a Python object.

For an object, a strategy would make a variable that spans all replicas. This module needs
TensorFlow only.
"""

import tensorflow as tf

from keras_mp.tensorflow_api import operations


def variable(dtype: tf.DType, shape: tf.TensorShape | list[int]) -> tf.Tensor:
    """Returns the handle of a new variable, which lives as long as the handle.

    Args:
        dtype: the dtype of the variable.
        shape: the shape of the variable.

    Example:

    >>> from keras_mp.numerics import handles
    >>> handle = handles.variable(tf.float32, [2])
    >>> tf.raw_ops.AssignVariableOp(resource=handle, value=tf.ones([2]))
    >>> tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).numpy().tolist()
    [1.0, 1.0]
    """
    name = operations.anonymous_name()
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)

"""How a step that XLA compiles is made or skipped: without a branch.

This module needs TensorFlow only.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.step import kept_values
from keras_mp.support import variable_ops
from keras_mp.tensorflow_api import graphs

# What operations that change a variable get in a step that is skipped.
_NO_CHANGE = {"AssignAddVariableOp": -0.0, "AssignSubVariableOp": 0.0}
_WRITES = {"AssignVariableOp", *_NO_CHANGE}


def write_if(finite: tf.Tensor, update: Callable[[], Any]) -> None:
    """Lets a function write to variables on a condition, without a branch.

    On a GPU, a branch copies its condition to the host, which waits for it. XLA makes one pass of
    an update and of the selection of what is written. Selected after the update, old values would
    be copied for each variable that is computed from another, as with momentum.
    """

    def write() -> None:
        update()
        graph: Any = tf.compat.v1.get_default_graph()
        for outside, inside in [*graph.captures]:
            for op in inside.consumers():
                if op.type not in _WRITES or op.inputs[0] is not inside:
                    continue
                new, no_change = op.inputs[1], _NO_CHANGE.get(op.type)
                with graph.outer_graph.as_default():
                    is_value = no_change is None
                    old = read(outside, new.dtype) if is_value else tf.cast(no_change, new.dtype)
                graphs.update_input(op, 1, tf.where(finite, new, old))

    read = kept_values.read
    traced = tf.function(write, autograph=False).get_concrete_function()
    kept: kept_values.Kept = []
    for outside, inside in traced.graph.captures:
        is_done = (
            op.type in _WRITES or variable_ops.only_reads(op, inside) for op in inside.consumers()
        )
        # The table in which a tool notes what it has seen has no such data, and keeps it.
        data = graphs.handle_data(outside) if inside.dtype == tf.resource else None
        if data is not None and data.shape_and_type and not all(is_done):
            kept.append((outside, read(outside, data.shape_and_type[0].dtype)))
    traced()
    kept_values.put_back(kept, finite)

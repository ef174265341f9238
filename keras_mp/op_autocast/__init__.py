"""Op autocast: runs any TensorFlow code in mixed precision.

The code sees float32 tensors only. This subpackage needs TensorFlow only, and replaces functions of
it when a region is first entered.
"""

from keras_mp.op_autocast.context_manager import (
    AutocastState,
    autocast,
    autocast_inputs,
    autocast_ops,
    autocast_state,
)

__all__ = ["AutocastState", "autocast", "autocast_inputs", "autocast_ops", "autocast_state"]

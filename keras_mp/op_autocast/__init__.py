"""Op autocast: any TensorFlow code in mixed precision, and what it sees stays float32.

What is here needs TensorFlow only, and takes hold of TensorFlow when a region is entered first.
"""

from keras_mp.op_autocast.context_manager import (
    AutocastState,
    autocast,
    autocast_inputs,
    autocast_ops,
    autocast_state,
)

__all__ = ["AutocastState", "autocast", "autocast_inputs", "autocast_ops", "autocast_state"]

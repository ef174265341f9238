"""What operations do to variables, whose handles they take.

This module needs TensorFlow only.
"""

import tensorflow as tf

# Operations that leave the value of a variable alone, as `op_table` has them.
READS = "ReadVariableOp ResourceGather ResourceGatherNd VariableV2"
LOOKS = "VariableShape VarIsInitializedOp"
THAT_ONLY_READ = frozenset(f"{READS} {LOOKS}".split())
# The attribute of operations that call a function: which of their inputs the function only reads.
_READ_ONLY_INPUTS = "_read_only_resource_inputs"


def only_reads(op: tf.Operation, handle: tf.Tensor) -> bool:
    """Whether an operation with a variable's handle as input leaves its value alone."""
    if op.type in THAT_ONLY_READ:
        return True
    try:
        read_only = set(op.get_attr(_READ_ONLY_INPUTS))
    except ValueError:
        return False
    return all(i in read_only for i, value in enumerate(op.inputs) if value is handle)

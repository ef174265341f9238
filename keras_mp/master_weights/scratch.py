"""Float32 variables that exist while an operation needs one.

The legacy optimizers of Keras 2 update a variable with one operation of TensorFlow's, which takes
the variable's handle. A view has no variable in float32, so it borrows one for as long as its
update takes.
"""

import uuid
import weakref
from collections import defaultdict
from typing import Any

import tensorflow as tf

from keras_mp.support import host


class Scratch:
    """Variables for one weight and its slots at a time.

    They are given back when a handle for another weight is asked for, or the step is over. Outside
    of XLA their memory is freed then. XLA keeps one for each shape, since compiled code neither
    frees variables nor changes their shapes.
    """

    def __init__(self) -> None:
        self._name = f"keras_mp_scratch_{uuid.uuid4().hex}"
        self._handles: dict[tuple[Any, ...], tf.Tensor] = {}
        # The variables that are borrowed, by device and by the id of the borrower: it has no hash.
        self._borrowed: dict[str, dict[int, tuple[Any, tf.Tensor]]] = defaultdict(dict)

    def handle_for(self, borrower: Any, value: tf.Tensor, device: str) -> tf.Tensor:
        """Lends a variable with a value, and returns its handle.

        Args:
            borrower: the view of a weight or of a slot, whose `take_back` gets the value later.
            value: float32 tensor of a static shape.
            device: the device of the variable.
        """
        borrowed = self._borrowed[device]
        handle = self._handle(device, value.shape, len(borrowed))
        borrowed[id(borrower)] = borrower, handle
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        return handle

    def find(self, borrower: Any, device: str) -> tf.Tensor | None:
        """Returns the handle that a borrower has now, or None."""
        _, handle = self._borrowed[device].get(id(borrower), (None, None))
        return handle

    def give_back(self) -> None:
        """Gives the values of all borrowed variables back to the borrowers."""
        keeps = host.is_compiled_by_xla()
        for device, borrowed in self._borrowed.items():
            while borrowed:
                _, (borrower, handle) = borrowed.popitem()
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
                with tf.device(device):
                    borrower.take_back(value)
                if not keeps:
                    tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

    def forget(self) -> None:
        """Forgets the borrowed variables, as after an error."""
        self._borrowed.clear()

    def _handle(self, device: str, shape: tf.TensorShape, number: int) -> tf.Tensor:
        key = (device, tuple(shape), number)
        if key not in self._handles:
            needs_value = host.is_compiled_by_xla()  # also of variables that are written first
            with tf.init_scope(), tf.device(device):
                handle = tf.raw_ops.VarHandleOp(
                    dtype=tf.float32,
                    shape=shape,
                    container="",
                    shared_name=f"{self._name}_{len(self._handles)}",
                )
                if needs_value:
                    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(shape))
            weakref.finalize(self, _destroy, handle)
            self._handles[key] = handle
        return self._handles[key]


def _destroy(handle: tf.Tensor) -> None:
    with tf.init_scope():
        if tf.executing_eagerly():  # and not while a graph of TensorFlow 1 is made
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

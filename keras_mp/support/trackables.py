"""The base class of objects that stand for others in checkpoints.

This module needs TensorFlow only.
"""

import operator
from typing import Any

import tensorflow as tf


class DelegatingTrackable:
    """An object whose `_trackable` attribute takes its place in checkpoints.

    Everything by which a checkpoint reads and writes an object comes from the other object.
    """


def delegated(name: str) -> property:
    """Returns a property that is an attribute of the other object."""

    def put(self: Any, value: Any) -> None:
        setattr(self._trackable, name, value)

    doc = f"`{name}` of the inner object."
    return property(operator.attrgetter(f"_trackable.{name}"), put, doc=doc)


_names = [name for name in vars(tf.Module.__mro__[-2]) if name[0] == "_" != name[1]]
# TensorFlow saves the values of any object that has these methods: they are for variables.
OF_VALUES = tuple(name for name in _names if name.endswith("tensors"))
# The methods that it calls on an optimizer with slots.
_OF_SLOTS = {"_create_or_restore_slot_variable", "_restore_slot_variable"}
for _name in _OF_SLOTS.union(_names).difference(OF_VALUES):
    setattr(DelegatingTrackable, _name, delegated(_name))

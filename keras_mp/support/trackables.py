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


def _delegated(name: str) -> property:
    def put(self: Any, value: Any) -> None:
        setattr(self._trackable, name, value)

    return property(operator.attrgetter(f"_trackable.{name}"), put)


_names = [name for name in vars(tf.Module.__mro__[-2]) if name[0] == "_" != name[1]]
# TensorFlow saves the values of any object that has these methods: they are for variables.
OF_VALUES = tuple(name for name in _names if name.endswith("tensors"))
for _name in {*_names}.difference(OF_VALUES):
    setattr(DelegatingTrackable, _name, _delegated(_name))

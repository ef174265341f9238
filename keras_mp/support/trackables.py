"""Base classes of objects that stand for others in checkpoints, or as tensors.

This module needs TensorFlow only.
"""

from typing import Any

import tensorflow as tf

from keras_mp.support import features
from keras_mp.tensorflow_api import saving
from keras_mp.tensorflow_api.features import TENSORS


class DelegatingTrackable:
    """An object whose `_trackable` attribute takes its place in checkpoints.

    Everything by which a checkpoint reads and writes an object comes from the other object.
    """


class DelegatingVariable(DelegatingTrackable):
    """A variable whose values, too, are those of the object in `_trackable`."""


def _delegated(name: str) -> property:
    def get(self: Any) -> Any:
        return getattr(self._trackable, name)

    def put(self: Any, value: Any) -> None:
        setattr(self._trackable, name, value)

    return property(get, put)


for _name in vars(tf.Module.__mro__[-2]):
    if _name.startswith("_") and not _name.startswith("__"):
        # TensorFlow saves the values of any object that has these methods.
        _is_of_values = _name.endswith("tensors")
        setattr(
            DelegatingVariable if _is_of_values else DelegatingTrackable, _name, _delegated(_name)
        )

# A class cannot change its bases later, so the private name is looked up now.
TENSOR_BASES: tuple[Any, ...] = (saving.Tensor.get(),) if features.is_on(TENSORS) else ()

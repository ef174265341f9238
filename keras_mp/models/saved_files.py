"""Files of models with a 16-bit policy of keras_mp.

h5py does not know bfloat16. Some dtypes, such as bfloat16, are known to NumPy only by another
library. h5py writes them as bytes without a meaning, which nobody can load. So while Keras saves a
model of keras_mp, numbers of 16 bits or fewer, except float16, are written as float32. It holds
each of these numbers, and Keras casts it back on loading.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import hooks, keras_api
from keras_mp.hooks import Replacement, When, wrapped
from keras_mp.hooks.once import once
from keras_mp.layer_calls import layer_call


@once
def install() -> None:
    """Lets Keras save models with a 16-bit policy of keras_mp, once in a process."""

    def is_ours(model: tf.keras.Model) -> bool:
        layers = keras_api.flatten_layers(model)
        return any(layer_call.policy_of(layer)[1] is not None for layer in layers)

    def saving(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            # One of Keras 2's takes the model as its second argument, another calls itself for all
            # that a model has.
            given = (*args, *kwargs.values())
            models = [each for each in given if isinstance(each, tf.keras.Model)]
            with _readable() if models and is_ours(models[0]) else contextlib.nullcontext():
                return original(*args, **kwargs)

        return write

    names = keras_api.names
    hooks.install(Replacement(n, saving, When.ALWAYS, names.FILES) for n in names.WRITERS)
    keras_api.export_as_called(is_ours, layer_call.entered)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Context manager in which this thread writes only what h5py can read."""
    import h5py  # Keras 2 can do without it.

    class Readable(h5py.Dataset):
        """A dataset of float32 to which values of another dtype are assigned."""

        def __setitem__(self, selection: Any, value: Any) -> None:
            super().__setitem__(selection, np.asarray(value, np.float32))

    def wrap(create_dataset: Callable[..., Any]) -> Callable[..., Any]:
        def create(
            group: Any,
            name: Any,
            shape: Any = None,
            dtype: Any = None,
            data: Any = None,
            **kwargs: Any,
        ) -> Any:
            if not _is_unreadable(dtype or getattr(data, "dtype", None)):
                return create_dataset(group, name, shape, dtype, data, **kwargs)
            if data is not None:
                data = np.asarray(data, np.float32)
            return Readable(create_dataset(group, name, shape, np.float32, data, **kwargs).id)

        return create

    with wrapped.here(h5py.Group, "create_dataset", wrap):
        yield


def _is_unreadable(dtype: Any) -> bool:
    """Whether h5py takes a dtype for bytes, though it is not one of bytes."""
    if not isinstance(dtype, np.dtype):
        return False
    return dtype.kind == "V" and dtype.type is not np.void

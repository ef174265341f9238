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
            models = (x for x in (*args, *kwargs.values()) if isinstance(x, tf.keras.Model))
            with _readable() if any(map(is_ours, models)) else contextlib.nullcontext():
                return original(*args, **kwargs)

        return write

    names = keras_api.names
    hooks.install(Replacement(n, saving, When.ALWAYS, names.FILES) for n in names.WRITERS)
    keras_api.export_as_called(is_ours, layer_call.entered)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Context manager in which this thread writes only what h5py can read."""
    import h5py  # Keras 2 can do without it.

    def wrap(write: Callable[..., Any]) -> Callable[..., Any]:
        def written(*args: Any, **kwargs: Any) -> Any:
            given = {name: _as_readable(value) for name, value in kwargs.items()}
            return write(*map(_as_readable, args), **given)

        return written

    create, assign = (h5py.Group, "create_dataset"), (h5py.Dataset, "__setitem__")
    with wrapped.here(*create, wrap), wrapped.here(*assign, wrap):
        yield


def _as_readable(value: Any) -> Any:
    """Returns float32, or an array of it, for a dtype that h5py would take for bytes."""
    dtype = value if isinstance(value, np.dtype) else getattr(value, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.kind != "V" or dtype.type is np.void:
        return value
    return np.dtype(np.float32) if value is dtype else np.asarray(value, np.float32)

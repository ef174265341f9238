"""The spellings of other systems and of older versions.

`keras_mp.compat.v1` is for the optimizers of TensorFlow 1. It is imported when it is needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_mp.compat import v1

__all__ = ["v1"]


if not TYPE_CHECKING:  # To a checker, any name would be there.

    def __getattr__(name: str) -> Any:
        if name != "v1":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")

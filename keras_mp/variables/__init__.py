"""Variables that cast themselves, their scope, and errors where dtypes meet.

RFC 293, "AutoCastVariable API" and "TypeErrors". This subpackage needs TensorFlow only.
"""

from keras_mp.variables.autocast_variable import AutoCastVariable, autocast_variable, cast_once
from keras_mp.variables.scope import (
    autocast_dtype,
    autocast_scope,
    in_current_scope,
    recompute_grad,
)

__all__ = [
    "AutoCastVariable",
    "autocast_dtype",
    "autocast_scope",
    "autocast_variable",
    "cast_once",
    "in_current_scope",
    "recompute_grad",
]

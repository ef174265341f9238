"""The Keras that `tf.keras` is, chosen once, at import.

`keras3*.py` and `keras2*.py` define the same names, which the former describe. `keras_api` has
those of the one that is chosen, and as `names` its private names and features. What is about
optimizers is imported here, all else (`models`) when it is first asked for. Nothing outside this
folder asks which Keras it is.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

import tensorflow as tf

_OLDEST_TENSORFLOW = (2, 16)
_OLDEST_KERAS_3 = (3, 12)

_INSTALL_KERAS = '`pip install "keras>={}.{}"`'.format(*_OLDEST_KERAS_3)

_OTHER = {"keras": "tf_keras", "tf_keras": "keras"}


def _refuse_older(title: str, version: str, oldest: tuple[int, int], cure: str = "") -> None:
    if tuple(int(part) for part in version.split(".")[:2]) < oldest:
        raise ImportError(
            f"keras_mp needs {title} {oldest[0]}.{oldest[1]} or later. {cure}"
            f"Received: {title.lower()} {version}"
        )


def _what_to_install() -> str:
    if os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True"):
        version = tf.__version__.rpartition(".")[0]
        return (
            "TF_USE_LEGACY_KERAS asks for Keras 2, which is not installed. Run "
            f"`pip install tf_keras=={version}.*`, or unset TF_USE_LEGACY_KERAS."
        )
    return (
        f"Keras 3 cannot be imported. Install it ({_INSTALL_KERAS}), and if KERAS_BACKEND or "
        "keras.json names another backend, set KERAS_BACKEND=tensorflow."
    )


def _root_package() -> str:
    """Returns "keras" (3) or "tf_keras" (2), if keras_mp works with it.

    Otherwise it raises an error.
    """
    _refuse_older("TensorFlow", tf.__version__, _OLDEST_TENSORFLOW)
    try:
        root = tf.keras.Model.__module__.partition(".")[0]
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"keras_mp cannot use `tf.keras`: {_what_to_install()} TensorFlow said: {error}"
        ) from error
    if root == "keras":
        version = sys.modules[root].__version__
        _refuse_older("Keras", version, _OLDEST_KERAS_3, f"Run {_INSTALL_KERAS}. ")
        backend = tf.keras.backend.backend()
        if backend != "tensorflow":
            raise ImportError(
                "keras_mp works with Keras 3 on its TensorFlow backend only. Set "
                "KERAS_BACKEND=tensorflow before Keras is imported, or in keras.json. "
                f"Received: backend={backend!r}"
            )
    return root


ROOT_PACKAGE = _root_package()
OTHER_PACKAGE = _OTHER[ROOT_PACKAGE]
# AutoGraph never converts Keras 3; tf_keras it converts up to TensorFlow 2.16.
AUTOGRAPH_MAY_CONVERT = ROOT_PACKAGE == "tf_keras"

# A test compares both, so one of them can stand for the other.
if TYPE_CHECKING or ROOT_PACKAGE == "keras":
    from keras_mp.keras_api import keras3_names as names
    from keras_mp.keras_api.keras3_optimizers import *
else:
    from keras_mp.keras_api import keras2_names as names
    from keras_mp.keras_api.keras2_optimizers import *

# Names that both Kerases have in the same place.
KerasLossScaleOptimizer = tf.keras.mixed_precision.LossScaleOptimizer
register_serializable = tf.keras.utils.register_keras_serializable(package="keras_mp")
# Where gradients are applied, by optimizers that are no wrappers.
APPLY_METHODS = tuple(
    (base, "apply" if hasattr(base, "apply") else "apply_gradients") for base in OPTIMIZER_BASES
)
serialize_optimizer = tf.keras.optimizers.serialize


def get_optimizer(identifier: Any) -> Any:
    """Returns an optimizer, given by itself or by its name or config.

    None stays None.

    Args:
        identifier: an optimizer, a str, a dict or None.
    """
    if isinstance(identifier, dict):
        identifier = deserialize_optimizer(identifier)
    return tf.keras.optimizers.get(identifier)


def switch_hint() -> str:
    """Returns the advice that makes `tf.keras` the other Keras."""
    change = "set TF_USE_LEGACY_KERAS=1" if ROOT_PACKAGE == "keras" else "unset TF_USE_LEGACY_KERAS"
    return f"{change} before TensorFlow is imported"


if TYPE_CHECKING:
    from keras_mp.keras_api.models import *
else:

    def __getattr__(name: str) -> Any:
        """Loads `models`. An optimizer needs nothing of layers, and of what those replace."""
        models = importlib.import_module(f"{__name__}.models")
        globals().update({k: v for k, v in vars(models).items() if not k.startswith("_")})
        return getattr(models, name)

"""Features that need private names.

They are off where TensorFlow or Keras has moved a name.
"""

import threading

from keras_mp.support import messages
from keras_mp.tensorflow_api.features import Feature

_lock = threading.Lock()
_known: dict[Feature, bool] = {}


def is_on(feature: Feature) -> bool:
    """Returns whether a feature works with this TensorFlow and Keras.

    Warns once if it does not.

    Args:
        feature: the `Feature` that the program needs now.
    """
    # It may be asked at each step.
    result = _known.get(feature)
    if result is None:
        with _lock:
            is_first = feature not in _known
            absent = feature.missing()
            result = _known[feature] = not absent
        if absent and is_first:
            messages.warn(
                f"keras_mp does without a feature: {feature.title}. {feature.without} "
                f"{'; '.join(absent)}, which the feature needs. A newer keras_mp may know this "
                "version (pip install --upgrade keras-mp); `python -m keras_mp.hardware` lists all "
                "features."
            )
    return result

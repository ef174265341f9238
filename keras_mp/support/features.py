"""Features that need private names.

They are off where TensorFlow or Keras has moved a name.
"""

import functools

from keras_mp.support import messages
from keras_mp.tensorflow_api.features import Feature

_missing = functools.cache(Feature.missing)  # It may be asked at each step.
_said: set[Feature] = set()


def is_on(feature: Feature) -> bool:
    """Returns whether a feature works with this TensorFlow and Keras.

    Warns once if it does not.

    Args:
        feature: the `Feature` that the program needs now.
    """
    absent = _missing(feature)
    if absent and feature not in _said:
        _said.add(feature)
        messages.warn(
            f"keras_mp does without a feature: {feature.title}. {feature.without} "
            f"{'; '.join(absent)}, which the feature needs. A newer keras_mp may know this "
            "version (pip install --upgrade keras-mp); `python -m keras_mp.hardware` lists all "
            "features."
        )
    return not absent

"""How keras_mp speaks to the user: one warning category, raised at the user's own line."""

import os
import sys
import warnings

_PACKAGES = ("keras_mp", "tensorflow", "keras", "tf_keras", "contextlib")
_NOT_THE_USER = (*(f"{os.sep}{p}{os.sep}" for p in _PACKAGES), "__autograph_generated_file")


class MixedPrecisionWarning(UserWarning):
    """Everything keras_mp warns about, so that one filter reaches all of it.

    Example:

    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=keras_mp.MixedPrecisionWarning)
    """


def warn(message: str) -> None:
    """Warns with `MixedPrecisionWarning`, pointing at the first caller outside the libraries.

    Args:
        message: str. What happened and what cures it.
    """
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    warnings.warn(message, MixedPrecisionWarning, stacklevel=level)


def _is_library(filename: str) -> bool:
    is_program = os.sep + "tests" + os.sep in filename or filename.endswith("__main__.py")
    return not is_program and any(part in filename for part in _NOT_THE_USER)

"""Explains an error about dtypes that a layer ran into (RFC 293, "TypeErrors").

This module needs TensorFlow only.
"""

import linecache
import re
import traceback
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_mp.support import messages
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

# The errors that TensorFlow raises where two dtypes meet: in eager, in a graph, on conversion.
ERRORS = (tf.errors.InvalidArgumentError, TypeError, ValueError)

_NAMES = {"half": "float16", "float": "float32", "double": "float64"}
_NAMES.update({name: name for name in ("float16", "bfloat16", "float32", "float64")})
# The name of a dtype, but not as part of another word, a path or the name of a tensor.
_DTYPE = re.compile(r"(?<![\w./:-])(?:tf\.)?(" + "|".join(_NAMES) + r")(?![\w/:(-]|\.\w)")
# The messages of TensorFlow where two dtypes meet. The user's own errors are not touched.
_ABOUT_DTYPES = re.compile(
    r"was expected to be a \S+ tensor but is a \S+ tensor|"  # in eager
    r"has type \S+ that does not match type|"  # in a graph
    r"have types \[.*\] that don't all match|"  # lists of tensors
    r"`x` and `y` must have the same dtype|"  # division
    r"Tensor conversion requested dtype \S+ for Tensor with dtype|"
    r"Incompatible type conversion requested to type|"  # of a variable
    r"variable with wrong dtype\. Expected \S+ got \S+|"  # in a graph
    r"Cannot convert a variable that appears as|"  # of one that casts itself
    r"enters the loop with type .* but has type|"  # loops
    r"TensorArray dtype is \S+ but Op is trying to write dtype|"
    r"Tensor\(.*\) and Tensor\(.*\) have different types|"  # branches
    r"`x.dtype` must be compatible with `rate.dtype`|"  # dropout
    r"Cannot convert a list containing a tensor of dtype|"
    r"Can not cast TensorSpec\(|"  # input_signature of a function
    r"has dtype \S+ (?:in the main branch|before the loop), but"  # AutoGraph's
)
# The form in which AutoGraph cites a line of the program.
_LINE = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)
# Functions that make a float32 tensor if no dtype is passed.
_MAKERS = re.compile(
    r"\btf\.((?:random\.(?:stateless_)?\w+|constant|ones|zeros|fill|eye|linspace|range|one_hot|"
    r"convert_to_tensor|cast))\("
)


_EXPLANATION = (
    "A layer's inputs and the weights of `add_weight` are cast to its compute dtype, other tensors "
    "are not."
)
# An outer layer recognizes by it that an inner one has explained the error. It is part of the
# message, since AutoGraph and Keras raise errors of their own, which have the message but no
# `__notes__`.
_SAID = "TensorFlow said: "


class _Explained:
    """An error whose explanation comes before the lines of AutoGraph.

    AutoGraph and Keras make an error of the same class, with a longer message.
    """

    # By it AutoGraph recognizes a class that takes a message.
    __init__ = Exception.__init__

    def __str__(self) -> str:
        message = Exception.__str__(self)  # pyright: ignore[reportArgumentType]
        lines = message.splitlines()
        number = next((i for i, line in enumerate(lines) if _SAID in line), 0)
        if not any("in user code:" in line for line in lines[:number]):
            return message
        line = lines.pop(number).strip()
        is_prefixed = line.split(" ")[0].endswith("Error:")
        return "\n".join([line.partition(" ")[2] if is_prefixed else line, "", *lines])


class DtypeTypeError(_Explained, TypeError):
    """A `TypeError` of TensorFlow that is explained."""


class DtypeValueError(_Explained, ValueError):
    """A `ValueError` of TensorFlow that is explained."""


def dtypes_in(error: Exception) -> list[str]:
    """Returns the floating dtypes that a TensorFlow error is about.

    Args:
        error: the error.

    Returns:
        The names of two different dtypes, in the order of the message; an empty list if the error
        is not about two floating dtypes.
    """
    lines = str(getattr(error, "message", error)).splitlines()
    # Other lines are left out: Keras lists the arguments of a layer there, with their dtypes.
    about = "".join(line for line in lines if _ABOUT_DTYPES.search(line))
    names = list(dict.fromkeys(_NAMES[name] for name in _DTYPE.findall(about)))
    return names[:2] if len(names) >= 2 else []


def explain(
    error: Exception, layer: str, compute_dtype: str, bare_variables: Iterable[str]
) -> TypeError | None:
    """Returns an error that names the layer, the dtypes and the likely cure.

    Args:
        error: the error that `call` raised.
        layer: str. How the message names the layer.
        compute_dtype: str. The layer's compute dtype.
        bare_variables: names of the layer's attributes that are variables and do not cast
            themselves.

    Returns:
        An exception to be raised from `error`, or None if it is about something else.
    """
    dtypes = dtypes_in(error)
    if not dtypes or _SAID in str(error):
        return None
    where, source = _where(error)
    return DtypeTypeError(
        f"{layer} computes in {compute_dtype}, and its `call` met {dtypes[0]} and {dtypes[1]} "
        f"{where}. {_EXPLANATION} {_cure(source, list(bare_variables))} {_said(error)}"
    )


def explain_refusal(error: Exception, who: str, in_float32: str) -> Exception | None:
    """Returns an error with the place, the dtypes and the cures before its message.

    Args:
        error: the error of TensorFlow that a layer or a step of Keras raised.
        who: str. The layer or step, as the beginning of a sentence.
        in_float32: str. What makes it float32, as the end of a sentence.

    Returns:
        An exception of the same type, or None if it is not about 16 bits beside another dtype.
    """
    dtypes = dtypes_in(error)
    if {*dtypes}.isdisjoint(LOW_PRECISION_NAMES) or _SAID in str(error):
        return None
    where, _ = _where(error)
    cures = "Cast one of them there."
    if "float32" in dtypes:  # It would not be refused in a float32 program.
        cures = f"Either cast one of them there, as in `tf.cast(x, tf.float32)`, or {in_float32}."
    message = (
        f"{who} met two dtypes that TensorFlow refuses together ({dtypes[0]} and {dtypes[1]}) "
        f"{where}. {cures} {_said(error)}"
    )
    if isinstance(error, tf.errors.OpError):
        of_tensorflow: Any = error
        return tf.errors.InvalidArgumentError(of_tensorflow.node_def, of_tensorflow.op, message)
    return DtypeValueError(message) if isinstance(error, ValueError) else DtypeTypeError(message)


def _said(error: Exception) -> str:
    return f"{_SAID}{getattr(error, 'message', error)}"


def _where(error: Exception) -> tuple[str, str]:
    """Returns where the user's program ran into an error, in words, and its source."""
    line = users_last_line(error)
    if line is None:
        return "in it", ""
    source = linecache.getline(*line).strip()
    return f"in line {line.number} of {line.file} (`{source}`)", source


def users_last_line(error: Exception) -> messages.Line | None:
    """Returns the innermost line of the program that an error has come through.

    It is None if there is no such line.
    """
    # AutoGraph runs a copy of the program, and notes which line of the program each line of it is.
    converted = getattr(error, "ag_error_metadata", None)
    stack = list(converted.translated_stack)[::-1] if converted else []
    frames = [*traceback.extract_tb(error.__traceback__), *stack]
    lines = [messages.Line(frame.filename, frame.lineno or 0) for frame in frames]
    # Keras 2 turns it into its own error, whose message has these lines.
    said = _LINE.findall(str(getattr(error, "message", error)))
    lines += [messages.Line(file, int(number)) for file, number in said]
    return next((line for line in lines[::-1] if not messages.is_library(line.file)), None)


def _cure(source: str, bare_variables: list[str]) -> str:
    used = [name for name in bare_variables if re.search(rf"\bself\.{name}\b", source)]
    maker = _MAKERS.search(source)
    if used or (bare_variables and not source):
        name = (used or bare_variables)[0]
        return (
            f"Likely cure: `self.{name}` is a bare tf.Variable; make it with `self.add_weight`, or "
            f"wrap it: `self.{name} = keras_mp.autocast_variable(...)`."
        )
    if maker and maker[1] in ("cast", "convert_to_tensor"):
        return f"Likely cure: let `tf.{maker[1]}` make a tensor of `self.compute_dtype`."
    if maker:
        return f"Likely cure: pass the dtype: `tf.{maker[1]}(..., dtype=self.compute_dtype)`."
    return (
        "Likely cures: pass `dtype=self.compute_dtype` to what makes a tensor (`tf.constant`, "
        "`tf.random.normal`, ...), make variables with `self.add_weight`, or cast: "
        "`tf.cast(x, self.compute_dtype)`."
    )

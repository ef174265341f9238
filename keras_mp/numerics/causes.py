"""The cause of a wrong number: where it is, what is said of it, and its cure, for all tools.

What `check` finds is a `Hazard`: a function that measures, and one that judges the numbers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_mp.numerics.results import Finding
from keras_mp.support.messages import Line

# Inputs of a batch, and weights, that make an overflow their own: networks begin with numbers of
# about 1, and few that train have weights of more than 10.
LARGE_INPUTS, LARGE_WEIGHTS = 1000.0, 100.0

_NORMALIZE = "for example with tf.keras.layers.Normalization"
_RESTART = "lower the learning rate, and restart from earlier weights"

# By cause, a sentence that a tool completes with what it has measured.
SAID = {
    "weights": "If training has made them so large, it has diverged: " + _RESTART + ".",
    "inputs": "normalize them first, " + _NORMALIZE + ".",
    "an input": "This input is too large for {dtype}: normalize it first, in float32.",
    "passed in": "It was already not finite when it was passed in.",
    "a constant": "This constant is too large for {dtype}. For a mask, use the lowest number of "
    "the dtype, or tf.where on the result.",
    "unscaled": "If a dynamic loss scale skips such steps, pass the model or the optimizer to "
    "`watch`, which then goes on.",
    "unknown": "print(keras_mp.numerics.check(model, (x, y))), with this batch, names the cure.",
}

# By cause, what to change.
CURES = {
    "weights": f"Training has diverged: {_RESTART}. If such weights are intended: ",
    "inputs": f"Normalize the inputs first, in float32, {_NORMALIZE}. Or: ",
    "an input": f"Normalize the inputs first, in float32, {_NORMALIZE} or Rescaling as the first "
    "layer.",
    "a constant": "Use a number that the dtype can represent: at most {largest:.5g}. For a mask, "
    "use its lowest number, {lowest:.5g}, or tf.where on the result.",
    "too large": "Compute it in float32, or scale its inputs down.",
    "too large for float16": "Compute it in float32, scale its inputs down, or use mixed_bfloat16.",
    "too large for float32": "Scale its inputs down: float32 alone is not enough.",
    "too small": "Compute it in float32, or scale its inputs up. An epsilon must be a number that "
    "{dtype} can represent.",
    "not finite": "Keep its inputs where its results are finite: for example, with "
    "tf.maximum(x, 1e-4) before a division or a logarithm.",
    "a cast to 8 bits": "If that is not intended, leave the cast to {dtype} out.",
    "unscaled": "In the function of tf.custom_gradient, multiply by what it gets: upstream * ...",
    "off": "Change that line, or {in_float32}.",
    "dtypes": "Cast there to self.compute_dtype, and make variables with `add_weight`, which casts "
    'them; or create the layer with dtype="float32".',
    "a custom gradient": "Let the gradient function of tf.custom_gradient return gradients in the "
    "dtypes of its inputs: tf.cast(gradient, x.dtype).",
    "a batch": "Clean the data, or check with another batch.",
}

# What lets something compute in float32, as words that follow "or".
IN_FLOAT32 = {
    "a loss": "cast to float32 in the loss: tf.cast(predictions, tf.float32)",
    "a layer": 'run the layer in float32: keras_mp.convert(model, {{"{path}": "float32"}})',
    "no layer of its own": "compute it in float32: cast there, or create the layer with "
    'dtype="float32"',
    "a function": "run it in float32: with keras_mp.autocast(enabled=False):",
}


class Said(NamedTuple):
    """What a judge says: a finding without its place.

    Attributes:
        hazard: str. Its name.
        why: str. Why it matters, with the numbers.
        cure: str. What to change.
        units: float. As in `Finding`.
        at: the operation that it is about, if it is another one than that which was observed.
        where: str. What it is about, if that is no layer.
    """

    hazard: str
    why: str
    cure: str
    units: float | None = None
    at: Any = None
    where: str | None = None

    def finding(self, where: str, line: Line | None) -> Finding:
        """Returns the finding, given what it is about if the judge has not said that."""
        return Finding(self.hazard, self.where or where, line, self.why, self.cure, self.units)


class Observed:
    """Something that may be a hazard, with the numbers that tell.

    Args:
        at: an operation, or words for what it is about.
        line: the line of the program, where it is known and `at` is no operation.
        **numbers: tensors of the graph, which are computed together with the step; or what is
            known already.
    """

    def __init__(self, at: Any, line: Line | None = None, /, **numbers: Any) -> None:
        self.at, self.line, self.numbers = at, line, numbers


class Hazard(NamedTuple):
    """A known hazard of 16 bits.

    Attributes:
        measure: called with what was run, such as a `TracedStep`; yields what is `Observed`.
        judge: called with the numbers of one, by name, each a number, a str or an array; returns
            what is `Said`, or None. It needs neither a model nor a graph.
    """

    measure: Callable[[Any], Iterator[Observed]]
    judge: Callable[..., Said | None]

    def findings(self, seen: Any) -> Iterator[Finding]:
        """Measures and judges what was run, where all numbers are known at once."""
        for found in self.measure(seen):
            said = self.judge(**found.numbers)
            if said is not None:
                yield said.finding(found.at, found.line)


def of_weights(largest: float) -> str:
    """Returns a sentence about weights that are too large, or not finite."""
    reached = f"reach {largest:.3g}" if math.isfinite(largest) else "are not finite"
    restart = _RESTART[0].upper() + _RESTART[1:]
    return f"Weights {reached}: if training has made them so, it has diverged. {restart}."


def of_overflow(
    dtype: str, largest_weight: float, largest_input: float, in_float32: int = 0
) -> tuple[str, str]:
    """Returns what to add to a sentence about an overflow, and its cure.

    Args:
        dtype: str. In which it is.
        largest_weight: float, of the model; NaN where weights are not finite.
        largest_input: float, of the batch.
        in_float32: int. How many of the results are not finite in float32, either.
    """
    why, cure = "", CURES["too large for float16" if dtype == "float16" else "too large"]
    if in_float32:
        why = f" {in_float32:,} of its results are not finite in float32, either."
        cure = CURES["too large for float32"]
    later = cure[0].lower() + cure[1:]
    if not largest_weight < LARGE_WEIGHTS:
        return f"{why} Weights reach {largest_weight:.3g}.", CURES["weights"] + later
    if largest_input >= LARGE_INPUTS:
        return f"{why} The inputs of the batch reach {largest_input:.3g}.", CURES["inputs"] + later
    return why, cure


def begun(
    inputs: Sequence[Sequence[int]],
    is_bad: np.ndarray,
    matters: np.ndarray,
    begins: np.ndarray | None = None,
) -> list[int]:
    """Returns the operations where numbers begin to be not finite, and reach what matters.

    Args:
        inputs: of each operation, the places of those before it whose results it takes.
        is_bad: array of bool: whose results are not finite.
        matters: array of bool: whose results must be finite.
        begins: array of bool: which have finite inputs. Defaults to what `is_bad` says of them.
    """
    reaches, found = is_bad & matters, []
    for i in reversed(np.flatnonzero(is_bad)):
        bad = [j for j in inputs[i] if is_bad[j]]
        if reaches[i]:
            reaches[bad] = True
            if not bad if begins is None else begins[i]:
                found.append(int(i))
    return found[::-1]

"""The report of the first operation whose result is not finite."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Range:
    """An operation, and the range of the numbers that it returned.

    Attributes:
        operation: str. Its type, "MatMul" say.
        layer: str. The path of its layer, such as "encoder/dense", if the model was passed; the
            name of the model for what it computes between its layers; else the name scopes.
        line: str or None. The line that it comes from, such as "model.py:12".
        dtype: str. The dtype of the numbers.
        low: float. The smallest finite number; Inf if there is none.
        high: float. The largest finite number; -Inf if there is none.
        bad: int. How many numbers are Inf or NaN.
        is_gradient: bool. Whether it is a part of a gradient.
    """

    operation: str
    layer: str
    line: str | None
    dtype: str
    low: float
    high: float
    bad: int
    is_gradient: bool

    @property
    def size(self) -> float:
        """The largest magnitude of a finite number; 0 if there is none."""
        return max(-self.low, self.high, 0.0) if self.low <= self.high else 0.0

    def __str__(self) -> str:
        where = f" in {self.layer}" if self.layer else ""
        line = f", {self.line}" if self.line else ""
        bad = f", {self.bad:,} not finite" if self.bad else ""
        numbers = f"{self.low:.3g} to {self.high:.3g}" if self.low <= self.high else "none finite"
        return f"{self.operation}{where} ({self.dtype}{line}): {numbers}{bad}"


class NotFiniteError(ArithmeticError):
    """The first operation whose result is not finite.

    Attributes:
        operation: Range of the operation.
        inputs: list of Range, of the operations whose results it takes.
        history: list of Range, for each layer before it the operation with the largest numbers,
            oldest first.
        device: str. The device that it ran on, which tells replicas apart; "" in eager.

    Example:

    >>> step = tf.function(lambda x: tf.sqrt(x - 1))
    >>> try:
    ...     with keras_mp.numerics.watch():
    ...         step(tf.constant(0.0))
    ... except keras_mp.numerics.NotFiniteError as error:
    ...     print(error.operation.operation, error.inputs[0].low)
    Sqrt -1.0
    """

    def __init__(
        self,
        operation: Range,
        inputs: Sequence[Range],
        history: Sequence[Range],
        device: str,
        advice: str,
    ) -> None:
        self.operation, self.inputs, self.history = operation, list(inputs), list(history)
        self.device = device
        way = "backward" if operation.is_gradient else "forward"
        lines = [
            f"The first operation whose result is not finite, in the {way} pass"
            f"{f' on {device}' if device else ''}:",
            f"  {operation}",
        ]
        if self.inputs:
            lines += ["Its inputs, from their smallest to their largest number:"]
            lines += [f"  {each}" for each in self.inputs]
        if self.history:
            lines += ["The layers before it, the last one last:"]
            lines += [f"  {each}" for each in self.history]
        super().__init__("\n".join([*lines, advice] if advice else lines))

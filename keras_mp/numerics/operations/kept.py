"""Operations as they run in eager, kept with what went in and what came out."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.numerics.operations.call_sites import place
from keras_mp.support import op_callbacks, op_table
from keras_mp.support.messages import Line

# Operations that move or rename numbers, and compute none.
SAFE = op_table.ops(
    *("arguments", "constants", "reads of variables", "fills", "no numbers"),
    *op_table.SAME_NUMBERS,
)


def is_safe(kind: str, outputs: Sequence[tf.Tensor]) -> bool:
    """Whether an operation returns the numbers that it takes: a cast to 8 bits changes many."""
    return kind in SAFE and not any(each.dtype.size == 1 for each in outputs)


class KeptOperation(NamedTuple):
    """An operation that ran.

    Attributes:
        type: its type, "MatMul" say.
        inputs: the tensors that went in.
        outputs: those that came out.
        is_gradient: whether it ran for a gradient.
        line: the line of the program that it came from; None where only libraries had to do with
            it.
        scope: the name scope that it ran in.
    """

    type: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    is_gradient: bool
    line: Line | None
    scope: str


class KeptOperations:
    """Operations that ran, in their order.

    Attributes:
        operations: list of KeptOperation. Those that compute floating-point numbers. One whose
            result is only rounded to 16 bits, as a sum in float32 is, has the rounded result.
    """

    def __init__(self) -> None:
        self.operations: list[KeptOperation] = []
        # The operation that computed a tensor, by the tensor's id, and the tensors, which are held
        # so that no other one gets the id.
        self._makers: dict[int, int] = {}
        self._held: list[Any] = []

    def is_computed(self, value: tf.Tensor) -> bool:
        """Whether one of the operations has computed a tensor."""
        return id(value) in self._makers

    def keep(
        self,
        kind: str | bytes,
        inputs: Sequence[tf.Tensor],
        attrs: object,
        outputs: Sequence[tf.Tensor],
        *_: Any,
        **__: Any,
    ) -> None:
        """Keeps an operation; `op_callbacks.observed` calls it."""
        del attrs
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if not any(value.dtype.is_floating for value in outputs):
            return
        if not is_safe(kind, outputs):
            maker = len(self.operations)
            where = place()
            self.operations.append(
                KeptOperation(
                    kind,
                    tuple(inputs),
                    tuple(outputs),
                    where.is_gradient,
                    where.at,
                    tf.get_current_name_scope(),
                )
            )
        else:
            maker = next((self._makers[id(v)] for v in inputs if self.is_computed(v)), None)
            if maker is None:
                return
            if kind == "Cast" and outputs[0].dtype.size < inputs[0].dtype.size:
                made = self.operations[maker]
                rounded = tuple(outputs[0] if v is inputs[0] else v for v in made.outputs)
                self.operations[maker] = made._replace(outputs=rounded)
        self._makers.update((id(value), maker) for value in outputs)
        self._held.extend(outputs)


@contextlib.contextmanager
def kept() -> Iterator[KeptOperations]:
    """Keeps the operations of the block."""
    seen = KeptOperations()
    with op_callbacks.observed(seen.keep):
        yield seen

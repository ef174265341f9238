"""The results of `tune`: a policy for each layer, with the reason, as a table and as JSON."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from keras_mp.numerics.results import Result
from keras_mp.support import text_tables


class Errors(NamedTuple):
    """How far a model is from float32 on a batch: relative, infinite where it is not finite.

    Attributes:
        outputs: float. Of the model's outputs, the one that is furthest off.
        loss: float.
        gradients: float. Of the gradients of layers' weights, the one that is furthest off.
        layer: str. The path of that layer.

    Example:

    >>> from keras_mp.numerics.tuned import Errors
    >>> print(Errors(0.001, 0.0, 0.04, "dense"))
    gradients of dense 4.0e-02 off
    """

    outputs: float
    loss: float
    gradients: float
    layer: str = ""

    @property
    def largest(self) -> float:
        """The largest of the three."""
        return max(self[:3])

    def __str__(self) -> str:
        if self.outputs == self.largest:
            what = "outputs"
        elif self.loss == self.largest:
            what = "loss"
        else:
            what = f"gradients of {self.layer}"
        return f"{what} {_number(self.largest)}{' off' * math.isfinite(self.largest)}"


class TunedLayer(NamedTuple):
    """The policy of a layer.

    Attributes:
        path: str.
        kind: str. Its class.
        policy: str.
        multiplications: int. How many it makes in the forward pass of a batch, in matrix products
            and convolutions.
        error: float. How far it is off in 16 bits by itself, given the inputs and the upstream
            gradient that it has in float32; None if it was left out.
        reason: str. Of a layer in float32, how far off the model would be with it in 16 bits.

    Example:

    >>> from keras_mp.numerics.tuned import TunedLayer
    >>> TunedLayer("dense", "Dense", "mixed_float16", 64, 0.0003, "").is_in_16_bits
    True
    """

    path: str
    kind: str
    policy: str
    multiplications: int
    error: float | None
    reason: str

    @property
    def is_in_16_bits(self) -> bool:
        """Whether it computes in 16 bits."""
        return self.policy != "float32"


@dataclasses.dataclass(frozen=True, repr=False)
class Tuned(Result):
    """The results of `tune`. `str` is a table; `keras_mp.convert` takes it, or its JSON.

    Attributes:
        name: str. The model's.
        dtype: str. "float16" or "bfloat16".
        tolerance: float.
        layers: tuple of `TunedLayer`s, in the order of the model.
        errors: tuple of `Errors`, of each batch that the policies were looked for with.
        held_out: tuple of `Errors`, of each batch that was held out.
        model: the model with these policies, not compiled.
        loss_scale: float or None. The scale to begin with, at which no gradient of these batches
            overflows; None where none is needed.

    Example:

    >>> layer = keras_mp.numerics.tuned.TunedLayer("dense", "Dense", "mixed_float16", 8, 0.0, "")
    >>> tuned = keras_mp.numerics.Tuned("model", "float16", 0.05, (layer,), (), (), None)
    >>> tuned
    <Tuned 'model': 1 of 1 layers in mixed_float16>
    >>> tuned.share
    1.0
    """

    name: str
    dtype: str
    tolerance: float
    layers: tuple[TunedLayer, ...]
    errors: tuple[Errors, ...]
    held_out: tuple[Errors, ...]
    model: Any = dataclasses.field(compare=False)
    loss_scale: float | None = None

    @property
    def policies(self) -> dict[str, str]:
        """The policies by paths of layers, for `keras_mp.convert`; that of the model is at ""."""
        of_model = f"mixed_{self.dtype}" if self._in_16_bits else "float32"
        return {"": of_model} | {layer.path: layer.policy for layer in self.layers}

    @property
    def share(self) -> float:
        """The share of the multiplications that is in 16 bits, from 0 to 1; 0 if there are none."""
        total = sum(layer.multiplications for layer in self.layers)
        return sum(layer.multiplications for layer in self._in_16_bits) / total if total else 0.0

    @property
    def _in_16_bits(self) -> list[TunedLayer]:
        return [layer for layer in self.layers if layer.is_in_16_bits]

    def to_dict(self) -> dict[str, Any]:
        """Returns the policies, which `convert` takes, and all that was measured."""
        described = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del described["model"]
        return {**described, "policies": self.policies}

    def to_text(self, rows: int | None = text_tables.MOST) -> str:
        """Returns what `print` shows: how far the model is off, where layers went, and why.

        Args:
            rows: int. How many layers are shown at most: those in float32 first, then those of most
                multiplications; None for all, in their order. Defaults to 10.

        Returns:
            str of several lines, of at most 100 characters each unless `rows` is None.
        """
        return "\n".join(self._lines(rows))

    def __repr__(self) -> str:
        return (
            f"<Tuned {self.name!r}: {len(self._in_16_bits)} of {len(self.layers)} layers in "
            f"mixed_{self.dtype}>"
        )

    def _lines(self, rows: int | None) -> Iterator[str]:
        yield (
            f"{text_tables.fitted(self.name, 30)}: {len(self._in_16_bits)} of {len(self.layers)} "
            f"layers in mixed_{self.dtype}, {self.share:.1%} of the multiplications"
        )
        yield ""
        distances: list[tuple[str, ...]] = [
            ("Off by, relative to float32", "Outputs", "Loss", "Gradients")
        ]
        for name, found in (("tuned on", self.errors), ("held out", self.held_out)):
            columns = list(zip(*(each[:3] for each in found)))
            of = f"{len(found)} batch{'es' * (len(found) != 1)} {name}"
            distances.append((f"{of}, worst", *(_number(max(each)) for each in columns)))
            means = (sum(each) / len(each) for each in columns)
            distances.append((f"{of}, mean", *map(_number, means)))
        yield from text_tables.aligned(distances)
        scale = f"; initial loss scale: {self.loss_scale:g}" if self.loss_scale else ""
        yield f"Tolerance: {self.tolerance:g}{scale}"
        yield ""
        header = ("Layer", "Policy", "Multiplications", "Error alone", "Reason")
        layers = list(map(_row, self.layers))
        yield from text_tables.shortened(header, layers, rows, left=(0, 1, 4))


def _row(layer: TunedLayer) -> text_tables.RankedRow:
    error = "-" if layer.error is None else _number(layer.error)
    name, products = f"{layer.path} ({layer.kind})", f"{layer.multiplications:,}"
    return text_tables.RankedRow(
        (name, layer.policy, products, error, layer.reason),
        (float(not layer.is_in_16_bits), float(layer.multiplications)),
        (layer.kind, layer.policy),
    )


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.1e}" if value else "0"

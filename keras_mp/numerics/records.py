"""What a run of a model left, layer by layer, in a form that can be kept in a file."""

import dataclasses
import json
import math
import os
import zipfile
from collections.abc import Iterator

import numpy as np

# Of a larger tensor, so many numbers at equal distances stand for all of them.
_MOST_VALUES = 2**16

_FORMAT = 1


@dataclasses.dataclass
class Quantity:
    """A tensor of a run.

    Attributes:
        values: array of float64, the numbers, or a sample of a large tensor's.
        not_finite: int. How many numbers of the whole tensor are Inf or NaN.
        explained: float. The root mean square of what rounding may change in it.
    """

    values: np.ndarray
    not_finite: int
    explained: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray, explained: float) -> "Quantity":
        """Makes one of all numbers of a tensor."""
        flat = values.ravel()
        stride = math.ceil(flat.size / _MOST_VALUES) or 1
        return cls(flat[::stride], int(np.count_nonzero(~np.isfinite(flat))), explained)


@dataclasses.dataclass
class Layer:
    """One call of a layer.

    Attributes:
        path: str. The names of the layers from below the model to this one; of the model its name.
        kind: str. Its class.
        dtype: str. The narrowest dtype that it computes in or returns.
        unit: float. The unit roundoff of that dtype.
        forward: dict of str to Quantity. What it returned.
        backward: dict of str to Quantity. The gradients of that, and of its weights.
    """

    path: str
    kind: str
    dtype: str
    unit: float
    forward: dict[str, Quantity] = dataclasses.field(default_factory=dict)
    backward: dict[str, Quantity] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Record:
    """What one run of a model left. `keras_mp.numerics.record` makes it.

    Attributes:
        name: str. What was run, and in which dtype.
        layers: list of Layer, in the order in which the layers returned.
        loss: float.
        loss_scale: float. What the loss was multiplied by; gradients are divided by it again.

    Example:

    >>> layers = [tf.keras.Input([4]), tf.keras.layers.Dense(2, name="dense")]
    >>> model = tf.keras.Sequential(layers, name="model")
    >>> record = keras_mp.numerics.record(model, tf.ones([3, 4]))
    >>> [layer.path for layer in record.layers]
    ['dense', 'model', 'loss']
    """

    name: str
    layers: list[Layer]
    loss: float
    loss_scale: float

    def save(self, path: str | os.PathLike) -> None:
        """Writes it to a file, which `load` reads: here, or in another version of the program.

        Args:
            path: of the file, which ends with ".npz".

        Raises:
            ValueError: it ends with something else.
        """
        if not os.fspath(path).endswith(".npz"):
            raise ValueError(f"Expected a path that ends with '.npz'. Received: path={path!r}")
        arrays = {key: quantity.values for key, _, quantity in self._quantities()}
        described = {
            **dataclasses.asdict(self),
            "format": _FORMAT,
            "layers": [
                {
                    **{f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)[:4]},
                    **{
                        side: {
                            name: [quantity.not_finite, quantity.explained]
                            for name, quantity in getattr(layer, side).items()
                        }
                        for side in ("forward", "backward")
                    },
                }
                for layer in self.layers
            ],
        }
        arrays["description"] = np.array(json.dumps(described))
        # NumPy declares no arrays by names of one's own.
        np.savez_compressed(path, **arrays)  # pyright: ignore[reportArgumentType]

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Record":
        """Reads what `save` wrote.

        Args:
            path: of the file.

        Returns:
            Record.

        Raises:
            ValueError: it is another file.
        """
        other = ValueError(
            "Expected a file that keras_mp.numerics.Record.save wrote. "
            f"Received: path={os.fspath(path)!r}"
        )
        if not zipfile.is_zipfile(path):
            os.stat(path)  # Is there any?
            raise other
        with np.load(path, allow_pickle=False) as file:
            described = json.loads(str(file["description"])) if "description" in file else {}
            if described.pop("format", None) != _FORMAT:
                raise other
            for i, layer in enumerate(described["layers"]):
                for side in ("forward", "backward"):
                    layer[side] = {
                        name: Quantity(file[f"{i}/{side}/{name}"], *numbers)
                        for name, numbers in layer[side].items()
                    }
        layers = [Layer(**layer) for layer in described.pop("layers")]
        return cls(**described, layers=layers)

    def _quantities(self) -> Iterator[tuple[str, Layer, Quantity]]:
        for i, layer in enumerate(self.layers):
            for side in ("forward", "backward"):
                for name, quantity in getattr(layer, side).items():
                    yield f"{i}/{side}/{name}", layer, quantity

"""The outputs and gradients of a run, layer by layer, in a form that can be saved."""

import dataclasses
import functools
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.numerics.calls import Call, named_weights
from keras_mp.numerics.distances import (
    NOISY_RUNS,
    UNIT_ROUNDOFF,
    Noise,
    apart,
    array,
    kind_of_gradient,
)
from keras_mp.numerics.run import Run, Runner

# A larger tensor is represented by so many of its numbers.
_MOST_VALUES = 2**16

_FORMAT = 1


SIDES = ("forward", "backward")


@functools.lru_cache(maxsize=32)
def _sampled(size: int) -> Any:
    """Returns which numbers of a tensor are looked at: the same ones in every run.

    At equal distances they could all be of the same few features.
    """
    if size <= _MOST_VALUES:
        return slice(None)
    return np.random.default_rng(0).integers(0, size, _MOST_VALUES)


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
    def of(cls, values: np.ndarray) -> "Quantity":
        """Samples a tensor."""
        flat = values.ravel()
        return cls(flat[_sampled(flat.size)], int(np.count_nonzero(~np.isfinite(flat))))


@dataclasses.dataclass
class LayerRecord:
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

    @classmethod
    def of(
        cls, call: Call, gradients: Mapping[str, tf.Tensor], scale: float = 1.0
    ) -> "LayerRecord":
        """Makes the layer of a call, and of gradients by name, which are divided by a scale."""
        forward = {f"output {i}": Quantity.of(array(each)) for i, each in enumerate(call.outputs)}
        backward = {name: Quantity.of(array(each) / scale) for name, each in gradients.items()}
        return cls(call.path, call.kind, call.dtype, call.unit, forward, backward)

    def quantities(self) -> Iterator[tuple[str, str, Quantity]]:
        """Yields the side, the name and the quantity of each tensor."""
        for side in SIDES:
            for name, quantity in getattr(self, side).items():
                yield side, name, quantity


@dataclasses.dataclass
class Record:
    """The outputs and gradients of one run of a model, as `keras_mp.numerics.record` returns them.

    Attributes:
        name: str. What was run, and in which dtype.
        layers: list of LayerRecord, in the order in which the layers returned.
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
    layers: list[LayerRecord]
    loss: float
    loss_scale: float

    def save(self, path: str | os.PathLike) -> None:
        """Writes the record to a file, which `load` reads: here, or in another program.

        Args:
            path: of the file, which ends with ".npz".

        Raises:
            ValueError: it ends with something else.
        """
        if not os.fspath(path).endswith(".npz"):
            raise ValueError(f"Expected a path that ends with '.npz'. Received: path={path!r}")
        arrays: dict[str, np.ndarray] = {}
        described = {**dataclasses.asdict(self), "format": _FORMAT}
        for i, (layer, description) in enumerate(zip(self.layers, described["layers"])):
            for side, name, quantity in layer.quantities():
                arrays[f"{i}/{side}/{name}"] = quantity.values
                description[side][name] = [quantity.not_finite, quantity.explained]
        arrays["description"] = np.array(json.dumps(described))
        # NumPy's stubs take keyword arguments for options.
        np.savez_compressed(path, **arrays)  # pyright: ignore[reportArgumentType]

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Record":
        """Reads a record that `save` wrote.

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
            os.stat(path)  # An error says so if there is no file.
            raise other
        with np.load(path, allow_pickle=False) as file:
            described = json.loads(str(file["description"])) if "description" in file else {}
            if described.pop("format", None) != _FORMAT:
                raise other
            for i, layer in enumerate(described["layers"]):
                for side in SIDES:
                    layer[side] = {
                        name: Quantity(file[f"{i}/{side}/{name}"], *numbers)
                        for name, numbers in layer[side].items()
                    }
        layers = [LayerRecord(**layer) for layer in described.pop("layers")]
        return cls(**described, layers=layers)


def layers_of(run: Run) -> list[LayerRecord]:
    """Returns a layer for each call of a run, and one for each weight that belongs to no call."""
    left = dict(run.gradients)
    names = {id(weight): name for name, weight in named_weights(run.model).items()}
    layers = []
    for call in run.calls:
        found = enumerate(call.gradients)
        gradients = {f"output {i}": each for i, each in found if each is not None}
        for weight in getattr(call.layer, "trainable_weights", ()):
            # A layer inside of another one comes first, so its weights are counted there.
            name = names.pop(id(weight), None)
            if name in left:
                gradients[name] = left.pop(name)
        layers.append(LayerRecord.of(call, gradients, run.loss_scale))
    for name, gradient in left.items():
        dtype, kind = gradient.dtype.name, kind_of_gradient(name)
        quantities = {name: Quantity.of(array(gradient) / run.loss_scale)}
        layers.append(LayerRecord(name, kind, dtype, UNIT_ROUNDOFF[dtype], backward=quantities))
    return layers


def explain(layers: Sequence[LayerRecord], moved: Sequence[LayerRecord]) -> None:
    """Raises what rounding explains to what noise has moved.

    Args:
        layers: of a run.
        moved: of the same run with noise.
    """
    if [layer.path for layer in layers] != [layer.path for layer in moved]:
        return  # The calls depend on the numbers.
    for layer, other in zip(layers, moved):
        for side, name, quantity in layer.quantities():
            found = getattr(other, side).get(name)
            distance = math.inf
            # A tensor that its layer returns and also uses has no gradient once noise replaces it.
            if found is not None and found.values.shape == quantity.values.shape:
                distance = apart(found.values, quantity.values)
            quantity.explained = max(quantity.explained, distance)


def explained_layers(runner: Runner, run: Run, unit: float) -> list[LayerRecord]:
    """Returns the layers of a run, with what rounding explains, which runs with noise measure.

    Args:
        runner: Runner that made the run.
        run: Run.
        unit: float. The unit roundoff of what is to be explained.
    """
    layers = layers_of(run)
    for seed in range(NOISY_RUNS):
        explain(layers, layers_of(runner.run(run.loss_scale, Noise(unit, seed))))
    return layers

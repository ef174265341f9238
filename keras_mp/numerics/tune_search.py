"""The search of `tune` for the layers that may compute in 16 bits."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.numerics import batches as batches_of
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.calls import RandomNumbers
from keras_mp.numerics.distances import array, is_noise, jitter, relative
from keras_mp.numerics.run import (
    GivenLoss,
    Loss,
    Run,
    Runner,
    check_finite,
    check_same_calls,
    compiled,
    loss_of,
    of_model,
    replay,
    signed_mean,
)
from keras_mp.numerics.tuned import Errors
from keras_mp.step.schedule import INITIAL_LOSS_SCALE
from keras_mp.support.progress import Progress

# After so many models have been made and run, groups of layers are not divided any more.
_MOST_MODELS = 100


class Reference(NamedTuple):
    """The results of the model in float32 on a batch.

    Attributes:
        batch: Batch.
        numbers: RandomNumbers that were drawn, in the dtypes of a model in 16 bits.
        outputs: list of arrays.
        loss: float.
        gradients: of each layer with trained weights, by its path, one array.
        noise: set of the layers whose gradients are rounding noise.
        loss_scale: float. The largest at which no gradient of float32 overflows in float16, or that
            with which training begins if that is smaller.
    """

    batch: Batch
    numbers: RandomNumbers
    outputs: list[np.ndarray]
    loss: float
    gradients: dict[str, np.ndarray]
    noise: set[str]
    loss_scale: float


@dataclasses.dataclass
class Search:
    """Models with some layers in 16 bits, and how far they are from float32.

    Args:
        model: of the user.
        reference: the same in float32.
        units: layers of that by their paths.
        policy: str, of layers in 16 bits.
        loss: of the user, or None.
        tolerance: float.
        batches: list of Batch.
        progress: Progress, which is told what is run.

    Attributes:
        refused: dict of the paths of layers that were too far off, with how far they were.
    """

    model: tf.keras.Model
    reference: tf.keras.Model
    units: dict[str, tf.keras.layers.Layer]
    policy: str
    loss: GivenLoss | None
    tolerance: float
    batches: Sequence[Batch]
    progress: Progress

    def __post_init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._references: list[Reference] = []
        self._errors: dict[tuple[frozenset[str], int], Errors] = {}
        self._made: tuple[frozenset[str], tf.keras.Model, Loss] | None = None
        self._models = 0

    def prepare(self, candidates: Sequence[str]) -> dict[str, float]:
        """Runs each batch in float32, and returns the errors of the candidates by themselves."""
        own = dict.fromkeys(candidates, 0.0)
        loss = self._loss(self.reference)
        for i, batch in enumerate(self.batches):
            self.progress.begin(f"batch {i + 1} of {len(self.batches)} in both dtypes")
            numbers = RandomNumbers()
            # This run draws the random numbers, and all dtypes hold those of the narrowest one.
            narrow = self._run(candidates, batch, numbers)
            runner = Runner(self.reference, batch, of_model(loss), numbers=numbers)
            wide = runner.run()
            check_finite(wide, batch)
            check_same_calls(narrow, wide)
            gradients = self._gradients(wide)
            moved = self._gradients(runner.run(noise=jitter(i)))
            noise = {
                path
                for path, value in gradients.items()
                if is_noise(value, moved[path]) or not value.any()
            }
            scale = max(1.0, _scale_for(wide.all_gradients()))
            reference = Reference(
                batch, numbers, _outputs(wide), wide.loss, gradients, noise, scale
            )
            self._references.append(reference)
            self._errors[frozenset(candidates), i] = self._apart(narrow, reference)
            for path, error in self._own_errors(candidates, narrow, wide).items():
                own[path] = max(own[path], error)
        return own

    def add(self, group: list[str], chosen: list[str], where: Sequence[int]) -> list[str]:
        """Adds layers to those that compute in 16 bits, as many as the tolerance allows.

        Args:
            group: the layers, the best first.
            chosen: those that already do.
            where: numbers of the batches to look at.

        Returns:
            `chosen` and those of `group` that went in.
        """
        if not group:
            return chosen
        both = [*chosen, *group]
        errors = (self.errors(both, i) for i in where)
        failure = next((str(each) for each in errors if not each.largest <= self.tolerance), None)
        if failure is None:
            return both
        if len(group) == 1 or self._models >= _MOST_MODELS:
            others = f", with {len(group) - 1} others" if len(group) > 1 else ""
            self.refused |= dict.fromkeys(group, failure + others)
            return chosen
        middle = len(group) // 2
        first, second = group[:middle], group[middle:]
        return self.add(second, self.add(first, chosen, where), where)

    def errors(self, chosen: Sequence[str], i: int) -> Errors:
        """Returns how far a model is from float32 on a batch."""
        key, reference = (frozenset(chosen), i), self._references[i]
        if key not in self._errors:
            self.progress.begin(f"{len(chosen)} layers in {self.policy}")
            run = self._run(chosen, reference.batch, reference.numbers, reference.loss_scale)
            self._errors[key] = self._apart(run, reference)
        return self._errors[key]

    @property
    def loss_scale(self) -> float:
        """The largest loss scale at which no gradient of a batch overflows."""
        return min(reference.loss_scale for reference in self._references)

    def policies(self, chosen: Sequence[str]) -> dict[str, str]:
        """Returns the policies of a model with these layers in 16 bits."""
        policies = dict.fromkeys(self.units, "float32") | dict.fromkeys(chosen, self.policy)
        return {"": self.policy if chosen else "float32"} | policies

    def _run(
        self,
        chosen: Sequence[str],
        batch: Batch,
        numbers: RandomNumbers,
        loss_scale: float | None = None,
    ) -> Run:
        key = frozenset(chosen)
        try:
            if self._made is None or self._made[0] != key:
                model = compiled(self.model, self.policies(chosen), "sgd")
                self._models += 1
                self._made = key, model, self._loss(model)
            _, model, loss = self._made
            runner = Runner(model, batch, of_model(loss), numbers=numbers)
            return runner.run_as_trained(loss_scale)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            raise ValueError(
                f"The model {self.model.name!r} does not run in {self.policy}. Name the "
                "layers that do not in `leave_out`, or give batches that suit it. The error is: "
                f"{batches_of.reason(error)}"
            ) from error

    def _loss(self, model: tf.keras.Model) -> Loss:
        batch = self.batches[0]
        loss = loss_of(model, self.model, batch, self.loss)
        if loss is signed_mean:
            raise ValueError(
                "Expected batches (x, y) with labels, and a loss: pass `loss`, or compile the "
                f"model {self.model.name!r}. Received: loss={self.loss!r}"
            )
        return loss

    def _gradients(self, run: Run) -> dict[str, np.ndarray]:
        found: dict[str, list[tf.Tensor]] = {}
        for path, gradient in run.gradients_by_path().items():
            if gradient is not None:
                found.setdefault(path.rpartition("/")[0], []).append(gradient)
        return {path: _joined(values) / run.loss_scale for path, values in found.items()}

    def _apart(self, run: Run, reference: Reference) -> Errors:
        outputs = map(relative, _outputs(run), reference.outputs)
        gradients = []
        for path, value in self._gradients(run).items():
            if path in reference.noise:
                gradients.append((0.0 if np.isfinite(value).all() else math.inf, path))
            else:
                gradients.append((relative(value, reference.gradients[path]), path))
        error, path = max(gradients, default=(0.0, ""))
        loss = relative(np.array([run.loss]), np.array([reference.loss]))
        return Errors(max(outputs, default=0.0), loss, error, path)

    def _own_errors(self, candidates: Sequence[str], narrow: Run, wide: Run) -> dict[str, float]:
        """Runs each layer in both dtypes, on the inputs that it had in float32."""
        paths = {id(self.units[path]): path for path in candidates}
        errors: dict[str, float] = {}
        for call, exact_call in zip(narrow.calls, wide.calls, strict=True):
            path = paths.get(id(exact_call.layer))
            if path is None:
                continue
            upstream = exact_call.gradients
            exact = replay(exact_call, exact_call.layer, upstream)
            # The scale that suits this layer alone.
            scale = _scale_for([*upstream, *exact.gradients.values()])
            scaled = [None if each is None else each * scale for each in upstream]
            one = replay(exact_call, call.layer, scaled)
            both = [each for each in exact.gradients if each in one.gradients]
            gradients = [one.gradients[each] for each in both]
            forward = relative(_joined(one.outputs), _joined(exact.outputs))
            backward = relative(_joined(gradients) / scale, _joined(exact.gradients.values()))
            errors[path] = max(errors.get(path, 0.0), forward, backward)
        return errors


def _scale_for(gradients: Iterable[tf.Tensor | None]) -> float:
    """Returns the largest usual loss scale at which gradients do not overflow in float16."""
    sizes = (float(tf.reduce_max(tf.abs(g))) for g in gradients if g is not None)
    largest = max((size for size in sizes if math.isfinite(size)), default=0.0)
    if not largest:
        return INITIAL_LOSS_SCALE
    return min(INITIAL_LOSS_SCALE, 2.0 ** math.floor(math.log2(float(tf.float16.max) / largest)))


def _outputs(run: Run) -> list[np.ndarray]:
    """Returns the floating-point outputs of the model, which are the inputs of the loss."""
    return [array(output) for output in run.calls[-1].inputs]


def _joined(tensors: Iterable[tf.Tensor]) -> np.ndarray:
    return np.concatenate([np.empty(0), *(array(each).ravel() for each in tensors)])

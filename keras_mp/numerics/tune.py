"""The policy of each layer: as much in 16 bits as a tolerance allows, measured.

A model in which some layers compute in 16 bits is run beside the same model in float32, on the same
batches, with the same random numbers. Layers are tried together, those first that bring many
multiplications for little error. Where they are too far off together, each half is tried by itself,
and so on down to the layers that have to stay in float32.
"""

import fnmatch
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.conversion import convert, paths_in_config, units_by_path
from keras_mp.layer_paths import variables_by_path
from keras_mp.numerics import batches as batches_of
from keras_mp.numerics import runs
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.census import census
from keras_mp.numerics.distances import relative
from keras_mp.numerics.layer_calls import RandomNumbers
from keras_mp.numerics.runs import Replay, Run
from keras_mp.numerics.training_loss import loss_of, run_as_trained, signed_mean
from keras_mp.numerics.tuned import Errors, Tuned, TunedLayer
from keras_mp.step.schedule import INITIAL_LOSS_SCALE
from keras_mp.support.dtypes import FLOATING, LOW_PRECISION_NAMES
from keras_mp.support.progress import Progress

_FLOATING_NAMES = tuple(dtype.name for dtype in FLOATING)

# One batch of so many is kept aside.
_KEPT_ASIDE = 4

# Once so many models have been made and run, groups of layers are not divided any more.
_MOST_MODELS = 100


def tune(
    model: Any,
    batches: Any,
    *,
    dtype: str = "float16",
    tolerance: float = 0.05,
    loss: Any = None,
    include: str | Iterable[str] = ("*",),
    leave_out: str | Iterable[str] = (),
    held_out: Any = None,
    seed: int = 0,
) -> Tuned:
    """Finds the policy of each layer: as much in 16 bits as a tolerance allows.

    Candidates are models that `keras_mp.convert` makes. Each is run forwards and backwards beside
    the model in float32, with the same weights, batch and random numbers, and three distances are
    measured, relative to float32:

    - of each output of the model, the root mean square of the differences over that of the numbers;
    - of the loss, the difference over the loss;
    - of the gradients of each layer's weights, taken together, the same as of an output. Gradients
      that are nothing but rounding noise in float32 only have to be finite: a second run tells,
      whose weights differ by up to 2^-20 of each.

    No distance exceeds the tolerance on any batch, neither on those that the policies are looked
    for with nor on those that are kept aside. Layers whose policies hold on the former and not on
    the latter go back to float32.

    Each layer's own error is measured first: it gets the inputs and upstream gradients that it has
    in float32, in both dtypes. Layers of many multiplications and little error come first. The loss
    is scaled by 2^15, or by less where gradients would overflow. Once 100 models have been made and
    run, groups of layers are not divided any more. Everything runs in eager; the model is not
    changed.

    Args:
        model: of `tf.keras`, Sequential or functional, built. Models inside of it are tuned layer
            by layer too; a subclassed one gets one policy, and so does a layer with what is inside
            of it. Layers of any floating-point policy begin in float32.
        batches: several batches: a `tf.data.Dataset`, a generator, or a list of tuples `(x, y)` or
            `(x, y, sample_weight)`. All are kept in memory.
        dtype: "float16" (the default) or "bfloat16".
        tolerance: float above 0. The largest distance. Defaults to 0.05.
        loss: a loss of `tf.keras`, by name or not, or a function of labels and predictions.
            Defaults to what the model was compiled with.
        include: patterns of the layers that may compute in 16 bits, as `fnmatch` takes them. One
            matches the path of a layer, such as "encoder/dense_*", or its name, and all layers
            inside of what it matches. Defaults to all layers.
        leave_out: patterns of layers that stay in float32, whether they are included or not.
        held_out: several batches to be kept aside. Defaults to the last quarter of `batches`, one
            at least.
        seed: int, of the random numbers of all runs: `tf.keras.utils.set_random_seed` is called
            with it.

    Returns:
        A `Tuned`: `model`, `policies` for `convert`, `layers` with reasons; `str` is a table.

    Raises:
        TypeError: `model` is not a model of `tf.keras`, or the batches are not several.
        ValueError: the model's config holds no policies of its layers, or it cannot be made anew,
            or cannot run in the dtype; there are fewer than two batches, or they do not suit it, or
            are not finite; there is no loss, or there are no labels; a pattern matches no layer, or
            none is left; the dtype or the tolerance is another.

    Example:

    >>> layers = tf.keras.layers
    >>> class Norm(layers.Layer):
    ...     def call(self, x):
    ...         return x / tf.sqrt(tf.reduce_sum(x * x, axis=-1, keepdims=True))
    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([4]), Norm(name="norm"), layers.Dense(1, name="dense")]
    ... )
    >>> batches = [(tf.fill([8, 4], 300.0 * i), tf.ones([8, 1])) for i in range(1, 5)]
    >>> tuned = keras_mp.numerics.tune(model, batches, loss="mse")
    >>> tuned.policies
    {'': 'mixed_float16', 'norm': 'float32', 'dense': 'mixed_float16'}
    >>> tuned.model.get_layer("norm").compute_dtype
    'float32'
    """
    keras_api.check_model(model)
    if dtype not in LOW_PRECISION_NAMES:
        raise ValueError(
            f"Expected one of the dtypes {list(LOW_PRECISION_NAMES)}. Received: dtype={dtype!r}"
        )
    if not 0 < tolerance < math.inf:
        raise ValueError(f"Expected a tolerance above 0. Received: tolerance={tolerance!r}")
    given, aside = _divided(batches, held_out)
    tf.keras.utils.set_random_seed(seed)
    reference = convert(model, "float32")
    units = _units(reference)
    included = _matching(units, include, "include") - _matching(units, leave_out, "leave_out")
    candidates = [path for path in units if path in included]
    if not candidates:
        raise ValueError(
            "Expected at least one layer that may compute in 16 bits. Received: "
            f"include={include!r}, leave_out={leave_out!r}, of the layers {list(units)}"
        )
    made = [batches_of.as_fit_takes_it(model, batch) for batch in (*given, *aside)]
    # Before the search compiles it: of the forward pass.
    work = _multiplications(reference, units, made[0])

    def cost(path: str) -> tuple[bool, bool, float]:
        """Of an infinite error last; else error by multiplication, then error."""
        error, products = own[path], work[path]
        return math.isinf(error), not products, error / max(products, 1)

    with Progress("tune", parts=None) as progress:
        policy = f"mixed_{dtype}"
        search = _Search(model, reference, units, policy, loss, tolerance, made, progress)
        own = search.prepare(candidates)
        chosen = search.add(sorted(candidates, key=cost), [], range(len(given)))
        reasons = dict(search.refused)
        search.refused.clear()
        kept = search.add(chosen, [], range(len(made)))
        reasons |= {path: f"kept aside: {why}" for path, why in search.refused.items()}
        errors = [search.errors(kept, i) for i in range(len(made))]

    def row(path: str, layer: Any) -> TunedLayer:
        is_in_16_bits = path in kept
        if is_in_16_bits:
            reason = "within the tolerance"
        else:
            reason = reasons.get(path, "left out, or not included")
        policy = search.policy if is_in_16_bits else "float32"
        kind = type(layer).__name__
        return TunedLayer(path, kind, policy, work[path], own.get(path), reason)

    return Tuned(
        model.name,
        dtype,
        tolerance,
        tuple(row(path, layer) for path, layer in units.items()),
        tuple(errors[: len(given)]),
        tuple(errors[len(given) :]),
        search.model(kept),
    )


def _divided(batches: Any, held_out: Any) -> tuple[list[Any], list[Any]]:
    """The batches to look for policies with, and those to keep aside."""
    found = []
    for name, each in (("batches", batches), ("held_out", held_out)):
        if each is None and name == "held_out":
            break
        several = batches_of.several(each)
        if several is None:
            raise TypeError(
                "Expected several batches: a tf.data.Dataset, a generator, or a list of tuples "
                f"(x, y). Received: {name} of {type(each)}"
            )
        found.append(list(several))
    if len(found) == 2:
        return found[0], found[1]
    [given] = found
    if len(given) < 2:
        raise ValueError(
            "Expected two batches at least, of which one is kept aside; or pass `held_out`. "
            f"Received: {len(given)}"
        )
    count = math.ceil(len(given) / _KEPT_ASIDE)
    return given[:-count], given[-count:]


def _units(model: Any) -> dict[str, Any]:
    """The layers that `convert` can give policies of their own, by their paths."""
    in_config = paths_in_config(model)
    units = units_by_path(model)
    for path, layer in units.items():
        if path not in in_config and not isinstance(layer, tf.keras.Model):
            raise ValueError(
                f"The model {model.name!r} cannot be tuned: the policy of its layer {path!r} is "
                "not in its config, since its class makes it. Expected a Sequential or functional "
                "model, in which all layers have policies of their own; or convert it as a whole. "
                f"Received: {type(model).__name__}"
            )
    return {path: layer for path, layer in units.items() if layer.compute_dtype in _FLOATING_NAMES}


def _matching(units: Iterable[str], patterns: str | Iterable[str], argument: str) -> set[str]:
    matching = set()
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        found = {path for path in units if _matches(path, pattern)}
        if not found:
            raise ValueError(
                f"No layer matches {pattern!r}. Expected patterns of some of {list(units)}. "
                f"Received: {argument}={patterns}"
            )
        matching |= found
    return matching


def _matches(path: str, pattern: str) -> bool:
    names = path.split("/")
    ways = ("/".join(names[:end]) for end in range(1, len(names) + 1))
    return any(fnmatch.fnmatchcase(each, pattern) for each in (*ways, *names))


def _multiplications(model: Any, units: Iterable[str], batch: Batch) -> dict[str, int]:
    """How many each layer makes in the forward pass of a batch."""
    found = dict.fromkeys(units, 0)
    for operation in census(model, (batch.x,)).traced.operations:
        for path in found:
            if f"{operation.layer}/".startswith(f"{path}/"):
                found[path] += operation.work // 2  # a multiplication and an addition are two
    return found


class _Reference:
    """What the model in float32 made of a batch; of `outputs` and so on, once it has run.

    Attributes:
        batch: Batch.
        numbers: RandomNumbers that were drawn, in the dtypes of a model in 16 bits.
        outputs: list of arrays.
        loss: float.
        gradients: of each layer with trained weights, by its path, one array.
        noise: set of the layers whose gradients are rounding noise.
        loss_scale: float. The largest at which no gradient of float32 overflows in float16, or that
            with which training begins if that is smaller; None until it is known.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch, self.numbers = batch, RandomNumbers()
        self.outputs: list[np.ndarray] = []
        self.loss = math.nan
        self.gradients: dict[str, np.ndarray] = {}
        self.noise: set[str] = set()
        self.loss_scale: float | None = None


class _Search:
    """Models with some layers in 16 bits, and how far they are from float32.

    Args:
        model: of the user.
        reference: the same in float32.
        units: layers of that by their paths.
        policy: str, of layers in 16 bits.
        loss: of the user, or None.
        tolerance: float.
        made: list of Batch.
        progress: Progress, which is told what is run.

    Attributes:
        policy: as above.
        refused: dict of paths of layers that were tried and were too far off, and how far.
    """

    def __init__(
        self,
        model: Any,
        reference: Any,
        units: dict[str, Any],
        policy: str,
        loss: Any,
        tolerance: float,
        made: Sequence[Batch],
        progress: Progress,
    ) -> None:
        self.policy, self.refused = policy, dict[str, str]()
        self._original, self._reference, self._units = model, reference, units
        self._user_loss, self._tolerance = loss, tolerance
        self._references = [_Reference(batch) for batch in made]
        owners = {id(v): path for path, (v, _) in variables_by_path(reference).items()}
        self._owners = {
            name: owners[id(weight)].rpartition("/")[0]
            for name, weight in runs.named_weights(reference).items()
        }
        self._errors: dict[tuple[frozenset[str], int], Errors] = {}
        self._made: tuple[frozenset[str], Any, Any] | None = None
        self._progress, self._models = progress, 0

    def prepare(self, candidates: Sequence[str]) -> dict[str, float]:
        """Runs each batch in float32, and returns the errors of the candidates by themselves."""
        own = dict.fromkeys(candidates, 0.0)
        loss = self._loss(self._reference)
        for i, reference in enumerate(self._references):
            self._progress.begin(f"batch {i + 1} of {len(self._references)} in both dtypes")
            # It draws the random numbers: those of the narrowest dtype suit all.
            narrow = self._run(candidates, i)
            wide = runs.run(self._reference, reference.batch, loss, numbers=reference.numbers)
            reference.loss_scale = max(1.0, _scale_for(wide.all_gradients()))
            runs.check_finite(wide, reference.batch)
            self._check_calls(narrow, wide)
            reference.outputs, reference.loss = _outputs(wide), wide.loss
            reference.gradients = self._gradients(wide)
            with runs.jitter(seed=i).on_weights(self._reference):
                moved = runs.run(self._reference, reference.batch, loss, numbers=reference.numbers)
            reference.noise = {
                path
                for path, value in self._gradients(moved).items()
                if runs.is_noise(reference.gradients[path], value)
                or not reference.gradients[path].any()
            }
            self._errors[frozenset(candidates), i] = self._apart(narrow, reference)
            for path, error in self._own_errors(candidates, narrow, wide, reference).items():
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
        failure = self._failure([*chosen, *group], where)
        if failure is None:
            return [*chosen, *group]
        if len(group) == 1 or self._models >= _MOST_MODELS:
            others = f", with {len(group) - 1} others" if len(group) > 1 else ""
            self.refused |= dict.fromkeys(group, failure + others)
            return chosen
        middle = len(group) // 2
        first, second = group[:middle], group[middle:]
        return self.add(second, self.add(first, chosen, where), where)

    def errors(self, chosen: Sequence[str], i: int) -> Errors:
        """How far a model is from float32 on a batch."""
        key = frozenset(chosen), i
        if key not in self._errors:
            self._progress.begin(f"{len(chosen)} layers in {self.policy}")
            self._errors[key] = self._apart(self._run(chosen, i), self._references[i])
        return self._errors[key]

    def model(self, chosen: Sequence[str]) -> Any:
        """Makes a model with these layers in 16 bits, which is not compiled."""
        policies = dict.fromkeys(self._units, "float32") | dict.fromkeys(chosen, self.policy)
        return convert(self._original, {"": self.policy if chosen else "float32"} | policies)

    def _failure(self, chosen: Sequence[str], where: Sequence[int]) -> str | None:
        for i in where:
            errors = self.errors(chosen, i)
            if not errors.largest <= self._tolerance:
                return str(errors)
        return None

    def _run(self, chosen: Sequence[str], i: int) -> Run:
        key, reference = frozenset(chosen), self._references[i]
        try:
            if self._made is None or self._made[0] != key:
                model = self.model(chosen)
                self._models += 1
                self._made = key, model, self._loss(model)
            _, model, loss = self._made
            return run_as_trained(
                model, reference.batch, loss, None, reference.numbers, True, reference.loss_scale
            )
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            raise ValueError(
                f"The model {self._original.name!r} does not run in {self.policy}. Name the layers "
                "that do not in `leave_out`, or give batches that suit it. The error is: "
                f"{batches_of.reason(error)}"
            ) from error

    def _loss(self, model: Any) -> Any:
        batch = self._references[0].batch
        loss = loss_of(model, self._original, batch, self._user_loss, is_a_copy=True)
        if loss is signed_mean:
            raise ValueError(
                "Expected batches (x, y) with labels, and a loss: pass `loss`, or compile the "
                f"model {self._original.name!r}. Received: loss={self._user_loss!r}"
            )
        return loss

    def _check_calls(self, narrow: Run, wide: Run) -> None:
        if len(narrow.calls) != len(wide.calls):
            raise ValueError(
                f"The model {self._original.name!r} calls other layers in {self.policy} than in "
                f"float32. Expected {[c.path for c in wide.calls]}. "
                f"Received: {[c.path for c in narrow.calls]}"
            )

    def _gradients(self, run: Run) -> dict[str, np.ndarray]:
        found: dict[str, list[np.ndarray]] = {}
        for name, gradient in run.weight_gradients().items():
            found.setdefault(self._owners[name], []).append(gradient.ravel())
        return {path: np.concatenate(values) for path, values in found.items()}

    def _apart(self, run: Run, reference: _Reference) -> Errors:
        outputs = map(relative, _outputs(run), reference.outputs)
        gradients = []
        for path, value in self._gradients(run).items():
            if path in reference.noise:
                gradients.append((0.0 if np.isfinite(value).all() else math.inf, path))
            else:
                gradients.append((relative(value, reference.gradients[path]), path))
        error, path = max(gradients, default=(0.0, ""))
        loss = abs(run.loss - reference.loss)
        loss = loss / abs(reference.loss) if loss else 0.0
        return Errors(
            max(outputs, default=0.0), loss if math.isfinite(loss) else math.inf, error, path
        )

    def _own_errors(
        self, candidates: Sequence[str], narrow: Run, wide: Run, reference: _Reference
    ) -> dict[str, float]:
        """Runs each layer in both dtypes, on what it got in float32."""
        paths = {id(self._units[path]): path for path in candidates}
        errors: dict[str, float] = {}
        for call, exact_call in zip(narrow.calls, wide.calls, strict=True):
            path = paths.get(id(exact_call.layer))
            if path is None:
                continue
            upstream = wide.gradients[exact_call.position]
            exact = runs.replay(exact_call, exact_call.layer, upstream, numbers=reference.numbers)
            # Whatever suits other layers: of this one by itself.
            scale = _scale_for([*upstream, *exact.gradients.values()])
            scaled = [None if each is None else each * scale for each in upstream]
            one = runs.replay(exact_call, call.layer, scaled, numbers=reference.numbers)
            errors[path] = max(errors.get(path, 0.0), _error(one, exact, scale))
        return errors


def _scale_for(gradients: Iterable[tf.Tensor | None]) -> float:
    """The largest loss scale up to the usual one at which gradients do not overflow in float16."""
    sizes = (float(tf.reduce_max(tf.abs(g))) for g in gradients if g is not None)
    largest = max((size for size in sizes if math.isfinite(size)), default=0.0)
    if not largest:
        return INITIAL_LOSS_SCALE
    return min(INITIAL_LOSS_SCALE, 2.0 ** math.floor(math.log2(float(tf.float16.max) / largest)))


def _outputs(run: Run) -> list[np.ndarray]:
    """What the model returned, of floating-point numbers: the loss was called with it."""
    return [runs.array(output) for output in runs.floating(run.calls[-1].args)]


def _error(one: Replay, exact: Replay, scale: float) -> float:
    """How far a layer is off: of its outputs, or of its gradients, taken together."""
    backward = {name: value / scale for name, value in one.backward().items()}
    sides = (one.forward(), exact.forward()), (backward, exact.backward())
    return max(relative(_joined(a, b), _joined(b, b)) for a, b in sides)


def _joined(values: dict[str, np.ndarray], names: Iterable[str]) -> np.ndarray:
    flat = [values[name].ravel() for name in names if name in values]
    return np.concatenate(flat) if flat else np.empty(0)

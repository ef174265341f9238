"""Which policy for each layer? As much in 16 bits as a tolerance allows, measured.

A model in which some layers compute in 16 bits is run beside the same model in float32, on the same
batches, with the same random numbers. Layers are tried together, those first that bring many
multiplications for little error. Where they are too far off together, each half is tried by itself,
and so on down to the layers that have to stay in float32.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.conversion import convert, paths_in_config
from keras_mp.models.layer_paths import layers_by_path
from keras_mp.numerics import histogram, own_thread, patterns
from keras_mp.numerics.batches import Batch, Given, listed, reason
from keras_mp.numerics.profile import census
from keras_mp.numerics.records import MOST_NOISE, array, jitter, off, relative, share_off
from keras_mp.numerics.results import Result
from keras_mp.numerics.run import GivenLoss, Run, Runner, compiled
from keras_mp.support import text_tables, validation
from keras_mp.support.dtypes import FLOATING
from keras_mp.support.progress import Progress

# One of so many batches is held out.
_HELD_OUT = 4
# After so many models have been made and run, groups of layers are not divided any more.
_MOST_MODELS = 100


class Errors(NamedTuple):
    """How far a model is from float32 on a batch: relative, infinite where it is not finite.

    Attributes:
        outputs: float. Of the model's outputs, the one that is furthest off.
        loss: float.
        gradients: float. Of the gradients of layers' weights, the one that is furthest off.
        layer: str. The path of that layer.

    Example:

    >>> from keras_mp.numerics.tune import Errors
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
        what = ("outputs", "loss", f"gradients of {self.layer}")[self[:3].index(self.largest)]
        return f"{what} {share_off(self.largest)}{' off' * math.isfinite(self.largest)}"


class TunedLayer(NamedTuple):
    """The policy of a layer.

    Attributes:
        path: str.
        kind: str. Its class.
        policy: str.
        multiplications: int. How many it makes in the forward pass of a batch, in matrix products
            and convolutions.
        reason: str. Of a layer in float32, how far off the model would be with it in 16 bits.

    Example:

    >>> from keras_mp.numerics.tune import TunedLayer
    >>> TunedLayer("dense", "Dense", "mixed_float16", 64, "").is_in_16_bits
    True
    """

    path: str
    kind: str
    policy: str
    multiplications: int
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
        policies: dict of policies by paths of layers, for `keras_mp.convert`; that of the model is
            at "".
        model: the model with these policies, not compiled.
        loss_scale: float or None. The scale to begin with, at which no gradient of these batches
            overflows; None where none is needed.

    Example:

    >>> from keras_mp.numerics.tune import TunedLayer
    >>> layer = TunedLayer("dense", "Dense", "mixed_float16", 8, "")
    >>> tuned = keras_mp.numerics.Tuned("model", "float16", 0.05, (layer,), (), (), {}, None)
    >>> tuned
    <Tuned: model: 1 of 1 layers in mixed_float16, 100.0% of the multiplications>
    >>> tuned.share
    1.0
    """

    name: str
    dtype: str
    tolerance: float
    layers: tuple[TunedLayer, ...]
    errors: tuple[Errors, ...]
    held_out: tuple[Errors, ...]
    policies: dict[str, str]
    model: Any = dataclasses.field(compare=False)
    loss_scale: float | None = None

    @property
    def share(self) -> float:
        """The share of the multiplications that is in 16 bits, from 0 to 1; 0 if there are none."""
        total = sum(layer.multiplications for layer in self.layers)
        return sum(layer.multiplications for layer in self._in_16_bits) / total if total else 0.0

    @property
    def _in_16_bits(self) -> list[TunedLayer]:
        return [layer for layer in self.layers if layer.is_in_16_bits]

    def _lines(self, rows: int | None) -> Iterator[str]:
        head = f"{text_tables.fitted(self.name, 30)}: {len(self._in_16_bits)} of {len(self.layers)}"
        yield f"{head} layers in mixed_{self.dtype}, {self.share:.1%} of the multiplications"
        yield ""
        distances: list[Any] = [("Off by, relative to float32", "Outputs", "Loss", "Gradients")]
        for name, found in (("tuned on", self.errors), ("held out", self.held_out)):
            columns = [*zip(*(each[:3] for each in found))]
            judged = (("worst", max), ("mean", lambda each: sum(each) / len(each)))
            for what, of in judged * bool(found):
                cells = (share_off(of(each)) for each in columns)
                distances.append((f"batches {name}: {len(found)}, {what}", *cells))
        yield from text_tables.aligned(distances)
        scale = f"; initial loss scale: {self.loss_scale:g}" if self.loss_scale else ""
        yield f"Tolerance: {self.tolerance:g}{scale}"
        yield ""
        header = ("Layer", "Policy", "Multiplications", "Reason")
        yield from text_tables.shortened(header, [*map(_row, self.layers)], rows, left=(0, 1, 3))


def tune(
    model: tf.keras.Model,
    batches: Given,
    *,
    dtype: str = "float16",
    tolerance: float = 0.05,
    loss: GivenLoss | None = None,
    include: str | Iterable[str] = ("*",),
    leave_out: str | Iterable[str] = (),
    held_out: Given | None = None,
    seed: int = 0,
) -> Tuned:
    """Finds the policy of each layer: as much in 16 bits as a tolerance allows.

    Candidates are models that `keras_mp.convert` makes. Each is run forwards and backwards beside
    the model in float32, with the same weights, batch and random numbers, and three distances are
    measured, relative to float32:

    - of each output of the model, the root mean square of the differences over that of the numbers;
    - of the loss, the difference over the loss;
    - of the gradients of each layer's weights, taken together, the same as of an output. Gradients
      that are nothing but rounding noise in float32 only have to be finite: a second run tells, in
      which inputs, weights and what layers return differ by up to 2^-20 of each.

    No distance exceeds the tolerance on any batch, neither on those that the policies are looked
    for with nor on those that are held out. Layers whose policies hold on the former and not on
    the latter go back to float32.

    Layers of many multiplications and little error come first: their outputs are hardly further
    off than their inputs. The loss is scaled by 2^15, or by less where gradients would overflow.
    Once 100 models have been made and run, groups of layers are not divided any more. Everything
    runs in eager; the model is not changed.

    Args:
        model: of `tf.keras`, Sequential or functional, built. Models inside of it are tuned layer
            by layer too; a subclassed one gets one policy, and so does a layer with what is inside
            of it. Layers of any floating-point policy begin in float32.
        batches: as `check` takes them: a tuple `(x, y)` or `(x, y, sample_weight)`, or several: a
            `tf.data.Dataset`, a generator, or a list of tuples. All are kept in memory.
        dtype: "float16" (the default) or "bfloat16".
        tolerance: float above 0. The largest distance. Defaults to 0.05.
        loss: a loss of `tf.keras`, by name or not, or a function of labels and predictions.
            Built-in losses compute in float32. Defaults to what the model was compiled with.
        include: patterns of the layers that may compute in 16 bits, as `fnmatch` takes them. One
            matches the path of a layer, such as "encoder/dense_*", or its name, and all layers
            inside of what it matches. Defaults to all layers.
        leave_out: patterns of layers that stay in float32, whether they are included or not.
        held_out: batches to be held out. Defaults to the last quarter of `batches`, one at least;
            of a single batch, to the last quarter of its samples.
        seed: int, of the random numbers of all runs, which the program's do not depend on.

    Returns:
        A `Tuned`: `model`, `policies` for `convert`, `loss_scale`, and `layers` with reasons; `str`
        is a table.

    Raises:
        TypeError: `model` is not a model of `tf.keras`, or x is None.
        ValueError: the model's config holds no policies of its layers, or it cannot be made anew,
            or cannot run in the dtype; there is one sample only, or the batches do not suit it, or
            are not finite; there is no loss, or there are no labels; a pattern matches no layer, or
            none is left; the dtype or the tolerance is another.

    Example:

    >>> layers = tf.keras.layers
    >>> class Scores(layers.Layer):
    ...     def call(self, x):
    ...         return tf.matmul(x, 2 * x, transpose_a=True) / 1e6
    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([4]), Scores(name="scores"), layers.Dense(1, name="dense")]
    ... )
    >>> batches = [(tf.fill([8, 4], 300.0 * i), tf.ones([4, 1])) for i in range(1, 5)]
    >>> tuned = keras_mp.numerics.tune(model, batches, loss="mse")
    >>> tuned.policies
    {'': 'mixed_float16', 'scores': 'float32', 'dense': 'mixed_float16'}
    >>> tuned.model.get_layer("scores").compute_dtype
    'float32'
    """
    keras_api.check_model(model)
    histogram.format_of(dtype)
    validation.number("tolerance", tolerance, above=0)
    given, aside = _divided(model, batches, held_out)
    with own_thread.random_numbers(seed), Progress("tune", parts=None) as progress:
        plain, policy = convert(model, "float32"), f"mixed_{dtype}"
        units = _units(plain)
        search = _Search(model, units, policy, tolerance, progress)
        if given[0].y is None or (loss is None and not getattr(model, "loss", None)):
            raise ValueError(
                "Expected batches (x, y) with labels, and a loss: pass `loss`, or compile the "
                f"model {model.name!r}. Received: loss={loss!r}"
            )
        left_out = patterns.chosen("leave_out", leave_out, units)
        included = patterns.chosen("include", include, units)
        candidates = [path for path in included if path not in left_out]
        if not candidates:
            raise ValueError(
                "Expected at least one layer that may compute in 16 bits. Received: "
                f"include={include!r}, leave_out={leave_out!r}, of the layers {list(units)}"
            )
        # Of a model that is not compiled, only the forward pass is counted.
        work = dict.fromkeys(units, 0)
        for operation in census(plain, (given[0].x,)).operations:
            for path in units:
                if f"{operation.layer}/".startswith(f"{path}/"):
                    work[path] += operation.work // 2  # a multiplication and an addition are two
        runners = (Runner(search.reference, each, [], model, loss) for each in (*given, *aside))
        references = [search.reference_of(runner, candidates) for runner in runners]

        def cost(path: str) -> tuple[bool, bool, float]:
            """The key to sort by: infinite errors last, then error per multiplication."""
            error, products = search.added[path], work[path]
            return math.isinf(error), not products, error / max(products, 1)

        chosen = search.add(sorted(candidates, key=cost), [], references[: len(given)])
        reasons, search.refused = search.refused, {}
        kept = search.add(chosen, [], references)
        reasons |= {path: f"held out: {why}" for path, why in search.refused.items()}
        errors, scales = zip(*(search.errors(kept, each) for each in references))
        policies = search.policies(kept)
        mixed = convert(model, policies)
    reasons = dict.fromkeys(units, "left out, or not included") | reasons
    reasons |= dict.fromkeys(kept, "within the tolerance")
    of: Any = policies, work, reasons
    layers = [TunedLayer(p, type(e).__name__, *(by[p] for by in of)) for p, e in units.items()]
    scale = min(scales) if dtype == "float16" and kept else None
    both = errors[: len(given)], errors[len(given) :]
    return Tuned(model.name, dtype, tolerance, tuple(layers), *both, policies, mixed, scale)


def _divided(model: Any, batches: Given, held_out: Given | None) -> tuple[list[Batch], list[Batch]]:
    """Returns the batches to search with, and those to hold out."""
    given = listed(model, batches)
    if held_out is not None:
        return given, listed(model, held_out)
    size = len(given)
    if size == 1:
        sizes = {each.shape[0] if each.shape.rank else 0 for each in given[0].parts()}
        size = min(sizes)
        if len(sizes) > 1 or size < 2:
            raise ValueError(
                "Expected two batches or more, or one with two samples or more, of which a part is "
                f"held out; or pass `held_out`. Received: one batch, with {size} samples"
            )
    end = size - math.ceil(size / _HELD_OUT)
    if len(given) > 1:
        return given[:end], given[end:]
    return [given[0].rows(0, end)], [given[0].rows(end, size)]


def _units(model: tf.keras.Model) -> dict[str, Any]:
    """Returns the layers that `convert` can give policies of their own, by their paths.

    A layer inside of another one that is not a model goes with that one. So does a layer in a model
    whose config does not hold its layers.
    """
    in_config, units = paths_in_config(model), {}
    for path, layer in layers_by_path(model).items():
        is_model = isinstance(layer, tf.keras.Model)
        has_layers = is_model and any(each.startswith(f"{path}/") for each in in_config)
        if not has_layers and not any(path.startswith(f"{unit}/") for unit in units):
            units[path] = layer
    return {path: layer for path, layer in units.items() if layer.compute_dtype in FLOATING}


# What is compared: arrays by the attribute of `Errors`, and by the number of an output or the path
# of a layer.
_Results = dict[tuple[str, str], np.ndarray]


class _Reference(NamedTuple):
    """The results of the model in float32 on a batch.

    Attributes:
        runner: Runner of the model in float32, with the random numbers of a model in 16 bits.
        results: what `_results` returns of its run.
        noise: set of the keys of gradients that are rounding noise.
        scale: float. The loss scale at which no gradient overflows with all layers in 16 bits.
        errors: dict of how far models are from it, and their loss scales, by their layers in 16
            bits.
    """

    runner: Runner
    results: _Results
    noise: set[tuple[str, str]]
    scale: float
    errors: dict[frozenset[str], tuple[Errors, float]]


class _Search:
    """Models with some layers in 16 bits, and how far they are from float32.

    Attributes:
        refused: dict of the paths of layers that were too far off, with how far they were.
        added: dict of how much further off the outputs of each layer are than its inputs, by its
            path.

    Args:
        model: of the user.
        units: the paths of its layers.
        policy: str, of layers in 16 bits.
        tolerance: float.
        progress: Progress, which is told what is run.
    """

    def __init__(
        self, model: Any, units: Iterable[str], policy: str, tolerance: float, progress: Progress
    ) -> None:
        def made(chosen: Collection[str]) -> tf.keras.Model:
            return compiled(model, self.policies(chosen), "sgd")

        self._units, self.policy, self._progress = tuple(units), policy, progress
        self._name, self._tolerance = model.name, tolerance
        # One mixed model at a time, for all batches.
        self.reference, self._mixed = made(()), functools.lru_cache(maxsize=1)(made)
        self.refused: dict[str, str] = {}
        self.added = defaultdict[str, float](float)

    def reference_of(self, runner: Runner, candidates: Collection[str]) -> _Reference:
        """Runs a batch in float32, and with all layers that may be so in 16 bits."""
        self._progress.begin("a batch in both dtypes")
        # This run draws the random numbers, and all dtypes hold those of the narrowest one.
        narrow = self._run(candidates, runner)
        wide = runner.run()
        if not math.isfinite(wide.loss):
            raise ValueError(
                f"Expected batches with a finite loss in float32. Received one whose loss is "
                f"{wide.loss}: keras_mp.numerics.check, with it, says why."
            )
        for call, exact in zip(narrow.calls, wide.calls):
            made = off(call.outputs, exact.outputs)
            added = made - off(call.inputs, exact.inputs) if made < math.inf else made
            self.added[call.path] = max(self.added[call.path], added)
        results, moved = _results(wide), _results(runner.run(noise=jitter()))
        most = {key: MOST_NOISE * value.any() for key, value in results.items()}
        gradients = (key for key in results if key[0] == "gradients")
        noise = {key for key in gradients if not relative(moved[key], results[key]) < most[key]}
        found = _Reference(runner, results, noise, narrow.loss_scale, {})
        found.errors[frozenset(candidates)] = _apart(narrow, found), narrow.loss_scale
        return found

    def add(self, group: list[str], chosen: list[str], where: Sequence[_Reference]) -> list[str]:
        """Adds layers to those that compute in 16 bits, as many as the tolerance allows.

        Args:
            group: the layers, the best first.
            chosen: those that already do.
            where: the batches to look at.

        Returns:
            `chosen` and those of `group` that went in.
        """
        if not group:
            return chosen
        both = [*chosen, *group]
        errors = (self.errors(both, each)[0] for each in where)
        failure = next((str(each) for each in errors if not each.largest <= self._tolerance), None)
        if failure is None:
            return both
        if len(group) == 1 or self._mixed.cache_info().misses >= _MOST_MODELS:
            others = f", with {len(group) - 1} others" if len(group) > 1 else ""
            self.refused |= dict.fromkeys(group, failure + others)
            return chosen
        middle = len(group) // 2
        return self.add(group[middle:], self.add(group[:middle], chosen, where), where)

    def errors(self, chosen: Sequence[str], reference: _Reference) -> tuple[Errors, float]:
        """Returns how far a model is from float32 on a batch, and its loss scale."""
        known, key = reference.errors, frozenset(chosen)
        if key not in known:
            self._progress.begin(f"{len(chosen)} layers in {self.policy}")
            run = self._run(chosen, reference.runner, reference.scale)
            known[key] = _apart(run, reference), run.loss_scale
        return known[key]

    def policies(self, chosen: Collection[str]) -> dict[str, str]:
        """Returns the policies of a model with these layers in 16 bits."""
        policies = dict.fromkeys(self._units, "float32") | dict.fromkeys(chosen, self.policy)
        return {"": self.policy if chosen else "float32"} | policies

    def _run(self, chosen: Collection[str], beside: Runner, scale: float | None = None) -> Run:
        try:
            mixed = dataclasses.replace(beside, model=self._mixed(frozenset(chosen)))
            return mixed.run_as_trained(scale)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            raise ValueError(
                f"The model {self._name!r} does not run in {self.policy}. Name the layers that do "
                f"not in `leave_out`, or give batches that suit it. The error is: {reason(error)}"
            ) from error


def _results(run: Run) -> _Results:
    """Returns the outputs of a model, its loss, and the gradients of each layer's weights."""
    # The outputs are the inputs of the loss.
    found = {("outputs", str(i)): array(each) for i, each in enumerate(run.calls[-1].inputs)}
    found["loss", ""] = np.array([run.loss])
    gradients = defaultdict[str, list[np.ndarray]](list)
    for path, gradient in run.gradients_by_path().items():
        if gradient is not None:
            gradients[path.rpartition("/")[0]].append(array(gradient).ravel() / run.loss_scale)
    return found | {("gradients", path): np.concatenate(of) for path, of in gradients.items()}


def _apart(run: Run, reference: _Reference) -> Errors:
    """Returns how far a run is from float32; what it has no gradient of is infinitely far."""
    worst: dict[str, tuple[float, str]] = dict.fromkeys(Errors._fields[:3], (0.0, ""))
    results = _results(run)
    for (what, path), exact in reference.results.items():
        value = results.get((what, path), np.empty(0))
        distance = relative(value, exact)
        if (what, path) in reference.noise:
            distance = 0.0 if np.isfinite(value).all() else math.inf
        worst[what] = max(worst[what], (distance, path))
    return Errors(worst["outputs"][0], worst["loss"][0], *worst["gradients"])


def _row(layer: TunedLayer) -> text_tables.RankedRow:
    cells = f"{layer.path} ({layer.kind})", layer.policy, f"{layer.multiplications:,}", layer.reason
    rank = float(not layer.is_in_16_bits), float(layer.multiplications)
    return text_tables.RankedRow(cells, rank, (layer.kind, layer.policy))

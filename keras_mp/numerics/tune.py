"""Finds a policy for each layer: as much in 16 bits as a tolerance allows, measured.

A model in which some layers compute in 16 bits is run beside the same model in float32, on the same
batches, with the same random numbers. Layers are tried together, those first that bring many
multiplications for little error. Where they are too far off together, each half is tried by itself,
and so on down to the layers that have to stay in float32.
"""

import math
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.conversion import convert, paths_in_config, units_by_path
from keras_mp.numerics import batches as batches_of
from keras_mp.numerics import own_thread, patterns
from keras_mp.numerics.batches import Batch, Batches, Structure
from keras_mp.numerics.graphs.census import census
from keras_mp.numerics.run import GivenLoss, compiled
from keras_mp.numerics.tune_search import Search
from keras_mp.numerics.tuned import Tuned, TunedLayer
from keras_mp.support.dtypes import FLOATING, LOW_PRECISION_NAMES
from keras_mp.support.progress import Progress

_FLOATING_NAMES = tuple(dtype.name for dtype in FLOATING)

# One of so many batches is held out.
_HELD_OUT = 4


def tune(
    model: tf.keras.Model,
    batches: Structure | Batches,
    *,
    dtype: str = "float16",
    tolerance: float = 0.05,
    loss: GivenLoss | None = None,
    include: str | Iterable[str] = ("*",),
    leave_out: str | Iterable[str] = (),
    held_out: Structure | Batches | None = None,
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

    Each layer's own error is measured first: it gets the inputs and upstream gradients that it has
    in float32, in both dtypes. Layers of many multiplications and little error come first. The loss
    is scaled by 2^15, or by less where gradients would overflow. Once 100 models have been made and
    run, groups of layers are not divided any more. Everything runs in eager; the model is not
    changed.

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
    given, aside = _divided(model, batches, held_out)
    made = [*given, *aside]
    with own_thread.random_numbers(seed):
        reference = compiled(model, "float32", "sgd")
        units = _units(reference)
        left_out = patterns.chosen("leave_out", leave_out, units)
        included = patterns.chosen("include", include, units)
        candidates = [path for path in included if path not in left_out]
        if not candidates:
            raise ValueError(
                "Expected at least one layer that may compute in 16 bits. Received: "
                f"include={include!r}, leave_out={leave_out!r}, of the layers {list(units)}"
            )
        # Of a model that is not compiled, only the forward pass is counted.
        work = _multiplications(convert(model, "float32"), units, made[0])

        def cost(path: str) -> tuple[bool, bool, float]:
            """The key to sort by: infinite errors last, then error per multiplication."""
            error, products = own[path], work[path]
            return math.isinf(error), not products, error / max(products, 1)

        with Progress("tune", parts=None) as progress:
            policy = f"mixed_{dtype}"
            search = Search(model, reference, units, policy, loss, tolerance, made, progress)
            own = search.prepare(candidates)
            chosen = search.add(sorted(candidates, key=cost), [], range(len(given)))
            reasons = dict(search.refused)
            search.refused.clear()
            kept = search.add(chosen, [], range(len(made)))
            reasons |= {path: f"held out: {why}" for path, why in search.refused.items()}
            errors = [search.errors(kept, i) for i in range(len(made))]

        def row(path: str, layer: tf.keras.layers.Layer) -> TunedLayer:
            name, reason = "float32", reasons.get(path, "left out, or not included")
            if path in kept:
                name, reason = policy, "within the tolerance"
            return TunedLayer(path, type(layer).__name__, name, work[path], own.get(path), reason)

        return Tuned(
            model.name,
            dtype,
            tolerance,
            tuple(row(path, layer) for path, layer in units.items()),
            tuple(errors[: len(given)]),
            tuple(errors[len(given) :]),
            convert(model, search.policies(kept)),
            search.loss_scale if dtype == "float16" and kept else None,
        )


def _divided(
    model: tf.keras.Model, batches: Structure | Batches, held_out: Structure | Batches | None
) -> tuple[list[Batch], list[Batch]]:
    """Returns the batches to search with, and those to hold out."""
    given = batches_of.listed(model, batches)
    if held_out is not None:
        return given, batches_of.listed(model, held_out)
    if len(given) == 1:
        return _cut(given[0])
    count = math.ceil(len(given) / _HELD_OUT)
    return given[:-count], given[-count:]


def _cut(batch: Batch) -> tuple[list[Batch], list[Batch]]:
    """Cuts one batch into two, the second one to be held out."""
    parts = batch.parts()
    sizes = {each.shape[0] if tf.is_tensor(each) and each.shape.rank else 0 for each in parts}
    size = min(sizes)
    if len(sizes) > 1 or size < 2:
        raise ValueError(
            "Expected at least two batches, of which one is held out, or one with two samples or "
            f"more, which is split; or pass `held_out`. Received: one batch, with {size} samples"
        )
    end = size - math.ceil(size / _HELD_OUT)
    return [batch.rows(0, end)], [batch.rows(end, size)]


def _units(model: tf.keras.Model) -> dict[str, Any]:
    """Returns the layers that `convert` can give policies of their own, by their paths."""
    in_config = paths_in_config(model)
    units = units_by_path(model)
    for path, layer in units.items():
        if path not in in_config and not isinstance(layer, tf.keras.Model):
            raise ValueError(
                f"The model {model.name!r} cannot be tuned: the policy of its layer {path!r} is "
                "not in its config, since its class makes it, or the layer's `get_config` leaves "
                "out the name. Expected a Sequential or functional model, in which all layers have "
                f"policies of their own; or convert it as a whole. Received: {type(model).__name__}"
            )
    return {path: layer for path, layer in units.items() if layer.compute_dtype in _FLOATING_NAMES}


def _multiplications(model: tf.keras.Model, units: Iterable[str], batch: Batch) -> dict[str, int]:
    """Returns how many multiplications each layer makes in the forward pass of a batch."""
    found = dict.fromkeys(units, 0)
    for operation in census(model, (batch.x,)).traced.operations:
        for path in found:
            if f"{operation.layer}/".startswith(f"{path}/"):
                found[path] += operation.work // 2  # a multiplication and an addition are two
    return found

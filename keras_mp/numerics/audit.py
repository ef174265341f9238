"""An audit of a model before it is trained: known hazards of 16 bits, found on one batch."""

import itertools
import os
import traceback
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.models.layer_paths import layers_by_path, variables_inside
from keras_mp.numerics import batches, hazards, own_thread, watching
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.causes import CURES
from keras_mp.numerics.graphs import traces
from keras_mp.numerics.hazards.traced_step import Hazard, Observed, TracedStep
from keras_mp.numerics.results import Finding
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.messages import Line
from keras_mp.support.progress import Progress
from keras_mp.variables import type_errors

# Nothing else can be looked at.
UNTRACEABLE = ("a custom gradient without dtypes", "dtypes that do not fit")

_DTYPES = (*LOW_PRECISION_NAMES, "half")
_OURS = os.path.dirname(hazards.__file__)


def audit(model: tf.keras.Model, batch: Batch, device: str | None = None) -> tuple[Finding, ...]:
    """Looks for known hazards of training in 16 bits, in a model and on one batch.

    The training step of a compiled model is traced and run once with the batch, under the model's
    own policy, optimizer and strategy; of another model it is the forward pass. What the step has
    assigned (weights, slots, statistics, metrics, the loss scale) is put back. It takes as much
    memory as that for a moment, and is not compiled by XLA.

    What is suspect in the graph is measured on the batch, and said only if the number shows it.

    Args:
        model: a model of `tf.keras`, best compiled.
        batch: Batch.
        device: str. A GPU and its compute capability, such as "GPU 7.0", for whose tensor cores
            dtypes and sizes are judged. None is needed. Defaults to this machine.

    Raises:
        ValueError: the batch does not suit the model.
    """
    try:
        with own_thread.random_numbers_of(model), Progress("audit", parts=2) as progress:
            return (*_not_finite(batch), *_findings(model, batch, device, progress))
    except (TypeError, ValueError, AttributeError, tf.errors.InvalidArgumentError) as error:
        finding = _finding_of_error(model, batch, error)
        if finding is not None:
            return (finding,)
        if not batches.is_misfit(batch, error) or _is_made_here(error):
            raise
        raise batches.misfit(traces.name_of_step(model), batch, error) from error


def of_batches(found: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Returns each hazard of a place once: that of the first batch, and on how many it was found.

    Args:
        found: what `audit` has found on each batch.
    """
    if len(found) == 1:
        return list(found[0])
    firsts: dict[Hashable, Finding] = {}
    for each in itertools.chain.from_iterable(found):
        firsts.setdefault(each.place, each)
    counts = Counter(place for one in found for place in {each.place for each in one})
    return [
        each._replace(why=f"{each.why} (On {counts[place]} of {len(found)} batches.)")
        for place, each in firsts.items()
    ]


def _not_finite(batch: Batch) -> Iterator[Finding]:
    for name, bad, _ in batches.not_finite(batch):
        yield Finding(
            "a batch that is not finite",
            f"the batch's {name}",
            None,
            f"{bad:,} of its numbers are NaN or infinite. So are results computed from them, in "
            "float32, too.",
            CURES["a batch"],
        )


def policy_of(model: tf.keras.Model) -> str:
    """Returns the policy of most layers, of those in 16 bits if there are any.

    That of the model itself is the global one where Keras has loaded it.
    """
    layers = [each for each in keras_api.flatten_layers(model) if not keras_api.layers_inside(each)]
    narrow = [each for each in layers if each.compute_dtype in LOW_PRECISION_NAMES]
    names = Counter(each.dtype_policy.name for each in narrow or layers if narrow or each.weights)
    return names.most_common(1)[0][0] if names else model.dtype_policy.name


def _findings(
    model: tf.keras.Model, batch: Batch, device: str | None, progress: Progress
) -> Iterator[Finding]:
    scopes: dict[str, str] = {}
    seen: list[tuple[Hazard, Observed]] = []
    steps: list[TracedStep] = []

    @do_not_convert
    def inspect(result: object) -> list[dict[str, tf.Tensor]]:
        # A function that makes variables is traced twice. The last trace is the one that runs.
        steps[:] = [TracedStep(model, batch, result, scopes, device)]
        seen[:] = [(each, found) for each in hazards.HAZARDS for found in each.measure(steps[0])]
        return [
            {name: each for name, each in found.numbers.items() if isinstance(each, tf.Tensor)}
            for _, found in seen
        ]

    progress.begin("tracing the step")
    traced = traces.step_of(model, batch, scopes, inspect)
    progress.begin("running it")
    places = set()
    for (hazard, found), measured in zip(seen, _run_and_restore(model, traced, batch), strict=True):
        arrays = {name: np.asarray(each) for name, each in measured.items()}
        numbers = {name: each if each.ndim else each.item() for name, each in arrays.items()}
        said = hazard.judge(**{**found.numbers, **numbers})
        if said is None:
            continue
        at, line = said.at or found.at, None
        if isinstance(at, tf.Operation):
            line = steps[0].line(at)
            at = steps[0].where(at)
        finding = Finding(said.hazard, said.where or at, line, said.why, said.cure, said.units)
        # Several operations of one line are one finding.
        if finding.place not in places:
            places.add(finding.place)
            yield finding


def _run_and_restore(
    model: tf.keras.Model, step: tf.types.experimental.ConcreteFunction, batch: Batch
) -> list[dict[str, tf.Tensor]]:
    # The graph knows those that it reads, of the optimizer and of the program, too.
    read = step.graph.variables  # pyright: ignore[reportAttributeAccessIssue]
    variables = {id(each): each for each in (*read, *variables_inside(model))}.values()
    before = [(variable, tf.identity(variable)) for variable in variables]
    try:
        return step(batch.data)
    finally:
        for variable, value in before:
            variable.assign(value)


def _is_made_here(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.startswith(_OURS) for frame in frames)


def _finding_of_error(model: tf.keras.Model, batch: Batch, error: Exception) -> Finding | None:
    """Returns a finding about an error over dtypes that do not fit; None for other errors."""
    reason, layer = batches.reason(error), watching.take_layer_that_raised()
    if _is_made_here(error) or not any(dtype in reason for dtype in _DTYPES):
        return None
    why = f"The step cannot be traced: {reason}"
    without_dtypes, unfit = UNTRACEABLE
    custom = _custom_gradients(model, batch)
    if custom:
        where, line = " or ".join(custom), next(iter(custom.values()))
        return Finding(without_dtypes, where, line, why, CURES["a custom gradient"])
    paths = {id(each): path for path, each in layers_by_path(model).items()}
    if layer is None:
        where, computes = "the training step", ""
    else:
        where = str(paths.get(id(layer), layer.name))
        computes = f" {layer.name!r} computes in {layer.compute_dtype}."
    line = type_errors.users_last_line(error)
    return Finding(unfit, where, line, f"{why}{computes}", CURES["dtypes"])


def _custom_gradients(model: tf.keras.Model, batch: Batch) -> dict[str, Line]:
    """Returns where programs use `tf.custom_gradient`; nothing if the forward pass fails.

    Gradients of TensorFlow have the dtype of what they are of. So where only the backward pass
    fails over dtypes, it is one of these that has another one.
    """
    found: dict[str, Line] = {}
    scopes: dict[str, str] = {}

    def inspect(result: object) -> object:
        step = TracedStep(model, batch, result, scopes)
        for operation in step.forward:
            is_custom = "_gradient_op_type" in operation.node_def.attr
            line = step.line(operation) if is_custom else None
            if line is not None:
                found.setdefault(step.where(operation), line)
        return result

    try:
        traces.step_of(model, batch, scopes, inspect, forward_only=True)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError):
        return {}
    return found

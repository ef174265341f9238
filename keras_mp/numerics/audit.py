"""An audit of a model before it is trained: known hazards of 16 bits, found on one batch."""

import itertools
import os
import traceback
from collections import Counter
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.layer_paths import variables_inside
from keras_mp.numerics import batches, hazards, own_thread
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.graphs import origins, traces
from keras_mp.numerics.hazards.traced_step import Suspect, TracedStep
from keras_mp.numerics.results import Finding
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.messages import Line
from keras_mp.support.progress import Progress

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
            "Clean the data, or check with another batch.",
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
    suspects: list[Suspect | Finding] = []
    scopes: dict[str, str] = {}

    @do_not_convert
    def inspect(result: object) -> list[list[tf.Tensor]]:
        step = TracedStep(model, batch, result, scopes, device)
        # A function that makes variables is traced twice. The last trace is the one that runs.
        begun = [each for hazard in hazards.HAZARDS for each in _begun(hazard(step))]
        suspects[:] = [suspect for suspect, _ in begun]
        return [list(measured) for _, measured in begun]

    progress.begin("tracing the step")
    step = traces.step_of(model, batch, scopes, inspect)
    progress.begin("running it")
    measured = _run_and_restore(model, step, batch)
    places = set()
    for suspect, values in zip(suspects, measured, strict=True):
        finding = suspect if isinstance(suspect, Finding) else _answer(suspect, values)
        # Several operations of one line are one finding.
        if finding is not None and finding.place not in places:
            places.add(finding.place)
            yield finding


def _begun(hazard: Any) -> Iterator[tuple[Suspect | Finding, Sequence[tf.Tensor]]]:
    """Yields each suspect of a hazard, with the tensors that it waits for."""
    for each in hazard:
        if isinstance(each, Finding):
            yield each, ()
        elif isinstance(each, Generator):
            yield from _begun(each)
        else:
            yield hazard, each
            return


def _answer(suspect: Suspect, values: Sequence[tf.Tensor]) -> Finding | None:
    """Sends a suspect the values that it waits for, and returns its finding."""
    try:
        suspect.send([np.asarray(value) for value in values])
    except StopIteration as end:
        return end.value
    return None


def _run_and_restore(
    model: tf.keras.Model, step: tf.types.experimental.ConcreteFunction, batch: Batch
) -> list[list[tf.Tensor]]:
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
    frames = traceback.extract_tb(error.__traceback__)
    # AutoGraph puts the user's lines before the message.
    of_dtypes = [text for text in str(error).splitlines() if any(d in text for d in _DTYPES)]
    if _is_made_here(error) or not of_dtypes:
        return None
    why = f"The step cannot be traced: {of_dtypes[-1].strip()}"
    lines = [Line(f.filename, f.lineno or 0) for f in frames if not origins.is_library(f.filename)]
    custom = _custom_gradients(model, batch)
    if custom:
        return Finding(
            "a custom gradient without dtypes",
            " or ".join(custom),
            next(iter(custom.values())),
            why,
            "Let the gradient function of tf.custom_gradient return gradients in the dtypes of "
            "its inputs: tf.cast(gradient, x.dtype).",
        )
    return Finding(
        "dtypes that do not fit",
        "the training step",
        lines[-1] if lines else None,
        why,
        "Cast to self.compute_dtype, and make variables with `add_weight`, which casts them.",
    )


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

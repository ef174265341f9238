"""An audit of a model before it is trained: known hazards of 16 bits, found on one batch.

To add a hazard, write a function that goes through a `TracedStep` and yields what is `Observed`,
put it into `HAZARDS`, causes before their consequences, and plant the defect in a model.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.kernels import slow
from keras_mp.numerics import hazards, not_finite, own_thread
from keras_mp.numerics.batches import Batch, suiting
from keras_mp.numerics.batches import reason as reason_of
from keras_mp.numerics.origins import Layers
from keras_mp.numerics.results import CURES, Finding, Observed, of_batches
from keras_mp.numerics.traced_step import TracedStep, name_of_step, trace
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.progress import Progress
from keras_mp.variables import type_errors

# Each goes through a `TracedStep` and yields what is `Observed`.
HAZARDS: tuple[Callable[[TracedStep], Iterator[Observed]], ...] = (
    hazards.batches,
    hazards.epsilons,
    hazards.inputs,
    not_finite.results,
    hazards.sums,
    hazards.labels,
    hazards.before_a_logarithm,
    hazards.cross_entropies,
    hazards.small_gradients,
    hazards.factors,
    hazards.clipping,
    hazards.weights,
)

# Nothing else can be looked at.
UNTRACEABLE = ("a custom gradient without dtypes", "dtypes that do not fit")

_DTYPES = (*LOW_PRECISION_NAMES, "half")
_AS_IT_IS = tf.compat.v1.ConfigProto()
_AS_IT_IS.graph_options.rewrite_options.disable_meta_optimizer = True


def audit(model: tf.keras.Model, given: Sequence[Batch]) -> tuple[Finding, ...]:
    """Looks for known hazards of training in 16 bits, in a model and on some batches.

    The training step of a compiled model is traced, and run once with each batch, under the model's
    own policy, optimizer and strategy; of another model it is the forward pass. What the step has
    assigned (weights, slots, statistics, metrics, the loss scale) is put back. It takes as much
    memory as that for a moment, and is not compiled by XLA.

    What is suspect in the graph is measured on the batch, and said only if the number shows it.

    Args:
        model: a model of `tf.keras`, best compiled.
        given: batches.

    Returns:
        Each hazard of a place once: that of the first batch, and on how many it was found.

    Raises:
        ValueError: a batch does not suit the model.
    """
    found, specs, judged = list[list[Finding]](), None, None
    for batch in given:
        layers = Layers(model)
        own_numbers = own_thread.random_numbers_of(model)
        with own_numbers, suiting(name_of_step(model), batch), Progress("audit", 2) as progress:
            try:
                progress.begin("tracing the step")
                own = tf.nest.map_structure(_spec, batch.data)
                if judged is None or specs != own:
                    specs, judged = own, _traced(model, batch, layers)
                progress.begin("running it")
                findings = [*judged(batch)]
            except (TypeError, ValueError, AttributeError, tf.errors.InvalidArgumentError) as error:
                findings = [*_findings_of_error(model, batch, layers, error)]
                if not findings:
                    raise
        found.append(findings)
    return tuple(of_batches(found))


def policy_of(model: tf.keras.Model) -> str:
    """Returns the policy of most layers, of those in 16 bits if there are any.

    That of the model itself is the global one where Keras has loaded it.
    """
    layers = [each for each in keras_api.flatten_layers(model) if not keras_api.layers_inside(each)]
    narrow = [each for each in layers if each.compute_dtype in LOW_PRECISION_NAMES]
    names = Counter(each.dtype_policy.name for each in narrow or layers if narrow or each.weights)
    return names.most_common(1)[0][0] if names else model.dtype_policy.name


def _spec(value: Any) -> Any:
    return None if value is None else tf.type_spec_from_value(value)


def _traced(
    model: tf.keras.Model, batch: Batch, layers: Layers
) -> Callable[[Batch], Iterator[Finding]]:
    """Traces a step that all hazards measure; returns a function that runs and judges it."""
    seen: list[tuple[TracedStep, Observed]] = []

    def inspect(step: TracedStep) -> list[dict[str, tf.Tensor]]:
        # A function that makes variables is traced twice. The last trace is the one that runs.
        seen[:] = [(step, found) for measure in HAZARDS for found in measure(step)]
        return [found.numbers for _, found in seen]

    with slow.switched_off():
        function = trace(model, batch, layers, inspect)

    def findings(batch: Batch) -> Iterator[Finding]:
        for (step, found), measured in zip(seen, _run(model, batch, function), strict=True):
            numbers: Any = {name: np.asarray(each)[()] for name, each in measured.items()}
            if (finding := found.said(**numbers)) is not None:
                if isinstance(at := cast(Any, finding.where), tf.Operation):
                    finding = finding._replace(where=step.where(at), line=step.line(at))
                yield finding

    return findings


def _run(model: tf.keras.Model, batch: Batch, step: Any) -> list[dict[str, tf.Tensor]]:
    """Runs a step, and restores what it has assigned."""
    # The graph knows the variables that it reads, of the optimizer and of the program, too.
    with own_thread.put_back(model, step.graph.variables):
        try:
            flat = tf.raw_ops.StatefulPartitionedCall(
                args=[*tf.nest.flatten(batch.data, expand_composites=True), *step.captured_inputs],
                Tout=[each.dtype for each in step.outputs],
                f=step,
                config_proto=_AS_IT_IS.SerializeToString(),
            )
            return tf.nest.pack_sequence_as(step.structured_outputs, flat)
        except (TypeError, ValueError, tf.errors.OpError):
            # An error of the step itself comes again, with its own message.
            return step(batch.data)


def _findings_of_error(
    model: tf.keras.Model, batch: Batch, layers: Layers, error: Exception
) -> Iterator[Finding]:
    """Yields what an error over dtypes that do not fit is about; nothing for other errors."""
    reason = reason_of(error)
    if not any(dtype in reason for dtype in _DTYPES):
        return
    why = f"The step cannot be traced: {reason}"
    without_dtypes, unfit = UNTRACEABLE
    if (raised := layers.raised) is not None:
        where = raised.path or raised.layer.name
        why += f" {raised.layer.name!r} computes in {raised.layer.compute_dtype}."
        yield Finding(unfit, where, type_errors.users_last_line(error), why, CURES["dtypes"])
        return
    # Gradients of TensorFlow have the dtype of what they are of. So where all layers have returned,
    # it is a `tf.custom_gradient` of the program that has another one, if there is one.
    step = TracedStep(model, batch, None, layers)
    made = (o for o in step.forward if "_gradient_op_type" in o.node_def.attr)
    if custom := {step.where(o): line for o in made if (line := step.line(o)) is not None}:
        where, line = " or ".join(custom), next(iter(custom.values()))
        yield Finding(without_dtypes, where, line, why, CURES["a custom gradient"])
    else:
        line = type_errors.users_last_line(error)
        yield Finding(unfit, "the training step", line, why, CURES["dtypes"])

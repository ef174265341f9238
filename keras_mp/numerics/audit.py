"""An audit of a model before it is trained: known hazards of 16 bits, found on one batch."""

import dataclasses
import itertools
import os
import traceback
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.grappler import optimize
from keras_mp.numerics import batches, hazards, origins, own_thread, traces
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.hazards.traced_step import Finding, Suspect, TracedStep
from keras_mp.numerics.results import Result
from keras_mp.support import text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.messages import Line
from keras_mp.support.progress import Progress

_DTYPES = (*LOW_PRECISION_NAMES, "half")
_OURS = os.path.dirname(hazards.__file__)


@dataclasses.dataclass(frozen=True)
class Audit(Result):
    """The findings of an audit. `str` of it, and `print`, give a text.

    Attributes:
        name: str. The name of the model.
        policy: str. The name of the policy that most of its layers have.
        findings: tuple of `Finding`s; empty for a model that there is nothing to say about.
        batches: tuple of `Audit`s, one for each of several batches; else empty. Each hazard of a
            place is one finding then, with the numbers of the first batch that shows it, and on how
            many it was found.

    Example:

    >>> from keras_mp.numerics.audit import Audit
    >>> print(Audit("model", "mixed_float16", ()))
    Audit of 'model', policy mixed_float16: nothing found.
    """

    name: str
    policy: str
    findings: tuple[Finding, ...]
    batches: tuple["Audit", ...] = ()

    @classmethod
    def of_batches(cls, found: "Sequence[Audit]") -> "Audit":
        """Makes one of those of several batches.

        Args:
            found: one for each batch. A single one is returned as it is.
        """
        if len(found) == 1:
            return found[0]
        firsts: dict[Hashable, Finding] = {}
        for each in itertools.chain.from_iterable(audited.findings for audited in found):
            firsts.setdefault(each.place, each)
        counts = Counter(place for a in found for place in {each.place for each in a.findings})
        findings = (
            each._replace(why=f"{each.why} (On {counts[place]} of {len(found)} batches.)")
            for place, each in firsts.items()
        )
        return cls(found[0].name, found[0].policy, tuple(findings), tuple(found))

    def to_dict(self) -> dict[str, Any]:
        """Returns an object with "name", "policy" and "findings"; of several batches, "batches"."""
        findings = [each._asdict() for each in self.findings]
        described = {"name": self.name, "policy": self.policy, "findings": findings}
        if self.batches:
            described["batches"] = [each.to_dict() for each in self.batches]
        return described

    def to_text(self, rows: int | None = text_tables.MOST) -> str:
        """Returns what `print` shows: a headline, and the findings.

        Args:
            rows: int. How many findings are shown at most, where those of one hazard in equal
                layers of repeated blocks are one; None for each by itself. Defaults to 10.

        Returns:
            str of several lines, of at most 100 characters each unless `rows` is None.
        """
        head = f"Audit of {self.name!r}, policy {self.policy}: "
        if not self.findings:
            return head + "nothing found."
        number = len(self.findings)
        head += f"{number} finding{'s' * (number > 1)}."
        found = list(self.findings)
        hidden = 0
        if rows is not None:
            groups = text_tables.merged(
                found, lambda each: each.where, lambda each: (each.hazard, each.cure)
            )
            hidden = sum(len(group) for _, group in groups[rows:])
            found = [_first_of(group, where) for where, group in groups[:rows]]
        texts = [f"[{i}] {each}" for i, each in enumerate(found, 1)]
        if rows is not None:
            texts = [
                "\n".join(
                    part for line in text.splitlines() for part in text_tables.wrapped(line, "    ")
                )
                for text in texts
            ]
        return "\n\n".join([head, *texts, *text_tables.more(hidden, "finding")])


def _first_of(group: Sequence[Finding], where: str) -> Finding:
    """Returns the first of findings that are alike, with a name for the layers of all."""
    first = group[0]
    times = f"{len(group)} times. The first: " if len(group) > 1 else ""
    return first._replace(where=where, why=times + first.why)


def audit(model: tf.keras.Model, batch: Any, device: str | None = None) -> Audit:
    """Looks for known hazards of training in 16 bits, in a model and on one batch.

    The training step of a compiled model is traced and run once with the batch, under the model's
    own policy, optimizer and strategy; of another model it is the forward pass. What the step has
    assigned (weights, slots, statistics, metrics, the loss scale) is put back. It takes as much
    memory as that for a moment, and is not compiled by XLA.

    What is suspect in the graph is measured on the batch, and said only if the number shows it:
    softmax and losses in 16 bits, overflow, masks and epsilons that 16 bits do not hold, long sums,
    labels that the outputs cannot express, layers that ignore their policy or have another one,
    casts for nothing, float64, sizes that tensor cores do not like, losses multiplied by numbers,
    gradients that are clipped or accumulated while they are scaled, steps that cannot be skipped,
    and weights in 16 bits that do not move.

    Args:
        model: a model of `tf.keras`, best compiled.
        batch: what `fit` takes for a step: a tuple `(x, y)` or `(x, y, sample_weight)` of arrays,
            tensors or structures of them; or x alone, which is no tuple then. Or several batches,
            as `keras_mp.numerics.batches.several` knows them: a `tf.data.Dataset`, a generator, or
            a list of tuples. The step is traced for each.
        device: str. A GPU and its compute capability, such as "GPU 7.0", for whose tensor cores
            dtypes and sizes are judged. None is needed. Defaults to this machine.

    Returns:
        `Audit`. Its `findings` are empty if nothing was found.

    Raises:
        TypeError: `model` is not a model of `tf.keras`, or the batch is None.
        ValueError: the batch is a tuple of another length, has no values, is a list with more or
            fewer parts than the model has inputs, or does not suit the model; `device` is no GPU,
            or this TensorFlow was built without CUDA.

    Example:

    >>> keras_mp.set_global_policy(keras_mp.Policy("mixed_bfloat16", model_outputs=None))
    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([8]), tf.keras.layers.Dense(1)], name="prices")
    >>> model.compile("sgd", "mse")
    >>> from keras_mp.numerics.audit import audit
    >>> found = audit(model, (tf.ones([2, 8]), tf.constant([[1001.0], [1003.0]])))
    >>> [finding.hazard for finding in found.findings]
    ['outputs in 16 bits']
    """
    keras_api.check_model(model)
    if device is not None:
        optimize.compute_capability(device)
    several = batches.several(batch)
    if several is not None:
        return Audit.of_batches([audit(model, each, device) for each in several])
    batch = batches.as_fit_takes_it(model, batch)
    try:
        with own_thread.random_numbers_of(model), Progress("audit", parts=2) as progress:
            findings = (*_not_finite(batch), *_findings(model, batch, device, progress))
    except (TypeError, ValueError, AttributeError, tf.errors.InvalidArgumentError) as error:
        finding = _finding_of_error(model, batch, error)
        if finding is None:
            if not batches.is_misfit(batch, error) or _is_made_here(error):
                raise
            raise batches.misfit(traces.name_of_step(model), batch, error) from error
        findings = (finding,)
    return Audit(model.name, _policy_of(model), findings)


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


def _policy_of(model: tf.keras.Model) -> str:
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
    suspects: list[Suspect] = []
    scopes: dict[str, str] = {}

    def inspect(result: object) -> list[list[tf.Tensor]]:
        step = TracedStep(model, batch, result, scopes, device)
        # A function that makes variables is traced twice. The last trace is the one that runs.
        suspects[:] = [suspect for hazard in hazards.HAZARDS for suspect in hazard(step)]
        return [list(suspect.measured) for suspect in suspects]

    progress.begin("tracing the step")
    step = traces.step_of(model, batch, scopes, inspect)
    progress.begin("running it")
    measured = _run_and_restore(step, batch)
    places = set()
    for suspect, values in zip(suspects, measured, strict=True):
        finding = suspect.say(*(np.asarray(value) for value in values))
        # Several operations of one line are one finding.
        if finding is not None and finding.place not in places:
            places.add(finding.place)
            yield finding


def _run_and_restore(
    step: tf.types.experimental.ConcreteFunction, batch: Batch
) -> list[list[tf.Tensor]]:
    variables = step.graph.variables  # pyright: ignore[reportAttributeAccessIssue]
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

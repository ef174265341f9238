"""Is a model safe and right in 16 bits? One list of findings, the cause first.

The training step is audited for known hazards, and the model is run beside its reference.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.conversion import compute_dtypes
from keras_mp.kernels import slow
from keras_mp.loss_scale import DynamicLossScale
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.models.model_steps import has_own_train_step
from keras_mp.numerics import batches as batches_of
from keras_mp.numerics import hazards, histogram, origins, own_thread, results, traced_step
from keras_mp.numerics.compare import Comparison, compare, policy_of, policy_path
from keras_mp.numerics.report import MANY_ZEROS, TOLERANCE, Advice, Report, advise
from keras_mp.numerics.results import DIFFERENCES, Finding, Result, listed, plain
from keras_mp.numerics.run import LOSS, GivenLoss, compiled, runners
from keras_mp.support import text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.progress import Progress
from keras_mp.variables import type_errors

# What may not be looked at.
_DISTANCES, _SCALES = "the distances from the reference", "loss scales"

_SCALE = "the loss scale"

# Nothing else can be looked at then.
_UNTRACEABLE = ("a custom gradient without dtypes", "dtypes that do not fit")

_AS_IT_IS = tf.compat.v1.ConfigProto()
_AS_IT_IS.graph_options.rewrite_options.disable_meta_optimizer = True

# What follows from these is no finding of its own.
_CAUSES = (
    *("a constant that is infinite in 16 bits", "an input that 16 bits do not hold"),
    *(*hazards.NOT_FINITE, hazards.EPSILON, "a batch that is not finite"),
    *_UNTRACEABLE,
)
# They explain what the loss makes of the outputs.
_OF_THE_LOSS = ("a softmax in 16 bits", "a sigmoid in 16 bits", "a loss in 16 bits")


@dataclasses.dataclass(frozen=True, repr=False)
class Check(Result):
    """The results of `check`. `str` of it, and `print`, give a text.

    Attributes:
        name: str. The model's.
        policy: str. The name of the policy that most of its layers have.
        hazards: tuple of `Finding`s, the hazards of a step.
        comparison: `Comparison` with the reference; None if there is none.
        report: `Report` of the exponents in float32, which tell what each loss scale would lose;
            None if there is none.
        notes: tuple of str. What could not be looked at, and why.
        model: the model that was looked at.

    Example:

    >>> layers = [tf.keras.Input([4]), tf.keras.layers.Dense(1, name="dense")]
    >>> model = tf.keras.Sequential(layers, name="model")
    >>> model.compile("sgd", "mse")
    >>> batch = tf.ones([2, 4]), tf.ones([2, 1])
    >>> checked = keras_mp.numerics.check(model, batch, policy="mixed_bfloat16")
    >>> print(checked)
    Check of 'model', policy mixed_bfloat16: nothing found.
    >>> checked.findings
    ()
    """

    name: str
    policy: str
    hazards: tuple[Finding, ...]
    comparison: Comparison | None = None
    report: Report | None = None
    notes: tuple[str, ...] = ()
    model: Any = dataclasses.field(default=None, compare=False)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, the cause first; empty for a model that there is nothing to say about."""
        measured = [*getattr(self.comparison, "findings", ()), *_lost(self)]
        found = sorted(self.hazards, key=lambda each: each.hazard not in _CAUSES)
        for each in sorted(measured, key=lambda each: each.where != _SCALE):
            if not any(_explains(cause, each) for cause in found):
                found.append(each)
        return tuple(found)

    @property
    def has_cause(self) -> bool:
        """Whether one of the hazards is the cause of whatever else could be found."""
        return any(each.hazard in _CAUSES for each in self.hazards)

    def advice(self, tolerance: float = TOLERANCE) -> Advice:
        """Returns a loss scale, and policies of layers for `keras_mp.convert`, from the runs.

        Each sentence has the numbers that it is based on. After a layer has moved to float32, the
        next one may overflow: act on it, and check again, until nothing is lost.

        Args:
            tolerance: float. Which share of a gradient may become zero. Defaults to 0.001.

        Raises:
            ValueError: nothing is known of the gradients.
        """
        if self.report is None:
            why = " ".join(self.notes) or "The step has to be mended first."
            raise ValueError(f"The model was not run at its loss scale. {why}")
        found = getattr(self.comparison, "findings", ())
        compared = [each for each in found if each.path != LOSS]
        return advise(self.report, tolerance, compared, functools.partial(policy_path, self.model))

    def _lines(self, rows: int | None) -> Iterator[str]:
        found = self.findings
        what = f"{len(found)} finding{'s' * (len(found) > 1)}" if found else "nothing found"
        yield f"Check of {self.name!r}, policy {self.policy}: {what}."
        yield from listed(found, rows)
        for note in self.notes:
            yield from ["", *text_tables.wrapped(f"Not looked at: {note}", "    ")]
        if rows is None and self.comparison:
            yield from ["", self.comparison.to_text(None)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the findings, the comparison, the exponents and advice, as JSON has them."""
        names = ("name", "policy", "findings", "comparison", "report", "notes")
        advice = self.report and self.advice()
        return plain({**{name: getattr(self, name) for name in names}, "advice": advice})


def _lost(checked: Check) -> Iterator[Finding]:
    """Says what gradients and outputs lose at the loss scale that the model is trained with."""
    report = checked.report
    if report is None or checked.has_cause:
        return
    advice = checked.advice(MANY_ZEROS)
    scales = [of.loss_scale for of in wrappers_among(getattr(checked.model, "optimizer", None))]
    # A dynamic loss scale that is too large finds its way down.
    falls = 0 < (advice.loss_scale or 0.0) < report.loss_scale and not advice.policies
    if not advice.sentences or (falls and all(isinstance(x, DynamicLossScale) for x in scales)):
        return
    shown = advice if advice.policies else checked.advice()  # the figure that users get
    hazard, where = f"numbers that {report.dtype} loses", next(iter(shown.policies), _SCALE)
    cures = [f"keras_mp.convert(model, {shown.policies})"] * bool(shown.policies)
    if shown.loss_scale:
        scale = f"keras_mp.DynamicLossScale(2.0**{histogram.exponent_of(shown.loss_scale)})"
        cures.append(f"keras_mp.LossScaleOptimizer(optimizer, {scale})")
    cure = f"{' and '.join(cures)}, and check again." if cures else "See the numbers above."
    gradients = (row for row in report.rows if row.kind == "gradient")
    helpless = [row.path for row in gradients if row.is_lost and row.overflowed_at <= 1]
    if helpless and not shown.policies:
        hazard, where = hazards.IN_ANY_DTYPE, helpless[-1]
        cure = "Run a step in `keras_mp.numerics.watch()`, which names the operation."
    yield Finding(hazard, where, None, " ".join(shown.sentences), cure)


def _explains(cause: Finding, other: Finding) -> bool:
    """Whether what was measured beside the reference follows from a finding before it."""
    # What is lost has the path of the layer that has the policy.
    is_inside = f"{cause.path}/".startswith(f"{other.path}/")
    # A loss scale that is wrong makes gradients so.
    is_of_scale = cause.where == _SCALE and other.hazard == DIFFERENCES["backward"]
    is_of_loss = cause.hazard in _OF_THE_LOSS and other.path == LOSS
    return cause.hazard in _CAUSES or is_inside or is_of_scale or is_of_loss


def audit(model: tf.keras.Model, given: Sequence[batches_of.Batch]) -> tuple[Finding, ...]:
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
    found, specs, judged, name = list[Any](), None, None, traced_step.name_of_step(model)
    for batch in given:
        layers, own_numbers = origins.Layers(model), own_thread.random_numbers_of(model)
        with own_numbers, batches_of.suiting(name, batch), Progress("audit", 2) as progress:
            try:
                progress.begin("tracing the step")
                own = tf.nest.map_structure(_spec, batch.data)
                if judged is None or specs != own:
                    specs, judged = own, _traced(model, batch, layers)
                progress.begin("running it")
                found.append([*judged(batch)])
            except (TypeError, ValueError, AttributeError, tf.errors.InvalidArgumentError) as error:
                found.append(_findings_of_error(model, batch, layers, error))
                if not found[-1]:
                    raise
    return tuple(results.of_batches(found))


def _spec(value: Any) -> Any:
    return None if value is None else tf.type_spec_from_value(value)


def _traced(model: Any, batch: Any, layers: origins.Layers) -> Callable[..., Iterator[Finding]]:
    """Traces a step that all hazards measure; returns a function that runs and judges it."""
    seen: list[tuple[Any, results.Observed]] = []

    def inspect(step: traced_step.TracedStep) -> list[dict[str, tf.Tensor]]:
        # A function that makes variables is traced twice. The last trace is the one that runs.
        seen[:] = [(step, found) for measure in hazards.HAZARDS for found in measure(step)]
        return [found.numbers for _, found in seen]

    with slow.switched_off():
        function = traced_step.trace(model, batch, layers, inspect)

    def findings(batch: batches_of.Batch) -> Iterator[Finding]:
        for (step, found), measured in zip(seen, _run(model, batch, function), strict=True):
            numbers: Any = {name: np.asarray(each)[()] for name, each in measured.items()}
            if (finding := found.said(**numbers)) is not None:
                at: Any = finding.where
                if isinstance(at, tf.Operation):
                    finding = finding._replace(where=step.where(at), line=step.line(at))
                yield finding

    return findings


def _run(model: tf.keras.Model, batch: batches_of.Batch, step: Any) -> list[dict[str, tf.Tensor]]:
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
    model: tf.keras.Model, batch: batches_of.Batch, layers: origins.Layers, error: Exception
) -> list[Finding]:
    """Returns what an error over dtypes that do not fit is about; nothing for other errors."""
    reason, raised = batches_of.reason(error), layers.raised
    if not any(dtype in reason for dtype in (*LOW_PRECISION_NAMES, "half")):
        return []
    without_dtypes, hazard = _UNTRACEABLE
    why, cure = f"The step cannot be traced: {reason}", results.CURES["dtypes"]
    where, line = "the training step", type_errors.users_last_line(error)
    # Gradients of TensorFlow have the dtype of what they are of. So where all layers have returned,
    # it is a `tf.custom_gradient` of the program that has another one, if there is one.
    step = traced_step.TracedStep(model, batch, None, layers)
    made = (o for o in step.forward if "_gradient_op_type" in o.node_def.attr)
    custom = {step.where(o): at for o in made if (at := step.line(o)) is not None}
    if raised is not None:
        where = raised.path or raised.layer.name
        why += f" {raised.layer.name!r} computes in {raised.layer.compute_dtype}."
    elif custom:
        where, line, hazard = " or ".join(custom), next(iter(custom.values())), without_dtypes
        cure = results.CURES["a custom gradient"]
    return [Finding(hazard, where, line, why, cure)]


def check(
    model: tf.keras.Model,
    batches: batches_of.Structure | batches_of.Batches | tuple[batches_of.Structure, ...],
    *,
    policy: Any = None,
    reference: Any = "float32",
    loss: GivenLoss | None = None,
    step: Callable[..., tf.Tensor] | None = None,
    training: bool = True,
) -> Check:
    """Looks whether a model is safe and right in 16 bits, before it is trained.

    The training step is traced and run once, and known hazards of 16 bits are looked for in it; and
    the model is run beside the reference, layer by layer, at the loss scale that it is trained
    with. The distances are compared with what rounding explains, and the exponents in float32 tell
    what a loss scale would lose. What is found is one list, the cause first, each with place,
    number and cure. A sound model has none. The model, its random numbers and other threads are
    left as they were.

    Args:
        model: a model of `tf.keras`, best compiled.
        batches: a batch as `fit` takes it: a tuple `(x, y)` or `(x, y, sample_weight)`, or x alone;
            or several: a `tf.data.Dataset`, a generator, or a list of tuples.
        policy: what `keras_mp.set_global_policy` takes, for a model that is not in 16 bits. A copy
            is looked at.
        reference: what to compare with: a policy, or a model with the same layers. Defaults to
            "float32".
        loss: a loss of `tf.keras`, by name or not, or a function. Defaults to what the model was
            compiled with.
        step: for training loops of your own. Called with a model, `x` and `y`; calls the model and
            returns the loss, a scalar. Then `loss` is not used.
        training: bool. Whether layers are called with `training=True` where they are compared.

    Returns:
        A `Check`: `findings`, and `str` of it is a text.

    Raises:
        TypeError: `model` is no model of `tf.keras`, or x is None.
        ValueError: nothing computes in 16 bits, or the batches do not suit the model.

    Example:

    >>> layers = tf.keras.layers
    >>> class Scores(layers.Layer):
    ...     def call(self, x):
    ...         return tf.matmul(x, 2 * x, transpose_a=True) / 1e4
    >>> keras_mp.set_global_policy("mixed_float16")
    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([4]), Scores(name="scores"), layers.Dense(1, dtype="float32")]
    ... )
    >>> model.compile("sgd", "mse")
    >>> found = keras_mp.numerics.check(model, (tf.fill([8, 4], 300.0), tf.ones([4, 1]))).findings
    >>> [(each.hazard, each.where) for each in found]
    [('an overflow in the forward pass', 'scores')]
    """
    keras_api.check_model(model)
    made = batches_of.listed(model, batches)
    narrow = model if policy is None else compiled(model, policy)
    is_wide = compute_dtypes(narrow).isdisjoint(LOW_PRECISION_NAMES)
    if is_wide and not isinstance(reference, tf.keras.Model):
        raise ValueError(
            f"The model {model.name!r} does not compute in 16 bits. Say which policy to try: pass "
            f'policy="mixed_float16", or "mixed_bfloat16". Received: policy={policy!r}'
        )
    checked = Check(narrow.name, policy_of(narrow), audit(narrow, made), model=narrow)
    if any(each.hazard in _UNTRACEABLE for each in checked.hazards):
        note = f"{_DISTANCES}, and {_SCALES}. The step has to be mended first."
        return dataclasses.replace(checked, notes=(note,))

    def look(what: str, reference: Any) -> Iterator[tuple[Comparison, Report]]:
        """Compares with a reference, and notes why this model cannot be looked at so."""
        for batch in made:
            try:
                if step is None and not narrow.built:
                    narrow(batch.x, training=False)  # with random numbers of the program
                with own_thread.random_numbers():
                    how = {"loss": loss, "step": step, "training": training}
                    compared = compare(*runners(narrow, batch, reference, **how))
                yield compared
            except Exception as error:  # A layer of the program may raise anything in eager.
                text, _, _ = str(error).partition(" Received: ")
                # What a `train_step` does with a batch need not be what `call` does.
                is_known = "cannot be converted" in text or has_own_train_step(narrow)
                if isinstance(error, ValueError) and not (checked.hazards or is_known):
                    raise
                # What is not finite in float32 either is compared with nothing: the cause says so.
                if not checked.has_cause:
                    notes.append(f"{what}. {batches_of.reason(ValueError(text))}")

    is_unknown = made[0].y is None or (loss is None and not getattr(narrow, "loss", None))
    backward = "" if has_own_train_step(narrow) else "the backward pass, and "
    missing = {
        f"{_SCALES}. The model does not compute in 16 bits.": is_wide,
        f"{_SCALES}. It is not known what `step` multiplies: pass `loss` in its place.": bool(step),
        f"{backward}{_SCALES}. The loss of {narrow.name!r} is not known: pass `loss`, or compile "
        "the model, and pass (x, y).": is_unknown,
    }
    notes = [why for why, is_so in missing.items() if is_so][:1]  # what could not be looked at
    has_report, is_one = not notes, not notes and reference == "float32"
    found = [*look(f"{_DISTANCES}, and {_SCALES}" if is_one else _DISTANCES, reference)]
    others = found if is_one else look(_SCALES, "float32") if has_report else ()
    comparisons, reports = [each for each, _ in found], [each for _, each in others]
    comparison = Comparison.of_batches(comparisons) if comparisons else None
    if comparison is not None and not comparison.is_judged and not checked.has_cause:
        notes.append("the distances. The loss of the reference is not finite either.")
    report = functools.reduce(operator.add, reports) if reports else None
    noted = (*dict.fromkeys(notes),)
    return dataclasses.replace(checked, comparison=comparison, report=report, notes=noted)

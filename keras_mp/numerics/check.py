"""Is a model safe and right in 16 bits? One list of findings, the cause first."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.conversion import compute_dtypes
from keras_mp.loss_scale import DynamicLossScale
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.models.model_steps import has_own_train_step
from keras_mp.numerics import audit, not_finite, own_thread
from keras_mp.numerics import batches as batches_of
from keras_mp.numerics.batches import Batch, Batches, Structure
from keras_mp.numerics.compare import Comparison, compare, policy_path
from keras_mp.numerics.hazards import EPSILON
from keras_mp.numerics.histogram import exponent_of
from keras_mp.numerics.records import SIDES
from keras_mp.numerics.report import MANY_ZEROS, TOLERANCE, Advice, Report, advise
from keras_mp.numerics.results import Finding, Result, listed, plain
from keras_mp.numerics.run import LOSS, GivenLoss, compiled, runners
from keras_mp.support import text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

# What may not be looked at.
_DISTANCES, _SCALES = "the distances from the reference", "loss scales"

_SCALE = "the loss scale"

# What is measured beside the reference.
_FORWARD, _BACKWARD = (f"a difference in the {side} pass" for side in SIDES)
_LOST = "numbers that "

# What follows from these is no finding of its own.
_CAUSES = (
    *("a constant that is infinite in 16 bits", "an input that 16 bits do not hold"),
    *not_finite.HAZARDS,
    *(EPSILON, "a batch that is not finite"),
    *audit.UNTRACEABLE,
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
        compared = self.comparison.findings if self.comparison else []
        measured = sorted([*compared, *_lost(self)], key=lambda each: each.where != _SCALE)
        found: list[Finding] = []
        for each in (*sorted(self.hazards, key=lambda each: each.hazard not in _CAUSES), *measured):
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
        found = self.comparison.findings if self.comparison else ()
        compared = [each for each in found if each.path != LOSS]
        forward, backward = (
            {each.path: each.why.removesuffix(".") for each in compared if each.hazard == hazard}
            for hazard in (_FORWARD, _BACKWARD)
        )
        owner = functools.partial(policy_path, self.model)
        return advise(self.report, tolerance, forward, backward, owner)

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
    hazard, where = f"{_LOST}{report.dtype} loses", next(iter(shown.policies), _SCALE)
    cure, gradients = _cure(shown), (row for row in report.rows if row.kind == "gradient")
    helpless = [row.path for row in gradients if row.is_lost and row.overflowed_at <= 1]
    if helpless and not shown.policies:
        hazard, where = not_finite.IN_ANY_DTYPE, helpless[-1]
        cure = "Run a step in `keras_mp.numerics.watch()`, which names the operation."
    yield Finding(hazard, where, None, " ".join(shown.sentences), cure)


def _explains(cause: Finding, other: Finding) -> bool:
    """Whether a finding follows from another one, which comes before it."""
    if other.hazard in (_FORWARD, _BACKWARD) or other.hazard.startswith(_LOST):
        # What is lost has the path of the layer that has the policy.
        is_inside = f"{cause.path}/".startswith(f"{other.path}/")
        # A loss scale that is wrong makes gradients so.
        is_of_scale = cause.where == _SCALE and other.hazard == _BACKWARD
        is_of_loss = cause.hazard in _OF_THE_LOSS and other.path == LOSS
        return cause.hazard in _CAUSES or is_inside or is_of_scale or is_of_loss
    is_epsilon = cause.hazard == EPSILON and cause.path == other.path
    return is_epsilon and other.hazard in not_finite.HAZARDS


def _cure(advice: Advice) -> str:
    """Returns the lines that do what an advice says."""
    lines = [f"keras_mp.convert(model, {advice.policies})"] if advice.policies else []
    if advice.loss_scale:
        scale = f"keras_mp.DynamicLossScale(2.0**{exponent_of(advice.loss_scale)})"
        lines.append(f"keras_mp.LossScaleOptimizer(optimizer, {scale})")
    return f"{' and '.join(lines)}, and check again." if lines else "See the numbers above."


def check(
    model: tf.keras.Model,
    batches: Structure | Batches | tuple[Structure, ...],
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
    checked = Check(narrow.name, audit.policy_of(narrow), audit.audit(narrow, made), model=narrow)
    if any(each.hazard in audit.UNTRACEABLE for each in checked.hazards):
        note = f"{_DISTANCES}, and {_SCALES}. The step has to be mended first."
        return dataclasses.replace(checked, notes=(note,))
    notes: list[str] = []  # what could not be looked at, and why

    def look(what: str, batch: Batch, reference: Any) -> tuple[Comparison, Report] | None:
        """Compares with a reference, or notes why this model cannot be looked at so."""
        try:
            if step is None and not narrow.built:
                narrow(batch.x, training=False)  # with random numbers of the program
            with own_thread.random_numbers():
                how = {"loss": loss, "step": step, "training": training}
                return compare(*runners(narrow, batch, reference, **how))
        except Exception as error:  # A layer of the program may raise anything in eager.
            text, _, _ = str(error).partition(" Received: ")
            # What a `train_step` does with a batch need not be what `call` does.
            is_known = "cannot be converted" in text or has_own_train_step(narrow)
            if isinstance(error, ValueError) and not (checked.hazards or is_known):
                raise
            # What is not finite in float32 either is compared with nothing, and the cause says so.
            if not checked.has_cause:
                notes.append(f"{what}. {batches_of.reason(ValueError(text))}")
            return None

    is_unknown = made[0].y is None or (loss is None and not getattr(narrow, "loss", None))
    backward = "" if has_own_train_step(narrow) else "the backward pass, and "
    missing = {
        f"{_SCALES}. The model does not compute in 16 bits.": is_wide,
        f"{_SCALES}. It is not known what `step` multiplies: pass `loss` in its place.": bool(step),
        f"{backward}{_SCALES}. The loss of {narrow.name!r} is not known: pass `loss`, or compile "
        "the model, and pass (x, y).": is_unknown,
    }
    notes += [why for why, is_so in missing.items() if is_so][:1]
    looks, has_report = {f"{_DISTANCES}, and {_SCALES}": reference}, not notes
    if notes:
        looks = {_DISTANCES: reference}
    elif reference != "float32":
        looks = {_DISTANCES: reference, _SCALES: "float32"}
    found = [[look(what, batch, each) for what, each in looks.items()] for batch in made]
    comparisons = [each[0] for each, *_ in found if each]
    reports = [each[1] for *_, each in found if each and has_report]
    comparison = Comparison.of_batches(comparisons) if comparisons else None
    if comparison is not None and not comparison.is_judged and not checked.has_cause:
        notes.append("the distances. The loss of the reference is not finite either.")
    return dataclasses.replace(
        checked,
        comparison=comparison,
        report=functools.reduce(operator.add, reports) if reports else None,
        notes=tuple(dict.fromkeys(notes)),
    )

"""Is a model safe and right in 16 bits? One list of findings, the cause first."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.conversion import compute_dtypes
from keras_mp.loss_scale import DynamicLossScale
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.model_steps import has_own_train_step
from keras_mp.numerics import batches as batches_of
from keras_mp.numerics import copies
from keras_mp.numerics.advice import Advice
from keras_mp.numerics.advise import advise
from keras_mp.numerics.audit import Audit, audit
from keras_mp.numerics.batches import Batches, Structure
from keras_mp.numerics.compare import compare, compare_records, record
from keras_mp.numerics.compare_function import compare_function
from keras_mp.numerics.comparison import Comparison
from keras_mp.numerics.exponents import round_down
from keras_mp.numerics.hazards.traced_step import Finding
from keras_mp.numerics.layer_distances import MANY_ZEROS
from keras_mp.numerics.lost import WhatIf
from keras_mp.numerics.records import Record
from keras_mp.numerics.results import Result
from keras_mp.numerics.training_loss import GivenLoss, scale_in_training
from keras_mp.numerics.what_if import what_if
from keras_mp.op_autocast.context_manager import autocast
from keras_mp.step.schedule import INITIAL_LOSS_SCALE
from keras_mp.support import text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

# What follows from these is no finding of its own.
_CAUSES = (
    *("a constant that is infinite in 16 bits", "an input that 16 bits do not hold"),
    "an overflow in the forward pass",
    *("an underflow in the forward pass", "a result that is not finite in any dtype"),
    *("an epsilon that is 0 in 16 bits", "a batch that is not finite"),
)


@dataclasses.dataclass(frozen=True, repr=False)
class Check(Result):
    """The results of `check`. `str` of it, and `print`, give a text.

    Attributes:
        name: str. The model's.
        audit: `Audit`, the hazards of a step.
        comparison: `Comparison` with the reference; None if there is none.
        what_if: `WhatIf`, the runs at loss scales; None if there are none.
        notes: tuple of str. What could not be looked at, and why.
        scale_moves: bool. Whether the loss scale is dynamic, and so finds its way down by itself.
        is_of_a_model: bool. False for a function.

    Example:

    >>> checked = keras_mp.numerics.check(tf.matmul, (tf.ones([2, 4]), tf.ones([4, 2])))
    >>> print(checked)
    Check of 'matmul', policy float16: nothing found.
    >>> checked.findings
    ()
    """

    name: str
    audit: Audit
    comparison: Comparison | None
    what_if: WhatIf | None
    notes: tuple[str, ...] = ()
    scale_moves: bool = True
    is_of_a_model: bool = True

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, the cause first; empty for a model that there is nothing to say about."""
        found = list(self.audit.findings)
        causes = [each for each in found if each.hazard in _CAUSES]
        found.sort(key=lambda each: each.hazard not in _CAUSES)
        if not causes:
            found += [each for each in self._compared() if not _is_named(each.where, found)]
            found += [each for each in self._advised() if not _is_named(each.where, found)]
        return tuple(found)

    def _compared(self) -> Iterable[Finding]:
        for each in self.comparison.findings if self.comparison else ():
            distance = each.distance
            what = each.what[0].upper() + each.what[1:]
            if math.isfinite(distance.units):
                what += f": {distance.units:,.0f} times as far off as rounding explains"
            at = f" ({each.line})" if each.line else ""
            yield Finding(
                f"a difference in the {each.direction} pass",
                f"{each.path} ({each.kind}){at}",
                None,
                f"{what}.",
                f"Change that line, or run {self._in_float32(each.path)}.",
            )

    def _in_float32(self, path: str) -> str:
        if not self.is_of_a_model:
            return "it in float32: with keras_mp.autocast(enabled=False):"
        return f'the layer in float32: keras_mp.convert(model, {{"{path}": "float32"}})'

    def _advised(self) -> Iterable[Finding]:
        if self.what_if is None:
            return
        for dtype in self.what_if.dtypes:
            advice = advise(self.what_if, dtype, MANY_ZEROS)
            falls = 0 < (advice.loss_scale or 0.0) < self.what_if.loss_scale
            is_planned = falls and self.scale_moves and not advice.policies
            if advice.sentences and not is_planned:
                where = next(iter(advice.policies), "the loss scale")
                why = " ".join(advice.sentences)
                yield Finding(f"numbers that {dtype} loses", where, None, why, _cure(advice))

    def advice(self, dtype: str | None = None, tolerance: float = 0.001) -> Advice:
        """Returns a loss scale, and policies of layers for `keras_mp.convert`, from the runs.

        Each sentence has the numbers that it is based on. After a layer has moved to float32, the
        next one may overflow: act on it, and check again, until nothing is lost.

        Args:
            dtype: "float16" or "bfloat16". Defaults to the first one that the model computes in.
            tolerance: float. Which share of a gradient may become zero. Defaults to 0.001.

        Raises:
            ValueError: the model was not run at loss scales, or not in this dtype.
        """
        if self.what_if is None:
            raise ValueError(f"The model was not run at loss scales. {' '.join(self.notes)}")
        return advise(self.what_if, dtype or self.what_if.dtypes[0], tolerance)

    def to_text(self, rows: int | None = text_tables.MOST) -> str:
        """Returns what `print` shows: a headline, the findings, and what could not be looked at.

        Args:
            rows: int. How many findings are shown at most, where those of equal layers are one;
                None for each by itself, with the table of the comparison. Defaults to 10.

        Returns:
            str of several lines, of at most 100 characters each unless `rows` is None.
        """
        shown = dataclasses.replace(self.audit, findings=self.findings)
        text = shown.to_text(rows).replace("Audit of", "Check of", 1)
        notes = [f"Not looked at: {note}" for note in self.notes]
        if rows is not None:
            notes = ["\n".join(text_tables.wrapped(note, "    ")) for note in notes]
        table = self.comparison.to_text(None) if rows is None and self.comparison else None
        return "\n\n".join(filter(None, [text, *notes, table]))

    def __repr__(self) -> str:
        return f"<Check of {self.name!r}: {len(self.findings)} findings>"

    def to_dict(self) -> dict[str, Any]:
        """Returns the findings and the comparison, as JSON has them."""
        described = dataclasses.replace(self.audit, findings=self.findings).to_dict()
        compared = self.comparison and self.comparison.to_dict()
        return {**described, "comparison": compared, "notes": list(self.notes)}

    def to_csv(self, path: str | os.PathLike) -> None:
        """Writes a line for each layer, with its distances from the reference.

        Args:
            path: of the file.

        Raises:
            ValueError: nothing was compared.
        """
        self._comparison().to_csv(path)

    def plot(self, axes: Any = None) -> Any:
        """Draws how far the model is from the reference, layer by layer.

        Args:
            axes: Matplotlib's two `Axes`. Defaults to those of a new figure.

        Returns:
            The two `Axes`.

        Raises:
            ValueError: nothing was compared.
        """
        return self._comparison().plot(axes)

    def _comparison(self) -> Comparison:
        if self.comparison is None:
            raise ValueError(f"Nothing was compared. {' '.join(self.notes)}")
        return self.comparison


def _check_function(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    policy: Any,
    reference: Any,
    context: Callable[[str], contextlib.AbstractContextManager] | None,
    variables: tf.Module | Iterable[tf.Variable] | None,
) -> Check:
    """Compares the operations of a function, which has neither layers nor a training step."""
    dtype = getattr(policy, "compute_dtype", policy or "float16").removeprefix("mixed_")
    how: dict[str, Any] = {"dtype": dtype, "context": context, "variables": variables}
    other = reference if callable(reference) else None
    comparison = compare_function(function, *arguments, reference=other, **how)
    name = comparison.name.removesuffix(f" in {dtype}")
    return Check(name, Audit(name, dtype, ()), comparison, None, is_of_a_model=False)


def _cure(advice: Advice) -> str:
    """Returns the lines that do what an advice says."""
    lines = [f"keras_mp.convert(model, {advice.policies})"] if advice.policies else []
    if advice.loss_scale:
        scale = f"keras_mp.DynamicLossScale({advice.loss_scale:g})"
        lines.append(f"keras_mp.LossScaleOptimizer(optimizer, {scale})")
    return f"{' and '.join(lines)}, and check again." if lines else "See the numbers above."


def _is_named(where: str, found: Sequence[Finding]) -> bool:
    path = where.partition(" (")[0]
    return any(each.where.partition(" (")[0] == path for each in found)


def check(
    model: tf.keras.Model | Callable[..., Any] | Record,
    batches: Structure | Batches | tuple[Structure, ...] = None,
    *,
    policy: Any = None,
    reference: Any = "float32",
    loss: GivenLoss | None = None,
    step: Callable[..., tf.Tensor] | None = None,
    scales: Sequence[float] = (),
    device: str | None = None,
    training: bool = True,
    context: Callable[[str], contextlib.AbstractContextManager] | None = autocast,
    variables: tf.Module | Iterable[tf.Variable] | None = None,
) -> Check:
    """Looks whether a model is safe and right in 16 bits, before it is trained.

    The training step is traced and run once, and known hazards of 16 bits are looked for in it; the
    model is run beside the reference, layer by layer, and the distances are compared with what
    rounding explains; and it is run at the loss scale that it is trained with, and at others where
    asked. What is found is one list, the cause first, each with place, number and cure. A sound
    model has none. The model, its random numbers and other threads are left as they were.

    Args:
        model: a model of `tf.keras`, best compiled. Or a function of tensors, which may read
            variables, in code without Keras: its operations are compared. Or a `Record`.
        batches: a batch as `fit` takes it: a tuple `(x, y)` or `(x, y, sample_weight)`, or x alone;
            or several: a `tf.data.Dataset`, a generator, or a list of tuples. Of a function, a
            tuple of its arguments; of a record, nothing.
        policy: what `keras_mp.set_global_policy` takes, for a model that is not in 16 bits. A copy
            is looked at. Of a function, "mixed_float16" (the default) or "mixed_bfloat16".
        reference: what to compare with: a policy, a model with the same layers, another function,
            or a `Record`, for which the first batch counts. Defaults to "float32".
        loss: a loss of `tf.keras`, by name or not, or a function. Defaults to what the model was
            compiled with.
        step: for training loops of your own. Called with a model, `x` and `y`; calls the model and
            returns the loss, a scalar. Then `loss` is not used.
        scales: sequence of float, powers of two: more loss scales to run the model at.
        device: str. A GPU and its compute capability, such as "GPU 7.0", for whose tensor cores
            dtypes and sizes are judged. Defaults to this machine.
        training: bool. Whether layers are called with `training=True` where they are compared.
        context: of a function: called with the dtype, returns the context manager in which it
            computes in 16 bits. Defaults to `keras_mp.autocast`; `keras_mp.autocast_scope` for
            variables of `keras_mp.autocast_variable`; None for a function that casts by itself,
            together with a reference.
        variables: of a function: those that it uses, or a `tf.Module`, to be put back afterwards.
            Defaults to the trainable ones that it reads.

    Returns:
        A `Check`: `findings`, and `str` of it is a text.

    Raises:
        TypeError: `model` is neither a model of `tf.keras` nor a function, or x is None.
        ValueError: nothing computes in 16 bits, or the batches do not suit the model.

    Example:

    >>> layers = tf.keras.layers
    >>> class Norm(layers.Layer):
    ...     def call(self, x):
    ...         return x / tf.sqrt(tf.reduce_sum(x * x, axis=-1, keepdims=True))
    >>> keras_mp.set_global_policy("mixed_float16")
    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([4]), Norm(name="norm"), layers.Dense(1, dtype="float32")]
    ... )
    >>> model.compile("sgd", "mse")
    >>> found = keras_mp.numerics.check(model, (tf.fill([8, 4], 1e-5), tf.ones([8, 1]))).findings
    >>> [(each.hazard, each.where) for each in found]
    [('an underflow in the forward pass', 'norm')]
    """
    if isinstance(model, Record):
        comparison = compare_records(model, reference)
        return Check(model.name, Audit(model.name, "that of the record", ()), comparison, None)
    if callable(model) and not hasattr(model, "compile"):
        arguments = batches if isinstance(batches, tuple) else (batches,)
        return _check_function(model, arguments, policy, reference, context, variables)
    keras_api.check_model(model)
    made = batches_of.listed(batches)
    narrow = cast(tf.keras.Model, model)
    if policy is not None:
        narrow = copies.compiled(narrow, policy)
    dtypes = [name for name in LOW_PRECISION_NAMES if name in compute_dtypes(narrow)]
    if not dtypes and not isinstance(reference, tf.keras.Model | Record):
        raise ValueError(
            f"The model {model.name!r} does not compute in 16 bits. Say which policy to try: pass "
            f'policy="mixed_float16", or "mixed_bfloat16". Received: policy={policy!r}'
        )
    audited = Audit.of_batches([audit(narrow, each, device) for each in made])
    notes: dict[str, str] = {}  # What could not be looked at, by the reason.
    how: dict[str, Any] = {"loss": loss, "step": step, "training": training}

    def compared() -> Comparison:
        if isinstance(reference, Record):
            return compare_records(record(narrow, *made[0], **how), reference)
        found = [compare(narrow, *each, reference=reference, **how) for each in made]
        return Comparison.of_batches(found)

    def run_at_scales() -> WhatIf | None:
        is_known = loss is not None or getattr(narrow, "loss", None)
        if step is not None or not is_known or len(made[0]) < 2 or made[0][1] is None:
            return None
        first = INITIAL_LOSS_SCALE if "float16" in dtypes else 1.0
        now = round_down(scale_in_training(narrow) or first)
        wanted = sorted({*map(float, scales), now})
        found = [what_if(narrow, *each, loss=loss, dtypes=dtypes, scales=wanted) for each in made]
        return WhatIf.of_batches(found)

    def noted(look: Callable[[], Any], what: str) -> Any:
        """Calls a function, and notes why it cannot look at this model."""
        try:
            return look()
        except ValueError as error:
            text, _, _ = str(error).partition(" Received: ")
            # What a `train_step` does with a batch need not be what `call` does.
            if not audited.findings and "cannot be converted" not in text and not has_own_step:
                raise
            reason = batches_of.reason(ValueError(text))
            if not has_cause:
                notes[reason] = f"{notes[reason]}, and {what}" if reason in notes else what
            return None

    has_own_step = has_own_train_step(narrow)
    # What is not finite in float32 either is compared with nothing, and the cause says so.
    has_cause = any(each.hazard in _CAUSES for each in audited.findings)
    comparison = noted(compared, "the distances from the reference")
    if comparison is not None and not comparison.is_judged and not has_cause:
        notes["The loss of the reference is not finite either."] = "the distances"
    at_scales = noted(run_at_scales, "loss scales") if dtypes else None
    scales_of = [each.loss_scale for each in wrappers_among(getattr(narrow, "optimizer", None))]
    moves = all(isinstance(each, DynamicLossScale) for each in scales_of)
    noted_reasons = tuple(f"{what}. {reason}" for reason, what in notes.items())
    return Check(narrow.name, audited, comparison, at_scales, noted_reasons, moves)

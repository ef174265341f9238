"""Advice about what was measured: sentences with their numbers, and policies for `convert`."""

from collections.abc import Iterator

from keras_mp.numerics.causes import LARGE_INPUTS, LARGE_WEIGHTS, SAID
from keras_mp.numerics.distances import UNIT_ROUNDOFF
from keras_mp.numerics.exponents.advice import Advice, Facts, power, share_of
from keras_mp.numerics.exponents.gradient_advice import about_gradients, overflow
from keras_mp.numerics.exponents.reports import Report
from keras_mp.numerics.exponents.rows import GRADIENT, OUTPUT, UPDATE, UPDATE_TOLERANCE
from keras_mp.numerics.exponents.what_if import WhatIf
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

# A layer loses what it returns if the error of that is larger than `tune` tolerates by default, and
# so many times as large as the error of what the layer takes, which is one rounding at least. Over
# many layers rounding may add up to as much, and no layer is to blame.
_OFF, _RISES = 0.05, 16.0


def advise(measured: Report | WhatIf, dtype: str = "float16", tolerance: float = 0.001) -> Advice:
    """Returns advice on how to keep a model from losing what it loses in 16 bits.

    Each sentence has the numbers that it is based on. If a model loses nothing at the loss scale
    that it is trained with, there is no advice. For a batch, this is the loss scale of the model's
    optimizer or policy, else 2^15: `WhatIf.loss_scale`. Gradients that are rounding noise do not
    count: `WhatIf.noise`. Layers that lose what they return, to infinity or to zero, come first: as
    long as there are any, gradients are no guide. What a run has lost outranks what histograms
    predict.
    Act on it with `keras_mp.convert(model, advice.policies)`, compile the model with the loss scale
    if there is one, and measure again, until nothing is lost.

    Args:
        measured: a `Report` of the steps of a training run, or what `what_if` returned. The latter
            knows what each value would have been in float32. In a report of a model in 16 bits,
            values that were too small are zeros, and nothing is known about them. A sentence says
            so where that may matter.
        dtype: "float16" (the default) or "bfloat16"; the one that `what_if` has run.
        tolerance: float, from 0 to 1. Which share of a gradient may become zero. Defaults to 0.001:
            a few values of a large gradient are always next to zero.

    Returns:
        An `Advice`.

    Raises:
        ValueError: `dtype` is another one, or the tolerance is not a share.

    Example:

    >>> import numpy as np
    >>> from keras_mp.numerics import Report
    >>> from keras_mp.numerics.exponents.advise import advise
    >>> from keras_mp.numerics.exponents.histogram import Histogram
    >>> from keras_mp.numerics.exponents.rows import Row
    >>> small, large = (Histogram.of(np.float32([size] * 8)) for size in (1e-11, 1.0))
    >>> report = Report(
    ...     [Row("gradient", "a/kernel", "float16", small),
    ...      Row("gradient", "b/kernel", "float16", large)],
    ...     step=3000, counted=30, loss_scale=1.0,
    ... )
    >>> advice = advise(report)
    >>> advice.loss_scale
    8192.0
    >>> print(advice.sentences[0])
    Fix the loss scale at 2^13: between 2^12 and 2^15 no gradient loses more than 0.1 %, in 30 of \
3,000 steps. At 2^0, 100.0 % of `a/kernel` is below float16.
    """
    if dtype not in LOW_PRECISION_NAMES:
        raise ValueError(f"Expected 'float16' or 'bfloat16'. Received: dtype={dtype!r}")
    if not 0 <= tolerance <= 1:
        raise ValueError(f"Expected a share from 0 to 1. Received: tolerance={tolerance!r}")
    facts = Facts(measured, dtype, tolerance)
    outputs = _about_outputs(facts)
    inside = None if outputs else _about_runs(facts)
    found = outputs or inside
    if found is None:
        zeros, found = _about_zeros(facts), about_gradients(facts)
        if zeros is not None and not overflow(facts):
            found = Advice([zeros], {}, None)
        elif zeros is not None and found is not None:
            found.sentences.append(zeros)
    found = found or Advice([], {}, None)
    noise = _about_noise(facts)
    if noise is not None:
        found.sentences.append(noise)
    found.sentences.extend(_about_updates(facts))
    if dtype == "float16" and (found.policies or found.loss_scale):
        found.sentences.extend(_about_bfloat16(facts, inside is not None))
    return found


def _about_outputs(facts: Facts) -> Advice | None:
    """Returns advice about layers whose results are beyond the dtype at any loss scale."""
    advice, dtype = Advice([], {}, None), facts.dtype
    for row in facts.rows:
        layer, histogram = facts.unit(row.path), row.histogram
        if row.kind != OUTPUT or layer in advice.policies:
            continue
        fate = histogram.fate(dtype)
        bad, total = fate.infinite, fate.values
        if not bad and row.dtype == dtype and not advice.policies:
            # What came out infinite may have been of any size. Layers after it suffer from it.
            bad = histogram.infinities + histogram.nans
            total = histogram.total
        if bad:
            advice.policies[layer] = "float32"
            advice.sentences.append(
                f"Run `{layer}` in float32: {share_of(bad, total)} of {_output(row.path, layer)} "
                f"is beyond {dtype}, {facts.where}."
            )
    if not advice.sentences:
        return None
    cause = _cause(facts, next(iter(advice.policies)))
    return Advice([*cause, *advice.sentences], advice.policies, None)


def _cause(facts: Facts, layer: str) -> list[str]:
    """Returns a sentence if weights, or inputs of the model, are too large for any layer."""
    runs = facts.runs
    if runs is None:
        return []
    weight = runs.largest_weights.get(layer, 0.0)
    if weight >= LARGE_WEIGHTS:
        return [f"The weights of `{layer}` reach {weight:.3g}. {SAID['weights']}"]
    if runs.largest_input >= LARGE_INPUTS:
        return [f"The inputs reach {runs.largest_input:.3g}: {SAID['inputs']}"]
    return []


def _output(path: str, layer: str) -> str:
    """Returns what to call an output, in advice about the same layer or another one."""
    if path == layer:
        return "its output"
    is_inside = path.startswith(f"{layer}/")
    return f"the output of `{path}`, which {'is inside' if is_inside else 'takes its'},"


def _about_runs(facts: Facts) -> Advice | None:
    """Returns advice about the first layer that loses an output inside which would fit."""
    if facts.runs is None:
        return None
    runs, dtype, computed_in = facts.runs, facts.dtype, facts.runs.computed_in
    for (kind, path), lost in runs[runs.scales[0]].items():
        if kind != OUTPUT:
            continue
        before = _off_before(runs, path)
        # The layer makes as large an error in float32 of what it takes in 16 bits.
        is_amplified = lost.error <= _RISES * runs.amplification.get(path, 0.0) * before
        if not lost.infinite and lost.error <= max(_OFF, _RISES * before):
            continue
        layers = [path]
        if computed_in[kind, path] not in LOW_PRECISION_NAMES or is_amplified:
            layers += runs.makers(path)
        layers = [each for each in layers if computed_in.get((OUTPUT, each)) in LOW_PRECISION_NAMES]
        if lost.infinite:
            what = f"{lost.infinite:,} values of {{}} are infinite or NaN"
        elif lost.share >= lost.error:
            what = f"{share_of(lost.zero, lost.values)} of {{}} is zero"
        else:
            what = f"{{}} is off by {100 * lost.error:.0f} % of its norm"
        sentences = {
            layer: f"Run `{layer}` in float32: {what.format(_output(path, layer))} in {dtype}, and "
            "not in float32, in the batch."
            for layer in map(facts.unit, layers)
        }
        if sentences:
            return Advice([*sentences.values()], dict.fromkeys(sentences, "float32"), None)
    return None


def _off_before(runs: WhatIf, path: str) -> float:
    """Returns the error of what a layer takes, which is one rounding at least."""
    lost = runs[runs.scales[0]]
    rows = [(OUTPUT, maker) for maker in runs.makers(path)]
    return max([UNIT_ROUNDOFF[runs.dtype], *(lost[row].error for row in rows if row in lost)])


def _about_zeros(facts: Facts) -> str | None:
    """Returns a sentence about gradients whose zeros may have been too small for the dtype."""
    if facts.report is None:
        return None
    rows = facts.report.rows_with_unknown_zeros(facts.tolerance)
    rows = [row for row in rows if row.dtype == facts.dtype]
    if not rows:
        return None
    worst = max(rows, key=lambda row: row.histogram.zeros / row.histogram.total)
    zeros, total = worst.histogram.zeros, worst.histogram.total
    others = f" (and of {len(rows) - 1} more)" if len(rows) > 1 else ""
    return (
        f"{share_of(zeros, total)} of `{worst.path}`{others} is zero in {facts.dtype} at a loss "
        f"scale of {facts.report.loss_scale:g}. Whether it is zero in float32, too, is unknown: "
        "`keras_mp.numerics.check` tells."
    )


def _about_noise(facts: Facts) -> str | None:
    """Returns a sentence about gradients that are lost, and may be rounding noise or not.

    A histogram tells their size alone.
    """
    report = facts.report
    if report is None:
        return None
    of_noise = (row for row in report.rows_in_16_bits if row.key in report.noise)
    fates = {row.path: row.histogram.fate(facts.dtype, facts.now) for row in of_noise}
    lost = {path: fate for path, fate in fates.items() if fate.share("zero") > facts.tolerance}
    if not lost:
        return None
    path, fate = max(lost.items(), key=lambda each: each[1].share("zero"))
    others = f" (and of {len(lost) - 1} more)" if len(lost) > 1 else ""
    return (
        f"{share_of(fate.zero, fate.values)} of `{path}`{others} is below {facts.dtype} at "
        f"{power(facts.now)}. It is so small compared with the other gradients of its layer that "
        "it may be rounding noise: `keras_mp.numerics.check` tells."
    )


def _about_updates(facts: Facts) -> Iterator[str]:
    """Yields sentences about weights in 16 bits that did not move, though they have gradients."""
    if facts.report is None:
        return
    rows = facts.report.rows
    gradients = {row.path: row.histogram for row in rows if row.kind == GRADIENT}
    for dtype in LOW_PRECISION_NAMES:
        lost = total = 0
        for row in rows:
            gradient = gradients.get(row.path)
            if row.kind != UPDATE or row.dtype != dtype or gradient is None:
                continue
            # A sparse gradient does not tell which weights are to move.
            if gradient.total == row.histogram.total:
                lost += max(0, row.histogram.zeros - gradient.zeros)
                total += gradient.total - gradient.zeros
        if lost > UPDATE_TOLERANCE * total:
            yield (
                "Compile the model with keras_mp.MasterWeightOptimizer(optimizer): "
                f"{share_of(lost, total)} of the weights in {dtype} with a gradient did not move, "
                f"{facts.where}."
            )


def _about_bfloat16(facts: Facts, is_inside: bool) -> list[str]:
    """Returns a sentence if bfloat16 keeps what float16 loses, else nothing.

    Histograms do not tell what is lost inside of a layer.
    """
    rows = facts.rows
    if is_inside:
        return []
    if any(row.dtype == "float16" for row in rows):
        # Nothing is known about what was not finite.
        bad = sum(row.histogram.infinities + row.histogram.nans for row in rows)
        if bad:
            return []
    fates = [row.histogram.fate("bfloat16") for row in rows]
    if any(fate.zero or fate.infinite for fate in fates):
        return []
    values = sum(fate.values for fate in fates)
    return [
        "bfloat16 would lose nothing that float16 loses here, and needs no loss scale: of "
        f"{values:,} values none becomes zero or infinite, {facts.where}. (It keeps 8 bits of each "
        "value, float16 11.)"
    ]

"""What to do about what was measured: sentences with their numbers, and policies for `convert`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from keras_mp.numerics.distances import UNIT_ROUNDOFF
from keras_mp.numerics.exponents import EVERYWHERE, Fate, Window, exponent_of
from keras_mp.numerics.lost import Lost, WhatIf
from keras_mp.numerics.reports import (
    GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    UPDATE,
    UPDATE_TOLERANCE,
    Report,
    Row,
)
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

# A layer loses what it returns if that is off by more than `tune` tolerates by default, and by so
# many times what the layer takes is off by, which is one rounding at least. Over many layers
# rounding may add up to as much, and no layer is to blame.
_OFF, _RISES = 0.05, 16.0

# What runs have lost of gradients, by loss scale and row.
_Losses = Mapping[float, Mapping[tuple[str, str], Lost]]


class Advice(NamedTuple):
    """What `advise` returns: `str(advice)` has a line for each sentence.

    Attributes:
        sentences: list of str; empty if nothing is lost.
        policies: dict of paths of layers and names of policies, as `keras_mp.convert` takes it.
        loss_scale: float, the scale that is recommended, or None: to keep where a training run was
            measured, to start with where it was one batch.

    Example:

    >>> print(keras_mp.numerics.Advice([], {}, None))
    Nothing is lost.
    """

    sentences: list[str]
    policies: dict[str, str]
    loss_scale: float | None

    def __str__(self) -> str:
        return "\n".join(self.sentences) or "Nothing is lost."


def advise(measured: Report | WhatIf, dtype: str = "float16", tolerance: float = 0.001) -> Advice:
    """Says what would keep a model from losing what it loses in 16 bits.

    Each sentence has the numbers that it is based on. Of a model that loses nothing at the loss
    scale that it is trained with, there is nothing to say. For a batch, that is the one of the
    model's optimizer or policy, else 2^15: `WhatIf.loss_scale`. Gradients that are rounding noise
    do not count: `WhatIf.noise`. First come the layers that lose what they return, to infinity or
    to zero: as long as there are any, gradients are no guide. What a run has lost outranks what
    histograms predict.
    Act on it with `keras_mp.convert(model, advice.policies)`, compile the model with the loss scale
    if there is one, and measure again, until nothing is lost.

    Args:
        measured: a `Report` of the steps of a training run, or what `what_if` returned. (What
            `audit` and `compare` find has a cure or a reason already.) The latter knows what each
            value would have been in float32; in a report of a model in 16 bits, values that were
            too small are zeros, of which nothing is known. There is a sentence that says so where
            that may matter.
        dtype: "float16" (the default) or "bfloat16".
        tolerance: float, from 0 to 1. Which share of a gradient may become zero. Defaults to 0.001:
            a few values of a large gradient are always next to zero.

    Returns:
        An `Advice`.

    Raises:
        TypeError: `measured` is neither.
        ValueError: `dtype` is another one, or `what_if` has not run it, or the tolerance is none.

    Example:

    >>> import numpy as np
    >>> from keras_mp.numerics import Histogram, Report, Row, advise
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
    facts = _facts(measured, dtype, tolerance)
    outputs = _about_outputs(facts)
    inside = None if outputs else _about_runs(measured, dtype)
    found = outputs or inside
    if found is None:
        zeros, found = _about_zeros(measured, dtype, tolerance), _about_gradients(facts)
        if zeros is not None and not _overflows(facts):
            found = zeros
        elif zeros is not None and found is not None:
            found.sentences.extend(zeros.sentences)
    found = found or Advice([], {}, None)
    found.sentences.extend(_about_updates(measured))
    if dtype == "float16" and (found.policies or found.loss_scale):
        found.sentences.extend(_about_bfloat16(facts, measured, inside is not None))
    return found


class _Facts(NamedTuple):
    """What was measured, and how to speak of it.

    Attributes:
        rows: those of tensors that 16 bits matter to.
        dtype: str.
        tolerance: float.
        now: float. The loss scale in force, or that which training would begin with.
        losses: what real runs at some loss scales have lost of gradients.
        where: str. What the numbers are of.
        set_scale: str. What to do with a loss scale that suits them.
        consumers: dict of paths of layers and of those that take what they return.
    """

    rows: list[Row]
    dtype: str
    tolerance: float
    now: float
    losses: _Losses
    where: str
    set_scale: str
    consumers: Mapping[str, set[str]]


def _facts(measured: Report | WhatIf, dtype: str, tolerance: float) -> _Facts:
    if isinstance(measured, WhatIf):
        if dtype not in measured.dtypes:
            raise ValueError(
                f"Expected one of the dtypes that were run, {measured.dtypes}. "
                f"Received: dtype={dtype!r}"
            )
        in_half = measured.computed_in[dtype]
        rows = [
            row._replace(dtype=in_half[row.kind, row.path])
            for row in measured.reference.rows
            if (row.kind, row.path) in in_half and (row.kind, row.path) not in measured.noise
        ]
        rows = Report(rows, step=1, counted=1, loss_scale=1.0).rows_in_16_bits
        losses = {
            scale: {
                row: lost
                for row, lost in measured.losses(dtype, scale, tolerance).items()
                if row not in measured.noise
            }
            for scale in measured.scales
        }
        # Other batches may well have larger gradients: that is no scale to keep.
        about = losses, "in the batch", "start the loss scale at", measured.consumers
    elif isinstance(measured, Report):
        noise = measured.noise
        rows = [row for row in measured.rows_in_16_bits if (row.kind, row.path) not in noise]
        where = f"in {measured.counted:,} of {measured.step:,} steps"
        about = {}, where, "fix the loss scale at", {}
    else:
        raise TypeError(
            "Expected a keras_mp.numerics.Report or what what_if returned; findings of audit have "
            f"cures of their own, `Finding.cure`. Received: {measured!r} (of type {type(measured)})"
        )
    now = 2.0 ** math.floor(math.log2(measured.loss_scale))
    return _Facts(rows, dtype, tolerance, now, *about)


def _seen(losses: _Losses) -> Window:
    """The loss scales between those of runs that have lost something of a gradient."""
    seen = EVERYWHERE
    for scale, of_rows in losses.items():
        exponent = exponent_of(scale)
        if any(lost.infinite for lost in of_rows.values()):
            seen &= Window(EVERYWHERE.low, exponent - 1)
        elif of_rows:
            seen &= Window(exponent + 1, EVERYWHERE.high)
    return seen


def layer_of(row: tuple[str, str]) -> str:
    """Returns the path of the layer that a row is about; of a variable, of the one that has it.

    Args:
        row: a kind and a path.
    """
    kind, path = row
    return path.rpartition("/")[0] if kind == GRADIENT else path


def _about_outputs(facts: _Facts) -> Advice | None:
    """Layers whose own results are beyond a dtype, whatever the loss scale."""
    advice, dtype = Advice([], {}, None), facts.dtype
    for row in facts.rows:
        if row.kind != OUTPUT:
            continue
        histogram = row.histogram
        fate = histogram.fate(dtype)
        bad, of = fate.infinite, fate.values
        if not bad and row.dtype == dtype and not advice.policies:
            # What came out infinite may have been of any size. What follows it suffers from it.
            bad = histogram.infinities + histogram.nans
            of = histogram.total
        if bad:
            advice.policies[row.path] = "float32"
            advice.sentences.append(
                f"Run `{row.path}` in float32: {_share(bad, of)} of its output is beyond "
                f"{dtype}, {facts.where}."
            )
    return advice if advice.sentences else None


def _about_runs(measured: Report | WhatIf, dtype: str) -> Advice | None:
    """The first layer that loses what it returns to something inside, though it would fit."""
    if not isinstance(measured, WhatIf):
        return None
    computed_in = measured.computed_in[dtype]
    for (kind, path), lost in measured[dtype, measured.scales[0]].items():
        if kind != OUTPUT or not (lost.infinite or _is_off(measured, dtype, path)):
            continue
        layers = [path]
        if computed_in[kind, path] not in LOW_PRECISION_NAMES:
            layers = [
                each
                for each, takers in measured.consumers.items()
                if path in takers and computed_in.get((OUTPUT, each)) in LOW_PRECISION_NAMES
            ]
        if layers:
            of = "its output" if layers == [path] else f"the output of `{path}`, which takes its,"
            if lost.infinite:
                what = f"{lost.infinite:,} values of {of} are infinite or NaN"
            elif lost.share >= lost.error:
                what = f"{_share(lost.zero, lost.values)} of {of} is zero"
            else:
                what = f"{of} is off by {100 * lost.error:.0f} % of its norm"
            return Advice(
                [
                    f"Run `{each}` in float32: {what} in {dtype}, and not in float32, in the batch."
                    for each in layers
                ],
                dict.fromkeys(layers, "float32"),
                None,
            )
    return None


def _is_off(measured: WhatIf, dtype: str, path: str) -> bool:
    """Whether what a layer returns is further off than what it takes can explain."""
    lost = measured[dtype, measured.scales[0]]
    taken = [lost[OUTPUT, each].error for each, by in measured.consumers.items() if path in by]
    error = lost[OUTPUT, path].error
    return error > max(_OFF, _RISES * max([UNIT_ROUNDOFF[dtype], *taken]))


def _about_zeros(measured: Report | WhatIf, dtype: str, tolerance: float) -> Advice | None:
    """Gradients in which zeros may be what was too small for the dtype, for all that is known."""
    if not isinstance(measured, Report):
        return None
    rows = [row for row in measured.rows_with_unknown_zeros(tolerance) if row.dtype == dtype]
    if not rows:
        return None
    worst = max(rows, key=lambda row: row.histogram.zeros / row.histogram.total)
    zeros, total = worst.histogram.zeros, worst.histogram.total
    others = f" (and of {len(rows) - 1} more)" if len(rows) > 1 else ""
    sentence = (
        f"{_share(zeros, total)} of `{worst.path}`{others} is zero in {dtype} at a loss scale of "
        f"{measured.loss_scale:g}. Whether it is in float32 too is unknown: ask `what_if`."
    )
    return Advice([sentence], {}, None)


def _about_updates(measured: Report | WhatIf) -> Iterator[str]:
    """Weights in 16 bits that stay where they are, though they have gradients."""
    if not isinstance(measured, Report):
        return
    gradients = {row.path: row.histogram for row in measured.rows if row.kind == GRADIENT}
    for dtype in LOW_PRECISION_NAMES:
        lost = of = 0
        for row in measured.rows:
            gradient = gradients.get(row.path)
            if row.kind != UPDATE or row.dtype != dtype or gradient is None:
                continue
            # A sparse gradient does not tell which weights are to move.
            if gradient.total == row.histogram.total:
                lost += max(0, row.histogram.zeros - gradient.zeros)
                of += gradient.total - gradient.zeros
        if lost > UPDATE_TOLERANCE * of:
            yield (
                "Compile the model with keras_mp.MasterWeightOptimizer(optimizer): "
                f"{_share(lost, of)} of the weights in {dtype} with a gradient did not move, in "
                f"{measured.counted:,} of {measured.step:,} steps."
            )


def _overflows(facts: _Facts) -> bool:
    """Whether a gradient was, or would be, too large at the loss scale in force."""
    return any(
        row.kind != OUTPUT
        and (row.overflowed_at <= facts.now or row.histogram.fate(facts.dtype, facts.now).infinite)
        for row in facts.rows
    )


def _about_gradients(facts: _Facts) -> Advice | None:
    dtype, now = facts.dtype, facts.now
    rows = [row for row in facts.rows if row.kind != OUTPUT]
    # A loss scale is at least 1.
    common = allowed = Window(0, EVERYWHERE.high)
    windows = {}
    for row in rows:
        window = row.window(dtype, facts.tolerance) & allowed
        windows[row.kind, row.path] = window
        common &= window
    if not common.is_empty and (common & _seen(facts.losses)).is_empty:
        return _about_losses(facts)
    common &= _seen(facts.losses)
    is_fine = min(common.margins(now)) >= 0
    needs_none = dtype == "bfloat16" and common.low == 0 <= common.high
    if is_fine or needs_none or not rows:
        return None
    if common.is_empty:
        return _about_conflict(facts, rows, windows)
    # As far from overflowing as from losing, and rather lower, for gradients grow at times.
    exponent = (common.low + common.high) // 2
    sentence = (
        f"{facts.set_scale.capitalize()} 2^{exponent}: between 2^{common.low} and "
        f"2^{common.high} no gradient loses more than {_tolerated(facts)}, {facts.where}."
    )
    worst = max(rows, key=lambda row: _lost(row.histogram.fate(dtype, now)))
    fate = worst.histogram.fate(dtype, now)
    if fate.infinite or fate.zero:
        beyond = "beyond" if fate.infinite else "below"
        sentence += (
            f" At {_power(now)}, {_share(fate.infinite or fate.zero, fate.values)} of "
            f"{_named(worst.kind, worst.path)} is {beyond} {dtype}."
        )
    return Advice([sentence], {}, 2.0**exponent)


def _about_losses(facts: _Facts) -> Advice:
    """Every run has lost something, though histograms leave room for a scale: something inside."""
    dtype = facts.dtype

    def lost(each: Lost) -> float:
        return 1.0 if each.infinite else each.share

    best = min(
        facts.losses, key=lambda scale: max(map(lost, facts.losses[scale].values()), default=0.0)
    )
    advice = Advice([], {}, best)
    for (kind, path), each in facts.losses[best].items():
        layers = {layer_of((kind, path)): path}
        if kind == OUTPUT_GRADIENT:
            layers = dict.fromkeys(sorted(facts.consumers.get(path, set())), path)
        for layer in layers:
            if layer and layer not in advice.policies:
                what = "infinite" if each.infinite else "zero"
                share = _share(each.infinite or each.zero, each.values)
                of = _named(kind, path)
                advice.policies[layer] = "float32"
                advice.sentences.append(
                    f"Run `{layer}` in float32: {share} of {of} is {what} in {dtype} at "
                    f"{_power(best)}, the best of the loss scales that were run, {facts.where}."
                )
    return advice


def _about_conflict(
    facts: _Facts, rows: Sequence[Row], windows: dict[tuple[str, str], Window]
) -> Advice:
    """No scale suits all gradients: the one that suits most, and float32 for the rest."""
    dtype = facts.dtype
    ends = {end for window in windows.values() for end in window}

    def suited(exponent: int) -> int:
        return sum(window.low <= exponent <= window.high for window in windows.values())

    best = max(sorted(ends), key=suited)
    kept = {row: each for row, each in windows.items() if each.low <= best <= each.high}
    common = EVERYWHERE
    for window in kept.values():
        common &= window
    low, high = common

    def lost(row: Row) -> tuple[Fate, bool, int]:
        """What a row loses at the nearest scale that suits the others; whether it is too small."""
        window = windows[row.kind, row.path]
        if window.is_empty:
            end = max(window.high, 0)
            return row.histogram.fate(dtype, 2.0**end), window.high >= 0, end
        is_small = window.low > best
        end = high if is_small else low
        return row.histogram.fate(dtype, 2.0**end), is_small, end

    advice = Advice([], {}, 2.0 ** ((low + high) // 2) if kept else None)
    worst: dict[str, Row] = {}
    for row in rows:
        if (row.kind, row.path) not in kept:
            layer = layer_of((row.kind, row.path))
            worst[layer] = max(worst.get(layer, row), row, key=lambda each: _lost(lost(each)[0]))
    for layer, row in worst.items():
        fate, is_small, end = lost(row)
        what = _named(row.kind, row.path)
        if windows[row.kind, row.path].is_empty:
            others = "it"
        else:
            others = next(
                f"`{path}`" for (_, path), each in kept.items() if end == each[1 if is_small else 0]
            )
        if is_small:
            reason = (
                f"{_share(fate.zero, fate.values)} of {what} is below {dtype} at any scale that "
                f"does not overflow {others}"
            )
        else:
            reason = (
                f"{_share(fate.infinite, fate.values)} of {what} is beyond {dtype} at any scale "
                f"at which nothing of {others} is lost"
            )
        if layer:
            advice.policies[layer] = "float32"
            advice.sentences.append(f"Run `{layer}` in float32: {reason}, {facts.where}.")
    # The gradient of an output is computed by whoever takes it.
    for kind, path in windows:
        if kind == OUTPUT_GRADIENT and (kind, path) not in kept:
            for layer in sorted(facts.consumers.get(path, set()) - set(advice.policies)):
                advice.policies[layer] = "float32"
                advice.sentences.append(
                    f"Run `{layer}` in float32: it computes the gradient of `{path}`'s output."
                )
    if kept:
        advice.sentences.append(
            f"Then {facts.set_scale} {_power(advice.loss_scale)}: between 2^{low} and 2^{high} "
            f"the other gradients lose no more than {_tolerated(facts)}, {facts.where}."
        )
    return advice


def _about_bfloat16(facts: _Facts, measured: Report | WhatIf, is_inside: bool) -> list[str]:
    """Whether bfloat16 keeps what float16 loses; histograms do not tell what is lost in a layer."""
    rows = facts.rows
    if isinstance(measured, WhatIf) and "bfloat16" in measured.dtypes:
        if _about_runs(measured, "bfloat16") is not None:
            return []
    elif is_inside:
        return []
    if any(row.dtype == "float16" for row in rows):
        # Of what was not finite, nothing is known.
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


def _named(kind: str, path: str) -> str:
    return f"`{path}`" if kind == GRADIENT else f"the gradient of `{path}`'s output"


def _lost(fate: Fate) -> float:
    return fate.share("zero") + fate.share("infinite")


def _share(count: int, of: int) -> str:
    share = 100 * count / of
    return f"{count:,} of {of:,} values" if share < 0.1 else f"{share:.1f} %"


def _tolerated(facts: _Facts) -> str:
    return f"{100 * facts.tolerance:g} %"


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):.0f}"

"""Advice about gradients: the loss scale that suits them, and layers that need float32."""

import functools
import math
from collections.abc import Mapping, Sequence

from keras_mp.numerics.exponents.advice import Advice, Facts, named, power, share_of
from keras_mp.numerics.exponents.histogram import EVERYWHERE, Fate, Window
from keras_mp.numerics.exponents.rows import OUTPUT_GRADIENT, Row, RowKey
from keras_mp.numerics.exponents.what_if import Lost


def overflow(facts: Facts) -> bool:
    """Whether a gradient was, or would be, too large at the current loss scale."""
    return any(
        row.overflowed_at <= facts.now or row.histogram.fate(facts.dtype, facts.now).infinite
        for row in facts.gradients
    )


def about_gradients(facts: Facts) -> Advice | None:
    """Returns the loss scale to take and layers for float32, unless the current scale is good.

    Args:
        facts: of a model whose layers lose nothing of what they return.

    Returns:
        An `Advice`, or None if the current loss scale is good.
    """
    dtype, now, rows = facts.dtype, facts.now, facts.gradients
    overflowed = [row for row in rows if row.dtype == dtype and math.isfinite(row.overflowed_at)]
    infinite = [row for row in overflowed if not row.histogram.exponents]
    if infinite:
        return _about_unknown_size(facts, infinite)
    # A loss scale is at least 1.
    common = allowed = Window(0, EVERYWHERE.high)
    windows = {}
    for row in rows:
        window = row.window(dtype, facts.tolerance) & allowed
        windows[row.key] = window
        common &= window
    if not common.is_empty and (common & facts.window_of_runs()).is_empty:
        return _about_losses(facts)
    common &= facts.window_of_runs()
    is_fine = min(common.margins(now)) >= 0
    needs_none = dtype == "bfloat16" and common.low == 0 <= common.high
    if is_fine or needs_none or not rows:
        return None
    if common.is_empty:
        return _about_conflict(facts, windows)
    # In the middle of the window, and rather lower, since gradients grow at times.
    exponent = (common.low + common.high) // 2
    sentence = (
        f"{facts.set_scale.capitalize()} 2^{exponent}: between 2^{common.low} and "
        f"2^{common.high} no gradient loses more than {facts.tolerated}, {facts.where}."
    )
    worst = max(rows, key=lambda row: _lost(row.histogram.fate(dtype, now)))
    fate = worst.histogram.fate(dtype, now)
    if overflowed:
        sentence += (
            " That only covers finite gradients. How much smaller the scale has to be for the "
            "steps that overflowed is unknown; a dynamic loss scale finds it."
        )
    elif fate.infinite or fate.zero:
        beyond = "beyond" if fate.infinite else "below"
        sentence += (
            f" At {power(now)}, {share_of(fate.infinite or fate.zero, fate.values)} of "
            f"{named(*worst.key)} is {beyond} {dtype}."
        )
    return Advice([sentence], {}, 2.0**exponent)


def _about_unknown_size(facts: Facts, infinite: Sequence[Row]) -> Advice:
    """Returns advice about gradients that had no finite value."""
    others = f" (and of {len(infinite) - 1} more)" if len(infinite) > 1 else ""
    scale = power(min(row.overflowed_at for row in infinite))
    sentence = (
        f"Use a dynamic loss scale, which finds one: at {scale} all of "
        f"`{infinite[0].path}`{others} is infinite or NaN, {facts.where}, so its size is unknown."
    )
    return Advice([sentence], {}, None)


def _about_losses(facts: Facts) -> Advice:
    """Returns advice where every run has lost something inside of layers.

    That is where the histograms of what they return leave a window open.
    """
    dtype = facts.dtype

    def lost(each: Lost) -> float:
        return 1.0 if each.infinite else each.share

    best = min(
        facts.losses, key=lambda scale: max(map(lost, facts.losses[scale].values()), default=0.0)
    )
    advice = Advice([], {}, best)
    for (kind, path), each in facts.losses[best].items():
        is_of_output = kind == OUTPUT_GRADIENT
        for layer in facts.takers(path) if is_of_output else [facts.owner(kind, path)]:
            if layer and layer not in advice.policies:
                what = "infinite" if each.infinite else "zero"
                share = share_of(each.infinite or each.zero, each.values)
                name = named(kind, path)
                advice.policies[layer] = "float32"
                advice.sentences.append(
                    f"Run `{layer}` in float32: {share} of {name} is {what} in {dtype} at "
                    f"{power(best)}, the best of the loss scales that were run, {facts.where}."
                )
    return advice


def _about_conflict(facts: Facts, windows: Mapping[RowKey, Window]) -> Advice:
    """Returns the scale that suits most gradients, and float32 for the layers of the others."""
    dtype = facts.dtype
    ends = {end for window in windows.values() for end in window}

    def suited(exponent: int) -> int:
        return sum(window.low <= exponent <= window.high for window in windows.values())

    best = max(sorted(ends), key=suited)
    compatible = {row: each for row, each in windows.items() if each.low <= best <= each.high}
    common = functools.reduce(Window.__and__, compatible.values(), EVERYWHERE)
    low, high = common

    def nearest(row: Row) -> tuple[int, bool]:
        """Returns the nearest scale that suits the others, and whether values are too small."""
        window = windows[row.key]
        if window.is_empty:
            return max(window.high, 0), window.high >= 0
        is_small = window.low > best
        return high if is_small else low, is_small

    def fate_of(row: Row) -> Fate:
        return row.histogram.fate(dtype, 2.0 ** nearest(row)[0])

    advice = Advice([], {}, 2.0 ** ((low + high) // 2) if compatible else None)
    worst: dict[str, Row] = {}
    for row in facts.gradients:
        if row.key not in compatible:
            layer = facts.owner(*row.key)
            worst[layer] = max(worst.get(layer, row), row, key=lambda each: _lost(fate_of(each)))
    for layer, row in worst.items():
        (end, is_small), fate, what = nearest(row), fate_of(row), named(*row.key)
        others = "it"
        if not windows[row.key].is_empty:
            others = next(
                f"`{path}`"
                for (_, path), each in compatible.items()
                if end == each[1 if is_small else 0]
            )
        if is_small:
            reason = (
                f"{share_of(fate.zero, fate.values)} of {what} is below {dtype} at any scale that "
                f"does not overflow {others}"
            )
        else:
            reason = (
                f"{share_of(fate.infinite, fate.values)} of {what} is beyond {dtype} at any scale "
                f"at which nothing of {others} is lost"
            )
        if layer:
            advice.policies[layer] = "float32"
            advice.sentences.append(f"Run `{layer}` in float32: {reason}, {facts.where}.")
    for kind, path in windows:
        if kind == OUTPUT_GRADIENT and (kind, path) not in compatible:
            for layer in facts.takers(path):
                if layer in advice.policies:
                    continue
                advice.policies[layer] = "float32"
                advice.sentences.append(
                    f"Run `{layer}` in float32: it computes the gradient of `{path}`'s output."
                )
    if advice.loss_scale is not None:
        advice.sentences.append(
            f"Then {facts.set_scale} {power(advice.loss_scale)}: between 2^{low} and 2^{high} "
            f"the other gradients lose no more than {facts.tolerated}, {facts.where}."
        )
    return advice


def _lost(fate: Fate) -> float:
    return fate.share("zero") + fate.share("infinite")

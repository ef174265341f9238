"""Advice about what was measured: sentences with their numbers, and policies for `convert`."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from keras_mp.numerics.causes import LARGE_INPUTS, LARGE_WEIGHTS, SAID
from keras_mp.numerics.distances import UNIT_ROUNDOFF
from keras_mp.numerics.exponents.histogram import EVERYWHERE, Fate, Window, exponent_of, round_down
from keras_mp.numerics.exponents.reports import Report
from keras_mp.numerics.exponents.rows import UPDATE_TOLERANCE, RowKey
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

if TYPE_CHECKING:
    from keras_mp.numerics.exponents.what_if import WhatIf

# A layer loses what it returns if the error of that is larger than `tune` tolerates by default, and
# so many times as large as the error of what the layer takes, which is one rounding at least. Over
# many layers rounding may add up to as much, and no layer is to blame.
_OFF, _RISES = 0.05, 16.0


class Advice(NamedTuple):
    """The result of `advise`: `str(advice)` has a line for each sentence.

    Attributes:
        sentences: list of str; empty if nothing is lost.
        policies: dict of paths of layers and names of policies, as `keras_mp.convert` takes it.
        loss_scale: float or None. The scale that is recommended, if one is: for the whole training
            if a training run was measured, to start with if it was a batch.

    Example:

    >>> print(keras_mp.numerics.exponents.advise.Advice([], {}, None))
    Nothing is lost.
    """

    sentences: list[str]
    policies: dict[str, str]
    loss_scale: float | None

    def __str__(self) -> str:
        return "\n".join(self.sentences) or "Nothing is lost."


def advise(measured: "Report | WhatIf", dtype: str = "float16", tolerance: float = 0.001) -> Advice:
    """Returns advice on how to keep a model from losing what it loses in 16 bits.

    Each sentence has the numbers that it is based on. If a model loses nothing at the loss scale
    that it is trained with, there is no advice. Gradients that are rounding noise do not count.
    Layers that lose what they return, to infinity or to zero, come first: as long as there are any,
    gradients are no guide. What a run has lost outranks what histograms predict. Act on it, and
    measure again, until nothing is lost.

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
    return _Adviser(measured, dtype, tolerance).advice()


class _Adviser:
    """What was measured, and the advice that follows, with words for it.

    Args:
        measured: `Report` or `WhatIf`.
        dtype: str.
        tolerance: float. Which share of a gradient may become zero.
    """

    def __init__(self, measured: "Report | WhatIf", dtype: str, tolerance: float) -> None:
        self.dtype, self.tolerance = dtype, tolerance
        self.report = measured if isinstance(measured, Report) else None
        self.runs = None if isinstance(measured, Report) else measured
        # The loss scale in force, or that which training would begin with.
        self.now = round_down(measured.loss_scale)
        noise, rows = measured.noise, measured.rows_in_16_bits
        self.rows = [row for row in rows if row.key not in noise]
        self.of_noise = [row for row in rows if row.key in noise]
        self.gradients = [row for row in self.rows if row.is_scaled]
        # What real runs have lost of gradients, by loss scale.
        self.losses = self.runs.losses_by_scale(tolerance) if self.runs else {}
        # Where it was measured. Other batches than one may have larger gradients, so that what
        # suits it is no scale to keep.
        self.where, self.set_scale = "in the batch", "start the loss scale at"
        if self.report:
            self.where = f"in {self.report.counted:,} of {self.report.step:,} steps"
            self.set_scale = "fix the loss scale at"
        self.sentences: list[str] = []
        self.policies: dict[str, str] = {}
        self.loss_scale: float | None = None

    def advice(self) -> Advice:
        is_inside = False
        if not self._outputs():
            is_inside = self._inside()
            if not is_inside:
                self._scale()
        self.sentences += [*self._noise(), *self._updates()]
        # Histograms do not tell what is lost inside of a layer.
        if self.dtype == "float16" and (self.policies or self.loss_scale) and not is_inside:
            self.sentences += self._bfloat16()
        return Advice(self.sentences, self.policies, self.loss_scale)

    def _in_float32(self, layer: str, why: str) -> None:
        if layer and layer not in self.policies:
            self.policies[layer] = "float32"
            self.sentences.append(f"Run `{layer}` in float32: {why}.")

    def _unit(self, path: str) -> str:
        """Returns the layer whose policy a layer has: itself, or the one around it."""
        return self.runs.units.get(path, path) if self.runs else path

    def _owner(self, kind: str, path: str) -> str:
        """Returns the layer of a row; for a variable of the model itself, ""."""
        return self._unit(path.rpartition("/")[0] if kind == "gradient" else path)

    def _takers(self, path: str) -> list[str]:
        """Returns the layers that take what a layer returns, and so compute its gradient."""
        takers = self.runs.consumers.get(path, ()) if self.runs else ()
        return sorted({self._unit(taker) for taker in takers})

    def _outputs(self) -> bool:
        """Advises about layers whose results are beyond the dtype at any loss scale."""
        for row in self.rows:
            layer, histogram = self._unit(row.path), row.histogram
            if row.kind != "output" or layer in self.policies:
                continue
            fate = histogram.fate(self.dtype)
            bad, total = fate.infinite, fate.values
            if not bad and row.dtype == self.dtype and not self.policies:
                # What came out infinite may have been of any size. Layers after it suffer from it.
                bad, total = histogram.infinities + histogram.nans, histogram.total
            if bad:
                self.sentences += [] if self.policies else self._cause(layer)
                lost = f"{_share(bad, total)} of {_output(row.path, layer)}"
                self._in_float32(layer, f"{lost} is beyond {self.dtype}, {self.where}")
        return bool(self.policies)

    def _cause(self, layer: str) -> list[str]:
        """Returns a sentence if weights, or inputs of the model, are too large for any layer."""
        if self.runs and (weight := self.runs.largest_weights.get(layer, 0.0)) >= LARGE_WEIGHTS:
            return [f"The weights of `{layer}` reach {weight:.3g}. {SAID['weights']}"]
        if self.runs and self.runs.largest_input >= LARGE_INPUTS:
            return [f"The inputs reach {self.runs.largest_input:.3g}: {SAID['inputs']}"]
        return []

    def _inside(self) -> bool:
        """Advises about the first layer that loses an output inside which would fit."""
        runs, dtype = self.runs, self.dtype
        if runs is None:
            return False
        lost_of, computed_in = runs[runs.scales[0]], runs.computed_in
        for (kind, path), lost in lost_of.items():
            if kind != "output":
                continue
            # The error of what the layer takes, which is one rounding at least.
            makers = [("output", maker) for maker in runs.makers(path)]
            errors = [lost_of[maker].error for maker in makers if maker in lost_of]
            before = _RISES * max(UNIT_ROUNDOFF[runs.dtype], *errors, 0.0)
            if not lost.infinite and lost.error <= max(_OFF, before):
                continue
            layers = [("output", path)]
            # The layer makes as large an error in float32 of what it takes in 16 bits.
            is_amplified = lost.error <= before * runs.amplification.get(path, 0.0)
            if computed_in[kind, path] not in LOW_PRECISION_NAMES or is_amplified:
                layers += makers
            what = f"{{}} is off by {100 * lost.error:.0f} % of its norm"
            if lost.infinite:
                what = f"{lost.infinite:,} values of {{}} are infinite or NaN"
            elif lost.share >= lost.error:
                what = f"{_share(lost.zero, lost.values)} of {{}} is zero"
            for key in layers:
                if computed_in.get(key) in LOW_PRECISION_NAMES:
                    layer = self._unit(key[1])
                    of_layer = what.format(_output(path, layer))
                    in_batch = f"in {dtype}, and not in float32, in the batch"
                    self._in_float32(layer, f"{of_layer} {in_batch}")
            if self.policies:
                return True
        return False

    def _scale(self) -> None:
        """Advises about gradients, unless their zeros may have been too small for the dtype."""
        zeros = self._unknown_zeros()
        is_too_large = any(
            row.overflowed_at <= self.now or row.histogram.fate(self.dtype, self.now).infinite
            for row in self.gradients
        )
        if not zeros or is_too_large:
            self._gradients()
        if zeros and (self.sentences or not is_too_large):
            self.sentences.append(zeros)

    def _gradients(self) -> None:
        """Advises a loss scale, and layers for float32, unless the current scale is good."""
        dtype, rows = self.dtype, self.gradients
        overflowed = [r for r in rows if r.dtype == dtype and math.isfinite(r.overflowed_at)]
        infinite = [row for row in overflowed if not row.histogram.exponents]
        if infinite:
            scale = _power(min(row.overflowed_at for row in infinite))
            self.sentences.append(
                f"Use a dynamic loss scale, which finds one: at {scale} all of "
                f"`{infinite[0].path}`{_others(infinite)} is infinite or NaN, {self.where}, so its "
                "size is unknown."
            )
            return
        allowed = Window(0, EVERYWHERE.high)  # A loss scale is at least 1.
        windows = {row.key: row.window(dtype, self.tolerance) & allowed for row in rows}
        of_rows = functools.reduce(Window.__and__, windows.values(), allowed)
        common = of_rows & self._window_of_runs()
        if common.is_empty and not of_rows.is_empty:
            self._best_of_runs()
            return
        needs_none = dtype == "bfloat16" and common.low == 0 <= common.high
        if min(common.margins(self.now)) >= 0 or needs_none or not rows:
            return
        if common.is_empty:
            self._conflict(windows)
            return
        # In the middle of the window, and rather lower, since gradients grow at times.
        exponent = (common.low + common.high) // 2
        self.loss_scale = 2.0**exponent
        sentence = (
            f"{self.set_scale.capitalize()} 2^{exponent}: between 2^{common.low} and "
            f"2^{common.high} no gradient loses more than {100 * self.tolerance:g} %, {self.where}."
        )
        worst = max(rows, key=lambda row: _lost(row.histogram.fate(dtype, self.now)))
        fate = worst.histogram.fate(dtype, self.now)
        if overflowed:
            sentence += (
                " That only covers finite gradients. How much smaller the scale has to be for the "
                "steps that overflowed is unknown; a dynamic loss scale finds it."
            )
        elif fate.infinite or fate.zero:
            beyond = "beyond" if fate.infinite else "below"
            sentence += (
                f" At {_power(self.now)}, {_share(fate.infinite or fate.zero, fate.values)} of "
                f"{_named(*worst.key)} is {beyond} {dtype}."
            )
        self.sentences.append(sentence)

    def _window_of_runs(self) -> Window:
        """Returns the loss scales between those of runs that have lost something of a gradient."""
        window = EVERYWHERE
        for scale, of_rows in self.losses.items():
            exponent = exponent_of(scale)
            if any(lost.infinite for lost in of_rows.values()):
                window &= Window(EVERYWHERE.low, exponent - 1)
            elif of_rows:
                window &= Window(exponent + 1, EVERYWHERE.high)
        return window

    def _best_of_runs(self) -> None:
        """Advises where every run has lost something inside of layers.

        That is where the histograms of what they return leave a window open.
        """

        def most(scale: float) -> float:
            losses = self.losses[scale].values()
            return max((1.0 if each.infinite else each.share for each in losses), default=0.0)

        best = self.loss_scale = min(self.losses, key=most)
        for (kind, path), lost in self.losses[best].items():
            what = "infinite" if lost.infinite else "zero"
            share = _share(lost.infinite or lost.zero, lost.values)
            is_of_output = kind == "output gradient"
            for layer in self._takers(path) if is_of_output else [self._owner(kind, path)]:
                self._in_float32(
                    layer,
                    f"{share} of {_named(kind, path)} is {what} in {self.dtype} at {_power(best)}, "
                    f"the best of the loss scales that were run, {self.where}",
                )

    def _conflict(self, windows: Mapping[RowKey, Window]) -> None:
        """Advises the scale that suits most gradients, and float32 for the layers of the others."""
        ends = sorted({end for window in windows.values() for end in window})
        best = max(ends, key=lambda end: sum(low <= end <= high for low, high in windows.values()))
        suited = {key: each for key, each in windows.items() if each.low <= best <= each.high}
        low, high = functools.reduce(Window.__and__, suited.values(), EVERYWHERE)
        # By layer, what is lost most at the nearest scale that suits the others.
        worst: dict[str, tuple[Fate, str]] = {}
        for row in self.gradients:
            if row.key in suited:
                continue
            window, others = windows[row.key], "it"
            end, is_small = max(window.high, 0), window.high >= 0
            if not window.is_empty:
                is_small = window.low > best
                end = high if is_small else low
                others = next(f"`{key[1]}`" for key, at in suited.items() if at[is_small] == end)
            fate = row.histogram.fate(self.dtype, 2.0**end)
            where = f"below {self.dtype} at any scale that does not overflow {others}"
            if not is_small:
                where = f"beyond {self.dtype} at any scale at which nothing of {others} is lost"
            lost = _share(fate.zero if is_small else fate.infinite, fate.values)
            layer, why = self._owner(*row.key), f"{lost} of {_named(*row.key)} is {where}"
            if layer not in worst or _lost(fate) > _lost(worst[layer][0]):
                worst[layer] = fate, why
        for layer, (_, why) in worst.items():
            self._in_float32(layer, f"{why}, {self.where}")
        for kind, path in windows:
            if kind == "output gradient" and (kind, path) not in suited:
                for layer in self._takers(path):
                    self._in_float32(layer, f"it computes the gradient of `{path}`'s output")
        if suited:
            self.loss_scale = 2.0 ** ((low + high) // 2)
            self.sentences.append(
                f"Then {self.set_scale} {_power(self.loss_scale)}: between 2^{low} and 2^{high} "
                f"the other gradients lose no more than {100 * self.tolerance:g} %, {self.where}."
            )

    def _unknown_zeros(self) -> str:
        """Returns a sentence about gradients whose zeros may have been too small for the dtype."""
        rows = self.report.rows_with_unknown_zeros(self.tolerance) if self.report else []
        rows = [row for row in rows if row.dtype == self.dtype]
        if not rows or self.report is None:
            return ""
        worst = max(rows, key=lambda row: row.histogram.zeros / row.histogram.total)
        return (
            f"{_share(worst.histogram.zeros, worst.histogram.total)} of `{worst.path}`"
            f"{_others(rows)} is zero in {self.dtype} at a loss scale of "
            f"{self.report.loss_scale:g}. Whether it is zero in float32, too, is unknown: "
            "`keras_mp.numerics.check` tells."
        )

    def _noise(self) -> Iterator[str]:
        """Yields a sentence about gradients that are lost, and may be rounding noise or not.

        A histogram tells their size alone.
        """
        of_noise = [(row.histogram.fate(self.dtype, self.now), row.path) for row in self.of_noise]
        lost = [each for each in of_noise if each[0].share("zero") > self.tolerance]
        if self.report and lost:
            fate, path = max(lost, key=lambda each: each[0].share("zero"))
            yield (
                f"{_share(fate.zero, fate.values)} of `{path}`{_others(lost)} is below "
                f"{self.dtype} at {_power(self.now)}. It is so small compared with the other "
                "gradients of its layer that it may be rounding noise: `keras_mp.numerics.check` "
                "tells."
            )

    def _updates(self) -> Iterator[str]:
        """Yields sentences about weights in 16 bits that have gradients, and did not move."""
        rows = self.report.rows if self.report else []
        gradients = {row.path: row.histogram for row in rows if row.kind == "gradient"}
        updates = [row for row in rows if row.kind == "update" and row.path in gradients]
        for dtype in LOW_PRECISION_NAMES:
            of_dtype = [row for row in updates if row.dtype == dtype]
            pairs = [(row.histogram, gradients[row.path]) for row in of_dtype]
            # A sparse gradient does not tell which weights are to move.
            pairs = [(update, each) for update, each in pairs if each.total == update.total]
            lost = sum(max(0, update.zeros - each.zeros) for update, each in pairs)
            total = sum(each.total - each.zeros for _, each in pairs)
            if lost > UPDATE_TOLERANCE * total:
                yield (
                    "Compile the model with keras_mp.MasterWeightOptimizer(optimizer): "
                    f"{_share(lost, total)} of the weights in {dtype} with a gradient did not "
                    f"move, {self.where}."
                )

    def _bfloat16(self) -> Iterator[str]:
        """Yields a sentence if bfloat16 keeps what float16 loses."""
        of_rows = [row.histogram for row in self.rows]
        # Nothing is known about what was not finite.
        is_unknown = any(each.infinities + each.nans for each in of_rows)
        fates = [each.fate("bfloat16") for each in of_rows]
        if is_unknown and any(row.dtype == "float16" for row in self.rows):
            return
        if not any(fate.zero or fate.infinite for fate in fates):
            yield (
                "bfloat16 would lose nothing that float16 loses here, and needs no loss scale: of "
                f"{sum(fate.values for fate in fates):,} values none becomes zero or infinite, "
                f"{self.where}. (It keeps 8 bits of each value, float16 11.)"
            )


def _lost(fate: Fate) -> float:
    return fate.share("zero") + fate.share("infinite")


def _named(kind: str, path: str) -> str:
    """Returns what a sentence calls a gradient."""
    return f"`{path}`" if kind == "gradient" else f"the gradient of `{path}`'s output"


def _output(path: str, layer: str) -> str:
    """Returns what to call an output, in advice about the same layer or another one."""
    if path == layer:
        return "its output"
    is_inside = path.startswith(f"{layer}/")
    return f"the output of `{path}`, which {'is inside' if is_inside else 'takes its'},"


def _others(rows: Sequence[object]) -> str:
    return f" (and of {len(rows) - 1} more)" if len(rows) > 1 else ""


def _share(count: int, total: int) -> str:
    """Returns a share of the values, in words."""
    share = 100 * count / total
    return f"{count:,} of {total:,} values" if share < 0.1 else f"{share:.1f} %"


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):.0f}"

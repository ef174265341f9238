"""The results of a comparison, layer by layer: as a table, as a picture, as JSON."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from keras_mp.numerics.distances import LIMIT, Distance
from keras_mp.numerics.results import Finding, Result
from keras_mp.support import text_tables
from keras_mp.support.figures import new_figure

_EXPLAINED = "Rounding explains all differences."

# The distances of a layer, and the measures of each.
_SIDES = ("output", "own_output", "gradient", "own_gradient")
_MEASURES = ("relative", "units", "sqnr", "cosine")


@dataclasses.dataclass(frozen=True)
class ComparedLayer:
    """One call of a layer.

    Attributes:
        path: str. The names of the layers from below the model to this one; of the model its name.
        kind: str. Its class.
        dtype: str. The narrowest dtype that it computes in or returns.
        output: Distance of what it returned, all layers before it included; None where it returned
            no floating point number.
        gradient: Distance of the gradients of what it returned and of its weights, whichever is
            further, all layers after it included.
        own_output: Distance of what it makes of the same inputs in both dtypes: its own share.
            None where that is not known.
        own_gradient: the same of the gradients, given the same upstream gradient.
    """

    path: str
    kind: str
    dtype: str
    output: Distance | None = None
    gradient: Distance | None = None
    own_output: Distance | None = None
    own_gradient: Distance | None = None


@dataclasses.dataclass(frozen=True)
class Comparison(Result):
    """Where two runs part. Its `str` is a table.

    Attributes:
        name: str. The run that was looked at.
        reference: str. The one that it was compared with.
        layers: list of ComparedLayer, in the order in which the layers returned.
        findings: list of `Finding`, in the order in which things happened: the forward pass first.
            Layers that only pass on what another one did are not among them. Empty where rounding
            explains all.
        losses: the loss of the run and that of the reference.
        loss_scale: float. What the loss was multiplied by in the run.
        batches: tuple of `Comparison`s, one for each of several batches; else empty. Distances are
            the worst of theirs then, findings are those of all of them, losses are means, and the
            loss scale is the smallest.

    Example:

    >>> from keras_mp.numerics.comparison.compared import Comparison
    >>> comparison = Comparison("16 bits", "float32", [], [], (0.5, 0.5), 1.0)
    >>> print(comparison)
    Rounding explains all differences. 16 bits and float32
    """

    name: str
    reference: str
    layers: list[ComparedLayer]
    findings: list[Finding]
    losses: tuple[float, float]
    loss_scale: float
    batches: tuple["Comparison", ...] = ()

    @classmethod
    def of_batches(cls, found: "Sequence[Comparison]") -> "Comparison":
        """Combines the comparisons of several batches: the worst distance of each layer.

        Args:
            found: one for each batch. A single one is returned as it is.
        """
        if len(found) == 1:
            return found[0]
        findings: dict[tuple[str, str], Finding] = {}
        for each in (finding for one in found for finding in one.findings):
            key = (each.path, each.hazard)
            findings[key] = max(findings.get(key, each), each, key=lambda one: one.units or 0.0)
        first = found[0]
        return cls(
            first.name,
            first.reference,
            _joined(found),
            list(findings.values()),
            (fmean(each.losses[0] for each in found), fmean(each.losses[1] for each in found)),
            min(each.loss_scale for each in found),
            tuple(found),
        )

    @property
    def is_judged(self) -> bool:
        """Whether the reference has a finite loss, or there are findings.

        Example:

        >>> nan = float("nan")
        >>> from keras_mp.numerics.comparison.compared import Comparison
        >>> Comparison("16 bits", "float32", [], [], (nan, nan), 1.0).is_judged
        False
        """
        return bool(self.findings) or math.isfinite(self.losses[1])

    def to_text(self, rows: int | None = text_tables.MOST) -> str:
        """Returns what `print` shows: the findings, and the layers that are furthest apart.

        Args:
            rows: int. How many layers are shown at most; None for all, in their order, with the
                signal-to-noise ratio and the cosine of what they returned. Defaults to 10.

        Returns:
            str: of at most 100 characters a line unless `rows` is None, and one line if rounding
            explains everything.
        """
        if rows is not None and self.is_judged and not self.findings:
            names = (text_tables.fitted(each, 30) for each in (self.name, self.reference))
            return f"{_EXPLAINED} {' and '.join(names)}"
        lines = list(self._lines(rows))
        if rows is not None:
            # Sentences are wrapped; lines of a table are short enough.
            lines = [part for line in lines for part in text_tables.wrapped(line, "   ")]
        return "\n".join(lines)

    def rows_of_csv(self) -> Iterator[Sequence[Any]]:
        """Yields a line for each layer, with all distances."""
        yield "path", "kind", "dtype", *(f"{side}_{name}" for side in _SIDES for name in _MEASURES)
        for row in self.layers:
            distances = [getattr(row, side) for side in _SIDES]
            cells = (each and getattr(each, name) for each in distances for name in _MEASURES)
            yield row.path, row.kind, row.dtype, *cells

    def plot(self, axes: Any = None) -> Any:
        """Draws how far the runs are apart, from the first layer to the last.

        What is above the dotted line is a finding.

        Args:
            axes: Matplotlib's two `Axes`, for outputs and for gradients. Defaults to those of a new
                figure.

        Returns:
            The two `Axes`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if axes is None:
            size = min(24.0, max(6.0, 0.3 * len(self.layers))), 8.0
            axes = new_figure(__name__, size).subplots(2, sharex=True)
        for side, ax in zip(("output", "gradient"), axes):
            self._draw(ax, side, "tab:blue", "with all that came before")
            self._draw(ax, f"own_{side}", "tab:orange", "the layer's own share")
            ax.axhline(LIMIT, color="black", linestyle=":", label="more is a finding")
            ax.set_yscale("log")
            ax.set_ylabel(f"{side}s apart\n(1: what rounding explains)")
            ax.grid(alpha=0.3)
            ax.legend()
        axes[0].set_title(f"{self.name} and {self.reference}")
        axes[1].set_xticks(range(len(self.layers)), [row.path for row in self.layers], rotation=90)
        return axes

    def _draw(self, ax: Any, name: str, color: str, label: str) -> None:
        found = [(i, getattr(row, name)) for i, row in enumerate(self.layers)]
        points = [(i, d.units) for i, d in found if d is not None and d.units > 0]
        finite = [(i, units) for i, units in points if math.isfinite(units)]
        infinite = [i for i, units in points if math.isinf(units)]
        if finite:
            ax.plot(*zip(*finite), ".-", color=color, label=label)
        if infinite:
            top = ax.get_xaxis_transform()
            label = f"{label}: not finite"
            ax.plot(infinite, [0.97] * len(infinite), "x", color=color, label=label, transform=top)

    def _lines(self, rows: int | None) -> Iterator[str]:
        scope = f", the worst of {len(self.batches)} batches" if self.batches else ""
        yield f"{self.name}, compared with {self.reference}{scope}"
        scale = f", at a loss scale of {self.loss_scale:g}" if self.loss_scale != 1 else ""
        yield f"Loss: {self.losses[0]:.6g} and {self.losses[1]:.6g}{scale}"
        yield ""
        if self.findings:
            yield "Further apart than rounding explains:"
            for i, finding in enumerate(self.findings[:rows], 1):
                yield f"{i}. {finding.hazard}, in {finding.where}: {finding.why}"
            yield from text_tables.more(len(self.findings[rows:]) if rows else 0, "finding")
        elif self.is_judged:
            yield _EXPLAINED
        else:
            yield "Nothing can be said: the loss of the reference is not finite either."
        yield ""
        yield from self._table(rows)
        yield ""
        yield (
            "Relative distances, and in parentheses in units of what rounding explains. Own "
            "share: with the same inputs in both."
        )

    def _table(self, rows: int | None) -> Iterator[str]:
        named = {finding.path for finding in self.findings}
        cells = []
        for row in self.layers:
            by_side = {side: getattr(row, side) for side in _SIDES}
            of_output = () if rows else _noise_cells(row.output)
            shown = [
                _cell(by_side["output"]),
                *of_output,
                *(_cell(by_side[side]) for side in _SIDES[1:]),
            ]
            own, both = (
                max((each.units for each in distances if each is not None), default=0.0)
                for distances in ((row.own_output, row.own_gradient), by_side.values())
            )
            alike = (row.kind, row.dtype, row.path in named, own > LIMIT, both > LIMIT)
            cells.append(
                text_tables.RankedRow(
                    (f"{row.path} ({row.kind})", row.dtype, *shown),
                    (float(row.path in named), own, both),
                    alike,
                )
            )
        of_output = () if rows else ("SQNR", "Cosine")
        header = ("Layer", "Dtype", "Output", *of_output, "Own share", "Gradient", "Own share")
        return text_tables.shortened(header, cells, rows, left=(0, 1))


def _joined(found: Sequence[Comparison]) -> list[ComparedLayer]:
    """Returns the worst of the rows of each call of a layer, one for each batch."""
    calls: dict[tuple[str, int], list[ComparedLayer]] = {}
    for one in found:
        counts: Counter[str] = Counter()
        for row in one.layers:
            calls.setdefault((row.path, counts[row.path]), []).append(row)
            counts[row.path] += 1
    joined = []
    for rows in calls.values():
        known = {
            side: [each for row in rows if (each := getattr(row, side)) is not None]
            for side in _SIDES
        }
        distances = {side: Distance.worst(each) for side, each in known.items()}
        joined.append(dataclasses.replace(rows[0], **distances))
    return joined


def _noise_cells(distance: Distance | None) -> tuple[str, str]:
    if distance is None:
        return "-", "-"
    cosine = "-" if math.isnan(distance.cosine) else f"{distance.cosine:.6f}"
    return f"{distance.sqnr:.1f} dB", cosine


def _cell(distance: Distance | None) -> str:
    if distance is None:
        return "-"
    if math.isinf(distance.relative):
        return "not finite"
    if distance.relative == 0:
        return "0"
    units = f"{distance.units:.1f}" if distance.units < 100 else f"{distance.units:.0f}"
    return f"{distance.relative:.1e} ({units})"

"""A picture of what the benchmarks measured."""

import pathlib
import statistics

from benchmarks import fit

_COLORS = {"bare": "0.6", "Keras": "tab:orange", "keras_mp": "tab:blue"}


def draw(results: dict, machine: str, path: pathlib.Path) -> bool:
    """Draws those of the results for which there is a panel.

    Args:
        results: dict of names of benchmarks and what their `run` returned.
        machine: str. What they ran on.
        path: where to write the PNG.

    Returns:
        bool. Was there anything to draw?
    """
    panels = [
        panel
        for name, panels_of in _PANELS.items()
        if results.get(name)
        for panel in panels_of(results[name])
    ]
    if not panels:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(panels) // 2)
    heights = [max(height for height, _ in panels[2 * i : 2 * i + 2]) for i in range(rows)]
    figure = pyplot.figure(figsize=(17, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(rows, 2, height_ratios=heights)
    for i, (_, draw_panel) in enumerate(panels):
        draw_panel(figure.add_subplot(grid[i // 2, i % 2]))
    figure.suptitle(f"keras_mp beside Keras's own classes\n{machine}", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _color(variant):
    return next((c for wrapper, c in _COLORS.items() if wrapper in variant), _COLORS["bare"])


def _overhead(results):
    def panel(keras, cells):
        def draw_panel(axes):
            names = list(cells)
            wrapped = [wrapper for wrapper in _COLORS if wrapper != "bare"]
            for offset, wrapper in zip((-0.2, 0.2), wrapped):
                percent = [
                    [100 * x / cells[name]["bare"] for x in cells[name][wrapper]] for name in names
                ]
                axes.barh(
                    [i + offset for i in range(len(names))],
                    [median for median, _, _ in percent],
                    0.38,
                    xerr=[[m - low for m, low, _ in percent], [high - m for m, _, high in percent]],
                    color=_COLORS[wrapper],
                    error_kw={"elinewidth": 0.7, "ecolor": "0.3"},
                    label=wrapper,
                )
            axes.set_yticks(range(len(names)), names, fontsize=8)
            axes.invert_yaxis()
            axes.set_ylim(len(names) - 0.5, -0.5)
            medians = [
                100 * c[w][0] / c["bare"] for c in cells.values() for w in ("Keras", "keras_mp")
            ]
            axes.set_xlim(min(0, *medians) - 5, 1.3 * max(medians) + 5)
            axes.axvline(0, color="0.3", linewidth=0.8)
            axes.set_xlabel("added to a step of the bare optimizer, % (medians; lines: quartiles)")
            axes.set_title(f"What a LossScaleOptimizer costs, {keras}")
            axes.legend()

        return 1.5 + 0.27 * len(cells), draw_panel

    return [panel(keras, cells) for keras, cells in results.items()]


def _fit(results):
    def panel(keras, models):
        def draw_panel(axes):
            labels, position = [], 0
            for name, seconds in models.items():
                for variant in seconds:
                    reference = fit.reference(variant)
                    if variant == reference:
                        continue
                    turns = [a / b for a, b in zip(seconds[reference], seconds[variant])]
                    low, median, high = statistics.quantiles(turns, n=4)
                    color = _color(variant)
                    error = [[median - low], [high - median]]
                    axes.barh(position, median, 0.8, xerr=error, color=color, ecolor="0.3")
                    labels.append((position, f"{name}: {variant}"))
                    position += 1
                position += 0.5
            axes.set_yticks(*zip(*labels), fontsize=8)
            axes.set_ylim(position - 0.5, -0.7)
            axes.axvline(1, color="0.3", linewidth=0.8)
            axes.set_xlabel("times faster than float32 (medians of turns; lines: quartiles)")
            axes.set_title(f"A step of training, {keras}")

        return 1.5 + 0.24 * sum(map(len, models.values())), draw_panel

    return [panel(keras, models) for keras, models in results.items()]


def _tracing(results):
    def panel(what, label):
        def draw_panel(axes):
            for keras, style in zip(results, ("-", "--")):
                counts = list(map(int, results[keras]))
                for wrapper, color in _COLORS.items():
                    values = [what(of_count[wrapper]) for of_count in results[keras].values()]
                    axes.loglog(
                        counts, values, style, marker="o", color=color, label=f"{keras}, {wrapper}"
                    )
            axes.set_xlabel("variables")
            axes.set_ylabel(label)
            axes.set_title("The graph of a step of SGD")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)

        return 4.5, draw_panel

    return [
        panel(lambda r: r["operations"], "operations, functions and branches included"),
        panel(lambda r: statistics.median(r["seconds"]), "time to trace, s"),
    ]


def _memory(results):
    def draw_panel(axes):
        labels, position = [], 0
        for name, variants in results["fit"].items():
            for variant, peaks in variants.items():
                added = peaks["peak"] - peaks["before"]
                axes.barh(position, added / 1e6, 0.8, color=_color(variant))
                labels.append((position, f"{name}: {variant}"))
                position += 1
            position += 0.5
        axes.set_yticks(*zip(*labels), fontsize=8)
        axes.set_ylim(position - 0.5, -0.7)
        axes.set_xlabel("MB since TensorFlow was loaded")
        axes.set_title("Peak resident memory of fit, Keras 3")

    return [(1.5 + 0.24 * sum(map(len, results["fit"].values())), draw_panel)]


def _sums(results):
    def panel(keras, curves):
        def draw_panel(axes):
            for variant, losses in curves.items():
                style = "--" if variant.startswith("keras_mp") else "-"
                axes.semilogy(range(1, len(losses) + 1), losses, style, color=_color(variant))
            axes.legend(curves)
            axes.set_xlabel("steps of SGD")
            axes.set_ylabel("loss")
            axes.set_title(f"A linear model whose biases carry the signal, {keras}")
            axes.grid(alpha=0.3)

        return 4.5, draw_panel

    return [panel(keras, curves) for keras, curves in results["losses"].items()]


_PANELS = {
    "overhead": _overhead,
    "fit": _fit,
    "memory": _memory,
    "tracing": _tracing,
    "sums": _sums,
}

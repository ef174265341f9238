"""The tables and pictures of `benchmarks parity`."""

import math
import pathlib
import statistics

from benchmarks import common

REFERENCE = "float32"
COLORS = {
    "mixed_float16": "tab:red",
    "mixed_bfloat16": "tab:blue",
    "bfloat16": "tab:green",
    "Keras's mixed_float16": "tab:orange",
    "Keras's mixed_bfloat16": "tab:cyan",
}


class Runs:
    """The runs of a task on a Keras.

    Args:
        rows: what `benchmarks parity` has written of them.
    """

    def __init__(self, rows: list[dict]) -> None:
        self.measure, self.is_error = rows[0]["measure"], rows[0]["is_error"]
        self._rows = rows

    def values(self, variant: str, key: str) -> dict[int, float]:
        """What was measured, by seed, if the run did not raise."""
        rows = [r for r in self._rows if r["variant"] == variant and key in r]
        return {row["seed"]: row[key] for row in rows}

    def difference(self, variant: str) -> tuple[float, float]:
        """How far a variant is from float32: the mean over seeds, and its standard error."""
        ours, exact = (self.values(name, "quality") for name in (variant, REFERENCE))
        differences = [ours[seed] - exact[seed] for seed in sorted(ours.keys() & exact.keys())]
        return _mean(differences), _deviation(differences) / math.sqrt(len(differences) or 1)

    def verdict(self, variant: str) -> str:
        """Says "worse" or "better" of more than two standard errors; else nothing."""
        mean, error = self.difference(variant)
        if self.values(variant, "error") or math.isnan(mean):
            return "worse"
        if math.isnan(error) or abs(mean) <= 2 * error:
            return ""
        return "worse" if (mean > 0) == self.is_error else "better"


def _mean(values: list[float]) -> float:
    return statistics.mean(values) if values else math.nan


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def of_tasks(results: list[dict], keras: str, are_long: bool = False) -> dict[str, Runs]:
    """The runs on a Keras, by task; of the long tasks, or of the others."""
    rows: dict[str, list[dict]] = {}
    for row in results:
        if row["keras"] == keras and ("scales" in row) == are_long:
            rows.setdefault(row["task"], []).append(row)
    return {task: Runs(of_task) for task, of_task in rows.items()}


def _with_error(mean: float, error: float, sign: str = "") -> str:
    """Both, with two digits of the error."""
    digits = 3 if not 0 < error < math.inf else max(0, 1 - math.floor(math.log10(error)))
    return f"{mean:{sign}.{digits}f} ± {error:.{digits}f}"


def _cell(runs: Runs, variant: str) -> str:
    errors, qualities = (runs.values(variant, key) for key in ("error", "quality"))
    if errors or not qualities:
        return next(iter(errors.values()), "-")
    spread = _deviation([*qualities.values()])
    quality = _with_error(_mean([*qualities.values()]), spread)
    if variant == REFERENCE:
        return quality
    verdict = runs.verdict(variant)
    difference = _with_error(*runs.difference(variant), sign="+")
    return f"{quality} ({difference})" + (f" **{verdict}**" if verdict else "")


def _costs(runs: Runs, variant: str) -> str:
    seconds, skipped = (runs.values(variant, key) for key in ("seconds", "skipped"))
    if not seconds:
        return "-"
    return f"{statistics.median(seconds.values()):.1f} s, {_mean([*skipped.values()]):.3g}"


def print_tables(results: list[dict]) -> None:
    """Prints what was trained so far."""
    variants = (REFERENCE, *COLORS)
    for keras in common.KERASES:
        tasks = of_tasks(results, keras)
        header = ["task, measure", *variants]
        seeds = len({row["seed"] for row in results if row["keras"] == keras})
        common.print_table(
            f"{keras}, {seeds} seeds: quality on held-out data, mean ± standard deviation (mean "
            "difference from float32 with the same seed ± standard error)",
            header,
            [
                [f"{task}, {runs.measure}", *(_cell(runs, variant) for variant in variants)]
                for task, runs in tasks.items()
            ],
        )
        common.print_table(
            f"{keras}: median of the CPU's seconds of training, mean of skipped steps",
            ["task", *variants],
            [[task, *(_costs(runs, v) for v in variants)] for task, runs in tasks.items()],
        )
        compared = [(runs, v) for runs in tasks.values() for v in COLORS]
        verdicts = [runs.verdict(variant) for runs, variant in compared]
        print(
            f"\nMore than two standard errors from float32, of {len(compared)}: "
            f"{verdicts.count('worse')} worse, {verdicts.count('better')} better."
        )
    common.print_table(
        "The long task",
        ["Keras, dtype", "measure", "quality", "skipped", "CPU's seconds", "last loss scale"],
        [row for keras in common.KERASES for row in _long_rows(results, keras)],
    )


def _long_rows(results: list[dict], keras: str) -> list[list[str]]:
    rows = [r for r in results if r["keras"] == keras and "scales" in r]
    return [
        [
            *(f"{keras}, {row['variant']}", row["measure"], f"{row['quality']:.4f}"),
            *(str(row["skipped"]), f"{row['seconds']:.0f}"),
            f"2\\*\\*{math.log2(row['scales'][-1][1]):.0f}" if row["scales"] else "-",
        ]
        for row in rows
    ]


def draw(results: list[dict], path: pathlib.Path) -> None:
    """Draws how far each variant is from float32."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 7), sharey=True, layout="constrained")
    for ax, keras in zip(axes, common.KERASES):
        tasks = of_tasks(results, keras)
        for i, (variant, color) in enumerate(COLORS.items()):
            for y, runs in enumerate(tasks.values()):
                mean, error = runs.difference(variant)
                exact = _mean([*runs.values(REFERENCE, "quality").values()])
                share = (-100 if runs.is_error else 100) / exact
                ax.errorbar(
                    mean * share,
                    y + (i - 2) * 0.14,
                    xerr=2 * error * abs(share),
                    color=color,
                    fmt="o" if variant.startswith("Keras") else "s",
                    markersize=4,
                    label=variant if y == 0 else None,
                )
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set_xscale("symlog", linthresh=1)
        ax.set_yticks(range(len(tasks)), tasks)
        ax.set(title=keras, xlabel="% better than float32 (two standard errors)")
        ax.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_scales(results: list[dict], path: pathlib.Path) -> None:
    """Draws the loss scales of the long task."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(8, 3.5), layout="constrained")
    for row in (r for r in results if r.get("scales")):
        steps, scales = zip(*row["scales"], (row["steps"], row["scales"][-1][1]))
        ours = not row["variant"].startswith("Keras")
        ax.step(
            steps,
            scales,
            where="post",
            color=COLORS[row["variant"]],
            linestyle="-" if row["keras"] == "Keras 3" else "--",
            linewidth=2.5 if ours else 1,
            label=f"{row['keras']}, {row['variant']}",
        )
    ax.set_yscale("log", base=2)
    ax.set(xlabel="step", ylabel="loss scale")
    ax.grid(alpha=0.3)
    if ax.has_data():
        ax.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)

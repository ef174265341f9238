"""The tables of `benchmarks parity`."""

import math
import statistics

from benchmarks import common

REFERENCE = "float32"
VARIANTS = (
    *("mixed_float16", "mixed_bfloat16", "bfloat16"),
    *("Keras's mixed_float16", "Keras's mixed_bfloat16"),
)


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
    variants = (REFERENCE, *VARIANTS)
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
        compared = [(runs, v) for runs in tasks.values() for v in VARIANTS]
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

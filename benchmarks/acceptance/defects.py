"""Are defects found in models that were not written for it, and are they named? Clean models, too.

Each model of `tf.keras.applications` has one defect. A tool has found it if one of its findings is
about the layer, or the part of the step, that has the defect, and says what it is.
"""

import json
import sys
import time
import traceback
import warnings
from typing import Any

from benchmarks import common
from benchmarks.acceptance import defective_models as models
from keras_mp import numerics
from keras_mp.numerics import batches, compare, own_thread
from keras_mp.numerics import run as runs
from keras_mp.numerics.check import audit

AUDIT, COMPARE = "audit", "compare"


Finding = tuple[str, str]  # where, and what


def look(tool: str, model: Any, batch: tuple[Any, Any]) -> list[Finding]:
    """Asks one of the tools."""
    [made] = batches.listed(model, batch)
    if tool == AUDIT:
        return [(f.where, f.hazard) for f in audit(model, [made])]
    if tool == COMPARE:
        with own_thread.random_numbers():
            compared, _ = compare.compare(*runs.runners(model, made))
        return [(f.path, f.why) for f in compared.findings]
    try:
        with numerics.watch(model):
            model.fit(*batch, batch_size=len(batch[0]), verbose=0)
    except numerics.NotFiniteError as error:
        return [(error.operation.layer, error.operation.operation)]
    return []


def measure(names: list[str] | None = None) -> dict[str, dict]:
    """Plants defects; says which tools have found them, and what they said."""
    results: dict[str, dict] = {}
    for name in names or models.DEFECTS:
        defect = models.DEFECTS[name]
        results[name] = {"model": defect.model, "where": defect.where, "tools": {}}
        for tool, words in defect.said.items():
            start = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    said = look(tool, *defect.make())
            except Exception as error:  # one that fails must not hide the rest
                traceback.print_exc()
                said = [("", f"{type(error).__name__}: {error}")]
            there = [s for s in said if s[0].endswith(defect.where)]
            results[name]["tools"][tool] = {
                "named": next((s for s in there if words in s[1]), None),
                "others": [s for s in said if s not in there],
            }
            seconds = time.perf_counter() - start
            print(f"{name}, {tool}, {seconds:.0f} s: {said}", file=sys.stderr, flush=True)
    return results


def measure_clean(names: list[str] | None = None) -> dict[str, dict]:
    """The same models without a defect: says what audit and compare find in them."""
    results: dict[str, dict] = {}
    for name in names or models.MODELS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results[name] = {
                tool: look(tool, models.compiled(name), models.batch(name))
                for tool in (AUDIT, COMPARE)
            }
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    return results


def run() -> dict:
    """Plants all defects on both Kerases, looks at the models without them, and prints a table."""
    results = {
        keras: {
            what: common.in_own_process("benchmarks.acceptance.defects", what, keras=keras)
            for what in ("defects", "clean")
        }
        for keras in common.KERASES
    }
    first, *_ = common.KERASES
    rows = []
    for name, found in results[first]["defects"].items():
        said = [tool["named"][1] for tool in found["tools"].values() if tool["named"]]
        by = [_found_by(results[keras]["defects"][name]) or "none" for keras in results]
        rows.append([name, found["model"], *by, found["where"], "; ".join(said)])
    common.print_table(
        "Defects that were planted: by whom each is found, and what it is called",
        ["", "model", *(f"found on {keras} by" for keras in results), "place", "named"],
        rows,
    )
    for keras, of_keras in results.items():
        named = [bool(_found_by(found)) for found in of_keras["defects"].values()]
        tools = [t for found in of_keras["defects"].values() for t in found["tools"].values()]
        elsewhere = sum(len(tool["others"]) for tool in tools)
        wrong = {name: said for name, said in of_keras["clean"].items() if any(said.values())}
        print(
            f"\n{keras}: {sum(named)} of {len(named)} defects are found and named. Findings "
            f"elsewhere in these models: {elsewhere}. Of {len(of_keras['clean'])} models without a "
            f"defect, {len(wrong)} have a finding: {wrong}"
        )
    return results


def _found_by(found: dict) -> str:
    return ", ".join(tool for tool, said in found["tools"].items() if said["named"])


if __name__ == "__main__":
    what, *chosen = sys.argv[1:]
    print(json.dumps({"defects": measure, "clean": measure_clean}[what](chosen)))

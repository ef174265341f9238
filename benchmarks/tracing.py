"""How the graph of a train step grows with the number of variables: operations, time to trace."""

import json
import statistics
import sys
import time

from benchmarks import common, overhead

# Of variables; how often each is traced.
COUNTS = {10: 5, 100: 3, 300: 3, 1000: 1}
COUNTS_ON_REPLICAS = {10: 5, 100: 3, 300: 1}


def measure(replicas: int = 1) -> dict[str, dict[str, dict]]:
    """Operations and seconds of each tracing, for each number of variables and wrapper."""
    import tensorflow as tf

    strategy = common.replicas(replicas) if replicas > 1 else None
    counts = COUNTS_ON_REPLICAS if strategy else COUNTS
    results: dict[str, dict[str, dict]] = {}
    for count, repeats in counts.items():
        cell = overhead.Cell("graph", "SGD", count, 1)
        steps = {
            wrapper: overhead.make_step(
                cell, wrapper, overhead.make_variables(cell, strategy), strategy
            )
            for wrapper in common.WRAPPERS
        }
        if not results:  # What is only done once, in the first tracing of a process.
            for step in steps.values():
                step.func.get_concrete_function(*step.args)
        results[str(count)] = of_count = {name: {"seconds": []} for name in steps}
        for _ in range(repeats):
            for name, step in steps.items():
                function = tf.function(step.func.python_function)
                start = time.perf_counter()
                graph = function.get_concrete_function(*step.args).graph
                of_count[name]["seconds"].append(time.perf_counter() - start)
                of_count[name]["operations"] = operations(graph.as_graph_def())
    return results


def operations(graph) -> int:
    """Counts them, with those of the functions that a graph calls, branches of a cond included."""
    return len(graph.node) + sum(len(function.node_def) for function in graph.library.function)


def run() -> dict:
    """Measures both Kerases, and prints a table."""
    results, rows = {}, []
    for keras in common.KERASES:
        for replicas, name in ((1, keras), (2, f"{keras}, 2 replicas")):
            results[name] = found = common.in_own_process(
                "benchmarks.tracing", str(replicas), keras=keras
            )
            for count, of_count in found.items():
                n = [of_count[wrapper]["operations"] for wrapper in common.WRAPPERS]
                s = [statistics.median(of_count[w]["seconds"]) for w in common.WRAPPERS]
                ratios = f"{n[2] / n[1]:.2f}", f"{s[2] / s[1]:.2f}"
                seconds = [f"{each:.2f} s" for each in s]
                rows.append([name, count, *map(str, n), ratios[0], *seconds, ratios[1]])
    wrappers = [*common.WRAPPERS, "keras_mp / Keras"]
    common.print_table(
        "The graph of a step of SGD: operations, and how long it takes to trace (medians)",
        ["", "variables", *(f"ops, {w}" for w in wrappers), *(f"time, {w}" for w in wrappers)],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))

"""Op autocast beside float32, a policy and TensorFlow's graph rewrite: time, memory, casts.

And what eager code pays for it inside of a region, and outside.
"""

import json
import statistics
import sys
import time

from benchmarks import common, fit, memory, models

VARIANTS = {
    "float32": {},
    "autocast": {"autocast": "bfloat16"},
    "policy": {"keras_mp": "mixed_bfloat16"},
    "graph rewrite": {"rewrite": True},
}
STEPS = 5
EAGER_REPEATS, EAGER_BLOCK = 40, 500


def measure_time(name: str) -> dict[str, list[float]]:
    """Seconds a step of `fit` for each variant of a model."""
    return fit.take_turns({variant: fit.make_fit(name, **how) for variant, how in VARIANTS.items()})


def measure_memory(name: str, variant: str) -> int:
    """Bytes that `fit` added to what was resident."""
    import tensorflow as tf

    tf.zeros([1]) + tf.keras.backend.epsilon()
    before = memory.peak()
    fit.make_fit(name, **VARIANTS[variant])(STEPS)
    return memory.peak() - before


def measure_casts(name: str) -> dict[str, int]:
    """How many casts there are in the graph of a step, forward and backward.

    Not those of the rewrite, which happens when the graph runs.
    """
    import tensorflow as tf

    import keras_mp

    counts = {}
    for variant, how in VARIANTS.items():
        if "rewrite" in how:
            continue
        with keras_mp.policy_scope(how.get("keras_mp", "float32")):
            model, inputs, labels = models.make(name, batch=2)
        loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))  # noqa: B023
            return loss, tape.gradient(loss, model.trainable_variables)  # noqa: B023

        with keras_mp.autocast("bfloat16", enabled="autocast" in how):
            concrete = step.get_concrete_function(inputs, labels)
        counts[variant] = live_casts(concrete)
    return counts


def _is_between_floats(node) -> bool:
    import tensorflow as tf

    return node.op == "Cast" and all(
        tf.as_dtype(node.attr[end].type).is_floating for end in ("SrcT", "DstT")
    )


def live_casts(concrete) -> int:
    """Casts between floats that a function, and those it calls, need for their results."""
    library = {f.signature.name: f for f in concrete.graph.as_graph_def().library.function}

    def count(definition, called):
        nodes = {node.name: node for node in definition.node_def}
        waiting = [*definition.ret.values(), *definition.control_ret.values()]
        needed = set()
        while waiting:
            node = waiting.pop().lstrip("^").partition(":")[0]
            if node in nodes and node not in needed:
                needed.add(node)
                waiting.extend(nodes[node].input)
        found = sum(_is_between_floats(nodes[node]) for node in needed)
        for node in needed:
            for attr in nodes[node].attr.values():
                if attr.func.name in library and attr.func.name not in called:
                    called.add(attr.func.name)
                    found += count(library[attr.func.name], called)
        return found

    return count(concrete.function_def, set())


def measure_eager() -> dict[str, list[float]]:
    """Seconds of a small operation in eager: before, outside of and inside of a region."""
    import tensorflow as tf

    import keras_mp

    x = tf.ones([8, 8])
    small = {"AddV2": lambda: x + x, "MatMul": lambda: tf.matmul(x, x)}

    def block(function):
        start = time.perf_counter()
        for _ in range(EAGER_BLOCK):
            function()
        return (time.perf_counter() - start) / EAGER_BLOCK

    seconds: dict[str, list[float]] = {}
    for where in ("before", "outside", "inside"):
        for name in small:
            seconds[f"{name}, {where}"] = []
    for _ in range(EAGER_REPEATS):
        for name, function in small.items():
            seconds[f"{name}, before"].append(block(function))
    with keras_mp.autocast("bfloat16"):
        pass
    for _ in range(EAGER_REPEATS):
        for name, function in small.items():
            seconds[f"{name}, outside"].append(block(function))
            with keras_mp.autocast("bfloat16"):
                seconds[f"{name}, inside"].append(block(function))
    return seconds


MEASURES = {
    "time": measure_time,
    "memory": measure_memory,
    "casts": measure_casts,
    "eager": measure_eager,
}


def run() -> dict:
    """Measures both Kerases, and prints tables."""
    results: dict = {"fit": {}}
    rows = []
    for keras in common.KERASES:
        for name in models.MODELS:

            def measured(what, *arguments):
                options = {"keras": keras, "on_cpu": what == "memory"}  # noqa: B023
                return common.in_own_process("benchmarks.autocast", what, *arguments, **options)

            seconds, casts = measured("time", name), measured("casts", name)
            of_model = results["fit"].setdefault(keras, {}).setdefault(name, {})
            added = {variant: measured("memory", name, variant) for variant in VARIANTS}
            for variant in VARIANTS:
                of_model[variant] = {
                    "seconds": seconds[variant],
                    "memory": added[variant],
                    "casts": casts.get(variant),
                }
                rows.append(
                    [
                        *(keras, name, variant),
                        f"{statistics.median(seconds[variant]) * 1e3:.1f} ms",
                        common.ratio(seconds, variant, "float32"),
                        common.ratio(seconds, variant, "policy"),
                        f"{added[variant] / added['float32']:.2f}",
                        str(casts.get(variant, "-")),
                    ]
                )
    common.print_table(
        "A step of fit in bfloat16 (ratios of medians, quartiles; memory: what fit adds, in terms "
        "of float32; casts in the graph of a step)",
        ["", "", "", "step", "/ float32", "/ policy", "memory", "casts"],
        rows,
    )
    results["eager"] = eager = common.in_own_process("benchmarks.autocast", "eager")
    common.print_table(
        "A small operation in eager (before: no region was ever entered)",
        ["", "microseconds", "/ before"],
        [
            [
                case,
                f"{statistics.median(turns) * 1e6:.2f}",
                common.ratio(eager, case, case.partition(",")[0] + ", before"),
            ]
            for case, turns in eager.items()
        ],
    )
    return results


if __name__ == "__main__":
    print(json.dumps(MEASURES[sys.argv[1]](*sys.argv[2:])))

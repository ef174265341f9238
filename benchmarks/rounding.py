"""How exact is a sum of gradients over replicas that travel as float16? With and without scaling.

RFC 293, "All-reducing in float16".
"""

import json
import sys

from benchmarks import common

EXPONENTS = range(-9, 3)
COUNTS = (2, 4, 8)
SIZE = 10_000
SCALE = 2.0**15


def measure(count: int) -> dict[int, dict[str, float]]:
    """For each order of magnitude, relative errors of the sum over `count` replicas."""
    strategy = common.replicas(count)
    import numpy as np
    import tensorflow as tf

    from keras_mp.step import gradients, replicas

    generator = np.random.default_rng(0)
    directions = generator.normal(size=(count, SIZE))

    @tf.function
    def reduce(values, scale, dtype):
        def replica_sum():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            scaled = gradients.scale([tf.gather(values, replica)], scale)
            return gradients.unscale(replicas.all_reduce(scaled, dtype), scale)[0]

        return strategy.experimental_local_results(strategy.run(replica_sum))[0]

    def error(values, scale, dtype=tf.float16):
        exact = values.astype("float64").sum(0)
        found = reduce(tf.constant(values), tf.constant(scale), dtype).numpy()
        if not np.isfinite(found).all():
            return float("inf"), 0.0
        lost = np.mean((found == 0) & (exact != 0))
        return float(np.linalg.norm(found - exact) / np.linalg.norm(exact)), float(lost)

    results = {}
    for exponent in EXPONENTS:
        values = (directions * 10.0**exponent).astype("float32")
        settled = SCALE
        while np.isinf(error(values, settled)[0]):  # as a dynamic loss scale does, step by step
            settled /= 2
        naive, lost = error(values, 1.0)
        results[exponent] = {
            "float32": error(values, 1.0, tf.float32)[0],
            "naive": naive,
            "lost": lost,
            "scaled": error(values, settled)[0],
            "scale": settled,
        }
    return results


def run() -> dict:
    """Measures all counts of replicas, and prints a table."""
    results = {count: common.in_own_process("benchmarks.rounding", str(count)) for count in COUNTS}
    rows = []
    for exponent in map(str, EXPONENTS):
        of = [results[count][exponent] for count in COUNTS]
        rows.append(
            [
                f"1e{exponent}",
                " / ".join(f"{r['float32']:.0e}" for r in of),
                " / ".join(f"{r['naive']:.0e}" for r in of),
                f"{of[0]['lost']:.0%}",
                " / ".join(f"{r['scaled']:.0e}" for r in of),
                " / ".join(f"2^{r['scale'].hex().partition('p')[2].lstrip('+')}" for r in of),
            ]
        )
    common.print_table(
        f"Relative error of the sum over {' / '.join(map(str, COUNTS))} replicas, against float64",
        ["gradients", "float32", "float16, not scaled", "of them lost", "float16, scaled", "scale"],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))

"""How long `import keras_mp` takes, after TensorFlow and Keras."""

import json
import statistics
import time

from benchmarks import common

REPEATS = 5


def measure() -> dict[str, float]:
    """Seconds of both imports, the first ones of this process."""
    start = time.perf_counter()
    import tensorflow as tf

    tf.keras.Model  # noqa: B018 (Keras is imported when it is first asked for)
    middle = time.perf_counter()
    import keras_mp  # noqa: F401

    return {"tensorflow": middle - start, "keras_mp": time.perf_counter() - middle}


def run() -> dict:
    """Measures both Kerases, and prints a table."""
    results = {
        keras: [common.in_own_process("benchmarks.imports", keras=keras) for _ in range(REPEATS)]
        for keras in common.KERASES
    }
    rows = []
    for keras, times in results.items():
        columns = []
        for name in ("tensorflow", "keras_mp"):
            low, median, high = statistics.quantiles([t[name] for t in times], n=4)
            columns.append(f"{median:.2f} s ({low:.2f}-{high:.2f})")
        rows.append([keras, *columns])
    common.print_table(
        "Imports (medians, quartiles)",
        ["", "import tensorflow; tensorflow.keras.Model", "import keras_mp"],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure()))

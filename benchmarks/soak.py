"""What is left after many turns of the same: resident bytes and Python objects, each turn of them.

A turn is a step, a model that is compiled, trained and deleted, a region, or a conversion. Both
Kerases, each kind in a process of its own.
"""

import gc
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks import common

TURNS = 10_000
# Of the turns, so many come first: pools of memory fill up in them, and caches.
WARM_UP = 0.1
# Objects and bytes are looked at so often afterwards. They grow if each look finds more.
LOOKS = 10
Turn = Callable[[], Any]
# What takes longer than a step is turned less often.
SLOWER = {"compile, fit, delete": 100, "the same with Keras's own": 100, "convert": 100}


def _steps(in_function: bool) -> Turn:
    """Good and skipped steps of a `LossScaleOptimizer`."""
    import keras_mp

    v = tf.Variable(tf.ones([8, 8]))
    optimizer = keras_mp.LossScaleOptimizer(
        tf.keras.optimizers.SGD(1e-6),
        keras_mp.DynamicLossScale(64, increment_period=5),
        warn_after_skips=None,
    )
    optimizer.build([v])

    def step(factor):
        optimizer.minimize(lambda: tf.reduce_sum(v) * factor, [v])

    return _alternating(tf.function(step) if in_function else step)


def _alternating(step: Callable[[Any], Any]) -> Callable[[], None]:
    """Every tenth step is skipped."""
    good, bad = tf.constant(1.0), tf.constant(float("inf"))
    turns = [0]

    def turn():
        turns[0] += 1
        step(good if turns[0] % 10 else bad)

    return turn


def _scaler() -> Turn:
    """Steps of a `GradScaler`, with a tape that scales."""
    import keras_mp

    v, optimizer = tf.Variable(tf.ones([8, 8])), tf.keras.optimizers.SGD(1e-6)
    scaler = keras_mp.GradScaler(
        keras_mp.DynamicLossScale(64, increment_period=5), warn_after_skips=None
    )

    def step(factor):
        with tf.GradientTape() as tape:
            loss = scaler.scale(tf.reduce_sum(v) * factor)
        scaler.step(optimizer, [(tape.gradient(loss, v), v)])
        scaler.update()

    return _alternating(step)


def _fit(is_ours: bool) -> Turn:
    """A model is made, compiled, trained for a step and deleted."""
    policy = tf.keras.mixed_precision.Policy("mixed_float16")
    if is_ours:
        import keras_mp

        policy = keras_mp.Policy("mixed_float16")
    x, y = tf.ones([4, 8]), tf.ones([4, 1])

    def turn():
        tf.keras.backend.clear_session()
        before = tf.keras.mixed_precision.global_policy()
        tf.keras.mixed_precision.set_global_policy(policy)
        try:
            model = _model(policy)
        finally:
            tf.keras.mixed_precision.set_global_policy(before)
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0)

    return turn


def _model(policy: Any) -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [tf.keras.Input([8]), *(layers.Dense(8, dtype=policy) for _ in range(2))]
    )


def _convert() -> Turn:
    """A model is converted, and the new one deleted."""
    import keras_mp

    model = _model("float32")

    def turn():
        tf.keras.backend.clear_session()
        keras_mp.convert(model, "mixed_bfloat16")

    return turn


def _region() -> Turn:
    """A product in a region of `autocast`, in eager and in a function."""
    import keras_mp

    x = tf.ones([8, 8])
    function = tf.function(lambda: x @ x)

    def turn():
        with keras_mp.autocast("bfloat16"):
            return x @ x, function()

    return turn


KINDS: dict[str, Callable[[], Turn]] = {
    "eager": lambda: _steps(in_function=False),
    "graph": lambda: _steps(in_function=True),
    "compile, fit, delete": lambda: _fit(is_ours=True),
    "the same with Keras's own": lambda: _fit(is_ours=False),
    "region": _region,
    "convert": _convert,
    "scaler": _scaler,
}


def measure(kind: str, turns: int) -> dict[str, float]:
    """Makes turns, and says what was left by them.

    Args:
        kind: str, one of `KINDS`.
        turns: int.

    Returns:
        dict of `turns`; `bytes` and `objects`, by how many of each the process grew a turn after
        the warm-up, as the slope of a line through what was found (of the medians, so that what
        comes once does not count); and `alive`, how many of the models that were made still live.
    """
    turn = KINDS[kind]()
    before = _models()
    for _ in range(max(2, round(turns * WARM_UP))):
        turn()
    found = [_look()]
    block = max(1, turns // LOOKS)
    for _ in range(LOOKS):
        for _ in range(block):
            turn()
        found.append(_look())
    grown = {name: _slope([each[name] for each in found]) / block for name in found[0]}
    return {"turns": block * LOOKS, **grown, "alive": _models() - before}


def _models() -> int:
    gc.collect()
    return sum(issubclass(type(each), tf.keras.Model) for each in gc.get_objects())


def _look() -> dict[str, int]:
    gc.collect()
    return {"bytes": common.resident(), "objects": len(gc.get_objects())}


def _slope(values: list[float]) -> float:
    """The median of the slopes between all pairs of values."""
    pairs = [(i, j) for j in range(len(values)) for i in range(j)]
    return statistics.median((values[j] - values[i]) / (j - i) for i, j in pairs)


def run(turns: int = TURNS) -> dict:
    """Measures all kinds on both Kerases, and prints a table.

    Args:
        turns: int. How many; a hundredth of it where a turn makes a model.
    """
    results: dict[str, dict[str, dict]] = {}
    rows = []
    for keras in common.KERASES:
        results[keras] = {}
        for kind in KINDS:
            count = max(LOOKS, turns // SLOWER.get(kind, 1))
            found = common.in_own_process(
                "benchmarks.soak", kind, str(count), keras=keras, on_cpu=True
            )
            results[keras][kind] = found
            cells = [f"{found['turns']:,}", f"{found['bytes']:.1f}", f"{found['objects']:.3f}"]
            rows.append([keras, kind, *cells, str(found["alive"])])
    common.print_table(
        "What a turn leaves behind",
        ["", "", "turns", "bytes a turn", "objects a turn", "models alive"],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))

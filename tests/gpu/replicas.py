"""The promises of keras_mp about replicas, in a process of its own.

That process can divide its devices. Two GPUs if there are, else one in two halves; without a GPU
the CPU in two.
"""

import json
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import keras_mp
from tests import steps
from tests.gpu.promises import Promise, judge

_MEGABYTES = 1024  # of each half of a GPU
_LONGEST = 300  # seconds
_MADE = "replicas can be made"


def judged_in_own_process() -> list[Promise]:
    """Tries the promises in another process."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        return [Promise(_MADE, False, f"nothing after {_LONGEST} seconds")]
    try:
        return [Promise(*each) for each in json.loads(done.stdout.splitlines()[-1])]
    except (LookupError, ValueError):
        error = next(reversed(done.stderr.splitlines()), "nothing was printed")
        return [Promise(_MADE, False, error)]


def main() -> None:
    """Tries the promises, and prints the results as JSON."""
    strategy = _strategy()
    print(
        json.dumps(
            [
                judge("replicas skip a step together", lambda: _skip_together(strategy)),
                judge("replicas sum float16 gradients", lambda: _sum_together(strategy)),
            ]
        )
    )


def _strategy() -> tf.distribute.Strategy:
    devices = tf.config.list_physical_devices("GPU")
    if len(devices) > 1:
        return tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
    kind, memory = ("GPU", _MEGABYTES) if devices else ("CPU", None)
    [device, *_] = tf.config.list_physical_devices(kind)
    half = tf.config.LogicalDeviceConfiguration(memory_limit=memory)
    tf.config.set_logical_device_configuration(device, [half, half])
    # Nvidia's own library sums over physical GPUs only.
    sum_on_one = tf.distribute.ReductionToOneDevice() if devices else None
    return tf.distribute.MirroredStrategy([f"{kind}:0", f"{kind}:1"], sum_on_one)


def _step(
    strategy: tf.distribute.Strategy, optimizer: keras_mp.LossScaleOptimizer, weights: tf.Variable
) -> Callable[[tf.Tensor], None]:
    """Returns a step in which each replica has a factor of its own."""

    def loss(factors: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        product = tf.cast(weights, tf.float16) * tf.gather(factors, replica)
        return tf.reduce_sum(tf.cast(product, tf.float32))

    of_replica = steps.keras_3(optimizer, loss, [weights])
    return tf.function(lambda factors: strategy.run(of_replica, args=(factors,)), autograph=False)


def _trained(
    strategy: tf.distribute.Strategy, *factors: list[float]
) -> tuple[list[list[float]], keras_mp.LossScaleOptimizer]:
    """Returns each replica's weights after a step for each pair of factors.

    The optimizer comes with them.
    """
    with strategy.scope():
        weights = tf.Variable(tf.constant([1.0, 2.0]))
        scale = keras_mp.DynamicLossScale(1024)
        optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(0.125), scale)
        optimizer.build([weights])
    step = _step(strategy, optimizer, weights)
    for each in factors:
        step(tf.constant(each, tf.float16))
    parts = strategy.experimental_local_results(weights)
    return [part.numpy().tolist() for part in parts], optimizer


def _skip_together(strategy: tf.distribute.Strategy) -> tuple[bool, str]:
    parts, optimizer = _trained(strategy, [1.0, np.inf])
    scale = float(optimizer.loss_scale())
    kept = parts == 2 * [[1.0, 2.0]] and scale == 512
    return kept, f"one infinite gradient; weights {parts}, scale 1024 to {scale:g}"


def _sum_together(strategy: tf.distribute.Strategy) -> tuple[bool, str]:
    parts, _ = _trained(strategy, [1.0, 3.0])
    return parts == 2 * [[0.5, 1.5]], f"weights {parts}"


if __name__ == "__main__":
    main()

"""A step of training: float32, Keras's own policies, ours, `autocast`, the rewrite, and PyTorch.

And ours with histograms of exponents: in steps that count, and in those between.

All of them take turns in one process. Where the time of TensorFlow's goes is added up by class of
operation, from its profiler.
"""

import contextlib
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

import keras_mp
from benchmarks import common, models
from keras_mp.numerics.counting import ExponentHistograms
from keras_mp.numerics.profile import PROFILED, UPDATE, seconds_by_class

REPEATS = 7
REWRITE = "auto_mixed_precision_onednn_bfloat16"
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "Keras's bfloat16": {"whose": "Keras", "policy": "mixed_bfloat16"},
    "bfloat16": {"whose": "keras_mp", "policy": "mixed_bfloat16"},
    "Keras's float16": {"whose": "Keras", "policy": "mixed_float16"},
    "float16": {"whose": "keras_mp", "policy": "mixed_float16"},
    "autocast": {"autocast": True},
    "graph rewrite": {"rewrite": True},
    "counting": {"whose": "keras_mp", "policy": "mixed_bfloat16", "counts_every": 1},
    "counting, not due": {"whose": "keras_mp", "policy": "mixed_bfloat16", "counts_every": 2**40},
}
TORCH = {"torch float32": False, "torch autocast": True}


def training_step(
    name: str,
    sizes: models.Sizes,
    whose: str | None = None,
    policy: str = "float32",
    autocast: bool = False,
    head: str | None = "float32",
    counts_every: int | None = None,
) -> tuple[Callable[..., Any], Any, Any]:
    """A Python function that makes one step of training with Adam, and what it is called with.

    Args:
        name: a model of `models`.
        sizes: its sizes.
        whose: "Keras" or "keras_mp", whose policy it is.
        policy: the global policy.
        autocast: whether the forward pass is in a region of bfloat16.
        head: the dtype of the last layer; None for the policy.
        counts_every: in how many steps exponents are counted once; None for never.

    Returns:
        The function, inputs and labels.
    """
    with common.policy(whose, policy):
        model, x, y = models.make(name, sizes, head)
    optimizer: Any = tf.keras.optimizers.Adam(1e-4)
    if policy == "mixed_float16":
        optimizer = common.WRAPPERS[whose](optimizer)
    losses = keras_mp.losses if whose == "keras_mp" else tf.keras.losses
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    counts = None
    if counts_every is not None:
        counts = ExponentHistograms(model, every=counts_every, optimizer=optimizer)

    def step(x: Any, y: Any) -> Any:
        region = keras_mp.autocast("bfloat16") if autocast else contextlib.nullcontext()
        with counts.step() if counts else contextlib.nullcontext():
            with region, tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
                scaled, unscale = common.scaled(optimizer, value)
            gradients = unscale(tape.gradient(scaled, model.trainable_variables))
            with tf.name_scope(UPDATE):
                optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return value

    return step, x, y


def make_step(
    name: str, sizes: models.Sizes, rewrite: bool = False, **how: Any
) -> Callable[[], Any]:
    """A function that runs a `training_step`.

    Args:
        name: a model of `models`.
        sizes: its sizes.
        rewrite: whether grappler rewrites the graph to bfloat16.
        **how: the other arguments of `training_step`.
    """
    function, x, y = training_step(name, sizes, **how)
    step = tf.function(function)

    def run() -> Any:
        with rewriting(rewrite):
            return step(x, y).numpy()

    return run


@contextlib.contextmanager
def rewriting(is_on: bool) -> Iterator[None]:
    """A context manager in which grappler rewrites graphs to bfloat16, or does not."""
    # The option is part of how a function is called: it holds where it was set.
    tf.config.optimizer.set_experimental_options({REWRITE: is_on})
    yield
    tf.config.optimizer.set_experimental_options({REWRITE: False})


def measure(name: str, size: str) -> dict[str, Any]:
    """Seconds a step of each variant, and where those of TensorFlow's go."""
    sizes = models.SIZES[size][name]
    steps = {variant: make_step(name, sizes, **how) for variant, how in VARIANTS.items()}
    if importlib.util.find_spec("torch"):
        # Its threads would wait in a loop, on cores that TensorFlow needs.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from benchmarks import torch_models

        for variant, autocast in TORCH.items():
            steps[variant] = torch_models.make_step(name, sizes, autocast)
    seconds = common.interleaved(steps, REPEATS)
    classes = {variant: seconds_by_class(steps[variant]) for variant in VARIANTS}
    return {"seconds": seconds, "classes": classes}


def run(small: bool = False) -> dict:
    """Measures each model on both Kerases, and prints tables."""
    size = "small" if small else "full"
    results = {
        keras: {
            name: common.in_own_process("benchmarks.step", name, size, keras=keras)
            for name in models.SIZES[size]
        }
        for keras in common.KERASES
    }
    found = [
        (keras, name, of_model["seconds"], of_model["classes"])
        for keras, of_keras in results.items()
        for name, of_model in of_keras.items()
    ]
    columns = (*VARIANTS, *TORCH)
    common.print_table(
        f"Milliseconds a step, medians of {REPEATS} ({size} sizes)",
        ["", "", *columns],
        [[keras, name, *_milliseconds(seconds, columns)] for keras, name, seconds, _ in found],
    )
    pairs = [
        *(("bfloat16", against) for against in ("float32", "Keras's bfloat16")),
        *(("float16", against) for against in ("float32", "Keras's float16")),
        ("autocast", "bfloat16"),
        ("graph rewrite", "bfloat16"),
        ("counting", "bfloat16"),
        ("counting, not due", "bfloat16"),
        ("bfloat16", "torch autocast"),
    ]
    common.print_table(
        "Ratios of medians, and quartiles of the ratios of steps made one after the other",
        ["", "", *(f"{ours} / {other}" for ours, other in pairs)],
        [
            [keras, name, *(_ratio(seconds, *pair) for pair in pairs)]
            for keras, name, seconds, _ in found
        ],
    )
    order = list(found[0][3]["float32"])
    common.print_table(
        f"Milliseconds of operations a step, of all threads, means of {PROFILED}",
        ["", "", "", *order],
        [
            [keras, name, variant, *(f"{1e3 * of_variant[each]:,.0f}" for each in order)]
            for keras, name, _, classes in found
            for variant, of_variant in classes.items()
        ],
    )
    return results


def _milliseconds(seconds: dict[str, list[float]], variants: tuple[str, ...]) -> list[str]:
    return [f"{1e3 * statistics.median(seconds[v]):,.1f}" if v in seconds else "" for v in variants]


def _ratio(seconds: dict[str, list[float]], ours: str, other: str) -> str:
    return common.ratio(seconds, ours, other) if other in seconds else ""


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))

"""A step of training: float32, Keras's own policy, ours, a region of `autocast`, and PyTorch.

All of them take turns in one process. Where the time of TensorFlow's goes is added up by class of
operation, from its profiler.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import common, step_models

REPEATS, PROFILED = 7, 3
POLICY, KERAS = "mixed_bfloat16", "Keras's own"
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    KERAS: {"keras": POLICY},
    "ours": {"policy": POLICY},
    "ours, jit_compile": {"policy": POLICY, "jit_compile": True},
    "autocast": {"autocast": True},
}
TORCH = {"torch float32": False, "torch autocast": True}

UPDATE = "update_of_weights"  # the name scope
XLA = "ExecuteAsyncOnStream"  # what the profiler calls a run of what XLA has compiled
# What an operation of TensorFlow's belongs to, by the beginning of its type; the first one counts.
CLASSES = {
    "products": r"_?(Fused)?(BatchMatMul|MatMul|Conv\dD|Depthwise|Einsum)",
    "casts": r"Cast$",
    "reductions": r"Sum|Mean|Max$|Min$|BiasAddGrad|FusedBatchNorm|Softmax|LogSoftmax|.*CrossEntropy"
    r"|AddN|L2Loss|UnsortedSegmentSum|All$|Any$",
    "loops": r"While|TensorList|Enter|Exit|NextIteration|Switch|Merge|LoopCond",
    "elementwise": r"Add|Sub|Mul|Div|RealDiv|Rsqrt|Sqrt|Square|Exp|Log|Tanh|Sigmoid|Erf|Relu|Gelu"
    r"|Elu|Softplus|Neg|Pow|Select|Maximum|Minimum|BiasAdd|Reciprocal|Inv|Greater|Less|Equal",
}
ORDER = ("products", "elementwise", "reductions", "casts", "update", "loops", "rest")


def make_step(
    name: str,
    sizes: step_models.Sizes,
    keras: str = "float32",
    policy: str | None = None,
    jit_compile: bool = False,
    autocast: bool = False,
) -> Callable[[], Any]:
    """A function that makes one step of training with Adam."""
    import tensorflow as tf

    import keras_mp

    own = tf.keras.mixed_precision
    own.set_global_policy(keras)
    if policy:
        keras_mp.set_global_policy(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
        model, x, y = step_models.make(name, sizes)
    keras_mp.set_global_policy(None)
    own.set_global_policy("float32")
    optimizer = tf.keras.optimizers.Adam(1e-4)
    if jit_compile:
        optimizer = keras_mp.OptimizerWrapper(optimizer, jit_compile=True)
    losses = keras_mp.losses if policy else tf.keras.losses
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        region = keras_mp.autocast("bfloat16") if autocast else contextlib.nullcontext()
        with region, tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        with tf.name_scope(UPDATE):
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return value

    return lambda: step(x, y).numpy()


@contextlib.contextmanager
def profiled() -> Iterator[dict[str, float]]:
    """Context manager that gives the seconds by class of operation, when it is left."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    seconds = dict.fromkeys(ORDER, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        try:
            yield seconds
        finally:
            tf.profiler.experimental.stop()
        space = xplane_pb2.XSpace()
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        space.ParseFromString(file.read_bytes())
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                found = class_of(plane.event_metadata[event.metadata_id].name)
                if found is not None:
                    seconds[found] += event.duration_ps / 1e12


def class_of(event: str) -> str | None:
    """The class of an event of the profiler, one of `ORDER`; None where it is no operation."""
    if event.endswith(f"::{XLA}"):
        return "update"  # Nothing else is compiled here.
    # TensorFlow calls the event of an operation "name of the node:type of the operation".
    node, _, op = event.rpartition(":")
    if not node or node.endswith(":") or not re.fullmatch(r"\w+", op):
        return None
    if UPDATE in node:
        return "update"
    op = re.sub("^_Mkl(Native)?", "", op)  # those of oneDNN
    return next((name for name, pattern in CLASSES.items() if re.match(pattern, op)), "rest")


def measure(name: str, size: str) -> dict[str, Any]:
    """Seconds a step of each variant, and where those of TensorFlow's go."""
    sizes = step_models.SIZES[size][name]
    steps = {variant: make_step(name, sizes, **how) for variant, how in VARIANTS.items()}
    if importlib.util.find_spec("torch"):
        # Its threads would wait in a loop, on cores that TensorFlow needs.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from benchmarks import step_torch

        for variant, autocast in TORCH.items():
            steps[variant] = step_torch.make_step(name, sizes, autocast)
    seconds = common.interleaved(steps, REPEATS)
    classes = {}
    for variant in VARIANTS:
        with profiled() as found:
            for _ in range(PROFILED):
                steps[variant]()
        classes[variant] = {each: total / PROFILED for each, total in found.items()}
    return {"seconds": seconds, "classes": classes}


def run(small: bool = False) -> dict:
    """Measures each model in a process of its own, on both Kerases, and prints two tables."""
    size = "small" if small else "full"
    results: dict[str, dict] = {}
    for keras in common.KERASES:
        results[keras] = {
            name: common.in_own_process("benchmarks.step", name, size, keras=keras)
            for name in step_models.SIZES[size]
        }
    rows, parts = [], []
    for keras, of_models in results.items():
        for name, found in of_models.items():
            seconds = {v: statistics.median(each) * 1e3 for v, each in found["seconds"].items()}
            columns = [f"{seconds[v]:,.0f}" if v in seconds else "" for v in (*VARIANTS, *TORCH)]
            best = min(seconds["ours"], seconds["ours, jit_compile"])
            against = best / seconds["torch autocast"] if "torch autocast" in seconds else None
            ratios = [f"{best / seconds[KERAS]:.2f}"]
            ratios.append("" if against is None else f"{against:.2f}")
            rows.append([keras, name, *columns, *ratios])
            for variant, classes in found["classes"].items():
                milliseconds = [f"{classes[each] * 1e3:,.0f}" for each in ORDER]
                parts.append([keras, name, variant, *milliseconds])
    common.print_table(
        f"Milliseconds a step ({size} sizes); our best against Keras's own, and against PyTorch",
        ["", "", *VARIANTS, *TORCH, "ours / Keras's own", "ours / torch"],
        rows,
    )
    common.print_table(
        "Milliseconds of operations a step, of all threads", ["", "", "", *ORDER], parts
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))

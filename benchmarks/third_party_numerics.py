"""What do `compare` and `audit` say of models that others wrote? Of sound ones, nothing.

The models of `third_party_models`, and some of `tf.keras.applications`, with random weights. Each
is made in 16 bits, compiled as its users would, and looked at on one batch.
"""

import importlib.util
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks import common, third_party_models
from benchmarks.third_party_models import CLASSES, Example

DTYPES = ("float16", "bfloat16")
# The sides of the images: small ones, of which something is left behind the last pooling.
APPLICATIONS = {
    "ConvNeXtTiny": 64,
    "EfficientNetB0": 64,
    "EfficientNetV2B0": 64,
    "MobileNet": 64,
    "MobileNetV2": 64,
    "MobileNetV3Small": 64,
    "ResNet50V2": 64,
    "VGG16": 64,
    "Xception": 71,
}
IMAGES = 4


def _application(name: str) -> Callable[[], Example]:
    def make() -> Example:
        import numpy as np
        import tensorflow as tf

        side = APPLICATIONS[name]
        base = getattr(tf.keras.applications, name)(
            include_top=False, weights=None, input_shape=(side, side, 3), pooling="avg"
        )
        logits = tf.keras.layers.Dense(CLASSES, dtype="float32", name="logits")(base.output)
        # Several of them scale what they get: whole numbers up to 255 are what they expect.
        images = np.random.default_rng(0).integers(0, 256, [IMAGES, side, side, 3])
        model = tf.keras.Model(base.input, logits, name=name.lower())
        labels = np.arange(IMAGES, dtype="int32") % CLASSES
        return Example(model, images.astype("float32"), labels, has_own_loss=False)

    return make


def models(keras: str) -> dict[str, Callable[[], Example]]:
    """The models for a Keras, of the libraries that are installed."""
    package = third_party_models.PACKAGES[keras]
    installed = third_party_models.MODELS[keras] if importlib.util.find_spec(package) else {}
    return {**installed, **{name: _application(name) for name in APPLICATIONS}}


def measure(keras: str, names: list[str] | None = None) -> dict[str, dict]:
    """Compares and audits models in each dtype.

    Args:
        keras: str. The Keras of this process.
        names: of the models; all by default.
    """
    results: dict[str, dict] = {}
    makers = models(keras)
    for name in names or makers:
        for dtype in DTYPES:
            for tool in (_compare, _audit):
                start = time.perf_counter()
                try:
                    result = _with_model(makers[name], dtype, tool)
                except Exception as error:  # a model of others that fails must not hide the rest
                    traceback.print_exc()
                    result = {"error": f"{type(error).__name__}: {error}"}
                result["seconds"] = time.perf_counter() - start
                what = f"{tool.__name__[1:]}, {dtype}"
                results.setdefault(name, {})[what] = result
                print(f"{keras}, {name}, {what}: {result}", file=sys.stderr, flush=True)
    return results


def _with_model(make: Callable[[], Example], dtype: str, tool: Callable[[Example], dict]) -> dict:
    import tensorflow as tf

    import keras_mp

    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(0)
    with keras_mp.policy_scope(f"mixed_{dtype}"):
        example = make()
        optimizer = tf.keras.optimizers.Adam(1e-3)
        example.model.compile(optimizer, jit_compile=False, **example.compile_arguments)
        return tool(example)


def _compare(example: Example) -> dict:
    import tensorflow as tf

    from keras_mp.numerics import batches, compare, own_thread, run

    def loss_of_its_own(model: Any, x: Any, y: Any) -> Any:
        del y
        return tf.reduce_mean(model(x, training=True).loss)

    step = loss_of_its_own if example.labels is None else None
    batch = batches.as_fit_takes_it(example.model, (example.inputs, example.labels))
    if step is None:
        batches.build(example.model, batch)
    with own_thread.random_numbers():
        comparison, _ = compare.compare(*run.runners(example.model, batch, step=step))
    result = {"layers": len(comparison.layers), "findings": list(map(str, comparison.findings))}
    for name in ("own_output", "own_gradient", "output", "gradient"):
        distances = [getattr(layer, name) for layer in comparison.layers]
        units = [each.units for each in distances if each is not None]
        result[name] = max(filter(math.isfinite, units), default=0.0)
    return result


def _audit(example: Example) -> dict:
    from keras_mp.numerics import audit, batches

    batch = batches.as_fit_takes_it(example.model, example.batch)
    found = audit.audit(example.model, [batch])
    return {"findings": [f"{each.where}: {each.hazard}. {each.why}" for each in found]}


def run() -> dict:
    """Looks at all models on both Kerases, and prints a table, and what was found."""
    results, rows, lines = {}, [], []
    for keras in common.KERASES:
        results[keras] = common.in_own_process(
            "benchmarks.third_party_numerics", keras, keras=keras
        )
        for name, of_model in results[keras].items():
            rows.append([keras, name, *_columns(of_model)])
            lines += [
                f"{keras}, {name}, {what}: {text}"
                for what, result in of_model.items()
                for text in result.get("findings", [result.get("error")])
            ]
    heads = [f"{what}, {dtype}" for dtype in DTYPES for what in ("own share", "all", "findings")]
    common.print_table(
        "How far outputs and gradients are from float32's at most, in units of what rounding "
        "explains: a layer's own share, and with all before it. Findings of `compare` and `audit`",
        ["", "", "calls", *heads],
        rows,
    )
    print(*lines, sep="\n")
    return results


def _columns(of_model: dict) -> list[str]:
    columns = []
    for dtype in DTYPES:
        both = [of_model[f"{tool}, {dtype}"] for tool in ("compare", "audit")]
        for prefix in ("own_", ""):
            units = [both[0].get(f"{prefix}{side}") for side in ("output", "gradient")]
            columns.append(", ".join(f"{each:.1f}" for each in units if each is not None))
        counts = [str(len(each["findings"])) if "findings" in each else "error" for each in both]
        columns.append(", ".join(counts))
    calls = next((str(each["layers"]) for each in of_model.values() if "layers" in each), "")
    return [calls, *columns]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2:])))

"""Are defects found in models that were not written for it, and are they named? Clean models, too.

Each model of `tf.keras.applications` has one defect. A tool has found it if one of its findings is
about the layer, or the part of the step, that has the defect, and says what it is.
"""

import functools
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import common

AUDIT, COMPARE, STOPS = "audit", "compare", "FirstBadOperation"


class Finding(NamedTuple):
    """What a tool has said.

    Attributes:
        where: str. Of what.
        what: str. What it is.
    """

    where: str
    what: str


class Defect(NamedTuple):
    """A defect, and what should be said of it.

    Attributes:
        model: str. The name of the model.
        make: returns the model with the defect, and a batch for `fit`.
        where: str. The end of the path of the layer, or what else is to be named.
        said: dict of tools and of what they should say, or a part of it.
    """

    model: str
    make: Callable[[], tuple[Any, tuple[Any, ...]]]
    where: str
    said: dict[str, str]


def defects() -> dict[str, Defect]:
    """The defects, by what they are called."""
    import numpy as np
    import tensorflow as tf

    import keras_mp
    from benchmarks.acceptance import defective_models as models

    dense = tf.keras.layers.Dense
    found: dict[str, Defect] = {}

    def batch(name: str) -> tuple[Any, Any]:
        return models.images(name), models.classes()

    def in_a_layer(
        what: str, name: str, layer: str, cls: Any, policy: Any = "mixed_float16", **said: str
    ) -> None:
        def make() -> tuple[Any, Any]:
            return models.compiled(name, {layer: cls}, policy), batch(name)

        said = {STOPS if tool == "stops" else tool: words for tool, words in said.items()}
        found[what] = Defect(name, make, layer, said)

    def in_the_step(what: str, name: str, make: Callable[[], Any], where: str, **said: str) -> None:
        found[what] = Defect(name, make, where, said)

    in_a_layer(
        "an epsilon of 1e-8 in a variance",
        *("MobileNet", "conv1_relu", models.EpsilonInAVariance),
        audit="an epsilon that is 0",
        compare="a constant of 1e-08, which is 0",
        stops="Rsqrt",
    )
    in_a_layer(
        "an epsilon of 1e-12 in a norm",
        *("VGG16", "block4_pool", models.EpsilonInANorm),
        audit="an epsilon that is 0",
        compare="a constant of 1e-12, which is 0",
    )
    in_a_layer(
        "an epsilon of 1e-9 in a logarithm",
        *("MobileNetV2", "block_1_expand_relu", models.EpsilonInALogarithm),
        audit="an epsilon that is 0",
        compare="a constant of 1e-09, which is 0",
    )
    in_a_layer(
        "a maximum with 1e-10 before a division",
        *("DenseNet121", "conv2_block1_0_relu", models.EpsilonInAMaximum),
        audit="an epsilon that is 0",
    )
    in_a_layer(
        "cubes that overflow",
        *("VGG16", "block1_pool", models.MeanOfCubes),
        audit="an overflow in the forward pass",
        compare="Overflow: Mul",
        stops="Mul",
    )
    in_a_layer(
        "a sum over all positions that overflows",
        *("VGG16", "block1_pool", models.SumOfSquares),
        audit="an overflow in the forward pass",
        compare="Overflow: Sum",
    )
    in_a_layer(
        "a sum in bfloat16 that stops at 256",
        *("MobileNet", "conv_dw_1_relu", models.RunningSum, "mixed_bfloat16"),
        compare="",
    )
    in_a_layer(
        "exponentials that overflow",
        *("EfficientNetB0", "block2a_expand_activation", models.SoftmaxByHand),
        audit="an overflow in the forward pass",
        compare="Overflow: Exp",
    )
    in_a_layer(
        "a variance by squares",
        *("MobileNetV2", "block_2_expand_relu", models.VarianceBySquares),
        compare="Cancellation: Sub",
    )
    in_a_layer(
        "3000 added and taken away",
        *("MobileNet", "conv_pw_2_relu", models.ThereAndBack),
        compare="Cancellation: Sub",
    )
    in_a_layer(
        "a mask of -1e9 times zero",
        *("EfficientNetB0", "stem_activation", models.Mask),
        audit="a constant that is infinite",
    )
    in_a_layer(
        "a mask of -1e9 over whole rows",
        *("VGG16", "block3_pool", models.MaskedRows),
        audit="a constant that is infinite",
        compare="which is infinite in float16",
    )
    in_a_layer(
        "a constant of 1e5",
        *("MobileNet", "conv_pw_3_relu", models.LargeConstant),
        audit="a constant that is infinite",
        compare="which is infinite in float16",
    )
    in_a_layer(
        "squares of small numbers",
        *("MobileNetV2", "block_3_expand_relu", models.SmallSteps),
        compare="are 0 in float16",
    )
    in_a_layer(
        "positions counted in 16 bits",
        *("MobileNet", "conv_pw_4_relu", models.FarPositions),
        compare="Sin of numbers of about",
    )
    in_a_layer(
        "a gradient times 1e-9",
        *("MobileNet", "conv_pw_5_relu", models.GradientThatVanishes),
        compare="a constant of 1e-09, which is 0",
    )
    in_a_layer(
        "a gradient that is infinite in between",
        *("MobileNet", "conv_pw_6_relu", models.GradientThatOverflows),
        compare="Overflow",
    )
    in_a_layer(
        "a custom gradient without dtypes",
        *("ResNet50", "conv1_relu", models.GradientWithoutDtypes),
        audit="a custom gradient without dtypes",
    )
    in_a_layer(
        "a layer that was given float32",
        *("MobileNet", "conv_pw_3"),
        lambda name: tf.keras.layers.Conv2D(
            128, 1, padding="same", use_bias=False, dtype="float32", name=name
        ),
        audit="a layer of another policy",
    )
    in_a_layer(
        "a layer that casts to float32",
        *("MobileNetV2", "block_1_expand_relu", models.IgnoresItsPolicy),
        audit="a layer that ignores its policy",
    )
    in_a_layer(
        "a variable that nothing casts",
        *("MobileNet", "conv_pw_1_relu", models.BareVariable),
        audit="a variable that is not cast",
    )
    in_a_layer(
        "a root of zero, whose gradient is infinite",
        *("MobileNet", "conv_pw_2_relu", models.RootOfZero, "mixed_bfloat16"),
        stops="SqrtGrad",
    )
    in_a_layer(
        "zero by zero",
        *("VGG16", "block2_pool", models.DividesByItsMean, "mixed_bfloat16"),
        stops="RealDiv",
    )

    def nan_among_weights() -> Any:
        model = models.compiled("MobileNet", policy="mixed_bfloat16")
        layer = model.get_layer("conv_pw_2")
        layer.set_weights([value * np.nan for value in layer.get_weights()])
        return model, batch("MobileNet")

    in_the_step(
        *("weights that are NaN", "MobileNet", nan_among_weights, "conv_pw_2"),
        **{STOPS: "ReadVariableOp"},
    )

    def returning_16_bits(name: str) -> Any:
        return keras_mp.Policy(name, model_outputs=None)

    def years() -> Any:
        policy = returning_16_bits("mixed_float16")
        model = models.make("MobileNetV2", policy=policy, head=lambda: dense(1, name="head"))
        with keras_mp.policy_scope(policy):
            model.compile("sgd", "mse", jit_compile=False)
        labels = np.linspace(20_000, 20_010, models.ROWS, dtype="float32")[:, None]
        return model, (models.images("MobileNetV2"), labels)

    in_the_step(
        *("outputs in float16, of years", "MobileNetV2", years, "the model's outputs"),
        audit="outputs in 16 bits",
    )

    def probabilities() -> Any:
        policy = returning_16_bits("mixed_float16")
        head = functools.partial(dense, models.CLASSES, "softmax", name="head")
        model = models.make("MobileNet", policy=policy, head=head)
        kernel, bias = model.get_layer("head").get_weights()
        model.get_layer("head").set_weights([kernel * 40, bias])
        with keras_mp.policy_scope(policy):
            model.compile("sgd", models.log_of_probabilities, jit_compile=False)
        return model, batch("MobileNet")

    in_the_step(
        *("a softmax in float16 before a logarithm", "MobileNet", probabilities, "head"),
        audit="a softmax in 16 bits",
    )

    def own_step(name: str, cls: Any, policy: Any = "mixed_float16", **kwargs: Any) -> Any:
        model = models.make(name, policy=policy, cls=cls, **kwargs)
        with keras_mp.policy_scope(policy):
            model.compile("sgd", jit_compile=False)
        return model, batch(name)

    def loss_in_bfloat16() -> Any:
        model, (x, y) = own_step(
            "MobileNet",
            models.LossIn16Bits,
            returning_16_bits("mixed_bfloat16"),
            head=lambda: dense(models.CLASSES, name="head"),
        )
        kernel, _ = model.get_layer("head").get_weights()
        # All are classified well: a loss of log(1 + 9 exp(-8)), of which log sees 1.
        model.get_layer("head").set_weights([kernel * 0, np.eye(models.CLASSES)[3] * 8])
        return model, (x, y * 0 + 3)

    in_the_step(
        *("a loss in bfloat16", "MobileNet", loss_in_bfloat16, "outside of layers"),
        audit="a loss in 16 bits",
    )

    def times_1024() -> Any:
        model = models.make("ResNet50")
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with keras_mp.policy_scope("mixed_float16"):
            model.compile("sgd", loss, loss_weights=1024.0, jit_compile=False)
        return model, batch("ResNet50")

    in_the_step(
        *("a loss times 1024", "ResNet50", times_1024, "outside of layers"),
        audit="a loss multiplied by a number",
    )
    in_the_step(
        *("clipping before unscaling", "EfficientNetB0"),
        lambda: own_step("EfficientNetB0", models.ClipsScaled),
        "outside of layers",
        audit="clipping before unscaling",
    )

    def all_in_float16() -> Any:
        model = models.compiled("MobileNet", policy="float16")
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(epsilon=1e-8), loss, jit_compile=False)
        return model, batch("MobileNet")

    in_the_step(
        *("variables in float16, and Adam's epsilon", "MobileNet", all_in_float16),
        "the optimizer (Adam)",
        audit="an epsilon that is 0",
    )
    in_the_step(
        *("a fixed scale that is too large", "MobileNetV2"),
        lambda: (
            models.compiled(
                "MobileNetV2", policy=keras_mp.Policy("mixed_float16", loss_scale=2.0**40)
            ),
            batch("MobileNetV2"),
        ),
        "the optimizer (LossScaleOptimizer)",
        audit="a step that cannot be skipped",
    )

    def without_scaling() -> Any:
        policy = keras_mp.Policy("mixed_float16", loss_scale=None)
        x, y = batch("VGG16")
        return models.compiled("VGG16", policy=policy), (x / 255, y)

    in_the_step(
        *("float16 without loss scaling", "VGG16", without_scaling, "the training step"),
        audit="float16 without loss scaling",
    )
    return found


def look(tool: str, model: Any, batch: tuple[Any, Any]) -> list[Finding]:
    """Asks one of the tools."""
    from keras_mp import numerics
    from keras_mp.numerics import audit, batches, compare, own_thread, run

    [made] = batches.listed(model, batch)
    if tool == AUDIT:
        return [Finding(f.where, f.hazard) for f in audit.audit(model, [made])]
    if tool == COMPARE:
        with own_thread.random_numbers():
            compared, _ = compare.compare(*run.runners(model, made))
        return [Finding(f.path, f.why) for f in compared.findings]
    try:
        with numerics.watch(model):
            model.fit(*batch, batch_size=len(batch[0]), verbose=0)
    except numerics.NotFiniteError as error:
        return [Finding(error.operation.layer, error.operation.operation)]
    return []


def measure(names: list[str] | None = None) -> dict[str, dict]:
    """Plants defects; says which tools have found them, and what they said."""
    results: dict[str, dict] = {}
    for name, defect in defects().items():
        if names and name not in names:
            continue
        results[name] = {"model": defect.model, "where": defect.where, "tools": {}}
        for tool, words in defect.said.items():
            start = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    said = look(tool, *defect.make())
            except Exception as error:  # one that fails must not hide the rest
                traceback.print_exc()
                said = [Finding("", f"{type(error).__name__}: {error}")]
            named = [s for s in said if s.where.endswith(defect.where) and words in s.what]
            others = [s for s in said if not s.where.endswith(defect.where)]
            results[name]["tools"][tool] = {
                "named": [*named[0]] if named else None,
                "others": [[*other] for other in others],
            }
            seconds = time.perf_counter() - start
            print(f"{name}, {tool}, {seconds:.0f} s: {said}", file=sys.stderr, flush=True)
    return results


def measure_clean(names: list[str] | None = None) -> dict[str, dict]:
    """The same models without a defect: says what audit and compare find in them."""
    from benchmarks.acceptance import defective_models as models

    results: dict[str, dict] = {}
    for name in names or models.MODELS:
        batch = models.images(name), models.classes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = {tool: look(tool, models.compiled(name), batch) for tool in (AUDIT, COMPARE)}
        results[name] = {tool: [[*each] for each in found] for tool, found in said.items()}
        print(f"{name}: {said}", file=sys.stderr, flush=True)
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

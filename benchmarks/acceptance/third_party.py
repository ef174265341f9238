"""Do models that others wrote train as in float32? Saved, loaded and converted, too.

Models of KerasHub on Keras 3 and of Hugging Face on tf_keras, from tiny configs with random
weights. Each sees the same batch in each step, so that losses can be compared step by step.
`third_party_programs` has programs of more libraries, and says how to install those.
"""

import importlib.util
import itertools
import json
import sys
import traceback
import warnings

import numpy as np
import tensorflow as tf

import keras_mp
from benchmarks import common
from benchmarks.acceptance import one_line, third_party_models, third_party_programs
from keras_mp import keras_api

STEPS, MORE_STEPS, LEARNING_RATE = 12, 3, 3e-3
UNIT_ROUNDOFF = {"float32": 2.0**-24, **one_line.UNIT_ROUNDOFF}
# A model of this size rounds some dozens of times from its input to its loss. In the worst case
# the errors add up, so as many units are the tolerance, in terms of what there is to lose: how far
# the loss falls in float32. A model that does not learn is 100 % away.
ROUNDINGS = 32
# What was loaded computes the same as what was saved, but for the order of sums.
RESUMED = 1e-3


def measure(keras: str, names: list[str] | None = None) -> dict[str, dict]:
    """Trains models in each dtype; says how far the losses are from those in float32.

    Args:
        keras: str. The Keras of this process.
        names: of the models; all by default.
    """
    results = {}
    for name in names or third_party_models.MODELS[keras]:
        results[name] = of_model = {}
        reference = None
        for variant, (who, policy) in common.POLICIES.items():
            print(f"{name}, {variant} ...", file=sys.stderr, flush=True)
            try:
                reference, of_model[variant] = _train(
                    third_party_models.MODELS[keras][name], who, policy, reference
                )
            except Exception as error:  # a model of others that fails must not hide the rest
                traceback.print_exc()
                of_model[variant] = {"error": f"{type(error).__name__}: {error}"}
            print(of_model[variant], file=sys.stderr, flush=True)
    return results


def _train(make, who, policy, reference):
    """Trains a model under a policy; a reference holds the first weights and the float32 losses."""

    def compile_model(model):
        model.compile(
            tf.keras.optimizers.Adam(LEARNING_RATE), jit_compile=False, **example.compile_arguments
        )

    tf.keras.utils.set_random_seed(0)
    with common.policy(who, policy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        example = make()
        model = example.model
        weights, exact = reference or (model.get_weights(), None)
        model.set_weights(weights)
        compile_model(model)
        losses, skipped = _fit(model, example, STEPS)
        applied = [loss for loss, skip in zip(losses, skipped) if not skip]
        if not applied:
            raise ArithmeticError(f"All {STEPS} steps were skipped; the first loss is {losses[0]}.")
        exact = exact or applied
        result = {
            "losses": losses,
            "skipped": sum(skipped),
            "deviation": _most(applied, exact) / (exact[0] - min(exact)),
        }
        if who == "keras_mp":
            loaded = third_party_models.saved_and_loaded(model, compile_model)
    if who == "keras_mp":
        went_on, _ = _fit(model, example, MORE_STEPS)
        resumed, _ = _fit(loaded, example, MORE_STEPS)
        result["resumed"] = _most(went_on, resumed) / (exact[0] - min(exact))
        converted = keras_mp.convert(model, "float32")
        result["converted"] = _distance(example.inputs, model, converted)
    result["warnings"] = sorted({str(warning.message).partition("\n")[0] for warning in caught})
    return (weights, exact), result


def _most(losses, others):
    return max(abs(a - b) for a, b in zip(losses, others))


def _distance(inputs, model, converted):
    """How far what a float32 model gives is from what a mixed one does, in its largest number."""
    dtypes = {layer.compute_dtype for layer in keras_api.flatten_layers(converted)}
    if dtypes & {"float16", "bfloat16"}:
        raise AssertionError(f"Layers of the converted model compute in {dtypes}.")
    outputs = [each(inputs) for each in (model, converted)]
    outputs = [getattr(output, "logits", output) for output in outputs]
    mixed, exact = (np.asarray(output, "float32") for output in outputs)
    return float(np.max(np.abs(mixed - exact)) / np.max(np.abs(exact)))


def _fit(model, example, steps):
    """The losses of each step, and which of them were skipped."""
    third_party_models.turn_dropout_off(model)
    optimizer, counts = model.optimizer, [common.steps_skipped(model.optimizer)]

    class Skipped(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            counts.append(common.steps_skipped(optimizer))

    history = model.fit(
        tf.data.Dataset.from_tensors(example.batch),
        epochs=steps,
        shuffle=False,
        verbose=0,
        callbacks=[Skipped()],
    )
    losses = [float(loss) for loss in history.history["loss"]]
    return losses, [after > before for before, after in itertools.pairwise(counts)]


def verdict(of_model: dict[str, dict], variant: str) -> str:
    """Says "ok", or what is wrong with a variant of a model."""
    result = of_model[variant]
    if "error" in result:
        return result["error"]
    tolerance = ROUNDINGS * UNIT_ROUNDOFF[variant.rpartition("_")[2]]
    tolerances = {"deviation": tolerance, "resumed": RESUMED, "converted": tolerance}
    wrong = [what for what in tolerances if not result.get(what, 0) <= tolerances[what]]
    return f"too far: {', '.join(wrong)}" if wrong else "ok"


def run() -> dict:
    """Trains all models of the libraries that are installed, runs programs, and prints tables."""
    results: dict[str, dict] = {}
    rows = []
    for keras, package in third_party_models.PACKAGES.items():
        if not importlib.util.find_spec(package):
            print(f"\nModels of {package} were not trained: it is not installed.")
            continue
        results[keras] = common.in_own_process(
            "benchmarks.acceptance.third_party", keras, keras=keras
        )
        for name, of_model in results[keras].items():
            rows += [
                [name, variant, *_columns(of_model[variant]), verdict(of_model, variant)]
                for variant in of_model
            ]
    common.print_table(
        f"{STEPS} steps of Adam. How far losses are from float32's at most, in terms of how far "
        f"those fall; {MORE_STEPS} more steps of what was saved and loaded, against the model that "
        "went on; outputs of `convert(model, 'float32')`, in terms of the largest",
        ["", "", "last loss", "skipped", "from float32", "loaded", "converted", "verdict"],
        rows,
    )
    return {**results, "one line": one_line.run(), "programs": third_party_programs.run()}


def _columns(result):
    if "error" in result:
        return [""] * 5
    return [
        f"{result['losses'][-1]:.4f}",
        str(result["skipped"]),
        *(f"{result[k]:.2%}" if k in result else "" for k in ("deviation", "resumed", "converted")),
    ]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2:])))

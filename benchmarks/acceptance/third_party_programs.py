"""Programs of other people's libraries, each in float32 and in 16 bits: their losses side by side.

Each is small and trains for 12 steps on the same data, in a process of its own. A library that is
not installed is named.

`pip install ".[third-party]"` brings Sonnet, KerasHub, keras-tuner, keras-rs, BayesFlow,
TensorFlow Probability and the Model Optimization Toolkit. Three more pin old versions of
TensorFlow or of what they need, and are installed without their requirements:

    pip install --no-deps tf-agents gin-config pygame "gym==0.23.0" gym-notices cloudpickle
    pip install --no-deps tensorflow-privacy dp-accounting
    pip install --no-deps tf-models-official tensorflow-datasets tensorflow-hub etils \
        importlib_resources opencv-python-headless pandas pytz pycocotools sacrebleu \
        sentencepiece seqeval tabulate

The last line brings Orbit as well.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import keras_mp
from benchmarks import common

STEPS, LEARNING_RATE = 12, 1e-2
# With the usual 2**15 the first steps of such small problems are skipped, one more in some
# libraries than in others, and losses could not be compared step by step.
INITIAL_SCALE = 2.0**10


class Variant(NamedTuple):
    """How a program computes in 16 bits.

    Attributes:
        who: "Keras", "keras_mp" or "Sonnet"; None in float32.
        dtype: of the computations.
        is_region: whether `keras_mp.autocast` is around each step, in place of a policy.
    """

    who: str | None
    dtype: str
    is_region: bool = False

    @property
    def policy(self) -> tuple[str | None, str]:
        """Whose global policy is set, and which."""
        mixed = self.who in ("Keras", "keras_mp") and not self.is_region
        return (self.who, f"mixed_{self.dtype}") if mixed else (None, "float32")

    def region(self) -> contextlib.AbstractContextManager:
        """What goes around a forward pass and its gradients."""
        return keras_mp.autocast(self.dtype) if self.is_region else contextlib.nullcontext()

    def optimizer(self, optimizer: Any) -> Any:
        """The optimizer, wrapped where the gradients of float16 need it."""
        if self.dtype != "float16":
            return optimizer
        if self.who == "Keras":
            wrapper = tf.keras.mixed_precision.LossScaleOptimizer
            return wrapper(optimizer, initial_scale=INITIAL_SCALE)
        return keras_mp.LossScaleOptimizer(optimizer, keras_mp.DynamicLossScale(INITIAL_SCALE))


VARIANTS = {
    "float32": Variant(None, "float32"),
    "Keras mixed_float16": Variant("Keras", "float16"),
    "keras_mp mixed_float16": Variant("keras_mp", "float16"),
    "keras_mp mixed_bfloat16": Variant("keras_mp", "bfloat16"),
    "keras_mp autocast bfloat16": Variant("keras_mp", "bfloat16", is_region=True),
}

SONNET_VARIANTS = {
    "float32": Variant(None, "float32"),
    "Sonnet float16": Variant("Sonnet", "float16"),
    "keras_mp autocast float16": Variant("keras_mp", "float16", is_region=True),
    "keras_mp autocast bfloat16": Variant("keras_mp", "bfloat16", is_region=True),
}


# The losses of the steps, and what made them or counts those that were skipped, if anything does.
Trained = tuple[list[float], Any]


def _data():
    x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    return x, x.sum(1, keepdims=True)


def _adam():
    return tf.keras.optimizers.Adam(LEARNING_RATE)


def _dense(units=8):
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [tf.keras.Input([8]), layers.Dense(units), layers.Dense(1, dtype="float32")]
    )


def _steps(variant, variables, loss, optimizer):
    """Trains in a loop of one's own, inside a region if there is one."""
    optimizer, losses = variant.optimizer(optimizer), []
    for _ in range(STEPS):
        with variant.region():
            with tf.GradientTape() as tape:
                value = tf.cast(loss(), "float32")
                scaled, unscale = common.scaled(optimizer, value)
            gradients = unscale(tape.gradient(scaled, variables()))
        optimizer.apply_gradients(zip(gradients, variables()))
        losses.append(float(value))
    return losses, optimizer


def _regression(variant, model, data=None, loss=None, own_loop=False):
    """`fit` under a policy; a loop of one's own with a region, or in any case."""
    x, y = data or _data()
    loss = loss or tf.keras.losses.MeanSquaredError()
    if not (own_loop or variant.is_region):
        model.compile(variant.optimizer(_adam()), loss, jit_compile=False)
        history = model.fit(x, y, epochs=STEPS, shuffle=False, verbose=0)
        return history.history["loss"], model.optimizer
    return _steps(
        variant,
        lambda: model.trainable_variables,
        lambda: (
            tf.reduce_mean(loss(y, tf.cast(model(x, training=True), "float32")))
            + tf.reduce_sum([tf.cast(each, "float32") for each in model.losses])
        ),
        _adam(),
    )


def _sonnet(variant):
    """A module casts nothing by itself: a region does, or Sonnet's own modes."""
    import sonnet as snt

    x, y = (tf.constant(each) for each in _data())
    net = snt.nets.MLP([16, 1], w_init=snt.initializers.Constant(0.05))
    scaler = keras_mp.GradScaler(keras_mp.DynamicLossScale(INITIAL_SCALE))
    optimizer, losses = snt.optimizers.SGD(0.05), []
    linear = snt.Linear.__call__
    if variant.who == "Sonnet":
        snt.Linear.__call__ = snt.mixed_precision.modes([tf.float32, tf.float16])(linear)
    net(x)  # makes the weights; Sonnet's modes do not cast the first call of a module
    try:
        with snt.mixed_precision.scope(tf.float16 if variant.who == "Sonnet" else None):
            for _ in range(STEPS):
                with tf.GradientTape() as tape:
                    with variant.region():
                        prediction = net(x)
                    loss = tf.reduce_mean((tf.cast(prediction, "float32") - y) ** 2)
                    scaled = scaler.scale(loss)
                gradients = tape.gradient(scaled, net.trainable_variables)
                scaler.step(optimizer, zip(gradients, net.trainable_variables))
                scaler.update()
                losses.append(float(loss))
    finally:
        snt.Linear.__call__ = linear
    return losses, scaler


def _orbit(variant):
    import orbit

    x, y = _data()
    model, optimizer = _dense(), variant.optimizer(_adam())
    step = tf.Variable(0, dtype="int64")
    losses = []

    class Trainer(orbit.StandardTrainer):
        def __init__(self):
            super().__init__(tf.data.Dataset.from_tensors((x, y)).repeat())
            self.loss = tf.keras.metrics.Mean()

        def train_loop_begin(self):
            self.loss.reset_state()

        def train_step(self, iterator):
            inputs, labels = next(iterator)
            variables = model.trainable_variables
            with keras_mp.training_step(model):
                with variant.region(), tf.GradientTape() as tape:
                    outputs = tf.cast(model(inputs, training=True), "float32")
                    loss = tf.reduce_mean((outputs - labels) ** 2)
                    scaled, unscale = common.scaled(optimizer, loss)
                gradients = unscale(tape.gradient(scaled, variables))
                optimizer.apply_gradients(zip(gradients, variables))
            self.loss.update_state(loss)
            step.assign_add(1)

        def train_loop_end(self):
            losses.append(float(self.loss.result()))

    optimizer.build(model.trainable_variables)
    controller = orbit.Controller(global_step=step, trainer=Trainer(), steps_per_loop=1)
    with contextlib.redirect_stdout(sys.stderr):
        controller.train(STEPS)
    return losses, optimizer


def _model_garden(variant):
    """Its `Task.train_step`, which scales with `LossScaleOptimizer`, run by its own trainer."""
    from official.core import base_task, base_trainer, config_definitions

    x, y = _data()
    model = _dense()

    class Task(base_task.Task):
        def build_model(self):
            return model

        def build_inputs(self, params, input_context=None):
            return tf.data.Dataset.from_tensors((x, y)).repeat()

        def build_losses(self, labels, model_outputs, aux_losses=None):
            return tf.reduce_mean((tf.cast(model_outputs, "float32") - labels) ** 2)

        def build_metrics(self, training=True):
            return []

        def train_step(self, *arguments, **options):
            with variant.region():
                return super().train_step(*arguments, **options)

    config = config_definitions.ExperimentConfig(
        task=config_definitions.TaskConfig(), trainer=config_definitions.TrainerConfig()
    )
    optimizer = variant.optimizer(_adam())
    trainer = base_trainer.Trainer(
        config, Task(config.task), model, optimizer, train=True, evaluate=False
    )
    losses = [float(trainer.train(tf.constant(1))["training_loss"]) for _ in range(STEPS)]
    return losses, optimizer


def _lora(variant):
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=64,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=12,
        dropout=0.0,
    )
    backbone.enable_lora(2)
    model = keras_hub.models.GPT2CausalLM(backbone)
    ids = np.random.default_rng(0).integers(1, 64, (8, 12))
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    frozen = [np.array(weight) for weight in backbone.non_trainable_weights]
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained = _regression(variant, model, (inputs, ids), loss)
    for before, weight in zip(frozen, backbone.non_trainable_weights):
        np.testing.assert_array_equal(before, np.array(weight))
    return trained


def _keras_tuner(variant):
    """Trains the best of the models that a search has built."""
    import keras_tuner

    def build(parameters):
        common.set_policy(*variant.policy)  # again: the tuner clears the session
        model = _dense(parameters.Fixed("units", 8))
        model.compile(variant.optimizer(_adam()), "mse", jit_compile=False)
        return model

    x, y = _data()
    with tempfile.TemporaryDirectory() as folder:
        tuner = keras_tuner.RandomSearch(build, objective="loss", max_trials=2, directory=folder)
        tuner.search(x, y, epochs=1, verbose=0)
        best = tuner.hypermodel.build(tuner.get_best_hyperparameters()[0])
    best.set_weights(_weights(best))
    return _regression(variant, best)


def _weights(model):
    """The same ones each time, however many models a search has built before."""
    generator = np.random.default_rng(1)
    return [generator.normal(scale=0.3, size=weight.shape) for weight in model.get_weights()]


def _keras_rs(variant):
    import keras_rs

    inputs, cross = tf.keras.Input([8]), keras_rs.layers.FeatureCross()
    crossed = cross(inputs, cross(inputs, inputs))
    outputs = tf.keras.layers.Dense(1, dtype="float32")(crossed)
    return _regression(variant, tf.keras.Model(inputs, outputs))


def _bayesflow(variant):
    import bayesflow

    network = bayesflow.networks.CouplingFlow(depth=2)
    z = tf.random.stateless_normal([32, 2], [1, 2])
    network.build(z.shape)
    return _steps(
        variant,
        lambda: network.trainable_variables,
        lambda: network.compute_metrics(z)["loss"],
        _adam(),
    )


def _flipout(variant):
    import tensorflow_probability as tfp

    layers = [tfp.layers.DenseFlipout(8, seed=0), tf.keras.layers.Dense(1, dtype="float32")]
    model = tf.keras.Sequential([tf.keras.Input([8]), *layers])
    return _regression(variant, model, own_loop=True)  # the same random numbers each time


def _quantized(variant):
    import tensorflow_model_optimization as tfmot

    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.InputLayer([8]), layers.Dense(8), layers.Dense(1)])
    return _regression(variant, tfmot.quantization.keras.quantize_model(model))


def _dqn(variant):
    from tf_agents.agents.dqn import dqn_agent
    from tf_agents.networks import sequential
    from tf_agents.specs import tensor_spec
    from tf_agents.trajectories import time_step, trajectory

    layers = tf.keras.layers
    observation_spec = tensor_spec.TensorSpec([8], tf.float32)
    agent = dqn_agent.DqnAgent(
        time_step.time_step_spec(observation_spec),
        tensor_spec.BoundedTensorSpec([], tf.int32, 0, 1),
        sequential.Sequential([layers.Dense(8), layers.Dense(2, dtype="float32")]),
        _adam(),
    )
    agent.initialize()
    x, _ = _data()
    shape = [len(x), 2]
    experience = trajectory.Trajectory(
        step_type=tf.ones(shape, tf.int32),
        observation=tf.constant(np.stack([x, x], 1)),
        action=tf.zeros(shape, tf.int32),
        policy_info=(),
        next_step_type=tf.ones(shape, tf.int32),
        reward=tf.ones(shape),
        discount=tf.ones(shape),
    )
    losses = []
    for _ in range(STEPS):
        with variant.region():
            losses.append(float(agent.train(experience).loss))
    return losses, None


def _privacy(variant):
    from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras

    x, y = _data()
    model = _dense()
    optimizer = dp_optimizer_keras.DPKerasSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=0.0, num_microbatches=32, learning_rate=0.25
    )
    model.compile(
        variant.optimizer(optimizer),
        tf.keras.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.NONE),
    )
    losses = []
    for _ in range(STEPS):
        losses.append(float(tf.reduce_mean((model(x) - y) ** 2)))
        with variant.region():
            model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
    return losses, model.optimizer


class Program(NamedTuple):
    """A program of a library.

    Attributes:
        package: what is looked for.
        train: trains in a variant.
        kerases: those that the library supports.
        variants: dict by title.
    """

    package: str
    train: Callable[[Variant], Trained]
    kerases: tuple[str, ...] = ("Keras 3", "tf_keras")
    variants: dict[str, Variant] = VARIANTS


PROGRAMS = {
    "Sonnet": Program("sonnet", _sonnet, variants=SONNET_VARIANTS),
    "Orbit": Program("orbit", _orbit),
    "Model Garden": Program("official", _model_garden, ("tf_keras",)),
    "KerasHub with LoRA": Program("keras_hub", _lora, ("Keras 3",)),
    "keras-tuner": Program("keras_tuner", _keras_tuner, ("Keras 3",)),
    "keras-rs FeatureCross": Program("keras_rs", _keras_rs, ("Keras 3",)),
    "BayesFlow CouplingFlow": Program("bayesflow", _bayesflow, ("Keras 3",)),
    "TF Probability DenseFlipout": Program("tensorflow_probability", _flipout, ("tf_keras",)),
    "tfmot quantize_model": Program("tensorflow_model_optimization", _quantized, ("tf_keras",)),
    "TF-Agents DQN": Program("tf_agents", _dqn, ("tf_keras",)),
    "TF Privacy DPKerasSGD": Program("tensorflow_privacy", _privacy, ("tf_keras",)),
}


def measure(name: str) -> dict[str, dict]:
    """Runs a program in each variant.

    Args:
        name: str, one of `PROGRAMS`.

    Returns:
        dict by variant, of `losses`, `skipped` and `deviation`, or of the `error`.
    """
    program = PROGRAMS[name]
    # Before seeds are set, since some draw numbers then. Without its switch, TensorFlow Privacy
    # imports the estimators that TensorFlow has no longer.
    sys.skip_tf_privacy_import = True
    importlib.import_module(program.package)
    results: dict[str, dict] = {}
    exact = None
    for title, variant in program.variants.items():
        tf.keras.utils.set_random_seed(0)
        try:
            with warnings.catch_warnings(), common.policy(*variant.policy):
                warnings.simplefilter("ignore")
                losses, optimizer = program.train(variant)
        except Exception as error:  # what others wrote and fails must not hide the rest
            traceback.print_exc()
            results[title] = {"error": f"{type(error).__name__}: {_reason(error)}"}
            continue
        losses = [*map(float, losses)]
        exact = exact or losses
        furthest = max(abs(a - b) for a, b in zip(losses, exact))
        results[title] = {
            "losses": losses,
            "skipped": common.steps_skipped(optimizer),
            "deviation": furthest / (exact[0] - min(exact)),
        }
    return results


def _reason(error):
    """The line of a message that says why: Keras puts the name of the layer above it."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line.partition(": ")[2] for line in lines if re.match(r"\w+Error: ", line)]
    reasons = [line for line in lines if not line.startswith("Exception encountered")]
    return (raised or reasons or lines or [""])[0]


def run() -> dict:
    """Runs all programs on each Keras that they support, and prints a table."""
    results: dict[str, dict[str, dict]] = {}
    rows = []
    for keras in common.KERASES:
        results[keras] = {}
        for name, program in PROGRAMS.items():
            if keras not in program.kerases:
                continue
            if not importlib.util.find_spec(program.package):
                print(f"\n{name} was not run: {program.package} is not installed.")
                continue
            found = common.in_own_process(
                "benchmarks.acceptance.third_party_programs", name, keras=keras
            )
            results[keras][name] = found
            rows += [[keras, name, variant, *_columns(found[variant])] for variant in found]
    common.print_table(
        f"Losses of {STEPS} steps of other people's programs, and how far they are from float32's "
        "at most, in terms of how far those fall",
        ["", "", "", "first loss", "last loss", "skipped", "from float32"],
        rows,
    )
    return results


def _columns(result):
    if "error" in result:
        return [result["error"], "", "", ""]
    losses = result["losses"]
    figures = [f"{losses[0]:.5g}", f"{losses[-1]:.5g}", str(result["skipped"])]
    return [*figures, f"{result['deviation']:.2%}"]


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # BayesFlow asks for it
    print(json.dumps(measure(sys.argv[1])))

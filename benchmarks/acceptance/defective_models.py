"""Models of `tf.keras.applications` with a defect planted in a layer, or in the training step.

The models were not written for it: one layer of each is replaced, or the model is compiled, fed or
stepped in a wrong way. Weights are random, images are small, and nothing is downloaded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import keras_mp

CLASSES, ROWS, SIDE = 10, 8, 32

L = tf.keras.layers
apps = tf.keras.applications


class Model(NamedTuple):
    """How to make a model.

    Attributes:
        make: called with arguments of the function of `tf.keras.applications`.
        arguments: of the smallest one that is worth a look.
        largest: float. Of the pixels: what does not scale its inputs gets what a file has.
    """

    make: Callable[..., Any]
    arguments: dict[str, Any]
    largest: float = 1.0


_POOLED = {"include_top": False, "pooling": "avg"}
MODELS = {
    "MobileNet": Model(apps.MobileNet, {"alpha": 0.25, **_POOLED}),
    "MobileNetV2": Model(apps.MobileNetV2, {"alpha": 0.35, **_POOLED}),
    "MobileNetV3Small": Model(apps.MobileNetV3Small, _POOLED, largest=255.0),
    "VGG16": Model(apps.VGG16, _POOLED, largest=255.0),
    "ResNet50": Model(apps.ResNet50, _POOLED, largest=255.0),
    "ResNet50V2": Model(apps.ResNet50V2, _POOLED),
    "EfficientNetB0": Model(apps.EfficientNetB0, _POOLED, largest=255.0),
    "DenseNet121": Model(apps.DenseNet121, _POOLED),
}


def images(name: str) -> np.ndarray:
    """A batch of noise, of which two images are blank."""
    batch = np.random.default_rng(0).uniform(0, MODELS[name].largest, [ROWS, SIDE, SIDE, 3])
    batch[:2] = 0
    return batch.astype("float32")


def classes() -> np.ndarray:
    """A class for each image."""
    return (np.arange(ROWS) % CLASSES).astype("int32")


def make(
    name: str,
    replaced: dict[str, Callable[..., Any]] | None = None,
    policy: Any = "mixed_float16",
    head: Callable[[], Any] = lambda: L.Dense(CLASSES, dtype="float32", name="head"),
    cls: Any = tf.keras.Model,
) -> Any:
    """Makes a model with a head of its own.

    Args:
        name: of `MODELS`.
        replaced: dict of names of layers, and of functions that make what takes their place.
        policy: of `keras_mp`.
        head: makes the last layer.
        cls: class of the model.
    """
    replaced = replaced or {}
    tf.keras.utils.set_random_seed(0)
    with keras_mp.policy_scope(policy):
        shape = (SIDE, SIDE, 3)
        base = MODELS[name].make(weights=None, input_shape=shape, **MODELS[name].arguments)

        def clone(layer: Any) -> Any:
            if layer.name in replaced:
                return replaced[layer.name](name=layer.name)
            return type(layer).from_config(layer.get_config())

        if replaced:
            assert replaced.keys() <= {layer.name for layer in base.layers}, name
            base = tf.keras.models.clone_model(base, clone_function=clone)
        return cls(base.input, head()(base.output), name=name.lower())


def compiled(name: str, replaced: Any = None, policy: Any = "mixed_float16", **kwargs: Any) -> Any:
    """The same, compiled as a classifier."""
    model = make(name, replaced, policy, **kwargs)
    with keras_mp.policy_scope(policy):
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
    return model


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


DEFECTS: dict[str, Defect] = {}
_EPSILON, _INFINITE = "an epsilon that is 0", "a constant that is infinite"
_OVERFLOW = "an overflow in the forward pass"


def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and their classes."""
    return images(name), classes()


def in_the_step(what: str, name: str, where: str, **said: str) -> Callable[[Any], Any]:
    """Notes a defect that a function plants: see `Defect`."""
    return lambda make: DEFECTS.setdefault(what, Defect(name, make, where, said)).make


class Planted(L.Layer):
    """A layer of Keras's own policy: under one of keras_mp many of the defects are none."""

    def __init__(self, dtype=None, **kwargs):
        dtype = dtype or tf.keras.mixed_precision.Policy(keras_mp.global_policy().name)
        super().__init__(dtype=dtype, **kwargs)

    def get_config(self):
        # Keras wants a method of the class that has a constructor.
        return super().get_config()


def in_a_layer(
    what: str, name: str, layer: str, policy: str = "mixed_float16", **said: str
) -> Callable[[Any], Any]:
    """Notes a defect of what a layer computes: of a function, or of a class of layers."""

    def note(planted: Any) -> Any:
        cls = planted
        if not isinstance(planted, type):
            cls = type("Computes", (Planted,), {"call": lambda self, x: planted(x)})
        in_the_step(what, name, layer, **said)(
            lambda: (compiled(name, {layer: cls}, policy), batch(name))
        )
        return planted

    return note


# Layers with a defect. Each does what the activation or pooling that it replaces does, and more.


def _number(like: Any, value: float) -> Any:
    """Makes a number in the dtype of a tensor by way of NumPy: it may be infinite there."""
    with np.errstate(over="ignore"):
        return like.dtype.as_numpy_dtype(value)


@in_a_layer(
    *("an epsilon of 1e-8 in a variance", "MobileNet", "conv1_relu"),
    audit=_EPSILON,
    compare="a constant of 1e-08: 0",
    watch="Rsqrt",
)
def _epsilon_in_a_variance(x):
    """An instance normalization: a blank image has no variance."""
    mean, variance = tf.nn.moments(x, [1, 2], keepdims=True)
    return tf.nn.relu((x - mean) * tf.math.rsqrt(variance + tf.constant(1e-8, x.dtype)))


@in_a_layer(
    *("an epsilon of 1e-12 in a norm", "VGG16", "block4_pool"),
    audit=_EPSILON,
    compare="a constant of 1e-12: 0",
)
def _epsilon_in_a_norm(x):
    """Vectors of length 1; those of a blank image are zero."""
    x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    squares = tf.reduce_sum(tf.square(x), -1, keepdims=True)
    return x * tf.math.rsqrt(squares + tf.constant(1e-12, x.dtype))


@in_a_layer(
    *("an epsilon of 1e-9 in a logarithm", "MobileNetV2", "block_1_expand_relu"),
    audit=_EPSILON,
    compare="a constant of 1e-09: 0",
)
def _epsilon_in_a_logarithm(x):
    """A logarithmic compression."""
    return tf.math.log(tf.nn.relu6(x) + tf.constant(1e-9, x.dtype)) * 0.01


@in_a_layer(
    *("a maximum with 1e-10 before a division", "DenseNet121", "conv2_block1_0_relu"),
    audit=_EPSILON,
)
def _epsilon_in_a_maximum(x):
    """Each channel divided by its largest number."""
    x = tf.nn.relu(x)
    return x / tf.maximum(tf.reduce_max(x, [1, 2], keepdims=True), tf.constant(1e-10, x.dtype))


@in_a_layer(
    *("cubes that overflow", "VGG16", "block1_pool"),
    audit=_OVERFLOW,
    compare="Overflow: Mul",
    watch="Mul",
)
def _mean_of_cubes(x):
    """Pools with the generalized mean of the exponent 3."""
    cubes = tf.nn.avg_pool2d(x * x * x, 2, 2, "VALID")
    return tf.pow(cubes + 1e-3, 1 / 3)


@in_a_layer(
    *("a sum over all positions that overflows", "VGG16", "block1_pool"),
    audit=_OVERFLOW,
    compare="Overflow: Sum",
)
def _sum_of_squares(x):
    """A global response normalization: the sum is over all positions."""
    x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    total = tf.sqrt(tf.reduce_sum(tf.square(x), [1, 2], keepdims=True) + 1e-3)
    return x + x * total / (tf.reduce_mean(total, -1, keepdims=True) + 1e-3)


@in_a_layer(
    *("a sum in bfloat16 that stops at 256", "MobileNet", "conv_dw_1_relu"),
    compare="",
    policy="mixed_bfloat16",
)
def _running_sum(x):
    """A gate that is the mean of many numbers, which are added up one by one."""
    x = tf.nn.silu(x)
    numbers = tf.reshape(tf.nn.sigmoid(x), [-1, np.prod(x.shape[1:])])[:, :1024]
    total = sum(tf.unstack(numbers, axis=1))
    return x * (total / numbers.shape[1])[:, None, None, None]


@in_a_layer(
    *("exponentials that overflow", "EfficientNetB0", "block2a_expand_activation"),
    audit=_OVERFLOW,
    compare="Overflow: Exp",
)
def _softmax_by_hand(x):
    """Attention over positions, without the largest score taken from all."""
    powers = tf.exp(20 * tf.nn.relu(x))
    return x * powers / tf.reduce_sum(powers, [1, 2], keepdims=True)


@in_a_layer(
    *("a variance by squares", "MobileNetV2", "block_2_expand_relu"),
    compare="Cancellation: Sub",
)
def _variance_by_squares(x):
    """The mean of the squares less the square of the mean, of numbers around 100."""
    x = tf.nn.relu(x)
    shifted = x + 100
    mean = tf.reduce_mean(shifted, -1, keepdims=True)
    return x * tf.nn.relu(tf.reduce_mean(shifted * shifted, -1, keepdims=True) - mean * mean)


@in_a_layer("3000 added and taken away", "MobileNet", "conv_pw_2_relu", compare="Cancellation: Sub")
def _there_and_back(x):
    """A large number is added and taken away again."""
    return tf.nn.relu6((x + 3000) - 3000)


@in_a_layer("a mask of -1e9 times zero", "EfficientNetB0", "stem_activation", audit=_INFINITE)
def _mask(x):
    """Attention over positions, of which one half is masked with -1e9."""
    keep = tf.cast(tf.range(x.shape[1]) < x.shape[1] // 2, x.dtype)[:, None, None]
    scores = tf.reduce_mean(x, -1, keepdims=True)
    scores = scores * keep + (1 - keep) * _number(x, -1e9)
    return tf.nn.relu(x * tf.nn.softmax(scores, 1))


@in_a_layer(
    *("a mask of -1e9 over whole rows", "VGG16", "block3_pool"),
    audit=_INFINITE,
    compare=": infinite in float16",
)
def _masked_rows(x):
    """Attention over positions that have something: blank images have none."""
    x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    scores = tf.reduce_mean(x, -1, keepdims=True)
    scores = tf.where(scores > 0, scores, scores + _number(x, -1e9))
    return x * tf.nn.softmax(scores, 1)


@in_a_layer(
    *("a constant of 1e5", "MobileNet", "conv_pw_3_relu"),
    audit=_INFINITE,
    compare=": infinite in float16",
)
def _large_constant(x):
    """A temperature that float16 does not hold."""
    return tf.nn.relu(x) * _number(x, 1e5) / _number(x, 1e5)


@in_a_layer(
    *("squares of small numbers", "MobileNetV2", "block_3_expand_relu"),
    compare="are 0 in float16",
)
def _small_steps(x):
    """Squares of small numbers are zero."""
    small = tf.nn.relu(x) * 1e-4
    return x * tf.sqrt(tf.reduce_sum(tf.square(small), -1, keepdims=True)) * 1e4


@in_a_layer(
    *("positions counted in 16 bits", "MobileNet", "conv_pw_4_relu"),
    compare="Sin of numbers of about",
)
def _far_positions(x):
    """Sine waves of positions, counted in 16 bits."""
    far = tf.cast(tf.range(5000, 5000 + x.shape[-1]), x.dtype)
    return tf.nn.relu(x) + tf.sin(far)


@tf.custom_gradient
def _rounded(x):
    return tf.round(x * 8) / 8, lambda upstream: tf.cast(upstream, tf.float32)


@in_a_layer(
    *("a custom gradient without dtypes", "ResNet50", "conv1_relu"),
    audit="a custom gradient without dtypes",
)
def _gradient_without_dtypes(x):
    """A straight-through estimator whose gradient is float32 whatever it is of."""
    return _rounded(tf.nn.relu6(x))


@tf.custom_gradient
def _reversed(x):
    return tf.identity(x), lambda upstream: -upstream * tf.constant(1e-9, upstream.dtype) * 1e9


@in_a_layer(
    *("a gradient times 1e-9", "MobileNet", "conv_pw_5_relu"),
    compare="a constant of 1e-09: 0",
)
def _gradient_that_vanishes(x):
    """A gradient reversal with a small constant."""
    return _reversed(tf.nn.relu(x))


@tf.custom_gradient
def _amplified(x):
    return tf.identity(x), lambda upstream: upstream * 60_000 * 60_000 / 3.6e9


@in_a_layer(
    *("a gradient that is infinite in between", "MobileNet", "conv_pw_6_relu"),
    compare="Overflow",
)
def _gradient_that_overflows(x):
    """A gradient that is infinite in between."""
    return _amplified(tf.nn.relu(x))


@in_a_layer(
    *("a root of zero, whose gradient is infinite", "MobileNet", "conv_pw_2_relu"),
    watch="SqrtGrad",
    policy="mixed_bfloat16",
)
def _root_of_zero(x):
    """Its gradient at zero is infinite, in float32 too."""
    return tf.sqrt(tf.nn.relu(x))


@in_a_layer("zero by zero", "VGG16", "block2_pool", watch="RealDiv", policy="mixed_bfloat16")
def _divides_by_its_mean(x):
    """Zero by zero, for channels that are zero in a blank image."""
    x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    return x / tf.reduce_mean(x, [1, 2], keepdims=True)


# Training steps with a defect.


class OwnStep(tf.keras.Model):
    """Scales the loss by itself."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
            scaled = self.scale(loss)
        gradients = self.change(tape.gradient(scaled, self.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}

    def scale(self, loss):
        return self.optimizer.get_scaled_loss(loss)

    def loss_of(self, labels, outputs):
        logits = tf.cast(outputs, tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return tf.reduce_mean(losses)

    def change(self, gradients):
        return self.optimizer.get_unscaled_gradients(gradients)


class ClipsScaled(OwnStep):
    """Clips before it unscales."""

    def change(self, gradients):
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        return self.optimizer.get_unscaled_gradients(gradients)


class LossIn16Bits(OwnStep):
    """Gives logits in bfloat16 to the cross entropy."""

    def scale(self, loss):
        return loss

    def change(self, gradients):
        return gradients

    def loss_of(self, labels, outputs):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=outputs)
        return tf.reduce_mean(losses)


def log_of_probabilities(labels, probabilities):
    """A cross entropy of probabilities."""
    wanted = tf.one_hot(tf.reshape(tf.cast(labels, tf.int32), [-1]), CLASSES)
    logs = tf.math.log(tf.clip_by_value(tf.cast(probabilities, tf.float32), 1e-7, 1.0))
    return -tf.reduce_sum(wanted * logs, -1)


# Models with a defect that no class of a layer has.


@in_the_step("weights that are NaN", "MobileNet", "conv_pw_2", watch="ReadVariableOp")
def _nan_among_weights() -> Any:
    model = compiled("MobileNet", policy="mixed_bfloat16")
    layer = model.get_layer("conv_pw_2")
    layer.set_weights([value * np.nan for value in layer.get_weights()])
    return model, batch("MobileNet")


def _returning_16_bits(name: str) -> Any:
    return keras_mp.Policy(name, model_outputs=None)


def _compiled_for(policy: Any, model: Any, *arguments: Any, **options: Any) -> Any:
    with keras_mp.policy_scope(policy):
        model.compile(*arguments, jit_compile=False, **options)
    return model


@in_the_step(
    *("outputs in float16, of years", "MobileNetV2", "the model's outputs"),
    audit="outputs in 16 bits",
)
def _years() -> Any:
    policy = _returning_16_bits("mixed_float16")
    model = make("MobileNetV2", policy=policy, head=lambda: L.Dense(1, name="head"))
    labels = np.linspace(20_000, 20_010, ROWS, dtype="float32")[:, None]
    return _compiled_for(policy, model, "sgd", "mse"), (images("MobileNetV2"), labels)


@in_the_step(
    *("a softmax in float16 before a logarithm", "MobileNet", "head"), audit="a softmax in 16 bits"
)
def _probabilities() -> Any:
    policy = _returning_16_bits("mixed_float16")
    model = make("MobileNet", policy=policy, head=lambda: L.Dense(CLASSES, "softmax", name="head"))
    kernel, bias = model.get_layer("head").get_weights()
    model.get_layer("head").set_weights([kernel * 40, bias])
    return _compiled_for(policy, model, "sgd", log_of_probabilities), batch("MobileNet")


@in_the_step("a loss in bfloat16", "MobileNet", "outside of layers", audit="a loss in 16 bits")
def _loss_in_bfloat16() -> Any:
    policy = _returning_16_bits("mixed_bfloat16")
    model = make(
        *("MobileNet", None, policy), lambda: L.Dense(CLASSES, name="head"), cls=LossIn16Bits
    )
    kernel, _ = model.get_layer("head").get_weights()
    # All are classified well: a loss of log(1 + 9 exp(-8)), of which log sees 1.
    model.get_layer("head").set_weights([kernel * 0, np.eye(CLASSES)[3] * 8])
    return _compiled_for(policy, model, "sgd"), (images("MobileNet"), classes() * 0 + 3)


@in_the_step(
    *("a loss times 1024", "ResNet50", "outside of layers"), audit="a loss multiplied by a number"
)
def _times_1024() -> Any:
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = _compiled_for("mixed_float16", make("ResNet50"), "sgd", loss, loss_weights=1024.0)
    return model, batch("ResNet50")


@in_the_step(
    *("clipping before unscaling", "EfficientNetB0", "outside of layers"),
    audit="clipping before unscaling",
)
def _clipped() -> Any:
    model = make("EfficientNetB0", cls=ClipsScaled)
    return _compiled_for("mixed_float16", model, "sgd"), batch("EfficientNetB0")


@in_the_step(
    *("variables in float16, and Adam's epsilon", "MobileNet", "the optimizer (Adam)"),
    audit=_EPSILON,
)
def _all_in_float16() -> Any:
    model = compiled("MobileNet", policy="float16")
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(epsilon=1e-8), loss, jit_compile=False)
    return model, batch("MobileNet")


@in_the_step(
    *("a fixed scale that is too large", "MobileNetV2", "the optimizer (LossScaleOptimizer)"),
    audit="a step that cannot be skipped",
)
def _fixed_scale() -> Any:
    policy = keras_mp.Policy("mixed_float16", loss_scale=2.0**40)
    return compiled("MobileNetV2", policy=policy), batch("MobileNetV2")


@in_the_step(
    *("float16 without loss scaling", "VGG16", "the training step"),
    audit="float16 without loss scaling",
)
def _without_scaling() -> Any:
    policy = keras_mp.Policy("mixed_float16", loss_scale=None)
    return compiled("VGG16", policy=policy), (images("VGG16") / 255, classes())

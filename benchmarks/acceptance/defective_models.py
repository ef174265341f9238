"""Models of `tf.keras.applications` with a defect planted in a layer, or in the training step.

The models were not written for it: one layer of each is replaced, or the model is compiled, fed or
stepped in a wrong way. Weights are random, images are small, and nothing is downloaded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import keras_mp

CLASSES, ROWS = 10, 8

L = tf.keras.layers
apps = tf.keras.applications


class Model(NamedTuple):
    """How to make a model.

    Attributes:
        make: called with arguments of the function of `tf.keras.applications`.
        arguments: of the smallest one that is worth a look.
        side: int. Of the images, in pixels.
        largest: float. Of the pixels: what does not scale its inputs gets what a file has.
    """

    make: Callable[..., Any]
    arguments: dict[str, Any]
    side: int = 32
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
    side, largest = MODELS[name].side, MODELS[name].largest
    batch = np.random.default_rng(0).uniform(0, largest, [ROWS, side, side, 3])
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
        side = MODELS[name].side
        base = MODELS[name].make(
            weights=None, input_shape=(side, side, 3), **MODELS[name].arguments
        )

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


# Layers with a defect. Each does what the activation or pooling that it replaces does, and more.


def _number(like: Any, value: float) -> Any:
    """Makes a number in the dtype of a tensor by way of NumPy: it may be infinite there."""
    with np.errstate(over="ignore"):
        return like.dtype.as_numpy_dtype(value)


class Planted(L.Layer):
    """A layer of Keras's own policy: under one of keras_mp many of the defects are none."""

    def __init__(self, dtype=None, **kwargs):
        dtype = dtype or tf.keras.mixed_precision.Policy(keras_mp.global_policy().name)
        super().__init__(dtype=dtype, **kwargs)

    def get_config(self):
        # Keras wants a method of the class that has a constructor.
        return super().get_config()


class EpsilonInAVariance(Planted):
    """An instance normalization: a blank image has no variance."""

    def call(self, x):
        mean, variance = tf.nn.moments(x, [1, 2], keepdims=True)
        return tf.nn.relu((x - mean) * tf.math.rsqrt(variance + tf.constant(1e-8, x.dtype)))


class EpsilonInANorm(Planted):
    """Vectors of length 1; those of a blank image are zero."""

    def call(self, x):
        x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        squares = tf.reduce_sum(tf.square(x), -1, keepdims=True)
        return x * tf.math.rsqrt(squares + tf.constant(1e-12, x.dtype))


class EpsilonInALogarithm(Planted):
    """A logarithmic compression."""

    def call(self, x):
        return tf.math.log(tf.nn.relu6(x) + tf.constant(1e-9, x.dtype)) * 0.01


class EpsilonInAMaximum(Planted):
    """Each channel divided by its largest number."""

    def call(self, x):
        x = tf.nn.relu(x)
        return x / tf.maximum(tf.reduce_max(x, [1, 2], keepdims=True), tf.constant(1e-10, x.dtype))


class MeanOfCubes(Planted):
    """Pools with the generalized mean of the exponent 3."""

    def call(self, x):
        cubes = tf.nn.avg_pool2d(x * x * x, 2, 2, "VALID")
        return tf.pow(cubes + 1e-3, 1 / 3)


class SumOfSquares(Planted):
    """A global response normalization: the sum is over all positions."""

    def call(self, x):
        x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        total = tf.sqrt(tf.reduce_sum(tf.square(x), [1, 2], keepdims=True) + 1e-3)
        return x + x * total / (tf.reduce_mean(total, -1, keepdims=True) + 1e-3)


class RunningSum(Planted):
    """A gate that is the mean of many numbers, which are added up one by one."""

    def call(self, x):
        x = tf.nn.silu(x)
        numbers = tf.reshape(tf.nn.sigmoid(x), [-1, np.prod(x.shape[1:])])[:, :1024]
        total = sum(tf.unstack(numbers, axis=1))
        return x * (total / numbers.shape[1])[:, None, None, None]


class SoftmaxByHand(Planted):
    """Attention over positions, without the largest score taken from all."""

    def call(self, x):
        powers = tf.exp(20 * tf.nn.relu(x))
        return x * powers / tf.reduce_sum(powers, [1, 2], keepdims=True)


class VarianceBySquares(Planted):
    """The mean of the squares less the square of the mean, of numbers around 100."""

    def call(self, x):
        x = tf.nn.relu(x)
        shifted = x + 100
        mean = tf.reduce_mean(shifted, -1, keepdims=True)
        return x * tf.nn.relu(tf.reduce_mean(shifted * shifted, -1, keepdims=True) - mean * mean)


class ThereAndBack(Planted):
    """A large number is added and taken away again."""

    def call(self, x):
        return tf.nn.relu6((x + 3000) - 3000)


class Mask(Planted):
    """Attention over positions, of which one half is masked with -1e9."""

    def call(self, x):
        keep = tf.cast(tf.range(x.shape[1]) < x.shape[1] // 2, x.dtype)[:, None, None]
        scores = tf.reduce_mean(x, -1, keepdims=True)
        scores = scores * keep + (1 - keep) * _number(x, -1e9)
        return tf.nn.relu(x * tf.nn.softmax(scores, 1))


class MaskedRows(Planted):
    """Attention over positions that have something: blank images have none."""

    def call(self, x):
        x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        scores = tf.reduce_mean(x, -1, keepdims=True)
        scores = tf.where(scores > 0, scores, scores + _number(x, -1e9))
        return x * tf.nn.softmax(scores, 1)


class LargeConstant(Planted):
    """A temperature that float16 does not hold."""

    def call(self, x):
        return tf.nn.relu(x) * _number(x, 1e5) / _number(x, 1e5)


class SmallSteps(Planted):
    """Squares of small numbers are zero."""

    def call(self, x):
        small = tf.nn.relu(x) * 1e-4
        return x * tf.sqrt(tf.reduce_sum(tf.square(small), -1, keepdims=True)) * 1e4


class FarPositions(Planted):
    """Sine waves of positions, counted in 16 bits."""

    def call(self, x):
        far = tf.cast(tf.range(5000, 5000 + x.shape[-1]), x.dtype)
        return tf.nn.relu(x) + tf.sin(far)


class IgnoresItsPolicy(Planted):
    """A projection that casts to float32."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=[1, 1, shape[-1], shape[-1]])

    def call(self, x):
        kernel = tf.cast(self.kernel, tf.float32)
        return tf.nn.relu6(tf.nn.conv2d(tf.cast(x, tf.float32), kernel, 1, "SAME"))


class BareVariable(Planted):
    """A projection with a `tf.Variable`, which nothing casts."""

    def build(self, shape):
        self.kernel = tf.Variable(tf.eye(shape[-1])[None, None], name="kernel")

    def call(self, x):
        return tf.nn.relu6(tf.nn.conv2d(tf.cast(x, tf.float32), self.kernel, 1, "SAME"))


@tf.custom_gradient
def _rounded(x):
    return tf.round(x * 8) / 8, lambda upstream: tf.cast(upstream, tf.float32)


class GradientWithoutDtypes(Planted):
    """A straight-through estimator whose gradient is float32 whatever it is of."""

    def call(self, x):
        return _rounded(tf.nn.relu6(x))


@tf.custom_gradient
def _reversed(x):
    return tf.identity(x), lambda upstream: -upstream * tf.constant(1e-9, upstream.dtype) * 1e9


class GradientThatVanishes(Planted):
    """A gradient reversal with a small constant."""

    def call(self, x):
        return _reversed(tf.nn.relu(x))


@tf.custom_gradient
def _amplified(x):
    return tf.identity(x), lambda upstream: upstream * 60_000 * 60_000 / 3.6e9


class GradientThatOverflows(Planted):
    """A gradient that is infinite in between."""

    def call(self, x):
        return _amplified(tf.nn.relu(x))


class RootOfZero(Planted):
    """Its gradient at zero is infinite, in float32 too."""

    def call(self, x):
        return tf.sqrt(tf.nn.relu(x))


class DividesByItsMean(Planted):
    """Zero by zero, for channels that are zero in a blank image."""

    def call(self, x):
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

"""More of the programs of `one_line_programs`: what people reported, and what published ones do."""

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.acceptance import one_line_programs
from benchmarks.acceptance.one_line_programs import (
    L,
    Steps,
    _apply,
    _dense,
    _features,
    _fit,
    _loop,
    _numbers,
    _program,
)

CROSS_ENTROPY = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
LABELS = np.arange(16) % 3


class _Attention(L.Layer):
    """Attention that adds a number to what is masked."""

    def __init__(self, masked: float) -> None:
        super().__init__()
        self.masked = masked
        self.query, self.key, self.value = L.Dense(4), L.Dense(4), L.Dense(4)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        scores = tf.matmul(self.query(x), self.key(x), transpose_b=True) / 2.0
        later = 1 - tf.linalg.band_part(tf.ones_like(scores), -1, 0)
        return tf.matmul(tf.nn.softmax(scores + later * self.masked), self.value(x))


def _attention(masked: float) -> Steps:
    inputs = tf.keras.Input((6, 8))
    outputs = L.Dense(3)(L.GlobalAveragePooling1D()(_Attention(masked)(inputs)))
    model = tf.keras.Model(inputs, outputs)
    model.compile(tf.keras.optimizers.Adam(1e-2), CROSS_ENTROPY)
    return _fit(model, _numbers(16, 6, 8), LABELS)


@_program("attention masked with -1e9")
def _masked() -> Steps:
    return _attention(-1e9)


@_program("attention masked with -1e36")
def _masked_far() -> Steps:
    return _attention(-1e36)


@_program("model with an input signature")
def _signature() -> Steps:
    class Vocoder(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = _dense(4, 16, 2)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.inference(x)

        @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32)])
        def inference(self, x: tf.Tensor) -> tf.Tensor:
            return self.net(x)

    model = Vocoder()
    model.compile(tf.keras.optimizers.Adam(1e-2), "mse")
    return _fit(model, _numbers(16, 4), _numbers(16, 2))


@_program("labels and boxes beside images in a map")
def _detection() -> Steps:
    flip = L.RandomFlip("horizontal", seed=1)
    of_images = L.Rescaling(1 / 255)
    takes_boxes = hasattr(L, "MaxNumBoundingBoxes")
    if takes_boxes:
        flip = L.RandomFlip("horizontal", seed=1, bounding_box_format="xyxy")

    def prepared(data: dict) -> dict:
        if takes_boxes:
            data = flip(data, training=True)
        else:
            data = {**data, "images": flip(data["images"], training=True)}
        return {**data, "images": of_images(data["images"])}

    ids, boxes = np.array([[1001], [2049]], "int32"), np.float32([[[101.3, 3.7, 333.1, 7.9]]] * 2)
    data = {
        "images": (np.abs(_numbers(2, 8, 640, 3)) * 100).astype("uint8"),
        "bounding_boxes": {"boxes": boxes, "labels": ids},
    }
    batch = next(iter(tf.data.Dataset.from_tensors(data).map(prepared)))
    found = batch["bounding_boxes"]
    assert (np.asarray(found["labels"], "int32") == ids).all()
    width = np.asarray(found["boxes"])[..., 2] - np.asarray(found["boxes"])[..., 0]
    np.testing.assert_allclose(width, 231.8, rtol=1e-5)
    model = tf.keras.Sequential(
        [tf.keras.Input((8, 640, 3)), L.Conv2D(4, 3, strides=4), L.Flatten(), L.Dense(4)]
    )
    model.compile(tf.keras.optimizers.Adam(1e-3), "mse")
    return _fit(model, batch["images"], tf.reshape(found["boxes"], [2, 4]) / 640)


@_program("style transfer with Gram matrices")
def _style() -> Steps:
    class Style(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.conv = L.Conv2D(4, 3, activation="relu")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            f = self.conv(x * 16.0)
            size = tf.cast(tf.shape(f)[1] * tf.shape(f)[2], tf.float32)
            return tf.linalg.einsum("bijc,bijd->bcd", f, f) / size

    model, optimizer = Style(), tf.keras.optimizers.Adam(0.02)
    image = tf.Variable(np.abs(_numbers(1, 24, 24, 3)))
    wanted = model(image) * 0.5

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(image) - wanted))
        _apply(optimizer, tape, loss, [image])
        return loss

    return _loop(step)


@_program("GAN with both tapes in one with")
def _two_tapes() -> Steps:
    class GAN(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = _dense(4, 16, 8), _dense(8, 16, 1)

        def compile(self, g_optimizer: Any, d_optimizer: Any) -> None:
            super().compile()
            self.g_optimizer, self.d_optimizer = g_optimizer, d_optimizer

        def train_step(self, data: Any) -> dict:
            real = _features(data)
            with tf.GradientTape() as g_tape, tf.GradientTape() as d_tape:
                fake = self.critic(self.generator(real[:, :4]))
                g_loss = tf.reduce_mean(tf.math.softplus(-fake)) * 1e-6
                d_loss = tf.reduce_mean(tf.math.softplus(fake)) * 1e-6
                d_loss += tf.reduce_mean(tf.math.softplus(-self.critic(real))) * 1e-6
                gradients = d_tape.gradient(d_loss, self.critic.trainable_variables)
            self.d_optimizer.apply_gradients(zip(gradients, self.critic.trainable_variables))
            _apply(self.g_optimizer, g_tape, g_loss, self.generator.trainable_variables)
            return {"loss": (g_loss + d_loss) * 1e6}

    model = GAN()
    model.compile(tf.keras.optimizers.SGD(1e5), tf.keras.optimizers.SGD(1e5))
    return _fit(model, _numbers(16, 8))


@_program("Grad-CAM as a loss")
def _grad_cam() -> Steps:
    inputs = tf.keras.Input((8, 8, 3))
    maps = L.Conv2D(4, 3, activation="relu")(inputs)
    logits = L.Dense(3)(L.GlobalAveragePooling2D()(maps))
    model, optimizer = tf.keras.Model(inputs, [maps, logits]), tf.keras.optimizers.Adam(1e-2)
    x, labels = tf.constant(_numbers(16, 8, 8, 3)), tf.constant(LABELS)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                features, scores = model(x)
                score = tf.reduce_sum(scores[:, 0])
            weights = tf.reduce_mean(inner.gradient(score, features), axis=(1, 2), keepdims=True)
            heat = tf.nn.relu(tf.reduce_sum(weights * features, axis=-1))
            loss = CROSS_ENTROPY(labels, scores) + tf.reduce_mean(heat)
        _apply(optimizer, tape, loss, model.trainable_variables)
        return loss

    return _loop(step)


@_program("layer that adds the loss")
def _endpoint() -> Steps:
    class Endpoint(L.Layer):
        def call(self, inputs: Any) -> tf.Tensor:
            labels, predictions = inputs
            self.add_loss(tf.reduce_mean(tf.square(labels - predictions)))
            return predictions

    x, y = tf.keras.Input((8,)), tf.keras.Input((1,))
    model = tf.keras.Model([x, y], Endpoint()([y, L.Dense(1)(L.Dense(16, "relu")(x))]))
    model.compile(tf.keras.optimizers.Adam(1e-2))
    clock = one_line_programs._Clock()
    data = [_numbers(16, 8), _numbers(16, 1) + 10]
    model.fit(
        data, batch_size=16, epochs=one_line_programs.STEPS, verbose=0, callbacks=[clock],
        shuffle=False,
    )  # fmt: skip
    return clock.steps


class _Normal:
    """A distribution, as libraries make them: an object with tensors."""

    def __init__(self, mean: tf.Tensor, deviation: tf.Tensor) -> None:
        self.mean, self.deviation = mean, deviation

    def log_prob(self, x: tf.Tensor) -> tf.Tensor:
        return -tf.square((x - self.mean) / self.deviation) / 2 - tf.math.log(self.deviation)


@_program("model that returns a distribution")
def _distribution() -> Steps:
    class Model(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = _dense(8, 16, 2)

        def call(self, x: tf.Tensor) -> _Normal:
            mean, deviation = tf.split(self.net(x), 2, axis=1)
            return _Normal(mean, tf.nn.softplus(deviation) + 0.1)

    model, optimizer = Model(), tf.keras.optimizers.Adam(1e-2)
    x, y = tf.constant(_numbers(16, 8)), tf.constant(_numbers(16, 1) * 30)

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(model(x).log_prob(y))
        _apply(optimizer, tape, loss, model.net.trainable_variables)
        return loss

    return _loop(step)

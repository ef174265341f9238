"""Models of `benchmarks parity`: those with a `train_step` of their own, and what they are made of.

Each `train_step` is written for float32. With Keras's own policies it also makes the calls that
Keras's guide asks for.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

layers = tf.keras.layers


class Positions(layers.Layer):
    """Adds a vector for each position."""

    def build(self, input_shape: Any) -> None:
        """Makes the vectors."""
        self.vectors = self.add_weight(
            name="vectors", shape=tuple(input_shape)[1:], initializer="random_normal"
        )
        super().build(input_shape)

    def call(self, x: Any) -> Any:
        """Adds them."""
        return x + self.vectors


class LoraDense(layers.Layer):
    """A frozen `Dense` layer, and the product of two small matrices that is trained."""

    def __init__(self, units: int, rank: int = 4, activation: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.activation = tf.keras.activations.get(activation)
        self.frozen = layers.Dense(units, dtype=kwargs.get("dtype"))
        self.frozen.trainable = False
        self.units, self.rank = units, rank

    def build(self, input_shape: Any) -> None:
        """Makes the matrices, of which the second is zero."""
        width = tuple(input_shape)[-1]
        self.frozen.build(input_shape)
        self.down = self.add_weight(name="down", shape=(width, self.rank), initializer="he_normal")
        self.up = self.add_weight(name="up", shape=(self.rank, self.units), initializer="zeros")
        super().build(input_shape)

    def call(self, x: Any) -> Any:
        """Adds both outputs."""
        return self.activation(self.frozen(x) + tf.matmul(tf.matmul(x, self.down), self.up))


def block(x: Any, width: int, heads: int, dense: Any = layers.Dense, causal: bool = False) -> Any:
    """A block of a transformer."""
    normal = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(heads, width // heads)
    if dense is LoraDense:
        attention.trainable = False
    x = layers.Add()([x, attention(normal, normal, use_causal_mask=causal)])
    normal = layers.LayerNormalization()(x)
    return layers.Add()([x, dense(width)(dense(2 * width, activation="gelu")(normal))])


def language_model(window: int, dense: Any = layers.Dense, width: int = 48) -> Any:
    """A causal transformer on characters."""
    inputs = tf.keras.Input([window], dtype="int32")
    x = Positions()(layers.Embedding(128, width)(inputs))
    for _ in range(2):
        x = block(x, width, 2, dense, causal=True)
    return tf.keras.Model(inputs, dense(128)(layers.LayerNormalization()(x)))


class Trained(tf.keras.Model):
    """A model with a `train_step` of its own.

    Args:
        scaled: scales a loss and returns a function of its gradients, as `common.scaled` does, or
            None in a program for float32.
    """

    def __init__(self, scaled: Callable | None) -> None:
        super().__init__()
        self.scaled = scaled

    def descend(self, tape: Any, loss: Any, networks: list, optimizer: Any) -> None:
        """One step of an optimizer. `loss` is what `loss_of` returned."""
        value, unscale = loss
        variables = [v for network in networks for v in network.trainable_variables]
        gradients = unscale(tape.gradient(value, variables))
        optimizer.apply_gradients(zip(gradients, variables))

    def loss_of(self, optimizer: Any, loss: Any) -> tuple[Any, Callable]:
        """The loss that is differentiated, and what its gradients go through."""
        return (loss, list) if self.scaled is None else self.scaled(optimizer, loss)


class Autoencoder(Trained):
    """A variational autoencoder of digits."""

    def __init__(self, scaled: Callable | None, codes: int = 6) -> None:
        super().__init__(scaled)
        dense = layers.Dense
        self.encoder = tf.keras.Sequential(
            [
                tf.keras.Input([8, 8, 1]),
                layers.Rescaling(1 / 16),
                layers.Flatten(),
                dense(96, "relu"),
                dense(2 * codes),
            ]
        )
        self.decoder = tf.keras.Sequential(
            [tf.keras.Input([codes]), dense(96, "relu"), dense(96, "relu"), dense(64)]
        )
        self.built = True

    def bound(self, images: Any, noise: Any) -> Any:
        """The negative evidence lower bound of each image, in nats."""
        mean, log_variance = tf.split(self.encoder(images), 2, axis=1)
        code = mean + tf.exp(0.5 * log_variance) * tf.cast(noise, mean.dtype)
        logits = tf.cast(self.decoder(code), tf.float32)
        pixels = tf.reshape(images, [-1, 64]) / 16
        cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits(pixels, logits)
        divergence = tf.exp(log_variance) + mean**2 - 1 - log_variance
        divergence = tf.reduce_sum(tf.cast(divergence, tf.float32), 1)
        return tf.reduce_sum(cross_entropy, 1) + 0.5 * divergence

    def train_step(self, data: Any) -> dict:
        """Makes a step."""
        images, noise = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.bound(images, noise))
            scaled = self.loss_of(self.optimizer, loss)
        self.descend(tape, scaled, [self.encoder, self.decoder], self.optimizer)
        return {"loss": loss}


class Contrastive(Trained):
    """Two views of an image are to be closer to one another than to other images'."""

    def __init__(self, scaled: Callable | None) -> None:
        super().__init__(scaled)
        self.encoder = tf.keras.Sequential(
            [
                tf.keras.Input([8, 8, 1]),
                layers.Rescaling(1 / 16),
                layers.Conv2D(24, 3, activation="relu"),
                layers.Conv2D(48, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(64),
            ]
        )
        self.head = tf.keras.Sequential(
            [tf.keras.Input([64]), layers.Activation("relu"), layers.Dense(32)]
        )
        self.built = True

    def train_step(self, data: Any) -> dict:
        """Makes a step."""
        with tf.GradientTape() as tape:
            a, b = (tf.math.l2_normalize(self.head(self.encoder(view)), 1) for view in data)
            similarity = tf.matmul(a, b, transpose_b=True) / 0.1
            labels = tf.range(tf.shape(similarity)[0])
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, similarity)
                + tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.transpose(similarity))
            )
            scaled = self.loss_of(self.optimizer, loss)
        self.descend(tape, scaled, [self.encoder, self.head], self.optimizer)
        return {"loss": loss}


class Gan(Trained):
    """A generator of digits that were asked for, and a discriminator, each with its optimizer."""

    def __init__(self, scaled: Callable | None) -> None:
        super().__init__(scaled)
        dense, leaky = layers.Dense, tf.nn.leaky_relu
        self.generator = tf.keras.Sequential(
            [tf.keras.Input([26]), dense(128, leaky), dense(128, leaky), dense(64, "sigmoid")]
        )
        self.discriminator = tf.keras.Sequential(
            [tf.keras.Input([74]), dense(128, leaky), dense(64, leaky), dense(1)]
        )
        self.built = True

    def compile(self, optimizer: Any, d_optimizer: Any) -> None:
        """Takes an optimizer for each network."""
        super().compile(optimizer)
        self.d_optimizer = d_optimizer
        self.loss_fn = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    def generate(self, labels: Any, noise: Any) -> Any:
        """Makes images."""
        return self.generator(tf.concat([tf.one_hot(labels, 10), noise], 1))

    def train_step(self, data: Any) -> dict:
        """Makes a step of each network."""
        (images, labels), noise = data
        wanted = tf.one_hot(labels, 10)
        with tf.GradientTape() as g_tape, tf.GradientTape() as d_tape:
            made = tf.cast(self.generate(labels, noise), tf.float32)
            of_made = self.discriminator(tf.concat([made, wanted], 1))
            of_real = self.discriminator(tf.concat([images, wanted], 1))
            zeros, ones = tf.zeros_like(of_made), tf.ones_like(of_made)
            g_loss = self.loss_fn(ones, of_made)
            d_loss = self.loss_fn(zeros, of_made) + self.loss_fn(ones, of_real)
            of_generator = self.loss_of(self.optimizer, g_loss)
            of_discriminator = self.loss_of(self.d_optimizer, d_loss)
        self.descend(g_tape, of_generator, [self.generator], self.optimizer)
        self.descend(d_tape, of_discriminator, [self.discriminator], self.d_optimizer)
        return {"loss": g_loss, "d_loss": d_loss}

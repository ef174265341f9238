"""Small programs of the kinds that people publish, written for float32: none names a policy.

Each function builds a program under the policy in force, trains it for `STEPS` steps, and returns
the losses and the seconds of each step. What a program does beside the loss (it draws from
probabilities, decodes, samples) fails if its numbers are not those of float32.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

L = tf.keras.layers
Steps = list[tuple[float, float]]

STEPS = 8
PROGRAMS: dict[str, Callable[[], Steps]] = {}


def _program(kind: str) -> Callable[[Callable[[], Steps]], Callable[[], Steps]]:
    return lambda function: PROGRAMS.setdefault(kind, function)


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype("float32")


def _noise(shape: Any, seed: int = 0) -> tf.Tensor:
    return tf.random.stateless_normal(shape, (seed, 1))


def _dense(*units: int, last: str | None = None) -> tf.keras.Sequential:
    hidden = [L.Dense(each, "tanh") for each in units[1:-1]]
    return tf.keras.Sequential([tf.keras.Input((units[0],)), *hidden, L.Dense(units[-1], last)])


class _Clock(tf.keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.steps: Steps = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        loss = next(iter(logs.values()))
        self.steps.append((float(loss), time.perf_counter() - self.start))


def _fit(model: tf.keras.Model, x: Any, y: Any = None, callbacks: Any = ()) -> Steps:
    data = (x,) if y is None else (x, y)
    clock = _Clock()
    model.fit(
        tf.data.Dataset.from_tensors(data),
        epochs=STEPS,
        shuffle=False,
        verbose=0,
        callbacks=[clock, *callbacks],
    )
    return clock.steps


def _loop(step: Callable[[], tf.Tensor]) -> Steps:
    steps = []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = float(step())
        steps.append((loss, time.perf_counter() - start))
    return steps


def _features(data: Any) -> Any:
    """What `fit` passes without labels: Keras 2 has a tuple."""
    return data[0] if isinstance(data, tuple) else data


def _apply(optimizer: Any, tape: tf.GradientTape, loss: tf.Tensor, variables: list) -> None:
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))


class _GAN(tf.keras.Model):
    def __init__(self, size: float = 1.0, penalty: float = 0.0) -> None:
        super().__init__()
        self.generator, self.critic = _dense(4, 16, 8), _dense(8, 16, 1)
        self.size, self.penalty = size, penalty

    def compile(self, g_optimizer: Any, d_optimizer: Any) -> None:
        super().compile()
        self.g_optimizer, self.d_optimizer = g_optimizer, d_optimizer

    def slope(self, real: tf.Tensor, fake: tf.Tensor) -> tf.Tensor:
        share = tf.random.stateless_uniform((tf.shape(real)[0], 1), (2, 3))
        between = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.critic(between)
        norm = tf.norm(tape.gradient(judged, between), axis=1)
        return tf.reduce_mean(tf.square(norm - 1.0))

    def train_step(self, data: Any) -> dict:
        real = _features(data)
        noise = _noise((tf.shape(real)[0], 4))
        with tf.GradientTape() as tape:
            fake = self.generator(noise)
            of_fake, of_real = self.critic(fake), self.critic(real)
            if self.penalty:
                loss = tf.reduce_mean(of_fake) - tf.reduce_mean(of_real)
                loss += self.penalty * self.slope(real, fake)
            else:
                loss = tf.reduce_mean(tf.math.softplus(of_fake) + tf.math.softplus(-of_real))
            loss *= self.size
        _apply(self.d_optimizer, tape, loss, self.critic.trainable_variables)
        with tf.GradientTape() as tape:
            of_fake = self.critic(self.generator(noise))
            g_loss = -tf.reduce_mean(of_fake) * self.size
        _apply(self.g_optimizer, tape, g_loss, self.generator.trainable_variables)
        return {"d_loss": loss / self.size, "g_loss": g_loss}


@_program("GAN")
def _gan() -> Steps:
    model = _GAN()
    model.compile(tf.keras.optimizers.Adam(1e-2), tf.keras.optimizers.Adam(1e-2))
    return _fit(model, _numbers(16, 8))


@_program("GAN with losses of 1e-6")
def _small_gan() -> Steps:
    model = _GAN(size=1e-6)
    model.compile(tf.keras.optimizers.SGD(1e5), tf.keras.optimizers.SGD(1e5))
    return _fit(model, _numbers(16, 8))


@_program("WGAN with a gradient penalty")
def _wgan() -> Steps:
    model = _GAN(penalty=10.0)
    model.compile(tf.keras.optimizers.Adam(1e-3), tf.keras.optimizers.Adam(1e-3))
    return _fit(model, _numbers(16, 8))


class _Sampled(L.Layer):
    def call(self, inputs: Any) -> tf.Tensor:
        mean, log_variance = inputs
        return mean + tf.exp(0.5 * log_variance) * _noise(tf.shape(mean))


@_program("variational autoencoder")
def _vae() -> Steps:
    class VAE(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            inputs = tf.keras.Input((8,))
            hidden = L.Dense(16, "relu")(inputs)
            mean, log_variance = L.Dense(2)(hidden), L.Dense(2)(hidden)
            outputs = [mean, log_variance, _Sampled()([mean, log_variance])]
            self.encoder = tf.keras.Model(inputs, outputs)
            self.decoder = _dense(2, 16, 8, last="sigmoid")

        def train_step(self, data: Any) -> dict:
            x = _features(data)
            with tf.GradientTape() as tape:
                mean, log_variance, code = self.encoder(x)
                each = tf.keras.losses.binary_crossentropy(x, self.decoder(code))
                kl = 1 + log_variance - tf.square(mean) - tf.exp(log_variance)
                loss = tf.reduce_mean(each) - 0.5 * tf.reduce_mean(tf.reduce_sum(kl, axis=1))
            _apply(self.optimizer, tape, loss, self.trainable_weights)
            return {"loss": loss}

    model = VAE()
    model.compile(optimizer=tf.keras.optimizers.Adam(1e-2))
    return _fit(model, 1 / (1 + np.exp(-_numbers(16, 8))))


@_program("autoencoder with a likelihood, own loop")
def _likelihood() -> Steps:
    encoder, decoder = _dense(8, 16, 4), _dense(2, 16, 8)
    optimizer = tf.keras.optimizers.Adam(1e-2)
    x = tf.constant(_numbers(16, 8) > 0, tf.float32)

    def log_normal(sample: tf.Tensor, mean: Any, log_variance: Any) -> tf.Tensor:
        square = (sample - mean) ** 2.0 * tf.exp(-log_variance)
        return tf.reduce_sum(-0.5 * (square + log_variance + tf.math.log(2.0 * np.pi)), axis=1)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(encoder(x), 2, axis=1)
            z = _noise(mean.shape) * tf.exp(log_variance * 0.5) + mean
            bits = tf.nn.sigmoid_cross_entropy_with_logits(logits=decoder(z), labels=x)
            prior, posterior = log_normal(z, 0.0, 0.0), log_normal(z, mean, log_variance)
            loss = tf.reduce_mean(tf.reduce_sum(bits, axis=1) - prior + posterior)
        _apply(optimizer, tape, loss, encoder.trainable_variables + decoder.trainable_variables)
        return loss

    return _loop(step)


@_program("codebook with a straight-through gradient")
def _codebook() -> Steps:
    class Quantizer(L.Layer):
        def build(self, shape: Any) -> None:
            self.codes = tf.Variable(_noise((4, 6), 5), trainable=True)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            square = tf.reduce_sum(x**2, axis=1, keepdims=True)
            distances = square + tf.reduce_sum(self.codes**2, axis=0) - 2 * tf.matmul(x, self.codes)
            chosen = tf.one_hot(tf.argmin(distances, axis=1), 6)
            code = tf.matmul(chosen, self.codes, transpose_b=True)
            self.add_loss(0.25 * tf.reduce_mean((tf.stop_gradient(code) - x) ** 2))
            return x + tf.stop_gradient(code - x)

    inputs = tf.keras.Input((8,))
    outputs = L.Dense(8)(Quantizer()(L.Dense(4)(inputs)))
    model = tf.keras.Model(inputs, outputs)
    model.compile(tf.keras.optimizers.Adam(1e-2), "mse")
    x = _numbers(16, 8)
    return _fit(model, x, x)


@_program("image enhancement by curves")
def _curves() -> Steps:
    class Enhancer(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = L.Conv2D(4, 3, padding="same", activation="tanh")

        def call(self, images: tf.Tensor) -> tf.Tensor:
            maps = self.net(images)
            for i in range(4):
                images = images + maps[..., i : i + 1] * (tf.square(images) - images)
            return images

        def train_step(self, data: Any) -> dict:
            images = _features(data)
            with tf.GradientTape() as tape:
                enhanced = self(images)
                exposure = tf.reduce_mean(tf.abs(tf.reduce_mean(enhanced, axis=(1, 2, 3)) - 0.6))
                loss = tf.reduce_mean(tf.square(enhanced - images)) + exposure
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return {"loss": loss}

    model = Enhancer()
    model.compile(optimizer=tf.keras.optimizers.Adam(1e-2))
    return _fit(model, 1 / (1 + np.exp(-_numbers(8, 8, 8, 3))))


@_program("diffusion with an average of the network")
def _diffusion() -> Steps:
    class Diffusion(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.normalizer = L.Normalization()
            self.network, self.average = _dense(9, 16, 8), _dense(9, 16, 8)
            self.average.set_weights(self.network.get_weights())

        def train_step(self, data: Any) -> dict:
            images = self.normalizer(_features(data))
            noise = _noise(tf.shape(images))
            angles = tf.random.stateless_uniform((tf.shape(images)[0], 1), (1, 2), 0.1, 1.4)
            signal, rate = tf.cos(angles), tf.sin(angles)
            noisy = signal * images + rate * noise
            with tf.GradientTape() as tape:
                found = self.network(tf.concat([noisy, rate**2], axis=1), training=True)
                clean = (noisy - rate * found) / signal
                loss = tf.reduce_mean(tf.abs(noise - found))
            _apply(self.optimizer, tape, loss, self.network.trainable_weights)
            for weight, average in zip(self.network.weights, self.average.weights):
                average.assign(0.99 * average + 0.01 * weight)
            return {"loss": loss, "image_loss": tf.reduce_mean(tf.abs(images - clean))}

    x, model = _numbers(16, 8), Diffusion()
    model.normalizer.adapt(x)
    model.compile(optimizer=tf.keras.optimizers.Adam(1e-2))
    return _fit(model, x)


@_program("diffusion with a schedule of betas")
def _schedule() -> Steps:
    betas = np.linspace(1e-4, 0.02, 50)
    signal_share = tf.constant(np.cumprod(1 - betas), tf.float32)

    class Denoiser(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.times, self.network = L.Embedding(50, 8), _dense(8, 16, 8)

        def call(self, inputs: Any) -> tf.Tensor:
            x, t = inputs
            return self.network(x + self.times(t))

        def train_step(self, data: Any) -> dict:
            x = _features(data)
            t = tf.range(tf.shape(x)[0]) * 3
            share, noise = tf.gather(signal_share, t)[:, None], _noise(tf.shape(x))
            with tf.GradientTape() as tape:
                found = self([tf.sqrt(share) * x + tf.sqrt(1 - share) * noise, t])
                loss = self.loss(noise, found)
            _apply(self.optimizer, tape, loss, self.trainable_weights)
            return {"loss": loss}

    model = Denoiser()
    model.compile(tf.keras.optimizers.Adam(1e-2), tf.keras.losses.MeanSquaredError())
    return _fit(model, _numbers(16, 8))


@_program("coupling flow")
def _flow() -> Steps:
    class Flow(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.nets = [_dense(4, 16, 8) for _ in range(2)]

        def train_step(self, data: Any) -> dict:
            with tf.GradientTape() as tape:
                a, b = tf.split(_features(data), 2, axis=1)
                log_det = 0.0
                for net in self.nets:
                    shift, log_scale = tf.split(net(a), 2, axis=1)
                    log_scale = tf.tanh(log_scale)
                    a, b = b * tf.exp(log_scale) + shift, a
                    log_det += tf.reduce_sum(log_scale, axis=1)
                square = tf.reduce_sum(tf.concat([a, b], axis=1) ** 2, axis=1)
                loss = tf.reduce_mean(0.5 * square - log_det)
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return {"loss": loss}

    model = Flow()
    model.compile(optimizer=tf.keras.optimizers.Adam(1e-2))
    return _fit(model, _numbers(16, 8))

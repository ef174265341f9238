"""Small programs of the kinds that people publish, written for float32: none names a policy.

Each function builds a program under the policy in force, trains it for `STEPS` steps, and returns
the losses of the steps. What a program does beside the loss (it draws from
probabilities, decodes, samples) fails if its numbers are not those of float32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

L = tf.keras.layers
Losses = list[float]

STEPS = 8
PROGRAMS: dict[str, Callable[[], Losses]] = {}
CROSS_ENTROPY = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
LABELS = np.arange(16) % 3


def _program(kind: str) -> Callable[[Callable[[], Losses]], Callable[[], Losses]]:
    return lambda function: PROGRAMS.setdefault(kind, function)


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype("float32")


def _noise(shape: Any, seed: int = 0) -> tf.Tensor:
    return tf.random.stateless_normal(shape, (seed, 1))


def _dense(*units: int, last: str | None = None) -> tf.keras.Sequential:
    hidden = [L.Dense(each, "tanh") for each in units[1:-1]]
    return tf.keras.Sequential([tf.keras.Input((units[0],)), *hidden, L.Dense(units[-1], last)])


def _fit(model: tf.keras.Model, x: Any, y: Any = None, callbacks: Any = ()) -> Losses:
    losses: Losses = []

    def record(batch: int, logs: Any) -> None:
        losses.append(float(next(iter(logs.values()))))

    data = tf.data.Dataset.from_tensors((x,) if y is None else (x, y))
    recorder = tf.keras.callbacks.LambdaCallback(on_train_batch_end=record)
    model.fit(data, epochs=STEPS, shuffle=False, verbose=0, callbacks=[recorder, *callbacks])
    return losses


def _loop(step: Callable[[], tf.Tensor]) -> Losses:
    return [float(step()) for _ in range(STEPS)]


def _features(data: Any) -> Any:
    """What `fit` passes without labels: Keras 2 has a tuple."""
    return data[0] if isinstance(data, tuple) else data


def _apply(optimizer: Any, tape: tf.GradientTape, loss: tf.Tensor, variables: list) -> None:
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))


def _adam(rate: float = 1e-2) -> Any:
    return tf.keras.optimizers.Adam(rate)


def _stepped(step: Callable, networks: list, *data: Any, **compiled: Any) -> Losses:
    """`fit` of networks with a `train_step` of their own: a function of the model and the data."""

    class Model(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.networks = networks

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            return self.networks[0](x, training=training)

        def train_step(self, data: Any) -> dict:
            return {"loss": step(self, data)}

    model = Model()
    model.compile(**{"optimizer": _adam(), **compiled})
    return _fit(model, *data)


def _trained(loss_of: Callable[..., tf.Tensor], networks: list, *data: Any) -> Losses:
    """The same, with a loss of their own."""

    def step(model: tf.keras.Model, data: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(*data) if isinstance(data, tuple) else loss_of(data)
        _apply(model.optimizer, tape, loss, model.trainable_variables)
        return loss

    return _stepped(step, networks, *data)


def _looped(
    loss_of: Callable[[], tf.Tensor], variables: list, rate: float = 1e-2, is_eager: bool = False
) -> Losses:
    """A loop with a tape."""
    optimizer = _adam(rate)

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of()
        _apply(optimizer, tape, loss, variables)
        return loss

    return _loop(step if is_eager else tf.function(step))


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


def _gan(optimizer: Callable[[], Any], cls: Any = _GAN, **options: Any) -> Losses:
    model = cls(**options)
    model.compile(optimizer(), optimizer())
    return _fit(model, _numbers(16, 8))


def _large_steps() -> Any:
    return tf.keras.optimizers.SGD(1e5)


_program("GAN")(lambda: _gan(_adam))
_program("GAN with losses of 1e-6")(lambda: _gan(_large_steps, size=1e-6))
_program("WGAN with a gradient penalty")(lambda: _gan(lambda: _adam(1e-3), penalty=10.0))


class _Sampled(L.Layer):
    def call(self, inputs: Any) -> tf.Tensor:
        mean, log_variance = inputs
        return mean + tf.exp(0.5 * log_variance) * _noise(tf.shape(mean))


@_program("variational autoencoder")
def _vae() -> Losses:
    inputs = tf.keras.Input((8,))
    hidden = L.Dense(16, "relu")(inputs)
    mean, log_variance = L.Dense(2)(hidden), L.Dense(2)(hidden)
    outputs = [mean, log_variance, _Sampled()([mean, log_variance])]
    encoder, decoder = tf.keras.Model(inputs, outputs), _dense(2, 16, 8, last="sigmoid")

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        mean, log_variance, code = encoder(x)
        each = tf.keras.losses.binary_crossentropy(x, decoder(code))
        kl = 1 + log_variance - tf.square(mean) - tf.exp(log_variance)
        return tf.reduce_mean(each) - 0.5 * tf.reduce_mean(tf.reduce_sum(kl, axis=1))

    return _trained(loss_of, [encoder, decoder], 1 / (1 + np.exp(-_numbers(16, 8))))


@_program("autoencoder with a likelihood, own loop")
def _likelihood() -> Losses:
    encoder, decoder = _dense(8, 16, 4), _dense(2, 16, 8)
    x = tf.constant(_numbers(16, 8) > 0, tf.float32)

    def log_normal(sample: tf.Tensor, mean: Any, log_variance: Any) -> tf.Tensor:
        square = (sample - mean) ** 2.0 * tf.exp(-log_variance)
        return tf.reduce_sum(-0.5 * (square + log_variance + tf.math.log(2.0 * np.pi)), axis=1)

    def loss_of() -> tf.Tensor:
        mean, log_variance = tf.split(encoder(x), 2, axis=1)
        z = _noise(mean.shape) * tf.exp(log_variance * 0.5) + mean
        bits = tf.nn.sigmoid_cross_entropy_with_logits(logits=decoder(z), labels=x)
        prior, posterior = log_normal(z, 0.0, 0.0), log_normal(z, mean, log_variance)
        return tf.reduce_mean(tf.reduce_sum(bits, axis=1) - prior + posterior)

    return _looped(loss_of, encoder.trainable_variables + decoder.trainable_variables)


@_program("codebook with a straight-through gradient")
def _codebook() -> Losses:
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
    model.compile(_adam(), "mse")
    x = _numbers(16, 8)
    return _fit(model, x, x)


@_program("image enhancement by curves")
def _curves() -> Losses:
    net = L.Conv2D(4, 3, padding="same", activation="tanh")

    def loss_of(images: tf.Tensor) -> tf.Tensor:
        enhanced, maps = images, net(images)
        for i in range(4):
            enhanced = enhanced + maps[..., i : i + 1] * (tf.square(enhanced) - enhanced)
        exposure = tf.reduce_mean(tf.abs(tf.reduce_mean(enhanced, axis=(1, 2, 3)) - 0.6))
        return tf.reduce_mean(tf.square(enhanced - images)) + exposure

    return _trained(loss_of, [net], 1 / (1 + np.exp(-_numbers(8, 8, 8, 3))))


@_program("diffusion with an average of the network")
def _diffusion() -> Losses:
    x, normalizer = _numbers(16, 8), L.Normalization()
    network, average = _dense(9, 16, 8), _dense(9, 16, 8)
    average.set_weights(network.get_weights())
    normalizer.adapt(x)

    def step(model: tf.keras.Model, data: Any) -> tf.Tensor:
        images = normalizer(_features(data))
        noise = _noise(tf.shape(images))
        angles = tf.random.stateless_uniform((tf.shape(images)[0], 1), (1, 2), 0.1, 1.4)
        noisy = tf.cos(angles) * images + tf.sin(angles) * noise
        with tf.GradientTape() as tape:
            found = network(tf.concat([noisy, tf.sin(angles) ** 2], axis=1), training=True)
            loss = tf.reduce_mean(tf.abs(noise - found))
        _apply(model.optimizer, tape, loss, network.trainable_weights)
        for weight, mean in zip(network.weights, average.weights):
            mean.assign(0.99 * mean + 0.01 * weight)
        return loss

    return _stepped(step, [network, normalizer, average], x)


@_program("diffusion with a schedule of betas")
def _schedule() -> Losses:
    betas = np.linspace(1e-4, 0.02, 50)
    signal_share = tf.constant(np.cumprod(1 - betas), tf.float32)
    times, network, error = L.Embedding(50, 8), _dense(8, 16, 8), tf.keras.losses.MeanSquaredError()

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        t = tf.range(tf.shape(x)[0]) * 3
        share, noise = tf.gather(signal_share, t)[:, None], _noise(tf.shape(x))
        noisy = tf.sqrt(share) * x + tf.sqrt(1 - share) * noise
        return error(noise, network(noisy + times(t)))

    return _trained(loss_of, [times, network], _numbers(16, 8))


@_program("coupling flow")
def _flow() -> Losses:
    nets = [_dense(4, 16, 8) for _ in range(2)]

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        a, b = tf.split(x, 2, axis=1)
        log_det = 0.0
        for net in nets:
            shift, log_scale = tf.split(net(a), 2, axis=1)
            log_scale = tf.tanh(log_scale)
            a, b = b * tf.exp(log_scale) + shift, a
            log_det += tf.reduce_sum(log_scale, axis=1)
        square = tf.reduce_sum(tf.concat([a, b], axis=1) ** 2, axis=1)
        return tf.reduce_mean(0.5 * square - log_det)

    return _trained(loss_of, nets, _numbers(16, 8))


def _classify(layer: Any, x: np.ndarray | None = None) -> Losses:
    """Trains a classifier with a layer, and draws from its probabilities."""
    x = _numbers(16, 6, 8) if x is None else x
    inputs = tf.keras.Input(x.shape[1:], dtype=x.dtype.name)
    hidden = layer(inputs)
    if len(hidden.shape) == 3:
        hidden = L.GlobalAveragePooling1D()(hidden)
    model = tf.keras.Model(inputs, L.Dense(3, activation="softmax")(hidden))
    model.compile(_adam(), "sparse_categorical_crossentropy")
    steps = _fit(model, x, LABELS)
    for probabilities in model.predict(x, verbose=0):
        np.random.default_rng(0).choice(3, p=probabilities)
    return steps


@_program("attention in windows, with a table of biases")
def _windows() -> Losses:
    class Windowed(L.Layer):
        def build(self, shape: Any) -> None:
            self.qkv = L.Dense(24)
            self.table = tf.Variable(_noise((11,)), trainable=True)
            self.index = np.arange(6)[:, None] - np.arange(6) + 5

        def call(self, x: tf.Tensor) -> tf.Tensor:
            q, k, v = tf.split(self.qkv(x), 3, axis=-1)
            scores = tf.matmul(q * 8**-0.5, k, transpose_b=True)
            scores = scores + tf.gather(self.table, self.index)
            return tf.matmul(tf.nn.softmax(scores), v)

    return _classify(Windowed())


def _attention(masked: float) -> Losses:
    class Attention(L.Layer):
        def build(self, shape: Any) -> None:
            self.q, self.k, self.v = L.Dense(8), L.Dense(8), L.Dense(8)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            k = self.k(x)
            scores = tf.matmul(self.q(x), k, transpose_b=True)
            scores = scores / tf.math.sqrt(tf.cast(tf.shape(k)[-1], tf.float32))
            later = 1 - tf.linalg.band_part(tf.ones_like(scores), -1, 0)
            return tf.matmul(tf.nn.softmax(scores + later * masked), self.v(x))

    return _classify(Attention())


_program("attention with a float32 scale, masked with -1e9")(lambda: _attention(-1e9))
_program("attention masked with -1e36")(lambda: _attention(-1e36))


@_program("mixture of experts with a balance loss")
def _experts() -> Losses:
    class Experts(L.Layer):
        def build(self, shape: Any) -> None:
            self.router, self.experts = L.Dense(3), [L.Dense(8) for _ in range(3)]

        def call(self, x: tf.Tensor) -> tf.Tensor:
            shares = tf.nn.softmax(self.router(x))
            chosen = tf.one_hot(tf.argmax(shares, axis=-1), 3)
            balance = tf.reduce_mean(chosen, axis=(0, 1)) * tf.reduce_mean(shares, axis=(0, 1))
            self.add_loss(3 * tf.reduce_sum(balance))
            gates = shares * chosen
            return tf.add_n([gates[..., i : i + 1] * e(x) for i, e in enumerate(self.experts)])

    return _classify(Experts())


@_program("soft decision tree")
def _tree() -> Losses:
    class Tree(L.Layer):
        def build(self, shape: Any) -> None:
            self.features = tf.one_hot([0, 3, 5, 6], 8)
            self.leaves = tf.Variable(_noise((4, 3)), trainable=True)
            self.decide = L.Dense(3, "sigmoid")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            right = self.decide(tf.matmul(x, self.features, transpose_b=True))
            both = tf.stack([right, 1 - right], axis=-1)
            reached = tf.ones((tf.shape(x)[0], 1))
            for level, nodes in enumerate((slice(0, 1), slice(1, 3))):
                reached = tf.reshape(reached[..., None] * both[:, nodes], (-1, 2 ** (level + 1)))
            return tf.matmul(reached, tf.nn.softmax(self.leaves))

    return _classify(Tree(), _numbers(16, 8))


@_program("embeddings times float32 positions")
def _positions() -> Losses:
    class Embedded(L.Layer):
        def build(self, shape: Any) -> None:
            self.tokens = L.Embedding(20, 8)
            angles = np.arange(6)[:, None] / 10 ** (np.arange(8) / 4)
            self.positions = tf.constant(np.sin(angles), tf.float32)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.tokens(x) * tf.math.sqrt(8.0) + self.positions[: tf.shape(x)[1]]

    return _classify(Embedded(), np.arange(96).reshape(16, 6) % 20)


@_program("recurrent cell with tf.while_loop")
def _recurrent() -> Losses:
    class Recurrent(L.Layer):
        def build(self, shape: Any) -> None:
            self.cell = L.Dense(8, "tanh")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            x = self.cell(x)
            decay = tf.constant(0.9)
            loop = tf.while_loop(
                lambda i, h: i < 6,
                lambda i, h: (i + 1, decay * h + x[:, i]),
                (0, tf.zeros_like(x[:, 0])),
                maximum_iterations=6,
            )
            return loop[1]

    return _classify(Recurrent())


@_program("graph convolution by segments")
def _graph() -> Losses:
    class Graph(L.Layer):
        def build(self, shape: Any) -> None:
            self.transform, edges = L.Dense(8), np.arange(6)
            self.edges, self.weights_of = (edges, (edges + 1) % 6), tf.linspace(0.5, 1.0, 6)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            sources = tf.gather(self.transform(x), self.edges[0], axis=1)
            messages = tf.transpose(sources * self.weights_of[:, None], (1, 0, 2))
            sums = tf.math.unsorted_segment_sum(messages, self.edges[1], 6)
            return x + tf.transpose(sums, (1, 0, 2))

    return _classify(Graph())


@_program("physics: derivatives of the network in the loss")
def _physics() -> Losses:
    network = _dense(1, 16, 1)

    def loss_of(t: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as inner:
            inner.watch(t)
            y = network(t)
        slope = inner.gradient(y, t)
        start = tf.square(network(tf.zeros((1, 1))) - 1.0)
        return tf.reduce_mean(tf.square(slope + y)) + tf.reduce_mean(start)

    return _trained(loss_of, [network], np.linspace(0, 1, 16, dtype="float32")[:, None])


@_program("distillation with a temperature")
def _distillation() -> Losses:
    teacher, student, kl = _dense(8, 32, 3), _dense(8, 3), tf.keras.losses.KLDivergence()
    teacher.trainable = False

    def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        of_teacher, logits = teacher(x, training=False), student(x, training=True)
        soft = kl(tf.nn.softmax(of_teacher / 3.0), tf.nn.softmax(logits / 3.0)) * 9.0
        return 0.1 * CROSS_ENTROPY(y, logits) + 0.9 * soft

    return _trained(loss_of, [teacher, student], _numbers(16, 8), LABELS)


@_program("contrastive loss with a temperature variable")
def _contrastive() -> Losses:
    class Contrastive(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.temperature = _dense(8, 16, 4), tf.Variable(0.5, trainable=True)

        def train_step(self, data: Any) -> dict:
            x = _features(data)
            with tf.GradientTape() as tape:
                views = [tf.math.l2_normalize(self.encoder(v), axis=1) for v in (x, x * 0.9 + 0.1)]
                similar = tf.matmul(views[0], views[1], transpose_b=True) / self.temperature
                labels = tf.range(tf.shape(x)[0])
                loss = tf.reduce_mean(
                    tf.keras.losses.sparse_categorical_crossentropy(
                        labels, similar, from_logits=True
                    )
                )
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return {"loss": loss}

    model = Contrastive()
    model.compile(optimizer=_adam())
    return _fit(model, _numbers(16, 8))


@_program("siamese network with a triplet loss")
def _triplets() -> Losses:
    embed = _dense(8, 16, 4)

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        anchor, near, far = (embed(v) for v in (x, x + 0.1, tf.reverse(x, [0])))
        distances = [tf.reduce_sum(tf.square(anchor - v), -1) for v in (near, far)]
        return tf.reduce_mean(tf.maximum(distances[0] - distances[1] + 10.0, 0.0))

    return _trained(loss_of, [embed], _numbers(16, 8))


@_program("adversarial examples in the step")
def _adversarial() -> Losses:
    def step(model: tf.keras.Model, data: Any) -> tf.Tensor:
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        x = x + 0.05 * tf.sign(tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        _apply(model.optimizer, tape, loss, model.trainable_variables)
        return loss

    return _stepped(step, [_dense(8, 16, 3)], _numbers(16, 8), LABELS, loss=CROSS_ENTROPY)


@_program("graph network that applies the optimizer given to compile")
def _own_optimizer() -> Losses:
    optimizer = tf.keras.optimizers.SGD(1e5)

    def step(model: tf.keras.Model, data: Any) -> tf.Tensor:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y)) * 1e-6
        _apply(optimizer, tape, loss, model.trainable_variables)
        return loss * 1e6

    networks, data = [_dense(8, 16, 1)], (_numbers(16, 8), _numbers(16, 1))
    return _stepped(step, networks, *data, optimizer=optimizer, loss="mse")


@_program("gradients accumulated by hand")
def _accumulated() -> Losses:
    def step(model: tf.keras.Model, data: Any) -> tf.Tensor:
        x, y = data
        sums = [tf.zeros_like(v) for v in model.trainable_variables]
        for part in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x[part::2]) - y[part::2]))
            found = tape.gradient(loss, model.trainable_variables)
            sums = [a + b / 2.0 for a, b in zip(sums, found)]
        sums, _ = tf.clip_by_global_norm(sums, 1.0)
        model.optimizer.apply_gradients(zip(sums, model.trainable_variables))
        return loss

    return _stepped(step, [_dense(8, 16, 1)], _numbers(16, 8), _numbers(16, 1))


@_program("captions: a sampler in a callback")
def _sampler() -> Losses:
    class Sampler(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            tokens = [1]
            for _ in range(3):
                logits, indices = tf.math.top_k(
                    self.model.predict(np.array([tokens]), verbose=0)[0][-1], 4
                )
                p = tf.nn.softmax(tf.expand_dims(logits, 0))[0].numpy()
                tokens.append(int(np.random.default_rng(0).choice(indices, p=p)))

    inputs = tf.keras.Input((None,), dtype="int32")
    hidden = L.GRU(16, return_sequences=True)(L.Embedding(12, 8)(inputs))
    model = tf.keras.Model(inputs, L.Dense(12)(hidden))
    model.compile(_adam(), CROSS_ENTROPY)
    x = np.arange(96).reshape(16, 6) % 12
    return _fit(model, x, (x + 1) % 12, [Sampler()])


@_program("speech: CTC, and its decoder")
def _ctc() -> Losses:
    class Loss(L.Layer):
        def call(self, labels: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
            ones = tf.ones((tf.shape(found)[0],), tf.int32)
            logits = tf.math.log(tf.transpose(found, (1, 0, 2)) + 1e-7)
            of_label, of_logit = 3 * ones, 12 * ones
            losses = tf.nn.ctc_loss(
                tf.cast(labels, tf.int32), logits, of_label, of_logit, blank_index=-1
            )
            self.add_loss(tf.reduce_mean(losses))
            return found

    inputs, labels = tf.keras.Input((12, 8), name="x"), tf.keras.Input((3,), name="y")
    hidden = L.Bidirectional(L.LSTM(8, return_sequences=True))(inputs)
    model = tf.keras.Model([inputs, labels], Loss()(labels, L.Dense(5, "softmax")(hidden)))
    model.compile(_adam())
    x = [_numbers(16, 12, 8), (np.arange(48).reshape(16, 3) % 4).astype("float32")]
    steps = _fit(model, {"x": x[0], "y": x[1]})
    found = model.predict(x, verbose=0)
    tf.nn.ctc_greedy_decoder(tf.math.log(tf.transpose(found, (1, 0, 2)) + 1e-7), [12] * 16)
    return steps


@_program("actor and critic, by np.random.choice")
def _actor_critic() -> Losses:
    inputs = tf.keras.Input((4,))
    hidden = L.Dense(16, "relu")(inputs)
    model = tf.keras.Model(inputs, [L.Dense(2, "softmax")(hidden), L.Dense(1)(hidden)])
    huber, states = tf.keras.losses.Huber(), tf.constant(_numbers(6, 4))

    def loss_of() -> tf.Tensor:
        losses = []
        for i in range(6):
            probabilities, value = model(states[i : i + 1])
            np.random.default_rng(0).choice(2, p=np.squeeze(probabilities))
            reward = tf.constant([[1.0 + i % 2]])
            losses.append(-tf.math.log(probabilities[0, i % 2]) * (reward - value)[0, 0])
            losses.append(huber(value, reward))
        return sum(losses)

    return _looped(loss_of, model.trainable_variables, is_eager=True)


@_program("clipped policy ratios")
def _ratios() -> Losses:
    policy = _dense(4, 16, 2)
    states, advantages = tf.constant(_numbers(8, 4)), tf.constant(_numbers(8))
    actions = tf.one_hot(tf.range(8) % 2, 2)
    old = tf.reduce_sum(tf.nn.log_softmax(policy(states)) * actions, axis=1)

    def loss_of() -> tf.Tensor:
        now = tf.reduce_sum(tf.nn.log_softmax(policy(states)) * actions, axis=1)
        limits = tf.where(advantages > 0, 1.2 * advantages, 0.8 * advantages)
        return -tf.reduce_mean(tf.minimum(tf.exp(now - old) * advantages, limits))

    return _looped(loss_of, policy.trainable_variables)


@_program("DDPG with target networks")
def _ddpg() -> Losses:
    def critic() -> tf.keras.Model:
        state, action = tf.keras.Input((3,)), tf.keras.Input((1,))
        both = L.Concatenate()([state, action])
        return tf.keras.Model([state, action], L.Dense(1)(L.Dense(16, "relu")(both)))

    actor, target_actor = _dense(3, 16, 1, last="tanh"), _dense(3, 16, 1, last="tanh")
    judge, target_judge = critic(), critic()
    optimizers = _adam(), _adam()
    states, rewards = tf.constant(_numbers(8, 3)), tf.constant(_numbers(8, 1))

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            wanted = rewards + 0.99 * target_judge([states, target_actor(states) * 2.0])
            loss = tf.reduce_mean(tf.square(wanted - judge([states, actor(states)])))
        _apply(optimizers[0], tape, loss, judge.trainable_variables)
        with tf.GradientTape() as tape:
            gain = -tf.reduce_mean(judge([states, actor(states)]))
        _apply(optimizers[1], tape, gain, actor.trainable_variables)
        for target, source in ((target_actor, actor), (target_judge, judge)):
            for a, b in zip(target.variables, source.variables):
                a.assign(b * 0.05 + a * 0.95)
        return loss

    return _loop(step)


@_program("style transfer with Gram matrices")
def _style() -> Losses:
    class Style(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.conv = L.Conv2D(4, 3, activation="relu")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            f = self.conv(x * 16.0)
            size = tf.cast(tf.shape(f)[1] * tf.shape(f)[2], tf.float32)
            return tf.linalg.einsum("bijc,bijd->bcd", f, f) / size

    model, image = Style(), tf.Variable(np.abs(_numbers(1, 24, 24, 3)))
    wanted = model(image) * 0.5
    return _looped(lambda: tf.reduce_mean(tf.square(model(image) - wanted)), [image], 0.02)


@_program("GAN with both tapes in one with")
def _two_tapes() -> Losses:
    class TwoTapes(_GAN):
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

    return _gan(_large_steps, TwoTapes)


@_program("Grad-CAM as a loss")
def _grad_cam() -> Losses:
    inputs = tf.keras.Input((8, 8, 3))
    maps = L.Conv2D(4, 3, activation="relu")(inputs)
    logits = L.Dense(3)(L.GlobalAveragePooling2D()(maps))
    model = tf.keras.Model(inputs, [maps, logits])
    x, labels = tf.constant(_numbers(16, 8, 8, 3)), tf.constant(LABELS)

    def loss_of() -> tf.Tensor:
        with tf.GradientTape() as inner:
            features, scores = model(x)
            score = tf.reduce_sum(scores[:, 0])
        weights = tf.reduce_mean(inner.gradient(score, features), axis=(1, 2), keepdims=True)
        heat = tf.nn.relu(tf.reduce_sum(weights * features, axis=-1))
        return CROSS_ENTROPY(labels, scores) + tf.reduce_mean(heat)

    return _looped(loss_of, model.trainable_variables)


class _Normal:
    """A distribution, as libraries make them: an object with tensors."""

    def __init__(self, mean: tf.Tensor, deviation: tf.Tensor) -> None:
        self.mean, self.deviation = mean, deviation

    def log_prob(self, x: tf.Tensor) -> tf.Tensor:
        return -tf.square((x - self.mean) / self.deviation) / 2 - tf.math.log(self.deviation)


@_program("model that returns a distribution")
def _distribution() -> Losses:
    class Model(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = _dense(8, 16, 2)

        def call(self, x: tf.Tensor) -> _Normal:
            mean, deviation = tf.split(self.net(x), 2, axis=1)
            return _Normal(mean, tf.nn.softplus(deviation) + 0.1)

    model, x, y = Model(), tf.constant(_numbers(16, 8)), tf.constant(_numbers(16, 1) * 30)
    model(x)
    return _looped(
        lambda: -tf.reduce_mean(model(x).log_prob(y)), model.net.trainable_variables, is_eager=True
    )

"""More of the programs of `one_line_programs`: layers, losses and loops of people's own."""

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.acceptance.one_line_programs import (
    L,
    Steps,
    _apply,
    _dense,
    _features,
    _fit,
    _loop,
    _noise,
    _numbers,
    _program,
)

LABELS = np.arange(16) % 3


def _classify(layer: Any, x: np.ndarray | None = None) -> Steps:
    """Trains a classifier with a layer, and draws from its probabilities."""
    x = _numbers(16, 6, 8) if x is None else x
    inputs = tf.keras.Input(x.shape[1:], dtype=x.dtype.name)
    hidden = layer(inputs)
    if len(hidden.shape) == 3:
        hidden = L.GlobalAveragePooling1D()(hidden)
    model = tf.keras.Model(inputs, L.Dense(3, activation="softmax")(hidden))
    model.compile(tf.keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy")
    steps = _fit(model, x, LABELS)
    for probabilities in model.predict(x, verbose=0):
        np.random.default_rng(0).choice(3, p=probabilities)
    return steps


@_program("attention in windows, with a table of biases")
def _windows() -> Steps:
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


@_program("attention with a float32 scale and a mask")
def _attention() -> Steps:
    class Attention(L.Layer):
        def build(self, shape: Any) -> None:
            self.q, self.k, self.v = L.Dense(8), L.Dense(8), L.Dense(8)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            k = self.k(x)
            scores = tf.matmul(self.q(x), k, transpose_b=True)
            scores = scores / tf.math.sqrt(tf.cast(tf.shape(k)[-1], tf.float32))
            mask = tf.linalg.band_part(tf.ones((6, 6)), -1, 0)
            return tf.matmul(tf.nn.softmax(scores - 1e9 * (1.0 - mask)), self.v(x))

    return _classify(Attention())


@_program("mixture of experts with a balance loss")
def _experts() -> Steps:
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
def _tree() -> Steps:
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
def _positions() -> Steps:
    class Embedded(L.Layer):
        def build(self, shape: Any) -> None:
            self.tokens = L.Embedding(20, 8)
            angles = np.arange(6)[:, None] / 10 ** (np.arange(8) / 4)
            self.positions = tf.constant(np.sin(angles), tf.float32)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.tokens(x) * tf.math.sqrt(8.0) + self.positions[: tf.shape(x)[1]]

    return _classify(Embedded(), np.arange(96).reshape(16, 6) % 20)


@_program("recurrent cell with tf.while_loop")
def _recurrent() -> Steps:
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
def _graph() -> Steps:
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
def _physics() -> Steps:
    class Oscillator(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.network = _dense(1, 16, 1)

        def train_step(self, data: Any) -> dict:
            t = _features(data)
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(t)
                    y = self.network(t)
                slope = inner.gradient(y, t)
                start = tf.square(self.network(tf.zeros((1, 1))) - 1.0)
                loss = tf.reduce_mean(tf.square(slope + y)) + tf.reduce_mean(start)
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return {"loss": loss}

    model = Oscillator()
    model.compile(optimizer=tf.keras.optimizers.Adam(1e-2))
    return _fit(model, np.linspace(0, 1, 16, dtype="float32")[:, None])


@_program("distillation with a temperature")
def _distillation() -> Steps:
    class Distiller(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = _dense(8, 32, 3), _dense(8, 3)

        def compile(self, student_loss: Any, **kwargs: Any) -> None:
            super().compile(**kwargs)
            self.student_loss = student_loss

        def train_step(self, data: Any) -> dict:
            x, y = data
            of_teacher, kl = self.teacher(x, training=False), tf.keras.losses.KLDivergence()
            with tf.GradientTape() as tape:
                logits = self.student(x, training=True)
                soft = kl(tf.nn.softmax(of_teacher / 3.0), tf.nn.softmax(logits / 3.0)) * 9.0
                loss = 0.1 * self.student_loss(y, logits) + 0.9 * soft
            _apply(self.optimizer, tape, loss, self.student.trainable_variables)
            return {"loss": loss}

    model = Distiller()
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(cross_entropy, optimizer=tf.keras.optimizers.Adam(1e-2))
    return _fit(model, _numbers(16, 8), LABELS)


@_program("contrastive loss with a temperature variable")
def _contrastive() -> Steps:
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
    model.compile(optimizer=tf.keras.optimizers.Adam(1e-2))
    return _fit(model, _numbers(16, 8))


@_program("siamese network with a triplet loss")
def _triplets() -> Steps:
    class Siamese(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.margin = _dense(8, 16, 4), 10.0

        def train_step(self, data: Any) -> dict:
            x = _features(data)
            with tf.GradientTape() as tape:
                anchor, near, far = (self.embed(v) for v in (x, x + 0.1, tf.reverse(x, [0])))
                distances = [tf.reduce_sum(tf.square(anchor - v), -1) for v in (near, far)]
                loss = tf.reduce_mean(tf.maximum(distances[0] - distances[1] + self.margin, 0.0))
            _apply(self.optimizer, tape, loss, self.embed.trainable_weights)
            return {"loss": loss}

    model = Siamese()
    model.compile(optimizer=tf.keras.optimizers.Adam(1e-2))
    return _fit(model, _numbers(16, 8))


@_program("adversarial examples in the step")
def _adversarial() -> Steps:
    class Robust(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.network = _dense(8, 16, 3)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.network(x)

        def train_step(self, data: Any) -> dict:
            x, y = data
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            x = x + 0.05 * tf.sign(tape.gradient(loss, x))
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            _apply(self.optimizer, tape, loss, self.trainable_variables)
            return {"loss": loss}

    model = Robust()
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(1e-2), cross_entropy)
    return _fit(model, _numbers(16, 8), LABELS)


@_program("graph network that applies the optimizer given to compile")
def _own_optimizer() -> Steps:
    optimizer = tf.keras.optimizers.SGD(1e5)

    class Network(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.network = _dense(8, 16, 1)

        def train_step(self, data: Any) -> dict:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.network(x) - y)) * 1e-6
            _apply(optimizer, tape, loss, self.trainable_variables)
            return {"loss": loss * 1e6}

    model = Network()
    model.compile(optimizer, "mse")
    return _fit(model, _numbers(16, 8), _numbers(16, 1))


@_program("gradients accumulated by hand")
def _accumulated() -> Steps:
    class Accumulating(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.network = _dense(8, 16, 1)

        def train_step(self, data: Any) -> dict:
            x, y = data
            sums = [tf.zeros_like(v) for v in self.trainable_variables]
            for part in range(2):
                with tf.GradientTape() as tape:
                    error = self.network(x[part::2]) - y[part::2]
                    loss = tf.reduce_mean(tf.square(error))
                found = tape.gradient(loss, self.trainable_variables)
                sums = [a + b / 2.0 for a, b in zip(sums, found)]
            sums, _ = tf.clip_by_global_norm(sums, 1.0)
            self.optimizer.apply_gradients(zip(sums, self.trainable_variables))
            return {"loss": loss}

    model = Accumulating()
    model.compile(optimizer=tf.keras.optimizers.Adam(1e-2))
    return _fit(model, _numbers(16, 8), _numbers(16, 1))


@_program("an image that is optimized")
def _image() -> Steps:
    features = tf.keras.Sequential([tf.keras.Input((8, 8, 3)), L.Conv2D(4, 3, activation="relu")])
    target = features(tf.constant(_numbers(1, 8, 8, 3)))
    image, optimizer = tf.Variable(tf.zeros((1, 8, 8, 3)) + 0.1), tf.keras.optimizers.Adam(1e-1)

    def gram(x: tf.Tensor) -> tf.Tensor:
        return tf.linalg.einsum("bijc,bijd->bcd", x, x) / tf.cast(tf.size(x), tf.float32)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            found = features(image)
            loss = tf.reduce_mean(tf.square(found - target))
            loss += tf.reduce_mean(tf.square(gram(found) - gram(target)))
        optimizer.apply_gradients([(tape.gradient(loss, image), image)])
        image.assign(tf.clip_by_value(image, -1.0, 1.0))
        return loss

    return _loop(step)


@_program("captions: a sampler in a callback")
def _sampler() -> Steps:
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
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(1e-2), cross_entropy)
    x = np.arange(96).reshape(16, 6) % 12
    return _fit(model, x, (x + 1) % 12, [Sampler()])


@_program("speech: CTC, and its decoder")
def _ctc() -> Steps:
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
    model.compile(tf.keras.optimizers.Adam(1e-2))
    x = [_numbers(16, 12, 8), (np.arange(48).reshape(16, 3) % 4).astype("float32")]
    steps = _fit(model, {"x": x[0], "y": x[1]})
    found = model.predict(x, verbose=0)
    tf.nn.ctc_greedy_decoder(tf.math.log(tf.transpose(found, (1, 0, 2)) + 1e-7), [12] * 16)
    return steps


def _policy_and_value() -> tf.keras.Model:
    inputs = tf.keras.Input((4,))
    hidden = L.Dense(16, "relu")(inputs)
    return tf.keras.Model(inputs, [L.Dense(2, "softmax")(hidden), L.Dense(1)(hidden)])


@_program("actor and critic, by np.random.choice")
def _actor_critic() -> Steps:
    model, huber = _policy_and_value(), tf.keras.losses.Huber()
    optimizer, states = tf.keras.optimizers.Adam(1e-2), tf.constant(_numbers(6, 4))

    def step() -> tf.Tensor:
        losses = []
        with tf.GradientTape() as tape:
            for i in range(6):
                probabilities, value = model(states[i : i + 1])
                np.random.default_rng(0).choice(2, p=np.squeeze(probabilities))
                reward = tf.constant([[1.0 + i % 2]])
                losses.append(-tf.math.log(probabilities[0, i % 2]) * (reward - value)[0, 0])
                losses.append(huber(value, reward))
            loss = sum(losses)
        _apply(optimizer, tape, loss, model.trainable_variables)
        return loss

    return _loop(step)


@_program("REINFORCE with returns")
def _reinforce() -> Steps:
    policy, optimizer = _dense(4, 16, 2), tf.keras.optimizers.Adam(1e-2)
    states, returns = tf.constant(_numbers(8, 4)), tf.constant(_numbers(8))

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            log_p = tf.nn.log_softmax(policy(states))
            chosen = tf.gather(log_p, tf.range(8) % 2, axis=1, batch_dims=1)
            loss = -tf.reduce_mean(chosen * returns)
        _apply(optimizer, tape, loss, policy.trainable_variables)
        return loss

    return _loop(step)


@_program("clipped policy ratios")
def _ratios() -> Steps:
    policy, optimizer = _dense(4, 16, 2), tf.keras.optimizers.Adam(1e-2)
    states, advantages = tf.constant(_numbers(8, 4)), tf.constant(_numbers(8))
    actions = tf.one_hot(tf.range(8) % 2, 2)
    old = tf.reduce_sum(tf.nn.log_softmax(policy(states)) * actions, axis=1)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            now = tf.reduce_sum(tf.nn.log_softmax(policy(states)) * actions, axis=1)
            limits = tf.where(advantages > 0, 1.2 * advantages, 0.8 * advantages)
            loss = -tf.reduce_mean(tf.minimum(tf.exp(now - old) * advantages, limits))
        _apply(optimizer, tape, loss, policy.trainable_variables)
        return loss

    return _loop(step)


@_program("DDPG with target networks")
def _ddpg() -> Steps:
    def critic() -> tf.keras.Model:
        state, action = tf.keras.Input((3,)), tf.keras.Input((1,))
        both = L.Concatenate()([state, action])
        return tf.keras.Model([state, action], L.Dense(1)(L.Dense(16, "relu")(both)))

    actor, target_actor = _dense(3, 16, 1, last="tanh"), _dense(3, 16, 1, last="tanh")
    judge, target_judge = critic(), critic()
    optimizers = tf.keras.optimizers.Adam(1e-2), tf.keras.optimizers.Adam(1e-2)
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


@_program("sparse autoencoder by an activity regularizer")
def _sparse() -> Steps:
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8,)),
            L.Dense(16, "relu", activity_regularizer=tf.keras.regularizers.L1(1e-3)),
            L.Dense(8),
        ]
    )
    model.compile(tf.keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    x = _numbers(16, 8)
    return _fit(model, x, x)

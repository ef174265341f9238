"""Six broken models, as people write them: the first call names the cause, and its cure trains."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import numerics
from tests.numerics.tools import of_keras, sequential

L = tf.keras.layers
rng = np.random.default_rng(0)
X = rng.normal(size=[64, 8]).astype("float32")
Y = (X[:, :1] > 0).astype("float32")
TOKENS = rng.integers(0, 50, [64, 12]).astype("int32")
PRESENT = (np.arange(12) < rng.integers(3, 12, [64, 1])).astype("float32")


class Attention(L.Layer):
    """Attention that leaves out padding."""

    def __init__(self, is_cured):
        super().__init__(name="attention")
        self.is_cured = is_cured
        self.query, self.key, self.value = L.Dense(8), L.Dense(8), L.Dense(8)

    def call(self, x, present):
        scores = tf.matmul(self.query(x), self.key(x), transpose_b=True)
        absent = 1.0 - tf.cast(present, scores.dtype)[:, None, :]
        if self.is_cured:
            scores += absent * scores.dtype.min
        else:
            scores += absent * scores.dtype.as_numpy_dtype(-1e9)
        return tf.matmul(tf.nn.softmax(scores), self.value(x))


class Norm(L.Layer):
    def call(self, x):
        return x / tf.sqrt(tf.reduce_sum(x * x, axis=-1, keepdims=True))


class Logarithm(L.Layer):
    def __init__(self, is_cured):
        super().__init__(name="logarithm")
        self.is_cured = is_cured

    def call(self, x):
        if self.is_cured:
            x = tf.maximum(x, 1e-4)
        return tf.math.log(x)


class GAN(tf.keras.Model):
    """Its losses are so small that float16 needs a loss scale."""

    def __init__(self):
        super().__init__(name="gan")
        largest = L.Reshape([2, 8]), L.Lambda(lambda x: tf.reduce_max(x, 1))  # with a mask
        self.generator = tf.keras.Sequential([L.Dense(16, "relu"), *largest, L.Dense(8)])
        self.critic = tf.keras.Sequential([L.Dense(16, "relu"), L.Dense(1)])
        self.optimizers = [tf.keras.optimizers.SGD(rate) for rate in (1e6, 1e4)]
        self.critic(self.generator(tf.zeros([1, 4])))

    def call(self, noise):
        return self.generator(noise)

    def train_step(self, data):
        real = data[0]
        noise = tf.random.normal([tf.shape(real)[0], 4])
        with tf.GradientTape(persistent=True) as tape:
            of_real, of_false = self.critic(real), self.critic(self.generator(noise))
            loss = 1e-7 * tf.reduce_mean(tf.nn.softplus(-of_real) + tf.nn.softplus(of_false))
            of_generator = 1e-7 * tf.reduce_mean(tf.nn.softplus(-of_false))
        for part, each, optimizer in zip(
            [self.critic, self.generator], [loss, of_generator], self.optimizers, strict=True
        ):
            variables = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(each, variables), variables, strict=True))
        return {"critic_loss": loss * 1e7}


def optimizer_of(is_cured):
    """One that trains quickly, or one of few operations, of which a `watch` block looks at each."""
    return "adam" if is_cured else "sgd"


def compiled(*layers, optimizer):
    return sequential(*layers, L.Dense(16, "elu"), L.Dense(1), optimizer=optimizer)


def with_a_mask(is_cured):
    tokens, present = tf.keras.Input([12], dtype="int32"), tf.keras.Input([12])
    x = Attention(is_cured)(L.Embedding(50, 8)(tokens), present)
    model = tf.keras.Model([tokens, present], L.Dense(1)(L.GlobalAveragePooling1D()(x)))
    model.compile(optimizer_of(is_cured), "mse", jit_compile=False)
    return model, [TOKENS, PRESENT]


def with_a_norm(is_cured):
    norm = Norm(name="norm", dtype="float32" if is_cured else of_keras())
    return compiled(norm, optimizer=optimizer_of(is_cured)), X * 1e-5


def with_a_learning_rate(is_cured):
    optimizer = tf.keras.optimizers.SGD(1e-2 if is_cured else 10.0)
    return compiled(L.Dense(16, name="first"), L.Dense(16), optimizer=optimizer), X


def with_huge_inputs(is_cured):
    normalization = [L.Normalization(mean=0.0, variance=1e12)] if is_cured else []
    return compiled(*normalization, optimizer=optimizer_of(is_cured)), X * 1e6


def with_a_logarithm(is_cured):
    layer = Logarithm(is_cured)
    return compiled(layer, optimizer=optimizer_of(is_cured)), np.round(np.abs(X))


def gan(is_cured):
    loss_scale = "dynamic" if is_cured else None
    with keras_mp.policy_scope(keras_mp.Policy("mixed_float16", loss_scale=loss_scale)):
        model = GAN()
    model.compile("sgd", "mse", jit_compile=False)
    return model, X


# By model: what `check` says of the cause, of the cure, and what a `watch` block says.
BROKEN = {
    with_a_mask: (
        "a constant that is infinite in 16 bits, in attention",
        *("its lowest number", ("Const in attention", "too large for float16")),
    ),
    with_a_norm: (
        "an underflow in the forward pass, in norm",
        *("Compute it in float32", ("RealDiv in norm", ": 0 to 0", "check(model, (x, y))")),
    ),
    with_a_learning_rate: (
        *("Weights reach", "lower the learning rate"),
        ("Weights reach", "Lower the learning rate"),
    ),
    with_huge_inputs: (
        "an input that 16 bits do not hold, in the model's input",
        *("Normalization", ("Cast in dense", "This input is too large for float16")),
    ),
    with_a_logarithm: (
        "a result that is not finite in any dtype, in logarithm",
        *("tf.maximum(x, 1e-4)", ("Log in logarithm", ": 0 to ", "check(model, (x, y))")),
    ),
    gan: ("float16 without loss scaling", 'set_global_policy("mixed_float16")', None),
}
LINES = {with_a_mask: "-1e9", with_a_norm: "tf.sqrt", with_a_logarithm: "tf.math.log"}


def fit(model, x, epochs):
    history = model.fit(x, Y, epochs=epochs, batch_size=32, verbose=0).history
    return next(iter(history.values()))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # the mask
@pytest.mark.filterwarnings("ignore:`build..` was called on layer:UserWarning")
@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_the_first_screen_names_the_cause_and_the_cure_trains(make):
    cause, cure, of_watch = BROKEN[make]
    tf.keras.utils.set_random_seed(0)
    with keras_mp.policy_scope("mixed_float16"):
        (model, x), (cured, _) = (make(is_cured=each) for each in (False, True))
    if of_watch is not None:
        with pytest.raises(numerics.NotFiniteError) as raised, numerics.watch(model):
            fit(model, x, epochs=12)  # so that the loss scale has come down
        assert [part for part in of_watch if part not in str(raised.value)] == [], raised.value
    found = numerics.check(model, (x, Y))
    first = " ".join(str(found).partition("[2]")[0].split())
    assert cause in first, first
    assert cure in first, first
    assert "[1m" not in str(found)
    assert "policy mixed_float16: " in str(found)
    # Nothing sends the reader to the tool that he has asked, or says one reason twice.
    assert "numerics.check" not in first
    assert str(found).count("Not looked at") <= (make is gan)
    assert all(len(line) <= 100 for line in str(found).splitlines())
    described = json.loads(found.to_json())
    assert described["findings"][0]["hazard"] == found.findings[0].hazard
    if make in LINES:
        source = pathlib.Path(__file__).read_text().splitlines()
        assert LINES[make] in source[found.findings[0].line.number - 1]

    losses = fit(cured, x, epochs=10)
    assert losses[-1] < 0.98 * losses[0]

"""The tasks of `benchmarks parity`: a model, its batches in order, and its quality in the end."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from benchmarks.acceptance import parity, parity_data, parity_models

layers = tf.keras.layers
_WINDOW = 48
# Images whose labels the test of the contrastive model knows.
_LABELLED = 100


def as_float32(outputs: Any) -> np.ndarray:
    """Outputs in float32, in which they are judged."""
    return tf.cast(outputs, tf.float32).numpy()


class Task(NamedTuple):
    """Something to learn.

    Attributes:
        make: makes a compiled model under the global policy. For a model with a `train_step`, it
            takes `scaled`, which makes the calls that Keras's guide asks for, and `wrap`, for an
            optimizer that `compile` does not wrap.
        batches: x and y of so many samples, in the order of training, from a random generator.
        quality: of a trained model, on data that it has not seen.
        measure: what that is.
        is_error: whether less is better.
        steps: of training.
        batch: samples of a step.
        records_scale: whether to note each change of the loss scale.
    """

    make: Callable[..., Any]
    batches: Callable[[np.random.Generator, int], tuple[Any, Any]]
    quality: Callable[[Any], float]
    measure: str
    is_error: bool
    steps: int
    batch: int = 32
    records_scale: bool = False


def rows_of_epochs(generator: np.random.Generator, length: int, count: int) -> np.ndarray:
    """Rows of an epoch after the other, each in another order."""
    epochs = [generator.permutation(length) for _ in range(-(-count // length))]
    return np.concatenate(epochs)[:count]


def batches_from(part: tuple[Any, Any]) -> Callable:
    """Batches of a training part."""

    def batches(generator: np.random.Generator, count: int) -> tuple[Any, Any]:
        x, y = part
        rows = rows_of_epochs(generator, len(y), count)
        of_x = {name: a[rows] for name, a in x.items()} if isinstance(x, dict) else x[rows]
        return of_x, y[rows]

    return batches


def accuracy(test: tuple[Any, Any]) -> Callable:
    """The share of a test part that a model tells right, in percent."""

    def quality(model: Any) -> float:
        return 100 * float(np.mean(np.argmax(as_float32(model(test[0])), -1) == test[1]))

    return quality


def root_mean_square(test: tuple[Any, Any]) -> Callable:
    """The error of a model on a test part."""

    def quality(model: Any) -> float:
        return float(np.sqrt(np.mean((as_float32(model(test[0])) - test[1]) ** 2)))

    return quality


def bits(test: tuple[Any, Any]) -> Callable:
    """The cross entropy of a test part, in bits."""

    def quality(model: Any) -> float:
        logits = as_float32(model(test[0]))
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(test[1], logits)
        return float(tf.reduce_mean(entropy) / np.log(2))

    return quality


def _compiled(
    network: Callable[[], Any], loss: Any, learning_rate: float, name: str = "Adam"
) -> Callable:
    def make(**_: Any) -> Any:
        model = network()
        model.compile(getattr(tf.keras.optimizers, name)(learning_rate), loss)
        return model

    return make


def _own_step(cls: Any, learning_rate: float) -> Callable:
    """The same of a model with a `train_step`."""

    def make(scaled: Callable | None = None, **_: Any) -> Any:
        model = cls(scaled)
        model.compile(tf.keras.optimizers.Adam(learning_rate))
        return model

    return make


def _classifier(
    network: Callable[[], Any], loss: Any, learning_rate: float, count: int, steps: int
) -> Task:
    train, test = parity_data.digits(count)
    return Task(
        _compiled(network, loss, learning_rate),
        batches_from(train),
        accuracy(test),
        "accuracy, %",
        is_error=False,
        steps=steps,
    )


def convolutions() -> Task:
    """A convolutional network that tells digits from another."""

    def network() -> Any:
        return tf.keras.Sequential(
            [
                tf.keras.Input([8, 8, 1]),
                layers.Rescaling(1 / 16),
                layers.Conv2D(16, 3, use_bias=False),
                layers.BatchNormalization(momentum=0.9),
                layers.ReLU(),
                layers.Conv2D(32, 3, use_bias=False),
                layers.BatchNormalization(momentum=0.9),
                layers.ReLU(),
                layers.GlobalAveragePooling2D(),
                layers.Dense(10, activation="softmax"),
            ]
        )

    return _classifier(network, "sparse_categorical_crossentropy", 2e-3, count=300, steps=1500)


def attention() -> Task:
    """A vision transformer that tells digits from another."""

    def network() -> Any:
        inputs = tf.keras.Input([8, 8, 1])
        x = layers.Conv2D(32, 2, strides=2)(layers.Rescaling(1 / 16)(inputs))
        x = parity_models.Positions()(layers.Reshape([16, 32])(x))
        for _ in range(2):
            x = parity_models.block(x, 32, 2)
        x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
        return tf.keras.Model(inputs, layers.Dense(10)(x))

    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return _classifier(network, loss, 1e-3, count=900, steps=1500)


def tabular() -> Task:
    """A table with numbers and categories."""
    import sklearn.metrics

    (x, y), (test_x, test_y) = parity_data.affairs()

    def network() -> Any:
        inputs = {name: tf.keras.Input([1], name=name) for name in x}
        encoded = []
        for name in ("age", "yrs_married", "educ"):
            normalization = layers.Normalization()
            normalization.adapt(x[name])
            encoded.append(normalization(inputs[name]))
        encoded.append(layers.Discretization([20.0, 25.0, 30.0, 40.0])(inputs["age"]))
        encoded[-1] = layers.CategoryEncoding(5, "one_hot")(encoded[-1])
        for name in ("occupation", "occupation_husb", "religious"):
            encoded.append(layers.CategoryEncoding(7, "one_hot")(inputs[name]))
        for name in ("rate_marriage", "children"):
            encoded.append(layers.Flatten()(layers.Embedding(6, 4)(inputs[name])))
        hidden = layers.Dense(32, activation="relu")(layers.Concatenate()(encoded))
        return tf.keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))

    return Task(
        _compiled(network, "binary_crossentropy", 2e-3),
        batches_from((x, y)),
        lambda model: 100 * sklearn.metrics.roc_auc_score(test_y, as_float32(model(test_x))),
        "area under the ROC curve, %",
        is_error=False,
        steps=1500,
    )


def _normalized(x: np.ndarray) -> Any:
    normalization = layers.Normalization(axis=-1)
    normalization.adapt(x)
    return normalization


def _of_numbers(
    network: Callable, parts: parity_data.Parts, learning_rate: float, steps: int
) -> Task:
    """A model that is made for the inputs of the training part."""
    train, test = parts
    make = _compiled(lambda: network(train[0]), "mse", learning_rate)
    measure = "root mean square error"
    return Task(make, batches_from(train), root_mean_square(test), measure, True, steps)


def regression() -> Task:
    """Targets as they are in the table."""

    def network(x: np.ndarray) -> Any:
        hidden = [layers.Dense(32, activation="relu"), layers.Dense(32, activation="relu")]
        return tf.keras.Sequential([tf.keras.Input([10]), _normalized(x), *hidden, layers.Dense(1)])

    return _of_numbers(network, parity_data.diabetes(), 2e-3, steps=1500)


def forecast_lstm() -> Task:
    """An LSTM that forecasts sunspots."""

    def network(x: np.ndarray) -> Any:
        inputs = tf.keras.Input(x.shape[1:])
        return tf.keras.Model(inputs, layers.Dense(1)(layers.LSTM(32)(_normalized(x)(inputs))))

    return _of_numbers(network, parity_data.sunspots(), 1e-2, steps=1500)


def forecast_gru() -> Task:
    """A GRU that forecasts by how much carbon dioxide will differ from the last month."""

    def network(x: np.ndarray) -> Any:
        inputs = tf.keras.Input(x.shape[1:])
        last = layers.Flatten()(layers.Cropping1D((x.shape[1] - 1, 0))(inputs))
        relative = layers.Subtract()([inputs, layers.Reshape([1, 1])(last)])
        change = layers.Dense(1)(layers.GRU(24)(relative))
        return tf.keras.Model(inputs, layers.Add()([last, change]))

    return _of_numbers(network, parity_data.carbon_dioxide(), 5e-3, steps=1000)


def _of_characters(
    network: Callable, learning_rate: float, parts: parity_data.Parts, **options: Any
) -> Task:
    train, test = parts
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    make = _compiled(network, loss, learning_rate)
    return Task(make, batches_from(train), bits(test), "bits a character", True, **options)


def characters() -> Task:
    """A language model on characters of Python's help."""
    parts = parity_data.help_pages(_WINDOW)
    network = functools.partial(parity_models.language_model, _WINDOW)
    return _of_characters(network, 3e-3, parts, steps=800, batch=16)


@functools.cache
def _pretrained() -> list[np.ndarray]:
    """Weights of the language model, trained in float32."""
    policy = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy("float32")
    try:
        tf.keras.utils.set_random_seed(0)
        task = characters()
        model = task.make()
        x, y = task.batches(np.random.default_rng(0), task.steps * task.batch)
        model.fit(x, y, batch_size=task.batch, shuffle=False, verbose=0)
        return [weight.numpy() for weight in model.weights]
    finally:
        tf.keras.mixed_precision.set_global_policy(policy)


def lora() -> Task:
    """That language model, with LoRA on Python's source code."""

    def network() -> Any:
        model = parity_models.language_model(_WINDOW, parity_models.LoraDense)
        of_lora = {
            id(v)
            for layer in model.layers
            for v in layer.trainable_weights
            if isinstance(layer, parity_models.LoraDense)
        }
        for layer in model.layers:
            if not isinstance(layer, parity_models.LoraDense):
                layer.trainable = False
        before = [v for v in model.weights if id(v) not in of_lora]
        for v, value in zip(before, _pretrained(), strict=True):
            v.assign(tf.cast(value, v.dtype))
        return model

    parts = parity_data.source_code(_WINDOW)
    return _of_characters(network, 5e-3, parts, steps=400, batch=16)


def denoising() -> Task:
    """Photographs with noise."""
    (train,), (test,) = parity_data.photographs()
    noisy = test + np.random.default_rng(1).normal(0, 25, test.shape).astype("float32")

    def network() -> Any:
        inputs = tf.keras.Input([16, 16, 1])
        scaled = layers.Rescaling(1 / 255)(inputs)
        x = layers.Conv2D(12, 3, padding="same", activation="relu")(scaled)
        x = layers.Conv2D(12, 3, padding="same", activation="relu")(x)
        noise = layers.Conv2D(1, 3, padding="same")(x)
        clean = layers.Subtract()([scaled, noise])
        return tf.keras.Model(inputs, layers.Rescaling(255.0)(clean))

    def batches(generator: np.random.Generator, count: int) -> tuple[Any, Any]:
        clean = train[rows_of_epochs(generator, len(train), count)]
        return clean + generator.normal(0, 25, clean.shape).astype("float32"), clean

    def quality(model: Any) -> float:
        error = np.mean((as_float32(model(noisy)) - test) ** 2)
        return float(10 * np.log10(255**2 / error))

    return Task(
        _compiled(network, "mse", 2e-3),
        batches,
        quality,
        "peak signal-to-noise ratio, dB",
        is_error=False,
        steps=1500,
        batch=16,
    )


def autoencoder() -> Task:
    """A variational autoencoder."""
    (images, _), (test, _) = parity_data.digits(900)
    test_noise = np.random.default_rng(1).normal(size=[len(test), 6]).astype("float32")

    def batches(generator: np.random.Generator, count: int) -> tuple[Any, Any]:
        noise = generator.normal(size=[count, 6]).astype("float32")
        return images[rows_of_epochs(generator, len(images), count)], noise

    return Task(
        _own_step(parity_models.Autoencoder, 3e-3),
        batches,
        lambda model: float(np.mean(as_float32(model.bound(test, test_noise)))),
        "negative evidence bound, nats",
        is_error=True,
        # Keras's own scale has not been doubled by then, so that it tells of skipped steps.
        steps=1900,
    )


def _view(generator: np.random.Generator, images: np.ndarray) -> np.ndarray:
    """Images moved by up to a pixel, with noise."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    moved = np.empty_like(images)
    down, right = generator.integers(0, 3, [2, len(images)])
    for i in range(3):
        for j in range(3):
            chosen = (down == i) & (right == j)
            moved[chosen] = padded[chosen, i : i + 8, j : j + 8]
    return moved + generator.normal(0, 2, images.shape).astype("float32")


def contrastive() -> Task:
    """Codes of digits, learnt without their labels. The nearest codes with labels name a test's."""
    import sklearn.neighbors

    (images, labels), (test, test_labels) = parity_data.digits(900)

    def batches(generator: np.random.Generator, count: int) -> tuple[Any, Any]:
        chosen = images[rows_of_epochs(generator, len(images), count)]
        return _view(generator, chosen), _view(generator, chosen)

    def quality(model: Any) -> float:
        neighbors = sklearn.neighbors.KNeighborsClassifier(1)
        codes = as_float32(tf.math.l2_normalize(model.encoder(images[:_LABELLED]), 1))
        neighbors.fit(codes, labels[:_LABELLED])
        return 100 * neighbors.score(
            as_float32(tf.math.l2_normalize(model.encoder(test), 1)), test_labels
        )

    make = _own_step(parity_models.Contrastive, 1e-3)
    return Task(
        make, batches, quality, "accuracy of neighbors, %", is_error=False, steps=500, batch=64
    )


def gan() -> Task:
    """A generator of digits. A classifier of real ones says whether they are those asked for."""
    import sklearn.svm

    images, labels = (np.concatenate(parts) for parts in zip(*parity_data.digits(900)))
    images = images.reshape(-1, 64) / 16
    judge = sklearn.svm.SVC(gamma=0.256).fit(images, labels)
    generator = np.random.default_rng(1)
    wanted, noise = np.arange(1000, dtype="int32") % 10, generator.normal(size=[1000, 16])
    noise = noise.astype("float32")

    def make(
        scaled: Callable | None = None, wrap: Callable[[Any], Any] = lambda optimizer: optimizer
    ) -> Any:
        model = parity_models.Gan(scaled)
        adam = tf.keras.optimizers.Adam
        model.compile(wrap(adam(1e-3, 0.5)), wrap(adam(1e-3, 0.5)))
        return model

    def batches(generator: np.random.Generator, count: int) -> tuple[Any, Any]:
        rows = rows_of_epochs(generator, len(images), count)
        return (images[rows], labels[rows]), generator.normal(size=[count, 16]).astype("float32")

    def quality(model: Any) -> float:
        return 100 * judge.score(as_float32(model.generate(wanted, noise)), wanted)

    return Task(make, batches, quality, "recognized, %", is_error=False, steps=1900)


def long() -> Task:
    """The next character from the eight before it, for 20,000 steps."""

    def network() -> Any:
        hidden = [layers.Embedding(128, 16), layers.Flatten(), layers.Dense(128, "relu")]
        return tf.keras.Sequential([tf.keras.Input([8]), *hidden, layers.Dense(128)])

    options = {"steps": 20_000, "batch": 64, "records_scale": True}
    return _of_characters(network, 1e-3, parity_data.contexts(8), **options)


TASKS: dict[str, Callable[[], Task]] = {
    "digits, convolutions": convolutions,
    "digits, attention": attention,
    "table, encodings": tabular,
    "regression, raw targets": regression,
    "forecast, LSTM": forecast_lstm,
    "forecast, GRU": forecast_gru,
    "characters, transformer": characters,
    "fine-tuning, LoRA": lora,
    "denoising": denoising,
    "variational autoencoder": autoencoder,
    "contrastive": contrastive,
    "GAN": gan,
    parity.LONG: long,
}

"""Layers that read raw inputs: each against its float32 self, to one rounding of its result."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.layer_calls import data_layers
from tests.common import IS_KERAS_3, Mixes, Subclassed, made, unscaled
from tests.models import compiled_model

layers = tf.keras.layers

YEARS = np.arange(1990, 2022, dtype="float32")[:, None]
FAR = np.array([[79990.3], [80000.0], [80010.9], [80700.5]], "float32")
EDGES = [255.95, 1000.3, 2000.7, 7e4, 9e4]
BETWEEN = np.array([[255.9], [1000.6], [2001], [66000], [80000], [95000]], "float32")
IDS = np.array([[257, 259, 2049], [3001, 3999, 4001]], "int64")
WORDS = np.array([["a", "b"], ["c", "nothing"]])
# Pixels of 16 bits, and rows of which float16 cannot hold the sum of squares.
DEEP = np.random.default_rng(0).uniform(0, 90000, [2, 8, 8, 3]).astype("float32")
IMAGES = np.random.default_rng(1).uniform(0, 255, [2, 8, 8, 3]).astype("float32")
ROWS = np.array([[300.0, 400.0], [1e-5, 1e-5], [0.0, 0.0], [7e4, 1.0]], "float32")
SERIES = np.array([[[0.1, 0.1], [1.0, 80000.0], [-999.0, -999.0]]], "float32")
KEPT = np.random.default_rng(4).uniform(300, 500, [1, 5000, 2]).astype("float32")
KEPT[:, ::5] = -1
SOUND = np.random.default_rng(2).uniform(-1, 1, [1, 600]).astype("float32") * 70000
LABELS = np.eye(2, 4, dtype="float32")
MASKED = {
    "images": IMAGES,
    "labels": np.array([[0.123456, 2049.0], [7.0, 1001.0]], "float32"),
    "segmentation_masks": np.full([2, 8, 8, 1], 1001, "int32"),
}
BOXED = {
    **MASKED,
    "bounding_boxes": {
        "boxes": np.array([[[1.3, 2.7, 4.1, 5.9]]] * 2, "float32"),
        "labels": np.array([[1001], [2049]], "int32"),
    },
}


def _embedding() -> Any:
    return layers.Embedding(
        5000, 1, embeddings_initializer=lambda shape, dtype=None: tf.range(5000.0)[:, None]
    )


XYXY = {"bounding_box_format": "xyxy"}


def _mean_of_what_is_kept() -> Any:
    pooling = layers.GlobalAveragePooling1D()
    return Mixes(lambda x: pooling(x, mask=tf.reduce_any(x != -1, -1)))


CASES: dict[str, tuple[Callable[[], Any], Any]] = {
    "Normalization": (lambda: layers.Normalization(mean=[2005.5], variance=[85.25]), YEARS),
    "Normalization far": (lambda: layers.Normalization(mean=[80000.0], variance=[9e5]), FAR),
    "Rescaling": (lambda: layers.Rescaling(1 / 65535, offset=-0.5), DEEP),
    "Discretization": (lambda: layers.Discretization(bin_boundaries=EDGES), BETWEEN),
    "CategoryEncoding": (lambda: layers.CategoryEncoding(4002, "multi_hot"), IDS),
    "Hashing": (lambda: layers.Hashing(3000), IDS),
    "HashedCrossing": (lambda: layers.HashedCrossing(3000), (IDS[:, :1], IDS[:, 1:2])),
    "StringLookup": (lambda: layers.StringLookup(vocabulary=["a", "c"]), WORDS),
    "TextVectorization": (
        lambda: layers.TextVectorization(
            vocabulary=["a", "c"], idf_weights=[256.9, 2049.3], output_mode="tf_idf"
        ),
        WORDS[:, :1],
    ),
    "Embedding": (_embedding, IDS.astype("float32")),
    "Masking": (lambda: layers.Masking(-999.0), SERIES),
    "SiLU": (lambda: Mixes(lambda x: tf.nn.silu(x) / 1000.0), FAR),
    "mean of a mask": (_mean_of_what_is_kept, KEPT),
    "UnitNormalization": (layers.UnitNormalization, ROWS),
    "Dot": (lambda: layers.Dot(axes=-1, normalize=True), [ROWS, ROWS[::-1].copy()]),
    "BatchNormalization": (layers.BatchNormalization, FAR),
    "BatchNormalization trains": (layers.BatchNormalization, FAR),
    "LayerNormalization": (layers.LayerNormalization, DEEP),
    "GroupNormalization": (lambda: layers.GroupNormalization(3), DEEP),
    "TimeDistributed": (
        lambda: layers.TimeDistributed(layers.Normalization(mean=[5.0, 7e4], variance=[1.0, 1e6])),
        SERIES,
    ),
    "Average": (layers.Average, [DEEP % 60000, DEEP % 50000 + 10000, DEEP % 60000]),
    "ReLU threshold": (lambda: layers.ReLU(threshold=1999.7, negative_slope=0.3), YEARS - 9.7),
    "Softmax axes": (lambda: layers.Softmax(axis=[1, 2]), DEEP[..., 0] % 60000),
    "Reshape": (lambda: layers.Reshape([-1]), DEEP),
    "Concatenate": (lambda: layers.Concatenate(), [YEARS, YEARS]),
    "RandomFlip": (lambda: layers.RandomFlip(seed=1), IMAGES),
    "RandomBrightness": (lambda: layers.RandomBrightness(0.5, seed=1), IMAGES),
    "Resizing": (lambda: layers.Resizing(5, 11), DEEP),
}
if hasattr(layers, "ThresholdedReLU"):
    CASES["ThresholdedReLU"] = lambda: layers.ThresholdedReLU(1999.7), YEARS - 9.7
if hasattr(layers, "AdaptiveAveragePooling2D"):
    CASES["AdaptiveAveragePooling2D"] = lambda: layers.AdaptiveAveragePooling2D(3), DEEP - 45000
if IS_KERAS_3:
    CASES |= {
        "RMSNormalization": (lambda: layers.RMSNormalization(), DEEP),
        "MelSpectrogram": (
            lambda: layers.MelSpectrogram(fft_length=256, sequence_stride=64, num_mel_bins=8),
            SOUND,
        ),
        "Pipeline": (
            lambda: layers.Pipeline([layers.Rescaling(1 / 3), layers.Rescaling(0.1, -7.7)]),
            IMAGES,
        ),
        "MaxNumBoundingBoxes": (lambda: layers.MaxNumBoundingBoxes(2, **XYXY), BOXED),
        "CutMix": (lambda: layers.CutMix(seed=1), {"images": IMAGES, "labels": LABELS}),
        "RandomBrightness of masks": (lambda: layers.RandomBrightness(0.1, seed=1), MASKED),
        "Resizing of boxes": (lambda: layers.Resizing(5, 11, **XYXY), BOXED),
        "Pipeline of boxes": (
            lambda: layers.Pipeline([layers.RandomFlip("vertical", seed=1, **XYXY)]),
            BOXED,
        ),
    }
# What they draw depends on the mode.
RANDOM = ("Rand", "CutMix")
# Their results depend on the state of a generator, or are not for datasets.
NOT_MAPPED = ("Embedding", "Dot", "Average", "BatchNormalization", "TextVectorization")


def _run(name: str, policy: str, how: str) -> tuple[Any, list[tf.Tensor]]:
    make, inputs = CASES[name]
    tf.keras.utils.set_random_seed(1)
    with keras_mp.policy_scope(policy):
        layer = make()
        inputs = tf.nest.map_structure(tf.constant, inputs)
        options = {"training": True} if name.startswith(("Rand", "BatchNormalization t")) else {}
        if how != "eager" and IS_KERAS_3 and not layer.built and "Random" not in name:
            layer(tf.nest.map_structure(tf.identity, inputs))
        if how == "function":
            tf.keras.utils.set_random_seed(1)
            result = tf.function(lambda x: layer(x, **options))(inputs)
        elif how == "map":
            dataset = tf.data.Dataset.from_tensors(inputs).map(lambda *x: layer(*x, **options))
            result = next(iter(dataset))
        else:
            result = layer(tf.nest.map_structure(tf.identity, inputs), **options)
    return layer, tf.nest.flatten(result)


@functools.cache
def _exact_in_eager(name: str) -> list[tf.Tensor]:
    return _run(name, "float32", "eager")[1]


def _is_mapped(name: str) -> bool:
    """Whether a dataset can call a layer with its inputs."""
    takes_one = not isinstance(CASES[name][1], list | tuple)
    return takes_one and not name.startswith(NOT_MAPPED)


# Functions and datasets both trace a layer: datasets get every other one that they can call.
MAPPED = list(filter(_is_mapped, CASES))[::2]


@pytest.mark.parametrize(
    ("name", "how", "dtype"),
    [
        *((name, "eager", "float16") for name in CASES),
        *((name, "function", "bfloat16") for name in CASES if name not in MAPPED),
        *((name, "map", "bfloat16") for name in MAPPED),
    ],
)
def test_one_rounding_of_the_result_of_float32(name: str, how: str, dtype: str) -> None:
    takes_more = isinstance(CASES[name][1], dict)
    in_mode = takes_more or name.startswith(RANDOM)
    exact = _run(name, "float32", how)[1] if in_mode else _exact_in_eager(name)
    layer, found = _run(name, f"mixed_{dtype}", how)
    # Keras 2 makes encodings in floatx, whatever the global policy.
    is_mixed = layer.dtype_policy == keras_mp.Policy(f"mixed_{dtype}")
    assert is_mixed or not IS_KERAS_3 or not any(each.dtype.is_floating for each in found)
    for right, value in zip(exact, found, strict=True):
        # Labels, boxes and masks beside images stay as they are.
        is_beside_images = takes_more and right.shape[-1] != 3
        if is_mixed and right.dtype.is_floating and not is_beside_images:
            right = tf.cast(right, dtype)
        assert value.dtype == right.dtype
        np.testing.assert_array_equal(value.numpy(), right.numpy())


def test_every_random_layer_of_images_reads_raw() -> None:
    found = [getattr(layers, name) for name in dir(layers) if name.startswith("Random")]
    found = [cls for cls in found if ".legacy." not in cls.__module__]
    assert len(found) > 8
    assert [cls.__name__ for cls in found if not data_layers.reads_raw(cls)] == []


def _model(kind: str, *stack: Any) -> Any:
    if kind == "sequential":
        return tf.keras.Sequential(list(stack))
    if kind == "sequential with inputs":
        return tf.keras.Sequential([layers.Input([1]), *stack])
    if kind == "functional":
        x = inputs = layers.Input([1])
        for layer in stack:
            x = layer(x)
        return tf.keras.Model(inputs, x)

    return Subclassed(*([_model("functional", *stack)] if kind == "nested" else stack))


KINDS = ["sequential", "sequential with inputs", "functional", "subclassed", "nested"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_pass_on_what_they_were_given(kind: str, dtype: str) -> None:
    with keras_mp.policy_scope(f"mixed_{dtype}"):
        norm = layers.Normalization()
        norm.adapt(YEARS)
        model = _model(kind, layers.Reshape([1]), norm)
        embedded = _model(kind, _embedding())
    right = tf.cast((YEARS - 2005.5) / np.sqrt(np.float32(85.25)), dtype).numpy()
    for found in (model(YEARS), model.predict(YEARS, verbose=0)):
        found, rtol = np.asarray(found, "float32"), 2 ** (-7 if dtype[0] == "b" else -10)
        np.testing.assert_allclose(found, right.astype("float32"), rtol=rtol)
        assert len(np.unique(found)) == 32
    ids = np.array([[257], [1025]], "float32")
    for given in (ids, ids.astype("int32")):
        found = np.ravel(np.asarray(embedded(given), "float32"))
        # A model may return the row as it is, or rounded; its neighbours are farther away.
        right = tf.cast(tf.cast([257, 1025], dtype), "float32")
        assert all(each in (i, r) for each, i, r in zip(found, [257, 1025], right))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_adapted_to_data_counts_in_float32(dtype: str) -> None:
    make = tf.keras.utils.FeatureSpace

    def encoded(policy: str) -> list[tf.Tensor]:
        with keras_mp.policy_scope(policy):
            space = make(
                features={
                    "year": make.float_normalized(),
                    "size": make.float_discretized(8),
                    "id": make.integer_categorical(num_oov_indices=0),
                },
                output_mode="concat",
            )
            data = {"year": YEARS[:, 0], "size": YEARS[:, 0] * 40, "id": np.arange(32) + 3000}
            batches = tf.data.Dataset.from_tensor_slices(data).batch(8)
            space.adapt(batches)
            return [space(batch) for batch in batches]

    for right, found in zip(encoded("float32"), encoded(f"mixed_{dtype}"), strict=True):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, tf.cast(right, dtype))


def test_inputs_above_65504_where_xla_compiles() -> None:
    with keras_mp.policy_scope("mixed_float16"):
        inputs = layers.Input([1])
        scaled = tf.keras.Model(inputs, layers.Rescaling(1 / 65535)(inputs))
        normal = tf.keras.Model(inputs, layers.BatchNormalization()(inputs))
    run = tf.function(lambda model, x: model(x, training=True), jit_compile=True)
    np.testing.assert_allclose(np.asarray(run(scaled, FAR), "f4"), FAR / 65535, rtol=1e-3)
    right = (FAR - FAR.mean()) / np.sqrt(FAR.var() + 1e-3)
    np.testing.assert_allclose(np.asarray(run(normal, FAR), "f4"), right, rtol=2e-2, atol=1e-2)


class Around(keras_mp.layers.Layer):
    def build(self, shape: Any) -> None:
        self.norm = layers.Normalization(mean=[2005.5], variance=[85.25], dtype=self.dtype_policy)

    def call(self, x: tf.Tensor, others: Any = None) -> tf.Tensor:
        assert x.dtype == others[0].dtype == self.compute_dtype
        return self.norm(x) - self.norm(others[0])


def test_layers_of_ones_own_pass_on_what_they_were_given() -> None:
    layer = Around(dtype=keras_mp.Policy("mixed_bfloat16"))
    with keras_mp.policy_scope("float32"):
        norm = layers.Normalization(mean=[2005.5], variance=[85.25])
    other = YEARS[::-1].copy()
    right = tf.cast(norm(YEARS), "bfloat16") - tf.cast(norm(other), "bfloat16")
    np.testing.assert_array_equal(layer(YEARS, others=[other]), right)
    run = tf.function(lambda x, y: layer(x, others=[y]))
    np.testing.assert_array_equal(run(YEARS, other), right)


class Doubled(keras_mp.layers.Layer):
    reads_raw = True

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(shape=[shape[-1]], initializer="ones", name="gain")
        self.inner = layers.Rescaling(1.0, dtype=self.dtype_policy)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        assert x.dtype == self.compute_dtype == "float32"
        return (x - 2000) * self.gain


def test_a_layer_of_ones_own_reads_raw() -> None:
    with keras_mp.policy_scope("mixed_bfloat16"):
        layer = Doubled()
        inputs = layers.Input([1])
        model = tf.keras.Model(inputs, layer(inputs))
    assert layer.dtype_policy == keras_mp.Policy("mixed_bfloat16")
    assert layer(YEARS).dtype == tf.bfloat16
    np.testing.assert_array_equal(np.asarray(model(YEARS), "f4"), YEARS - 2000)


@pytest.mark.parametrize("compute", [lambda f: f, tf.function])
@pytest.mark.parametrize("given", [np.array, tf.constant])
@pytest.mark.parametrize("number", [1999.7, np.float32(1999.7), np.array([1999.7], "float32")])
def test_arrays_of_numpy_are_raw_data_and_constants(
    number: Any, given: Callable[..., Any], compute: Callable[..., Any]
) -> None:
    values = np.array([[1980.3], [1990.1]], "float32")
    layer = Mixes(lambda x: x - number, dtype=keras_mp.Policy("mixed_float16"))
    found = compute(lambda: layer(given(values)))()
    np.testing.assert_array_equal(found, tf.cast(values - np.float32(1999.7), tf.float16))


def test_variables_are_float32_under_any_policy() -> None:
    norm = layers.Normalization(dtype=keras_mp.Policy("bfloat16"))
    norm.adapt(YEARS)
    dtypes = {tf.as_dtype(v.dtype) for v in norm.variables}
    assert {dtype for dtype in dtypes if dtype.is_floating} == {tf.float32}
    assert norm(YEARS).dtype == tf.bfloat16


def test_symbolic_results_have_the_right_dtype() -> None:
    with keras_mp.policy_scope("mixed_float16"):
        for name in ("Normalization", "Rescaling", "Masking", "BatchNormalization", "Resizing"):
            make, example = CASES[name]
            inputs = layers.Input(example.shape[1:])
            layer = make()
            symbolic = layer(inputs)
            assert symbolic.dtype == "float16"
            if IS_KERAS_3 and name in ("Normalization", "Rescaling"):
                assert layer.compute_output_spec(inputs).dtype == "float16"
        if IS_KERAS_3:
            batch = {"images": layers.Input([8, 8, 3]), "labels": layers.Input([2])}
            found = layers.RandomFlip()(batch)
            assert (found["images"].dtype, found["labels"].dtype) == ("float16", "float32")


def test_other_layers_round_what_they_call_images() -> None:
    class Generates(layers.Layer):
        reads_raw = False

        def call(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"images": x, "noise": x}

    found = Generates(dtype=keras_mp.Policy("mixed_bfloat16"))(tf.ones([2]))
    assert {value.dtype for value in found.values()} == {tf.bfloat16}


@functools.cache
def _kernel_after(policy: Any, name: str, steps: int = 40) -> np.ndarray:
    """A weight after steps of which each is below a rounding of 16 bits."""
    model = made(lambda: tf.keras.Sequential([layers.Input([2]), WRITERS[name]()]), policy)
    model.compile(tf.keras.optimizers.SGD(1e-4), "mse")
    x, y = np.ones([4 * steps, 2], "float32"), np.full([4 * steps, 1], 9.0, "float32")
    model.fit(x, y, batch_size=4, verbose=0)
    return model.trainable_weights[0].numpy()


class Pruned(tf.keras.layers.Layer):
    """Sets a weight to zero in each step, with code that looks at the weight."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(name="k", shape=(2, 1), initializer="ones")

    def prune(self) -> None:
        mask = tf.constant([[1.0], [0.0]])
        self.kernel.assign(self.kernel * tf.cast(mask, self.compute_dtype))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.prune()
        return tf.matmul(x, tf.convert_to_tensor(self.kernel))


class Clipping(tf.keras.layers.Layer):
    def call(self, weight: tf.Tensor) -> tf.Tensor:
        return tf.clip_by_value(weight, -5.0, 5.0)


class Averaging(tf.keras.layers.Layer):
    """Moves its weight towards a constant, by additions."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(name="m", shape=(1,), initializer="zeros")
        self.calls = self.add_weight(name="c", shape=(), initializer="zeros", trainable=False)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.mean.assign_sub((self.mean - 1.001) * 0.01)
        self.calls.assign_add(1.0)
        return x[:, :1] + tf.convert_to_tensor(self.mean)


@pytest.mark.parametrize(("dtype", "calls"), [("bfloat16", 300), ("float16", 2100)])
def test_counts_of_layers_do_not_stop(dtype: str, calls: int) -> None:
    layer = Averaging(dtype=unscaled(dtype))
    x = tf.ones([1, 1])
    layer(x)

    @tf.function
    def call_on() -> None:
        for _ in tf.range(calls - 1):
            layer(x)

    call_on()
    assert float(tf.convert_to_tensor(layer.calls)) == calls


class Through(tf.keras.constraints.Constraint):
    def __init__(self) -> None:
        self.layer = Clipping()

    def __call__(self, weight: Any) -> tf.Tensor:
        return self.layer(weight)


WRITERS = {
    "average": Averaging,
    "pruning": Pruned,
    "SpectralNormalization": lambda: layers.SpectralNormalization(layers.Dense(1)),
    "constraint with a layer": lambda: layers.Dense(1, kernel_constraint=Through()),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", list(WRITERS))
def test_what_layers_assign_to_weights_is_computed_from_float32(name: str, dtype: str) -> None:
    exact, found = _kernel_after("float32", name), _kernel_after(unscaled(dtype), name)
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-5)


ignored = pytest.mark.filterwarnings("ignore::keras_mp.MixedPrecisionWarning")


@ignored
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["SpectralNormalization", "pruning"])
def test_layers_assign_to_weights_in_16_bits(name: str, dtype: str) -> None:
    policy = keras_mp.Policy(dtype, loss_scale=None)
    found = np.asarray(tf.cast(_kernel_after(policy, name), "float32"))
    if name == "pruning":
        np.testing.assert_allclose(found, [[1.0], [0.0]], atol=0.1)
    else:
        np.testing.assert_allclose(np.linalg.norm(found), 1.0, rtol=0.02)


@ignored
@pytest.mark.parametrize("policy", ["bfloat16", "float16", "mixed_bfloat16"])
def test_metrics_and_statistics_count_in_float32(policy: str) -> None:
    with keras_mp.policy_scope(keras_mp.Policy(policy, loss_scale=None)):
        own, mean = tf.keras.metrics.MeanAbsoluteError(name="own"), tf.keras.metrics.Mean()
        norm = layers.BatchNormalization(momentum=0.999)
        zeros = layers.Dense(1, kernel_initializer="zeros", use_bias=False)
        metrics = {"metrics": ["mae", own], "weighted_metrics": ["mse"]}
        model = compiled_model(zeros, inputs=1, **metrics)

        def count() -> None:
            mean.update_state(3.0)
            norm(tf.ones([4, 1]), training=True)

        @tf.function
        def count_on() -> None:
            for _ in tf.range(299):
                count()

        count()  # which makes their variables
        count_on()
    threes = np.full([600, 1], 3, "float32")
    found = model.evaluate(threes / 3, threes, batch_size=2, verbose=0, return_dict=True)
    assert found == {"loss": 9.0, "mae": 3.0, "own": 3.0, "mse": 9.0}
    assert float(mean.result()) == 3.0
    moving = np.asarray(norm.moving_mean, "float64")
    np.testing.assert_allclose(moving, 1 - 0.999**300, rtol=1e-4)


@pytest.mark.skipif(IS_KERAS_3, reason="Keras 3 has no such weights.")
@pytest.mark.parametrize("name", ["StringLookup", "TextVectorization"])
def test_vocabularies_are_no_variables(name: str) -> None:
    with keras_mp.policy_scope("mixed_float16"):
        length = {"output_sequence_length": 1} if name == "TextVectorization" else {}
        lookup = getattr(layers, name)(**length)
        lookup.adapt(WORDS[:, :1])
        inputs = layers.Input([1], dtype="string")
        rows = layers.Flatten()(layers.Embedding(10, 3)(lookup(inputs)))
        model = tf.keras.Model(inputs, layers.Dense(1)(rows))
        model.compile("sgd", "mse")
    words = tf.constant([["a"], ["b"]])
    history = model.fit(words, np.ones([2, 1]), epochs=5, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    converted = keras_mp.convert(model, "float32")
    np.testing.assert_allclose(converted(words), np.asarray(model(words), "f4"), rtol=1e-2)

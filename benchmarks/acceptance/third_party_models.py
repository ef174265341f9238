"""Tiny models of KerasHub (Keras 3) and of Hugging Face (tf_keras), with random weights and data.

Nothing is downloaded.
"""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp import keras_api

VOCABULARY, CLASSES, LENGTH, BATCH, SIDE = 64, 4, 12, 8, 32
# Arguments of KerasHub's.
_TRANSFORMER = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 32,
    "intermediate_dim": 64,
}
_SEQUENCE = {**_TRANSFORMER, "dropout": 0.0, "max_sequence_length": LENGTH}


class Example(NamedTuple):
    """A model that is not compiled, and a batch to train it with.

    Args:
        model: a model of `tf.keras`.
        inputs: what the model takes.
        labels: None if they are among the inputs.
        has_own_loss: Does the model choose its loss? If not, it gives logits.
    """

    model: Any
    inputs: Any
    labels: Any = None
    has_own_loss: bool = True

    @property
    def batch(self) -> Any:
        """What `fit` takes for a step."""
        return self.inputs if self.labels is None else (self.inputs, self.labels)

    @property
    def compile_arguments(self) -> dict[str, Any]:
        """What `compile` takes beside the optimizer."""
        if self.has_own_loss:
            return {}
        return {"loss": tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


def tokens(seed: int = 0) -> Any:
    """Token ids; the same each time."""
    return np.random.default_rng(seed).integers(1, VOCABULARY, size=(BATCH, LENGTH)).astype("int32")


def images(channels_first: bool = False) -> Any:
    """Images of noise; the same each time."""
    shape = (BATCH, 3, SIDE, SIDE) if channels_first else (BATCH, SIDE, SIDE, 3)
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def classes() -> Any:
    """A class for each example."""
    return np.arange(BATCH, dtype="int32") % CLASSES


def mask() -> Any:
    """Which tokens count: the last ones of every other sequence do not."""
    result = np.ones((BATCH, LENGTH), "int32")
    result[::2, -3:] = 0
    return result


def _hub_bert():
    import keras_hub

    backbone = keras_hub.models.BertBackbone(**_SEQUENCE)
    model = keras_hub.models.BertTextClassifier(backbone, CLASSES, dropout=0.0)
    ids = tokens()
    inputs = {"token_ids": ids, "padding_mask": mask(), "segment_ids": ids * 0}
    return Example(model, inputs, classes())


def _hub_gpt2():
    import keras_hub

    model = keras_hub.models.GPT2CausalLM(keras_hub.models.GPT2Backbone(**_SEQUENCE))
    ids = tokens()
    return Example(model, {"token_ids": ids, "padding_mask": mask()}, _next(ids))


def _hub_resnet():
    import keras_hub

    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 32],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(SIDE, SIDE, 3),
    )
    return Example(keras_hub.models.ResNetImageClassifier(backbone, CLASSES), images(), classes())


def _hub_vit():
    import keras_hub

    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64, "patch_size": 8}
    backbone = keras_hub.models.ViTBackbone(image_shape=(SIDE, SIDE, 3), **sizes)
    return Example(keras_hub.models.ViTImageClassifier(backbone, CLASSES), images(), classes())


def _hub_segformer():
    import keras_hub

    encoder = keras_hub.models.MiTBackbone(
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[8, 4],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        hidden_dims=[16, 32],
        image_shape=(SIDE, SIDE, 3),
    )
    backbone = keras_hub.models.SegFormerBackbone(image_encoder=encoder, projection_filters=16)
    model = keras_hub.models.SegFormerImageSegmenter(backbone, CLASSES)
    pixels = images()
    return Example(model, pixels, np.eye(CLASSES)[(pixels[..., 0] > 0).astype("int32")])


def _decoder(backbone: Any, inputs: dict[str, Any]) -> Example:
    """A model that tells the next of the decoder's tokens."""
    decoded = backbone.output["decoder_sequence_output"]
    logits = tf.keras.layers.Dense(VOCABULARY, dtype="float32")(decoded)
    ids = tokens()
    model = tf.keras.Model(backbone.input, logits)
    return Example(model, {**inputs, "decoder_token_ids": ids}, _next(ids), has_own_loss=False)


def _hub_whisper():
    import keras_hub

    lengths = {"max_encoder_sequence_length": 2 * LENGTH, "max_decoder_sequence_length": LENGTH}
    backbone = keras_hub.models.WhisperBackbone(**_TRANSFORMER, **lengths, num_mels=8)
    features = np.random.default_rng(0).normal(size=(BATCH, 2 * LENGTH, 8)).astype("float32")
    inputs = {"encoder_features": features, "decoder_padding_mask": mask()}
    return _decoder(backbone, inputs)


def _hub_t5():
    import keras_hub

    # In float16 it cannot be trained, for the same reason as that of Hugging Face.
    backbone = keras_hub.models.T5Backbone(**_TRANSFORMER, dropout=0.0)
    masks = {"encoder_padding_mask": mask(), "decoder_padding_mask": np.ones_like(mask())}
    return _decoder(backbone, {"encoder_token_ids": tokens(1), **masks})


def _next(ids: Any) -> Any:
    """What comes after each token."""
    return np.roll(ids, -1, axis=1)


class _HuggingFace(NamedTuple):
    """A model of Hugging Face, which computes the loss itself: the labels are among the inputs.

    Attributes:
        model: str. The name of its class.
        config: str. That of its configuration.
        inputs: makes them.
        arguments: of the configuration.
    """

    model: str
    config: str
    inputs: Callable[[], dict[str, Any]]
    arguments: dict[str, Any]

    def __call__(self) -> Example:
        import transformers

        config = getattr(transformers, self.config)(**self.arguments)
        model, inputs = getattr(transformers, self.model)(config), self.inputs()
        model({key: value for key, value in inputs.items() if key != "labels"})  # makes the weights
        return Example(model, inputs)


def _sentences() -> dict[str, Any]:
    return {"input_ids": tokens(), "attention_mask": mask(), "labels": classes()}


def _texts() -> dict[str, Any]:
    return {**_sentences(), "labels": tokens()}


def _pictures() -> dict[str, Any]:
    return {"pixel_values": images(channels_first=True), "labels": classes()}


def _translations() -> dict[str, Any]:
    return {**_texts(), "input_ids": tokens(1), "decoder_input_ids": tokens()}


_WIDTHS = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": CLASSES,
}
_WORDS = {"vocab_size": VOCABULARY}
MODELS: dict[str, dict[str, Callable[[], Example]]] = {
    "Keras 3": {
        "KerasHub BERT": _hub_bert,
        "KerasHub GPT-2": _hub_gpt2,
        "KerasHub T5": _hub_t5,
        "KerasHub Whisper": _hub_whisper,
        "KerasHub ResNet": _hub_resnet,
        "KerasHub ViT": _hub_vit,
        "KerasHub SegFormer": _hub_segformer,
    },
    "tf_keras": {
        "Hugging Face BERT": _HuggingFace(
            *("TFBertForSequenceClassification", "BertConfig", _sentences),
            {**_WORDS, **_WIDTHS, "max_position_embeddings": LENGTH},
        ),
        "Hugging Face DistilBERT": _HuggingFace(
            *("TFDistilBertForSequenceClassification", "DistilBertConfig", _sentences),
            {
                **{**_WORDS, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64},
                **{"max_position_embeddings": LENGTH, "num_labels": CLASSES},
                **{"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
            },
        ),
        "Hugging Face GPT-2": _HuggingFace(
            *("TFGPT2LMHeadModel", "GPT2Config", _texts),
            {
                **{**_WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 1, "n_head": 2},
                **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
            },
        ),
        # Its masks are 0 * -1e9, which is NaN in float16 unless it is computed in float32.
        "Hugging Face T5": _HuggingFace(
            *("TFT5ForConditionalGeneration", "T5Config", _translations),
            {
                **{**_WORDS, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1},
                **{"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0},
            },
        ),
        "Hugging Face ResNet": _HuggingFace(
            *("TFResNetForImageClassification", "ResNetConfig", _pictures),
            {
                **{"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
                **{"layer_type": "basic", "num_labels": CLASSES},
            },
        ),
        "Hugging Face ViT": _HuggingFace(
            *("TFViTForImageClassification", "ViTConfig", _pictures),
            {**_WIDTHS, "image_size": SIDE, "patch_size": 8},
        ),
    },
}
PACKAGES = {"Keras 3": "keras_hub", "tf_keras": "transformers"}


def turn_dropout_off(model: Any) -> None:
    """Also where it is no argument: its masks would differ between dtypes."""
    for layer in keras_api.flatten_layers(model):
        if isinstance(layer, tf.keras.layers.Dropout):
            layer.rate = 0.0


def saved_and_loaded(model: Any, compile_model: Callable[[Any], None]) -> Any:
    """Saves a model and its optimizer as its library does it, and loads them.

    That is a `.keras` file; of a model of Hugging Face, `save_pretrained`. Neither holds the state
    of the optimizer where the library has a `compile` of its own, so a checkpoint does there.

    Args:
        model: a compiled model.
        compile_model: compiles a model like it.

    Returns:
        The model that was loaded, compiled.
    """
    is_huggingface = hasattr(model, "save_pretrained")
    with tempfile.TemporaryDirectory() as folder:
        file = str(pathlib.Path(folder) / "model.keras")
        if not is_huggingface:
            model.save(file)
            if type(model).compile is tf.keras.Model.compile:
                return tf.keras.models.load_model(file)
        checkpoint = tf.train.Checkpoint(optimizer=model.optimizer)
        path = checkpoint.save(str(pathlib.Path(folder) / "optimizer"))
        if is_huggingface:
            model.save_pretrained(folder)
            loaded = type(model).from_pretrained(folder)
        else:
            loaded = tf.keras.models.load_model(file, compile=False)
        compile_model(loaded)
        loaded.optimizer.build(loaded.trainable_variables)
        checkpoint = tf.train.Checkpoint(optimizer=loaded.optimizer)
        checkpoint.restore(path).assert_existing_objects_matched()
        return loaded

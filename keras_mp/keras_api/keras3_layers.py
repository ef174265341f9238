"""Layers of Keras 3: raw inputs, the loop of an LSTM, batch normalization."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Method, Replacement
from keras_mp.keras_api.keras3_names import SHAPES, convert_inputs_of_model, in_symbolic_scope
from keras_mp.tensorflow_api.names import Name

keras = tf.keras

# What casts inputs in a graph before `Layer.__call__` is called.
EARLY_CASTING: tuple[Method, ...] = (Method.of(keras.layers.Normalization, "__call__"),)
# What casts the initial states of recurrent layers: they do so themselves.
CASTS_OF_STATES: tuple[Replacement, ...] = ()

# They subtract what is nearly equal, or multiply matrices, and `stft` refuses 16 bits.
_IN_FLOAT32 = (
    "corrcoef",
    "cross",
    "lstsq",
    "moments",
    "stft",
    "tanh_shrink",
)
# They compute the size of a kernel, or coordinates, in the dtype of images.
_OF_IMAGES_IN_FLOAT32 = ("gaussian_blur", "elastic_transform")


def replace_slow_layers(lstm: Callable[..., Any], batch_normalization: Callable[..., Any]) -> None:
    """Replaces the slow parts of layers in 16 bits that are not kernels of TensorFlow.

    Args:
        lstm: function with the arguments of `kernels.recurrent.lstm`, which runs the loop of an
            LSTM where Keras would run that of cuDNN on a GPU. It may return None.
        batch_normalization: function with the arguments of
            `kernels.normalization.batch_normalization`. It may return None.
    """
    loop, call = (
        Method(keras.layers.LSTM, "inner_loop"),
        Method(keras.layers.BatchNormalization, "call"),
    )
    hooks.install(
        [
            Replacement(loop, functools.partial(_with_loop, lstm), feature=SHAPES),
            Replacement(call, functools.partial(_normalizing, batch_normalization), feature=SHAPES),
        ]
    )


def _with_loop(
    run: Callable[..., tuple[tf.Tensor, ...] | None], inner_loop: Callable[..., Any]
) -> Callable[..., Any]:
    def replaced(
        self: tf.keras.layers.Layer,
        sequences: tf.Tensor,
        initial_state: Sequence[tf.Tensor],
        mask: tf.Tensor | None,
        training: bool = False,
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        found = None
        if mask is None and _is_plain_lstm(self) and not in_symbolic_scope():
            inputs, cell = sequences, self.cell
            if training and self.dropout:
                inputs = inputs * cell.get_dropout_mask(inputs[:, 0, :])[:, tf.newaxis]
            weights = cell.kernel, cell.recurrent_kernel, cell.bias
            tensors = map(tf.convert_to_tensor, (inputs, *initial_state, *weights))
            found = run(*tensors, self.go_backwards)
        if found is None:
            return inner_loop(self, sequences, initial_state, mask=mask, training=training)
        outputs, last, cell_state = found
        return last, outputs if self.return_sequences else last[:, tf.newaxis], [last, cell_state]

    return replaced


def _is_plain_lstm(layer: keras.layers.Layer) -> bool:
    """Whether Keras would run a layer by cuDNN on a GPU, and nothing watches its cell."""
    cell = layer.cell
    activations = cell.activation, cell.recurrent_activation
    return (
        type(cell) is keras.layers.LSTMCell
        and "call" not in vars(cell)
        and activations == (keras.activations.tanh, keras.activations.sigmoid)
        and cell.use_bias
        and not layer.recurrent_dropout
        and not layer.unroll
        and layer.use_cudnn == "auto"
    )


def _normalizing(
    run: Callable[..., tuple[tf.Tensor, ...] | None], original: Callable[..., tf.Tensor]
) -> Callable[..., tf.Tensor]:
    def call(
        self: tf.keras.layers.Layer,
        inputs: tf.Tensor,
        training: bool | None = None,
        mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        found = None
        if training is True and mask is None and _is_plain_normalization(self, inputs):
            found = run(inputs, *_affine(self), self.epsilon)
        if found is None:
            return original(self, inputs, training=training, mask=mask)
        outputs, *moments = found
        statistics = self.moving_mean, self.moving_variance
        for moving, value in zip(statistics, moments, strict=True):
            before = keras.ops.cast(moving, value.dtype)
            moving.assign(before * self.momentum + value * (1.0 - self.momentum))
        return outputs

    return call


def _is_plain_normalization(layer: tf.keras.layers.Layer, inputs: object) -> bool:
    """Whether a layer normalizes by the batch's moments over all axes but the last."""
    return (
        type(layer) is keras.layers.BatchNormalization  # and not a subclass, with other moments
        and isinstance(inputs, tf.Tensor)
        and inputs.dtype == layer.compute_dtype
        and layer.trainable
        and layer.axis in (-1, len(inputs.shape) - 1)
        and not layer.synchronized
        and not getattr(layer, "renorm", False)
        and not in_symbolic_scope()
    )


def _affine(layer: tf.keras.layers.Layer) -> tuple[tf.Tensor, tf.Tensor]:
    # The layer knows the number of channels, even if the shape of its input does not.
    channels = layer.moving_mean.shape
    scale = keras.ops.cast(layer.gamma, "float32") if layer.scale else tf.ones(channels)
    offset = keras.ops.cast(layer.beta, "float32") if layer.center else tf.zeros(channels)
    return tf.convert_to_tensor(scale), tf.convert_to_tensor(offset)


def exact_functions() -> list[Any]:
    """Returns Keras's own functions that need float32 as a whole."""
    found = [getattr(keras.ops, name, None) for name in _IN_FLOAT32]
    found += [getattr(keras.ops.image, name, None) for name in _OF_IMAGES_IN_FLOAT32]
    return [each for each in found if each]


def input_casts(policy_class: type) -> tuple[Name | Method, ...]:
    """Returns the methods by which layers and models cast their inputs.

    They take an input, or a list of inputs, and return what becomes of it.

    Args:
        policy_class: class of the policies whose layers do.
    """
    return Method(policy_class, "convert_input"), convert_inputs_of_model


def set_policy(layer: Any, policy: Any) -> None:
    """Gives a layer without variables another policy."""
    layer.dtype_policy = policy


def report_of_outputs(cls: Any) -> Name | Method:
    """Returns the method by which layers of a class say what their results are like."""
    return Method.of(cls, "compute_output_spec")


def with_dtype(dtype: tf.DType, output: Any) -> Any:
    """Gives a symbolic result of float32 or float64 another dtype."""
    if not isinstance(output, keras.KerasTensor) or output.dtype not in ("float32", "float64"):
        return output
    return keras.KerasTensor(
        output.shape, dtype.name, sparse=output.sparse, ragged=output.ragged, name=output.name
    )


# What else makes variables in the first call of a step: nothing in Keras 3.
IN_ONE_TRACE: tuple[Replacement, ...] = ()

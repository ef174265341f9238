"""The loop of Keras 3's LSTM."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Method, Replacement
from keras_mp.keras_api.keras3_names import SHAPES, in_symbolic_scope
from keras_mp.kernels.recurrent import Lstm

keras = tf.keras


def replace_lstm(run: Callable[..., Lstm | None]) -> None:
    place, make = Method(keras.layers.LSTM, "inner_loop"), functools.partial(_replaced, run)
    hooks.install([Replacement(place, make, feature=SHAPES)])


def _replaced(
    run: Callable[..., Lstm | None], inner_loop: Callable[..., Any]
) -> Callable[..., Any]:
    def replaced(
        self: tf.keras.layers.Layer,
        sequences: tf.Tensor,
        initial_state: Sequence[tf.Tensor],
        mask: tf.Tensor | None,
        training: bool = False,
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        found = None
        if mask is None and _is_plain(self) and not in_symbolic_scope():
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


def _is_plain(layer: keras.layers.Layer) -> bool:
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

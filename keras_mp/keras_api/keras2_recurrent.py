"""The loop of Keras 2's LSTM."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_keras.src.layers.rnn import gru_lstm_utils as _utils
from tf_keras.src.layers.rnn import lstm as _lstm

from keras_mp.support.autograph import do_not_convert


def replace_lstm(run: Callable[..., Any]) -> None:
    # In eager, and in graphs, where both return a name of what has run beside the results.
    for name in ("standard_lstm", "lstm_with_backend_selection"):
        setattr(_lstm, name, _replaced(getattr(_lstm, name), run))


def _replaced(loop: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loop)
    @do_not_convert
    def replaced(
        inputs: tf.Tensor,
        init_h: tf.Tensor,
        init_c: tf.Tensor,
        kernel: tf.Tensor,
        recurrent_kernel: tf.Tensor,
        bias: tf.Tensor | None,
        mask: tf.Tensor | None,
        time_major: bool,
        go_backwards: bool,
        sequence_lengths: tf.Tensor | None,
        zero_output_for_mask: bool,
        return_sequences: bool,
    ) -> Any:
        tensors = inputs, init_h, init_c, kernel, recurrent_kernel, bias
        found = None
        if mask is None and sequence_lengths is None and not time_major:
            found = run(*tensors, go_backwards)
        if found is None:
            options = time_major, go_backwards, sequence_lengths, zero_output_for_mask
            return loop(*tensors, mask, *options, return_sequences)
        outputs, last, cell_state = found
        runtime = _utils.runtime(_utils.RUNTIME_CPU)
        shown = outputs if return_sequences else last[:, tf.newaxis]
        return last, shown, last, cell_state, runtime

    return replaced

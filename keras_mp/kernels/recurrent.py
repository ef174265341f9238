"""LSTMs in 16 bits on CPUs.

They are one loop of small products, with large products around it. Keras multiplies inputs by
weights in each time step, and sums the gradients of both kernels in each step of the backward pass.
Here the inputs of all steps are multiplied at once, and so are the gradients, after a loop that
keeps the gradients of the gates. Gates and the cell state are computed in float32 and rounded once.
Where products in 16 bits are slow, all of it is in float32 inside. This module needs TensorFlow
only.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_mp.hooks import own_gradient, reach
from keras_mp.kernels.slow import is_slow, may_replace_layer

# The outputs of all steps, the last output, the last cell state.
Lstm = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


def lstm(
    inputs: tf.Tensor,
    hidden: tf.Tensor,
    cell: tf.Tensor,
    kernel: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    bias: tf.Tensor,
    go_backwards: bool,
) -> Lstm | None:
    """Runs an LSTM with tanh, sigmoid and without masks.

    Args:
        inputs: tensor of shape [batch, time, features].
        hidden: tensor of shape [batch, units]. The output before the first step.
        cell: tensor of that shape. The cell state before the first step.
        kernel: tensor of shape [features, 4 * units]. Input, forget, cell and output gate.
        recurrent_kernel: tensor of shape [units, 4 * units].
        bias: tensor of shape [4 * units].
        go_backwards: bool. Whether the last time step comes first.

    Returns:
        The outputs of all steps, of shape [batch, time, units], in the order in which they were
        computed; the last output; the last cell state. None where it is not known to be faster:
        in float16 where its products are not slow, in other dtypes than 16 bits, where XLA
        compiles, and on other devices than CPUs.
    """
    tensors = inputs, hidden, cell, kernel, recurrent_kernel, bias
    dtype = inputs.dtype
    is_one_dtype = {each.dtype for each in tensors} == {dtype}
    if not (is_one_dtype and may_replace_layer(dtype)):
        return None
    products_are_slow = is_slow("MatMul", dtype)
    if dtype == tf.float16 and not products_are_slow:
        return None
    inside = tf.float32 if products_are_slow else dtype
    with reach.without_region(), reach.decided(), tf.name_scope("lstm"):
        sequence = tf.reverse(inputs, [1]) if go_backwards else inputs
        if sequence.shape[-1] is None:  # as in a SavedModel of Keras 2
            sequence = tf.ensure_shape(sequence, [None, None, kernel.shape[0]])
        results = own_gradient.compute(
            "Lstm",
            _forward,
            _backward,
            [tf.cast(each, inside) for each in (sequence, *tensors[1:])],
        )
        outputs, last, last_cell = (tf.cast(each, dtype) for each in results)
    return outputs, last, last_cell


def _forward(
    inputs: tf.Tensor,
    hidden: tf.Tensor,
    cell: tf.Tensor,
    kernel: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    bias: tf.Tensor,
) -> own_gradient.Computed:
    dtype = inputs.dtype
    units: Any = recurrent_kernel.shape[0]
    by_time = tf.transpose(inputs, [1, 0, 2])
    of_inputs = _multiply_each(by_time, kernel)
    steps = tf.shape(by_time)[0]
    sequence = _array(steps, of_inputs).unstack(of_inputs)
    offset = tf.cast(bias, tf.float32)

    def step(time: tf.Tensor, *state: Any) -> tuple[Any, ...]:
        hidden, cell, outputs, gates, cells = state
        linear = tf.cast(tf.matmul(hidden, recurrent_kernel), tf.float32) + offset
        linear += tf.cast(sequence.read(time), tf.float32)
        i, f, g, o = tf.split(linear, 4, axis=1)
        i, f, g, o = tf.sigmoid(i), tf.sigmoid(f), tf.tanh(g), tf.sigmoid(o)
        cell = f * cell + i * g
        hidden = tf.cast(o * tf.tanh(cell), dtype)
        residuals = tf.cast(tf.concat([i, f, g, o], axis=1), dtype)
        return (
            time + 1,
            hidden,
            cell,
            outputs.write(time, hidden),
            gates.write(time, residuals),
            cells.write(time, cell),
        )

    _, last, last_cell, outputs, gates, cells = tf.while_loop(
        lambda time, *_: time < steps,
        step,
        (
            0,
            hidden,
            tf.cast(cell, tf.float32),
            tf.TensorArray(dtype, steps, element_shape=[None, units]),
            tf.TensorArray(dtype, steps, element_shape=[None, 4 * units]),
            tf.TensorArray(tf.float32, steps, element_shape=[None, units]),
        ),
    )
    of_all_steps = tf.ensure_shape(outputs.stack(), [*by_time.shape[:2], units])
    results = [tf.transpose(of_all_steps, [1, 0, 2]), last, tf.cast(last_cell, dtype)]
    return results, [gates.stack(), cells.stack()]


def _backward(
    upstream: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
) -> list[tf.Tensor | None]:
    sequence, hidden, cell, kernel, recurrent_kernel, bias = inputs
    dtype = sequence.dtype
    units: Any = recurrent_kernel.shape[0]
    with reach.without_region():
        steps = tf.shape(sequence)[1]
        of_outputs = tf.transpose(upstream[0], [1, 0, 2])
        before = tf.concat([tf.cast(cell, tf.float32)[tf.newaxis], residuals[1]], axis=0)
        arrays = [_array(steps, each).unstack(each) for each in (of_outputs, residuals[0])]
        # Each is read twice: after a step and before the next.
        cells = tf.TensorArray(
            tf.float32, steps + 1, element_shape=[None, units], clear_after_read=False
        ).unstack(before)

        def step(time: tf.Tensor, *state: Any) -> tuple[Any, ...]:
            of_hidden, of_cell, of_linear = state
            i, f, g, o = tf.split(tf.cast(arrays[1].read(time), tf.float32), 4, axis=1)
            dh = tf.cast(of_hidden, tf.float32) + tf.cast(arrays[0].read(time), tf.float32)
            tanh = tf.tanh(cells.read(time + 1))
            dc = of_cell + dh * o * (1 - tanh * tanh)
            parts = [
                dc * g * i * (1 - i),
                dc * cells.read(time) * f * (1 - f),
                dc * i * (1 - g * g),
                dh * tanh * o * (1 - o),
            ]
            dz = tf.cast(tf.concat(parts, axis=1), dtype)
            of_before = tf.matmul(dz, recurrent_kernel, transpose_b=True)
            return time - 1, of_before, dc * f, of_linear.write(time, dz)

        _, of_hidden, of_cell, array = tf.while_loop(
            lambda time, *_: time >= 0,
            step,
            (
                steps - 1,
                upstream[1],
                tf.cast(upstream[2], tf.float32),
                tf.TensorArray(dtype, steps, element_shape=[None, 4 * units]),
            ),
        )
        of_linear = array.stack()
        by_time = tf.transpose(sequence, [1, 0, 2])
        hidden_before = tf.concat([hidden[tf.newaxis], tf.transpose(outputs[0], [1, 0, 2])], 0)[:-1]
        flat = tf.reshape(of_linear, [-1, 4 * units])
        of_kernel, of_recurrent_kernel = (
            tf.matmul(tf.reshape(each, [-1, each.shape[-1]]), flat, transpose_a=True)
            for each in (by_time, hidden_before)
        )
        of_given = _multiply_each(of_linear, tf.transpose(kernel))
        return [
            tf.transpose(of_given, [1, 0, 2]),
            of_hidden,
            tf.cast(of_cell, cell.dtype),
            of_kernel,
            of_recurrent_kernel,
            tf.cast(tf.reduce_sum(tf.cast(flat, tf.float32), 0), bias.dtype),
        ]


def _array(steps: tf.Tensor, values: tf.Tensor) -> tf.TensorArray:
    return tf.TensorArray(values.dtype, steps, element_shape=[None, values.shape[-1]])


def _multiply_each(values: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
    """Multiplies the rows of a tensor of three axes by a matrix, in one product."""
    product = tf.matmul(tf.reshape(values, [-1, values.shape[-1]]), matrix)
    return tf.reshape(product, [*tf.unstack(tf.shape(values)[:2]), matrix.shape[-1]])

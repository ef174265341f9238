"""Functions with a custom gradient that keeps no graph alive.

`tf.custom_gradient` registers a function for each call in a graph, and that function keeps the
graph until the process ends. The functions that are registered here hold the graph by a weak
reference, and its tensors by name. This module needs TensorFlow only.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.hooks import reach
from keras_mp.support.autograph import do_not_convert
from keras_mp.tensorflow_api import gradients

# The outputs, and the residuals: tensors that are kept for the gradient.
Computed = tuple[list[tf.Tensor], list[tf.Tensor]]
# A function of the gradients of the outputs, the inputs, the outputs, and the residuals.
Gradient = Callable[..., list[tf.Tensor | None]]


def compute(
    name: str, function: Callable[..., Computed], gradient: Gradient, inputs: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Computes a function that has a custom gradient; both have decided their dtypes.

    Args:
        name: str. The name of the gradient.
        function: function of the inputs that returns a list of outputs, and a list of other tensors
            that the gradient needs.
        gradient: function at the top level of a module, which uses no other tensors than its
            arguments. These are a list of the gradients of the outputs, and the lists of the
            inputs, the outputs and the residuals. It returns the gradients of the inputs.
        inputs: sequence of tensors.

    Returns:
        list of tensors, the outputs.
    """
    dtype = reach.current()

    def differentiate(*args: Any) -> list[tf.Tensor | None]:
        with reach.entered(dtype), reach.decided():
            return gradient(*args)

    outputs, residuals = function(*inputs)
    if tf.executing_eagerly():
        with gradients.stop_recording():
            results = [tf.identity(each) for each in outputs]
        gradients.record_operation(
            name,
            results,
            list(inputs),
            lambda *upstream: differentiate(upstream, inputs, outputs, residuals),
        )
        return results
    start, end = len(inputs), len(inputs) + len(outputs)
    graph = weakref.ref(tf.compat.v1.get_default_graph())
    registered, names = f"KerasMp{name}_{next(_numbers)}", []
    _register(registered, differentiate, graph, names, start, end)
    op = identity(registered, [*inputs, *outputs, *residuals])
    # By now, eager tensors that were captured are tensors of the graph.
    names += [each.name for each in op.inputs]
    return list(op.outputs[start:end])


def identity(gradient: str, tensors: Sequence[tf.Tensor]) -> tf.Operation:
    """Makes an identity of tensors in a graph that has a registered gradient.

    Args:
        gradient: str. The name of the gradient.
        tensors: sequence of tensors.

    Returns:
        The operation, whose outputs are equal to the tensors.
    """
    types = [tensor.dtype.as_datatype_enum for tensor in tensors]
    attrs = {"T": tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(type=types))}
    graph = tf.compat.v1.get_default_graph()
    with graph.gradient_override_map({"IdentityN": gradient}):
        op = graph.create_op("IdentityN", tensors, [t.dtype for t in tensors], attrs=attrs)
    gradients.record_gradient(gradient, list(op.inputs), (), op.outputs)
    return op


_numbers = itertools.count()


def _register(
    registered: str,
    gradient: Gradient,
    graph: "weakref.ref[tf.Graph]",
    names: Sequence[str],
    start: int,
    end: int,
) -> None:
    @tf.RegisterGradient(registered)
    @do_not_convert
    def of_operation(op: tf.Operation, *upstream: Any) -> list[Any]:
        # A SavedModel asks for the function without an operation.
        own = graph() if op is None else None
        tensors = list(op.inputs) if own is None else [own.get_tensor_by_name(n) for n in names]
        inputs, outputs, residuals = tensors[:start], tensors[start:end], tensors[end:]
        output_gradients = [
            tf.zeros_like(output) if each is None else each
            for each, output in zip(upstream[start:end], outputs, strict=True)
        ]
        of_inputs = gradient(output_gradients, inputs, outputs, residuals)
        return [*of_inputs, *[None] * (len(tensors) - start)]

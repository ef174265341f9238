"""The functions that run operations in a region.

They are between generated code and TensorFlow. TensorFlow's generated code (`gen_math_ops` and
others) makes operations through one function in eager and through another one in graphs, and tells
tapes about the latter through a third one. In a region the functions of this module replace these
three. It needs TensorFlow only.
"""

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.hooks import reach
from keras_mp.kernels import low_precision_gradients
from keras_mp.op_autocast import lower_precision, plans
from keras_mp.op_autocast.lower_precision import Origin
from keras_mp.op_autocast.plans import Plan
from keras_mp.tensorflow_api import operations

_READS = "ReadVariableOp"
_WEIGHT = Origin(is_weight=True)


def in_eager(execute: Callable[..., Any]) -> Callable[..., object]:
    """Returns the function that runs an operation in eager.

    Args:
        execute: takes the context, the operation, a name, inputs and attributes; TensorFlow's own.
    """

    def call(context: object, op: str, name: str | None, *args: Any) -> object:
        region = reach.region()
        if region is None:
            return execute(context, op, name, *args)
        plan = plans.plan_of(op, region)
        if plan is None:
            result = execute(context, op, name, *args)
            if op == _READS and result.dtype == tf.float32:
                lower_precision.mark(result, _WEIGHT)
            return result
        tensors, values, dtype = _decide(plan, region, [args[i] for i in plan.positions])
        if dtype is None and not plan.is_view:
            return execute(context, op, name, *args)
        # Given lists or variables, TensorFlow may leave this function, and run the operation
        # in another one.
        cast = list(args)
        for i, wanted, of_empty in plan.others:
            if isinstance(args[i], list | tuple):
                # An empty list, such as the shape of a scalar, does not say what it is a list of.
                cast[i] = tf.convert_to_tensor(args[i], wanted if args[i] else wanted or of_empty)
        for i, value in zip(plan.positions, tensors):
            if dtype is not None:
                value = _cast(value, tf.float32 if region.gradients_only else dtype)
            cast[i] = value
        if dtype is None:
            result = execute(context, op, name, *cast)
            _note(result, plan, values)
            return result
        if region.gradients_only and dtype == region.dtype:
            run = functools.partial(execute, context, op, name)
            return low_precision_gradients.run_in_eager(run, op, cast, len(plan.names), dtype)
        try:
            results = execute(context, op, name, *cast)
        except operations.QuickWayFailed.get():
            if len({value.dtype for value in values or () if tf.is_tensor(value)}) > 1:
                raise
            # No such kernel, or a mistake of the user's, which TensorFlow is to report.
            return execute(context, op, name, *args)
        if isinstance(results, list | tuple):
            return type(results)(_to_float32(each, region.dtype, plan) for each in results)
        return _to_float32(results, region.dtype, plan)

    return call


def in_graph(apply: Callable[..., Any]) -> Callable[..., tuple[object, ...]]:
    """Returns the function that makes an operation in a graph.

    Args:
        apply: takes the operation, a name, inputs and attributes; returns four things, of which the
            third is the operation and the last the list of results. TensorFlow's own.
    """

    def call(op_type_name: str, name: str | None = None, **keywords: Any) -> tuple[object, ...]:
        region = reach.region()
        if region is None:
            return apply(op_type_name, name, **keywords)
        plan = plans.plan_of(op_type_name, region)
        if plan is None:
            parts = apply(op_type_name, name, **keywords)
            if op_type_name == _READS and parts[3][0].dtype == tf.float32:
                lower_precision.mark(parts[3][0], _WEIGHT)
            return parts
        names = [plan.names[i] for i in plan.positions]
        tensors, values, dtype = _decide(plan, region, [keywords[each] for each in names])
        if dtype is None:
            parts = apply(op_type_name, name, **keywords)
            if parts[3]:
                _note(parts[3][0], plan, values)
            return parts
        only_gradients = region.gradients_only and dtype == region.dtype
        wanted = tf.float32 if only_gradients else dtype
        keywords.update({each: _cast(value, wanted) for each, value in zip(names, tensors)})
        structure, is_stateful, op, outputs = apply(op_type_name, name, **keywords)
        if only_gradients:
            low_precision_gradients.set_in_graph(op, dtype)
        else:
            # Tapes hear of these casts when they have heard of the operation: see `on_tape`.
            outputs = [_to_float32(each, region.dtype, plan) for each in outputs]
        return structure, is_stateful, op, outputs

    return call


def on_tape(record: Callable[..., None]) -> Callable[..., None]:
    """Returns the function that tells tapes of an operation in a graph.

    Args:
        record: takes the operation, its inputs, attributes and results; TensorFlow's own.
    """

    def call(op: str, inputs: object, attributes: object, results: Sequence[tf.Tensor]) -> None:
        computed = [lower_precision.origin(each).low_precision for each in results]
        pairs = list(zip(computed, results))
        gradient = low_precision_gradients.name_of_gradient(op, results)
        record(gradient, inputs, attributes, [r if c is None else c for c, r in pairs])
        for each, result in pairs:
            if each is not None:
                record("Cast", [each], (), [result])

    return call


def _decide(
    plan: Plan, region: reach.Region, inputs: Sequence[object]
) -> tuple[list[Any], list[Any] | None, tf.DType | None]:
    """Returns inputs without variables, their tensors, and the dtype to run in.

    The second item has the tensors and numbers, including those of lists. It is None if there is
    something else. The dtype is None if the operation is left alone.
    """
    tensors = [_read(each) for each in inputs]
    values: list[Any] = []
    for value in tensors:
        values.extend(value if isinstance(value, list | tuple) else [value])
    if not all(map(_is_known, values)):
        return tensors, None, None
    return tensors, values, plans.dtype_for(plan, values, region.dtype)


def _read(value: Any) -> Any:
    """Returns an input with tensors in the place of variables and arrays."""
    if isinstance(value, list | tuple):
        return [_read(each) for each in value]
    is_variable = isinstance(value, tf.Variable)
    # A variable of Keras has the method. One of TensorFlow counts as a tensor.
    is_variable |= hasattr(value, "__tf_tensor__") and not isinstance(value, tf.Tensor)
    return tf.convert_to_tensor(value) if is_variable or isinstance(value, np.ndarray) else value


def _is_known(value: object) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number or isinstance(value, tf.Tensor)


def _cast(value: Any, dtype: tf.DType) -> Any:
    if isinstance(value, list | tuple):
        return [_cast(each, dtype) for each in value]
    if dtype == tf.float32:  # A 16-bit tensor meets float32 ones.
        return tf.cast(value, dtype)
    return lower_precision.to_low_precision(value, dtype)


def _to_float32(result: Any, dtype: tf.DType, plan: Plan) -> Any:
    if isinstance(result, list | tuple):
        return [_to_float32(each, dtype, plan) for each in result]
    if not tf.is_tensor(result) or result.dtype != dtype:
        return result
    cast = lower_precision.to_float32(result)
    lower_precision.mark(cast, Origin(result, plan.is_bounded))
    return cast


def _note(result: tf.Tensor, plan: Plan, values: Sequence[Any] | None) -> None:
    """Marks the result of an operation that was left alone.

    A view of a weight is a weight, too.
    """
    if plan.is_view and values and lower_precision.origin(values[0]).is_weight:
        lower_precision.mark(result, _WEIGHT)

"""How an operation runs in a region: what is called between generated code and TensorFlow.

Generated code makes operations through one function in eager and through another one in graphs,
and tells tapes about the latter through a third. In a region those are the functions of this
module. It needs TensorFlow only.
"""

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import core as _core

from keras_mp.op_autocast import low_precision_gradients, lower_precision, plans
from keras_mp.op_autocast.lower_precision import Origin
from keras_mp.op_autocast.plans import Plan
from keras_mp.support import regions

_READS = "ReadVariableOp"
_WEIGHT = Origin(is_weight=True)


def in_eager(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what takes the place of the function that runs an operation in eager.

    Args:
        execute: takes the context, the operation, a name, inputs and attributes; TensorFlow's own.
    """

    def call(context: Any, op: str, name: Any, *args: Any) -> Any:
        region = regions.current()
        if region is None:
            return execute(context, op, name, *args)
        plan = plans.plan_of(op, region)
        if plan is None:
            result = execute(context, op, name, *args)
            if op == _READS and result.dtype == tf.float32:
                lower_precision.mark(result, _WEIGHT)
            return result
        given = _read([args[i] for i in plan.positions])
        values = _values(given)
        dtype = None if values is None else plans.dtype_for(plan, values, region.dtype)
        if dtype is None and not plan.is_view:
            return execute(context, op, name, *args)
        # Given lists or variables, TensorFlow may leave this function, and run the operation
        # in another one.
        cast = list(args)
        for i, wanted in plan.others:
            if isinstance(args[i], list | tuple):
                cast[i] = tf.convert_to_tensor(args[i], wanted)
        for i, value in zip(plan.positions, given):
            if dtype is not None:
                value = _cast(value, tf.float32 if region.gradients_only else dtype)
            cast[i] = value
        if dtype is None:
            return _noted(execute(context, op, name, *cast), plan, values)
        if region.gradients_only and dtype == region.dtype:
            run = functools.partial(execute, context, op, name)
            return low_precision_gradients.run_in_eager(run, op, cast, len(plan.names), dtype)
        try:
            results = execute(context, op, name, *cast)
        except _core._NotOkStatusException:
            if len({value.dtype for value in values or () if tf.is_tensor(value)}) > 1:
                raise
            # No such kernel, or a mistake of the user's, which TensorFlow is to report.
            return execute(context, op, name, *args)
        if isinstance(results, list | tuple):
            return type(results)(_to_float32(each, region.dtype, plan) for each in results)
        return _to_float32(results, region.dtype, plan)

    return call


def in_graph(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what takes the place of the function that makes an operation in a graph.

    Args:
        apply: takes the operation, a name, inputs and attributes, and returns four things of which
            the last is the list of results; TensorFlow's own.
    """

    def call(op_type_name: str, name: Any = None, **keywords: Any) -> Any:
        region = regions.current()
        if region is None:
            return apply(op_type_name, name, **keywords)
        plan = plans.plan_of(op_type_name, region)
        if plan is None:
            made = apply(op_type_name, name, **keywords)
            if op_type_name == _READS and made[3][0].dtype == tf.float32:
                lower_precision.mark(made[3][0], _WEIGHT)
            return made
        names = [plan.names[i] for i in plan.positions]
        given = _read([keywords[each] for each in names])
        values = _values(given)
        dtype = None if values is None else plans.dtype_for(plan, values, region.dtype)
        if dtype is None:
            made = apply(op_type_name, name, **keywords)
            _noted(made[3][0] if made[3] else None, plan, values)
            return made
        if region.gradients_only and dtype == region.dtype:
            keywords.update({each: _cast(value, tf.float32) for each, value in zip(names, given)})
            made = apply(op_type_name, name, **keywords)
            low_precision_gradients.set_in_graph(made[2], dtype)
            return made
        keywords.update({each: _cast(value, dtype) for each, value in zip(names, given)})
        structure, is_stateful, op, outputs = apply(op_type_name, name, **keywords)
        # Tapes hear of these casts when they have heard of the operation: see `on_tape`.
        outputs = [_to_float32(each, region.dtype, plan) for each in outputs]
        return structure, is_stateful, op, outputs

    return call


def on_tape(record: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what takes the place of the function that tells tapes of an operation in a graph.

    Args:
        record: takes the operation, its inputs, attributes and results; TensorFlow's own.
    """

    def call(op: str, inputs: Any, attributes: Any, results: Any) -> None:
        computed = [lower_precision.origin(each).low_precision for each in results]
        pairs = list(zip(computed, results))
        gradient = low_precision_gradients.of(op, results)
        record(gradient, inputs, attributes, [r if c is None else c for c, r in pairs])
        for each, result in pairs:
            if each is not None:
                record("Cast", [each], (), [result])

    return call


def _read(given: Any) -> Any:
    """Inputs with tensors in the place of variables, TensorFlow's and Keras's, and of arrays."""
    if isinstance(given, list | tuple):
        return [_read(each) for each in given]
    if isinstance(given, tf.Variable | np.ndarray):
        return tf.convert_to_tensor(given)
    if hasattr(given, "__tf_tensor__") and not isinstance(given, tf.Tensor):
        return tf.convert_to_tensor(given)
    return given


def _values(given: Sequence[Any]) -> list[Any] | None:
    """Tensors and numbers among inputs, lists made flat; None if there is something else."""
    values: list[Any] = []
    for value in given:
        values.extend(value if isinstance(value, list | tuple) else [value])
    known = all(
        isinstance(value, tf.Tensor)
        or (isinstance(value, numbers.Real) and not isinstance(value, bool))
        for value in values
    )
    return values if known else None


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


def _noted(result: Any, plan: Plan, values: Sequence[Any] | None) -> Any:
    """The result of an operation that was left alone: what it made of a weight is one, too."""
    if plan.is_view and values and lower_precision.origin(values[0]).is_weight:
        lower_precision.mark(result, _WEIGHT)
    return result

"""Layers that do not compute in the dtype that they should, and casts for nothing."""

from collections import Counter
from collections.abc import Iterator

import tensorflow as tf

from keras_mp import kernels
from keras_mp.layer_calls import raw_inputs
from keras_mp.numerics import origins
from keras_mp.numerics.causes import CURES, Observed, Said
from keras_mp.numerics.distances import UNIT_ROUNDOFF
from keras_mp.numerics.graphs import tensor_cores, work
from keras_mp.numerics.hazards.traced_step import (
    TracedStep,
    before,
    shapes_of,
    widened,
)
from keras_mp.support.dtypes import LOW_PRECISION, LOW_PRECISION_NAMES

# Layers with a smaller share of the model's work are not reported.
_LARGE_SHARE = 0.01
_ODD_SHARE = 0.1

# What is said of a layer in float32.
_OF_ANOTHER_POLICY, _NOT_CAST, _IGNORES = (
    "a layer of another policy",
    "a variable that is not cast",
    "a layer that ignores its policy",
)
_OF_A_LAYER = {
    _OF_ANOTHER_POLICY: "Create it under the policy of the model, without a dtype of its own, or "
    "pass dtype=self.dtype_policy from the layer that creates it. If float32 is intended, ignore "
    "this.",
    _NOT_CAST: "Make the variable with `add_weight`, which casts it where it is read, or wrap it "
    "in keras_mp.autocast_variable.",
    _IGNORES: "Let its `call` cast to self.compute_dtype, and not to float32; or, if it needs "
    'float32, create it with dtype="float32".',
}


def layers_in_float32(step: TracedStep) -> Iterator[Observed]:
    """A layer multiplies in float32, against its policy or in the middle of a 16-bit model."""
    found = (step.layers.layer(operation.name) for operation, _ in step.products)
    dtypes = {id(layer): layer.compute_dtype for layer in found if layer is not None}
    is_mostly_low = 2 * sum(each in LOW_PRECISION_NAMES for each in dtypes.values()) >= len(dtypes)
    counts: Counter[str] = Counter()
    most: dict[str, tuple[int, tf.Operation]] = {}
    for operation, count in step.products:
        path = step.layers.name(operation.name)
        # What keras_mp decides is in 16 bits, but for what is inside of the kernel.
        if path and operation.outputs[0].dtype == tf.float32 and not kernels.has_decided(operation):
            counts[path] += count
            most[path] = max(most.get(path, (0, operation)), (count, operation), key=lambda e: e[0])
    for path, (_, operation) in most.items():
        layer = step.layers.layer(operation.name)
        if layer is None or id(layer) in step.output_layers:
            continue
        if layer.compute_dtype not in LOW_PRECISION_NAMES:
            hazard = _OF_ANOTHER_POLICY if is_mostly_low else None
        elif raw_inputs.reads_raw(type(layer)):
            hazard = None
        else:
            hazard = _NOT_CAST if any(map(_is_variable, operation.inputs)) else _IGNORES
        if hazard is not None:
            share = counts[path] / sum(count for _, count in step.products)
            yield Observed(operation, hazard=hazard, share=share, policy=layer.dtype_policy.name)


def judge_layer_in_float32(hazard: str, share: float, policy: str) -> Said | None:
    """It matters if the layer has much of the work."""
    if share < _LARGE_SHARE:
        return None
    return Said(
        hazard,
        f"{share:.0%} of the multiplications of the forward pass run in float32 here; its policy "
        f"is {policy}.",
        _OF_A_LAYER[hazard],
    )


def _is_variable(tensor: tf.Tensor) -> bool:
    """Whether a tensor comes from a read of a variable, and nothing has cast it."""
    return before(tensor, origins.MOVES).op.type == "ReadVariableOp"


# 8 bits have two or three digits, bfloat16 seven.
_LIMIT_OF_8_BITS = 4


def casts_there_and_back(step: TracedStep) -> Iterator[Observed]:
    """The program casts to another dtype and back, with nothing computed in between."""
    for second in step.forward:
        if second.type != "Cast" or not second.outputs[0].dtype.is_floating:
            continue
        between, back = before(second.inputs[0], origins.MOVES), second.outputs[0].dtype
        first, there = between.op, between.dtype
        if first.type != "Cast" or first.inputs[0].dtype != back or there == back:
            continue
        if not there.is_floating or {*map(origins.maker_of, (first, second))} != {"user"}:
            continue
        source = first.inputs[0]
        size = source.shape.num_elements()
        if size is None or size < 2 or source.op.type == "Const":
            continue
        wide, rounded = widened(source), widened(between)
        errors = tf.where(tf.math.is_finite(rounded), wide - rounded, 0.0)
        rms, size_of_all = (tf.sqrt(tf.reduce_mean(tf.square(each))) for each in (errors, wide))
        yield Observed(
            second,
            there=there.name,
            back=back.name,
            is_to_8_bits=there.size == 1,
            moved=2 * size * (there.size + back.size),
            error=tf.reduce_max(tf.abs(errors)),
            largest=tf.reduce_max(tf.abs(wide)),
            off=tf.math.divide_no_nan(rms, size_of_all),
        )


def judge_cast_there_and_back(
    there: str, back: str, is_to_8_bits: bool, moved: int, error: float, largest: float, off: float
) -> Said | None:
    """Both casts are for nothing; but to 8 bits nobody rounds for nothing."""
    if is_to_8_bits:
        units = off / UNIT_ROUNDOFF[back]
        if units <= _LIMIT_OF_8_BITS:
            return None
        return Said(
            "a difference in the forward pass",
            f"{back} is rounded to {there}: numbers up to {largest:.3g} by up to {error:.2g}, "
            f"{units:,.0f} times as far as rounding to {back} explains.",
            CURES["a cast to 8 bits"].format(dtype=there),
            units,
        )
    loss = f", and rounds numbers up to {largest:.3g} by up to {error:.2g}" if error else ""
    return Said(
        "a cast there and back",
        f"{back} is cast to {there} and back with nothing computed in between: that moves "
        f"{moved:,} bytes in the forward pass{loss}.",
        "Leave both casts out.",
    )


def float64_data(step: TracedStep) -> Iterator[Observed]:
    """The batch is in float64."""
    for name, part in step.batch._asdict().items():
        wide = [t for t in tf.nest.flatten(part) if t is not None and t.dtype == tf.float64]
        if wide:
            moved = sum(8 * (tensor.shape.num_elements() or 0) for tensor in wide)
            yield Observed(f"the batch's {name}", moved=moved)


def judge_float64_data(moved: int) -> Said:
    """It is prepared, copied and cast for nothing."""
    return Said(
        "data in float64",
        f"It is float64: {moved:,} bytes a batch, twice those of float32, are prepared and copied "
        "to the device, and cast there.",
        "Cast it in the data pipeline: dataset.map(lambda x, y: (tf.cast(x, tf.float32), y)).",
    )


def float64_layers(step: TracedStep) -> Iterator[Observed]:
    """A layer computes in float64."""
    computing = [
        operation
        for operation in step.forward
        if operation.outputs
        and operation.outputs[0].dtype == tf.float64
        and operation.type not in ("Cast", "Placeholder", "Const", "ReadVariableOp", *origins.MOVES)
        and step.layers.name(operation.name)
    ]
    if computing:
        numbers = sum(o.outputs[0].shape.num_elements() or 0 for o in computing)
        first = computing[0]
        yield Observed(first, operations=len(computing), op=first.type, numbers=numbers)


def judge_float64_layer(operations: int, op: str, numbers: int) -> Said:
    """Most GPUs are slow in float64."""
    return Said(
        "a layer in float64",
        f"{operations} operations, of which {op} is the first, compute {numbers:,} numbers in "
        "float64, which most GPUs do at a small part of their speed.",
        "Cast to self.compute_dtype, or to float32 where 16 bits are too few.",
    )


def without_tensor_cores(step: TracedStep) -> Iterator[Observed]:
    """Products are in 16 bits for which the GPU that was named has no tensor cores."""
    if step.device is None:  # A policy itself warns where this machine is slow.
        return
    refused = [
        (count, operation)
        for operation, count in step.products
        if operation.outputs[0].dtype in LOW_PRECISION
        and not tensor_cores.take(operation.outputs[0].dtype.name, step.device)
    ]
    if refused:
        _, operation = max(refused, key=lambda each: each[0])
        share = sum(count for count, _ in refused) / sum(count for _, count in step.products)
        yield Observed(
            operation,
            dtype=operation.outputs[0].dtype.name,
            device=step.device,
            share=share,
            takes_float16=tensor_cores.take("float16", step.device),
        )


def judge_without_tensor_cores(dtype: str, device: str, share: float, takes_float16: bool) -> Said:
    """They are as slow as in float32, or slower."""
    other = "mixed_float16" if takes_float16 else "float32"
    return Said(
        "a dtype without tensor cores",
        f"{share:.0%} of the multiplications of the forward pass are in {dtype}, for which a "
        f"{device} has no tensor cores.",
        f"Train under the policy {other} there, or on a newer GPU.",
    )


def odd_shapes(step: TracedStep) -> Iterator[Observed]:
    """Products in 16 bits have sizes that are no multiple of 8, on a GPU with tensor cores."""
    total = sum(count for _, count in step.products)
    by_layer: dict[str, tuple[int, tf.Operation, tuple[int | None, ...]]] = {}
    for operation, count in step.products:
        sizes = work.multiplied_sizes(operation.node_def, *shapes_of(operation))
        takes = tensor_cores.take(operation.outputs[0].dtype.name, step.device)
        if takes and tensor_cores.are_odd(sizes):
            path = step.layers.name(operation.name)
            before = by_layer.get(path, (0, operation, sizes))[0]
            by_layer[path] = (before + count, operation, sizes)
    for count, operation, sizes in by_layer.values():
        yield Observed(operation, share=count / total, sizes=sizes)


def judge_odd_shape(share: float, sizes: tuple[int | None, ...]) -> Said | None:
    """It matters if the layer has much of the work."""
    if share < _ODD_SHARE:
        return None
    return Said(
        "a shape that is slow on tensor cores",
        f"{share:.0%} of the multiplications of the forward pass have the sizes "
        f"{' x '.join(map(str, sizes))}: tensor cores are fastest with multiples of 8.",
        "Round units, filters, or the size of the batch up to a multiple of 8.",
    )

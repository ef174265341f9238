"""Layers that do not compute in the dtype that they should, and casts for nothing."""

from collections import Counter
from collections.abc import Iterator

import tensorflow as tf

from keras_mp import kernels, raw_inputs
from keras_mp.numerics.graphs import origins, tensor_cores, work
from keras_mp.numerics.hazards.traced_step import Suspect, TracedStep, shapes_of, widened
from keras_mp.numerics.results import Finding
from keras_mp.support.dtypes import LOW_PRECISION, LOW_PRECISION_NAMES

# Layers with a smaller share of the model's work are not reported.
_LARGE_SHARE = 0.01


def layers_in_float32(traced: TracedStep) -> Iterator[Finding]:
    """A layer multiplies in float32, against its policy or in the middle of a 16-bit model."""
    found = (traced.layers.layer(operation.name) for operation, _ in traced.products)
    dtypes = {id(layer): layer.compute_dtype for layer in found if layer is not None}
    in_16_bits = [dtype for dtype in dtypes.values() if dtype in LOW_PRECISION_NAMES]
    for share, operation, layer in _layers_in_float32(traced):
        if layer.compute_dtype not in LOW_PRECISION_NAMES:
            if len(in_16_bits) < len(dtypes) / 2:
                continue
            hazard = "a layer of another policy"
            cure = (
                "Create it under the policy of the model, without a dtype of its own, or pass "
                "dtype=self.dtype_policy from the layer that creates it. If float32 is intended, "
                "ignore this."
            )
        elif raw_inputs.reads_raw(type(layer)):
            continue
        elif any(map(_variable_of, operation.inputs)):
            hazard = "a variable that is not cast"
            cure = (
                "Make the variable with `add_weight`, which casts it where it is read, or wrap it "
                "in keras_mp.autocast_variable."
            )
        else:
            hazard = "a layer that ignores its policy"
            cure = (
                "Let its `call` cast to self.compute_dtype, and not to float32; or, if it needs "
                'float32, create it with dtype="float32".'
            )
        why = (
            f"{share:.0%} of the multiplications of the forward pass run in float32 here; its "
            f"policy is {layer.dtype_policy.name}."
        )
        yield traced.finding(operation, hazard, why, cure)


def _layers_in_float32(
    traced: TracedStep,
) -> Iterator[tuple[float, tf.Operation, tf.keras.layers.Layer]]:
    """Yields layers with much work in float32, but for those that make the model's outputs.

    Yields:
        The share of the forward pass's work, the operation that has most of it, and the layer.
    """
    total = sum(count for _, count in traced.products)
    counts: Counter[str] = Counter()
    most: dict[str, tuple[int, tf.Operation]] = {}
    for operation, count in traced.products:
        path = traced.layers.name(operation.name)
        if kernels.has_decided(operation):
            continue  # It is in 16 bits, but for what is inside of the kernel.
        if path and operation.outputs[0].dtype == tf.float32:
            counts[path] += count
            most[path] = max(most.get(path, (0, operation)), (count, operation), key=lambda e: e[0])
    for path, (_, operation) in most.items():
        layer = traced.layers.layer(operation.name)
        if layer is None or id(layer) in traced.output_layers:
            continue
        if counts[path] >= _LARGE_SHARE * total:
            yield counts[path] / total, operation, layer


def _variable_of(tensor: tf.Tensor) -> tf.Operation | None:
    """Returns the read of a variable that a tensor comes from, if nothing has cast it."""
    while tensor.op.type in origins.MOVES:
        tensor = tensor.op.inputs[0]
    return tensor.op if tensor.op.type == "ReadVariableOp" else None


def casts_there_and_back(traced: TracedStep) -> Iterator[Suspect]:
    """The program casts to another dtype and back, with nothing computed in between."""
    for second in traced.forward:
        if second.type != "Cast" or not second.outputs[0].dtype.is_floating:
            continue
        between = second.inputs[0]
        while between.op.type in origins.MOVES:
            between = between.op.inputs[0]
        first = between.op
        if first.type != "Cast" or first.inputs[0].dtype != second.outputs[0].dtype:
            continue
        if first.outputs[0].dtype == second.outputs[0].dtype or not between.dtype.is_floating:
            continue
        if {origins.maker_of(first), origins.maker_of(second)} != {"user"}:
            continue
        source = first.inputs[0]
        size = source.shape.num_elements()
        if size is None or size < 2 or source.op.type == "Const":
            continue
        yield _cast_there_and_back(traced, source, between, second)


def _cast_there_and_back(
    traced: TracedStep, source: tf.Tensor, between: tf.Tensor, second: tf.Operation
) -> Suspect:
    there, back = between.dtype, second.outputs[0].dtype
    wide, rounded = widened(source), widened(between)
    error, largest = yield tf.reduce_max(tf.abs(wide - rounded)), tf.reduce_max(tf.abs(wide))
    moved = 2 * source.shape.num_elements() * (there.size + back.size)
    loss = f", and rounds numbers up to {largest:.3g} by up to {error:.2g}" if error else ""
    return traced.finding(
        second,
        "a cast there and back",
        f"{back.name} is cast to {there.name} and back with nothing computed in between: that "
        f"moves {moved:,} bytes in the forward pass{loss}.",
        "Leave both casts out.",
    )


def float64(traced: TracedStep) -> Iterator[Finding]:
    """The batch, or something that is computed, is in float64."""
    for name, part in traced.batch._asdict().items():
        wide = [t for t in tf.nest.flatten(part) if t is not None and t.dtype == tf.float64]
        moved = sum(8 * (tensor.shape.num_elements() or 0) for tensor in wide)
        if wide:
            yield Finding(
                "data in float64",
                f"the batch's {name}",
                None,
                f"It is float64: {moved:,} bytes a batch, twice those of float32, are prepared "
                "and copied to the device, and cast there.",
                "Cast it in the data pipeline: dataset.map(lambda x, y: (tf.cast(x, tf.float32), "
                "y)).",
            )
    computing = [
        operation
        for operation in traced.forward
        if operation.outputs
        and operation.outputs[0].dtype == tf.float64
        and operation.type not in ("Cast", "Placeholder", "Const", "ReadVariableOp", *origins.MOVES)
        and traced.layers.name(operation.name)
    ]
    if computing:
        numbers = sum(o.outputs[0].shape.num_elements() or 0 for o in computing)
        why = (
            f"{len(computing)} operations, of which {computing[0].type} is the first, compute "
            f"{numbers:,} numbers in float64, which most GPUs do at a small part of their speed."
        )
        cure = "Cast to self.compute_dtype, or to float32 where 16 bits are too few."
        yield traced.finding(computing[0], "a layer in float64", why, cure)


def dtypes_for_no_tensor_core(traced: TracedStep) -> Iterator[Finding]:
    """Products are in 16 bits for which the GPU that was named has no tensor cores."""
    if traced.device is None:  # A policy itself warns where this machine is slow.
        return
    total = sum(count for _, count in traced.products)
    refused = [
        (operation, count)
        for operation, count in traced.products
        if operation.outputs[0].dtype in LOW_PRECISION
        and not tensor_cores.take(operation.outputs[0].dtype.name, traced.device)
    ]
    if not refused:
        return
    operation, _ = max(refused, key=lambda each: each[1])
    dtype = operation.outputs[0].dtype.name
    why = (
        f"{sum(count for _, count in refused) / total:.0%} of the multiplications of the forward "
        f"pass are in {dtype}, for which a {traced.device} has no tensor cores."
    )
    other = "mixed_float16" if tensor_cores.take("float16", traced.device) else "float32"
    cure = f"Train under the policy {other} there, or on a newer GPU."
    yield traced.finding(operation, "a dtype without tensor cores", why, cure)


def shapes_for_no_tensor_core(traced: TracedStep) -> Iterator[Finding]:
    """Products in 16 bits have sizes that are no multiple of 8, on a GPU with tensor cores."""
    total = sum(count for _, count in traced.products)
    by_layer: dict[str, tuple[int, tf.Operation, tuple[int | None, ...]]] = {}
    for operation, count in traced.products:
        dtype = operation.outputs[0].dtype
        if not tensor_cores.take(dtype.name, traced.device):
            continue
        sizes = work.multiplied_sizes(operation.node_def, *shapes_of(operation))
        if not tensor_cores.are_odd(sizes):
            continue
        path = traced.layers.name(operation.name)
        before = by_layer.get(path, (0, operation, sizes))[0]
        by_layer[path] = (before + count, operation, sizes)
    for count, operation, sizes in by_layer.values():
        if count < 0.1 * total:
            continue
        why = (
            f"{count / total:.0%} of the multiplications of the forward pass have the sizes "
            f"{' x '.join(map(str, sizes))}: tensor cores are fastest with multiples of 8."
        )
        cure = "Round units, filters, or the size of the batch up to a multiple of 8."
        yield traced.finding(operation, "a shape that is slow on tensor cores", why, cure)

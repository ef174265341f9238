"""What loss scaling does to gradients: scale, unscale, reduce across replicas, judge.

RFC 293, "LossScaleOptimizer Overview" and "All-reducing in float16". This module needs TensorFlow
only. A gradient is a tensor, a `tf.IndexedSlices` (which stays sparse) or None (which stays None).
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.support import host
from keras_mp.support.autograph import do_not_convert

Gradient = tf.Tensor | tf.IndexedSlices | None

# So many values of a gradient take longer than an operation of its own costs (2 cores).
_MANY = 2**13

# A pack of so many bytes is sent as soon as its gradients are there, while others are still
# computed. TensorFlow itself makes one of all, which waits for the last.
_BYTES_PER_PACK = 2**22

# On these nothing was tested.
_TPU_STRATEGIES = (
    tf.distribute.TPUStrategy,
    tf.distribute.experimental.TPUStrategy,
    tf.compat.v1.distribute.experimental.TPUStrategy,
)

# Those whose replicas sum gradients and update together.
_SUPPORTED_STRATEGIES = (
    *_TPU_STRATEGIES,
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.experimental.CentralStorageStrategy,
    tf.compat.v1.distribute.OneDeviceStrategy,
    tf.compat.v1.distribute.MirroredStrategy,
    tf.compat.v1.distribute.experimental.MultiWorkerMirroredStrategy,
)


def check_strategy(may_skip: bool = True) -> None:
    """Refuses strategies that are not known to judge gradients of all replicas together.

    Args:
        may_skip: bool. May a step be skipped? Where none is, a ParameterServerStrategy works.

    Raises:
        ValueError: the current strategy is one of them.
    """
    strategy = tf.distribute.get_strategy()
    if not tf.distribute.has_strategy() or isinstance(strategy, _SUPPORTED_STRATEGIES):
        return
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        if not may_skip:
            return
        raise ValueError(
            "Loss scaling that skips steps does not work under ParameterServerStrategy: its "
            "workers make their steps apart, so there is no verdict for all of them, and they "
            "would move one scale at the same time. Use a fixed scale without `skip_nonfinite`, "
            "such as LossScaleOptimizer(optimizer, 1024), or train without loss scaling: "
            f'keras_mp.set_global_policy("mixed_bfloat16"). Received: {strategy}'
        )
    raise ValueError(
        "Loss scaling does not work under this strategy: it takes replicas that sum gradients "
        "and skip a step together. Use MirroredStrategy, OneDeviceStrategy, "
        "MultiWorkerMirroredStrategy or TPUStrategy, or train without loss scaling: "
        f'keras_mp.set_global_policy("mixed_bfloat16"). Received: {strategy}'
    )


def convert(gradients: Iterable[Any]) -> list[Gradient]:
    """Makes a list of gradients of what stands for one.

    Args:
        gradients: iterable of tensors, arrays, `tf.IndexedSlices` and None.

    Returns:
        list of gradients.

    Raises:
        TypeError: there is something else among them, or they are not in a flat list.
    """
    is_one = tf.is_tensor(gradients) or isinstance(gradients, (str, dict))
    if is_one or not isinstance(gradients, Iterable):
        raise TypeError(
            "Expected a flat list of gradients, each a tensor, a tf.IndexedSlices or None. "
            f"Received: {gradients!r} (of type {type(gradients)})"
        )
    return [_map(lambda g: g, gradient) for gradient in gradients]


def scale_loss(loss: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
    """Multiplies a loss by the loss scale.

    Args:
        loss: float tensor of any shape. A float16 or bfloat16 loss is widened first: `2**16`, an
            ordinary loss scale, is infinite in float16.
        loss_scale: float32 scalar tensor.

    Returns:
        The scaled loss, in float32, or in float64 where `loss` is.

    Raises:
        TypeError: `loss` is not a floating-point tensor.
    """
    if loss is None or isinstance(loss, (list, tuple, dict)):
        raise TypeError(
            "The loss must be one tensor, or a callable that returns one; add several losses up "
            f"before scaling them. Received: loss={loss!r} (of type {type(loss)})"
        )
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        raise TypeError(
            "Only a floating-point loss can be scaled. "
            f"Received: loss={loss!r} (of dtype {loss.dtype.name})"
        )
    if loss.dtype.size < tf.float32.size:
        loss = tf.cast(loss, tf.float32)
    return loss * tf.cast(loss_scale, loss.dtype)


def scale(gradients: Sequence[Gradient], loss_scale: tf.Tensor) -> list[Gradient]:
    """Multiplies gradients by the loss scale, each in its own dtype.

    Args:
        gradients: sequence of gradients.
        loss_scale: float32 scalar tensor.

    Returns:
        list of gradients.
    """
    return _multiply(gradients, lambda dtype: tf.cast(loss_scale, dtype))


def unscale(gradients: Sequence[Gradient], loss_scale: tf.Tensor) -> list[Gradient]:
    """Divides gradients by the loss scale, each in its own dtype.

    Args:
        gradients: sequence of gradients.
        loss_scale: float32 scalar tensor, of a value whose reciprocal float32 holds too.

    Returns:
        list of gradients: bitwise the quotients where the scale is a power of two, within one unit
        in the last place of them otherwise.
    """
    # A product takes half the time of a quotient.
    return _multiply(gradients, lambda dtype: 1 / tf.cast(loss_scale, dtype))


def all_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Tells whether every value of every gradient is finite.

    Where it can, it looks at sums, in a fraction of the time of looking at each value. A sum is not
    finite where a value is not; where only the sum of unscaled gradients passes the largest
    float32, they are not worth more.

    Args:
        gradients: sequence of gradients, unscaled. Of a sparse one, the sums over equal indices
            have to be finite too, since an optimizer adds these up.

    Returns:
        bool scalar tensor; True where there is nothing to look at.
    """
    for_xla = host.is_compiled_by_xla()
    alike: dict[Any, list[tf.Tensor]] = {}
    for gradient in gradients:
        if gradient is None or gradient.dtype.is_integer:
            continue
        values = _magnitudes_of_sums(gradient) if _is_sparse(gradient) else gradient
        if values.dtype.is_complex:
            values = tf.math.real(values) + tf.math.imag(values)
        together = values.shape.is_fully_defined() and (for_xla or _is_small(values))
        kind = values.dtype, tuple(values.shape.as_list()) if together else id(values)
        alike.setdefault(kind, []).append(values)
    verdicts = []
    totals: dict[tf.DType, list[tf.Tensor]] = {}
    for (dtype, _), values in alike.items():
        if for_xla:
            # One loop for all of them. On CPUs XLA adds up one value after the other; and in
            # float32 it would not see what is infinite in float16, since it leaves out a cast to
            # float16 that is followed by one back.
            are_finite = functools.reduce(tf.logical_and, map(tf.math.is_finite, values))
            verdicts.append(tf.reduce_all(are_finite))
        elif dtype == tf.float16:  # the sums of which pass 65504
            verdicts += [tf.reduce_all(tf.math.is_finite(v)) for v in values]
        else:
            totals.setdefault(dtype, []).append(tf.reduce_sum(_add(values)))
    verdicts += [tf.math.is_finite(_add(of_dtype)) for of_dtype in totals.values()]
    if len(verdicts) == 1:
        return verdicts[0]
    return tf.reduce_all(tf.stack(verdicts)) if verdicts else tf.constant(True)


def count_not_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Says of each gradient what `all_finite` says of all.

    Args:
        gradients: sequence of gradients.

    Returns:
        int64 tensor of shape [gradients, 3]: how many values are infinite; how many are NaN; and 1
        where every value is finite and a sum that `all_finite` looks at is not, else 0.
    """
    alike: dict[tf.DType, list[int]] = {}
    rows, order = [], []
    for i, gradient in enumerate(gradients):
        if gradient is None or gradient.dtype.is_integer:
            rows.append(tf.zeros([1, 3], tf.int64))
            order.append(i)
        elif not _is_sparse(gradient) and _is_small(gradient) and gradient.dtype.is_floating:
            alike.setdefault(gradient.dtype, []).append(i)
        else:
            values = gradient.values if _is_sparse(gradient) else gradient
            counts = [tf.math.count_nonzero(each) for each in _infs_and_nans(values)]
            is_only_sum = tf.logical_not(all_finite([gradient])) & tf.equal(tf.add_n(counts), 0)
            rows.append([[*counts, tf.cast(is_only_sum, tf.int64)]])
            order.append(i)
    for dtype, group in alike.items():
        values = tf.concat([tf.reshape(gradients[i], [-1]) for i in group], 0)
        sizes = [gradients[i].shape.num_elements() for i in group]
        whose = np.repeat(np.arange(len(group)), sizes)
        kinds = tf.cast(tf.stack(_infs_and_nans(values), 1), tf.int64)
        counts = tf.math.unsorted_segment_sum(kinds, whose, len(group))
        sums = tf.zeros([len(group)])
        if dtype != tf.float16 and not host.is_compiled_by_xla():
            sums = tf.math.unsorted_segment_sum(values, whose, len(group))
        is_only_sum = tf.logical_not(tf.math.is_finite(sums)) & tf.reduce_all(counts == 0, 1)
        rows.append(tf.concat([counts, tf.cast(is_only_sum, tf.int64)[:, tf.newaxis]], 1))
        order += group
    return tf.gather(tf.concat(rows, 0), np.argsort(order))


def narrow(gradients: Sequence[Gradient], dtype: tf.DType) -> list[Gradient]:
    """Casts float32 gradients to another dtype.

    Args:
        gradients: sequence of gradients.
        dtype: DType.

    Returns:
        list of gradients; those that are not float32 as they are.
    """
    return [_map(lambda values: _float32_to(dtype, values), gradient) for gradient in gradients]


def widen(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Makes float32 gradients of float16 ones.

    Args:
        gradients: sequence of gradients.

    Returns:
        list of gradients; those that are not float16 as they are.
    """
    return [
        _cast(g, tf.float32) if g is not None and g.dtype == tf.float16 else g for g in gradients
    ]


def to_float32(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Makes float32 gradients of those in 16 bits, which loses nothing.

    Args:
        gradients: sequence of gradients.

    Returns:
        list of gradients; those in other dtypes as they are.
    """
    low_precision = (tf.float16, tf.bfloat16)
    return [
        _cast(g, tf.float32) if g is not None and g.dtype in low_precision else g for g in gradients
    ]


def cast_as(gradients: Sequence[Gradient], models: Sequence[Gradient]) -> list[Gradient]:
    """Gives gradients the dtypes of others.

    Args:
        gradients: sequence of gradients.
        models: sequence of gradients, as many.

    Returns:
        list of gradients.
    """
    pairs = zip(gradients, models, strict=True)
    return [_cast(g, model.dtype) if g is not None else None for g, model in pairs]


def pack(
    gradients: Sequence[Gradient],
) -> tuple[list[Gradient], Callable[[list[Gradient]], list[Gradient]]]:
    """Joins small gradients of one dtype end to end: what is done to all of them is done once.

    Args:
        gradients: sequence of gradients.

    Returns:
        tuple of a list of gradients, of which large ones, sparse ones and None are as they were,
        and of a function that turns such a list back into one gradient for each of `gradients`.
    """
    positions: dict[tf.DType, list[int]] = {}
    for i, gradient in enumerate(gradients):
        if gradient is not None and not _is_sparse(gradient) and _is_small(gradient):
            positions.setdefault(gradient.dtype, []).append(i)
    joined = [group for group in positions.values() if len(group) > 1]
    alone = sorted(set(range(len(gradients))).difference(*joined))
    packed = [tf.concat([tf.reshape(gradients[i], [-1]) for i in group], 0) for group in joined]

    def unpack(packed: list[Gradient]) -> list[Gradient]:
        unpacked = dict(zip(alone, packed[len(joined) :], strict=True))
        for group, values in zip(joined, packed):
            parts = tf.split(values, [gradients[i].shape.num_elements() for i in group])
            for i, part in zip(group, parts, strict=True):
                unpacked[i] = tf.reshape(part, gradients[i].shape)
        return [unpacked[i] for i in range(len(gradients))]

    return [*packed, *(gradients[i] for i in alone)], unpack


def all_reduce(gradients: Sequence[Gradient], reduce_dtype: tf.DType) -> list[Gradient]:
    """Sums gradients over all replicas. Called in a replica context.

    Args:
        gradients: sequence of gradients. float16, bfloat16 and float64 ones travel as they are.
        reduce_dtype: DType. In which those of float32 travel and are added up. As float16 they
            should be scaled, or small ones underflow; a sum that overflows comes back infinite.

    Returns:
        list of summed gradients, each in the dtype it came in.

    Source: RFC 293, "All-reducing in float16".
    """
    context = tf.distribute.get_replica_context()
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=_BYTES_PER_PACK)
    narrowed = narrow(gradients, reduce_dtype)
    sent = [_bits_as(tf.float16, g) if _cannot_be_gathered(g) else g for g in narrowed]
    received: list[Gradient] = [None] * len(sent)
    # TensorFlow packs what one call reduces, last ones first, and cannot pack different dtypes.
    for dtype in dict.fromkeys(g.dtype for g in sent if g is not None):
        positions = [i for i, g in enumerate(sent) if g is not None and g.dtype == dtype]
        summed = context.all_reduce(
            tf.distribute.ReduceOp.SUM, [sent[i] for i in positions], options
        )
        for position, gradient in zip(positions, summed):
            gradient = _bits_as(narrowed[position].dtype, gradient)
            received[position] = _cast(gradient, gradients[position].dtype)
    return received


def agree(finite: tf.Tensor) -> tf.Tensor:
    """Turns each replica's own verdict into one that all replicas share: all of them finite.

    Args:
        finite: bool scalar tensor, of this replica.

    Returns:
        bool scalar tensor, the same on every replica.
    """
    context = tf.distribute.get_replica_context()
    not_finite = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, not_finite), 0.0)


def decide_for_all_replicas(
    decide: Callable[..., Any],
    verdicts: Sequence[tf.Tensor | None],
    mine: Any,
    *of_each: Callable[[Any], Any],
) -> Any:
    """Calls `decide` where a condition may stand around what all replicas do.

    Under strategies that meet in `merge_call`, such as MirroredStrategy on CPUs, that is the
    cross-replica context: a `tf.cond` in a replica context must not update a mirrored variable.

    Args:
        decide: called once with each verdict, with a list of what is at hand, of all replicas of
            this process or of this one, and with a function for each of `of_each`, without
            arguments, that calls it on each replica.
        verdicts: bool scalar tensors, the same on every replica, or None for one that is not made.
        mine: object, what this replica has.
        *of_each: called on each replica with what that replica has.

    Returns:
        What `decide` returns.
    """
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        calls = [functools.partial(function, mine) for function in of_each]
        return decide(*verdicts, [mine], *calls)

    @do_not_convert
    def cross_replica(strategy: tf.distribute.Strategy, verdicts: Sequence[Any], all: Any) -> Any:
        local = strategy.experimental_local_results
        on_each = strategy.extended.call_for_each_replica
        functions = [do_not_convert(functools.partial(function)) for function in of_each]
        calls = [functools.partial(on_each, function, args=(all,)) for function in functions]
        return decide(*(local(verdict)[0] for verdict in verdicts), local(all), *calls)

    context = tf.distribute.get_replica_context()
    return context.merge_call(cross_replica, args=(list(verdicts), mine))


def once_for_all_replicas(function: Callable[[Sequence[tf.Tensor]], Any], tensors: Any) -> Any:
    """Calls a function where it may update variables that replicas share, in any context.

    Args:
        function: called once with the tensors.
        tensors: list of tensors, the same on every replica.

    Returns:
        What the function returns.
    """
    if (
        tf.distribute.in_cross_replica_context()
        or tf.__internal__.distribute.strategy_supports_no_merge_call()
    ):
        return function(tensors)

    @do_not_convert
    def cross_replica(strategy: tf.distribute.Strategy, tensors: Sequence[Any]) -> Any:
        return function([strategy.experimental_local_results(t)[0] for t in tensors])

    return tf.distribute.get_replica_context().merge_call(cross_replica, args=(tensors,))


def checked_pairs(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Checks what is to be applied, before anything is changed.

    Args:
        pairs: iterable of (gradient, variable) pairs.

    Returns:
        list of pairs of gradients, as `convert` returns them, and variables.

    Raises:
        TypeError: these are no pairs, or what is to be a variable is none.
        ValueError: no variable has a gradient, or the call is in a cross-replica context.
    """
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Gradients are applied in a replica context: call this inside the function that is "
            "passed to `strategy.run`."
        )
    pairs = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or pair[1] is None or isinstance(pair[1], _NO_VARIABLES):
            raise TypeError(
                "Expected (gradient, variable) pairs, such as zip(gradients, variables). "
                f"Received: {pair!r}"
            )
    gradients, variables = convert(g for g, _ in pairs), [v for _, v in pairs]
    if pairs and all(g is None for g in gradients):
        raise ValueError(
            "No gradients provided for any variable: "
            f"{[v.name for v in variables]}. Is the loss computed from them, under the tape? "
            f"Received: {gradients!r}"
        )
    return list(zip(gradients, variables, strict=True))


_NO_VARIABLES = (tf.Tensor, tf.IndexedSlices, float, int, str)


def _is_small(tensor: tf.Tensor) -> bool:
    """Would an operation for it alone take longer than what it does?"""
    size = tensor.shape.num_elements()
    return size is not None and size < _MANY


def _add(tensors: list[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(tensors) if len(tensors) > 1 else tensors[0]


def _infs_and_nans(values: tf.Tensor) -> list[tf.Tensor]:
    """Where values are infinite, and where they are NaN."""
    if values.dtype.is_complex:
        parts = [_infs_and_nans(part) for part in (tf.math.real(values), tf.math.imag(values))]
        infs, nans = (tf.logical_or(*kinds) for kinds in zip(*parts))
        return [tf.logical_and(infs, tf.logical_not(nans)), nans]
    return [tf.math.is_inf(values), tf.math.is_nan(values)]


def _is_sparse(gradient: Gradient) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _magnitudes_of_sums(gradient: tf.IndexedSlices) -> tf.Tensor:
    """Bounds of the sums over equal indices; infinite where such a sum could overflow."""
    magnitudes = tf.abs(gradient.values)
    if gradient.dtype != tf.float16:
        # All rows together: nothing sound comes near the largest float32.
        return tf.reduce_sum(magnitudes, axis=0)
    # float16 ends at 65504, which many rows together may well pass while none of them does.
    order = tf.argsort(gradient.indices)
    indices = tf.gather(gradient.indices, order)
    is_new = tf.concat(
        [tf.zeros_like(indices[:1]), tf.cast(indices[1:] != indices[:-1], indices.dtype)], 0
    )
    sums = tf.math.unsorted_segment_sum(
        tf.cast(tf.gather(magnitudes, order), tf.float32), tf.cumsum(is_new), tf.size(indices)
    )
    return tf.cast(sums, tf.float16)


def _map(fn: Callable[[tf.Tensor], tf.Tensor], gradient: Gradient) -> Gradient:
    if gradient is None:
        return None
    if _is_sparse(gradient):
        return tf.IndexedSlices(fn(gradient.values), gradient.indices, gradient.dense_shape)
    if isinstance(gradient, (list, tuple, dict, str)):
        raise TypeError(
            "A gradient must be a tensor, a tf.IndexedSlices or None. "
            f"Received: {gradient!r} (of type {type(gradient)})"
        )
    return fn(tf.convert_to_tensor(gradient))


def _multiply(
    gradients: Sequence[Gradient], factor_in: Callable[[tf.DType], tf.Tensor]
) -> list[Gradient]:
    factor = functools.cache(factor_in)

    def multiply(gradient: tf.Tensor) -> tf.Tensor:
        dtype = gradient.dtype
        # A loss scale above 65504 has no finite float16 value, so narrow gradients meet it in
        # float32.
        if dtype.size < tf.float32.size:
            return tf.cast(tf.cast(gradient, tf.float32) * factor(tf.float32), dtype)
        # In eager the raw operation takes less than half of the operator's time.
        return tf.raw_ops.Mul(x=gradient, y=factor(dtype))

    return [_map(multiply, gradient) for gradient in gradients]


def _float32_to(dtype: tf.DType, gradient: tf.Tensor) -> tf.Tensor:
    return tf.cast(gradient, dtype) if gradient.dtype == tf.float32 else gradient


def _cannot_be_gathered(gradient: Gradient) -> bool:
    """Rows are gathered, not added up, by an operation that knows no bfloat16; not on a TPU."""
    if not _is_sparse(gradient) or gradient.dtype != tf.bfloat16:
        return False
    return not isinstance(tf.distribute.get_strategy(), _TPU_STRATEGIES)


def _bits_as(dtype: tf.DType, gradient: Gradient) -> Gradient:
    if gradient.dtype == dtype:
        return gradient
    return _map(lambda g: tf.bitcast(g, dtype), gradient)


def _cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
    return _map(lambda g: tf.cast(g, dtype), gradient)

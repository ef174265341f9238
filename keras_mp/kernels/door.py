"""The door: every operation of code in reach takes the faces that it needs.

Generated code makes operations through one function in eager and through another one in graphs.
Both ask here. The table `support/op_table.py` has each kind of operation:

- products and what belongs to them take the 16-bit faces;
- what must be exact takes the float32 faces, computes in float32, and returns 16 bits whose
  float32 face is exact (`hooks/faces.py`);
- all others do so if a face among their inputs is exact, or if these are weights and constants
  only. Else they stay in 16 bits.

What TensorFlow cannot compute in 16 bits counts as exact, and so does a kernel that is wrong in 16
bits. In gradient functions, where the dtypes of the forward pass decide, only the last holds.

This module needs TensorFlow only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.hooks import faces, reach
from keras_mp.hooks.faces import CAST, EXACT, LAST, LEFT, MADE, NOTE, WEIGHT
from keras_mp.kernels import known_operations, low_precision_gradients, regions, slow, sums
from keras_mp.kernels.known_operations import FLOAT32, RESULT, TRIED, Operation
from keras_mp.support import marks, op_table
from keras_mp.support.dtypes import LOW_PRECISION, is_low
from keras_mp.tensorflow_api import gradients, operations

_thread = reach.thread
MARK = "keras_mp_reach"
# By whether the dtype is bfloat16. Each operation needs one, and asking a DType takes long.
MARKS = [(MARK, dtype.as_datatype_enum) for dtype in (tf.float16, tf.bfloat16)]
# The types of arguments that generated code hands over as they are, and TensorFlow converts.
_NUMBERS = (float, int)


def _follows_others() -> bool:
    """Whether dtypes are those of a forward pass, or of a region."""
    return _thread.in_gradient or _thread.region is not None


def _flat(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += value
        else:
            found.append(value)
    return found


def _low_dtype_of(values: Sequence[Any]) -> tf.DType | None:
    for value in values:
        if isinstance(value, tf.Tensor):
            if is_low(value.dtype):
                return value.dtype
        elif isinstance(value, list | tuple):
            dtype = _low_dtype_of(value)
            if dtype is not None:
                return dtype
        elif hasattr(value, "__tf_tensor__") or isinstance(value, tf.Variable):
            # It casts itself when it is read.
            dtype = tf.as_dtype(value.dtype)
            if dtype in LOW_PRECISION:
                return dtype
    return None


def _as_tensor(value: Any, low: tf.DType, has_list: bool, is_first: bool = False) -> Any:
    """Returns an input as a tensor; a number after others gets their dtype anyway."""
    if isinstance(value, tf.Tensor) or (type(value) in _NUMBERS and not is_first):
        return value
    if isinstance(value, tf.Variable) or hasattr(value, "__tf_tensor__"):
        return tf.convert_to_tensor(value)
    if not isinstance(value, list | tuple) or not any(map(tf.is_tensor, _flat(value))):
        return tf.convert_to_tensor(value, low)
    if has_list:
        return [_as_tensor(each, low, has_list) for each in value]
    return tf.convert_to_tensor(value)  # Of tensors of two dtypes, TensorFlow makes none.


class _Choice:
    """How an operation is computed in float32.

    Attributes:
        low: DType of 16 bits that its results will have; None if they stay float32.
        kind: int. The kind of their faces; 0 if they have none, and inputs are only cast.
    """

    __slots__ = ("kind", "low")

    def __init__(self, low: tf.DType | None, kind: int) -> None:
        self.low: Any = low
        self.kind = kind


# By the kind of a `_Choice`: the function that makes float32 of an input.
_WIDEN = {kind: faces.widened if kind else faces.cast for kind in (0, WEIGHT, EXACT, LAST)}


def _choose(known: Operation, values: Sequence[Any], pairs: Sequence[Any]) -> _Choice | None:
    """Decides whether an operation is computed in float32.

    Args:
        known: the `Operation`.
        values: its inputs that share a dtype: tensors and numbers.
        pairs: names and values of its attributes in turn.
    """
    low, kind, are_weights, is_mixed = None, 0, True, False
    for value in values:
        if not isinstance(value, tf.Tensor):
            continue
        dtype = value.dtype
        if dtype is tf.bfloat16 or dtype is tf.float16:
            low = dtype
            face = value.__dict__.get(NOTE)
            of_value = 0 if face is None else face.kind
            if of_value > kind:
                kind = of_value
            if of_value != WEIGHT:
                are_weights = False
        elif dtype is tf.float32:
            is_mixed = True
        else:
            return None  # TensorFlow refuses it.
    if low is None:
        return None
    if is_mixed:
        return None if _thread.is_strict else _Choice(None, EXACT)
    if known.kind == "low":
        return _Choice(low, 0) if low in known.refuses else None
    if known.kind == "product":
        if _thread.is_exact:
            return _Choice(low, LAST)
        if are_weights:
            return _Choice(low, WEIGHT)
        if known.has_list and len(values) == 1:  # Of one tensor, an `einsum` is a sum or a move.
            is_exact = kind >= EXACT or not known_operations.sums_nothing(values, pairs)
        else:
            is_exact = _is_square(values) or (
                kind >= EXACT and known_operations.sums_nothing(values, pairs)
            )
        return _Choice(low, EXACT) if is_exact else None
    if known.kind == "exact" or kind >= EXACT or _thread.is_exact:
        return _Choice(low, max(kind, EXACT))
    if low in known.refuses:
        return None if _thread.is_strict else _Choice(low, EXACT)
    if are_weights and not known.is_move:
        return _Choice(low, WEIGHT)
    if known.name in ("Mul", "MulNoNan") and _is_square(values):
        return _Choice(low, EXACT)
    if not _thread.is_strict:
        for value in values:
            if not isinstance(value, tf.Tensor) and not faces.is_held(value, low):
                return _Choice(low, EXACT)
    return None


def _is_square(values: Sequence[Any]) -> bool:
    """Whether a tensor is multiplied by itself: sums of squares overflow in float16."""
    return len(values) > 1 and values[0] is values[1]


def _note_lazily(known: Operation, args: Sequence[Any], pairs: Sequence[Any], results: Any) -> None:
    """Notes faces that are made only if an exact operation takes them.

    Moves keep a face, and its kind.
    """
    kind = MADE
    if known.is_move:
        values = _flat([args[i] for i in known.positions])
        notes = [faces.of(each) for each in values if isinstance(each, tf.Tensor)]
        if not any(notes):
            return
        kind = min(MADE if each is None else each.kind for each in notes)
        if kind == LEFT:
            return
    if known.is_one and isinstance(results, list):
        results = results[0]
    faces.lazily(known.name, args, pairs, results, kind, known.is_move)


_ARITHMETIC = op_table.ops(
    *("additions", "multiplications", "signs", "softmax", "sigmoids", "other arithmetic"),
    *("maxima of two", "maxima over axes", "selections", "roundings"),
) - {"BiasAdd", "BiasAddV1"}
# Operations whose results have faces that are made when they are taken. A relu that is 0 stops a
# gradient that is infinite in float16; in eager it would keep one more tensor for that.
_LAZY = op_table.MOVES | _ARITHMETIC
_LAZY_IN_GRAPHS = op_table.ops("relu")


# An operation in its faces. `make` takes inputs, and names and values of attributes in turn, and
# returns a result or a list of them. `cast` takes a float32 tensor and a DType of 16 bits.


def _made(
    known: Operation,
    given: list[Any],
    pairs: Sequence[Any],
    make: Callable[..., Any],
    cast: Callable[[Any, tf.DType], Any],
) -> Any:
    """Returns the results of an operation in the faces that it needs."""
    if known.kind == "cast":
        return _made_cast(given[0], pairs, make)
    if known.kind == "draw":
        return _drawn(known, given, pairs, make, cast)
    low = _low_dtype_of([given[i] for i in known.positions])
    if low is None:
        return make(given, pairs)
    for i in range(len(given)):
        if i in known.positions:
            given[i] = _as_tensor(given[i], low, known.has_list, i == known.positions[0])
        else:
            given[i] = known.as_tensor(i, given[i])
    choice = _choice_of(known, given, pairs, low)
    if choice is None:
        results = make(given, pairs)
    else:
        results = _widened(known, given, pairs, make, cast, choice)
    has_no_face = choice is None or not choice.kind
    if has_no_face and not _follows_others() and _has_later_face(known, pairs):
        _note_lazily(known, given, pairs, results)
    return results


def _has_later_face(known: Operation, pairs: Sequence[Any]) -> bool:
    """Whether the face of a result in 16 bits is made when it is taken."""
    if known.name == "Einsum":
        return known_operations.sums_nothing((), pairs)
    return known.name in _LAZY or (known.name in _LAZY_IN_GRAPHS and not tf.executing_eagerly())


def _widened(
    known: Operation,
    given: Sequence[Any],
    pairs: Sequence[Any],
    make: Callable[..., Any],
    cast: Callable[[Any, tf.DType], Any],
    choice: _Choice,
) -> Any:
    """Returns the results of an operation that is computed in float32, rounded."""
    is_exact_product = known.kind == "product" and choice.kind == LAST
    widen = faces.factor if is_exact_product else _WIDEN[choice.kind]
    wide = [widen(value) if i in known.positions else value for i, value in enumerate(given)]
    with reach.decided():
        if is_exact_product:
            results = make(wide, _in_float32(known, pairs), choice.low)
        else:
            try:
                results = make(wide, _in_float32(known, pairs))
            except operations.TakeSlowerWay.get():
                results = faces.run(known.name, wide, pairs)
    return results if choice.low is None else _rounded(known, results, choice, cast)


def _in_float32(known: Operation, pairs: Sequence[Any]) -> list[Any]:
    """Returns the attributes of an operation with float32 as its dtype."""
    names = (known.attribute, RESULT)
    return [
        FLOAT32 if i % 2 and pairs[i - 1] in names and tf.as_dtype(each).is_floating else each
        for i, each in enumerate(pairs)
    ]


def _rounded(known: Operation, results: Any, choice: _Choice, cast: Callable[..., Any]) -> Any:
    """Rounds those of an operation's results that have its dtype."""

    def rounded(face: Any) -> Any:
        if isinstance(face, list):
            return [rounded(each) for each in face]
        if face.dtype is not tf.float32:
            return face
        result = cast(face, choice.low)
        if choice.kind and not _follows_others():
            faces.note(result, face, choice.kind)
        return result

    if known.is_one:
        return rounded(results) if known.outputs else results
    parts = [
        rounded(each) if known.outputs is None or i in known.outputs else each
        for i, each in enumerate(results)
    ]
    is_tuple = isinstance(results, tuple) and hasattr(results, "_fields")
    return type(results)(*parts) if is_tuple else parts


def _made_cast(value: Any, pairs: Sequence[Any], make: Callable[..., Any]) -> Any:
    """Returns what the program casts: of a 16-bit tensor, its float32 face."""
    wanted = tf.as_dtype(pairs[pairs.index("DstT") + 1])
    if not isinstance(value, tf.Tensor):
        return make([value], pairs)
    if is_low(value.dtype):
        face = None if wanted is value.dtype else faces.float32_of(value)
        result = make([value if face is None else face], pairs)
        if wanted.is_floating:
            marks.copy_logits(value, _only(result))
        if face is None:
            return result
        if is_low(wanted):
            faces.note(_only(result), face, faces.kind_of(value))
        return result
    if not is_low(wanted):
        return make([value], pairs)
    is_weight = faces.is_weight(value, ("Identity",), op_table.READS)
    if not is_weight and value.dtype is tf.float32 and not _is_constant(value):
        value = faces.of_its_own(value)
    result = make([value], pairs)
    faces.note_cast(value, _only(result), is_weight)
    return result


def _only(result: Any) -> Any:
    return result[0] if isinstance(result, list) else result


def _is_constant(value: Any) -> bool:
    """Whether a tensor of a graph is a constant."""
    if tf.executing_eagerly():
        return False
    return not tf.is_symbolic_tensor(value) or value.op.type == "Const"


def _drawn(
    known: Operation,
    given: Sequence[Any],
    pairs: Sequence[Any],
    make: Callable[..., Any],
    cast: Callable[..., Any],
) -> Any:
    """Returns random numbers, or what hides its dtype, that are made in float32."""
    wanted = tf.as_dtype(pairs[pairs.index(known.attribute) + 1])
    given = [faces.widened(known.as_tensor(i, each)) for i, each in enumerate(given)]
    if not is_low(wanted):
        return make(given, pairs)
    with reach.decided():
        results = make(given, _in_float32(known, pairs))
    choice = _Choice(wanted, EXACT if op_table.DRAWS.get(known.name, True) else CAST)
    return _rounded(known, results, choice, cast)


def _choice_of(
    known: Operation, given: list[Any], pairs: Sequence[Any], low: tf.DType
) -> _Choice | None:
    """Returns what an operation is to do; None leaves it in 16 bits."""
    if low in known.doubtful_in:
        arguments = faces.arguments(known.name, given, pairs)
        table = TRIED.get(known.name)
        if table is not None and table.is_wrong_for(known.name, low, arguments):
            return _Choice(low, EXACT if table is sums.TABLE else 0)
        can_be_slow = known.name in slow.OPS and low not in known.refuses
        is_slow = can_be_slow and slow.is_slow_here(known.name, low, arguments)
    else:
        is_slow = False
    if _follows_others():
        return _Choice(low, 0) if is_slow else None
    choice = _choose(known, _flat([given[i] for i in known.positions]), pairs)
    return _Choice(low, 0) if choice is None and is_slow else choice


# In eager.


def run_in_eager(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that runs an operation, and marks it for tapes.

    TensorFlow runs an operation with the attributes that it knows, and tells tapes of all.

    Args:
        original: takes the context, the operation, a name, inputs and attributes; TensorFlow's own.
    """

    def execute(context: Any, op: str, name: Any, *args: Any) -> Any:
        thread = _thread
        plan = None if thread.region is None else regions.plan_for(op)
        if plan is not None:
            make = _maker(functools.partial(in_16_bits, context, op, name), op)
            number = len(plan.known.inputs)
            return regions.made(plan, args[:number], args[number:], make)
        known = None if thread.is_decided else known_operations.BY_NAME[op]
        if known is None or (not known.doubtful_in and thread.in_gradient):
            return original(context, op, name, *args, *MARKS[thread.dtype is tf.bfloat16])
        return in_16_bits(context, op, name, *args)

    def in_16_bits(context: Any, op: str, name: Any, *args: Any) -> Any:
        mark = MARKS[_thread.dtype is tf.bfloat16]
        known = None if _thread.is_decided else known_operations.BY_NAME[op]
        if known is not None and known.kind == "read":
            result = original(context, op, name, *args, *mark)
            if isinstance(result, tf.Tensor) and result.dtype is tf.float32:
                faces.note(result, None, WEIGHT)
            return result
        if known is None or _is_plain(known, args):
            return original(context, op, name, *args, *mark)

        def cast(face: Any, low: tf.DType) -> Any:
            pairs = "DstT", low.as_datatype_enum, "Truncate", False
            return original(context, "Cast", None, face, *pairs, *mark)

        make = _maker(functools.partial(original, context, op, name), op, mark)
        number = len(known.inputs)
        return _made(known, list(args[:number]), args[number:], make, cast)

    return execute


def _maker(run: Callable[..., Any], op: str, mark: Sequence[Any] = ()) -> Callable[..., Any]:
    """Returns what runs an operation in eager, given its inputs and attributes."""

    def make(given: Sequence[Any], pairs: Sequence[Any], low: tf.DType | None = None) -> Any:
        if low is None:
            return run(*given, *pairs, *mark)
        return low_precision_gradients.run_in_eager(run, op, [*given, *pairs], len(given), low)

    return make


def _is_plain(known: Operation, args: Sequence[Any]) -> bool:
    """Whether an operation takes what it is given, and what it returns has no face."""
    follows = _follows_others()
    if follows and not known.doubtful_in:
        return True
    if known.kind in ("cast", "draw"):
        return False
    low, is_mixed = [], False
    for i in known.positions:
        value = args[i]
        if not isinstance(value, tf.Tensor):
            if type(value) not in _NUMBERS:
                return False
        elif is_low(value.dtype):
            low.append(value)
        else:
            is_mixed = True
    if not low:
        return True
    dtype = low[0].dtype
    if dtype in known.doubtful_in:
        return False
    if follows:
        return True
    if is_mixed or _thread.is_exact:
        return False
    if known.kind == "product":
        kinds = [faces.kind_of(each) for each in low if each.dtype is dtype]
        is_whole = len(kinds) == len(known.positions) and not _is_square(low)
        return is_whole and max(kinds) < EXACT and min(kinds) < WEIGHT
    if known.kind != "other" or known.name in _ARITHMETIC or dtype in known.refuses:
        return False
    if type(args[known.positions[0]]) in _NUMBERS or any(NOTE in each.__dict__ for each in low):
        return False
    numbers = [args[i] for i in known.positions if type(args[i]) in _NUMBERS]
    return all(faces.is_held(each, tf.float16) for each in numbers)


# In graphs.


def make_in_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that makes an operation in a graph.

    Args:
        original: takes the operation, a name, inputs and attributes; returns four things, of which
            the third is the operation and the last the list of results. TensorFlow's own.
    """

    def apply(op_type_name: str, name: str | None = None, **keywords: Any) -> Any:
        plan = None if _thread.region is None else regions.plan_for(op_type_name)
        if plan is None:
            return in_16_bits(op_type_name, name, **keywords)
        run = functools.partial(in_16_bits, op_type_name, name)
        return _made_by_name(plan.known, functools.partial(regions.made, plan), run, keywords)

    def in_16_bits(op_type_name: str, name: str | None = None, **keywords: Any) -> Any:
        known = None if _thread.is_decided else known_operations.BY_NAME[op_type_name]
        if known is None or known.kind == "read" or (not known.doubtful_in and _follows_others()):
            return original(op_type_name, name, **keywords)
        made = functools.partial(_made, known, cast=cast)
        return _made_by_name(known, made, functools.partial(original, op_type_name, name), keywords)

    def cast(face: Any, low: tf.DType) -> Any:
        # Tapes hear of it in `on_tape`.
        with reach.decided(), gradients.stop_recording():
            return original("Cast", None, x=face, DstT=low, Truncate=False)[3][0]

    return apply


def _made_by_name(
    known: Operation,
    made: Callable[..., Any],
    run: Callable[..., Any],
    keywords: dict[str, Any],
) -> tuple[Any, ...]:
    """Returns what `run` makes of inputs and attributes, as `made` wants them."""
    others: list[Any] = []

    def make(given: Sequence[Any], pairs: Sequence[Any], low: tf.DType | None = None) -> Any:
        arguments = dict(zip((*known.inputs, *pairs[::2]), (*given, *pairs[1::2])))
        *others[:], outputs = run(**arguments)
        if low is not None:
            low_precision_gradients.set_in_graph(others[2], low)
        return outputs

    given = [keywords.pop(each) for each in known.inputs]
    pairs = [each for pair in keywords.items() for each in pair]
    outputs = made(given, pairs, make)
    return *others, outputs


def on_tape(original: Callable[..., None]) -> Callable[..., None]:
    """Returns the function that tells tapes of an operation in a graph, and marks it.

    It is followed by the casts of its results: to 16 bits where it was computed in float32, to
    float32 where it was computed in 16 bits in a region.

    Args:
        original: takes the operation, its inputs, attributes and results; TensorFlow's own.
    """

    def record(op: str, inputs: Any, attributes: Any, results: Sequence[Any]) -> None:
        mark = MARKS[_thread.dtype is tf.bfloat16]
        computed = [_before_cast(op, each) for each in results]
        if all(before is result for before, result in zip(computed, results)):
            gradient = low_precision_gradients.name_of_gradient(op, results)
            original(gradient, inputs, (*(attributes or ()), *mark), results)
            return
        record(op, inputs, attributes, computed)
        for before, result in zip(computed, results):
            if before is not result:
                dtypes = [each.dtype.as_datatype_enum for each in (before, result)]
                cast = ("SrcT", dtypes[0], "DstT", dtypes[1], "Truncate", False)
                original("Cast", [before], (*cast, *mark), [result])

    return record


def _before_cast(op: str, result: Any) -> Any:
    """Returns what an operation returned before the door cast it, or what it returned."""
    if not isinstance(result, tf.Tensor) or not tf.is_symbolic_tensor(result):
        return result
    is_cast = result.op.type == "Cast" != op
    is_ours = is_cast and (is_low(result.dtype) or faces.kind_of(result) >= faces.LOW)
    return result.op.inputs[0] if is_ours else result


def watch(original: Callable[..., None]) -> Callable[..., None]:
    """Returns the method by which tensors are watched, which then have no face.

    Args:
        original: that of a tape, or of a `tf.autodiff.ForwardAccumulator`.
    """

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        for each in tf.nest.flatten((args, kwargs), expand_composites=True):
            faces.drop(each)
        _thread.watches += 1
        return original(self, *args, **kwargs)

    return call

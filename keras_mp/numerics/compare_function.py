"""A function of tensors and variables, in 16 bits and in float32: where they part.

There are no layers here to be run one by one, so it is the operations that are looked at, in eager,
in the order in which they run. What rounding explains is measured as for models: the function is
run in float32, on arguments and variables that are moved at random by as much as rounding moves
them. What an algorithm that is backward stable returns is not further off than that.
"""

import contextlib
import copy
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf

from keras_mp.numerics import operations, runs
from keras_mp.numerics.comparison import ComparedLayer, Comparison, Finding
from keras_mp.numerics.distances import LIMIT, UNIT_ROUNDOFF, Distance, apart, rms
from keras_mp.numerics.explanations import explain, matches
from keras_mp.numerics.layer_calls import RandomNumbers, Watch
from keras_mp.numerics.noise import NOISY_RUNS, Noise
from keras_mp.numerics.operations import Kept, KeptOperation
from keras_mp.op_autocast.context_manager import autocast
from keras_mp.step.schedule import INITIAL_LOSS_SCALE
from keras_mp.support import op_callbacks
from keras_mp.support.dtypes import LOW_PRECISION

_LOSS_SCALES = {"float16": INITIAL_LOSS_SCALE, "bfloat16": 1.0}


def compare_function(
    function: Callable[..., Any],
    *args: Any,
    dtype: str = "float16",
    context: Callable[[str], contextlib.AbstractContextManager] | None = autocast,
    reference: Callable[..., Any] | None = None,
    variables: Any = None,
    loss_scale: float | None = None,
) -> Comparison:
    """Runs a function in 16 bits and in float32, and says which operation is the first to part.

    For code without a model of `tf.keras`: a function of tensors, which may read `tf.Variable`s. It
    runs forwards and backwards, with the same arguments, variables and random numbers. All of it
    runs in eager, functions that `tf.function` made included.

    Each operation is a row, by its name scope and type, such as "encoder/MatMul", with the distance
    of what it returned and of the gradient of that; so are variables and arguments, with their
    gradients. Distances are in units of what rounding explains, as `compare` has them. What an
    operation did itself is not told from what it was given. So the finding is the first operation
    that is more than 16 units off; on the way back it is the first whose gradient is.

    Args:
        function: called with `args`. Returns a loss, a scalar; or any structure of tensors, of
            which a sum with random signs is taken for the gradients.
        *args: tensors, arrays, or structures of them. Gradients of what is floating point are
            compared.
        dtype: "float16" or "bfloat16".
        context: called with `dtype`, returns the context manager in which the function computes in
            16 bits. Defaults to `keras_mp.autocast`; pass `keras_mp.autocast_scope` for variables
            that `keras_mp.autocast_variable` has made, and None for a function that casts by
            itself, together with a reference.
        reference: the function to compare with. Defaults to the same one, outside of the context.
        variables: a `tf.Module`, or an iterable of the variables that the function uses. They are
            put back to what they were. Defaults to the trainable ones that it reads; then other
            states that it assigns are not put back, nor what it assigns before it reads it.
        loss_scale: float, at least 1. The loss is multiplied by it. Defaults to 2 ** 15 in float16,
            and 1 in bfloat16. If gradients overflow, it is halved until they do not.

    Returns:
        A `Comparison`: `findings` is empty if rounding explains everything, `str` is a table.

    Raises:
        TypeError: `function` cannot be called, or `variables` are others than these.
        ValueError: nothing is computed in 16 bits, nothing that is floating point is returned, or
            the dtype or the loss scale is another one.

    Example:

    >>> w = tf.Variable(tf.ones([4, 4]), name="w")
    >>> def loss(x):
    ...     with tf.name_scope("norm"):
    ...         squares = tf.linalg.matvec(w, x * x)
    ...     return tf.reduce_mean(tf.sqrt(squares))
    >>> x = tf.constant([[100.0, 200.0, 300.0, 400.0]])
    >>> keras_mp.numerics.compare_function(loss, x / 100).findings
    []
    >>> first = keras_mp.numerics.compare_function(loss, x).first
    >>> first.path, first.direction
    ('norm/BatchMatMulV2', 'forward')
    """
    _check(function, dtype, loss_scale)
    args = tuple(tf.nest.map_structure(_tensor, arg) for arg in args)
    wide = function if reference is None else reference
    under = contextlib.nullcontext if context is None else lambda: context(dtype)
    held = _held(function, args, variables, under)
    numbers = RandomNumbers()
    run = runs.run_at_a_good_scale(
        lambda scale: _run(function, args, held, numbers, under, scale),
        _LOSS_SCALES[dtype] if loss_scale is None else float(loss_scale),
    )
    if not any(_is_narrow(value) for op in run.kept.operations for value in _values(op)):
        raise ValueError(
            f"{_name(function)} computes nothing in 16 bits, so there is nothing to compare. "
            "Expected operations that `keras_mp.autocast` runs in 16 bits, variables of "
            "`keras_mp.autocast_variable` with context=keras_mp.autocast_scope, or a function that "
            "casts by itself. (A concrete function, or one that was loaded, computes as it was "
            f"traced.) Received: dtype={dtype!r}, context={context!r}"
        )
    exact = _run(wide, args, held, numbers, contextlib.nullcontext, 1.0)
    explained = [
        _noisy_run(wide, args, held, numbers, UNIT_ROUNDOFF[dtype], seed)
        for seed in range(NOISY_RUNS)
    ]
    rows = list(_rows(run, exact, explained, UNIT_ROUNDOFF[dtype]))
    first = _first(rows)
    return Comparison(
        name=f"{_name(function)} in {dtype}",
        reference=f"{_name(wide)} in float32",
        layers=[row.layer for row in rows],
        findings=[] if first is None else [_finding(*first, run, exact, dtype)],
        losses=(run.loss, exact.loss),
        loss_scale=run.loss_scale,
    )


class _FunctionRun(NamedTuple):
    """What one run of a function left.

    Attributes:
        kept: Kept operations, those of the backward pass behind the others.
        forward: list of KeptOperation, those of the function itself.
        outputs: what the operations, and the function, have returned: tensors by name.
        gradients: of these, of the variables and of the arguments: tensors by name.
        loss: float.
        loss_scale: float. Gradients are divided by it again.
    """

    kept: Kept
    forward: list[KeptOperation]
    outputs: dict[str, tf.Tensor]
    gradients: dict[str, tf.Tensor]
    loss: float
    loss_scale: float

    def is_finite(self) -> bool:
        """Whether all gradients are."""
        return all(np.isfinite(runs.array(g)).all() for g in self.gradients.values())


class _TracedRow(NamedTuple):
    """A row of the table, and where it comes from.

    Attributes:
        layer: ComparedLayer.
        index: int. Of the operation in the narrow run and in the wide one; None for the others.
    """

    layer: ComparedLayer
    index: tuple[int, int] | None = None


def _check(function: Any, dtype: Any, loss_scale: float | None) -> None:
    if not callable(function):
        raise TypeError(
            "Expected a function of tensors. For a model of `tf.keras` there is `compare`. "
            f"Received: {function!r} (of type {type(function)})"
        )
    if dtype not in _LOSS_SCALES:
        raise ValueError(f"Expected 'float16' or 'bfloat16'. Received: dtype={dtype!r}")
    runs.check_loss_scale(loss_scale)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _tensor(value: Any) -> Any:
    return value if tf.is_tensor(value) else tf.convert_to_tensor(value)


def _listed(variables: Any) -> list[Any]:
    given = variables.variables if isinstance(variables, tf.Module) else variables
    if given is None:
        return []
    listed = list(given) if isinstance(given, Iterable) else [None]
    if not all(hasattr(each, "assign") for each in listed):
        raise TypeError(
            "Expected a tf.Module or an iterable of variables. "
            f"Received: variables={variables!r} (of type {type(variables)})"
        )
    return listed


def _held(
    function: Callable[..., Any],
    args: Any,
    variables: Any,
    under: Callable[[], contextlib.AbstractContextManager],
) -> Any:
    """What stands for a layer: has the variables.

    The function is run once to see them; and so that those of its kernels that may be wrong have
    been tried out before the run that is looked at.
    """
    held = types.SimpleNamespace(variables=_listed(variables))
    with (
        runs.as_it_was(held),
        Watch(RandomNumbers()).over(None),
        tf.GradientTape() as tape,
    ):
        keeping = _as_first_read(tape) if variables is None else contextlib.nullcontext()
        with keeping, under():
            function(*args)
    if variables is None:
        held.variables = list(tape.watched_variables())
    held.weights = held.variables
    return held


@contextlib.contextmanager
def _as_first_read(tape: tf.GradientTape) -> Iterator[None]:
    """Puts back the variables that a tape sees, to the values that the block first read."""
    seen: set[int] = set()
    read: list[tuple[Any, np.ndarray]] = []

    def keep(_: Any, inputs: Sequence[Any], *__: Any, **___: Any) -> None:
        if tf.executing_eagerly() and any(value.dtype == tf.resource for value in inputs):
            for variable in tape.watched_variables():
                if id(variable) not in seen:
                    # First, since to read it here comes back here.
                    seen.add(id(variable))
                    read.append((variable, variable.numpy()))

    try:
        with op_callbacks.observed(keep):
            yield
    finally:
        for variable, value in read:
            variable.assign(value)


def _run(
    function: Callable[..., Any],
    args: Any,
    held: Any,
    numbers: RandomNumbers,
    under: Callable[[], contextlib.AbstractContextManager],
    loss_scale: float,
) -> _FunctionRun:
    watch = Watch(numbers)
    named = _named_sources(held, args)
    with runs.as_it_was(held), operations.kept() as kept:
        with tf.GradientTape() as tape:
            tape.watch(runs.floating(args))
            with watch.over(None), under():
                returned = runs.floating(watch.run("", function, function, *args))
            forward = list(kept.operations)
            if not returned:
                raise ValueError(
                    f"Expected {_name(function)} to return tensors of floating point. Received none"
                )
            is_loss = len(returned) == 1 and returned[0].shape.rank == 0
            loss = returned[0] if is_loss else runs.signed_mean(returned)
            scaled = tf.cast(loss, tf.float32) * loss_scale
        outputs = _named_outputs(forward) | {
            f"result {i}": value for i, value in enumerate(returned)
        }
        sources = outputs | named
        found = dict(zip(sources, tape.gradient(scaled, list(sources.values()))))
    gradients = {
        name: tf.cast(tf.convert_to_tensor(gradient), tf.float32) / loss_scale
        for name, gradient in found.items()
        if gradient is not None
    }
    return _FunctionRun(kept, forward, outputs, gradients, float(loss), loss_scale)


def _named_sources(held: Any, args: Any) -> dict[str, Any]:
    """What the function takes that has a gradient, by name."""
    floats = [v for v in held.variables if v.trainable and tf.as_dtype(v.dtype).is_floating]
    named = _numbered((v.name.partition(":")[0] for v in floats), floats)
    return named | {f"argument {i}": value for i, value in enumerate(runs.floating(args))}


def _named_outputs(made: Sequence[KeptOperation]) -> dict[str, Any]:
    """What operations have returned, by names that are like those in a graph."""
    names = (f"{each.scope}/{each.type}".strip("/") for each in made)
    outputs = (next(v for v in each.outputs if v.dtype.is_floating) for each in made)
    return _numbered(names, outputs)


def _numbered(names: Iterable[str], values: Iterable[Any]) -> dict[str, Any]:
    """A dict in which the second of one name gets "_1" at its end, and so on."""
    found: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for name, value in zip(names, values):
        unique = name
        while unique in found:
            counts[name] += 1
            unique = f"{name}_{counts[name]}"
        found[unique] = value
    return found


def _noisy_run(
    function: Callable[..., Any],
    args: Any,
    held: Any,
    numbers: RandomNumbers,
    unit: float,
    seed: int,
) -> _FunctionRun:
    noise = Noise(unit, seed)
    with noise.on_weights(held):
        return _run(
            function, noise.on_inputs(args), held, numbers, contextlib.nullcontext, loss_scale=1.0
        )


def _is_narrow(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype in LOW_PRECISION


def _values(operation: KeptOperation) -> Iterator[Any]:
    yield from operation.inputs
    yield from operation.outputs


def _rows(
    run: _FunctionRun, exact: _FunctionRun, noisy: Sequence[_FunctionRun], unit: float
) -> Iterator[_TracedRow]:
    names, other_names = list(run.outputs), list(exact.outputs)
    # Of noisy runs the operations are those of the exact one, unless numbers decide what runs.
    same = [each for each in noisy if list(each.outputs) == other_names] or [exact]

    def distance(side: str, name: str, other: str, largest: float = 0.0) -> Distance | None:
        narrow, wide = getattr(run, side).get(name), getattr(exact, side).get(other)
        if narrow is None or wide is None:
            return None
        value = runs.array(wide)
        found = [
            runs.array(g) for each in same if (g := getattr(each, side).get(other)) is not None
        ]
        explained = max(apart(each, value) for each in found) if found else 0.0
        return Distance.of_gradient(runs.array(narrow), value, explained, unit, largest)

    for i, j in matches(run.forward, exact.forward):
        distances = [distance(side, names[i], other_names[j]) for side in ("outputs", "gradients")]
        values = [value for value in _values(run.forward[i]) if isinstance(value, tf.Tensor)]
        dtypes = [value.dtype.name for value in values if value.dtype.name in UNIT_ROUNDOFF]
        dtype = max(dtypes, key=UNIT_ROUNDOFF.__getitem__)
        yield _TracedRow(ComparedLayer(names[i], run.forward[i].type, dtype, *distances), (i, j))
    for name, value in run.outputs.items():
        if name.startswith("result "):
            distances = [distance(side, name, name) for side in ("outputs", "gradients")]
            yield _TracedRow(ComparedLayer(name, "result", value.dtype.name, *distances))
    # Of one kind the largest gradient tells whether another is zero but for rounding.
    largest: dict[str, float] = {}
    for name, gradient in exact.gradients.items():
        if name not in exact.outputs:
            kind = _kind(name)
            largest[kind] = max(largest.get(kind, 0.0), rms(runs.array(gradient)))
    for name, gradient in run.gradients.items():
        if name not in run.outputs:
            kind = _kind(name)
            found = distance("gradients", name, name, largest.get(kind, 0.0))
            yield _TracedRow(ComparedLayer(name, kind, gradient.dtype.name, None, found))


def _kind(name: str) -> str:
    return "argument" if name.startswith("argument ") else "variable"


def _first(rows: Sequence[_TracedRow]) -> tuple[_TracedRow, str] | None:
    """The first row that is too far off, in the order in which things happened, and its side."""

    def is_far(distance: Distance | None) -> bool:
        return distance is not None and distance.units > LIMIT

    for row in rows:
        if is_far(row.layer.output):
            return row, "forward"
    inside = [row for row in rows if row.index is not None]
    others = [row for row in rows if row.index is None]
    for row in (*reversed(inside), *others):
        if is_far(row.layer.gradient):
            return row, "backward"
    return None


def _finding(
    row: _TracedRow, side: str, run: _FunctionRun, exact: _FunctionRun, dtype: str
) -> Finding:
    layer = row.layer
    distance = cast(Distance, layer.output if side == "forward" else layer.gradient)
    both = copy.copy(run.kept), copy.copy(exact.kept)
    line = None
    if row.index is not None:
        line = run.forward[row.index[0]].line
        if side == "forward":
            for kept, each, last in zip(both, (run, exact), row.index):
                kept.operations = each.forward[: last + 1]
    reason = explain(*both, side, dtype)
    if reason is None:
        what = f"what it returns in {dtype} is further off than rounding explains"
        if side == "backward":
            what = f"its gradient in {dtype} is further off than rounding explains"
        return Finding(layer.path, layer.kind, side, what, line, distance)
    if side == "forward":
        line = reason.line or line
    return Finding(layer.path, layer.kind, side, reason.what, line, distance)

"""Compares a function of tensors and variables in 16 bits and in float32.

A function has no layers, so its operations are compared, in the order in which they run in eager.
What rounding explains is measured as for models: the function runs in float32, on arguments and
variables that are moved at random by as much as rounding moves them. The result of a backward
stable algorithm is not further off than that.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from keras_mp.numerics import own_thread
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.calls import Call, KeptOperations, RandomNumbers, Watch, floating
from keras_mp.numerics.causes import IN_FLOAT32
from keras_mp.numerics.comparison import records
from keras_mp.numerics.comparison.compared import Comparison
from keras_mp.numerics.comparison.differences import (
    FAR,
    TooFar,
    compare_layers,
    explain,
    matches,
)
from keras_mp.numerics.comparison.records import LayerRecord
from keras_mp.numerics.distances import UNIT_ROUNDOFF
from keras_mp.numerics.run import Forward, Passed, Run, Runner, signed_mean
from keras_mp.op_autocast.context_manager import autocast
from keras_mp.step.schedule import INITIAL_LOSS_SCALE
from keras_mp.support import op_callbacks
from keras_mp.support.dtypes import LOW_PRECISION

_LOSS_SCALES = {"float16": INITIAL_LOSS_SCALE, "bfloat16": 1.0}

# The kind of what a function returns.
_RESULT = "result"

_Value = TypeVar("_Value")

_Context = Callable[[], contextlib.AbstractContextManager]


class _Variables(NamedTuple):
    """Stands for a model where a function is run."""

    variables: list[Any]

    @property
    def weights(self) -> list[Any]:
        """The same list, by the other name that layers have for it."""
        return self.variables


@own_thread.random_numbers()
def compare_function(
    function: Callable[..., Any],
    *args: Any,
    dtype: str = "float16",
    context: Callable[[str], contextlib.AbstractContextManager] | None = autocast,
    reference: Callable[..., Any] | None = None,
    variables: tf.Module | Iterable[tf.Variable] | None = None,
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

    The loss is multiplied by 2 ** 15 in float16. If gradients overflow, it is halved until they do
    not.

    Returns:
        A `Comparison`: `findings` is empty if rounding explains everything, `str` is a table.

    Raises:
        TypeError: `variables` are others than these.
        ValueError: nothing is computed in 16 bits, nothing that is floating point is returned, or
            the dtype is another one.

    Example:

    >>> w = tf.Variable(tf.ones([4, 4]), name="w")
    >>> def loss(x):
    ...     with tf.name_scope("norm"):
    ...         squares = tf.linalg.matvec(w, x * x)
    ...     return tf.reduce_mean(tf.sqrt(squares))
    >>> x = tf.constant([[100.0, 200.0, 300.0, 400.0]])
    >>> keras_mp.numerics.comparison.compare_function.compare_function(loss, x / 100).findings
    []
    >>> first = keras_mp.numerics.comparison.compare_function.compare_function(loss, x).findings[0]
    >>> first.hazard, first.path
    ('a difference in the forward pass', 'norm/BatchMatMulV2')
    """
    if dtype not in _LOSS_SCALES:
        raise ValueError(f"Expected 'float16' or 'bfloat16'. Received: dtype={dtype!r}")
    unit, numbers = UNIT_ROUNDOFF[dtype], RandomNumbers()
    args = tuple(tf.nest.map_structure(_tensor, arg) for arg in args)
    under = contextlib.nullcontext if context is None else lambda: context(dtype)
    held = _held(function, args, variables, under)
    narrow = Runner(held, Batch(args), _of(function, under), numbers=numbers, keeps=True)
    run = narrow.run_as_trained(_LOSS_SCALES[dtype])
    dtypes = {each.dtype for call in run.calls for each in (*call.inputs, *call.outputs)}
    if dtypes.isdisjoint(LOW_PRECISION):
        raise ValueError(
            f"{_name(function)} computes nothing in 16 bits, so there is nothing to compare. "
            "Expected operations that `keras_mp.autocast` runs in 16 bits, variables of "
            "`keras_mp.autocast_variable` with context=keras_mp.autocast_scope, or a function that "
            "casts by itself. (A concrete function, or one that was loaded, computes as it was "
            f"traced.) Received: dtype={dtype!r}, context={context!r}"
        )
    other = reference or function
    wide = Runner(held, Batch(args), _of(other), numbers=numbers, keeps=True)
    exact = wide.run()
    layers, references = records.layers_of(run), records.explained_layers(wide, exact, unit)
    for layer in layers:
        layer.unit = unit
    pairs = _pairs(run, exact, layers, references)
    rows, first = compare_layers(pairs)
    findings = [*FAR.findings(_explained(each, run, exact, dtype) for each in first)]
    names = f"{_name(function)} in {dtype}", f"{_name(other)} in float32"
    return Comparison(*names, rows, findings, (run.loss, exact.loss), run.loss_scale)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _of(function: Callable[..., Any], under: _Context = contextlib.nullcontext) -> Forward:
    """Returns the forward pass of a function on its arguments; calls are operations and results.

    Args:
        function: of the user.
        under: makes the context manager that it runs in.
    """

    def forward(held: _Variables, batch: Batch, watch: Watch, tape: tf.GradientTape) -> Passed:
        arguments = floating(batch.x)
        tape.watch(arguments)
        with under():
            returned = floating(function(*batch.x))
        if not returned:
            raise ValueError(
                f"Expected {_name(function)} to return floating-point tensors. Received none"
            )
        recorded = list(watch.kept.operations)
        watch.calls += [
            dataclasses.replace(each, path=name, outputs=floating(each.outputs)[:1])
            for name, each in _numbered((each.path for each in recorded), recorded).items()
        ]
        watch.calls += [
            Call((len(recorded) + i,), f"{_RESULT} {i}", _RESULT, None, (), outputs=[value])
            for i, value in enumerate(returned)
        ]
        is_loss = len(returned) == 1 and returned[0].shape.rank == 0
        loss = returned[0] if is_loss else signed_mean(None, returned)
        trained = [v for v in held.variables if v.trainable and tf.as_dtype(v.dtype).is_floating]
        sources = _numbered((each.name.partition(":")[0] for each in trained), trained)
        sources |= {f"argument {i}": value for i, value in enumerate(arguments)}
        return Passed([loss], sources)

    return forward


def _tensor(value: Any) -> Any:
    return value if tf.is_tensor(value) else tf.convert_to_tensor(value)


def _listed(variables: tf.Module | Iterable[tf.Variable] | None) -> list[tf.Variable]:
    source = variables.variables if isinstance(variables, tf.Module) else variables
    if source is None:
        return []
    listed: list[Any] = list(source) if isinstance(source, Iterable) else [None]
    if not all(hasattr(each, "assign") for each in listed):
        raise TypeError(
            "Expected a tf.Module or an iterable of variables. "
            f"Received: variables={variables!r} (of type {type(variables)})"
        )
    return listed


def _held(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    variables: tf.Module | Iterable[tf.Variable] | None,
    under: _Context,
) -> _Variables:
    """Runs the function once, and returns the variables that it uses.

    That also tries out its kernels, which may have to be replaced before the runs to compare.
    """
    held = _Variables(_listed(variables))
    with (
        own_thread.put_back(held),
        Watch(RandomNumbers()).over(held),
        tf.GradientTape() as tape,
        _as_first_read(tape) if variables is None else contextlib.nullcontext(),
        under(),
    ):
        function(*args)
    return held if variables is not None else _Variables(list(tape.watched_variables()))


@contextlib.contextmanager
def _as_first_read(tape: tf.GradientTape) -> Iterator[None]:
    """Restores the variables that a tape watches to the values that the block first read."""
    visited: set[int] = set()
    read: list[tuple[Any, np.ndarray]] = []

    def keep(_: Any, inputs: Sequence[Any], *__: Any, **___: Any) -> None:
        if tf.executing_eagerly() and any(value.dtype == tf.resource for value in inputs):
            for variable in tape.watched_variables():
                if id(variable) not in visited:
                    # First, since reading the variable calls this function again.
                    visited.add(id(variable))
                    read.append((variable, variable.numpy()))

    try:
        with op_callbacks.observed(keep):
            yield
    finally:
        for variable, value in read:
            variable.assign(value)


def _numbered(names: Iterable[str], values: Iterable[_Value]) -> dict[str, _Value]:
    """Returns a dict; of equal names, the second ends with "_1" and so on, as in a graph."""
    unique_name = tf.Graph().unique_name
    return {unique_name(name): value for name, value in zip(names, values)}


def _pairs(
    run: Run, exact: Run, layers: Sequence[LayerRecord], references: Sequence[LayerRecord]
) -> list[tuple[LayerRecord, LayerRecord]]:
    """Pairs the operations of two runs, and results, variables and arguments by name."""
    narrow, wide = ([call for call in each.calls if call.kind != _RESULT] for each in (run, exact))
    pairs = [(layers[i], references[j]) for i, j in matches(narrow, wide)]
    others = {layer.path: layer for layer in references[len(wide) :]}
    rest = layers[len(narrow) :]
    return pairs + [(each, others[each.path]) for each in rest if each.path in others]


def _explained(first: TooFar, run: Run, exact: Run, dtype: str) -> TooFar:
    """Explains what is too far, and finds the line of its operation."""
    layer, other, side, *_ = first
    is_forward = side == "forward"
    line = next((each.line for each in run.calls if each.path == layer.path), None)
    both = (run, layer.path), (exact, other.path)
    narrow, wide = (_until(each, path if is_forward else None) for each, path in both)
    what = "what it returns" if is_forward else "its gradient"
    unknown = f"{what} in {dtype} is further off than rounding explains", None
    what, found = explain(narrow, wide, side, dtype) or unknown
    line = (found if is_forward else None) or line
    return first._replace(what=what, line=line, in_float32=IN_FLOAT32["a function"])


def _until(run: Run, path: str | None) -> KeptOperations:
    """Returns the operations of a run, up to the one with that name if there is one."""
    copied = copy.copy(run.kept)
    last = next((i for i, call in enumerate(run.calls, 1) if call.path == path), None)
    copied.operations = copied.operations[:last]
    return copied

"""The dtypes that a traced function computes in: work, casts, and the reasons.

Nothing runs: all of it is read from the graph.
"""

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.grappler import passes
from keras_mp.grappler import report as rewrites
from keras_mp.kernels import cast_policy, lower_precision, slow
from keras_mp.numerics import batches, gpu, origins, own_thread
from keras_mp.numerics.gpu import Sending
from keras_mp.numerics.graph import CALLS, Node, nodes_of
from keras_mp.numerics.results import Result
from keras_mp.numerics.traced_step import name_of_step, trace
from keras_mp.support import op_table, text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.messages import Line
from keras_mp.support.progress import Progress

# They hand on the numbers that they get, and compute none.
_NO_COMPUTATIONS = op_table.ops(
    *("arguments", "constants", "results", "variables", "reads of variables"),
    *("writes of variables", *op_table.SAME_NUMBERS, "shapes", "fills", "no numbers"),
    *("calls", "conditions", "loops", "empty tensors", "lists of a loop"),
)


class Operation(NamedTuple):
    """An operation that computes with floating-point numbers.

    Attributes:
        name: str. Its name in the graph.
        op: str. Its type, such as "MatMul".
        dtype: str. In which dtype it computes.
        layer: str. The path of its layer, or "outside of layers".
        line: the line of a program that made it, or None if libraries alone did.
        why: str. Why it computes in this dtype.
        turns: int. How often a call runs it.
        work: int. How many floating-point operations of products a call takes for it.
        is_known: bool. Whether its work is known: not that of a product of unknown shapes.
        is_least: bool. Whether it is in a loop of which nothing tells how often it runs. Its turns
            and work are those of one round then.

    Example:

    >>> from keras_mp.numerics.census import Operation
    >>> Operation("a", "Exp", "float32", "", None, "", 1, 0, is_known=True, is_least=False).op
    'Exp'
    """

    name: str
    op: str
    dtype: str
    layer: str
    line: Line | None
    why: str
    turns: int
    work: int
    is_known: bool
    is_least: bool


@dataclasses.dataclass(frozen=True)
class Census(Result):
    """The dtypes that a traced function computes in. `print` of it gives sentences and tables.

    Attributes:
        name: str. The name of the function, or of the model.
        operations: tuple of `Operation`, as they were traced. What grappler or XLA makes of them is
            not known.
        device: str. The GPU that it is about; None if it is about this machine.
        sending: `Sending`, what the host sends to a GPU; None where none computes, and where XLA
            compiles it as a whole.
        more: tuple of sentences about the device.

    Example:

    >>> census = keras_mp.numerics.census.census(tf.matmul, tf.ones([2, 3]), tf.ones([3, 4]))
    >>> census.work()
    {'float32': 48}
    """

    name: str
    operations: tuple[Operation, ...]
    device: str | None = None
    sending: Sending | None = None
    more: tuple[str, ...] = ()

    def work(self) -> dict[str, int]:
        """Returns a dict of dtypes, and how much products and convolutions compute in each."""
        work = Counter[str]()
        for each in self.operations:
            work[each.dtype] += each.work
        return {dtype: amount for dtype, amount in work.most_common() if amount}

    def to_dict(self) -> dict[str, Any]:
        """Returns its attributes, and "work" by dtype."""
        return {**super().to_dict(), "work": self.work()}

    def _lines(self, rows: int | None) -> Iterator[str]:
        yield f"Census of {self.name}" + (f" on a {self.device}" if self.device else "")
        for sentence in (*self._sentences(), *self.more):
            yield from text_tables.wrapped(sentence) if rows else [sentence]
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for each in self.operations:
            products = each.turns * (each.work > 0)
            counts[each.dtype].update(operations=each.turns, products=products, work=each.work)
        table = [("", "operations", "products", "work")]
        for dtype, of in sorted(counts.items(), key=lambda of: -of[1]["work"]):
            table.append((dtype, f"{of['operations']:,}", f"{of['products']:,}", _flop(of["work"])))
        yield from ("", *text_tables.aligned(table), "")
        total = sum(self.work().values())
        # Each group stays a row of its own.
        ranked = [
            text_tables.RankedRow((f"{work / total:.1%}", each.dtype, name, each.why), (-i,), i)
            for i, (work, name, each) in enumerate(_added_up(self.operations, rows is None))
        ]
        if ranked:
            header = ("work", "dtype", "layer", "why")
            yield from text_tables.shortened(header, ranked, rows, left=(1, 2, 3), name=2)

    def _sentences(self) -> Iterator[str]:
        work, parts = self.work(), list[str]()
        for dtype, amount in work.items():
            share = amount / sum(work.values())
            part = f"{share:{'.0%' if 0.01 <= share <= 0.99 or share == 1 else '.2%'}} in {dtype}"
            if parts or dtype not in LOW_PRECISION_NAMES:
                groups = _added_up([e for e in self.operations if e.dtype == dtype])
                layers = dict.fromkeys(name for _, name, _ in groups)
                part += f" ({groups[0][-1].why}: {', '.join([*layers][:3])})"
            parts.append(part)
        if parts:
            yield f"Of the multiplications, {'; '.join(parts)}."
        if turning := [each for each in self.operations if each.work and each.is_least]:
            yield (
                "The number of iterations of some loops is unknown. They are counted once: "
                f"{_some(turning)}."
            )
        if unknown := [each for each in self.operations if not each.is_known]:
            yield (
                f"The shapes of {len(unknown)} product{'s' * (len(unknown) > 1)} are not known, so "
                f"they are not counted: {_some(unknown)}."
            )


def census(
    function: Callable[..., object], *args: Any, device: str | None = None, **kwargs: Any
) -> Census:
    """Counts what a function, or the training step of a model, computes in which dtype, and why.

    Floating-point work is that of matrix products and convolutions, forwards and backwards, where a
    multiplication and an addition count as two. Of a branch, the one with more work counts. A loop
    over the rows of a tensor counts for each of them, another one once, which is said
    (`Operation.is_least`).

    Args:
        function: a model of `tf.keras`; or a `tf.types.experimental.ConcreteFunction`, a
            `tf.function` or another callable. Of a compiled model it is the training step, of
            another one the forward pass.
        *args: of a model, a batch as `fit` takes it: x, or a tuple `(x, y)` or
            `(x, y, sample_weight)`. Of what is not traced yet, its arguments or `tf.TensorSpec`s.
        device: str. A GPU and its compute capability, such as "GPU 7.0": how much of it would its
            tensor cores take, and the host send? None is needed. Defaults to this machine.
        **kwargs: more arguments of what is not traced yet.

    Returns:
        `Census`.

    Raises:
        TypeError: `function` cannot be called, or a model comes without a batch, or with a dataset.
        ValueError: the batch is a tuple of more than three, has no values, or does not suit the
            model; `device` is no GPU, or this TensorFlow was built without CUDA.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input([8]), tf.keras.layers.Dense(4)])
    >>> keras_mp.numerics.census.census(model, tf.ones([2, 8])).work()
    {'float32': 128}
    """
    capability = gpu.capability_of(device)
    model = function if isinstance(function, tf.keras.Model) else None
    if model is not None and (len(args) != 1 or kwargs):
        raise TypeError(
            "Expected a batch after the model: x, or a tuple (x, y) or (x, y, sample_weight). "
            f"Received {len(args)} positional and {len(kwargs)} other arguments."
        )
    if not callable(function):
        raise TypeError(
            "Expected a model of `tf.keras`, a concrete function, a `tf.function` or another "
            f"callable. Received: {function!r} (of type {type(function)})"
        )
    layers = origins.Layers(model)
    with Progress("census", parts=2) as progress:
        progress.begin("tracing")
        with slow.switched_off() if device is not None else contextlib.nullcontext():
            if model is not None:
                batch, name = batches.as_fit_takes_it(model, args[0]), name_of_step(model)
                with batches.suiting(name, batch), own_thread.random_numbers_of(model):
                    concrete: Any = trace(model, batch, layers)
            else:
                concrete = function
                if not isinstance(function, tf.types.experimental.ConcreteFunction):
                    is_of_tf = hasattr(function, "get_concrete_function")
                    concrete = function if is_of_tf else tf.function(function)
                    concrete = concrete.get_concrete_function(*args, **kwargs)
                name = getattr(function, "__name__", None) or concrete.name.decode()
        progress.begin("reading the graph")
        nodes = [*nodes_of(concrete.graph)]
        operations = tuple(_read(nodes, concrete.graph, layers, model is not None))
        more, sent = list[str](), None
        is_compiled = rewrites.is_compiled(concrete) or getattr(model, "jit_compile", False) is True
        if capability is not None:
            whose = "this GPU" if device is None else f"a {device}"
            more += gpu.on_tensor_cores(nodes, capability, whose)
            if not is_compiled:
                sent = gpu.sending(nodes, capability, model is not None)
                more += sent.sentences()
        if not is_compiled and (dtype := passes.enabled_dtype()) is not None:
            more.append(
                f"The graph rewrite is on, and makes more of it {dtype}: "
                "keras_mp.graph_rewrite.report tells."
            )
        return Census(name, operations, device, sent, tuple(more))


def _read(
    nodes: Sequence[Node], graph: tf.Graph, layers: origins.Layers, is_model: bool
) -> Iterator[Operation]:
    """Yields the operations that compute, with what is known of the function that they come from.

    Args:
        nodes: those of the function, and of what it calls.
        graph: that of the function.
        layers: `Layers` of the model whose step it is, which have seen their calls.
        is_model: whether it is one of a model.
    """
    known = {op.name: op for op in graph.get_operations()}
    is_autocast = any(name.rpartition("/")[2].startswith(lower_precision.NAME) for name in known)
    for node in nodes:
        made, path = node.made, node.path
        if not node.dtype or made.type in _NO_COMPUTATIONS:
            continue
        if not layers.name(path):
            # The backward pass of a function is a function without the scope of its layer, but it
            # takes what the function in the layer has kept for it.
            call = known.get(path.partition("/")[0])
            takes = () if call is None or call.type not in CALLS else call.inputs
            calls = [each.op.name for each in takes if each.op.type in CALLS]
            path = next(filter(layers.name, calls), path)
        why = (is_autocast and _of_autocast(node)) or _of_layer(node, path, layers, is_model)
        why += " (a loop, counted once)" * node.is_least
        layer, work = layers.name(path) or "outside of layers", (node.work or 0) * node.turns
        about = node.dtype, layer, origins.line_of(made), why
        is_known = node.work is not None
        yield Operation(made.name, made.type, *about, node.turns, work, is_known, node.is_least)


def _of_autocast(node: Node) -> str:
    """Returns why an operation computes so in a region; "" if that does not decide."""
    row = cast_policy.ROWS.get(node.made.type)
    if row is None:
        return ""
    is_decided = row.policy in (cast_policy.DENY, cast_policy.PROMOTE)
    return f"autocast: {row.why}" if is_decided or node.dtype in LOW_PRECISION_NAMES else ""


def _of_layer(node: Node, path: str, layers: origins.Layers, is_model: bool) -> str:
    layer, is_own = layers.layer(path), origins.is_users(node.made)
    if layer is None:
        return "loss, metrics or optimizer" if is_model and not is_own else "the program"
    policy = layer.dtype_policy.name
    if node.dtype == "float32" and id(layer) in layers.last:
        return "the model returns float32"
    if node.dtype == layer.compute_dtype:
        return f"policy {policy}"
    if is_own:
        return f"the layer's code, against its policy {policy}"
    return f"{type(layer).__name__} computes so under {policy}"


def _added_up(
    operations: Sequence[Operation], is_apart: bool = False
) -> list[tuple[int, str, Operation]]:
    """Adds up the work of equal layers; the largest sum first.

    Args:
        operations: the operations.
        is_apart: whether layers whose names differ in numbers are left apart.

    Returns:
        list of the sum, a name for all of the layers, and the first operation.
    """
    groups = text_tables.merged(
        [each for each in operations if each.work],
        lambda each: each.layer,
        lambda each: (each.dtype, each.why, is_apart and each.layer),
    )
    found = [(sum(each.work for each in group), name, group[0]) for name, group in groups]
    return sorted(found, key=lambda each: -each[0])


def _some(operations: Sequence[Operation]) -> str:
    """Returns the names of their layers, at most three."""
    names = [*dict.fromkeys(each.layer for each in operations)]
    return ", ".join([*names[:3], *([f"{len(names) - 3} more"] if len(names) > 3 else [])])


def _flop(count: float) -> str:
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {prefix}FLOP"
        count /= 1000
    return f"{count:,.3g} TFLOP"

"""The dtypes that a traced function computes in: work, casts, and the reasons.

Nothing runs: all of it is read from the graph.
"""

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from keras_mp.grappler import optimize, passes
from keras_mp.grappler import report as rewrites
from keras_mp.kernels import cast_policy, lower_precision, slow
from keras_mp.numerics import batches, gpu, origins, own_thread
from keras_mp.numerics.gpu import Sending
from keras_mp.numerics.graph import CALLS, Node, nodes_of
from keras_mp.numerics.results import Result, plain
from keras_mp.numerics.traced_step import name_of_step, trace
from keras_mp.support import op_table, text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.messages import Line
from keras_mp.support.progress import Progress

_RETURNED = "the model returns float32"

# They hand on the numbers that they get, and compute none.
_NO_COMPUTATIONS = op_table.ops(
    *("arguments", "constants", "results", "variables", "reads of variables"),
    *("writes of variables", *op_table.SAME_NUMBERS, "shapes", "fills", "no numbers"),
    *("calls", "conditions", "loops", "empty tensors", "lists of a loop"),
)

_NO_LAYER = "outside of layers"

_Item = TypeVar("_Item", "Operation", "Cast")


class Operation(NamedTuple):
    """An operation that computes with floating-point numbers.

    Attributes:
        name: str. Its name in the graph.
        op: str. Its type, such as "MatMul".
        dtype: str. In which dtype it computes.
        layer: str. The path of its layer; empty outside of layers.
        line: the line of a program that made it, or None if libraries alone did.
        why: str. Why it computes in this dtype.
        turns: int. How often a call runs it.
        is_known: bool. Whether its work is known: not that of a product of unknown shapes.
        work: int. How many floating-point operations of products a call takes for it.
        is_least: bool. Whether it is in a loop of which nothing tells how often it runs. Its turns
            and work are those of one round then.

    Example:

    >>> from keras_mp.numerics.census import Operation
    >>> Operation("a", "Exp", "float32", "", None, "", 1, True, 0, False).op
    'Exp'
    """

    name: str
    op: str
    dtype: str
    layer: str
    line: Line | None
    why: str
    turns: int
    is_known: bool
    work: int
    is_least: bool


class Cast(NamedTuple):
    """A cast from one floating-point dtype to another.

    Attributes:
        name: str. Its name in the graph.
        source: str. The dtype that it casts from.
        to: str. The dtype that it casts to.
        after: str. The path of the layer that makes what is cast; empty outside of layers.
        before: str. That of the layer that takes it.
        line: the line of a program that made it, or None if libraries alone did.
        why: str. What makes the cast, and why.
        bytes: int. How many bytes a call reads and writes for it.

    Example:

    >>> from keras_mp.numerics.census import Cast
    >>> Cast("a", "float32", "float16", "", "", None, "", 6).to
    'float16'
    """

    name: str
    source: str
    to: str
    after: str
    before: str
    line: Line | None
    why: str
    bytes: int


class Graph(NamedTuple):
    """The operations and casts of a graph.

    Attributes:
        operations: tuple of `Operation`.
        casts: tuple of `Cast`.

    Example:

    >>> from keras_mp.numerics.census import Graph
    >>> Graph((), ()).work()
    {}
    """

    operations: tuple[Operation, ...]
    casts: tuple[Cast, ...]

    def work(self) -> dict[str, int]:
        """Returns a dict of dtypes, and how much products and convolutions compute in each."""
        return _sums((each.dtype, each.work) for each in self.operations if each.work)


def _sums(pairs: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    """Adds up counts of the same key; the largest sum first."""
    result: Counter[Any] = Counter()
    for key, count in pairs:
        result[key] += count
    return dict(result.most_common())


@dataclasses.dataclass(frozen=True)
class Census(Result):
    """The dtypes that a traced function computes in. `print` of it gives sentences and tables.

    Attributes:
        name: str. The name of the function, or of the model.
        traced: `Graph`, as it was traced. What grappler or XLA makes of it is not known.
        device: str. The GPU that it is about; None if it is about this machine.
        sending: `Sending`, what the host sends to a GPU; None where none computes, and where XLA
            compiles it as a whole.
        more: tuple of sentences about the device.

    Example:

    >>> census = keras_mp.numerics.census.census(tf.matmul, tf.ones([2, 3]), tf.ones([3, 4]))
    >>> census.traced.work()
    {'float32': 48}
    """

    name: str
    traced: Graph
    device: str | None = None
    sending: Sending | None = None
    more: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns an object with "name", "device", "traced" and "sending"."""
        sent = self.sending and {**self.sending._asdict(), "is_bound": self.sending.is_bound}
        traced = {"work": self.traced.work(), **plain(self.traced)}
        return {"name": self.name, "device": self.device, "traced": traced, "sending": sent}

    def _lines(self, most: int | None) -> Iterator[str]:
        yield f"Census of {self.name}" + (f" on a {self.device}" if self.device else "")
        for sentence in self._sentences():
            yield from text_tables.wrapped(sentence) if most else [sentence]
        yield ""
        rows = [("", "operations", "products", "work", "casts", "bytes cast")]
        yield from text_tables.aligned([*rows, *_rows(self.traced)])
        yield ""
        graph, is_apart = self.traced, most is None
        total = sum(graph.work().values())
        products = [each for each in graph.operations if each.work]
        rows = [
            (f"{amount / total:.1%}", dtype, name, why)
            for name, (dtype, why), amount, _ in _grouped(
                products, _layer, _about, "work", is_apart
            )
        ]
        yield from _table(("work", "dtype", "layer", "why"), rows, most)
        rows = [
            (_bytes(amount), str(count), source, to, name, why)
            for name, (source, to, why), amount, count in _grouped(
                graph.casts, _between, _about_cast, "bytes", is_apart
            )
        ]
        yield from _table(("bytes cast", "casts", "from", "to", "between", "why"), rows, most)

    def _sentences(self) -> Iterator[str]:
        graph, work = self.traced, self.traced.work()
        total, parts = sum(work.values()), []
        for dtype, count in work.items():
            part = f"{_percent(count / total)} in {dtype}"
            if parts or dtype not in LOW_PRECISION_NAMES:
                products = [e for e in graph.operations if e.dtype == dtype and e.work]
                layers = [
                    name for name, *_ in _grouped(products, _layer, lambda _: (), "work", False)
                ]
                whys = _sums((each.why, each.work) for each in products)
                part += f" ({next(iter(whys))}: {', '.join(layers[:3])})"
            parts.append(part)
        if parts:
            yield f"Of the multiplications, {'; '.join(parts)}."
        if graph.casts:
            moved = sum(each.bytes for each in graph.casts)
            places = text_tables.merged(graph.casts, _between)
            where, casts = max(places, key=lambda place: len(place[1]))
            after, _, before = where.partition(" > ")
            place = f"between {after} and {before}" if before else f"in {after}"
            yield (
                f"{len(graph.casts)} cast{'s' * (len(graph.casts) > 1)} move {_bytes(moved)} a "
                f"call, {len(casts)} of them {place}."
            )
        if turning := [each for each in graph.operations if each.is_least]:
            yield (
                "The number of iterations of some loops is unknown. They are counted once: "
                f"{_some(turning)}."
            )
        unknown = [each for each in graph.operations if not each.is_known]
        if unknown:
            yield (
                f"The shapes of {len(unknown)} product{'s' * (len(unknown) > 1)} are not known, so "
                f"they are not counted: {_some(unknown)}."
            )
        yield from self.more


def census(
    function: Callable[..., object], *args: Any, device: str | None = None, **kwargs: Any
) -> Census:
    """Counts what a function, or the training step of a model, computes in which dtype, and why.

    Floating-point work is that of matrix products and convolutions, forwards and backwards, where a
    multiplication and an addition count as two. Of a branch, the one with more work counts. A loop
    counts with the turns that it is known to make at most. If nothing tells, it counts once, which
    is said (`Operation.is_least`).

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
    >>> keras_mp.numerics.census.census(model, tf.ones([2, 8])).traced.work()
    {'float32': 128}
    """
    if device is not None:
        optimize.compute_capability(device)
    model = function if isinstance(function, tf.keras.Model) else None
    if model is not None and (len(args) != 1 or kwargs):
        raise TypeError(
            "Expected a batch after the model: x, or a tuple (x, y) or (x, y, sample_weight). "
            f"Received {len(args)} positional and {len(kwargs)} other arguments."
        )
    layers = origins.Layers(model)
    with Progress("census", parts=2) as progress:
        progress.begin("tracing")
        with slow.switched_off() if device is not None else contextlib.nullcontext():
            if model is not None:
                batch, name = batches.as_fit_takes_it(model, args[0]), name_of_step(model)
                with batches.suiting(name, batch), own_thread.random_numbers_of(model):
                    concrete = trace(model, batch, layers)
            else:
                concrete = _function_of(function, *args, **kwargs)
                name = getattr(function, "__name__", None) or concrete.name.decode()  # pyright: ignore
        progress.begin("reading the graph")
        graph: Any = concrete.graph  # pyright: ignore
        nodes = nodes_of(graph)
        traced = _Reader(graph, model, layers).read(nodes)
        more, sent = [*gpu.on_tensor_cores(nodes, device)], None
        if not (rewrites.is_compiled(concrete) or getattr(model, "jit_compile", False) is True):
            sent = gpu.sending(nodes, device, model)
            more += [] if sent is None else gpu.sentences(sent)
            if (dtype := passes.enabled_dtype()) is not None:
                more.append(
                    f"The graph rewrite is on, and makes more of it {dtype}: "
                    "keras_mp.graph_rewrite.report tells."
                )
        return Census(name, traced, device, sent, tuple(more))


def _function_of(
    function: Callable[..., object], *args: Any, **kwargs: Any
) -> tf.types.experimental.ConcreteFunction:
    """Traces a function, without running it.

    Args:
        function: `ConcreteFunction`, `tf.function`, or any callable.
        *args: arguments or `tf.TensorSpec`s, for what is not traced yet.
        **kwargs: the same.

    Returns:
        `tf.types.experimental.ConcreteFunction`.

    Raises:
        TypeError: it cannot be called.
    """
    if isinstance(function, tf.types.experimental.ConcreteFunction):
        return function
    if not callable(function):
        raise TypeError(
            "Expected a model of `tf.keras`, a concrete function, a `tf.function` or another "
            f"callable. Received: {function!r} (of type {type(function)})"
        )
    if not hasattr(function, "get_concrete_function"):
        function = tf.function(function)
    return function.get_concrete_function(*args, **kwargs)


class _Reader:
    """Reads nodes, with what is known of the function that they come from.

    Args:
        graph: that of the function.
        model: the model whose step it is, or None.
        layers: its `Layers`, which have seen their calls.
    """

    def __init__(
        self, graph: tf.Graph, model: tf.keras.Model | None, layers: origins.Layers
    ) -> None:
        self._made = {op.name: op for op in graph.get_operations()}
        self._layers, self._is_model = layers, model is not None
        self._is_autocast = any(_is_autocast(name) for name in self._made)

    def read(self, nodes: Sequence[Node]) -> Graph:
        by_path = {node.path: node for node in nodes if node.made.type != "Placeholder"}
        takers: dict[str, list[str]] = defaultdict(list)
        for node in nodes:
            for source in node.sources:
                takers[source].append(node.path)
        casts = [
            self._cast(node, by_path.get(node.sources[0]), takers[node.path])
            for node in nodes
            if node.made.type == "Cast" and len(node.dtypes) == 2
        ]
        computing = (n for n in nodes if n.dtypes and n.made.type not in _NO_COMPUTATIONS)
        return Graph(tuple(map(self._operation, computing)), tuple(casts))

    def _owner(self, path: str) -> str:
        """Returns the name of an operation whose layer is that of another one."""
        if self._layers.path(path):
            return path
        # The backward pass of a function is a function without the scope of its layer, but it takes
        # what the function in the layer has kept for it.
        call = self._made.get(path.partition("/")[0])
        takes = () if call is None or call.type not in CALLS else call.inputs
        calls = [each.op.name for each in takes if each.op.type in CALLS]
        return next(filter(self._layers.path, calls), path)

    def _is_returned(self, path: str) -> bool:
        """Whether an operation is in float32 since the model returns that."""
        return id(self._layers.layer(path)) in self._layers.last

    def _operation(self, node: Node) -> Operation:
        made, work, turns, dtype = node.made, node.work, node.turns, node.dtype
        layer = self._layers.name(self._owner(node.path))
        about = layer, origins.line_of(made), self._why(node, dtype)
        is_known, work = work is not None, (work or 0) * turns
        return Operation(made.name, made.type, dtype, *about, turns, is_known, work, node.is_least)

    def _why(self, node: Node, dtype: str) -> str:
        if self._is_autocast and node.made.type in cast_policy.ROWS:
            row = cast_policy.ROWS[node.made.type]
            is_decided = row.policy in (cast_policy.DENY, cast_policy.PROMOTE)
            if is_decided or dtype in LOW_PRECISION_NAMES:
                return f"autocast: {row.why}"
        layer = self._layers.layer(self._owner(node.path))
        if layer is None:
            is_steps = self._is_model and origins.maker_of(node.made) != "user"
            return "loss, metrics or optimizer" if is_steps else "the program"
        policy = layer.dtype_policy.name
        if dtype == "float32" and self._is_returned(node.path):
            return _RETURNED
        if dtype == layer.compute_dtype:
            return f"policy {policy}"
        if origins.maker_of(node.made) == "user":
            return f"the layer's code, against its policy {policy}"
        return f"{type(layer).__name__} computes so under {policy}"

    def _cast(self, node: Node, source: Node | None, takers: Sequence[str]) -> Cast:
        own = self._layers.name(node.path)
        after = "" if source is None else self._layers.name(source.path)
        before = next(filter(None, map(self._layers.name, takers)), "")
        dtypes = node.dtypes["SrcT"], node.dtypes["DstT"]
        wide = takers if dtypes[1] == "float32" else ()
        why = self._why_cast(node, source, after, before, wide)
        about = after or own, before or own, origins.line_of(node.made), why
        numbers = (node.made.outputs[0].shape.num_elements() or 0) * node.turns
        moved = numbers * sum(tf.as_dtype(each).size for each in dtypes)
        return Cast(node.made.name, *dtypes, *about, moved)

    def _why_cast(
        self, node: Node, source: Node | None, after: str, before: str, wide: Sequence[str]
    ) -> str:
        if _is_autocast(node.path):
            return "autocast"
        if origins.is_of_backward_pass(node.path):
            return "backward pass of a cast"
        if source is not None and source.made.type == "ReadVariableOp":
            return "a variable, cast to the policy of its layer"
        maker = origins.maker_of(node.made)
        if maker == "user":
            return "the program's own cast"
        if any(map(self._is_returned, wide)):
            return _RETURNED
        if maker == "keras_mp":
            return "keras_mp: loss, loss scaling or float32 sums"
        if not self._layers.name(node.path) and not before:
            return "loss, metrics or optimizer" if self._is_model else "the program's own cast"
        return "a layer's input, cast to its policy" if after != before else "inside of a layer"


def _is_autocast(name: str) -> bool:
    return name.rpartition("/")[2].startswith(lower_precision.NAME)


def _grouped(
    items: Iterable[_Item],
    name: Callable[[_Item], str],
    about: Callable[[_Item], tuple[str, ...]],
    amount: str,
    is_apart: bool,
) -> list[tuple[str, tuple[str, ...], int, int]]:
    """Adds up operations or casts of equal layers; the largest sum first.

    Args:
        items: sequence of `Operation` or `Cast`.
        name: called with each; returns the name of its layer.
        about: called with each; returns what else those have in common that are added up.
        amount: str. The attribute that is added up.
        is_apart: bool. Whether layers whose names differ in numbers are left apart.

    Returns:
        list of a name for all of the layers, what they have in common, the sum, and their number.
    """
    groups = text_tables.merged(items, name, lambda each: (about(each), is_apart and name(each)))
    found = [
        (title, about(group[0]), sum(getattr(each, amount) for each in group), len(group))
        for title, group in groups
    ]
    return sorted(found, key=lambda each: each[2], reverse=True)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], most: int | None) -> Iterator[str]:
    """Yields the lines of a table of groups, each of which stays a row of its own."""
    if rows:
        ranked = [text_tables.RankedRow(tuple(row), (-i,), i) for i, row in enumerate(rows)]
        left = [i for i, title in enumerate(header) if title not in ("work", "bytes cast", "casts")]
        yield from text_tables.shortened(header, ranked, most, left, name=left[0])
        yield ""


def _some(operations: Iterable["Operation"]) -> str:
    """Returns the names of their layers, at most three."""
    names = [*dict.fromkeys(map(_layer, operations))]
    return ", ".join([*names[:3], *([f"{len(names) - 3} more"] if len(names) > 3 else [])])


def _rows(graph: Graph) -> Iterator[tuple[str, ...]]:
    work, operations = graph.work(), _sums((e.dtype, e.turns) for e in graph.operations)
    products = _sums((e.dtype, e.turns) for e in graph.operations if e.work)
    casts = _sums((each.to, 1) for each in graph.casts)
    moved = _sums((each.to, each.bytes) for each in graph.casts)
    for dtype in dict.fromkeys([*work, *operations, *casts]):
        yield (
            dtype,
            f"{operations.get(dtype, 0):,}",
            f"{products.get(dtype, 0):,}",
            _scaled(work.get(dtype, 0), "FLOP"),
            f"{casts.get(dtype, 0):,}",
            _bytes(moved.get(dtype, 0)),
        )


def _layer(operation: "Operation") -> str:
    return operation.layer or _NO_LAYER


def _about(operation: "Operation") -> tuple[str, ...]:
    return operation.dtype, operation.why + " (a loop, counted once)" * operation.is_least


def _between(cast: "Cast") -> str:
    """Returns the names of the layers that a cast is between, or of the one that it is in."""
    after, before = cast.after or _NO_LAYER, cast.before or _NO_LAYER
    return after if after == before else f"{after} > {before}"


def _about_cast(cast: "Cast") -> tuple[str, ...]:
    return cast.source, cast.to, cast.why


def _percent(share: float) -> str:
    return f"{share:.0%}" if 0.01 <= share <= 0.99 or share == 1 else f"{share:.2%}"


def _bytes(count: int) -> str:
    return _scaled(count, "B")


def _scaled(count: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    return f"{count:,.3g} T{unit}"

"""The dtypes that a traced function computes in: work, casts, and the reasons.

Nothing runs: all of it is read from the graph.
"""

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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

    @property
    def amount(self) -> int:
        """Its work."""
        return self.work

    @property
    def place(self) -> str:
        """The path of its layer, or other words."""
        return self.layer or _NO_LAYER

    @property
    def about(self) -> tuple[str, ...]:
        """What operations of equal layers have in common that are added up."""
        return self.dtype, self.why + " (a loop, counted once)" * self.is_least


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

    @property
    def amount(self) -> int:
        """How many bytes it moves."""
        return self.bytes

    @property
    def place(self) -> str:
        """The paths of the layers that it is between, or of the one that it is in."""
        after, before = self.after or _NO_LAYER, self.before or _NO_LAYER
        return after if after == before else f"{after} > {before}"

    @property
    def about(self) -> tuple[str, ...]:
        """What casts between equal layers have in common that are added up."""
        return self.source, self.to, self.why


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
        work = Counter[str]()
        for each in self.operations:
            work[each.dtype] += each.work
        return {dtype: amount for dtype, amount in work.most_common() if amount}


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
        graph, total = self.traced, sum(self.traced.work().values())
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for each in graph.operations:
            products = each.turns if each.work else 0
            counts[each.dtype].update(operations=each.turns, products=products, work=each.work)
        for each in graph.casts:
            counts[each.to].update(casts=1, moved=each.bytes)
        rows = [
            (
                *(dtype, f"{of['operations']:,}", f"{of['products']:,}"),
                *(_scaled(of["work"], "FLOP"), f"{of['casts']:,}", _scaled(of["moved"], "B")),
            )
            for dtype, of in sorted(
                counts.items(), key=lambda each: (-each[1]["work"], -each[1]["operations"])
            )
        ]
        header = ("", "operations", "products", "work", "casts", "bytes cast")
        yield from ("", *text_tables.aligned([header, *rows]), "")
        rows = [
            (f"{amount / total:.1%}", dtype, name, why)
            for name, amount, _, (dtype, why) in _groups(self._products, most is None)
        ]
        yield from _table(("work", "dtype", "layer", "why"), rows, (1, 2, 3), most)
        rows = [
            (_scaled(amount, "B"), str(count), source, to, name, why)
            for name, amount, count, (source, to, why) in _groups(graph.casts, most is None)
        ]
        header = ("bytes cast", "casts", "from", "to", "between", "why")
        yield from _table(header, rows, (2, 3, 4, 5), most)

    @property
    def _products(self) -> list[Operation]:
        return [each for each in self.traced.operations if each.work]

    def _sentences(self) -> Iterator[str]:
        graph, work = self.traced, self.traced.work()
        total, parts = sum(work.values()), []
        for dtype, count in work.items():
            part = f"{_percent(count / total)} in {dtype}"
            if parts or dtype not in LOW_PRECISION_NAMES:
                products = [each for each in self._products if each.dtype == dtype]
                whys = Counter[str]()
                for each in products:
                    whys[each.why] += each.work
                [(why, _)] = whys.most_common(1)
                layers = dict.fromkeys(name for name, *_ in _groups(products, False))
                part += f" ({why}: {', '.join([*layers][:3])})"
            parts.append(part)
        if parts:
            yield f"Of the multiplications, {'; '.join(parts)}."
        if graph.casts:
            moved = sum(each.bytes for each in graph.casts)
            places = text_tables.merged(graph.casts, lambda each: each.place)
            where, casts = max(places, key=lambda place: len(place[1]))
            after, _, before = where.partition(" > ")
            place = f"between {after} and {before}" if before else f"in {after}"
            yield (
                f"{len(graph.casts)} cast{'s' * (len(graph.casts) > 1)} move "
                f"{_scaled(moved, 'B')} a call, {len(casts)} of them {place}."
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
        nodes = nodes_of(concrete.graph)
        traced = _Reader(concrete.graph, model, layers).read(nodes)
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


def _groups(
    items: Sequence[Operation] | Sequence[Cast], is_apart: bool
) -> list[tuple[str, int, int, tuple[str, ...]]]:
    """Adds up operations or casts of equal layers; the largest sum first.

    Args:
        items: the operations or casts.
        is_apart: whether layers whose names differ in numbers are left apart.

    Returns:
        list of a name for all of the layers, the sum, their number, and what they have in common.
    """
    groups = text_tables.merged(
        items, lambda each: each.place, lambda each: (each.about, is_apart and each.place)
    )
    found = [
        (name, sum(each.amount for each in group), len(group), group[0].about)
        for name, group in groups
    ]
    return sorted(found, key=lambda each: -each[1])


def _table(
    header: Sequence[str], rows: Sequence[tuple[str, ...]], left: Sequence[int], most: int | None
) -> Iterator[str]:
    """Yields the lines of a table of groups, each of which stays a row of its own."""
    if rows:
        ranked = [text_tables.RankedRow(row, (-i,), i) for i, row in enumerate(rows)]
        yield from text_tables.shortened(header, ranked, most, left, name=left[-2])
        yield ""


def _some(operations: Sequence[Operation]) -> str:
    """Returns the names of their layers, at most three."""
    names = [*dict.fromkeys(each.place for each in operations)]
    return ", ".join([*names[:3], *([f"{len(names) - 3} more"] if len(names) > 3 else [])])


def _percent(share: float) -> str:
    return f"{share:.0%}" if 0.01 <= share <= 0.99 or share == 1 else f"{share:.2%}"


def _scaled(count: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    return f"{count:,.3g} T{unit}"

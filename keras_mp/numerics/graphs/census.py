"""The dtypes that a traced function computes in: work, casts, reasons, before and after grappler.

Nothing runs: all of it is read from the graph.
"""

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.grappler import optimize, passes
from keras_mp.grappler import report as rewrites
from keras_mp.kernels import slow
from keras_mp.layer_calls import model_outputs
from keras_mp.numerics import batches, origins, own_thread
from keras_mp.numerics.graphs import census_text, sending, traces
from keras_mp.numerics.graphs import work as works
from keras_mp.numerics.graphs.census_text import sums
from keras_mp.numerics.graphs.sending import Sending
from keras_mp.numerics.graphs.walk import CALLS, Node, Walk
from keras_mp.numerics.results import Result, plain
from keras_mp.op_autocast import cast_policy, lower_precision
from keras_mp.support import op_table, text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.messages import Line
from keras_mp.support.progress import Progress

# Where keras_mp computes outputs of subclassed models once more.
_MADE_AGAIN = ("exact_outputs.py", "again_in_float32.py")
_RETURNED = "the model returns float32"

# They hand on the numbers that they get, and compute none.
_NO_COMPUTATIONS = op_table.ops(
    *("arguments", "constants", "results", "variables", "reads of variables"),
    *("writes of variables", *op_table.SAME_NUMBERS, "shapes", "fills", "no numbers"),
    *("calls", "conditions", "loops", "entries of frames", "exits of frames", "frames"),
    *("empty tensors", "lists of a loop"),
)


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
        kind: str. "matrix product" or "convolution"; empty for all others, and if the shapes are
            not known.
        work: int. How many floating-point operations of products a call takes for it.
        is_least: bool. Whether it is in a loop of which nothing tells how often it runs. Its turns
            and work are those of one round then.
        sizes: tuple of int. Of a plain matrix product, rows, columns and what is summed over; of a
            convolution, channels in and out; empty for all others.

    Example:

    >>> from keras_mp.numerics.graphs.census import Operation
    >>> Operation("a", "Exp", "float32", "", None, "", 1, "", 0, False).op
    'Exp'
    """

    name: str
    op: str
    dtype: str
    layer: str
    line: Line | None
    why: str
    turns: int
    kind: str
    work: int
    is_least: bool
    sizes: tuple[int | None, ...] = ()


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

    >>> from keras_mp.numerics.graphs.census import Cast
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

    >>> from keras_mp.numerics.graphs.census import Graph
    >>> Graph((), ()).work()
    {}
    """

    operations: tuple[Operation, ...]
    casts: tuple[Cast, ...]

    def work(self) -> dict[str, int]:
        """Returns a dict of dtypes, and how much products and convolutions compute in each."""
        return sums((each.dtype, each.work) for each in self.operations if each.work)

    def operations_by_dtype(self) -> dict[str, int]:
        """Returns a dict of dtypes, and how many operations a call runs in each."""
        return sums((each.dtype, each.turns) for each in self.operations)


@dataclasses.dataclass(frozen=True)
class Census(Result):
    """The dtypes that a traced function computes in. `print` of it gives sentences and tables.

    Attributes:
        name: str. The name of the function, or of the model.
        traced: `Graph`, as it was traced.
        optimized: `Graph`, as grappler leaves it and TensorFlow runs it; None where XLA compiles
            it as a whole, which grappler does not see, or where grappler fails.
        device: str. The GPU that it is about; None if it is about this machine.
        sending: `Sending`, what the host sends to a GPU; None where none computes, and where XLA
            compiles it as a whole.

    Example:

    >>> census = keras_mp.numerics.graphs.census.census(tf.matmul, tf.ones([2, 3]), tf.ones([3, 4]))
    >>> census.traced.work()
    {'float32': 48}
    """

    name: str
    traced: Graph
    optimized: Graph | None
    device: str | None = None
    sending: Sending | None = None

    @property
    def runs(self) -> Graph:
        """The graph that runs: the optimized one, where there is one."""
        return self.optimized or self.traced

    def to_dict(self) -> dict[str, Any]:
        """Returns an object with "name", "device", "traced", "optimized" and "sending"."""
        listed = {
            name: graph and {"work": graph.work(), **plain(graph)}
            for name, graph in (("traced", self.traced), ("optimized", self.optimized))
        }
        sent = self.sending and {**self.sending._asdict(), "is_bound": self.sending.is_bound}
        return {"name": self.name, "device": self.device, **listed, "sending": sent}

    def to_text(self, rows: int | None = text_tables.MOST) -> str:
        """Returns what `print` shows: sentences, and tables of dtypes, layers and casts.

        Args:
            rows: int. How many layers, and how many casts, are shown at most, where those of equal
                layers in repeated blocks are one; None for all of them. Defaults to 10.

        Returns:
            str of several lines, of at most 100 characters each unless `rows` is None.
        """
        return "\n".join(census_text.lines(self, rows)).rstrip()


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
        device: str. A GPU and its compute capability, such as "GPU 7.0": what would TensorFlow make
            of the graph there, and how much of it do tensor cores take? None is needed. Defaults to
            this machine.
        **kwargs: more arguments of what is not traced yet.

    Returns:
        `Census`.

    Raises:
        TypeError: `function` cannot be called, or a model comes without a batch, or with a dataset.
        ValueError: the batch is a tuple of more than three, has no values, or does not suit the
            model; `device` is no GPU, or this TensorFlow was built without CUDA.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input([8]), tf.keras.layers.Dense(4)])
    >>> keras_mp.numerics.graphs.census.census(model, tf.ones([2, 8])).traced.work()
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
    scopes: dict[str, str] = {}
    with Progress("census", parts=2) as progress:
        progress.begin("tracing")
        with slow.switched_off() if device is not None else contextlib.nullcontext():
            if model is not None:
                concrete, name = _step_of(model, args[0], scopes), traces.name_of_step(model)
            else:
                concrete = traces.function_of(function, *args, **kwargs)
                name = getattr(function, "__name__", None) or concrete.name.decode()  # pyright: ignore
        progress.begin("reading the graph")
        meta = rewrites.of_function(concrete, shapes=True)
        reader = _Reader(concrete.graph, model, scopes)  # pyright: ignore
        walk = Walk(meta.graph_def)
        traced = reader.read(walk.nodes)
        if rewrites.is_compiled(concrete) or getattr(model, "jit_compile", False) is True:
            return Census(name, traced, None, device)
        reader.rewritten_to = passes.enabled_dtype()
        try:
            graph = rewrites.optimized(meta, reader.rewritten_to, device)
        except tf.errors.UnimplementedError:  # of a dtype that a pass of it does not know
            return Census(name, traced, None, device)
        nodes = Walk(graph, walk).nodes
        sent = sending.of(nodes, device, model)
        return Census(name, traced, reader.read(nodes), device, sent)


def _step_of(
    model: tf.keras.Model, batch: Any, scopes: dict[str, str]
) -> tf.types.experimental.ConcreteFunction:
    batch = batches.as_fit_takes_it(model, batch)
    try:
        with own_thread.random_numbers_of(model):
            return traces.step_of(model, batch, scopes)
    except (ValueError, AttributeError) as error:
        if not batches.is_misfit(batch, error):
            raise
        raise batches.misfit(traces.name_of_step(model), batch, error) from error


class _Reader:
    """Reads nodes, with what is known of the function that they come from.

    Args:
        graph: that of the function.
        model: the model whose step it is, or None.
        scopes: in which scopes its layers were called.
    """

    def __init__(
        self, graph: tf.Graph, model: tf.keras.Model | None, scopes: dict[str, str]
    ) -> None:
        self._made = {op.name: op for op in graph.get_operations()}
        self._layers, self._is_model = origins.Layers(model, scopes), model is not None
        self._last = set() if model is None else _last_layers(model)
        self._is_autocast = any(_is_autocast(name) for name in self._made)
        # By path, the dtypes before the graph was rewritten.
        self._before: dict[str, str] = {}
        self.rewritten_to: str | None = None

    def read(self, nodes: Sequence[Node]) -> Graph:
        by_path = {node.path: node for node in nodes}
        takers: dict[str, list[str]] = defaultdict(list)
        for node in nodes:
            for source in node.sources:
                takers[source].append(node.path)
        casts = [
            self._cast(node, by_path.get(node.sources[0]), takers[node.path])
            for node in nodes
            if node.proto.op == "Cast" and len(node.dtypes) == 2
        ]
        computing = (n for n in nodes if n.dtypes and n.proto.op not in _NO_COMPUTATIONS)
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
        is_gradient = origins.is_of_backward_pass(path)
        made = self._made.get(origins.forward_name(path, "", self._made) if is_gradient else path)
        is_made_again = made is not None and origins.is_made_in(made, _MADE_AGAIN)
        return is_made_again or id(self._layers.layer(path)) in self._last

    def _operation(self, node: Node) -> Operation:
        dtype = node.dtypes.get("T") or next(iter(node.dtypes.values()))
        why = self._why(node, dtype)
        if self.rewritten_to is None:
            self._before[node.path] = dtype
        what = node.proto.name, node.proto.op, dtype
        where = self._layers.name(self._owner(node.path)), self._line(node.path), why
        kind, count = node.work or ("", 0)
        sizes = works.multiplied_sizes(node.proto, node.inputs, node.outputs)
        turns = node.turns
        return Operation(*what, *where, turns, kind, count * turns, node.is_least, sizes)

    def _why(self, node: Node, dtype: str) -> str:
        if self.rewritten_to == dtype and self._before.get(node.path, dtype) != dtype:
            return "the graph rewrite"
        if self._is_autocast and node.proto.op in cast_policy.ROWS:
            row = cast_policy.ROWS[node.proto.op]
            is_decided = row.policy in (cast_policy.DENY, cast_policy.PROMOTE)
            if is_decided or dtype in LOW_PRECISION_NAMES:
                return f"autocast: {row.why}"
        layer = self._layers.layer(self._owner(node.path))
        if layer is None:
            is_steps = self._is_model and self._maker(node.path) != "user"
            return "loss, metrics or optimizer" if is_steps else "the program"
        policy = layer.dtype_policy.name
        if dtype == "float32" and self._is_returned(node.path):
            return _RETURNED
        if dtype == layer.compute_dtype:
            return f"policy {policy}"
        if self._maker(node.path) == "user":
            return f"the layer's code, against its policy {policy}"
        return f"{type(layer).__name__} computes so under {policy}"

    def _cast(self, node: Node, source: Node | None, takers: Sequence[str]) -> Cast:
        own = self._layers.name(node.path)
        after = "" if source is None else self._layers.name(source.path)
        before = next(filter(None, map(self._layers.name, takers)), "")
        dtypes = node.dtypes["SrcT"], node.dtypes["DstT"]
        wide = takers if dtypes[1] == "float32" else ()
        why = self._why_cast(node.path, source, after, before, wide)
        about = after or own, before or own, self._line(node.path), why
        shape = (node.outputs[0] if node.outputs else None) or ()
        numbers = math.prod(length or 0 for length in shape) * node.turns
        moved = numbers * sum(tf.as_dtype(each).size for each in dtypes)
        return Cast(node.proto.name, *dtypes, *about, moved)

    def _why_cast(
        self, name: str, source: Node | None, after: str, before: str, takers: Sequence[str]
    ) -> str:
        if name.endswith("AutoMixedPrecision"):
            return "the graph rewrite"
        if _is_autocast(name):
            return "autocast"
        if origins.is_of_backward_pass(name):
            return "backward pass of a cast"
        if source is not None and source.proto.op == "ReadVariableOp":
            return "a variable, cast to the policy of its layer"
        maker = self._maker(name)
        if maker == "user":
            return "the program's own cast"
        if any(map(self._is_returned, takers)):
            return _RETURNED
        if maker == "keras_mp":
            return "keras_mp: loss, loss scaling or float32 sums"
        if not self._layers.name(name) and not before:
            return "loss, metrics or optimizer" if self._is_model else "the program's own cast"
        return "a layer's input, cast to its policy" if after != before else "inside of a layer"

    def _maker(self, name: str) -> str | None:
        made = self._made.get(name)
        return None if made is None else origins.maker_of(made)

    def _line(self, name: str) -> Line | None:
        made = self._made.get(name)
        return None if made is None else origins.line_of(made)


def _last_layers(model: Any) -> set[int]:
    """Returns the ids of the layers that a model calls in float32, since it returns that."""
    found: set[int] = set()
    waiting = list(model_outputs.last_layers(model))
    while waiting:
        layer = waiting.pop()
        waiting += model_outputs.last_layers(layer)
        is_low = getattr(layer, "compute_dtype", None) in LOW_PRECISION_NAMES
        if is_low and model_outputs.returns_float32(model, layer.dtype_policy):
            found.add(id(layer))
    return found


def _is_autocast(name: str) -> bool:
    return name.rpartition("/")[2].startswith(lower_precision.NAME)

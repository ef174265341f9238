"""The result of a pass: operations by dtype, added casts, and why others stayed.

TensorFlow 1.15, "enable_mixed_precision_graph_rewrite": the four lists. Grappler is called as
TensorFlow calls it before a function first runs, but nothing runs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from keras_mp.grappler import op_lists, optimize, passes
from keras_mp.grappler.optimize import MetaGraph
from keras_mp.support import columns, op_table, registered_kernels
from keras_mp.support.dtypes import FLOATING

# The end of the names of casts that the passes put in.
_SUFFIX = "AutoMixedPrecision"
_DEVICES = {"float16": "GPU", "bfloat16": "CPU"}
_FLOATS = {dtype.as_datatype_enum: dtype for dtype in FLOATING}

_Node: TypeAlias = tf.compat.v1.NodeDef
_Nodes: TypeAlias = Mapping[str, _Node]
_Lists: TypeAlias = Mapping[str, frozenset[str]]

# They bring numbers in and out, and compute none.
_NO_COMPUTATIONS = op_table.ops(
    *("arguments", "constants", "results", "variables", "reads of variables", "calls"),
)


class RewrittenOperation(NamedTuple):
    """An operation on floating-point numbers, in the graph as it runs.

    Attributes:
        name: str. Its name.
        op: str. Its type, such as "MatMul".
        dtype: str. The dtype in which it computes.
        why: str. Why it was not rewritten; empty if it computes in the dtype of the rewrite.

    Example:

    >>> keras_mp.graph_rewrite.RewrittenOperation("Exp", "Exp", "float32", "on the deny list")
    RewrittenOperation(name='Exp', op='Exp', dtype='float32', why='on the deny list')
    """

    name: str
    op: str
    dtype: str
    why: str


class RewriteReport(NamedTuple):
    """The result of rewriting a graph. `str` of it, and `print`, give a table.

    Attributes:
        name: str. The name of the function.
        dtype: str. The dtype to which it was rewritten.
        operations: tuple of `RewrittenOperation`. All that compute with floating-point numbers, but
            for the casts that were put in.
        casts: dict of dtypes, str, and how many casts to them were put in.
        before: int. How many operations computed in the dtype before.
        device: str. The GPU that it is about; None if it is about this machine.

    Example:

    >>> report = keras_mp.graph_rewrite.RewriteReport(
    ...     "step", "float16", (), casts={"float16": 0, "float32": 0}, before=0)
    >>> report.by_dtype()
    {}
    """

    name: str
    dtype: str
    operations: tuple[RewrittenOperation, ...]
    casts: dict[str, int]
    before: int
    device: str | None = None

    def by_dtype(self) -> dict[str, dict[str, int]]:
        """Returns a dict of dtypes and, by type of operation, how many there are."""
        counts = Counter((each.dtype, each.op) for each in self.operations)
        dtypes = dict.fromkeys(dtype for dtype, _ in counts)
        return {each: {op: n for (d, op), n in counts.items() if d == each} for each in dtypes}

    def __str__(self) -> str:
        rewritten = self.by_dtype().get(self.dtype, {})
        where = f" on a {self.device}" if self.device else ""
        head = (
            f"Graph rewrite of {self.name}{where}: "
            f"{sum(rewritten.values())} of {len(self.operations)} floating-point operations "
            f"compute in {self.dtype} ({self.before} without the rewrite). Casts put in: "
            + ", ".join(f"{count} to {dtype}" for dtype, count in self.casts.items())
        )
        rows = [("operation", self.dtype, "others", "why not")]
        for op in sorted({each.op for each in self.operations}):
            whys = Counter(each.why for each in self.operations if each.op == op and each.why)
            why = "; ".join(f"{why} ({n})" if len(whys) > 1 else why for why, n in whys.items())
            rows.append((op, str(rewritten.get(op, 0)), str(whys.total()), why))
        return "\n".join([head, "", *columns.aligned(rows, left=(0, 3))])


def report(
    graph: MetaGraph, name: str, dtype: str, compiled: bool = False, device: str | None = None
) -> RewriteReport:
    """Rewrites a graph as TensorFlow will, and reports the result.

    Args:
        graph: `MetaGraphDef`, as `of_function` and `of_fetches` make it.
        name: str. What the graph is called.
        dtype: str, "float16" or "bfloat16".
        compiled: bool. Whether XLA compiles it, in place of what grappler does.
        device: str. The GPU on which it would run, such as "GPU 7.0"; None for this machine.
    """
    if compiled:
        without = rewritten = graph.graph_def
    else:
        without, rewritten = (optimized(graph, each, device) for each in (None, dtype))
    of_xla = _functions_for_xla(graph.graph_def)
    bodies = _bodies(without, of_xla)
    before = sum(dtype in each for nodes, _ in bodies for _, each in _computations(nodes))
    casts, operations = {dtype: 0, "float32": 0}, []
    lists = op_lists.read(dtype) if op_lists.can_be_read(dtype) else {}
    for nodes, is_of_xla in _bodies(rewritten, of_xla):
        by_name = {node.name: node for node in nodes}
        for node, dtypes in _computations(nodes):
            if node.op == "Cast" and node.name.endswith(_SUFFIX):
                casts[tf.as_dtype(node.attr["DstT"].type).name] += 1
            elif dtype in dtypes:
                operations.append(RewrittenOperation(node.name, node.op, dtype, ""))
            else:
                by_xla = "XLA compiles it" if compiled or is_of_xla else None
                why = by_xla or _why(node, dtypes, by_name, dtype, lists, device)
                operations.append(RewrittenOperation(node.name, node.op, dtypes[0], why))
    return RewriteReport(name, dtype, tuple(operations), casts, before, device)


def optimized(graph: MetaGraph, dtype: str | None, device: str | None = None) -> Any:
    """Returns what grappler makes of a graph before it runs.

    It has the options of this program.

    Args:
        graph: `MetaGraphDef`, as `of_function` and `of_fetches` make it.
        dtype: str, "float16" or "bfloat16", to which it is rewritten; None for no rewrite.
        device: str. The GPU on which it would run, such as "GPU 7.0". Defaults to this machine.
    """
    return optimize.graph(passes.config_for_sessions(None, dtype), graph, device)


def of_function(function: tf.types.experimental.ConcreteFunction) -> MetaGraph:
    """Returns the graph of a concrete function as grappler takes it.

    Args:
        function: `tf.types.experimental.ConcreteFunction`.
    """
    graph = function.graph  # pyright: ignore[reportAttributeAccessIssue]
    definition = graph.as_graph_def()
    # As TensorFlow has the graph of a function when it rewrites it.
    inputs = {tensor.op.name: i for i, tensor in enumerate(graph.inputs)}
    for node in definition.node:
        if node.name in inputs:
            # Not those of its operation: a small tensor that is captured is a constant here.
            attributes = {key: node.attr[key] for key in node.attr if key.startswith("_")}
            attributes["T"] = node.attr["dtype"]
            attributes["index"] = tf.compat.v1.AttrValue(i=inputs[node.name])
            node.CopyFrom(tf.compat.v1.NodeDef(name=node.name, op="_Arg", attr=attributes))
    fetches = [operation.name for operation in graph.control_outputs]
    for i, tensor in enumerate(graph.outputs):
        result = definition.node.add(name=f"keras_mp_result_{i}", op="_Retval", input=[tensor.name])
        result.attr["T"].type = tensor.dtype.as_datatype_enum
        result.attr["index"].i = i
        fetches.append(result.name)
    return optimize.with_fetches(definition, fetches)


def is_compiled(function: Any) -> bool:
    """Whether XLA compiles a concrete function as a whole.

    Then grappler never sees it.

    Args:
        function: `tf.types.experimental.ConcreteFunction`.
    """
    return function.function_def.attr["_XlaMustCompile"].b


def of_fetches(fetches: Sequence[Any]) -> MetaGraph:
    """Returns the graph that a session runs, as grappler takes it.

    Args:
        fetches: sequence of operations and tensors of one `tf.Graph`.
    """
    names = [getattr(fetch, "op", fetch).name for fetch in fetches]
    return optimize.with_fetches(fetches[0].graph.as_graph_def(), names)


def _bodies(graph: Any, of_xla: Mapping[str, Any]) -> Iterator[tuple[Sequence[_Node], bool]]:
    """Yields the nodes of a graph and of each function, and whether it is in `of_xla`."""
    yield graph.node, False
    for function in graph.library.function:
        # XLA takes them as they were traced: grappler's version, if there is one, never runs.
        traced = of_xla.get(function.signature.name)
        yield (traced or function).node_def, traced is not None


def _functions_for_xla(graph: tf.compat.v1.GraphDef) -> dict[str, Any]:
    """Returns the functions of a graph that XLA compiles, by name.

    The functions that they call are among them.
    """
    library = {function.signature.name: function for function in graph.library.function}
    found: dict[str, Any] = {}
    waiting = [name for name, each in library.items() if each.attr["_XlaMustCompile"].b]
    for name in waiting:
        if name in library and name not in found:
            found[name] = library[name]
            nodes = library[name].node_def
            waiting += [value.func.name for node in nodes for value in node.attr.values()]
    return found


def _computations(nodes: Sequence[_Node]) -> Iterator[tuple[_Node, list[str]]]:
    """Yields nodes that compute with floating-point numbers, and the dtypes of these."""
    for node in nodes:
        dtypes = {dtype.name for each in floating_dtypes(node).values() for dtype in each}
        if dtypes and node.op not in _NO_COMPUTATIONS:
            yield node, sorted(dtypes)


def floating_dtypes(node: tf.compat.v1.NodeDef) -> dict[str, list[tf.DType]]:
    """Returns the floating-point dtypes of a node by attribute.

    Args:
        node: `NodeDef`.
    """
    found = {}
    for name, value in node.attr.items():
        types = [value.type] if value.WhichOneof("value") == "type" else value.list.type
        dtypes = [_FLOATS[each] for each in types if each in _FLOATS]
        if dtypes and not name.startswith("_"):
            found[name] = dtypes
    return found


def _why(
    node: _Node, dtypes: list[str], nodes: _Nodes, dtype: str, lists: _Lists, device: str | None
) -> str:
    """Returns the reason why an operation was left as it is.

    Args:
        node: `NodeDef` of the operation.
        dtypes: its floating-point dtypes.
        nodes: those among which it is, by name.
        dtype: str. The dtype to which the others were rewritten.
        lists: what `op_lists.read` returns; nothing where TensorFlow rewrites nothing.
        device: str. The GPU that the graph was rewritten for; None for this machine.
    """
    if "float32" not in dtypes:
        return f"is {dtypes[0]} already"
    if not lists:
        return "not on this CPU"
    op_list = next((name for name, ops in lists.items() if node.op in ops), None)
    if node.op in op_lists.kept_out():
        return "kept for its sum"
    if op_list is None:
        return "on no list"
    if op_list == "deny":
        return "on the deny list"
    kind = _DEVICES[dtype] if device is None else "GPU"
    if not _has_kernel(node, dtype, kind):
        return f"no {dtype} kernel"
    # The pass for float16 leaves the whole graph alone on an older GPU.
    is_older = device is not None and float(optimize.compute_capability(device)) < 7.0
    if op_list == "allow" or is_older:
        return f"not on a {kind} that is fast, or fetched"
    denied = _denied_before(node, nodes, lists)
    return f"after {denied}" if denied else "not among operations of the allow list"


def _denied_before(node: _Node, nodes: _Nodes, lists: _Lists) -> str | None:
    """Returns the operation of the deny list that a node is behind.

    There may be operations of other lists in between.
    """
    waiting, visited = [node.name], {node.name}
    for each in waiting:
        names = [name.split(":")[0] for name in nodes[each].input]
        for source in (nodes[name] for name in names if name in nodes):
            if source.op in lists["deny"]:
                return source.op
            if source.op in lists["infer"] | lists["clear"] and source.name not in visited:
                visited.add(source.name)
                waiting.append(source.name)
    return None


def _has_kernel(node: tf.compat.v1.NodeDef, dtype: str, device: str) -> bool:
    """Whether some attribute of a node can be of the dtype, with the others unchanged."""
    types = {name: each[0].as_datatype_enum for name, each in floating_dtypes(node).items()}
    enum = tf.as_dtype(dtype).as_datatype_enum
    return any(
        registered_kernels.has_kernel(node.op, {**types, name: enum}, device) for name in types
    )

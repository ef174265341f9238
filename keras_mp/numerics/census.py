"""The dtypes that a traced function computes in, the reasons, and what a GPU takes of it.

Nothing runs: all of it is read from the graph. TensorFlow sends the operations of a graph to a GPU
one by one. How long that takes, and how long the GPU takes to compute, are estimates, from steps on
one H200 (docs/speed.md); they tell orders of magnitude apart. Code that XLA compiles is sent by
XLA, which takes a tenth of the time.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.grappler import optimize, passes
from keras_mp.grappler import report as rewrites
from keras_mp.hardware import devices
from keras_mp.kernels import cast_policy, lower_precision, slow
from keras_mp.numerics import batches, origins, own_thread
from keras_mp.numerics.graph import CALLS, Node, multiplied_sizes, nodes_of
from keras_mp.numerics.results import Result
from keras_mp.numerics.traced_step import name_of_step, trace
from keras_mp.support import op_table, text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.messages import Line
from keras_mp.support.progress import Progress

# They start nothing on a GPU.
_NOT_SENT = op_table.ops(
    *("arguments", "constants", "results", "variables", "reads of variables", "shapes", "calls"),
    *("conditions", "loops", "no numbers", "identities", "identities of lists"),
    *("identities without a gradient", "reshapes"),
)
# They hand on the numbers that they get, and compute none.
_NO_COMPUTATIONS = _NOT_SENT | op_table.ops(
    *("writes of variables", "fills", "empty tensors", "lists of a loop", *op_table.SAME_NUMBERS)
)

# Tensor cores fill other sizes up to a multiple. (Nvidia, "Matrix Multiplication Background",
# "Requirements to Use Tensor Cores": 16 bytes; with the A100, 128 are best.)
_MULTIPLE = 8
# What they do not take is so much slower.
_WITHOUT_TENSOR_CORES = 4
# The models that were run took 15 to 33 microseconds an operation, where the host is slow.
_SECONDS_OF_AN_OPERATION = 15e-6
# An estimate that says less is not told.
_LEAST_OPERATIONS = 100
# By the least compute capability: floating-point operations of products in 16 bits, and bytes, in a
# second: half of what is written on an H100, A10, A100, T4 and V100, and most of its bandwidth.
_GPUS = {
    (9, 0): (500e12, 3.5e12),
    (8, 6): (60e12, 0.5e12),
    (8, 0): (150e12, 1.5e12),
    (7, 5): (30e12, 0.25e12),
    (7, 0): (60e12, 0.8e12),
    (0, 0): (8e12, 0.3e12),
}


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


class Sending(NamedTuple):
    """What the host sends to a GPU for one call of a function. The seconds are estimates.

    Attributes:
        operations: int. How many operations are sent one by one. Those that XLA compiles are not
            among them.
        host_seconds: float. How long the host takes for them.
        gpu_seconds: float. How long a GPU takes to compute them, with what XLA compiles.
        helps: tuple of str. The code with which XLA compiles it, that which takes in most first.
        is_bound: bool. Whether the GPU waits for the host.

    Example:

    >>> from keras_mp.numerics.census import Sending
    >>> Sending(5000, 0.05, 0.03, (), is_bound=True).operations
    5000
    """

    operations: int
    host_seconds: float
    gpu_seconds: float
    helps: tuple[str, ...]
    is_bound: bool


@dataclasses.dataclass(frozen=True, repr=False)
class Census(Result):
    """The dtypes that a traced function computes in. `print` of it gives sentences and tables.

    Attributes:
        name: str. The name of the function, or of the model.
        operations: tuple of `Operation`, as they were traced. What grappler or XLA makes of them is
            not known.
        device: str. The GPU that it is about; None if it is about this machine.
        sending: `Sending`, what the host sends to a GPU; None where none computes, and where XLA
            compiles it as a whole.
        more: tuple of sentences about what is not counted, and about the device.

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
        work = self.work()
        total = sum(work.values())
        groups = text_tables.merged(
            [each for each in self.operations if each.work],
            lambda each: each.layer,
            lambda each: (each.dtype, each.why, each.layer if rows is None else ""),
        )
        sums = ((sum(each.work for each in group), name, group[0]) for name, group in groups)
        cells = [
            (f"{amount / total:.1%}", each.dtype, name, each.why)
            for amount, name, each in sorted(sums, key=lambda each: -each[0])
        ]
        table, shares = [("", "operations", "products", "GFLOP")], list[str]()
        for dtype in dict.fromkeys([*work, *(each.dtype for each in self.operations)]):
            of = [each for each in self.operations if each.dtype == dtype]
            turns, amount = sum(each.turns for each in of), work.get(dtype, 0)
            products = sum(each.turns for each in of if each.work)
            table.append((dtype, f"{turns:,}", f"{products:,}", f"{amount / 1e9:.3g}"))
            if found := [each for each in cells if each[1] == dtype]:
                names = ", ".join([*dict.fromkeys(each[2] for each in found)][:3])
                shares.append(f"{amount / total:.2%} in {dtype} ({found[0][3]}: {names})")
        said = [f"Of the multiplications, {'; '.join(shares)}."] if shares else []
        for sentence in (*said, *self.more):
            yield from text_tables.wrapped(sentence) if rows else [sentence]
        yield from ("", *text_tables.aligned(table), "")
        if cells:
            # Each group stays a row of its own.
            ranked = [text_tables.RankedRow(each, (-i,), i) for i, each in enumerate(cells)]
            header = ("work", "dtype", "layer", "why")
            yield from text_tables.shortened(header, ranked, rows, left=(1, 2, 3), name=2)


def census(function: Any, *args: Any, device: str | None = None, **kwargs: Any) -> Census:
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
    if device is None:
        capability = min((each.capability or (0, 0) for each in devices.gpus()), default=None)
    else:
        capability = tuple(map(int, optimize.compute_capability(device).split(".")))
    model = function if isinstance(function, tf.keras.Model) else None
    if not callable(function) or (model is not None and (len(args) != 1 or kwargs)):
        raise TypeError(
            "Expected a model of `tf.keras` and a batch, which is x, or a tuple (x, y) or "
            "(x, y, sample_weight); or a function and its arguments. Received: "
            f"{function!r}, {len(args)} positional and {len(kwargs)} other arguments"
        )
    layers = origins.Layers(model)
    as_on_gpu = slow.switched_off() if device is not None else contextlib.nullcontext()
    with Progress("census", parts=2) as progress, as_on_gpu:
        progress.begin("tracing")
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
    is_compiled = rewrites.is_compiled(concrete) or getattr(model, "jit_compile", False) is True
    more, sending = [*_not_counted(operations)], None
    if capability is not None:
        said, sending = _on_gpu(nodes, capability, model is not None)
        more += said
        if is_compiled:
            sending = None
        elif sending.is_bound:
            host, of_gpu = (f"{1000 * each:.2g} ms" for each in sending[1:3])
            more.append(
                f"It is bound by what the host sends: {sending.operations:,} operations one by "
                f"one, about {host} on a slow host, for about {of_gpu} of the GPU (estimates). XLA "
                f"sends what it compiles in a few calls: {', or '.join(sending.helps) or 'not it'}."
            )
    if not is_compiled and (dtype := passes.enabled_dtype()) is not None:
        more.append(
            f"The graph rewrite is on, and makes more of it {dtype}: "
            "keras_mp.graph_rewrite.report tells."
        )
    return Census(name, operations, device, sending, tuple(more))


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
        made = node.made
        if not node.dtype or made.type in _NO_COMPUTATIONS:
            continue
        # The backward pass of a function is a function without the scope of its layer, but it takes
        # what the function in the layer has kept for it.
        call = known.get(node.path.partition("/")[0], made)
        kept = (each.op for each in call.inputs if call.type in CALLS)
        paths = [node.path, *(each.name for each in kept if each.type in CALLS)]
        path = next(filter(layers.name, paths), node.path)
        row = cast_policy.ROWS.get(made.type) if is_autocast else None
        is_decided = row is not None and row.policy in (cast_policy.DENY, cast_policy.PROMOTE)
        if row is not None and (is_decided or node.dtype in LOW_PRECISION_NAMES):
            why = f"autocast: {row.why}"
        else:
            why = _why(node, path, layers, is_model)
        why += " (a loop, counted once)" * node.is_least
        about = node.dtype, layers.name(path) or "outside of layers", origins.line_of(made), why
        counts = node.turns, (node.work or 0) * node.turns, node.work is not None, node.is_least
        yield Operation(made.name, made.type, *about, *counts)


def _why(node: Node, path: str, layers: origins.Layers, is_model: bool) -> str:
    """Returns why an operation computes in its dtype, where no region decides."""
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


def _not_counted(operations: Sequence[Operation]) -> Iterator[str]:
    """Says of which products the work is not known."""
    loops = [each.layer for each in operations if each.work and each.is_least]
    unknown = [each.layer for each in operations if not each.is_known]
    for layers, said in (
        (loops, "The number of iterations of some loops is unknown. They are counted once"),
        (unknown, "The shapes of some products are unknown. They are not counted"),
    ):
        if names := [*dict.fromkeys(layers)]:
            some = ", ".join(names[:3])
            yield f"{said}: {some} (products: {len(layers)}, layers: {len(names)})."


def _on_gpu(
    nodes: Sequence[Node], capability: tuple[int, ...], is_model: bool
) -> tuple[list[str], Sending]:
    """Returns what tensor cores take of a graph, in sentences, and what a host sends.

    Args:
        nodes: of the graph.
        capability: two ints, that of the GPU.
        is_model: whether it is the step of a model.
    """
    speed, moved = next(of for at, of in _GPUS.items() if capability >= at)
    taken = {dtype for dtype, at in devices.COMPUTE_CAPABILITY.items() if capability >= at}
    work, odd, sent, seconds = Counter[str](), Counter[str](), 0, 0.0
    for node in nodes:
        # An empty batch has products without work.
        of_node, sizes = node.work or 0, multiplied_sizes(node.made) if node.work else ()
        work[node.dtype] += of_node * node.turns
        if node.dtype in taken and any(size % _MULTIPLE for size in sizes):
            odd[" x ".join(map(str, sizes))] += of_node * node.turns
        if node.dtype and node.made.type not in _NOT_SENT:
            sent += 0 if node.is_compiled else node.turns
            tensors = (*node.made.inputs, *node.made.outputs)
            numbers = sum(tensor.shape.num_elements() or 0 for tensor in tensors)
            moving = numbers * tf.as_dtype(node.dtype).size / moved
            slower = 1 if node.dtype in taken else _WITHOUT_TENSOR_CORES
            seconds += node.turns * max(of_node * slower / speed, moving)
    helps = ["model.compile(..., jit_compile=True)"] * is_model
    helps.append("tf.function(step, jit_compile=True)")
    # XLA has no kernel for the recurrent layers of cuDNN.
    if any(node.made.type.startswith("Cudnn") for node in nodes):
        helps = []
    host = sent * _SECONDS_OF_AN_OPERATION
    is_bound = sent >= _LEAST_OPERATIONS and host > seconds
    total, more = sum(work.values()), list[str]()
    if total:
        of_taken = sum(work[dtype] for dtype in taken) / total
        more.append(f"Tensor cores take {of_taken:.0%} of the multiplications.")
    has_tensor_float_32 = tf.config.experimental.tensor_float_32_execution_enabled()
    if work["float32"] and capability >= (8, 0) and has_tensor_float_32:
        more.append(
            f"They also take the {work['float32'] / total:.0%} in float32, as TensorFloat-32, with "
            "as many digits as float16 "
            "(tf.config.experimental.enable_tensor_float_32_execution(False) ends that)."
        )
    if odd:
        more.append(
            f"{sum(odd.values()) / total:.0%} of the multiplications have sizes that are no "
            f"multiples of {_MULTIPLE}: {', '.join([*odd][:3])}. Round units, filters, or the size "
            "of the batch up."
        )
    return more, Sending(sent, host, seconds, tuple(helps), is_bound)

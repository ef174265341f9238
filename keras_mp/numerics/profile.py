"""Why is a model not faster? Its dtypes, the time of a step by class, and changes, tried.

The dtypes that a traced function computes in, the reasons, and what a GPU takes of it are a census:
nothing runs, and all of it is read from the graph. TensorFlow sends the operations of a graph to a
GPU one by one. How long that takes, and how long the GPU takes to compute, are estimates, from
steps on one H200 (docs/speed.md); they tell orders of magnitude apart. Code that XLA compiles is
sent by XLA, which takes a tenth of the time.
"""

import contextlib
import dataclasses
import functools
import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp import hardware, keras_api
from keras_mp.grappler import optimize, passes
from keras_mp.grappler import report as rewrites
from keras_mp.hardware import devices, turns
from keras_mp.kernels import cast_policy, lower_precision, slow
from keras_mp.models import layer_paths
from keras_mp.numerics import batches, origins, own_thread, run
from keras_mp.numerics.graph import CALLS, COUNTED, Node, multiplied_sizes, nodes_of
from keras_mp.numerics.results import Result
from keras_mp.numerics.traced_step import name_of_step, trace, trains
from keras_mp.policy import Policy
from keras_mp.support import messages, op_table, text_tables, validation
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.progress import Progress
from keras_mp.wrappers.inner_optimizers import chain

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

_WARM_UP, PROFILED = 2, 3
# A smaller share cannot be told from noise.
_LEAST = 0.03

# The name scope of what belongs to the class "update".
UPDATE = "update_of_weights"

# The profiler's name for a run of code that XLA has compiled.
XLA = "ExecuteAsyncOnStream"

_OPS = {
    "products": COUNTED | op_table.ops("padded convolutions", "sparse matrix products"),
    "casts": op_table.ops("casts"),
    "reductions": op_table.ops(
        *("sums over axes", "running sums", "sums of tensors", "gradients of biases", "norms"),
        *("products over axes", "maxima over axes", "softmax", "log softmax", "cross entropies"),
        "batch normalization",
    ),
    "loops": op_table.ops("loops", "lists of a loop", "empty tensors", "frames")
    | op_table.ops("entries of frames", "exits of frames"),
    "elementwise": op_table.ops(
        *("additions", "multiplications", "squared differences", "squares", "powers", "divisions"),
        *("divisions without NaN", "reciprocals", "roots", "exponentials", "logarithms"),
        *("maxima of two", "selections", "signs", "roundings", "comparisons", "relu"),
        *("leaky relu", "softsign", "sigmoids", "exponential units", "softplus"),
    ),
}
CLASSES = (*_OPS, "update", "compiled", "rest")


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

    >>> from keras_mp.numerics.profile import Operation
    >>> Operation("a", "Exp", "float32", "", None, "", 1, 0, is_known=True, is_least=False).op
    'Exp'
    """

    name: str
    op: str
    dtype: str
    layer: str
    line: messages.Line | None
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

    >>> from keras_mp.numerics.profile import Sending
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

    >>> profile = keras_mp.numerics.profile(tf.matmul, tf.ones([2, 3]), tf.ones([3, 4]))
    >>> profile.census.work()
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
        products = [each for each in self.operations if each.work]
        alike = lambda each: (each.dtype, each.why, each.layer if rows is None else "")  # noqa: E731
        groups = text_tables.merged(products, lambda each: each.layer, alike)
        sums = [(sum(each.work for each in group), name, group[0]) for name, group in groups]
        sums.sort(key=lambda each: -each[0])
        cells = [(f"{work_of / total:.1%}", e.dtype, name, e.why) for work_of, name, e in sums]
        table, shares = [("", "operations", "products", "GFLOP")], list[str]()
        for dtype in dict.fromkeys([*work, *(each.dtype for each in self.operations)]):
            of = [each for each in self.operations if each.dtype == dtype]
            turns, amount = sum(each.turns for each in of), work.get(dtype, 0)
            of_products = sum(each.turns for each in of if each.work)
            table.append((dtype, f"{turns:,}", f"{of_products:,}", f"{amount / 1e9:.3g}"))
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
    >>> from keras_mp.numerics.profile import census
    >>> census(model, tf.ones([2, 8])).work()
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
            is_concrete = isinstance(function, tf.types.experimental.ConcreteFunction)
            is_of_tf = is_concrete or hasattr(function, "get_concrete_function")
            made: Any = function if is_of_tf else tf.function(function)
            concrete = made if is_concrete else made.get_concrete_function(*args, **kwargs)
            name = getattr(function, "__name__", None) or concrete.name.decode()
        progress.begin("reading the graph")
        nodes = [*nodes_of(concrete.graph)]
        operations = tuple(_read(nodes, layers, model is not None))
    is_compiled = rewrites.is_compiled(concrete) or getattr(model, "jit_compile", False) is True
    more, sending = [*_not_counted(operations)], None
    if capability is not None:
        said, sending = _on_gpu(nodes, capability, model is not None, is_compiled)
        more += said
    if not is_compiled and (dtype := passes.enabled_dtype()) is not None:
        more.append(
            f"The graph rewrite is on, and makes more of it {dtype}: see graph_rewrite.report."
        )
    return Census(name, operations, device, sending, tuple(more))


def _read(nodes: Sequence[Node], layers: origins.Layers, is_model: bool) -> Iterator[Operation]:
    """Yields the operations that compute, with what is known of the function that they come from.

    Args:
        nodes: those of the function, and of what it calls.
        layers: `Layers` of the model whose step it is, which have seen their calls.
        is_model: whether it is one of a model.
    """
    known = {node.path: node.made for node in nodes}
    is_autocast = any(path.rpartition("/")[2].startswith(lower_precision.NAME) for path in known)
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
            yield f"{said}: {', '.join(names[:3])} (products: {len(layers)}, layers: {len(names)})."


def _on_gpu(
    nodes: Sequence[Node], capability: tuple[int, ...], is_model: bool, is_compiled: bool
) -> tuple[list[str], Sending | None]:
    """Returns what tensor cores take of a graph, in sentences, and what a host sends.

    Args:
        nodes: of the graph.
        capability: two ints, that of the GPU.
        is_model: whether it is the step of a model.
        is_compiled: whether XLA compiles it as a whole, so that nothing is sent.
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
    # XLA has no kernel for the recurrent layers of cuDNN.
    has_cudnn = any(node.made.type.startswith("Cudnn") for node in nodes)
    helps = ["model.compile(..., jit_compile=True)", "tf.function(step, jit_compile=True)"]
    helps = [] if has_cudnn else helps[not is_model :]
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
    host = sent * _SECONDS_OF_AN_OPERATION
    is_bound = sent >= _LEAST_OPERATIONS and host > seconds and not is_compiled
    if is_bound:
        more.append(
            f"It is bound by what the host sends: {sent:,} operations one by one, about "
            f"{1000 * host:.2g} ms on a slow host, for about {1000 * seconds:.2g} ms of the GPU "
            "(estimates). XLA sends what it compiles in a few calls: "
            f"{', or '.join(helps) or 'not it'}."
        )
    return more, None if is_compiled else Sending(sent, host, seconds, tuple(helps), is_bound)


class Change(NamedTuple):
    """A change that would make a function faster.

    Attributes:
        what: str. What to change.
        seconds: float. What a call would gain.

    Example:

    >>> from keras_mp.numerics.profile import Change
    >>> Change("compute 'dense' in bfloat16", 0.001).seconds
    0.001
    """

    what: str
    seconds: float


@dataclasses.dataclass(frozen=True, repr=False)
class StepTimes(Result):
    """The time of a step, and what saves time. `str` of it, and `print`, give a table.

    Attributes:
        name: str. The name of the model.
        seconds: float. Median time of a step.
        classes: dict of classes of operations, and the seconds that all threads together spend on
            each in a step. "update" is that of the weights; "compiled" is what XLA has compiled,
            whatever it is.
        tried: dict of the changes that were tried, each a line of code, and the median time of a
            step with it; or, where a change cannot be made, the error as a str.
        changes: tuple of at most three `Change`s, that which saves most first. Each was tried
            alone.

    Example:

    >>> from keras_mp.numerics.profile import StepTimes
    >>> print(StepTimes("model", 0.002, {"products": 0.003, "casts": 0.001}, {}, ()))
    A step of 'model' takes 2 ms. Operations by class, in all threads together:
    products  3 ms  75%
    casts     1 ms  25%
    What saves 3% or more, each tried alone on a copy of the model:
      nothing
    """

    name: str
    seconds: float
    classes: Mapping[str, float]
    tried: Mapping[str, float | str]
    changes: tuple[Change, ...]

    def _lines(self, rows: int | None) -> Iterator[str]:
        ms = _milliseconds(self.seconds)
        yield f"A step of {self.name!r} takes {ms}. Operations by class, in all threads together:"
        total = sum(self.classes.values())
        classes = sorted(self.classes.items(), key=lambda item: -item[1])
        cells = [(name, _milliseconds(e), f"{e / total:.0%}") for name, e in classes if e]
        yield from text_tables.aligned(cells)
        yield f"What saves {_LEAST:.0%} or more, each tried alone on a copy of the model:"
        gains = [f"  {_milliseconds(each.seconds)}: {each.what}" for each in self.changes]
        failed = ((what, each) for what, each in self.tried.items() if isinstance(each, str))
        yield from gains or ["  nothing"]
        yield from (f"Could not be tried: {what} ({error})" for what, error in failed)


@dataclasses.dataclass(frozen=True, repr=False)
class Profile(Result):
    """The results of `profile`. `str` of it, and `print`, give a text.

    Attributes:
        census: `Census`, what computes in which dtype, and why.
        times: `StepTimes`, the time of a step, and the changes that save most; None for what has no
            training step, or for another device.

    Example:

    >>> profile = keras_mp.numerics.profile(tf.matmul, tf.ones([2, 3]), tf.ones([3, 4]))
    >>> profile.census.work(), profile.times
    ({'float32': 48}, None)
    """

    census: Census
    times: StepTimes | None

    def _lines(self, rows: int | None) -> Iterator[str]:
        if self.times is not None:
            yield f"{self.times}\n"
        yield self.census.to_text(rows)


def profile(
    function: Any, *args: Any, device: str | None = None, steps: int = 9, **kwargs: Any
) -> Profile:
    """Says what a model computes in which dtype and why, where its time goes, and what saves time.

    Args:
        function: a model of `tf.keras`; or a `tf.function`, a concrete function or another
            callable, which is not timed.
        *args: of a model, a batch as `fit` takes it. Of a function, its arguments.
        device: str. A GPU and its compute capability, such as "GPU 7.0": how much of it would its
            tensor cores take? Nothing is timed then. Defaults to this machine.
        steps: int. How many steps of each copy of a compiled model are timed; 0 for none, so that
            nothing runs. Defaults to 9.
        **kwargs: more arguments of a function.

    Returns:
        A `Profile`.

    Raises:
        TypeError: `function` cannot be called, or a model comes without a batch, or with a dataset.
        ValueError: the batch does not suit the model, the model cannot be copied, or `device` is no
            GPU.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input([8]), tf.keras.layers.Dense(4)])
    >>> model.compile("sgd", "mse")
    >>> profile = keras_mp.numerics.profile(model, (tf.ones([2, 8]), tf.ones([2, 4])), steps=1)
    >>> profile.times.seconds > 0
    True
    """
    steps = validation.integer("steps", steps, at_least=0)
    counted = census(function, *args, device=device, **kwargs)
    is_timed = steps and not device and isinstance(function, tf.keras.Model) and trains(function)
    return Profile(counted, step_times(function, args[0], steps) if is_timed else None)


def step_times(model: tf.keras.Model, batch: Any, steps: int = 9) -> StepTimes:
    """Measures a training step of a compiled model, and what would make it shorter.

    The model itself is left as it is: copies of it make the steps, in turns. What is tried: the
    policy that `keras_mp.hardware.best_policy` names, or float32 in place of a slow one; float32
    outputs with gradients in 16 bits; a whole step that XLA compiles. Under a strategy of several
    replicas, it is a step of one.

    Args:
        model: a compiled model of `tf.keras` that `convert` takes.
        batch: what `fit` takes for a step: a tuple `(x, y)` or `(x, y, sample_weight)`.
        steps: int. How many steps of each copy are timed. Defaults to 9.

    Returns:
        `StepTimes`.

    Raises:
        TypeError: the batch is None or a dataset.
        ValueError: the model cannot be copied, the batch does not suit it, or `steps` is below 1.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input([8]), tf.keras.layers.Dense(4)])
    >>> model.compile("sgd", "mse")
    >>> from keras_mp.numerics.profile import step_times
    >>> times = step_times(model, (tf.ones([2, 8]), tf.ones([2, 4])), steps=1)
    >>> times.seconds > 0, "model.compile(..., jit_compile=True)" in times.tried
    (True, True)
    """
    validation.integer("steps", steps)
    data = batches.as_fit_takes_it(model, batch)
    candidates = dict(_candidates(model))
    parts, unheard = len(candidates) + 2, own_thread.without_warnings()
    # Messages would be about copies.
    with own_thread.random_numbers(), unheard, Progress("step_times", parts) as progress:
        progress.begin("the model as it is")
        variants = {"": _step_of(model, data)}
        tried: dict[str, float | str] = {}
        for what, change in candidates.items():
            progress.begin(what)
            try:
                variants[what] = _step_of(model, data, **change)
            except Exception as error:  # A user's model may raise anything under another policy.
                tried[what] = batches.reason(error)
        progress.begin("taking turns")
        seconds = turns.medians(turns.take(variants, steps))
        classes = seconds_by_class(variants[""])
    now = seconds.pop("")
    gains = [Change(what, now - each) for what, each in seconds.items()]
    changes = sorted((c for c in gains if c.seconds >= _LEAST * now), key=lambda c: -c.seconds)
    return StepTimes(model.name, now, classes, {**tried, **seconds}, tuple(changes[:3]))


def _candidates(model: tf.keras.Model) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields changes to try, each a line of code and the arguments of `_step_of`."""
    layers = [layer for layer in keras_api.flatten_layers(model) if layer.weights]
    dtypes = {layer.compute_dtype for layer in layers} | {model.compute_dtype}
    now = next((f"mixed_{name}" for name in LOW_PRECISION_NAMES if name in dtypes), "float32")
    for policy in dict.fromkeys((hardware.best_policy(), "float32")):
        if policy != now:
            what = f'keras_mp.set_global_policy("{policy}"), before the model is made'
            yield what, {"policies": policy}
    heads = set(map(id, keras_api.output_layers(model) or []))
    for path, layer in layer_paths.layers_by_path(model).items():
        is_wide = layer.weights and layer.dtype_policy.name == "float32"
        if id(layer) in heads and is_wide and now != "float32":
            code = f'dtype=keras_mp.Policy("{now}", output_dtype="float32")'
            policies = {path: Policy(now, output_dtype="float32")}
            yield f"{code}, of layer {path!r}", {"policies": policies}
    if model.jit_compile is not True:
        yield "model.compile(..., jit_compile=True)", {"compiles": True}


def _step_of(
    model: tf.keras.Model, data: batches.Batch, policies: Any = None, compiles: bool = False
) -> Callable[[], object]:
    """Returns a function that makes a step with a copy of the model, with a change.

    Args:
        model: what is copied.
        data: Batch.
        policies: what `convert` takes; None for those that the layers have.
        compiles: bool. Whether XLA compiles the whole step.
    """
    is_compiled = compiles or model.jit_compile is True
    copy: Any = run.compiled(model, policies or {}, jit_compile=is_compiled)
    *_, optimizer = chain(copy.optimizer)
    # The name scope of its update, by which the profiler tells that.
    vars(optimizer).update(name=UPDATE, _name=UPDATE)
    step = functools.partial(copy.train_on_batch, data.x, data.y, sample_weight=data.sample_weight)
    for _ in range(_WARM_UP):
        step()
    return step


def _milliseconds(seconds: float) -> str:
    """Returns a time in words, such as "2.5 ms"."""
    return f"{seconds * 1000:.3g} ms"


def class_of(event: str) -> str | None:
    """Returns the class of an event of the profiler, one of `CLASSES`; None if it has none.

    Args:
        event: str. TensorFlow calls that of an operation "name of the node:type of the operation".
    """
    # Without the beginning of those of oneDNN and of grappler.
    found = re.fullmatch(r"(.*[^:]):(?:_(?:Mkl(?:Native)?)?)?(\w+)", event)
    if found is None:
        return "compiled" if event.endswith(f"::{XLA}") else None
    node, op = found.groups()
    if UPDATE in node:
        return "update"
    known = {op, op.removeprefix("Fused"), re.sub("Grad(?=(V[23])?$)", "", op)}
    return next((name for name, ops in _OPS.items() if known & ops), "rest")


def seconds_by_class(step: Callable[[], object]) -> dict[str, float]:
    """Returns the seconds that a step spends on each class of operations, a mean of some steps."""
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace  # pyright: ignore

    seconds: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            for _ in range(PROFILED):
                step()
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        space = XSpace.FromString(file.read_bytes())
    events = ((plane, e) for plane in space.planes for line in plane.lines for e in line.events)
    for plane, event in events:
        if (found := class_of(plane.event_metadata[event.metadata_id].name)) is not None:
            seconds[found] += event.duration_ps / 1e12 / PROFILED
    return seconds

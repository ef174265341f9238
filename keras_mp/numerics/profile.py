"""Why is a model not faster? Its dtypes, the time of a step by class, and changes, tried."""

import dataclasses
import functools
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp import hardware, keras_api
from keras_mp.hardware import turns
from keras_mp.models import layer_paths
from keras_mp.numerics import batches, graph, own_thread, run
from keras_mp.numerics.census import Census, census
from keras_mp.numerics.results import Result
from keras_mp.numerics.traced_step import trains
from keras_mp.policy import Policy
from keras_mp.support import messages, op_table, text_tables, validation
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.support.progress import Progress
from keras_mp.wrappers.inner_optimizers import chain

_WARM_UP, PROFILED = 2, 3
# A smaller share cannot be told from noise.
_LEAST = 0.03

# The name scope of what belongs to the class "update".
UPDATE = "update_of_weights"

# The profiler's name for a run of code that XLA has compiled.
XLA = "ExecuteAsyncOnStream"

_OPS = {
    "products": graph.COUNTED | op_table.ops("padded convolutions", "sparse matrix products"),
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
    A step of 'model' takes 2 ms. Its operations take, by class, in all threads together:
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
        yield (
            f"A step of {self.name!r} takes {_milliseconds(self.seconds)}. Its operations take, by "
            "class, in all threads together:"
        )
        total = sum(self.classes.values())
        classes = sorted(self.classes.items(), key=lambda item: -item[1])
        yield from text_tables.aligned(
            [(name, _milliseconds(each), f"{each / total:.0%}") for name, each in classes if each]
        )
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
    is_model = isinstance(function, tf.keras.Model) and trains(function)
    is_timed = is_model and device is None and steps > 0
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
    with (
        own_thread.random_numbers(),
        Progress("step_times", parts=len(candidates) + 2) as progress,
        messages.unheard(),  # They would be about run.
    ):
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
    if event.endswith(f"::{XLA}"):
        return "compiled"
    node, _, op = event.rpartition(":")
    if not node or node.endswith(":") or not re.fullmatch(r"\w+", op):
        return None
    if UPDATE in node:
        return "update"
    op = re.sub("^_(Mkl(Native)?)?", "", op)  # those of oneDNN and of grappler
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
    for plane in space.planes:
        for event in (event for line in plane.lines for event in line.events):
            found = class_of(plane.event_metadata[event.metadata_id].name)
            if found is not None:
                seconds[found] += event.duration_ps / 1e12 / PROFILED
    return seconds

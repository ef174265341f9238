"""One run, in eager, of a model or a single layer, forwards and backwards.

What it is made of is the same for all tools: a copy under a policy, the loss that a model is
trained with, its loss scale, noise, and the variables that are put back. A `Run` has the calls of
layers, with what went in, what came out, and the gradients, all of it on the device. The method
`call` of each layer is watched: its arguments have been cast by then.
"""

import bisect
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import numpy as np
import tensorflow as tf

from keras_mp import keras_api, losses
from keras_mp.conversion import convert
from keras_mp.layer_calls import layer_observers, model_outputs
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.models.layer_paths import layers_by_path, native_variable, variables_by_path
from keras_mp.numerics import own_thread, records
from keras_mp.numerics.batches import Batch, Structure
from keras_mp.numerics.records import UNIT_ROUNDOFF, Distance, Noise, Quantity
from keras_mp.step.schedule import INITIAL_LOSS_SCALE
from keras_mp.support import attributes, marks

LOSS = "loss"

Change = Callable[[tf.Tensor], tf.Tensor]

# Gradients of outputs.
Upstream = Sequence[tf.Tensor | None]

# A loss of `tf.keras`, by name or not, or a function of labels and predictions.
GivenLoss = str | tf.keras.losses.Loss | Callable[..., tf.Tensor]


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer or of a loss: what went in, and what came out.

    Attributes:
        path: str. The names of the layers from below the model to this one; of the model its name.
        kind: str. The class of the layer, or "loss".
        layer: the layer, or what else was called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        outputs: list of the floating-point tensors that it returned.
        inside: list of Call, those that were made inside of it.
        numbers: list of the random numbers that were drawn in it.
        gradients: list of the gradients of the outputs, multiplied by the loss scale; None where
            there is none. Empty until a backward pass has told.
        trained_through: set of the ids of those arguments whose gradients training computes, since
            trainable weights lie before them. Empty until a backward pass has told.
        is_widened: whether the model has computed its outputs in float32, to return them.
        quantities: dict of what was measured of its tensors, by side ("forward" or "backward") and
            name, such as "output 0" or "kernel". Empty until `measure` is called.
    """

    path: str
    kind: str
    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[tf.Tensor]
    inside: "list[Call]"
    numbers: list[tf.Tensor]
    gradients: list[tf.Tensor | None] = dataclasses.field(default_factory=list)
    trained_through: set[int] = dataclasses.field(default_factory=set)
    is_widened: bool = False
    quantities: dict[tuple[str, str], Quantity] = dataclasses.field(default_factory=dict)

    @property
    def inputs(self) -> list[tf.Tensor]:
        """The floating-point tensors among its arguments."""
        return floating((self.args, self.kwargs))

    @functools.cached_property
    def dtype(self) -> str:
        """The coarsest of the dtypes of inputs and outputs and of the compute dtypes.

        A model that was loaded may have another policy than the layers inside of it.
        """
        dtypes = [value.dtype.name for value in (*self.inputs, *self.outputs)]
        if isinstance(self.layer, tf.keras.layers.Layer):
            dtypes += [layer.compute_dtype for layer in keras_api.flatten_layers(self.layer)]
        known = [dtype for dtype in dtypes if dtype in UNIT_ROUNDOFF]
        return max(known, key=UNIT_ROUNDOFF.__getitem__, default="float32")

    def measure(self, gradients: Mapping[str, tf.Tensor], scale: float = 1.0) -> "Call":
        """Measures its outputs, and gradients by name, which are divided by a scale."""
        outputs = {("forward", f"output {i}"): Quantity.of(e) for i, e in enumerate(self.outputs)}
        backward = {("backward", name): Quantity.of(e, scale) for name, e in gradients.items()}
        self.quantities = outputs | backward
        return self

    def distance(self, other: "Call", side: str) -> Distance | None:
        """Measures how far its tensors are from those of the reference: the one furthest off.

        Args:
            other: the same call in the reference, of which it is known what rounding explains.
            side: "forward" or "backward".
        """
        unit = max(UNIT_ROUNDOFF[self.dtype], UNIT_ROUNDOFF[other.dtype])
        found = []
        for key, exact in other.quantities.items():
            if key[0] == side and key in self.quantities:
                found.append(self.quantities[key].distance(exact, unit))
            # An output may have no gradient where its float32 face is used.
            elif key[0] == side and not key[1].startswith("output") and exact.size:
                found.append(Distance(math.inf, math.inf))
        return Distance.worst(found)


_Calls = Sequence[Call]


def explain(calls: _Calls, again: Callable[[Noise], _Calls], unit: float) -> _Calls:
    """Finds out what rounding explains: the largest effect of a few runs with noise.

    Args:
        calls: those of a run, measured.
        again: makes and measures them with noise.
        unit: float. The unit roundoff.
    """
    for seed in range(records.NOISY_RUNS):
        moved = again(Noise(unit, seed))
        is_same = [each.path for each in calls] == [each.path for each in moved]
        for call, other in zip(calls, moved if is_same else ()):
            for key, quantity in call.quantities.items():
                found = other.quantities.get(key)
                # A tensor that its layer returns and uses has no gradient once noise replaces it.
                distance = records.apart(found.values, quantity.values) if found else math.inf
                quantity.explained = max(quantity.explained, distance)
    known = (each for call in calls for each in call.quantities.items())
    gradients = [quantity for (side, _), quantity in known if side == "backward"]
    largest = max((quantity.size for quantity in gradients), default=0.0)
    for quantity in gradients:
        quantity.beside = largest
    return calls


class Watch(layer_observers.LayerObserver):
    """Watches the calls of layers, and the random numbers that are drawn meanwhile.

    TensorFlow draws other numbers in float16 than in float32 from the same seed. So the numbers of
    the first run are kept, for the other runs. Let the narrowest dtype run first: wider dtypes hold
    its numbers exactly.

    Attributes:
        calls: list of Call, each when it ends: those inside of a layer come before its own.

    Args:
        numbers: list of the random numbers that were drawn, in their order. Runs that are to be
            compared share it.
        change: called with each floating-point tensor that a layer returns; the result takes its
            place. None changes nothing.
    """

    def __init__(self, numbers: list[tf.Tensor], change: Change | None) -> None:
        self.calls: list[Call] = []
        self._numbers, self._change, self._drawn = numbers, change, 0
        # Of each call that has begun, how many calls and numbers there were before it.
        self._begun: dict[int, tuple[int, int]] = {}

    def run(self, path: str, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function, and notes that as the call of a layer of that name."""
        return layer_observers.observed(self, path, function, function)(*args)

    def inputs(self, call: layer_observers.LayerCall) -> None:
        """Begins a call."""
        self._begun[id(call)] = len(self.calls), self._drawn

    def outputs(self, call: layer_observers.LayerCall, outputs: Any) -> Any:
        """Notes a call, and changes what it returns."""
        first, drawn = self._begun[id(call)]
        if self._change is not None:
            outputs = map_floating(self._change, outputs)
        path, layer, args, kwargs = call
        if model_outputs.is_made_again():
            before = next(each for each in reversed(self.calls) if each.layer is layer)
            self.replace(zip(before.outputs, floating(outputs)))
            return outputs
        kind = LOSS if path == LOSS else type(layer).__name__
        inside, numbers = self.calls[first:], self._numbers[drawn : self._drawn]
        seen = Call(path, kind, layer, args, kwargs, floating(outputs), inside, numbers)
        seen.is_widened = model_outputs.is_last(layer)
        self.calls.append(seen)
        return outputs

    def replace(self, pairs: Iterable[tuple[tf.Tensor, tf.Tensor]]) -> None:
        """Puts what is made for a model to return in the place of what layers have returned."""
        places = {id(returned): other for returned, other in pairs}
        for call in self.calls:
            call.is_widened |= any(id(value) in places for value in call.outputs)
            call.outputs = [places.get(id(value), value) for value in call.outputs]

    @contextlib.contextmanager
    def over(self, root: Any) -> Iterator[None]:
        """Watches a model or layer, with the layers inside of it, and the numbers that are drawn.

        Args:
            root: the model or layer. If it has no `call`, only the numbers are watched.
        """
        layers = _named(root).values() if hasattr(root, "call") else ()
        taking = attributes.replaced(own_thread.thread, "take", self._take)
        with layer_observers.attached(self, layers), taking, own_thread.eager_functions():
            yield

    def _take(self, own: tf.Tensor) -> tf.Tensor:
        if self._drawn == len(self._numbers):
            self._numbers.append(own)
        drawn, self._drawn = self._numbers[self._drawn], self._drawn + 1
        return tf.cast(drawn, own.dtype) if drawn.shape == own.shape else own


def floating(structure: Any) -> list[tf.Tensor]:
    """Returns the floating-point tensors in a structure, each once."""
    return [*{id(e): e for e in tf.nest.flatten(structure) if is_floating(e)}.values()]


def map_floating(change: Change, structure: Any) -> Any:
    """Returns the structure, with its floating-point tensors changed."""
    return tf.nest.map_structure(lambda e: change(e) if is_floating(e) else e, structure)


def is_floating(value: object) -> TypeGuard[tf.Tensor]:
    """Whether a value is a floating-point tensor."""
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def _named(root: Any) -> dict[int, tuple[str, Any]]:
    """Returns a model or layer, and the layers inside of it, with their paths, each by its id."""
    is_layer = isinstance(root, tf.keras.layers.Layer)
    layers = {"": root, **(layers_by_path(root) if is_layer else {})}
    found = {id(layer): (path or root.name, layer) for path, layer in layers.items()}
    for path, layer in layers.items():
        # A functional model of Keras 3 has operations that are no layers.
        for each in getattr(layer, "operations", ()):
            found.setdefault(id(each), (f"{path}/{each.name}".strip("/"), each))
    return found


def named_weights(layer: Any) -> dict[str, Any]:
    """Returns the trainable weights of a layer or model, by names that a copy of it has as well."""
    return {f"weight {i}": each for i, each in enumerate(getattr(layer, "trainable_weights", ()))}


def compiled(model: tf.keras.Model, policy: Any, optimizer: Any = None, **changes: Any) -> Any:
    """Returns a copy under a policy, compiled as the model is, but for metrics and changes."""
    copy, own = convert(model, policy), getattr(model, "optimizer", None)
    if own is not None:
        weights = (model.get_compile_config() or {}).get("loss_weights")
        how = {"loss": getattr(model, "loss", None), "loss_weights": weights, **changes}
        new = optimizer or keras_api.deserialize_optimizer(keras_api.serialize_optimizer(own))
        copy.compile(new, **how)
    return copy


def signed_mean(prediction: Structure) -> tf.Tensor:
    """Returns the mean of the outputs with random signs, so that they do not cancel."""
    random, outputs = np.random.default_rng(0), floating(prediction)
    signs = (random.choice([-1.0, 1.0], each.numpy().shape) for each in outputs)
    pairs = zip((tf.cast(each, tf.float32) for each in outputs), signs)
    return tf.add_n([tf.reduce_mean(output * sign) for output, sign in pairs])


def first_scale(model: tf.keras.Model) -> float:
    """Returns the loss scale with which a model would go on, or begin, to train."""
    policies = [model.dtype_policy] * bool(getattr(model.dtype_policy, "scales_loss", False))
    for owner in (*wrappers_among(getattr(model, "optimizer", None)), *policies):
        return float(owner.loss_scale())
    dtypes = {layer.compute_dtype for layer in keras_api.flatten_layers(model)}
    return INITIAL_LOSS_SCALE if "float16" in dtypes else 1.0


class Run(NamedTuple):
    """The calls and gradients of one run.

    Attributes:
        model: what was run.
        calls: list of Call, in the order in which they ended; the last one is that of the
            loss, unless a function of the user computes it, or that of a layer that ran alone.
        gradients: dict, of each trainable weight its gradient, multiplied by the loss scale, by
            name; those of the arguments of a function or layer are among them.
        loss: float; NaN for a layer.
        loss_scale: float.
    """

    model: Any
    calls: list[Call]
    gradients: dict[str, tf.Tensor]
    loss: float
    loss_scale: float

    @property
    def dtype(self) -> str:
        """The coarsest dtype of all calls."""
        return max((call.dtype for call in self.calls), key=UNIT_ROUNDOFF.__getitem__)

    def measured(self) -> list[Call]:
        """Measures all calls, with the gradients of the weights of their layers."""
        names = {id(weight): name for name, weight in named_weights(self.model).items()}
        for call in self.calls:
            found = enumerate(call.gradients)
            gradients = {f"output {i}": each for i, each in found if each is not None}
            for weight in getattr(call.layer, "trainable_weights", ()):
                # A layer inside of another one comes first, so its weights are counted there.
                name = names.pop(id(weight), None)
                if name in self.gradients:
                    gradients[name] = self.gradients[name]
            call.measure(gradients, self.loss_scale)
        return self.calls

    @property
    def is_sound(self) -> bool:
        """Whether no gradient overflows, as far as that can be told: the loss does not either."""
        return not math.isfinite(self.loss) or records.are_finite(self.all_gradients())

    def all_gradients(self) -> list[tf.Tensor]:
        """The gradients of outputs and of weights, multiplied by the loss scale."""
        of_outputs = (each for call in self.calls for each in call.gradients if each is not None)
        return [*of_outputs, *self.gradients.values()]

    def gradients_by_path(self) -> dict[str, tf.Tensor | None]:
        """The same gradients of weights by the paths of these, all of them."""
        names = {id(weight): name for name, weight in named_weights(self.model).items()}
        paths = variables_by_path(self.model).items()
        return {path: self.gradients.get(names[id(weight)]) for path, (weight, _) in paths}


# Runs something on a batch, and leaves the calls that it takes to a `Watch`. Returns the loss, or
# outputs with the gradients of these; and by name what else gradients are computed of.
Forward = Callable[[Batch, Watch, tf.GradientTape], Any]


@dataclasses.dataclass(eq=False)
class Runner:
    """Runs something on a batch, as often as needed, and restores the variables that this changes.

    Without labels, or without a loss, the loss of a model is `signed_mean` of its outputs.

    Args:
        model: of `tf.keras`, or a layer, or what else has the variables.
        batch: Batch. Of a function or layer, x is its arguments.
        numbers: list of random numbers. Runners whose runs are to be compared share it.
        original: the model of the user, which may be compiled, for a copy of it.
        loss: as for `check`; None for that of `original`.
        step: as for `check`.
        training: as for `check`.
        forward: Forward, of a layer.
    """

    model: Any
    batch: Batch
    numbers: list[tf.Tensor]
    original: Any = None
    loss: GivenLoss | None = None
    step: Callable[..., Any] | None = None
    training: bool = True
    forward: Forward | None = None

    def run(self, loss_scale: float = 1.0, noise: Noise | None = None) -> Run:
        """Runs it forwards and backwards.

        Args:
            loss_scale: float. The loss is multiplied by it.
            noise: Noise on inputs and weights, and on what each layer returns.
        """
        watch = Watch(self.numbers, noise and noise.both_ways)
        is_built, batch = getattr(self.model, "built", False), self.batch
        tape = tf.GradientTape(watch_accessed_variables=not is_built)
        with own_thread.put_back(self.model), tape:
            if noise is not None:
                noise.move_weights(self.model)
                moved = map_floating(lambda each: marks.copy(each, noise(each)), batch.x)
                batch = batch._replace(x=moved)
            # Training computes no gradients before the first trained weight, so the weights alone
            # are watched. A model that is not built makes them now, and the tape sees that.
            weights = named_weights(self.model).values() if is_built else ()
            tape.watch([native_variable(weight) for weight in weights])
            with watch.over(self.model):
                forward = self.forward or self._with_loss
                targets, upstream, sources = forward(batch, watch, tape)
            loss = math.nan if upstream is not None else float(targets[0])
            upstream = [tf.cast(loss_scale, targets[0].dtype)] if upstream is None else upstream
            outputs = [call.outputs for call in watch.calls]
            inputs = [call.inputs for call in watch.calls]
            of = [outputs, inputs, {**sources, **named_weights(self.model)}]
            of_outputs, of_inputs, of_sources = cast(Any, tape.gradient(targets, of, upstream))
        for call, call.gradients, values, found in zip(watch.calls, of_outputs, inputs, of_inputs):
            call.trained_through = {id(v) for v, g in zip(values, found) if g is not None}
        gradients = {n: tf.convert_to_tensor(g) for n, g in of_sources.items() if g is not None}
        return Run(self.model, watch.calls, gradients, loss, loss_scale)

    def run_as_trained(self, loss_scale: float | None = None) -> Run:
        """Runs a model at a loss scale, which is halved until gradients do not overflow.

        Args:
            loss_scale: the first one; None for that with which the model would begin to train.
        """
        first = first_scale(self.model) if loss_scale is None else loss_scale
        found = self.run(first)

        def is_sound(scale: float) -> bool:
            nonlocal found  # the last one that is sound, or else the last one
            run = self.run(scale)
            found = run if run.is_sound or not found.is_sound else found
            return run.is_sound

        # What overflows at one scale does so at all that are larger.
        halvings = 0 if found.is_sound else math.ceil(math.log2(max(first, 1.0)))
        bisect.bisect([max(1.0, first / 2**i) for i in range(1, halvings + 1)], False, key=is_sound)
        return found

    def _with_loss(self, batch: Batch, watch: Watch, _: tf.GradientTape) -> Any:
        """Calls a model and its loss: a `Forward`."""
        if self.step is not None:
            value = self.step(self.model, batch.x, batch.y)
        else:
            prediction = self.model(batch.x, training=self.training)
            pairs = zip(watch.calls[-1].outputs, floating(prediction))
            watch.replace([each for each in pairs if each[0].dtype != each[1].dtype])
            value = watch.run(LOSS, functools.partial(self._loss_of, batch), prediction)
        if not isinstance(value, tf.Tensor | tf.Variable) or value.shape.rank != 0:
            what = "step" if self.step else LOSS
            raise ValueError(f"Expected `{what}` to return the loss, a scalar. Received: {value!r}")
        return [tf.convert_to_tensor(value)], None, {}

    def _loss_of(self, batch: Batch, prediction: Structure) -> tf.Tensor:
        if batch.y is None or (self.loss is None and not getattr(self.original, "loss", None)):
            return signed_mean(prediction)
        if self.loss is not None:
            weight = () if batch.sample_weight is None else (batch.sample_weight,)
            given: Any = losses.get(self.loss)
            takes_weights = isinstance(given, tf.keras.losses.Loss)
            each = given(batch.y, prediction, *weight * takes_weights)
            if weight and not takes_weights:  # a function, whose values Keras weights
                each = keras_api.LossFunctionWrapper(lambda _, values: values)(each, each, *weight)
            value, added = tf.cast(tf.reduce_mean(each), tf.float32), self.model.losses
        else:
            of = self.model if getattr(self.model, "loss", None) else self.original
            keras_api.build_loss(of, prediction)
            with own_thread.without_metrics(of):
                value = of.compute_loss(batch.x, batch.y, prediction, batch.sample_weight)
            # A reference that is not compiled has losses that its own layers add.
            added = [] if of is self.model else [*self.model.losses, *(-e for e in of.losses)]
        return tf.add_n([value, *(tf.cast(each, value.dtype) for each in added)])


def runners(model: Any, batch: Batch, wide: Any = "float32", **how: Any) -> tuple[Runner, Runner]:
    """Returns what runs a model, and what runs its reference, with the same random numbers.

    Args:
        model: of `tf.keras`, built.
        batch: Batch.
        wide: the reference, a policy for a copy of the model, or a model with the same layers.
        **how: `loss`, `step` and `training`, as for `check`.
    """
    narrow = Runner(model, batch, [], model, **how)
    wide = wide if isinstance(wide, tf.keras.Model) else compiled(model, wide, "sgd")
    return narrow, dataclasses.replace(narrow, model=wide)


def replay(
    call: Call, layer: Any, upstream: Upstream, dtype: str | None = None, noise: Noise | None = None
) -> Run:
    """Makes a call once more, with the same or with another layer, and the same random numbers.

    Args:
        call: what was called, with what.
        layer: what to call now: a layer, an operation of Keras, a loss.
        upstream: the gradients of its outputs.
        dtype: to which inputs in 16 bits are cast; None leaves them.
        noise: Noise on inputs, weights, outputs and upstream gradients.

    Returns:
        The run, whose last call is this one, with the gradients of its inputs and weights.
    """

    def given(value: tf.Tensor) -> tf.Tensor:
        # A new tensor, since a gradient of the old one would be that of the whole run.
        cast = tf.cast(value, dtype) if dtype and value.dtype.size < 4 else tf.identity(value)
        return marks.copy(value, cast)

    def forward(batch: Batch, watch: Watch, tape: tf.GradientTape) -> Any:
        pairs = zip(tf.nest.flatten((call.args, call.kwargs)), tf.nest.flatten(batch.x))
        inputs = [value for was, value in pairs if id(was) in call.trained_through]
        tape.watch(inputs)
        args, kwargs = batch.x
        with model_outputs.as_last(layer) if call.is_widened else contextlib.nullcontext():
            if hasattr(layer, "call"):
                returned = layer(*args, **kwargs)
            else:
                returned = watch.run(call.path, layer, *args)
            if call.is_widened:
                returned = model_outputs.widened(returned, lambda _: True)
        again, moved = watch.calls[-1], noise or tf.identity
        again.path, again.outputs = call.path, floating(returned)
        both = [(o, g) for o, g in zip(again.outputs, upstream) if g is not None]
        both = [(o, g) for o, g in both if g.shape == o.shape]
        pairs = [(o, tf.cast(moved(tf.cast(g, tf.float32)), o.dtype)) for o, g in both]
        sources = {f"input {i}": value for i, value in enumerate(inputs)}
        return [each for each, _ in pairs], [each for _, each in pairs], sources

    batch = Batch(map_floating(given, (call.args, call.kwargs)))
    return Runner(layer, batch, [*call.numbers], forward=forward).run(noise=noise)

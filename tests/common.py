"""What several tests share."""

import functools
import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import tensorflow as tf

import keras_mp
from tests import inside

ROOT = pathlib.Path(__file__).parent.parent
IS_KERAS_3 = tf.keras.Model.__module__.startswith("keras.")
# What Keras takes for an optimizer.
OPTIMIZER_BASES = (
    tf.keras.optimizers.Optimizer,
    *(() if IS_KERAS_3 else (tf.keras.optimizers.legacy.Optimizer,)),
)

_NAMES = ("SGD", "Adam", "RMSprop")
_NAMESPACES = {"new": "optimizers"} if IS_KERAS_3 else {"new": "optimizers", "legacy": "legacy"}

# Every optimizer family of this Keras, with plain and with stateful optimizers.
NAMESPACES = list(_NAMESPACES)
OPTIMIZERS = [f"{family}.{name}" for family in _NAMESPACES for name in _NAMES]
FAMILIES = [f"{family}.SGD" for family in _NAMESPACES]

# How a function is run.
MODES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda function: function,
    "function": tf.function,
    "jit": lambda function: tf.function(function, jit_compile=True),
}

once = pytest.mark.skipif(not IS_KERAS_3, reason="Which Keras it is makes no difference.")


def pairs(*parameters: Iterable[Any]) -> list[tuple]:
    """Cases in which every two values of two parameters meet, instead of all with all.

    For what acts together, two at a time. Where three have to meet, stack `parametrize`.
    """
    lists = [list(values) for values in parameters]

    def met(case: tuple[int, ...]) -> set:
        return set(itertools.combinations(enumerate(case), 2))

    candidates = {case: met(case) for case in itertools.product(*map(range, map(len, lists)))}
    missing, cases = set().union(*candidates.values()), []
    while missing:
        best = max(candidates, key=lambda case: len(candidates[case] & missing))
        missing -= candidates[best]
        cases.append(tuple(values[i] for values, i in zip(lists, best)))
    return cases


def eager_and_graph(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Each name in eager and in a graph, which XLA compiles every other time; with a dtype.

    For what is decided for each name, and where it is traced in one way for both kinds of graphs.
    """
    low = itertools.cycle(["float16", "bfloat16", "bfloat16", "float16"])
    eager = zip(names, itertools.repeat("eager"), itertools.cycle(["bfloat16", "float16"]))
    return [*eager, *zip(names, itertools.cycle(["function", "jit"]), low)]


def unscaled(dtype: str) -> keras_mp.Policy:
    """The mixed policy of a dtype, which scales no loss."""
    return keras_mp.Policy(f"mixed_{dtype}", loss_scale=None)


def made(make: Callable[[], Any], policy: Any = "float32") -> Any:
    """What a function makes under a policy, each time with the same weights."""
    tf.keras.utils.set_random_seed(0)
    with keras_mp.policy_scope(policy):
        return make()


def differentiated(
    function: Callable[[], Any], sources: Any, loss: Callable[[Any], Any] = lambda value: value
) -> tuple[Any, Any]:
    """What a function returns, and the gradients of a loss of it; tensors are watched."""
    with tf.GradientTape() as tape:
        tape.watch([each for each in tf.nest.flatten(sources) if isinstance(each, tf.Tensor)])
        value = function()
        total = loss(value)
    return value, tape.gradient(total, sources)


def run_program(*arguments: Any, folder: pathlib.Path = ROOT, **environment: str) -> str:
    """What a process of Python's prints, which has to end well."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def distance(found: Any, exact: Any) -> float:
    """How far numbers are from others, relative to these, by the norm."""
    found, exact = (np.asarray(tf.convert_to_tensor(each), "float64") for each in (found, exact))
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def distances(found: Iterable[Any], exact: Iterable[Any]) -> list[float]:
    """How far arrays are from others, each by its norm."""
    return [distance(a, b) for a, b in zip(found, exact, strict=True)]


def make_optimizer(name: str, learning_rate: float = 0.01, **kwargs: Any) -> Any:
    """Makes an optimizer from a name of OPTIMIZERS."""
    family, name = name.split(".")
    namespace = tf.keras.optimizers.legacy if family == "legacy" else tf.keras.optimizers
    if name == "SGD":
        kwargs = {"momentum": 0.9, **kwargs}
    return getattr(namespace, name)(learning_rate, **kwargs)


def sgd(name: str, learning_rate: float = 1.0, **kwargs: Any) -> Any:
    """Makes one of FAMILIES without momentum: a step moves a variable by the gradient."""
    return make_optimizer(name, learning_rate, momentum=0.0, **kwargs)


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits: 1797 images as rows of 64 values in [0, 1], and their labels."""
    data = sklearn.datasets.load_digits()
    return (data.data / 16).astype("float32"), data.target.astype("int32")


def classifier(units: int = 16) -> Any:
    """A small model of the digits."""
    layers = [tf.keras.Input((64,)), tf.keras.layers.Dense(units, activation="relu")]
    return tf.keras.Sequential([*layers, tf.keras.layers.Dense(10)])


def compiled_model(*layers: Any, inputs: int = 2, optimizer: Any = "sgd", **how: Any) -> Any:
    """A sequential model of these layers, or of one unit, that is compiled."""
    inside = layers or (tf.keras.layers.Dense(1),)
    model = tf.keras.Sequential([tf.keras.Input([inputs]), *inside])
    model.compile(optimizer, **{"loss": "mse", **how})
    return model


def variables_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer of any family."""
    variables = optimizer.variables
    return variables() if callable(variables) else variables


def state(optimizer: Any) -> list[np.ndarray]:
    """The values of an optimizer's variables."""
    return [value(v) for v in variables_of(optimizer)]


class Mixes(tf.keras.layers.Layer):
    """A layer of Keras that computes a function."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


class Subclassed(tf.keras.Model):
    """A subclassed model that calls layers, one after the other."""

    def __init__(self, *layers, **kwargs):
        super().__init__(**kwargs)
        self.inside = list(layers)

    def call(self, x, training=None):
        for layer in self.inside:
            x = layer(x)
        return x


def ours(caught):
    """The warnings of keras_mp: TensorFlow and numpy warn, too, which depends on their versions."""
    return [each for each in caught if each.category is keras_mp.MixedPrecisionWarning]


def value(variable: Any) -> np.ndarray:
    """The value of a variable, mirrored or not."""
    return tf.convert_to_tensor(variable).numpy()


def assert_all_equal(found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Asserts that each array, tensor or variable is equal to the other one, to the bit."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value(one), value(other))


def slots(model: Any) -> list[np.ndarray]:
    """The slots of a model's optimizer, in an order that does not depend on how it was made."""
    optimizer, variables = model.optimizer, model.trainable_variables
    if hasattr(optimizer, "get_slot_names") and optimizer.get_slot_names():  # a legacy one
        names = optimizer.get_slot_names()
        return [value(optimizer.get_slot(v, name)) for v in variables for name in names]
    return state(optimizer)


def chain(optimizer: Any) -> list[Any]:
    """An optimizer and those inside of it."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer, *([] if inner is None else chain(inner))]


def training_state(model: Any) -> list[np.ndarray]:
    """Everything that a run has: weights, the optimizer's variables, the loss scale's state."""
    optimizer = model.optimizer
    scaling = next(o for o in chain(optimizer) if isinstance(o, keras_mp.LossScaleOptimizer))
    scale = scaling.loss_scale
    own = [scale.loss_scale, scale.num_good_steps, scale.num_bad_steps, scaling.steps_skipped]
    return [value(v) for v in (*model.weights, optimizer.iterations, *optimizer.variables, *own)]


@functools.cache
def mirrored(count: int) -> tf.distribute.MirroredStrategy:
    """A strategy of that many CPU devices, one for all tests.

    TensorFlow numbers collectives from the same start for each strategy, so that two strategies in
    one process would take each other's; its own tests move the start as we do.
    """
    tf.distribute.MirroredStrategy._collective_key_base += 100_000
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])


# oneDNN may be switched off, as it is on older CPUs, or be kept from using what the CPU has.
has_all_of_onednn = inside.uses_onednn() and "ONEDNN_MAX_CPU_ISA" not in os.environ
needs_onednn = pytest.mark.skipif(not has_all_of_onednn, reason="It takes all of oneDNN.")

TAKES_BFLOAT16_REWRITE = inside.takes_rewrite("bfloat16")
needs_bfloat16_rewrite = pytest.mark.skipif(
    not TAKES_BFLOAT16_REWRITE, reason="TensorFlow rewrites no graph to bfloat16 on this CPU."
)

needs_cuda = pytest.mark.skipif(
    not tf.sysconfig.get_build_info().get("is_cuda_build"),
    reason="This TensorFlow was built without CUDA.",
)


@tf.keras.utils.register_keras_serializable("keras_mp_tests")
class Times(tf.keras.layers.Layer):
    """Multiplies in its compute dtype. Keras's `Rescaling` is for raw data, and does not."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        return x * tf.cast(self.factor, x.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


def batches(*pairs):
    """A dataset of batches of inputs and labels, of any number of rows."""
    signature = tuple(tf.TensorSpec([None, pair.shape[1]]) for pair in pairs[0])
    dataset = tf.data.Dataset.from_generator(lambda: iter(pairs), output_signature=signature)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(pairs)))


def placed(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as one of `MODES` runs it."""
    return MODES[mode](function)

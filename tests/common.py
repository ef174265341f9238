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
import tensorflow as tf

import keras_mp
from tests import inside
from tests.models import IS_KERAS_3, value

ROOT = pathlib.Path(__file__).parent.parent

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


class Mixes(tf.keras.layers.Layer):
    """A layer of Keras that computes a function."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


class Weighs(Mixes):
    """A layer of Keras that computes a function of its input and of a weight."""

    def __init__(self, function, shape, initializer="ones", **kwargs):
        super().__init__(function, **kwargs)
        self.weight = self.add_weight(shape=shape, initializer=initializer, name="weight")

    def call(self, x):
        return self.function(x, self.weight)


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


def assert_all_equal(found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Asserts that each array, tensor or variable is equal to the other one, to the bit."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value(one), value(other))


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


def placed(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as one of `MODES` runs it."""
    return MODES[mode](function)

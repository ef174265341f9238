"""On a GPU, a step runs on the GPU. A good one waits no more often than Keras's own."""

import functools

import pytest
import tensorflow as tf

from benchmarks import small_steps
from tests.ci import gpu_waits

# Regions and bfloat16 add casts: compiled or on replicas, they show nothing that others do not.
COMPARED = [
    name
    for name, kind in small_steps.STEPS.items()
    if kind.compared_with
    and not (
        name.endswith((small_steps.XLA, small_steps.REPLICAS))
        and ("autocast" in name or "bfloat16" in name)
    )
]

# How often more than Keras's own the host waits in a step that is skipped.
MORE_IF_SKIPPED = {"LossScaleGradientTape": 2}


@functools.cache
def steps(name):
    kind = small_steps.STEPS[name]
    function = kind.make()
    return [
        gpu_waits.step(function, small_steps.X, skipped=skipped, replicas=kind.replicas)
        for skipped in (False, True)
    ]


@pytest.mark.parametrize("name", COMPARED)
def test_a_step_stays_on_the_gpu(name):
    good, skipped = steps(name)
    keras, keras_skipped = steps(small_steps.STEPS[name].compared_with)
    assert not good.without_gpu_kernel + skipped.without_gpu_kernel
    # Metrics of Keras 2 are computed on the first device, which stands for the host of replicas.
    assert len(good.to_gpu | skipped.to_gpu) <= len(keras.to_gpu | keras_skipped.to_gpu)
    assert len(good.to_host) <= len(keras.to_host)
    more = next((more for start, more in MORE_IF_SKIPPED.items() if name.startswith(start)), 0)
    assert len(skipped.to_host) <= len(keras_skipped.to_host) + more
    # The tape computes gradients in a loop, which the host runs.
    if name.endswith(small_steps.XLA) and "Tape" not in name:
        assert not good.to_host | skipped.to_host


def step(x):
    """A condition on a tensor, what the GPU has no kernel for, and what the program places."""

    def reversed(x):
        return tf.reverse(tf.cast(x, tf.int64), [0])

    x = tf.cond(tf.reduce_sum(x) > 0, lambda: -x, lambda: tf.cast(reversed(x), tf.float32))
    with tf.device("CPU:0"):
        y = tf.sin(x)
    return tf.cos(y), reversed(x)


def test_waits_copies_and_operations_without_a_kernel_are_seen():
    good, skipped = (
        gpu_waits.step(tf.function(step), tf.TensorSpec([3]), skipped=skipped)
        for skipped in (False, True)
    )
    assert good.without_gpu_kernel == {"ReverseV2(int32, int64)": 1}
    assert skipped.without_gpu_kernel == {"ReverseV2(int32, int64)": 2}
    # The condition, what is reversed, and what the program has placed on the CPU; two come back.
    assert len(good.to_host) == 3
    assert len(good.to_gpu) == 2


def test_xla_waits_for_conditions_only_and_says_what_it_cannot_compile():
    def compiled(x):
        reversed = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reverse(x, [0]), lambda: x)
        return reversed, tf.strings.as_string(x)

    tf.function(tf.identity, jit_compile=True)(1.0)  # XLA registers its kernels then.
    function = tf.function(compiled, jit_compile=True)
    found = gpu_waits.step(function, tf.TensorSpec([3], tf.int64))
    assert sorted(found.without_gpu_kernel) == ["AsString(int64)", "Identity(string)"]
    assert len(found.to_host) == 1
    assert not found.to_gpu

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


def test_operations_without_a_gpu_kernel_are_named():
    found = gpu_waits.step(
        tf.function(lambda x: tf.reduce_sum(tf.reverse(x, [0]) * 2)), tf.TensorSpec([3], tf.int64)
    )
    assert list(found.without_gpu_kernel) == ["ReverseV2(int32, int64)"]
    assert len(found.to_gpu) == 1  # What comes back is multiplied on the GPU.


def test_a_condition_on_a_tensor_is_a_wait():
    def step(x):
        is_positive = tf.reduce_sum(x) > 0
        return tf.cond(is_positive, lambda: tf.cond(is_positive, lambda: x, lambda: -x), lambda: x)

    found = gpu_waits.step(tf.function(step), tf.TensorSpec([3]))
    assert len(found.to_host) == 1  # The second one finds the tensor on the host.


def test_a_skipped_step_takes_the_other_branch():
    def step(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: tf.exp(tf.exp(x)))

    good, skipped = (
        gpu_waits.step(tf.function(step), tf.TensorSpec([3]), skipped=skipped)
        for skipped in (False, True)
    )
    assert skipped.operations - good.operations == {"Exp(float32)": 2}


def test_a_case_has_one_wait_and_a_branch_of_its_own_for_a_skipped_step():
    def step(x):
        index = tf.cast(tf.reduce_sum(x), tf.int32)
        return tf.switch_case(index, [lambda: x, lambda: -x, lambda: tf.exp(x)])

    found = gpu_waits.step(tf.function(step), tf.TensorSpec([3]), skipped=True)
    assert len(found.to_host) == 1
    assert "Exp(float32)" in found.operations
    assert "Neg(float32)" not in found.operations


def test_what_the_program_places_on_the_cpu_is_copied_there_and_back():
    def step(x):
        with tf.device("CPU:0"):
            y = tf.exp(x)
        return -y

    found = gpu_waits.step(tf.function(step), tf.TensorSpec([3]))
    assert len(found.to_host) == len(found.to_gpu) == 1


def test_xla_waits_for_conditions_only_and_says_what_it_cannot_compile():
    def step(x):
        reversed = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reverse(x, [0]), lambda: x)
        return reversed, tf.strings.as_string(x)

    x = tf.TensorSpec([3], tf.int64)
    found = gpu_waits.step(tf.function(step, jit_compile=True), x)
    assert sorted(found.without_gpu_kernel) == ["AsString(int64)", "Identity(string)"]
    assert len(found.to_host) == 1
    assert not found.to_gpu


def test_replicas_have_a_gpu_each():
    # The first one stands for the host.
    strategy = tf.distribute.MirroredStrategy(["CPU:1", "CPU:2"])
    with strategy.scope():
        v = tf.Variable(1.0)

    def step(x):
        context = tf.distribute.get_replica_context()
        context.all_reduce(tf.distribute.ReduceOp.SUM, v * x)

    @tf.function
    def on_both(x):
        strategy.run(step, (x,))

    found = gpu_waits.step(on_both, tf.TensorSpec([]), replicas=2)
    assert found.operations["CollectiveReduceV2(float32)"] == 2
    assert not found.to_host
    assert found.between_gpus == {"x"}

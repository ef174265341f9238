"""On a GPU, a good step runs on the GPU, and waits for it no more often than Keras's own."""

import pytest
import tensorflow as tf

from benchmarks import gpu_kernels, gpu_steps

COMPARED = {name: reference for name, (_, reference) in gpu_steps.STEPS.items() if reference}


def good_step(name):
    make, _ = gpu_steps.STEPS[name]
    return gpu_kernels.step(make(), gpu_steps.X)


@pytest.mark.parametrize("name", COMPARED)
def test_a_good_step_stays_on_the_gpu(name):
    ours, keras = good_step(name), good_step(COMPARED[name])
    assert not ours.without_gpu_kernel
    assert len(ours.to_host) <= len(keras.to_host)


def test_operations_without_a_gpu_kernel_are_named():
    found = gpu_kernels.step(
        tf.function(lambda x: tf.reduce_sum(tf.reverse(x, [0]) * 2)), tf.TensorSpec([3], tf.int64)
    )
    assert list(found.without_gpu_kernel) == ["ReverseV2(int32, int64)"]
    assert len(found.to_gpu) == 1  # What comes back is multiplied on the GPU.


def test_a_condition_on_a_tensor_is_a_wait():
    def step(x):
        is_positive = tf.reduce_sum(x) > 0
        return tf.cond(is_positive, lambda: tf.cond(is_positive, lambda: x, lambda: -x), lambda: x)

    found = gpu_kernels.step(tf.function(step), tf.TensorSpec([3]))
    assert len(found.to_host) == 1  # The second one finds the tensor on the host.


def test_a_skipped_step_takes_the_other_branch():
    def step(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: tf.exp(tf.exp(x)))

    good, skipped = (
        gpu_kernels.step(tf.function(step), tf.TensorSpec([3]), skipped=skipped)
        for skipped in (False, True)
    )
    assert skipped.operations == good.operations + 2

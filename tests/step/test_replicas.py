import numpy as np
import pytest
import tensorflow as tf

from keras_mp.step import replicas
from tests.common import mirrored, once

pytestmark = once


def replica_id():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def on_replicas(fn, count=2):
    """Runs fn(replica id) on logical devices; returns the replicas' results."""
    strategy = mirrored(count)

    @tf.function
    def run():
        return strategy.run(lambda: fn(tf.convert_to_tensor(replica_id())))

    return strategy.experimental_local_results(run())


@pytest.mark.parametrize("reduce_dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_all_reduce_sums_each_gradient_in_its_own_dtype(reduce_dtype):
    dtypes = [tf.float16, tf.bfloat16, tf.float32, tf.float64]

    def reduce(replica):
        grads = [tf.cast(replica + 1, dtype) for dtype in dtypes]
        return replicas.all_reduce([grads[0], None, *grads[1:]], reduce_dtype)

    for result in on_replicas(reduce):
        assert result[1] is None
        present = [g for g in result if g is not None]
        assert [g.dtype for g in present] == dtypes
        assert [float(g) for g in present] == [3, 3, 3, 3]


def test_a_reduction_rounds_and_overflows_as_its_dtype_does():
    def reduce(dtype):
        def fn(replica):
            big = tf.constant([65504.0, 1.0 + 2.0**-12, 1.0 + 2.0**-7])
            return replicas.all_reduce([big], dtype)[0]

        return on_replicas(fn)[0].numpy()

    exact = [2 * 65504, 2 * (1 + 2.0**-12), 2 * (1 + 2.0**-7)]
    np.testing.assert_array_equal(reduce(tf.float32), exact)
    np.testing.assert_array_equal(reduce(tf.float16), [float("inf"), 2, 2 * (1 + 2.0**-7)])
    np.testing.assert_array_equal(reduce(tf.bfloat16), [2 * 65536, 2, 2 * (1 + 2.0**-7)])


def test_all_reduce_keeps_sparse_gradients_sparse():
    def reduce(replica):
        grad = tf.IndexedSlices(
            tf.cast([[replica + 1]], tf.float32), tf.stack([replica]), tf.constant([4, 1])
        )
        (reduced,) = replicas.all_reduce([grad], tf.float16)
        assert isinstance(reduced, tf.IndexedSlices)
        assert reduced.values.dtype == tf.float32
        return tf.convert_to_tensor(reduced)

    for result in on_replicas(reduce):
        np.testing.assert_array_equal(result, [[1], [2], [0], [0]])


@pytest.mark.parametrize("bad", [None, 0, 1, 3])
def test_agree(bad):
    def fn(replica):
        return replicas.agree(tf.not_equal(replica, -1 if bad is None else bad))

    assert [bool(r) for r in on_replicas(fn, 4)] == [bad is None] * 4


def test_without_a_strategy_nobody_is_met():
    # A merge call would make TensorFlow convert the update of each variable.
    assert replicas.need_not_meet()

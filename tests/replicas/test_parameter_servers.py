"""ParameterServerStrategy: a worker and a parameter server, in a process of their own.

One worker, since several apply their gradients in an order that nobody knows.
"""

import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import assert_all_equal, value
from tests.models import FAMILIES, make_optimizer
from tests.replicas import workers

STEPS = 3


def sgd(name):
    return make_optimizer(name, 0.125, momentum=0.5)


MAKERS = {
    "Keras's own": sgd,
    "fixed scale": lambda name: keras_mp.LossScaleOptimizer(sgd(name), 64),
    "all-reduce": lambda name: keras_mp.AllReduceOptimizer(sgd(name)),
}


def train(strategy, schedule, name, kind, policy):
    """Trains a variable, or a model of a policy, with gradients of one's own or `minimize`."""
    keras_mp.set_global_policy(policy)
    with strategy.scope():
        v, optimizer = tf.Variable([1.0, 2.0]), MAKERS[kind](name)
        layer = tf.keras.layers.Dense(2, use_bias=False, kernel_initializer="ones")
        layer.build((None, 2))
        variables = [v, *layer.trainable_variables]
        wrapped = kind != "Keras's own"
        (optimizer if wrapped else keras_mp.OptimizerWrapper(optimizer)).build(variables)

    def loss():
        return tf.reduce_sum(tf.cast(layer(v[tf.newaxis]), tf.float32)) + tf.reduce_sum(v**2)

    way = steps.minimize if kind == "fixed scale" else steps.unscaled
    replica_step = way(optimizer, loss, variables)
    step = tf.function(lambda: strategy.run(replica_step))
    for _ in range(STEPS):
        schedule(step)
    return [*map(value, variables), int(value(optimizer.iterations))]


def refusals(strategy):
    """What errors say of arguments that cannot work there."""
    texts = []
    keras_mp.set_global_policy("mixed_float16")
    with strategy.scope():
        for make in (
            lambda: keras_mp.LossScaleOptimizer(sgd(FAMILIES[0])),
            lambda: keras_mp.LossScaleOptimizer(sgd(FAMILIES[0]), 64, skip_nonfinite=True),
            lambda: keras_mp.GradScaler(),
            lambda: tf.keras.Sequential([tf.keras.layers.Dense(1)]).compile("sgd", "mse"),
        ):
            try:
                make()
            except ValueError as error:
                texts.append(str(error))
    return texts


CASES = [(name, kind, None) for name in FAMILIES for kind in MAKERS]
CASES += [(FAMILIES[0], "all-reduce", "mixed_bfloat16")]
CASES += [(FAMILIES[0], "fixed scale", "mixed_float16")]


def cluster():
    """Runs all cases on a worker and a parameter server, and what is refused there."""
    ports = workers.free_ports(2)
    spec = tf.train.ClusterSpec(
        {job: [f"127.0.0.1:{port}"] for job, port in zip(("worker", "ps"), ports)}
    )
    # A worker with fewer threads waits for itself.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)
    servers = [tf.distribute.Server(spec, job, 0, "grpc", config) for job in ("worker", "ps")]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def schedule(step):
        coordinator.schedule(step)
        coordinator.join()

    results = {case: train(strategy, schedule, *case) for case in CASES}
    del servers
    return results, refusals(strategy)


@pytest.fixture(scope="module")
def on_the_cluster():
    return workers.in_own_process(cluster)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_worker_trains_as_without_a_strategy(on_the_cluster, case):
    found = on_the_cluster[0][case]
    here = tf.distribute.get_strategy()
    expected = train(here, lambda step: step(), *case)
    assert found[-1] == expected[-1] == STEPS
    assert_all_equal(found[:-1], expected[:-1])


def test_what_skips_steps_is_refused_with_the_reason(on_the_cluster):
    texts = on_the_cluster[1]
    assert len(texts) == 4
    for text in texts:
        assert "cannot decide together" in text
        assert "Use a fixed scale without `skip_nonfinite`" in text
        assert "Received: " in text

"""A program that uses the public names, for a type checker: tests/ci/test_reference.py runs it."""

import tensorflow as tf

import keras_mp

policy: keras_mp.Policy = keras_mp.Policy("mixed_float16", loss_scale="dynamic")
keras_mp.set_global_policy(policy)
with keras_mp.policy_scope("mixed_bfloat16"):
    pass

scale: keras_mp.LossScale = keras_mp.DynamicLossScale(2.0**10, increment_period=100)
value: tf.Tensor = scale()
optimizer = keras_mp.LossScaleOptimizer("adam", scale)
skipped: tf.Tensor = optimizer.steps_skipped
overflow: keras_mp.Overflow | None = optimizer.last_overflow
wrapper: keras_mp.OptimizerWrapper = keras_mp.AllReduceOptimizer("adam", "bfloat16")


class Scale(keras_mp.layers.Layer):
    """A layer of one's own."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Doubles its inputs."""
        return inputs * 2


layer = Scale(dtype="mixed_bfloat16")
loss: keras_mp.losses.Loss = keras_mp.losses.SparseCategoricalCrossentropy(from_logits=True)
name: str = keras_mp.hardware.best_policy()

scaler = keras_mp.GradScaler()
scaled: tf.Tensor = scaler.scale(tf.constant(1.0))
with keras_mp.autocast("bfloat16"):
    pass
variable = keras_mp.autocast_variable(tf.Variable(tf.constant(1.0)))
keras_mp.numerics.watch(every=10)

"""Programs in float32 that know nothing of mixed precision, for several tests."""

import tensorflow as tf

from tests.op_autocast.common import normal


class Programs:
    """Functions of `x`, by name, that share variables."""

    def __init__(self):
        shapes = {"w": [6, 8], "b": [8], "v": [8, 6], "c": [6], "filters": [3, 3, 2, 4]}
        for i, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, tf.Variable(normal(*shape, seed=i), name=name))
        self.variables = [self.w, self.b, self.v, self.c, self.filters]
        self.x = normal(4, 6, seed=9)
        self.image = normal(2, 6, 6, 2, seed=10)
        self.inner = tf.function(lambda x: tf.nn.relu(x @ self.w))

    def mlp(self, x):
        return tf.nn.bias_add(tf.nn.relu(x @ self.w + self.b) @ self.v, self.c)

    def convolutions(self, x):
        image = self.image * tf.reshape(x[:2, 0], [2, 1, 1, 1])
        y = tf.nn.conv2d(image, self.filters, 1, "SAME")
        y = tf.compat.v1.nn.fused_batch_norm(y, tf.ones([4]), tf.zeros([4]))[0]
        return tf.reduce_mean(tf.nn.avg_pool2d(tf.nn.relu(y), 2, 2, "SAME"), [1, 2])

    def loop(self, x):
        """A recurrent cell; `x @ w` comes from outside, and so does the read of `v`."""
        kernel = self.v.read_value()

        def cell(i, h):
            return i + 1, tf.tanh(x @ self.w + tf.nn.relu(h @ kernel) @ self.w + self.b)

        state = (0, tf.zeros([4, 8]))
        return tf.while_loop(lambda i, _: i < 3, cell, state, maximum_iterations=3)[1]

    def attention(self, x):
        query = key = value = x @ self.w
        mask = (1 - tf.linalg.band_part(tf.ones([4, 4]), -1, 0)) * -1e9
        logits = tf.einsum("ij,kj->ik", query, key) / 8**0.5 + mask
        return tf.nn.softmax(logits) @ value

    def condition(self, x):
        y = x @ self.w
        positive = tf.reduce_sum(y) > -100
        return tf.cond(positive, lambda: tf.nn.relu(y) @ self.v, lambda: y @ self.v * 2)

    def mapped(self, x):
        return tf.map_fn(lambda row: tf.squeeze(row[None] @ self.w, 0), x)

    def vectorized(self, x):
        row = lambda row: tf.squeeze(tf.nn.relu(row[None] @ self.w) @ self.v, 0)  # noqa: E731
        return tf.vectorized_map(row, x)

    def nested(self, x):
        return self.inner(x) @ self.v

    def custom_gradient(self, x):
        @tf.custom_gradient
        def product(x, w):
            return x @ w, lambda up: (up @ tf.transpose(w), tf.transpose(x) @ up)

        return product(x, tf.identity(self.w))

    def recomputed(self, x):
        return tf.recompute_grad(lambda x: tf.nn.relu(x @ self.w) @ self.v)(x)

    def embedding(self, x):
        return tf.gather(self.v, [1, 2, 3, 3]) @ self.w * x[0, 0]

    def arrays(self, x):
        array = tf.TensorArray(tf.float32, 4)
        for i in range(4):
            array = array.write(i, x[i : i + 1] @ self.w)
        return array.concat()

    def second_order(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.tanh(x @ self.w) @ self.v)
        return tape.gradient(y, x)

    def forward_mode(self, x):
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = tf.tanh(x @ self.w) @ self.v
        return accumulator.jvp(y)

    def jacobian(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x @ self.w) @ self.v
        return tape.jacobian(y, x)

"""A program of TensorFlow 1.15 but for its imports: no eager code, variables of that time.

The tests run it in a process of its own, since what its first lines turn off stays off.
"""

import json
import sys
import warnings

import numpy as np
import sklearn.datasets
import tensorflow.compat.v1 as tf

if __name__ == "__main__":  # pytest looks for doctests in here
    tf.disable_v2_behavior()

import keras_mp
from tests.compat import keras_in_tf1_program

mixed_precision = keras_mp.compat.v1
warnings.filterwarnings("ignore", ".* may run slower", keras_mp.MixedPrecisionWarning)

data = sklearn.datasets.load_digits()
images, labels = (data.images / 16).astype("float32")[..., None], data.target.astype("int32")


def in_float32(getter, name, shape=None, dtype=None, **kwargs):
    """Variables in float32, cast where they are used, as Nvidia's manual has it."""
    return tf.cast(getter(name, shape, dtype=tf.float32, **kwargs), dtype)


def network(x, dtype):
    """A convolution and a dense layer, in a dtype."""
    with tf.variable_scope(tf.get_variable_scope(), dtype=dtype, custom_getter=in_float32):
        kernel = tf.get_variable("kernel", [3, 3, 1, 8])
        weights, biases = tf.get_variable("weights", [128, 10]), tf.get_variable("biases", [10])
    h = tf.nn.conv2d(tf.cast(x, dtype), kernel, strides=[1, 2, 2, 1], padding="SAME")
    h = tf.reshape(tf.nn.relu(h), [-1, 4 * 4 * 8])
    return tf.cast(tf.matmul(h, weights) + biases, tf.float32)


def train(kind, folder):
    """Trains, and saves; returns what the tests look at."""
    tf.reset_default_graph()
    tf.set_random_seed(1)
    x = tf.placeholder(tf.float32, [None, 8, 8, 1])
    y = tf.placeholder(tf.int32, [None])
    logits = network(x, tf.float16 if kind == "contrib" else tf.float32)
    loss = tf.losses.sparse_softmax_cross_entropy(y, logits)
    factor = tf.placeholder_with_default(1.0, [])
    global_step = tf.train.get_or_create_global_step()

    opt = tf.train.AdamOptimizer(0.01)
    if kind == "contrib":
        manager = mixed_precision.ExponentialUpdateLossScaleManager(2**15, 40)
        opt = mixed_precision.LossScaleOptimizer(opt, manager)
    elif kind == "rewrite":
        opt = keras_mp.enable_mixed_precision_graph_rewrite(opt, dtype="bfloat16")
    grads, variables = zip(*opt.compute_gradients(loss * factor))
    grads, _ = tf.clip_by_global_norm(grads, 5.0)
    train_op = opt.apply_gradients(zip(grads, variables), global_step=global_step)

    result = {"ref variables": sum("_ref" in v.dtype.name for v in tf.trainable_variables())}
    if kind == "rewrite":
        report = keras_mp.graph_rewrite.report(train_op)
        result["bfloat16"] = report.by_dtype().get("bfloat16", {})
    config = keras_mp.graph_rewrite.session_config() if kind == "rewrite" else None
    saver = tf.train.Saver()
    with tf.Session(config=config) as sess:
        sess.run(tf.global_variables_initializer())
        for first in [*range(0, 1400, 70)] * 4:
            part = slice(first, first + 70)
            sess.run(train_op, {x: images[part], y: labels[part]})
        if kind == "contrib":
            before = sess.run(tf.trainable_variables())
            for _ in range(2):
                sess.run(train_op, {x: images[:70], y: labels[:70], factor: np.inf})
            after = sess.run(tf.trainable_variables())
            result["unchanged"] = all((a == b).all() for a, b in zip(before, after))
            scale = [opt.loss_scale(), opt.steps_skipped]
            result["scale"], result["skipped"] = map(float, sess.run(scale))
        found = sess.run(logits, {x: images[1400:]}).argmax(1)
        result["accuracy"] = float((found == labels[1400:]).mean())
        result["global_step"] = int(sess.run(global_step))
        saver.save(sess, f"{folder}/{kind}")
    if kind == "rewrite":
        keras_mp.disable_mixed_precision_graph_rewrite()
    return result


if __name__ == "__main__":
    folder, *kinds = sys.argv[1:]
    results = {kind: train(kind, folder) for kind in kinds}
    slices = tf.IndexedSlices(tf.ones([3, 1], tf.float16), tf.constant([3, 1, 3]))
    results["sparse"] = bool(tf.Session().run(keras_mp.step.finiteness.all_finite([slices])))
    print(json.dumps({**results, "fit": keras_in_tf1_program.results()}))

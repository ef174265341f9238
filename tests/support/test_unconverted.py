import tensorflow as tf

from keras_mp.support.unconverted import unconverted


def branches(x):
    if x > 0:  # Only AutoGraph makes this work in a graph.
        return x
    return -x


@unconverted
def has_control_flow(x):
    return branches(x)


@unconverted
def calls(fn, x):
    return tf.distribute.get_strategy().run(fn, args=(x,))


def test_a_function_is_not_converted():
    # Fails if AutoGraph marks its own functions in another way.
    function = tf.function(lambda x: has_control_flow(x))
    try:
        function(tf.constant(-1.0))
    except tf.errors.OperatorNotAllowedInGraphError:
        return
    raise AssertionError("AutoGraph converted what was not to be converted.")


def test_what_a_user_gave_tensorflow_to_call_is_converted_as_ever():
    function = tf.function(lambda x: calls(branches, x))
    assert float(function(tf.constant(-1.0))) == 1

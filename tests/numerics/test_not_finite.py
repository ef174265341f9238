"""The cause of what is not finite, told by numbers alone."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.numerics.tools import hazards, origins


def chain(compute, dtype=tf.float16):
    """The operations of a graph that compute floating-point numbers. It is not run."""
    with tf.Graph().as_default() as graph:
        compute(tf.raw_ops.Placeholder(dtype=dtype, shape=[2, 2]))
    return [each for each in graph.get_operations() if each.outputs[0].dtype.is_floating]


def judged(operations, nan=(), infinite=(), loss=1.0, gradients=0.0, zeros=(), wide=()):
    """Judges operations of which some, by their places, are not finite."""
    counts, exact = np.zeros([2, len(operations), 11])
    bad = counts[:, hazards.BAD]
    bad[list(infinite), 1], bad[list(nan), 2] = 4, 2
    counts[list(zeros), hazards.ZEROS] = 3
    for place, number in dict(wide).items():
        exact[place, hazards.BAD] = 0, 0, number
    numbers = {"counts": counts, "wide": exact, "sizes": np.array([1.0]), "weights": np.ones([1])}
    before = dict.fromkeys(operations, True)
    where = lambda operation: operation.name.partition("/")[0]  # noqa: E731
    said = functools.partial(hazards.first_not_finite, where, before, ["the model's input"])
    found = said(loss=loss, gradients=gradients, **numbers)
    return found and found._replace(where=found.where.type)


CHAIN = chain(lambda x: tf.reduce_mean(tf.math.log(tf.square(x))))


def test_nothing_is_said_of_finite_numbers_or_of_what_has_no_effect():
    assert judged(CHAIN) is None
    # Infinities that reach nothing, and NaN that no gradient has.
    assert judged(CHAIN, infinite=[1], loss=0.0) is None
    assert judged(CHAIN, nan=[1], loss=0.0) is None
    assert judged(CHAIN, nan=[1], loss=0.0, gradients=1.0) is not None


@pytest.mark.parametrize(
    ("where", "hazard", "at", "why"),
    [
        (
            {"infinite": [1, 2], "nan": [3]},
            *("an overflow in the forward pass", "Square"),
            "Square in float16 is the first operation with finite inputs whose results are not "
            "finite (the largest float16 is 65504): 2 results of Mean are NaN; so is the loss.",
        ),
        (
            {"infinite": [1, 2], "nan": [3], "wide": {1: 1, 2: 4}},
            *("an overflow in the forward pass", "Square"),
            "Square in float16 is the first operation with finite inputs whose results are not "
            "finite (the largest float16 is 65504): 2 results of Mean are NaN; so is the loss. 1 "
            "of its results are not finite in float32, either.",
        ),
        (
            {"infinite": [2, 3], "zeros": [1], "wide": {2: 4}},
            *("an underflow in the forward pass", "Square"),
            "3 results of Square are 0 in float16, whose smallest number is 6e-08, but not in "
            "float32. Log of them is the first result that is not finite: 4 results of Log are "
            "infinite; so is the loss.",
        ),
        (
            {"nan": [2, 3], "wide": {2: 1}, "loss": 0.0, "gradients": 1.0},
            *("a result that is not finite in any dtype", "Log"),
            "Log is the first operation with finite inputs whose results are not finite, in "
            "float32, too: 2 results of Log are NaN; so are gradients, though the loss is not.",
        ),
    ],
    ids=["overflow", "overflow_in_float32", "underflow", "any_dtype"],
)
def test_the_cause_of_what_is_not_finite(where, hazard, at, why):
    said = judged(CHAIN, **where)
    assert (said.hazard, said.where, said.why) == (hazard, at, why)
    assert said.cure


def test_a_product_that_was_lost_before_a_division_in_float32_is_to_blame():
    def divide(wide, between=tf.identity):
        x = tf.cast(wide, tf.float16)
        return tf.cast(wide / between(tf.cast(x @ x, tf.float32)), tf.float16)

    operations = chain(divide, tf.float32)
    division, last = len(operations) - 2, len(operations) - 1
    product = [each.type for each in operations].index("MatMul")
    said = judged(operations, infinite=[division, last], zeros=[product])
    assert (said.hazard, said.where) == ("an underflow in the forward pass", "MatMul")
    said = judged(operations, infinite=[division, last])
    assert (said.hazard, said.where) == ("a result that is not finite in any dtype", "RealDiv")
    # The zeros of what a mean was made of are not those of the mean.
    operations = chain(lambda x: divide(x, tf.reduce_mean), tf.float32)
    said = judged(operations, infinite=[division, last], zeros=[product])
    assert (said.hazard, said.where) == ("a result that is not finite in any dtype", "RealDiv")


@pytest.mark.parametrize("function", [tf.math.rsqrt, tf.math.log1p])
def test_a_zero_that_is_added_is_an_epsilon_if_something_divides_by_it(function):
    operations = chain(lambda x: function(tf.raw_ops.AddV2(x=x, y=tf.constant(0.0, x.dtype))))
    said = judged(operations, infinite=[3], zeros=[2], wide={3: 4})
    is_epsilon = said.hazard == "an epsilon that is 0 in 16 bits"
    assert is_epsilon == (function is tf.math.rsqrt)
    assert said.where == "AddV2"


def test_a_constant_is_said_where_it_is_used_first():
    def masked(x):
        with tf.name_scope("mask"):
            mask = x * tf.constant(-np.inf, tf.float16)
        with tf.name_scope("out"):
            tf.reduce_sum(mask)
        return mask

    said = judged(chain(masked), infinite=[1, 2], nan=[3])
    assert (said.hazard, said.where) == ("a constant that is infinite in 16 bits", "Mul")
    assert "is -inf in float16, and with it, in out, 2 results of Sum are NaN" in said.why
    # A mask of which a softmax makes zeros is not to blame for another NaN.
    other = chain(lambda x: tf.nn.softmax(masked(x)) * tf.math.log(x))
    assert [each.type for each in other[4:]] == ["Softmax", "Log", "Mul"]
    said = judged(other, infinite=[1, 2], nan=[5, 6])
    assert (said.hazard, said.where) == ("an overflow in the forward pass", "Log")


def test_a_programs_folder_may_have_the_name_of_one_of_kerass():
    own = {"tf": tf}
    exec(compile("square = lambda x: tf.square(x)", "/own/src/utils/model.py", "exec"), own)
    operations = chain(tf.keras.layers.Lambda(own["square"]), tf.float32)
    assert origins.is_users(next(each for each in operations if each.type == "Square"))

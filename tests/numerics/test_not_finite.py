"""The cause of what is not finite, told by numbers alone."""

import numpy as np
import pytest

from tests.numerics.tools import not_finite

Result = not_finite.Result


def judged(*results, nan=(), infinite=(), loss=1.0, gradients=0.0, zeros=(), wide=()):
    """Judges a chain of operations, in which some are not finite."""
    places = range(len(results))
    counts = [[0.0, 4.0 * (i in infinite), 2.0 * (i in nan)] for i in places]
    numbers = {
        "loss": loss,
        "gradients": gradients,
        "counts": np.array(counts),
        "exact": np.array([[3 * (i in zeros), dict(wide).get(i, 0)] for i in places]),
        "sizes": np.array([0.0, 1.0]),
        "largest_weight": 1.0,
    }
    return not_finite.NotFinite(results, ["the model's input"]).said(**numbers)


def narrow(kind, *inputs, **how):
    return Result(kind, kind, "float16", True, inputs=inputs, **how)


CHAIN = narrow("Placeholder"), narrow("Square", 0), narrow("Log", 1), narrow("Mean", 2)


def test_nothing_is_said_of_finite_numbers_or_of_what_has_no_effect():
    assert judged(*CHAIN) is None
    # Infinities that reach nothing, and NaN that no gradient has.
    assert judged(*CHAIN, infinite=[1], loss=0.0) is None
    assert judged(*CHAIN, nan=[1], loss=0.0) is None
    assert judged(*CHAIN, nan=[1], loss=0.0, gradients=1.0) is not None


@pytest.mark.parametrize(
    ("where", "hazard", "at", "why"),
    [
        (
            {"infinite": [1, 2], "nan": [3]},
            *("an overflow in the forward pass", "Square"),
            "Square in float16 is the first operation with finite inputs whose results are not "
            "finite (the largest float16 is 65,504): 2 results of Mean are NaN; so is the loss.",
        ),
        (
            {"infinite": [1, 2], "nan": [3], "wide": {1: 1, 2: 4}},
            *("an overflow in the forward pass", "Square"),
            "Square in float16 is the first operation with finite inputs whose results are not "
            "finite (the largest float16 is 65,504): 2 results of Mean are NaN; so is the loss. 1 "
            "of its results are not finite in float32, either.",
        ),
        (
            {"infinite": [2, 3], "zeros": [1], "wide": {2: 4}},
            *("an underflow in the forward pass", "Square"),
            "3 results of Square are 0 in float16, whose smallest number is 6e-08, but not in "
            "float32. Log of them is the first result that is not finite: 4 of Log are infinite; "
            "so is the loss.",
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
    said = judged(*CHAIN, **where)
    assert (said.hazard, said.at, said.why) == (hazard, at, why)
    assert said.cure


def test_a_product_that_was_lost_before_a_division_in_float32_is_to_blame():
    division = Result("RealDiv", "RealDiv", "float32", inputs=[0, 2])
    chain = (CHAIN[0], narrow("MatMul", 0), Result("Cast", "Cast", "float32", True, inputs=[1]))
    chain = *chain, division, narrow("Cast", 3)
    said = judged(*chain, infinite=[3, 4], zeros=[1])
    assert (said.hazard, said.at) == ("an underflow in the forward pass", "MatMul")
    said = judged(*chain, infinite=[3, 4])
    assert (said.hazard, said.at) == ("a result that is not finite in any dtype", "RealDiv")
    # The zeros of what a mean was made of are not those of the mean.
    mean = Result("Mean", "Mean", "float32", inputs=[1])
    said = judged(*chain[:2], mean, *chain[3:], infinite=[3, 4], zeros=[1])
    assert (said.hazard, said.at) == ("a result that is not finite in any dtype", "RealDiv")


def test_a_constant_is_said_where_it_is_used_first():
    mask = narrow("Const", constant=np.float16(-np.inf))
    chain = (
        mask,
        narrow("Placeholder"),
        narrow("Mul", 1, 0, where="mask"),
        narrow("Sum", 2, where="out"),
    )
    said = judged(*chain, infinite=[0, 2], nan=[3])
    assert (said.hazard, said.at) == ("a constant that is infinite in 16 bits", "Mul")
    assert "is -inf in float16, and with it 2 results of Sum in out are NaN" in said.why
    # A mask of which a softmax makes zeros is not to blame for another NaN.
    other = narrow("Softmax", 2), narrow("Log"), narrow("Sum", 4)
    said = judged(*chain[:3], *other, infinite=[0, 2], nan=[4, 5])
    assert (said.hazard, said.at) == ("an overflow in the forward pass", "Log")

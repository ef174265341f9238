"""Judges of hazards get numbers by name: each says something on one side of its border only."""

import numpy as np
import pytest

from tests.numerics.tools import auditing, hazards, not_finite

Result = not_finite.Result
EPSILON = {"op": "AddV2", "divides": "Rsqrt", "dtype": "float16", "size": 8, "least": 1e-9}
SUM = {"op": "Sum", "dtype": "bfloat16", "length": 4096, "is_loss": False}
# By judge: numbers that are no finding, and those that are one; the hazard, and what is said of it.
JUDGED = {
    hazards.judge_epsilon: (
        {**EPSILON, "zeros": 0},
        {**EPSILON, "zeros": 3},
        *("an epsilon that is 0 in 16 bits", "Of 8 values of this batch 3 are 0"),
    ),
    hazards.judge_batch: (
        {"bad": 0},
        {"bad": 3},
        *("a batch that is not finite", "3 of its numbers are NaN or infinite"),
    ),
    hazards.judge_sum: (
        {**SUM, "error": 0.01},
        {**SUM, "error": 0.02},
        *("a long sum in 16 bits", "adds up 4,096 numbers in bfloat16, and is up to 2.0%"),
    ),
    hazards.judge_labels: (
        {"dtype": "float16", "lost": 0.009, "infinite": 0, "largest": 5.0},
        {"dtype": "float16", "lost": 0.009, "infinite": 3, "largest": 1e5},
        *("outputs in 16 bits", "up to 100000, 3 are infinite"),
    ),
    hazards.judge_input: (
        {"dtype": "bfloat16", "is_of_ids": True, "lost": 0.5, "infinite": 0, "others": 0}
        | {"largest": 300.0},
        {"dtype": "bfloat16", "is_of_ids": True, "lost": 0.0, "infinite": 0, "others": 7}
        | {"largest": 300.0},
        *("inputs that are rounded", "go up to 300, 7 become other integers"),
    ),
    hazards.judge_before_a_logarithm: (
        {"kind": "sigmoid", "dtype": "float16", "worst": 0.04},
        {"kind": "sigmoid", "dtype": "float16", "worst": 0.06},
        *("a sigmoid in 16 bits", "it is 0.06 away from that of float32"),
    ),
    hazards.judge_cross_entropy: (
        {"dtype": "bfloat16", "loss": 1.01, "exact": 1.0},
        {"dtype": "bfloat16", "loss": 1.02, "exact": 1.0},
        *("a loss in 16 bits", "its mean is 1.02; in float32 it is 1"),
    ),
    hazards.judge_layer_in_float32: (
        {"hazard": "a layer that ignores its policy", "share": 0.009, "policy": "mixed_float16"},
        {"hazard": "a layer that ignores its policy", "share": 0.02, "policy": "mixed_float16"},
        *("a layer that ignores its policy", "2% of the multiplications"),
    ),
    hazards.judge_small_gradients: (
        {"small": 9, "others": 100},
        {"small": 10, "others": 100},
        *("float16 without loss scaling", "10% of the numbers in gradients"),
    ),
    hazards.judge_factor: (
        {"factor": 100.0, "loss": 1.0, "scale": 8.0},
        {"factor": 64.0, "loss": 1.0, "scale": 8.0},
        *("a loss multiplied by a number", "is multiplied by 64, and then by the loss scale, 8"),
    ),
    hazards.judge_optimizers_epsilon: (
        {"epsilon": 0.0, "dtypes": ["float32"], "variables": 1, "size": 8, "bad": 0},
        {"epsilon": 0.0, "dtypes": ["float32"], "variables": 1, "size": 8, "bad": 2},
        *("an epsilon that is 0", "2 of their 8 numbers are not finite"),
    ),
    hazards.judge_weights: (
        {"bad": 4, "scale": 8.0, "loss_is_finite": True, "bad_in_gradients": 0.0},
        {"bad": 4, "scale": 8.0, "loss_is_finite": True, "bad_in_gradients": 1.0},
        *("a step that cannot be skipped", "makes 4 numbers of the weights infinite"),
    ),
}

# Of judges that speak whatever the numbers are, since what they are about is wrong anyway.
SAID = {
    hazards.judge_clipping: (
        {"largest": 64.0, "scale": 32.0},
        *("clipping before unscaling", "is 64 there, and 2 without it"),
    ),
}


ALL = {**JUDGED, **{judge: (None, *said) for judge, said in SAID.items()}}


@pytest.mark.parametrize("judge", ALL, ids=lambda judge: f"{judge.__module__}.{judge.__name__}")
def test_a_judge_needs_numbers_alone(judge):
    sound, broken, hazard, why = ALL[judge]
    assert sound is None or judge(**sound) is None
    said = judge(**broken)
    assert said.hazard == hazard
    assert why in said.why
    assert said.cure


def test_each_judge_is_tested():
    assert {each.judge for each in auditing.HAZARDS} == {*ALL, not_finite.judge}


def judged(*results, nan=(), infinite=(), loss=1.0, gradients=0.0, zeros=(), wide=(), **how):
    """Judges a chain of operations, in which some are not finite."""
    places = range(len(results))
    counts = [[0.0, 4.0 * (i in infinite), 2.0 * (i in nan)] for i in places]
    numbers = {
        "results": results,
        "is_before": np.ones(len(results), bool),
        "inputs": ["the model's input"],
        "loss": loss,
        "gradients": gradients,
        "counts": np.array(counts),
        "exact": np.array([[3 * (i in zeros), dict(wide).get(i, 0)] for i in places]),
        "sizes": np.array([0.0, 1.0]),
        "largest_weight": 1.0,
    }
    return not_finite.judge(**{**numbers, **how})


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
    chain = (
        CHAIN[0],
        narrow("MatMul", 0),
        Result("Cast", "Cast", "float32", True, inputs=[1]),
    )
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
